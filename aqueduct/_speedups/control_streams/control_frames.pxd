"""The frames of the control-stream draft (AQ0): values, and bytes to values, incrementally."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from aqueduct._speedups.channels.frames cimport FrameValue
from aqueduct._speedups.channels.receive_buffer cimport ReceiveBuffer

cdef enum Carrier:
    UNI
    DATAGRAM
    OPENER
    ANSWER

# Where in a frame the next byte stands.
cdef enum ControlState:
    AT_TYPE
    AT_MAGIC
    AT_VERSION_LENGTH
    AT_VERSION_TEXT
    AT_HEADERS_LENGTH
    AT_HEADERS
    AT_FIELD
    AT_RANGES_LENGTH
    AT_RANGES
    AT_CHANNEL
    AT_NUMBER
    AT_ATTACHMENTS_LENGTH
    AT_ATTACHMENTS
    AT_PAYLOAD_LENGTH
    AT_BLOCK_LENGTH
    AT_BLOCK
    AT_BROKEN
    AT_SIZED
    AT_ADMISSION
    AT_PAYLOAD
    AT_SKIPPED

cdef class ConnectionControl(FrameValue):
    cdef readonly tuple headers

cdef class ChannelControl(FrameValue):
    cdef readonly uint64_t channel

cdef class RangesValue:
    cdef readonly bytes block

cdef class ControlAcks(RangesValue):
    pass

cdef class ControlAckNacks(RangesValue):
    pass

cdef class ControlClose(RangesValue):
    pass

cdef class ClosedChannelLost(FrameValue):
    cdef readonly uint64_t channel

cdef class ControlFrameDecoder:
    cdef readonly ReceiveBuffer buffer  # what was fed, and where a payload lands
    cdef public int64_t auto_admit
    cdef public bint pause
    cdef readonly bint paused
    cdef readonly bint ended
    cdef readonly uint64_t frames
    cdef readonly bint from_server
    cdef readonly str carrier
    cdef readonly bint header_blocks
    cdef Carrier _carrier
    cdef uint64_t _frame_limit
    cdef uint64_t _header_limit
    cdef uint64_t _attachment_limit
    cdef uint64_t _block_limit

    cdef bint _busy
    cdef object _error
    cdef bint _versioned         # the first frame was a Version
    cdef bint _controlled        # a channel control stream, of ``_channel``
    cdef bint _named             # there is a ``_channel``
    cdef uint64_t _channel
    cdef int _last               # the type of a frame that nothing may follow, 0 before it

    cdef ControlState state
    cdef int _type
    cdef uint64_t _frame_start
    cdef uint64_t _value         # the varint that was read last, or is being read
    cdef int _shift
    cdef Py_ssize_t _matched     # bytes of Version that were compared
    cdef Py_ssize_t length       # of the block or payload at hand
    cdef uint64_t _skipping      # bytes of a payload that are read and not kept

    cdef uint64_t _num
    cdef object _headers          # of a header block: bytes or pairs
    cdef tuple _attachments
    cdef Py_ssize_t _overhead
    cdef uint64_t _block_start   # where the header block of a message begins
    cdef Py_ssize_t _block_size  # of its headers, without their length
    cdef Py_ssize_t _block_room  # the same with the zeros behind them

    cpdef object next(self)

    cdef int _enter(self) except -1
    cdef object _parse(self)
    cdef object _starved(self)
    cdef int _begin(self) except -1
    cdef int _varint(self) except -1
    cdef int _length(self, uint64_t limit, str name) except -1
    cdef object _short_frame(self)
    cdef object _ranged_frame(self, const uint8_t *block)
    cdef int _measure_block(self) except -1
    cdef int _read_block(self, const uint8_t *block) except -1
    cdef int _break_block(self, str text) except -1
    cdef object _head_frame(self)
    cdef object _message(self, object payload)
    # Fields and C memory alone: nothing can raise.
    cdef bint _skip_on(self) noexcept
    cdef void _frame_done(self) noexcept
    cdef int _fail(self, object error) except -1
