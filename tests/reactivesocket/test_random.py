"""Random requests both ways, by a proxy that chops bytes and cuts: each run follows its seed."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest

from aqueduct.config import Flow
from aqueduct.endpoint.accounts import process
from aqueduct.errors import ConnectionLost, ReactiveError
from aqueduct.reactivesocket import ReactiveSocketConnection, connect
from tests.carriers.proxy import End, Fate, Proxy
from tests.reactivesocket.pairs import answering, brisk, eventually, serving, within

STEPS = 60
CONFIG = brisk(
    flow=Flow(channel_high_water=20_000, connection_high_water=60_000),
    frame_bytes=4096,
    receive_bytes=200_000,
    send_bytes=1 << 20,
)


class Asking:
    """A program that asks at random, and checks what comes."""

    def __init__(self, connection: ReactiveSocketConnection, seed: int) -> None:
        self.connection = connection
        self.chance = random.Random(seed)
        self.done = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(self._several())

    async def _several(self) -> None:
        for _ in range(STEPS // 8):
            await self.chance.choice(
                (self._ask, self._count, self._leave, self._fail, self._stop)
            )()
            self.done += 1

    async def _ask(self) -> None:
        sent = self.chance.randbytes(self.chance.randrange(4000))
        item = await self.connection.request(b"echo " + sent)
        assert bytes(item.data) == sent

    async def _count(self) -> None:
        count, n = self.chance.randrange(40), self.chance.randrange(1, 9)
        stream = self.connection.stream(b"count %d" % count, n=n)
        found = [item.data async for item in stream]
        assert found == [b"%d" % number for number in range(count)]

    async def _leave(self) -> None:
        size = self.chance.randrange(1, 20_000)
        left = self.chance.randrange(1, 10)
        async for item in self.connection.subscribe(b"ever %d" % size, n=left):
            assert len(item.data) == size
            left -= 1
            if not left:
                break

    async def _fail(self) -> None:
        with pytest.raises(ReactiveError, match="no luck"):
            await self.connection.request(b"fail no luck")
        await self.connection.fire(bytes(100))

    async def _stop(self) -> None:
        with pytest.raises(TimeoutError):
            await self.connection.request(b"wait", timeout=self.chance.random() / 50)


@pytest.mark.parametrize("family", ["tcp", "ws"])
@pytest.mark.parametrize("seed", range(3))
async def test_random_requests_both_ways(family: str, seed: int, tmp_path: Path) -> None:
    gc.collect()
    before = process().receiving.used, process().sending.used
    proxy = Proxy(up=Fate(chop=True), down=Fate(chop=True), seed=seed)
    theirs: list[Asking] = []
    ended = asyncio.Event()

    async def on_connection(connection: ReactiveSocketConnection) -> None:
        theirs.append(Asking(connection, seed + 100))
        await theirs[0].run()
        ended.set()
        await connection.wait_closed()

    async with serving(family, tmp_path, CONFIG, on_connection=on_connection) as server:
        where = server.address
        place = proxy.start((where.host, where.port))
        client = await connect(where.with_port(int(place[1])), responder=answering, config=CONFIG)
        async with client:
            await within(Asking(client, seed).run())
            await within(ended.wait())
            await eventually(lambda: not client.snapshot().responding)
            await eventually(lambda: not client.snapshot().held_bytes)
        proxy.close()
    gc.collect()
    assert (process().receiving.used, process().sending.used) == before


@pytest.mark.parametrize("family", ["tcp", "ws"])
@pytest.mark.parametrize("end", [End.RESET, End.FIN])
@pytest.mark.parametrize("seed", range(4))
async def test_a_cut_ends_every_wait(family: str, end: End, seed: int, tmp_path: Path) -> None:
    gc.collect()
    before = process().receiving.used, process().sending.used
    chance = random.Random(seed)
    fate = Fate(limit=chance.randrange(3_000, 300_000), end=end, chop=True)
    proxy = Proxy(up=fate, down=fate, seed=seed)
    ended = asyncio.Event()

    async def on_connection(connection: ReactiveSocketConnection) -> None:
        with pytest.raises(ExceptionGroup) as found:
            while True:
                await Asking(connection, chance.randrange(1000)).run()
        assert found.group_contains(ConnectionLost)
        ended.set()

    async with serving(family, tmp_path, CONFIG, on_connection=on_connection) as server:
        where = server.address
        place = proxy.start((where.host, where.port))
        client = await connect(where.with_port(int(place[1])), responder=answering, config=CONFIG)
        with pytest.raises(ExceptionGroup) as found:
            while True:
                await within(Asking(client, chance.random()).run())  # type: ignore[arg-type]
        assert found.group_contains(ConnectionLost)
        await within(client.wait_closed())
        await within(ended.wait())
        proxy.close()
    gc.collect()
    assert (process().receiving.used, process().sending.used) == before
