"""Writers: what is there after each commit, who is told what, and what is kept in between."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.write_segments import Ack
from aqueduct.client.writer import Writer
from aqueduct.endpoint.accounts import process
from aqueduct.errors import (
    BadCall,
    BatchTooLarge,
    Cancelled,
    ConfigError,
    ConnectionLost,
    HandlerFailed,
    LocalProtocolError,
    Refused,
    SchemaMismatch,
    UnknownHandler,
    WriteLost,
    WrongType,
)
from tests.sinks.shelf import Book, NotedShelf, Shelf, service_with
from tests.support.calls import NUMBERS, PAIRS, config, connected, numbers, serving, until
from tests.support.proxy import CuttingProxy


class Slow(NotedShelf):
    """Its attempts are prepared when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.preparing: list[int] = []
        self.allowed: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        """By partition."""

    async def open(self, attempt: Any, call: Any) -> Any:  # type: ignore[override]
        return _SlowBook(super().open(attempt, call), self)


class _SlowBook:
    def __init__(self, book: Book, shelf: Slow) -> None:
        self.book = book
        self.shelf = shelf

    async def write(self, batch: pa.RecordBatch) -> None:
        self.book.write(batch)

    async def prepare(self) -> Any:
        partition = self.book.attempt.partition
        self.shelf.preparing.append(partition)
        await self.shelf.allowed[partition].wait()
        return self.book.prepare()

    async def abort(self) -> None:
        self.book.abort()


@pytest.fixture
def shelf() -> NotedShelf:
    return NotedShelf()


@pytest.fixture
async def client(shelf: NotedShelf) -> AsyncIterator[aqueduct.Client]:
    async with connected(service_with(shelf)) as client:
        yield client


def connected_to(shelf: Any, **settings: Any) -> Any:
    return connected(service_with(shelf, **settings))


SIZE = numbers(1).nbytes + 512
"""What one batch of one number counts."""


# What is there


