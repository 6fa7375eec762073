"""What the metadata of one Arrow IPC message says, in numbers."""

from libc.stdint cimport int64_t, uint8_t


cdef struct Bytes:
    const uint8_t *start
    Py_ssize_t size


cdef struct Numbers:
    int64_t kind
    int64_t version
    int64_t body
    bint layout
    int64_t nodes
    int64_t buffers
    int64_t views
    bint compressed
    int64_t dictionary
    bint delta


# Reads the metadata in any buffer; ValueError if it is cut short.
cdef int look(metadata, Numbers *found) except -1
