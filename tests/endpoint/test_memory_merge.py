"""Many answers that one thread, or one task, reads in an order that none of them knows.

Those that nobody reads yet may take all of every budget: the one that is waited for comes all the
same.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from aqueduct import Service
from aqueduct.config import Config, Flow, Timing
from tests.support.calls import connected, sync_client

SCHEMA = pa.schema([("x", pa.int64())])
KiB, MiB = 1 << 10, 1 << 20
SOURCES, PARTS, ROWS = 256, 3, 16 * KiB
NARROW = Config(
    flow=Flow(
        receive_budget=2048 * KiB,
        channel_receive_bytes=1024 * KiB,
        read_ahead=512 * KiB,
        connection_high_water=2048 * KiB,
        channel_high_water=1024 * KiB,
        process_receive_budget=4096 * KiB,
        process_send_budget=4096 * KiB,
    )
)
"""Budgets of a fraction of what 256 sources have at once."""

EXCHANGES, EXCHANGED = 64, 12
BRIEF = Config(
    flow=replace(NARROW.flow, receive_budget=4096 * KiB, process_receive_budget=64 * MiB),
    timing=Timing(progress_deadline=10),
)
"""Nobody waits for ``stall_deadline`` often."""

CARRIERS = ("memory", "unix", "tcp", "tls", "quic")


def service() -> Service:
    found = Service("merge", config=NARROW)

    @found.handler("part", kind="source", output=SCHEMA)
    def part(call: object) -> Iterator[pa.RecordBatch]:
        for index in range(PARTS):
            column = pa.array([index] + [0] * (ROWS - 1), pa.int64())
            yield pa.record_batch([column], schema=SCHEMA)

    @found.handler("async part", kind="source", output=SCHEMA)
    async def async_part(call: object) -> AsyncIterator[pa.RecordBatch]:
        for batch in part(call):
            yield batch

    return found


def first_of(batch: pa.RecordBatch) -> int:
    return int(batch.column(0)[0].as_py())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("carrier", CARRIERS[1:])
@pytest.mark.parametrize("name", ["part", "async part"])
def test_one_thread_merges_256_sources_of_one_connection(carrier: str, name: str) -> None:
    with sync_client(service(), carrier, config=NARROW) as client:
        sources = [client.source(name) for _ in range(SOURCES)]
        merged = [first_of(batch) for batch in heapq.merge(*sources, key=first_of)]
    assert merged == sorted(list(range(PARTS)) * SOURCES)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_one_task_merges_256_sources_of_one_connection(carrier: str) -> None:
    async with connected(service(), carrier) as client:
        sources = [client.source("part") for _ in range(SOURCES)]
        heads = [(first_of(await anext(source)), index) for index, source in enumerate(sources)]
        merged = []
        heapq.heapify(heads)
        while heads:
            value, index = heapq.heappop(heads)
            merged.append(value)
            batch = await anext(sources[index], None)
            if batch is not None:
                heapq.heappush(heads, (first_of(batch), index))
    assert merged == sorted(list(range(PARTS)) * SOURCES)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("carrier", CARRIERS[1:])
@pytest.mark.parametrize("name", ["echo", "async echo", "each", "async each"])
def test_one_thread_merges_64_exchanges_of_one_connection(carrier: str, name: str) -> None:
    """Handlers hold batches whose answers nobody reads: those that are waited for go on."""
    found = Service("merge", config=BRIEF)

    @found.handler("echo", input=SCHEMA, output=SCHEMA)
    def echo(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    @found.handler("async echo", input=SCHEMA, output=SCHEMA)
    async def async_echo(
        batches: AsyncIterator[pa.RecordBatch],
    ) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield batch

    @found.handler("each", input=SCHEMA, output=SCHEMA)
    def each(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    @found.handler("async each", input=SCHEMA, output=SCHEMA)
    async def async_each(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    def parts() -> Iterator[pa.RecordBatch]:
        for index in range(EXCHANGED):
            yield pa.record_batch([pa.array([index] * ROWS, pa.int64())], schema=SCHEMA)

    with sync_client(found, carrier, config=BRIEF) as client:
        answers = [client.exchange(name, parts(), schema=SCHEMA) for _ in range(EXCHANGES)]
        merged = [first_of(batch) for batch in heapq.merge(*answers, key=first_of)]
    assert merged == sorted(list(range(EXCHANGED)) * EXCHANGES)
