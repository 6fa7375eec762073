"""The whole life of a oneshot channel in two sequences."""

from libc.stdint cimport uint8_t

from aqueduct._speedups.channels.decoder cimport FrameDecoder

cdef uint8_t *route_store(uint8_t *out, object channel) except NULL
cdef bint memory_of(object data, const uint8_t **start, const uint8_t **end) noexcept
cdef int rewind(FrameDecoder decoder) except -1
