"""The library ``rsocket`` over TCP, by its own version of the protocol (1.0).

benchmarks/reactivesocket.py uses it. Its transport reads 64 KiB at once, as ours may; by default it
reads 1 KiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from reactivestreams.subscriber import Subscriber
from rsocket.helpers import create_future, single_transport_provider
from rsocket.payload import Payload
from rsocket.request_handler import BaseRequestHandler
from rsocket.rsocket_client import RSocketClient
from rsocket.rsocket_server import RSocketServer
from rsocket.streams.stream_from_async_generator import StreamFromAsyncGenerator
from rsocket.transports.tcp import TransportTCP

READ: Final = 64 << 10


class Handler(BaseRequestHandler):  # type: ignore[misc]
    """Answers a request with its data, and a stream with so many items of a size."""

    async def request_response(self, payload: Payload) -> Any:
        return create_future(Payload(payload.data))

    async def request_stream(self, payload: Payload) -> Any:
        count, size = map(int, bytes(payload.data).split())
        data = bytes(size)

        async def items() -> AsyncIterator[tuple[Payload, bool]]:
            for at in range(count):
                yield Payload(data), at == count - 1

        return StreamFromAsyncGenerator(items)


async def serve() -> int:
    """Listens; returns the port."""

    def session(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        RSocketServer(TransportTCP(reader, writer, READ), handler_factory=Handler)

    server = await asyncio.start_server(session, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    return port


class Client:
    """A connection."""

    def __init__(self, rsocket: RSocketClient) -> None:
        self.rsocket = rsocket

    @classmethod
    async def connect(cls, port: int) -> Client:
        streams = await asyncio.open_connection("127.0.0.1", port)
        found = RSocketClient(single_transport_provider(TransportTCP(*streams, READ)))
        await found.connect()
        return cls(found)

    async def ask(self, data: bytes) -> bytes:
        answer: Payload = await self.rsocket.request_response(Payload(data))
        return bytes(answer.data)

    async def read(self, count: int, size: int, ahead: int) -> int:
        """Reads a stream; returns how many bytes came. ``ahead`` items are asked for at a time."""
        reader = _Reader(ahead)
        publisher = self.rsocket.request_stream(Payload(b"%d %d" % (count, size)))
        publisher.initial_request_n(ahead).subscribe(reader)
        await reader.over
        return reader.nbytes


class _Reader(Subscriber):  # type: ignore[misc]
    """Counts, and asks for more once half of what it asked for has come."""

    def __init__(self, ahead: int) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.nbytes = self._came = 0
        self._half = ahead // 2

    def on_subscribe(self, subscription: Any) -> None:
        self._subscription = subscription

    def on_next(self, value: Payload, is_complete: bool = False) -> None:
        self.nbytes += len(value.data)
        self._came += 1
        if is_complete:
            self.on_complete()
        elif self._came == self._half:
            self._came = 0
            self._subscription.request(self._half)

    def on_complete(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def on_error(self, exception: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(exception)
