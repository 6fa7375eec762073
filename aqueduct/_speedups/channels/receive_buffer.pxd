"""Fed chunks in a row, read by a cursor; the base of the incremental decoders."""

from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    # While many chunks wait, those up to TINY bytes are packed into blocks of TAIL bytes: a peer
    # that sends single bytes must not cost a Python object for each.
    PACK_FROM = 16
    TINY = 128
    TAIL = 1024

cdef class ReceiveBuffer:
    cdef const uint8_t *_pos      # the next unread byte of the current chunk
    cdef const uint8_t *_end
    cdef const uint8_t *_start
    cdef uint64_t _before         # bytes of the chunks before the current one
    cdef uint64_t _fed
    cdef object _chunk            # owner of the current memory: bytes or a memoryview
    cdef list _queue
    cdef Py_ssize_t _head         # index of the first waiting chunk
    cdef bytes _tail              # the last waiting chunk while it is open for packing
    cdef Py_ssize_t _tail_used
    cdef uint8_t *_scratch        # a block that straddles chunks
    cdef Py_ssize_t _scratch_size
    cdef Py_ssize_t _scratch_room

    cdef int push(self, object data) except -1
    cdef int _close_tail(self) except -1
    cdef bint refill(self) noexcept
    cdef const uint8_t *block(self, Py_ssize_t size) except? NULL
    cdef void release_block(self) noexcept
    cdef void drop(self) noexcept
    cdef void skip_outside(self, uint64_t size) noexcept
    cdef uint64_t taken(self) noexcept
    cdef uint64_t left(self) noexcept
