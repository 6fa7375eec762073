"""Many answers that one thread, or one task, reads in an order that none of them knows.

Those that nobody reads yet may take all of every budget: the one that is waited for comes all the
same.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from aqueduct import Service
from aqueduct.config import Config, Flow, Timing
from aqueduct.endpoint.accounts import process
from aqueduct.protocol.common.context import ConnectionContext
from tests.support.calls import connected, sync_client
from tests.support.selection import mostly_long

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

LARGE_EXCHANGES, LARGE_ROWS, LARGE_PARTS = 64, 32 * KiB, 4
LARGE = Config(
    flow=replace(NARROW.flow, process_receive_budget=256 * MiB, process_send_budget=256 * MiB),
    timing=Timing(progress_deadline=100, stall_deadline=100),
)
"""A handler holds an eighth of the budget with one batch. Nobody goes on because of time."""

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
@pytest.mark.parametrize(
    ("carrier", "name"),
    mostly_long(
        itertools.product(CARRIERS[1:], ("part", "async part")),
        *(("tcp", "part"), ("quic", "async part")),
    ),
)
def test_one_thread_merges_256_sources_of_one_connection(carrier: str, name: str) -> None:
    with sync_client(service(), carrier, config=NARROW) as client:
        sources = [client.source(name) for _ in range(SOURCES)]
        merged = [first_of(batch) for batch in heapq.merge(*sources, key=first_of)]
    assert merged == sorted(list(range(PARTS)) * SOURCES)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("carrier", mostly_long(CARRIERS, "tcp", "quic"))
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
@pytest.mark.parametrize(
    ("carrier", "name"),
    mostly_long(
        itertools.product(CARRIERS[1:], ("echo", "async echo", "each", "async each")),
        *(("unix", "echo"), ("tls", "each"), ("quic", "async each")),
    ),
)
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


def large_exchanges(held: list[int], config: Config) -> Service:
    """Handlers that hold a batch until its answer is read; ``held``: what the service holds."""
    found = Service("merge", config=config)
    others = set(process().receiving.members)  # of connections that nothing has freed yet

    def look() -> None:
        members = set(process().receiving.members) - others
        servers = [each for each in members if isinstance(each, ConnectionContext) and each.side]
        held.append(max(each.budget_used for each in servers))

    @found.handler("echo", input=SCHEMA, output=SCHEMA)
    def echo(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            look()
            yield batch

    @found.handler("async echo", input=SCHEMA, output=SCHEMA)
    async def async_echo(
        batches: AsyncIterator[pa.RecordBatch],
    ) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            look()
            yield batch

    @found.handler("each", input=SCHEMA, output=SCHEMA)
    def each(batch: pa.RecordBatch) -> pa.RecordBatch:
        look()
        return batch

    @found.handler("pairs", input=SCHEMA, output=SCHEMA)
    def pairs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch, other in zip(batches, batches, strict=True):
            look()
            yield batch
            yield other

    return found


def large_parts() -> Iterator[pa.RecordBatch]:
    for index in range(LARGE_PARTS):
        yield pa.record_batch([pa.array([index] * LARGE_ROWS, pa.int64())], schema=SCHEMA)


WAYS = (
    *((carrier, "echo") for carrier in CARRIERS),
    *(("tcp", name) for name in ("async echo", "each", "pairs")),
)
USUAL_WAYS = mostly_long(
    WAYS, *(way for way in WAYS if way not in (("unix", "echo"), ("tls", "echo"), ("tcp", "echo")))
)

MOST = LARGE.flow.receive_budget + 8 * LARGE_ROWS + 4 * KiB
"""Bytes: the budget, and one batch above it."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("carrier", "name"), USUAL_WAYS[1:])
def test_one_thread_merges_exchanges_whose_batches_are_an_eighth_of_the_budget(
    carrier: str, name: str
) -> None:
    """What is sent for calls that nobody reads leaves room for the one that is waited for."""
    held: list[int] = []
    with sync_client(large_exchanges(held, LARGE), carrier, config=LARGE) as client:
        answers = [
            client.exchange(name, large_parts(), schema=SCHEMA) for _ in range(LARGE_EXCHANGES)
        ]
        merged = [first_of(batch) for batch in heapq.merge(*answers, key=first_of)]
    assert merged == sorted(list(range(LARGE_PARTS)) * LARGE_EXCHANGES)
    assert max(held) <= MOST


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("carrier", "name"), USUAL_WAYS)
async def test_one_task_reads_exchanges_of_large_batches_last_one_first(
    carrier: str, name: str
) -> None:
    held: list[int] = []
    async with connected(large_exchanges(held, LARGE), carrier) as client:
        answers = [
            client.exchange(name, large_parts(), schema=SCHEMA) for _ in range(LARGE_EXCHANGES)
        ]
        for index in range(LARGE_PARTS):
            found = [first_of(await anext(stream)) for stream in reversed(answers)]
            assert found == [index] * LARGE_EXCHANGES
        for stream in answers:
            assert await anext(stream, None) is None
        assert client.link.under_way.used == 0
    assert max(held) <= MOST


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("budget", "name"),
    mostly_long(
        itertools.product((2 * MiB, 4 * MiB), ("echo", "async echo", "each")),
        *((2 * MiB, "echo"), (4 * MiB, "async echo"), (2 * MiB, "each")),
    ),
)
def test_calls_that_are_read_last_one_first_end_although_the_room_for_answers_is_narrow(
    name: str, budget: int
) -> None:
    """The second time it is known how large answers are: handlers without input have the room."""
    settings = replace(LARGE, flow=replace(LARGE.flow, process_send_budget=budget))
    made: list[int] = []
    with sync_client(large_exchanges(made, settings), "tcp", config=LARGE) as client:
        for _ in range(2):
            answers = [
                client.exchange(name, large_parts(), schema=SCHEMA) for _ in range(LARGE_EXCHANGES)
            ]
            for stream in reversed(answers):
                assert [first_of(batch) for batch in stream] == list(range(LARGE_PARTS))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", ["thread", "task"])
