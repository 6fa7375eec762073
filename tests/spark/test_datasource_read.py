"""``spark.read.format("aqueduct")``: what Spark gets, what the service saw, and what errors say."""

from __future__ import annotations

import datetime
import decimal
import threading
import time
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions
from pyspark.sql.types import LongType, StructType

import aqueduct
import spark_udfs
from aqueduct.errors import (
    ConfigError,
    ConnectFailed,
    HandlerFailed,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from spark_udfs.datasource import AqueductSource
from spark_udfs.datasource.options import settings_of
from spark_udfs.datasource.reader import Split, TableReader
from spark_udfs.datasource.types import arrow_of, check, fit, spark_schema

pytestmark = pytest.mark.spark

TCP = "aqueduct+tcp://127.0.0.1:0"
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
SCHEMA = pa.schema([("id", pa.int64()), ("word", pa.string()), ("x", pa.float64())])
CERTAIN = decimal.Decimal("12345678901234567890.0123456789")
DAY = datetime.date(2026, 3, 29)
CLOCK = datetime.datetime(2026, 3, 29, 2, 30, 0, 123456)  # an hour that Zurich skips
POINT = datetime.datetime(2026, 3, 29, 1, 30, 0, 123000, tzinfo=datetime.UTC)
TYPES: dict[str, tuple[pa.DataType, Any]] = {
    "int8": (pa.int8(), -128),
    "int16": (pa.int16(), -(2**15)),
    "int32": (pa.int32(), -(2**31)),
    "int64": (pa.int64(), -(2**63)),
    "uint8": (pa.uint8(), 255),
    "uint16": (pa.uint16(), 2**16 - 1),
    "uint32": (pa.uint32(), 2**32 - 1),
    "uint64": (pa.uint64(), 2**64 - 1),
    "float32": (pa.float32(), 1.5),
    "float64": (pa.float64(), 1e300),
    "bool": (pa.bool_(), True),
    "string": (pa.string(), "Zürich\n"),
    "large_string": (pa.large_string(), ""),
    "string_view": (pa.string_view(), "a view of some text"),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), "again"),
    "binary": (pa.binary(), b"\x00\xff"),
    "large_binary": (pa.large_binary(), b""),
    "fixed_binary": (pa.binary(3), b"abc"),
    "decimal": (pa.decimal128(38, 10), CERTAIN),
    "decimal256": (pa.decimal256(38, 10), -CERTAIN),
    "date32": (pa.date32(), DAY),
    "date64": (pa.date64(), DAY),
    "timestamp": (pa.timestamp("us", "UTC"), POINT),
    "timestamp_ms": (pa.timestamp("ms", "America/New_York"), POINT),
    "timestamp_ns": (pa.timestamp("ns", "UTC"), POINT),
    "clock": (pa.timestamp("us"), CLOCK),
    "clock_s": (pa.timestamp("s"), CLOCK.replace(microsecond=0)),
    "duration": (pa.duration("ms"), datetime.timedelta(days=1, milliseconds=5)),
    "list": (pa.list_(pa.int32()), [1, None, 3]),
    "large_list": (pa.large_list(pa.large_string()), ["a", None]),
    "fixed_list": (pa.list_(pa.int64(), 2), [1, 2]),
    "map": (pa.map_(pa.string(), pa.uint8()), [("a", 1), ("b", None)]),
    "struct": (
        pa.struct([("when", pa.timestamp("ms", "UTC")), ("deep", pa.struct([("x", pa.uint8())]))]),
        {"when": POINT, "deep": {"x": 5}},
    ),
    "points": (pa.list_(pa.struct([("at", pa.timestamp("us", "Asia/Tokyo"))])), [{"at": POINT}]),
}


def rows(start, end):
    numbers = range(start, end)
    columns = [list(numbers), [f"w{n}" for n in numbers], [n / 2 for n in numbers]]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)],
        schema=SCHEMA,
    )


@pytest.fixture
def source(spark):
    """``source(address, table, **options)``: a reader with these options."""
    spark_udfs.register(spark)

    def of(address, table, **options):
        given = {"address": address, "backoff": "10ms", **options}
        return spark.read.format("aqueduct").options(handler=table, **given)

    return of


@pytest.fixture
def pushing(spark):
    spark.conf.set(PUSHDOWN, "true")
    yield
    spark.conf.unset(PUSHDOWN)


