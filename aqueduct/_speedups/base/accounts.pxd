"""What all connections of a process hold, in bytes of one direction."""

from libc.stdint cimport int64_t

cdef class Account:
    cdef public int64_t used
    cdef public int64_t returned  # all that ever was
    cdef public int64_t alive     # handed to handlers and readers, and not freed
    cdef public int64_t lent      # of those, still charged
    cdef public dict waiting
    cdef public dict pulling      # calls of clients that wait for room
    cdef public object place

    cdef int spend(self, int64_t size) except -1
