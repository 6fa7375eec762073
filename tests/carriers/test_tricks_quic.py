"""Peers that misbehave over real QUIC: what the carrier adds to the bounds of the core.

The peer is a bare carrier, spoken for by the test; the core under attack is that of an endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.address import Address
from aqueduct.carriers import quic
from aqueduct.carriers.contract import Buffer, Carrier
from aqueduct.carriers.quic import dev_certificate
from aqueduct.config import DEFAULT, Flow, Limits
from aqueduct.endpoint import Connection, serve
from aqueduct.errors import ConnectionLost
from tests.protocol.channels.attacker import ENTRY, message
from tests.support.endpoints import eventually

TLS = dev_certificate()
MiB = 1 << 20
SMALL = replace(
    DEFAULT,
    limits=Limits(channels=300, early_datagrams=8),
    flow=Flow(
        receive_budget=4 * MiB, channel_receive_bytes=1 * MiB, read_ahead=256 << 10, streams=64
    ),
)


class Bare:
    """A carrier without a core: it says what the test says, and credits what it likes."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.opened = 0
        self.ended: ConnectionLost | None = None
        self.up = asyncio.Event()
        self.over = asyncio.Event()
        carrier.attach(self)

    def connected(self) -> None:
        self.up.set()

    def early_decided(self, accepted: bool) -> None:
        """There is no early data here."""

    def stream_data(self, stream: int, data: Buffer, fin: bool) -> None:
        pass

    def inlet(self, stream: int) -> None:
        """Has none to give."""

    def inlet_done(self, stream: int) -> None:
        raise AssertionError("no inlet was opened")

    def stream_reset(self, stream: int, code: int) -> None:
        pass

    def stream_stopped(self, stream: int, code: int) -> None:
        pass

    def datagram_received(self, data: bytes) -> None:
        pass

    def openable_changed(self) -> None:
        pass

    def datagram_room_changed(self) -> None:
        pass

    def written(self, stream: int, size: int) -> bool:
        return False

    def kept(self, size: int) -> None:
        pass

    def ponged(self) -> None:
        pass

    def end_of_input(self) -> None:
        pass

    def closed(self, error: ConnectionLost) -> None:
        self.ended = error
        self.over.set()

    async def say(self, *parts: bytes, fin: bool = True) -> int:
        """A stream with these bytes, once there is a slot for it; -1: the connection is over."""
        if not self.carrier.openable:
            await eventually(lambda: self.carrier.openable or self.ended is not None)
        if self.ended is not None:
            return -1
        stream = self.opened
        self.opened += 1
        self.carrier.write(stream, [b"".join(parts)], fin)
        self.carrier.flush()
        return stream

    async def code(self) -> int | None:
        """The code that it is closed with."""
        async with asyncio.timeout(20):
            await self.over.wait()
        assert self.ended is not None
        return self.ended.code


@asynccontextmanager
async def attacked() -> AsyncIterator[tuple[Bare, Connection]]:
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    listen = "aqueduct://127.0.0.1:0"
    async with await serve(arrived.set_result, listen, tls=TLS, config=SMALL) as server:
        carrier = await quic.connect(Address.parse(server.addresses[0]), DEFAULT, None)
        bare = Bare(carrier)
        async with asyncio.timeout(10):
            await bare.up.wait()
        hello = codec.encode_connection_headers(())
        await bare.say(codec.VERSION, codec.ACK_VERSION, hello)
        async with asyncio.timeout(10):
            connection = await arrived
        try:
            yield bare, connection
        finally:
            carrier.close(0, "")


def entry(connection: Connection) -> Any:
    return connection.entrypoint


@pytest.mark.requirement("AQ-R30")
@pytest.mark.requirement("AQ-R31")
async def test_channels_without_end_are_closed_with_limit_exceeded() -> None:
    async with attacked() as (bare, connection):
        for index in range(1, 2000):
            if await bare.say(codec.encode_route_to(index << 3)) < 0:
                break
            assert connection.core.channels <= SMALL.limits.channels
        assert await bare.code() == 5
        assert connection.core.channels == 0


