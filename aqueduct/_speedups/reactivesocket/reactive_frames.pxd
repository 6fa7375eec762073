"""Frames of ReactiveSocket: their heads, and an incremental decoder."""

from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    LENGTH_SIZE = 4       # of the length, where the transport does not frame (RS-1)
    HEAD_MOST = 24        # with length and number of items

cdef class ReactiveFrameDecoder:
    cdef const uint8_t *_pos
    cdef const uint8_t *_end
    cdef const uint8_t *_start
    cdef object _fed            # owner of that memory: bytes or a memoryview
    cdef uint8_t[HEAD_MOST] _held   # the beginning of a head that straddles reads
    cdef uint64_t _held_size
    cdef uint64_t _need         # bytes of the head without which nothing more is known of it
    cdef bint _framed
    cdef bint _waiting          # a message is fed and not read
    cdef uint64_t _limit
    cdef str _setting           # the name of that limit
    cdef object _error
    cdef object _landing        # bytes or an AlignedBuffer, where the payload of a frame lands
    cdef uint8_t *_place        # of the next byte there
    cdef readonly uint64_t missing
    cdef readonly uint64_t frames
    cdef readonly int type
    cdef readonly int flags
    cdef readonly uint64_t stream
    cdef readonly uint64_t n
    cdef readonly uint64_t extended_type
    cdef readonly object data

    cdef int push(self, object data) except -1
    cdef bint step(self) except -1
    cdef bint _gather(self) except -1
    cdef int _load(self, const uint8_t *data, uint64_t size) except -1
    cdef bint _begin(self, uint64_t size) except -1
    cdef bint _land(self) except -1
    cdef int _fail(self, object error) except -1

cdef inline uint64_t network_load(const uint8_t *data, int size) noexcept nogil:
    """The number of ``size`` bytes in network byte order (RS-R1)."""
    cdef uint64_t value = 0
    cdef int index
    for index in range(size):
        value = value << 8 | data[index]
    return value


cdef inline uint8_t *network_store(uint8_t *out, uint64_t value, int size) noexcept nogil:
    """Writes ``value`` in ``size`` bytes; returns where the next byte goes."""
    cdef int index
    for index in range(size):
        out[index] = <uint8_t> (value >> (8 * (size - 1 - index)))
    return out + size
