"""The few numbers that one Arrow IPC message says of itself, read from its flatbuffer.

``Message`` of the Arrow format's ``Message.fbs``. What is read here pyarrow has written or
verified; nothing outside the bytes is read all the same.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy

from aqueduct._speedups.arrow.flatbuffer cimport Bytes, Numbers

__all__ = ["is_batch", "numbers"]

cdef enum:
    DICTIONARY = 2
    RECORD_BATCH = 3
    VERSION_5 = 4


def is_batch(metadata, int64_t nodes, int64_t buffers, int64_t views):
    """Whether this is a plain record batch of metadata V5 with so many parts, uncompressed."""
    cdef Numbers found
    look(metadata, &found)
    return (
        found.kind == RECORD_BATCH
        and found.version == VERSION_5
        and not found.compressed
        and found.nodes == nodes
        and found.buffers == buffers
        and found.views == views
    )


def numbers(metadata):
    """Kind, version, body length, layout, whether compressed, dictionary, whether a delta.

    The layout is (nodes, buffers without variadic ones, views), None where there is none; the
    dictionary is -1 where there is none. Raises ValueError if the flatbuffer is cut short.
    """
    cdef Numbers found
    look(metadata, &found)
    return (
        found.kind,
        found.version,
        found.body,
        (found.nodes, found.buffers, found.views) if found.layout else None,
        bool(found.compressed),
        found.dictionary,
        bool(found.delta),
    )


cdef int look(metadata, Numbers *found) except -1:
    cdef Py_buffer buffer
    cdef Bytes data
    PyObject_GetBuffer(metadata, &buffer, PyBUF_SIMPLE)
    try:
        data.start = <const uint8_t *> buffer.buf
        data.size = buffer.len
        return read(&data, found)
    finally:
        PyBuffer_Release(&buffer)


cdef int read(Bytes *data, Numbers *found) except -1:
    cdef int64_t message = load(data, 0, 4)
    cdef int64_t at, header, counts
    found.version = value_of(data, message, 0, 2)
    found.kind = value_of(data, message, 1, 1)
    found.body = value_of(data, message, 3, 8)
    found.nodes = found.buffers = found.views = 0
    found.layout = found.compressed = found.delta = False
    found.dictionary = -1
    header = follow(data, field(data, message, 2))
    if found.kind == DICTIONARY:
        found.dictionary = value_of(data, header, 0, 8)
        found.delta = value_of(data, header, 2, 1) != 0
        header = follow(data, field(data, header, 1))
    elif found.kind != RECORD_BATCH:
        return 0
    found.layout = True
    found.nodes = length_of(data, header, 1)
    found.buffers = length_of(data, header, 2)
    found.compressed = field(data, header, 3) != 0
    found.views = length_of(data, header, 4)
    if found.views:
        at = follow(data, field(data, header, 4)) + 4
        for counts in range(found.views):
            found.buffers -= load(data, at + 8 * counts, 8)
    return 0


cdef int64_t load(Bytes *data, int64_t at, int size) except? -1:
    """A little-endian number of ``size`` bytes at ``at``; those of 8 bytes are signed."""
    cdef uint8_t narrow
    cdef uint16_t short
    cdef uint32_t word
    cdef int64_t wide
    if at < 0 or at > data.size - size:
        raise ValueError("the metadata of an Arrow message is cut short")
    if size == 8:
        memcpy(&wide, data.start + at, 8)
        return wide
    if size == 4:
        memcpy(&word, data.start + at, 4)
        return word
    if size == 2:
        memcpy(&short, data.start + at, 2)
        return short
    memcpy(&narrow, data.start + at, 1)
    return narrow


cdef int64_t field(Bytes *data, int64_t table, int index) except -1:
    """Where field ``index`` of a table begins; 0 if it is absent."""
    cdef int64_t vtable = table - <int32_t> load(data, table, 4)
    cdef int64_t entry = 4 + 2 * index
    cdef int64_t offset
    if entry >= load(data, vtable, 2):
        return 0
    offset = load(data, vtable + entry, 2)
    return table + offset if offset else 0


cdef int64_t value_of(Bytes *data, int64_t table, int index, int size) except? -1:
    """The number in field ``index``; 0 if it is absent."""
    cdef int64_t at = field(data, table, index)
    return load(data, at, size) if at else 0


cdef int64_t follow(Bytes *data, int64_t at) except -1:
    """Where the table or vector begins that the field at ``at`` refers to."""
    if not at:
        raise ValueError("an Arrow message without its header")
    return at + load(data, at, 4)


cdef int64_t length_of(Bytes *data, int64_t table, int index) except -1:
    """The length of the vector in field ``index``; 0 if it is absent."""
    cdef int64_t at = field(data, table, index)
    return load(data, follow(data, at), 4) if at else 0
