"""What is answered counts until it has left; the next large answer is made when there is room."""

from __future__ import annotations

import asyncio
import gc
import heapq
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from aqueduct import Client, Service
from aqueduct.config import Config
from aqueduct.endpoint.accounts import SendingAccount, process
from aqueduct.errors import Busy
from aqueduct.protocol.common.send_streams import SendStreams
from tests.support.calls import config, connected, serving, sync_client, until, until_seen
from tests.support.selection import mostly_long

KiB, MiB = 1 << 10, 1 << 20
SCHEMA = pa.schema([("x", pa.int64())])
SIZE = 2 * MiB
CALLS = 24


def batch_of(size: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(size // 8), pa.int64())], schema=SCHEMA)


def narrow(**flow: int) -> Config:
    flow = {"channel_high_water": 256 * KiB, "read_ahead": 256 * KiB, **flow}
    return config(flow=flow, calls={"fragment_bytes": 256 * KiB}, timing={"progress_deadline": 20})


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does, in the end nothing is charged to the process."""
    gc.collect()  # of tests before
    account, sending = process().receiving, process().sending
    before = account.used, sending.used
    yield
    until_seen(lambda: before == (account.used, sending.used))
    assert not sending.waiting and not sending.pulling and not sending.pulls.busy
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
@pytest.mark.parametrize("deadline", [None, 90.0])
async def test_calls_that_find_no_room_for_their_answers_fail_as_busy(
    deadline: float | None,
) -> None:
    """They would wait until their deadline, or for ever: nobody reads what was answered before."""
    made, _ = service(
        config(
            flow={"process_send_budget": 3 * MiB, "read_ahead": 256 * KiB},
            calls={"fragment_bytes": 256 * KiB},
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
        unread = [client.source("source", deadline=deadline) for _ in range(6)]
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
    account = SendingAccount()
    ledger = SendStreams(narrow(process_send_budget=4 * MiB), [], account)
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


def test_the_room_above_the_budget_is_for_a_call_whose_batch_is_here() -> None:
    account = SendingAccount()
    ledger = SendStreams(narrow(process_send_budget=4 * MiB), [], account)
    here = {"late", "small"}
    woken: list[str] = []
    rooms = {
        name: account.reservation(
            ledger, lambda: 0, partial(woken.append, name), partial(here.__contains__, name)
        )
        for name in ("first", "second", "late", "small")
    }
    first, second, late, small = rooms.values()
    assert first.ask(3 * MiB)  # it fits
    assert not second.ask(3 * MiB)
    assert late.ask(3 * MiB) and account.place is late
    assert small.ask(300 * KiB) is False  # nothing fits beside
    late.release()
    assert woken == ["small"] and small.granted  # it fits again
    here.add("second")
    second.retry()
    assert woken == ["small", "second"] and account.place is second
    for room in rooms.values():
        room.end()
    assert account.used == 0 and not account.waiting


def test_threads_that_ask_at_once_get_no_more_than_there_is() -> None:
    account = SendingAccount()
    ledger = SendStreams(narrow(process_send_budget=4 * MiB), [], account)
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


class Pulled:
    """Batches that calls pull from their iterators, and the most that counted before one."""

    def __init__(self) -> None:
        self.most = 0
        self.count = 0

    def __call__(self, number: int, size: int = SIZE) -> Iterator[pa.RecordBatch]:
        for _ in range(number):
            self.most = max(self.most, process().sending.used)
            self.count += 1
            yield batch_of(size)


def taker() -> Service:
    """Handlers that answer the first row of each batch, all of it, or one row at the end."""
    found = Service("taker", config=narrow())

    @found.handler("take", input=SCHEMA, output=SCHEMA)
    def take(batches: Iterator[pa.RecordBatch], call: Any) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.slice(0, 1)

    @found.handler("echo", input=SCHEMA, output=SCHEMA)
    def echo(batches: Iterator[pa.RecordBatch], call: Any) -> Iterator[pa.RecordBatch]:
        yield from batches

    @found.handler("count", kind="sink", input=SCHEMA)
    def count(batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
        return {"rows": sum(batch.num_rows for batch in batches)}

    return found


PULL_BUDGET = 6 * MiB
PULL_MOST = PULL_BUDGET + 2 * SIZE
"""Bytes: the budget, one batch above it, and what goes with messages."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("form", ["iterator", "async iterator"])
async def test_a_client_pulls_large_batches_only_when_there_is_room(form: str, known: bool) -> None:
    pulled = Pulled()

    async def slowly(number: int) -> AsyncIterator[pa.RecordBatch]:
        for batch in pulled(number):
            yield batch

    batches: Any = pulled if form == "iterator" else slowly
    settings = narrow(process_send_budget=PULL_BUDGET)
    async with connected(taker(), "tcp", client_config=settings) as client:

        async def read(stream: Any) -> int:
            return sum([batch.num_rows async for batch in stream])

        if known:
            assert await read(client.exchange("take", batches(1), schema=SCHEMA)) == 1
            pulled.count = 0
        calls = [client.exchange("take", batches(3), schema=SCHEMA) for _ in range(CALLS)]
        assert pulled.count < CALLS  # not one for each call, as nothing has left
        assert await asyncio.gather(*map(read, calls)) == [3] * CALLS
        assert pulled.most <= PULL_MOST
        assert SIZE <= client.link.sizes["take"] <= SIZE + KiB


@pytest.mark.timeout(120)
async def test_sinks_pull_large_batches_only_when_there_is_room() -> None:
    pulled = Pulled()
    settings = narrow(process_send_budget=PULL_BUDGET)
    async with connected(taker(), "tcp", client_config=settings) as client:
        await client.sink("count", pulled(1), schema=SCHEMA)
        counters = await asyncio.gather(
            *(client.sink("count", pulled(3), schema=SCHEMA) for _ in range(CALLS))
        )
    assert [found["rows"] for found in counters] == [3 * SIZE // 8] * CALLS
    assert pulled.most <= PULL_MOST


@pytest.mark.timeout(120)
def test_threads_pull_large_batches_only_when_there_is_room() -> None:
    pulled = Pulled()
    with sync_client(taker(), "tcp", config=narrow(process_send_budget=PULL_BUDGET)) as client:

        def read(number: int) -> int:
            stream = client.exchange("take", pulled(number), schema=SCHEMA)
            return sum(batch.num_rows for batch in stream)

        assert read(1) == 1
        with ThreadPoolExecutor(CALLS) as pool:
            assert list(pool.map(read, [3] * CALLS)) == [3] * CALLS
    assert pulled.most <= PULL_MOST


@pytest.mark.timeout(120)
def test_one_thread_merges_exchanges_of_large_batches() -> None:
    pulled = Pulled()
    settings = narrow(process_send_budget=PULL_BUDGET)
    with sync_client(taker(), "tcp", config=settings) as client:
        list(client.exchange("echo", pulled(1), schema=SCHEMA))
        calls = [client.exchange("echo", pulled(2), schema=SCHEMA) for _ in range(32)]
        merged = heapq.merge(*calls, key=lambda batch: batch.num_rows)
        assert sum(batch.num_rows for batch in merged) == 64 * SIZE // 8


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tasks", mostly_long(["one", "each"], "one"))
async def test_tasks_merge_exchanges_of_large_batches(tasks: str) -> None:
    """One task reads all in turn, or a new task waits for each answer, and all for the slowest."""
    pulled = Pulled()
    settings = narrow(process_send_budget=PULL_BUDGET)
    async with connected(taker(), "tcp", client_config=settings) as client:
        async for _ in client.exchange("echo", pulled(1), schema=SCHEMA):
            pass
        calls = [client.exchange("echo", pulled(2), schema=SCHEMA) for _ in range(32)]
        for _ in range(2):
            if tasks == "one":
                found = [await anext(stream) for stream in calls]
            else:
                found = await asyncio.gather(*(anext(stream) for stream in calls))
            assert [batch.num_rows for batch in found] == [SIZE // 8] * 32
            del found
        for stream in calls:
            assert await anext(stream, None) is None


@pytest.mark.timeout(120)
def test_threads_chain_exchanges_of_large_batches() -> None:
    pulled = Pulled()
    with sync_client(taker(), "tcp", config=narrow(process_send_budget=MiB)) as client:
        list(client.exchange("echo", pulled(1), schema=SCHEMA))
        stream: Any = pulled(3)
        for _ in range(5):
            stream = client.exchange("echo", stream, schema=SCHEMA)
        assert [batch.num_rows for batch in stream] == [SIZE // 8] * 3


@pytest.mark.timeout(120)
async def test_tasks_chain_exchanges_of_large_batches() -> None:
    pulled = Pulled()
    settings = narrow(process_send_budget=MiB)
    async with connected(taker(), "tcp", client_config=settings) as client:
        async for _ in client.exchange("echo", pulled(1), schema=SCHEMA):
            pass
        stream: Any = pulled(3)
        for _ in range(5):
            stream = client.exchange("echo", stream, schema=SCHEMA)
        assert [batch.num_rows async for batch in stream] == [SIZE // 8] * 3


@pytest.mark.timeout(120)
async def test_an_idle_input_does_not_hold_up_others() -> None:
    """Nothing comes of some inputs for long; others are pulled after Timing.stall_deadline."""
    pulled, release = Pulled(), asyncio.Event()
    settings = config(
        flow={"process_send_budget": 3 * MiB, "channel_high_water": 256 * KiB},
        calls={"fragment_bytes": 256 * KiB},
        timing={"progress_deadline": 60.0, "stall_deadline": 0.2},
    )

    async def idle() -> AsyncIterator[pa.RecordBatch]:
        await release.wait()
        yield batch_of(64)

    async with connected(taker(), "tcp", client_config=settings) as client:
        async for _ in client.exchange("take", pulled(1), schema=SCHEMA):
            pass

        async def read(batches: Any) -> int:
            stream = client.exchange("take", batches, schema=SCHEMA)
            return sum([batch.num_rows async for batch in stream])

        quiet = [asyncio.ensure_future(read(idle())) for _ in range(8)]
        await until(lambda: process().sending.pulls.busy)
        async with asyncio.timeout(30):
            assert await read(pulled(3)) == 3
        release.set()
        assert await asyncio.gather(*quiet) == [1] * 8


@pytest.mark.timeout(120)
async def test_a_call_goes_on_above_the_budget_if_nothing_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two calls wait for what the input of a third one brings about, and their batches stay."""
    release = threading.Event()
    settings = config(
        flow={"process_send_budget": MiB, "channel_high_water": 256 * KiB, "read_ahead": 256 * KiB},
        calls={"fragment_bytes": 256 * KiB},
        timing={"progress_deadline": 8.0, "stall_deadline": 0.5},
    )
    made = Service("slow", config=narrow(receive_budget=MiB, channel_receive_bytes=512 * KiB))

    @made.handler("slow", input=SCHEMA, output=SCHEMA)
    def slow(batches: Iterator[pa.RecordBatch], call: Any) -> Iterator[pa.RecordBatch]:
        assert release.wait(60)
        for batch in batches:
            yield batch.slice(0, 1)

    @made.handler("quick", input=SCHEMA, output=SCHEMA)
    def quick(batches: Iterator[pa.RecordBatch], call: Any) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            release.set()
            yield batch.slice(0, 1)

    async def read(client: Client, name: str) -> int:
        stream = client.exchange(name, [batch_of(8 * MiB)], schema=SCHEMA)
        return sum([batch.num_rows async for batch in stream])

    with caplog.at_level(logging.WARNING, logger="aqueduct.endpoint.pulling"):
        async with (
            serving(made, "tcp") as running,
            await Client.connect(running.addresses[0], config=settings) as one,
            await Client.connect(running.addresses[0], config=settings) as other,
        ):
            stuck = [asyncio.ensure_future(read(one, "slow")) for _ in range(2)]
            await until(lambda: process().sending.pulls.place is not None)
            async with asyncio.timeout(60):
                assert await read(other, "quick") == 1
                assert await asyncio.gather(*stuck) == [1, 1]
    (line,) = caplog.messages
    assert "'quick'" in line and "4 s" in line and "Flow.process_send_budget" in line


async def test_a_client_whose_batches_are_small_again_waits_for_no_room() -> None:
    pulled = Pulled()
    settings = narrow(process_send_budget=PULL_BUDGET)
    async with connected(taker(), "tcp", client_config=settings) as client:
        for size in (SIZE, 64, 64, 64, 64):
            async for _ in client.exchange("take", pulled(1, size), schema=SCHEMA):
                pass
        assert client.link.sizes["take"] == 0


@pytest.mark.parametrize("end", ["closed", "dropped", "failed", "cancelled", "lost"])
async def test_room_for_input_is_given_back_at_each_end(end: str) -> None:
    """The fixture looks whether all is given back."""
    pulled, failing = Pulled(), asyncio.Event()
    before = process().sending.used

    async def waits() -> AsyncIterator[pa.RecordBatch]:
        yield batch_of(SIZE)
        await failing.wait()
        raise ValueError("no more")

    settings = narrow(process_send_budget=MiB)
    async with connected(taker(), "tcp", client_config=settings) as client:
        async for _ in client.exchange("take", pulled(1), schema=SCHEMA):
            pass
        stream = client.exchange("take", waits(), schema=SCHEMA)
        assert (await anext(stream)).num_rows == 1
        await until(lambda: process().sending.used >= before + SIZE)  # for the second one
        if end == "closed":
            await stream.aclose()
        elif end == "dropped":
            del stream
        elif end == "failed":
            failing.set()
            with pytest.raises(ValueError, match="no more"):
                await anext(stream)
        elif end == "cancelled":
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        else:
            client.connection.close_soon()
        if end != "lost":
            await until(lambda: process().sending.used == before)
