"""Two programs with a bpmux connection between them, over real sockets in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from aqueduct.bpmux import BpmuxConnection, BpmuxRequest, BpmuxServer, connect, serve
from aqueduct.config import DEFAULT, Config
from aqueduct.testing.stream_relay import Place, StreamRelay
from tests.carriers.chunks import RawPeer

__all__ = ["BRISK", "FAMILIES", "Pair", "attacked", "eventually", "joined", "place_for", "within"]

T = TypeVar("T")
FAMILIES = ("tcp", "unix")
DEADLINE = 30.0
BRISK = replace(DEFAULT, timing=replace(DEFAULT.timing, close_linger=1.0, progress_deadline=20.0))


class Pair:
    """The two ends of a connection; ``server`` is the one that was called."""

    def __init__(
        self, client: BpmuxConnection, server: BpmuxConnection, listener: BpmuxServer
    ) -> None:
        self.client = client
        self.server = server
        self.listener = listener


def place_for(family: str, folder: Path, name: str = "socket") -> Place:
    return str(folder / name) if family == "unix" else ("127.0.0.1", 0)


@asynccontextmanager
async def joined(
    family: str,
    folder: Path,
    config: Config = BRISK,
    *,
    window: int = 256 << 10,
    proxy: StreamRelay | None = None,
) -> AsyncIterator[Pair]:
    arrived: asyncio.Future[BpmuxConnection] = asyncio.get_running_loop().create_future()

    async def handler(connection: BpmuxConnection) -> None:
        arrived.set_result(connection)
        await connection.wait_closed()

    place = place_for(family, folder)
    async with await serve(handler, place, window=window, config=config) as listener:
        target = listener.place
        if proxy is not None:
            target = proxy.start(target, place_for(family, folder, "proxy"))
        client = await connect(target, window=window, config=config)
        try:
            yield Pair(client, await within(arrived), listener)
        finally:
            await client.close()
            if proxy is not None:
                proxy.close()


@asynccontextmanager
async def attacked(
    family: str, folder: Path, config: Config = BRISK, *, window: int = 256 << 10
) -> AsyncIterator[tuple[RawPeer, BpmuxConnection]]:
    """A peer by hand, and the connection that suffers it."""
    arrived: asyncio.Future[BpmuxConnection] = asyncio.get_running_loop().create_future()

    async def handler(connection: BpmuxConnection) -> None:
        arrived.set_result(connection)
        await connection.wait_closed()

    place = place_for(family, folder)
    async with await serve(handler, place, window=window, config=config) as listener:
        peer = await RawPeer.connect(listener.place)
        try:
            yield peer, await within(arrived)
        finally:
            peer.close()


async def within(work: asyncio.Future[T]) -> T:
    async with asyncio.timeout(DEADLINE):
        return await work


async def eventually(condition: Callable[[], object]) -> None:
    for _ in range(int(DEADLINE * 200)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be so")


async def answering(connection: BpmuxConnection) -> None:
    """Shouts back whatever is asked."""
    async for opened in connection:
        assert isinstance(opened, BpmuxRequest)
        await opened.respond(opened.payload.upper())
