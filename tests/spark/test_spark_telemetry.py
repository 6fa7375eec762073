"""One trace from the driver over Python workers into a service, and the log of the workers.

All three are processes of their own, with the SDK of OpenTelemetry, which writes into files.
"""

from __future__ import annotations

import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id
from pyspark.errors import PySparkException

import aqueduct
from spark_udfs import exchange, register, traced
from tests.sinks.shelf import Shelf
from tests.spark.spans import SetUp, lines, until
from tests.spark.witness import Witness

pytestmark = pytest.mark.spark

NAMES = ("read words", "write shelf")
WORDS = pa.record_batch({"id": pa.array([0, 1, 2], pa.int64())})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("spans")  # workers set themselves up once for all tests


@pytest.fixture(scope="module")
def service(directory):
    witness = Witness("aqueduct+tcp://127.0.0.1:0", free=True, spans=directory / "service")
    yield witness
    witness.close()


@pytest.fixture
def address(service):
    return service.addresses[0]


@pytest.fixture
def tracer():
    provider = TracerProvider()
    yield provider.get_tracer("driver")
    provider.shutdown()


def of_trace(path, span):
    """The spans in a file that belong to the trace of ``span``."""
    wanted = f"0x{format_trace_id(span.get_span_context().trace_id)}"
    return [found for found in lines(path) if found["context"]["trace_id"] == wanted]


def own_id(span):
    return f"0x{format_span_id(span.get_span_context().span_id)}"


def test_one_trace_from_driver_to_handler(spark, address, directory, tracer):
    score = exchange(address, "echo", telemetry=SetUp(directory))
    with tracer.start_as_current_span("job") as job:
        frame = spark.range(0, 400, 1, numPartitions=4).mapInArrow(score, "id long")
        assert len(frame.collect()) == 400
    workers, service = directory / "workers", directory / "service"
    until(lambda: len(of_trace(service, job)) == 4)
    tasks, calls = of_trace(workers, job), of_trace(service, job)
    assert len(tasks) == len(calls) == 4
    assert {task["parent_id"] for task in tasks} == {own_id(job)}
    assert {call["parent_id"] for call in calls} == {task["context"]["span_id"] for task in tasks}
    assert {task["name"] for task in tasks} == {"exchange echo"}
    assert sorted(task["attributes"]["spark.partition"] for task in tasks) == [0, 1, 2, 3]
    assert sum(task["attributes"]["aqueduct.rows_received"] for task in tasks) == 400
    assert {task["attributes"]["aqueduct.outcome"] for task in tasks} == {"well"}
    assert sum(call["attributes"]["aqueduct.rows_out"] for call in calls) == 400
    at_work = {task["resource"]["attributes"]["pid"] for task in tasks}
    serving = {call["resource"]["attributes"]["pid"] for call in calls}
    assert len(at_work | serving) == len(at_work) + 1


def test_metrics_of_workers(spark, address, directory):
    # No other test calls this handler: counts of earlier tests may come late.
    score = exchange(address, "careful", headers={"at": ""}, telemetry=SetUp(directory))
    spark.range(0, 300, 1, numPartitions=3).mapInArrow(score, "id long").collect()
    until(lambda: rows_counted(directory, "careful") == 300)


def rows_counted(directory, handler):
    """The last value of each process, added up, of the calls of one handler."""
    newest = {}
    for data in lines(directory / "metrics"):
        for resource in data["resource_metrics"]:
            pid = resource["resource"]["attributes"]["pid"]
            for scope in resource["scope_metrics"]:
                for metric in scope["metrics"]:
                    if metric["name"] == "aqueduct.client.rows_received":
                        points = metric["data"]["data_points"]
                        newest[pid] = sum(
                            point["value"]
                            for point in points
                            if point["attributes"]["rpc.method"] == handler
                        )
    return sum(newest.values())


def test_workers_without_a_setup_pass_the_trace_on(spark, address, directory, tracer):
    spark.range(0, 10, 1, numPartitions=1).mapInArrow(exchange(address, "hold"), "id long").count()
    with tracer.start_as_current_span("job") as job:
        score = exchange(address, "hold")
    # The span is that in which the function was made: none is current when it is sent.
    frame = spark.range(0, 10, 1, numPartitions=1).mapInArrow(score, "id long")
    assert len(frame.collect()) == 10
    until(lambda: len(of_trace(directory / "service", job)) == 1)
    (call,) = of_trace(directory / "service", job)
    tasks = of_trace(directory / "workers", job)  # of a worker that another test has set up
    parents = {own_id(job), *(task["context"]["span_id"] for task in tasks)}
    assert call["parent_id"] in parents


