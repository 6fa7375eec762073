"""The blocks of known length inside frames, parsed when whole."""

from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    # Bits of a channel id (AQ-6).
    CREATOR = 1
    SENDER = 2
    ONESHOT = 4

cdef tuple header_pairs(const uint8_t *pos, const uint8_t *end)
cdef tuple attached_channels(
    const uint8_t *pos,
    const uint8_t *end,
    bint from_server,
    uint64_t header_limit,
    uint64_t attachment_limit,
)
# What ``attached_channels`` would raise, without an object for each header.
cdef int check_attachments(
    const uint8_t *pos,
    const uint8_t *end,
    bint from_server,
    uint64_t header_limit,
    uint64_t attachment_limit,
) except -1
# RANGES: a check of the bytes as they came, which makes no numbers of Python.
cdef int check_ranges(const uint8_t *pos, const uint8_t *end, bint paired) except -1

# The bytes of header data; raises what ``header_pairs`` would.
cdef bytes header_block(const uint8_t *block, Py_ssize_t size)

# The same from the bytes of a block that was checked before.
cdef tuple headers_of(bytes block)
cdef tuple attachments_of(bytes block)
# As ``attachments_of``, but the headers of each channel are bytes still.
cdef tuple attached_blocks(bytes block)
cdef tuple ranges_of(bytes block)
# The bytes of such a block.
cdef bytes ranges_block(tuple ranges)
