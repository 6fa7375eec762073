"""Back pressure or not, as the sender chooses: waiting for room, dropping, and the hard limit."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from aqueduct.config import DEFAULT, Flow, Limits
from aqueduct.endpoint import Mode, Receiver, Sender
from aqueduct.errors import ConfigError, SendQueueFull
from tests.support.endpoints import PLACES, eventually, place

SMALL = dataclasses.replace(
    DEFAULT,
    flow=dataclasses.replace(
        DEFAULT.flow,
        channel_receive_bytes=1 << 20,
        channel_high_water=1 << 20,
        channel_hard_limit=4 << 20,
    ),
)
NETWORKS = ("memory", "quic")


@pytest.mark.requirement("AQ-R17")
@pytest.mark.requirement("AQ-31")
@pytest.mark.parametrize("kind", PLACES)
async def test_unreliable_sends_that_wait_lose_nothing_on_this_side(kind: str) -> None:
    async with place(kind) as world:
        sender, receiver = await world.pair(mode=Mode.UNRELIABLE)
        count = 3000

        async def produce() -> None:
            for index in range(count):
                await sender.send(b"%d" % index)
            sender.finish()

        task = asyncio.create_task(produce())
        got = [bytes(message.payload) async for message in receiver]
        await task
        if kind == "quic":  # the receiver's kernel may drop what comes too fast
            assert len(got) > count // 2
            assert set(got) <= {b"%d" % index for index in range(count)}
        else:
            assert got == [b"%d" % index for index in range(count)]
        if world.networked:
            assert world.client.core._shared.datagrams_dropped == 0


@pytest.mark.requirement("AQ-R17")
@pytest.mark.requirement("AQ-38")
@pytest.mark.parametrize("kind", NETWORKS)
async def test_unreliable_sends_that_do_not_wait_are_dropped_and_counted(kind: str) -> None:
    async with place(kind) as world:
        sender, receiver = await world.pair(mode=Mode.UNRELIABLE)
        room = world.client.carrier.datagram_room
        count = room * 4
        numbers = [sender.send_nowait(b"%d" % index) for index in range(count)]
        assert numbers == list(range(count)), "what is dropped has its number all the same"
        shared = world.client.core._shared
        assert shared.datagrams_dropped == count - room
        assert len(shared.effects) <= room, "what finds no room takes no memory"
        assert not sender.writable
        async with asyncio.timeout(10):
            await sender.wait_writable()
        sender.finish()
        got = [bytes(message.payload) async for message in receiver]
        assert got == [b"%d" % index for index in range(room)]
        async with asyncio.timeout(10):
            await sender.wait_closed()  # announced, nacked, settled: all is well


async def fill(sender: Sender, mode: Mode) -> int:
    """Sends without waiting until that is refused; returns how many messages were taken."""
    taken = 0
    while taken < 1000:
        try:
            sender.send_nowait(bytes(256 << 10), mode=mode)
        except SendQueueFull:
            return taken
        taken += 1
    pytest.fail("there is no limit")


@pytest.mark.requirement("AQ-R31")
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("kind", NETWORKS)
async def test_what_is_queued_without_waiting_has_a_hard_limit(kind: str, mode: Mode) -> None:
    async with place(kind, SMALL) as world:
        sender, receiver = await world.pair()
        taken = await fill(sender, mode)  # too large for a datagram: all go by stream
        assert taken == SMALL.flow.channel_hard_limit // (256 << 10)
        assert not sender.writable
        with pytest.raises(SendQueueFull, match=r"channel_hard_limit.*wait_writable"):
            sender.send_nowait(b"", mode=mode)
        sender.send_nowait(bytes(20_000), mode=mode, force=True)
        waiting = asyncio.ensure_future(sender.send(bytes(20_001), mode=mode))
        async with asyncio.timeout(20):
            got = [(await receiver.receive()).size for _ in range(taken + 2)]
        await waiting
        assert sorted(got) == [20_000, 20_001, *[256 << 10] * taken], "nothing of it was lost"
        await eventually(lambda: sender.writable)
        sender.send_nowait(b"fine")


@pytest.mark.requirement("AQ-R31")
@pytest.mark.parametrize("kind", NETWORKS)
async def test_messages_without_an_acknowledgement_have_a_hard_limit(kind: str) -> None:
    config = dataclasses.replace(DEFAULT, limits=Limits(unacknowledged=10))
    async with place(kind, config) as world:
        sender, receiver = await world.pair()
        for _ in range(10):
            sender.send_nowait(b"x")
        with pytest.raises(SendQueueFull, match=r"Limits\.unacknowledged"):
            sender.send_nowait(b"x")
        await sender.send(b"after an ack")
        for _ in range(11):
            await receiver.receive()


async def test_a_local_pair_has_the_same_limits() -> None:
    async with place("local") as world:
        sender, receiver = await world.pair()
        limit = DEFAULT.flow.channel_hard_limit
        block = bytes(8 << 20)
        for _ in range(limit // len(block)):
            sender.send_nowait(block)
        with pytest.raises(SendQueueFull):
            sender.send_nowait(b"x")
        sender.send_nowait(b"y", force=True)
        assert sender.queued == limit + 1
        assert await unreliable_dropped(sender, receiver)


async def unreliable_dropped(sender: Sender, receiver: Receiver) -> bool:
    """A full local pair drops an unreliable message, as the transport would."""
    await receiver.receive()
    assert not sender.writable
    before = sender.queued
    assert sender.send_nowait(b"dropped", mode=Mode.UNRELIABLE) == 0
    return sender.queued == before


async def test_a_sender_waits_for_room_in_its_own_mode_alone() -> None:
    async with place("memory") as world:
        sender, _receiver = await world.pair(mode=Mode.UNRELIABLE)
        while sender.writable:
            sender.send_nowait(b"x")
        await sender.send(b"reliable ones have room", mode=Mode.ORDERED)
        blocked = asyncio.ensure_future(sender.send(b"x"))
        async with asyncio.timeout(10):
            await blocked
        assert sender.writable


@pytest.mark.requirement("AQ-R31")
def test_the_hard_limit_is_not_below_the_mark() -> None:
    with pytest.raises(ConfigError, match=r"channel_hard_limit \(1\)"):
        Flow(channel_hard_limit=1)
    with pytest.raises(ConfigError, match="channel_hard_limit"):
        Flow(channel_hard_limit=0)


@pytest.mark.parametrize("kind", NETWORKS)
async def test_the_room_returns_however_small_the_bursts_are(kind: str) -> None:
    async with place(kind) as world:
        sender, receiver = await world.pair(mode=Mode.UNRELIABLE)
        shared = world.client.core._shared
        whole = world.client.carrier.datagram_room
        for _ in range(20):
            for _ in range(whole // 3):
                sender.send_nowait(b"x")
            await eventually(lambda: shared.datagram_room == whole)
        assert shared.datagrams_dropped == 0
        receiver.close()
