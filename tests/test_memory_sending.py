"""What is answered counts until it has left; the next large answer is made when there is room."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from aqueduct import Client, Service
from aqueduct.accounts import Sending, process
from aqueduct.config import Config
from aqueduct.errors import Busy
from aqueduct.protocol.channels.outgoing import Outgoing
from tests.calls import config, connected, serving, until, until_seen

KiB, MiB = 1 << 10, 1 << 20
SCHEMA = pa.schema([("x", pa.int64())])
SIZE = 2 * MiB
CALLS = 24


def batch_of(size: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(size // 8), pa.int64())], schema=SCHEMA)


def narrow(**flow: int) -> Config:
    flow = {"channel_high_water": 256 * KiB, "read_ahead": 256 * KiB, **flow}
    return config(flow=flow, calls={"cut": 256 * KiB}, timing={"progress_deadline": 20})


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does, in the end nothing is charged to the process."""
    gc.collect()  # of tests before
    account, sending = process().receiving, process().sending
    before = account.used, sending.used
    yield
    until_seen(lambda: before == (account.used, sending.used))
    assert not sending.waiting
    assert sending.place is None or sending.place._left


def service(settings: Config) -> tuple[Service, list[int]]:
    """Handlers of each shape whose answers have SIZE bytes; and what was charged as one began."""
    found, seen = Service("answers", config=settings), []

    def made() -> pa.RecordBatch:
        seen.append(process().sending.used)
        return batch_of(SIZE)

    @found.handler("source", kind="source", output=SCHEMA)
    def source(call: Any) -> Iterator[pa.RecordBatch]:
        yield made()
        yield made()

    @found.handler("async source", kind="source", output=SCHEMA)
    async def async_source(call: Any) -> AsyncIterator[pa.RecordBatch]:
        yield made()
        yield made()

    @found.handler("exchange", input=SCHEMA, output=SCHEMA)
    def exchange(batches: Iterator[pa.RecordBatch], call: Any) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield made()

    @found.handler("function", input=SCHEMA, output=SCHEMA, concurrency=4)
    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        return made()

    return found, seen


def call(client: Client, name: str) -> Any:
    if name.endswith("source"):
        return client.source(name)
    return client.exchange(name, [batch_of(64)] * 2, schema=SCHEMA)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["source", "async source", "exchange", "function"])
