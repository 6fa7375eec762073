"""Streams of bpmux/rel that come and go in one chunk."""

from aqueduct._speedups.bpmux.entities cimport Entity, EntityReader
from aqueduct._speedups.io.gather cimport IovecWriter
from aqueduct._speedups.bpmux.scheduler cimport SchedulerBase

cdef class SingleChunkReader(EntityReader):
    cdef tuple _maps
    cdef object _urgent
    cdef Py_ssize_t _entities
    cdef bint _brief
    # Called instead of a report; None: everything is reported.
    cdef object _on_arrival
    cdef object _on_piece
    cdef object _on_acknowledgement

    cdef bint _acknowledged(self) except -1
    cdef bint _arrived(self) except -1

cdef class SingleChunkScheduler(SchedulerBase):
    cdef tuple _maps
    cdef dict _sinks
    cdef Entity _top
    cdef Py_ssize_t _most
    cdef Py_ssize_t _entities
    cdef readonly object _waiting

    cdef int _acknowledge(self, Entity entity, IovecWriter out) except -1
    cdef int _grant(self, Entity entity, IovecWriter out) except -1

cdef int remove(Entity entity, tuple maps) except -1