async def test_rows_are_there_after_their_commit(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    async with client.writer("shelf", key="k") as writer:
        assert (writer.committed.commits, writer.committed.note) == (0, None)
        assert writer.schema is not None and writer.schema.equals(NUMBERS)
        await writer.write(numbers(1, 2))
        await writer.write(numbers(3))
        await writer.flush()
        assert shelf.rows == [] and writer.uncommitted == 3
        done = await writer.commit(note={"at": 3})
        assert shelf.rows == [1, 2, 3] and writer.uncommitted == 0
        assert (done.commits, done.rows, done.note) == (1, 3, {"at": 3})
        assert done.result == {"repeated": False, "rows": 3}
        await writer.write(numbers(4))
        assert (await writer.commit()).rows == 4
    assert shelf.rows == [1, 2, 3, 4]
    assert [each[1] for each in shelf.asked_for("commit")] == ["k/0", "k/1"]


async def test_a_later_writer_goes_on_where_the_note_says(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    for start in range(3):
        async with client.writer("shelf", key="k") as writer:
            there = writer.committed
            assert (there.commits, there.rows, there.note) == (start, start, start or None)
            await writer.write(numbers(start))
            await writer.commit(note=start + 1)
    assert shelf.rows == [0, 1, 2]
    async with client.writer("shelf", key="other") as writer:
        assert writer.committed.commits == 0


async def test_a_commit_without_rows_keeps_its_note(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    async with client.writer("shelf", key="k") as writer:
        assert (await writer.commit(note="nothing yet")).commits == 1
    async with client.writer("shelf", key="k") as writer:
        assert writer.committed.note == "nothing yet"
    assert shelf.rows == []


async def test_tables_and_what_speaks_the_c_interface_are_taken(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    class Stream:
        def __init__(self, table: pa.Table) -> None:
            self.table = table

        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return self.table.__arrow_c_stream__(requested_schema)

    class Array:
        def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
            return numbers(5).__arrow_c_array__(requested_schema)

    table = pa.Table.from_batches([numbers(1), numbers(2, 3)])
    async with client.writer("shelf", key="k") as writer:
        assert (await writer.write(table)).rows == 3
        await writer.write(Stream(pa.Table.from_batches([numbers(4)])))
        await writer.write(Array())
        assert (await writer.write(table.slice(0, 0))).rows == 0
        assert (await writer.write(Stream(NUMBERS.empty_table()))).rows == 0
        with pytest.raises(WrongType, match="__arrow_c_array__, not list"):
            await writer.write([numbers(9)])
        await writer.commit()
    assert shelf.rows == [1, 2, 3, 4, 5]


async def test_frames_take_on_the_layout_of_the_sink() -> None:
    schema = pa.schema([("id", pa.int64()), ("word", pa.string())])

    class Words(NotedShelf):
        def open(self, attempt: Any, call: Any) -> Book:
            assert call.schema.equals(schema)
            return Book(self, attempt)

    shelf = Words()
    frame = pl.DataFrame({"id": [1, 2], "word": ["one", "two"]})
    query = duckdb.connect().sql("select 3::bigint as id, 'three' as word")
    async with (
        connected(service_with(shelf, schema=schema)) as client,
        client.writer("shelf", key="k") as writer,
    ):
        await writer.write(pl.concat([frame, frame], rechunk=False))
        await writer.write(query)
        await writer.write(frame[:0])
        assert {each.schema for each in writer.unacknowledged()} == {schema}
        with pytest.raises(SchemaMismatch, match="the input of the writer"):
            await writer.write(frame.select("id"))
        with pytest.raises(WrongType, match=r"one column.* series\.to_frame"):
            await writer.write(frame["id"])
        await writer.commit()
    assert shelf.rows == [1, 1, 2, 2, 3]


async def test_a_batch_that_cannot_be_taken_leaves_the_writer_as_it_is() -> None:
    shelf = NotedShelf()
    settings = config(calls={"batch_limit": 4096})
    async with (
        connected(service_with(shelf, settings)) as client,
        client.writer("shelf", key="k") as writer,
    ):
        await writer.write(numbers(1))
        with pytest.raises(SchemaMismatch, match="the input of the writer into the sink 'shelf'"):
            await writer.write(pa.record_batch({"id": ["x"]}))
        with pytest.raises(BatchTooLarge, match=r"Calls\.batch_limit"):
            await writer.write(numbers(*range(1000)))
        await writer.write(numbers(2))
        await writer.commit()
    assert shelf.rows == [1, 2]


async def test_a_first_batch_that_is_refused_fixes_no_schema() -> None:
    settings = config(calls={"batch_limit": 4096})
    async with (
        connected(service_with(NotedShelf(), settings, schema=None)) as client,
        client.writer("shelf", key="k") as writer,
    ):
        with pytest.raises(BatchTooLarge):
            await writer.write(pa.record_batch({"other": range(1000)}))
        assert writer.schema is None
        await writer.write(numbers(1))
        await writer.commit()


async def test_a_sink_of_any_schema_takes_that_of_the_first_batch() -> None:
    class AnySchema(NotedShelf):
        def open(self, attempt: Any, call: Any) -> Book:
            self.note("open", call.schema)
            return Book(self, attempt)

    shelf = AnySchema()
    async with connected_to(shelf, schema=None) as client:
        async with client.writer("shelf", key="k") as writer:
            assert writer.schema is None
            await writer.write(numbers(1))
            with pytest.raises(SchemaMismatch):
                await writer.write(pa.record_batch({"id": [1], "text": ["x"]}, schema=PAIRS))
            await writer.commit()
        async with client.writer("shelf", key="k", schema=PAIRS) as writer:
            assert writer.schema == PAIRS
    async with connected_to(shelf) as client:
        with pytest.raises(SchemaMismatch):
            await client.writer("shelf", key="k", schema=PAIRS).open()


# Acknowledgements


async def test_acknowledgements_come_in_order_and_a_callback_hears_them(
    client: aqueduct.Client,
) -> None:
    heard: list[int] = []

    def hear(ack: Ack) -> None:
        heard.append(ack.number)
        if ack.number == 1:
            raise RuntimeError("the program has a bug")

    async with client.writer("shelf", key="k", on_ack=hear) as writer:
        acks = [await writer.write(numbers(value)) for value in range(5)]
        assert not any(ack.done for ack in acks)
        await acks[3]
        assert [ack.done for ack in acks[:4]] == [True] * 4
        await writer.flush()
        assert acks[4].done and acks[4].error is None
        assert heard == [0, 1, 2, 3, 4]
        await acks[0]
        assert (acks[0].commit, acks[0].rows) == (0, 1)
        await writer.commit()
        assert (await writer.write(numbers(9))).commit == 1
        await writer.commit()


async def test_an_attempt_that_is_done_early_waits_for_the_former() -> None:
    shelf = Slow()
    async with connected_to(shelf) as client:
        writer = await client.writer("shelf", key="k").open()
        first = await writer.write(numbers(1))
        waiting = asyncio.ensure_future(writer.flush())
        await until(lambda: shelf.preparing == [0])
        second = await writer.write(numbers(2))
        await until(lambda: len(shelf.asked_for("open")) == 2)
        later = asyncio.ensure_future(_awaited(second))
        await until(lambda: shelf.preparing == [0, 1])
        shelf.allowed[1].set()
        await until(lambda: len(shelf.staged) == 1)
        await client.ping()
        assert not first.done and not second.done
        shelf.allowed[0].set()
        await waiting
        await later
        assert first.done and second.done
        await writer.commit()
        await writer.close()
    assert shelf.rows == [1, 2]


async def _awaited(ack: Ack) -> None:
    await ack


async def test_those_who_wait_at_once_share_few_attempts(shelf: NotedShelf) -> None:
    async with connected_to(shelf) as client, client.writer("shelf", key="k") as writer:

        async def one(value: int) -> None:
            await (await writer.write(numbers(value)))

        await asyncio.gather(*map(one, range(50)))
        assert len(shelf.asked_for("prepare")) <= 5
        await writer.commit()
    assert shelf.rows == list(range(50))


async def test_batches_are_acknowledged_within_the_time_asked_for(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    async with client.writer("shelf", key="k", ack_within="10ms") as writer:
        ack = await writer.write(numbers(1))
        await until(lambda: ack.done)
        assert shelf.asked_for("prepare")
        await writer.commit()


async def test_a_flush_does_not_wait_for_what_is_written_after_it() -> None:
    shelf = Slow()
    async with connected_to(shelf) as client:
        writer = await client.writer("shelf", key="k").open()
        await writer.write(numbers(1))
        flushing = asyncio.ensure_future(writer.flush())
        await until(lambda: shelf.preparing == [0])
        later = await writer.write(numbers(2))
        shelf.allowed[0].set()
        done, _ = await asyncio.wait((flushing,), timeout=5)
        early = done and not later.done
        shelf.allowed[1].set()
        assert early
        await writer.commit()
        await writer.close()
    assert shelf.rows == [1, 2]


# The bound


async def test_a_write_waits_while_the_bound_is_reached() -> None:
    shelf = Slow()
    before = process().sending.used
    async with connected_to(shelf) as client:
        writer = await client.writer("shelf", key="k", in_flight_bytes=4 * SIZE).open()
        acks = [await writer.write(numbers(value)) for value in range(4)]
        late = asyncio.ensure_future(writer.write(numbers(4)))
        await until(lambda: sorted(shelf.preparing) == [0, 1])
        assert writer.kept_bytes == 4 * SIZE and not late.done()
        assert process().sending.used - before >= 4 * SIZE
        assert [batch["id"][0].as_py() for batch in writer.unacknowledged()] == [0, 1, 2, 3]
        shelf.allowed[0].set()
        acks.append(await late)
        assert acks[0].done and acks[1].done and not acks[2].done
        assert writer.kept_bytes == 3 * SIZE
        shelf.allowed[1].set()
        shelf.allowed[2].set()
        await writer.commit()
        assert writer.kept_bytes == 0 and writer.unacknowledged() == []
        await writer.close()
    assert shelf.rows == [0, 1, 2, 3, 4]
    assert process().sending.used == before


async def test_an_attempt_ends_early_while_the_process_s_account_is_full(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    account, budget = process().sending, client.config.flow.process_send_bytes
    async with client.writer("shelf", key="k") as writer:
        account.keep(budget)
        try:
            ack = await writer.write(numbers(1))
            await until(lambda: ack.done)
        finally:
            account.keep(-budget)
        later = await writer.write(numbers(2))
        await client.ping()
        assert not later.done
        await writer.commit()
    assert shelf.rows == [1, 2]


async def test_one_write_may_be_above_the_bound(client: aqueduct.Client, shelf: NotedShelf) -> None:
    async with client.writer("shelf", key="k", in_flight_bytes=1) as writer:
        for value in range(3):
            await writer.write(numbers(value, value))
        await writer.commit()
    assert shelf.rows == [0, 0, 1, 1, 2, 2]


async def test_a_write_that_is_cancelled_takes_nothing() -> None:
    shelf = Slow()
    async with connected_to(shelf) as client:
        writer = await client.writer("shelf", key="k", in_flight_bytes=SIZE).open()
        await writer.write(numbers(1))
        late = [asyncio.ensure_future(writer.write(numbers(value))) for value in (2, 3)]
        await until(lambda: shelf.preparing)
        late[0].cancel()
        await asyncio.wait(late[:1])
        shelf.allowed[0].set()
        shelf.allowed[1].set()
        await late[1]
        await writer.commit()
        await writer.close()
    assert shelf.rows == [1, 3]


# Commits


async def test_a_commit_whose_task_is_cancelled_goes_on(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    async with client.writer("shelf", key="k") as writer:
        await writer.write(numbers(1))
        shelf.blocked.clear()
        committing = asyncio.ensure_future(writer.commit("first"))
        await until(shelf.committing.is_set)
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        writing = asyncio.ensure_future(writer.write(numbers(2)))
        await asyncio.sleep(0)
        assert not writing.done()
        shelf.blocked.set()
        assert (await writing).commit == 1
        assert writer.committed.note == "first"
        await writer.commit("second")
    assert shelf.rows == [1, 2]


async def test_an_abort_ends_a_commit_that_is_under_way(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    writer = await client.writer("shelf", key="k").open()
    await writer.write(numbers(1))
    shelf.blocked.clear()
    committing = asyncio.ensure_future(writer.commit())
    await until(shelf.committing.is_set)
    aborting = asyncio.ensure_future(writer.abort())
    with pytest.raises(Cancelled, match="was closed during its commit"):
        await committing
    shelf.blocked.set()
    await aborting
    async with client.writer("shelf", key="k") as writer:
        assert writer.committed.commits == len(shelf.there) == 1  # the sink had begun


async def test_a_commit_that_the_sink_refuses_may_be_repeated(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    async with client.writer("shelf", key="k") as writer:
        await writer.write(numbers(1))
        shelf.fail["commit"] = RuntimeError("the disk is full")
        with pytest.raises(WriteLost, match=r"refused commit 0, so none of its 1 rows .* is full"):
            await writer.commit()
        with pytest.raises(WriteLost, match="the disk is full"):
            await writer.write(numbers(2))
        with pytest.raises(WriteLost, match="the disk is full"):
            await writer.commit()
        shelf.fail.clear()
        assert (await writer.commit()).rows == 1
        await writer.write(numbers(2))
        await writer.commit()
    assert shelf.rows == [1, 2]


async def test_rows_that_the_sink_has_forgotten_are_lost_and_the_error_says_what_to_do(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    with pytest.raises(WriteLost, match="open another writer with this key") as caught:
        async with client.writer("shelf", key="k") as writer:
            await writer.write(numbers(1))
            await writer.commit("one")
            await writer.write(numbers(2, 3))
            await writer.flush()
            shelf.staged.clear()
            await writer.commit("two")
    assert "commit 1" in str(caught.value) and "2 rows" in str(caught.value)
    assert isinstance(caught.value.__cause__, HandlerFailed)
    async with client.writer("shelf", key="k") as writer:
        assert writer.committed.note == "one"
        await writer.write(numbers(2, 3))
        await writer.commit("two")
    assert shelf.rows == [1, 2, 3]


async def test_a_note_is_what_it_was_when_it_was_given() -> None:
    shelf = Slow()
    async with connected_to(shelf) as client:
        writer = await client.writer("shelf", key="k").open()
        await writer.write(numbers(1))
        note = {"offset": 1}
        committing = asyncio.ensure_future(writer.commit(note))
        await until(lambda: shelf.preparing == [0])
        note["offset"] = 2
        shelf.allowed[0].set()
        assert (await committing).note == {"offset": 1}
        await writer.close()
    assert shelf.notes["k/0"]["note"] == {"offset": 1}


async def test_a_note_that_cannot_be_kept_changes_nothing(client: aqueduct.Client) -> None:
    async with client.writer("shelf", key="k") as writer:
        with pytest.raises(ConfigError, match="cannot be written as JSON"):
            await writer.commit(note={1, 2})
        with pytest.raises(ConfigError, match=r"65538 bytes .* limit of 65536 \(Sinks.note_bytes"):
            await writer.commit(note="x" * 65536)
        assert (await writer.commit(note="x" * 65534)).commits == 1


# Two writers of one key


async def test_a_later_writer_takes_the_key_over(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    former = await client.writer("shelf", key="k").open()
    await former.write(numbers(1))
    await former.flush()
    async with client.writer("shelf", key="k") as later:
        await later.write(numbers(2))
        with pytest.raises(WriteLost, match="claimed the key 'k'"):
            while True:
                await former.write(numbers(3))
                await former.flush()
        with pytest.raises(WriteLost, match="open another writer with this key"):
            await former.write(numbers(3))
        await later.commit()
    await former.close()  # which was told already
    assert shelf.rows == [2] and shelf.staged == {}


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "a note alone"])
async def test_a_former_writer_that_has_written_nothing_yet_has_lost_the_key(
    client: aqueduct.Client, shelf: NotedShelf, rows: bool
) -> None:
    former = await client.writer("shelf", key="k").open()
    later = await client.writer("shelf", key="k").open()
    if rows:
        await former.write(numbers(1))
    with pytest.raises(WriteLost, match="another writer has claimed the key 'k'"):
        await former.commit("former")
    await later.write(numbers(2))
    await later.commit("later")
    await later.write(numbers(3))
    await later.commit("latest")
    await later.close()
    await former.abort()
    assert shelf.rows == [2, 3] and shelf.staged == {}


async def test_of_two_writers_that_do_not_know_each_other_the_first_commit_counts(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    """The sink has two services, and each knows its own claims."""
    former = await client.writer("shelf", key="k").open()
    await former.write(numbers(1))
    async with connected_to(shelf) as elsewhere:
        later = await elsewhere.writer("shelf", key="k").open()
        await later.write(numbers(2))
        await later.commit("later")
        await later.close()
    with pytest.raises(WriteLost, match="another writer has made commit 0, so none of the 1 rows"):
        await former.commit("former")
    with pytest.raises(WriteLost, match="another writer has made commit 0"):
        await former.commit("former")
    await former.close()
    assert shelf.rows == [2] and shelf.staged == {}


# The end


async def test_an_exception_drops_what_is_not_committed(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.writer("shelf", key="k") as writer:
            await writer.write(numbers(1))
            await writer.commit()
            await writer.write(numbers(2))
            await writer.flush()
            ack = await writer.write(numbers(3))
            raise ZeroDivisionError
    assert isinstance(ack.error, Cancelled)
    await until(lambda: not shelf.staged)
    assert shelf.rows == [1] and shelf.asked_for("abort run")


async def test_an_end_with_rows_that_are_not_committed_says_so(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    with pytest.raises(LocalProtocolError, match=r"2 rows that were written and not committed"):
        async with client.writer("shelf", key="k") as writer:
            await writer.write(numbers(1, 2))
            await writer.flush()
    assert shelf.staged == {} and shelf.rows == []
    writer = await client.writer("shelf", key="k").open()
    await writer.write(numbers(3))
    with pytest.raises(LocalProtocolError, match=r"await commit\(\) before the end, or abort\(\)"):
        await writer.close()
    await writer.commit()  # it was not closed
    await writer.close()
    await writer.close()
    assert writer.closed and shelf.rows == [3]


async def test_a_writer_is_used_between_its_opening_and_its_end(client: aqueduct.Client) -> None:
    writer = client.writer("shelf", key="k")
    with pytest.raises(LocalProtocolError, match="is not open yet"):
        await writer.write(numbers(1))
    await writer.open()
    with pytest.raises(LocalProtocolError, match="was opened already"):
        await writer.open()
    await writer.abort()
    await writer.abort()
    for use in (writer.write(numbers(1)), writer.flush(), writer.commit()):
        with pytest.raises(LocalProtocolError, match="is closed"):
            await use
    with pytest.raises(LocalProtocolError):
        await writer.open()


# What fails


async def test_an_error_of_the_sink_is_that_of_the_writer(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    shelf.fail["write"] = ValueError("a row that is none")
    writer = await client.writer("shelf", key="k").open()
    ack = await writer.write(numbers(1))
    with pytest.raises(HandlerFailed, match="a row that is none"):
        await ack
    for use in (writer.write(numbers(1)), writer.flush(), writer.commit()):
        with pytest.raises(HandlerFailed, match="a row that is none"):
            await use
    assert [batch["id"].to_pylist() for batch in writer.unacknowledged()] == [[1]]
    await writer.close()
    assert shelf.there == {}


async def test_an_error_that_nobody_has_heard_is_raised_at_the_end(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    shelf.fail["write"] = ValueError("a row that is none")
    with pytest.raises(HandlerFailed, match="a row that is none"):
        async with client.writer("shelf", key="k") as writer:
            ack = await writer.write(numbers(1))
            await until(lambda: ack.done)


async def test_sinks_that_cannot_be_written_to() -> None:
    async with connected_to(Shelf()) as client:
        with pytest.raises(BadCall, match=r"give it a method committed\(write_key\)"):
            await client.writer("shelf", key="k").open()
        with pytest.raises(UnknownHandler):
            await client.writer("shelv", key="k").open()
        for key in ("", "x" * 237, "a\nb"):
            with pytest.raises(ConfigError, match="the key of a writer"):
                client.writer("shelf", key=key)
        with pytest.raises(ConfigError, match="deadline is 0; it must be above zero"):
            client.writer("shelf", key="k", deadline=0)


async def test_a_token_that_the_service_refuses_is_told_as_that() -> None:
    shelf = NotedShelf()
    shown, seen = ["good"], list[str | None]()

    def authorize(call: Any) -> bool:
        seen.append(call.token)
        return bool(call.token != "old")

    service = aqueduct.Service("test", config=config(), authorize=authorize)
    service.sink("shelf", shelf, schema=NUMBERS)
    async with connected(service) as client:
        async with client.writer("shelf", key="k", token=lambda: shown[-1]) as writer:
            await writer.write(numbers(1))
            shown.append("new")
            await writer.commit()
            assert seen[0] == "good" and seen[-1] == "new"
            shown.append("old")
            await writer.write(numbers(2))
            with pytest.raises(Refused, match="open another writer with this key"):
                await writer.flush()
            await writer.abort()
        for wrong, text in ((lambda: 1 / 0, "raised ZeroDivisionError"), (lambda: 7, "gave a int")):
            with pytest.raises(ConfigError, match=f"token, which is asked for each call, {text}"):
                await client.writer("shelf", key="k", token=wrong).open()  # type: ignore[arg-type]
    assert shelf.rows == [1]


@pytest.mark.parametrize("options", ["", "?resume=30s"], ids=["", "resumed"])
async def test_rows_are_there_once_when_their_connection_is_cut(options: str) -> None:
    shelf = NotedShelf()
    service = service_with(shelf)
    async with (
        service.serving(f"aqueduct+tcp://127.0.0.1:0{options}", drain=0) as running,
        CuttingProxy(running.addresses[0]) as proxy,
        await aqueduct.Client.connect(proxy.address, config=service.config) as client,
        client.writer("shelf", key="k") as writer,
    ):
        for value in range(10):
            seen = len(shelf.asked_for("write"))
            await writer.write(numbers(value))
            if value % 3 == 0:
                await until(partial(more_than, shelf, seen))
                proxy.cut()
        await writer.commit("all")
    assert shelf.rows == list(range(10)) and shelf.staged == {}
    opened = len(shelf.asked_for("open"))
    assert opened == 1 if options else opened > 1


def more_than(shelf: Shelf, seen: int) -> bool:
    """Whether it was given more than so many batches."""
    return len(shelf.asked_for("write")) > seen


async def test_a_service_that_stays_away_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    shelf = NotedShelf()
    async with serving(service_with(shelf), "tcp") as running:
        client = await aqueduct.Client.connect(running.addresses[0], config=config())
        writer = await client.writer("shelf", key="k", deadline=0.5).open()
        await writer.write(numbers(1))
        await writer.flush()
    with caplog.at_level(logging.WARNING):
        await writer.write(numbers(2))
        with pytest.raises(ConnectionLost, match=r"tried \d+ times within 0.5 s \(deadline\)"):
            await writer.flush()
    assert "it is sent again in" in caplog.text
    with pytest.raises(ConnectionLost):
        await writer.commit()
    await writer.close()
    assert [batch["id"].to_pylist() for batch in writer.unacknowledged()] == [[2]]
    await client.close()


async def test_a_service_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aqueduct.client.writer._LASTED", 0.05)  # less than a connection may take

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = config(timing={"connect_timeout": 0.1})
    async with server:
        client = aqueduct.Client(f"aqueduct+tcp://127.0.0.1:{port}", config=settings)
        async with asyncio.timeout(10):
            with pytest.raises(ConnectionLost, match=r"tried \d+ times within 0.5 s \(deadline\)"):
                await client.writer("shelf", key="k", deadline=0.5).open()
        await client.close()


async def test_a_commit_without_an_answer_may_be_repeated() -> None:
    shelf = NotedShelf()
    async with (
        serving(service_with(shelf), "tcp") as running,
        CuttingProxy(running.addresses[0]) as proxy,
    ):
        client = await aqueduct.Client.connect(proxy.address, config=config())
        writer = await client.writer("shelf", key="k", deadline=0.5).open()
        await writer.write(numbers(1))
        shelf.blocked.clear()
        committing = asyncio.ensure_future(writer.commit("one"))
        await until(shelf.committing.is_set)
        proxy.refuse = True
        proxy.cut()
        with pytest.raises(ConnectionLost, match=r"whether commit 0 of .* is there is not known"):
            await committing
        shelf.blocked.set()
        await until(lambda: shelf.there)
        proxy.refuse = False
        with pytest.raises(ConnectionLost, match="is not known"):
            await writer.write(numbers(2))
        assert (await writer.commit("again")).note == "one"  # it was there
        await writer.close()
        await client.close()
    assert shelf.rows == [1] and shelf.staged == {}


async def test_a_client_that_is_closed_ends_its_writers(client: aqueduct.Client) -> None:
    writer = await client.writer("shelf", key="k").open()
    ack = await writer.write(numbers(1))
    await client.close()
    with pytest.raises(ConnectionLost):
        await ack
    await writer.abort()


async def test_a_writer_shows_what_it_is(client: aqueduct.Client) -> None:
    async with client.writer("shelf", key="k") as writer:
        assert isinstance(writer, Writer)
        ack = await writer.write(numbers(1))
        assert repr(writer) == "<Writer into 'shelf' by the key 'k', 1 rows not committed>"
        assert repr(ack) == "<Ack of write 0, 1 rows: waiting>"
        await writer.commit()
        assert repr(ack) == "<Ack of write 0, 1 rows: prepared>"
    assert repr(writer) == "<Writer into 'shelf' by the key 'k', closed>"
