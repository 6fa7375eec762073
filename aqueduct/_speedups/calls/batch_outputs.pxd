"""From what a handler makes to messages of a channel."""

from libc.stdint cimport int64_t

from aqueduct._speedups.calls.batch_receiver cimport InputReceiver
from aqueduct._speedups.arrow.writer cimport BatchEncoder, Encoded
from aqueduct._speedups.channels.sender cimport SenderBase

cdef class OutputSender:
    cdef InputReceiver _input
    cdef public int64_t largest_out
    cdef public int64_t batches_out
    cdef public int64_t rows_out
    cdef public int64_t bytes_out
    cdef public int64_t settled
    cdef public int64_t settled_bytes
    cdef public BatchEncoder encoder
    cdef SenderBase _row
    cdef bytes _key
    cdef Py_ssize_t _most
    cdef object _flush
    cdef Encoded _plain(self, object batch)
