"""Loss in transit over every carrier: channels in messages that the network really lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from aqueduct import Mode, Receiver, Sender, channel
from aqueduct.config import DEFAULT
from aqueduct.errors import Cancelled, Finished, LostInTransit, MessageLost, ReceiverClosed
from tests.channels.peers import BRISK, Carrier, Peers, ending, joined, payloads, within

LOSS = 0.2
"""Of all packets, where any are lost: of so many messages some are lost, and some are not."""

COUNT = 50


@pytest.fixture
async def lossy(carrier: Carrier, seed: int) -> AsyncIterator[Peers]:
    """Two peers with a worse network than the carrier's, if it has one that loses."""
    async with joined(carrier, BRISK, seed=seed, drop=LOSS) as found:
        yield found


@dataclass
class Sent:
    """One message and what its sender kept: a half of each channel that went with it."""

    number: bytes
    sender: Sender
    receiver: Receiver
    deep_sender: Sender
    """Of a channel whose other half was sent on ``sender``."""
    deep_receiver: Receiver


async def send_one(out: Sender, index: int, mode: Mode | None = None) -> Sent:
    """A message with two channels; on the one that is sent on here, two more follow at once."""
    sender, away = channel()
    back, receiver = channel()
    number = b"%d" % index
    await out.send(number, attachments=[away, back], mode=mode)
    deep_sender, deep_away = channel()
    deep_back, deep_receiver = channel(oneshot=True)
    await sender.send(number, attachments=[deep_away, deep_back])
    await deep_sender.send(number)
    # Not finished yet: a finish can be delivered before it is known that the channel was lost.
    return Sent(number, sender, receiver, deep_sender, deep_receiver)


async def answer(message: Any) -> bytes:
    """The other side: reads all that came with a message, and answers on what is there for it."""
    number = bytes(message.payload)
    inner, back = (attachment.handle for attachment in message.attachments)
    await back.send(b"got " + number)
    back.finish()
    deep = await inner.receive()
    assert bytes(deep.payload) == number
    deep_inner, deep_back = (attachment.handle for attachment in deep.attachments)
    await deep_back.send(b"deep " + number)
    assert bytes((await deep_inner.receive()).payload) == number
    for handle in (inner, deep_inner):
        assert type(await ending(handle)) is Finished
    return number


async def check_delivered(sent: Sent) -> None:
    sent.sender.finish()
    sent.deep_sender.finish()
    assert await payloads(sent.receiver) == [b"got " + sent.number]
    assert await payloads(sent.deep_receiver) == [b"deep " + sent.number]
    assert await ending(sent.sender) is None
    assert await ending(sent.deep_sender) is None


async def check_lost(sent: Sent) -> None:
    """All four halves read the same, whenever they are asked."""
    for handle in (sent.sender, sent.receiver, sent.deep_sender, sent.deep_receiver):
        error = await ending(handle)
        assert type(error) is LostInTransit, (sent.number, handle, error)
        assert await ending(handle) is error and handle.error is error
    for sender in (sent.sender, sent.deep_sender):
        with pytest.raises(LostInTransit):
            sender.send_nowait(b"x")
        with pytest.raises(LostInTransit):
            sender.finish()


@pytest.mark.requirement("AQ-38")
@pytest.mark.requirement("AQ-47")
@pytest.mark.requirement("AQ-R23")
@pytest.mark.requirement("AQ-R25")
@pytest.mark.requirement("AQ-R27")
@pytest.mark.parametrize("by_server", [False, True], ids=["client", "server"])
async def test_channels_in_lost_datagrams_are_lost_with_all_that_hangs_on_them(
    lossy: Peers, by_server: bool
) -> None:
    out, into = await (lossy.to_client if by_server else lossy.to_server)(Mode.UNRELIABLE)
    answers: dict[bytes, asyncio.Task[bytes]] = {}

    async def serve() -> None:
        async for message in into:
            assert bytes(message.payload) not in answers
            answers[bytes(message.payload)] = asyncio.create_task(answer(message))

    serving = asyncio.create_task(serve())
    everything = []
    for index in range(COUNT):
        everything.append(await send_one(out, index))
        await asyncio.sleep(0.002)  # a packet for each, or few packets would carry all of them
    out.finish()
    await within(serving)
    for sent in everything:
        await (check_delivered if sent.number in answers else check_lost)(sent)
    assert await within(asyncio.gather(*answers.values())) == list(answers)
    lost = COUNT - len(answers)
    assert (0 < lost < COUNT) if lossy.carrier.loses else lost == 0
    await within(out.wait_closed())  # finished, whatever became of the messages
    await lossy.forgotten(channels=1)


