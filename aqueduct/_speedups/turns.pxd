"""What leaves of a byte stream: gathered for the kernel, and whose turn it is."""

from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.bpmux cimport HEAD_MAX
from aqueduct._speedups.buffers cimport Scatter
from aqueduct._speedups.entities cimport Entity, Item
from aqueduct._speedups.ring cimport Rings

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

cdef enum:
    # Shorter buffers are copied next to each other; longer ones leave by reference.
    COALESCE_BELOW = 4096

cdef struct Part:
    const uint8_t *start    # NULL: it is in the arena
    Py_ssize_t place        # there
    Py_ssize_t size

cdef class Turns

cdef class Outlet:
    cdef Part *_parts
    cdef Py_ssize_t _count
    cdef Py_ssize_t _room
    cdef list _owners           # of each part: as in a Scatter; None of the arena
    cdef uint8_t *_arena        # short buffers
    cdef Py_ssize_t _filled
    cdef Py_ssize_t _arena_room
    cdef Py_ssize_t _first      # the first part that has not left
    cdef Py_ssize_t _offset     # bytes of it that have
    cdef readonly Py_ssize_t size
    cdef readonly Py_ssize_t left
    cdef readonly list written
    cdef uint64_t _gone         # bytes that the socket took
    cdef Rings _rings           # memory, where what follows goes once both sides know of it

    cdef int put(self, object owner, const uint8_t *start, Py_ssize_t size) except -1
    cdef int put_head(self, const uint8_t *start, Py_ssize_t size) except -1
    cdef int put_run(self, Scatter scatter, Py_ssize_t size) except -1
    cdef int _grow(self, Py_ssize_t size) except -1
    cdef int _begin(self) except -1
    cdef Py_ssize_t _send(
        self, int fd, Turns turns, Py_ssize_t size, Py_ssize_t offered
    ) except -2
    cdef bint _pass(self, int fd) except -1
    cdef int _count_gone(self, Py_ssize_t size) except -1
    cdef int passed(self, Py_ssize_t size) except -1
    cdef Py_ssize_t _share(self, int fd) except -2
    cdef int _left(self, Py_ssize_t size) except -1

cdef class Turns:
    cdef readonly object urgent
    cdef readonly object fresh
    cdef readonly object bulky
    cdef Py_ssize_t _chunk
    cdef Py_ssize_t _offered    # bytes of payload of each chunk that was offered to the kernel
    cdef uint8_t[HEAD_MAX] _head            # of each of these
    cdef Py_ssize_t _head_size

    cdef int fill(self, Outlet out, Py_ssize_t limit) except -1
    cdef int freshen(self, Entity entity) except -1
    cdef int hurried(self, Entity entity, Outlet out) except -1
    cdef bint opening(self, Entity entity, Py_ssize_t room, Outlet out) except -1
    cdef int _move(self, object lane, int to) except -1
    cdef int _run(self, Entity entity, Py_ssize_t room, Outlet out) except -2
    cdef int _chunk_of(self, Entity entity, Item item, Py_ssize_t size, Outlet out) except -1
    cdef int offer(
        self, iovec *vector, int count, Py_ssize_t size, Py_ssize_t most
    ) except -1
    cdef int offered_left(self, Outlet out, Py_ssize_t sent) except -1
