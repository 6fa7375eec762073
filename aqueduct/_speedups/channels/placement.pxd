"""Bytes of an input on their way to their final memory; the middle of the decoders."""

from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.channels.encoder cimport COALESCE_BELOW
from aqueduct._speedups.channels.receive_buffer cimport ReceiveBuffer

cdef enum:
    # Payloads below this become bytes; larger ones land in aligned memory.
    SMALL = COALESCE_BELOW

cdef class PlacementBuffer(ReceiveBuffer):
    cdef object payload          # bytes, an AlignedBuffer or a given buffer; None: no memory yet
    cdef Py_ssize_t missing      # bytes of it that did not land yet
    cdef object _view            # a memoryview of it, once one is needed
    cdef uint8_t *_land          # where its next byte goes

    cpdef uint64_t reach(self, Py_ssize_t most) except? 0
    cpdef uint64_t take_up(self) except? 0xFFFFFFFFFFFFFFFF
    cdef int prepare(self, Py_ssize_t size, object target) except -1
    cdef bint land(self) noexcept
    cdef object room(self, Py_ssize_t hint)
    cdef int landed(self, Py_ssize_t size) except -1
    cdef void leave(self) noexcept
