"""The option ``cast`` wherever it is one: true, false and round, through a real service."""

from __future__ import annotations

import datetime
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import aqueduct
from aqueduct.errors import ConfigError, SchemaMismatch
from spark_udfs import exchange, exchange_files, exchange_pandas, register
from spark_udfs.functions.casts import Casting, casts
from spark_udfs.functions.pandas import ColumnExchange
from tests.sinks.shelf import Shelf

VIEWS = {
    "in order": ([0, 2], [2, 1]),
    "out of order": ([3, 0], [1, 2]),
    "overlaps": ([0, 1], [3, 2]),
    "gaps": ([1, 3], [1, 1]),
}
NOON = datetime.datetime(2024, 1, 1, 13, 5)
LIES = {
    "an infinity": (1e300, pa.float64(), pa.float32(), "1e+300", "out of the range of float", ""),
    "true": (5, pa.int64(), pa.bool_(), "5", "neither 0 nor 1", ""),
    "a date": (NOON, pa.timestamp("us"), pa.date32(), repr(NOON), "has a time of day", ""),
    "a decimal": (
        1.239,
        pa.float64(),
        pa.decimal128(10, 2),
        "1.239",
        "no number that is equal to it",
        "Decimal('1.24')",
    ),
    "a unit": (
        NOON.replace(microsecond=7),
        pa.timestamp("us"),
        pa.timestamp("ms"),
        repr(NOON.replace(microsecond=7)),
        "too coarse for it",
        repr(NOON),
    ),
}


def view(form: Any, parts: tuple[list[int], list[int]]) -> pa.Array:
    """A list view over the numbers from 10 on."""
    width = pa.int64() if form is pa.LargeListViewArray else pa.int32()
    values = pa.array([10, 11, 12, 13], pa.int32())
    return form.from_arrays(*(pa.array(each, width) for each in parts), values)


# The option


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (True, True),
        (False, False),
        ("true", True),
        ("on", True),
        ("False", False),
        ("off", False),
        ("round", "round"),
        (" Round ", "round"),
    ],
)
def test_cast_is_true_false_or_round(given, found):
    assert casts(given) == found
    shape = exchange("aqueduct://127.0.0.1:9", "h", cast=given).shape
    assert (shape.cast, shape.rounding) == (found, found == "round")


@pytest.mark.parametrize("given", [1, 0, "yes", "safe", "rounded", "", 1.0, [True]])
def test_cast_is_nothing_else(given):
    with pytest.raises(ConfigError) as caught:
        exchange("aqueduct://127.0.0.1:9", "h", cast=given)
    assert str(caught.value) == f"option cast is {given!r}; it must be true, false or round"


# Values


@pytest.mark.parametrize(
    ("value", "got", "wanted", "shown", "why", "rounded"), LIES.values(), ids=LIES
)
def test_casts_that_would_change_a_value_name_column_row_and_value(
    address, value, got, wanted, shown, why, rounded
):
    batch = pa.record_batch({"a": pa.array([None, value], got)})
    declared = pa.schema([("a", wanted)])
    for options in ({"input_schema": declared}, {"schema": declared}):
        side = "input" if "input_schema" in options else "output"
        with pytest.raises(SchemaMismatch) as caught:
            list(exchange(address, "echo", cast=True, **options)(iter([batch])))
        text = str(caught.value)
        assert (
            f"the {side} of handler 'echo': column 'a': wanted {wanted}, got {got}, and the value "
            f"{shown} in row 1 of batch 0 cannot be cast: "
        ) in text
        assert why in text
        told = f'; it would become {rounded}, which cast="round" allows'
        assert (told in text) == bool(rounded)
        round_ = exchange(address, "echo", cast="round", **options)
        if rounded:
            (answer,) = round_(iter([batch]))
            assert [repr(each) for each in answer["a"].to_pylist()] == ["None", rounded]
        else:
            with pytest.raises(SchemaMismatch, match=why):
                list(round_(iter([batch])))


def test_casts_name_fields_inside_with_dots(address):
    got = pa.list_(pa.struct([("x", pa.map_(pa.string(), pa.int64()))]))
    wanted = pa.list_(pa.struct([("x", pa.map_(pa.string(), pa.int8()))]))
    rows = [[], [{"x": [("k", 1)]}], [{"x": None}, {"x": [("k", 300)]}]]
    batch = pa.record_batch({"a": pa.array(rows, got)})
    call = exchange(address, "echo", cast=True, input_schema=pa.schema([("a", wanted)]))
    with pytest.raises(SchemaMismatch) as caught:
        list(call(iter([batch])))
    assert (
        "column 'a.item.x.value': wanted int8, got int64, and the value 300 in row 2 of batch 0 "
        "cannot be cast: "
    ) in str(caught.value)
    assert caught.value.column == "a.item.x.value"
    (answer,) = call(iter([batch.slice(0, 2)]))
    assert answer["a"].to_pylist() == rows[:2] and answer.schema.types == [wanted]


