"""What is received counts from its first byte until its handler or reader is done with it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pyarrow as pa
import pytest

from aqueduct import Client, Service
from aqueduct.config import Config
from aqueduct.endpoint import connect
from aqueduct.endpoint.accounts import process
from aqueduct.errors import AqueductError, ConnectFailed, ConnectionLost
from aqueduct.rpc.keys import BATCH, FRAGMENT
from aqueduct.rpc.request import CallHead
from tests.support.calls import config, connected, serving, sync_client, until, until_seen

KiB, MiB = 1 << 10, 1 << 20
SCHEMA = pa.schema([("x", pa.int64())])


def batch_of(size: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(size // 8), pa.int64())], schema=SCHEMA)


def narrow(**flow: int) -> Config:
    """Budgets of a few MiB, and batches in pieces of 256 KiB."""
    flow = {"receive_budget": 8 * MiB, "channel_receive_bytes": 2 * MiB, **flow}
    flow.setdefault("read_ahead", 256 * KiB)
    return config(flow=flow, calls={"fragment_bytes": 256 * KiB}, timing={"stall_deadline": 1.0})


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does, in the end nothing is charged to the process."""
    gc.collect()  # of tests before
    account, sending = process().receiving, process().sending
    before = account.used, sending.used, process().connections
    yield
    until_seen(lambda: before == (account.used, sending.used, process().connections))
    assert account.lent == 0
    assert not account.waiting and account.place is None
    assert not sending.waiting


class Peak:
    """The most that connections of the process had received at once, seen by handlers."""

    def __init__(self) -> None:
        self.bytes = 0

    def look(self) -> None:
        self.bytes = max(self.bytes, process().receiving.used)


