"""The one table of types for Spark: what it says, and what Spark itself makes of each type."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import subprocess
import sys
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import types as sql

import aqueduct
from aqueduct.errors import ConfigError, SchemaMismatch
from spark_udfs import (
    exchange,
    exchange_by_key,
    exchange_column,
    exchange_files,
    exchange_grouped,
    exchange_pandas,
    register,
    spark_types,
)
from spark_udfs.datasource.types import check_declared
from spark_udfs.spark_schemas import arrow_of, spark_schema
from spark_udfs.spark_types import (
    ARROW_TYPES,
    JSON_TYPE,
    PRECISION,
    SQL_NAME,
    taken_schema,
    told_schema,
)
from tests.sinks.shelf import Shelf
from tests.spark.services import make

pytestmark = pytest.mark.spark

TCP = "aqueduct+tcp://127.0.0.1:0"
ROOT = Path(__file__).parent.parent.parent
VALIDATE = "spark.sql.execution.arrow.pyspark.validateSchema.enabled"
POINT = "X'0101000000000000000000F03F0000000000000040'"
SPECIAL = f"""
    select id, parse_json('{{"a":1}}') v, array(parse_json('1')) vl,
        named_struct('x', parse_json('2')) vs, map('k', parse_json('3')) vm,
        ST_GeomFromWKB({POINT}) g, ST_GeogFromWKB({POINT}) h,
        collate('Ab', 'UTF8_LCASE') c, array(collate('Ab', 'UNICODE')) cl,
        interval '1' day d, interval '1 2' day to hour dh,
        named_struct('s', interval '3' second) ds, time'01:02:03' t, null n, cast('a' as char(3)) ch
    from range(1)"""


def refused(column, kind, advice):
    return TypeError(f"{column}: {kind}: {advice}")


def one(kind, metadata=None):
    """What Spark calls a field."""
    return spark_schema(pa.schema([pa.field("c", kind, metadata=metadata)]), refused)["c"]


def stored(kind, value, storage):
    return pa.ExtensionArray.from_storage(kind, pa.array([value, None], storage))


DAY = dt.date(2024, 1, 2)
MOMENT = dt.datetime(2024, 1, 2, 3, 4, 5)
SPAN = dt.timedelta(days=1, seconds=5)
CENTS = decimal.Decimal("1.25")
UUID = uuid.UUID(int=7)
ARRAYS = {
    "null": (pa.nulls(2), "void", None),
    "bool": (pa.array([True, None]), "boolean", True),
    **{
        name: (pa.array([7, None], name), spark, 7)
        for name, spark in {
            "int8": "tinyint",
            "int16": "smallint",
            "int32": "int",
            "int64": "bigint",
            "uint8": "smallint",
            "uint16": "int",
            "uint32": "bigint",
        }.items()
    },
    "uint64": (
        pa.array([2**64 - 1, None], pa.uint64()),
        "decimal(20,0)",
        decimal.Decimal(2**64 - 1),
    ),
    "half": (pa.array([1.5, None], pa.float16()), "float", 1.5),
    "float": (pa.array([1.5, None], pa.float32()), "float", 1.5),
    "double": (pa.array([1e300, None]), "double", 1e300),
    "decimal32": (pa.array([CENTS, None], pa.decimal32(9, 2)), "decimal(9,2)", CENTS),
    "decimal64": (pa.array([CENTS, None], pa.decimal64(18, 2)), "decimal(18,2)", CENTS),
    "decimal128": (pa.array([CENTS, None], pa.decimal128(38, 2)), "decimal(38,2)", CENTS),
    "decimal256": (pa.array([CENTS, None], pa.decimal256(38, 2)), "decimal(38,2)", CENTS),
    "negative_scale": (
        pa.array([decimal.Decimal(100), None], pa.decimal128(5, -2)),
        "decimal(7,0)",
        decimal.Decimal(100),
    ),
    "string": (pa.array(["ä", None]), "string", "ä"),
    "large_string": (pa.array(["ä", None], pa.large_string()), "string", "ä"),
    "string_view": (pa.array(["ä", None], pa.string_view()), "string", "ä"),
    "binary": (pa.array([b"\xff", None]), "binary", b"\xff"),
    "large_binary": (pa.array([b"\xff", None], pa.large_binary()), "binary", b"\xff"),
    "binary_view": (pa.array([b"\xff", None], pa.binary_view()), "binary", b"\xff"),
    "fixed_binary": (pa.array([b"abc", None], pa.binary(3)), "binary", b"abc"),
    "date32": (pa.array([DAY, None]), "date", DAY),
    "date64": (pa.array([DAY, None], pa.date64()), "date", DAY),
    **{
        f"time_{unit}": (pa.array([dt.time(1, 2, 3), None], kind), "time(6)", dt.time(1, 2, 3))
        for unit, kind in {
            "s": pa.time32("s"),
            "ms": pa.time32("ms"),
            "us": pa.time64("us"),
            "ns": pa.time64("ns"),
        }.items()
    },
    **{
        f"clock_{unit}": (pa.array([MOMENT, None], pa.timestamp(unit)), "timestamp_ntz", MOMENT)
        for unit in ("s", "ms", "us", "ns")
    },
    **{
        f"point_{unit}": (
            pa.array([MOMENT.replace(tzinfo=dt.UTC), None], pa.timestamp(unit, "Asia/Tokyo")),
            "timestamp",
            dt.datetime.fromtimestamp(MOMENT.replace(tzinfo=dt.UTC).timestamp()),
        )
        for unit in ("s", "ms", "us", "ns")
    },
    **{
        f"span_{unit}": (pa.array([SPAN, None], pa.duration(unit)), "interval day to second", SPAN)
        for unit in ("s", "ms", "us", "ns")
    },
    "dictionary": (pa.array(["a", None]).dictionary_encode(), "string", "a"),
    "runs": (
        pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), pa.array(["a", None])),
        "string",
        "a",
    ),
    "list": (pa.array([[1], None]), "array<bigint>", [1]),
    "large_list": (pa.array([[1], None], pa.large_list(pa.uint8())), "array<smallint>", [1]),
    "fixed_list": (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), "array<bigint>", [1, 2]),
    "list_view": (pa.array([[1], None], pa.list_view(pa.int64())), "array<bigint>", [1]),
    "large_list_view": (
        pa.array([[1], None], pa.large_list_view(pa.int64())),
        "array<bigint>",
        [1],
    ),
    "map": (
        pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.uint8())),
        "map<string,smallint>",
        {"a": 1},
    ),
    "struct": (pa.array([{"x": 1}, None]), "struct<x:bigint>", sql.Row(x=1)),
    "bool8": (stored(pa.bool8(), 1, pa.int8()), "boolean", True),
    "uuid": (stored(pa.uuid(), UUID.bytes, pa.binary(16)), "binary", UUID.bytes),
    "json": (stored(pa.json_(), "{}", pa.string()), "string", "{}"),
    "opaque": (stored(pa.opaque(pa.string(), "a", "b"), "x", pa.string()), "string", "x"),
    "tensor": (
        stored(pa.fixed_shape_tensor(pa.int32(), [2]), [1, 2], pa.list_(pa.int32(), 2)),
        "array<int>",
        [1, 2],
    ),
}
REFUSED = {
    "dense_union": pa.dense_union([pa.field("a", pa.int64())]),
    "sparse_union": pa.sparse_union([pa.field("a", pa.int64())]),
    "interval": pa.month_day_nano_interval(),
    "decimal256": pa.decimal256(50, 2),
    "decimal128": pa.decimal128(38, -1),
}


# The table itself


def test_every_type_of_arrow_is_in_the_table_once():
    kinds = {name: array.type for name, (array, _, _) in ARRAYS.items()} | REFUSED
    tried = {kind.id for kind in kinds.values()}
    named = {name: number for name, number in vars(pa.lib).items() if name.startswith("Type_")}
    # Intervals of months and of days have no type in pyarrow, an extension is tried by its kinds.
    left = {name for name, number in named.items() if number not in tried}
    assert left <= {
        "Type_NA",
        "Type_INTERVAL_MONTHS",
        "Type_INTERVAL_DAY_TIME",
        "Type_MAX_ID",
    }, left
    for name, kind in kinds.items():
        rows = [row for row in ARROW_TYPES if row.holds(kind)]
        assert rows, name
        assert bool(rows[0].spark) == (name not in REFUSED), name


@pytest.mark.checkout
def test_the_page_of_types_has_the_table():
    page = (ROOT / "docs" / "cookbook" / "types.md").read_text()
    assert spark_types.markdown() in page, "python ci/spark_types.py writes it"
    command = [sys.executable, str(ROOT / "ci" / "spark_types.py"), "--check"]
    assert subprocess.run(command, check=False, timeout=120).returncode == 0


@pytest.mark.parametrize("name", ARRAYS)
def test_what_spark_calls_each_type_and_what_it_takes_agree(name):
    array, called, _ = ARRAYS[name]
    found = one(array.type)
    assert found.dataType.simpleString() == called
    taken = taken_schema(pa.schema([("c", array.type)]), refused)
    assert arrow_of(sql.StructType([found])).types == taken.types


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_that_spark_has_not_is_refused_by_the_reader_with_advice(name):
    from spark_udfs.datasource.types import spark_schema as of_table

    inside = pa.struct([("deep", pa.list_(REFUSED[name]))])
    with pytest.raises(SchemaMismatch, match="the table: Spark has no type for column 'u'") as one:
        of_table(pa.schema([("u", REFUSED[name])]), "the table")
    assert "give " in str(one.value)
    with pytest.raises(SchemaMismatch, match=r"column 'u\.deep\.item'"):
        of_table(pa.schema([("u", inside)]), "the table")


# What metadata tells


@pytest.mark.parametrize(
    ("kind", "told", "called"),
    [
        (pa.string(), "string collate UTF8_LCASE", "string collate UTF8_LCASE"),
        (pa.large_string(), "STRING COLLATE UNICODE_CI", "string collate UNICODE_CI"),
        (pa.duration("s"), "INTERVAL DAY", "interval day"),
        (pa.duration("us"), "interval hour to second", "interval hour to second"),
        # What does not fit the type counts for nothing.
        (pa.int64(), "string collate UTF8_LCASE", "bigint"),
        (pa.string(), "interval day", "string"),
        (pa.string(), "string collate", "string"),
        (pa.duration("us"), "interval second to day", "interval day to second"),
        (pa.duration("us"), "interval year", "interval day to second"),
        (pa.duration("us"), "interval day and hour", "interval day to second"),
    ],
)
def test_a_fields_metadata_may_name_its_spark_type(kind, told, called):
    assert one(kind, {SQL_NAME: told}).dataType.simpleString() == called
    inside = pa.list_(pa.field("item", kind, metadata={SQL_NAME: told}))
    assert one(inside).dataType.elementType.simpleString() == called


@pytest.mark.parametrize(("digits", "called"), [("0", 0), ("3", 3), ("6", 6), ("9", 6), ("x", 6)])
def test_the_precision_of_a_time_is_that_of_spark_metadata(digits, called):
    assert one(pa.time64("us"), {PRECISION: digits}).dataType == sql.TimeType(called)


def test_a_columns_own_metadata_is_kept_if_it_can_be_read():
    key = b"SPARK::metadata::json"
    assert one(pa.int64(), {key: b'{"comment": "hallo"}'}).metadata == {"comment": "hallo"}
    assert one(pa.int64(), {key: b"{"}).metadata == {}
    assert one(pa.int64(), {key: b"[1]"}).metadata == {}


def test_a_user_defined_type_is_only_what_the_rows_have():
    schema = sql.StructType().add("vec", sql.ArrayType(VectorUDT()))
    sent = arrow_of(schema)
    assert spark_schema(sent, refused, known=[schema]) == schema
    # Nothing is imported that a service names.
    (plain,) = spark_schema(sent, refused)
    assert plain.dataType == sql.ArrayType(VectorUDT.sqlType())
    described = json.dumps({"type": "udt", "pyClass": "antigravity.Any", "sqlType": "long"})
    assert one(pa.int64(), {JSON_TYPE: described}).dataType == sql.LongType()
    assert "antigravity" not in sys.modules
    # Nor is a type taken whose storage is another by now.
    other = pa.field("vec", pa.int64(), metadata=sent.field("vec").type.value_field.metadata)
    assert spark_schema(pa.schema([other]), refused, known=[schema])["vec"].dataType == (
        sql.LongType()
    )


@pytest.mark.parametrize(
    "kind",
    [
        sql.StringType("UTF8_LCASE"),
        sql.DayTimeIntervalType(0, 0),
        sql.DayTimeIntervalType(1, 2),
        sql.DayTimeIntervalType(),
        sql.TimeType(0),
        sql.TimeType(),
        sql.VariantType(),
        sql.GeometryType(0),
        sql.GeometryType("ANY"),
        sql.GeographyType(4326),
        sql.NullType(),
        sql.DecimalType(38, 38),
    ],
)
def test_a_spark_type_comes_back_as_it_went_at_any_depth(kind):
    # What is always null may be null.
    may_be_null = isinstance(kind, sql.NullType)
    inner = sql.StructType([sql.StructField("x", kind, may_be_null), sql.StructField("y", kind)])
    schema = sql.StructType(
        [
            sql.StructField("c", kind, metadata={"comment": "here"}),
            sql.StructField("l", sql.ArrayType(inner, False), False),
            sql.StructField("m", sql.MapType(sql.StringType(), sql.ArrayType(kind))),
        ]
    )
    assert spark_schema(arrow_of(schema), refused) == schema


def test_types_that_spark_hands_to_no_function_are_refused_with_their_column():
    months = sql.StructType().add("s", sql.StructType().add("y", sql.YearMonthIntervalType()))
    with pytest.raises(ConfigError, match=r"rows: column 's\.y' is interval year to month, .*YEAR"):
        arrow_of(months, "rows")
    calendar = sql.StructType().add("i", sql.CalendarIntervalType())
    with pytest.raises(ConfigError, match="column 'i' is interval, and Spark takes no such"):
        arrow_of(calendar)
    assert arrow_of(calendar, calendar=True).types == [pa.month_day_nano_interval()]


def test_a_geometry_is_not_read_as_one_of_another_system():
    def declare(kind, given):
        declared, have = (sql.StructType().add("g", each) for each in (kind, given))
        check_declared(declared, arrow_of(have), "the table")

    declare(sql.GeometryType(4326), sql.GeometryType(4326))
    declare(sql.GeometryType("ANY"), sql.GeometryType(4326))
    for kind in (sql.GeometryType(0), sql.GeographyType(4326), sql.GeographyType("ANY")):
        with pytest.raises(SchemaMismatch, match=r"column 'g' has another type: wanted geo"):
            declare(kind, sql.GeometryType(4326))
    nested = sql.ArrayType(sql.GeometryType(0)), sql.ArrayType(sql.GeometryType(4326))
    with pytest.raises(SchemaMismatch, match=r"column 'g\.\w+' has another type"):
        declare(*nested)


def test_metadata_is_told_beside_what_is_there():
    got = pa.schema([pa.field("c", pa.string(), metadata={"a": "got"}), pa.field("d", pa.int64())])
    told = pa.schema([pa.field("c", pa.string(), metadata={"a": "x", "b": "y"}), ("d", pa.int64())])
    assert told_schema(got, told).field("c").metadata == {b"a": b"x", b"b": b"y"}
    assert told_schema(got, pa.schema([("other", pa.int64())])) is got


# Names


@pytest.fixture
def named(running):
    """Answers with columns of each list of names, called as the names joined by a comma."""
    service = make()
    for names in (["c", "c"], ["a.b", ""], ["c", "C"]):
        batch = pa.RecordBatch.from_arrays([pa.array([1, 2])] * 2, names=names)
        service.handler(",".join(names), output=batch.schema)(lambda given, batch=batch: batch)
    with running(service, TCP, dev_certificate=False) as address:
        yield address


def test_two_columns_of_one_name_are_refused_on_the_driver_and_in_the_task(named):
    rows = pa.schema([("id", pa.int64())])
    call = exchange(named, "c,c")
    with pytest.raises(ConfigError, match=r"the answer of 'c,c' has 2 columns 'c'.* rename"):
        call.output_schema(rows)
    batch = pa.record_batch([[1, 2]], schema=rows)
    assert [each.num_columns for each in call(iter([batch]))] == [2]  # Spark does not get them
    with pytest.raises(ConfigError, match="2 columns 'c'"):
        call.fitting(pa.schema([("c", pa.int64()), ("c", pa.int64())]))
    found = exchange(named, "c,C").output_schema(rows)
    assert found.simpleString() == "struct<c:bigint,C:bigint>"


def test_two_fields_of_one_name_have_no_type_in_spark():
    inside = pa.struct([("a", pa.int64()), ("a", pa.int64())])
    for kind, name in ((inside, "s"), (pa.list_(inside), r"s\.item")):
        schema = pa.schema([("s", kind)])
        with pytest.raises(TypeError, match=f"^{name}: struct<.*rename one of its fields 'a'"):
            taken_schema(schema, refused)
    apart = pa.struct([("a", pa.int64()), ("A", pa.int64())])
    assert one(apart).dataType.simpleString() == "struct<a:bigint,A:bigint>"


def test_a_column_without_a_name_keeps_its_type(named):
    found = exchange(named, "a.b,").output_schema(pa.schema([("id", pa.int64())]))
    assert [(each.name, each.dataType.simpleString()) for each in found] == [
        ("a.b", "bigint"),
        ("", "bigint"),
    ]


# Through Spark


@pytest.fixture
def everything(running):
    """A service that gives every type: as an answer, and as a table."""
    schema = pa.schema([(name, array.type) for name, (array, _, _) in ARRAYS.items()])
    batch = pa.RecordBatch.from_arrays([array for array, _, _ in ARRAYS.values()], schema=schema)
    service = aqueduct.Service("test")
    service.handler("all", output=schema)(lambda given: batch)
    service.table("all", schema=schema)(lambda: (yield batch))
    with running(service, TCP, dev_certificate=False) as address:
        yield address


def checked(frame):
    assert dict(frame.dtypes) == {name: called for name, (_, called, _) in ARRAYS.items()}
    rows = frame.collect()
    assert len(rows) == 2
    full, empty = sorted(rows, key=lambda row: row["int64"] is None)
    assert full.asDict() == {name: value for name, (_, _, value) in ARRAYS.items()}
    assert set(empty.asDict().values()) == {None}


def test_every_type_reaches_spark_through_apply(spark, everything):
    checked(spark.range(1, numPartitions=1).transform(exchange(everything, "all").apply))


def test_every_type_reaches_spark_through_the_reader(spark, everything):
    register(spark)
    checked(spark.read.format("aqueduct").option("address", everything).load("all"))


def test_every_type_reaches_spark_through_groups_and_keys(spark, everything):
    frame = spark.range(1)
    ddl = ", ".join(f"`{name}` {called}" for name, (_, called, _) in ARRAYS.items())
    for form in ("table", "batches"):
        function = exchange_grouped(everything, "all", form=form)
        checked(frame.groupBy("id").applyInArrow(function, ddl))
    checked(exchange_by_key(everything, "all", ["id"]).apply(frame))
    checked(exchange_by_key(everything, "all", ["id"]).apply(frame, ddl))


def test_every_type_reaches_spark_beside_the_rows(spark, everything):
    # A scalar function and columns= need an answer for each row.
    frame = spark.range(0, 2, 1, 1)
    joined = frame.transform(exchange(everything, "all", columns=["id"]).apply)
    assert joined.select("id").collect() == [(0,), (1,)]
    checked(joined.drop("id"))


def test_answers_of_files_have_sparks_types_and_what_is_written_has_the_handlers(
    spark, everything, tmp_path
):
    import pyarrow.parquet as pq

    path = str(tmp_path / "one.parquet")
    pq.write_table(pa.table({"id": [1]}), path)
    files = spark.createDataFrame([(path,)], "path string")
    ddl = ", ".join(f"`{name}` {called}" for name, (_, called, _) in ARRAYS.items())
    checked(files.mapInArrow(exchange_files(everything, "all", returns="answers"), ddl))


@pytest.fixture
def single(running):
    """A service whose handlers ``echo_NAME`` answer with one column of a type."""
    service = make()
    kinds = {
        "ns": (pa.timestamp("ns"), [1000, 2001]),
        "seconds": (pa.duration("s"), [5, None]),
        "coded": (pa.dictionary(pa.int8(), pa.large_string()), ["a", "b"]),
        "small": (pa.uint8(), [1, 255]),
        "wide": (pa.decimal256(50, 1), [decimal.Decimal(5), decimal.Decimal(6)]),
    }
    for name, (kind, values) in kinds.items():
        schema = pa.schema([("c", kind)])
        array = pa.array(values, kind.value_type if name == "coded" else kind)
        array = array.dictionary_encode().cast(kind) if name == "coded" else array
        batch = pa.RecordBatch.from_arrays([array], schema=schema)
        service.handler(name, output=schema)(lambda given, batch=batch: batch)
        service.table(name, schema=schema)(lambda batch=batch: (yield batch))
    with running(service, TCP, dev_certificate=False) as address:
        yield address


def test_a_value_that_spark_would_lose_fails_the_task_with_its_row(spark, single):
    frame = spark.range(0, 2, 1, 1)
    for made in (
        frame.transform(exchange(single, "ns").apply),
        frame.mapInArrow(exchange(single, "ns"), "c timestamp_ntz"),
        frame.mapInPandas(exchange_pandas(single, "ns"), "c timestamp_ntz"),
        frame.select(exchange_column(single, "ns", "timestamp_ntz")("id")),
    ):
        with pytest.raises(
            Exception, match="SchemaMismatch: the answer of 'ns': column 'c': "
        ) as e:
            made.collect()
        assert "in row 1 of batch 0" in str(e.value) and "[ns]" in str(e.value)
    register(spark)
    read = spark.read.format("aqueduct").option("address", single).load("ns")
    with pytest.raises(Exception, match=r"column 'c': .*in row 1 of batch 0"):
        read.collect()


def test_functions_of_columns_and_frames_take_types_that_spark_lacks(spark, single):
    frame = spark.range(0, 2, 1, 1)
    named = {"seconds": "interval day to second", "coded": "string", "small": "smallint"}
    found = {
        name: [row[0] for row in frame.select(exchange_column(single, name, kind)("id")).collect()]
        for name, kind in named.items()
    }
    assert found == {
        "seconds": [dt.timedelta(seconds=5), None],
        "coded": ["a", "b"],
        "small": [1, 255],
    }
    for name in ("coded", "small"):
        made = frame.mapInPandas(exchange_pandas(single, name), f"c {named[name]}")
        assert [row[0] for row in made.collect()] == found[name]


def test_a_function_of_columns_casts_what_spark_has_no_type_for(spark, single):
    frame = spark.range(0, 2, 1, 1)
    for name, returns, found in (("wide", "decimal(38,0)", [5, 6]), ("ns", "bigint", [1000, 2001])):
        called = exchange_column(single, name, returns, cast=True)
        assert [row[0] for row in frame.select(called("id")).collect()] == found
    with pytest.raises(
        Exception, match=r"column 'c' is decimal256\(50, 1\), and Spark has no such"
    ):
        frame.select(exchange_column(single, "wide", "decimal(38,0)")("id")).collect()


def test_text_with_wide_offsets_is_taken_by_every_function(spark, single):
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        frame = spark.sql("select 1L id, 'a' text, array('b') more")
        rows = frame.collect()
        assert frame.transform(exchange(single, "echo").apply).collect() == rows
        for form in ("table", "batches"):
            grouped = exchange_grouped(single, "echo", form=form)
            assert frame.groupBy("id").applyInArrow(grouped, frame.schema).collect() == rows
        plain = exchange_grouped(single, "coded")
        coded = frame.groupBy("id").applyInArrow(plain, "c string").collect()
        assert [row.c for row in coded] == ["a", "b"]
        column = exchange_column(single, "echo", "string", columns=["text"])
        assert frame.select(column("text")).collect() == [("a",)]
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")


def test_a_function_of_columns_keeps_to_the_bounds_that_it_declares(spark, single):
    frame = spark.range(0, 2, 1, 1)
    seconds = frame.select(exchange_column(single, "seconds", "interval second")("id").alias("s"))
    assert seconds.dtypes == [("s", "interval second")]
    assert seconds.collect() == [(dt.timedelta(seconds=5),), (None,)]
    minutes = frame.select(exchange_column(single, "seconds", "interval minute")("id"))
    with pytest.raises(Exception, match=r"in row 0 of batch 0: the interval's last field is larg"):
        minutes.collect()


def test_a_frame_of_pandas_that_went_to_a_service_comes_back(spark, running):
    import pandas as pd

    service = make()
    times = pd.DataFrame({"t": pd.to_datetime(["2024-01-02 03:04:05.000006"])})
    batch = pa.RecordBatch.from_pandas(times.astype("datetime64[ns]"))
    assert batch.schema.types == [pa.timestamp("ns")]  # as pandas makes them
    service.handler("times", output=batch.schema)(lambda given: batch)
    with running(service, TCP, dev_certificate=False) as address:
        frame = spark.range(1, numPartitions=1).transform(exchange(address, "times").apply)
        assert frame.collect() == [(dt.datetime(2024, 1, 2, 3, 4, 5, 6),)]


# Spark's own types through a service


@pytest.fixture
def special(spark):
    """A row of every type that Arrow has no type for."""
    frame = spark.sql(SPECIAL).withMetadata("c", {"comment": "hallo"})
    vectors = spark.createDataFrame([(0, Vectors.dense(1.0, 2.0))], ["id", "vec"])
    return frame.join(vectors, "id")


LOOKED_AT = [
    "id", "v", "vl", "vs", "vm", "c", "cl", "d", "dh", "ds", "t", "n", "ch", "vec",
    "hex(ST_AsBinary(g)) g", "hex(ST_AsBinary(h)) h", "ST_Srid(g) gs", "c = 'aB' same",
]  # fmt: skip


def test_variant_geometry_collation_intervals_and_vectors_come_back_from_a_service(
    spark, special, address
):
    found = special.transform(exchange(address, "echo").apply)
    assert found.schema == special.schema
    for mine, theirs in zip(special.schema, found.schema, strict=True):
        assert mine.metadata == theirs.metadata, mine.name
    assert repr(found.selectExpr(*LOOKED_AT).collect()) == repr(
        special.selectExpr(*LOOKED_AT).collect()
    )
    beside = exchange(address, "double", columns=["id"], columns_mode="replace")
    kept = special.transform(beside.apply)
    assert kept.schema[1:] == special.schema[1:]
    assert repr(kept.selectExpr(*LOOKED_AT).collect()) == repr(
        special.selectExpr(*LOOKED_AT).collect()
    )


class Keeper(Shelf):
    """A sink that keeps the schema of each attempt and its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.schemas: list[pa.Schema] = []
        self.batches: list[pa.RecordBatch] = []

    def open(self, attempt, call):
        self.schemas.append(call.schema)
        return self

    def write(self, batch):
        self.batches.append(batch)

    def prepare(self):
        return {}

    def commit(self, run, prepared):
        return {}

    def abort(self, *given):
        pass


