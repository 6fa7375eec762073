"""Bytes of a sequence on their way to their final memory: fed chunks in a row, read by a cursor.

A payload lands once: fed bytes are copied to their place as they come, and what a carrier reads
straight into ``room`` is not copied at all.
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

from aqueduct._speedups.base.buffers cimport AlignedBuffer, byte_view, copy_bytes, new_aligned

from aqueduct.errors import LimitExceeded, LocalProtocolError

__all__ = ["ReceiveBuffer"]

cdef uint8_t EMPTY = 0


@cython.final
@cython.freelist(16)
@cython.auto_pickle(False)
cdef class ReceiveBuffer:
    """What a decoder reads from, with a place for one payload."""

    def __cinit__(self):
        self._queue = []
        self.pos = self.end = self._start = &EMPTY

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
        if self.pos == self.end and self._head == len(self._queue):
            self._before += <uint64_t> (self.end - self._start)
            self._chunk = data
            self._start = self.pos = memory
            self.end = memory + size
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
        self.fed += <uint64_t> size
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
        self._before += <uint64_t> (self.end - self._start)
        if PyBytes_CheckExact(chunk):
            self._start = <const uint8_t *> PyBytes_AS_STRING(chunk)
            size = PyBytes_GET_SIZE(chunk)
            if chunk is self._tail:
                size = self._tail_used
                self._tail = None
        else:
            self._start = <const uint8_t *> PyMemoryView_GET_BUFFER(chunk).buf
            size = PyMemoryView_GET_BUFFER(chunk).len
        self.pos = self._start
        self.end = self._start + size
        self._chunk = chunk
        return True

    cdef const uint8_t *block(self, Py_ssize_t size) except? NULL:
        """``size`` bytes in a row, read; NULL without an error while they are not all here.

        They stay valid until the next call of any other method.
        """
        cdef const uint8_t *memory
        cdef uint8_t *grown
        cdef Py_ssize_t part, room
        if self.gathered == 0:
            if self.end - self.pos >= size:
                memory = self.pos
                self.pos += size
                return memory
        while self.gathered < size:
            if self.pos == self.end and not self.refill():
                return NULL
            part = min(self.end - self.pos, size - self.gathered)
            if self.gathered + part > self._scratch_room:
                room = min(max(self.gathered + part, 2 * self._scratch_room, 64), size)
                grown = <uint8_t *> realloc(self._scratch, <size_t> room)
                if grown == NULL:
                    raise MemoryError()
                self._scratch = grown
                self._scratch_room = room
            memcpy(self._scratch + self.gathered, self.pos, <size_t> part)
            self.gathered += part
            self.pos += part
        return self._scratch

    cdef void release_block(self) noexcept:
        """Forgets a gathered block; to be called once a block was parsed."""
        self.gathered = 0
        if self._scratch_room > TAIL:
            free(self._scratch)
            self._scratch = NULL
            self._scratch_room = 0

    cdef void drop(self) noexcept:
        """Lets everything fed go; what was taken stays counted."""
        cdef uint64_t taken = self.taken()
        self._start = self.pos = self.end = &EMPTY
        self._before = self.fed = taken
        self._chunk = None
        self._queue.clear()
        self._head = 0
        self._tail = None
        free(self._scratch)
        self._scratch = NULL
        self.gathered = self._scratch_room = 0

    cdef void skip_outside(self, uint64_t size) noexcept:
        """Counts bytes that reached their place without being fed."""
        self._before += size
        self.fed += size

    cdef uint64_t taken(self) noexcept:
        return self._before + <uint64_t> (self.pos - self._start)

    cdef uint64_t left(self) noexcept:
        return self.fed - self.taken()

    # A payload, and its place

    cdef uint64_t reach(self, Py_ssize_t most) noexcept:
        """Bytes that were consumed, and those that the admitted payload lacks, ``most`` of them."""
        return self.taken() + <uint64_t> min(self.missing, most)

    cpdef uint64_t take_up(self) except? 0xFFFFFFFFFFFFFFFF:
        """Takes the memory of a payload if that was put off; what came of it lands there.

        Returns the bytes that were fed and are not consumed. MemoryError: it is not to be had.
        """
        if self.missing and self.payload is None:
            self.prepare(self.missing, None)
            self.land()
        return self.left()

    cdef int prepare(self, Py_ssize_t size, object target) except -1:
        """Takes the memory of a payload; nothing changes if that fails."""
        cdef object view = None
        cdef AlignedBuffer aligned
        cdef Py_buffer *info
        if target is not None:
            view = byte_view(target)
            info = PyMemoryView_GET_BUFFER(view)
            if info.readonly or info.len != size:
                raise LocalProtocolError(
                    f"the target has {info.len} bytes and is "
                    f"{'read-only' if info.readonly else 'writable'}; the payload needs "
                    f"{size} writable bytes"
                )
            self.place = <uint8_t *> info.buf
            self.payload = target
        elif size < SMALL:
            self.payload = PyBytes_FromStringAndSize(NULL, size)
            self.place = <uint8_t *> PyBytes_AS_STRING(self.payload)
        else:
            aligned = new_aligned(size)
            self.place = aligned.data
            self.payload = aligned
        self._view = view
        self.whole = self.missing = size
        return 0

    cdef bint land(self) noexcept:
        """Copies fed bytes to their place, once; True when the payload is whole."""
        cdef Py_ssize_t size
        while self.missing:
            if self.pos == self.end and not self.refill():
                return False
            size = min(self.end - self.pos, self.missing)
            copy_bytes(self.place, self.pos, size)
            self.pos += size
            self.place += size
            self.missing -= size
        return True

    cdef object room(self, Py_ssize_t hint):
        """A view of the next bytes to land; None if fed bytes come first or it is not large."""
        cdef Py_ssize_t done
        if self.payload is None or self.missing == 0 or self.left():
            return None
        if PyBytes_CheckExact(self.payload):
            return None
        if self._view is None:
            self._view = byte_view(self.payload)
        done = PyMemoryView_GET_BUFFER(self._view).len - self.missing
        if 0 < hint < self.missing:
            return self._view[done:done + hint]
        return self._view[done:]

    cdef int landed(self, Py_ssize_t size) except -1:
        """Counts bytes that were written to ``room``."""
        if self._view is None or self.left() or not 0 <= size <= self.missing:
            raise LocalProtocolError(
                f"received({size}): {self.missing} bytes of the payload are missing, and "
                "only memory of receive_buffer counts"
            )
        self.place += size
        self.missing -= size
        self.skip_outside(<uint64_t> size)
        return 0

    cdef void leave(self) noexcept:
        """Lets the payload go."""
        self.payload = self._view = None
        self.missing = 0


cdef int raise_length(
    uint64_t size, uint64_t used, uint64_t frame_limit, uint64_t limit, str name
) except -1:
    """The error of ``check_length``."""
    if used > frame_limit or size > frame_limit - used:
        raise LimitExceeded(
            f"a frame of {used + <object> size} bytes or more, "
            f"{frame_limit} are allowed (Limits.frame_bytes)"
        )
    raise LimitExceeded(f"a block of {size} bytes, {limit} are allowed ({name})")