@pytest.mark.parametrize(
    ("got", "wanted", "text"),
    [
        (
            pa.struct([("s", pa.struct([("x", pa.int64())]))]),
            pa.struct([("s", pa.struct([("x", pa.int8()), ("y", pa.int8())]))]),
            (
                "column 'a.s' has another type: wanted struct<x: int8, y: int8>, got struct<x: "
                "int64>; it lacks the field 'y'; there is no cast"
            ),
        ),
        (
            pa.struct([("n", pa.int64()), ("x", pa.int64())]),
            pa.struct([("n", pa.int8())]),
            (
                "column 'a' has another type: wanted struct<n: int8>, got struct<n: int64, x: "
                "int64>; the field 'x' is not wanted; there is no cast"
            ),
        ),
        (
            pa.struct([("n", pa.int64()), ("x", pa.binary())]),
            pa.struct([("n", pa.int8()), ("x", pa.date32())]),
            "column 'a.x' has another type: wanted date32[day], got binary; there is no cast",
        ),
    ],
    ids=["a field lacking", "a field too many", "behind one that is cast"],
)
def test_where_no_cast_leads_inside_the_field_is_named(got, wanted, text):
    with pytest.raises(SchemaMismatch) as caught:
        Casting(pa.schema([("a", wanted)]), pa.schema([("a", got)]), where="here")
    assert str(caught.value).startswith(f"here: {text}")


def test_columns_are_found_in_any_order_and_case():
    wanted = pa.schema([("id", pa.int8()), ("word", pa.string()), ("Word", pa.string())])
    got = pa.schema([("Word", pa.string()), ("ID", pa.int64()), ("word", pa.string())])
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["b"]), pa.array([1]), pa.array(["a"])], schema=got
    )
    made = Casting(wanted, got, where="here").one(batch, 0)
    assert made.to_pydict() == {"id": [1], "word": ["a"], "Word": ["b"]}
    assert made.schema == wanted


def test_a_batch_that_is_not_sound_is_named():
    # What has no row to blame: text that is none, of a peer that is trusted without a look.
    data = pa.py_buffer(b"\xff")
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1], data]
    )
    array = pa.StructArray.from_arrays([broken, pa.array([1])], ["t", "n"])
    wanted = pa.schema([("a", pa.struct([("t", pa.string()), ("n", pa.int8())]))])
    casting = Casting(wanted, pa.schema([("a", array.type)]), where="here")
    with pytest.raises(SchemaMismatch) as caught:
        casting.one(pa.record_batch({"a": array}), 3)
    assert str(caught.value).startswith("here: column 'a': wanted struct<t: string, n: int8>, got ")
    assert "and batch 3 cannot be cast: " in str(caught.value)


def test_casts_keep_the_metadata_of_fields():
    tagged = pa.struct([pa.field("value", pa.binary(), metadata={"variant": "true"})])
    plain = pa.struct([pa.field("value", pa.binary())])
    note = {"comment": "how many"}
    wanted = pa.schema([pa.field("v", tagged), pa.field("n", pa.int8(), metadata=note)])
    got = pa.schema([pa.field("v", plain), pa.field("n", pa.int64(), metadata={"other": "x"})])
    batch = pa.RecordBatch.from_arrays([pa.nulls(1, plain), pa.array([1])], schema=got)
    made = Casting(wanted, got, where="here").one(batch, 0)
    assert made.schema.equals(wanted, check_metadata=True)
    bare = Casting(pa.schema([("n", pa.int8())]), pa.schema([got.field("n")]), where="here")
    assert bare.schema.field("n").metadata == {b"other": b"x"}


# List views


