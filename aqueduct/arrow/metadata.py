"""A look into the metadata of one Arrow IPC message, which pyarrow does not show.

The metadata is a flatbuffer, ``Message`` of the Arrow format's ``Message.fbs``. Only a few numbers
are wanted, so this reads them and nothing else. It trusts the offsets inside: look only at what
pyarrow wrote, or what it has verified by making a ``pa.ipc.Message`` of it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["DICTIONARY", "RECORD_BATCH", "SCHEMA", "VERSION_5", "Layout", "Summary", "summarize"]

SCHEMA: Final = 1
DICTIONARY: Final = 2
RECORD_BATCH: Final = 3
VERSION_5: Final = 4
"""The value of ``MetadataVersion.V5``, which every Arrow since 1.0 writes."""

_u8 = struct.Struct("<B").unpack_from
_u16 = struct.Struct("<H").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_i64 = struct.Struct("<q").unpack_from


class Layout(NamedTuple):
    """How many parts a record batch has: the same for every batch of a schema."""

    nodes: int
    buffers: int
    """Without the variadic ones."""
    views: int
    """Columns with a variable number of buffers: string_view and binary_view."""


class Summary(NamedTuple):
    """What one message says of itself."""

    kind: int
    """SCHEMA, DICTIONARY or RECORD_BATCH."""
    version: int
    body: int
    """Bytes that follow the metadata."""
    layout: Layout | None
    """Of a record batch, or of the values of a dictionary."""
    compressed: bool
    dictionary: int
    """The dictionary's id; -1 for the rest."""
    delta: bool
    """Whether it adds to the dictionary instead of replacing it."""


def summarize(metadata: ReadableBuffer) -> Summary:
    """Reads the flatbuffer of a message. Raises struct.error if it is cut short."""
    message: int = _u32(metadata, 0)[0]
    at = _field(metadata, message, 0)
    version: int = _u16(metadata, at)[0] if at else 0
    at = _field(metadata, message, 1)
    kind: int = _u8(metadata, at)[0] if at else 0
    at = _field(metadata, message, 3)
    body: int = _i64(metadata, at)[0] if at else 0
    header = _follow(metadata, _field(metadata, message, 2))
    dictionary, delta = -1, False
    if kind == DICTIONARY:
        at = _field(metadata, header, 0)
        dictionary = _i64(metadata, at)[0] if at else 0
        at = _field(metadata, header, 2)
        delta = bool(at and _u8(metadata, at)[0])
        header = _follow(metadata, _field(metadata, header, 1))
    elif kind != RECORD_BATCH:
        return Summary(kind, version, body, None, False, -1, False)
    nodes = _length(metadata, header, 1)
    buffers = _length(metadata, header, 2)
    compressed = _field(metadata, header, 3) != 0
    views = _length(metadata, header, 4)
    if views:
        at = _follow(metadata, _field(metadata, header, 4))
        buffers -= sum(struct.unpack_from(f"<{views}q", metadata, at + 4))
    layout = Layout(nodes, buffers, views)
    return Summary(kind, version, body, layout, compressed, dictionary, delta)


def _field(data: ReadableBuffer, table: int, index: int) -> int:
    """Where field ``index`` of a table begins; 0 if it is absent."""
    vtable = table - _i32(data, table)[0]
    entry = 4 + 2 * index
    if entry >= _u16(data, vtable)[0]:
        return 0
    offset: int = _u16(data, vtable + entry)[0]
    return table + offset if offset else 0


def _follow(data: ReadableBuffer, at: int) -> int:
    """Where the table or vector begins that the field at ``at`` refers to."""
    if not at:
        raise struct.error("a message without its header")
    offset: int = _u32(data, at)[0]
    return at + offset


def _length(data: ReadableBuffer, table: int, index: int) -> int:
    """The length of the vector in field ``index``; 0 if it is absent."""
    at = _field(data, table, index)
    length: int = _u32(data, _follow(data, at))[0] if at else 0
    return length
