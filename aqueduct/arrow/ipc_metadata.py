"""A look into the metadata of one Arrow IPC message, which pyarrow does not show.

Only a few numbers are wanted, so they are read and nothing else. Look only at what pyarrow wrote,
or what it has verified by making a ``pa.ipc.Message`` of it: the offsets inside are believed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from aqueduct._speedups.arrow.flatbuffer import numbers

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["DICTIONARY", "RECORD_BATCH", "SCHEMA", "VERSION_5", "Layout", "Summary", "summarize"]

SCHEMA: Final = 1
DICTIONARY: Final = 2
RECORD_BATCH: Final = 3
VERSION_5: Final = 4
"""The value of ``MetadataVersion.V5``, which every Arrow since 1.0 writes."""


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
    """Reads the flatbuffer of a message. Raises ValueError if it is cut short."""
    kind, version, body, layout, compressed, dictionary, delta = numbers(metadata)
    parts = None if layout is None else Layout(*layout)
    return Summary(kind, version, body, parts, compressed, dictionary, delta)
