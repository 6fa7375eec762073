"""The frames of Aqueduct (AQ-12 to AQ-23) as immutable values.

``TAG`` is the first byte of the frame on the wire. ``Headers`` are a tuple of (key, value) pairs
of bytes; a channel is the number of its id (AQ-6). Frames compare by value and are unhashable.
No class here takes part in garbage collection: a frame holds numbers, bytes and the payload only,
and a million queued messages should not be walked by the collector.
"""

cimport cython
from libc.stdint cimport uint64_t

from aqueduct._speedups.channels.blocks cimport (
    attached_blocks,
    attachments_of,
    headers_of,
    ranges_block,
    ranges_of,
)

__all__ = [
    "FRAME_NAMES",
    "AckNackUnreliable",
    "AckReliable",
    "AckVersion",
    "CancelSender",
    "CloseReceiver",
    "ConnectionHeaders",
    "FinishSender",
    "ForgetChannel",
    "MessageFrame",
    "MessageHead",
    "RouteTo",
    "SentUnreliable",
    "Version",
    "decode_headers",
]

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


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class Version:
    """The protocol's version; ``version`` is its text (AQ-12)."""

    TAG = VERSION_TAG

    def __init__(self, str version not None):
        self.version = version

    def __eq__(self, other):
        return type(other) is Version and self.version == (<Version> other).version

    __hash__ = None

    def __repr__(self):
        return f"Version(version={self.version!r})"


@cython.final
@cython.auto_pickle(False)
cdef class AckVersion:
    """The peer has seen a VERSION (AQ-13)."""

    TAG = ACK_VERSION_TAG

    def __eq__(self, other):
        return type(other) is AckVersion

    __hash__ = None

    def __repr__(self):
        return "AckVersion()"


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class ConnectionHeaders:
    """The headers of the connection (AQ-14)."""

    TAG = CONNECTION_HEADERS_TAG

    def __init__(self, tuple headers not None):
        self.headers = headers

    def __eq__(self, other):
        return (
            type(other) is ConnectionHeaders
            and self.headers == (<ConnectionHeaders> other).headers
        )

    __hash__ = None

    def __repr__(self):
        return f"ConnectionHeaders(headers={self.headers!r})"


@cython.final
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class RouteTo:
    """The channel that the rest of the sequence is about (AQ-15)."""

    TAG = ROUTE_TO_TAG

    def __init__(self, uint64_t channel):
        self.channel = channel

    def __eq__(self, other):
        return type(other) is RouteTo and self.channel == (<RouteTo> other).channel

    __hash__ = None

    def __repr__(self):
        return f"RouteTo(channel={self.channel})"


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
        self._headers = headers
        self._attachments = attachments
        self.payload = payload
        self.size = memoryview(payload).nbytes

    @property
    def headers(self):
        """(key, value) pairs of bytes."""
        if type(self._headers) is bytes:
            self._headers = headers_of(self._headers)
        return self._headers

    @property
    def attachments(self):
        """(channel, headers) pairs."""
        if type(self._attachments) is bytes:
            self._attachments = attachments_of(self._attachments)
        return self._attachments

    @property
    def attached(self):
        """As ``attachments``, but the headers of a channel may be bytes still."""
        if type(self._attachments) is bytes:
            return attached_blocks(self._attachments)
        return self._attachments

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
cdef class MessageHead:
    """A MESSAGE whose payload of ``size`` bytes waits for ``Decoder.admit``; else as
    MessageFrame.
    """

    TAG = MESSAGE_HEAD_TAG

    def __init__(
        self, uint64_t num, tuple headers not None, tuple attachments not None, uint64_t size
    ):
        self.num = num
        self._headers = headers
        self._attachments = attachments
        self.size = size

    @property
    def headers(self):
        """(key, value) pairs of bytes."""
        if type(self._headers) is bytes:
            self._headers = headers_of(self._headers)
        return self._headers

    @property
    def attachments(self):
        """(channel, headers) pairs."""
        if type(self._attachments) is bytes:
            self._attachments = attachments_of(self._attachments)
        return self._attachments

    def __eq__(self, other):
        cdef MessageHead head
        if type(other) is not MessageHead:
            return False
        head = <MessageHead> other
        return (
            self.num == head.num
            and self.headers == head.headers
            and self.attachments == head.attachments
            and self.size == head.size
        )

    __hash__ = None

    def __repr__(self):
        return (
            f"MessageHead(num={self.num}, headers={self.headers!r}, "
            f"attachments={self.attachments!r}, size={self.size})"
        )


