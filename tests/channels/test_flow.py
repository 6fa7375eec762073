"""Back pressure over every carrier: a slow consumer holds its sender, nobody else, and no byte."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from aqueduct import Mode, Sender, channel
from aqueduct.config import DEFAULT, Config, Flow
from tests.channels.peers import (
    BRISK,
    Carrier,
    MiB,
    Peers,
    at_rest,
    eventually,
    joined,
    payloads,
    within,
)

KiB = 1 << 10


def windows(carrier: Carrier, *, whole: bool = False) -> tuple[int, Config]:
    """A size of messages, and a config: parts of the usual where a network makes bytes dear.

    ``whole``: the usual itself wherever nothing is lost.
    """
    share = 128 if carrier.loses else 1 if whole or carrier.network is None else 8
    flow = DEFAULT.flow
    small = Flow(
        receive_budget=flow.receive_budget // share,
        channel_receive_bytes=flow.channel_receive_bytes // share,
        initial_window=flow.initial_window // min(share, 16),
        read_ahead=flow.read_ahead // share,
        admitted_window=flow.admitted_window // share,
        channel_high_water=flow.channel_high_water // share,
        connection_high_water=flow.connection_high_water // share,
    )
    return MiB // share, replace(DEFAULT, flow=small)


def most_ahead(config: Config, size: int) -> int:
    """Bytes of one channel that a sender may be ahead of a consumer that reads nothing."""
    flow = config.flow
    return flow.channel_high_water + flow.channel_receive_bytes + flow.read_ahead + 4 * size


@pytest.mark.requirement("AQ-R31")
@pytest.mark.parametrize("mode", [Mode.ORDERED, Mode.UNORDERED], ids=lambda mode: mode.value)
async def test_high_water_holds_the_sender_and_reading_lets_it_go(
    carrier: Carrier, seed: int, mode: Mode
) -> None:
    size, config = windows(carrier, whole=mode is Mode.ORDERED)
    count = 100 if carrier.loses and mode is Mode.UNORDERED else 40
    async with joined(carrier, config, seed=seed) as peers:
        sender, theirs = await peers.to_server(mode)
        sent = 0

        async def produce() -> None:
            nonlocal sent
            for index in range(count):
                await sender.send(index.to_bytes(4, "big") + bytes(size - 4))
                sent += 1
            sender.finish()

        task = asyncio.create_task(produce())
        await at_rest(lambda: sent)
        assert not sender.writable and not task.done()
        bound = most_ahead(config, size)
        if mode is Mode.UNORDERED:  # each of its streams has a first window, or a small message
            bound += config.flow.unordered_streams * max(config.flow.initial_window, 16 * KiB)
        assert sent >= 8 and sent * size <= bound < count * size
        got = [bytes(payload[:4]) for payload in await within(payloads(theirs))]
        await within(task)
        wanted = [index.to_bytes(4, "big") for index in range(count)]
        assert (got if mode is Mode.ORDERED else sorted(got)) == wanted


async def test_a_slow_consumer_holds_back_its_own_channel_alone(
    carrier: Carrier, seed: int
) -> None:
    size, config = windows(carrier)
    async with joined(carrier, config, seed=seed) as peers:
        stuck, unread = await peers.to_server()
        task = asyncio.create_task(_fill(stuck, size))
        await at_rest(lambda: stuck.queued, lambda: stuck._half.sent if stuck._half else 0)
        assert not stuck.writable
        others = [await peers.to_server(mode) for mode in Mode]
        others += [await peers.to_client(mode) for mode in Mode]
        for sender, receiver in others:
            for _ in range(3):
                await within(sender.send(b"x" * 900, mode=Mode.ORDERED))
                assert (await within(receiver.receive())).size == 900
        assert not stuck.writable and not task.done()
        unread.close()
        await within(asyncio.wait([task]))


@pytest.mark.requirement("AQ-R31")
async def test_a_sender_may_choose_not_to_wait(carrier: Carrier, seed: int) -> None:
    """``send_nowait`` queues above every mark; what was queued arrives whole and in order."""
    size, config = windows(carrier)
    async with joined(carrier, config, seed=seed) as peers:
        sender, theirs = await peers.to_server()
        count = 2 * config.flow.channel_high_water // size
        for index in range(count):
            sender.send_nowait(index.to_bytes(4, "big") + bytes(size - 4))
        sender.finish()
        assert sender.queued > config.flow.channel_high_water and not sender.writable
        assert sender.queued >= count * size
        got = await within(payloads(theirs))
        assert [payload[:4] for payload in got] == [n.to_bytes(4, "big") for n in range(count)]
        await within(sender.wait_closed())
        assert sender.queued == 0


@pytest.mark.requirement("AQ-R31")
async def test_who_takes_from_the_inbox_itself_tells_of_the_room(
    carrier: Carrier, seed: int
) -> None:
    size, config = windows(carrier)
    config = replace(config, flow=replace(config.flow, channel_receive_bytes=4 * size))
    async with joined(carrier, config, seed=seed) as peers:
        sender, theirs = await peers.to_server()
        count = 20
        for index in range(count):
            sender.send_nowait(index.to_bytes(4, "big") + bytes(size - 4))
        queue = theirs.queue
        assert queue is not None
        got: list[bytes] = []
        while len(got) < count:
            await eventually(lambda: bool(queue.waiting) or len(got) + len(queue) == count)
            assert queue.charged <= 4 * size
            while (received := queue.take()) is not None:
                got.append(bytes(memoryview(received.payload)[:4]))
            peers.server.room_came()
        assert got == [index.to_bytes(4, "big") for index in range(count)]
    assert channel()[1].queue is None


@pytest.mark.requirement("AQ-R31")
async def test_unreliable_messages_are_never_held_back_and_the_oldest_make_room(
    carrier: Carrier, seed: int
) -> None:
    config = replace(BRISK, flow=replace(DEFAULT.flow, channel_receive_bytes=16 * KiB))
    async with joined(carrier, config, seed=seed) as peers:
        sender, theirs = await peers.to_server(Mode.UNRELIABLE)
        for index in range(200):
            sender.send_nowait(index.to_bytes(4, "big") + bytes(600))
            assert sender.writable
            if index % 10 == 0:
                await asyncio.sleep(0.005)
        sender.finish()
        await within(sender.wait_closed())  # all of them are acked or nacked, and nothing was read
        half = theirs._half
        assert half is not None and half.queue.charged <= 16 * KiB
        got = [int.from_bytes(payload[:4], "big") for payload in await within(payloads(theirs))]
        most = 16 * KiB // (604 + config.flow.message_overhead)
        assert 0 < len(got) <= most and len(set(got)) == len(got)
        assert min(got) >= 100  # the newest survived; the network may have lost the last
        await peers.forgotten()


@pytest.mark.requirement("AQ-31")
async def test_who_waits_for_room_has_no_datagram_dropped_at_home(peers: Peers) -> None:
    """Many in a row: ``send`` waits until the transport takes another, ``send_nowait`` does not."""
    count = 1_000
    for waits in (True, False):
        sender, receiver = await peers.to_server(Mode.UNRELIABLE)
        reading = asyncio.create_task(payloads(receiver))
        for index in range(count):
            payload = index.to_bytes(4, "big") + bytes(500)
            if waits:
                await within(sender.send(payload))
            else:
                sender.send_nowait(payload)
        sender.finish()
        got = [int.from_bytes(payload[:4], "big") for payload in await within(reading)]
        assert got and len(set(got)) == len(got)
        if not waits:
            assert len(got) < count
        elif not peers.carrier.loses:
            assert sorted(got) == list(range(count))
        await within(sender.wait_closed())


async def test_the_mark_of_the_connection_holds_all_senders(carrier: Carrier, seed: int) -> None:
    size, config = windows(carrier)
    config = replace(config, flow=replace(config.flow, connection_high_water=4 * size))
    count = 20  # each channel's share at the receiver is 16 of them, and that of all 64
    async with joined(carrier, config, seed=seed) as peers:
        pairs = [await peers.to_server() for _ in range(4)]
        tasks = [asyncio.create_task(_fill(sender, size, count)) for sender, _ in pairs]
        await eventually(lambda: not any(sender.writable for sender, _ in pairs))
        sums = await within(asyncio.gather(*(_read(receiver) for _, receiver in pairs)))
        assert sums == [count * size] * 4
        await within(asyncio.gather(*tasks))


async def test_room_is_told_even_if_it_is_there_already(peers: Peers) -> None:
    sender, receiver = channel()
    await peers.call(receiver)
    told = asyncio.Event()
    sender.on_change = told.set
    sender.notify_writable()
    await within(told.wait())


async def test_a_consumer_that_comes_and_goes_gets_every_byte(carrier: Carrier, seed: int) -> None:
    size, config = windows(carrier)
    chance = random.Random(seed)
    async with joined(carrier, config, seed=seed) as peers:
        sender, theirs = await peers.to_server()
        sent = [chance.randbytes(chance.randrange(size // 4)) for _ in range(80)]

        async def produce() -> None:
            for payload in sent:
                await sender.send(payload)
            sender.finish()

        task = asyncio.create_task(produce())
        got: list[bytes] = []
        while len(got) < len(sent):
            for _ in range(chance.randrange(1, 12)):
                if len(got) < len(sent):
                    got.append(bytes((await within(theirs.receive())).payload))
            await asyncio.sleep(chance.random() * 0.02)
        assert got == sent
        assert await within(payloads(theirs)) == []
        await within(task)


async def _fill(sender: Sender, size: int, count: int | None = None) -> None:
    """Sends as much as it may, and finishes; without a count, until the channel ends."""
    sent = 0
    while count is None or sent < count:
        await sender.send(bytes(size))
        sent += 1
    sender.finish()


async def _read(receiver: object) -> int:
    return sum(map(len, await payloads(receiver)))  # type: ignore[arg-type]
