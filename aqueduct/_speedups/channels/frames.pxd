"""The frames of Aqueduct as values; ``codec`` makes them, the protocol's core reads them."""

from libc.stdint cimport uint64_t

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

cdef class Version:
    cdef readonly str version

cdef class AckVersion:
    pass

cdef class ConnectionHeaders:
    cdef readonly tuple headers

cdef class RouteTo:
    cdef readonly uint64_t channel

cdef class MessageFrame:
    cdef readonly uint64_t num
    cdef object _headers          # the tuple, or the bytes until they are asked for
    cdef object _attachments
    cdef readonly object payload
    cdef readonly Py_ssize_t size
    cdef readonly Py_ssize_t overhead

cdef class SentUnreliable:
    cdef readonly uint64_t count

cdef class FinishSender:
    cdef readonly uint64_t sent_reliable

cdef class CancelSender:
    pass

cdef class AckReliable:
    cdef readonly bytes block

cdef class AckNackUnreliable:
    cdef readonly uint64_t channel
    cdef readonly bytes block

cdef class CloseReceiver:
    pass

cdef class ForgetChannel:
    pass

cdef class MessageHead:
    cdef readonly uint64_t num
    cdef object _headers
    cdef object _attachments
    cdef readonly uint64_t size
    cdef readonly Py_ssize_t overhead
