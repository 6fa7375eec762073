"""Which message numbers were sent, received, acknowledged: both spaces, both sides."""

from libc.stdint cimport uint64_t

from aqueduct._speedups.base.ranges cimport RangeSet

cdef class SentNumbers:
    cdef readonly uint64_t next
    cdef readonly RangeSet acked

    cdef list _settle(self, uint64_t first, uint64_t last)

cdef class ReceivedNumbers:
    cdef readonly RangeSet ranges
    cdef RangeSet _pending
    cdef RangeSet _withdrawn      # None: none was
    cdef uint64_t _range_limit

    # 1: it is new and was added; 0: it is not to be had so (seen, one hole too many, too high).
    cdef bint take_in(self, uint64_t number) except -1
    # Whether ``take_in`` would not refuse it for having been seen, or for being too high.
    # It looks at fields alone and cannot raise.
    cdef bint is_new(self, uint64_t number) noexcept

cdef class UnreliableSent:
    cdef readonly uint64_t next
    cdef uint64_t _announced
    cdef readonly uint64_t nacked     # of those that are settled
    cdef readonly uint64_t settled    # all numbers below are acked or nacked

cdef class UnreliableReceived:
    cdef readonly uint64_t announced
    cdef readonly uint64_t settled
    cdef readonly uint64_t refused
    cdef readonly RangeSet ranges
    cdef uint64_t _range_limit
