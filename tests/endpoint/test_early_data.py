"""Connections of the control-stream draft that begin with early data, over QUIC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from aqueduct import Connection, Server, connect, serve
from aqueduct.address import Address
from aqueduct.carriers.quic import dev_certificate
from aqueduct.carriers.quic.tickets import TicketStore
from aqueduct.config import DEFAULT
from aqueduct.endpoint.accounts import process
from aqueduct.errors import ConnectFailed
from tests.carriers.early import CONNECT, Again, Gate

TLS = dev_certificate()
DEADLINE = 30.0


def offered(connection: Connection) -> bool:
    """Whether a client's connection began with a ticket."""
    carrier: Any = connection.carrier
    return carrier._quic.tls.session_ticket is not None


def accepted(connection: Connection) -> bool:
    """Whether the server has taken it."""
    carrier: Any = connection.carrier
    return bool(carrier._quic.tls.early_data_accepted)


async def until(condition: Callable[[], object]) -> None:
    """Waits for what nothing reports."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Scene:
    """A server that keeps what its clients send, behind a relay."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.server: Server
        self.address = ""
        self.messages: list[bytes] = []
        self._came = asyncio.Event()

    async def on_connection(self, connection: Connection) -> None:
        with contextlib.suppress(Exception):
            async for message in connection.entrypoint:
                self.messages.append(bytes(message.payload))
                self._came.set()

    async def has(self, *messages: bytes) -> None:
        """Waits for as many messages, which have to be these, in any order."""
        async with asyncio.timeout(DEADLINE):
            while len(self.messages) < len(messages):
                self._came.clear()
                await self._came.wait()
        assert sorted(self.messages) == sorted(messages)

    async def ticket(self) -> None:
        """A connection that leaves a ticket."""
        async with await connect(self.address) as connection:
            assert not offered(connection)
            await connection.entrypoint.send(b"first")
            await self.has(b"first")
        await until(lambda: not self.server.connections)  # and nothing of it is under way
        self.messages.clear()


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> TicketStore:
    """A store of this test's own."""
    made = TicketStore()
    monkeypatch.setattr(CONNECT, "STORE", made)
    return made


@contextlib.asynccontextmanager
async def scene(options: str = "dialect=control-streams&early_data=on") -> AsyncIterator[Scene]:
    made = Scene()
    async with await serve(
        made.on_connection, f"aqueduct://127.0.0.1:0?{options}", tls=TLS
    ) as made.server:
        target = Address.parse(made.server.addresses[0])
        made.address = str(target.with_port(await made.gate.start(target.port)))
        try:
            yield made
        finally:
            made.gate.close()


def half_open(server: Server) -> int:
    (door,) = server._listeners
    found: int = door.half_open  # type: ignore[attr-defined]
    return found


async def test_a_connection_is_ready_after_one_round_trip() -> None:
    """What the client sends after the server's first answer is held back."""
    async with scene() as here:
        await here.ticket()
        here.gate.answered, here.gate.shut = False, True
        async with asyncio.timeout(DEADLINE), await connect(here.address) as connection:
            assert half_open(here.server) == 1
            assert accepted(connection)
            here.gate.shut = False
            await connection.entrypoint.send(b"message")
            await here.has(b"message")
            assert half_open(here.server) == 0


async def test_without_early_data_it_needs_two() -> None:
    async with scene("dialect=control-streams") as here:
        await here.ticket()
        here.gate.answered, here.gate.shut = False, True
        connecting = asyncio.ensure_future(connect(here.address))
        await until(lambda: here.gate.dropped)
        assert not connecting.done()
        here.gate.shut = False
        async with await connecting as connection:
            assert not offered(connection)


async def test_rejected_early_data_is_repeated_and_arrives_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CONNECT, "STORE", Again())
    async with scene() as here:
        await here.ticket()
        async with await connect(here.address) as first:
            assert accepted(first)
            async with await connect(here.address) as connection:
                assert offered(connection)
                assert not accepted(connection)
                messages = [b"%d" % number for number in range(100)]
                for message in messages:
                    await connection.entrypoint.send(message)
                await here.has(*messages)


async def test_the_first_of_two_deadlines_says_what_was_missing() -> None:
    config = replace(DEFAULT, timing=replace(DEFAULT.timing, connect_timeout=0.2))
    async with scene() as here:
        await here.ticket()
        here.gate.cut = True
        with pytest.raises(ConnectFailed, match=r"handshake was not complete within 0\.2 s"):
            await connect(here.address, config=config)
        await until(lambda: not process().connections)


async def test_a_server_that_is_gone_is_a_failure_to_connect() -> None:
    async with scene() as here:
        await here.ticket()
        here.gate.cut = True
        here.gate.close()
        with pytest.raises(ConnectFailed, match="no server listens at its UDP port any more"):
            await connect(here.address)
