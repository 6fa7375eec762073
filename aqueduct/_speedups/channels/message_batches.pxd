"""Received messages, and runs of them read at once."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from aqueduct._speedups.channels.decoder cimport FrameDecoder
from aqueduct._speedups.channels.tracker cimport ReceivedNumbers

cdef enum:
    # A message from here on has no memory before those that are whole could be taken.
    ALONE = 262144

cdef class Received:
    cdef readonly uint64_t number
    cdef object _headers          # the tuple, or bytes (see frames.Message)
    cdef readonly tuple attachments
    cdef public object payload
    cdef readonly Py_ssize_t charge
    cdef readonly bint reliable
    cdef public bint dropped

cdef class MessageBatch:
    cdef readonly list messages
    cdef readonly int64_t charge
    cdef readonly int64_t pending
    cdef readonly int64_t largest
    cdef readonly Py_ssize_t admitted
    cdef readonly object follows
    cdef readonly bint full
    cdef bint _puts_off           # memory of what is large, behind what is whole

    cdef int take(
        self, FrameDecoder decoder, ReceivedNumbers numbers, Py_ssize_t overhead, int64_t room,
        bytes asked
    ) except -1

cdef class DirectRead:
    cdef readonly FrameDecoder decoder
    cdef readonly MessageBatch run         # None: the payload under way lands, and nothing else
    cdef readonly bint stopped
    cdef readonly uint64_t size   # bytes given since it was opened
    cdef bint large               # the last message that was admitted was
    cdef ReceivedNumbers _numbers
    cdef Py_ssize_t _overhead
    cdef Py_ssize_t _window
    cdef int64_t _room
    cdef bytes _asked

    cpdef object open(self, int64_t room, int64_t pending, bytes asked)
    cpdef MessageBatch close(self)
    cdef int take_up(self) except -1
    cdef Py_ssize_t wanted(self) noexcept
    cdef uint8_t *place(self) noexcept
    cdef int fill(self, Py_ssize_t size) except -1
    cdef int push(self, object data) except -1
    cdef int _go_on(self) except -1
