"""A full upload delays no cancel, over every carrier: what is full is full for messages alone.

Nothing here measures time. An upload that is stuck must not have moved by a byte when the end of
another channel arrives; one that runs must still have nearly all of its queue before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from aqueduct import Connection, Mode, Receiver, Sender, channel
from aqueduct.config import DEFAULT, Config, Flow
from aqueduct.errors import Cancelled, Finished, LostInTransit, ReceiverClosed
from tests.channels.peers import Carrier, MiB, Peers, at_rest, ending, eventually, joined, within

KiB = 1 << 10

NARROW = replace(
    DEFAULT,
    flow=Flow(
        receive_budget=128 * KiB,
        channel_receive_bytes=96 * KiB,  # two uploads want more than there is for all
        initial_window=2 * KiB,
        read_ahead=16 * KiB,
        admitted_window=32 * KiB,
        channel_high_water=64 * KiB,
        connection_high_water=320 * KiB,  # and six queue more than all may
        streams=64,
        unordered_streams=32,  # and three want more streams than there are
    ),
    timing=replace(DEFAULT.timing, receipt_deadline=0.3),
)


class Full:
    """A connection on which the client can send no message more, and channels beside the uploads.

    Each upload is as far as it can get: the server's budget, the windows of the streams, the
    streams that messages may use, and the marks of the client's queue are all used up. Before,
    more has passed than a limit of the connection would allow that did not follow consumption.
    """

    UNORDERED, ORDERED = 0, 3
    """The first of three uploads of each kind."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.uploads: list[tuple[Sender, Receiver]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.sent = 0

    async def fill(self) -> None:
        client, flow = self.peers.client, NARROW.flow
        passing, read = await self.peers.to_server()
        for _ in range(3 * flow.streams * flow.initial_window // (32 * KiB)):
            await within(passing.send(bytes(32 * KiB)))
            assert (await within(read.receive())).size == 32 * KiB
        passing.finish()
        assert type(await ending(read)) is Finished
        for mode, size in ((Mode.UNORDERED, 1 * KiB), (Mode.ORDERED, 8 * KiB)):
            added = [await self.peers.to_server(mode) for _ in range(3)]
            self.uploads += added
            for sender, _ in added:
                self.tasks.append(asyncio.create_task(self._upload(sender, size)))
            await at_rest(lambda: self.sent, *(self._progress_of(r) for _, r in self.uploads))
        assert not any(sender.writable for sender, _ in self.uploads)
        server, queued = self.peers.server.core.snapshot(), client.core.snapshot()
        assert server["budget_used_bytes"] + 9 * KiB > flow.receive_budget
        assert queued["queued_bytes"] >= flow.connection_high_water
        assert queued["streams_waiting"] > 0
        assert client.carrier.openable <= client.core._shared.outgoing._most_openable / 4

    def progress(self) -> tuple[int, ...]:
        """What has moved: messages taken from the uploaders, bytes admitted for each upload."""
        return (self.sent, *(self._progress_of(receiver)() for _, receiver in self.uploads))

    async def _upload(self, sender: Sender, size: int) -> None:
        while True:
            await sender.send(bytes(size))
            self.sent += 1

    def _progress_of(self, receiver: Receiver) -> Any:
        half = receiver._half
        assert half is not None
        return lambda: half.queue.charged

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def full(carrier: Carrier, seed: int) -> AsyncIterator[Full]:
    """Two peers; the test fills the connection when it has its own channels."""
    async with joined(carrier, NARROW, seed=seed) as peers:
        found = Full(peers)
        yield found
        await found.end()
        for sender, _ in found.uploads:
            sender.cancel()
        await peers.forgotten()  # nothing of all that is left


@pytest.mark.requirement("AQ-35")
@pytest.mark.requirement("AQ-R31")
async def test_a_cancel_a_close_a_finish_and_acks_pass_a_full_upload(full: Full) -> None:
    peers = full.peers
    cancelled = [await peers.to_server(mode) for mode in Mode]
    closed = [await peers.to_server(mode) for mode in Mode]
    finished = [await peers.to_server(mode) for mode in Mode]
    answered = [await peers.to_client(mode) for mode in (Mode.ORDERED, Mode.UNORDERED)]
    for sender, receiver in (*cancelled, *closed, *finished):
        await sender.send(b"early", mode=Mode.ORDERED)
        assert (await within(receiver.receive())).size == 5
    await full.fill()
    before = full.progress()
    for sender, receiver in cancelled:
        sender.cancel()
        assert type(await ending(receiver)) is Cancelled
    assert full.progress() == before
    for sender, receiver in closed:
        receiver.close()
        assert type(await ending(sender)) is ReceiverClosed
    assert full.progress() == before
    for sender, receiver in finished:
        sender.finish()
        assert type(await ending(receiver)) is Finished
        assert await ending(sender) is None  # and its last word came back
    assert full.progress() == before
    for sender, receiver in answered:  # the other way is free, and its acks go up
        for index in range(10):
            await within(sender.send(b"%d" % index))
            await within(receiver.receive())
        half = sender._half
        assert half is not None
        await eventually(lambda half=half: not half.unsettled)  # type: ignore[misc]
        receiver.close()
        assert type(await ending(sender)) is ReceiverClosed
    assert full.progress() == before


@pytest.mark.requirement("AQ-41")
@pytest.mark.requirement("AQ-R27")
async def test_a_forgotten_channel_is_forgotten_beside_a_full_upload(
    full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = full.peers
    out, into = await peers.to_server(Mode.UNRELIABLE)
    await out.send(b"early", mode=Mode.ORDERED)
    assert (await within(into.receive())).size == 5
    await full.fill()
    before = full.progress()
    # The carrier may drop any datagram; it drops the one that carries these two.
    with monkeypatch.context() as dropping:
        dropping.setattr(peers.client.carrier, "send_datagram", lambda data: False)
        sender, away = channel()
        back, receiver = channel()
        out.send_nowait(b"with channels", attachments=[away, back])
        sender.send_nowait(b"for a channel whose message never comes")
        sender.cancel()
        spare, away = channel()
        out.send_nowait(b"with another", attachments=[away])
        spare.send_nowait(b"what has no room at the server")
        await asyncio.sleep(0)  # the datagrams go, that is, they do not
    assert type(await ending(spare)) is LostInTransit
    assert type(await ending(receiver)) is LostInTransit
    assert type(await ending(sender)) is Cancelled
    await eventually(lambda: peers.server.core.channels == 2 + len(full.uploads))
    await eventually(lambda: peers.client.core.channels == 2 + len(full.uploads))
    assert full.progress() == before
    out.finish()
    assert type(await ending(into)) is Finished
    assert full.progress() == before


@pytest.mark.requirement("AQ-35")
@pytest.mark.requirement("AQ-43")
@pytest.mark.parametrize("number", [Full.ORDERED, Full.UNORDERED], ids=["ordered", "unordered"])
async def test_a_full_upload_itself_is_cancelled_or_closed_at_once(full: Full, number: int) -> None:
    await full.fill()
    sender, receiver = full.uploads[number]
    other, unread = full.uploads[number + 1]
    sender.cancel()
    # Not one of its messages has to be read first.
    await eventually(lambda: receiver.error is not None)
    with pytest.raises(Cancelled):
        receiver.receive_nowait()
    with pytest.raises(Cancelled):
        await within(full.tasks[number])
    unread.close()
    with pytest.raises(ReceiverClosed):
        await within(full.tasks[number + 1])
    assert type(await ending(other)) is ReceiverClosed


def counted(connection: Connection, name: str) -> int:
    """Bytes of streams that the carrier has ``sent``, or ``received``."""
    found = connection.carrier.snapshot()[name]
    assert isinstance(found, int)
    return found


def late_bytes(carrier: Carrier, config: Config) -> int:
    """The most that a byte stream delivers between what left before a cancel and the word of it.

    The take that waited for the kernel goes first: it is one chunk. And since both ends share an
    event loop, the reader reads on in its turn before the application has one. What the kernel may
    hold back of what left is counted elsewhere: tests/carriers/test_stream_fairness.py.
    """
    assert carrier.late_turns is not None
    turn = config.byte_stream.wake_up + config.byte_stream.read_ahead
    return config.bpmux.chunk + carrier.late_turns * turn


@pytest.mark.requirement("AQ-35")
async def test_a_cancel_overtakes_what_is_queued(carrier: Carrier, seed: int) -> None:
    """An upload runs, with MiBs in its queue: little of it arrives before the cancel does."""
    config = replace(
        DEFAULT,
        quic=replace(DEFAULT.quic, transport_buffer=128 * KiB),
        byte_stream=replace(DEFAULT.byte_stream, wake_up=512 * KiB),
    )
    # How much a kernel takes of a byte stream is its own affair: more is queued than it would.
    uploaded = 8 * MiB if carrier.late_turns is None else 32 * MiB
    body = bytes(32 * KiB)
    async with joined(carrier, config, seed=seed) as peers:
        upload, reading = await peers.to_server()
        others = [await peers.to_server() for _ in range(3)]
        for sender, receiver in others:
            await sender.send(b"early")
            await within(receiver.receive())
        for _ in range(uploaded // len(body)):
            upload.send_nowait(body)
        got = 0
        moved = asyncio.Event()

        async def read() -> None:
            nonlocal got
            async for message in reading:
                got += message.size
                moved.set()

        task = asyncio.create_task(read())
        for sender, receiver in others:
            moved.clear()
            await within(moved.wait())
            start = got
            sender.cancel()
            await asyncio.sleep(0)  # the cancel goes to the carrier
            if carrier.late_turns is not None:
                left = counted(peers.client, "sent")
            assert type(await ending(receiver)) is Cancelled
            if carrier.late_turns is not None:
                assert counted(peers.server, "received") - left <= late_bytes(carrier, config)
            else:
                # What was in flight, and again if the cancel had to be sent twice or more.
                assert got - start <= 8 * config.quic.transport_buffer
        assert got <= uploaded / 2 and upload.queued >= uploaded * 3 / 8 and not task.done()
        upload.cancel()
        with pytest.raises(Cancelled):
            await within(task)