@pytest.fixture
def service():
    return aqueduct.Service("test")


def reader_of(address, table, schema, **options):
    """The reader as Spark makes it, without Spark."""
    options = {"address": address, "handler": table, "backoff": "10ms", **options}
    return TableReader(settings_of(options, {}), schema)


# What is read


def test_many_types_and_nulls(running, service, source):
    schema = pa.schema([(name, kind) for name, (kind, _) in TYPES.items()])

    @service.table("types", schema=schema, splits=[False, True])
    def types(null):
        arrays = []
        for kind, value in TYPES.values():
            # Some types cannot be made of Python's values at once.
            array = pa.array([None if null else value], _made_of(kind))
            arrays.append(array.cast(kind) if array.type != kind else array)
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    with running(service, TCP) as address:
        frame = source(address, "types").load()
        found = sorted(frame.toArrow().to_pylist(), key=lambda row: row["int8"] is None)
    assert found[1] == dict.fromkeys(TYPES)
    for name, (_, value) in TYPES.items():
        if name == "uint64":
            value = decimal.Decimal(value)
        assert found[0][name] == value, name
    named = dict(frame.dtypes)
    assert (named["uint32"], named["uint64"]) == ("bigint", "decimal(20,0)")
    assert (named["timestamp_ns"], named["clock"]) == ("timestamp", "timestamp_ntz")
    assert named["points"] == "array<struct<at:timestamp>>"


def _made_of(kind):
    if pa.types.is_dictionary(kind):
        return kind.value_type
    return pa.string() if kind == pa.string_view() else kind


