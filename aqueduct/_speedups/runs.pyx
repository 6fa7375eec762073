"""Messages as the application takes them, and runs of small ones read at once.

A step of Python for each frame, each number and each charge is what a small message would cost
most; for plain messages in a row these steps are taken here, and once in Python for the run.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from aqueduct._speedups.blocks cimport headers_of
from aqueduct._speedups.decoder cimport Decoder
from aqueduct._speedups.frames cimport Message
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
@cython.auto_pickle(False)
cdef class Run:
    """Plain messages in a row: without attachments, and of numbers that are new.

    ``messages`` are Received, ``charge`` is the sum of their charges.
    """

    def __cinit__(self):
        self.messages = []

    def read(
        self,
        Decoder decoder not None,
        ReceivedNumbers numbers not None,
        Py_ssize_t overhead,
        int64_t room,
    ):
        """Takes plain messages from ``decoder``; returns what follows, as ``Decoder.next`` does.

        Each is added to ``numbers`` and charged with its size and ``overhead``. The run also ends,
        with None, when ``charge`` is above ``room``. A message that is not plain is returned, and
        ``numbers`` is without it. After an error the run holds what came before it.
        """
        cdef object frame
        cdef Message message
        cdef Received received
        while self.charge <= room:
            frame = decoder.next()
            if type(frame) is not Message:
                return frame
            message = <Message> frame
            if message._attachments or not numbers.take_in(message.num):
                return frame
            received = Received.__new__(Received)
            received.number = message.num
            received._headers = message._headers
            received.attachments = ()
            received.payload = message.payload
            received.charge = message.size + message.overhead + overhead
            received.reliable = True
            self.charge += received.charge
            self.messages.append(received)
        return None
