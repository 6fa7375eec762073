"""A set of uint64 kept as ranges in a balanced tree."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

# One range, both ends included, so that 2^64 - 1 is a number like the others.
cdef struct Node:
    uint64_t first
    uint64_t last
    uint32_t left
    uint32_t right
    int32_t height

cdef class RangeSet:
    cdef Node *nodes         # node 0 is no node: height 0, both children 0
    cdef uint32_t _room       # nodes in memory
    cdef uint32_t _used       # nodes ever taken from it
    cdef uint32_t _free       # returned nodes, chained by ``left``
    cdef uint32_t _root
    cdef uint32_t spans      # ranges
    cdef uint64_t covered    # numbers modulo 2^64: 0 with a range means all of them
    cdef uint64_t _looked     # nodes visited so far, for tests

    # For compiled users: both ends included; 0, or -1 with an error and nothing changed.
    cdef int add_span(self, uint64_t first, uint64_t last, uint64_t *added) except -1
    cdef int remove_span(self, uint64_t first, uint64_t last, uint64_t *removed) except -1
    # The range that holds ``number``, else the nearest one below or above it; 0: none.
    cdef uint32_t at_or_below(self, uint64_t number) noexcept nogil
    cdef uint32_t above(self, uint64_t number) noexcept nogil
    cdef uint32_t leftmost(self) noexcept nogil
    cdef uint32_t rightmost(self) noexcept nogil
    cdef tuple pair_of(self, uint32_t node)
    cdef list missing_spans(self, uint64_t first, uint64_t last)

    cdef int _reserve(self) except -1
    cdef void _insert(self, uint64_t first, uint64_t last) noexcept nogil
    cdef void _delete(self, uint64_t first) noexcept nogil
    cdef uint32_t _insert_under(self, uint32_t at, uint32_t node) noexcept nogil
    cdef uint32_t _delete_under(self, uint32_t at, uint64_t first) noexcept nogil
    cdef uint32_t _take_leftmost(self, uint32_t at, uint32_t *taken) noexcept nogil
    cdef uint32_t _balance(self, uint32_t at) noexcept nogil
    cdef void _measure(self, uint32_t at) noexcept nogil
    cdef uint32_t _turn_left(self, uint32_t at) noexcept nogil
    cdef uint32_t _turn_right(self, uint32_t at) noexcept nogil

# Python's half-open range as a closed one; ValueError unless 0 <= start < stop <= 2^64.
cdef int to_span(object start, object stop, uint64_t *first, uint64_t *last) except -1
cdef tuple span_pair(uint64_t first, uint64_t last)
