"""Workers whose service is slow send signs of life, where Spark ends those that look idle."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest

from spark_udfs import exchange, exchange_files, register
from spark_udfs.functions.pandas import ColumnExchange
from spark_udfs.worker.awake import TIMEOUTS, idle_limit, kept_awake, without_rows
from tests.spark.services import NUMBERS, make
from tests.support.selection import needs_pyspark

SQL, CORE = TIMEOUTS
BUFFER = 1 << 16
LIMIT = 0.3
PAIRED = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


@pytest.fixture
def task(monkeypatch):
    """``task(**properties)``: this process is in a task of Spark whose job has these."""
    pyspark = pytest.importorskip("pyspark")

    def begin(properties):
        # To make a context sets it, too: first what is to be there again afterwards.
        monkeypatch.setattr(pyspark.TaskContext, "_taskContext", None)
        context = pyspark.TaskContext()
        context._localProperties = properties
        context._partitionId, context._stageId = 0, 0
        context._attemptNumber, context._taskAttemptId = 0, 1
        monkeypatch.setattr(pyspark.TaskContext, "_taskContext", context)

    return begin


@pytest.fixture
def go():
    """Lets the slow handlers answer."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def service(go):
    """With handlers that answer when the test says so."""
    service = make()

    @service.handler("slow", input=NUMBERS, output=pa.schema([("out", pa.int64())]))
    def slow(batch):
        assert go.wait(60)
        return pa.record_batch({"out": batch["id"]})

    @service.table("slow", schema=NUMBERS)
    def table():
        assert go.wait(60)
        yield pa.record_batch({"id": [1, 2]})

    return service


@pytest.mark.parametrize(
    ("properties", "seconds"),
    [
        ({}, None),
        ({SQL: "9s"}, 9.0),
        ({SQL: "9"}, 9.0),
        ({CORE: "2min"}, 120.0),
        ({CORE: "300", SQL: "1m"}, 60.0),
        ({SQL: "0"}, None),
        ({SQL: "a while"}, None),
    ],
)
def test_the_limit_is_that_of_spark(task, properties, seconds):
    task(properties)
    assert idle_limit() == seconds


def test_without_a_task_there_is_no_limit():
    assert idle_limit() is None


def test_signs_fill_the_buffer_of_a_worker(monkeypatch):
    for columns in (0, 1, 40):
        schema = pa.schema([(f"c{number}", pa.string()) for number in range(columns)])
        batches = without_rows(schema)
        assert {batch.num_rows for batch in batches} == {0}
        assert all(batch.schema.equals(schema) for batch in batches)
        assert sum(map(pa.ipc.get_record_batch_size, batches)) > BUFFER
    monkeypatch.setenv("SPARK_BUFFER_SIZE", str(4 * BUFFER))
    assert len(without_rows(schema)) > 3 * len(batches)


def until_there_are(found, rows, go):
    """``found``, with the service allowed to answer after the first sign of life."""
    batches = []
    for batch in found:
        if not batch.num_rows:
            go.set()
        batches.append(batch)
    assert sum(batch.num_rows for batch in batches) == rows
    size = sum(pa.ipc.get_record_batch_size(batch) for batch in batches if not batch.num_rows)
    assert size > BUFFER
    assert len({batch.schema for batch in batches}) == 1
    return batches


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"columns": ["id"]},
        {"retries": 1},
        {"cast": True, "schema": pa.schema({"out": "int32"})},
    ],
    ids=["plain", "columns", "retries", "cast"],
)
def test_batches_without_rows_come_while_the_service_is_slow(task, address, service, go, options):
    task({SQL: "300ms"})
    given = [pa.record_batch({"id": [number]}, schema=NUMBERS) for number in range(3)]
    batches = until_there_are(exchange(address, "slow", **options)(iter(given)), 3, go)
    answers = [batch["out"].to_pylist() for batch in batches if batch.num_rows]
    assert answers == [[0], [1], [2]]


def test_a_quick_service_has_none(task, address):
    task({SQL: "100s"})
    given = [pa.record_batch({"id": [number]}, schema=NUMBERS) for number in range(3)]
    assert [batch.num_rows for batch in exchange(address, "echo")(iter(given))] == [1, 1, 1]


def test_a_declared_schema_is_that_of_all_batches(task, address, service, go):
    """Spark's writer takes one schema, and a declared one may call a time zone otherwise."""
    task({SQL: "300ms"})

    @service.handler("zoned")
    def zoned(batch):
        assert go.wait(60)
        return batch

    kinds = [pa.schema({"at": pa.timestamp("us", zone)}) for zone in ("Europe/Zurich", "UTC")]
    given = [pa.record_batch([pa.array([5], kinds[0].types[0])], schema=kinds[0])]
    call = exchange(address, "zoned")
    object.__setattr__(call, "declared", kinds[1])
    until_there_are(call(iter(given)), 1, go)


