"""What received chunks do to the entities of bpmux/rel."""

from libc.stdint cimport uint64_t

from aqueduct._speedups.bpmux.chunks cimport ChunkDecoder
from aqueduct._speedups.bpmux.entities cimport Entity, State
from aqueduct._speedups.bpmux.scheduler cimport Scheduler

cdef class EntityReceiver:
    cdef readonly ChunkDecoder decoder
    cdef readonly Entity entity
    cdef readonly Entity payer
    cdef public int allowance        # chunks that may be taken now; below zero: any number
    cdef readonly bint unread        # a chunk begins that is above it
    cdef bint plain                  # the chunk under way is a plain payload
    cdef list reported
    cdef bint _opening
    cdef bint _last
    cdef bint _whole
    cdef bint _regrant
    cdef object _budget
    cdef uint64_t _payload_bytes
    cdef Py_ssize_t _entities
    cdef State _state
    cdef dict _streams_in
    cdef dict _streams_out
    cdef dict _sinks_out
    cdef Scheduler _scheduler

    cdef int run_plain(self) except -1
    cdef bint plain_head(self) except -1
    cdef bint credit_head(self) except -1
    cdef bint credit(self) except -1
    cdef int _head(self) except -1
    cdef int _piece(self) except -1
    cdef int _deliver(self, bytes data) except -1
    cdef int _finish_payload(self) except -1
    cdef int _refund(self, uint64_t size) except -1
    cdef int _rest(self) except -1
    cdef int _done(self) except -1
    cdef Entity _create(self, int type, int place)
    cdef int _allow(self, Entity entity, int type) except -1
    cdef int _begin_partial(self, Entity entity, int type, bint payload) except -1
    cdef int _continue_partial(self, Entity entity, int type) except -1
    cdef int _charge(self, Entity payer, uint64_t size, str what) except -1
    cdef int _above(self, uint64_t size) except -1
    cdef int _too_large(self, uint64_t size) except -1
