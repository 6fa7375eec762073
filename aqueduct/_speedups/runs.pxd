"""Received messages, and runs of them read at once."""

from libc.stdint cimport int64_t, uint64_t

from aqueduct._speedups.decoder cimport Decoder
from aqueduct._speedups.tracker cimport ReceivedNumbers

cdef class Received:
    cdef readonly uint64_t number
    cdef object _headers          # the tuple, or the bytes of a large block (see frames.Message)
    cdef readonly tuple attachments
    cdef public object payload
    cdef readonly Py_ssize_t charge
    cdef readonly bint reliable
    cdef public bint dropped

cdef class Run:
    cdef readonly list messages
    cdef readonly int64_t charge
    cdef readonly int64_t pending
    cdef readonly int64_t largest
    cdef readonly Py_ssize_t admitted
    cdef readonly object follows
    cdef readonly bint full