@pytest.mark.parametrize("carrier", ["tcp", "unix", "quic"])
async def test_sinks_of_one_connection_stay_within_its_budget(carrier: str) -> None:
    """20 sinks, each with one batch as large as the budget: one at a time goes on above it."""
    settings = narrow()
    service, peak = Service("sinks", config=settings), Peak()

    @service.handler("count", kind="sink", input=SCHEMA)
    def count(batches: Iterator[pa.RecordBatch], call: Any) -> dict[str, int]:
        rows = 0
        for batch in batches:
            peak.look()
            rows += batch.num_rows
        return {"rows": rows}

    size = 6 * MiB
    async with connected(service, carrier, client_config=config()) as client:
        batch = batch_of(size)
        results = await asyncio.gather(
            *(client.sink("count", [batch], schema=SCHEMA) for _ in range(20))
        )
    assert [result["rows"] for result in results] == [size // 8] * 20
    assert size < peak.bytes <= settings.flow.receive_budget + size + MiB


async def test_async_handlers_and_functions_of_one_batch_stay_within_the_budget() -> None:
    settings = narrow()
    service, peak = Service("all", config=settings), Peak()
    size = 3 * MiB

    @service.handler("sink", kind="sink", input=SCHEMA)
    async def sink(batches: AsyncIterator[pa.RecordBatch], call: Any) -> dict[str, int]:
        rows = 0
        async for batch in batches:
            peak.look()
            await asyncio.sleep(0)
            rows += batch.num_rows
        return {"rows": rows}

    @service.handler("function", input=SCHEMA, output=SCHEMA, concurrency=8)
    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        peak.look()
        return batch.slice(0, 1)

    async def exchange(client: Client) -> int:
        stream = client.exchange("function", [batch_of(size)] * 4, schema=SCHEMA)
        return sum([answer.num_rows async for answer in stream])

    async with connected(service, "tcp", client_config=config()) as client:
        async with asyncio.timeout(60):
            found: list[Any] = await asyncio.gather(
                *(client.sink("sink", [batch_of(size)] * 3, schema=SCHEMA) for _ in range(6)),
                *(exchange(client) for _ in range(6)),
            )
    assert [result["rows"] for result in found[:6]] == [3 * size // 8] * 6
    assert found[6:] == [4] * 6
    assert peak.bytes <= settings.flow.receive_budget + size + MiB


async def test_handlers_that_collect_more_than_the_budget_finish() -> None:
    """What they keep is shown, and nobody waits for it."""
    service = Service("collect", config=narrow())
    kept: list[int] = []

    @service.handler("collect", kind="sink", input=SCHEMA)
    def collect(batches: Iterator[pa.RecordBatch], call: Any) -> dict[str, int]:
        found = list(batches)
        kept.append(process().receiving.kept)
        return {"rows": sum(batch.num_rows for batch in found)}

    async with connected(service, "unix", client_config=config()) as client:
        async with asyncio.timeout(60):
            results = await asyncio.gather(
                *(
                    client.sink("collect", [batch_of(MiB) for _ in range(16)], schema=SCHEMA)
                    for _ in range(8)
                )
            )
    assert [result["rows"] for result in results] == [16 * MiB // 8] * 8
    assert max(kept) >= 15 * MiB


async def test_a_handler_that_frees_a_batch_gives_its_room_back_before_it_asks_again() -> None:
    service = Service("frees", config=narrow())
    freed, go_on = threading.Event(), threading.Event()
    used: list[int] = []

    @service.handler("free", kind="sink", input=SCHEMA)
    def free(batches: Iterator[pa.RecordBatch], call: Any) -> None:
        batch: Any = next(batches)
        used.append(process().receiving.used)
        del batch
        end = time.monotonic() + 20  # the thread that has handed it over may hold it a moment more
        while process().receiving.used >= used[0] and time.monotonic() < end:
            time.sleep(0.001)
        used.append(process().receiving.used)
        freed.set()
        go_on.wait(30)

    async with connected(service, "unix", client_config=config()) as client:
        sink = asyncio.create_task(client.sink("free", [batch_of(4 * MiB)], schema=SCHEMA))
        await asyncio.to_thread(freed.wait, 30)
        go_on.set()
        await sink
    assert used[0] >= 4 * MiB > MiB > used[0] - used[1] - 4 * MiB >= 0


async def begin_and_stall(client: Client, handler: str, total: int, size: int) -> Any:
    """A sink whose first batch is said to have ``total`` bytes, of which ``size`` come."""
    connection = client.connection
    headers, payload = CallHead(handler=handler, kind="sink", schema=SCHEMA).encode()
    sender, output, status = connection.call(payload, headers, feeds=True)
    assert sender is not None
    await output.receive()  # before that nobody can tell how large a batch is
    sender.post(bytes(size), ((BATCH, b"0"), (FRAGMENT, b"0/%d" % total)))
    return sender, output, status


@pytest.mark.parametrize("above", [True, False])
async def test_a_peer_that_dribbles_delays_another_no_longer_than_allowed(above: bool) -> None:
    """Whether it has the place above the budget, or a lie of it within: it fails as busy."""
    settings = narrow(receive_budget=4 * MiB)
    service = Service("dribble", config=settings)

    @service.handler("count", kind="sink", input=SCHEMA)
    def count(batches: Iterator[pa.RecordBatch], call: Any) -> dict[str, int]:
        return {"rows": sum(batch.num_rows for batch in batches)}

    async with connected(service, "tcp", client_config=config()) as client:
        held = await begin_and_stall(client, "count", (5 if above else 3) * MiB, 128 * KiB)
        await until(lambda: process().receiving.used > 3 * MiB)
        if not above:
            held += await begin_and_stall(client, "count", 3 * MiB, 128 * KiB)
            await until(lambda: process().receiving.used > 6 * MiB)
        async with asyncio.timeout(30):
            result = await client.sink("count", [batch_of(3 * MiB)], schema=SCHEMA)
            assert result["rows"] == 3 * MiB // 8
            message = await held[2].receive()
        assert b"busy" in dict(message.headers).values()
        text = str(message.headers) + bytes(message.payload).decode(errors="replace")
        assert "Flow.receive_budget" in text
        assert "Flow.stall_rate" in text


async def test_a_dribbled_batch_within_the_budget_is_left_alone_while_nobody_waits() -> None:
    service = Service("dribble", config=narrow())

    @service.handler("count", kind="sink", input=SCHEMA)
    def count(batches: Iterator[pa.RecordBatch], call: Any) -> dict[str, int]:
        return {"rows": sum(batch.num_rows for batch in batches)}

    async with connected(service, "tcp", client_config=config()) as client:
        held = await begin_and_stall(client, "count", 20 * MiB, 128 * KiB)
        await until(lambda: process().receiving.used > 20 * MiB)
        # More calls, and more time than a dribbling peer has while others wait.
        began = time.monotonic()
        while time.monotonic() - began < 2.5:
            result = await client.sink("count", [batch_of(8 * KiB)], schema=SCHEMA)
            assert result["rows"] == 1024
        assert held[2].error is None
        assert process().receiving.used > 20 * MiB


@pytest.mark.parametrize("end", ["cancel", "lose", "raise", "stop"])
async def test_whatever_ends_a_call_gives_back_all_that_it_held(end: str) -> None:
    """``nothing_is_left`` looks at the accounts."""
    service = Service("ends", config=narrow())
    waits = asyncio.Event()

    @service.handler("sink", kind="sink", input=SCHEMA)
    async def sink(batches: AsyncIterator[pa.RecordBatch], call: Any) -> None:
        async for _ in batches:
            waits.set()
            if end == "raise":
                raise ValueError("no")
            await asyncio.sleep(3600)

    @service.handler("echo", input=SCHEMA, output=SCHEMA)
    def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    async with serving(service, "tcp") as running:
        client = await Client.connect(running.addresses[0], config=config())
        batches = [batch_of(MiB) for _ in range(12)]
        task = asyncio.create_task(client.sink("sink", batches, schema=SCHEMA))
        answers = client.exchange("echo", batches, schema=SCHEMA)
        assert (await anext(answers)).num_rows == MiB // 8
        await asyncio.wait_for(waits.wait(), 30)
        if end == "cancel":
            task.cancel()
            await answers.aclose()
        elif end == "lose":
            client.connection.carrier.close(1, "", linger=0.0)
        elif end == "stop":
            await client.close()
        with pytest.raises((AqueductError, asyncio.CancelledError)):
            await asyncio.wait_for(task, 30)
        del answers
        await client.close()


def test_answers_of_a_sync_client_that_nobody_reads_are_given_back() -> None:
    service = Service("answers", config=narrow())

    @service.handler("part", kind="source", output=SCHEMA)
    def part(call: Any) -> Iterator[pa.RecordBatch]:
        for _ in range(6):
            yield batch_of(MiB)

    with sync_client(service, "tcp", config=narrow()) as client:
        read, left, dropped = (client.source("part") for _ in range(3))
        assert len(list(read)) == 6
        assert next(left).num_rows == next(dropped).num_rows == MiB // 8
        del dropped
        left.close()
        assert len(list(client.source("part"))) == 6


async def test_one_connection_holds_no_more_than_half_while_another_waits() -> None:
    """A handler that keeps its batch has what its connection holds: the others share the rest."""
    budget = 8 * MiB
    service = Service("half", config=narrow(receive_budget=64 * MiB, process_receive_budget=budget))
    release, waiting = threading.Event(), threading.Semaphore(0)

    @service.handler("hold", kind="sink", input=SCHEMA)
    def hold(batches: Iterator[pa.RecordBatch], call: Any) -> None:
        for _ in batches:
            waiting.release()
            release.wait(30)

    async with serving(service, "tcp") as running:
        address = running.addresses[0]
        clients = [await Client.connect(address, config=config()) for _ in range(3)]
        greedy, first, second = clients
        size = budget // 4
        tasks = [
            asyncio.create_task(greedy.sink("hold", [batch_of(size)] * 2, schema=SCHEMA))
            for _ in range(4)
        ]
        for _ in range(3):
            assert await asyncio.to_thread(waiting.acquire, timeout=30)
        tasks += [
            asyncio.create_task(client.sink("hold", [batch_of(size)], schema=SCHEMA))
            for client in (first, second)
        ]
        server = max(running.connections, key=lambda each: each.core.budget.budget_used).core.budget
        await until(lambda: len(process().receiving.waiting) > 1)
        room = budget // 2 - server.budget_used
        assert room < size and not server.fits_process(room + 1)
        release.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        for client in clients:
            await client.close()


async def test_a_process_takes_no_more_connections_than_its_limit() -> None:
    limit = process().connections + 4
    service = Service("crowd", config=config(limits={"connections": limit}))
    async with serving(service, "tcp") as running:
        address = running.addresses[0]
        one = await Client.connect(address)
        two = await Client.connect(address)
        with pytest.raises(ConnectionLost, match=r"Limits\.connections"):
            await Client.connect(address)
        with pytest.raises(ConnectFailed, match=r"Limits\.connections"):
            await connect(address, config=service.config)
        await one.close()
        await until(lambda: process().connections == limit - 2)
        three = await Client.connect(address)
        await three.close()
        await two.close()


async def test_a_call_of_one_batch_counts_until_its_handler_has_returned() -> None:
    service = Service("unary", config=narrow())
    begun, go_on = threading.Event(), threading.Event()

    @service.handler("wait", input=SCHEMA, output=SCHEMA)
    def wait(batch: pa.RecordBatch) -> pa.RecordBatch:
        begun.set()
        go_on.wait(30)
        return batch.slice(0, 1)

    async with connected(service, "tcp", client_config=config()) as client:
        asked = asyncio.create_task(client.call("wait", batch_of(128 * KiB)))
        await asyncio.to_thread(begun.wait, 30)
        assert process().receiving.used >= 128 * KiB
        go_on.set()
        assert (await asked).num_rows == 1


def test_what_is_charged_is_shown() -> None:
    with sync_client(Service("shown", config=narrow()), "tcp", config=narrow()) as client:
        until_seen(lambda: process().sending.used == 0)  # the first frames of both sides have left
        shot = client._client.connection.snapshot()
    flow = narrow().flow
    assert shot.process_receive_budget == flow.process_receive_bytes
    assert shot.process_send_budget == flow.process_send_bytes
    assert (shot.process_receive_used, shot.process_send_used, shot.process_kept) == (0, 0, 0)
    assert f"process 0 of {flow.process_receive_bytes}, 0 kept" in str(shot)


async def test_a_service_tells_what_its_process_holds() -> None:
    async with serving(Service("told"), "tcp") as running:
        found = running.memory()
        assert set(found) == {"received_bytes", "kept_bytes", "sending_bytes", "connections"}
        assert running.state()["memory"] == found
        client = await Client.connect(running.addresses[0])
        assert running.memory()["connections"] == found["connections"] + 2
        await client.close()


async def test_calls_that_wait_for_their_turn_do_not_fail_while_others_get_theirs() -> None:
    """The last one waits for longer than a call may stand still."""
    patience, work, calls = 3.0, 0.4, 10
    timing = {"progress_deadline": patience, "stall_deadline": 30.0}
    flow = {"receive_budget": 2 * MiB, "read_ahead": 256 * KiB, "process_send_budget": 3 * MiB}
    settings = config(flow=flow, timing=timing, calls={"fragment_bytes": 256 * KiB})
    service = Service("turns", config=settings)

    @service.handler("work", kind="sink", input=SCHEMA)
    def work_on(batches: Iterator[pa.RecordBatch], call: Any) -> None:
        for _ in batches:
            time.sleep(work)

    @service.handler("large", kind="source", output=SCHEMA)
    def large(call: Any) -> Iterator[pa.RecordBatch]:
        yield batch_of(2 * MiB)

    async def read(client: Client, turn: asyncio.Lock) -> int:
        stream = client.source("large")
        rows = 0
        async with turn:
            await asyncio.sleep(work)
            async for batch in stream:
                rows += batch.num_rows
        return rows

    async with connected(service, "tcp", client_config=settings) as client:
        sinks = [client.sink("work", [batch_of(2 * MiB)], schema=SCHEMA) for _ in range(calls)]
        await asyncio.gather(*sinks)
        turn = asyncio.Lock()
        async with turn:
            assert sum([batch.num_rows async for batch in client.source("large")]) == 2 * MiB // 8
        found = await asyncio.gather(*(read(client, turn) for _ in range(calls)))
        assert found == [2 * MiB // 8] * calls
