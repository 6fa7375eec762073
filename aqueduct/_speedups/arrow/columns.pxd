"""What a record batch of some schema is made of, and the C data interface of Arrow."""

from libc.stdint cimport int64_t, uint8_t

# The struct of Arrow's C data interface: arrays cross by it, and no library is linked.
cdef struct ArrowArray:
    int64_t length
    int64_t null_count
    int64_t offset
    int64_t n_buffers
    int64_t n_children
    const void **buffers
    ArrowArray **children
    ArrowArray *dictionary
    void (*release)(ArrowArray *) noexcept nogil
    void *private_data

cdef enum Kind:
    NULLS
    BITS            # one bit a value
    FIXED           # ``width`` bytes a value
    BYTES           # offsets of 32 bits, values
    LARGE_BYTES     # offsets of 64 bits, values
    STRUCT
    LIST
    LARGE_LIST
    FIXED_LIST      # ``width`` values of the child each

cdef struct Step:
    Kind kind
    int children
    bint strict             # it must not have nulls
    int64_t width
    int child_at            # where its children are among all children
    int buffer_at           # where its buffers are among all buffers
    int buffers

cdef enum:
    # Where the metadata that ``Columns.head`` writes has its numbers.
    BODY_AT = 32
    ROWS_AT = 64
    NODES_AT = 80
    # Values of an array, those inside lists too, so that no size overflows. More is not common.
    VALUES_LIMIT = 0x7FFFFFFF

cdef class Columns:
    cdef Step *steps                # every array, a parent before its children
    cdef readonly int nodes         # how many there are
    cdef readonly int columns       # those that are no children
    cdef readonly int buffers
    cdef readonly int head_size
    cdef uint8_t *head              # the continuation and the metadata; numbers are zero

    cdef int _end(self, int place, int depth) except -1
    # C memory alone, whose numbers ``_end`` has checked: nothing can raise.
    cdef void _place_children(self) noexcept
    cdef int _make_head(self) except -1

cdef int64_t count_bits(const uint8_t *bits, int64_t start, int64_t length) noexcept nogil
