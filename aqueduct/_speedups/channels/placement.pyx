"""Bytes of an input on their way to their final memory.

A payload lands once: fed bytes are copied to their place as they come, and what a carrier reads
straight into ``room`` is not copied at all.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_GET_BUFFER
from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.base.buffers cimport AlignedBuffer, byte_view, copy_bytes, new_aligned
from aqueduct._speedups.channels.receive_buffer cimport ReceiveBuffer

from aqueduct.errors import LocalProtocolError

__all__ = ["PlacementBuffer"]


@cython.auto_pickle(False)
cdef class PlacementBuffer(ReceiveBuffer):
    """An input with a place for one payload; made by its subclasses alone."""

    cpdef uint64_t reach(self, Py_ssize_t most) except? 0:
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
            self._land = <uint8_t *> info.buf
            self.payload = target
        elif size < SMALL:
            self.payload = PyBytes_FromStringAndSize(NULL, size)
            self._land = <uint8_t *> PyBytes_AS_STRING(self.payload)
        else:
            aligned = new_aligned(size)
            self._land = aligned.data
            self.payload = aligned
        self._view = view
        self.missing = size
        return 0

    cdef bint land(self) noexcept:
        """Copies fed bytes to their place, once; True when the payload is whole."""
        cdef Py_ssize_t size
        while self.missing:
            if self._pos == self._end and not self.refill():
                return False
            size = min(self._end - self._pos, self.missing)
            copy_bytes(self._land, self._pos, size)
            self._pos += size
            self._land += size
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
        self._land += size
        self.missing -= size
        self.skip_outside(<uint64_t> size)
        return 0

    cdef void leave(self) noexcept:
        """Lets the payload go."""
        self.payload = self._view = None
        self.missing = 0