@pytest.mark.requirement("AQ-R31")
async def test_an_application_that_reads_nothing_holds_the_peer_back() -> None:
    """However much is offered, on however many streams: the windows and the slots say no."""
    async with attacked() as (bare, connection):
        for number in range(SMALL.flow.streams - 2):
            head = message(number, bytes(900_000))
            await bare.say(ENTRY, head)
        await eventually(lambda: connection.snapshot().receive_budget_used > 500_000)
        still, before = 0, -1
        while still < 20:
            await asyncio.sleep(0.02)
            received = int(str(connection.carrier.snapshot()["received"]))
            still, before = (still + 1, before) if received == before else (0, received)
        shot = connection.snapshot()
        flow = SMALL.flow
        assert shot.receive_budget_used <= flow.receive_budget
        windows = shot.streams_in * flow.initial_window
        assert before <= flow.channel_receive_bytes + flow.read_ahead + windows + MiB
        assert connection.error is None
        # A cancel passes by all of it.
        await bare.say(ENTRY, codec.CANCEL_SENDER)
        await eventually(lambda: entry(connection).error is not None)
        await eventually(lambda: connection.snapshot().receive_budget_used == 0)


@pytest.mark.requirement("AQ-11")
async def test_streams_reset_at_once_leave_nothing() -> None:
    async with attacked() as (bare, connection):
        half = message(0, bytes(50_000))[:20_000]
        for _ in range(500):
            stream = await bare.say(ENTRY, half, fin=False)
            bare.carrier.reset(stream, 1)
            bare.carrier.flush()
        await bare.say(ENTRY, message(0, b"after"))
        async with asyncio.timeout(20):
            assert bytes((await entry(connection).receive()).payload) == b"after"
        await eventually(lambda: connection.snapshot().streams_in == 0)
        assert connection.snapshot().receive_budget_used == 0
        assert connection.error is None


@pytest.mark.requirement("AQ-10")
async def test_a_byte_a_packet_is_a_message_all_the_same() -> None:
    async with attacked() as (bare, connection):
        whole = ENTRY + message(0, b"slowly", ((b"k", b"v"),))
        stream = await bare.say(whole[:1], fin=False)
        for at in range(1, len(whole)):
            bare.carrier.write(stream, [whole[at : at + 1]], False)
            bare.carrier.flush()
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            assert bytes((await entry(connection).receive()).payload) == b"slowly"


@pytest.mark.requirement("AQ-R31")
async def test_datagrams_that_nobody_reads_are_evicted() -> None:
    async with attacked() as (bare, connection):
        for number in range(4000):
            while not bare.carrier.send_datagram(ENTRY + message(number, bytes(1000))):
                bare.carrier.flush()
                await asyncio.sleep(0.001)
        bare.carrier.flush()
        await eventually(lambda: connection.snapshot().datagrams_evicted > 100)
        shot = connection.snapshot()
        assert shot.receive_budget_used <= SMALL.flow.channel_receive_bytes
        assert connection.error is None


@pytest.mark.requirement("AQ-R30")
@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([ENTRY, b"\x63"], 1),
        ([ENTRY, message(0), message(0)], 2),
        ([codec.VERSION.replace(b"AFTER", b"LATER")], 3),
        ([ENTRY, b"\x04\x00\x00\x00\xff\xff\xff\xff\x7f"], 5),
        ([ENTRY, b"\x04\x00\xff\xff\xff\x7f"], 5),
    ],
    ids=["no frame", "a number twice", "another version", "a huge payload", "huge headers"],
)
async def test_the_code_reaches_the_peer(frames: list[bytes], code: int) -> None:
    async with attacked() as (bare, connection):
        await bare.say(*frames, fin=False)
        assert await bare.code() == code
        assert connection.error is not None
        assert connection.error.code == code