@pytest.fixture
def kept(spark, special, running):
    """What a sink was sent of ``special``: a schema and a batch."""
    register(spark)
    service, keeper = aqueduct.Service("test"), Keeper()
    service.sink("keep", keeper)
    with running(service, TCP, dev_certificate=False) as address:
        writer = special.write.format("aqueduct").options(address=address, handler="keep")
        writer.mode("append").save()
    (schema,), (batch,) = keeper.schemas, keeper.batches
    return schema, batch


def test_what_arrow_has_no_type_for_reaches_a_sink_and_is_read_back(spark, special, kept, running):
    schema, batch = kept
    assert batch.schema.equals(schema, check_metadata=True)
    assert schema.field("c").metadata[SQL_NAME] == b"string collate UTF8_LCASE"
    assert b"VectorUDT" in schema.field("vec").metadata[JSON_TYPE]

    service = aqueduct.Service("test")
    service.table("kept", schema=schema)(lambda: (yield batch))
    with running(service, TCP, dev_certificate=False) as address:
        reader = spark.read.format("aqueduct").option("address", address)
        found = reader.load("kept")
        others = [field.name for field in special.schema if field.name != "vec"]
        assert found.select(*others).schema == special.select(*others).schema
        assert found.schema["c"].metadata == {"comment": "hallo"}
        looked_at = [each for each in LOOKED_AT if each != "vec"]
        assert repr(found.selectExpr(*looked_at).collect()) == repr(
            special.selectExpr(*looked_at).collect()
        )
        # A user-defined type is declared, as the reader imports nothing that a service names.
        declared = reader.schema(special.schema).load("kept")
        assert declared.select("vec").collect() == special.select("vec").collect()


