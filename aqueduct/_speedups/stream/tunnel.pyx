"""The bytes of a multiplexer as messages of one channel of Relink.

It stands between a socket and its reader, as the records of TLS do, and over these where there are
some. Large payloads land where they belong: what stands around messages is read to memory of its
own in the same call. What each message means for the link is the core's affair.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from cpython.memoryview cimport PyMemoryView_GET_BUFFER
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy, memset

from aqueduct._speedups.base.buffers cimport memory_of
from aqueduct._speedups.io.gather cimport IovecWriter, iovec
from aqueduct._speedups.io.tls_records cimport Records
from aqueduct._speedups.relink.packets cimport (
    DONE,
    MESSAGE_FORMAT,
    NOTHING,
    PACKET,
    PacketDecoder,
)

from aqueduct.errors import SequenceError

__all__ = ["Tunnel"]

cdef extern from "<sys/socket.h>" nogil:
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    ssize_t recvmsg(int socket, msghdr *message, int flags)

cdef uint64_t ALL = 0xFFFFFFFFFFFFFFFF

cdef enum:
    # Packets that are taken before it is others' turn.
    PACKETS = 256
    # Read beyond a message: its padding, the head of the next one, acknowledgements.
    AHEAD = 4096
    # Bytes of a message from which they are read to their place.
    LANDING_FROM = 4096
    # The head of a message of one large part, for a channel whose id has no bytes.
    HEAD = 16


@cython.final
@cython.auto_pickle(False)
cdef class Tunnel(Records):
    """The messages of one connection, on the socket ``fd`` or in the records ``under``.

    ``decoder`` is the link's. ``owner`` has seven methods. ``take_packet(decoder)`` is called for
    what is no message. ``begin_message(decoder)`` returns how many bytes of it an earlier
    connection has handed over, and ``end_message(decoder)`` follows. ``keep(parts, size)`` is
    given what leaves, until it is acknowledged. ``may_send()`` says whether more may.
    ``waits()`` says whether ``take()`` has buffers of packets to be sent. ``memory`` is read to and
    copied from at once. ``hurried``: there is more, and it is others' turn first.
    """

    def __cinit__(self, object owner not None, PacketDecoder decoder not None, int fd,
                  Records under, memory not None):
        if type(memory) is not memoryview or memory.readonly or memory.nbytes < AHEAD:
            raise ValueError(f"memory: a writable memoryview of {AHEAD} bytes or more is needed")
        self._owner = owner
        self._decoder = decoder
        self._fd = fd
        self._under = under
        self.plain = under is None
        self._memory = memory

    def feed(self, bytes data not None):
        """Bytes that came with the handshake."""
        self._decoder.push(data)

    def drop(self):
        """The connection is gone: what it has read is not kept."""
        self._piece = None
        self._owner = None

    @property
    def handed(self):
        """Bytes of the message that is coming that were handed over, on any connection."""
        cdef Py_ssize_t waiting = 0 if self._piece is None else len(self._piece) - self._taken
        return max(self._arrived - <uint64_t> waiting, self._skip)

    @property
    def has_input(self):
        """Whether bytes wait that make no socket readable."""
        return self._piece is not None

    cdef Py_ssize_t decrypt(self, char *target, Py_ssize_t size) except -2:
        """The next bytes of messages; -1: there are none now, 0: the end."""
        cdef Py_ssize_t got = 0, count
        if self._failure is not None:
            raise self._failure
        self.hurried = False
        self._packets = 0
        try:
            while got < size:
                count = self._go_on(<uint8_t *> target + got, size - got)
                got += count
                if got == size or self._short or self._ended or self.hurried:
                    break
                count = self._read(<uint8_t *> target + got, size - got)
                if count < 0:
                    break
                got += count
        except Exception as error:
            if not got:
                raise
            self._failure = error  # what came before it is not lost
        self._short = False
        self.closed = self._ended or self._failure is not None
        if got or self.closed:
            return got
        return -1

    cdef Py_ssize_t land(
        self, char *target, Py_ssize_t size, char *ahead, Py_ssize_t more
    ) except -2:
        """As ``decrypt``, and ``more`` bytes to ``ahead`` if they are of the same message."""
        cdef Py_ssize_t count
        if (
            self._under is not None or self._failure is not None or self._piece is not None
            or self._arrived < self._skip or self._decoder.expects() < <uint64_t> (size + more)
        ):
            return self.decrypt(target, size)
        count = self._kernel(<uint8_t *> target, size, ahead, more)
        if count > 0:
            self._decoder.landed(<uint64_t> count)
            self._arrived += <uint64_t> count
        elif count == 0:
            self._ended = self.closed = True
        return count

    cdef Py_ssize_t _go_on(self, uint8_t *target, Py_ssize_t size) except -1:
        """Takes what the decoder has; returns how many bytes of messages."""
        cdef PacketDecoder decoder = self._decoder
        cdef Py_ssize_t got = 0
        cdef int step
        while got < size:
            if self._piece is not None:
                got += self._take_piece(target + got, size - got)
                continue
            if self._packets >= PACKETS:
                self.hurried = True  # each costs a step of Python
                break
            step = decoder.step()
            if step == NOTHING:
                break
            if step == PACKET:
                self._packets += 1
                if decoder.format != MESSAGE_FORMAT:
                    self._owner.take_packet(decoder)
                    continue
                if len(decoder.sizes) != 1:
                    raise SequenceError(
                        f"a message of {len(decoder.sizes)} parts, where each has one"
                    )
                self._arrived = 0
                if decoder.channels:
                    self._skip = self._owner.begin_message(decoder)
                else:
                    self._skip = ALL  # it is to nobody, which is allowed (RL-R6)
            elif step == DONE:
                if decoder.channels:
                    self._owner.end_message(decoder)
                self._skip = self._arrived = 0
            else:
                self._piece = decoder.data
                self._taken = 0
                self._arrived += <uint64_t> len(self._piece)
                if self._arrived <= self._skip:
                    self._piece = None
                elif self._arrived - <uint64_t> len(self._piece) < self._skip:
                    self._taken = <Py_ssize_t> (
                        <uint64_t> len(self._piece) - (self._arrived - self._skip)
                    )
        return got

    cdef Py_ssize_t _take_piece(self, uint8_t *target, Py_ssize_t size) except -1:
        cdef Py_ssize_t length = 0
        cdef const uint8_t *start = memory_of(self._piece, &length)
        size = min(size, length - self._taken)
        memcpy(target, start + self._taken, <size_t> size)
        self._taken += size
        if self._taken == length:
            self._piece = None
        return size

    cdef Py_ssize_t _read(self, uint8_t *target, Py_ssize_t size) except -2:
        """Reads once: to ``target`` what belongs there, and returns how much; -1: nothing came."""
        cdef PacketDecoder decoder = self._decoder
        cdef uint64_t expected = decoder.expects()
        cdef Py_ssize_t count, wanted = 0, ahead = self._memory.nbytes
        if expected >= LANDING_FROM and self._arrived >= self._skip:
            wanted = <Py_ssize_t> min(expected, <uint64_t> size)
            # If the message goes on behind ``target``, it goes on to a place of its own.
            ahead = AHEAD if <uint64_t> wanted == expected else 0
        count = self._receive(target, wanted, ahead)
        if count <= 0:
            self._ended = count == 0
            return -1
        if wanted:
            expected = <uint64_t> min(count, wanted)
            decoder.landed(expected)
            self._arrived += expected
            if count <= wanted:
                return count
            count -= wanted
        decoder.push(PyBytes_FromStringAndSize(self._place(), count))
        return wanted

    cdef Py_ssize_t _receive(self, uint8_t *target, Py_ssize_t size, Py_ssize_t ahead) except -2:
        """Reads to ``target``, and to the memory behind it; -1: nothing is there."""
        cdef Py_ssize_t count
        cdef char *memory = self._place()
        if self._under is not None:
            if size:
                ahead = 0
                count = self._under.decrypt(<char *> target, size)
            else:
                count = self._under.decrypt(memory, ahead)
            self._short = 0 < count < size + ahead and not self._under.closed
            return count
        count = self._kernel(target, size, memory, ahead)
        self._short = 0 < count < size + ahead
        return count

    cdef Py_ssize_t _kernel(
        self, uint8_t *target, Py_ssize_t size, char *ahead, Py_ssize_t more
    ) except -2:
        """Reads from the socket; -1: nothing is there."""
        cdef iovec[2] parts
        cdef msghdr message
        cdef Py_ssize_t count
        parts[0].iov_base = target
        parts[0].iov_len = <size_t> size
        parts[1].iov_base = ahead
        parts[1].iov_len = <size_t> more
        memset(&message, 0, sizeof(message))
        message.msg_iov = &parts[0] if size else &parts[1]
        message.msg_iovlen = 2 if size and more else 1
        while True:
            with nogil:
                count = recvmsg(self._fd, &message, 0)
            if count >= 0:
                break
            if errno == EAGAIN:
                return -1
            if errno != EINTR:
                PyErr_SetFromErrno(OSError)
            PyErr_CheckSignals()
        return count

    cdef char *_place(self) except NULL:
        """The memory that is read to."""
        return <char *> PyMemoryView_GET_BUFFER(self._memory).buf

    # Sending

    cdef int frame(self, object out) except -1:
        """Makes one message of what is in ``out``, an IovecWriter, and has the owner keep it."""
        cdef IovecWriter writer = <IovecWriter?> out
        cdef uint8_t[HEAD] head
        cdef uint64_t size = <uint64_t> writer.left
        cdef int index
        self._owner.keep(writer.buffers, writer.left)
        memset(head, 0, HEAD)
        head[0] = 0x51  # a message to one channel, with sizes of 64 bits
        head[1] = 1
        for index in range(8):
            head[8 + index] = <uint8_t> (size >> 8 * index)
        writer.put_before(head, HEAD)
        memset(head, 0, 8)
        writer.put_head(head, <Py_ssize_t> (-size & 7))
        return 0

    cdef bint may_send(self) except -1:
        """Whether messages may leave now."""
        return self._owner is not None and self._owner.may_send()

    cdef bint waits(self) except -1:
        """Whether packets of the link wait to leave."""
        return self._owner is not None and self._owner.waits()

    cdef bint fill(self, IovecWriter out) except -1:
        """Puts packets of the link into ``out``, which is empty; whether there were some."""
        if not self.waits():
            return False
        out.extend(self._owner.take())
        if self._under is not None:
            out.encrypt(self._under)
        return out.left > 0

    cdef Py_ssize_t encrypt(self, const char *source, Py_ssize_t size, Py_ssize_t waiting,
                            list sealed) except -1:
        return self._under.encrypt(source, size, waiting, sealed)

    cdef bytes take(self):
        return self._under.take()
