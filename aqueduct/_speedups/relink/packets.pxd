"""Packets of Relink: their heads, and an incremental decoder of packets and payloads."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

cdef enum:
    # Formats (RL-10). The last is no number of the wire: it is of packets without the channel bit.
    CHANNEL_OP_FORMAT = 0
    CHANNEL_ACK_FORMAT = 1
    SEQUENCE_OP_FORMAT = 2
    SEQUENCE_ACK_FORMAT = 3
    MESSAGE_FORMAT = 4
    GENERAL_FORMAT = 5

    ID_SIZE_MAX = 8
    # Targets that have no id take no bytes: what a packet announces is bounded by this, too.
    TARGETS_WITHOUT_ID = 65536

    # Steps of the decoder.
    NOTHING = 0       # all that was fed is consumed
    PACKET = 1        # a packet begins; of other packets than messages, it is whole
    PIECE = 2         # ``data`` is the next piece of part ``part``; ``missing`` bytes follow
    DONE = 3          # the message is complete

cdef class PacketDecoder:
    cdef const uint8_t *_pos
    cdef const uint8_t *_end
    cdef const uint8_t *_start
    cdef object _fed            # owner of that memory: bytes or a memoryview
    cdef uint8_t *_held         # the beginning of a head that straddles reads
    cdef uint64_t _held_size
    cdef uint64_t _held_room
    cdef uint64_t _need         # bytes of the head without which nothing more is known of it
    cdef uint64_t _counted      # sizes of parts that are in ``_sum``
    cdef uint64_t _sum
    cdef uint64_t _padding      # to skip before part ``part``, or the end
    cdef int _state
    cdef object _error
    cdef int _sender_id_size
    cdef int _receiver_id_size
    cdef uint64_t _parts_limit
    cdef uint64_t _targets_limit
    cdef uint64_t _bytes_limit
    cdef readonly int format
    cdef readonly int type
    cdef readonly bint multicast
    cdef readonly tuple channels
    cdef readonly int64_t sequence
    cdef readonly tuple sizes
    cdef readonly uint64_t part
    cdef readonly uint64_t missing
    cdef readonly uint64_t packets   # so many have begun
    cdef readonly object data

    cdef int push(self, object data) except -1
    cdef int step(self) except -1
    cdef int landed(self, uint64_t size) except -1
    cdef uint64_t expects(self) noexcept   # bytes of a part that come next, right here; else 0
    cdef bint _gather(self) except -1
    cdef int64_t _load(self, const uint8_t *data, uint64_t size) except -1
    cdef int _add_sizes(
        self, const uint8_t *vector, uint64_t here, uint64_t parts, int width
    ) except -1
    cdef int _hold(self, uint64_t size) except -1
    cdef int _enter(self, uint64_t part) except -1
    cdef bint _skip(self) noexcept
    cdef object _piece(self)
    cdef int _fail(self, object error) except -1

cdef inline uint64_t aligned(uint64_t offset, uint64_t to) noexcept nogil:
    """The first multiple of ``to``, a power of two, from ``offset`` on."""
    return (offset + to - 1) & ~(to - 1)


cdef inline uint64_t number_load(const uint8_t *data, int size) noexcept nogil:
    """The little-endian number of ``size`` bytes, 0 to 8 (RL-1)."""
    cdef uint64_t value = 0
    while size:
        size -= 1
        value = value << 8 | data[size]
    return value


cdef inline uint8_t *number_store(uint8_t *out, uint64_t value, int size) noexcept nogil:
    """Writes ``value`` in ``size`` bytes; returns where the next byte goes."""
    cdef int index
    for index in range(size):
        out[index] = <uint8_t> value
        value >>= 8
    return out + size
