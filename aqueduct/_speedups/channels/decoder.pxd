"""Bytes to frames, incrementally."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from aqueduct._speedups.channels.frames cimport Version
from aqueduct._speedups.channels.receive_buffer cimport ReceiveBuffer

# Where in a frame the next byte stands.
cdef enum State:
    AT_TAG
    AT_MAGIC
    AT_VERSION_LENGTH
    AT_VERSION_TEXT
    AT_CONNECTION_HEADERS_LENGTH
    AT_CONNECTION_HEADERS
    AT_FIELD
    AT_ACKED_CHANNEL
    AT_RANGES_LENGTH
    AT_RANGES
    AT_NUM
    AT_HEADERS_LENGTH
    AT_HEADERS
    AT_ATTACHMENTS_LENGTH
    AT_ATTACHMENTS
    AT_PAYLOAD_LENGTH
    AT_ADMISSION
    AT_PAYLOAD

cdef class FrameDecoder:
    cdef readonly ReceiveBuffer buffer  # what was fed, and where a payload lands
    cdef public int64_t auto_admit
    cdef public bint pause
    cdef readonly bint paused
    cdef readonly bint ended
    cdef readonly uint64_t frames
    cdef readonly bint from_server
    cdef readonly bint datagram
    cdef uint64_t _frame_limit
    cdef uint64_t _header_limit
    cdef uint64_t _attachment_limit
    cdef uint64_t _block_limit

    cdef bint _busy
    cdef object _error
    cdef bint _routed
    cdef uint64_t _route

    cdef State state
    cdef int _tag
    cdef uint64_t _frame_start
    cdef uint64_t _value         # the varint that was read last, or is being read
    cdef int _shift
    cdef Py_ssize_t _matched     # bytes of VERSION that were compared
    cdef Py_ssize_t length        # of the block or payload at hand

    cdef uint64_t _num
    cdef object _headers         # bytes that are known to parse, or () (see frames.Message)
    cdef object _attachments
    cdef Py_ssize_t _overhead

    cpdef object next(self)

    cdef int _enter(self) except -1
    cdef object _parse(self)
    cdef object _starved(self)
    cdef int _begin(self) except -1
    cdef int _varint(self) except -1
    cdef int _length(self, uint64_t limit, str name) except -1
    cdef object _short_frame(self)
    cdef object _acks(self, const uint8_t *block)
    cdef object _head_frame(self)
    cdef object _message(self, object payload)
    # Fields and C memory alone: nothing can raise.
    cdef void _frame_done(self) noexcept
    cdef int _fail(self, object error) except -1

# FrameError: the sequence was finished inside a frame.
cdef object truncation()
# Compares VERSION up to its text as far as bytes are there: 1, or 0 for more bytes.
cdef int match_magic(ReceiveBuffer buffer, Py_ssize_t *matched) except -1
# Its text, first the length of it.
cdef int check_version_length(uint64_t size) except -1
cdef Version read_version(const uint8_t *text, Py_ssize_t size)
