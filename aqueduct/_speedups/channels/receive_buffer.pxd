"""Fed chunks in a row, read by a cursor, and a place for a payload."""

from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.base.varint cimport VARINT_ABOVE_64, VARINT_PADDED, raise_varint
from aqueduct._speedups.channels.encoder cimport COALESCE_BELOW

cdef enum:
    # While many chunks wait, those up to TINY bytes are packed into blocks of TAIL bytes: a peer
    # that sends single bytes must not cost a Python object for each.
    PACK_FROM = 16
    TINY = 128
    TAIL = 1024
    # Payloads below this become bytes; larger ones land in aligned memory.
    SMALL = COALESCE_BELOW

cdef class ReceiveBuffer:
    cdef const uint8_t *pos      # the next unread byte of the current chunk
    cdef const uint8_t *end
    cdef const uint8_t *_start
    cdef uint64_t _before         # bytes of the chunks before the current one
    cdef uint64_t fed
    cdef object _chunk            # owner of the current memory: bytes or a memoryview
    cdef list _queue
    cdef Py_ssize_t _head         # index of the first waiting chunk
    cdef bytes _tail              # the last waiting chunk while it is open for packing
    cdef Py_ssize_t _tail_used
    cdef uint8_t *_scratch        # a block that straddles chunks
    cdef Py_ssize_t gathered
    cdef Py_ssize_t _scratch_room
    cdef object payload          # bytes, an AlignedBuffer or a given buffer; None: no memory yet
    cdef Py_ssize_t whole        # bytes of it, once there is memory
    cdef Py_ssize_t missing      # bytes of it that did not land yet
    cdef object _view            # a memoryview of it, once one is needed
    cdef uint8_t *place          # where its next byte goes

    # What is ``noexcept`` looks at fields and C memory alone. The queue holds what ``push`` has
    # checked, so nothing there can raise.
    cdef int push(self, object data) except -1
    cdef int _close_tail(self) except -1
    cdef bint refill(self) noexcept
    cdef const uint8_t *block(self, Py_ssize_t size) except? NULL
    cdef void release_block(self) noexcept
    cdef void drop(self) noexcept
    cdef void skip_outside(self, uint64_t size) noexcept
    cdef uint64_t taken(self) noexcept
    cdef uint64_t left(self) noexcept
    cdef uint64_t reach(self, Py_ssize_t most) noexcept
    cpdef uint64_t take_up(self) except? 0xFFFFFFFFFFFFFFFF
    cdef int prepare(self, Py_ssize_t size, object target) except -1
    cdef bint land(self) noexcept
    cdef object room(self, Py_ssize_t hint)
    cdef int landed(self, Py_ssize_t size) except -1
    cdef void leave(self) noexcept


cdef inline int read_varint(ReceiveBuffer buffer, uint64_t *value, int *shift) except -1:
    """Reads on in a varint, wherever it was cut: 1 and ``value``, or 0 for more bytes.

    ``shift`` is 0 between varints.
    """
    cdef uint8_t byte
    if shift[0] == 0:
        if buffer.pos < buffer.end and buffer.pos[0] < 0x80:
            value[0] = buffer.pos[0]
            buffer.pos += 1
            return 1
        value[0] = 0
    while True:
        if buffer.pos == buffer.end and not buffer.refill():
            return 0
        byte = buffer.pos[0]
        buffer.pos += 1
        if shift[0] == 63 and byte > 1:
            raise_varint(VARINT_ABOVE_64)
        value[0] |= <uint64_t> (byte & 0x7f) << shift[0]
        if byte < 0x80:
            if byte == 0 and shift[0]:
                raise_varint(VARINT_PADDED)
            shift[0] = 0
            return 1
        shift[0] += 7


cdef inline int check_length(
    uint64_t size, uint64_t used, uint64_t frame_limit, uint64_t limit, str name
) except -1:
    """LimitExceeded unless ``size`` bytes may follow the ``used`` ones of a frame.

    ``limit`` is that of a block, by its ``name``.
    """
    if used > frame_limit or size > frame_limit - used or size > limit:
        raise_length(size, used, frame_limit, limit, name)
    return 0


cdef int raise_length(
    uint64_t size, uint64_t used, uint64_t frame_limit, uint64_t limit, str name
) except -1
