"""Owned aligned memory, buffers on their way out, and the count of copied bytes."""

from libc.stdint cimport uint8_t

cdef enum:
    ALIGNMENT = 64
    # From here on a copy is long enough to be worth letting other threads run.
    LONG_COPY = 65536

cdef class AlignedBuffer:
    cdef uint8_t *data
    cdef Py_ssize_t _room       # what the memory was taken with
    cdef readonly Py_ssize_t size
    cdef readonly Py_ssize_t exports

cdef class Scatter:
    cdef list _items            # bytes, or one-dimensional memoryviews of bytes
    cdef Py_ssize_t _head       # index of the first item not taken
    cdef Py_ssize_t _offset     # bytes of that item that were taken
    cdef readonly Py_ssize_t nbytes

    cdef int trim(self) except -1

cdef AlignedBuffer new_aligned(Py_ssize_t size)
cdef object byte_view(object buffer)
cdef void copy_bytes(uint8_t *target, const uint8_t *source, Py_ssize_t size) noexcept
cdef void count_copied(Py_ssize_t size) noexcept
