"""Compressed record batches: how payloads are packed, and what is looked at before they unpack.

Each buffer of a body is packed by itself, as Arrow's ``BodyCompression`` says: its length, eight
bytes little-endian, then an LZ4 or Zstandard frame; or -1, then the buffer as it is, where packing
would not pay. Arrow itself unpacks. A few bytes may claim to be any amount of memory, so first
the claims are summed up: a payload may unpack to ``FREE`` bytes and ``RATIO`` times its own size,
and never to more than the limit of a batch. Who has a batch that packs better adds zeros to it.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from struct import Struct
from typing import Final, NamedTuple

import pyarrow as pa

from aqueduct.arrow.encode import Encoded, Part
from aqueduct.arrow.ipc import ALIGNMENT, DICTIONARY, RECORD_BATCH, VERSION_5
from aqueduct.config import COMPRESSIONS
from aqueduct.errors import ConfigError

__all__ = [
    "FREE",
    "RATIO",
    "BadPacking",
    "Overblown",
    "Unpacking",
    "codec_of",
    "compress",
    "pack",
]

FREE: Final = 1 << 20
"""Bytes that any payload may unpack to."""
RATIO: Final = 256
"""What each byte of a payload may unpack to beyond that."""

_LEAST: Final = 1 << 10
"""Payloads below this stay as they are: there is nothing to gain."""
_LEAST_BUFFER: Final = 128
"""So do buffers."""
_WORTH: Final = 0.95
"""What is packed to more than this share of itself is sent as it was."""
_RAW: Final = (-1).to_bytes(8, "little", signed=True)
_ZEROS: Final = bytes(ALIGNMENT)

_U32: Final = Struct("<I")
_I32: Final = Struct("<i")
_U16: Final = Struct("<H")
_I64: Final = Struct("<q")
_PAIR: Final = Struct("<qq")
_HEAD: Final = Struct("<4si")


def codec_of(name: str) -> str:
    """``name`` if it is a codec's, "" for ``none``. Raises ConfigError for anything else."""
    if name == "none":
        return ""
    if name not in COMPRESSIONS:
        raise ConfigError(
            f"compression is {name!r}; it must be one of {', '.join(COMPRESSIONS)}, none"
        )
    return name


# ---------------------------------------------------------------- sending


def compress(encoded: Encoded, codec: str) -> Encoded:
    """The same payload, packed; itself where that saves nothing worth the trouble."""
    if encoded.size < _LEAST:
        return encoded
    found = pack(encoded, codec)
    return found if found.size <= encoded.size * _WORTH else encoded


def pack(encoded: Encoded, codec: str) -> Encoded:
    """The same payload, packed in any case."""
    return _Packer(encoded, codec).pack()