@pytest.mark.requirement("AQ-R27")
@pytest.mark.requirement("AQ-R28")
async def test_a_lost_oneshot_says_so_and_so_do_its_channels(lossy: Peers) -> None:
    """Many oneshots of one datagram each: each is read, or both sides know that it was lost."""
    pairs = [channel(oneshot=True, mode=Mode.UNRELIABLE) for _ in range(COUNT)]
    receivers = await lossy.call(*(receiver for _, receiver in pairs))
    kept = []
    for index, (sender, _) in enumerate(pairs):
        inner, away = channel()
        await sender.send(b"%d" % index, attachments=[away])
        kept.append(inner)
        await asyncio.sleep(0.002)
    lost = 0
    for index, receiver in enumerate(receivers):
        await within(receiver.wait_readable())
        if type(receiver.error) is MessageLost:
            lost += 1
            assert await ending(receiver) is receiver.error
            assert type(await ending(kept[index])) is LostInTransit
            continue
        message = await receiver.receive()
        assert bytes(message.payload) == b"%d" % index
        assert type(await ending(receiver)) is Finished
        await kept[index].send(b"on it")
        (attachment,) = message.attachments
        assert bytes((await within(attachment.handle.receive())).payload) == b"on it"
        kept[index].finish()
        assert type(await ending(attachment.handle)) is Finished
    assert (0 < lost < COUNT) if lossy.carrier.loses else lost == 0
    for sender, _ in pairs:
        await within(sender.wait_closed())
    await lossy.forgotten()


@pytest.mark.requirement("AQ-R19")
@pytest.mark.requirement("AQ-R22")
@pytest.mark.requirement("AQ-R26")
@pytest.mark.requirement("AQ-R27")
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_channel_that_ends_midway_leaves_no_handle_waiting(
    lossy: Peers, mode: Mode, how: str
) -> None:
    """Messages with channels are on their way, have come, were read: then their channel ends."""
    out, into = await lossy.to_server(mode)
    everything = []
    for index in range(40):
        everything.append(await send_one(out, index))
        if mode is Mode.UNRELIABLE:
            await asyncio.sleep(0.001)  # or they share few packets, and all of them may be lost
    answers: dict[bytes, asyncio.Task[bytes]] = {}

    async def read() -> None:
        message = await within(into.receive())
        answers[bytes(message.payload)] = asyncio.create_task(answer(message))

    for _ in range(5):
        await read()
    if how == "cancel":
        out.cancel()
        assert type(await ending(out)) is Cancelled
        with pytest.raises(Cancelled):  # what came before the cancel is read as usual
            while True:
                await read()
    else:
        into.close()
        assert type(await ending(out)) is ReceiverClosed
    for sent in everything:
        if sent.number in answers:
            await check_delivered(sent)
            continue
        ends = (type(await ending(sent.sender)), type(await ending(sent.receiver)))
        if ends == (LostInTransit, LostInTransit):
            await check_lost(sent)  # with all below it
            continue
        # It was there, and dropped unread. What hangs on it had come with it, or is lost with it.
        assert ends == (ReceiverClosed, Cancelled)
        deep = (type(await ending(sent.deep_sender)), type(await ending(sent.deep_receiver)))
        assert deep in ((ReceiverClosed, Cancelled), (LostInTransit, LostInTransit))
    assert await within(asyncio.gather(*answers.values())) == list(answers)
    await lossy.forgotten()


@pytest.mark.requirement("AQ-R26")
@pytest.mark.requirement("AQ-R31")
async def test_channels_in_evicted_messages_are_ended_not_lost(carrier: Carrier, seed: int) -> None:
    config = replace(BRISK, flow=replace(DEFAULT.flow, channel_receive_bytes=8 << 10))
    async with joined(carrier, config, seed=seed) as peers:
        out, into = await peers.to_server(Mode.UNRELIABLE)
        kept = []
        for index in range(60):
            sender, away = channel()
            back, receiver = channel()
            await out.send(b"%d" % index, attachments=[away, back])
            kept.append((sender, receiver))
            await asyncio.sleep(0.002)
        out.finish()
        await within(out.wait_closed())  # all are settled, and nothing was read
        read = {int(message.payload): message async for message in into}
        assert 0 < len(read) < 30
        evicted = lost = 0
        for index, (sender, receiver) in enumerate(kept):
            if index in read:
                theirs, answer = (a.handle for a in read[index].attachments)
                assert isinstance(theirs, Receiver) and isinstance(answer, Sender)
                theirs.close()
                answer.finish()
                assert type(await ending(sender)) is ReceiverClosed
                assert type(await ending(receiver)) is Finished
                continue
            ends = (type(await ending(sender)), type(await ending(receiver)))
            assert ends in ((ReceiverClosed, Cancelled), (LostInTransit, LostInTransit))
            evicted += ends == (ReceiverClosed, Cancelled)
            lost += ends == (LostInTransit, LostInTransit)
        assert evicted > 20
        assert lost == 0 or carrier.loses
        await peers.forgotten()
