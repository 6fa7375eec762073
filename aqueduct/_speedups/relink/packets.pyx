"""Packets of Relink: their heads to bytes, and packets from bytes.

A packet is two bytes of header, what its format adds, and padding to a multiple of 8 bytes (RL-9).
All alignment is relative to its start (RL-R2). A message has parts, each padded to 8 (RL-15). The
decoder knows the grammar of packets; what they do to which message is not its affair.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset

from aqueduct._speedups.base.buffers cimport bounds_of, piece_of
from aqueduct._speedups.base.varint cimport to_number

from aqueduct.errors import FrameError, LimitExceeded, LocalProtocolError

__all__ = [
    "CHANNEL_ACK",
    "CHANNEL_OP",
    "CLOSE",
    "CLOSED",
    "COMMIT",
    "COMMITTED",
    "CONSUMED",
    "FORMAT_NAMES",
    "GENERAL",
    "LARGE",
    "LONG",
    "MESSAGE",
    "NOP",
    "PING",
    "PONG",
    "RECEIVED",
    "RESUME",
    "ROLLBACK",
    "SEQUENCE_ACK",
    "SEQUENCE_OP",
    "SHORT_MAX",
    "SHUTDOWN",
    "SMALL_MAX",
    "TYPE_NAMES",
    "UNCOMMITTED",
    "PacketDecoder",
    "PacketStep",
    "encode_general",
    "encode_message_head",
    "encode_packet",
    "padding_of",
]

# Formats (RL-10). GENERAL is no number of the wire.
CHANNEL_OP = CHANNEL_OP_FORMAT
CHANNEL_ACK = CHANNEL_ACK_FORMAT
SEQUENCE_OP = SEQUENCE_OP_FORMAT
SEQUENCE_ACK = SEQUENCE_ACK_FORMAT
MESSAGE = MESSAGE_FORMAT
GENERAL = GENERAL_FORMAT

# Types of general packets (RL-11), operations and acknowledgements (RL-13), flags of messages.
NOP, PING, PONG, RESUME, SHUTDOWN = range(5)
COMMIT, ROLLBACK, CLOSE = range(3)
RECEIVED, CONSUMED, COMMITTED, UNCOMMITTED, CLOSED = range(5)
LONG = LONG_FLAG
LARGE = LARGE_FLAG
SHORT_MAX = SHORT_PARTS
SMALL_MAX = SMALL_SIZE

FORMAT_NAMES = ("channel-op", "channel-ack", "sequence-op", "sequence-ack", "message", "general")
TYPE_NAMES = (
    ("commit", "rollback", "close"),
    ("received", "consumed", "committed", "uncommitted", "closed"),
    ("commit", "rollback"),
    ("received", "consumed", "committed", "uncommitted"),
    (),
    ("nop", "ping", "pong", "resume", "shutdown"),
)

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF
cdef uint64_t HIGHEST_32 = 0xFFFFFFFF
cdef uint64_t BYTES_MAX = 0x7FFFFFFFFFFFFFFF
cdef uint8_t EMPTY = 0

cdef enum:
    CHANNEL_BIT = 1
    MULTICAST_BIT = 2
    LONG_FLAG = 1
    LARGE_FLAG = 2

    SHORT_PARTS = 255      # parts of a message that byte 1 can count
    SMALL_SIZE = 65535     # bytes of a part in a vector of small sizes
    HEADER_SIZE = 2
    GENERAL_SIZE = 8
    COUNT_AT = 4           # the number of targets of a multicast, after two bytes of padding
    TARGETS_AT = 8
    KEPT_ROOM = 65536      # a larger buffer of a straddling head is given back after it

    # States of the decoder.
    AT_HEAD = 0
    AT_PART = 1
    AT_TAIL = 2            # behind the last part: its padding, then DONE
    FAILED = 3

# How many types a format has; of messages these bits are flags.
cdef int[6] TYPES = [3, 5, 2, 4, 8, 5]


class PacketStep:
    """What ``PacketDecoder.next`` says."""

    NOTHING, PACKET, PIECE, DONE = range(4)


def padding_of(size):
    """How many zero bytes follow a part of ``size`` bytes, 0 to 7; LocalProtocolError below 0."""
    cdef uint64_t number = 0
    to_number(size, HIGHEST, "the size of a part", &number)
    return (8 - number % 8) % 8


def encode_general(int type):
    """The 8 bytes of a general packet, from NOP to SHUTDOWN; LocalProtocolError for others."""
    cdef uint8_t[GENERAL_SIZE] out
    if not 0 <= type < TYPES[<int> GENERAL_FORMAT]:
        raise LocalProtocolError(f"there is no general packet of type {type} (RL-11)")
    memset(out, 0, GENERAL_SIZE)
    out[0] = <uint8_t> (type << 5)
    return PyBytes_FromStringAndSize(<char *> out, GENERAL_SIZE)


def encode_packet(int format, int type, channels, id_size, *, bint multicast=False, sequence=None):
    """The bytes of an operation or acknowledgement, in its channel or sequence form.

    ``channels`` are the ids of the targets, one of them unless ``multicast``. ``id_size`` is the
    bytes of an id, 0 to 8, in the id space of ``format``. ``sequence``, 0 to 2^32 - 1, belongs to
    the sequence forms. LocalProtocolError for what has no such bytes.
    """
    cdef tuple targets = tuple(channels)
    cdef int width = width_of(id_size)
    cdef uint64_t number = 0, size
    cdef bint numbered = format == SEQUENCE_OP_FORMAT or format == SEQUENCE_ACK_FORMAT
    cdef bytes out
    cdef uint8_t *start
    cdef uint8_t *at
    if not 0 <= format < MESSAGE_FORMAT or not 0 <= type < TYPES[format]:
        raise LocalProtocolError(
            f"there is no operation or acknowledgement of format {format} and type {type} "
            "(RL-13, RL-14)"
        )
    if numbered != (sequence is not None):
        raise LocalProtocolError("a sequence number belongs to the sequence forms alone (RL-14)")
    if numbered:
        to_number(sequence, HIGHEST_32, "the sequence number", &number)
    size = targets_size(len(targets), width, multicast)
    if numbered:
        size = aligned(size, 4) + 4
    size = aligned(size, 8)
    out = zeroed(size, &start)
    at = targets_store(start, format, type, targets, width, multicast)
    if numbered:
        at = start + aligned(<uint64_t> (at - start), 4)
        number_store(at, number, 4)
    return out


def encode_message_head(
    channels, id_size, sizes, *, bint multicast=False, bint long=False, bint large=False
):
    """The bytes of a message up to the data of its parts, in the shortest form.

    ``channels`` and ``id_size`` are as of ``encode_packet``. ``sizes`` are the bytes of each part.
    The caller appends each part and ``padding_of(size)`` zero bytes. ``long`` and ``large`` ask for
    these forms where shorter ones would do. LocalProtocolError for what has no such bytes: 2^32
    parts or targets, or 2^63 bytes in all.
    """
    cdef tuple targets = tuple(channels)
    cdef tuple parts = tuple(sizes)
    cdef int width = width_of(id_size), size_width
    cdef int flags = (LONG_FLAG if long else 0) | (LARGE_FLAG if large else 0)
    cdef uint64_t number = 0, total = 0, size, vector
    cdef bytes out
    cdef object part
    cdef uint8_t *start
    cdef uint8_t *at
    if <uint64_t> len(parts) > HIGHEST_32:
        raise LocalProtocolError(f"a message has {HIGHEST_32} parts at most, not {len(parts)}")
    for part in parts:
        to_number(part, BYTES_MAX, "the size of a part", &number)
        if number > BYTES_MAX - total:
            raise LocalProtocolError("the parts of a message have 2^63 bytes or more")
        total += number
        if number > SMALL_SIZE:
            flags |= LARGE_FLAG
    if len(parts) > SHORT_PARTS:
        flags |= LONG_FLAG
    size_width = 8 if flags & LARGE_FLAG else 2
    size = aligned(targets_size(len(targets), width, multicast), 2)
    if flags & LONG_FLAG:
        size += 4
    vector = aligned(size, size_width)
    size = aligned(vector + <uint64_t> len(parts) * size_width, 8)
    out = zeroed(size, &start)
    at = targets_store(start, MESSAGE_FORMAT, flags, targets, width, multicast)
    if flags & LONG_FLAG:
        at = start + aligned(<uint64_t> (at - start), 2)
        number_store(at, <uint64_t> len(parts), 4)
    else:
        start[1] = <uint8_t> len(parts)
    at = start + vector
    for part in parts:
        to_number(part, BYTES_MAX, "the size of a part", &number)
        at = number_store(at, number, size_width)
    return out


@cython.final
@cython.auto_pickle(False)
cdef class PacketDecoder:
    """The packets of one peer to steps, whatever pieces their bytes come in.

    ``sender_id_size`` and ``receiver_id_size`` are bytes of a channel id, 0 to 8, of the peer whose
    packets these are and of the other: acknowledgements name channels of the other (RL-10).
    ``parts``, ``targets`` and ``message_bytes`` bound what one packet may announce. The parts of a
    message count by their sizes, without padding.

    ``feed`` what came, then ``next`` until it says NOTHING; only then feed again. PACKET comes when
    the head of a packet is known: of a message all up to the data of its parts, of others all.
    From then to the next PACKET its fields are valid:

    - ``format`` and ``type``; of a message the type is its flags, LONG | LARGE
    - ``multicast`` and ``channels``, the ids of its targets
    - ``sequence``, -1 if there is none
    - ``sizes`` of the parts of a message, in bytes

    The parts of a message come in pieces, as their bytes come: ``data`` of PIECE belongs to part
    ``part``, of which ``missing`` bytes are yet to come. After NOTHING ``part`` is the one that the
    next bytes of a part belong to. An empty part has no piece, and padding is never shown. Pieces
    of 4096 bytes or more are views of what was fed. DONE ends a message, after its last padding.
    ``packets`` counts those that have begun.

    Raises FrameError for bytes that are no packet, and LimitExceeded as soon as more is announced
    than is allowed. No memory is taken for what is only announced. After an error every method
    raises it again. LocalProtocolError for ids of more than 8 bytes.
    """

    def __cinit__(
        self,
        sender_id_size,
        receiver_id_size,
        *,
        parts=0xFFFFFFFF,
        targets=0xFFFFFFFF,
        message_bytes=0x7FFFFFFFFFFFFFFF,
    ):
        self._pos = self._end = self._start = &EMPTY
        self._state = AT_HEAD
        self._need = 1
        self._sender_id_size = width_of(sender_id_size)
        self._receiver_id_size = width_of(receiver_id_size)
        to_number(parts, HIGHEST_32, "the limit of parts", &self._parts_limit)
        to_number(targets, HIGHEST_32, "the limit of targets", &self._targets_limit)
        to_number(message_bytes, BYTES_MAX, "the limit of a message", &self._bytes_limit)
        self.format = GENERAL_FORMAT
        self.channels = self.sizes = ()
        self.sequence = -1

    def __dealloc__(self):
        PyMem_Free(self._held)

    def feed(self, data):
        """Takes the next bytes, by reference: they must not change while pieces of them live."""
        self.push(data)

    def next(self):
        """The next step, one of ``PacketStep``."""
        return self.step()

    def landed_outside(self, size):
        """``size`` bytes of the current part reached their place without being fed."""
        cdef uint64_t number = 0
        to_number(size, HIGHEST, "the size", &number)
        self.landed(number)

    def end(self):
        """No bytes follow: FrameError (``truncated``) inside a packet."""
        if self._error is not None:
            raise self._error
        if self._state != AT_HEAD or self._held_size or self._pos != self._end:
            raise FrameError("the bytes end inside a packet", truncated=True)

    @property
    def consumed(self):
        """How many bytes of what was fed last are consumed."""
        return self._pos - self._start

    @property
    def in_payload(self):
        """Whether what was fed is consumed and the next bytes belong to part ``part``."""
        return self.expects() > 0

    # For the other compiled modules.

    cdef int push(self, object data) except -1:
        if self._error is not None:
            raise self._error
        if self._pos != self._end:
            raise LocalProtocolError("feed before what was fed is consumed")
        self._fed = bounds_of(data, &self._start, &self._end)
        self._pos = self._start
        return 0

    cdef int step(self) except -1:
        if self._state == AT_HEAD:
            if not self._gather():
                return NOTHING
            self.packets += 1
            if self.format == MESSAGE_FORMAT:
                self._padding = 0
                self._enter(0)
            return PACKET
        if self._state == FAILED:
            raise self._error
        if self._state == AT_PART and self.missing == 0:
            self._padding = <uint64_t> self.sizes[self.part]
            self._padding = aligned(self._padding, 8) - self._padding
            self._enter(self.part + 1)
        self.data = None
        if self._padding and not self._skip():
            self._fed = None
            return NOTHING
        if self._state == AT_PART:
            self.data = self._piece()
            return NOTHING if self.data is None else PIECE
        self._state = AT_HEAD
        return DONE

    cdef int landed(self, uint64_t size) except -1:
        if self._error is not None:
            raise self._error
        if size > self.expects():
            raise LocalProtocolError(
                f"{size} bytes cannot have landed: {self.expects()} bytes of a part are expected"
            )
        self.missing -= size
        return 0

    cdef uint64_t expects(self) noexcept:
        """Bytes of the current part that come next. It looks at fields alone: nothing can raise."""
        if self._state != AT_PART or self._padding or self._pos != self._end:
            return 0
        return self.missing

    # Within.

    cdef bint _gather(self) except -1:
        """Reads a head as a whole; False: its bytes are not all here, and held."""
        cdef uint64_t here = <uint64_t> (self._end - self._pos)
        cdef uint64_t part
        cdef int64_t size
        if self._held_size == 0 and here:
            size = self._load(self._pos, here)
            if size:
                self._pos += size
                return True
        while True:
            if self._held_size < self._need:
                part = min(self._need - self._held_size, <uint64_t> (self._end - self._pos))
                if part == 0:
                    self._fed = None
                    return False
                self._hold(part)
            size = self._load(self._held, self._held_size)
            if size:
                self._held_size = 0
                if self._held_room > KEPT_ROOM:
                    PyMem_Free(self._held)
                    self._held = NULL
                    self._held_room = 0
                return True

    cdef int64_t _load(self, const uint8_t *data, uint64_t size) except -1:
        """The size of the head at ``data``, which has ``size`` bytes, one at least.

        0: they are not all there, and nothing more is known before ``_need`` of them are.
        """
        cdef int specific = data[0] >> 5, format = data[0] >> 2 & 7, width, size_width = 2
        cdef bint multicast = data[0] & MULTICAST_BIT != 0
        cdef uint64_t at = HEADER_SIZE, targets = 1, parts = 0, ids = HEADER_SIZE, vector = 0
        cdef int64_t sequence = -1
        cdef tuple channels
        if not data[0] & CHANNEL_BIT:
            format = GENERAL_FORMAT
            multicast = False
        elif format > MESSAGE_FORMAT:
            self._fail(FrameError(f"a packet of format {format}, which is not used (RL-1, RL-10)"))
        if specific >= TYPES[format]:
            self._fail(unused(format, specific))
        if format == GENERAL_FORMAT:
            if size < GENERAL_SIZE:
                self._need = GENERAL_SIZE
                return 0
            self._need = 1
            self.format = format
            self.type = specific
            self.multicast = False
            self.channels = self.sizes = ()
            self.sequence = -1
            return GENERAL_SIZE
        width = self._receiver_id_size if format & 1 else self._sender_id_size
        if multicast:
            if size < TARGETS_AT:
                self._need = TARGETS_AT
                return 0
            targets = number_load(data + COUNT_AT, 4)
            if targets > self._targets_limit or (targets > TARGETS_WITHOUT_ID and width == 0):
                self._fail(too_many_targets(targets, self._targets_limit))
            at = ids = TARGETS_AT
        at += targets * width
        if format == MESSAGE_FORMAT:
            at = aligned(at, 2)
            if specific & LONG_FLAG:
                at += 4
            if size < at:
                self._need = at
                return 0
            parts = number_load(data + at - 4, 4) if specific & LONG_FLAG else data[1]
            if parts > self._parts_limit:
                self._fail(LimitExceeded(
                    f"a message of {parts} parts is above {self._parts_limit} (Relink.parts)"
                ))
            if specific & LARGE_FLAG:
                size_width = 8
                at = aligned(at, 8)
            vector = at
            at += parts * size_width
            self._add_sizes(data + vector, size - min(size, vector), parts, size_width)
        elif format == SEQUENCE_OP_FORMAT or format == SEQUENCE_ACK_FORMAT:
            at = aligned(at, 4) + 4
        at = aligned(at, 8)
        if size < at:
            self._need = at
            return 0
        if format == SEQUENCE_OP_FORMAT or format == SEQUENCE_ACK_FORMAT:
            sequence = <int64_t> number_load(data + aligned(ids + targets * width, 4), 4)
        channels = numbers(data + ids, targets, width)
        self.sizes = numbers(data + vector, parts, size_width)
        self.channels = channels
        self.format = format
        self.type = specific & (LONG_FLAG | LARGE_FLAG) if format == MESSAGE_FORMAT else specific
        self.multicast = multicast
        self.sequence = sequence
        self._need = 1
        self._counted = self._sum = 0
        return <int64_t> at

    cdef int _add_sizes(
        self, const uint8_t *vector, uint64_t here, uint64_t parts, int width
    ) except -1:
        """Adds the sizes that are in the ``here`` bytes of the vector, and not yet counted."""
        cdef uint64_t size
        parts = min(parts, here // <uint64_t> width)
        while self._counted < parts:
            size = number_load(vector + self._counted * <uint64_t> width, width)
            if size > self._bytes_limit - self._sum:
                # In this form the sum cannot overflow.
                self._fail(LimitExceeded(
                    f"a message of more than {self._bytes_limit} bytes (Relink.message_bytes)"
                ))
            self._sum += size
            self._counted += 1
        return 0

    cdef int _hold(self, uint64_t size) except -1:
        """Copies the next ``size`` bytes of a head that is not whole to those that came before."""
        cdef uint64_t room = self._held_size + size
        cdef uint8_t *held
        if room > self._held_room:
            room = max(<uint64_t> 64, 2 * room)
            held = <uint8_t *> PyMem_Realloc(self._held, <size_t> room)
            if held == NULL:
                raise MemoryError
            self._held = held
            self._held_room = room
        memcpy(self._held + self._held_size, self._pos, <size_t> size)
        self._held_size += size
        self._pos += size
        return 0

    cdef int _enter(self, uint64_t part) except -1:
        """Goes to the first part from ``part`` on that is not empty, or behind the last."""
        cdef uint64_t count = <uint64_t> len(self.sizes)
        self.missing = 0
        while part < count:
            self.missing = <uint64_t> self.sizes[part]
            if self.missing:
                break
            part += 1
        self.part = part
        self._state = AT_PART if part < count else AT_TAIL
        return 0

    cdef bint _skip(self) noexcept:
        """Whether all padding before the current part, or the end, is consumed.

        It changes fields alone: nothing can raise.
        """
        cdef uint64_t size = min(self._padding, <uint64_t> (self._end - self._pos))
        self._pos += size
        self._padding -= size
        return self._padding == 0

    cdef object _piece(self):
        """The next bytes of the part, at least one; None: there are none."""
        cdef Py_ssize_t size = self._end - self._pos
        cdef object data
        if size == 0:
            self._fed = None
            return None
        if <uint64_t> size > self.missing:
            size = <Py_ssize_t> self.missing
        data = piece_of(self._fed, self._pos - self._start, size)
        self._pos += size
        self.missing -= <uint64_t> size
        return data

    cdef int _fail(self, object error) except -1:
        self._error = error
        self._state = FAILED
        raise error


cdef tuple numbers(const uint8_t *data, uint64_t count, int width):
    """``count`` numbers of ``width`` bytes each."""
    cdef tuple out
    cdef object number
    cdef Py_ssize_t index
    if count == 1:
        return (number_load(data, width),)
    out = PyTuple_New(<Py_ssize_t> count)
    for index in range(<Py_ssize_t> count):
        number = number_load(data + index * width, width)
        Py_INCREF(number)
        PyTuple_SET_ITEM(out, index, number)
    return out


cdef int width_of(object id_size) except -1:
    """An argument that is the size of a channel id."""
    cdef uint64_t number = 0
    to_number(id_size, ID_SIZE_MAX, "the size of a channel id", &number)
    return <int> number


cdef uint64_t targets_size(Py_ssize_t count, int width, bint multicast) except 0:
    """The bytes of a head up to its targets, which LocalProtocolError refuses if it must."""
    if not multicast:
        if count != 1:
            raise LocalProtocolError(f"a packet that is no multicast has one target, not {count}")
        return <uint64_t> (HEADER_SIZE + width)
    if <uint64_t> count > HIGHEST_32:
        raise LocalProtocolError(f"a packet has {HIGHEST_32} targets at most, not {count}")
    return TARGETS_AT + <uint64_t> count * <uint64_t> width


cdef uint8_t *targets_store(
    uint8_t *start, int format, int specific, tuple targets, int width, bint multicast
) except NULL:
    """Writes a head up to its targets; returns where the next byte goes."""
    cdef uint64_t number = 0
    cdef uint64_t highest = HIGHEST >> (64 - 8 * width) if width else 0
    cdef uint8_t *at = start + <int> (TARGETS_AT if multicast else HEADER_SIZE)
    start[0] = <uint8_t> (
        CHANNEL_BIT | (MULTICAST_BIT if multicast else 0) | format << 2 | specific << 5
    )
    if multicast:
        number_store(start + <int> COUNT_AT, <uint64_t> len(targets), 4)
    for target in targets:
        to_number(target, highest, f"a channel id of {width} bytes", &number)
        at = number_store(at, number, width)
    return at


cdef bytes zeroed(uint64_t size, uint8_t **start):
    """New bytes of zeros, to be filled before anyone sees them."""
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> size)
    start[0] = <uint8_t *> PyBytes_AS_STRING(out)
    memset(start[0], 0, <size_t> size)
    return out


cdef object unused(int format, int type):
    rule = "RL-11" if format == GENERAL_FORMAT else "RL-13"
    if format == SEQUENCE_OP_FORMAT or format == SEQUENCE_ACK_FORMAT:
        rule = "RL-14"
    return FrameError(
        f"a packet {FORMAT_NAMES[format]} of type {type}, which is not used (RL-1, {rule})"
    )


cdef object too_many_targets(uint64_t targets, uint64_t limit):
    if targets > limit:
        return LimitExceeded(f"a packet to {targets} targets is above {limit} (Relink.targets)")
    return LimitExceeded(
        f"a packet to {targets} targets that have no id is above {<int> TARGETS_WITHOUT_ID} "
        "(Relink.targets)"
    )
