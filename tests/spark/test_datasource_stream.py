"""``spark.readStream.format("aqueduct")``: each row once, whatever is stopped and started again."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

import spark_udfs
from aqueduct.errors import ConfigError, SchemaMismatch
from aqueduct.service.tables import Limit
from spark_udfs.datasource.options import settings_of
from spark_udfs.datasource.stream_reader import TableStreamReader
from spark_udfs.datasource.types import spark_schema
from tests.spark.tables import ENTRIES, Log, make

pytestmark = pytest.mark.spark

TCP = "aqueduct+tcp://127.0.0.1:0"
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    made = Log(folder)
    made.newest = 0
    return made


class Sink:
    """What a query has written, by batch: a batch that is done again takes the place of the first.

    ``fail_at``: the batch at whose first time it raises.
    """

    def __init__(self, fail_at=None):
        self.batches = {}
        self.written = []
        self.fail_at = fail_at

    def __call__(self, frame, number):
        rows = sorted(row.row for row in frame.collect())
        if number == self.fail_at:
            self.fail_at = None
            raise RuntimeError("the sink fell over")
        self.batches[number] = rows
        self.written.append(number)

    @property
    def rows(self):
        return [row for number in sorted(self.batches) for row in self.batches[number]]


@pytest.fixture
def start(spark, tmp_path):
    """``start(address, sink, **options)``: a query with the test's one checkpoint."""
    spark_udfs.register(spark)
    started = []

    def begin(address, sink, *, trigger=None, table="log", **options):
        source = spark.readStream.format("aqueduct").options(
            address=address, backoff="50ms", **options
        )
        writer = source.load(table).writeStream.foreachBatch(sink)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()
        started.append(query)
        return query

    yield begin
    for query in started:
        query.stop()


def until(condition, query, *, seconds=60):
    """Waits until ``condition()`` holds, as long as the query lives."""
    limit = time.monotonic() + seconds
    while not condition():
        assert query.exception() is None, query.exception()
        assert time.monotonic() < limit, "the condition never held"
        query.awaitTermination(0.05)


def test_rows_come_as_they_are_there_and_are_committed(running, log, start):
    sink = Sink()
    log.newest = 10
    with running(make(log), TCP) as address:
        query = start(address, sink)
        until(lambda: len(sink.rows) == 10, query)
        log.newest = 25
        # What a batch has finished is committed when the next one begins.
        until(lambda: len(sink.rows) == 25 and {"row": 10} in log.commits, query)
        query.stop()
    assert sink.rows == list(range(25))
    splits = [split for what, split in log.asked if what == "read"]
    assert sorted(splits) == sorted(
        [[0, 4], [4, 8], [8, 10], [10, 14], [14, 18], [18, 22], [22, 25]]
    )


def test_a_query_that_starts_again_goes_on(running, log, start):
    first, second = Sink(), Sink()
    log.newest = 7
    with running(make(log), TCP) as address:
        query = start(address, first, trigger={"availableNow": True})
        assert query.awaitTermination(60)
        log.newest = 12
        query = start(address, second, trigger={"availableNow": True})
        assert query.awaitTermination(60)
    assert first.rows == list(range(7))
    assert second.rows == list(range(7, 12))


def test_a_batch_that_failed_is_asked_for_again_as_it_was(running, log, start):
    sink = Sink(fail_at=1)
    log.newest = 10
    with running(make(log), TCP) as address:
        query = start(address, sink, trigger={"availableNow": True}, max_rows=4)
        with pytest.raises(PySparkException, match="the sink fell over"):
            query.awaitTermination(60)
        log.newest = 11  # what was planned before is not changed by that
        query = start(address, sink, trigger={"availableNow": True}, max_rows=4)
        assert query.awaitTermination(60)
    assert sink.batches == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9, 10]}
    asked = [what for name, what in log.asked if name == "between"]
    assert asked.count((4, 8)) >= 2


def test_available_now_ends_at_what_there_was_and_keeps_limits(running, log, start):
    sink = Sink()
    log.newest = 10

    def write(frame, number):
        sink(frame, number)
        log.newest = 100  # rows that came later are not this query's

    with running(make(log), TCP) as address:
        query = start(address, write, trigger={"availableNow": True}, max_rows=4)
        assert query.awaitTermination(60)
        progress = query.lastProgress["sources"][0]
    assert sink.batches == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9]}
    assert json.loads(progress["endOffset"]) == {"row": 10}
    assert json.loads(progress["latestOffset"]) == {"row": 100}
    limits = [limit for what, limit in log.asked if what == "latest" and limit.rows]
    assert {(limit.rows, limit.until["row"]) for limit in limits} == {(4, 10)}


