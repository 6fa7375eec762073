"""What a schema means for memory: which batches need a deep look, and a cheap way to take it.

``RecordBatch.validate()`` compares sizes only: an offset, an index or a run in the middle of a
column may still point outside it, and reading that column would read foreign memory.
``validate(full=True)`` finds them, but it also decodes all text and tests every decimal and time,
which costs eight times as much (measured: 77 us a MiB, a quarter of it strings, against 10 us). So
a batch is looked at through its *physical* schema: same layout, and no rule but those of memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, TypeAlias

import pyarrow as pa

from aqueduct._speedups.arrow.columns import DEPTH_LIMIT, NODES_LIMIT, Columns
from aqueduct._speedups.arrow.writer import BatchWriter
from aqueduct.arrow.compact import has_slack
from aqueduct.arrow.ipc import Layout, by_identity, is_wide
from aqueduct.arrow.nulls import Required

__all__ = [
    "BufferLayout",
    "common_columns",
    "grows_by_deltas",
    "layouts",
    "needs_deep_check",
    "physical_schema",
    "plan",
    "quick_plan",
]

_Steps: TypeAlias = list[tuple[str, int, int, bool]]


@dataclass(frozen=True)
class BufferLayout:
    """What encoders and decoders of a schema have to know of it."""

    schema: pa.Schema
    layout: Layout
    """Of its batches."""
    dictionaries: dict[int, Layout]
    """Of its dictionaries, by their ids."""
    required: Required
    """The columns, and fields inside them, that are declared without nulls."""
    grows_by_deltas: bool
    slack: tuple[int, ...]
    """The columns that may hold what none of their rows refers to; see ``compact``."""
    columns: Columns | None
    """For the compiled reader; None if a type is not for it."""
    writer: BatchWriter | None
    """The compiled writer, likewise."""
    maps: bool
    """Whether there are maps. Arrow ends the process at one with a null in its entries or keys,
    even where no row refers to it."""

    @cached_property
    def physical(self) -> pa.Schema | None:
        """What batches are looked at through; None if their values are no pointers.

        Most never need it: the compiled reader looks by itself.
        """
        return physical_schema(self.schema) if needs_deep_check(self.schema) else None


@by_identity
def plan(schema: pa.Schema) -> BufferLayout:
    """The plan of a schema. Kept, because each call of a handler has the same ones again."""
    if is_wide(schema):  # Arrow holds all threads up while it hashes and compares
        return _make_plan(schema)
    try:
        return _kept_plan(schema)
    except TypeError:  # an extension type that cannot be hashed
        return _make_plan(schema)


@by_identity
def quick_plan(schema: pa.Schema) -> BufferLayout | None:
    """The plan of a schema; None for a very wide one: to plan it takes milliseconds."""
    return None if is_wide(schema) else plan(schema)


def _make_plan(schema: pa.Schema) -> BufferLayout:
    layout, dictionaries = layouts(schema)
    columns = common_columns(schema)
    required = Required(schema)
    return BufferLayout(
        schema,
        layout,
        dictionaries,
        required,
        grows_by_deltas(schema),
        # What the compiled writer knows has none.
        () if columns is not None else tuple(i for i, f in enumerate(schema) if has_slack(f.type)),
        columns,
        None if columns is None else BatchWriter(columns, required.check),
        any(pa.types.is_map(kind) for kind in _all_types(schema)),
    )


_kept_plan: Final = lru_cache(maxsize=256)(_make_plan)


def grows_by_deltas(schema: pa.Schema) -> bool:
    """Whether dictionaries that only grew may send what is new alone: where values are plain."""
    return not any(
        pa.types.is_nested(kind.value_type) or isinstance(kind.value_type, pa.BaseExtensionType)
        for kind in _all_types(schema)
        if pa.types.is_dictionary(kind)
    )


def needs_deep_check(schema: pa.Schema) -> bool:
    """Whether values of any column point to other places of memory."""
    types = pa.types
    for kind in _all_types(schema):
        if types.is_struct(kind) or types.is_fixed_size_list(kind):
            continue  # these have no pointers themselves, and what is inside comes next
        if types.is_nested(kind) or types.is_dictionary(kind) or types.is_run_end_encoded(kind):
            return True
        if _as_bytes(kind) is not None or _is_bytes(kind):
            return True
    return False


def common_columns(schema: pa.Schema) -> Columns | None:
    """The layout for the compiled writer and reader; None if they do not know some type.

    They know what has a fixed size, text and bytes with offsets, structs, lists and maps; neither
    dictionaries, unions, runs nor views.
    """
    steps: _Steps = []
    for field in schema:
        if not _add_steps(steps, field.type, not field.nullable, DEPTH_LIMIT):
            return None
    # They write and read numbers as this machine has them, and the wire is little-endian.
    if not 0 < len(steps) <= NODES_LIMIT or sys.byteorder != "little":
        return None
    return Columns(steps)


def _add_steps(steps: _Steps, kind: pa.DataType, strict: bool, levels: int) -> bool:
    """Adds an array of this type and what is inside it; ``strict``: it must not have nulls."""
    types = pa.types
    if not levels or len(steps) > NODES_LIMIT:
        return False
    if isinstance(kind, pa.BaseExtensionType):
        return _add_steps(steps, kind.storage_type, strict, levels)
    count = kind.num_fields
    if types.is_struct(kind):
        steps.append(("struct", 0, count, strict))
    elif types.is_map(kind):
        steps.append(("list", 0, 1, strict))
        # The entries of a map, and their keys, never are null: Arrow checks it too.
        steps.append(("struct", 0, 2, True))
        return _add_steps(steps, kind.key_type, True, levels - 2) and _add_steps(
            steps, kind.item_type, not kind.item_field.nullable, levels - 2
        )
    elif types.is_list(kind):
        steps.append(("list", 0, 1, strict))
    elif types.is_large_list(kind):
        steps.append(("large_list", 0, 1, strict))
    elif types.is_fixed_size_list(kind):
        steps.append(("fixed_list", kind.list_size, 1, strict))
    else:
        return _add_leaf(steps, kind, strict)
    return all(
        _add_steps(steps, field.type, not field.nullable, levels - 1)
        for field in map(kind.field, range(count))
    )


def _add_leaf(steps: _Steps, kind: pa.DataType, strict: bool) -> bool:
    types = pa.types
    if types.is_null(kind):
        steps.append(("nulls", 0, 0, strict))
    elif types.is_boolean(kind):
        steps.append(("bits", 0, 0, strict))
    elif types.is_fixed_size_binary(kind):
        steps.append(("fixed", kind.byte_width, 0, strict))
    elif types.is_primitive(kind) or types.is_decimal(kind):
        steps.append(("fixed", kind.bit_width // 8, 0, strict))
    elif types.is_binary(kind) or types.is_string(kind):
        steps.append(("bytes", 0, 0, strict))
    elif types.is_large_binary(kind) or types.is_large_string(kind):
        steps.append(("large_bytes", 0, 0, strict))
    else:
        return False
    return True


def layouts(schema: pa.Schema) -> tuple[Layout, dict[int, Layout]]:
    """The layouts of the schema's batches and of its dictionaries, by their ids.

    Dictionaries are numbered from 0 in the order of the schema's text: a dictionary comes before
    those inside its values.
    """
    dictionaries: dict[int, Layout] = {}
    # Fields are asked for one by one: lists of very many would have the collector look at them.
    types = (field.type for field in schema)
    return _sum(Layout(0, 0, 0), types, dictionaries), dictionaries


def _layout(kind: pa.DataType, dictionaries: dict[int, Layout]) -> Layout:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _layout(kind.storage_type, dictionaries)
    if types.is_dictionary(kind):
        number = len(dictionaries)
        dictionaries[number] = Layout(0, 0, 0)  # keeps the place before those inside
        dictionaries[number] = _layout(kind.value_type, dictionaries)
        return Layout(1, 2, 0)
    if kind in (pa.string_view(), pa.binary_view()):
        return Layout(1, 2, 1)
    if types.is_null(kind) or types.is_run_end_encoded(kind):
        own = Layout(1, 0, 0)
    elif types.is_struct(kind) or types.is_fixed_size_list(kind):
        own = Layout(1, 1, 0)
    elif types.is_union(kind):
        own = Layout(1, 1 if kind.mode == "sparse" else 2, 0)
    elif types.is_list_view(kind) or types.is_large_list_view(kind):
        own = Layout(1, 3, 0)
    else:
        own = Layout(1, 3 if _as_bytes(kind) or _is_bytes(kind) else 2, 0)
    return _sum(own, (kind.field(i).type for i in range(kind.num_fields)), dictionaries)


def _sum(own: Layout, inner: Iterable[pa.DataType], dictionaries: dict[int, Layout]) -> Layout:
    nodes, buffers, views = own
    for kind in inner:
        child = _layout(kind, dictionaries)
        nodes, buffers, views = nodes + child.nodes, buffers + child.buffers, views + child.views
    return Layout(nodes, buffers, views)


def physical_schema(schema: pa.Schema) -> pa.Schema:
    """A schema of the same layout without meaning: bytes for text, integers for times."""
    return pa.schema([_physical_field(field) for field in schema])


def _physical_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _physical(field.type), nullable=field.nullable)


def _physical(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _physical(kind.storage_type)
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _physical(kind.value_type), kind.ordered)
    if types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, _physical(kind.value_type))
    if types.is_nested(kind):
        return _physical_nested(kind)
    if types.is_decimal(kind):
        return pa.binary(kind.bit_width // 8)
    if types.is_temporal(kind) and kind.bit_width <= 64 and not types.is_interval(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    return _as_bytes(kind) or kind


def _physical_nested(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([_physical_field(field) for field in kind])
    if types.is_union(kind):
        fields = [_physical_field(kind.field(i)) for i in range(kind.num_fields)]
        return pa.union(fields, kind.mode, kind.type_codes)
    if types.is_map(kind):
        key, item = _physical(kind.key_type), _physical_field(kind.item_field)
        return pa.map_(key, item, kind.keys_sorted)
    item = _physical_field(kind.value_field)
    if types.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    if types.is_list(kind):
        return pa.list_(item)
    if types.is_large_list(kind):
        return pa.large_list(item)
    if types.is_list_view(kind):
        return pa.list_view(item)
    return pa.large_list_view(item)


def _as_bytes(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_string_view(kind):
        return pa.binary_view()
    return None


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.large_binary(), pa.binary_view())


def _all_types(schema: pa.Schema) -> Iterator[pa.DataType]:
    """The types of all columns and of all that is inside them; storage for extensions."""
    for field in schema:
        waiting = [field.type]
        while waiting:
            kind = waiting.pop()
            if isinstance(kind, pa.BaseExtensionType):
                waiting.append(kind.storage_type)
                continue
            yield kind
            if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
                waiting.append(kind.value_type)
            else:
                waiting.extend(kind.field(i).type for i in range(kind.num_fields))
