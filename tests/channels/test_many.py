"""Many channels at once on one connection, over every carrier: more than there are streams."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest

from aqueduct import Mode, Receiver, Sender, channel
from aqueduct.config import DEFAULT
from aqueduct.errors import Cancelled, Finished, ReceiverClosed
from tests.channels.peers import CARRIERS, Peers, ending, eventually, joined, payloads, within
from tests.support.selection import mostly_long

LIVE = 300
MORE_THAN_STREAMS = 1_500
NAMES = mostly_long(["memory", "quic", "quic-2%", "quic-10%"], "memory", "quic")


async def open_both_ways(peers: Peers, count: int) -> list[tuple[Sender, Receiver]]:
    """Pairs that the client made: by turns it sends or receives on them, in all modes by turns."""
    pairs: list[tuple[Sender, Receiver]] = []
    for start in range(0, count, 50):
        batch = [channel(mode=tuple(Mode)[number % 3]) for number in range(start, start + 50)]
        theirs = await peers.call(*(pair[1 - number % 2] for number, pair in enumerate(batch)))
        for number, handle in enumerate(theirs):
            sender, receiver = batch[number]
            if number % 2:
                handle._mode = tuple(Mode)[(start + number) % 3]
                pairs.append((handle, receiver))
            else:
                pairs.append((sender, handle))
    return pairs


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-45")
@pytest.mark.parametrize("name", NAMES)
async def test_300_live_channels_of_all_modes_with_messages_both_ways(name: str, seed: int) -> None:
    """Each has a twin for the answers; all are open while every one of them is used."""
    carrier, chance = CARRIERS[name], random.Random(seed)
    async with joined(carrier, seed=seed) as peers:
        pairs = await open_both_ways(peers, 2 * LIVE)
        channels = [(pairs[number], pairs[number + 1]) for number in range(0, 2 * LIVE, 2)]
        assert peers.client.core.channels == peers.server.core.channels == 2 * LIVE + 1

        async def exchange(index: int, text: bytes) -> None:
            (sender, receiver), (back, answers) = channels[index]
            # This one must come: where any are lost, it is too large for a datagram.
            await sender.send(text.ljust(1500, b"."))
            assert (await receiver.receive()).payload[: len(text)] == text
            await back.send(b"re: " + text)
            if back._mode is not Mode.UNRELIABLE:
                assert bytes((await answers.receive()).payload) == b"re: " + text

        for turn in range(3):
            order = list(range(LIVE))
            chance.shuffle(order)
            await within(
                asyncio.gather(*(exchange(index, b"%d %d" % (turn, index)) for index in order))
            )
            assert peers.client.core.channels == peers.server.core.channels == 2 * LIVE + 1
        for index, ((sender, receiver), (back, answers)) in enumerate(channels):
            wanted: tuple[type[Exception] | None, ...]
            if index % 3 == 0:
                sender.finish()
                back.cancel()
                wanted = (None, Finished, Cancelled, Cancelled)
            elif index % 3 == 1:
                receiver.close()
                back.finish()
                wanted = (ReceiverClosed, ReceiverClosed, None, Finished)
            else:
                sender.cancel()
                answers.close()
                wanted = (Cancelled, Cancelled, ReceiverClosed, ReceiverClosed)
            halves = (sender, receiver, back, answers)
            ends = [await ending(handle) for handle in halves]
            assert [type(error) if error else None for error in ends] == list(wanted)
        await peers.forgotten()
        await no_streams_left(peers)


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-36")
@pytest.mark.parametrize("name", NAMES)
async def test_more_live_ordered_channels_than_streams(name: str, seed: int) -> None:
    """Each keeps its stream, and that of its acks: they do not count against Flow.streams."""
    assert DEFAULT.flow.streams < MORE_THAN_STREAMS
    carrier, chance = CARRIERS[name], random.Random(seed)
    async with joined(carrier, seed=seed) as peers:
        pairs: list[tuple[Sender, Receiver]] = []
        for _ in range(0, MORE_THAN_STREAMS, 300):
            batch = [channel() for _ in range(300)]
            theirs = await peers.call(*(receiver for _, receiver in batch))
            pairs += [(sender, handle) for (sender, _), handle in zip(batch, theirs, strict=True)]
        for turn in range(2):
            chance.shuffle(pairs)
            for sender, _ in pairs:
                sender.send_nowait(b"message %d" % turn)
            for _, receiver in pairs:
                assert bytes((await within(receiver.receive())).payload) == b"message %d" % turn
            halves = [sender._half for sender, _ in pairs]
            await eventually(partial(all_settled, halves))
            for side in peers.sides:
                assert side.core.channels == MORE_THAN_STREAMS + 1
        # All streams of messages are open still, and there is room for others.
        assert int(str(peers.client.core.snapshot()["streams_waiting"])) == 0
        extra, late = await peers.to_server(Mode.UNORDERED)
        for index in range(100):
            await within(extra.send(b"%d" % index))
        extra.finish()
        assert len(await within(payloads(late))) == 100
        for sender, receiver in pairs:
            sender.finish()
            assert await within(payloads(receiver)) == []
        await peers.forgotten()
        await no_streams_left(peers)


async def no_streams_left(peers: Peers) -> None:
    """Every stream of a channel is over on both sides, but those of the entrypoint."""

    def few() -> bool:
        found = [side.core.snapshot() for side in peers.sides]
        return all(side["streams_in"] <= 2 and side["streams_out"] <= 2 for side in found)

    await eventually(few)


def all_settled(halves: list[Any]) -> bool:
    return all(half is not None and not half.unsettled for half in halves)
