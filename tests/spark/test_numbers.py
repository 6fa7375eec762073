"""What tasks count, and its sum, without Spark."""

from __future__ import annotations

import pickle
from contextlib import closing
from dataclasses import fields

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aqueduct.errors import ConnectFailed, HandlerFailed
from spark_udfs import (
    exchange,
    exchange_by_key,
    exchange_files,
    exchange_grouped,
    exchange_pandas,
    send_files,
)
from spark_udfs.functions.pandas import ColumnExchange
from spark_udfs.worker.metrics import Tally, TaskMetrics, Total
from tests.spark.services import NUMBERS, make

ONE = TaskMetrics(**{field.name: place + 1 for place, field in enumerate(fields(TaskMetrics))})


def batches(*firsts):
    return iter([pa.record_batch({"id": [first, first]}, schema=NUMBERS) for first in firsts])


def test_a_sum_has_every_number():
    total = Total() + ONE + ONE
    assert total == Total(
        **{field.name: 2 * getattr(ONE, field.name) for field in fields(TaskMetrics)}, tasks=2
    )
    assert total + total == Total() + ONE + ONE + ONE + ONE
    assert Total().tasks == 0  # what is added to is not changed


def test_a_tally_sums_up_and_begins_again():
    tally = Tally()
    assert "no numbers yet" in tally.summary()
    tally.add(ONE)
    tally.add(ONE)
    assert tally.value == Total() + ONE + ONE
    tally.clear()
    assert tally.value == Total()


def test_a_shell_shows_the_summary_as_it_is_and_a_notebook_as_a_table():
    tally = Tally()
    tally.add(ONE)
    summary = tally.summary().titled("'<script>alert(1)</script>\n\x1b[31m' at \"a&b\"")
    assert summary.startswith("'<script>") and "1 task\nsent" in summary
    assert "\x1b" not in repr(summary) and "1 task\nsent      1 batch" in repr(summary)
    page = summary._repr_html_()
    assert "<script" not in page and "\x1b" not in page and "\n" not in page
    assert "<caption>&#x27;&lt;script&gt;alert(1)&lt;/script&gt;\\n\\x1b[31m&#x27; at " in page
    assert "at &quot;a&amp;b&quot;</caption>" in page
    assert ">sent</th>" in page and ">1 batch, 3 rows, 0.0 MiB</td>" in page
    again = pickle.loads(pickle.dumps(summary))
    assert again == summary and again._repr_html_() == page
    empty = Tally().summary()
    assert "no numbers yet" in repr(empty) and "no numbers yet" in empty._repr_html_()


def test_the_summary_is_for_people():
    tally = Tally()
    tally.add(
        TaskMetrics(
            batches_sent=1200,
            rows_sent=12_000_000,
            bytes_sent=96 << 20,
            batches_received=1,
            rows_received=1,
            bytes_received=1 << 19,
            waiting_seconds=3.21,
            retries=1,
            reconnects=2,
            resumes=1,
        )
    )
    assert tally.summary().splitlines() == [
        "1 task",
        "sent      1,200 batches, 12,000,000 rows, 96.0 MiB",
        "received  1 batch, 1 row, 0.5 MiB",
        "waited    3.2 s for the service",
        "          1 retry, 2 reconnects, 1 resume, 0 failed batches",
    ]


def test_without_spark_a_copy_counts_for_itself():
    tally = Tally()
    tally.add(ONE)
    copy = pickle.loads(pickle.dumps(tally))
    copy.add(ONE)
    assert copy.value == tally.value == Total() + ONE


def test_a_function_counts_where_it_is_called(running):
    with running(make()) as address:
        score = exchange(address, "double")
        assert len(list(score(batches(1, 2, 3)))) == 3
        assert score.numbers.tasks == 1
        assert score.numbers.batches_sent == score.numbers.batches_received == 3
        assert score.numbers.rows_sent == score.numbers.rows_received == 6
        summary = score.summary()
    assert summary.startswith(f"'double' at {address.partition('?')[0]}: 1 task\n")
    assert "3 batches, 6 rows" in summary


def test_what_fails_or_is_left_early_counts_once(running):
    with running(make()) as address:
        failing = exchange(address, "fail")
        with pytest.raises(HandlerFailed):
            list(failing(batches(1, 42)))
        left = exchange(address, "double", in_flight=1)
        with closing(left(batches(1, 2, 3))) as answers:
            next(answers)
    assert failing.numbers.tasks == 1
    assert failing.numbers.batches_sent == 2
    assert left.numbers.tasks == left.numbers.batches_received == 1


def test_what_is_asked_again_is_in_the_log(running, caplog):
    with running(make()) as address:
        score = exchange(["aqueduct+tcp://127.0.0.1:9", address], "double", retries=3)
        with caplog.at_level("WARNING", "spark_udfs"):
            assert len(list(score(batches(1, 2, 3)))) == 3
    assert caplog.records  # a second one, if the other address takes that long to answer
    for record in caplog.records:
        assert record.levelname == "WARNING"
        said = record.getMessage()
        assert said.startswith("'double' at aqueduct+tcp://127.0.0.1:9: ConnectFailed: ")
        assert "is asked again, there not before 0." in said


# Every counter of every function

