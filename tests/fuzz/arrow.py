"""The compiled reader of record batches fed any payload, beside Arrow's own reader.

An input is a byte that chooses the schema and how closely offsets are looked at, then the payload.
What the compiled reader takes, Arrow's takes too and as the same; all else it may leave.
"""

from __future__ import annotations

import ctypes
from typing import Final

import pyarrow as pa

from aqueduct._speedups.arrow.columns import Columns
from aqueduct._speedups.arrow.reader import BatchReader
from aqueduct._speedups.arrow.writer import BatchWriter
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.layout import common_columns
from tests.fuzz.source import Source

__all__ = ["SCHEMAS", "target"]

SCHEMAS: Final = tuple(
    pa.schema(fields)
    for fields in (
        [("a", pa.int64()), ("b", pa.binary())],
        [("a", pa.bool_()), pa.field("b", pa.int16(), nullable=False), ("c", pa.null())],
        [("a", pa.list_(pa.large_binary()))],
        [("a", pa.struct([("b", pa.int8()), ("c", pa.large_list(pa.bool_()))]))],
        [("a", pa.map_(pa.binary(), pa.int32()))],
        [("a", pa.list_(pa.int32(), 3)), ("b", pa.binary(5))],
        [("a", pa.list_(pa.struct([])))],
        [("a", pa.null())],
    )
)
"""Every kind of array; bytes and numbers alone, so that any value of a sound layout is one."""


def target(data: bytes) -> None:
    """One input."""
    source = Source(data)
    choice = source.byte()
    schema = SCHEMAS[choice >> 1 & 7]
    inside = not choice & 1
    payload = exactly(source.rest())
    columns = common_columns(schema)
    assert columns is not None
    found = BatchReader(columns, pa.RecordBatch._import_from_c, schema, inside).read(payload)
    if found is None:
        return
    arrow = Decoder(schema, checks="memory" if inside else "layout")
    arrow._fast = None
    expected = arrow.decode(payload)
    assert found.num_rows == expected.num_rows
    assert found.schema.equals(schema)
    if inside:
        found.validate(full=True)
        assert written(found, columns) == written(expected, columns)


def exactly(data: bytes) -> memoryview:
    """The bytes in memory that ends with them: an address sanitizer sees a read behind it."""
    return memoryview((ctypes.c_ubyte * len(data)).from_buffer_copy(data)).cast("B")


def written(batch: pa.RecordBatch, columns: Columns) -> bytes:
    """The payload of a batch, by the compiled writer."""
    made = BatchWriter(columns).write(batch)
    assert made is not None
    buffers, size = made
    payload = b"".join(buffers)
    assert len(payload) == size
    return payload
