"""Many calls at once that end in every way there is, seeded: nothing hangs and nothing is left."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.errors import AqueductError
from aqueduct.service.server import RunningService
from tests.support.calls import NUMBERS, config, numbers, served, serving, until
from tests.support.selection import mostly_long

SMALL = config(
    calls={"fragment_bytes": 4096, "in_flight_batches": 3}, timing={"progress_deadline": 5.0}
)
EXCHANGES = ["function", "coroutine", "generator", "async generator"]


def unruly(seed: int) -> aqueduct.Service:
    """Handlers that fail, end early, answer too much, too little, or late."""
    service = aqueduct.Service("chaos", config=SMALL if seed % 2 else config())
    chance = random.Random(seed)

    def answers(batch):
        if chance.random() < 0.01:
            raise ValueError("by chance")
        return [batch] * chance.choice([0, 1, 1, 3])

    @service.handler("function", concurrency=3)
    def function(batch):
        answers(batch)
        return batch

    @service.handler("coroutine", concurrency=3)
    async def coroutine(batch):
        answers(batch)
        await asyncio.sleep(chance.random() * 0.003)
        return batch

    @service.handler("generator")
    def generator(batches, call):
        for batch in batches:
            yield from answers(batch)
            if chance.random() < 0.01:
                return

    @service.handler("async generator")
    async def async_generator(batches, call):
        async for batch in batches:
            for answer in answers(batch):
                yield answer
            if chance.random() < 0.01:
                return

    @service.handler("sink", kind="sink")
    def sink(batches):
        for batch in batches:
            if not answers(batch):
                return

    @service.handler("source", kind="source", output=NUMBERS)
    def source(call):
        for _ in range(chance.choice([0, 1, 50, 300])):
            yield numbers(*range(chance.choice([0, 1, 2000])))

    return service


def some_batches(chance):
    return [
        numbers(*range(chance.choice([0, 1, 3000]))) for _ in range(chance.choice([0, 1, 5, 40]))
    ]


async def unruly_input(chance, batches):
    for batch in batches:
        if chance.random() < 0.1:
            await asyncio.sleep(0.001)
        if chance.random() < 0.01:
            raise KeyError("by chance")
        yield batch


async def one_call(client, chance):
    handler = chance.choice([*EXCHANGES, "sink", "source"])
    batches = some_batches(chance)
    given = unruly_input(chance, batches) if chance.random() < 0.5 else batches
    deadline = chance.choice([None, None, None, 0.02, 0.5])
    if handler == "sink":
        await client.sink(handler, given, schema=NUMBERS, deadline=deadline)
        return
    if handler == "source":
        stream = client.source(handler, deadline=deadline)
    else:
        stream = client.exchange(
            handler, given, schema=NUMBERS, deadline=deadline, in_flight=chance.choice([1, 2, 8])
        )
    most = chance.choice([0, 3, 10**9, 10**9])
    seen = 0
    async with asyncio.timeout(chance.choice([0.01, None, None, None])):
        async for _ in stream:
            seen += 1
            if seen > most:
                break
    if chance.random() < 0.5:
        await stream.aclose()  # otherwise it is dropped


async def caller(running: RunningService, service: aqueduct.Service, chance: random.Random) -> None:
    async def connect():
        return await Client.connect(running.addresses[0], config=service.config)

    client = await connect()
    for _ in range(40):
        if chance.random() < 0.04:
            if chance.random() < 0.5:
                await client.close()
            else:
                client.connection.close_soon(3, "by chance")
            client = await connect()
        try:
            await one_call(client, chance)
        except (AqueductError, KeyError, TimeoutError):
            pass
    await client.close()


@pytest.mark.parametrize("seed", mostly_long(range(4), 0))
@pytest.mark.parametrize("carrier", ["memory", "quic", "draft", "draft-memory"])
async def test_nothing_hangs_and_nothing_is_left(carrier, seed, caplog):
    service = unruly(seed)
    async with serving(service, carrier) as running:
        callers = (caller(running, service, random.Random(f"{seed} {n}")) for n in range(5))
        async with asyncio.timeout(50):
            await asyncio.gather(*callers)
        await until(lambda: not service.counters()["open_calls"])
        await until(lambda: not running.connections)
        bench = running._pool
        await until(lambda: bench.threads == len(bench._idle))
    counters = service.counters()
    assert counters["calls"] > 100
    assert counters["cancelled"] and counters["failed"]
    complaints = [record for record in caplog.records if record.name == "asyncio"]
    assert complaints == []


@pytest.mark.parametrize("seed", range(2))
def test_nothing_hangs_with_sync_clients(seed):
    service = unruly(seed)

    def call(client, chance):
        handler = chance.choice([*EXCHANGES, "source"])
        deadline = chance.choice([None, None, 0.02, 0.5])
        if handler == "source":
            stream = client.source(handler, deadline=deadline)
        else:
            batches = iter(some_batches(chance))
            stream = client.exchange(handler, batches, schema=NUMBERS, deadline=deadline)
        most = chance.choice([0, 3, 10**9])
        for seen, _ in enumerate(stream):
            if seen == most:
                break
        if chance.random() < 0.5:
            stream.close()

    def caller(client, chance, ended):
        for _ in range(30):
            try:
                call(client, chance)
            except AqueductError:
                pass
        ended.append(True)

    ended: list[bool] = []
    with served(service) as address, aqueduct.SyncClient(address, config=service.config) as client:
        threads = [
            threading.Thread(target=caller, args=(client, random.Random(f"{seed} {n}"), ended))
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert len(ended) == 4
        asyncio.run(until(lambda: not service.counters()["open_calls"]))
