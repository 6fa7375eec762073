"""Sinks of a service: what each step leads to, who is told what, and in which order."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct import cli
from aqueduct.client.sink_writer import SinkWriter
from aqueduct.errors import (
    BadCall,
    Busy,
    Cancelled,
    HandlerFailed,
    Refused,
    SchemaMismatch,
)
from aqueduct.rpc.sink_commit import ABORT, ATTEMPT_HEADER, COMMIT, WRITE, Settlement, to_batch
from aqueduct.service.sinks import Attempt, PreparedAttempt, WriteKey
from tests.sinks.shelf import RUN, AsyncShelf, Book, Shelf, attempt, service_with, write
from tests.support.calls import (
    NUMBERS,
    PAIRS,
    config,
    connected,
    numbers,
    served,
    sync_client,
    until,
)


@pytest.fixture(params=[Shelf, AsyncShelf], ids=["threads", "loop"])
def shelf(request: pytest.FixtureRequest) -> Shelf:
    made: Shelf = request.param()
    return made


@pytest.fixture
def sink(shelf: Shelf) -> Iterator[SinkWriter]:
    with sync_client(service_with(shelf)) as client:
        yield SinkWriter(client, "shelf")


def wait_for(condition: Callable[[], object]) -> None:
    asyncio.run(until(condition))


# What happens when all goes well


@pytest.mark.requirement("AC-82")
def test_a_run_is_written_in_order(shelf: Shelf, sink: SinkWriter) -> None:
    prepared = write(sink, attempt(4, 9), 1, 2)
    assert prepared.receipt == {"rows": 2, "of": [1, None]}
    assert shelf.rows == []
    assert sink.commit(RUN, [prepared]) == {"repeated": False, "rows": 2}
    assert shelf.rows == [1, 2]
    assert shelf.asked == [
        ("open", 4, 9),
        ("write", 4, 9, 1),
        ("write", 4, 9, 1),
        ("prepare", 4, 9),
        ("commit", "run 1", [(4, 9)]),
    ]


@pytest.mark.requirement("AC-88")
def test_exactly_the_named_attempts_are_committed_and_the_others_aborted(
    shelf: Shelf, sink: SinkWriter
) -> None:
    first, slow, second = (
        write(sink, attempt(0, 1), 1),
        write(sink, attempt(0, 2), 1),
        write(sink, attempt(1, 3), 2),
    )
    assert slow.attempt.id != first.attempt.id
    sink.commit(RUN, [second, first])
    assert shelf.rows == [1, 2]
    assert shelf.asked[-2:] == [
        ("commit", "run 1", [(1, 3), (0, 1)]),
        ("abort run", "run 1", [(0, 2)]),
    ]
    assert shelf.staged == {}


@pytest.mark.requirement("AC-89")
def test_a_repeated_commit_reaches_the_sink_which_does_nothing(
    shelf: Shelf, sink: SinkWriter
) -> None:
    prepared = [write(sink, attempt(0), 1)]
    sink.commit(RUN, prepared)
    assert sink.commit(RUN, prepared) == {"repeated": True}
    again = [write(sink, attempt(0, 7, execution="another"), 1)]
    assert shelf.staged
    assert sink.commit(RUN, again) == {"repeated": True}
    assert shelf.rows == [1]
    assert shelf.asked[-1] == ("abort run", "run 1", [(0, 7)])
    assert shelf.staged == {}


def test_a_run_without_attempts_is_committed(shelf: Shelf, sink: SinkWriter) -> None:
    assert sink.commit(RUN, []) == {"repeated": False, "rows": 0}


def test_overwriting_reaches_the_sink(shelf: Shelf, sink: SinkWriter) -> None:
    sink.commit(RUN, [write(sink, attempt(0), 1)])
    other = WriteKey("run 2", overwrite=True)
    sink.commit(other, [write(sink, attempt(0, write_key=other), 2)])
    assert shelf.rows == [2]


def test_many_attempts_at_once(shelf: Shelf) -> None:
    with sync_client(service_with(shelf)) as client:
        sink = SinkWriter(client, "shelf")
        prepared: list[PreparedAttempt] = []

        def one(partition: int) -> None:
            batches = (numbers(*range(i, i + 10)) for i in range(0, 1000, 10))
            prepared.append(sink.write(attempt(partition), batches, schema=NUMBERS))

        threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(prepared) == 8
        sink.commit(RUN, prepared)
    assert shelf.rows == sorted(list(range(1000)) * 8)


@pytest.mark.requirement("AC-82")
def test_what_a_sink_tells_of_itself(sink: SinkWriter) -> None:
    found = sink.look()
    assert found.schema is not None and found.schema.equals(NUMBERS)
    assert found.time_to_live == 86_400


def test_a_service_names_its_sinks(
    sink: SinkWriter, shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    description = sink.client.describe()
    (found,) = description.sinks
    assert (found.name, found.schema) == ("shelf", NUMBERS)
    assert found.summary == inspect.getdoc(type(shelf)).split("\n")[0]  # type: ignore[union-attr]
    assert description.handlers == ()
    assert cli.main(["describe", sink.client.address + "?verify=off"]) == 0
    assert f"shelf  (sink, exactly once)\n  {found.summary}\n  takes" in capsys.readouterr().out


# Attempts that come to nothing


@pytest.mark.requirement("AC-87")
def test_an_iterable_that_raises_aborts_its_attempt(shelf: Shelf, sink: SinkWriter) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield numbers(1)
        wait_for(lambda: ("write", 0, 0, 1) in shelf.asked)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        sink.write(attempt(), batches(), schema=NUMBERS)
    assert shelf.aborted.wait(20)
    assert shelf.asked_for("prepare", "abort") == [("abort", 0, 0)]


def test_a_lost_connection_aborts_the_attempt(shelf: Shelf) -> None:
    service = service_with(shelf)
    with served(service) as address, aqueduct.SyncClient(address) as client:

        def batches() -> Iterator[pa.RecordBatch]:
            yield numbers(1)
            wait_for(lambda: ("write", 0, 0, 1) in shelf.asked)
            client.close()
            yield numbers(2)

        with pytest.raises(aqueduct.AqueductError):
            SinkWriter(client, "shelf").write(attempt(), batches(), schema=NUMBERS)
        assert shelf.aborted.wait(20)
        wait_for(lambda: service._sinks["shelf"].attempts.counts() == (0, 0))
    assert shelf.asked_for("prepare", "abort") == [("abort", 0, 0)]


@pytest.mark.parametrize("step", ["open", "write", "prepare"])
def test_a_step_that_raises_aborts_the_attempt_and_says_why(
    shelf: Shelf, sink: SinkWriter, step: str
) -> None:
    shelf.fail[step] = OSError("the disk is full")
    with pytest.raises(HandlerFailed, match="OSError: the disk is full"):
        write(sink, attempt(), 1)
    assert shelf.asked_for("abort") == ([] if step == "open" else [("abort", 0, 0)])
    del shelf.fail[step]
    sink.commit(RUN, [write(sink, attempt(), 1)])  # its id is free again
    assert shelf.rows == [1]


def test_an_abort_that_raises_is_logged_and_hides_nothing(
    shelf: Shelf, sink: SinkWriter, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.fail.update(write=OSError("the disk is full"), abort=OSError("nor this"))
    with caplog.at_level(logging.ERROR), pytest.raises(HandlerFailed, match="the disk is full"):
        write(sink, attempt(2, 5), 1)
    wait_for(lambda: "partition 2 of write 'run 1'" in caplog.text)
    assert "could not be aborted" in caplog.text and "nor this" in caplog.text


def test_a_schema_that_does_not_fit_is_refused_before_the_sink_is_asked(
    shelf: Shelf, sink: SinkWriter
) -> None:
    with pytest.raises(SchemaMismatch, match="column 'text' is not wanted"):
        sink.write(attempt(), [], schema=PAIRS)
    assert shelf.asked == []


def test_a_receipt_must_be_json(shelf: Shelf, sink: SinkWriter, monkeypatch: Any) -> None:
    monkeypatch.setattr(Book, "prepare", lambda book: {1, 2})
    with pytest.raises(BadCall, match="cannot be written as JSON"):
        write(sink, attempt(), 1)
    assert shelf.asked_for("abort") == [("abort", 0, 0)]


@pytest.mark.requirement("AC-84")
def test_a_receipt_has_a_limit(shelf: Shelf, monkeypatch: Any) -> None:
    monkeypatch.setattr(Book, "prepare", lambda book: "x" * 99)
    with sync_client(service_with(shelf, config(sinks={"receipt_bytes": 100}))) as client:
        with pytest.raises(BadCall, match="101 bytes is above the limit of 100"):
            write(SinkWriter(client, "shelf"), attempt(), 1)
    with sync_client(service_with(shelf, config(sinks={"receipt_bytes": 101}))) as client:
        assert write(SinkWriter(client, "shelf"), attempt(), 1).receipt == "x" * 99


def test_what_open_returns_must_take_batches(
    shelf: Shelf, sink: SinkWriter, monkeypatch: Any
) -> None:
    target = type(shelf)
    wrong: Any = (lambda *_: object()) if target is Shelf else _async_object
    monkeypatch.setattr(shelf, "open", wrong)
    with sync_client(service_with(shelf)) as client:
        with pytest.raises(HandlerFailed, match=r"returned a object without write\(\)"):
            write(SinkWriter(client, "shelf"), attempt(), 1)


async def _async_object(attempt: Attempt, call: Any) -> object:
    return object()


def test_methods_of_an_attempt_are_all_of_one_kind() -> None:
    class Mixed(AsyncShelf):
        async def open(self, attempt: Attempt, call: Any) -> Any:  # type: ignore[override]
            return Book(self, attempt)

    with sync_client(service_with(Mixed())) as client:
        with pytest.raises(HandlerFailed, match=r"Book\.write must be a coroutine function"):
            write(SinkWriter(client, "shelf"), attempt(), 1)


def test_attempts_have_a_limit(shelf: Shelf) -> None:
    with sync_client(service_with(shelf, config(sinks={"attempts": 2}))) as client:
        sink = SinkWriter(client, "shelf")
        prepared = [write(sink, attempt(i), i) for i in range(2)]
        with pytest.raises(Busy, match=r"2 attempts .* the limit \(Sinks.attempts\)"):
            write(sink, attempt(2), 2)
        sink.commit(RUN, prepared)
        write(sink, attempt(2, execution="another"), 2)


@pytest.mark.requirement("AC-87")
def test_an_attempt_is_made_once(sink: SinkWriter) -> None:
    write(sink, attempt(1, 2), 1)
    with pytest.raises(BadCall, match=r"partition 1 of write 'run 1' .* already, or did"):
        write(sink, attempt(1, 2), 1)


# Runs that come to nothing


@pytest.mark.requirement("AC-90")
def test_an_abort_takes_all_that_is_known_of_the_run(shelf: Shelf, sink: SinkWriter) -> None:
    write(sink, attempt(0, 1), 1)
    named = write(sink, attempt(1, 2), 1)
    other = WriteKey("another")
    kept = write(sink, attempt(0, 3, write_key=other), 5)
    sink.abort(RUN, [named])
    assert shelf.asked[-1] == ("abort run", "run 1", [(1, 2), (0, 1)])
    sink.abort(RUN)
    assert shelf.asked[-1] == ("abort run", "run 1", [])
    sink.commit(other, [kept])
    assert shelf.rows == [5]


@pytest.mark.requirement("AC-90")
def test_an_abort_of_one_execution_leaves_the_others(shelf: Shelf, sink: SinkWriter) -> None:
    old, new = attempt(0, 1, execution="old"), attempt(0, 1, execution="new")
    write(sink, old, 1)
    prepared = write(sink, new, 2)
    sink.abort(RUN, execution="old")
    assert shelf.asked[-1] == ("abort run", "run 1", [(0, 1)])
    sink.commit(RUN, [prepared])
    assert shelf.rows == [2]


@pytest.mark.requirement("AC-90")
def test_an_abort_stops_attempts_that_are_open(shelf: Shelf, sink: SinkWriter) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield numbers(1)
        wait_for(lambda: ("write", 0, 0, 1) in shelf.asked)
        sink.abort(RUN)
        yield numbers(2)

    with pytest.raises(Refused, match="writes no more: its write is aborted"):
        sink.write(attempt(), batches(), schema=NUMBERS)
    assert shelf.asked_for("write", "prepare", "abort") == [("write", 0, 0, 1), ("abort", 0, 0)]


@pytest.mark.requirement("AC-90")
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_late_attempt_of_an_execution_that_is_over_is_refused(
    shelf: Shelf, sink: SinkWriter, end: str
) -> None:
    """A speculative one, or one that Spark started while it gave up the job."""

    def batches() -> Iterator[pa.RecordBatch]:
        yield numbers(1)
        wait_for(lambda: ("write", 0, 2, 1) in shelf.asked)
        sink.commit(RUN, prepared) if end == "commit" else sink.abort(RUN, execution="e")
        yield numbers(2)

    prepared = [write(sink, attempt(0, 1), 1)]
    with pytest.raises(Refused, match=f"writes no more: its write is {end}"):
        sink.write(attempt(0, 2), batches(), schema=NUMBERS)
    with pytest.raises(Refused, match=f"comes too late: its write is {end}"):
        write(sink, attempt(0, 3), 1)
    write(sink, attempt(0, 3, execution="another"), 1)
    assert shelf.rows == ([1] if end == "commit" else [])


def test_an_execution_without_a_name_is_not_over(shelf: Shelf, sink: SinkWriter) -> None:
    sink.commit(RUN, [write(sink, attempt(0, 1, execution=""), 1)])
    write(sink, attempt(0, 2, execution=""), 1)


@pytest.mark.requirement("AC-88")
def test_a_commit_that_raises_commits_nothing_and_may_be_repeated(
    shelf: Shelf, sink: SinkWriter
) -> None:
    prepared = [write(sink, attempt(0), 1)]
    write(sink, attempt(0, 2), 1)
    shelf.fail["commit"] = OSError("the table is locked")
    with pytest.raises(HandlerFailed, match="the table is locked"):
        sink.commit(RUN, prepared)
    assert shelf.rows == [] and shelf.asked_for("abort run") == []
    del shelf.fail["commit"]
    sink.commit(RUN, prepared)
    assert shelf.rows == [1]
    assert shelf.asked_for("abort run") == [("abort run", "run 1", [(0, 2)])]


def test_losers_that_cannot_be_aborted_do_not_undo_a_commit(
    shelf: Shelf, sink: SinkWriter, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = [write(sink, attempt(0), 1)]
    write(sink, attempt(0, 2), 1)
    shelf.fail["abort run"] = OSError("not now")
    assert sink.commit(RUN, prepared) == {"repeated": False, "rows": 1}
    assert "attempts that lost were not aborted" in caplog.text
    del shelf.fail["abort run"]
    sink.commit(RUN, prepared)  # they are not forgotten
    assert shelf.asked[-1] == ("abort run", "run 1", [(0, 0), (0, 2)])


@pytest.mark.requirement("AC-89")
async def test_a_commit_goes_on_when_its_client_goes(shelf: Shelf) -> None:
    service = service_with(shelf)
    async with connected(service, "quic") as client:
        shelf.blocked.clear()
        document = json.dumps(
            {"version": 1, "run": "r", "overwrite": False, "execution": None, "attempts": []}
        )
        call = asyncio.create_task(client.call(COMMIT + "shelf", to_batch(document)))
        await until(shelf.committing.is_set)
        call.cancel()
        await until(lambda: service.counters()["cancelled"] == 1)
        # One that comes now waits for its turn.
        again = asyncio.create_task(client.call(COMMIT + "shelf", to_batch(document)))
        await until(lambda: service.counters()["open_calls"] >= 1)
        assert shelf.asked == []
        shelf.blocked.set()
        answer = await again
    assert json.loads(answer["document"][0].as_py())["result"] == {"repeated": True}
    assert shelf.asked_for("commit") == [("commit", "r", []), ("commit", "r", [])]


async def test_a_commit_whose_client_left_before_its_turn_is_not_made(shelf: Shelf) -> None:
    service = service_with(shelf)
    async with connected(service, "quic") as client:
        shelf.blocked.clear()
        text = '{"version": 1, "run": "r", "overwrite": false, "execution": null, "attempts": []}'
        first = asyncio.create_task(client.call(COMMIT + "shelf", to_batch(text)))
        await until(shelf.committing.is_set)
        late = asyncio.create_task(client.call(COMMIT + "shelf", to_batch(text)))
        await until(lambda: service.counters()["open_calls"] == 2)
        late.cancel()
        await until(lambda: service.counters()["cancelled"] == 1)
        shelf.blocked.set()
        await first
        await client.call(ABORT + "shelf", to_batch(text))
    assert [name for name, *_ in shelf.asked] == ["commit", "abort run"]


# Time to live, and what former processes left


@pytest.mark.requirement("AC-91")
async def test_what_nobody_commits_is_aborted_after_its_time(shelf: Shelf) -> None:
    service = service_with(shelf, time_to_live=0.2)
    async with connected(service, "quic") as client:
        headers = {ATTEMPT_HEADER: attempt(3, 4).to_json()}
        async with client.exchange(
            WRITE + "shelf", [numbers(1)], headers=headers, write_key=RUN.key
        ) as answers:
            assert [answer.num_rows async for answer in answers] == [1]
        assert shelf.staged
        await until(lambda: shelf.asked[-1] == ("abort run", "run 1", [(3, 4)]))
        assert service._sinks["shelf"].attempts.counts() == (0, 0)
    assert shelf.staged == {}


async def test_a_run_with_an_open_attempt_is_not_too_old(shelf: Shelf) -> None:
    service = service_with(shelf, time_to_live=0.1)
    asked = asyncio.Event()

    async def batches() -> Any:
        yield numbers(1)
        await asked.wait()

    async with connected(service, "quic") as client:
        done = {ATTEMPT_HEADER: attempt(0, 1).to_json()}
        async with client.exchange(WRITE + "shelf", [numbers(1)], headers=done) as answers:
            assert [answer.num_rows async for answer in answers] == [1]
        open_now = {ATTEMPT_HEADER: attempt(1, 2).to_json()}
        async with client.exchange(
            WRITE + "shelf", batches(), schema=NUMBERS, headers=open_now
        ) as answers:
            await until(lambda: service._sinks["shelf"].attempts.counts() == (1, 1))
            await asyncio.sleep(0.4)
            assert shelf.asked_for("abort run") == []
            asked.set()
            assert [answer.num_rows async for answer in answers] == [1]
        await until(lambda: shelf.asked_for("abort run"))
    assert shelf.asked_for("abort run") == [("abort run", "run 1", [(0, 1), (1, 2)])]


async def test_what_a_former_process_left_is_aborted_when_its_time_is_over(shelf: Shelf) -> None:
    shelf.left = [
        (PreparedAttempt(attempt(0, 1)), 3600.0),
        (PreparedAttempt(attempt(1, 2, WriteKey("new"))), 0.0),
    ]
    service = service_with(shelf, time_to_live=100)
    sink = service._sinks["shelf"]
    sink.time_to_live = 0.4  # looked at every 0.1 s
    sink.attempts.recall(PreparedAttempt(attempt(5, 6, WriteKey("later"))), -3600.0)
    async with connected(service, "memory"):
        await until(lambda: shelf.asked_for("abort run"))
        assert shelf.asked[0] == ("abort run", "run 1", [(0, 1)])
        await until(lambda: len(shelf.asked_for("abort run")) == 2)
    assert shelf.asked[1] == ("abort run", "new", [(1, 2)])
    assert sink.attempts.counts() == (0, 1)


async def test_leftovers_that_cannot_be_told_are_logged(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.leftovers = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    async with connected(service_with(shelf), "memory"):
        await until(lambda: "what was left behind cannot be told" in caplog.text)


async def test_an_abort_by_age_that_raises_is_tried_again(shelf: Shelf) -> None:
    shelf.left = [(PreparedAttempt(attempt(0, 1)), 3600.0)]
    shelf.fail["abort run"] = OSError("not now")
    async with connected(service_with(shelf, time_to_live=0.05), "memory"):
        await until(lambda: len(shelf.asked_for("abort run")) >= 2)


# What goes wrong in between


async def test_a_commit_that_the_service_cannot_describe_is_done_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(Shelf):
        def commit(self, write_key: WriteKey, prepared: Any) -> Any:
            return object()

    async with connected(service_with(Odd())) as client:
        answer = await client.call(COMMIT + "shelf", to_batch(Settlement(RUN).to_json()))
    assert json.loads(answer["document"][0].as_py()) == {"version": 1, "result": None}
    assert "what commit returned cannot be written as JSON" in caplog.text


def test_an_answer_that_does_not_count_what_was_sent_is_refused(monkeypatch: Any) -> None:
    shelf = Shelf()
    with sync_client(service_with(shelf)) as client:
        lying = '{"version": 1, "batches": 1, "rows": 2, "receipt": null}'
        monkeypatch.setattr(
            "aqueduct.rpc.sink_commit.Receipt.to_json", lambda receipt, *, limit: lying
        )
        with pytest.raises(BadCall, match="sent 2 batches of 2 rows, and prepared 1 of 2"):
            write(SinkWriter(client, "shelf"), attempt(), 1, 2)


@pytest.mark.requirement("AC-87")
async def test_an_abandoned_call_is_no_end_of_its_batches(shelf: Shelf) -> None:
    service = service_with(shelf)
    async with connected(service, "quic") as client:
        stream = client.exchange(
            WRITE + "shelf",
            _then_wait(),
            schema=NUMBERS,
            headers={ATTEMPT_HEADER: attempt().to_json()},
        )
        reading = asyncio.create_task(anext(aiter(stream)))
        await until(lambda: ("write", 0, 0, 1) in shelf.asked)
        reading.cancel()
        await asyncio.wait([reading])
        await stream.aclose()
        await until(shelf.aborted.is_set)
    assert shelf.asked_for("prepare", "abort") == [("abort", 0, 0)]


async def _then_wait() -> Any:
    yield numbers(1)
    await asyncio.Event().wait()


def test_a_cancelled_call_does_not_prepare(monkeypatch: Any) -> None:
    """Even if the batches seem to end: an end that came with a cancel is none."""
    shelf = Shelf()
    service = service_with(shelf)
    sink = service._sinks["shelf"]

    class Gone:
        write_key = ""
        schema = NUMBERS

        def __init__(self) -> None:
            self.headers = {ATTEMPT_HEADER: attempt().to_json()}

        def check(self) -> None:
            raise Cancelled("gone")

    with pytest.raises(Cancelled):
        list(sink._write(iter([numbers(1)]), Gone()))
    assert shelf.asked_for("prepare", "abort") == [("abort", 0, 0)]
