"""The proxy of byte streams does to them what it was told, to the byte."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aqueduct.testing.stream_relay import End, Fate, Place, StreamRelay

pytestmark = pytest.mark.parametrize("family", ["tcp", "unix"])

DATA = random.Random(7).randbytes(200_000)
PATIENCE = 20.0


class Ends:
    """A client and the server's side of its connection, with a proxy between them."""

    def __init__(self, proxy: StreamRelay, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = server


@asynccontextmanager
async def joined(
    family: str, folder: Path, proxy: StreamRelay, small: int | None = None
) -> AsyncIterator[Ends]:
    loop = asyncio.get_running_loop()
    kind = socket.AF_UNIX if family == "unix" else socket.AF_INET
    target: Place = str(folder / "server") if family == "unix" else ("127.0.0.1", 0)
    listen: Place = str(folder / "proxy") if family == "unix" else ("127.0.0.1", 0)
    with socket.socket(kind) as listener, socket.socket(kind) as client:
        for sock in (listener, client):
            sock.setblocking(False)
            if small is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, small)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, small)
        listener.bind(target)
        listener.listen()
        place = proxy.start(listener.getsockname(), listen)
        try:
            async with asyncio.timeout(PATIENCE):
                await loop.sock_connect(client, place)
                server, _ = await loop.sock_accept(listener)
                await until(lambda: proxy.links)
                with server:
                    server.setblocking(False)
                    yield Ends(proxy, client, server)
        finally:
            proxy.close()


