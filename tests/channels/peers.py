"""A client and a server joined by each carrier there is: what the channel suite runs on.

The suite knows the carriers by name alone. A further carrier joins with an entry in ``CARRIERS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

from aqueduct import Connection, Receiver, Sender, Server, channel, connect, serve
from aqueduct.address import Address
from aqueduct.carriers.quic import dev_certificate
from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint import Headers, Mode
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.control_streams.connection import ControlConnection
from aqueduct.testing.datagram_relay import DatagramRelay
from tests.support.selection import mostly_long

T = TypeVar("T")

DEADLINE = 60.0
"""Seconds after which what a test waits for has failed to come; far above what it ever takes."""

MiB = 1 << 20
TLS = dev_certificate()


BRISK = replace(DEFAULT, timing=replace(DEFAULT.timing, receipt_deadline=0.3))
"""What is announced and does not come is lost sooner than usual."""


@dataclass(frozen=True)
class Carrier:
    """How two peers are joined."""

    listen: str
    network: Mapping[str, float] | None = None
    """What a relay between them does to their datagrams; None: there is no relay."""
    late_turns: int | None = None
    """Of a byte stream, that is one way for all: in how many turns of the event loop its reader
    reads more, once what is urgent has come, before the application is told."""

    @property
    def draft(self) -> bool:
        """Whether the peers speak the control-stream draft."""
        return DRAFT in self.listen

    @property
    def loses(self) -> bool:
        """Whether datagrams are lost on the way."""
        return self.network is not None and self.network.get("drop", 0.0) > 0


LATE = {"latency": 0.0005, "reorder": 0.05, "delay": 0.004, "duplicate": 0.02}
"""All are late, some later than those that were sent after them, and some come twice."""

CARRIERS: dict[str, Carrier] = {
    "memory": Carrier("memory://suite"),
    "quic": Carrier("aqueduct://127.0.0.1:0", LATE),
    "quic-2%": Carrier("aqueduct://127.0.0.1:0?datagram_size=1200", {**LATE, "drop": 0.02}),
    "quic-10%": Carrier("aqueduct://127.0.0.1:0?datagram_size=1200", {**LATE, "drop": 0.1}),
    "tcp": Carrier("aqueduct+tcp://127.0.0.1:0", late_turns=1),
    # What TLS has decrypted makes no socket readable, so its reader asks for the next turn itself.
    "tls": Carrier("aqueduct+tls://127.0.0.1:0", late_turns=2),
    "unix": Carrier(
        f"aqueduct+unix://{tempfile.gettempdir()}/aqueduct-suite-{os.getpid()}", late_turns=1
    ),
}
DRAFT = "dialect=control-streams"
CARRIERS |= {
    f"draft-{name}": replace(
        carrier, listen=carrier.listen + ("&" if "?" in carrier.listen else "?") + DRAFT
    )
    for name, carrier in CARRIERS.items()
    if name not in ("tls", "unix")
}
"""The suite runs on the control-stream draft as well, where the two dialects agree."""


@dataclass
class Side:
    """One peer: a sender to the other, and the receiver of what the other sends."""

    connection: Connection
    out: Sender
    into: Receiver


@dataclass
class Peers:
    """Two connected endpoints, and what lies between them."""

    carrier: Carrier
    client: Connection
    server: Connection
    listener: Server
    relay: DatagramRelay | None
    kept: list[Any] = field(default_factory=list)
    """Handles that a test does not name, but that must not be dropped."""

    def named(self, *pairs: tuple[bytes, bytes]) -> Headers:
        """Headers of a message or an attachment, which the draft does not have."""
        return () if self.carrier.draft else pairs

    @property
    def sides(self) -> tuple[Connection, Connection]:
        """The client and the server."""
        return self.client, self.server

    async def opened(self) -> tuple[Side, Side]:
        """Both sides with a channel to the other, so that each can send channels away."""
        back, answers = channel()
        (returned,) = await self.call(back)
        client, server = self.sides
        return (
            Side(client, client.entrypoint, answers),
            Side(server, returned, server.entrypoint),
        )

    async def call(self, *handles: Sender | Receiver, headers: Headers = ()) -> list[Any]:
        """Sends handles to the server and returns what it got for them."""
        attached = [(handle, headers) for handle in handles] if headers else handles
        await self.client.entrypoint.send(b"call", attachments=attached)
        message = await within(self.server.entrypoint.receive())
        return [attachment.handle for attachment in message.attachments]

    async def to_server(self, mode: Mode = Mode.ORDERED) -> tuple[Sender, Receiver]:
        """A channel on which the client sends."""
        sender, receiver = channel(mode=mode)
        (theirs,) = await self.call(receiver)
        return sender, theirs

    async def to_client(self, mode: Mode = Mode.ORDERED) -> tuple[Sender, Receiver]:
        """A channel on which the server sends; the client made it."""
        sender, receiver = channel()
        (theirs,) = await self.call(sender)
        theirs._mode = mode
        return theirs, receiver

    async def forgotten(self, channels: int = 1) -> None:
        """Waits until neither side has state of more than ``channels`` channels, or bytes."""

        def settled() -> bool:
            found = [side.core.snapshot() for side in self.sides]
            return all(
                side["channels"] == channels and not side["budget_used_bytes"] for side in found
            )

        try:
            await eventually(settled)
        except AssertionError:
            raise AssertionError([side.snapshot() for side in self.sides]) from None

    def check(self) -> None:
        """Fails if one side found that the other broke the protocol: here nobody does."""
        for side in self.sides:
            error = side.error
            assert error is None or error.code in (None, 0, 6), error


@contextlib.asynccontextmanager
async def joined(
    carrier: Carrier,
    config: Config = DEFAULT,
    *,
    headers: Headers = (),
    server_headers: Headers = (),
    seed: int = 0,
    drop: float | None = None,
    network: Mapping[str, float] | None = None,
) -> AsyncIterator[Peers]:
    """Connects a client and a server over ``carrier``, for as long as the block runs.

    ``seed`` is the relay's, and ``drop`` makes a carrier that loses lose more than usual;
    ``network`` is in place of the usual one, if there is one.
    """
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    # A handshake has to pass the worst network, on a busy machine.
    patient = replace(config, timing=replace(config.timing, connect_timeout=DEADLINE))
    listener = await serve(
        arrived.set_result,
        carrier.listen,
        tls=TLS,
        config=patient,
        headers=server_headers,
    )
    address = Address.parse(listener.addresses[0])
    relay = None
    if carrier.network is not None:
        does = dict(network or carrier.network)
        if carrier.loses and drop is not None:
            does["drop"] = drop
        relay = DatagramRelay(seed=seed, **does)  # type: ignore[arg-type]
        address = address.with_port(await relay.start(address.port))
    client = await connect(address, headers=headers, config=patient)
    assert isinstance(client.core, ControlConnection if carrier.draft else ChannelConnection)
    peers = Peers(carrier, client, await within(arrived), listener, relay)
    try:
        yield peers
        peers.check()
    finally:
        client.close_soon(0, "the test is over")
        await listener.close()
        await within(client.wait_closed())
        if relay is not None:
            relay.close()


def turns(names: Iterable[str]) -> list[Any]:
    """Names of carriers for tests to be run with.

    The draft over QUIC is for the long run. So are TLS and Unix sockets, which are byte streams as
    TCP is, and the milder of the two networks that lose.
    """
    every = list(names)
    rare = ("tls", "unix", "quic-2%")
    usual = [name for name in every if not name.startswith("draft-quic") and name not in rare]
    return mostly_long(every, *usual)


@pytest.fixture(params=turns(CARRIERS))
def carrier(request: pytest.FixtureRequest) -> Carrier:
    """Each carrier in turn."""
    return CARRIERS[request.param]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own, the same in each run."""
    return zlib.crc32(request.node.name.encode())


