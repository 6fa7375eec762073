"""Entities of bpmux/rel, and what waits to be sent on them."""

from libc.stdint cimport uint64_t

from aqueduct._speedups.base.buffers cimport GatherList

cdef enum:
    # Where an entity stands in the state, and the type of the chunks that we send for it.
    REQ_OUT_PLACE = 0
    REQ_IN_PLACE = 1
    SINK_OUT_PLACE = 2
    SINK_IN_PLACE = 3
    STREAM_OUT_PLACE = 4
    STREAM_IN_PLACE = 5

    # What a core reports; see aqueduct.protocol.bpmux.events.
    OPENED_EVENT = 0
    PAYLOAD_EVENT = 1
    CREDIT_EVENT = 2
    PING_EVENT = 3
    PONG_EVENT = 4
    PONG_MISSING_EVENT = 5
    ENDED_EVENT = 6
    ACKNOWLEDGED_EVENT = 7
    ABANDONED_EVENT = 8
    FAILED_EVENT = 9

cdef class Item:
    cdef readonly GatherList scatter
    cdef readonly bint whole
    cdef public uint64_t total
    cdef public uint64_t missing
    cdef public bint begun
    cdef public bint opening
    cdef readonly bint is_end
    cdef readonly bint is_response
    cdef readonly bint urgent

cdef class Entity:
    cdef readonly int place
    cdef readonly uint64_t identifier
    cdef public uint64_t number     # the owner's
    cdef public object user
    cdef public Entity twin
    cdef public uint64_t credit_out
    cdef public uint64_t credit_in
    cdef public bint end_out
    cdef public bint end_in
    cdef public uint64_t partial
    cdef public int partial_type
    cdef public bint partial_end
    cdef public bint opening_in
    cdef public object joined
    cdef public bint gone
    cdef public bint opened
    cdef public int open_type
    cdef public object items
    cdef public bint ending
    cdef public uint64_t keep
    cdef public uint64_t grant
    cdef public uint64_t pings
    cdef public uint64_t pongs
    cdef public object awaited
    cdef public bint in_urgent
    cdef public int queue           # of the scheduler, that it stands in
    cdef public Py_ssize_t deficit

cdef class State:
    cdef readonly tuple maps
    cdef readonly Entity top_sink
    cdef readonly Entity top_stream

    cpdef Entity add(self, int place, uint64_t identifier)
    cpdef object remove(self, Entity entity)

cdef int type_of(Entity entity) noexcept
