"""Fed chunks in a row, read by a cursor.

Chunks are kept by reference until they are read. Only a block that straddles chunks is gathered,
as its bytes come, in memory that grows with them: a declared length takes no memory by itself.
"""

cimport cython
from cpython.buffer cimport PyBuffer_IsContiguous
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.memoryview cimport PyMemoryView_FromObject, PyMemoryView_GET_BUFFER
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

__all__ = ["ReceiveBuffer"]

cdef uint8_t EMPTY = 0


@cython.auto_pickle(False)
cdef class ReceiveBuffer:
    """The base of a decoder; made by its subclasses alone."""

    def __cinit__(self):
        self._queue = []
        self._pos = self._end = self._start = &EMPTY

    def __dealloc__(self):
        free(self._scratch)

    cdef int push(self, object data) except -1:
        """Appends a chunk by reference; it must not change until it was read."""
        cdef Py_ssize_t size
        cdef const uint8_t *memory
        cdef Py_buffer *info
        if PyBytes_CheckExact(data):
            size = PyBytes_GET_SIZE(data)
            memory = <const uint8_t *> PyBytes_AS_STRING(data)
        else:
            data = PyMemoryView_FromObject(data)
            info = PyMemoryView_GET_BUFFER(data)
            if not PyBuffer_IsContiguous(info, b"C"):
                raise BufferError("the chunk is not contiguous")
            size = info.len
            memory = <const uint8_t *> info.buf
        if size == 0:
            return 0
        if self._pos == self._end and self._head == len(self._queue):
            self._before += <uint64_t> (self._end - self._start)
            self._chunk = data
            self._start = self._pos = memory
            self._end = memory + size
        elif size > TINY or len(self._queue) - self._head < PACK_FROM:
            self._close_tail()
            self._queue.append(data)
        else:
            if self._tail is None or self._tail_used + size > TAIL:
                self._close_tail()
                self._tail = PyBytes_FromStringAndSize(NULL, TAIL)
                self._tail_used = 0
                self._queue.append(self._tail)
            memcpy(PyBytes_AS_STRING(self._tail) + self._tail_used, memory, <size_t> size)
            self._tail_used += size
        self._fed += <uint64_t> size
        return 0

    cdef int _close_tail(self) except -1:
        if self._tail is not None:
            self._queue[len(self._queue) - 1] = self._tail[:self._tail_used]
            self._tail = None
        return 0

    cdef bint refill(self) noexcept:
        """Makes the next chunk the current one, which is read; False if there is none."""
        cdef object chunk
        cdef Py_ssize_t size
        if self._head == len(self._queue):
            return False
        chunk = self._queue[self._head]
        self._queue[self._head] = None
        self._head += 1
        if self._head == len(self._queue):
            self._queue.clear()
            self._head = 0
        elif self._head >= 64 and self._head * 2 >= len(self._queue):
            del self._queue[:self._head]
            self._head = 0
        self._before += <uint64_t> (self._end - self._start)
        if PyBytes_CheckExact(chunk):
            self._start = <const uint8_t *> PyBytes_AS_STRING(chunk)
            size = PyBytes_GET_SIZE(chunk)
            if chunk is self._tail:
                size = self._tail_used
                self._tail = None
        else:
            self._start = <const uint8_t *> PyMemoryView_GET_BUFFER(chunk).buf
            size = PyMemoryView_GET_BUFFER(chunk).len
        self._pos = self._start
        self._end = self._start + size
        self._chunk = chunk
        return True

    cdef const uint8_t *block(self, Py_ssize_t size) except? NULL:
        """``size`` bytes in a row, read; NULL without an error while they are not all here.

        They stay valid until the next call of any other method.
        """
        cdef const uint8_t *memory
        cdef uint8_t *grown
        cdef Py_ssize_t part, room
        if self._scratch_size == 0:
            if self._end - self._pos >= size:
                memory = self._pos
                self._pos += size
                return memory
        while self._scratch_size < size:
            if self._pos == self._end and not self.refill():
                return NULL
            part = min(self._end - self._pos, size - self._scratch_size)
            if self._scratch_size + part > self._scratch_room:
                room = min(max(self._scratch_size + part, 2 * self._scratch_room, 64), size)
                grown = <uint8_t *> realloc(self._scratch, <size_t> room)
                if grown == NULL:
                    raise MemoryError()
                self._scratch = grown
                self._scratch_room = room
            memcpy(self._scratch + self._scratch_size, self._pos, <size_t> part)
            self._scratch_size += part
            self._pos += part
        return self._scratch

    cdef void release_block(self) noexcept:
        """Forgets a gathered block; to be called once a block was parsed."""
        self._scratch_size = 0
        if self._scratch_room > TAIL:
            free(self._scratch)
            self._scratch = NULL
            self._scratch_room = 0

    cdef void drop(self) noexcept:
        """Lets everything fed go; what was taken stays counted."""
        cdef uint64_t taken = self.taken()
        self._start = self._pos = self._end = &EMPTY
        self._before = self._fed = taken
        self._chunk = None
        self._queue.clear()
        self._head = 0
        self._tail = None
        free(self._scratch)
        self._scratch = NULL
        self._scratch_size = self._scratch_room = 0

    cdef void skip_outside(self, uint64_t size) noexcept:
        """Counts bytes that reached their place without being fed."""
        self._before += size
        self._fed += size

    cdef uint64_t taken(self) noexcept:
        return self._before + <uint64_t> (self._pos - self._start)

    cdef uint64_t left(self) noexcept:
        return self._fed - self.taken()
