"""How each channel ends, told apart: every later use of either handle gives the same error."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from aqueduct.endpoint import Mode, Receiver, Sender, channel
from aqueduct.errors import (
    Cancelled,
    ConnectionLost,
    Finished,
    LocalProtocolError,
    LostInTransit,
    MessageLost,
    ReceiverClosed,
)
from tests.support.endpoints import PLACES, Place, eventually, place

pytestmark = [pytest.mark.requirement("AQ-R18")]

Ends = tuple[Any, Any]


@pytest.fixture(params=PLACES)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with place(request.param) as found:
        yield found


# ------------------------------------------------------------ the ways to end


async def finished(world: Place, make: Any) -> Ends:
    sender, receiver = await make()
    sender.send_nowait(b"read")
    sender.finish()
    assert bytes((await receiver.receive()).payload) == b"read"
    return sender, receiver


async def cancelled(world: Place, make: Any) -> Ends:
    sender, receiver = await make()
    sender.send_nowait(b"dropped or not")
    sender.cancel()
    return sender, receiver


async def closed(world: Place, make: Any) -> Ends:
    sender, receiver = await make()
    sender.send_nowait(b"unread")
    receiver.close()
    return sender, receiver


async def unused(world: Place, make: Any) -> Ends:
    sender, receiver = await make(oneshot=True)
    sender.finish()
    return sender, receiver


async def used(world: Place, make: Any) -> Ends:
    sender, receiver = await make(oneshot=True)
    sender.send_nowait(b"the one")
    assert bytes((await receiver.receive()).payload) == b"the one"
    return sender, receiver


async def disconnected(world: Place, make: Any) -> Ends:
    sender, receiver = await make()
    await world.client.close(7, "enough")
    await world.server.wait_closed()
    return sender, receiver


async def forgotten(world: Place, make: Any) -> Ends:
    """The client, which created the channel, says FORGET_CHANNEL and has lost it itself."""
    sender, receiver = await make()
    for handle in (sender, receiver):
        if handle._connection is world.client:
            world.client.core._reader.endings.lose([handle._half.channel])
            world.client.pump.flush_soon()
    return sender, receiver


WAYS: dict[str, tuple[Callable[..., Awaitable[Ends]], Any, Any]] = {
    "finished": (finished, None, Finished),
    "cancelled": (cancelled, Cancelled, Cancelled),
    "receiver closed": (closed, ReceiverClosed, ReceiverClosed),
    "an unused oneshot": (unused, None, Cancelled),
    "a used oneshot": (used, None, Finished),
    "lost in transit": (forgotten, LostInTransit, LostInTransit),
    "connection lost": (disconnected, ConnectionLost, ConnectionLost),
}
NETWORK_ONLY = ("lost in transit", "connection lost")


# ------------------------------------------------------------ the uses


async def send(sender: Sender) -> None:
    await sender.send(b"x")


async def send_nowait(sender: Sender) -> None:
    sender.send_nowait(b"x")


async def send_attached(sender: Sender) -> None:
    _kept, half = channel()
    sender.send_nowait(b"x", attachments=[half])


async def send_datagram(sender: Sender) -> None:
    await sender.send(b"x", mode=Mode.UNRELIABLE)


async def finish(sender: Sender) -> None:
    sender.finish()


async def wait_closed(sender: Sender) -> None:
    await sender.wait_closed()


async def receive(receiver: Receiver) -> None:
    await receiver.receive()


async def receive_nowait(receiver: Receiver) -> None:
    receiver.receive_nowait()


async def iterate(receiver: Receiver) -> None:
    async for _ in receiver:
        pass


Use = Callable[[Any], Awaitable[None]]
SENDS: tuple[Use, ...] = (send, send_nowait, send_attached, send_datagram, finish)


async def outcome(use: Use, handle: Any) -> BaseException | None:
    async with asyncio.timeout(10):
        try:
            await use(handle)
        except Exception as error:  # noqa: BLE001 - whatever it raises is the outcome
            return error
    return None


@pytest.mark.requirement("AQ-43")
@pytest.mark.requirement("AQ-44")
@pytest.mark.requirement("AQ-R19")
@pytest.mark.requirement("AQ-R20")
@pytest.mark.requirement("AQ-R27")
@pytest.mark.parametrize("backward", [False, True], ids=["to the server", "to the client"])
@pytest.mark.parametrize(
    ("kind", "way"),
    [(k, w) for k in PLACES for w in WAYS if k != "local" or w not in NETWORK_ONLY],
)
async def test_every_later_use_gives_the_same_error(kind: str, way: str, backward: bool) -> None:
    async with place(kind) as world:
        await check_uses(world, way, backward)


async def check_uses(world: Place, way: str, backward: bool) -> None:
    end, sender_reads, receiver_reads = WAYS[way]
    sender, receiver = await end(world, world.backward if backward else world.pair)

    async with asyncio.timeout(10):
        await receiver.wait_readable()
    with pytest.raises(receiver_reads) as read:
        while True:
            await receiver.receive()
    reason = receiver.error
    assert read.value is reason
    reads: tuple[Use, ...] = (receive, receive_nowait, iterate, receive)
    for use in reads:
        got = await outcome(use, receiver)
        assert got is (None if use is iterate and receiver_reads is Finished else reason)
        receiver.close()  # without effect
        assert receiver.error is reason
        await receiver.wait_readable()

    settled = await outcome(wait_closed, sender)
    assert type(settled) is (sender_reads or type(None))
    assert sender.error is settled
    for use in (*SENDS, wait_closed, *SENDS):
        got = await outcome(use, sender)
        if sender_reads is not None or use is wait_closed:
            assert got is settled
        else:
            assert isinstance(got, LocalProtocolError)  # its own finish forbids it
        sender.cancel()  # without effect
        assert sender.error is settled
        assert sender.writable
        await sender.wait_writable()


@pytest.mark.requirement("AQ-R27")
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, way)
        for kind in PLACES
        for way in ("cancelled", "receiver closed", "connection lost")
        if kind != "local" or way not in NETWORK_ONLY
    ],
)
async def test_a_waiting_task_gets_the_same_error(kind: str, way: str) -> None:
    async with place(kind) as world:
        sender, receiver = await world.pair()

        async def fill() -> None:
            while True:
                await sender.send(bytes(1 << 20))

        waiting = asyncio.ensure_future(wait_closed(sender))
        blocked = asyncio.ensure_future(fill())
        await eventually(lambda: not sender.writable)
        if way == "cancelled":
            sender.cancel()
        elif way == "receiver closed":
            receiver.close()
        else:
            await world.client.close()
        async with asyncio.timeout(10):
            results = await asyncio.gather(waiting, blocked, return_exceptions=True)
        assert sender.error is not None
        assert list(results) == [sender.error, sender.error]


@pytest.mark.requirement("AQ-R28")
@pytest.mark.parametrize("kind", ["memory", "quic"])
async def test_the_lost_message_of_a_oneshot(kind: str) -> None:
    async with place(kind) as world:
        sender, receiver = await world.pair(oneshot=True)
        world.client.core._shared.datagram_room = 0  # the transport takes none now
        sender.send_nowait(b"lost", mode=Mode.UNRELIABLE)
        for _ in range(3):
            with pytest.raises(MessageLost) as read:
                async with asyncio.timeout(10):
                    await receiver.receive()
            assert read.value is receiver.error
        await sender.wait_closed()
        assert sender.error is None


@pytest.mark.requirement("AQ-R27")
@pytest.mark.parametrize("kind", ["memory", "quic"])
async def test_what_hangs_on_an_unread_message_is_lost_and_what_was_read_is_not(kind: str) -> None:
    async with place(kind) as world:
        carrying, theirs = await world.pair()
        reached, inner = channel()
        carrying.send_nowait(b"", attachments=[inner])
        (attachment,) = (await theirs.receive()).attachments
        theirs.close()  # and before the client knows:
        kept_sender, away = channel()
        away_sender, kept_receiver = channel()
        carrying.send_nowait(b"", attachments=[away, away_sender])
        uses: tuple[tuple[Use, Any], ...] = ((wait_closed, kept_sender), (receive, kept_receiver))
        for use, handle in uses:
            first = await outcome(use, handle)
            assert isinstance(first, LostInTransit)
            assert await outcome(use, handle) is first is handle.error
        assert isinstance(await outcome(wait_closed, carrying), ReceiverClosed)
        reached.send_nowait(b"still here")
        assert bytes((await attachment.handle.receive()).payload) == b"still here"


async def test_an_error_that_is_read_often_does_not_grow(world: Place) -> None:
    sender, receiver = await cancelled(world, world.pair)
    await eventually(lambda: receiver.error is not None)
    depths = set()
    for _ in range(50):
        uses: tuple[tuple[Use, Any], ...] = ((receive_nowait, receiver), (send_nowait, sender))
        for use, handle in uses:
            error = await outcome(use, handle)
            assert error is not None
            depths.add((use, len(traceback.extract_tb(error.__traceback__))))
    assert len(depths) == 2
