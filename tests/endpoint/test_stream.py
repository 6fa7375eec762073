"""Handles over a byte stream whose peer is made by hand: what it does wrong ends or bounds them."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aqueduct import Connection, Sender, serve
from aqueduct._speedups import channels as codec
from aqueduct.carriers.certificates import dev_certificate
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConnectionLost
from aqueduct.testing.stream_relay import Place
from tests.carriers.chunks import Kind, RawPeer, chunk, varu64
from tests.carriers.streams import eventually, listen_at, nothing_left, place_of
from tests.carriers.users import DEADLINE
from tests.protocol.channels.attacker import ENTRY, message
from tests.support.selection import mostly_long

KiB = 1 << 10
MiB = 1 << 20
SMALL = replace(
    DEFAULT,
    flow=replace(
        DEFAULT.flow,
        channel_high_water=1 * MiB,
        streams=64,
        receive_budget=4 * MiB,
        channel_receive_bytes=1 * MiB,
        read_ahead=256 * KiB,
    ),
    timing=replace(DEFAULT.timing, close_linger=0.5),
)
STREAMS = 1000
SENDER_THERE = 1 << 3 | 1 << 1  # made by the client, the server sends, index 1 (AQ-6)
HELLO = codec.VERSION + codec.ACK_VERSION + codec.encode_connection_headers(())

pytestmark = pytest.mark.parametrize("scheme", mostly_long(["tcp", "unix", "tls"], "tcp", "tls"))
TLS = dev_certificate()


class Client:
    """A peer by hand that has said what an Aqueduct client says first."""

    def __init__(self, raw: RawPeer) -> None:
        self.raw = raw
        self.opened = 0

    async def begin(self) -> None:
        """Credit and slots for the server, and the first stream."""
        await self.raw.say(
            chunk(Kind.IN_STREAM, 0, credit=MiB),
            chunk(Kind.IN_SINK, 0, b"\1" + varu64(STREAMS)),
            self.stream(HELLO),
        )

    def stream(self, data: bytes, *, end: bytes | None = b"") -> bytes:
        """The chunk of a whole stream; ``end=None``: it goes on."""
        self.opened += 1
        return chunk(Kind.OUT_SINK, self.opened, data, credit=9, end=end)


@asynccontextmanager
async def met(
    scheme: str, folder: Path, config: Config = SMALL
) -> AsyncIterator[tuple[Client, Connection]]:
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    listen = listen_at(scheme, folder)
    tls = TLS if scheme == "tls" else None
    async with (
        await serve(arrived.set_result, listen, config=config, tls=tls) as server,
        reached(place_of(server.addresses[0]), encrypted=tls is not None) as place,
    ):
        client = Client(await RawPeer.connect(place))
        await client.begin()
        try:
            async with asyncio.timeout(60):
                yield client, await arrived
        finally:
            client.raw.close()


@asynccontextmanager
async def reached(place: Place, *, encrypted: bool) -> AsyncIterator[Place]:
    """Where a peer by hand goes. If TLS is spoken there, to who makes records of what it says."""
    if not encrypted:
        yield place
        return
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["aqueduct-bpmux"])
    ways: set[asyncio.Task[None]] = set()

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(64 * KiB):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def meet(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(*place, ssl=context)
        for way in (pass_on(source, there[1]), pass_on(there[0], sink)):
            ways.add(asyncio.create_task(way))

    between = await asyncio.start_server(meet, "127.0.0.1", 0)
    try:
        yield between.sockets[0].getsockname()
    finally:
        between.close()
        if ways:
            await asyncio.wait(ways, timeout=DEADLINE)


async def back_channel(client: Client, connection: Connection) -> Sender:
    """A channel on which the server sends."""
    await client.raw.say(client.stream(ENTRY + message(0, b"", attached=(SENDER_THERE,))))
    (attachment,) = (await entry(connection).receive()).attachments
    assert isinstance(attachment.handle, Sender)
    return attachment.handle


def entry(connection: Connection) -> Any:
    return connection.entrypoint


async def test_an_aqueduct_client_by_hand_a_byte_at_a_time(scheme: str, tmp_path: Path) -> None:
    async with met(scheme, tmp_path) as (client, connection):
        for byte in client.stream(ENTRY + message(0, b"slowly")):
            await client.raw.say(bytes([byte]))
            await asyncio.sleep(0)
        assert bytes((await entry(connection).receive()).payload) == b"slowly"


async def test_a_receiver_knows_that_more_is_arriving(scheme: str, tmp_path: Path) -> None:
    async with met(scheme, tmp_path) as (client, connection):
        receiver = entry(connection)
        assert not receiver.arriving
        data = ENTRY + message(0, b"first") + message(1, bytes(20_000))
        await client.raw.say(client.stream(data[:-1], end=None))
        assert bytes((await receiver.receive()).payload) == b"first"
        await eventually(lambda: receiver.arriving)
        await client.raw.say(chunk(Kind.OUT_SINK, client.opened, data[-1:]))
        assert len((await receiver.receive()).payload) == 20_000
        assert not receiver.arriving


async def test_a_chunk_that_comes_slowly_is_no_silence(scheme: str, tmp_path: Path) -> None:
    """Nobody is woken for a little of a chunk, but before that is taken for silence it counts."""
    timing = replace(SMALL.timing, idle_timeout=0.5, ping_interval=0.2)
    async with met(scheme, tmp_path, replace(SMALL, timing=timing)) as (client, connection):
        payload = bytes(range(250)) * 160
        data = ENTRY + message(0, payload)
        await client.raw.say(client.stream(data[:5_000], end=None))
        number = client.opened
        await client.raw.until(lambda: client.raw.credit(Kind.IN_STREAM, number) > 40_000)
        wire = chunk(Kind.OUT_SINK, number, data[5_000:])
        await client.raw.say(wire[:20_000])
        for at in range(20_000, 20_050, 2):  # five times as long as silence may last
            await asyncio.sleep(0.1)
            await client.raw.say(wire[at : at + 2])
            assert connection.error is None
        await client.raw.say(wire[20_050:30_000])
        await connection.wait_closed()
        assert "nothing was heard for 0.5 s" in str(connection.error)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_goes_in_the_middle_of_a_large_chunk(
    scheme: str, reset: bool, tmp_path: Path
) -> None:
    """Its end is seen though nobody is woken for less than the rest of the chunk."""
    async with met(scheme, tmp_path) as (client, connection):
        data = ENTRY + message(0, bytes(40_000))
        await client.raw.say(client.stream(data[:5_000], end=None))
        number = client.opened
        await client.raw.until(lambda: client.raw.credit(Kind.IN_STREAM, number) > 40_000)
        await client.raw.say(chunk(Kind.OUT_SINK, number, data[5_000:])[:20_000])
        await eventually(lambda: entry(connection).arriving)
        if reset:
            client.raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.raw.close()
        await connection.wait_closed()
        assert "nothing was heard" not in str(connection.error)
        with pytest.raises(ConnectionLost):
            await entry(connection).receive()


async def test_a_peer_that_grants_no_stream_anything(scheme: str, tmp_path: Path) -> None:
    """Sends wait at their mark, and the cancel leaves all the same, on the top level's credit."""
    async with met(scheme, tmp_path) as (client, connection):
        sender = await back_channel(client, connection)
        sent = 0
        with pytest.raises(TimeoutError):
            while True:
                async with asyncio.timeout(0.2):
                    await sender.send(bytes(50_000))
                sent += 1
        # What left with the opening chunk, the mark, and the one that went over it.
        assert sent * 50_000 <= SMALL.bpmux.opening + SMALL.flow.channel_high_water + 50_000
        assert connection.snapshot().queued_bytes <= SMALL.flow.channel_high_water + 100_000
        before = len(client.raw.chunks)
        sender.cancel()
        await client.raw.until(
            lambda: any(
                codec.CANCEL_SENDER in (found.payload or b"")
                for found in client.raw.chunks[before:]
            )
        )
        await eventually(lambda: connection.snapshot().queued_bytes == 0)
        assert connection.error is None


