"""What a compressed batch unpacks to counts against the receive budget while it is worked on."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterator

import pyarrow as pa
import pytest

from aqueduct import Service
from aqueduct.config import Config, Flow, Timing
from aqueduct.endpoint.accounts import process
from aqueduct.protocol.common.context import ConnectionContext
from tests.support.calls import config, connected, sync_client, until

KiB, MiB = 1 << 10, 1 << 20
SCHEMA = pa.schema([("x", pa.int64())])
SIZE = 8 * MiB


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["thread", "async", "each"])
async def test_a_compressed_batch_is_charged_what_it_unpacks_to(name: str) -> None:
    batch = pa.record_batch([pa.array([7] * (SIZE // 8), pa.int64())], schema=SCHEMA)
    service, seen = Service("unpacks"), []

    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(process().receiving.used)
        return batch.slice(0, 1)

    @service.handler("thread", input=SCHEMA, output=SCHEMA)
    def thread(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield look(batch)

    @service.handler("async", input=SCHEMA, output=SCHEMA)
    async def in_task(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield look(batch)

    @service.handler("each", input=SCHEMA, output=SCHEMA)
    def each(batch: pa.RecordBatch) -> pa.RecordBatch:
        return look(batch)

    async with connected(service, "tcp") as client:
        before = process().receiving.used
        told = asyncio.Event()

        async def batches() -> AsyncIterator[pa.RecordBatch]:
            yield batch.slice(0, 1)
            await told.wait()  # what leaves before the accept message comes cannot be compressed
            yield batch

        stream = client.exchange(name, batches(), schema=SCHEMA, compression="lz4")
        await anext(stream)
        told.set()
        assert (await anext(stream)).num_rows == 1
        assert await anext(stream, None) is None
        counters = service.counters()
        await until(lambda: process().receiving.used <= before)
    assert counters["bytes_in"] < MiB  # it came compressed
    assert seen[1] - before >= SIZE


CALLS, PARTS, PART = 24, 3, 2 * MiB
NARROW = Config(
    flow=Flow(receive_budget=4 * MiB, channel_receive_bytes=MiB, read_ahead=MiB),
    timing=Timing(progress_deadline=100, stall_deadline=100),
)
"""Two batches fit. Nobody goes on because of time."""
MOST = NARROW.flow.receive_budget + PART + CALLS * 80 * KiB
"""Bytes: the budget, one batch above it, and for each call a small message that comes in parts."""


def held_by(side: int) -> int:
    """The most that a connection holds: of clients (0) or services (1)."""
    members = [each for each in process().receiving.members if isinstance(each, ConnectionContext)]
    return max(each.budget_used for each in members if each.wake and each.side == side)


def part_of(index: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array([index] * (PART // 8), pa.int64())], schema=SCHEMA)


def narrow_service(look: Callable[[], object], settings: Config = NARROW) -> Service:
    service = Service("narrow", config=settings)

    @service.handler("thread", kind="sink", input=SCHEMA)
    def thread(batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
        rows = 0
        for batch in batches:
            look()
            rows += batch.num_rows
        return {"rows": rows}

    @service.handler("async", kind="sink", input=SCHEMA)
    async def in_task(batches: AsyncIterator[pa.RecordBatch]) -> dict[str, int]:
        rows = 0
        async for batch in batches:
            look()
            await asyncio.sleep(0)
            rows += batch.num_rows
        return {"rows": rows}

    @service.handler("each", input=SCHEMA, output=SCHEMA)
    def each(batch: pa.RecordBatch) -> pa.RecordBatch:
        look()
        return batch.slice(0, 1)

    @service.handler("source", kind="source", output=SCHEMA)
    def source() -> Iterator[pa.RecordBatch]:
        for index in range(PARTS):
            yield part_of(index)

    return service


async def learn(client: object) -> None:
    """Later calls send compressed batches from the first on: the service agrees again."""
    assert await client.sink("thread", [part_of(0)], compression="zstd")  # type: ignore[attr-defined]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["thread", "async", "each"])
async def test_handlers_of_compressed_batches_stay_within_the_budget(name: str) -> None:
    seen: list[int] = []
    service = narrow_service(lambda: seen.append(held_by(1)))
    async with connected(service, "tcp", client_config=config()) as client:
        await learn(client)
        batches = [part_of(index) for index in range(PARTS)]

        async def one() -> int:
            if name != "each":
                counters = await client.sink(name, batches, schema=SCHEMA, compression="zstd")
                return counters["rows"]
            stream = client.exchange(name, batches, schema=SCHEMA, compression="zstd")
            return sum([batch.num_rows async for batch in stream])

        rows = await asyncio.gather(*(one() for _ in range(CALLS)))
        assert rows == [PARTS * (1 if name == "each" else PART // 8)] * CALLS
        assert not process().receiving.pulling
        await until(lambda: held_by(1) < MiB)
    assert PART < max(seen) <= MOST


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", ["tasks", "one task", "thread"])
async def test_readers_of_compressed_answers_stay_within_the_budget(form: str) -> None:
    """But for the batches that a reader keeps while it reads others."""
    seen: list[int] = []
    service = narrow_service(lambda: None, config())

    def first_of(batch: pa.RecordBatch) -> int:
        seen.append(held_by(0))
        return int(batch.column(0)[0].as_py())

    def merge() -> list[int]:
        with sync_client(service, "tcp", config=NARROW) as client:
            streams = [client.source("source", compression="zstd") for _ in range(CALLS)]
            return [first_of(batch) for batch in heapq.merge(*streams, key=first_of)]

    if form == "thread":
        assert await asyncio.to_thread(merge) == sorted(list(range(PARTS)) * CALLS)
        assert max(seen) <= MOST + CALLS * PART
        return
    async with connected(service, "tcp", client_config=NARROW) as client:
        streams = [client.source("source", compression="zstd") for _ in range(CALLS)]
        if form == "one task":
            for index in range(PARTS):
                heads = [await anext(stream) for stream in streams]
                assert [first_of(batch) for batch in heads] == [index] * CALLS
            for stream in streams:
                assert await anext(stream, None) is None
            assert max(seen) <= MOST + CALLS * PART
            return

        async def read(stream: AsyncIterator[pa.RecordBatch]) -> list[int]:
            return [first_of(batch) async for batch in stream]

        found = await asyncio.gather(*map(read, streams))
        assert found == [list(range(PARTS))] * CALLS
    assert max(seen) <= MOST


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", ["thread", "async"])
async def test_a_batch_is_unpacked_without_room_if_there_is_none_for_long(form: str) -> None:
    """The handler that has the batch above the budget waits for one that needs room."""
    timing = Timing(stall_deadline=0.2)
    settings = Config(flow=Flow(receive_budget=MiB, channel_receive_bytes=MiB // 2), timing=timing)
    come = asyncio.Event()
    service = narrow_service(lambda: loop.call_soon_threadsafe(come.set), settings)
    loop = asyncio.get_running_loop()

    @service.handler("waits", kind="sink", input=SCHEMA)
    async def waits(batches: AsyncIterator[pa.RecordBatch]) -> None:
        async for batch in batches:
            started.set()
            await come.wait()
            assert batch.num_rows

    started = asyncio.Event()
    async with connected(service, "tcp", client_config=config()) as client:
        await learn(client)
        come.clear()
        batches = [part_of(0)]
        waiting = asyncio.ensure_future(
            client.sink("waits", batches, schema=SCHEMA, compression="zstd")
        )
        await started.wait()
        async with asyncio.timeout(30):
            counters = await client.sink(form, batches, schema=SCHEMA, compression="zstd")
            assert counters["rows"] == PART // 8
            await waiting


@pytest.mark.timeout(60)
async def test_a_call_that_ends_while_its_batch_waits_leaves_nothing_behind() -> None:
    settings = Config(
        flow=Flow(receive_budget=MiB, channel_receive_bytes=MiB // 2),
        timing=Timing(stall_deadline=100),
    )
    release, started = asyncio.Event(), asyncio.Event()
    service = narrow_service(lambda: None, settings)

    @service.handler("waits", kind="sink", input=SCHEMA)
    async def waits(batches: AsyncIterator[pa.RecordBatch]) -> None:
        async for batch in batches:
            started.set()
            await release.wait()
            assert batch.num_rows

    async with connected(service, "tcp", client_config=config()) as client:
        await learn(client)
        batches = [part_of(0)]
        calls = []
        for name in ("waits", "async"):
            call = client.sink(name, batches, schema=SCHEMA, compression="zstd")
            calls.append(asyncio.ensure_future(call))
            await started.wait()
        await until(lambda: process().receiving.pulling)
        calls[1].cancel()
        await until(lambda: not process().receiving.pulling)
        release.set()
        await calls[0]
        await until(lambda: held_by(1) < MiB // 4)