def test_what_arrow_has_no_type_for_goes_through_streams(spark, special, kept, running, tmp_path):
    schema, batch = kept

    class Growing:
        """A table with one row, before the offset 1."""

        def __init__(self):
            self.schema = schema

        def initial(self):
            return {"row": 0}

        def latest(self, start, limit):
            return {"row": 1}

        def between(self, start, end):
            return [0]

        def read(self, split):
            yield batch

    service, keeper = aqueduct.Service("test"), Keeper()
    service.table("growing", Growing())
    service.sink("keep", keeper)
    with running(service, TCP, dev_certificate=False) as address:
        given = {"address": address, "checkpointLocation": str(tmp_path / "checkpoint")}
        wanted = special.drop("t").schema  # Spark's streams have no times yet
        found = spark.readStream.format("aqueduct").options(**given).schema(wanted).load("growing")
        assert found.schema == wanted
        writer = found.writeStream.format("aqueduct").options(handler="keep", **given)
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        assert query.exception() is None
    (written,) = keeper.batches
    sent = batch.drop_columns(["t"])
    assert written.schema.equals(sent.schema, check_metadata=True)
    assert written.equals(sent)


def test_the_length_of_char_and_varchar_is_kept_as_sparks_frames_have_it(spark, address):
    spark.sql("create table lengths (c char(3), v varchar(5)) using parquet")
    try:
        spark.sql("insert into lengths values ('a', 'bcd')")
        frame = spark.table("lengths")
        found = frame.transform(exchange(address, "echo").apply)
        assert found.schema == frame.schema
        kept = [next(iter(field.metadata.values())) for field in found.schema]
        assert kept == ["char(3)", "varchar(5)"]
        assert found.collect() == [("a  ", "bcd")]
    finally:
        spark.sql("drop table lengths")


