"""Cuts batches to the bytes that their rows refer to, so that a slice is sent without the rest.

Arrow's writer cuts most arrays to their rows. It leaves three things whole, as rows refer to them
in any order: the buffers of string and binary views, the values of list views, and the children of
dense unions. Each slice of these, or a filtered array, would take all bytes of the whole with it.

An array stays as it is, uncopied, unless enough bytes can be saved. Bytes in use are cut out where
they lie together, and copied where they do not.

A dictionary is not cut to the values that the rows of a batch use. It belongs to the column: its
numbers mean something to programs, and a stream sends it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct._speedups.arrow.views import (
    measure,
    measure_children,
    measure_lists,
    move_bits,
    rewrite,
)
from aqueduct.arrow.taking import numbers_below, taken

__all__ = ["Compactor", "has_slack"]

_Cut: TypeAlias = Callable[[pa.Array], pa.Array]
"""Returns the array itself, or one of the same values and type."""

_SPARED: Final = 512
"""Fewer bytes are not worth the work, and neither is less than an eighth of those in use."""
_SMALL: Final = 1 << 10
"""If fewer bytes of a buffer are in use, they are copied: an own buffer would cost more."""
_VIEW: Final = 16
"""Bytes of a view."""
_BUFFER: Final = 24
"""What a buffer costs beside its bytes."""
_PACKED_MOST: Final = (1 << 31) - 1
"""Bytes of one buffer that views can refer to."""
_NOTHING: Final = pa.py_buffer(b"")
_ZERO: Final = pa.py_buffer(bytes(8))
"""The only offset of an array without values, of either width."""
_INT8: Final = pa.int8()
_INT32: Final = pa.int32()


def has_slack(kind: pa.DataType) -> bool:
    """Whether arrays of this type may hold what none of their rows refers to."""
    return _cut_of(kind) is not None


class Compactor:
    """Makes batches of one stream compact. For one thread at a time."""

    def __init__(self, schema: pa.Schema, columns: tuple[int, ...]) -> None:
        """``columns``: those whose type has slack."""
        self._cuts: list[tuple[int, _Cut]] = []
        for place in columns:
            cut = _cut_of(schema.field(place).type)
            if cut is not None:
                self._cuts.append((place, cut))

    def compact(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch itself, or an equal one.

        Arrays that refer to what is not there stay as they are: who receives them says so.
        """
        if not batch.num_rows:
            columns = [_emptied(column) for column in batch.columns]
            return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
        changed: dict[int, pa.Array] = {}
        for place, cut in self._cuts:
            array = batch.column(place)
            try:
                found = cut(array)
            except pa.ArrowNotImplementedError:  # then it leaves as it is
                continue
            if found is not array:
                changed[place] = found
        if not changed:
            return batch
        columns = [changed.get(place, array) for place, array in enumerate(batch.columns)]
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _cut_of(kind: pa.DataType) -> _Cut | None:
    """What makes arrays of this type compact; None: nothing in it has slack."""
    types = pa.types
    if types.is_primitive(kind):  # which most are
        return None
    if isinstance(kind, pa.BaseExtensionType):
        inner = _cut_of(kind.storage_type)
        return None if inner is None else _extension(kind, inner)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return _cut_views
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        large = types.is_large_list_view(kind)
        return _list_views(large, _has_list_views(kind.value_type), _cut_of(kind.value_type))
    if types.is_union(kind):
        cuts = [_cut_of(kind.field(i).type) for i in range(kind.num_fields)]
        if kind.mode == "dense":
            return _dense(kind, cuts)
        return None if not any(cuts) else _sparse(cuts)
    if types.is_dictionary(kind):
        inner = _cut_of(kind.value_type)
        return None if inner is None else _Dictionary(inner).cut
    if types.is_run_end_encoded(kind):
        inner = _cut_of(kind.value_type)
        return None if inner is None else _runs(kind, inner)
    if types.is_struct(kind):
        cuts = [_cut_of(field.type) for field in kind]
        return None if not any(cuts) else _struct(cuts)
    if types.is_nested(kind):
        item = kind.field(0).type
        inner = _cut_of(item)
        if inner is None and not _has_offsets(item):
            return None
        return _fixed(kind.list_size, inner) if types.is_fixed_size_list(kind) else _lists(inner)
    return None


