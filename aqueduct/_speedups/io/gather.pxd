"""Bytes on their way to the kernel, gathered."""

from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.base.buffers cimport GatherList
from aqueduct._speedups.io.shared_ring cimport Rings
from aqueduct._speedups.io.tls_records cimport Records

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

cdef class IovecWriter:
    cdef Part *_parts
    cdef Py_ssize_t _count
    cdef Py_ssize_t _room
    cdef list _owners           # of each part: as in a GatherList; None of the arena
    cdef uint8_t *_arena        # short buffers
    cdef Py_ssize_t _filled
    cdef Py_ssize_t _arena_room
    cdef Py_ssize_t _first      # the first part that has not left
    cdef Py_ssize_t offset      # bytes of it that have
    cdef readonly Py_ssize_t size
    cdef readonly Py_ssize_t left
    cdef readonly list written
    cdef uint64_t _gone         # bytes that the socket took
    cdef Rings _rings           # memory, where what follows goes once both sides know of it

    cdef int put(self, object owner, const uint8_t *start, Py_ssize_t size) except -1
    cdef int put_head(self, const uint8_t *start, Py_ssize_t size) except -1
    cdef int put_before(self, const uint8_t *start, Py_ssize_t size) except -1
    cdef int put_run(self, GatherList scatter, Py_ssize_t size) except -1
    cdef int seal(self, Records records) except -1
    cdef int encrypt(self, Records records) except -1
    cdef int _grow(self, Py_ssize_t size) except -1
    cdef int _begin(self) except -1
    cdef Py_ssize_t give(self, int fd, const iovec *behind, int more) except -2
    cdef bint _pass(self, int fd) except -1
    cdef int _passed(self, Py_ssize_t size) except -1
    cdef Py_ssize_t _share(self, int fd) except -2
    cdef int leave(self, Py_ssize_t size) except -1