async def send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def receive(sock: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes."""
    found = b""
    while len(found) < count:
        data = await asyncio.get_running_loop().sock_recv(sock, count - len(found))
        assert data, f"it ended after {len(found)} bytes"
        found += data
    return found


async def rest(sock: socket.socket) -> bytes:
    """All bytes up to the end."""
    found = b""
    while data := await asyncio.get_running_loop().sock_recv(sock, 65_536):
        found += data
    return found


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(int(PATIENCE * 1000)):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to be so")


async def test_all_bytes_pass_both_ways_and_are_counted(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path, StreamRelay()) as ends:
        back, _, there, _ = await asyncio.gather(
            receive(ends.client, len(DATA)),
            send(ends.client, DATA),
            receive(ends.server, len(DATA)),
            send(ends.server, DATA[::-1]),
        )
        assert (there, back) == (DATA, DATA[::-1])
        link = ends.proxy.link
        assert link.up.read == link.up.passed == link.down.passed == len(DATA)


async def test_an_end_goes_through_and_the_other_way_lives_on(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path, StreamRelay()) as ends:
        await send(ends.client, b"question")
        ends.client.shutdown(socket.SHUT_WR)
        assert await rest(ends.server) == b"question"
        await send(ends.server, b"answer")
        ends.server.close()
        assert await rest(ends.client) == b"answer"
        await until(lambda: ends.proxy.link.over)


@pytest.mark.parametrize("limit", [0, 1, 7, 65_537, 150_000])
async def test_a_cut_lets_as_many_bytes_through_as_it_says(
    family: str, tmp_path: Path, limit: int
) -> None:
    proxy = StreamRelay(up=Fate(limit=limit, end=End.FIN))
    async with joined(family, tmp_path, proxy) as ends:
        await send(ends.server, b"before" if limit else b"")
        if limit:
            assert await receive(ends.client, 6) == b"before"
        sending = asyncio.ensure_future(send(ends.client, DATA))
        assert await rest(ends.server) == DATA[:limit]
        assert await rest(ends.client) == b""
        await sending  # what comes after the cut is swallowed, and blocks nobody


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_reset_reaches_both_sides(family: str, tmp_path: Path, way: str) -> None:
    fate = Fate(limit=1000, end=End.RESET)
    proxy = StreamRelay(up=fate) if way == "up" else StreamRelay(down=fate)
    async with joined(family, tmp_path, proxy) as ends:
        source, target = ends.client, ends.server
        if way == "down":
            source, target = target, source
        await send(source, DATA[:5000])
        found = b""
        with pytest.raises(ConnectionError):
            while data := await asyncio.get_running_loop().sock_recv(target, 65_536):
                found += data
            assert family == "unix", "TCP says that it was no orderly end"
            raise ConnectionResetError
        assert found == DATA[:1000]
        with pytest.raises(ConnectionError):
            while True:
                await send(source, DATA)
        assert getattr(proxy.link, way).passed == 1000


async def test_one_way_can_be_ended_alone(family: str, tmp_path: Path) -> None:
    proxy = StreamRelay(up=Fate(limit=10, end=End.HALF))
    async with joined(family, tmp_path, proxy) as ends:
        await send(ends.client, DATA[:100])
        assert await rest(ends.server) == DATA[:10]
        await send(ends.server, b"still here")
        assert await receive(ends.client, 10) == b"still here"


async def test_a_stalled_way_takes_nothing_more_from_its_sender(
    family: str, tmp_path: Path
) -> None:
    proxy = StreamRelay(down=Fate(limit=5))
    async with joined(family, tmp_path, proxy) as ends:
        await send(ends.server, DATA[:20])
        assert await receive(ends.client, 5) == DATA[:5]
        await send(ends.client, b"the other way")
        assert await receive(ends.server, 13) == b"the other way"
        way = proxy.link.down
        assert (way.read, way.passed) == (5, 5)
        way.let(3)
        assert await receive(ends.client, 3) == DATA[5:8]
        await turns()
        assert (way.read, way.passed) == (8, 8)
        way.resume()
        assert await receive(ends.client, 12) == DATA[8:20]
        way.stall()
        await send(ends.server, b"unheard")
        await turns()
        assert way.read == 20


async def test_back_pressure_goes_through_it(family: str, tmp_path: Path) -> None:
    """A sender whose bytes nobody reads blocks: the proxy holds no more than it says."""
    async with joined(family, tmp_path, StreamRelay(buffer=4096), small=4096) as ends:
        sending = asyncio.ensure_future(send(ends.client, DATA * 20))
        way = ends.proxy.links[0].up
        await until(lambda: way.read - way.passed == 256 * 1024)
        await turns()
        assert not sending.done()
        assert way.read - way.passed == 256 * 1024
        assert way.passed < 64 * 1024
        assert await receive(ends.server, len(DATA) * 20) == DATA * 20
        await sending


async def test_a_trickle_passes_a_byte_at_a_time(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path, StreamRelay(up=Fate(piece=1))) as ends:
        await send(ends.client, DATA[:300])
        loop = asyncio.get_running_loop()
        seen: list[bytes] = []
        while sum(map(len, seen)) < 300:
            seen.append(await loop.sock_recv(ends.server, 65_536))
        assert b"".join(seen) == DATA[:300]
        assert max(map(len, seen)) <= 8  # a turn of the loop or two, never the whole


async def test_the_pieces_follow_the_seed(family: str, tmp_path: Path) -> None:
    async def pieces(seed: int, folder: Path) -> list[int]:
        proxy = StreamRelay(up=Fate(piece=40, chop=True), seed=seed)
        async with joined(family, folder, proxy) as ends:
            way = proxy.link.up
            await send(ends.client, DATA[:500])
            seen = [0]
            while way.passed < 500:
                await asyncio.sleep(0)
                if way.passed != seen[-1]:
                    seen.append(way.passed)
            assert await receive(ends.server, 500) == DATA[:500]
        return seen

    for name in "abc":
        (tmp_path / name).mkdir()
    first = await pieces(1, tmp_path / "a")
    assert first == await pieces(1, tmp_path / "b")
    assert first != await pieces(2, tmp_path / "c")
    assert len(first) > 13  # 500 / 40


async def test_what_is_late_comes_in_order_and_before_the_end(family: str, tmp_path: Path) -> None:
    proxy = StreamRelay(up=Fate(delay=0.05, piece=1000))
    async with joined(family, tmp_path, proxy) as ends:
        await send(ends.client, DATA[:50_000])
        ends.client.shutdown(socket.SHUT_WR)
        way = proxy.link.up
        await until(lambda: way.read)
        assert way.passed == 0
        assert await rest(ends.server) == DATA[:50_000]


async def test_it_writes_down_what_it_heard(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path, StreamRelay()) as ends:
        ends.proxy.link.up.heard = bytearray()
        await send(ends.client, b"abc")
        await receive(ends.server, 3)
        assert ends.proxy.link.up.heard == b"abc"


async def test_a_cut_on_demand(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path, StreamRelay()) as ends:
        ends.proxy.link.cut(End.FIN)
        assert await rest(ends.server) == b""
        assert await rest(ends.client) == b""
        ends.client.close()
        ends.server.close()
        await until(lambda: all(sock.fileno() < 0 for sock in ends.proxy.link._sockets))


async def test_without_a_server_the_client_is_turned_away(family: str, tmp_path: Path) -> None:
    kind = socket.AF_UNIX if family == "unix" else socket.AF_INET
    target: Place = str(tmp_path / "nobody")
    if family == "tcp":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            target = unused.getsockname()
    proxy = StreamRelay()
    place = proxy.start(target, str(tmp_path / "proxy") if family == "unix" else ("127.0.0.1", 0))
    with socket.socket(kind) as client:
        client.setblocking(False)
        async with asyncio.timeout(PATIENCE):
            await asyncio.get_running_loop().sock_connect(client, place)
            assert await rest(client) == b""
    proxy.close()
