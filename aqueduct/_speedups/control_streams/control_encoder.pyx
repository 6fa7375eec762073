"""Frames of the control-stream draft to bytes (AQ0-4 to AQ0-17).

Where Arrow calls go over the draft, the payload of each message begins with a *header block*: the
headers that messages of Aqueduct have, and zeros up to the next multiple of 64 (AC-95).

Bad arguments are a LocalProtocolError, of a wrong type a TypeError.
"""

from cpython.buffer cimport PyObject_CheckBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy, memset

from aqueduct._speedups.base.varint cimport VARINT_MAX, to_number, varint_size, varint_store
from aqueduct._speedups.channels.encoder cimport (
    headers_size,
    headers_store,
    message_buffers,
    normal_headers,
    ranged,
    tagged,
)

from aqueduct.errors import LocalProtocolError

__all__ = [
    "encode_channel_control",
    "encode_closed_channel_lost",
    "encode_connection_control",
    "encode_control_ack_nacks",
    "encode_control_acks",
    "encode_control_close",
    "encode_control_finish",
    "encode_control_message",
    "encode_control_sent_unreliable",
]

cdef enum:
    # The tag, number 0, no headers and no attachments of a MESSAGE of the other revision.
    PLAIN_HEAD = 4

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF

# Those with ranges.
cdef dict NAMES = {
    CONTROL_ACKS: "AckReliable",
    CONTROL_ACK_NACKS: "AckNackUnreliable",
    CONTROL_CLOSE: "CloseReceiver",
}


def encode_connection_control(headers):
    """A ConnectionControl (AQ0-11) with (key, value) pairs of bytes."""
    cdef tuple pairs = normal_headers(headers)
    cdef Py_ssize_t size = headers_size(pairs)
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, 1 + varint_size(<uint64_t> size) + size)
    cdef uint8_t *out = <uint8_t *> PyBytes_AS_STRING(frame)
    out[0] = CONNECTION_CONTROL
    headers_store(out + 1, pairs, size)
    return frame


def encode_channel_control(channel):
    """A ChannelControl (AQ0-12)."""
    return tagged(CHANNEL_CONTROL, channel, HIGHEST, "the channel")


def encode_control_message(channel, number, payload=b"", attachments=(), headers=None):
    """A Message (AQ0-13) as a list of buffers; ``attachments`` are channels.

    ``headers``: (key, value) pairs for a header block in front of the payload; None: it has none.

    ``payload`` is a buffer or a sequence of buffers. Those below COALESCE bytes are copied next
    to the head and to each other; the others are passed on as they are, or, unless they are bytes,
    a bytearray, a memoryview of bytes or a BufferSlice, as a memoryview of the same memory.
    """
    cdef uint8_t[1 + 3 * VARINT_MAX] out
    cdef uint8_t *end
    cdef uint64_t value = 0
    cdef bytes first, attached = b""
    cdef list buffers
    cdef Py_ssize_t head, block, rest, size = 0
    out[0] = CONTROL_MESSAGE
    to_number(channel, HIGHEST, "the channel", &value)
    end = varint_store(out + 1, value)
    # The highest number stays free, so that a count of all messages fits 64 bits (AQ-R13).
    to_number(number, HIGHEST - 1, "the message number", &value)
    end = varint_store(end, value)
    if attachments:
        attached = attachments_block(attachments)
    block = PyBytes_GET_SIZE(attached)
    end = varint_store(end, <uint64_t> block)
    if headers is not None:
        first = header_block_of(headers)
        payload = [first, payload] if PyObject_CheckBuffer(payload) else [first, *payload]
    # A MESSAGE of the other revision is the same from the length of the payload on.
    buffers = message_buffers(0, payload, (), (), &size)
    first = buffers[0]
    head = end - out
    rest = PyBytes_GET_SIZE(first) - PLAIN_HEAD
    buffers[0] = PyBytes_FromStringAndSize(NULL, head + block + rest)
    end = <uint8_t *> PyBytes_AS_STRING(buffers[0])
    memcpy(end, out, <size_t> head)
    memcpy(end + head, PyBytes_AS_STRING(attached), <size_t> block)
    memcpy(end + head + block, PyBytes_AS_STRING(first) + PLAIN_HEAD, <size_t> rest)
    return buffers


