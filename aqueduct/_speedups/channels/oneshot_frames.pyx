"""The whole life of a oneshot channel in two sequences: its message, and the answer to that.

Either comes in one piece nearly always, and is then read without a stream being made for it. What
is not this plain is left untouched, for the general way of ``aqueduct.protocol.channels``.
"""

from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.memoryview cimport PyMemoryView_Check, PyMemoryView_GET_BUFFER
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcmp, memcpy

from aqueduct._speedups.channels.decoder cimport AT_TAG, FrameDecoder
from aqueduct._speedups.channels.frames cimport (
    ACK_RELIABLE_TAG,
    CLOSE_RECEIVER_TAG,
    FINISH_SENDER_TAG,
    ROUTE_TO_TAG,
    MessageFrame,
    RouteTo,
)
from aqueduct._speedups.base.varint cimport VARINT_MAX, to_number, varint_load, varint_store

from aqueduct._speedups.base.buffers import size_of
from aqueduct._speedups.channels.encoder import encode_message
from aqueduct.errors import RemoteProtocolError

__all__ = ["drained", "encode_alone", "encode_taken", "is_taken", "message_of", "route_of"]

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF
cdef enum:
    # ACK_RELIABLE of number 0 alone, and CLOSE_RECEIVER.
    TAKEN_SIZE = 5
cdef uint8_t[TAKEN_SIZE] TAKEN = [ACK_RELIABLE_TAG, 2, 0, 1, CLOSE_RECEIVER_TAG]
# FINISH_SENDER that counts one message.
cdef bytes FINISHED = bytes([FINISH_SENDER_TAG, 1])


def route_of(data):
    """The channel of the ROUTE_TO that ``data`` begins with; -1 if it does not begin so."""
    cdef const uint8_t *start = NULL
    cdef const uint8_t *end = NULL
    cdef uint64_t channel = 0
    if not memory_of(data, &start, &end) or start == end or start[0] != ROUTE_TO_TAG:
        return -1
    return channel if varint_load(start + 1, end, &channel) > 0 else -1


def message_of(FrameDecoder decoder not None, data, Py_ssize_t most):
    """The MessageFrame with which the sequence in ``data`` goes on after ROUTE_TO; None if it
    does not.

    ``decoder`` is for nothing else; a payload may have ``most`` bytes. None is what cannot be
    decoded as well: who reads it in the general way finds out why.
    """
    cdef object found = None
    rewind(decoder)
    decoder.auto_admit = most
    try:
        decoder.push(data)
        if type(decoder._parse()) is RouteTo:
            found = decoder._parse()
    except RemoteProtocolError:
        found = None
    rewind(decoder)
    return found if type(found) is MessageFrame else None


def is_taken(data):
    """Whether ROUTE_TO is followed by the end of a oneshot channel whose message was taken.

    That is by ACK_RELIABLE of its one message, CLOSE_RECEIVER, and nothing else (AQ-R22).
    """
    cdef const uint8_t *start = NULL
    cdef const uint8_t *end = NULL
    if not memory_of(data, &start, &end) or end - start < TAKEN_SIZE + 2:
        return False
    start += 1
    while start[0] & 0x80 and start < end - TAKEN_SIZE:
        start += 1
    return end - start == TAKEN_SIZE + 1 and memcmp(start + 1, TAKEN, TAKEN_SIZE) == 0


def encode_alone(channel, payload, headers, attachments):
    """The whole sequence of a oneshot channel (AQ-R28): (its buffers, the bytes of its MESSAGE)."""
    cdef uint8_t[1 + VARINT_MAX] out
    cdef uint8_t *end = route_store(out, channel)
    cdef list buffers = encode_message(0, payload, headers, attachments)
    cdef object size = size_of(buffers)
    buffers.insert(0, PyBytes_FromStringAndSize(<char *> out, end - out))
    buffers.append(FINISHED)
    return buffers, size


def encode_taken(channel):
    """The sequence that ``is_taken``."""
    cdef uint8_t[1 + VARINT_MAX + TAKEN_SIZE] out
    cdef uint8_t *end = route_store(out, channel)
    memcpy(end, TAKEN, TAKEN_SIZE)
    return PyBytes_FromStringAndSize(<char *> out, end - out + TAKEN_SIZE)


def drained(FrameDecoder decoder not None):
    """Whether all that was fed is consumed and ends with a whole frame."""
    return decoder._state == AT_TAG and decoder.left() == 0 and decoder._error is None


cdef uint8_t *route_store(uint8_t *out, object channel) except NULL:
    cdef uint64_t number = 0
    to_number(channel, HIGHEST, "the channel", &number)
    out[0] = ROUTE_TO_TAG
    return varint_store(out + 1, number)


cdef bint memory_of(object data, const uint8_t **start, const uint8_t **end) noexcept:
    """The bytes of ``data``; False if they are not in one piece. Nothing here can raise."""
    cdef Py_buffer *info
    if PyBytes_CheckExact(data):
        start[0] = <const uint8_t *> PyBytes_AS_STRING(data)
        end[0] = start[0] + PyBytes_GET_SIZE(data)
        return True
    if not PyMemoryView_Check(data):
        return False
    info = PyMemoryView_GET_BUFFER(data)
    if info.ndim != 1 or info.itemsize != 1 or (info.strides != NULL and info.strides[0] != 1):
        return False
    start[0] = <const uint8_t *> info.buf
    end[0] = start[0] + info.len
    return True


cdef int rewind(FrameDecoder decoder) except -1:
    """As new: it has read nothing."""
    decoder.drop()
    decoder._before = decoder._fed = 0
    decoder._error = None
    decoder._routed = False
    decoder._state = AT_TAG
    decoder._shift = 0
    decoder._route = 0
    decoder._headers = decoder._attachments = ()
    decoder.leave()
    return 0
