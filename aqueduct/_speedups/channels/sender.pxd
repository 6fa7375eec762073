"""What is done for each message of a long row, and for each run of bytes that has left."""

from libc.stdint cimport int64_t, uint64_t

from aqueduct._speedups.base.accounts cimport Account
from aqueduct._speedups.channels.tracker cimport SentNumbers, UnreliableSent

cdef class SendStream:
    cdef public object half
    cdef readonly bint control
    cdef public Py_ssize_t number
    cdef public Py_ssize_t queued
    cdef public bint fin
    cdef public bint dead
    cdef public object waiting
    cdef public object guard
    cdef public object speaker

cdef class SendQueue:
    cdef readonly dict _open
    cdef readonly dict _left        # stream -> channel, oldest first
    cdef Py_ssize_t _left_kept      # of live channels, when they are looked at
    cdef Py_ssize_t _left_most      # until they are looked at again
    cdef public dict live           # channel -> half
    cdef readonly list _effects
    cdef object _make_guard         # in debug; else None
    cdef public Py_ssize_t queued
    cdef readonly uint64_t charged
    cdef public Account process     # what all connections have queued
    cdef public int64_t process_budget
    cdef readonly int64_t retained  # bytes that left, and are kept
    cdef public bint fell
    cdef public Py_ssize_t _control_queued
    cdef Py_ssize_t _mark           # of the connection, bytes
    cdef Py_ssize_t _channel_mark   # bytes
    cdef Py_ssize_t _messages       # unacknowledged ones that a channel may have
    cdef Py_ssize_t _frame          # bytes that one may have
    cdef object _sending            # the state of a half that may send
    cdef readonly object _control_waiting
    cdef readonly object _message_waiting
    cdef Py_ssize_t _next
    cdef double _control_share
    cdef Py_ssize_t _openable
    cdef public Py_ssize_t _most_openable
    cdef Py_ssize_t _opened_since
    cdef public bint connected
    cdef public object frames       # what frames messages in another dialect; None: ``post`` does
    cdef public bint version_acknowledged

    cdef int _remember(self, SendStream stream) except -1
    cdef int _write(self, SendStream stream, list buffers, bint fin) except -1
    cpdef int append(self, SendStream stream, list buffers, Py_ssize_t size) except -1
    cpdef int _watch(self, SendStream stream, list buffers) except -1
    cpdef int check_size(self, Py_ssize_t size) except -1
    cpdef int _allow(self, Py_ssize_t count) except -1
    cpdef int recount(self, Py_ssize_t held, bint forgotten) except -1
    cpdef bint _may_open(self, SendStream stream) except -1
    cpdef bint _begin(self, SendStream stream) except -1
    cdef int _emit(self, SendStream stream, list buffers, bint fin) except -1
    cpdef int _charge(self, SendStream stream, Py_ssize_t size) except -1
    cpdef int _release(self, SendStream stream, Py_ssize_t size) except -1
    cdef int _end(self, SendStream stream) except -1
    cdef int _retain(self, SenderBase half, Py_ssize_t size) except -1

cdef class SenderBase:
    cdef SendQueue _ledger
    cdef public SentNumbers numbers
    cdef public UnreliableSent unreliable
    cdef public SendStream message_stream
    cdef public object error
    cdef public Py_ssize_t queued
    cdef public object state
    cdef public bint given
    cdef public bint accessible
    cdef public bint oneshot
    cdef public Py_ssize_t streams_in
    cdef public object links        # a SentLinks, or None
    cdef public SendStream control
    cdef public object unordered    # an UnorderedStreams, or None
    cdef public bint finish_waits
    cdef object _ends               # of large batches, counted in bytes; None: there was none
    cdef int64_t _left
    cdef int64_t _returned

    cdef bint room(self) except -1
    cpdef object post(self, object payload, object headers)
