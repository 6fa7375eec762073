"""Events of one half."""

cdef class HalfEvent:
    cdef readonly object half