class _Packer:
    """Packs one payload."""

    def __init__(self, encoded: Encoded, codec: str) -> None:
        self._parts = [memoryview(part).cast("B") for part in encoded.buffers]
        self._starts = [0, *accumulate(len(part) for part in self._parts)]
        self._size = encoded.size
        self._codec = pa.Codec(codec)
        self._number = COMPRESSIONS.index(codec)
        self._unpacked = 0
        self._out: list[Part] = []
        self._written = 0

    def pack(self) -> Encoded:
        place = 0
        while place < self._size:
            _, length = _HEAD.unpack(self._bytes(place, 8))
            body = place + 8 + length
            message = _read(bytes(self._bytes(place + 8, length)))
            self._message(message, body, last=body + message.body == self._size)
            place = body + message.body
        return Encoded(self._out, self._written)

    def _message(self, message: _Message, start: int, *, last: bool) -> None:
        body: list[Part] = []
        size = 0
        buffers: list[tuple[int, int]] = []
        for offset, length in message.buffers:
            self._unpacked += length
            if not length:
                buffers.append((size, 0))
                continue
            data = self._bytes(start + offset, length)
            packed = self._packed(data)
            # What Arrow reads in place lies right for it: behind its prefix, at a multiple of 64.
            raw = packed is None
            padding = -(size + 8) % ALIGNMENT if raw else -size % 8
            if padding:
                body.append(_ZEROS[:padding])
            size += padding
            found = data if packed is None else packed
            body += (_RAW if raw else _I64.pack(length), found)
            buffers.append((size, 8 + len(found)))
            size += 8 + len(found)
        padding = -size % ALIGNMENT
        if last:
            # It may not unpack to more than the receiver allows for its size.
            missing = -(-(self._unpacked - FREE) // RATIO) - self._written - size
            padding = max(padding, missing + -(size + missing) % ALIGNMENT)
        if padding:
            body.append(bytes(padding))
        metadata = _write(message._replace(buffers=buffers, body=size + padding), self._number)
        fill = -(self._written + 8 + len(metadata)) % ALIGNMENT
        head = _HEAD.pack(b"\xff\xff\xff\xff", len(metadata) + fill)
        self._out += (head + metadata + _ZEROS[:fill], *body)
        self._written += 8 + len(metadata) + fill + size + padding

    def _packed(self, data: memoryview) -> memoryview | None:
        if len(data) < _LEAST_BUFFER:
            return None
        packed = memoryview(self._codec.compress(pa.py_buffer(data))).cast("B")
        return packed if len(packed) <= len(data) * _WORTH else None

    def _bytes(self, start: int, length: int) -> memoryview:
        """Bytes of the payload: in place if they lie in one part, else joined."""
        index = bisect_right(self._starts, start) - 1
        at = start - self._starts[index]
        if at + length <= len(self._parts[index]):
            return self._parts[index][at : at + length]
        joined = bytearray()
        while len(joined) < length:
            joined += self._parts[index][at : at + length - len(joined)]
            index, at = index + 1, 0
        return memoryview(joined)


# -------------------------------------------------------------- receiving


class BadPacking(Exception):
    """A compressed payload that makes no sense, or that was not agreed on."""


class Overblown(Exception):
    """A payload that claims to unpack to more than it may."""


class Unpacking:
    """What one payload may unpack to, over all of its messages."""

    def __init__(
        self,
        codecs: tuple[str, ...],
        limit: int,
        payload: int,
    ) -> None:
        """``payload`` is its size as it came; ``limit`` that of a batch."""
        self._codecs = codecs
        self._limit = limit
        self._payload = payload
        self._most = min(limit, FREE + RATIO * payload)
        self._claimed = 0

    def admit(self, metadata: pa.Buffer, body: pa.Buffer) -> int:
        """Looks at one compressed message, before anything of it is unpacked.

        Returns the bytes that it will unpack to. Raises BadPacking and Overblown.
        """
        message = _read(memoryview(metadata))
        if message.method or not 0 <= message.codec < len(COMPRESSIONS):
            raise BadPacking(
                f"it is compressed in an unknown way (codec {message.codec}, method "
                f"{message.method})"
            )
        codec = COMPRESSIONS[message.codec]
        if codec not in self._codecs:
            raise BadPacking(f"it is compressed by {codec}, which was not agreed on")
        view = memoryview(body)
        claimed = 0
        for number, (offset, length) in enumerate(message.buffers):
            if not length:
                continue
            if not 0 <= offset <= offset + length <= len(view) or length < 8:
                raise BadPacking(
                    f"its compressed buffer {number}, {length} bytes at {offset}, does not lie in "
                    f"the {len(view)} bytes of its body"
                )
            (claim,) = _I64.unpack_from(view, offset)
            if claim < -1:
                raise BadPacking(f"its compressed buffer {number} claims to hold {claim} bytes")
            claimed += length - 8 if claim == -1 else claim
        self._claimed += claimed
        if self._claimed > self._most:
            raise Overblown(
                f"its {self._payload} bytes claim to unpack to {self._claimed}, above the limit of "
                + (
                    f"{self._limit} (Calls.batch_limit)"
                    if self._most == self._limit
                    else f"{self._most}: {RATIO} times its size and {FREE}"
                )
            )
        return claimed


# -------------------------------------------------------- the flatbuffers


class _Message(NamedTuple):
    """A record batch, or the one inside a dictionary, as its metadata describes it."""

    dictionary: int
    """The dictionary's id; -1: it is a batch."""
    delta: bool
    rows: int
    nodes: bytes
    buffers: list[tuple[int, int]]
    """Offset and length of each, in the body."""
    counts: bytes
    """How many variadic buffers each column of views has."""
    body: int
    codec: int
    """-1: not compressed."""
    method: int


def _read(data: memoryview | bytes) -> _Message:
    """Reads what Arrow has written, or verified."""
    message = _U32.unpack_from(data, 0)[0]
    kind = data[_field(data, message, 1)]
    at = _field(data, message, 3)
    body = _I64.unpack_from(data, at)[0] if at else 0
    table = _follow(data, _field(data, message, 2))
    dictionary, delta = -1, False
    if kind == DICTIONARY:
        at = _field(data, table, 0)
        dictionary = _I64.unpack_from(data, at)[0] if at else 0
        at = _field(data, table, 2)
        delta = bool(at and data[at])
        table = _follow(data, _field(data, table, 1))
    at = _field(data, table, 0)
    rows = _I64.unpack_from(data, at)[0] if at else 0
    codec, method = -1, 0
    at = _field(data, table, 3)
    if at:
        packing = _follow(data, at)
        at = _field(data, packing, 0)
        codec = data[at] if at else 0
        at = _field(data, packing, 1)
        method = data[at] if at else 0
    return _Message(
        dictionary,
        delta,
        rows,
        _vector(data, table, 1, 16),
        list(_PAIR.iter_unpack(_vector(data, table, 2, 16))),
        _vector(data, table, 4, 8),
        body,
        codec,
        method,
    )


def _field(data: memoryview | bytes, table: int, index: int) -> int:
    """Where a field of a table is; 0 if it is absent."""
    vtable = table - _I32.unpack_from(data, table)[0]
    if 4 + 2 * index >= _U16.unpack_from(data, vtable)[0]:
        return 0
    offset: int = _U16.unpack_from(data, vtable + 4 + 2 * index)[0]
    return table + offset if offset else 0


def _follow(data: memoryview | bytes, at: int) -> int:
    found: int = at + _U32.unpack_from(data, at)[0]
    return found


def _vector(data: memoryview | bytes, table: int, index: int, size: int) -> bytes:
    at = _field(data, table, index)
    if not at:
        return b""
    at = _follow(data, at)
    return bytes(data[at + 4 : at + 4 + size * _U32.unpack_from(data, at)[0]])


_MESSAGE: Final = Struct("<I 6H ihBx II q")
"""The root, the vtable and the table of ``Message``; ends at 40, a multiple of 8 as all others."""
_DICTIONARY: Final = Struct("<5H 6x iIq B7x")
_BATCH: Final = Struct("<7H 2x iIq IIII")
_PACKING: Final = Struct("<4H ibb2x")


def _write(message: _Message, codec: int) -> bytes:
    """The metadata of a compressed message. Each table stands behind its vtable."""
    is_batch = message.dictionary < 0
    base = _MESSAGE.size if is_batch else _MESSAGE.size + _DICTIONARY.size
    batch = base + 16
    packing = base + _BATCH.size
    nodes = packing + _PACKING.size + 4  # where its length stands, right before the elements
    buffers = nodes + 4 + len(message.nodes) + 4
    counts = buffers + 4 + 16 * len(message.buffers) + 4
    kind = RECORD_BATCH if is_batch else DICTIONARY
    header = (batch if is_batch else _MESSAGE.size + 16) - (16 + 8)
    parts = [
        _MESSAGE.pack(16, 12, 24, 4, 6, 8, 16, 12, VERSION_5, kind, header, 0, message.body),
    ]
    if not is_batch:
        data = batch - (_MESSAGE.size + 16 + 4)
        parts.append(
            _DICTIONARY.pack(10, 24, 8, 4, 16, 16, data, message.dictionary, message.delta)
        )
    variadic = 24 if message.counts else 0
    parts += (
        _BATCH.pack(
            *(14, 32, 8, 4, 16, 20, variadic),
            *(16, nodes - (batch + 4), message.rows),
            *(buffers - (batch + 16), packing + 8 - (batch + 20)),
            *(counts - (batch + 24) if variadic else 0, 0),
        ),
        _PACKING.pack(8, 8, 4, 5, 8, codec, 0),
        bytes(4),
        _U32.pack(len(message.nodes) // 16),
        message.nodes,
        bytes(4),
        _U32.pack(len(message.buffers)),
        *(_PAIR.pack(*pair) for pair in message.buffers),
    )
    if variadic:
        parts += (bytes(4), _U32.pack(len(message.counts) // 8), message.counts)
    return b"".join(parts)
