"""The peer's streams, as far as no message on them needs a look."""

from libc.stdint cimport int64_t

from aqueduct._speedups.channels.decoder cimport FrameDecoder
from aqueduct._speedups.channels.receiver cimport ReceiveBudget, ReceiverBase
from aqueduct._speedups.channels.sender cimport SendQueue
from aqueduct._speedups.channels.message_batches cimport DirectRead, MessageBatch

cdef class RecvStream:
    cdef readonly int64_t number
    cdef public FrameDecoder decoder
    cdef public object handlers
    cdef public object half       # an ReceiverBase, a sender's half, or None
    cdef public bint begun
    cdef public bint fin
    cdef public bint ignoring
    cdef public object head       # a MessageHead, or None
    cdef public bint held
    cdef public bint postponed
    cdef public int64_t limit
    cdef public int64_t granted
    cdef public int64_t gathered
    cdef DirectRead _inlet
    cdef public int64_t partial

cdef class RecvStreamsBase:
    cdef readonly dict streams
    cdef public object plain      # the handlers of a stream on which messages come
    cdef ReceiveBudget _budget
    cdef SendQueue _ledger
    cdef list _effects
    cdef list _events
    cdef object _open
    cdef int64_t _small
    cdef int64_t _read_ahead
    cdef int64_t _read_ahead_both
    cdef int64_t _overhead
    cdef int64_t _initial
    cdef int64_t _admitted
    cdef int64_t _sent            # by this side, when a large stream last had credit

    cpdef object credit(self, RecvStream stream)
    cpdef object grant_read_ahead(self, RecvStream stream, int64_t size)
    cpdef object charge_small(self, RecvStream stream)
    cpdef object take_run(self, RecvStream stream, ReceiverBase half, MessageBatch run)
    cdef int64_t _room(self, ReceiverBase half) except? -1
    cdef int _run(self, RecvStream stream, int64_t taken, int64_t ahead) except -1
