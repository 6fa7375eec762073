"""A byte stream is shared: what is small or urgent passes what is queued, and shares are equal.

Counted in bytes, at a proxy that passes as many as the test says and whose own buffers are small.
What may go before something that is sent now: the rest of the chunk that was taken for the kernel,
what the kernel has and has not sent (ByteStream.notsent_lowat), and, beyond what the rule counts,
what
the buffers of the kernel hold on the way to the proxy, and the step in which it passes: ``SLACK``.
What has been sent and is not read yet is no part of the rule, so the proxy's receive buffers are
small; in place of those a Unix socket has the writer's own (ByteStream.unix_buffer), small here
too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct import Connection, Receiver, Sender, channel, connect, serve
from aqueduct.config import DEFAULT
from aqueduct.errors import Cancelled
from aqueduct.protocol.common.snapshot import SenderView
from aqueduct.testing.stream_relay import StreamRelay, Way
from tests.carriers.streams import SCHEMES, TLS, eventually, listen_at, through

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
UNBOUNDED = replace(
    DEFAULT,
    flow=replace(
        DEFAULT.flow,
        channel_high_water=4 * GiB,
        channel_hard_limit=4 * GiB,
        connection_high_water=4 * GiB,
    ),
    byte_stream=replace(DEFAULT.byte_stream, unix_buffer=DEFAULT.byte_stream.notsent_lowat),
)
STEP = 16 * KiB
SLACK = 48 * KiB
BOUND = DEFAULT.bpmux.chunk + DEFAULT.byte_stream.notsent_lowat + SLACK
BODY = memoryview(bytes(8 * MiB))

pytestmark = pytest.mark.parametrize("scheme", SCHEMES)


class Scene:
    """A server that sends through a narrow way to a client that reads all of it at once."""

    def __init__(self, client: Connection, server: Connection, way: Way) -> None:
        self.client = client
        self.server = server
        self.way = way
        self.tasks: list[asyncio.Task[None]] = []

    async def sender(self) -> tuple[Sender, Receiver]:
        """A channel from the server to the client."""
        sender, receiver = channel()
        await self.client.entrypoint.send(b"", attachments=[sender])
        message = await self.server.entrypoint.receive()
        (attachment,) = message.attachments
        assert isinstance(attachment.handle, Sender)
        return attachment.handle, receiver

    def drop_all(self, receiver: Receiver) -> None:
        """Reads a channel to its end and keeps nothing."""

        async def read() -> None:
            async for _ in receiver:
                pass

        self.tasks.append(asyncio.create_task(read()))

    async def let(self, count: int) -> None:
        """``count`` more bytes pass."""
        self.way.let(count)
        await eventually(lambda: self.way.passed >= (self.way.limit or 0))
        for _ in range(6):
            await asyncio.sleep(0)  # the client reads them and answers

    async def passed_until(self, condition: Callable[[], object]) -> int:
        """How many bytes pass until the client has seen something."""
        before = self.way.passed
        while not condition():
            await self.let(STEP)
            assert self.way.passed - before < 64 * MiB, "it does not come"
        return self.way.passed - before


def unsettled(connection: Connection) -> int:
    """Messages of this side that the other has not acknowledged."""
    views = connection.snapshot().channels
    return sum(view.unsettled for view in views if isinstance(view, SenderView))


@asynccontextmanager
async def scene(scheme: str, folder: Path, config=UNBOUNDED) -> AsyncIterator[Scene]:
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    tls = TLS if scheme == "tls" else None
    listen = listen_at(scheme, folder)
    async with await serve(arrived.set_result, listen, tls=tls, config=config) as listener:
        proxy = StreamRelay(buffer=4 * KiB)
        client = await connect(through(proxy, listener.addresses[0], folder), config=config)
        found = Scene(client, await arrived, proxy.link.down)
        try:
            async with asyncio.timeout(120):
                yield found
        finally:
            for task in found.tasks:
                task.cancel()
            proxy.close()
            await client.close()


@asynccontextmanager
async def clogged(scheme: str, folder: Path) -> AsyncIterator[Scene]:
    """A scene with 1 GiB queued on one channel: 128 times the same 8 MiB."""
    async with scene(scheme, folder) as found:
        bulk, receiver = await found.sender()
        found.drop_all(receiver)
        found.way.stall()
        for _ in range(128):
            bulk.send_nowait(BODY)
        await found.let(3 * MiB)
        assert found.server.snapshot().queued_bytes > GiB - 16 * MiB
        yield found


async def test_a_small_message_passes_a_gigabyte(scheme: str, tmp_path: Path) -> None:
    async with clogged(scheme, tmp_path) as found:
        found.way.resume()
        small, receiver = await found.sender()
        # Opened while the bulk flows; then again and again, at different bytes of it.
        found.way.stall()
        await found.let(1)
        counts = []
        for number in range(6):
            await found.let(100_003)
            got = asyncio.create_task(receiver.receive())
            await small.send(b"%d" % number)
            counts.append(await found.passed_until(got.done))
            assert bytes((await got).payload) == b"%d" % number
        assert max(counts) <= BOUND, counts


async def test_cancels_acks_and_pongs_pass_a_gigabyte(scheme: str, tmp_path: Path) -> None:
    async with clogged(scheme, tmp_path) as found:
        found.way.resume()
        doomed, receiver = await found.sender()
        found.way.stall()
        await found.let(1)
        counts = {}
        end = asyncio.create_task(receiver.receive())
        doomed.cancel()
        counts["cancel"] = await found.passed_until(end.done)
        assert isinstance(end.exception(), Cancelled)

        client = found.client
        await client.entrypoint.send(b"answer me")
        assert bytes((await found.server.entrypoint.receive()).payload) == b"answer me"
        await asyncio.sleep(2 * DEFAULT.timing.ack_delay)
        counts["ack"] = await found.passed_until(lambda: not unsettled(client))
        pong = asyncio.create_task(client.ping())
        await asyncio.sleep(0.01)
        counts["pong"] = await found.passed_until(pong.done)
        assert max(counts.values()) <= BOUND, counts


async def test_credit_passes_a_gigabyte(scheme: str, tmp_path: Path) -> None:
    """An upload goes on at full width while the other way is full: its credit is not behind."""
    async with clogged(scheme, tmp_path) as found:
        reading = found.server.entrypoint
        body = memoryview(bytes(4 * MiB))
        before = found.way.passed
        sending = asyncio.create_task(found.client.entrypoint.send(body))
        got = asyncio.create_task(reading.receive())
        passed = await found.passed_until(got.done)
        await sending
        assert len((await got).payload) == 4 * MiB
        # One credit or two were waited for on the way, each behind what was in the kernel.
        assert passed <= 3 * BOUND
        assert found.way.passed > before


async def test_bulky_channels_have_equal_shares(scheme: str, tmp_path: Path) -> None:
    """By bytes, whatever the size of their messages: within a chunk, and one message."""
    wide = replace(UNBOUNDED, flow=replace(UNBOUNDED.flow, initial_window=8 * MiB))
    async with scene(scheme, tmp_path, wide) as found:
        sizes = [16 * KiB, 40_000, 64 * KiB, 100_000, 128 * KiB, 256 * KiB]
        counts = [0] * len(sizes)
        senders = []
        for number in range(len(sizes)):
            sender, receiver = await found.sender()
            senders.append(sender)

            async def count(number: int, receiver: Receiver) -> None:
                async for message in receiver:
                    counts[number] += len(message.payload)

            found.tasks.append(asyncio.create_task(count(number, receiver)))
        found.way.stall()
        for sender, size in zip(senders, sizes, strict=True):
            for _ in range(32 * MiB // size):
                sender.send_nowait(BODY[:size])
        await found.let(6 * MiB)
        # A turn is a chunk; a message counts when its last byte is here.
        for _ in range(5):
            await found.let(MiB + 77_777)
            assert max(counts) - min(counts) <= DEFAULT.bpmux.chunk + max(sizes), counts
        assert min(counts) > MiB
