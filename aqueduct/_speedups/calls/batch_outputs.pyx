"""From what a handler makes to messages of a channel: what is done for each of many batches."""

cimport cython
from libc.stdint cimport int64_t

from aqueduct._speedups.calls.batch_receiver cimport InputReceiver
from aqueduct._speedups.arrow.writer cimport Encoded
from aqueduct._speedups.channels.sender cimport SenderBase

__all__ = ["OutputSender"]


@cython.auto_pickle(False)
cdef class OutputSender:
    """What the handler of a call makes of the batches that ``input`` takes.

    ``batches_out``, ``rows_out`` and ``bytes_out`` count that; ``largest_out`` is the largest
    answer so far. Inputs below ``settled`` are answered, or told to be taken; ``settled_bytes``
    had come when that was said.
    """

    def __cinit__(self, InputReceiver input not None):
        self._input = input

    def leave_by(self, SenderBase row, bytes key not None, Py_ssize_t most, flush):
        """Answers of at most ``most`` bytes leave by ``row`` as they are, others by ``send``.

        ``key``: of the header with a batch's number. ``flush`` is called after each message.
        """
        self._row = row
        self._key = key
        self._most = most
        self._flush = flush

    def give(self, batch, int64_t number):
        """Sends an answer that is one plain message, if there is room; else False, and no more."""
        cdef SenderBase row = self._row
        cdef Encoded encoded
        if row is None or row.error is not None or self.encoder is None or not row.room():
            return False
        encoded = self._plain(batch)
        if encoded is None or encoded.size > self._most:
            return False
        if row.post(encoded.buffers, ((self._key, b"%d" % number),)) is None:
            return False
        self.rows_out += <int64_t> batch.num_rows
        self._flush()
        self.count(number, encoded.size)
        return True

    cdef Encoded _plain(self, batch):
        """The batch, if that is simply done; None: it is for others, who say what was wrong."""
        try:
            return self.encoder.plain(batch)
        except MemoryError:
            return None

    def count(self, int64_t number, int64_t size):
        """An answer of ``size`` bytes to input ``number`` was sent."""
        self.batches_out += 1
        self.bytes_out += size
        if size > self.largest_out:
            self.largest_out = size
        if number >= self.settled:
            self.settled = number + 1
            self.settled_bytes = self._input.bytes_in