def test_columns_without_nulls_and_batches_of_every_size(running, service, source):
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])

    @service.table("sizes", schema=schema, splits=[[], [0, 0], [1, 0, 20_000]])
    def sizes(split):
        for size in split:
            yield pa.RecordBatch.from_arrays([pa.array(range(size), pa.int64())], schema=schema)

    with running(service) as address:
        frame = source(address, "sizes").load()
        assert not frame.schema["id"].nullable
        total = frame.agg(functions.count("*"), functions.sum("id"), functions.min("id")).first()
    assert tuple(total) == (20_001, 20_000 * 19_999 // 2, 0)


def test_no_splits_no_rows(running, service, source):
    @service.table("none", schema=SCHEMA, splits=[])
    def none(split):
        raise AssertionError("there is no split to read")
        yield

    with running(service, TCP) as address:
        frame = source(address, "none").load()
        assert (frame.count(), frame.rdd.getNumPartitions()) == (0, 1)


def test_many_splits_read_once_each(running, service, source):
    seen: Counter[int] = Counter()
    workers = set()

    def splits(request):
        assert request.partitions == 200
        return [[n * 5, n * 5 + 5] for n in range(request.partitions)]

    @service.table("many", schema=SCHEMA, splits=splits)
    def many(split, request):
        seen[split[0]] += 1
        partition = request.call.partition
        assert (partition.index, partition.count) == (split[0] // 5, 200)
        assert request.call.write_key.endswith(f"/{partition.index}")
        workers.add(request.call.peer)
        yield rows(*split)

    with running(service, TCP) as address:
        frame = source(address, "many", partitions=200).load()
        assert frame.agg(functions.count("*"), functions.sum("id")).first() == (1000, 499_500)
    assert set(seen.values()) == {1} and len(seen) == 200
    assert len(workers) <= 3  # a connection for each Python worker, not for each task


def test_rows_are_counted_without_columns(running, service, source):
    service.table("words", schema=SCHEMA, splits=[3, 4])(lambda split: (yield rows(0, split)))
    with running(service, TCP) as address:
        frame = source(address, "words").load()
        assert frame.select().count() == 7
        assert frame.count() == 7
        assert frame.select(functions.lit(1).alias("one")).agg(functions.sum("one")).first()[0] == 7


def test_a_table_without_columns_is_counted():
    given = pa.RecordBatch.from_struct_array(pa.array([{}] * 3, pa.struct([])))
    made = fit(given, arrow_of(StructType()))
    assert (made.num_rows, made.schema) == (3, arrow_of(StructType()))


# Columns


def test_the_option_columns_and_the_schema_choose_columns(running, service, source):
    seen = []

    @service.table("words", schema=SCHEMA)
    def words(request):
        seen.append(request.columns)
        yield rows(0, 3)

    with running(service, TCP) as address:
        frame = source(address, "words", columns="x, id").load()
        assert frame.dtypes == [("x", "double"), ("id", "bigint")]
        assert frame.collect() == [(0.0, 0), (0.5, 1), (1.0, 2)]
        declared = source(address, "words").schema("word string, id bigint").load()
        assert declared.collect() == [("w0", 0), ("w1", 1), ("w2", 2)]
        # Spark asks for all that it was told of, whatever it needs of it.
        assert source(address, "words").load().select("id").collect() == [(0,), (1,), (2,)]
    assert seen == [("x", "id"), ("word", "id"), ("id", "word", "x")]


@pytest.mark.parametrize(
    ("declared", "options", "message"),
    [
        ("id int", {}, "column 'id' has another type: wanted int32, got int64; cast to int32"),
        (
            "id bigint, wrod string",
            {},
            "has no column 'wrod'; did you mean 'word'? its colum",
        ),
        (
            "id bigint",
            {"columns": "x"},
            "the option columns is x, and .schema(...) has id: gi",
        ),
    ],
)
def test_a_declared_schema_is_compared(running, service, spark, declared, options, message):
    service.table("words", schema=SCHEMA)(lambda: (yield rows(0, 1)))
    with running(service, TCP) as address:
        with pytest.raises(Exception, match="words") as caught:
            reader_of(address, "words", StructType.fromDDL(declared), **options)
        assert message in str(caught.value)
        assert f"table 'words' at {address}" in str(caught.value)


def test_a_schema_that_changed_since_it_was_planned(running, service, source):
    kind = [pa.int64()]

    @service.table("words", schema=lambda call: pa.schema([("id", kind[0])]))
    def words():
        yield pa.record_batch([pa.array([1], kind[0])], names=["id"])

    with running(service, TCP) as address:
        frame = source(address, "words").load()
        assert frame.collect() == [(1,)]
        kind[0] = pa.string()
        with pytest.raises(PySparkException) as caught:
            source(address, "words").schema("id bigint").load().collect()
        assert f"table 'words' at {address}" in str(caught.value)
        assert "column 'id' has another type: wanted int64, got string" in str(caught.value)
        # Between the plan and the reading of a split the call itself is refused.
        kind[0] = pa.int64()
        reader = reader_of(address, "words", StructType().add("id", LongType()))
        (split,) = reader.partitions()
        kind[0] = pa.string()
        with pytest.raises(SchemaMismatch, match=r"split 0 of 1, null: .*column 'id'.*got string"):
            list(reader.read(split))
        with pytest.raises(SchemaMismatch, match="has changed since it was looked at: column 'id'"):
            reader._plan(())


def test_types_that_spark_has_not():
    schema = pa.schema([("id", pa.int64()), ("u", pa.dense_union([pa.field("a", pa.int64())]))])
    with pytest.raises(SchemaMismatch, match="the table: Spark has no type for column 'u', dense"):
        spark_schema(schema, "the table")


def test_the_advice_about_types_names_the_option_that_casts():
    small, large = (pa.schema([("id", kind)]) for kind in (pa.uint8(), pa.int64()))
    with pytest.raises(SchemaMismatch, match=r'^here: .*in Spark \.option\("cast", "true"\)$'):
        check(small, large, "here")
    with pytest.raises(SchemaMismatch, match=r"in Spark col\('id'\)\.cast\('bigint'\)$"):
        check(large, pa.schema([("id", pa.int32())]), "here")


def test_a_value_that_does_not_fit():
    batch = pa.record_batch({"t": pa.array([2**62], pa.timestamp("ms", "UTC"))})
    wanted = pa.schema([("t", pa.timestamp("us", "UTC"))])
    with pytest.raises(SchemaMismatch, match=r"column 't': timestamp\[ms, tz=UTC\] does not be"):
        fit(batch, wanted)


# Filters


def of_interest(frame):
    return frame.where(
        (functions.col("id") >= 3)
        & functions.col("word").isin("w3", "w4", "w9")
        & ~functions.col("word").endswith("9")
        & (functions.length("word") == 2)
    )


def test_filters_are_pushed_if_the_session_says_so(running, service, source, spark):
    seen = []

    @service.table("words", schema=SCHEMA, splits=[[0, 5], [5, 10]], filters="applied")
    def words(split, request):
        seen.append({str(each) for each in request.filters})
        yield rows(*split)

    with running(service, TCP) as address:
        frame = source(address, "words").load()
        plain = of_interest(frame).orderBy("id").collect()
        assert [row.id for row in plain] == [3, 4]
        assert seen and not any(seen)
        seen.clear()
        spark.conf.set(PUSHDOWN, "true")
        try:
            pushed = of_interest(source(address, "words").load())
            assert pushed.orderBy("id").collect() == plain
            # What the table takes is left out of Spark's own plan, what it cannot be is not.
            plan = pushed._jdf.queryExecution().executedPlan().toString()
        finally:
            spark.conf.unset(PUSHDOWN)
    assert seen
    for filters in seen:
        assert {"id >= 3", "word in ('w3', 'w4', 'w9')"} <= filters
        assert "not (word ends_with '9')" in filters
    assert ">= 3" not in plan and "length(word" in plan


def test_values_of_filters_keep_their_types(running, service, source, pushing):
    schema = pa.schema(
        [
            ("date", pa.date32()),
            ("point", pa.timestamp("ms", "UTC")),
            ("clock", pa.timestamp("us")),
            ("price", pa.decimal128(20, 4)),
            ("bytes", pa.binary()),
            ("flag", pa.bool_()),
            ("x", pa.float64()),
        ]
    )
    seen = {}

    @service.table("values", schema=schema, filters="applied")
    def values(request):
        seen.update({each.column: each.value for each in request.filters if each.value is not None})
        for add in (0, 1):
            row = [
                DAY + datetime.timedelta(days=add),
                POINT + datetime.timedelta(seconds=add),
                CLOCK + datetime.timedelta(seconds=add),
                decimal.Decimal("1.5") + add,
                bytes([1 + add]),
                bool(add),
                [1.0, float("nan")][add],
            ]
            arrays = [
                pa.array([value], kind) for value, kind in zip(row, schema.types, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    with running(service, TCP) as address:
        frame = source(address, "values").load()
        found = frame.where(
            (functions.col("date") > functions.lit(DAY))
            & (functions.col("point") > functions.lit(POINT))
            & (functions.col("clock") > functions.expr("timestamp_ntz'2026-03-29 02:30:00.123456'"))
            & (functions.col("price") > decimal.Decimal("1.5000"))
            & (functions.col("bytes") > functions.expr("x'01'"))
            & functions.col("flag")
            & (functions.col("x") > 5.0)  # as NaN is, in Spark
        )
        assert [row.price for row in found.collect()] == [decimal.Decimal("2.5000")]
    assert {name: seen.get((name,)) for name in schema.names if name != "x"} == {
        "date": DAY,
        "point": POINT,
        "clock": CLOCK,
        "price": decimal.Decimal("1.5"),
        "bytes": b"\x01",
        "flag": True,
    }


def test_a_table_chooses_and_filters_too_large_stay_with_spark(running, service, source, pushing):
    seen = []

    class Chooser:
        schema = SCHEMA

        def takes(self, filter):
            return "partly" if filter.operation in ("greater", "in") else False

        def read(self, split, request):
            seen.append([filter.operation for filter in request.filters])
            yield rows(0, 3000)  # it only looks as if it took them

    service.table("words", Chooser())
    with running(service, TCP) as address:
        frame = source(address, "words").load()
        assert frame.where("id > 2 and id < 5").count() == 2
        long = [f"w{n}" for n in range(2000)]
        assert (
            frame.where((functions.col("id") > 1990) & functions.col("word").isin(long)).count()
            == 9
        )
    assert seen == [["greater"], ["greater"]]


# Errors, and tasks that end early


def test_a_split_that_fails_is_named(running, service, source):
    @service.table("words", schema=SCHEMA, splits=["good", "bad"])
    def words(split):
        yield rows(0, 2)
        if split != "good":
            raise ValueError("this is no split of mine")

    with running(service, TCP) as address:
        with pytest.raises(PySparkException) as caught:
            source(address, "words").load().collect()
        text = str(caught.value)
        assert 'HandlerFailed: split 1 of 2, "bad"' in text
        assert "this is no split of mine" in text
        assert f"'words' at {address}" in text
        assert "partition 1 (stage" in text
        assert "after 0 batches sent and 1 received" in text

        schema = spark_schema(SCHEMA, "")
        reader = reader_of(address, "words", schema)
        wrong = Split({"from": "elsewhere"}, 7, 9, "run")
        with pytest.raises(
            HandlerFailed, match=r'split 7 of 9, \{"from": "elsewhere"\}: .*no split of'
        ):
            list(reader.read(wrong))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"adress": "x"},
            "unknown option adress; did you mean address? there are address, ",
        ),
        (
            {"handler": "words"},
            'no address: give .option("address", ...), or set spark.',
        ),
        (
            {"address": TCP},
            'no handler: give .option("handler", NAME), the name of a t',
        ),
        (
            {"address": TCP, "handler": "a", "path": "b"},
            "handler is 'a', and the path is 'b'",
        ),
        (
            {"address": TCP, "handler": "a", "retries": "x"},
            "option retries is 'x'; it must be",
        ),
        (
            {"address": "aqueduct+tcp://127.0.0.1:1", "handler": "a", "retries": "1"},
            "[table 'a' at aqueduct+tcp://127.0.0.1:1, asked 2 times; the driver must reach it",
        ),
    ],
)
def test_options_that_cannot_be(options, message):
    source = AqueductSource({"backoff": "1ms", **options})
    with pytest.raises((ConfigError, ConnectFailed)) as caught:
        source.schema()
    assert message in str(caught.value)