@contextlib.contextmanager
def served(folder, port=0):
    """The service of ``tests.spark.tables`` in a process of its own, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.spark.tables", str(port), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_service_is_killed_and_starts_again(log, start):
    sink = Sink()
    log.newest = 10
    with served(log.folder) as address:
        query = start(address, sink, max_rows=4, retries=30)
        until(lambda: len(sink.rows) == 10, query)
    log.newest = 30
    # There is nobody to ask now; the query asks again until there is.
    with served(log.folder, address.rpartition(":")[2]):
        until(lambda: len(sink.rows) == 30, query)
        query.stop()
    assert sink.rows == list(range(30))
    assert sink.written == sorted(set(sink.written))  # no batch was done again


def test_the_service_is_killed_while_it_is_read(log, start):
    sink = Sink()
    log.newest = 120
    options = {"max_rows": 8, "retries": 30}
    port: int | str = 0
    query: Any = None
    for rows in (16, 48, 120):
        with served(log.folder, port) as address:
            port = address.rpartition(":")[2]
            limit = time.monotonic() + 100
            while len(sink.rows) < rows:
                if query is None or not query.isActive:
                    # A task whose split broke after its first batch is Spark's to try again, and a
                    # local master tries nothing twice.
                    query = start(address, sink, **options)
                with contextlib.suppress(PySparkException):
                    query.awaitTermination(0.05)
                assert time.monotonic() < limit
    query.stop()
    assert sink.rows == list(range(120))


# The reader by itself


def reader_of(address, table="log", **options):
    given = {"address": address, "handler": table, "backoff": "10ms", **options}
    return TableStreamReader(settings_of(given, {}), spark_schema(ENTRIES, ""))


def test_what_spark_asks_is_asked_of_the_table(running, log):
    log.newest = 20
    with running(make(log), TCP) as address:
        reader = reader_of(address, partitions=2)
        start = reader.initialOffset()
        assert start == {"row": 0}
        end = reader.latestOffset(start, ReadMaxRows(6))
        assert end == {"row": 6}
        assert reader.latestOffset(start, ReadAllAvailable()) == {"row": 20}
        splits = reader.partitions(start, end)
        assert [split.value for split in splits] == [[0, 4], [4, 6]]
        read = [row for split in splits for batch in reader.read(split) for row in batch["row"]]
        assert [row.as_py() for row in read] == list(range(6))
        assert reader.partitions(end, end) == []
        reader.commit(end)
        assert log.commits == [{"row": 6}]
        reader.prepareForTriggerAvailableNow()
        log.newest = 40
        assert reader.latestOffset(end, ReadMaxRows(50)) == {"row": 20}
        assert reader.latestOffset({"row": 20}, ReadMaxRows(50)) == {"row": 20}
        reader.stop()
    limits = [limit for what, limit in log.asked if what == "latest"]
    assert limits == [Limit(rows=6), Limit(), Limit(), Limit(rows=50, until={"row": 20})]


def test_the_newest_offset_is_told_and_never_ends_a_query(running, log, caplog):
    log.newest = 20
    with running(make(log), TCP) as address:
        reader = reader_of(address, retries=100)
        assert reader.reportLatestOffset() is None  # nothing was read yet
        assert reader.latestOffset({"row": 0}, ReadMaxRows(6)) == {"row": 6}
        assert reader.reportLatestOffset() == {"row": 20}
        asked = len(log.asked)
        assert reader.latestOffset({"row": 6}, ReadAllAvailable()) == {"row": 20}
        assert reader.reportLatestOffset() == {"row": 20}
        assert len(log.asked) == asked + 1  # the answer without a limit is the newest offset
        assert reader.latestOffset({"row": 6}, ReadMaxRows(6)) == {"row": 12}
    assert reader.reportLatestOffset() is None  # at once, however many retries there may be
    (record,) = [each for each in caplog.records if "newest offset" in each.getMessage()]
    assert "table 'log' at " in record.getMessage()


def test_what_a_split_took_is_in_the_log(running, log, caplog):
    with running(make(log), TCP) as address, caplog.at_level(logging.INFO, "spark_udfs"):
        reader = reader_of(address)
        (split,) = reader.partitions({"row": 0}, {"row": 4})
        assert sum(batch.num_rows for batch in reader.read(split)) == 4
    (record,) = [each for each in caplog.records if each.name == "spark_udfs"]
    assert record.getMessage().startswith("'log', without a task: well; 0 batches and 0 rows sent")
    assert (record.context["batches_received"], record.context["rows_received"]) == ("2", "4")
    assert int(record.context["bytes_received"]) > 4 * 8


def test_limits_are_options(running, log):
    with running(make(log), TCP) as address:
        assert reader_of(address).getDefaultReadLimit() == ReadAllAvailable()
        assert reader_of(address, max_rows=5).getDefaultReadLimit() == ReadMaxRows(5)
        assert reader_of(address, max_bytes="1m").getDefaultReadLimit() == ReadMaxBytes(1 << 20)
        with pytest.raises(ConfigError, match="max_rows and max_files are given: a query has one"):
            reader_of(address, max_rows=5, max_files=1)


def test_a_table_without_offsets_is_no_stream(running, log):
    with running(make(log), TCP) as address:
        with pytest.raises(
            ConfigError, match=r"'plain' at .* has no offsets: it can be read, but not"
        ):
            reader_of(address, "plain")


def test_a_service_that_is_restarted_is_asked_again(running, log):
    log.newest = 5
    with running(make(log), TCP) as address:
        reader = reader_of(address, retries=50)
        assert reader.initialOffset() == {"row": 0}
    found = []
    asking = threading.Thread(
        target=lambda: found.append(reader.latestOffset({"row": 0}, ReadAllAvailable()))
    )
    asking.start()
    with running(make(log), address):
        asking.join(30)
        assert found == [{"row": 5}]


def test_a_schema_that_changes_ends_the_query(running, log):
    log.newest = 5
    with running(make(log), TCP) as address:
        reader = reader_of(address)
    log.schema = ENTRIES.remove(1).append(ENTRIES.field("text").with_type(pa.binary()))
    with running(make(log), address):
        with pytest.raises(
            SchemaMismatch, match="has changed since it was looked at: column 'text'"
        ):
            reader.partitions({"row": 0}, {"row": 5})
