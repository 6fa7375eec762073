"""Batches as they come by the channel of a call."""

from libc.stdint cimport int64_t

from aqueduct._speedups.arrow.reader cimport BatchReader
from aqueduct._speedups.calls.batch_sender cimport InFlightWindow
from aqueduct._speedups.channels.receiver cimport MemoryLease, ReceiveQueue

cdef class BatchReceiver:
    cdef public bint partial
    cdef public int64_t moved
    cdef public MemoryLease lease       # of the last payload taken, until its reader has it
    cdef ReceiveQueue _queue
    cdef object _room_came
    cdef bytes _said              # the headers of a whole batch, but for the number's text
    cdef Py_ssize_t _limit
    cdef BatchReader _reader
    cdef object _held             # taken, and not read here

    cdef Py_ssize_t _look(self, int64_t *number) except -2
    cdef object _take(self, Py_ssize_t size)
    cdef object _read(self, payload)
    cdef object _next_whole(self)
    cdef object _next_batch(self)

cdef class InputReceiver(BatchReceiver):
    cdef public int64_t batches_in
    cdef public int64_t rows_in
    cdef public int64_t bytes_in
    cdef public int64_t taken

cdef class AnswerReceiver(BatchReceiver):
    cdef public int64_t number
    cdef InFlightWindow _window
    cdef public object on_change
