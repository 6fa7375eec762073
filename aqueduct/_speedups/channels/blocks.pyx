"""The blocks of known length inside frames, parsed when whole.

The errors say what is wrong inside the block; the decoder adds where the frame stands. A block
may lie in memory that somebody else can write to, so each length is checked where it is used.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.base.varint cimport (
    VARINT_MAX,
    VARINT_MORE,
    raise_varint,
    to_uint64,
    varint_load,
    varint_store,
)

from aqueduct.errors import FrameError, LimitExceeded, SequenceError

__all__ = []


cdef tuple header_pairs(const uint8_t *pos, const uint8_t *end):
    """Header data as (key, value) pairs (AQ-5); keys are ASCII and not empty (AQ-R3)."""
    cdef list pairs = []
    cdef const uint8_t *key
    cdef Py_ssize_t size, index
    cdef bytes name
    while pos < end:
        size = inner_length(&pos, end)
        if size == 0:
            raise FrameError("a header has an empty key (AQ-R3)")
        key = pos
        pos += size
        name = PyBytes_FromStringAndSize(<const char *> key, size)
        for index in range(size):
            if key[index] >= 0x80:
                raise FrameError(f"the header key {name[:64]!r} is not ASCII (AQ-R3)")
        if pos == end:
            raise FrameError(f"the header {name[:64]!r} has no value (AQ-5)")
        size = inner_length(&pos, end)
        pairs.append((name, PyBytes_FromStringAndSize(<const char *> pos, size)))
        pos += size
    return tuple(pairs)


cdef bytes header_block(const uint8_t *block, Py_ssize_t size):
    cdef bytes kept = block[:size]
    block = <const uint8_t *> PyBytes_AS_STRING(kept)
    if not are_headers(block, block + size):
        header_pairs(block, block + size)  # says what is wrong
    return kept


cdef bint are_headers(const uint8_t *pos, const uint8_t *end) noexcept:
    # It looks at bytes alone: nothing can raise.
    cdef const uint8_t *next
    cdef uint64_t length = 0
    cdef bint is_key = False
    cdef int size
    while pos < end:
        is_key = not is_key
        size = varint_load(pos, end, &length)
        if size <= 0 or length > <uint64_t> (end - pos - size) or (is_key and length == 0):
            return False
        pos += size
        next = pos + length
        while is_key and pos < next:
            if pos[0] >= 0x80:
                return False
            pos += 1
        pos = next
    return not is_key


cdef tuple attached_channels(
    const uint8_t *pos,
    const uint8_t *end,
    bint from_server,
    uint64_t header_limit,
    uint64_t attachment_limit,
):
    """ATTACHMENTS as (channel, headers) pairs (AQ-16, AQ-R4)."""
    cdef list attached = []
    cdef set seen = set()
    cdef uint64_t channel = 0
    cdef Py_ssize_t size
    while pos < end:
        size = attached_head(&pos, end, &channel, seen, from_server, header_limit, attachment_limit)
        attached.append((channel, header_pairs(pos, pos + size)))
        pos += size
    return tuple(attached)


cdef int check_attachments(
    const uint8_t *pos,
    const uint8_t *end,
    bint from_server,
    uint64_t header_limit,
    uint64_t attachment_limit,
) except -1:
    cdef set seen = set()
    cdef uint64_t channel = 0
    cdef Py_ssize_t size
    while pos < end:
        size = attached_head(&pos, end, &channel, seen, from_server, header_limit, attachment_limit)
        if not are_headers(pos, pos + size):
            header_pairs(pos, pos + size)  # says what is wrong
        pos += size
    return 0


cdef Py_ssize_t attached_head(
    const uint8_t **pos,
    const uint8_t *end,
    uint64_t *channel,
    set seen,
    bint from_server,
    uint64_t header_limit,
    uint64_t attachment_limit,
) except -1:
    """Reads one attachment up to its headers, whose size is returned."""
    cdef Py_ssize_t size
    if <uint64_t> len(seen) == attachment_limit:
        raise LimitExceeded(
            f"a message with more than {attachment_limit} attachments (Limits.attachments)"
        )
    inner_varint(pos, end, channel)
    if channel[0] == 0:
        raise SequenceError("the entrypoint is attached (AQ-R4)")
    if (channel[0] & CREATOR != 0) != from_server:
        raise SequenceError(
            f"channel {channel[0]} is attached by the side that did not create it"
        )
    if channel[0] in seen:
        raise SequenceError(f"channel {channel[0]} is attached twice (AQ-R4)")
    seen.add(channel[0])
    size = inner_length(pos, end)
    if <uint64_t> size > header_limit:
        raise LimitExceeded(
            f"{size} bytes of headers of attached channel {channel[0]}, "
            f"{header_limit} are allowed (Limits.header_bytes)"
        )
    return size


cdef int check_ranges(const uint8_t *pos, const uint8_t *end, bint paired) except -1:
    """The varints of ACK_RELIABLE (``paired``, AQ-20) or ACK_NACK_UNRELIABLE (AQ-21)."""
    cdef uint64_t length = 0, total = 0
    cdef Py_ssize_t count = 0
    while pos < end:
        inner_varint(&pos, end, &length)
        if length == 0 and count:
            raise FrameError("a varint of its RANGES after the first is zero")
        if length > 0xFFFFFFFFFFFFFFFF - total:
            raise FrameError("its RANGES reach above 2^64 - 1 (AQ-R2)")
        total += length
        count += 1
    if count == 0:
        raise FrameError("its RANGES are empty")
    if paired and count % 2:
        raise FrameError(f"its RANGES have {count} varints, an odd number (AQ-20)")
    if total == 0:
        raise FrameError("its RANGES name no message")
    return 0


cdef tuple headers_of(bytes block):
    cdef const uint8_t *pos = <const uint8_t *> PyBytes_AS_STRING(block)
    return header_pairs(pos, pos + PyBytes_GET_SIZE(block))


cdef tuple attachments_of(bytes block):
    cdef const uint8_t *pos = <const uint8_t *> PyBytes_AS_STRING(block)
    # All are created by one side, so the first byte says which.
    return attached_channels(
        pos, pos + PyBytes_GET_SIZE(block), pos[0] & CREATOR,
        0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF,
    )


cdef tuple attached_blocks(bytes block):
    cdef const uint8_t *pos = <const uint8_t *> PyBytes_AS_STRING(block)
    cdef const uint8_t *end = pos + PyBytes_GET_SIZE(block)
    cdef list attached = []
    cdef uint64_t channel = 0
    cdef Py_ssize_t size
    while pos < end:
        inner_varint(&pos, end, &channel)
        size = inner_length(&pos, end)
        attached.append((channel, PyBytes_FromStringAndSize(<const char *> pos, size)))
        pos += size
    return tuple(attached)


cdef tuple ranges_of(bytes block):
    cdef const uint8_t *pos = <const uint8_t *> PyBytes_AS_STRING(block)
    cdef const uint8_t *end = pos + PyBytes_GET_SIZE(block)
    cdef list lengths = []
    cdef uint64_t length = 0
    while pos < end:
        inner_varint(&pos, end, &length)
        lengths.append(length)
    return tuple(lengths)


cdef bytes ranges_block(tuple ranges):
    cdef uint8_t[VARINT_MAX] out
    cdef list parts = []
    for length in ranges:
        parts.append(
            PyBytes_FromStringAndSize(<char *> out, varint_store(out, to_uint64(length)) - out)
        )
    return b"".join(parts)


cdef int inner_varint(const uint8_t **pos, const uint8_t *end, uint64_t *value) except -1:
    cdef int size = varint_load(pos[0], end, value)
    if size == VARINT_MORE:
        raise FrameError("a block ends inside a varint")
    if size < 0:
        raise_varint(size)
    pos[0] += size
    return 0


cdef Py_ssize_t inner_length(const uint8_t **pos, const uint8_t *end) except -1:
    """The length of varbytes that must lie inside the block."""
    cdef uint64_t length = 0
    inner_varint(pos, end, &length)
    if length > <uint64_t> (end - pos[0]):
        raise FrameError(f"{length} bytes are declared inside a block that has {end - pos[0]} left")
    return <Py_ssize_t> length