async def test_large_answers_are_made_only_when_there_is_room(name: str) -> None:
    """While no reader reads, no more is made than the budget and one; then all complete."""
    budget = 6 * MiB
    made, seen = service(narrow(process_send_budget=budget))
    async with serving(made, "tcp") as running:
        async with await Client.connect(running.addresses[0], config=narrow()) as client:
            async for _ in call(client, name):  # from now on it is known how large they are
                pass
            del seen[:]
            calls = [call(client, name) for _ in range(CALLS)]

            async def read(stream: Any) -> int:
                return sum([batch.num_rows async for batch in stream])

            await until(lambda: process().sending.waiting)  # nobody has read anything
            async with asyncio.timeout(90):
                rows = await asyncio.gather(*map(read, calls))
    assert rows == [2 * SIZE // 8] * CALLS
    assert len(seen) == 2 * CALLS
    # At its beginning the room of an answer is counted already.
    assert max(seen) <= budget + SIZE + MiB


async def test_answers_that_nobody_reads_do_not_stop_the_one_that_is_read() -> None:
    """They have all of their connection's mark, and of its reader's budget."""
    made, seen = service(narrow(connection_high_water=3 * MiB))
    async with connected(made, "tcp", client_config=narrow(receive_budget=4 * MiB)) as client:
        async for _ in call(client, "source"):
            pass
        del seen[:]
        calls = [call(client, "source") for _ in range(CALLS)]
        async with asyncio.timeout(90):
            for stream in calls:  # one after the other: nobody reads the others
                assert sum([batch.num_rows async for batch in stream]) == 2 * SIZE // 8
    assert len(seen) == 2 * CALLS


@pytest.mark.timeout(120)
async def test_calls_that_find_no_room_for_their_answers_fail_as_busy() -> None:
    """They would wait for ever: what was answered before them nobody reads."""
    made, _ = service(
        config(
            flow={"process_send_budget": 3 * MiB, "read_ahead": 256 * KiB},
            calls={"cut": 256 * KiB},
            timing={"progress_deadline": 2.0},
        )
    )
    settings = narrow(receive_budget=1 * MiB, channel_receive_bytes=512 * KiB)
    async with (
        serving(made, "tcp") as running,
        await Client.connect(running.addresses[0], config=settings) as client,
    ):
        async for _ in call(client, "source"):
            pass
        unread = [call(client, "source") for _ in range(6)]
        await until(lambda: running.counters()["failed"])
        errors = []
        for stream in unread:
            try:
                async for _ in stream:
                    pass
            except Busy as error:
                errors.append(str(error))
    assert errors
    assert all("Flow.process_send_budget" in error for error in errors)


@pytest.mark.parametrize("name", ["source", "async source", "function"])
async def test_a_handler_whose_answers_are_small_again_waits_for_no_room(name: str) -> None:
    sizes = iter([SIZE, 64, 64, 64])
    made = Service("changes", config=narrow(process_send_budget=MiB))

    @made.handler("source", kind="source", output=SCHEMA)
    def source(call: Any) -> Iterator[pa.RecordBatch]:
        yield batch_of(next(sizes))

    @made.handler("async source", kind="source", output=SCHEMA)
    async def async_source(call: Any) -> AsyncIterator[pa.RecordBatch]:
        yield batch_of(next(sizes))

    @made.handler("function", input=SCHEMA, output=SCHEMA)
    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch_of(next(sizes))

    async with serving(made, "tcp") as running:
        async with await Client.connect(running.addresses[0], config=narrow()) as client:
            for size in (SIZE, 64, 64, 64):
                stream = (
                    client.exchange(name, [batch_of(64)], schema=SCHEMA)
                    if name == "function"
                    else client.source(name)
                )
                assert [batch.num_rows async for batch in stream] == [size // 8]
                await until(lambda: not running.calls)
                assert bool(running.sizes) == (size == SIZE)


def test_room_is_granted_in_order_and_never_twice() -> None:
    account = Sending()
    ledger = Outgoing(narrow(process_send_budget=4 * MiB), [], account)
    queued = {"first": 0, "second": 0, "third": 0}
    woken: list[str] = []
    rooms = {
        name: account.reservation(
            ledger, partial(queued.__getitem__, name), partial(woken.append, name)
        )
        for name in queued
    }
    first, second, third = rooms.values()
    assert first.ask(3 * MiB) and account.used == 3 * MiB
    assert second.ask(3 * MiB)  # alone above the budget
    assert account.place is second and account.used == 6 * MiB
    assert not third.ask(1 * MiB) and third.waits and woken == []
    second.made(2 * MiB)
    assert account.used == 5 * MiB and not third.granted
    second.posted(2 * MiB)
    assert account.used == 4 * MiB and woken == ["third"] and third.granted
    assert third.ask(100)  # small: nothing is reserved
    assert account.used == 3 * MiB
    for room in rooms.values():
        room.end()
    assert account.used == 0 and account.place is None and not account.waiting
    # A handler that was left alone goes on: nobody waits, and nothing counts.
    assert first.ask(100 * MiB)
    first.made(100 * MiB)
    first.posted(100 * MiB)
    assert account.used == 0 and not account.waiting


def test_threads_that_ask_at_once_get_no_more_than_there_is() -> None:
    account = Sending()
    ledger = Outgoing(narrow(process_send_budget=4 * MiB), [], account)
    peaks: list[int] = []

    def work() -> None:
        granted = threading.Semaphore(0)
        room = account.reservation(ledger, lambda: 0, granted.release)
        for _ in range(200):
            if not room.ask(MiB):
                assert granted.acquire(timeout=30)
            peaks.append(account.used)
            room.release()
        room.end()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert max(peaks) <= 5 * MiB and account.used == 0
