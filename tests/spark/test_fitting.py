"""Values converted to the types that Spark takes, beside what Python makes of the same values."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import uuid
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.errors import SchemaMismatch
from spark_udfs.functions.fitting import Fitting
from spark_udfs.spark_types import JSON_TYPE, PRECISION, SQL_NAME, taken_schema

US = pa.timestamp("us")
TAGGED = pa.struct(
    [
        pa.field("value", pa.binary(), False),
        pa.field("metadata", pa.binary(), False, {b"variant": b"true"}),
    ]
)


def refused(column, kind, advice):
    return TypeError(f"{column}: {kind}: {advice}")


def fitted(array, field=None, **options):
    """What Spark gets of ``array``, or of the field ``field`` that is declared."""
    given = pa.schema([pa.field("c", array.type)])
    wanted = taken_schema(given, refused, **options) if field is None else pa.schema([field])
    batch = pa.RecordBatch.from_arrays([array], schema=given)
    made = Fitting(wanted, given, where="the answer").one(batch, 3)
    made.validate(full=True)
    assert made.schema.equals(wanted, check_metadata=True)
    return made.column(0)


def runs(ends, values):
    return pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), values)


def stored(kind, values, storage):
    return pa.ExtensionArray.from_storage(kind, pa.array(values, storage))


DAY = dt.date(2024, 1, 2)
NOON = dt.time(12, 0, 0, 5)
VALUES: dict[str, tuple[Any, pa.DataType, list[Any]]] = {
    "uint8": (pa.array([255, None], pa.uint8()), pa.int16(), [255, None]),
    "uint16": (pa.array([65535], pa.uint16()), pa.int32(), [65535]),
    "uint32": (pa.array([2**32 - 1], pa.uint32()), pa.int64(), [2**32 - 1]),
    "uint64": (
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.decimal128(20, 0),
        [decimal.Decimal(2**64 - 1), decimal.Decimal(0)],
    ),
    "half": (pa.array([1.5, None, float("-inf")], pa.float16()), pa.float32(), [1.5, None, -2e999]),
    "decimal256": (
        pa.array([decimal.Decimal("9" * 38)], pa.decimal256(38, 0)),
        pa.decimal128(38, 0),
        [decimal.Decimal("9" * 38)],
    ),
    "negative scale": (
        pa.array([decimal.Decimal(99900)], pa.decimal128(3, -2)),
        pa.decimal128(5, 0),
        [decimal.Decimal(99900)],
    ),
    "scale above precision": (
        pa.array([7], pa.int64()).cast(pa.decimal128(20, 0)).view(pa.decimal128(3, 5)),
        pa.decimal128(5, 5),
        [decimal.Decimal("0.00007")],
    ),
    "large text": (pa.array(["ä", None], pa.large_string()), pa.string(), ["ä", None]),
    "views": (pa.array(["x" * 40, None], pa.string_view()), pa.string(), ["x" * 40, None]),
    "fixed bytes": (pa.array([b"abc", None], pa.binary(3)), pa.binary(), [b"abc", None]),
    "date64": (pa.array([DAY, None], pa.date64()), pa.date32(), [DAY, None]),
    "time in s": (pa.array([3600], pa.time32("s")), pa.time64("ns"), [dt.time(1)]),
    "time in us": (pa.array([NOON], pa.time64("us")), pa.time64("ns"), [NOON]),
    "timestamp in s": (
        pa.array([-1], pa.timestamp("s")),
        US,
        [dt.datetime(1969, 12, 31, 23, 59, 59)],
    ),
    "timestamp in ns": (
        pa.array([-1000], pa.timestamp("ns")),
        US,
        [dt.datetime(1969, 12, 31, 23, 59, 59, 999999)],
    ),
    "duration in s": (
        pa.array([90], pa.duration("s")),
        pa.duration("us"),
        [dt.timedelta(seconds=90)],
    ),
    "dictionary": (
        pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 2]), pa.array(["a", "b", None])),
        pa.string(),
        ["b", "a", None, None],
    ),
    "dictionary of views": (
        pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array(["a", "b"], pa.string_view())),
        pa.string(),
        ["b", "a"],
    ),
    "runs": (runs([2, 5], pa.array([1, None])).slice(1, 3), pa.int64(), [1, None, None]),
    "runs of structs of runs": (
        runs([1, 3], pa.StructArray.from_arrays([runs([2], pa.array(["a"]))], ["x"])),
        pa.struct([("x", pa.string())]),
        [{"x": "a"}] * 3,
    ),
    "runs in a list": (
        pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), runs([2, 3], pa.array([1, 2]))),
        pa.list_(pa.int64()),
        [[1], [1, 2]],
    ),
    "bool8": (
        stored(pa.bool8(), [1, 0, None, -3], pa.int8()),
        pa.bool_(),
        [True, False, None, True],
    ),
    "uuid": (
        stored(pa.uuid(), [uuid.UUID(int=7).bytes, None], pa.binary(16)),
        pa.binary(),
        [uuid.UUID(int=7).bytes, None],
    ),
    "json": (stored(pa.json_(), ["{}"], pa.string()), pa.string(), ["{}"]),
    "tensor": (
        stored(pa.fixed_shape_tensor(pa.int8(), [2]), [[1, 2], None], pa.list_(pa.int8(), 2)),
        pa.list_(pa.int8()),
        [[1, 2], None],
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_types_that_spark_lacks_become_types_that_hold_every_value(name):
    array, kind, values = VALUES[name]
    made = fitted(array)
    assert made.type == kind
    assert made.to_pylist() == values
    # And the same inside of everything that has something inside.
    first = pa.array([0, 1, len(array)], pa.int32())
    lists = pa.ListArray.from_arrays(first, array)
    assert fitted(lists).to_pylist() == [values[:1], values[1:]]
    structs = pa.StructArray.from_arrays([array], ["x"])
    assert fitted(structs).to_pylist() == [{"x": value} for value in values]
    names = [f"k{place}" for place in range(len(values))]
    maps = pa.MapArray.from_arrays(first, pa.array(names), array)
    pairs = list(zip(names, values, strict=True))
    assert fitted(maps).to_pylist() == [pairs[:1], pairs[1:]]
    assert fitted(maps.slice(1)).to_pylist() == [pairs[1:]]


LOST: dict[str, tuple[Any, str, int]] = {
    "nanoseconds": (pa.array([0, 1500], pa.timestamp("ns")), "00:00:00.000001500", 1),
    "a timestamp's range": (pa.array([2**62], pa.timestamp("s", "UTC")), "", 0),
    "a duration's nanoseconds": (pa.array([0, 0, 1], pa.duration("ns")), "", 2),
    "a duration's range": (pa.array([2**62], pa.duration("s")), "", 0),
    "a day with an hour": (pa.array([0, 86_400_000, 5]).view(pa.date64()), "", 2),
    "a time's nanoseconds": (pa.array([1000, 1]).view(pa.time64("ns")), "", 1),
    "a time beyond the day": (pa.array([86_400], pa.int32()).view(pa.time32("s")), "", 0),
    "a time before the day": (pa.array([None, -1000]).view(pa.time64("us")), "", 1),
}


@pytest.mark.parametrize("name", LOST)
def test_a_value_that_would_be_lost_is_an_error_with_column_row_and_batch(name):
    array, text, row = LOST[name]
    with pytest.raises(SchemaMismatch) as caught:
        fitted(array)
    said = str(caught.value)
    assert said.startswith("the answer: column 'c': ") and text in said
    assert f"in row {row} of batch 3" in said
    assert caught.value.column == "c"
    with pytest.raises(SchemaMismatch, match="column 'c': list<"):
        fitted(pa.ListArray.from_arrays(pa.array([0, len(array)], pa.int32()), array))


def test_a_null_among_runs_that_are_declared_not_null_is_an_error_with_its_row():
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([1, None]))
    taken = pa.schema([pa.field("c", pa.int64(), nullable=False)])
    for array in (runs, runs.slice(1)):
        got = pa.schema([pa.field("c", array.type, nullable=False)])
        fitting = Fitting(taken, got, where="the answer")
        batch = pa.RecordBatch.from_arrays([array], schema=got)
        row = len(array) - 1
        with pytest.raises(
            SchemaMismatch,
            match=rf"column 'c' is declared int64 not null, and row {row} of batch 3 is null",
        ) as caught:
            fitting.one(batch, 3)
        assert caught.value.column == "c"
        good = pa.RecordBatch.from_arrays([array.slice(0, row)], schema=got)
        assert fitting.one(good, 0)["c"].to_pylist() == [1] * row


def test_values_under_a_null_do_not_count():
    bad = pa.array([1, 2000], pa.timestamp("ns"))
    struct = pa.StructArray.from_arrays([bad], ["x"], mask=pa.array([True, False]))
    assert fitted(struct).to_pylist()[0] is None
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), bad, mask=pa.array([True, False])
    )
    assert fitted(lists).to_pylist() == [None, [dt.datetime(1970, 1, 1, 0, 0, 0, 2)]]


def test_types_that_spark_takes_pass_without_a_copy():
    kinds = [pa.string(), pa.list_(pa.float64()), pa.map_(pa.string(), pa.int64()), US, pa.null()]
    schema = pa.schema([(f"c{place}", kind) for place, kind in enumerate(kinds)])
    fitting = Fitting(taken_schema(schema, refused), schema)
    batch = pa.RecordBatch.from_arrays([pa.nulls(2, kind) for kind in kinds], schema=schema)
    assert fitting.nothing
    assert fitting.one(batch, 0) is batch


def test_zones_and_wide_offsets_pass_where_nobody_compares_types():
    schema = pa.schema([("t", pa.timestamp("us", "Asia/Tokyo")), ("s", pa.large_string())])
    assert taken_schema(schema, refused, loose=True) == schema
    exact = taken_schema(schema, refused)
    assert exact.types == [pa.timestamp("us", "UTC"), pa.string()]
    assert taken_schema(schema, refused, large=True).types[1] == pa.large_string()


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (pa.dense_union([pa.field("a", pa.int64())]), "c"),
        (pa.list_(pa.sparse_union([pa.field("a", pa.int64())])), "c.item"),
        (pa.month_day_nano_interval(), "c"),
        (pa.decimal256(50, 2), "c"),
        (pa.decimal128(38, -1), "c"),
        (pa.struct([("x", pa.map_(pa.string(), pa.decimal256(39, 0)))]), "c.x.value"),
        (pa.dictionary(pa.int8(), pa.month_day_nano_interval()), "c.values"),
    ],
)
def test_a_type_that_spark_has_not_is_refused_with_its_place_and_advice(kind, path):
    with pytest.raises(TypeError) as caught:
        taken_schema(pa.schema([("c", kind)]), refused)
    place, _, advice = str(caught.value).split(": ", 2)
    assert place == path and advice


# Declared by metadata


def test_a_time_has_the_digits_that_its_precision_says():
    field = pa.field("c", pa.time64("ns"), metadata={PRECISION: b"3"})
    fine = pa.array([1_000_000, None]).view(pa.time64("ns"))
    assert fitted(fine, field).to_pylist() == [dt.time(0, 0, 0, 1000), None]
    with pytest.raises(SchemaMismatch, match=r"a time\(3\) has fewer digits"):
        fitted(pa.array([1_000]).view(pa.time64("ns")), field)
    with pytest.raises(SchemaMismatch, match=r"a time\(0\) has fewer digits"):
        fitted(
            pa.array([1_000]).view(pa.time64("ns")),
            field.with_metadata({PRECISION: b"0"}),
        )


def test_an_interval_is_whole_in_its_last_field():
    hour = 3_600_000_000
    field = pa.field("c", pa.duration("us"), metadata={SQL_NAME: b"INTERVAL DAY TO HOUR"})
    assert fitted(pa.array([25 * hour, None], pa.duration("us")), field)[0].as_py() == dt.timedelta(
        hours=25
    )
    with pytest.raises(SchemaMismatch, match="in row 1 of batch 3: the interval's last field"):
        fitted(pa.array([hour, hour + 1], pa.duration("us")), field)


def test_a_variant_is_put_in_order_and_has_no_nulls_inside():
    loose = pa.struct(
        [
            pa.field("metadata", pa.binary_view(), metadata={b"variant": b"true"}),
            pa.field("value", pa.large_binary()),
        ]
    )
    whole = pa.StructArray.from_arrays(
        [pa.array([b"m", None], pa.binary_view()), pa.array([b"v", None], pa.large_binary())],
        fields=list(loose),
        mask=pa.array([False, True]),
    )
    found = fitted(whole)
    assert found.type.equals(TAGGED)
    assert found.to_pylist() == [{"value": b"v", "metadata": b"m"}, None]
    broken = pa.StructArray.from_arrays(
        [pa.array([b"m"], pa.binary_view()), pa.array([None], pa.large_binary())],
        fields=list(loose),
    )
    with pytest.raises(SchemaMismatch, match="its field 'value' is null"):
        fitted(broken)


def test_a_struct_with_other_fields_beside_is_no_variant():
    more = pa.struct([*TAGGED, pa.field("typed_value", pa.int64())])
    assert taken_schema(pa.schema([("c", more)]), refused).field("c").type == more


def test_metadata_of_fields_stays():
    field = pa.field("c", pa.uint8(), metadata={JSON_TYPE: b"x", b"other": b"y"})
    inner = pa.field("l", pa.large_list(pa.field("item", pa.uint8(), metadata={b"a": b"b"})))
    found = taken_schema(pa.schema([field, inner]), refused)
    assert found.field("c").metadata == field.metadata
    assert found.field("l").type.value_field.metadata == {b"a": b"b"}


# Lists of every layout, beside Python's


@st.composite
def views(draw):
    """A list view of any offsets and sizes, with nulls, and its rows."""
    values = draw(st.lists(st.integers(0, 255), max_size=12))
    count = draw(st.integers(0, 8))
    offsets, sizes, rows = [], [], []
    for _ in range(count):
        offset = draw(st.integers(0, len(values)))
        size = draw(st.integers(0, len(values) - offset))
        null = draw(st.booleans())
        offsets.append(offset)
        sizes.append(size)
        rows.append(None if null else values[offset : offset + size])
    large = draw(st.booleans())
    number = pa.int64() if large else pa.int32()
    maker = pa.LargeListViewArray if large else pa.ListViewArray
    mask = pa.array([row is None for row in rows], pa.bool_())
    array = maker.from_arrays(
        pa.array(offsets, number), pa.array(sizes, number), pa.array(values, pa.uint8()), mask=mask
    )
    start = draw(st.integers(0, count))
    end = draw(st.integers(start, count))
    return array.slice(start, end - start), rows[start:end]


@given(views())
def test_list_views_of_any_layout_keep_their_rows(case):
    array, rows = case
    assert fitted(array).to_pylist() == rows
    offsets = pa.array([0, len(rows)], pa.int32())
    assert fitted(pa.ListArray.from_arrays(offsets, array)).to_pylist() == [rows]


@st.composite
def nested(draw, depth=2):
    """A type of Arrow with rows of Python values, and those that Spark gets of them."""
    kind = draw(st.sampled_from(["uint8", "dictionary", "ns", "list", "fixed", "struct", "map"]))
    count = draw(st.integers(0, 5))
    nulls = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    if depth == 0 or kind in ("uint8", "dictionary", "ns"):
        numbers = draw(st.lists(st.integers(0, 200), min_size=count, max_size=count))
        rows = [None if null else n for null, n in zip(nulls, numbers, strict=True)]
        if kind == "ns":
            moments = [None if n is None else n * 1000 for n in rows]
            epoch = dt.datetime(1970, 1, 1)
            made = [None if n is None else epoch + dt.timedelta(microseconds=n) for n in rows]
            return pa.array(moments, pa.timestamp("ns")), made
        array = pa.array(rows, pa.uint8())
        return (array.dictionary_encode() if kind == "dictionary" else array), rows
    inner, values = draw(nested(depth - 1))
    mask = pa.array(nulls, pa.bool_())
    if kind == "struct":
        nulls = (nulls + [False] * len(values))[: len(values)]
        array = pa.StructArray.from_arrays([inner], ["x"], mask=pa.array(nulls, pa.bool_()))
        rows = [None if null else {"x": v} for null, v in zip(nulls, values, strict=True)]
        return array, rows
    if kind == "fixed":
        values, inner = values[: len(values) // 2 * 2], inner.slice(0, len(inner) // 2 * 2)
        nulls = (nulls + [False] * len(values))[: len(values) // 2]
        array = pa.FixedSizeListArray.from_arrays(inner, 2, mask=pa.array(nulls, pa.bool_()))
        pairs = [values[place : place + 2] for place in range(0, len(values), 2)]
        return array, [None if null else pair for null, pair in zip(nulls, pairs, strict=True)]
    cuts = sorted(draw(st.lists(st.integers(0, len(values)), min_size=count, max_size=count)))
    ends = [0, *cuts]
    spans = list(itertools.pairwise(ends))
    offsets = pa.array(ends, pa.int32() if kind == "map" else pa.int64())
    if kind == "list":
        array = pa.LargeListArray.from_arrays(offsets, inner, mask=mask)
        rows = [None if null else values[a:b] for null, (a, b) in zip(nulls, spans, strict=True)]
        return array, rows
    keys = pa.array([f"k{place}" for place in range(len(values))], pa.large_string())
    array = pa.MapArray.from_arrays(offsets, keys, inner, mask=mask)
    return array, [
        None if null else [(f"k{place}", values[place]) for place in range(a, b)]
        for null, (a, b) in zip(nulls, spans, strict=True)
    ]


@given(nested(), st.data())
def test_nested_values_are_those_of_python(case, data):
    array, rows = case
    start = data.draw(st.integers(0, len(rows)))
    assert fitted(array).to_pylist() == rows
    assert fitted(array.slice(start)).to_pylist() == rows[start:]
