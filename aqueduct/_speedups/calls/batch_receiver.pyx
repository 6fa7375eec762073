"""The next batch of a call in one step: taken from its channel, counted, and read.

That is for what nearly every message is: a whole batch that says nothing but its number. Anything
else is left where it is, for the general way of ``aqueduct.service.call`` and
``aqueduct.client.call``.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcmp

from aqueduct._speedups.arrow.reader cimport BatchReader
from aqueduct._speedups.base.buffers cimport AlignedBuffer
from aqueduct._speedups.calls.batch_sender cimport InFlightWindow
from aqueduct._speedups.channels.receiver cimport ReceiveQueue, Received

__all__ = ["AnswerReceiver", "BatchReceiver", "InputReceiver"]

cdef enum:
    # Longer numbers might not fit 64 bits.
    DIGITS = 18


@cython.auto_pickle(False)
cdef class BatchReceiver:
    """What InputReceiver and AnswerReceiver have in common.

    ``moved`` grows with what is taken; ``partial``: the last message was part of a batch, and what
    comes next is not taken here. ``lease``: what the last payload is charged. Who asks by
    ``next_batch`` is done with the batch before; who takes ahead takes the lease as well.
    """

    def arrive_by(self, ReceiveQueue queue, room_came, bytes key not None, Py_ssize_t limit):
        """Takes messages from ``queue`` (None: from nowhere) from now on.

        They are those with the one header ``key``, whose value is a number, and at most ``limit``
        bytes of payload. ``room_came`` is called when that makes room others wait for.
        """
        if len(key) >= 0x80:
            raise ValueError("arrive_by: a key of 127 bytes at most is wanted")
        self._queue = queue
        self._room_came = room_came
        self._said = bytes((len(key),)) + key
        self._limit = limit

    @property
    def holds_payload(self):
        """Whether ``take_whole`` has a payload that ``next_batch`` could not read."""
        return self._held is not None

    @property
    def quiet(self):
        """Nothing is there to be taken, of what comes by ``queue``, and it has not ended."""
        return (
            self._held is None and self._queue is not None and not self._queue.messages
            and not self._queue.ended
        )

    def read_by(self, BatchReader reader):
        """``next_batch`` has it read the payloads; None: it gives no batches."""
        self._reader = reader

    def read(self, payload):
        """The batch of a payload; None: somebody else has to read it, or to say what it is."""
        return None if self._reader is None else self._read(payload)

    cdef object _read(self, payload):
        try:
            return self._reader.read(payload)
        except Exception:
            return None

    def take_whole(self):
        """The payload of the next whole batch; None: not here.

        First what ``next_batch`` could not read.
        """
        cdef object payload = self._held
        if payload is None:
            return self._next_whole()
        self._held = None
        return payload

    cdef object _next_whole(self):
        """The next payload of the queue, counted. Both classes below define it, as no cdef class
        can be abstract.
        """
        raise NotImplementedError

    cdef object _next_batch(self):
        """Its batch; None: not here, or somebody else has to read it by ``take_whole``."""
        cdef object payload, batch
        if self._held is not None:
            return None
        if self.lease is not None:
            self.lease.give_back()
            self.lease = None
        if self._reader is None:
            return None
        payload = self._next_whole()
        if payload is None:
            return None
        batch = self._read(payload)
        if batch is None:
            self._held = payload
        return batch

    cdef Py_ssize_t _look(self, int64_t *number) except -2:
        """The size of the next payload, and the batch's number; -1: there is none for us."""
        cdef ReceiveQueue queue = self._queue
        cdef Received received
        cdef const uint8_t *said
        cdef object payload, headers
        cdef Py_ssize_t size, place
        if queue is None or self.partial or not queue.messages:
            return -1
        received = <Received?> queue.messages[0]
        headers, payload = received.raw, received.payload
        if type(payload) is AlignedBuffer:
            size = (<AlignedBuffer> payload).size
        elif type(payload) is bytes:
            size = PyBytes_GET_SIZE(payload)
        else:
            return -1
        if (
            size > self._limit or type(headers) is not bytes or received.attachments
            or received.dropped or not received.reliable
        ):
            return -1
        place = PyBytes_GET_SIZE(self._said)
        said = <const uint8_t *> PyBytes_AS_STRING(headers)
        if (
            PyBytes_GET_SIZE(headers) < place + 2
            or memcmp(said, PyBytes_AS_STRING(self._said), <size_t> place) != 0
        ):
            return -1
        number[0] = number_in(said + place, PyBytes_GET_SIZE(headers) - place)
        return -1 if number[0] < 0 else size

    cdef object _take(self, Py_ssize_t size):
        """The payload that ``_look`` has found, of ``size`` bytes."""
        cdef ReceiveQueue queue = self._queue
        cdef Received received = queue.take()
        self.moved += 1
        if queue.keeps:
            if size:
                self.lease = queue.lease(received.payload)
            else:
                queue.settle()
        if queue.budget.is_awaited():
            self._room_came()
        return received.payload


@cython.auto_pickle(False)
cdef class InputReceiver(BatchReceiver):
    """The batches of a call in the service, which come in the order of their numbers.

    ``batches_in``, ``rows_in`` and ``bytes_in`` count them; ``taken`` those that the handler has.
    """

    cdef object _next_whole(self):
        """It has number ``batches_in - 1`` from then on."""
        cdef object payload
        cdef int64_t number = -1
        cdef Py_ssize_t size = self._look(&number)
        if size <= 0 or number != self.batches_in:
            return None
        payload = self._take(size)
        self.batches_in += 1
        self.bytes_in += size
        return payload

    def next_batch(self):
        """The next batch, for the handler; None: not here."""
        cdef object batch = self._next_batch()
        if batch is not None:
            self.rows_in += <int64_t> batch.num_rows
            self.taken = self.batches_in
        return batch


@cython.auto_pickle(False)
cdef class AnswerReceiver(BatchReceiver):
    """The answers of a call in the client. They settle what ``window`` has sent, if not None.

    ``number``: of the last one, which is that of its input batch; -1 before the first. Numbers
    never fall here.
    """

    def __cinit__(self, InFlightWindow window):
        self._window = window
        self.number = -1

    cdef object _next_whole(self):
        """Past the marks before it."""
        cdef object payload
        cdef int64_t number = -1
        cdef Py_ssize_t size
        while True:
            size = self._look(&number)
            if size < 0 or (size and number < self.number):
                return None
            payload = self._take(size)
            if self._window is not None:
                self._window.settle(number, size > 0)
            if size:
                self.number = number
                return payload

    def heard(self):
        """Something came. Marks, which say what is settled, are taken: nobody waits for them.

        Then ``on_change`` is called, for what may be read, or sent.
        """
        cdef int64_t number = -1
        while self._look(&number) == 0:
            self._take(0)
            if self._window is not None:
                self._window.settle(number, False)
        if self.on_change is not None:
            self.on_change()

    def next_batch(self):
        """The batch of the next answer; None: not here."""
        return self._next_batch()


cdef int64_t number_in(const uint8_t *text, Py_ssize_t size) noexcept:
    """The number that a header's value of so many bytes, its length before it, is; -1 if none.

    It looks at bytes alone: nothing can raise.
    """
    cdef int64_t number = 0
    cdef Py_ssize_t place
    if text[0] != size - 1 or size - 1 > DIGITS or (text[1] == 0x30 and size > 2):
        return -1
    for place in range(1, size):
        if not 0x30 <= text[place] <= 0x39:
            return -1
        number = 10 * number + (text[place] - 0x30)
    return number