@pytest.fixture
async def peers(carrier: Carrier, seed: int) -> AsyncIterator[Peers]:
    """Two peers over each carrier in turn."""
    me, you = ((b"who", b"me"),), ((b"who", b"you"),)
    async with joined(carrier, BRISK, seed=seed, headers=me, server_headers=you) as found:
        yield found


async def within(work: Awaitable[T]) -> T:
    """What ``work`` gives, unless it hangs."""
    async with asyncio.timeout(DEADLINE):
        return await work


async def eventually(condition: Callable[[], object]) -> None:
    """Waits until something that nothing reports is so."""
    for _ in range(int(DEADLINE * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be so")


async def at_rest(*counts: Callable[[], int]) -> None:
    """Waits until numbers that the network drives no longer change for a good while."""
    before: list[int] = []
    still = 0
    while still < 30:
        now = [count() for count in counts]
        still = still + 1 if now == before else 0
        before = now
        await asyncio.sleep(0.02)


async def payloads(receiver: Receiver) -> list[bytes]:
    """Everything up to the end of the channel."""
    return [bytes(message.payload) async for message in receiver]


async def ending(handle: Sender | Receiver) -> Exception | None:
    """How a channel ended; None: a sender that finished. Messages are read and dropped."""
    async with asyncio.timeout(DEADLINE):
        try:
            if isinstance(handle, Sender):
                await handle.wait_closed()
                return None
            while True:
                await handle.receive()
        except Exception as error:  # noqa: BLE001 - it is what the caller asks for
            return error
