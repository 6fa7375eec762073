"""What links under calls must reach: silent networks, thousands of cuts, thousands of links."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import resource
import time
import zlib
from collections.abc import AsyncIterator, Iterator

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.config import Relink
from aqueduct.errors import ConnectionLost
from tests.carriers.test_resume import (
    SCHEMA,
    batch,
    exchanged,
    link_of,
    service_of,
    serving,
)
from tests.support.proxy import CuttingProxy, Way
from tests.support.selection import mostly_long

MiB = 1 << 20
KEEP = 60.0
NOTICED = Relink().ack_deadline
"""Seconds until a side knows that its connection moves no byte."""
SLACK = 10.0
"""For a machine that does other things; the deadlines themselves are of the protocol."""


async def through_silence(way: Way, seconds: float) -> tuple[list[str], float]:
    """How a call and an exchange end that meet a proxy which drops the bytes of a way for so long.

    Also the seconds that they took.
    """
    seen: list[int] = []
    async with (
        serving(service_of(seen), "tcp") as running,
        CuttingProxy(running.addresses[0]) as proxy,
    ):
        client = await aqueduct.Client.connect(proxy.address)
        assert await client.call("once", batch(1)) == batch(1)

        async def call() -> None:
            assert await client.call("once", batch(2)) == batch(2)

        async def exchange() -> None:
            assert await exchanged(client, range(10, 40), 10_000) == list(range(10, 40))

        proxy.silent = {way}
        begun = time.monotonic()
        asyncio.get_running_loop().call_later(seconds, proxy.silent.clear)
        ended = await asyncio.gather(call(), exchange(), return_exceptions=True)
        took = time.monotonic() - begun
        texts = []
        for each in ended:
            if each is not None and not isinstance(each, ConnectionLost):
                raise each
            texts.append("well" if each is None else str(each))
        if texts == ["well", "well"]:
            assert sorted(seen) == [1, 2, *range(10, 40)]  # each once
            assert link_of(client)["resumes"]
        await client.close()
        return texts, took


@pytest.mark.requirement("RL-R17")
@pytest.mark.parametrize(
    "seconds", [3.0, pytest.param(20.0, marks=pytest.mark.long)], ids=["3 s", "20 s"]
)
async def test_calls_go_on_after_a_silence(seconds: float) -> None:
    ways: tuple[Way, Way] = ("up", "down")
    settings = Relink()
    found = await asyncio.gather(*(through_silence(way, seconds) for way in ways))
    for texts, took in found:
        assert texts == ["well", "well"]
        # It notices; attempts within the silence take their deadline each; then there is a pause.
        attempts = 1 + seconds // settings.handshake_deadline
        pauses = 1.5 * settings.redial_first * 2**attempts
        assert took < NOTICED + attempts * settings.handshake_deadline + pauses + SLACK


@pytest.mark.long
@pytest.mark.requirement("RL-R17")
async def test_calls_say_what_happened_after_a_silence_that_is_too_long() -> None:
    ways: tuple[Way, Way] = ("up", "down")
    found = await asyncio.gather(*(through_silence(way, 90.0) for way in ways))
    for texts, took in found:
        assert all("no connection for 60 s (resume): " in text for text in texts)
        assert KEEP < took < NOTICED + KEEP + SLACK


# Thousands of cuts


BATCH = 64 << 10
TOTAL = 4 << 30
CUTS = 10_000
FLAT = 16 * MiB


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def cut_often(total: int, cuts: int) -> int:
    """An exchange of ``total`` bytes or more each way, with so many cuts; a batch between two.

    Returns how far the memory of all (client, proxy, service) rose above what it was after a
    fiftieth of the way, bytes.
    """
    chance = random.Random(5)
    count = total // BATCH
    there = back = 0  # checksums
    sent, received, first, most = 0, 0, 0, 0
    base = pa.array(range(BATCH // 8), pa.int64())

    async def batches() -> AsyncIterator[pa.RecordBatch]:
        nonlocal there, sent
        while sent < count or proxy.connections <= cuts:
            column = pa.Array.from_buffers(
                pa.int64(),
                len(base),
                [None, pa.py_buffer(sent.to_bytes(8, "little") + bytes(base.buffers()[1])[8:])],
            )
            made = pa.record_batch([column], schema=SCHEMA)
            there = zlib.crc32(made.column(0).buffers()[1], there)
            sent += 1
            yield made

    async with (
        serving(service_of(), "tcp") as running,
        CuttingProxy(running.addresses[0]) as proxy,
        await aqueduct.Client.connect(proxy.address) as client,
    ):

        async def cut() -> None:
            while proxy.connections <= cuts:
                before, connections = received, proxy.connections
                while received == before:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                left = max(cuts - proxy.connections + 1, 1)
                step = max(count - received, 1) * BATCH // left
                proxy.cut_at(chance.choice(("up", "down")), chance.randrange(1, step + 2))
                while proxy.connections == connections:  # noqa: ASYNC110
                    await asyncio.sleep(0)

        cutting = asyncio.ensure_future(cut())
        async for each in client.exchange("count", batches(), schema=SCHEMA):
            received += 1
            back = zlib.crc32(each.column(0).buffers()[1], back)
            if received % max(count // 50, 1000) == 0:  # it takes long
                now = resident()
                first = first or now
                most = max(most, now)
        cutting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cutting
        assert (received, back) == (sent, there)
        assert link_of(client)["resumes"] == proxy.connections - 1 >= cuts
    return most - first


@pytest.mark.parametrize(
    ("total", "cuts"), mostly_long([(24 * MiB, 60), (64 * MiB, 200)], (24 * MiB, 60))
)
async def test_an_exchange_is_cut_often(total: int, cuts: int) -> None:
    await cut_often(total, cuts)


@pytest.mark.long
async def test_an_exchange_of_4_gib_is_cut_thousands_of_times_with_flat_memory() -> None:
    assert await cut_often(TOTAL, CUTS) < FLAT


# Thousands of links


@pytest.fixture
def many_files() -> Iterator[None]:
    """A connection through a proxy has four sockets in one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def restart_below(links: int) -> None:
    """So many links have a call open while their proxy restarts; all calls go on."""
    service = aqueduct.Service("many")
    held = asyncio.Event()

    @service.handler
    async def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
        await held.wait()
        return batch

    async with (
        serving(service, "tcp") as running,
        CuttingProxy(running.addresses[0]) as proxy,
    ):
        clients = [await aqueduct.Client.connect(proxy.address) for _ in range(links)]
        calls = [asyncio.ensure_future(client.call("hold", batch(1))) for client in clients]
        while service.counters()["open_calls"] < links:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await proxy.stop()
        while any(link_of(client)["state"] == "up" for client in clients):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await proxy.__aenter__()
        async with asyncio.timeout(KEEP):
            while any(link_of(client)["state"] != "up" for client in clients):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        held.set()
        assert await asyncio.gather(*calls) == [batch(1)] * links
        assert all(link_of(client)["resumes"] == 1 for client in clients)
        assert service.counters()["resumes"] == links
        assert service.counters()["connections"] == links
        await asyncio.gather(*(client.close() for client in clients))


async def test_the_links_of_a_proxy_that_restarts_are_up_again(many_files: None) -> None:
    await restart_below(50)


@pytest.mark.long
async def test_a_thousand_links_are_up_again(many_files: None) -> None:
    await restart_below(1000)
