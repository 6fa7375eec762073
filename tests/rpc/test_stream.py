"""Arrow calls over byte streams that are cut, stalled, and cut up at any byte: nothing hangs.

Each call is completed or ends in ConnectionLost, and of none is anything left in the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConnectFailed, ConnectionLost, DeadlineExceeded
from aqueduct.service.server import RunningService
from aqueduct.testing.stream_relay import End, Fate, StreamRelay
from tests.carriers.streams import (
    SCHEMES,
    TLS,
    eventually,
    listen_at,
    nothing_left,
    through,
)
from tests.support.calls import NUMBERS, config, numbers, values
from tests.support.selection import mostly_long

MiB = 1 << 20
BATCHES = [numbers(1, 2), numbers(3)]
ANSWERS = [[2, 4], [6]]


def doubling(settings: Config) -> aqueduct.Service:
    service = aqueduct.Service("doubling", config=settings)

    @service.handler("double", input=NUMBERS, output=NUMBERS)
    def double(batch):
        return numbers(*(2 * value for value in batch["id"].to_pylist()))

    @service.handler("flood", kind="source", output=NUMBERS)
    def flood():
        while True:
            yield numbers(*range(10_000))

    return service


@asynccontextmanager
async def served(
    scheme: str, folder: Path, settings: Config = DEFAULT
) -> AsyncIterator[tuple[aqueduct.Service, RunningService]]:
    """A service, all of which must be gone when the block ends."""
    service = doubling(settings)
    tls = TLS if scheme == "tls" else None
    async with (
        nothing_left(),
        service.serving(listen_at(scheme, folder), tls=tls, drain=0) as running,
    ):
        yield service, running
        await idle(service, running)


async def idle(service: aqueduct.Service, running: RunningService) -> None:
    await eventually(lambda: not running.connections and not service.counters()["open_calls"])


async def call(
    address: str, settings: Config = DEFAULT, batches: Sequence[pa.RecordBatch] = BATCHES
) -> list[list[int]]:
    """What one call gives, on a connection of its own."""
    client = await Client.connect(address, config=settings)
    try:
        stream = client.exchange("double", batches, schema=NUMBERS)
        return values([batch async for batch in stream])
    finally:
        await client.close()


async def cut_at(
    running: RunningService, folder: Path, way: str, end: End, offsets: Sequence[int]
) -> list[int]:
    """Cuts one call at each offset; those at which it was complete all the same."""
    complete = []
    for at in offsets:
        fate = Fate(limit=at, end=end)
        proxy = StreamRelay(up=fate) if way == "up" else StreamRelay(down=fate)
        address = through(proxy, running.addresses[0], folder)
        try:
            async with asyncio.timeout(20):
                assert await call(address) == ANSWERS
            complete.append(at)
        except ConnectionLost:
            pass
        except TimeoutError:
            raise AssertionError(f"it hung, cut after {at} bytes {way}") from None
        finally:
            proxy.close()
    return complete


async def length(running: RunningService, folder: Path, way: str) -> int:
    """How many bytes a call takes this way, less what the close of the connection says."""
    proxy = StreamRelay()
    assert await call(through(proxy, running.addresses[0], folder)) == ANSWERS
    proxy.close()
    return int(getattr(proxy.link, way).passed)


@pytest.mark.parametrize("end", [End.FIN, End.RESET])
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize(
    ("scheme", "step"),
    mostly_long(
        [("tcp", 1), ("tcp", 7), ("unix", 7), ("unix", 11), ("tls", 19), ("tls", 29)],
        *(("unix", 11), ("tls", 29)),
    ),
)
async def test_a_call_that_is_cut_at_any_byte_is_lost(
    scheme: str, step: int, way: str, end: End, tmp_path: Path
) -> None:
    """The connection, its headers, the call, batches both ways, the status, and the close."""
    async with served(scheme, tmp_path) as (service, running):
        total = await length(running, tmp_path, way)
        offsets = range(0, total, step)
        complete = await cut_at(running, tmp_path, way, end, offsets)
        # Only what comes after the status can be missing to a call that is complete.
        assert all(at > total * 0.6 for at in complete), complete
        await idle(service, running)
        assert await call(running.addresses[0]) == ANSWERS


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_call_of_one_batch_that_is_cut_is_lost(scheme: str, tmp_path: Path) -> None:
    async def one(address: str) -> list[list[int]]:
        client = await Client.connect(address)
        try:
            return values([await client.call("double", BATCHES[0])])
        finally:
            await client.close()

    async with served(scheme, tmp_path) as (_, running):
        for at in range(0, 700, 11):
            fate = Fate(limit=at, end=End.RESET if at % 2 else End.FIN)
            proxy = StreamRelay(up=fate) if at % 3 else StreamRelay(down=fate)
            try:
                async with asyncio.timeout(20):
                    assert await one(through(proxy, running.addresses[0], tmp_path)) == ANSWERS[:1]
                assert at > 250
            except ConnectionLost:
                pass
            finally:
                proxy.close()
        assert await one(running.addresses[0]) == ANSWERS[:1]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_one_way_that_ends_ends_the_call(scheme: str, tmp_path: Path) -> None:
    """Half a connection is none: there is no call that needs but one way."""
    async with served(scheme, tmp_path) as (_, running):
        for way in ("up", "down"):
            total = await length(running, tmp_path, way)
            complete = await cut_at(running, tmp_path, way, End.HALF, range(0, total, total // 40))
            assert all(at > total * 0.6 for at in complete), complete


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_any_pieces_and_any_delay_change_nothing(scheme: str, tmp_path: Path) -> None:
    async with served(scheme, tmp_path) as (_, running):
        for seed, fate in enumerate(
            [Fate(piece=1), Fate(piece=7, chop=True), Fate(piece=300, chop=True, delay=0.002)]
        ):
            proxy = StreamRelay(up=fate, down=fate, seed=seed)
            async with asyncio.timeout(60):
                assert await call(through(proxy, running.addresses[0], tmp_path)) == ANSWERS
            proxy.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_stalled_connection_is_lost_in_time(scheme: str, way: str, tmp_path: Path) -> None:
    """At bytes all through the call: the handshake, the headers, the call's progress."""
    brisk = config(
        timing={
            "connect_timeout": 0.3,
            "idle_timeout": 0.5,
            "ping_interval": 0.1,
            "progress_deadline": 5.0,
            "close_linger": 0.2,
        }
    )
    async with served(scheme, tmp_path, brisk) as (_, running):
        total = await length(running, tmp_path, way)

        async def stalled(at: int) -> None:
            fate = Fate(limit=at)
            proxy = StreamRelay(up=fate) if way == "up" else StreamRelay(down=fate)
            folder = tmp_path / str(at)
            folder.mkdir()
            address = through(proxy, running.addresses[0], folder)
            try:
                if await call(address, brisk) == ANSWERS:
                    assert at > total * 0.6
            except ConnectionLost:
                pass
            finally:
                proxy.close()

        async with asyncio.timeout(30):
            await asyncio.gather(*(stalled(at) for at in range(0, total, total // 25)))


async def test_a_call_that_makes_no_progress_has_its_own_deadline(tmp_path: Path) -> None:
    """Pings pass, batches do not: the peer lives, and the call ends all the same."""
    settings = config(timing={"progress_deadline": 0.5})
    service = aqueduct.Service("slow", config=settings)
    never = asyncio.Event()

    @service.handler("wait", input=NUMBERS, output=NUMBERS)
    async def wait(batch):
        await never.wait()
        return batch

    async with service.serving(listen_at("tcp", tmp_path), drain=0) as running:
        client = await Client.connect(running.addresses[0], config=settings)
        with pytest.raises(DeadlineExceeded):
            async for _ in client.exchange("wait", BATCHES, schema=NUMBERS):
                pass
        await eventually(lambda: not service.counters()["open_calls"])
        await client.close()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_client_that_stops_reading_is_held_and_can_leave(
    scheme: str, tmp_path: Path
) -> None:
    """A source without end: what waits for the client is bounded, and its cancel gets through."""
    async with served(scheme, tmp_path) as (service, running):
        await stop_reading(service, running, tmp_path)


async def stop_reading(service: aqueduct.Service, running: RunningService, folder: Path) -> None:
    proxy = StreamRelay(buffer=16_384)
    client = await Client.connect(through(proxy, running.addresses[0], folder))
    stream = client.source("flood")
    assert (await anext(stream)).num_rows == 10_000
    proxy.link.down.stall()
    (connection,) = running.connections
    queued, still = 0, 0
    while still < 20:
        await asyncio.sleep(0.02)
        now = connection.snapshot().queued_bytes
        queued, still = (now, still + 1) if now == queued else (now, 0)
    flow = connection.config.flow
    assert 0 < queued <= flow.channel_high_water + MiB  # the mark, and what went over it
    await stream.aclose()
    await eventually(lambda: not service.counters()["open_calls"])
    await eventually(lambda: connection.snapshot().queued_bytes <= MiB)
    proxy.link.down.resume()
    answers = client.exchange("double", BATCHES, schema=NUMBERS)
    assert values([batch async for batch in answers]) == ANSWERS
    await client.close()
    proxy.close()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_reset_in_the_middle_of_a_large_batch(scheme: str, tmp_path: Path) -> None:
    """Inside a chunk of a body that was landing in its place: its memory goes with the call."""
    async with served(scheme, tmp_path) as (_, running):
        for at in (20_000, 300_000, 1_000_003):
            proxy = StreamRelay(up=Fate(limit=at, end=End.RESET))
            address = through(proxy, running.addresses[0], tmp_path)
            with pytest.raises(ConnectionLost):
                await call(address, batches=[numbers(*range(400_000))])
            proxy.close()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_connecting_fails_where_a_proxy_has_no_server(scheme: str, tmp_path: Path) -> None:
    """What is accepted and closed at once is no connection, and the error says so."""
    proxy = StreamRelay()
    address = listen_at(scheme, tmp_path).replace(":0", ":1")
    with pytest.raises(ConnectFailed):
        await Client.connect(through(proxy, address, tmp_path))
    proxy.close()
