"""The frames of Aqueduct (AQ-12 to AQ-23) as immutable values.

``TAG`` is the first byte of the frame on the wire. ``Headers`` are a tuple of (key, value) pairs
of bytes; a channel is the number of its id (AQ-6). Frames compare by value and are unhashable.
No class here takes part in garbage collection: a frame holds numbers, bytes and the payload only,
and a million queued messages should not be walked by the collector.
"""

cimport cython
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

__all__ = [
    "CREATOR",
    "FRAME_NAMES",
    "ONESHOT",
    "AckNackUnreliable",
    "AckReliable",
    "AckVersion",
    "CancelSender",
    "CloseReceiver",
    "ConnectionHeaders",
    "FinishSender",
    "ForgetChannel",
    "Frame",
    "MessageFrame",
    "MessageHead",
    "RouteTo",
    "SentUnreliable",
    "Version",
    "decode_headers",
]

# Bits of a channel's id (AQ-6) that are looked at for every message.
CREATOR = CREATOR_BIT
ONESHOT = ONESHOT_BIT

FRAME_NAMES = {
    VERSION_TAG: "VERSION",
    ACK_VERSION_TAG: "ACK_VERSION",
    CONNECTION_HEADERS_TAG: "CONNECTION_HEADERS",
    ROUTE_TO_TAG: "ROUTE_TO",
    MESSAGE_TAG: "MESSAGE",
    SENT_UNRELIABLE_TAG: "SENT_UNRELIABLE",
    FINISH_SENDER_TAG: "FINISH_SENDER",
    CANCEL_SENDER_TAG: "CANCEL_SENDER",
    ACK_RELIABLE_TAG: "ACK_RELIABLE",
    ACK_NACK_UNRELIABLE_TAG: "ACK_NACK_UNRELIABLE",
    CLOSE_RECEIVER_TAG: "CLOSE_RECEIVER",
    FORGET_CHANNEL_TAG: "FORGET_CHANNEL",
}


def decode_headers(headers not None):
    """The (key, value) pairs of headers that are bytes still; pairs are returned as they are."""
    return headers_of(headers) if type(headers) is bytes else headers


@cython.auto_pickle(False)
cdef class FrameValue:
    """What frames have in common: two are equal if their ``_FIELDS`` are."""

    _FIELDS = ()

    def __eq__(self, other):
        if type(other) is not type(self):
            return False
        return all([getattr(self, name) == getattr(other, name) for name in self._FIELDS])

    __hash__ = None

    def __repr__(self):
        fields = ", ".join([f"{name}={getattr(self, name)!r}" for name in self._FIELDS])
        return f"{type(self).__name__}({fields})"


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class Version(FrameValue):
    """The protocol's version; ``version`` is its text (AQ-12)."""

    TAG = VERSION_TAG
    _FIELDS = ("version",)

    def __init__(self, str version not None):
        self.version = version


@cython.final
@cython.auto_pickle(False)
cdef class AckVersion(FrameValue):
    """The peer has seen a VERSION (AQ-13)."""

    TAG = ACK_VERSION_TAG


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class ConnectionHeaders(FrameValue):
    """The headers of the connection (AQ-14)."""

    TAG = CONNECTION_HEADERS_TAG
    _FIELDS = ("headers",)

    def __init__(self, tuple headers not None):
        self.headers = headers


@cython.final
@cython.auto_pickle(False)
cdef class RouteTo(FrameValue):
    """The channel that the rest of the sequence is about (AQ-15)."""

    TAG = ROUTE_TO_TAG
    _FIELDS = ("channel",)

    def __init__(self, uint64_t channel):
        self.channel = channel


@cython.final
@cython.no_gc
@cython.freelist(1024)
@cython.auto_pickle(False)
cdef class MessageFrame:
    """One message (AQ-16). ``payload`` is bytes, an AlignedBuffer or the buffer of ``admit``;
    ``size`` is its length, ``overhead`` that of headers and attachments on the wire (0 if the
    message did not come from there), in bytes.

    Headers, and large blocks of attachments, stay bytes until they are asked for: as tuples they
    take many times that, in time too.
    """

    TAG = MESSAGE_TAG

    def __init__(
        self, uint64_t num, tuple headers not None, tuple attachments not None, payload not None
    ):
        self.num = num
        self.raw_headers = headers
        self.raw_attachments = attachments
        self.payload = payload
        self.size = memoryview(payload).nbytes

    @property
    def headers(self):
        """(key, value) pairs of bytes."""
        if type(self.raw_headers) is bytes:
            self.raw_headers = headers_of(self.raw_headers)
        return self.raw_headers

    @property
    def attachments(self):
        """(channel, headers) pairs."""
        if type(self.raw_attachments) is bytes:
            self.raw_attachments = attachments_of(self.raw_attachments)
        return self.raw_attachments

    @property
    def attached(self):
        """As ``attachments``, but the headers of a channel may be bytes still."""
        if type(self.raw_attachments) is bytes:
            return attached_blocks(self.raw_attachments)
        return self.raw_attachments

    def __eq__(self, other):
        cdef MessageFrame message
        if type(other) is not MessageFrame:
            return False
        message = <MessageFrame> other
        return (
            self.num == message.num
            and self.headers == message.headers
            and self.attachments == message.attachments
            and memoryview(self.payload).cast("B") == memoryview(message.payload).cast("B")
        )

    __hash__ = None

    def __repr__(self):
        payload = repr(bytes(self.payload)) if self.size <= 32 else f"<{self.size} bytes>"
        return (
            f"Message(num={self.num}, headers={self.headers!r}, "
            f"attachments={self.attachments!r}, payload={payload})"
        )


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class MessageHead(FrameValue):
    """A MESSAGE whose payload of ``size`` bytes waits for ``Decoder.admit``; else as
    MessageFrame.
    """

    TAG = MESSAGE_HEAD_TAG
    _FIELDS = ("num", "headers", "attachments", "size")

    def __init__(
        self, uint64_t num, tuple headers not None, tuple attachments not None, uint64_t size
    ):
        self.num = num
        self.raw_headers = headers
        self.raw_attachments = attachments
        self.size = size

    @property
    def headers(self):
        """(key, value) pairs of bytes."""
        if type(self.raw_headers) is bytes:
            self.raw_headers = headers_of(self.raw_headers)
        return self.raw_headers

    @property
    def attachments(self):
        """(channel, headers) pairs."""
        if type(self.raw_attachments) is bytes:
            self.raw_attachments = attachments_of(self.raw_attachments)
        return self.raw_attachments


