"""What only a network does to channels: it goes away, comes back, moves, is slow, has a limit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from aqueduct import Mode, Sender, channel
from aqueduct.config import DEFAULT
from aqueduct.errors import ConnectionLost, Finished, LostInTransit
from tests.channels.peers import (
    BRISK,
    CARRIERS,
    Carrier,
    Peers,
    at_rest,
    ending,
    eventually,
    joined,
    payloads,
    turns,
    within,
)
from tests.channels.test_ends import channels_of_all_kinds

KiB = 1 << 10

IMPATIENT = replace(
    DEFAULT, timing=replace(DEFAULT.timing, idle_timeout=1.0, ping_interval=0.2, close_linger=0.5)
)
NETWORKS = [name for name, carrier in CARRIERS.items() if carrier.network is not None]


@pytest.fixture(params=turns(NETWORKS))
def network(request: pytest.FixtureRequest) -> Carrier:
    """Each carrier that goes over a relay."""
    return CARRIERS[request.param]


@pytest.mark.requirement("AQ-R27")
async def test_a_cut_connection_ends_every_handle_on_both_sides(
    network: Carrier, seed: int
) -> None:
    # With little loss before the cut, or the short idle timeout may end it by itself.
    async with joined(network, IMPATIENT, seed=seed, drop=0.02) as peers:
        pairs = await channels_of_all_kinds(peers)
        finished, done = pairs.pop()
        finished.finish()
        assert type(await ending(done)) is Finished
        assert await ending(finished) is None
        unread, queue = pairs.pop()
        for index in range(3):
            await unread.send(b"%d" % index, mode=Mode.ORDERED)
        half = queue._half
        assert half is not None
        await eventually(lambda: len(half.queue) == 3)
        stuck, _ = pairs[0]
        filling = asyncio.create_task(_fill(stuck))
        waiting = [asyncio.create_task(receiver.receive()) for _, receiver in pairs[1:]]
        await asyncio.sleep(0)
        assert peers.relay is not None
        peers.relay.cut = True
        for task in (filling, *waiting):
            with pytest.raises(ConnectionLost, match="nothing was heard for 1 s"):
                await within(task)
        for side in peers.sides:
            await within(side.wait_closed())
            error = side.error
            assert error is not None and error.code is None and not error.remote
        for sender, receiver in pairs:
            for handle in (sender, receiver):
                read = await ending(handle)
                assert type(read) is ConnectionLost and await ending(handle) is read
        # What had come can be read; what had ended stays as it was.
        assert [bytes((await queue.receive()).payload) for _ in range(3)] == [b"0", b"1", b"2"]
        assert type(await ending(queue)) is ConnectionLost
        assert type(await ending(done)) is Finished and finished.error is None


async def _fill(sender: Sender) -> None:
    while True:
        await sender.send(bytes(64 * KiB), mode=Mode.ORDERED)


@pytest.mark.requirement("AQ-38")
@pytest.mark.requirement("AQ-R27")
async def test_an_outage_loses_datagrams_and_nothing_else(network: Carrier, seed: int) -> None:
    async with joined(network, BRISK, seed=seed) as peers:
        pairs = [await peers.to_server(mode) for mode in (Mode.ORDERED, Mode.UNORDERED)]
        out, into = await peers.to_server(Mode.UNRELIABLE)
        assert peers.relay is not None
        peers.relay.cut = True
        lost = []
        for index in range(10):
            sender, away = channel()
            await out.send(b"%d" % index, attachments=[away])
            lost.append(sender)
            for reliable, _ in pairs:
                await reliable.send(b"%d" % index)
        dropped = peers.relay.dropped
        await at_rest(lambda: peers.client.core.snapshot()["queued_bytes"])
        assert peers.relay.dropped > dropped  # they did leave, and were tried again
        peers.relay.cut = False
        out.finish()
        assert await within(payloads(into)) == []
        for sender in lost:
            assert type(await ending(sender)) is LostInTransit
        for reliable, receiver in pairs:
            reliable.finish()
            assert sorted(await within(payloads(receiver))) == [b"%d" % n for n in range(10)]
        await peers.forgotten()


async def test_a_client_whose_port_changes_keeps_its_channels(network: Carrier, seed: int) -> None:
    async with joined(network, seed=seed) as peers:
        pairs = [await peers.to_server(), await peers.to_client()]
        assert peers.relay is not None
        for turn in range(4):
            peers.relay.move()
            for sender, receiver in pairs:
                await sender.send(b"%d" % turn)
                assert bytes((await within(receiver.receive())).payload) == b"%d" % turn
        for sender, receiver in pairs:
            sender.finish()
            assert await within(payloads(receiver)) == []


@pytest.mark.requirement("AQ-37")
async def test_what_is_only_late_is_not_lost(seed: int) -> None:
    """Datagrams come long after their announcement, but within two round trips."""
    config = replace(DEFAULT, timing=replace(DEFAULT.timing, receipt_deadline=0.02))
    slow = {"latency": 0.2, "reorder": 0.5, "delay": 0.15}
    async with joined(CARRIERS["quic"], config, seed=seed, network=slow) as peers:
        out, into = await peers.to_server(Mode.UNRELIABLE)
        kept = []
        for index in range(40):
            sender, away = channel()
            await out.send(b"%d" % index, attachments=[away])
            kept.append(sender)
            await asyncio.sleep(0.002)
        out.finish()
        got = [message async for message in into]
        assert sorted(int(message.payload) for message in got) == list(range(40))
        order = [int(message.payload) for message in got]
        assert order != sorted(order)  # late ones were among them
        for message in got:
            message.attachments[0].handle.close()  # type: ignore[union-attr]
        ends = [type(await ending(sender)).__name__ for sender in kept]
        assert ends == ["ReceiverClosed"] * 40
        await peers.forgotten()


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-32")
@pytest.mark.requirement("AQ-R17")
async def test_what_is_just_too_large_for_a_datagram_goes_by_stream(peers: Peers) -> None:
    """By one byte: each kind of carriage numbers its messages from 0."""
    sender, receiver = await peers.to_server(Mode.UNRELIABLE)
    await at_rest(lambda: peers.client.carrier.datagram_limit)  # QUIC finds out what a path takes
    limit = peers.client.carrier.datagram_limit
    sizes = range(limit - 32, limit + 4)
    numbers = []
    for size in sizes:
        numbers.append(await sender.send(size.to_bytes(size, "big")))
        await asyncio.sleep(0)
    datagrams = numbers.index(0, 1)
    assert numbers == [*range(datagrams), *range(len(numbers) - datagrams)]
    assert sizes[datagrams] <= limit < sizes[datagrams] + 16  # frames around the payload
    sender.finish()
    got = [int.from_bytes(payload, "big") for payload in await within(payloads(receiver))]
    assert len(set(got)) == len(got)
    assert set(sizes[datagrams:]) <= set(got) <= set(sizes)
    if not peers.carrier.loses:
        assert sizes[datagrams - 1] in got  # the largest datagram does get through
