"""Views of text and bytes that lack a buffer: casts of PyArrow 21 to 24 make them.

Such a cast leaves out the buffer of long values if it would be empty. PyArrow reads and writes
these arrays. It ends the process if one goes through Arrow's C data interface.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

__all__ = ["CASTS_LOSE_BUFFERS", "may_lack_buffers", "with_all_buffers"]

CASTS_LOSE_BUFFERS: Final = int(pa.__version__.partition(".")[0]) < 25
"""Whether casts of this PyArrow may leave buffers out."""


def may_lack_buffers(*kinds: pa.DataType) -> bool:
    """Whether arrays of one of these types may lack a buffer, with this PyArrow."""
    return CASTS_LOSE_BUFFERS and any(map(_with_views, kinds))


def with_all_buffers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """``batch`` with all buffers. A column that lacks one is copied.

    Raises ``pyarrow.ArrowException`` for what Arrow cannot write.
    """
    lacking = [_lacks_one(column) for column in batch.columns]
    if not any(lacking):
        return batch
    columns = [
        _again(column, field) if lacks else column
        for lacks, column, field in zip(lacking, batch.columns, batch.schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _with_views(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _with_views(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _with_views(kind.value_type)
    if _is_view(kind):
        return True
    return any(_with_views(kind.field(place).type) for place in range(kind.num_fields))


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _lacks_one(array: pa.Array) -> bool:
    """Whether a buffer is missing, at any depth."""
    kind, types = array.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _lacks_one(array.storage)
    if not _with_views(kind):
        return False
    if _is_view(kind):
        return any(buffer is None for buffer in array.buffers()[2:])
    if types.is_dictionary(kind):
        return _lacks_one(array.dictionary)
    if types.is_struct(kind) or types.is_union(kind):
        return any(_lacks_one(array.field(place)) for place in range(kind.num_fields))
    if types.is_map(kind):
        return _lacks_one(array.keys) or _lacks_one(array.items)
    return _lacks_one(array.values)


def _again(column: pa.Array, field: pa.Field) -> pa.Array:
    """The same values, written and read: a reader makes every buffer."""
    sink, schema = pa.BufferOutputStream(), pa.schema([field])
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([column], schema=schema))
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch().column(0)