def test_a_struct_declared_as_variant_is_one(spark, running):
    register(spark)
    plain = pa.schema(
        [
            (
                "v",
                pa.struct(
                    [
                        pa.field("value", pa.binary(), False),
                        pa.field("metadata", pa.binary(), False),
                    ]
                ),
            )
        ]
    )
    rows = pa.RecordBatch.from_pylist(
        [{"v": {"value": b"\x0c\x07", "metadata": b"\x01\x00\x00"}}], schema=plain
    )
    service = aqueduct.Service("test")
    service.table("plain", schema=plain)(lambda: (yield rows))
    with running(service, TCP, dev_certificate=False) as address:
        reader = spark.read.format("aqueduct").option("address", address)
        assert reader.load("plain").schema["v"].dataType.typeName() == "struct"
        found = reader.schema("v variant").load("plain")
        assert found.selectExpr("cast(v as int)").collect() == [(7,)]


def test_intervals_of_months_and_calendars_are_refused_on_the_driver(spark, address):
    frame = spark.sql("select 1L id, make_interval(1, 2, 3) i, interval '1-2' year to month y")
    with pytest.raises(ConfigError, match=r"rows: column 'y' is interval year to month, .*extract"):
        exchange(address, "echo").apply(frame.drop("i"))
    with pytest.raises(ConfigError, match="the answer of 'echo': column 'i' is month_day_nano"):
        exchange(address, "echo").apply(frame.drop("y"))
    beside = exchange(address, "double", columns=["id"], columns_mode="replace")
    with pytest.raises(ConfigError, match="column 'i' is interval, and Spark takes no such column"):
        beside.apply(frame.drop("y"))
    register(spark)
    with pytest.raises(Exception, match="column 'y' is interval year to month"):
        frame.drop("i").write.format("aqueduct").options(address=address, handler="x").mode(
            "append"
        ).save()