def _cut_views(array: pa.Array) -> pa.Array:
    """Text and bytes behind views."""
    _, views, *texts = array.buffers()
    sizes = [text.size for text in texts]
    total = sum(sizes) + _BUFFER * len(sizes)
    if total <= max(_SPARED, _VIEW * len(array) // 4):  # the views themselves are the most of it
        return array
    validity = array.buffers()[0] if array.null_count else None
    offset, length = array.offset, len(array)
    moves: list[tuple[int, int]] = []
    kept: list[pa.Buffer] = []
    packed = span = 0
    try:
        found = measure(views, validity, offset, length, sizes)
    except ValueError:  # a view refers to bytes outside its buffers
        return array
    for number, (used, low, high) in enumerate(found):
        if not used:
            moves.append((0, 0))  # no view refers to it
        elif (used <= _SMALL or _pays(high - low, used, _SPARED)) and packed + used <= _PACKED_MOST:
            moves.append((-1, 0))
            packed += used
        else:
            moves.append((len(kept), low))
            kept.append(texts[number].slice(low, high - low))
            span += high - low
    if not _pays(total, packed + span + _BUFFER * len(kept), _SPARED):
        return array
    new_views = pa.allocate_buffer(_VIEW * length)
    room = pa.allocate_buffer(packed)
    moves = [(-1, len(kept)) if index < 0 else (index, low) for index, low in moves]
    rewrite(views, validity, offset, length, texts, moves, new_views, room)
    if packed:
        kept.append(room)
    return pa.Array.from_buffers(
        array.type, length, [_validity(array), new_views, *kept], array.null_count
    )


def _list_views(large: bool, nested: bool, inner: _Cut | None) -> _Cut:
    def cut(array: pa.Array) -> pa.Array:
        validity, starts, counts = array.buffers()[:3]
        bits = validity if array.null_count else None
        used, low, high = measure_lists(starts, counts, bits, large, array.offset, len(array))
        values = array.values
        if low < 0 or high > len(values):
            return array
        scattered, apart = _pays(high - low, used), high - low < len(values)
        if scattered:
            found = _flattened(array, values) if nested else array.flatten()
        else:
            found = values.slice(low, high - low) if apart else values
        cut_found = _cut_child(found, inner)
        if cut_found is values:
            return array
        offsets, sizes = array.offsets, array.sizes
        if array.null_count:
            sizes = pc.if_else(array.is_valid(), sizes, _like(0, sizes))
        if scattered:
            offsets = pc.subtract(pc.cumulative_sum(sizes), sizes)
        elif apart:
            moved = pc.subtract(offsets, _like(low, offsets))
            offsets = pc.if_else(pc.greater(sizes, _like(0, sizes)), moved, _like(0, offsets))
        buffers = [_validity(array), _values(offsets), _values(sizes)]
        return pa.Array.from_buffers(
            array.type, len(array), buffers, array.null_count, children=[cut_found]
        )

    return cut


def _flattened(array: pa.Array, values: pa.Array) -> pa.Array:
    """The values of all rows of a list view, in order; they have list views inside, too.

    Arrow's ``flatten`` copies what these refer to once for each row. That may be more than the ends
    of runs can count. So rows are taken out by their numbers.
    """
    numbers = numbers_below(len(values))
    form = pa.large_list_view if pa.types.is_large_list_view(array.type) else pa.list_view
    buffers = array.buffers()[:3]
    numbered = pa.Array.from_buffers(
        form(numbers.type), len(array), buffers, offset=array.offset, children=[numbers]
    )
    return taken(values, numbered.flatten())


def _has_list_views(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_list_views(kind.storage_type)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return True
    if pa.types.is_run_end_encoded(kind) or pa.types.is_dictionary(kind):
        return _has_list_views(kind.value_type)
    return any(_has_list_views(kind.field(i).type) for i in range(kind.num_fields))


def _dense(kind: pa.UnionType, cuts: list[_Cut | None]) -> _Cut:
    type_codes = kind.type_codes

    def cut(array: pa.Array) -> pa.Array:
        length, start = len(array), array.offset
        _, codes, places = array.buffers()[:3]
        children = [array.field(i) for i in range(len(cuts))]
        uses = measure_children(codes, places, start, length)
        kinds = pa.Array.from_buffers(_INT8, length, [None, codes], offset=start)
        offsets = fresh = pa.Array.from_buffers(_INT32, length, [None, places], offset=start)
        made = []
        for code, child, inner in zip(type_codes, children, cuts, strict=True):
            used, low, high = uses.get(code, (0, 0, 0))
            if low < 0 or high > len(child):
                return array
            found = child
            if high - low < len(child) or _pays(high - low, used):
                mine = pc.equal(kinds, pa.scalar(code, _INT8))
                if _pays(high - low, used):
                    found = taken(child, offsets.filter(mine))
                    ranks = pc.cumulative_sum(mine.cast(_INT32))
                    moved = pc.subtract(ranks, _like(1, ranks))
                else:
                    found = child.slice(low, high - low)
                    moved = pc.subtract(offsets, _like(low, offsets))
                fresh = pc.if_else(mine, moved, fresh)
            made.append(_cut_child(found, inner))
        if all(one is other for one, other in zip(made, children, strict=True)):
            return array
        parts = [None, codes.slice(start, length), _values(fresh)]
        return pa.Array.from_buffers(array.type, length, parts, children=made)

    return cut


def _sparse(cuts: list[_Cut | None]) -> _Cut:
    def cut(array: pa.Array) -> pa.Array:
        made = _cut_fields(array, cuts)
        if made is None:
            return array
        parts = [None, array.buffers()[1].slice(array.offset, len(array))]
        return pa.Array.from_buffers(array.type, len(array), parts, children=made)

    return cut


def _struct(cuts: list[_Cut | None]) -> _Cut:
    def cut(array: pa.Array) -> pa.Array:
        made = _cut_fields(array, cuts)
        if made is None:
            return array
        return pa.Array.from_buffers(
            array.type, len(array), [_validity(array)], array.null_count, children=made
        )

    return cut


def _cut_fields(array: pa.Array, cuts: list[_Cut | None]) -> list[pa.Array] | None:
    """The children, those of the rows of ``array`` alone; None if there is nothing to gain."""
    children = [array.field(i) for i in range(len(cuts))]
    made = [child if cut is None else cut(child) for child, cut in zip(children, cuts, strict=True)]
    if all(one is other for one, other in zip(made, children, strict=True)):
        return None
    return made


def _lists(inner: _Cut | None) -> _Cut:
    """Lists, large lists and maps."""

    def cut(array: pa.Array) -> pa.Array:
        offsets = array.offsets
        low, high = offsets[0].as_py(), offsets[-1].as_py()
        child = array.values.slice(low, high - low)
        found = _cut_child(child, inner)
        if found is child:
            return array
        if low:
            offsets = pc.subtract(offsets, _like(low, offsets))
        buffers = [_validity(array), _values(offsets)]
        return pa.Array.from_buffers(
            array.type, len(array), buffers, array.null_count, children=[found]
        )

    return cut


def _fixed(size: int, inner: _Cut | None) -> _Cut:
    def cut(array: pa.Array) -> pa.Array:
        child = array.values.slice(array.offset * size, len(array) * size)
        found = _cut_child(child, inner)
        if found is child:
            return array
        return pa.Array.from_buffers(
            array.type, len(array), [_validity(array)], array.null_count, children=[found]
        )

    return cut


def _runs(kind: Any, inner: _Cut) -> _Cut:
    def cut(array: pa.Array) -> pa.Array:
        start, count = array.find_physical_offset(), array.find_physical_length()
        values = array.values.slice(start, count)
        found = inner(values)
        if found is values:
            return array
        ends = array.run_ends.slice(start, count)
        ends = pc.subtract(ends, _like(array.offset, ends))
        ends = pc.min_element_wise(ends, _like(len(array), ends))
        return pa.RunEndEncodedArray.from_arrays(ends, found, kind)

    return cut


class _Dictionary:
    """Cuts what is inside the values of a dictionary, which a stream has again and again."""

    def __init__(self, inner: _Cut) -> None:
        self._inner = inner
        self._last: tuple[tuple[int, ...], pa.Array, pa.Array] | None = None

    def cut(self, array: pa.Array) -> pa.Array:
        values = array.dictionary
        buffers = (0 if each is None else each.address for each in values.buffers())
        key = (values.offset, len(values), *buffers)
        if self._last is None or self._last[0] != key:
            self._last = key, values, _cut_child(values, self._inner)
        _, kept, found = self._last
        if found is kept:
            return array
        ordered = array.type.ordered
        return pa.DictionaryArray.from_arrays(array.indices, found, ordered=ordered, safe=False)


def _extension(kind: pa.BaseExtensionType, inner: _Cut) -> _Cut:
    def cut(array: pa.Array) -> pa.Array:
        storage = array.storage
        found = inner(storage)
        return array if found is storage else pa.ExtensionArray.from_storage(kind, found)

    return cut


def _cut_child(child: pa.Array, inner: _Cut | None) -> pa.Array:
    """A child of an array, only its values in use."""
    if not len(child):
        return _emptied(child)
    return child if inner is None else inner(child)


def _emptied(array: pa.Array) -> pa.Array:
    """An array without values, without what it was cut from.

    Arrow's writer would send all offsets of that. Dictionaries are kept.
    """
    kind, types = array.type, pa.types
    if array.get_total_buffer_size() <= _SPARED:
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _emptied(array.storage))
    if types.is_run_end_encoded(kind):
        ends, values = array.run_ends.slice(0, 0), _emptied(array.values.slice(0, 0))
        return pa.RunEndEncodedArray.from_arrays(ends, values, kind)
    buffers: list[pa.Buffer | None] = [None, *[_NOTHING] * (kind.num_buffers - 1)]
    if types.is_struct(kind) or types.is_union(kind):
        children = [_emptied(array.field(i).slice(0, 0)) for i in range(kind.num_fields)]
        return pa.Array.from_buffers(kind, 0, buffers, children=children)
    if _begins_with_offsets(kind):
        buffers[1] = _ZERO
    if types.is_nested(kind):
        children = [_emptied(array.values.slice(0, 0))]
        return pa.Array.from_buffers(kind, 0, buffers, children=children)
    if types.is_dictionary(kind):
        return array
    return pa.Array.from_buffers(kind, 0, buffers)


def _has_offsets(kind: pa.DataType) -> bool:
    """Whether arrays of this type, or what is inside them, have offsets: one more than values."""
    if isinstance(kind, pa.BaseExtensionType):
        return _has_offsets(kind.storage_type)
    inner = (kind.field(i).type for i in range(kind.num_fields))
    return _begins_with_offsets(kind) or any(map(_has_offsets, inner))


def _begins_with_offsets(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_binary(kind)
        or types.is_large_string(kind)
        or types.is_large_binary(kind)
        or types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_map(kind)
    )


def _pays(whole: int, kept: int, least: int = 0) -> bool:
    """Whether it is worth while to send ``kept`` in place of ``whole``."""
    return whole - kept > least + kept // 8


def _like(value: int, array: pa.Array) -> pa.Scalar:
    return pa.scalar(value, array.type)


def _values(array: pa.Array) -> pa.Buffer:
    """The buffer of an array of numbers without nulls, from its first one on."""
    width = array.type.bit_width // 8
    return array.buffers()[1].slice(array.offset * width, len(array) * width)


def _validity(array: pa.Array) -> pa.Buffer | None:
    """The bitmap of an array from its first value on; None if it has no nulls."""
    if not array.null_count:
        return None
    bits = array.buffers()[0]
    offset, length = array.offset, len(array)
    if offset % 8 == 0:
        return bits.slice(offset // 8, (length + 7) // 8)
    moved = pa.allocate_buffer((length + 7) // 8)
    move_bits(bits, offset, length, moved)
    return moved
