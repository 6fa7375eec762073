"""Owned aligned memory, buffers on their way out, and the count of copied bytes."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_GET_BUFFER
from libc.stdint cimport uint8_t

cdef enum:
    ALIGNMENT = 64

cdef class Keeper:
    cdef int freed(self) except -1

cdef class AlignedBuffer:
    cdef uint8_t *data
    cdef Keeper keeper          # is told when the memory is released; no way may lead back here
    cdef Py_ssize_t _room       # what the memory was taken with
    cdef Py_ssize_t _paged      # up to where its pages are here
    cdef readonly Py_ssize_t size
    cdef readonly Py_ssize_t exports

    cdef void expect(self, const uint8_t *place, Py_ssize_t size) noexcept

cdef class BufferSlice:
    cdef const uint8_t *start
    cdef readonly Py_ssize_t size
    cdef object _owner          # keeps the memory; it must not lead back here

cdef class GatherList:
    cdef list items             # bytes, Pieces, or one-dimensional memoryviews of bytes
    cdef Py_ssize_t head        # index of the first item not taken
    cdef Py_ssize_t offset      # bytes of that item that were taken
    cdef readonly Py_ssize_t nbytes

    cdef int push(self, object buffer) except -1
    cdef int skip(self, Py_ssize_t size) except -1
    cdef int trim(self) except -1

cdef AlignedBuffer new_aligned(Py_ssize_t size)
cdef BufferSlice new_piece(object owner, const uint8_t *start, Py_ssize_t size)
cdef object byte_view(object buffer)

cdef inline const uint8_t *memory_of(object item, Py_ssize_t *size) noexcept:
    """Where the bytes of an item of a GatherList are, and how many. Nothing here can raise."""
    if PyBytes_CheckExact(item):
        size[0] = PyBytes_GET_SIZE(item)
        return <const uint8_t *> PyBytes_AS_STRING(item)
    if type(item) is BufferSlice:
        size[0] = (<BufferSlice> item).size
        return (<BufferSlice> item).start
    size[0] = PyMemoryView_GET_BUFFER(item).len
    return <const uint8_t *> PyMemoryView_GET_BUFFER(item).buf

cdef inline object bounds_of(object data, const uint8_t **start, const uint8_t **end):
    """What a decoder is fed, as bytes or a memoryview of bytes, and where those are."""
    cdef Py_buffer *info
    if PyBytes_CheckExact(data):
        start[0] = <const uint8_t *> PyBytes_AS_STRING(data)
        end[0] = start[0] + PyBytes_GET_SIZE(data)
        return data
    data = byte_view(data)
    info = PyMemoryView_GET_BUFFER(data)
    start[0] = <const uint8_t *> info.buf
    end[0] = start[0] + info.len
    return data

cdef enum:
    # Shorter pieces of a payload are copied: a view would keep all bytes of a read alive.
    VIEW_FROM = 4096

cdef object piece_of(object fed, Py_ssize_t at, Py_ssize_t size)

# Nothing in these can raise.
cdef void copy_bytes(uint8_t *target, const uint8_t *source, Py_ssize_t size) noexcept
cdef void copy_uncounted(uint8_t *target, const uint8_t *source, Py_ssize_t size) noexcept
cdef void count_copied(Py_ssize_t size) noexcept
cdef void page_in(uint8_t *start, Py_ssize_t size) noexcept