async def test_a_client_that_merges_sources_holds_its_budget_and_what_its_reader_has(
    form: str,
) -> None:
    """A merge has one batch of each stream in its hands, whatever the budget; nothing else of its
    calls exceeds that."""
    sources, parts, size = 32, 3, 256 * KiB
    narrow = Config(flow=Flow(receive_budget=MiB, channel_receive_bytes=MiB, read_ahead=MiB // 2))
    service, before, held = Service("merge"), set(process().receiving.members), [0]

    @service.handler("part", kind="source", output=SCHEMA)
    def part() -> Iterator[pa.RecordBatch]:
        for index in range(parts):
            yield pa.record_batch([pa.array([index] * (size // 8), pa.int64())], schema=SCHEMA)

    def seen(batch: pa.RecordBatch) -> int:
        members = set(process().receiving.members) - before
        clients = [
            each for each in members if isinstance(each, ConnectionContext) and not each.side
        ]
        held.append(max(each.budget_used for each in clients))
        return first_of(batch)

    if form == "thread":

        def merge() -> list[int]:
            with sync_client(service, "tcp", config=narrow) as client:
                streams = [client.source("part") for _ in range(sources)]
                return [seen(batch) for batch in heapq.merge(*streams, key=seen)]

        merged = await asyncio.to_thread(merge)
    else:
        async with connected(service, "tcp", client_config=narrow) as client:
            streams = [client.source("part") for _ in range(sources)]
            merged = []
            for _ in range(parts):
                heads = [await anext(stream) for stream in reversed(streams)]
                merged += [seen(batch) for batch in heads]
            del heads
            for stream in streams:
                assert await anext(stream, None) is None
    assert merged == sorted(list(range(parts)) * sources)
    assert size * sources < max(held) <= MiB + sources * (size + 4 * KiB)
