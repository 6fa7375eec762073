"""VarU64 as inline C: a first byte below 248 is the value, else the count of bytes (BP-R1)."""

from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    VARU64_MAX = 9         # bytes of the longest VarU64
    VARU64_MORE = 0        # ``varu64_load``: the bytes end inside it
    VARU64_PADDED = -1     # ``varu64_load``: not the shortest form


cdef inline int varu64_size(uint64_t value) noexcept nogil:
    """How many bytes ``value`` takes."""
    cdef int size = 1
    if value < 248:
        return 1
    while value:
        value >>= 8
        size += 1
    return size


cdef inline uint8_t *varu64_store(uint8_t *out, uint64_t value) noexcept nogil:
    """Writes ``value`` at ``out``, which has room for it; returns where the next byte goes."""
    cdef int extra, index
    if value < 248:
        out[0] = <uint8_t> value
        return out + 1
    extra = varu64_size(value) - 1
    out[0] = <uint8_t> (247 + extra)
    for index in range(extra, 0, -1):
        out[index] = <uint8_t> value
        value >>= 8
    return out + 1 + extra


cdef inline int varu64_load(
    const uint8_t *data, const uint8_t *end, uint64_t *value
) noexcept nogil:
    """Reads one VarU64 of ``data``; returns its size, or one of the codes above (<= 0)."""
    cdef uint64_t total = 0
    cdef int extra, index
    if data == end:
        return VARU64_MORE
    if data[0] < 248:
        value[0] = data[0]
        return 1
    extra = data[0] - 247
    # A needless leading zero is seen as soon as it comes.
    if extra > 1 and end - data > 1 and data[1] == 0:
        return VARU64_PADDED
    if end - data <= extra:
        return VARU64_MORE
    for index in range(1, extra + 1):
        total = total << 8 | data[index]
    if total < 248:
        return VARU64_PADDED
    value[0] = total
    return extra + 1
