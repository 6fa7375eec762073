"""Pairs of handles in each place where a channel can live: in the process, in memory, over QUIC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aqueduct.carriers.quic import dev_certificate
from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint import Connection, Mode, Receiver, Sender, Server, channel, connect, serve

__all__ = ["PLACES", "TLS", "Place", "eventually", "place"]

TLS = dev_certificate()
PLACES = ("local", "memory", "quic")


class Place:
    """Where channels are made: ``pair`` gives both ends of one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.client: Connection
        self.server: Connection
        self.listener: Server

    @property
    def networked(self) -> bool:
        return self.kind != "local"

    async def pair(self, *, oneshot: bool = False, mode: Mode = Mode.ORDERED) -> Any:
        """(sender, receiver), the receiver at the server if there is one."""
        sender, receiver = channel(oneshot=oneshot, mode=mode)
        if self.networked:
            (receiver,) = await self.across(receiver)
        return sender, receiver

    async def backward(self, *, oneshot: bool = False) -> tuple[Sender, Receiver]:
        """The same with the sender at the server."""
        sender, receiver = channel(oneshot=oneshot)
        if self.networked:
            (sender,) = await self.across(sender)
        return sender, receiver

    async def across(self, *handles: Any) -> list[Any]:
        """Sends handles to the other side and returns what it gets for them."""
        if not self.networked:
            way, end = channel()
            await way.send(b"", attachments=handles)
            message = await end.receive()
        else:
            await self.client.entrypoint.send(b"", attachments=handles)
            message = await self.server.entrypoint.receive()
        return [attachment.handle for attachment in message.attachments]


@asynccontextmanager
async def place(kind: str, config: Config = DEFAULT) -> AsyncIterator[Place]:
    """A place of this kind, for as long as the block runs."""
    found = Place(kind)
    if kind == "local":
        yield found
        return
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    listen = "memory://place" if kind == "memory" else "aqueduct://127.0.0.1:0"
    found.listener = await serve(arrived.set_result, listen, tls=TLS, config=config)
    found.client = await connect(found.listener.addresses[0], config=config)
    async with asyncio.timeout(10):
        found.server = await arrived
    try:
        yield found
    finally:
        await found.client.close()
        await found.listener.close()


async def eventually(condition: Any) -> None:
    """Waits until something that the network has to bring about is so."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never came to be so")
