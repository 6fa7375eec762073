"""Varints as inline C: 7 bits a byte, lowest first (AQ-2), shortest form, 64 bits (AQ-R1)."""

from cpython.long cimport PyLong_AsUnsignedLongLong, PyLong_CheckExact
from cpython.number cimport PyNumber_Index
from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    VARINT_MAX = 10        # bytes of the longest varint
    VARINT_MORE = 0        # ``varint_load``: the bytes end inside the varint
    VARINT_ABOVE_64 = -1   # ``varint_load``: more than 64 bits
    VARINT_PADDED = -2     # ``varint_load``: not the shortest encoding


cdef inline int varint_size(uint64_t value) noexcept nogil:
    """How many bytes ``value`` takes."""
    cdef int size = 1
    while value >= 0x80:
        value >>= 7
        size += 1
    return size


cdef inline uint8_t *varint_store(uint8_t *out, uint64_t value) noexcept nogil:
    """Writes ``value`` at ``out``, which has room for it; returns where the next byte goes."""
    while value >= 0x80:
        out[0] = <uint8_t> (value | 0x80)
        out += 1
        value >>= 7
    out[0] = <uint8_t> value
    return out + 1


cdef inline int varint_load(
    const uint8_t *data, const uint8_t *end, uint64_t *value
) noexcept nogil:
    """Reads one varint of ``data``; returns its size, or one of the codes above (<= 0)."""
    cdef uint64_t total = 0
    cdef uint8_t byte
    cdef int size = 0
    while data + size < end:
        byte = data[size]
        if size == 9 and byte > 1:
            return VARINT_ABOVE_64
        total |= <uint64_t> (byte & 0x7f) << (7 * size)
        size += 1
        if byte < 0x80:
            if byte == 0 and size > 1:
                return VARINT_PADDED
            value[0] = total
            return size
    return VARINT_MORE


cdef inline uint64_t to_uint64(object value) except? 0xFFFFFFFFFFFFFFFF:
    """An int of Python: OverflowError outside 64 bits, TypeError if it is none (Cython's own
    conversion would take 0.5).
    """
    if not PyLong_CheckExact(value):
        value = PyNumber_Index(value)
    return PyLong_AsUnsignedLongLong(value)


cdef int raise_varint(int code) except -1
cdef int to_number(object value, uint64_t highest, str what, uint64_t *out) except -1
