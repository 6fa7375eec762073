"""How many bytes rows have, also where PyArrow cannot tell."""

from __future__ import annotations

import pyarrow as pa

from aqueduct.arrow.views import may_lack_buffers

__all__ = ["array_bytes", "batch_bytes"]


def batch_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of the rows of ``batch``; see ``array_bytes``."""
    if not any(map(_miscounted, batch.schema.types)):
        try:
            return int(batch.nbytes)
        except pa.ArrowTypeError:
            pass
    return sum(map(array_bytes, batch.columns))


def array_bytes(array: pa.Array) -> int:
    """Bytes of the values of ``array``; of views with everything that their buffers hold.

    Of a dense union it is the share of its rows. ``nbytes`` of PyArrow 21 raises for views, and for
    what has them inside.
    """
    if not _miscounted(array.type):
        try:
            return int(array.nbytes)
        except pa.ArrowTypeError:
            pass
    return _counted(array)


def _counted(array: pa.Array) -> int:
    """The bytes, as newer versions of PyArrow count them."""
    kind, types, rows = array.type, pa.types, len(array)
    if isinstance(kind, pa.BaseExtensionType):
        return array_bytes(array.storage)
    if types.is_dictionary(kind):
        return array_bytes(array.indices) + array_bytes(array.dictionary)
    validity, *others = array.buffers()
    size = 0 if validity is None else (rows + 7) // 8
    if types.is_string_view(kind) or types.is_binary_view(kind):
        texts: int = sum(each.size for each in others[1:] if each is not None)
        return size + 16 * rows + texts
    if types.is_union(kind):
        children = [array.field(place) for place in range(kind.num_fields)]
        inside = sum(map(array_bytes, children))
        if kind.mode == "sparse":
            return rows + inside
        values = sum(map(len, children))
        return 5 * rows + inside * min(rows, values) // max(values, 1)
    if types.is_struct(kind):
        return size + sum(array_bytes(array.field(place)) for place in range(kind.num_fields))
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        width = 16 if types.is_large_list_view(kind) else 8
        return size + width * rows + array_bytes(array.values)
    if types.is_fixed_size_list(kind):
        each = kind.list_size
        return size + array_bytes(array.values.slice(array.offset * each, rows * each))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        start, end = array.offsets[0].as_py(), array.offsets[rows].as_py()
        width = 8 if types.is_large_list(kind) else 4
        return size + width * rows + array_bytes(array.values.slice(start, end - start))
    return int(array.get_total_buffer_size())


def _miscounted(kind: pa.DataType) -> bool:
    """Whether ``nbytes`` may end the process.

    That of PyArrow 26 does for a union without rows, and that of PyArrow 24 for views that a cast
    has made.
    """
    return _has_union(kind) or may_lack_buffers(kind)


def _has_union(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_union(kind.storage_type)
    if pa.types.is_union(kind):
        return True
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _has_union(kind.value_type)
    return any(_has_union(kind.field(place).type) for place in range(kind.num_fields))
