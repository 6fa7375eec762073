"""The wiring into Spark: real executors, real Python workers, a real service."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pyarrow as pa
import pytest

import aqueduct
from aqueduct.arrow.ipc import adopt
from aqueduct.config import Config, Timing
from aqueduct.errors import ConfigError, SchemaMismatch
from spark_udfs import exchange, exchange_pandas
from tests.support.calls import served, until_seen

pytestmark = pytest.mark.spark

QUICK = Config(timing=Timing(connect_timeout=3.0, idle_timeout=3.0, ping_interval=0.5))


def failure(frame):
    """The text of the error that the driver gets."""
    from pyspark.errors import PythonException

    with pytest.raises(PythonException) as caught:
        frame.collect()
    return str(caught.value)


def test_order_is_kept_through_many_partitions(spark, address, service, small_batches):
    frame = spark.range(0, 20_000, 1, numPartitions=7)
    rows = frame.mapInArrow(exchange(address, "double", schema="id long"), "id long").collect()
    assert [row.id for row in rows] == list(range(0, 40_000, 2))
    counters = service.counters()
    assert counters["calls"] == 7
    assert counters["rows_in"] == counters["rows_out"] == 20_000
    assert counters["batches_in"] > 200


def test_tasks_of_a_worker_share_one_connection(spark, address, service, small_batches):
    call = exchange(address, "double")
    for _ in range(3):
        frame = spark.range(0, 4000, 1, numPartitions=8)
        assert frame.mapInArrow(call, "id long").count() == 4000
    counters = service.counters()
    assert counters["calls"] == 24
    assert 1 <= counters["connections"] <= 2  # local[2]: two worker processes at most


def test_a_worker_does_not_walk_what_lives_for_good_after_each_task(spark, address):
    call = exchange(address, "double")

    def frozen(batches):
        import gc

        rows = sum(batch.num_rows for batch in call(batches))
        found = {"pid": [os.getpid()], "frozen": [gc.get_freeze_count()], "rows": [rows]}
        yield pa.record_batch(found)

    frame = spark.range(0, 800, 1, numPartitions=8)
    found = frame.mapInArrow(frozen, "pid long, frozen long, rows long").collect()
    assert [row.rows for row in found] == [100] * 8
    pids = [row.pid for row in found]
    again = [pid for pid in pids if pids.count(pid) > 1]
    assert again  # 8 tasks, 2 workers
    for pid in again:
        assert max(row.frozen for row in found if row.pid == pid) > 10_000


def test_tasks_wait_for_their_turn(spark):
    service, inside = aqueduct.Service("model"), threading.Semaphore(1)
    waited: list[bool] = []

    @service.handler("score", max_concurrency=1)
    def score(batches):
        assert inside.acquire(blocking=False)
        try:
            if not waited:  # both tasks are there: the other one waits
                until_seen(lambda: service.counters()["waiting_calls"] == 1)
                waited.append(True)
            yield from batches
        finally:
            inside.release()

    with served(service) as address:
        frame = spark.range(0, 800, 1, numPartitions=8)
        call = exchange(address, "score", schema="id long", retries=0)
        assert frame.mapInArrow(call, "id long").count() == 800
    assert service.counters()["calls"] == 8


def test_empty_partitions_and_frames_work(spark, address, service):
    call = exchange(address, "double")
    sparse = spark.range(0, 100, 1, numPartitions=8).where("id = 3")
    assert [row.id for row in sparse.mapInArrow(call, "id long").collect()] == [6]
    empty = spark.range(0).mapInArrow(call, "id long")
    assert empty.collect() == []
    nothing = spark.createDataFrame([], "id long").mapInArrow(call, "id long")
    assert nothing.collect() == []


def test_an_empty_partition_with_a_schema_calls_the_handler(spark, address):
    call = exchange(address, "total", schema="id long", input_schema="id long")
    frame = spark.range(0, 100, 1, numPartitions=4).where("id < 25")
    assert sorted(row.id for row in frame.mapInArrow(call, "id long").collect()) == [0, 0, 0, 300]


def test_a_handler_that_answers_a_hundred_times_its_input(spark, address):
    frame = spark.range(0, 100_000, 1, numPartitions=2)
    call = exchange(address, "hundredfold", schema="id long")
    out = frame.mapInArrow(call, "id long").selectExpr("count(*) as n", "sum(id) as total")
    assert out.collect()[0].asDict() == {"n": 10_000_000, "total": 100 * sum(range(100_000))}


def test_a_handler_that_answers_nothing_until_the_end(spark, address):
    frame = spark.range(0, 6_000_000, 1, numPartitions=2)  # 24 MB a call
    out = frame.mapInArrow(exchange(address, "sort", schema="id long"), "id long")
    halves = out.mapInArrow(_heads_and_count, "head long, rows long").collect()
    assert [(row.head, row.rows) for row in halves] == [
        (2_999_999, 3_000_000),
        (5_999_999, 3_000_000),
    ]


def _heads_and_count(batches):
    head, rows = None, 0
    for batch in batches:
        head = batch["id"][0].as_py() if head is None else head
        rows += batch.num_rows
    yield pa.record_batch({"head": [head], "rows": [rows]})


def test_a_limit_ends_the_call_and_the_job_goes_on(spark, address, small_batches):
    call = exchange(address, "hundredfold")
    frame = spark.range(0, 10_000, 1, numPartitions=2)
    assert len(frame.mapInArrow(call, "id long").limit(5).collect()) == 5
    assert frame.mapInArrow(exchange(address, "double"), "id long").count() == 10_000


def test_a_handlers_error_reaches_the_driver(spark, address, small_batches):
    frame = spark.range(0, 1000, 1, numPartitions=1)
    text = failure(frame.mapInArrow(exchange(address, "fail"), "id long"))
    for part in (
        "HandlerFailed",
        address.partition("?")[0],
        "'fail'",
        "ValueError",
        "42 is not to my taste",
        "partition 0 (stage ",
        "attempt 0",
        "batch 0",
        "in fail",  # the service's own traceback
    ):
        assert part in text


def test_an_unknown_handler_reaches_the_driver(spark, address):
    frame = spark.range(0, 10, 1, numPartitions=1)
    text = failure(frame.mapInArrow(exchange(address, "nonsense"), "id long"))
    assert "UnknownHandler" in text
    assert "'nonsense'" in text
    assert "partition 0" in text


@pytest.mark.parametrize(
    ("query", "column"),
    [
        ("select id from range(3)", "word"),
        ("select cast(id as int) id, 'a' word from range(3)", "id"),
        ("select 'a' word, id from range(3)", "id"),
        ("select id, 'a' word, 1 more from range(3)", "more"),
    ],
    ids=["missing", "type", "order", "extra"],
)
def test_a_schema_that_does_not_fit_names_its_column(spark, address, query, column):
    frame = spark.sql(query).coalesce(1)
    text = failure(frame.mapInArrow(exchange(address, "words"), "id long, word string"))
    assert "SchemaMismatch" in text
    assert f"column {column!r}" in text
    assert "partition 0" in text


def test_nulls_where_none_are_wanted_name_their_column(spark, address):
    call = exchange(address, "certain")
    frame = spark.sql("select id from range(3)").coalesce(1)
    assert frame.mapInArrow(call, "id long").count() == 3  # Spark knows that there is no null
    maybe = spark.sql("select nullif(id, 2) id from range(3)").coalesce(1)
    text = failure(maybe.mapInArrow(call, "id long"))
    assert "SchemaMismatch" in text
    assert "column 'id' may hold nulls" in text


def test_a_nested_null_where_none_is_wanted_names_its_field(spark):
    kind = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    strict = pa.schema([("a", kind)])
    service = aqueduct.Service("nested")

    @service.handler("nested", output=strict)
    def nested(batch):
        values = [None if value == 2 else {"x": value} for value in batch["id"].to_pylist()]
        if batch.num_rows > 3:
            values[3] = {"x": None}
        loose = pa.record_batch([pa.array(values, pa.struct([("x", pa.int64())]))], ["a"])
        return adopt(loose, strict)

    with served(service) as address:
        call = exchange(address, "nested")
        rows = call.apply(spark.range(0, 3, 1, numPartitions=1)).collect()
        assert [row.a and row.a.x for row in rows] == [0, 1, None]
        text = failure(call.apply(spark.range(0, 4, 1, numPartitions=1)))
    assert "column 'a.x' is declared int64 not null, and 1 of its values are null" in text


def test_an_output_schema_that_does_not_fit_names_its_column(spark, address):
    call = exchange(address, "words", schema="id long, word int")
    frame = spark.sql("select id, 'a' word from range(3)").coalesce(1)
    text = failure(frame.mapInArrow(call, "id long, word int"))
    assert "column 'word'" in text


def test_a_service_that_is_down_fails_the_job(spark):
    call = exchange("aqueduct://127.0.0.1:9", "double", config=QUICK)
    text = failure(spark.range(0, 10, 1, numPartitions=1).mapInArrow(call, "id long"))
    assert "ConnectFailed" in text
    assert "127.0.0.1:9" in text
    assert "partition 0" in text


def test_a_service_killed_on_the_way_fails_the_job(spark, child, small_batches):
    killed = child("3")
    call = exchange(killed.address, "stall", config=QUICK)
    frame = spark.range(0, 2000, 1, numPartitions=1).mapInArrow(call, "id long")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(failure, frame)
        killed.line("taken")
        killed.kill()
        text = job.result(60)
    assert "ConnectionLost" in text
    assert "'stall'" in text
    assert "partition 0" in text
    assert "batches sent and " in text


def test_attempts_and_units_of_work_are_told_apart(spark, address):
    call = exchange(address, "about", input_schema="id long")
    frame = spark.range(0, 10, 1, numPartitions=3)
    rows = frame.mapInArrow(call, "write_key string, attempt string").collect()
    runs = [row.write_key.split("/") for row in rows]
    assert {run for run, _, _ in runs} == {call.write_key}
    assert len({stage for _, stage, _ in runs}) == 1
    assert [partition for _, _, partition in runs] == ["0", "1", "2"]
    assert len({row.attempt for row in rows}) == 3


def test_large_batches_travel(spark, address):
    names = ("maxRecordsPerBatch", "maxBytesPerBatch")
    for name in names:
        spark.conf.set(f"spark.sql.execution.arrow.{name}", str(1 << 30))
    try:
        # 72 MB in one batch, of few rows: Spark takes its time for each.
        frame = spark.range(0, 9_000, 1, numPartitions=1).selectExpr("repeat('abcd', 2000) text")
        out = frame.mapInArrow(exchange(address, "echo"), "text string")
        sizes = out.mapInArrow(_sizes, "rows long, bytes long").collect()
    finally:
        for name in names:
            spark.conf.unset(f"spark.sql.execution.arrow.{name}")
    ((rows, size),) = ((row.rows, row.bytes) for row in sizes)
    assert rows == 9_000 and 72_000_000 <= size < 72_100_000


def _sizes(batches):
    for batch in batches:
        yield pa.record_batch({"rows": [batch.num_rows], "bytes": [batch.nbytes]})


TYPES = """
select
  id, cast(id as byte) b, cast(id as short) s, cast(id as int) i, cast(id as float) f,
  cast(id as double) d, id % 2 = 0 as flag, if(id % 3 = 0, null, concat('word ', id)) word,
  cast('bytes' as binary) raw, cast(id + 0.25 as decimal(20, 3)) price,
  date_add(date'2024-02-28', cast(id as int)) day,
  timestamp'2024-03-31 01:59:59' + make_dt_interval(0, cast(id as int)) moment,
  timestamp_ntz'2024-01-01 00:00:00.123456' local,
  make_dt_interval(cast(id as int), 1) length,
  array(id, null) list, map('k', id, 'n', null) pairs,
  named_struct('x', id, 'y', array(named_struct('z', 'deep'))) nested,
  cast(null as string) nothing, cast(null as void) never