def test_arrays_without_rows_come_to_functions_of_columns(task, address, service, go):
    task({SQL: "300ms", PAIRED: "false"})
    column = ColumnExchange(exchange(address, "slow", check_rows=True), ("id",), pa.int64())
    arrays = []
    for array in column(iter([(pa.array([1, 2]),), (pa.array([3]),)])):
        if not len(array):
            go.set()
        arrays.append(array)
    assert [array.to_pylist() for array in arrays if len(array)] == [[1, 2], [3]]
    assert len(arrays) > 2 and {array.type for array in arrays} == {pa.int64()}


@needs_pyspark(4, 1)
@pytest.mark.parametrize("setting", [{}, {PAIRED: "true"}])
def test_none_come_where_spark_may_pair_batches(task, address, service, go, setting):
    """By default it may: an array without rows would be taken for the answer to a batch."""
    task({SQL: "300ms", **setting})
    column = ColumnExchange(exchange(address, "slow", check_rows=True), ("id",), pa.int64())
    later = threading.Timer(1, go.set)
    later.start()
    assert [len(array) for array in column(iter([(pa.array([1, 2]),)]))] == [2]
    later.join()


def test_receipts_of_files_are_waited_for(task, address, service, go, tmp_path):
    import pyarrow.parquet as pq

    task({SQL: "300ms"})
    pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / "a.parquet")
    rows = pa.record_batch(
        {
            "path": [str(tmp_path / "a.parquet")],
            "row_groups": pa.array([None], pa.list_(pa.int32())),
        }
    )
    function = exchange_files(address, "slow")
    batches = until_there_are(function(iter([rows])), 1, go)
    assert [row["rows_out"] for batch in batches for row in batch.to_pylist()] == [3]


def test_a_task_that_is_left_ends_what_it_waits_for(task, address, service, go):
    task({SQL: "300ms"})
    given = iter([pa.record_batch({"id": [1]}, schema=NUMBERS)])
    found = exchange(address, "slow")(given)
    assert next(found).num_rows == 0
    go.set()
    found.close()
    assert not [each for each in threading.enumerate() if each.name == "aqueduct-answers"]


def test_an_error_is_raised_where_answers_are_waited_for(task, address):
    task({SQL: "9s"})
    given = iter([pa.record_batch({"id": [42]}, schema=NUMBERS)])
    with pytest.raises(Exception, match=r"42 is not to my taste.*partition 0"):
        list(exchange(address, "fail")(given))


def test_a_step_that_does_not_end_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr("spark_udfs.worker.awake._LEAVE", 0.1)
    go = threading.Event()

    def endless():
        yield go.wait(60)

    found = kept_awake(endless(), LIMIT, lambda: [None])
    assert next(found) is None
    found.close()
    assert "an answer is still waited for" in caplog.text
    go.set()
    ends = time.monotonic() + 20
    while any(each.name == "aqueduct-answers" for each in threading.enumerate()):
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.spark
@pytest.mark.long
def test_spark_ends_no_worker_whose_service_is_slow(spark, running, service):
    """The slow handler is slower than Spark is patient, here with each way to call it."""
    settings = {SQL: "12s", "spark.sql.execution.pyspark.udf.killOnIdleTimeout": "true"}
    settings[PAIRED] = "false"
    register(spark)

    @service.handler("later", input=NUMBERS, output=NUMBERS)
    def later(batch):
        time.sleep(20 if batch.num_rows else 0)
        return batch

    @service.table("later", schema=NUMBERS)
    def table():
        time.sleep(20)
        yield pa.record_batch({"id": [1, 2]})

    from spark_udfs import exchange_column, exchange_table

    with running(service, "aqueduct+tcp://127.0.0.1:0") as address:
        for name, value in settings.items():
            spark.conf.set(name, value)
        try:
            frame = spark.range(0, 10, 1, 1)
            called = exchange(address, "later")
            assert called.apply(frame).count() == 10
            assert frame.mapInArrow(called, "id long").count() == 10
            column = exchange_column(address, "later")
            assert frame.select(column("id").alias("x")).where("x > 4").count() == 5
            assert exchange_table(address, "later")(frame.asTable()).count() == 10
            source = spark.read.format("aqueduct").option("address", address)
            assert source.load("later").count() == 2
        finally:
            for name in settings:
                spark.conf.unset(name)