async def test_a_peer_that_reads_nothing_is_left_at_last(scheme: str, tmp_path: Path) -> None:
    async with met(scheme, tmp_path) as (client, connection):
        sender = await back_channel(client, connection)
        client.raw.read(False)
        await client.raw.say(*(chunk(Kind.IN_STREAM, n, credit=2**40) for n in (1, 2)))
        with pytest.raises(TimeoutError):
            while True:
                async with asyncio.timeout(0.2):
                    await sender.send(bytes(50_000))
        assert connection.snapshot().queued_bytes <= SMALL.flow.channel_high_water + 100_000
        connection.close_soon(0, "enough")
        await connection.wait_closed()
        with pytest.raises(ConnectionLost, match="closed here"):
            await sender.send(b"more")


BROKEN = {
    "credit beyond all": chunk(Kind.IN_STREAM, 0, credit=2**64 - 1),
    "bytes beyond the window": chunk(Kind.OUT_SINK, 3, bytes(70_000)) * 2,
    "a stream out of turn": chunk(Kind.OUT_SINK, 77, b"", credit=9),
    "a request": chunk(Kind.OUT_REQUEST, 1, b"?"),
    "a kind of message that there is not": chunk(Kind.IN_SINK, 0, b"\7"),
    "no chunk": b"\xff" * 40,
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_breaks_bpmux_ends_every_handle(scheme: str, name: str, tmp_path: Path) -> None:
    async with nothing_left():
        await broken(scheme, BROKEN[name], tmp_path)


async def broken(scheme: str, said: bytes, folder: Path) -> None:
    async with met(scheme, folder) as (client, connection):
        sender = await back_channel(client, connection)
        waiting = [
            asyncio.create_task(entry(connection).receive()),
            asyncio.create_task(sender.wait_closed()),
        ]
        await asyncio.sleep(0)
        await client.raw.say(said)
        await client.raw.until_over()
        for task in waiting:
            with pytest.raises(ConnectionLost, match="broke"):
                await task
        with pytest.raises(ConnectionLost):
            await sender.send(b"more")
        # It was told why, in the close (BP-4 allows as much).
        ends = [found.end for found in client.raw.of(Kind.IN_SINK, 0) if found.end is not None]
        assert len(ends) <= 1


async def test_streams_without_end_meet_the_limit(scheme: str, tmp_path: Path) -> None:
    async with met(scheme, tmp_path) as (client, connection):
        with pytest.raises(ConnectionLost, match="allowed"):
            half = message(0, bytes(50_000))[:1000]
            await client.raw.say(*(client.stream(ENTRY + half, end=None) for _ in range(2000)))
            await entry(connection).receive()
        assert connection.snapshot().streams_in <= 64


async def test_a_reset_inside_a_chunk_ends_every_handle(scheme: str, tmp_path: Path) -> None:
    async with nothing_left():
        await reset_inside(scheme, tmp_path)


async def reset_inside(scheme: str, folder: Path) -> None:
    async with met(scheme, folder) as (client, connection):
        sender = await back_channel(client, connection)
        whole = client.stream(ENTRY + message(1, bytes(40_000)))
        await client.raw.say(whole[:20_000])
        await eventually(lambda: connection.snapshot().streams_in)
        linger = struct.pack("ii", 1, 0)
        client.raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.raw.close()
        with pytest.raises(ConnectionLost):
            await entry(connection).receive()
        with pytest.raises(ConnectionLost):
            await sender.wait_closed()
