"""Chunks of bpmux/rel: their tags, and an incremental decoder of what comes before payloads."""

from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    PAYLOAD_FLAG = 16
    CREDIT_FLAG = 8
    PING_FLAG = 4
    END_FLAG = 2
    ACK_END_FLAG = 1
    DUPLEX_TYPE = 6
    PARTIAL_TYPE = 7
    # A Partial with its size, then tag, identifier, payload length, credit and end length.
    HEAD_MAX = 9 + 1 + 4 * 9

    # Steps of the decoder.
    NOTHING = 0       # all that was fed is consumed
    HEAD = 1          # a chunk begins: type, identifier, flags, total, payload are known
    PIECE = 2         # ``data`` is the next piece of the payload; ``missing`` bytes follow
    REST = 3          # credit and the length of the end payload are known
    END_PIECE = 4     # as PIECE, of the end payload
    DONE = 5          # the chunk is complete

cdef class ChunkDecoder:
    cdef const uint8_t *_pos
    cdef const uint8_t *_end
    cdef const uint8_t *_start
    cdef object _fed            # owner of that memory: bytes or a memoryview
    cdef uint8_t[HEAD_MAX] _held  # the beginning of a head that straddles two reads
    cdef int _held_size
    cdef int _state
    cdef object _error
    cdef readonly int type
    cdef readonly int flags
    cdef readonly uint64_t identifier
    cdef readonly uint64_t total
    cdef readonly uint64_t payload
    cdef readonly uint64_t credit
    cdef readonly uint64_t end_payload
    cdef readonly uint64_t chunks    # so many have begun
    cdef readonly uint64_t missing
    cdef readonly object data

    cdef int push(self, object data) except -1
    cdef int step(self) except -1
    cdef int landed(self, uint64_t size) except -1
    cdef bint _gather(self, bint head) except -1
    cdef int _load_head(self, const uint8_t *data, const uint8_t *end) except -1
    cdef int _load_rest(self, const uint8_t *data, const uint8_t *end) except -1
    cdef int _check(self) except -1
    cdef int _short(self, int size, str what) except -1
    cdef int _fail(self, str text) except -1
    cdef object _piece(self)

cdef uint8_t *head_store(
    uint8_t *out, int type, int flags, uint64_t identifier, uint64_t total
) noexcept nogil
cdef str type_name(int type)
