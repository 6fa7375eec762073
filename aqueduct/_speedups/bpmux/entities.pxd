"""Entities of bpmux/rel, what waits to be sent on them, and the path of every byte that comes."""

from libc.stdint cimport uint64_t

from aqueduct._speedups.bpmux.chunks cimport ChunkDecoder
from aqueduct._speedups.base.buffers cimport GatherList

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
    cdef public int lane
    cdef public Py_ssize_t deficit

cdef class EntityReader:
    cdef readonly ChunkDecoder decoder
    cdef public Entity entity
    cdef public Entity purse
    cdef public bint opening
    cdef public bint last
    cdef public int allowance        # chunks that may be taken now; below zero: any number
    cdef public bint unread          # a chunk begins that is above it
    cdef list _reported
    cdef dict _top_out
    cdef dict _in
    cdef dict _sinks
    cdef object _wake                # called with who has credit, and something to send
    cdef int _kind
    cdef bint _whole
    cdef bint _plain

    cdef bint plain_head(self) except -1
    cdef bint credit_head(self) except -1
    cdef bint credit(self) except -1
    cdef bint at_once(self) except -1
    cdef bint told(self) except -1
