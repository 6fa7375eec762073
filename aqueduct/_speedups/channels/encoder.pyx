"""Frames to bytes. Bad arguments are a LocalProtocolError, of a wrong type a TypeError."""

from cpython.buffer cimport PyObject_CheckBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.memoryview cimport PyMemoryView_Check, PyMemoryView_GET_BUFFER
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from aqueduct._speedups.base.buffers cimport BufferSlice, byte_view
from aqueduct._speedups.base.buffers cimport copy_bytes, memory_of
from aqueduct._speedups.channels.frames cimport (
    ACK_NACK_UNRELIABLE_TAG,
    ACK_RELIABLE_TAG,
    ACK_VERSION_TAG,
    CANCEL_SENDER_TAG,
    CLOSE_RECEIVER_TAG,
    CONNECTION_HEADERS_TAG,
    FINISH_SENDER_TAG,
    FORGET_CHANNEL_TAG,
    MESSAGE_TAG,
    ROUTE_TO_TAG,
    SENT_UNRELIABLE_TAG,
)
from aqueduct._speedups.base.varint cimport VARINT_MAX, to_number, varint_size, varint_store

from aqueduct.errors import LocalProtocolError

__all__ = [
    "ACK_VERSION",
    "CANCEL_SENDER",
    "CLOSE_RECEIVER",
    "COALESCE",
    "FORGET_CHANNEL",
    "VERSION",
    "encode_ack_nack_unreliable",
    "encode_ack_reliable",
    "encode_connection_headers",
    "encode_finish_sender",
    "encode_message",
    "encode_route_to",
    "encode_sent_unreliable",
]

# A buffer of a payload.
cdef struct Span:
    const uint8_t *start
    Py_ssize_t size

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF

COALESCE = COALESCE_BELOW
VERSION = b"\xef\x50\x5f\xa6\x60\x0f\x40\x8e" b"AQUEDUCT" b"\x0b0.0.0-AFTER"
ACK_VERSION = bytes([ACK_VERSION_TAG])
CANCEL_SENDER = bytes([CANCEL_SENDER_TAG])
CLOSE_RECEIVER = bytes([CLOSE_RECEIVER_TAG])
FORGET_CHANNEL = bytes([FORGET_CHANNEL_TAG])


def encode_message(num, payload=b"", headers=(), attachments=()):
    """A MESSAGE (AQ-16) as a list of buffers.

    ``payload`` is a buffer or a sequence of buffers. Those below COALESCE bytes are copied next
    to the head and to each other; the others are passed on as they are, or, unless they are bytes,
    a bytearray, a memoryview of bytes or a BufferSlice, as a memoryview of the same memory.
    ``headers``
    are (key, value) pairs of bytes with ASCII keys, ``attachments`` (channel, headers) pairs.
    """
    cdef uint64_t number = 0
    cdef Py_ssize_t size = 0

    # The highest number stays free, so that a count of all messages fits 64 bits (AQ-R13).
    to_number(num, HIGHEST - 1, "the message number", &number)
    return message_buffers(number, payload, headers, attachments, &size)


cdef list message_buffers(
    uint64_t number, object payload, object headers, object attachments, Py_ssize_t *size
):
    """``encode_message``, and in ``size`` the bytes of it all."""
    cdef Py_ssize_t headers_bytes = 0, attached_bytes = 0, payload_bytes = 0, head_bytes
    cdef Py_ssize_t count, index
    cdef tuple pairs = (), attached = ()
    cdef list parts, views = []
    cdef Span *spans
    cdef object part
    if headers:
        pairs = normal_headers(headers)
        headers_bytes = headers_size(pairs)
    if attachments:
        attached = normal_attachments(attachments)
        attached_bytes = attachments_size(attached)
    parts = [payload] if PyObject_CheckBuffer(payload) else list(payload)
    count = len(parts)
    spans = <Span *> malloc(<size_t> max(count, 1) * sizeof(Span))
    if spans == NULL:
        raise MemoryError()
    try:
        for index in range(count):
            part = parts[index]
            if not PyBytes_CheckExact(part) and type(part) is not BufferSlice:
                part = byte_view(part)
                views.append(part)  # the size of its memory cannot change
            spans[index].start = memory_of(part, &spans[index].size)
            payload_bytes += spans[index].size
        head_bytes = (
            1 + varint_size(number)
            + varint_size(<uint64_t> headers_bytes) + headers_bytes
            + varint_size(<uint64_t> attached_bytes) + attached_bytes
            + varint_size(<uint64_t> payload_bytes)
        )
        size[0] = head_bytes + payload_bytes
        return gather_spans(
            number, pairs, headers_bytes, attached, attached_bytes, head_bytes,
            parts, spans, payload_bytes,
        )
    finally:
        free(spans)


def encode_route_to(channel):
    """A ROUTE_TO (AQ-15)."""
    return tagged(ROUTE_TO_TAG, channel, HIGHEST, "the channel")