def test_a_filter_on_text_with_a_collation_loses_no_row(spark, running):
    register(spark)
    told = {SQL_NAME: "string collate UTF8_LCASE"}
    schema = pa.schema([pa.field("c", pa.string(), metadata=told), ("plain", pa.string())])
    batch = pa.record_batch([["Ab", "aB", "x"], ["Ab", "aB", "x"]], schema=schema)
    service = aqueduct.Service("test")
    service.table("words", schema=schema, filters="applied")(lambda: (yield batch))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        with running(service, TCP, dev_certificate=False) as address:
            frame = spark.read.format("aqueduct").option("address", address).load("words")
            for condition in ("c = 'AB'", "c in ('AB', 'y')", "startswith(c, 'A')", "c < 'b'"):
                assert frame.where(condition).count() == 2, condition
            assert frame.where("plain = 'Ab'").count() == 1
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


# Columns go by position in mapInArrow


@pytest.fixture
def swapping(running):
    """A service whose handler changes the order of its columns when told."""
    service = make()
    state = {"swapped": False}
    first = pa.schema([("id", pa.int64()), ("length", pa.int64())])

    def schema_of(schema):
        return pa.schema(list(first)[::-1]) if state["swapped"] else first

    @service.handler("lengths", output=schema_of)
    def lengths(batch):
        rows = {"id": batch["id"], "length": pa.array([100] * batch.num_rows)}
        schema = schema_of(None)
        return pa.record_batch([rows[name] for name in schema.names], schema=schema)

    with running(service, TCP, dev_certificate=False) as address:
        yield address, state


