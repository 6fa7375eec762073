"""What a socket has, to where it belongs: plain payloads to the inlets of their streams.

A step of Python for each read, chunk and message is what receiving would cost most. Here are those
for the common case: a payload for a stream that is known, whose owner has opened an inlet. All
else is left to the core and its events.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from cpython.memoryview cimport PyMemoryView_GET_BUFFER
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memset

from aqueduct._speedups.bpmux.chunks cimport (
    CREDIT_FLAG,
    DONE,
    HEAD,
    NOTHING,
    PAYLOAD_FLAG,
    PIECE,
    REST,
    ChunkDecoder,
)
from aqueduct._speedups.base.buffers cimport AlignedBuffer
from aqueduct._speedups.bpmux.entities cimport Entity
from aqueduct._speedups.bpmux.entity_receiver cimport EntityReceiver
from aqueduct._speedups.io.tls_records cimport Records
from aqueduct._speedups.io.shared_ring cimport Rings, take_descriptor
from aqueduct._speedups.channels.receiver cimport ALONE, DirectRead

from aqueduct.errors import RemoteProtocolError

__all__ = ["SocketReader", "Outcome"]

cdef extern from "<sys/socket.h>" nogil:
    cdef struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
        void *msg_control
        size_t msg_controllen
    ssize_t recvmsg(int socket, msghdr *message, int flags)
    int setsockopt(int socket, int level, int name, const void *value, unsigned int size)
    int SOL_SOCKET
    int SO_RCVLOWAT

cdef extern from *:
    """
    #ifndef MSG_CMSG_CLOEXEC
    #define MSG_CMSG_CLOEXEC 0
    #endif
    """
    int MSG_CMSG_CLOEXEC

cdef enum:
    # Read beyond a large payload, and where the next large one is likely to begin.
    AHEAD = 4096
    # Read where a large payload goes on behind the head of its next chunk.
    PEEK = 64
    # Of a payload on its way, memory for so many bytes is got ready at once.
    EXPECTED = 262144
    # Payloads of chunks from which a stream is asked for its inlet.
    ASK_FROM = 1024

    # Of a chunk that is under way, so many bytes are worth waking up for.
    PATIENCE = 131072

    # Wake-up bytes that are read at once, and room for what comes with them.
    WAKE_BYTES = 64
    CONTROL = 256


class Outcome:
    """Why ``SocketReader.read`` returned."""

    DRAINED, END, CORE, TURN, WHOLE, LEFT = range(6)


@cython.final
@cython.auto_pickle(False)
cdef class SocketReader:
    """Reads one connection for the core whose ``receiver`` it is given.

    ``open(entity)`` gives the inlet of a stream, or None, and sets ``entity`` and ``inlet`` by
    ``use``; ``close()`` ends what is open and calls ``use(None, None)``. ``ahead`` is memory that
    is read to and copied from at once. ``records`` decrypt what the socket ``fd`` has; None: it is
    read as it is.
    """

    def __cinit__(
        self, EntityReceiver receiver not None, int fd, Records records, ahead not None, open, close
    ):
        if type(ahead) is not memoryview or ahead.readonly or ahead.nbytes < PEEK:
            raise ValueError(f"ahead: a writable memoryview of {PEEK} bytes or more is needed")
        self._receiver = receiver
        self._chunks = receiver.decoder
        self._fd = fd
        self._records = records
        self._ahead = ahead
        self._memory = <uint8_t *> PyMemoryView_GET_BUFFER(ahead).buf
        self._size = PyMemoryView_GET_BUFFER(ahead).len
        self._little = min(self._size, AHEAD)
        self._open = open
        self._close = close
        self._threshold = 1

    def count(self, Py_ssize_t size):
        """So many bytes of the stream were read from the socket by somebody else."""
        self._heard += <uint64_t> size

    def share(self, Rings rings):
        """The peer may go on in this memory; None: it is let go, and nothing more comes.

        From now on any byte makes the socket readable.
        """
        self._rings = rings
        self._wake_from(1)

    def expect_memory(self, accept):
        """The peer may pass memory: ``accept(fd)`` owns its descriptor then."""
        self._accept = accept

    @property
    def shares(self):
        """Bytes come by memory: they make no socket readable again."""
        return self._shares

    cpdef object use(self, Entity entity, DirectRead inlet):
        """This inlet is open; None: none is."""
        if (entity is None) != (inlet is None):
            raise ValueError("use: an entity and its inlet, or neither")
        self.entity = entity
        self.inlet = inlet
        if entity is not None:
            self._latest = entity.identifier

    def read(self, Py_ssize_t budget):
        """Reads until nothing is there, about ``budget`` bytes were read, or the core is needed.

        Returns (an ``Outcome``, bytes read). CORE: what was read is fed to the core's decoder, and
        it goes on with ``step``. LEFT: the allowance of ``receiver`` is used up, and chunks are
        left of what was read. WHOLE: a large message is, and a large one behind it has no memory
        yet: whoever takes the first lets go of what the other lands in, and so the caches have it
        still. Raises OSError of the socket (BlockingIOError is an outcome).
        """
        cdef Py_ssize_t before = budget
        cdef int outcome = TURN
        cdef Entity last = self._receiver.entity
        self.drained = self._looked = False
        if self._shares:
            self._read_wake_bytes()
        if (
            self.inlet is None and not self._receiver.unread
            and last.identifier and not last.gone and not last.end_in
            and self._chunks.flags == PAYLOAD_FLAG
            and (self._chunks.payload >= ASK_FROM or last.identifier == self._latest)
        ):
            self._open(last)  # where there was much, more will come
        while budget > 0:
            outcome = self._run_on() if self._receiver.unread else self._read_once()
            budget -= self._last
            if outcome != TURN:
                break
            if self.drained:
                outcome = DRAINED
                break
        # Nothing can be behind the rest of a chunk, so less of it wakes no task. Not so with
        # TLS, which may say at any time that the peer has closed. A message of a link has whole
        # chunks, and its packets come between messages.
        if (self._records is None or self._records.plain) and self._rings is None:
            if outcome == DRAINED and self._receiver.plain and self._chunks.missing > 1:
                self._wake_from(<int> min(self._chunks.missing, <uint64_t> PATIENCE))
            else:
                self._wake_from(1)
        return outcome, before - budget

    def allow(self, int chunks):
        """So many chunks are taken before others have their turn."""
        self._receiver.allowance = chunks

    def relax(self):
        """Any byte makes the socket readable again; returns whether that was different."""
        if self._threshold == 1:
            return False
        self._wake_from(1)
        return True

    cdef int _wake_from(self, int threshold) except -1:
        if threshold != self._threshold:
            self._threshold = threshold
            # Without effect where the system has no such thing, and that is as good.
            setsockopt(self._fd, SOL_SOCKET, SO_RCVLOWAT, &threshold, sizeof(threshold))
        return 0

    cdef int _read_once(self) except -1:
        """One read and what it leads to; TURN to go on."""
        cdef ChunkDecoder chunks = self._chunks
        cdef EntityReceiver receiver = self._receiver
        cdef DirectRead inlet = self.inlet
        cdef Py_ssize_t wanted = 0
        cdef Py_ssize_t size, landed
        cdef bint large, goes_on, alone
        self._last = 0
        if inlet is not None:
            inlet.take_up()
            wanted = inlet.wanted()
        if wanted and chunks.missing and receiver.plain and receiver.entity is self.entity:
            large = inlet.buffer.whole >= ALONE
            goes_on = <uint64_t> wanted > chunks.missing  # in the next chunk
            alone = large and not goes_on
            if goes_on:
                wanted = <Py_ssize_t> chunks.missing
            size = self._little
            if large and goes_on:
                size = PEEK  # or less of the next chunk would be left for its place
            size = self._land(wanted, size)
            if size <= 0:
                return END if size == 0 else DRAINED
            self._last = size
            landed = min(size, wanted)
            chunks.missing -= <uint64_t> landed
            if chunks.missing == 0:
                chunks.step()  # DONE, or the end of the bytes would look as if it cut the chunk
                receiver.plain = False
            inlet.fill(landed)
            if inlet.stopped:
                self._close()
            alone = alone and landed == wanted
            if size <= wanted:
                return WHOLE if alone else TURN
            size -= wanted
        else:
            size = self._size
            if wanted:
                size = PEEK
            elif inlet is not None and inlet.large and not self._looked:
                size = self._little
            self._looked = not wanted and size < self._size
            size = self._fetch(size)
            if size <= 0:
                return END if size == 0 else DRAINED
            self._last = size
            alone = False
        return self._feed(PyBytes_FromStringAndSize(<char *> self._memory, size), alone)

    cdef int _run_on(self) except -1:
        """Takes what is left of the last read."""
        self._last = 0
        return self._feed(None, False)

    cdef int _feed(self, object data, bint alone) except -1:
        """What comes of these bytes, or of those that were left."""
        try:
            self.step = self._run(data)
        except RemoteProtocolError:
            # The decoder raises it again when the core goes on, which knows what to do about it.
            self.step = NOTHING
            return CORE
        if self.step != NOTHING or self._receiver.reported:
            return CORE
        if self._receiver.unread:
            return LEFT
        return WHOLE if alone else TURN

    cdef Py_ssize_t _land(self, Py_ssize_t wanted, Py_ssize_t ahead) except -2:
        """Reads to the inlet's place, and ``ahead`` bytes more; -1: nothing is there."""
        cdef object payload = self.inlet.buffer.payload
        cdef Py_ssize_t count
        if type(payload) is AlignedBuffer:
            (<AlignedBuffer> payload).expect(self.inlet.place(), min(wanted, EXPECTED))
        if self._records is None:
            return self._kernel(self.inlet.place(), wanted, ahead)
        count = self._records.land(
            <char *> self.inlet.place(), wanted, <char *> self._memory, ahead
        )
        if count >= 0:
            self.drained = count < wanted and not self._records.closed
        return count

    cdef Py_ssize_t _fetch(self, Py_ssize_t size) except -2:
        """Reads to the memory ahead; -1: nothing is there."""
        if self._records is None:
            return self._kernel(self._memory, size, 0)
        return self._decrypt(self._memory, size)

    cdef Py_ssize_t _decrypt(self, uint8_t *target, Py_ssize_t size) except -2:
        cdef Py_ssize_t count = self._records.decrypt(<char *> target, size)
        if count >= 0:
            self.drained = count < size and not self._records.closed
        return count

    cdef Py_ssize_t _kernel(self, uint8_t *target, Py_ssize_t size, Py_ssize_t ahead) except -2:
        cdef iovec[2] parts
        cdef Py_ssize_t count, wake_bytes
        if self._shares:
            return self._shared(target, size, ahead)
        parts[0].iov_base = target
        parts[0].iov_len = <size_t> size
        parts[1].iov_base = self._memory
        parts[1].iov_len = <size_t> ahead
        count = self._receive(parts, 2 if ahead else 1)
        if count < 0:
            return -1
        self.drained = count < size + ahead
        self._heard += <uint64_t> count
        if self._rings is None or not self._rings.reached(self._heard):
            return count
        wake_bytes = self._rings.surplus(self._heard)
        if wake_bytes > count:
            raise RemoteProtocolError("the peer's shared memory begins before what it has sent")
        self._shares = True
        self._ended = count == 0
        self.drained = False
        return count - wake_bytes or self._shared(target, size, ahead)

    cdef Py_ssize_t _receive(self, iovec *parts, size_t count) except -2:
        """Reads from the socket; -1: nothing is there."""
        cdef msghdr message
        cdef char[CONTROL] control
        cdef ssize_t size
        cdef int passed
        memset(&message, 0, sizeof(message))
        message.msg_iov = parts
        message.msg_iovlen = count
        while True:
            if self._accept is not None:
                message.msg_control = control
                message.msg_controllen = CONTROL
            with nogil:
                size = recvmsg(self._fd, &message, MSG_CMSG_CLOEXEC)
            if size >= 0:
                break
            if errno == EAGAIN:
                return -1
            if errno != EINTR:
                PyErr_SetFromErrno(OSError)
            PyErr_CheckSignals()
        if self._accept is not None and message.msg_controllen:
            passed = take_descriptor(control, message.msg_controllen)
            if passed >= 0:
                accept, self._accept = self._accept, None
                accept(passed)
        return size

    cdef Py_ssize_t _shared(self, uint8_t *target, Py_ssize_t size, Py_ssize_t ahead) except -2:
        """Reads from memory; -1: nothing is there, and a wake-up byte comes when there is."""
        cdef Rings rings = self._rings
        cdef Py_ssize_t count
        if rings is None:
            return -1
        while True:
            count = rings.take(target, size, self._fd)
            if count == size and ahead:
                count += rings.take(self._memory, ahead, self._fd)
            self.drained = count < size + ahead and rings.sleeps()
            if count:
                return count
            if self.drained:
                if self._failure is not None:
                    raise self._failure
                return 0 if self._ended else -1

    cdef int _read_wake_bytes(self) except -1:
        """Reads the socket beside the memory: the peer has written, or its side has ended."""
        cdef iovec part
        cdef char[WAKE_BYTES] wake_bytes
        cdef Py_ssize_t count
        if self._rings is not None:
            self._rings.awake()
        part.iov_base = wake_bytes
        part.iov_len = WAKE_BYTES
        try:
            count = self._receive(&part, 1)
        except OSError as error:
            self._failure = error  # once the memory is empty
        else:
            self._ended = self._ended or count == 0
        return 0

    cdef int _run(self, object data) except -1:
        """Feeds the chunk decoder; the step that the core is to take, NOTHING if there is none.

        Without data it goes on with a chunk that was left.
        """
        cdef ChunkDecoder chunks = self._chunks
        cdef EntityReceiver receiver = self._receiver
        cdef int step
        if data is not None:
            chunks.push(data)
        while True:
            step = HEAD if receiver.unread else chunks.step()
            receiver.unread = step == HEAD and receiver.allowance == 0
            if receiver.unread:
                return NOTHING
            if step == PIECE:
                if not receiver.plain:
                    return step
                if self.entity is receiver.entity:
                    self.inlet.push(chunks.data)
                    if self.inlet.stopped:
                        self._close()
                else:
                    return step
            elif step == DONE and receiver.plain:
                receiver.plain = False
            elif step == HEAD and receiver.credit_head():
                receiver.allowance -= receiver.allowance > 0
            elif step == REST and receiver.credit():
                pass
            elif step == DONE and chunks.flags == CREDIT_FLAG:
                pass
            elif step == HEAD and receiver.plain_head():
                receiver.allowance -= receiver.allowance > 0
                if (
                    self.entity is not receiver.entity and receiver.entity.identifier
                    and chunks.payload >= ASK_FROM
                ):
                    self._open(receiver.entity)
            else:
                return step
