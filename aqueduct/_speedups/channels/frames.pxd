"""The frames of Aqueduct as values: the decoder makes them, the protocol's core reads them."""

from libc.stdint cimport uint8_t, uint64_t

# The tag is the first byte on the wire; MESSAGE_HEAD is not a wire frame.
cdef enum:
    ACK_VERSION_TAG = 1
    CONNECTION_HEADERS_TAG = 2
    ROUTE_TO_TAG = 3
    MESSAGE_TAG = 4
    SENT_UNRELIABLE_TAG = 5
    FINISH_SENDER_TAG = 6
    CANCEL_SENDER_TAG = 7
    ACK_RELIABLE_TAG = 8
    ACK_NACK_UNRELIABLE_TAG = 9
    CLOSE_RECEIVER_TAG = 10
    FORGET_CHANNEL_TAG = 11
    MESSAGE_HEAD_TAG = 12
    VERSION_TAG = 239

cdef enum:
    # Bits of a channel id (AQ-6).
    CREATOR_BIT = 1
    SENDER_BIT = 2
    ONESHOT_BIT = 4

cdef class FrameValue:
    pass

cdef class Version(FrameValue):
    cdef readonly str version

cdef class AckVersion(FrameValue):
    pass

cdef class ConnectionHeaders(FrameValue):
    cdef readonly tuple headers

cdef class RouteTo(FrameValue):
    cdef readonly uint64_t channel

cdef class MessageFrame:
    cdef readonly uint64_t num
    cdef object raw_headers          # the tuple, or the bytes until they are asked for
    cdef object raw_attachments
    cdef readonly object payload
    cdef readonly Py_ssize_t size
    cdef readonly Py_ssize_t overhead

cdef class SentUnreliable(FrameValue):
    cdef readonly uint64_t count

cdef class FinishSender(FrameValue):
    cdef readonly uint64_t sent_reliable

cdef class CancelSender(FrameValue):
    pass

cdef class AckReliable(FrameValue):
    cdef readonly bytes block

cdef class AckNackUnreliable(FrameValue):
    cdef readonly uint64_t channel
    cdef readonly bytes block

cdef class CloseReceiver(FrameValue):
    pass

cdef class ForgetChannel(FrameValue):
    pass

cdef class MessageHead(FrameValue):
    cdef readonly uint64_t num
    cdef object raw_headers
    cdef object raw_attachments
    cdef readonly uint64_t size
    cdef readonly Py_ssize_t overhead

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
# How many varints, and their sum: FrameError for a zero that is not the first, or above 2^64 - 1.
cdef Py_ssize_t sum_ranges(const uint8_t *pos, const uint8_t *end, uint64_t *total) except -1
# Reads a varint that must lie inside the block.
cdef int inner_varint(const uint8_t **pos, const uint8_t *end, uint64_t *value) except -1

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