@cython.final
@cython.auto_pickle(False)
cdef class SentUnreliable(FrameValue):
    """``count`` more messages were sent in datagrams (AQ-17)."""

    TAG = SENT_UNRELIABLE_TAG
    _FIELDS = ("count",)

    def __init__(self, uint64_t count):
        self.count = count


@cython.final
@cython.auto_pickle(False)
cdef class FinishSender(FrameValue):
    """The sender finished after ``sent_reliable`` messages on streams (AQ-18)."""

    TAG = FINISH_SENDER_TAG
    _FIELDS = ("sent_reliable",)

    def __init__(self, uint64_t sent_reliable):
        self.sent_reliable = sent_reliable


@cython.final
@cython.auto_pickle(False)
cdef class CancelSender(FrameValue):
    """The sender was cancelled (AQ-19)."""

    TAG = CANCEL_SENDER_TAG


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class AckReliable(FrameValue):
    """Received numbers of messages on streams: gap, range, gap, range, ... (AQ-20).

    ``block`` has them as they are on the wire: as numbers they take many times that.
    """

    TAG = ACK_RELIABLE_TAG
    _FIELDS = ("ranges",)

    def __init__(self, tuple ranges not None):
        self.block = ranges_block(ranges)

    @property
    def ranges(self):
        """The numbers of ``block``."""
        return ranges_of(self.block)


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class AckNackUnreliable(FrameValue):
    """Numbers of messages in datagrams: acked, nacked, acked, ... (AQ-21).

    ``block`` as in AckReliable.
    """

    TAG = ACK_NACK_UNRELIABLE_TAG
    _FIELDS = ("channel", "ranges")

    def __init__(self, uint64_t channel, tuple ranges not None):
        self.channel = channel
        self.block = ranges_block(ranges)

    @property
    def ranges(self):
        """The numbers of ``block``."""
        return ranges_of(self.block)


@cython.final
@cython.auto_pickle(False)
cdef class CloseReceiver(FrameValue):
    """The receiver was closed (AQ-22)."""

    TAG = CLOSE_RECEIVER_TAG


@cython.final
@cython.auto_pickle(False)
cdef class ForgetChannel(FrameValue):
    """The creator of the channel has no state for it, or lost it (AQ-23)."""

    TAG = FORGET_CHANNEL_TAG


Frame = (
    Version
    | AckVersion
    | ConnectionHeaders
    | RouteTo
    | MessageFrame
    | SentUnreliable
    | FinishSender
    | CancelSender
    | AckReliable
    | AckNackUnreliable
    | CloseReceiver
    | ForgetChannel
)
"""What ``FrameDecoder.next`` gives beside MessageHead; told apart by type or by ``TAG``."""


# The blocks of known length inside frames, parsed when whole. The errors say what is wrong inside
# the block; the decoder adds where the frame stands. A block may lie in memory that somebody else
# can write to, so each length is checked where it is used.


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
    if (channel[0] & CREATOR_BIT != 0) != from_server:
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
    cdef uint64_t total = 0
    cdef Py_ssize_t count = add_ranges(pos, end, &total)
    if count == 0:
        raise FrameError("its RANGES are empty")
    if paired and count % 2:
        raise FrameError(f"its RANGES have {count} varints, an odd number (AQ-20)")
    if total == 0:
        raise FrameError("its RANGES name no message")
    return 0


cdef Py_ssize_t sum_ranges(const uint8_t *pos, const uint8_t *end, uint64_t *total) except -1:
    return add_ranges(pos, end, total)


cdef inline Py_ssize_t add_ranges(
    const uint8_t *pos, const uint8_t *end, uint64_t *total
) except -1:
    cdef uint64_t length = 0, reached = 0
    cdef Py_ssize_t count = 0
    while pos < end:
        inner_varint(&pos, end, &length)
        if length == 0 and count:
            raise FrameError("a varint of its RANGES after the first is zero")
        if length > 0xFFFFFFFFFFFFFFFF - reached:
            raise FrameError("its RANGES reach above 2^64 - 1 (AQ-R2)")
        reached += length
        count += 1
    total[0] = reached
    return count


cdef tuple headers_of(bytes block):
    cdef const uint8_t *pos = <const uint8_t *> PyBytes_AS_STRING(block)
    return header_pairs(pos, pos + PyBytes_GET_SIZE(block))


cdef tuple attachments_of(bytes block):
    cdef const uint8_t *pos = <const uint8_t *> PyBytes_AS_STRING(block)
    # All are created by one side, so the first byte says which.
    return attached_channels(
        pos, pos + PyBytes_GET_SIZE(block), pos[0] & CREATOR_BIT,
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