def test_names_swapped_since_apply_looked_fail_the_task_with_both(spark, swapping):
    address, state = swapping
    frame = spark.range(0, 2, 1, 1)
    made = frame.transform(exchange(address, "lengths").apply)
    assert made.collect() == [(0, 100), (1, 100)]
    keyed = exchange_by_key(address, "lengths", ["id"]).apply(frame, "id long, length long")
    assert sorted(keyed.collect()) == [(0, 100), (1, 100)]
    state["swapped"] = True
    for frame in (made, keyed):
        with pytest.raises(Exception, match="differs from what Spark was told by apply") as caught:
            frame.collect()
        assert "'id' is out of order" in str(caught.value)


def test_swapped_names_are_an_error_with_schema_or_sparks_own_check(spark, swapping):
    address, _ = swapping
    frame = spark.range(0, 2, 1, 1)
    swapped = "length long, id long"
    with pytest.raises(Exception, match="out of order"):
        frame.mapInArrow(exchange(address, "lengths", schema=swapped), swapped).collect()
    # Without schema= this function does not learn what Spark was told; Spark can look itself.
    spark.conf.set(VALIDATE, "true")
    try:
        with pytest.raises(Exception, match="ARROW_TYPE_MISMATCH"):
            frame.mapInArrow(exchange(address, "lengths"), swapped).collect()
        made = frame.transform(exchange(address, "lengths").apply)
        assert made.collect() == [(0, 100), (1, 100)]
    finally:
        spark.conf.unset(VALIDATE)
