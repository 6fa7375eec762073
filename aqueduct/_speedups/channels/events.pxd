"""Events of one half."""

cdef class Signal:
    cdef readonly object half