def encode_connection_headers(headers):
    """A CONNECTION_HEADERS (AQ-14) with (key, value) pairs of bytes."""
    cdef tuple pairs = normal_headers(headers)
    cdef Py_ssize_t size = headers_size(pairs)
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, 1 + varint_size(<uint64_t> size) + size)
    cdef uint8_t *out = <uint8_t *> PyBytes_AS_STRING(frame)
    out[0] = CONNECTION_HEADERS_TAG
    headers_store(out + 1, pairs, size)
    return frame


def encode_sent_unreliable(count):
    """A SENT_UNRELIABLE (AQ-17); zero is never sent (AQ-R17)."""
    if count == 0:
        raise LocalProtocolError("SENT_UNRELIABLE with count 0 is never sent (AQ-R17)")
    return tagged(SENT_UNRELIABLE_TAG, count, HIGHEST, "the count")


def encode_finish_sender(sent_reliable):
    """A FINISH_SENDER (AQ-18)."""
    return tagged(FINISH_SENDER_TAG, sent_reliable, HIGHEST, "the count of messages")


def encode_ack_reliable(varints):
    """An ACK_RELIABLE (AQ-20): gap, range, gap, range, ...; only the first may be zero."""
    cdef tuple ranges = tuple(varints)
    if not ranges or len(ranges) % 2:
        raise LocalProtocolError(
            f"ACK_RELIABLE takes pairs of gap and range, not {len(ranges)} numbers (AQ-20)"
        )
    return ranged(bytes([ACK_RELIABLE_TAG]), ranges)


def encode_ack_nack_unreliable(channel, varints):
    """An ACK_NACK_UNRELIABLE (AQ-21): ack, nack, ack, ...; only the first may be zero."""
    cdef tuple ranges = tuple(varints)
    if not ranges or (len(ranges) == 1 and ranges[0] == 0):
        raise LocalProtocolError("ACK_NACK_UNRELIABLE has nothing to say (AQ-21)")
    return ranged(tagged(ACK_NACK_UNRELIABLE_TAG, channel, HIGHEST, "the channel"), ranges)


cdef bytes tagged(int tag, object value, uint64_t highest, str what):
    """A tag and one varint."""
    cdef uint8_t[1 + VARINT_MAX] out
    cdef uint64_t number = 0
    to_number(value, highest, what, &number)
    out[0] = <uint8_t> tag
    return PyBytes_FromStringAndSize(<char *> out, varint_store(out + 1, number) - out)


cdef bytes ranged(bytes head, tuple ranges):
    """``head`` and varbytes of ``ranges``, of which only the first may be zero."""
    cdef Py_ssize_t size = 0, start = len(head)
    cdef uint64_t number = 0, total = 0
    cdef uint8_t *out
    cdef bytes frame
    for index, value in enumerate(ranges):
        to_number(value, HIGHEST, "a length of a range", &number)
        if number == 0 and index > 0:
            raise LocalProtocolError(f"range number {index} is zero; only the first may be")
        if number > HIGHEST - total:
            raise LocalProtocolError("the ranges reach above 2^64 - 1 (AQ-R2)")
        total += number
        size += varint_size(number)
    frame = PyBytes_FromStringAndSize(NULL, start + varint_size(<uint64_t> size) + size)
    out = <uint8_t *> PyBytes_AS_STRING(frame)
    memcpy(out, PyBytes_AS_STRING(head), <size_t> start)
    out = varint_store(out + start, <uint64_t> size)
    for value in ranges:
        to_number(value, HIGHEST, "a length of a range", &number)
        out = varint_store(out, number)
    return frame


cdef tuple normal_headers(object headers):
    """``headers`` as a tuple of tuples."""
    cdef tuple pairs = headers if type(headers) is tuple else tuple(headers)
    for pair in pairs:
        if type(pair) is not tuple:
            return tuple([tuple(each) for each in pairs])
    return pairs


cdef Py_ssize_t headers_size(tuple headers) except -1:
    """The bytes of header data without the length in front; checks every pair (AQ-5, AQ-R3)."""
    cdef Py_ssize_t total = 0
    cdef tuple pair
    cdef object key, value
    for pair in headers:
        if len(pair) != 2:
            raise LocalProtocolError(f"a header is {pair!r}; it must be (key, value)")
        key = pair[0]
        value = pair[1]
        if not PyBytes_CheckExact(key) or not PyBytes_CheckExact(value):
            raise TypeError(f"header {key!r}: key and value must be bytes")
        if PyBytes_GET_SIZE(key) == 0 or not is_ascii(key):
            raise LocalProtocolError(f"header key {key!r} must be ASCII and not empty (AQ-R3)")
        total += varint_size(<uint64_t> PyBytes_GET_SIZE(key)) + PyBytes_GET_SIZE(key)
        total += varint_size(<uint64_t> PyBytes_GET_SIZE(value)) + PyBytes_GET_SIZE(value)
    return total


