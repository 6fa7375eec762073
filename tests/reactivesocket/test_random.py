"""Random requests both ways, by a proxy that chops bytes and cuts: each run follows its seed."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from pathlib import Path

import pytest

from aqueduct.config import Flow
from aqueduct.endpoint.accounts import process
from aqueduct.errors import ConnectionLost, ReactiveError
from aqueduct.reactivesocket import ReactiveSocketConnection, connect
from aqueduct.testing.stream_relay import End, Fate, StreamRelay
from tests.reactivesocket.pairs import (
    answering,
    brisk,
    eventually,
    frame,
    frames,
    serving,
    within,
)
from tests.support.selection import mostly_long

STEPS = 60
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
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
    gc.collect()  # what earlier tests left counts until it is collected
    before = process().receiving.used, process().sending.used
    proxy = StreamRelay(up=Fate(chop=True), down=Fate(chop=True), seed=seed)
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
@pytest.mark.parametrize("seed", mostly_long(range(4), 0, 1))
async def test_a_cut_ends_every_wait(family: str, end: End, seed: int, tmp_path: Path) -> None:
    gc.collect()
    gc.collect()  # what earlier tests left counts until it is collected
    before = process().receiving.used, process().sending.used
    chance = random.Random(seed)
    fate = Fate(limit=chance.randrange(3_000, 300_000), end=end, chop=True)
    proxy = StreamRelay(up=fate, down=fate, seed=seed)
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


def mutated(said: bytes, chance: random.Random) -> bytes:
    """The same with some bytes changed, left out, or repeated."""
    found = bytearray(said)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(found))
        way = chance.randrange(3)
        if way == 0:
            found[at] = chance.randrange(256)
        elif way == 1:
            del found[at : at + chance.randrange(1, 9)]
        else:
            found[at:at] = found[at : at + chance.randrange(1, 40)]
        found = found or bytearray(1)
    return bytes(found)


def conversation(chance: random.Random) -> list[bytes]:
    """Frames that are sound, without their length."""
    said = [frame(frames.SETUP, 0, b"hi")]
    for stream in range(1, 20, 2):
        word = chance.choice((b"echo x", b"count 3", b"fail x", b"ever 10", b"nothing"))
        kind = chance.choice((frames.REQUEST_RESPONSE, frames.REQUEST_FNF))
        said.append(frame(kind, stream, word))
        kind = chance.choice((frames.REQUEST_STREAM, frames.REQUEST_SUB))
        said.append(frame(kind, 100 + stream, word, n=chance.randrange(4)))
        said.append(frame(frames.REQUEST_N, 100 + stream, n=1))
        said.append(frame(chance.choice((frames.CANCEL, frames.ERROR)), 100 + stream))
        said.append(frame(frames.RESPONSE, stream, b"x", flags=chance.randrange(256)))
    return [each[4:] for each in said]


def in_a_websocket(message: bytes, chance: random.Random) -> bytes:
    """A message of a client, most often binary and whole."""
    first = 0x82 if chance.random() < 0.9 else chance.randrange(256)
    size = len(message)
    return bytes((first, 0xFE, size >> 8, size % 256)) + bytes(4) + message


@pytest.mark.parametrize("family", ["tcp", "ws"])
@pytest.mark.parametrize("seed", mostly_long(range(10), *range(4)))
async def test_mutations_harm_nobody(
    family: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever comes, others are served, nothing is left, and nothing fails within the library."""
    chance = random.Random(seed)
    gc.collect()
    gc.collect()  # what earlier tests left counts until it is collected
    before = process().receiving.used, process().sending.used
    async with serving(family, config=brisk(timing={"close_linger": 0.2})) as server:
        for _ in range(20):
            messages = conversation(chance)
            if family == "ws":
                whole = b"".join(in_a_websocket(each, chance) for each in messages)
            else:
                whole = b"".join((len(each) + 4).to_bytes(4, "big") + each for each in messages)
            where = server.address
            reader, writer = await asyncio.open_connection(where.host, where.port)
            if family == "ws":
                writer.write(UPGRADE)
                if chance.random() < 0.9:
                    await within(reader.readuntil(b"\r\n\r\n"))
            writer.write(mutated(whole, chance))
            writer.write_eof()
            await within(reader.read())
            writer.transport.abort()
        async with await connect(server.address, config=CONFIG) as client:
            assert (await within(client.request(b"echo x"))).data == b"x"
    gc.collect()
    assert (process().receiving.used, process().sending.used) == before
    bad = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert not [each for each in bad if not each.startswith("the responder failed at")]
