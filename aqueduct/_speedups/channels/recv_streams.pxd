"""The peer's streams: what has come on them, what they hold, and their credit."""

from libc.stdint cimport int64_t

from aqueduct._speedups.channels.decoder cimport FrameDecoder
from aqueduct._speedups.channels.receiver cimport (
    DirectRead,
    MessageBatch,
    ReceiveBudget,
    ReceiveQueue,
)
from aqueduct._speedups.channels.stream_credit cimport CreditedStream, StreamCredit

cdef class RecvStream(CreditedStream):
    cdef public FrameDecoder decoder
    cdef public object handlers
    cdef public object half       # a receiver's or a sender's, or None
    cdef public ReceiveQueue queue    # of a receiver's half, or None
    cdef public bint begun
    cdef public bint ignoring
    cdef public object head       # a MessageHead, or None
    cdef public bint held
    cdef public bint postponed
    cdef public int64_t gathered
    cdef DirectRead _inlet
    cdef public int64_t partial

cdef class RecvStreams:
    cdef readonly dict streams
    cdef public object plain      # the handlers of a stream on which messages come
    cdef readonly StreamCredit granting
    cdef ReceiveBudget _budget
    cdef list _effects
    cdef list _events
    cdef object _open
    cdef int64_t _small
    cdef int64_t _overhead
    cdef int64_t _initial
    cdef int64_t _admitted
    cdef object _config
    cdef object _ended            # the state of a sender that is over
    cdef bint _from_server
    cdef Py_ssize_t _step
    cdef Py_ssize_t _most_lasting
    cdef FrameDecoder _nothing
    cdef readonly int64_t _gathered
    cdef public Py_ssize_t most   # frames and attachments that are worked on in one turn
    cdef readonly Py_ssize_t held
    cdef readonly Py_ssize_t lasting
    cdef readonly Py_ssize_t extra
    cdef public bint version_checked

    cdef int _check_begin(self, object frame) except -1
    cdef object _next_for(self, RecvStream stream)
    cdef MessageBatch read_plain(self, RecvStream stream)
    cpdef object hold(self, RecvStream stream)
    cpdef object leave(self, RecvStream stream)
    cdef int _count(self, Py_ssize_t lasting, Py_ssize_t held) except -1
    cdef int _weigh(self, RecvStream stream, int64_t gathered) except -1
    cpdef object credit(self, RecvStream stream)
    cpdef object charge_small(self, RecvStream stream)
    cpdef object take_run(self, RecvStream stream, MessageBatch run)
    cdef int64_t _room(self, RecvStream stream) except? -1