cdef bytes header_block_of(object headers):
    """Header data, and zeros up to the next multiple of 64 (AC-95)."""
    cdef tuple pairs = normal_headers(headers)
    cdef Py_ssize_t size = headers_size(pairs)
    cdef Py_ssize_t used = varint_size(<uint64_t> size) + size
    cdef Py_ssize_t whole = aligned(used)
    cdef bytes block = PyBytes_FromStringAndSize(NULL, whole)
    cdef uint8_t *end = headers_store(<uint8_t *> PyBytes_AS_STRING(block), pairs, size)
    memset(end, 0, <size_t> (whole - used))
    return block


def encode_control_sent_unreliable(count):
    """A SentUnreliable (AQ0-14); zero is never sent (AQ0-R12)."""
    if count == 0:
        raise LocalProtocolError("SentUnreliable with count 0 is never sent (AQ0-R12)")
    return tagged(CONTROL_SENT_UNRELIABLE, count, HIGHEST, "the count")


def encode_control_finish(sent_reliable):
    """A FinishSender (AQ0-14)."""
    return tagged(CONTROL_FINISH, sent_reliable, HIGHEST, "the count of messages")


def encode_control_acks(ranges):
    """An AckReliable (AQ0-15): acked, not acked, acked, ...; only the first may be zero."""
    return told(CONTROL_ACKS, tuple(ranges))


def encode_control_ack_nacks(ranges):
    """An AckNackUnreliable (AQ0-15): acked, nacked, acked, ...; only the first may be zero."""
    return told(CONTROL_ACK_NACKS, tuple(ranges))


def encode_control_close(ranges):
    """A CloseReceiver (AQ0-16) with ranges from 0 on: acked, nacked, ...; they may be empty."""
    return pos_neg(CONTROL_CLOSE, tuple(ranges))


def encode_closed_channel_lost(channel):
    """A ClosedChannelLost (AQ0-17)."""
    return tagged(CLOSED_CHANNEL_LOST, channel, HIGHEST, "the channel")


cdef bytes told(int tag, tuple ranges):
    if not ranges:
        raise LocalProtocolError(f"{NAMES[tag]} without ranges is never sent (AQ0-R12)")
    return pos_neg(tag, ranges)


cdef bytes pos_neg(int tag, tuple ranges):
    """A type and ranges by AQ0-6."""
    if len(ranges) == 1 and ranges[0] == 0:
        raise LocalProtocolError(
            f"the ranges of {NAMES[tag]} are a single zero; leave it out (AQ0-6)"
        )
    return ranged(bytes([tag]), ranges)


cdef bytes attachments_block(object attachments):
    """Channels back to back, checked for what a frame can know."""
    cdef uint8_t[VARINT_MAX] out
    cdef uint64_t channel = 0, creator = 0
    cdef list parts = []
    cdef set seen = set()
    for given in attachments:
        to_number(given, HIGHEST, "an attached channel", &channel)
        if channel == 0:
            raise LocalProtocolError("the entrypoint cannot be attached (AQ0-7)")
        if channel in seen:
            raise LocalProtocolError(f"channel {channel} is attached twice (AQ0-24)")
        if parts and channel & CONTROL_CREATOR_BIT != creator:
            raise LocalProtocolError(
                "the attached channels have different creators; one is the peer's (AQ0-24)"
            )
        creator = channel & CONTROL_CREATOR_BIT
        seen.add(channel)
        parts.append(PyBytes_FromStringAndSize(<char *> out, varint_store(out, channel) - out))
    return b"".join(parts)
