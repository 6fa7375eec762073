"""Frames to bytes."""

from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    COALESCE_BELOW = 4096   # a buffer shorter than this is copied next to its neighbours

# Header data, normalised to tuples so that nothing can change between measuring and writing.
cdef tuple normal_headers(object headers)
cdef Py_ssize_t headers_size(tuple headers) except -1
# They are tuples of bytes by then, and there is room for them: nothing can raise.
cdef uint8_t *headers_store(uint8_t *out, tuple headers, Py_ssize_t size) noexcept
cdef list message_buffers(
    uint64_t number, object payload, object headers, object attachments, Py_ssize_t *size
)
# A tag and one varint; ``head`` and varbytes of ``ranges``, of which only the first may be zero.
cdef bytes tagged(int tag, object value, uint64_t highest, str what)
cdef bytes ranged(bytes head, tuple ranges)
