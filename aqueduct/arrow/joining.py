"""Batches of one schema as one batch, also where Arrow joins their dictionaries wrongly or not.

Arrow mixes up the values of dictionaries of 16-bit floats. It takes 0.0 and -0.0 for the same
value, and joins no dictionaries of extension types. Their bits it joins rightly, as integers. Of
structs and lists it joins no dictionaries that differ: here one follows the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.views import may_lack_buffers, with_all_buffers

__all__ = ["joined"]

_BITS: Final = {
    pa.float16(): pa.uint16(),
    pa.float32(): pa.uint32(),
    pa.float64(): pa.uint64(),
}
_LISTS: Final[tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Field], Any]], ...]] = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of all batches, of which there is one at least, in their order.

    Raises ``pyarrow.ArrowException`` where a dictionary or runs cannot number all the values, and
    for dictionaries of structs or lists that differ within a struct or list.
    """
    schema = batches[0].schema
    if not any(_has_dictionary(field.type) for field in schema):
        return pa.concat_batches(batches)
    if may_lack_buffers(*schema.types):
        batches = [with_all_buffers(batch) for batch in batches]
    columns = [_joined([batch.column(place) for batch in batches]) for place in range(len(schema))]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _joined(arrays: Sequence[pa.Array]) -> pa.Array:
    kind = arrays[0].type
    if not _has_dictionary(kind):
        return pa.concat_arrays(arrays)
    bits = _in_bits(kind)
    seen = [_seen_as(bits, array) for array in arrays]
    try:
        whole = pa.concat_arrays(seen)
    except pa.ArrowNotImplementedError:  # for dictionaries of structs and lists
        if not pa.types.is_dictionary(bits):
            raise
        whole = _following(seen)
    return _seen_as(kind, whole)


def _following(arrays: Sequence[pa.Array]) -> pa.Array:
    """Dictionaries one behind the other."""
    kind, indices, start = arrays[0].type, [], 0
    for array in arrays:
        indices.append(pc.add(array.indices.cast(pa.int64()), start))
        start += len(array.dictionary)
    values = _joined([array.dictionary for array in arrays])
    numbers = pa.concat_arrays(indices).cast(kind.index_type)
    return pa.DictionaryArray.from_arrays(numbers, values, ordered=kind.ordered)


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return True
    if pa.types.is_run_end_encoded(kind):
        return _has_dictionary(kind.value_type)
    return any(_has_dictionary(kind.field(place).type) for place in range(kind.num_fields))


def _in_bits(kind: pa.DataType) -> pa.DataType:
    """The type of the same buffers, with integers for floats and without extension types."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _in_bits(kind.storage_type)
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _in_bits(kind.value_type), kind.ordered)
    if types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, _in_bits(kind.value_type))
    fields = [kind.field(place) for place in range(kind.num_fields)]
    inner = [field.with_type(_in_bits(field.type)) for field in fields]
    if types.is_struct(kind):
        return pa.struct(inner)
    if types.is_map(kind):
        key, item = inner[0].type
        return pa.map_(key, item, kind.keys_sorted)
    if types.is_union(kind):
        return pa.union(inner, kind.mode, kind.type_codes)
    if types.is_fixed_size_list(kind):
        return pa.list_(inner[0], kind.list_size)
    for fits, make in _LISTS:
        if fits(kind):
            return make(inner[0])
    return _BITS.get(kind, kind)


def _seen_as(kind: pa.DataType, array: pa.Array) -> pa.Array:
    """The same buffers as values of another type."""
    return pa.Array._import_from_c_capsule(kind.__arrow_c_schema__(), array.__arrow_c_array__()[1])
