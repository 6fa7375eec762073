"""Messages as the application takes them, and runs of plain ones read at once.

A step of Python for each frame, each number and each charge is what a message would cost most;
for plain messages in a row these steps are taken here, and once in Python for the run.
"""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

from aqueduct._speedups.channels.blocks cimport headers_of
from aqueduct._speedups.channels.decoder cimport AT_PAYLOAD, FrameDecoder
from aqueduct._speedups.channels.frames cimport MessageFrame, MessageHead
from aqueduct._speedups.channels.tracker cimport ReceivedNumbers

from aqueduct.errors import LocalProtocolError

__all__ = ["DirectRead", "Received", "MessageBatch"]

cdef enum:
    # Fewer bytes are not read straight to their place: a call for them costs more than their copy.
    LANDING_FROM = 4096
    # Where payloads are so large, the next one is not looked for in more bytes than need be.
    LARGE = 32768


@cython.final
@cython.freelist(1024)
@cython.auto_pickle(False)
cdef class Received:
    """One message. ``attachments`` are (half, headers) pairs, the halves those of this side's core;
    the headers are pairs, or bytes for ``frames.decode_headers``.

    ``charge``: bytes of the budget that return when it is taken. ``dropped``: evicted by a later
    unreliable message; still in the queue, but nobody gets it.
    """

    def __init__(
        self,
        uint64_t number,
        headers,
        tuple attachments not None,
        payload,
        Py_ssize_t charge,
        *,
        bint reliable=True,
    ):
        self.number = number
        self._headers = headers
        self.attachments = attachments
        self.payload = payload
        self.charge = charge
        self.reliable = reliable

    @staticmethod
    def of(
        MessageFrame message not None,
        tuple attachments not None,
        Py_ssize_t charge,
        *,
        bint reliable=True,
    ):
        """What became of a frame. Headers that are bytes in it stay so until they are asked for."""
        cdef Received received = Received.__new__(Received)
        received.number = message.num
        received._headers = message._headers
        received.attachments = attachments
        received.payload = message.payload
        received.charge = charge
        received.reliable = reliable
        return received

    @property
    def headers(self):
        """(key, value) pairs of bytes."""
        if type(self._headers) is bytes:
            self._headers = headers_of(self._headers)
        return self._headers

    @property
    def raw(self):
        """The headers as they are now, bytes or pairs: equal only where ``headers`` are."""
        return self._headers

    def __repr__(self):
        return f"<Received: message {self.number}, {len(self.attachments)} attachments>"


@cython.final
@cython.freelist(8)
@cython.auto_pickle(False)
cdef class MessageBatch:
    """Plain messages in a row: without attachments, and of numbers that are new.

    ``messages`` are Received; ``admitted`` counts them, and one whose payload is still landing;
    ``charge`` is what these are charged in sum, below zero if an earlier one was charged too much.
    ``pending`` is what that last one is charged beside the overhead, -1 if there is none;
    ``largest`` the largest payload that was let in. ``follows`` is what comes next; ``full`` that
    it was not looked at, for want of room.
    """

    def __cinit__(self):
        self.messages = []
        self.pending = -1

    def read(
        self,
        FrameDecoder decoder not None,
        ReceivedNumbers numbers not None,
        Py_ssize_t overhead,
        int64_t room,
        int64_t pending=-1,
        bytes asked=None,
    ):
        """Takes plain messages from ``decoder``; returns ``follows``, as ``FrameDecoder.next``
        does.

        Each is added to ``numbers`` and charged with its size and ``overhead``. A MessageHead is
        admitted if its message is plain and fits ``room`` with the others, and has no header with
        the key ``asked``. The run also ends, with None, when ``charge`` is above ``room``. What is
        not plain is returned, and ``numbers`` is without it. ``pending`` is what a message that
        began to land before was charged beside the overhead; that is put right when it is whole.
        After an error the run holds what came before it.
        """
        self.pending = pending
        self.take(decoder, numbers, overhead, room, asked)
        return self.follows

    cdef int take(
        self, FrameDecoder decoder, ReceivedNumbers numbers, Py_ssize_t overhead, int64_t room,
        bytes asked
    ) except -1:
        """As ``read``, which may be gone on with as long as nothing follows and it is not full."""
        cdef object frame
        cdef MessageFrame message
        cdef MessageHead head
        cdef Received received
        cdef int64_t size
        cdef bint later
        self.full = False
        self.follows = None
        while self.charge <= room:
            frame = decoder.next()
            if type(frame) is MessageHead:
                head = <MessageHead> frame
                size = <int64_t> head.size + head.overhead
                if (
                    size + overhead > room - self.charge
                    or not is_plain(head, asked)
                    or not numbers.is_new(head.num)
                ):
                    break
                later = (
                    self._puts_off and decoder._size >= ALONE and len(self.messages) > 0
                    and decoder.left() < <uint64_t> decoder._size
                )
                if later:
                    decoder.missing = decoder._size
                else:
                    try:
                        decoder.prepare(decoder._size, None)
                    except MemoryError:
                        break  # ``FrameDecoder.admit`` says so again
                decoder._state = AT_PAYLOAD
                self.pending = size
                self.charge += size + overhead
                self.admitted += 1
                self.largest = max(self.largest, <int64_t> head.size)
                if later:
                    return 0
                continue
            if type(frame) is not MessageFrame:
                break
            message = <MessageFrame> frame
            if message._attachments or not numbers.take_in(message.num):
                break
            received = Received.__new__(Received)
            received.number = message.num
            received._headers = message._headers
            received.attachments = ()
            received.payload = message.payload
            received.charge = message.size + message.overhead + overhead
            received.reliable = True
            if self.pending < 0:
                self.charge += received.charge
                self.admitted += 1
            else:
                self.charge += received.charge - overhead - self.pending
                self.pending = -1
            self.messages.append(received)
        else:
            self.full = True
            return 0
        self.follows = frame
        return 0