def test_the_span_of_a_failed_task_arrives_before_its_worker_ends(
    spark, address, directory, tracer
):
    def fail(batches):
        for batch in score(batches):
            raise ValueError("not what I wanted")
            yield batch

    with tracer.start_as_current_span("job") as job:
        score = exchange(address, "echo", telemetry=SetUp(directory))
        refused = exchange(address, "nobody", telemetry=SetUp(directory))
    with pytest.raises(PySparkException, match="has no handler 'nobody'"):
        spark.range(0, 10, 1, numPartitions=1).mapInArrow(refused, "id long").collect()
    with pytest.raises(PySparkException, match="not what I wanted"):
        spark.range(0, 10, 1, numPartitions=1).mapInArrow(fail, "id long").collect()
    by_name = {span["name"]: span for span in of_trace(directory / "workers", job)}
    assert by_name["exchange nobody"]["status"]["status_code"] == "ERROR"
    assert "has no handler 'nobody'" in by_name["exchange nobody"]["status"]["description"]
    assert by_name["exchange nobody"]["events"][0]["name"] == "exception"
    assert by_name["exchange echo"]["attributes"]["aqueduct.outcome"] == "left early"


@pytest.fixture
def table(running):
    """A table and a sink; gives their address, and what the calls said: (what, span of whom)."""
    asked = []

    def authorize(call):
        asked.append((call.handler.split(".")[2], call.headers.get("traceparent", "")))

    service = aqueduct.Service("test", authorize=authorize)
    service.table("words", schema=WORDS.schema)(lambda: (yield WORDS))
    service.sink("shelf", Shelf(), schema=WORDS.schema)
    with running(service, "aqueduct+tcp://127.0.0.1:0") as address:
        yield address, asked


def parents(asked, span):
    """The parents of the calls, by what they are; all must belong to the trace of ``span``."""
    found: dict[str, set[str]] = {}
    for what, said in asked:
        _, trace_id, span_id, _ = said.split("-")
        assert trace_id == format_trace_id(span.get_span_context().trace_id), what
        found.setdefault(what, set()).add(f"0x{span_id}")
    return found


def test_one_trace_for_the_data_source(table, spark, directory, tracer):
    """What the driver asks is a child of its span, what a task does of the task's."""
    address, asked = table
    register(spark, telemetry=SetUp(directory))
    try:
        with tracer.start_as_current_span("job") as job:
            source = spark.read.format("aqueduct").options(address=address, **traced())
            assert source.load("words").count() == 3
            writer = spark.range(0, 4, 1, numPartitions=2).write.format("aqueduct")
            writer = writer.options(address=address, handler="shelf", **traced())
            writer.mode("append").save()
    finally:
        register(spark)
    found = parents(asked, job)
    assert [found.pop(what) for what in ("plan", "look", "commit")] == [{own_id(job)}] * 3
    tasks = of_trace(directory / "workers", job)
    assert sorted(task["name"] for task in tasks) == ["read words", "write shelf", "write shelf"]
    assert {task["parent_id"] for task in tasks} == {own_id(job)}
    spans = [{one["context"]["span_id"] for one in tasks if one["name"] == name} for name in NAMES]
    assert [found.pop("read"), found.pop("write")] == spans
    assert not found


def test_the_trace_of_the_registration_is_that_of_its_sources(table, spark, tracer):
    address, asked = table
    with tracer.start_as_current_span("night") as night:
        register(spark)
    try:
        source = spark.read.format("aqueduct").option("address", address)
        assert source.load("words").count() == 3
        with pytest.raises(PySparkException, match=r"must be what spark_udfs\.traced\(\) gives"):
            source.option("trace", "nonsense").load("words")
    finally:
        register(spark)
    assert parents(asked, night)["plan"] == {own_id(night)}


def test_without_a_span_the_data_source_says_nothing(table, spark):
    address, asked = table
    assert traced() == {}
    register(spark)
    assert spark.read.format("aqueduct").option("address", address).load("words").count() == 3
    assert {said for _, said in asked} == {""}


def test_a_setup_that_raises_is_named(spark, address):
    def setup():
        raise OSError("no collector")

    score = exchange(address, "echo", telemetry=setup)
    with pytest.raises(PySparkException, match="called once in each Python worker, raised OSError"):
        spark.range(0, 10, 1, numPartitions=1).mapInArrow(score, "id long").collect()


def test_no_trace_without_a_span(spark, address, directory):
    before = len(lines(directory / "service"))
    score = exchange(address, "echo")
    assert not score.trace.wanted
    spark.range(0, 10, 1, numPartitions=1).mapInArrow(score, "id long").collect()
    until(lambda: len(lines(directory / "service")) == before + 1)
    assert lines(directory / "service")[-1]["parent_id"] is None
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_the_log_of_workers_is_a_table(spark, address):
    name = "spark.sql.pyspark.worker.logging.enabled"
    spark.conf.set(name, "true")
    try:
        score = exchange(address, "echo")
        frame = spark.range(0, 200, 1, numPartitions=2).mapInArrow(score, "id long")
        assert len(frame.collect()) == 200
        logs = spark.tvf.python_worker_logs().where("logger = 'spark_udfs'").collect()
    finally:
        spark.conf.unset(name)
    assert len(logs) == 2
    assert {row.level for row in logs} == {"INFO"}
    assert {row.context["partition"] for row in logs} == {"0", "1"}
    assert {row.context["outcome"] for row in logs} == {"well"}
    assert sum(int(row.context["rows_received"]) for row in logs) == 200
    assert all(row.msg.startswith("'echo', partition ") for row in logs)
    assert all("1 batches and 100 rows sent" in row.msg for row in logs)
