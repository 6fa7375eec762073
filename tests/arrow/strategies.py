"""Hypothesis strategies for Arrow types, and arrays of any type from a seed."""

from __future__ import annotations

import datetime
import decimal
import random
import struct
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

SHOWS_UNIONS = int(pa.__version__.partition(".")[0]) >= 25


class Celsius(pa.ExtensionType):
    """An extension type over a plain number."""

    def __init__(self) -> None:
        super().__init__(pa.float64(), "aqueduct.tests.celsius")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Celsius:
        return cls()


class Labels(pa.ExtensionType):
    """An extension type over a list of dictionary values."""

    def __init__(self) -> None:
        storage = pa.list_(pa.dictionary(pa.int8(), pa.string()))
        super().__init__(storage, "aqueduct.tests.labels")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Labels:
        return cls()


for _extension in (Celsius(), Labels()):
    pa.register_extension_type(_extension)

INTEGERS = [
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
]
PLAIN = [
    *INTEGERS,
    pa.null(),
    pa.bool_(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.binary(0),
    pa.binary(7),
    pa.decimal128(1, 0),
    pa.decimal128(38, 10),
    pa.decimal256(76, -3),
    pa.date32(),
    pa.date64(),
    pa.time32("s"),
    pa.time32("ms"),
    pa.time64("us"),
    pa.time64("ns"),
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    pa.timestamp("us", "UTC"),
    pa.timestamp("ms", "+07:30"),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
    pa.month_day_nano_interval(),
    pa.bool8(),
    pa.uuid(),
    Celsius(),
]
VIEWS = [pa.string_view(), pa.binary_view()]
KEYS = [kind for kind in PLAIN if kind not in (pa.null(), pa.bool8(), pa.uuid(), Celsius())]
FLAT = [
    *KEYS[:8],
    pa.string(),
    pa.binary(),
    pa.float64(),
    pa.decimal128(12, 3),
    pa.timestamp("us", "UTC"),
]


def names() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


@st.composite
def fields(draw: st.DrawFn, kinds: st.SearchStrategy[pa.DataType]) -> pa.Field:
    kind = draw(kinds)
    return pa.field(draw(names()), kind, nullable=draw(st.booleans()) or _has_nulls_alone(kind))


def _has_nulls_alone(kind: pa.DataType) -> bool:
    """Whether some rows can only be null, so that a field of this type must be nullable."""
    if pa.types.is_run_end_encoded(kind) or pa.types.is_dictionary(kind):
        return _has_nulls_alone(kind.value_type)
    if pa.types.is_union(kind):
        return any(_has_nulls_alone(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_null(kind))


def types(*, dictionaries: bool = True) -> st.SearchStrategy[pa.DataType]:
    """Types, nested up to a few levels."""
    plain = st.sampled_from(PLAIN)
    if dictionaries:
        plain |= st.just(Labels())
        plain |= st.builds(
            pa.dictionary, st.sampled_from(INTEGERS), st.sampled_from(FLAT), st.booleans()
        )
    return st.recursive(plain, lambda inner: _nested(inner, dictionaries), max_leaves=6)


def _nested(
    inner: st.SearchStrategy[pa.DataType], dictionaries: bool
) -> st.SearchStrategy[pa.DataType]:
    one = fields(inner)
    several = st.lists(one, min_size=1, max_size=4, unique_by=lambda field: field.name)
    nested = (
        one.map(pa.list_)
        | one.map(pa.large_list)
        | one.map(pa.list_view)
        | one.map(pa.large_list_view)
        | st.builds(pa.list_, one, st.integers(1, 3))
        | st.lists(one, max_size=4).map(pa.struct)
        | st.builds(pa.map_, st.sampled_from(FLAT), one.map(lambda field: field.type))
        | several.map(pa.sparse_union)
        | several.map(lambda some: pa.dense_union(some, [3 * i + 1 for i in range(len(some))]))
        | st.builds(
            pa.run_end_encoded,
            st.sampled_from([pa.int16(), pa.int32(), pa.int64()]),
            st.sampled_from(FLAT),
        )
    )
    if dictionaries:
        # Dictionaries whose values hold dictionaries.
        nested |= st.builds(pa.dictionary, st.just(pa.int32()), one.map(pa.list_))
    return nested


def schemas(*, dictionaries: bool = True) -> st.SearchStrategy[pa.Schema]:
    one = fields(types(dictionaries=dictionaries))
    return st.lists(one, max_size=5).map(pa.schema)


def common_schemas() -> st.SearchStrategy[pa.Schema]:
    """Schemas of the types that the compiled writer and reader know: all but a few."""
    plain = st.sampled_from([kind for kind in PLAIN if kind not in VIEWS])
    kinds = st.recursive(plain, _common_nested, max_leaves=6)
    return st.lists(fields(kinds), min_size=1, max_size=5).map(pa.schema)


def _common_nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    one = fields(inner)
    return (
        one.map(pa.list_)
        | one.map(pa.large_list)
        | st.builds(pa.list_, one, st.integers(1, 3))
        | st.lists(one, max_size=4).map(pa.struct)
        | st.builds(pa.map_, st.sampled_from(FLAT), one.map(lambda field: field.type))
    )


def shown_rightly(schema: pa.Schema) -> bool:
    """Whether ``to_pylist`` gives the rows of a slice.

    PyArrow 21 to 24 gives other rows of a sparse union. It writes the right ones.
    """
    return SHOWS_UNIONS or "sparse_union" not in str(schema)


@st.composite
def streams(
    draw: st.DrawFn,
    *,
    dictionaries: bool = True,
    of: st.SearchStrategy[pa.Schema] | None = None,
) -> list[pa.RecordBatch]:
    """A few batches of one schema, some of them slices of larger ones."""
    schema = draw(schemas(dictionaries=dictionaries) if of is None else of)
    chance = random.Random(draw(st.integers(0, 1 << 32)))
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(0, 40))
        batch = make_batch(schema, size, chance)
        if draw(st.booleans()):
            start = draw(st.integers(0, size))
            batch = batch.slice(start, draw(st.integers(0, size - start)))
        batches.append(batch)
    return batches


def make_batch(schema: pa.Schema, size: int, chance: random.Random) -> pa.RecordBatch:
    columns = [make_array(field.type, size, chance, field.nullable) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def make_array(
    kind: pa.DataType, size: int, chance: random.Random, nullable: bool = True
) -> pa.Array:
    """An array of any type; no NaN, which is equal to nothing."""
    if isinstance(kind, pa.BaseExtensionType):
        storage = make_array(kind.storage_type, size, chance, nullable)
        return pa.ExtensionArray.from_storage(kind, storage)
    if pa.types.is_dictionary(kind):
        return _dictionary(kind, size, chance, nullable)
    if pa.types.is_run_end_encoded(kind):
        ends = sorted(chance.sample(range(1, size), min(3, size - 1))) if size > 1 else []
        ends = [*ends, size] if size else []
        values = make_array(kind.value_type, len(ends), chance, nullable)
        return pa.RunEndEncodedArray.from_arrays(pa.array(ends, kind.run_end_type), values, kind)
    if pa.types.is_nested(kind):
        return _nested_array(kind, size, chance, nullable)
    if pa.types.is_null(kind):
        return pa.nulls(size)
    mask = _mask(size, chance, nullable)
    if pa.types.is_float16(kind):
        halves = struct.pack(f"<{size}e", *(chance.uniform(-100, 100) for _ in range(size)))
        validity = None
        if any(mask):
            validity = pa.array([not null for null in mask]).buffers()[1]
        return pa.Array.from_buffers(kind, size, [validity, pa.py_buffer(halves)])
    return pa.array([None if null else _value(kind, chance) for null in mask], kind)


def _dictionary(
    kind: pa.DictionaryType, size: int, chance: random.Random, nullable: bool
) -> pa.Array:
    # Growing by appending now and then, so that deltas occur.
    count = chance.randint(1, 6)
    values = make_array(kind.value_type, count, random.Random(chance.randint(0, 2)), False)
    indices = [None if null else chance.randrange(count) for null in _mask(size, chance, nullable)]
    return pa.DictionaryArray.from_arrays(
        pa.array(indices, kind.index_type), values, ordered=kind.ordered
    )


def _nested_array(kind: pa.DataType, size: int, chance: random.Random, nullable: bool) -> pa.Array:
    types = pa.types
    if types.is_struct(kind):
        children = [make_array(f.type, size, chance, f.nullable) for f in kind]
        if not children:
            return pa.array([None if null else {} for null in _mask(size, chance, nullable)], kind)
        mask = pa.array(_mask(size, chance, nullable), pa.bool_())
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if types.is_union(kind):
        return _union(kind, size, chance, nullable)
    lengths = [chance.randint(0, 3) for _ in range(size)]
    offsets = [sum(lengths[:i]) for i in range(size + 1)]
    if types.is_map(kind):
        keys = make_array(kind.key_type, offsets[-1], chance, False)
        items = make_array(kind.item_type, offsets[-1], chance, kind.item_field.nullable)
        starts = pa.array(offsets, pa.int32())
        return pa.MapArray.from_arrays(starts, keys, items, type=kind)
    inner = kind.value_field
    if types.is_fixed_size_list(kind):
        values = make_array(inner.type, size * kind.list_size, chance, inner.nullable)
        return pa.FixedSizeListArray.from_arrays(values, type=kind)
    values = make_array(inner.type, offsets[-1], chance, inner.nullable)
    large = types.is_large_list(kind) or types.is_large_list_view(kind)
    index = pa.int64() if large else pa.int32()
    mask = pa.array(_mask(size, chance, nullable), pa.bool_())
    if types.is_list(kind) or types.is_large_list(kind):
        array = pa.LargeListArray if large else pa.ListArray
        starts = pa.array(offsets, index)
        return array.from_arrays(starts, values, type=kind, mask=mask)
    views = pa.LargeListViewArray if large else pa.ListViewArray
    order = list(range(size))
    chance.shuffle(order)
    starts = pa.array([offsets[i] for i in order], index)
    sizes = pa.array([lengths[i] for i in order], index)
    return views.from_arrays(starts, sizes, values, type=kind, mask=mask)


def _union(kind: pa.UnionType, size: int, chance: random.Random, nullable: bool) -> pa.Array:
    count = kind.num_fields
    which = [chance.randrange(count) for _ in range(size)]
    codes = pa.array([kind.type_codes[i] for i in which], pa.int8())
    inner = [kind.field(i) for i in range(count)]
    loose = [field.nullable and nullable for field in inner]
    field_names = [field.name for field in inner]
    if kind.mode == "sparse":
        children = [make_array(inner[i].type, size, chance, loose[i]) for i in range(count)]
        array = pa.UnionArray.from_sparse(codes, children, field_names, kind.type_codes)
    else:
        offsets = pa.array([which[:i].count(choice) for i, choice in enumerate(which)], pa.int32())
        children = [
            make_array(inner[i].type, which.count(i), chance, loose[i]) for i in range(count)
        ]
        array = pa.UnionArray.from_dense(codes, offsets, children, field_names, kind.type_codes)
    # The makers above know of no nullability; this reads the same memory as the type wanted.
    fitting = pa.schema([pa.field("", kind)])
    batch = pa.RecordBatch.from_arrays([array], names=[""])
    exported = batch.__arrow_c_array__()[1]
    return pa.RecordBatch._import_from_c_capsule(fitting.__arrow_c_schema__(), exported).column(0)


def _mask(size: int, chance: random.Random, nullable: bool) -> list[bool]:
    rate = chance.choice([0.0, 0.3, 1.0]) if nullable else 0.0
    return [chance.random() < rate for _ in range(size)]


def _value(kind: pa.DataType, chance: random.Random) -> Any:
    types = pa.types
    if types.is_boolean(kind):
        return chance.random() < 0.5
    if types.is_integer(kind):
        bits = kind.bit_width
        return chance.randrange(1 << bits) - (1 << bits - 1 if types.is_signed_integer(kind) else 0)
    if types.is_floating(kind):
        return chance.choice([0.0, 1.5, -2.25, float("inf"), 1e30])
    if types.is_fixed_size_binary(kind):
        return chance.randbytes(kind.byte_width)
    if kind in (pa.string(), pa.large_string(), pa.string_view()):
        return "".join(chance.choices("aé漢🜁z", k=chance.choice([0, 3, 30])))
    if kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        return chance.randbytes(chance.choice([0, 3, 30]))
    if types.is_decimal(kind):
        digits = chance.randrange(10 ** min(kind.precision, 20))
        with decimal.localcontext(prec=80):
            return decimal.Decimal(digits).scaleb(-kind.scale)
    if types.is_interval(kind):
        return pa.MonthDayNano(
            [chance.randint(-9, 9), chance.randint(-99, 99), chance.getrandbits(40)]
        )
    if types.is_date(kind):
        return datetime.date(1970, 1, 1) + datetime.timedelta(days=chance.randint(-9000, 9000))
    if types.is_time(kind):
        return chance.randrange(86_400)
    return chance.randrange(1 << 32)
