"""What the peer may send on each of its streams."""

from libc.stdint cimport int64_t

from aqueduct._speedups.channels.receiver cimport ReceiveBudget
from aqueduct._speedups.channels.sender cimport SendQueue

cdef class CreditedStream:
    cdef readonly int64_t number
    cdef public bint fin
    cdef public int64_t limit
    cdef public int64_t granted

cdef class StreamCredit:
    cdef ReceiveBudget _budget
    cdef SendQueue _ledger
    cdef list _effects
    cdef int64_t _initial
    cdef int64_t _read_ahead
    cdef int64_t _read_ahead_both
    cdef int64_t _sent            # by this side, when a large stream last had credit

    cpdef object renew(self, CreditedStream stream, int64_t taken)
    cpdef object read_ahead(self, CreditedStream stream, int64_t size)
    cpdef object leave(self, CreditedStream stream)
    cdef int _grow(self, CreditedStream stream, int64_t due, int64_t ahead) except -1