KEYED = pa.schema([("id", pa.int64())])
ROWS = 1000
SIZE = 8 * ROWS  # bytes of the values alone


@pytest.fixture
def counted(running):
    """A service with a sink, and a way to the values of one column."""
    service = make()

    @service.handler("keep", kind="sink")
    def keep(batches, call):
        for _ in batches:
            pass

    with running(service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as address:
        yield address


def table(count=1):
    return pa.table({"id": pa.array([7] * ROWS * count)}, KEYED)


def by_batches(make_function):
    """Calls the function with two batches, without Spark; gives what has the counters."""

    def call(address, folder):
        function = make_function(address)
        list(function(iter(table(2).to_batches(max_chunksize=ROWS))))
        return function

    return call


def by_frames(address, folder):
    function = exchange_pandas(address, "echo")
    list(function(each.to_pandas() for each in table(2).to_batches(max_chunksize=ROWS)))
    return function


def by_groups(form, count=1):
    def call(address, folder):
        function = exchange_grouped(address, "echo", form=form)
        for _ in range(2):
            rows = table(count)
            key = ((pa.scalar(7),),) if form.startswith("key") else ()
            if form.endswith("batches"):
                list(function(*key, iter(rows.to_batches())))
            else:
                assert function(*key, rows).num_rows == ROWS * count
        return function

    return call


def by_columns(address, folder):
    column = ColumnExchange(exchange(address, "echo"), ("id",), pa.int64())
    arrays = [(each.column(0),) for each in table(2).to_batches(max_chunksize=ROWS)]
    assert sum(len(each) for each in column(iter(arrays))) == 2 * ROWS
    return column.call


def by_files(make_function):
    def call(address, folder):
        paths = [f"{folder}/{name}.parquet" for name in "ab"]
        for path in paths:
            pq.write_table(table(), path)
        function = make_function(address)
        list(function(iter([pa.record_batch({"path": paths})])))
        return function

    return call


@pytest.mark.parametrize(
    ("call", "answered"),
    [
        pytest.param(by_batches(lambda at: exchange(at, "echo")), True, id="exchange"),
        pytest.param(
            by_batches(lambda at: exchange(at, "echo", check_rows=True)), True, id="check_rows"
        ),
        pytest.param(by_batches(lambda at: exchange(at, "echo", retries=1)), True, id="retries"),
        pytest.param(by_batches(lambda at: exchange_by_key(at, "echo", ["id"])), True, id="by_key"),
        pytest.param(by_frames, True, id="exchange_pandas"),
        pytest.param(by_columns, True, id="exchange_column"),
        pytest.param(by_groups("table"), True, id="exchange_grouped"),
        pytest.param(by_groups("key_table"), True, id="exchange_grouped by key"),
        pytest.param(by_groups("table", 500), True, id="exchange_grouped, large"),
        pytest.param(by_groups("batches"), True, id="exchange_grouped by batches"),
        pytest.param(by_files(lambda at: exchange_files(at, "echo")), True, id="exchange_files"),
        pytest.param(
            by_files(lambda at: exchange_files(at, "echo", returns="answers")), True, id="answers"
        ),
        pytest.param(by_files(lambda at: send_files(at, "keep")), False, id="send_files"),
    ],
)
def test_every_function_counts_bytes_rows_and_waiting(call, answered, counted, tmp_path):
    function = call(counted, tmp_path)
    found = function.tally.value if hasattr(function, "tally") else function.numbers
    assert found.tasks and found.batches_sent
    assert found.rows_sent >= 2 * ROWS
    assert found.bytes_sent >= 8 * found.rows_sent
    assert found.waiting_seconds > 0
    if answered:
        assert found.rows_received == found.rows_sent and found.batches_received
        assert found.bytes_received >= 8 * found.rows_received
    else:
        assert found.rows_received == found.bytes_received == 0
    assert f"{found.rows_sent:,} rows, {found.bytes_sent / (1 << 20):,.1f} MiB" in (
        function.summary()
    )


def test_send_files_summary_has_the_bytes_that_were_sent(counted, tmp_path):
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"id": pa.array(range(300_000))}), path)
    function = send_files(counted, "keep")
    list(function(iter([pa.record_batch({"path": [str(path)]})])))
    assert "300,000 rows, 2.3 MiB" in function.summary()
    assert "300,000 rows, 0.0 MiB" not in function.summary()


def test_a_failed_call_of_files_or_groups_has_been_counted(running, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path)
    service = make()

    @service.handler("break", kind="sink")
    def breaks(batches, call):
        for _ in batches:
            raise ValueError("broken")

    @service.handler("break all")
    def break_all(batch):
        raise ValueError("broken")

    with running(service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as address:
        files = send_files(address, "break")
        with pytest.raises(HandlerFailed):
            list(files(iter([pa.record_batch({"path": [str(path)]})])))
        groups = exchange_grouped(address, "break all")
        with pytest.raises(HandlerFailed):
            groups(table())
    for found in (files.numbers, groups.tally.value):
        assert (found.tasks, found.rows_sent) == (1, ROWS)
        assert found.bytes_sent >= SIZE
    with pytest.raises(ConnectFailed):
        list(
            send_files("aqueduct+tcp://127.0.0.1:9", "keep")(
                iter([pa.record_batch({"path": [str(path)]})])
            )
        )
