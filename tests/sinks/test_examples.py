"""The sinks of the examples, one by one: what they leave behind, and what they refuse."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import aqueduct
from aqueduct.client.sink_writer import SinkWriter
from aqueduct.service.sinks import Attempt, PreparedAttempt, WriteKey
from tests.sinks.servers import Server
from tests.support.calls import sync_client, until

pytestmark = pytest.mark.checkout

ROWS = pa.schema([("id", pa.int64()), ("te xt", pa.string()), ("x", pa.list_(pa.float64()))])
RUN = WriteKey("run/../../1")
TABLES = itertools.count()


def batch(*ids: int) -> pa.RecordBatch:
    columns = {"id": ids, "te xt": [f"'{i};" for i in ids], "x": [[i / 2] for i in ids]}
    return pa.record_batch(columns, schema=ROWS)


def write(
    sink: Any, task: int, *ids: int, write_key: WriteKey = RUN, partition: int | None = None
) -> PreparedAttempt:
    attempt = Attempt(
        write_key, execution="e", partition=task if partition is None else partition, task=task
    )
    writer = sink.open(attempt, SimpleNamespace(schema=ROWS))
    for value in ids:
        writer.write(batch(value))
    return PreparedAttempt(attempt, writer.prepare())


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """What they return, run at the same time."""
    results: list[Any] = []
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        begin.wait(20)
        results.append(work())

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(params=["parquet", "postgres"])
def made(request: pytest.FixtureRequest, folder: Path) -> tuple[Any, Callable[[], list[int]]]:
    """A sink, and what reads it."""
    if request.param == "parquet":
        from examples.sinks.parquet import ParquetSink, files

        def read() -> list[int]:
            return sorted(
                i for name in files(folder) for i in pq.read_table(name)["id"].to_pylist()
            )

        return ParquetSink(folder), read
    from examples.sinks.postgres import PostgresSink

    server: Server = request.getfixturevalue("postgres")
    table = f"target {next(TABLES)}"
    return PostgresSink(server.uri, table), lambda: sorted(server.ids(table).elements())


def test_a_run_is_there_after_its_commit(made: Any) -> None:
    sink, read = made
    prepared = [write(sink, 0, 1, 2), write(sink, 1), write(sink, 2, 3)]
    assert sink.commit(RUN, prepared) == {"repeated": False, "rows": 3}
    assert read() == [1, 2, 3]
    assert sink.commit(RUN, prepared) == {"repeated": True, "rows": 3}
    assert sink.commit(RUN, [write(sink, 9, 7)]) == {"repeated": True, "rows": 3}
    assert read() == [1, 2, 3]


@pytest.mark.parametrize("receipt", [None, {}, [], {"rows": "x"}, {"rows": 9, "bytes": -1}, "a"])
def test_a_receipt_that_is_not_the_one_that_was_given_commits_nothing(
    made: Any, receipt: Any
) -> None:
    sink, read = made
    sink.commit(WriteKey("before"), [write(sink, 5, 0, write_key=WriteKey("before"))])
    good, other = write(sink, 0, 1), write(sink, 1, 2)
    with pytest.raises(RuntimeError, match="nothing of the write is committed"):
        sink.commit(RUN, [good, PreparedAttempt(other.attempt, receipt)])
    assert read() == [0]
    sink.commit(RUN, [good, other])
    assert read() == [0, 1, 2]


def test_an_attempt_that_nobody_made_commits_nothing(made: Any) -> None:
    sink, read = made
    sink.commit(WriteKey("before"), [write(sink, 5, 0, write_key=WriteKey("before"))])
    good = write(sink, 0, 1)
    unknown = PreparedAttempt(Attempt(RUN, execution="e", partition=8, task=8), good.receipt)
    with pytest.raises(RuntimeError, match="nothing of the write is committed"):
        sink.commit(RUN, [good, unknown])
    assert read() == [0]


def test_what_is_aborted_is_gone_and_what_is_committed_stays(made: Any) -> None:
    sink, read = made
    winner, loser = write(sink, 0, 1), write(sink, 1, 1, partition=0)
    sink.commit(RUN, [winner])
    for _ in range(2):
        sink.abort(RUN, [winner, loser])
        assert read() == [1]
        assert list(sink.leftovers()) == []


def test_an_attempt_that_is_given_up_leaves_nothing(made: Any) -> None:
    sink, read = made
    sink.commit(WriteKey("before"), [write(sink, 5, 0, write_key=WriteKey("before"))])
    attempt = Attempt(RUN, task=1)
    writer = sink.open(attempt, SimpleNamespace(schema=ROWS))
    writer.write(batch(1))
    writer.abort()
    writer = sink.open(attempt, SimpleNamespace(schema=ROWS))
    writer.prepare()
    writer.abort()
    assert list(sink.leftovers()) == []
    assert read() == [0]


@pytest.mark.parametrize("made", ["parquet"], indirect=True)
def test_a_file_that_is_committed_outlives_the_end_of_its_attempt(made: Any) -> None:
    sink, read = made
    prepared = write(sink, 0, 1)
    late = sink.open(prepared.attempt, SimpleNamespace(schema=ROWS))
    sink.commit(RUN, [prepared])
    late.abort()
    assert read() == [1]


def test_what_is_prepared_is_known_to_the_next_process(made: Any, folder: Path) -> None:
    sink, read = made
    prepared = [write(sink, 0, 1), write(sink, 1, 2)]
    found = sorted(sink.leftovers(), key=lambda pair: pair[0].attempt.task)
    assert [pair[0].attempt for pair in found] == [each.attempt for each in prepared]
    assert all(0 <= seconds < 60 for _, seconds in found)
    sink.commit(RUN, prepared)
    assert list(sink.leftovers()) == []
    assert read() == [1, 2]


def test_a_run_is_committed_once_by_two_at_once(made: Any) -> None:
    sink, read = made
    sink.commit(WriteKey("before"), [write(sink, 5, 0, write_key=WriteKey("before"))])
    prepared = [write(sink, 0, 1), write(sink, 1, 2)]
    again = [write(sink, 2, 1, partition=0), write(sink, 3, 2, partition=1)]
    works = [lambda: sink.commit(RUN, prepared), lambda: sink.commit(RUN, again)]
    assert sorted(result["repeated"] for result in at_once(*works)) == [False, True]
    assert read() == [0, 1, 2]


def test_two_runs_are_committed_at_once(made: Any) -> None:
    sink, read = made
    runs = [WriteKey("a"), WriteKey("b")]
    prepared = [write(sink, i, i, write_key=write_key) for i, write_key in enumerate(runs)]
    commit: Callable[[WriteKey, Sequence[PreparedAttempt]], Any] = sink.commit
    at_once(lambda: commit(runs[0], prepared[:1]), lambda: commit(runs[1], prepared[1:]))
    assert read() == [0, 1]


def test_another_process_commits_and_the_first_one_lets_it_be(made: Any) -> None:
    """A service of several processes: what one has prepared reaches its end in another."""
    sink, read = made
    sink.commit(WriteKey("before"), [write(sink, 5, 0, write_key=WriteKey("before"))])
    services = [aqueduct.Service("one"), aqueduct.Service("other")]
    # The first looks every 50 ms at what is too old; nobody tells it of the commit.
    first = services[0].sink("sink", sink, schema=ROWS, time_to_live=0.2)
    services[1].sink("sink", type(sink)(*made_of(sink)), schema=ROWS)
    with sync_client(services[0]) as one, sync_client(services[1]) as other:
        prepared = [
            SinkWriter(one, "sink").write(
                Attempt(RUN, execution="e", partition=number), [batch(number)], schema=ROWS
            )
            for number in (1, 2)
        ]
        assert SinkWriter(other, "sink").commit(RUN, prepared) == {"repeated": False, "rows": 2}
        asyncio.run(until(lambda: first.attempts.counts() == (0, 0)))
    assert read() == [0, 1, 2]
    assert list(sink.leftovers()) == []


def made_of(sink: Any) -> tuple[Any, ...]:
    """What makes another sink of the same rows."""
    return (sink.folder,) if hasattr(sink, "folder") else (sink.uri, sink.table)


def test_overwriting_runs(made: Any) -> None:
    sink, read = made
    for number in range(4):
        write_key = WriteKey(f"run {number}", overwrite=number > 1)
        sink.commit(write_key, [write(sink, number, number, write_key=write_key)])
        assert read() == [[0], [0, 1], [2], [3]][number]
    old = WriteKey("run 1")
    assert sink.commit(old, [write(sink, 9, 9, write_key=old)])["repeated"]
    assert read() == [3]


def test_files_of_replaced_runs_are_removed_one_run_later(folder: Path) -> None:
    from examples.sinks.parquet import ParquetSink

    sink = ParquetSink(folder)
    there = []
    for number in range(4):
        write_key = WriteKey(f"run {number}", overwrite=True)
        sink.commit(write_key, [write(sink, number, number, write_key=write_key)])
        paths = sorted((folder / "data").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)
        there.append([pq.read_table(path)["id"].to_pylist() for path in paths])
    assert there == [[[0]], [[0], [1]], [[1], [2]], [[2], [3]]]


def test_batches_are_gathered_into_row_groups(folder: Path) -> None:
    from examples.sinks.parquet import ParquetSink, files

    sink = ParquetSink(folder)
    sink.commit(RUN, [write(sink, 0, *range(100))])
    (name,) = files(folder)
    assert pq.ParquetFile(name).metadata.num_row_groups == 1
    assert pq.ParquetFile(name).read().equals(pa.Table.from_batches([batch(*range(100))]))
    assert Path(name).parent.parent == folder / "data"  # whatever the key of the run says


def test_a_table_is_as_its_first_rows_are(postgres: Server) -> None:
    from examples.sinks.postgres import PostgresSink

    table = 'it"s new'
    sink = PostgresSink(postgres.uri, table)
    sink.commit(RUN, [write(sink, 0, 7, 8)])
    rows = postgres.sql('SELECT id, "te xt", x FROM "it""s new" ORDER BY id')
    assert rows == ["7|'7;|{3.5}", "8|'8;|{4}"]
    left = "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'staged%'"
    assert write(sink, 1, 9, write_key=WriteKey("more")).receipt == {"rows": 1}
    assert int(postgres.sql(left)[0]) >= 1
    for each, _ in list(sink.leftovers()):
        sink.abort(each.attempt.write_key, [each])
    sink.abort(RUN, [])
    assert postgres.sql(f"{left} AND tableowner = 'nobody'") == ["0"]


@pytest.mark.parametrize("name", ["", "x" * 64])
def test_a_name_that_no_table_can_have(name: str) -> None:
    from examples.sinks.postgres import PostgresSink

    with pytest.raises(ValueError, match="must have a name of 1 to 63 bytes"):
        PostgresSink("postgresql:///nowhere", name)


def test_a_row_that_the_table_refuses_commits_nothing(postgres: Server) -> None:
    from examples.sinks.postgres import PostgresSink

    postgres.sql('CREATE TABLE narrow (id bigint CHECK (id < 5), "te xt" text, x float8[])')
    sink = PostgresSink(postgres.uri, "narrow")
    prepared = [write(sink, 0, 1), write(sink, 1, 9)]
    with pytest.raises(Exception, match="narrow_id_check"):
        sink.commit(RUN, prepared)
    assert postgres.sql("SELECT id FROM narrow") == []
    postgres.sql("ALTER TABLE narrow DROP CONSTRAINT narrow_id_check")
    assert sink.commit(RUN, prepared) == {"repeated": False, "rows": 2}
