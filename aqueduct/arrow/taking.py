"""Rows taken out of arrays and batches of every type.

Arrow has no function that takes rows out of views of text and bytes, or out of runs, nor out of
lists, structs and maps with these inside. Here such arrays are taken apart: what Arrow can take is
taken by Arrow, and nothing but the rows is copied.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["numbers_below", "rows_where", "taken"]

_VIEW: Final = pa.binary(16)
"""What stands in an array of views for each of its values."""


def rows_where(
    batch: pa.RecordBatch, condition: pc.Expression, columns: Collection[str]
) -> list[pa.RecordBatch]:
    """The rows for which ``condition`` is true, which looks at no more than ``columns``."""
    try:
        kept: list[pa.RecordBatch] = pa.Table.from_batches([batch]).filter(condition).to_batches()
        return kept
    except pa.ArrowNotImplementedError:
        pass  # Arrow filters no table with such a column, whatever the condition looks at
    looked_at = [name for name in batch.schema.names if name in columns]
    number = "".join(looked_at) + "#"  # no column has this name
    numbers = numbers_below(batch.num_rows)
    arrays = [*(batch.column(name) for name in looked_at), numbers]
    found = pa.table(arrays, names=[*looked_at, number]).filter(condition)[number]
    rows = found.combine_chunks()
    if not len(rows):
        return []
    made = [taken(array, rows) for array in batch.columns]
    return [pa.RecordBatch.from_arrays(made, schema=batch.schema)]


def taken(array: pa.Array, rows: pa.Array) -> pa.Array:
    """The values at ``rows``, which are integers. A null among them gives null, if the type has it.

    Raises ``pyarrow.ArrowNotImplementedError`` for a type that it does not know.
    """
    kind, types = array.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return kind.wrap_array(taken(array.storage, rows))
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return _views(array, rows)
    if types.is_run_end_encoded(kind):
        return _runs(array, rows)
    try:
        return array.take(rows)
    except pa.ArrowNotImplementedError:
        pass  # Arrow takes no rows out of a type inside; below it is taken apart
    if types.is_struct(kind):
        children = [taken(array.field(place), rows) for place in range(kind.num_fields)]
        there = _validity_taken(array, rows)
        return pa.Array.from_buffers(kind, len(rows), [there], children=children)
    if types.is_union(kind):
        return _union(array, rows)
    if types.is_nested(kind):
        return _lists(array, rows)
    raise pa.ArrowNotImplementedError(f"no rows can be taken out of {kind}")


def _views(array: pa.Array, rows: pa.Array) -> pa.Array:
    validity, views, *texts = array.buffers()
    whole = pa.Array.from_buffers(_VIEW, len(array), [validity, views], offset=array.offset)
    buffers = whole.take(rows).buffers()
    return pa.Array.from_buffers(array.type, len(rows), [*buffers, *texts])


def _runs(array: pa.Array, rows: pa.Array) -> pa.Array:
    numbered = pa.RunEndEncodedArray.from_arrays(array.run_ends, numbers_below(len(array.values)))
    places = pc.run_end_decode(numbered.slice(array.offset, len(array))).take(rows)
    made = pc.run_end_encode(places, run_end_type=array.type.run_end_type)
    values = taken(array.values, made.values)
    return pa.RunEndEncodedArray.from_arrays(made.run_ends, values, array.type)


def _union(array: pa.Array, rows: pa.Array) -> pa.Array:
    kind, length, start = array.type, len(array), array.offset
    rows = pc.fill_null(rows, 0)  # a union has no nulls of its own
    forms = (pa.int8(), pa.int32()) if kind.mode == "dense" else (pa.int8(),)
    found = []
    for form, buffer in zip(forms, array.buffers()[1:], strict=False):
        numbers = pa.Array.from_buffers(form, length, [None, buffer], offset=start)
        found.append(numbers.take(rows))
    children = [array.field(place) for place in range(kind.num_fields)]
    if kind.mode == "sparse":
        children = [taken(child, rows) for child in children]
    else:
        found[1], children = _in_order(kind, children, *found)
    parts = [None, *(each.buffers()[1] for each in found)]
    return pa.Array.from_buffers(kind, len(rows), parts, children=children)


def _in_order(
    kind: pa.DataType, children: list[pa.Array], codes: pa.Array, places: pa.Array
) -> tuple[pa.Array, list[pa.Array]]:
    """The offsets and children of a dense union, whose offsets must grow in each child."""
    made = []
    one = pa.scalar(1, pa.int32())
    for code, child in zip(kind.type_codes, children, strict=True):
        mine = pc.equal(codes, pa.scalar(code, pa.int8()))
        made.append(taken(child, places.filter(mine)))
        ranks = pc.subtract(pc.cumulative_sum(mine.cast(pa.int32())), one)
        places = pc.if_else(mine, ranks, places)
    return places, made


def _lists(array: pa.Array, rows: pa.Array) -> pa.Array:
    """Lists and maps: Arrow takes out of lists of numbers, which say where values are."""
    kind, types = array.type, pa.types
    child = array.values
    numbers = numbers_below(len(child))
    if types.is_fixed_size_list(kind):
        form = pa.list_(pa.int64(), kind.list_size)
    else:
        form = pa.large_list(pa.int64()) if types.is_large_list(kind) else pa.list_(pa.int64())
    buffers = array.buffers()[: form.num_buffers]
    places = pa.Array.from_buffers(
        form, len(array), buffers, offset=array.offset, children=[numbers]
    ).take(rows)
    children = [taken(child, places.values)]
    return pa.Array.from_buffers(
        kind, len(rows), places.buffers()[: form.num_buffers], children=children
    )


def numbers_below(count: int) -> pa.Array:
    """The integers from 0 to ``count`` - 1."""
    ends = pc.cumulative_sum(pa.repeat(1, count))
    return pc.subtract(ends, 1)


def _validity_taken(array: pa.Array, rows: pa.Array) -> pa.Buffer | None:
    """The bitmap of ``rows``; None if none of them is null."""
    there = pc.fill_null(array.is_valid().take(rows), False)
    return None if pc.all(there, min_count=0).as_py() else there.buffers()[1]
