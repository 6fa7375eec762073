"""The peer's streams, as far as no message on them needs a look."""

from libc.stdint cimport int64_t

from aqueduct._speedups.channels.decoder cimport Decoder
from aqueduct._speedups.channels.receiver cimport Budget, Inbox
from aqueduct._speedups.channels.sender cimport Ledger
from aqueduct._speedups.channels.message_batches cimport Inlet, Run

cdef class InStream:
    cdef readonly int64_t number
    cdef public Decoder decoder
    cdef public object handlers
    cdef public object half       # an Inbox, a sender's half, or None
    cdef public bint begun
    cdef public bint fin
    cdef public bint ignoring
    cdef public object head       # a MessageHead, or None
    cdef public bint held
    cdef public int64_t limit
    cdef public int64_t granted
    cdef public int64_t gathered
    cdef Inlet _inlet
    cdef public int64_t partial

cdef class Streams:
    cdef readonly dict streams
    cdef public object plain      # the handlers of a stream on which messages come
    cdef Budget _budget
    cdef Ledger _ledger
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

    cpdef object credit(self, InStream stream)
    cpdef object grant_read_ahead(self, InStream stream, int64_t size)
    cpdef object charge_small(self, InStream stream)
    cpdef object take_run(self, InStream stream, Inbox half, Run run)
    cdef int64_t _room(self, Inbox half) except? -1
    cdef int _run(self, InStream stream, int64_t taken, int64_t ahead) except -1