from range(0, 50, 1, 2)
"""


def test_every_type_makes_the_round_trip(spark, address):
    frame = spark.sql(TYPES)
    out = frame.mapInArrow(exchange(address, "echo", schema=frame.schema), frame.schema)
    assert out.collect() == frame.collect()


def test_large_variable_types_make_the_round_trip(spark, address):
    name = "spark.sql.execution.arrow.useLargeVarTypes"
    frame = spark.sql("select id, concat('word ', id) word from range(10)")
    spark.conf.set(name, "true")
    try:
        call = exchange(address, "echo", schema=frame.schema)
        assert frame.mapInArrow(call, frame.schema).collect() == frame.collect()
    finally:
        spark.conf.unset(name)


def test_pandas_frames_make_the_round_trip(spark, address, small_batches):
    frame = spark.sql(
        "select id, concat('word ', id) word, id / 2 half, "
        "timestamp'2024-03-30 23:00:00' + make_dt_interval(0, cast(id as int)) moment "
        "from range(0, 1000, 1, 3)"
    )
    call = exchange_pandas(address, "echo", input_schema=frame.schema, schema=frame.schema)
    rows = frame.mapInPandas(call, frame.schema).collect()
    assert rows == frame.collect()


def test_pandas_frames_without_a_schema_go_by_the_first(spark, address):
    frame = spark.range(0, 100, 1, numPartitions=2)
    out = frame.mapInPandas(exchange_pandas(address, "double"), "id long")
    assert [row.id for row in out.collect()] == list(range(0, 200, 2))
    assert spark.range(0).mapInPandas(exchange_pandas(address, "double"), "id long").count() == 0


def test_frames_need_no_spark(address):
    frames = [pd.DataFrame({"id": [1, 2]}), pd.DataFrame({"id": [3.0, None]}), pd.DataFrame()]
    frames[2]["id"] = pd.Series([], dtype=object)
    answers = list(exchange_pandas(address, "echo")(iter(frames)))
    assert [len(answer) for answer in answers] == [2, 2, 0]
    assert answers[0].equals(frames[0])
    assert answers[1].equals(frames[1])
    assert list(exchange_pandas(address, "echo")(iter([]))) == []


def test_frames_with_nested_and_repeated_columns(address):
    frame = pd.DataFrame([[1, [1, None]], [2, [3]]])
    frame.columns = ["a", "a"]
    (answer,) = exchange_pandas(address, "echo")(iter([frame]))
    assert list(answer.columns) == ["a", "a"]
    assert answer.iloc[1, 1].tolist() == [3]


def test_local_times_belong_to_the_zone_of_the_schema(address):
    zoned = pa.schema([("t", pa.timestamp("us", tz="Europe/Zurich"))])
    frame = pd.DataFrame({"t": pd.to_datetime(["2024-01-01 12:00", "2024-07-01 12:00"])})
    (answer,) = exchange_pandas(address, "echo", input_schema=zoned)(iter([frame]))
    assert answer["t"].dt.tz_convert("UTC").dt.hour.tolist() == [11, 10]


@pytest.mark.parametrize(
    ("frames", "schema", "text"),
    [
        (
            [pd.DataFrame({"a": [1]}), pd.DataFrame({"a": ["x"]})],
            None,
            "batch 1, column 'a': the frame's object values do not fit int64",
        ),
        ([pd.DataFrame({"a": [1, "x"]})], None, "batch 0, column 'a'"),
        (
            [pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]})],
            None,
            r"batch 1 has the columns \['b'\], wanted \['a'\]",
        ),
        (
            [pd.DataFrame({"a": ["noon"]})],
            pa.schema([("a", pa.timestamp("us", tz="UTC"))]),
            "batch 0, column 'a'",
        ),
    ],
    ids=["type", "mixed", "names", "time"],
)
def test_frames_that_do_not_fit_name_batch_and_column(address, frames, schema, text):
    with pytest.raises(SchemaMismatch, match=text):
        list(exchange_pandas(address, "echo", input_schema=schema)(iter(frames)))


def test_ddl_needs_spark_and_says_what_is_wrong_with_it(spark):
    call = exchange("aqueduct://host", "echo", schema="a int not null, b timestamp")
    assert call.schema == pa.schema(
        [
            pa.field("a", pa.int32(), nullable=False),
            pa.field("b", pa.timestamp("us", tz="Europe/Zurich")),
        ]
    )
    with pytest.raises(ConfigError, match="schema='nonsense'"):
        exchange("aqueduct://host", "echo", schema="nonsense")
    with pytest.raises(ConfigError, match="input_schema is a int"):
        exchange("aqueduct://host", "echo", input_schema=5)