cdef bint is_ascii(bytes text) noexcept:
    """Looks at bytes alone: nothing can raise."""
    cdef const uint8_t *data = <const uint8_t *> PyBytes_AS_STRING(text)
    cdef Py_ssize_t index
    for index in range(PyBytes_GET_SIZE(text)):
        if data[index] >= 0x80:
            return False
    return True


cdef uint8_t *headers_store(uint8_t *out, tuple headers, Py_ssize_t size) noexcept:
    """Writes header data that ``headers_size`` has measured and checked."""
    cdef tuple pair
    out = varint_store(out, <uint64_t> size)
    for pair in headers:
        out = varbytes_store(out, <bytes> pair[0])
        out = varbytes_store(out, <bytes> pair[1])
    return out


cdef inline uint8_t *varbytes_store(uint8_t *out, bytes data) noexcept:
    """Writes a length and its bytes, for which there is room: nothing can raise."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
    out = varint_store(out, <uint64_t> size)
    memcpy(out, PyBytes_AS_STRING(data), <size_t> size)
    return out + size


cdef tuple normal_attachments(object attachments):
    """``attachments`` as a tuple of (channel, headers), checked for what a frame can know."""
    cdef uint64_t channel = 0, creator = 0
    cdef list normal = []
    cdef set seen = set()
    for given, headers in attachments:
        to_number(given, HIGHEST, "an attached channel", &channel)
        if channel == 0:
            raise LocalProtocolError("the entrypoint cannot be attached (AQ-R4)")
        if given in seen:
            raise LocalProtocolError(f"channel {given} is attached twice (AQ-R4)")
        if normal and channel & 1 != creator:
            raise LocalProtocolError(
                "the attached channels have different creators; one is the peer's (AQ-16)"
            )
        creator = channel & 1
        seen.add(given)
        normal.append((channel, normal_headers(headers)))
    return tuple(normal)


cdef Py_ssize_t attachments_size(tuple attachments) except -1:
    cdef Py_ssize_t total = 0, size
    cdef tuple entry
    for entry in attachments:
        size = headers_size(<tuple> entry[1])
        total += varint_size(<uint64_t> entry[0]) + varint_size(<uint64_t> size) + size
    return total


cdef uint8_t *head_store(
    uint8_t *out,
    uint64_t num,
    tuple headers,
    Py_ssize_t headers_bytes,
    tuple attachments,
    Py_ssize_t attached_bytes,
) except NULL:
    """Writes a MESSAGE up to the length of its payload."""
    cdef tuple entry
    out[0] = MESSAGE_TAG
    out = varint_store(out + 1, num)
    out = headers_store(out, headers, headers_bytes)
    out = varint_store(out, <uint64_t> attached_bytes)
    for entry in attachments:
        out = varint_store(out, <uint64_t> entry[0])
        out = headers_store(out, <tuple> entry[1], headers_size(<tuple> entry[1]))
    return out


cdef list gather_spans(
    uint64_t num,
    tuple headers,
    Py_ssize_t headers_bytes,
    tuple attachments,
    Py_ssize_t attached_bytes,
    Py_ssize_t head_bytes,
    list parts,
    const Span *spans,
    Py_ssize_t payload_bytes,
):
    """Runs of short buffers become one bytes object each; the first run begins with the head."""
    cdef list result = []
    cdef bytes run
    cdef uint8_t *out
    cdef Py_ssize_t index = 0, stop, size = head_bytes, each
    while True:
        stop = index
        while stop < len(parts) and spans[stop].size < COALESCE_BELOW:
            size += spans[stop].size
            stop += 1
        if size:
            run = PyBytes_FromStringAndSize(NULL, size)
            out = <uint8_t *> PyBytes_AS_STRING(run)
            if not result:
                out = head_store(
                    out, num, headers, headers_bytes, attachments, attached_bytes
                )
                out = varint_store(out, <uint64_t> payload_bytes)
            for each in range(index, stop):
                copy_bytes(out, spans[each].start, spans[each].size)
                out += spans[each].size
            result.append(run)
        if stop == len(parts):
            return result
        if is_plain(parts[stop]):
            result.append(parts[stop])
        else:
            # Carriers count and slice bytes; the view shows the same memory so.
            result.append(byte_view(parts[stop]))
        index = stop + 1
        size = 0


cdef bint is_plain(object buffer) except -1:
    """Whether length and slices of ``buffer`` count bytes."""
    cdef Py_buffer *view
    if type(buffer) is BufferSlice:
        return True
    if PyMemoryView_Check(buffer):
        view = PyMemoryView_GET_BUFFER(buffer)
        return view.itemsize == 1 and view.ndim == 1
    return isinstance(buffer, (bytes, bytearray))
