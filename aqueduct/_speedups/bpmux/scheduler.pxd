"""Whose turn it is to send on a byte stream."""

from libc.stdint cimport uint8_t

from aqueduct._speedups.bpmux.chunks cimport HEAD_MAX
from aqueduct._speedups.bpmux.entities cimport Entity, Item
from aqueduct._speedups.io.gather cimport IovecWriter, iovec

cdef class SchedulerBase:
    cdef readonly object urgent
    cdef readonly object fresh
    cdef readonly object bulky
    cdef Py_ssize_t _chunk
    cdef Py_ssize_t _offered    # bytes of payload of each chunk that was offered to the kernel
    cdef uint8_t[HEAD_MAX] _head            # of each of these
    cdef Py_ssize_t _head_size
    cdef Py_ssize_t _whole      # how many there are of these
    cdef Py_ssize_t _rest       # bytes of payload of one behind them that has less; 0: none is
    cdef uint8_t[HEAD_MAX] _rest_head
    cdef Py_ssize_t _rest_head_size

    cdef bint is_idle(self) except -1
    cpdef bint goes_first(self, Entity entity) except -1
    cpdef object hurry(self, Entity entity)
    cdef int fill(self, IovecWriter out, Py_ssize_t limit) except -1
    cdef int freshen(self, Entity entity) except -1
    cdef int hurried(self, Entity entity, IovecWriter out) except -1
    cdef bint opening(self, Entity entity, Py_ssize_t room, IovecWriter out) except -1
    cdef int _move(self, object lane, int to) except -1
    cdef int _run(self, Entity entity, Py_ssize_t room, IovecWriter out) except -2
    cdef int _chunk_of(self, Entity entity, Item item, Py_ssize_t size, IovecWriter out) except -1
    cdef int offer(self, iovec *vector, Py_ssize_t size, Py_ssize_t most) except -1
    cdef int offered_left(self, IovecWriter out, Py_ssize_t sent) except -1
