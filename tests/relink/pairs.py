"""Two programs with a link between them, over real sockets in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from aqueduct.carriers.certificates import ServerTls
from aqueduct.config import DEFAULT, Config, Relink
from aqueduct.relink import RelinkConnection, RelinkServer, connect, serve
from aqueduct.testing.stream_relay import StreamRelay

__all__ = ["BRISK", "FAMILIES", "Pair", "address_for", "brisk", "eventually", "joined", "within"]

T = TypeVar("T")
FAMILIES = ("tcp", "unix")
DEADLINE = 30.0


def brisk(**relink: Any) -> Config:
    """Settings with short waits."""
    return replace(
        DEFAULT,
        timing=replace(DEFAULT.timing, close_linger=2.0, progress_deadline=20.0),
        relink=Relink(**{"redial_first": 0.01, "redial_most": 0.1, "keep": 20.0, **relink}),
    )


BRISK = brisk()


class Pair:
    """The two ends of a link; ``server`` is the one that was called."""

    def __init__(
        self, client: RelinkConnection, server: RelinkConnection, listener: RelinkServer
    ) -> None:
        self.client = client
        self.server = server
        self.listener = listener


def address_for(family: str, folder: Path, name: str = "socket") -> str:
    if family == "unix":
        return f"aqueduct+unix://{folder / name}"
    return f"aqueduct+{family}://127.0.0.1:0"


@asynccontextmanager
async def joined(
    family: str,
    folder: Path,
    config: Config = BRISK,
    *,
    transactions: str = "none",
    proxy: StreamRelay | None = None,
    tls: ServerTls | None = None,
) -> AsyncIterator[Pair]:
    arrived: asyncio.Future[RelinkConnection] = asyncio.get_running_loop().create_future()

    async def handler(connection: RelinkConnection) -> None:
        arrived.set_result(connection)
        await connection.wait_closed()

    server = await serve(
        handler,
        address_for(family, folder),
        endpoint="test",
        transactions=transactions,
        config=config,
        tls=tls,
    )
    async with server as listener:
        address = str(listener.address)
        if proxy is not None:
            address = through(proxy, listener, folder)
        client = await connect(address, endpoint="test", transactions=transactions, config=config)
        try:
            pair = Pair(client, await within(arrived), listener)
            yield pair
        finally:
            client.abandon("the test is over")
            if arrived.done():
                arrived.result().abandon("the test is over")
            if proxy is not None:
                proxy.close()


def through(proxy: StreamRelay, listener: RelinkServer, folder: Path) -> str:
    """The address of a proxy before a listener."""
    where = listener.address
    if where.path:
        return f"aqueduct+unix://{proxy.start(where.path, str(folder / 'proxy'))}"
    place = proxy.start((where.host, where.port))
    assert not isinstance(place, str)
    return str(where.with_port(place[1]))


async def within(work: asyncio.Future[T] | Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(DEADLINE):
        return await work


async def eventually(condition: Callable[[], object]) -> None:
    for _ in range(int(DEADLINE * 200)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be so")