@cython.final
@cython.auto_pickle(False)
cdef class SentUnreliable:
    """``count`` more messages were sent in datagrams (AQ-17)."""

    TAG = SENT_UNRELIABLE_TAG

    def __init__(self, uint64_t count):
        self.count = count

    def __eq__(self, other):
        return type(other) is SentUnreliable and self.count == (<SentUnreliable> other).count

    __hash__ = None

    def __repr__(self):
        return f"SentUnreliable(count={self.count})"


@cython.final
@cython.auto_pickle(False)
cdef class FinishSender:
    """The sender finished after ``sent_reliable`` messages on streams (AQ-18)."""

    TAG = FINISH_SENDER_TAG

    def __init__(self, uint64_t sent_reliable):
        self.sent_reliable = sent_reliable

    def __eq__(self, other):
        return (
            type(other) is FinishSender
            and self.sent_reliable == (<FinishSender> other).sent_reliable
        )

    __hash__ = None

    def __repr__(self):
        return f"FinishSender(sent_reliable={self.sent_reliable})"


@cython.final
@cython.auto_pickle(False)
cdef class CancelSender:
    """The sender was cancelled (AQ-19)."""

    TAG = CANCEL_SENDER_TAG

    def __eq__(self, other):
        return type(other) is CancelSender

    __hash__ = None

    def __repr__(self):
        return "CancelSender()"


@cython.final
@cython.no_gc
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class AckReliable:
    """Received numbers of messages on streams: gap, range, gap, range, ... (AQ-20).

    ``block`` has them as they are on the wire: as numbers they take many times that.
    """

    TAG = ACK_RELIABLE_TAG

    def __init__(self, tuple ranges not None):
        self.block = ranges_block(ranges)

    @property
    def ranges(self):
        """The numbers of ``block``."""
        return ranges_of(self.block)

    def __eq__(self, other):
        return type(other) is AckReliable and self.block == (<AckReliable> other).block

    __hash__ = None

    def __repr__(self):
        return f"AckReliable(ranges={self.ranges!r})"


@cython.final
@cython.no_gc
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class AckNackUnreliable:
    """Numbers of messages in datagrams: acked, nacked, acked, ... (AQ-21).

    ``block`` as in AckReliable.
    """

    TAG = ACK_NACK_UNRELIABLE_TAG

    def __init__(self, uint64_t channel, tuple ranges not None):
        self.channel = channel
        self.block = ranges_block(ranges)

    @property
    def ranges(self):
        """The numbers of ``block``."""
        return ranges_of(self.block)

    def __eq__(self, other):
        return (
            type(other) is AckNackUnreliable
            and self.channel == (<AckNackUnreliable> other).channel
            and self.block == (<AckNackUnreliable> other).block
        )

    __hash__ = None

    def __repr__(self):
        return f"AckNackUnreliable(channel={self.channel}, ranges={self.ranges!r})"


@cython.final
@cython.auto_pickle(False)
cdef class CloseReceiver:
    """The receiver was closed (AQ-22)."""

    TAG = CLOSE_RECEIVER_TAG

    def __eq__(self, other):
        return type(other) is CloseReceiver

    __hash__ = None

    def __repr__(self):
        return "CloseReceiver()"


@cython.final
@cython.auto_pickle(False)
cdef class ForgetChannel:
    """The creator of the channel has no state for it, or lost it (AQ-23)."""

    TAG = FORGET_CHANNEL_TAG

    def __eq__(self, other):
        return type(other) is ForgetChannel

    __hash__ = None

    def __repr__(self):
        return "ForgetChannel()"
