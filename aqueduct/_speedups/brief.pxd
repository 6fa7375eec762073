"""Streams of bpmux/rel that come and go in one chunk."""

from aqueduct._speedups.entities cimport Entity, Reading

cdef class Arrivals(Reading):
    cdef tuple _maps
    cdef object _urgent
    cdef Py_ssize_t _entities
    cdef bint _brief

    cdef bint _at_once(self) except -1
    cdef bint _acknowledged(self) except -1
    cdef bint _arrived(self) except -1

cdef int remove(Entity entity, tuple maps) except -1