@pytest.mark.parametrize("parts", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("form", [pa.ListViewArray, pa.LargeListViewArray])
def test_list_views_reach_the_handler_whole(address, form, parts):
    array = view(form, parts)
    batch = pa.record_batch({"a": array})
    (answer,) = exchange(address, "echo")(iter([batch]))
    assert answer["a"].to_pylist() == array.to_pylist()
    for options in ("input_schema", "schema"):
        wanted = pa.schema([("a", pa.list_(pa.int64()))])
        call = exchange(address, "echo", cast=True, **{options: wanted})
        (answer,) = call(iter([batch]))
        assert answer["a"].to_pylist() == array.to_pylist() and answer.schema == wanted
        (answer,) = call(iter([batch.slice(1)]))
        assert answer["a"].to_pylist() == array.to_pylist()[1:]


@pytest.mark.parametrize("parts", VIEWS.values(), ids=VIEWS)
def test_list_views_are_joined_to_the_rows(address, parts):
    array = view(pa.LargeListViewArray, parts)
    rows = pa.record_batch({"a": array, "more": ["x", "y"]})
    call = exchange(address, "echo", columns=["a"], columns_mode="replace", merge_rows=10)
    (answer,) = call(iter([rows, rows.slice(1)]))
    values = array.to_pylist()
    assert answer.to_pydict() == {"a": [*values, values[1]], "more": ["x", "y", "y"]}
    wanted = pa.schema([("a", pa.list_(pa.int32()))])
    call = exchange(
        address, "echo", columns=["a"], columns_mode="replace", cast=True, schema=wanted
    )
    (answer,) = call(iter([rows]))
    assert answer.to_pydict() == {"a": values, "more": ["x", "y"]}
    assert answer.schema.field("a").type == pa.list_(pa.int32())


def test_the_advice_for_list_views_is_no_cast_of_arrows(address):
    with pytest.raises(SchemaMismatch) as caught:
        call = exchange(address, "echo", input_schema=pa.schema([("a", pa.list_(pa.int64()))]))
        list(call(iter([pa.record_batch({"a": view(pa.ListViewArray, VIEWS["gaps"])})])))
    assert "cast to list<item: int64>, or in Spark exchange(..., cast=True)" in str(caught.value)
    assert "batch.cast" not in str(caught.value)


# Files, functions of columns, and frames of pandas


def test_files_are_cast_as_they_are_sent(address, tmp_path):
    pq.write_table(pa.table({"a": [1.0, 2.5]}), tmp_path / "part.parquet")
    frame = pa.record_batch({"path": [str(tmp_path / "part.parquet")]})
    declared = pa.schema([("a", pa.int8())])
    options = {"input_schema": declared, "returns": "answers"}
    with pytest.raises(SchemaMismatch, match='it would become 2, which cast="round" allows'):
        list(exchange_files(address, "echo", cast=True, **options)(iter([frame])))
    answers = exchange_files(address, "echo", cast="round", **options)(iter([frame]))
    assert [answer.to_pydict() for answer in answers] == [{"a": [1, 2]}]


def test_a_column_that_comes_back_is_cast(address):
    arrays = [(pa.array([1, 2]),), (pa.array([300]),)]
    call = exchange(address, "echo", check_rows=True, cast=True)
    function = ColumnExchange(call, ("id",), pa.int8())
    assert next(function(iter(arrays))).equals(pa.array([1, 2], pa.int8()))
    with pytest.raises(SchemaMismatch, match="the value 300 in row 0 of batch 1 cannot be cast"):
        list(function(iter(arrays)))


@pytest.mark.parametrize(
    ("values", "wanted", "text"),
    [
        ([1.0, 1e300], pa.float32(), "the value 1e+300 in row 1: it is out of the range of float"),
        ([1, 5], pa.bool_(), "the value 5 in row 1: it is neither 0 nor 1"),
        ([NOON], pa.date32(), "in row 0: it has a time of day, and a date has none"),
        ([[1.0], [1e300]], pa.list_(pa.float32()), "row 1: it is out of the range of float"),
        ([2.5, None], pa.int64(), "float64 values do not fit int64: Float value 2.5"),
    ],
)
def test_frames_of_pandas_are_not_changed_on_their_way(address, values, wanted, text):
    import pandas as pd

    call = exchange_pandas(address, "echo", input_schema=pa.schema([("a", wanted)]))
    with pytest.raises(SchemaMismatch) as caught:
        list(call(iter([pd.DataFrame({"a": values})])))
    assert text in str(caught.value) and "column 'a'" in str(caught.value)


def test_frames_of_pandas_that_fit_go_as_declared(address):
    import pandas as pd

    wanted = pa.schema(
        [
            ("a", pa.int64()),
            ("b", pa.float32()),
            ("c", pa.map_(pa.string(), pa.int8())),
            ("d", pa.struct([("x", pa.int8()), ("y", pa.int8())])),
            ("e", pa.date32()),
        ]
    )
    frame = pd.DataFrame(
        {
            "a": [1.0, None],
            "b": [0.1, 2.0],
            "c": [[("k", 1)], None],
            "d": [{"x": 1}, None],
            "e": [datetime.date(2024, 1, 1), None],
        }
    )
    call = exchange(address, "echo", input_schema=wanted)
    from spark_udfs.functions.pandas import _batches

    (answer,) = call(_batches(iter([frame]), wanted))
    assert answer.schema == wanted
    assert answer["a"].to_pylist() == [1, None]
    assert answer["d"].to_pylist() == [{"x": 1, "y": None}, None]


# Spark


def test_what_spark_takes_is_rounded_if_that_is_allowed(address):
    batch = pa.record_batch({"t": pa.array([2_000, 1_500], pa.timestamp("ns"))})
    told = pa.schema([("t", pa.timestamp("us"))])
    call = replace(exchange(address, "echo"), declared=told)  # as apply() makes it
    with pytest.raises(SchemaMismatch) as caught:
        list(call(iter([batch])))
    assert "in row 1 of batch 0: " in str(caught.value)
    assert '; cast="round" allows it to be rounded' in str(caught.value)
    call = replace(exchange(address, "echo", cast="round"), declared=told)
    (answer,) = call(iter([batch]))
    assert answer["t"].cast(pa.int64()).to_pylist() == [2, 2]
    batch = pa.record_batch({"t": pa.array([2**62], pa.timestamp("s"))})
    for cast in (True, "round"):
        call = replace(exchange(address, "echo", cast=cast), declared=told)
        with pytest.raises(SchemaMismatch, match=r"column 't'.*row 0 of batch 0") as caught:
            list(call(iter([batch])))
        assert 'cast="round"' not in str(caught.value)


@pytest.fixture
def tables(running):
    service = aqueduct.Service("tables")
    shelf = Shelf()
    views = pa.schema([("id", pa.int64()), ("v", pa.large_list_view(pa.int32()))])
    texts = pa.schema([("id", pa.string()), ("at", pa.timestamp("ns"))])

    @service.table("views", schema=views, splits=[None])
    def read_views(split):
        # Out of order, with a gap and an overlap; and the one that is in the report.
        odd = view(pa.LargeListViewArray, ([2, 0, 1], [2, 3, 1]))
        plain = pa.array([[1, 2], [3]], views.field("v").type)
        yield pa.record_batch([pa.array([0, 1, 2]), odd], schema=views)
        yield pa.record_batch([pa.array([3, 4]), plain], schema=views)

    @service.table("texts", schema=texts, splits=[None])
    def read_texts(split):
        yield pa.record_batch(
            [pa.array(["9", "10"]), pa.array([1_500, 2_000], pa.timestamp("ns"))], schema=texts
        )

    service.sink("shelf", shelf, schema=pa.schema([("id", pa.int64())]))
    with running(service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as address:
        yield address, shelf


@pytest.mark.spark
def test_list_views_reach_spark_whole(spark, tables):
    register(spark)
    reader = spark.read.format("aqueduct").option("address", tables[0])
    rows = reader.load("views").orderBy("id").collect()
    assert [row.v for row in rows] == [[12, 13], [10, 11, 12], [11], [1, 2], [3]]
    rows = reader.option("cast", "true").schema("v array<string>").load("views").collect()
    assert [row.v for row in rows][3:] == [["1", "2"], ["3"]]


@pytest.mark.spark
def test_tables_are_read_as_declared_if_cast_says_so(spark, tables):
    register(spark)
    reader = (
        spark.read.format("aqueduct")
        .option("address", tables[0])
        .schema("id int, at timestamp_ntz")
    )
    with pytest.raises(Exception, match=r"column 'id' has another type: wanted int32, got string"):
        reader.load("texts").collect()
    with pytest.raises(
        Exception, match=r"in row 0 of batch 0 cannot be cast: .* too coarse for it"
    ):
        reader.option("cast", "true").load("texts").collect()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        # As text 9 is above 10.
        found = reader.option("cast", "round").load("texts").where("id > 9").collect()
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    assert [(row.id, row.at.microsecond) for row in found] == [(10, 2)]


@pytest.mark.spark
def test_rows_are_written_as_cast_says(spark, tables):
    address, shelf = tables
    register(spark)

    def write(frame, cast):
        writer = frame.write.format("aqueduct").option("address", address).option("cast", cast)
        writer.option("handler", "shelf").mode("append").save()

    with pytest.raises(Exception, match='it would become 2, which cast="round" allows'):
        write(spark.sql("select 2.5D as id"), "true")
    assert shelf.rows == []
    write(spark.sql("select 2.5D as id"), "round")
    assert shelf.rows == [2]
    with pytest.raises(Exception, match="cast is 'maybe'; it must be true, false or round"):
        write(spark.sql("select 2.5D as id"), "maybe")


@pytest.mark.spark
def test_the_setting_of_casts_is_heard(spark, address):
    batch = pa.record_batch({"a": pa.array([Decimal("1.5")])})
    spark.conf.set("spark.aqueduct.cast", "round")
    try:
        call = exchange(address, "echo", input_schema=pa.schema([("a", pa.int8())]))
    finally:
        spark.conf.unset("spark.aqueduct.cast")
    (answer,) = call(iter([batch]))
    assert answer["a"].to_pylist() == [2]
