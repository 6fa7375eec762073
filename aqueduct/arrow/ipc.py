"""What encoder and decoder share: payloads, and the schema messages that precede them.

A *payload* is what one batch needs: new dictionaries, if there are any, then the batch itself, each
an encapsulated IPC message of Arrow's streaming format. The schema message is left out; it travels
once, with the call. The metadata of each message is padded so that its body begins at a multiple
of 64 from the payload's start, where the receiver's memory is aligned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import pyarrow as pa

from aqueduct._speedups.arrow.flatbuffer import numbers
from aqueduct.errors import BadCall

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "ALIGNMENT",
    "DICTIONARY",
    "EXTENSION",
    "LONG_SCHEMA",
    "RECORD_BATCH",
    "ROWS_LIMIT",
    "SCHEMA",
    "VERSION_5",
    "Layout",
    "Summary",
    "adopt",
    "by_identity",
    "deserialize_schema",
    "first_line",
    "is_wide",
    "serialize_schema",
    "summarize",
]

ALIGNMENT: Final = 64
"""Bodies begin at multiples of this in a payload."""
EXTENSION: Final = b"ARROW:extension:"
"""What is in a schema message whose meaning depends on the types that are registered."""
ROWS_LIMIT: Final = (1 << 31) - 1
"""The rows of one batch; Arrow's other implementations count them in 32 bits."""

SCHEMA: Final = 1
DICTIONARY: Final = 2
RECORD_BATCH: Final = 3
VERSION_5: Final = 4
"""The value of ``MetadataVersion.V5``, which every Arrow since 1.0 writes."""

_KEPT: Final = 128
_KEPT_SIZE: Final = 8 << 10  # bytes of a schema message: peers can make this keep a MiB

LONG_SCHEMA: Final = 64 << 10
"""Bytes of a schema message that takes milliseconds to read: more than some 1,000 columns."""

_Value = TypeVar("_Value")


def by_identity(make: Callable[[pa.Schema], _Value]) -> Callable[[pa.Schema], _Value]:
    """``make``, with what it made of the last few schemas while these live.

    The calls of a handler have the same schema objects again. To hash or compare schemas takes
    longer than most of what is made of them, and equal ones may differ in metadata.
    """
    kept: dict[int, tuple[weakref.ref[pa.Schema], _Value]] = {}

    @wraps(make)
    def find(schema: pa.Schema) -> _Value:
        key = id(schema)
        found = kept.get(key)
        if found is not None and found[0]() is schema:
            return found[1]
        value = make(schema)
        if len(kept) >= _KEPT:
            kept.clear()
        kept[key] = weakref.ref(schema, lambda _: kept.pop(key, None)), value
        return value

    return find


@by_identity
def serialize_schema(schema: pa.Schema) -> bytes:
    """The IPC schema message of ``schema``."""
    message: bytes = schema.serialize().to_pybytes()
    return message


def is_wide(schema: pa.Schema | None) -> bool:
    """Whether a schema is so large that comparing it, or planning for it, takes milliseconds."""
    return schema is not None and len(serialize_schema(schema)) >= LONG_SCHEMA


def deserialize_schema(payload: ReadableBuffer, *, where: str = "", peer: str = "") -> pa.Schema:
    """The schema of an IPC schema message. Raises BadCall if it is anything else.

    ``where`` begins the text, for example "the input schema".
    """
    prefix = f"{where}: " if where else ""
    try:
        buffer = pa.py_buffer(payload)
        if buffer.size <= _KEPT_SIZE and EXTENSION not in (data := buffer.to_pybytes()):
            schema, kind, rest = _kept_parse(data)
        else:  # large, or of types that may be registered otherwise the next time
            schema, kind, rest = _parse(buffer)
            if schema is not None and buffer.size >= LONG_SCHEMA:
                serialize_schema(schema)  # here and now, for ``is_wide`` on an event loop
    except MemoryError:
        raise
    except Exception as error:
        text = f"{prefix}not a schema in Arrow IPC form: {first_line(error)}"
        raise BadCall(text, peer=peer) from error
    if schema is None:
        raise BadCall(f"{prefix}a schema was expected and a {kind} came", peer=peer)
    if rest:
        raise BadCall(f"{prefix}{rest} bytes follow the schema", peer=peer)
    return schema


def _parse(payload: bytes | pa.Buffer) -> tuple[pa.Schema | None, str, int]:
    """The schema, if it is one, what it is, and how many bytes follow."""
    source = pa.BufferReader(payload)
    message = pa.ipc.read_message(source)
    kind, rest = message.type, source.size() - source.tell()
    schema = pa.ipc.read_schema(message) if kind == "schema" else None
    if schema is not None:
        _decode_names(schema)
    return schema, kind, rest


_kept_parse: Final = lru_cache(maxsize=_KEPT)(_parse)


def _decode_names(inside: pa.Schema | pa.DataType) -> None:
    """Raises UnicodeDecodeError for a name that is not UTF-8: anyone who asks for it would."""
    while isinstance(inside, pa.BaseExtensionType | pa.DictionaryType):
        dictionary = isinstance(inside, pa.DictionaryType)
        inside = inside.value_type if dictionary else inside.storage_type
    count = len(inside) if isinstance(inside, pa.Schema) else inside.num_fields
    for field in map(inside.field, range(count)):
        assert field.name is not None
        _decode_names(field.type)


def adopt(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """``batch`` read as ``schema``, which it must match in layout. Nothing is copied."""
    array = batch.__arrow_c_array__()[1]
    return pa.RecordBatch._import_from_c_capsule(schema.__arrow_c_schema__(), array)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its type."""
    return str(error).partition("\n")[0] or type(error).__name__


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
    """A few numbers of a message's metadata, which pyarrow does not show.

    Only for what pyarrow wrote, or what it has verified by making a ``pa.ipc.Message`` of it: the
    offsets inside are believed. Raises ValueError if it is cut short.
    """
    kind, version, body, layout, compressed, dictionary, delta = numbers(metadata)
    parts = None if layout is None else Layout(*layout)
    return Summary(kind, version, body, parts, compressed, dictionary, delta)
