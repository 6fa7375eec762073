"""Looking at a socket or two again and again for moments."""

cdef double seconds_now() noexcept nogil
