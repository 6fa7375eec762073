"""What a call does to its two channels, step by step as the general way does it, but at once."""

from libc.stdint cimport int64_t, uint64_t

from aqueduct._speedups.channels.decoder cimport FrameDecoder
from aqueduct._speedups.channels.frames cimport MessageFrame
from aqueduct._speedups.channels.receiver cimport ReceiverBase
from aqueduct._speedups.channels.sender cimport SendQueue, SenderBase
from aqueduct._speedups.channels.message_batches cimport Received

cdef class Brisk:
    cdef object _shared
    cdef object _registry
    cdef SendQueue _ledger
    cdef FrameDecoder _decoder
    cdef object _forgetting
    cdef dict _live
    cdef dict _early
    cdef dict _destroyed
    cdef dict _attached
    cdef dict _next
    cdef list _events
    cdef object _make_sender
    cdef object _make_receiver
    cdef object _may_send
    cdef object _all_sent
    cdef object _sender_ended
    cdef object _open
    cdef object _closed
    cdef uint64_t _side
    cdef int64_t _small
    cdef int64_t _overhead
    cdef Py_ssize_t _channels
    cdef Py_ssize_t _attachments
    cdef Py_ssize_t _ranges
    cdef Py_ssize_t _hard_limit
    cdef uint64_t _unacknowledged
    cdef double _ack_delay

    cdef bint _answered(self, ReceiverBase half, uint64_t channel, object data) except -1
    cdef bint _asks(self, ReceiverBase half, MessageFrame frame) except -1
    cdef bint _taken(self, SenderBase half, uint64_t channel, object data) except -1
    cdef Received _received(self, MessageFrame frame, tuple attachments)
    cdef int _remove(self, object half, uint64_t channel) except -1
    cdef int _add(self, dict spaces, uint64_t channel) except -1