@cython.final
@cython.auto_pickle(False)
cdef class DirectRead:
    """Where a carrier puts the bytes of one stream of the peer without a step of Python for each.

    The stream's owner opens it, and takes back what became of them (``close``). Between the two
    nothing else may happen on the connection: neither a command nor an input. ``place`` (in C) and
    ``room`` are memory for the next bytes of a large payload; ``push`` takes any that come next.
    Plain messages in a row become a ``run``; ``stopped``: what comes next needs the owner first.
    ``window``: what the peer may send of an admitted payload before more of it has landed.
    """

    def __cinit__(
        self,
        FrameDecoder decoder not None,
        Py_ssize_t overhead,
        ReceivedNumbers numbers not None,
        Py_ssize_t window,
    ):
        self.decoder = decoder
        self._overhead = overhead
        self._numbers = numbers
        self._window = window
        self.stopped = True

    cpdef object open(self, int64_t room, int64_t pending, bytes asked):
        """Takes messages as ``MessageBatch.read`` does; with ``room`` below zero none but the
        payload that is landing."""
        self.run = None
        if room >= 0:
            self.run = MessageBatch.__new__(MessageBatch)
            self.run.pending = pending
            self.run._puts_off = True
        self._room = room
        self._asked = asked
        self.stopped = False
        self.size = 0

    cpdef MessageBatch close(self):
        """No more bytes are taken; returns the run, or None if there could be none."""
        cdef MessageBatch run = self.run
        self.run = None
        self.stopped = True
        return run

    @property
    def idle(self):
        """All that came is a part of a payload whose rest the peer may send already.

        Then its owner has nothing to do, and need not be asked to close it.
        """
        cdef MessageBatch run = self.run
        return (
            run is not None and run.pending >= 0 and not run.admitted and not self.stopped
            and 0 < self.decoder.missing <= self._window - <Py_ssize_t> self.size
            and not self.decoder.left()
        )

    def room(self, Py_ssize_t most):
        """A view of the memory for the next bytes, at most ``most``; None if they are to be fed."""
        return None if self.wanted() == 0 else self.decoder.room(most)

    def landed(self, Py_ssize_t size):
        """``size`` bytes were written to ``room``."""
        if not 0 <= size <= self.wanted():
            raise LocalProtocolError(
                f"landed({size}): {self.wanted()} bytes of a payload are missing"
            )
        self.fill(size)

    def feed(self, data):
        """Takes the next bytes, by reference."""
        if self.stopped:
            raise LocalProtocolError("feed: the inlet is stopped")
        self.push(data)

    cdef int take_up(self) except -1:
        """More is to come by this inlet: what is whole is not taken before that."""
        cdef FrameDecoder decoder = self.decoder
        if decoder.missing and decoder.payload is None and not self.stopped:
            try:
                decoder.take_up()
            except MemoryError:
                pass  # with the next bytes its owner is told
        return 0

    cdef Py_ssize_t wanted(self) noexcept:
        """How many bytes ``place`` has room for; 0 if it is not worth it. Looks at fields alone."""
        cdef FrameDecoder decoder = self.decoder
        if (
            self.stopped or decoder._state != AT_PAYLOAD or decoder.payload is None
            or decoder.missing < LANDING_FROM or decoder.left()
        ):
            return 0
        return decoder.missing

    cdef uint8_t *place(self) noexcept:
        """Where the next bytes of the payload go. A field, as ``wanted``."""
        return self.decoder._land

    cdef int fill(self, Py_ssize_t size) except -1:
        """``size`` bytes, no more than are ``wanted``, were written to ``place``."""
        cdef FrameDecoder decoder = self.decoder
        decoder._land += size
        decoder.missing -= size
        decoder.skip_outside(<uint64_t> size)
        self.size += <uint64_t> size
        if decoder.missing == 0:
            self._go_on()
        return 0

    cdef int push(self, object data) except -1:
        """Takes the next bytes, by reference."""
        cdef uint64_t before = self.decoder._fed
        self.decoder.push(data)
        self.size += self.decoder._fed - before
        self._go_on()
        return 0

    cdef int _go_on(self) except -1:
        cdef MessageBatch run = self.run
        if run is None:
            self.stopped = self.decoder.left() > 0 or self.decoder.missing == 0
            return 0
        try:
            run.take(self.decoder, self._numbers, self._overhead, self._room, self._asked)
        except Exception:
            # The decoder raises it again when its owner reads on.
            self.stopped = True
            return 0
        if run.largest:
            self.large = run.largest >= LARGE
        self.stopped = run.full or run.follows is not None
        return 0


cdef bint is_plain(MessageHead head, bytes asked) except -1:
    """Whether nobody needs to look at a message before it is whole."""
    if head._attachments:
        return False
    # Of a frame that was decoded the headers are bytes. A value may hold the key, too: then the
    # message is looked at, and that is all.
    return asked is None or not head._headers or asked not in <bytes?> head._headers
