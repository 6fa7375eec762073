"""Measures which bytes and values Arrow's views and unions refer to, and rewrites views.

A view has 16 bytes. A short one has its length and up to 12 bytes of text. A long one has its
length, the first four bytes, the number of the buffer with the text, and the place in it. So a
slice of a few views still has all buffers of the whole.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

__all__ = ["measure", "measure_children", "measure_lists", "move_bits", "rewrite"]


def measure(views not None, validity, int64_t offset, int64_t length, list sizes not None):
    """For each buffer of ``sizes`` bytes: (bytes in use, where they begin, where they end).

    Of ``length`` views from number ``offset``; ``validity``: their bitmap, or None. Bytes count as
    often as a view refers to them. Raises ValueError for a view of what is not there.
    """
    cdef Py_buffer seen, bits
    cdef Use *uses
    cdef Py_ssize_t count = len(sizes), place
    cdef bint good
    take_all(views, validity, VIEW, offset, length, &seen, &bits)
    uses = <Use *> calloc(count + 1, sizeof(Use))
    try:
        if uses == NULL:
            raise MemoryError
        for place in range(count):
            uses[place].size, uses[place].low = sizes[place], INT64_MAX
        with nogil:
            good = look(&seen, &bits, offset, length, uses, count)
        if not good:
            raise ValueError("a view refers to bytes outside its buffers")
        return [
            (uses[place].used, uses[place].low if uses[place].used else 0, uses[place].high)
            for place in range(count)
        ]
    finally:
        free(uses)
        PyBuffer_Release(&seen)
        if validity is not None:
            PyBuffer_Release(&bits)


def rewrite(
    views not None,
    validity,
    int64_t offset,
    int64_t length,
    list texts not None,
    list moves not None,
    out not None,
    packed not None,
):
    """Writes the same views for other buffers into ``out``; those of nulls become empty.

    ``moves`` has a pair for each of the buffers ``texts``. It is the number of the new buffer, and
    how many bytes are left out at its beginning. Or it is (-1, number): the bytes of its views are
    copied to ``packed``, which is buffer ``number``. Raises ValueError for views that ``measure``
    refuses, and for too little room.
    """
    cdef Py_buffer seen, bits
    cdef Py_buffer *held    # of ``texts``, then of ``out`` and ``packed``
    cdef Use *uses
    cdef Py_ssize_t count = len(texts), place, taken = 0
    cdef int failed
    if len(moves) != count:
        raise ValueError(f"there are {count} buffers and {len(moves)} moves")
    take_all(views, validity, VIEW, offset, length, &seen, &bits)
    held = <Py_buffer *> malloc((count + 2) * sizeof(Py_buffer))
    uses = <Use *> calloc(count + 1, sizeof(Use))
    try:
        if uses == NULL or held == NULL:
            raise MemoryError
        for place in range(count):
            PyObject_GetBuffer(texts[place], &held[place], PyBUF_SIMPLE)
            taken += 1
            uses[place].size, uses[place].low = held[place].len, INT64_MAX
            uses[place].data = <const uint8_t *> held[place].buf
            uses[place].index, uses[place].shift = moves[place]
        for writable in (out, packed):
            PyObject_GetBuffer(writable, &held[taken], PyBUF_WRITABLE)
            taken += 1
        if held[count].len < VIEW * length:
            raise ValueError(f"{held[count].len} bytes are no room for {length} views")
        with nogil:
            failed = not look(&seen, &bits, offset, length, uses, count)
            if not failed:
                failed = write(&seen, &bits, offset, length, uses, &held[count], &held[count + 1])
        if failed:
            raise ValueError("a view refers to bytes outside its buffers, or they have no room")
    finally:
        for place in range(taken):
            PyBuffer_Release(&held[place])
        free(held)
        free(uses)
        PyBuffer_Release(&seen)
        if validity is not None:
            PyBuffer_Release(&bits)


def move_bits(bits not None, int64_t offset, int64_t length, out not None):
    """Copies ``length`` bits from number ``offset`` on to the beginning of ``out``."""
    cdef Py_buffer source, target
    cdef const uint8_t *data
    cdef uint8_t *made
    cdef int64_t place, last, size = length + 7 >> 3
    cdef int shift = offset & 7
    if offset < 0 or length < 0:
        raise ValueError(f"{length} bits from number {offset} on are none")
    PyObject_GetBuffer(bits, &source, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(out, &target, PyBUF_WRITABLE)
    except BaseException:
        PyBuffer_Release(&source)
        raise
    try:
        if source.len < offset + length + 7 >> 3 or target.len < size:
            raise ValueError(f"{length} bits from number {offset} are not there, or have no room")
        data = <const uint8_t *> source.buf + (offset >> 3)
        made = <uint8_t *> target.buf
        last = (shift + length + 7 >> 3) - 1  # the last byte with one of the bits
        with nogil:
            for place in range(size):
                made[place] = data[place] >> shift
                if shift and place < last:
                    made[place] |= <uint8_t> (data[place + 1] << (8 - shift))
    finally:
        PyBuffer_Release(&source)
        PyBuffer_Release(&target)


def measure_lists(
    offsets not None, sizes not None, validity, bint large, int64_t offset, int64_t length
):
    """What ``length`` list views from number ``offset`` refer to, as (values, first, end).

    Values count as often as a view has them. ``large``: numbers of 64 bits, else of 32. Raises
    ValueError for buffers that are too short. Where the views point is not looked at.
    """
    cdef Py_buffer starts, counts, bits
    cdef int width = 8 if large else 4
    cdef int64_t used = 0, low = INT64_MAX, high = 0, place, start, size
    take_all(offsets, validity, width, offset, length, &starts, &bits)
    try:
        take_all(sizes, None, width, offset, length, &counts, NULL)
        try:
            with nogil:
                for place in range(offset, offset + length):
                    if is_null(&bits, place):
                        continue
                    if large:
                        start = (<const int64_t *> starts.buf)[place]
                        size = (<const int64_t *> counts.buf)[place]
                    else:
                        start = (<const int32_t *> starts.buf)[place]
                        size = (<const int32_t *> counts.buf)[place]
                    if size:
                        used += size
                        low = min(low, start)
                        high = max(high, start + size)
        finally:
            PyBuffer_Release(&counts)
    finally:
        PyBuffer_Release(&starts)
        if validity is not None:
            PyBuffer_Release(&bits)
    return used, low if used else 0, high


def measure_children(codes not None, offsets not None, int64_t offset, int64_t length):
    """What ``length`` rows of a dense union refer to, as {type code: (values, first, end)}.

    Raises ValueError for buffers that are too short.
    """
    cdef Py_buffer kinds, places
    cdef int64_t[128] used, low, high
    cdef int64_t place, value
    cdef int code
    take_all(codes, None, 1, offset, length, &kinds, NULL)
    try:
        take_all(offsets, None, 4, offset, length, &places, NULL)
        try:
            with nogil:
                for code in range(128):
                    used[code], low[code], high[code] = 0, INT64_MAX, 0
                for place in range(offset, offset + length):
                    code = (<const uint8_t *> kinds.buf)[place] & 127
                    value = (<const int32_t *> places.buf)[place]
                    used[code] += 1
                    low[code] = min(low[code], value)
                    high[code] = max(high[code], value + 1)
        finally:
            PyBuffer_Release(&places)
    finally:
        PyBuffer_Release(&kinds)
    return {code: (used[code], low[code], high[code]) for code in range(128) if used[code]}


cdef int take_all(
    object data,
    object validity,
    int width,
    int64_t offset,
    int64_t length,
    Py_buffer *taken,
    Py_buffer *bits,
) except -1:
    """Takes a buffer of values and, if there is one, their bitmap; both are large enough."""
    if bits != NULL:
        bits.buf = NULL
    if offset < 0 or length < 0 or offset > INT64_MAX / VIEW - length:
        raise ValueError(f"{length} values from number {offset} on are none")
    PyObject_GetBuffer(data, taken, PyBUF_SIMPLE)
    if taken.len < width * (offset + length):
        PyBuffer_Release(taken)
        raise ValueError(f"{length} values from number {offset} on are not there")
    if validity is None:
        return 0
    try:
        PyObject_GetBuffer(validity, bits, PyBUF_SIMPLE)
    except BaseException:
        PyBuffer_Release(taken)
        raise
    if bits.len < offset + length + 7 >> 3:
        PyBuffer_Release(taken)
        PyBuffer_Release(bits)
        raise ValueError(f"{length} bits from number {offset} on are not there")
    return 0


cdef inline bint is_null(const Py_buffer *bits, int64_t place) noexcept nogil:
    return bits.buf != NULL and not (<const uint8_t *> bits.buf)[place >> 3] >> (place & 7) & 1


cdef inline int32_t load32(const uint8_t *data) noexcept nogil:
    cdef int32_t number
    memcpy(&number, data, 4)
    return number


cdef bint look(
    const Py_buffer *seen,
    const Py_buffer *bits,
    int64_t offset,
    int64_t length,
    Use *uses,
    Py_ssize_t count,
) noexcept nogil:
    """Measures each buffer; False: a view refers to what is not there."""
    cdef const uint8_t *view
    cdef int64_t place, size, start
    cdef int32_t index
    cdef Use *use
    for place in range(offset, offset + length):
        if is_null(bits, place):
            continue
        view = <const uint8_t *> seen.buf + VIEW * place
        size = load32(view)
        if 0 <= size <= SHORT:
            continue
        index, start = load32(view + 8), load32(view + 12)
        if size < 0 or not 0 <= index < count or start < 0 or start + size > uses[index].size:
            return False
        use = &uses[index]
        use.used += size
        use.low = min(use.low, start)
        use.high = max(use.high, start + size)
    return True


cdef int write(
    const Py_buffer *seen,
    const Py_buffer *bits,
    int64_t offset,
    int64_t length,
    const Use *uses,
    Py_buffer *target,
    Py_buffer *room,
) noexcept nogil:
    """Writes the views that ``look`` has found good; 1: there is no room."""
    cdef const uint8_t *view
    cdef uint8_t *out = <uint8_t *> target.buf
    cdef int64_t place, size, start, filled = 0
    cdef int32_t index, moved
    cdef const Use *use
    for place in range(offset, offset + length):
        if is_null(bits, place):
            memset(out, 0, VIEW)
            out += VIEW
            continue
        view = <const uint8_t *> seen.buf + VIEW * place
        memcpy(out, view, VIEW)
        size = load32(view)
        if size > SHORT:
            use = &uses[load32(view + 8)]
            start = load32(view + 12)
            if use.index >= 0:
                index, start = use.index, start - use.shift
                if start < 0:
                    return 1
            else:
                if size > room.len - filled:
                    return 1
                memcpy(<uint8_t *> room.buf + filled, use.data + start, <size_t> size)
                index, start = <int32_t> use.shift, filled
                filled += size
            moved = <int32_t> start
            memcpy(out + 8, &index, 4)
            memcpy(out + 12, &moved, 4)
        out += VIEW
    return 0