def test_who_may_not_ask_what_tables_there_are_learns_of_the_one(running):
    def authorize(call):
        if call.handler == "aqueduct.describe":
            raise Refused("nobody may look around here")

    service = aqueduct.Service("test", authorize=authorize)
    service.table("words", schema=SCHEMA)(lambda: (yield rows(0, 1)))
    with running(service, TCP) as address:
        with pytest.raises(UnknownHandler, match=r"no handler 'aqueduct\.table\.plan\.wrods'"):
            reader_of(address, "wrods", StructType())


def test_errors_of_the_driver_reach_the_user(running, service, spark, source):
    service.table("words", schema=SCHEMA)(lambda: (yield rows(0, 1)))
    with running(service, TCP) as address:
        with pytest.raises(PySparkException, match="has no table 'wrods'; did you mean 'words'"):
            source(address, "wrods").load()
        with pytest.raises(PySparkException, match="unknown option partition; did you mean parti"):
            source(address, "words", partition="8").load()


def test_a_task_that_ends_early_is_cancelled(running, service, source):
    cancelled = threading.Semaphore(0)
    moments = []

    @service.table("endless", schema=SCHEMA, splits=[0, 1])
    async def endless(split, request):
        try:
            while True:
                yield rows(0, 1000)
        finally:
            assert request.call.cancelled
            moments.append(time.monotonic())
            cancelled.release()

    with running(service, TCP) as address:
        frame = source(address, "endless").load()
        assert len(frame.limit(5).collect()) == 5
        left = time.monotonic()
        assert cancelled.acquire(timeout=30)
        # A second after its worker is gone, and four for a machine that is busy with other tests.
        assert moments[0] - left < 5
        broken = frame.select(functions.raise_error(functions.lit("enough")))
        with pytest.raises(PySparkException, match="enough"):
            broken.collect()
        assert cancelled.acquire(timeout=30)


# Addresses, and what is asked again


def test_a_split_is_read_at_another_address(running, service, source):
    service.table("words", schema=SCHEMA, splits=[1, 2, 3])(lambda split: (yield rows(0, split)))
    dead = "aqueduct+tcp://127.0.0.1:1"
    with running(service, TCP) as address:
        frame = source(f"{dead},{address}", "words", retries=0).load()
        assert frame.count() == 6


def test_a_busy_table_is_asked_again(running, service):
    gate = threading.Event()

    @service.table("words", schema=SCHEMA, max_calls=1, splits=[1, 2])
    def words(split):
        gate.set()
        yield rows(0, split)

    with running(service, TCP) as address:
        reader = reader_of(address, "words", spark_schema(SCHEMA, ""), retries=50, backoff="20ms")
        one, two = reader.partitions()
        first = reader.read(one)
        assert next(first).num_rows == 1
        found = []
        other = threading.Thread(target=lambda: found.extend(reader.read(two)))
        other.start()
        assert list(first) == []
        other.join(30)
        assert [batch.num_rows for batch in found] == [2]
