"""Bytes between two processes by memory that both map."""

from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    WAKE_BYTE = 0   # the byte that wakes the peer

cdef struct Positions:
    # Of one direction, each with a line of the cache of its own.
    # Bytes that went by the socket before; NOT_YET: all go there.
    uint64_t since
    uint8_t pad_since[120]
    # Bytes written so far, and read so far.
    uint64_t tail
    uint8_t pad_tail[120]
    uint64_t head
    uint8_t pad_head[120]
    # Whether the reader sleeps until there are bytes, the writer until there is room.
    int reader_waits
    uint8_t pad_reader[124]
    int writer_waits
    uint8_t pad_writer[124]

cdef struct Header:
    uint64_t magic
    uint64_t capacity
    uint8_t pad[112]
    Positions ways[2]

cdef class Rings:
    cdef readonly Py_ssize_t capacity
    cdef readonly bint begun        # what is written goes this way, no more by the socket
    cdef uint64_t gone              # bytes that went by the socket
    cdef void *_memory
    cdef Positions *_out
    cdef Positions *_in
    cdef uint8_t *_out_data
    cdef uint8_t *_in_data
    cdef uint64_t _written
    cdef uint64_t _read
    cdef int _fd
    cdef object __weakref__

    # What is ``noexcept`` looks at fields and at the shared memory alone: nothing can raise.
    cdef void _free(self) noexcept
    cdef int _map(self, int fd, Py_ssize_t capacity, int out) except -1
    # For the writer.
    cdef bint agreed(self) noexcept
    cdef void begin(self) noexcept
    cdef Py_ssize_t put(self, const uint8_t *start, Py_ssize_t size, int fd) except -1
    cdef bint full(self) noexcept
    # For the reader.
    cdef bint reached(self, uint64_t heard) noexcept
    cdef Py_ssize_t surplus(self, uint64_t heard) noexcept
    cdef Py_ssize_t take(self, uint8_t *target, Py_ssize_t size, int fd) except -1
    cdef bint sleeps(self) noexcept
    cdef void awake(self) noexcept
    cdef int _wake_peer(self, int fd) except -1

cdef int send_byte(int fd, uint8_t byte, int passed) except -2
# System calls whose failure changes nothing here: it cannot raise.
cdef int take_descriptor(void *control, size_t size) noexcept
