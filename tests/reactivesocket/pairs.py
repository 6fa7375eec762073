"""Two programs that speak ReactiveSocket, over real sockets in one process."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from aqueduct._speedups.reactivesocket import reactive_frames as frames
from aqueduct.carriers.certificates import dev_certificate
from aqueduct.config import DEFAULT, Config, Flow, ReactiveSocket
from aqueduct.reactivesocket import (
    ReactiveRequest,
    ReactiveSocketConnection,
    ReactiveSocketServer,
    Responder,
    connect,
    serve,
)

__all__ = [
    "BRISK",
    "FAMILIES",
    "TLS",
    "Pair",
    "Peer",
    "address_for",
    "answering",
    "brisk",
    "eventually",
    "frame",
    "frames",
    "joined",
    "scripted",
    "serving",
    "within",
]

T = TypeVar("T")
FAMILIES = ("tcp", "unix", "tls", "ws", "wss")
TLS = dev_certificate()
DEADLINE = 30.0


def brisk(
    *, flow: Flow | None = None, timing: dict[str, Any] | None = None, **settings: Any
) -> Config:
    """Settings with short waits."""
    waits = {"close_linger": 2.0, "progress_deadline": 20.0, **(timing or {})}
    return replace(
        DEFAULT,
        timing=replace(DEFAULT.timing, **waits),
        flow=flow or DEFAULT.flow,
        reactivesocket=ReactiveSocket(**settings),
    )


BRISK = brisk()


async def answering(request: ReactiveRequest) -> None:
    """A responder: words say what is wanted."""
    word, _, rest = bytes(request.data).partition(b" ")
    if word == b"echo":
        await request.send(rest)
    elif word == b"count":
        for number in range(int(rest)):
            await request.send(b"%d" % number)
    elif word == b"large":
        await request.send(bytes(range(256)) * (int(rest) // 256))
    elif word == b"ever":
        while True:
            await request.send(bytes(int(rest)))
    elif word == b"wait":
        await asyncio.sleep(DEADLINE)
    elif word == b"raise":
        raise ValueError(rest.decode())
    elif word == b"fail":
        request.fail(rest.decode())


class Pair:
    """The two ends of a connection; ``server`` is the one that was called."""

    def __init__(
        self,
        client: ReactiveSocketConnection,
        server: ReactiveSocketConnection,
        listener: ReactiveSocketServer,
    ) -> None:
        self.client = client
        self.server = server
        self.listener = listener


def address_for(family: str, folder: Path) -> str:
    if family == "unix":
        return f"reactivesocket+unix://{folder / 'socket'}"
    return f"reactivesocket+{family}://127.0.0.1:0"


@asynccontextmanager
async def serving(
    family: str = "tcp",
    folder: Path = Path("/nowhere"),
    config: Config = BRISK,
    *,
    responder: Responder | None = answering,
    **options: Any,
) -> AsyncIterator[ReactiveSocketServer]:
    tls = TLS if family in ("tls", "wss") else None
    server = await serve(
        options.pop("on_connection", None),
        address_for(family, folder),
        responder=responder,
        config=config,
        tls=tls,
        **options,
    )
    async with server:
        yield server


@asynccontextmanager
async def joined(
    family: str = "tcp",
    folder: Path = Path("/nowhere"),
    config: Config = BRISK,
    *,
    responder: Responder | None = answering,
    client_responder: Responder | None = answering,
    setup: bytes = b"",
) -> AsyncIterator[Pair]:
    arrived: asyncio.Future[ReactiveSocketConnection] = asyncio.get_running_loop().create_future()

    async def on_connection(connection: ReactiveSocketConnection) -> None:
        arrived.set_result(connection)
        await connection.wait_closed()

    async with (
        serving(family, folder, config, responder=responder, on_connection=on_connection) as server,
        await connect(
            server.address, setup=setup, responder=client_responder, config=config
        ) as client,
    ):
        yield Pair(client, await within(arrived), server)


def frame(
    kind: int, stream: int = 0, data: bytes = b"", *, flags: int = 0, n: int | None = None
) -> bytes:
    """A frame with its length, however wrong."""
    body = struct.pack(">BBHQ", 0, flags, kind, stream)
    body += (b"" if n is None else n.to_bytes(8, "big")) + data
    return (len(body) + 4).to_bytes(4, "big") + body


class Peer:
    """A client by hand: it says bytes, and reads what comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, server: ReactiveSocketServer, first: bytes = b"") -> Peer:
        where = server.address
        if where.path:
            return cls(*await asyncio.open_unix_connection(where.path))
        peer = cls(*await asyncio.open_connection(where.host, where.port))
        peer.say(first)
        return peer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self) -> tuple[int, int, int, bytes]:
        """The next frame: type, flags, stream, data."""
        head = await within(self.reader.readexactly(4))
        body = await within(self.reader.readexactly(int.from_bytes(head, "big") - 4))
        kind, flags = int.from_bytes(body[2:4], "big"), body[1]
        return kind, flags, int.from_bytes(body[4:12], "big"), body[12:]

    async def error(self, stream: int = 0) -> str:
        """The text of the ERROR that comes next on this stream."""
        while True:
            kind, _, found, data = await self.read()
            if found == stream:
                assert kind == frames.ERROR, kind
                return data.decode()

    async def end(self) -> None:
        """Returns when the server has closed the connection."""
        await within(self.reader.read())
        self.close()

    def close(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def scripted(play: Callable[[Peer], Coroutine[Any, Any, None]]) -> AsyncIterator[str]:
    """The address of a server by hand, for one connection; its end is waited for."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await play(Peer(reader, writer))
            await reader.read()
        finally:
            writer.close()
            done.set_result(None)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"reactivesocket+tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await within(done)


async def within(work: asyncio.Future[T] | Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(DEADLINE):
        return await work


async def eventually(condition: Callable[[], object]) -> None:
    for _ in range(int(DEADLINE * 200)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be so")
