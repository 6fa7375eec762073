"""Messages as the application takes them, and runs of plain ones read at once.

A step of Python for each frame, each number and each charge is what a message would cost most;
for plain messages in a row these steps are taken here, and once in Python for the run.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from aqueduct._speedups.blocks cimport headers_of
from aqueduct._speedups.decoder cimport AT_PAYLOAD, Decoder
from aqueduct._speedups.frames cimport Message, MessageHead
from aqueduct._speedups.tracker cimport ReceivedNumbers

__all__ = ["Received", "Run"]


@cython.final
@cython.freelist(1024)
@cython.auto_pickle(False)
cdef class Received:
    """One message. ``attachments`` are (half, headers) pairs, the halves those of this side's core.

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
        Message message not None,
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

    def __repr__(self):
        return f"<Received: message {self.number}, {len(self.attachments)} attachments>"


@cython.final
@cython.freelist(8)
@cython.auto_pickle(False)
cdef class Run:
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
        Decoder decoder not None,
        ReceivedNumbers numbers not None,
        Py_ssize_t overhead,
        int64_t room,
        int64_t pending=-1,
        bytes asked=None,
    ):
        """Takes plain messages from ``decoder``; returns ``follows``, as ``Decoder.next`` does.

        Each is added to ``numbers`` and charged with its size and ``overhead``. A MessageHead is
        admitted if its message is plain and fits ``room`` with the others, and has no header with
        the key ``asked``. The run also ends, with None, when ``charge`` is above ``room``. What is
        not plain is returned, and ``numbers`` is without it. ``pending`` is what a message that
        began to land before was charged beside the overhead; that is put right when it is whole.
        After an error the run holds what came before it.
        """
        cdef object frame
        cdef Message message
        cdef MessageHead head
        cdef Received received
        cdef int64_t size
        self.pending = pending
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
                try:
                    decoder.prepare(decoder._size, None)
                except MemoryError:
                    break  # ``Decoder.admit`` says so again
                decoder._state = AT_PAYLOAD
                self.pending = size
                self.charge += size + overhead
                self.admitted += 1
                self.largest = max(self.largest, <int64_t> head.size)
                continue
            if type(frame) is not Message:
                break
            message = <Message> frame
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
            return None
        self.follows = frame
        return frame


cdef bint is_plain(MessageHead head, bytes asked) except -1:
    """Whether nobody needs to look at a message before it is whole."""
    cdef tuple pair
    if head._attachments:
        return False
    if asked is None:
        return True
    if type(head._headers) is not tuple:
        return False  # a large block, which is not parsed here
    for pair in <tuple> head._headers:
        if pair[0] == asked:
            return False
    return True
