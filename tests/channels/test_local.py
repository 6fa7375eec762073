"""Pairs inside the process, and how they go on when one half is sent away, over every carrier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from aqueduct import Mode, Receiver, Sender, channel
from aqueduct.config import DEFAULT
from aqueduct.endpoint import Headers
from aqueduct.errors import (
    Cancelled,
    ChannelError,
    Finished,
    LocalProtocolError,
    ReceiverClosed,
)
from tests.channels.peers import Peers, ending, eventually, within

Script: TypeAlias = Callable[[Sender, Receiver, list[Any], Headers], Coroutine[Any, Any, None]]


# The same code on a pair inside the process and on a networked one


async def send_and_finish(
    sender: Sender, receiver: Receiver, seen: list[Any], headers: Headers
) -> None:
    for index in range(5):
        await sender.send([b"%d" % index, b"!"], headers=headers * index)
    await eventually(lambda: receiver.readable)
    sender.finish()
    seen += await outcomes(sender.finish, lambda: sender.send_nowait(b"late"), sender.cancel)
    seen += [(bytes(m.payload), m.size, m.headers, m.attachments) async for m in receiver]
    seen.append(await outcome(receiver.receive))
    seen.append(await outcome(sender.wait_closed))
    receiver.close()
    seen.append(await outcome(receiver.receive))


async def cancel_it(sender: Sender, receiver: Receiver, seen: list[Any], headers: Headers) -> None:
    await sender.send(b"one")
    seen.append(bytes((await receiver.receive()).payload))
    sender.cancel()
    seen.append(await outcome(receiver.receive))
    seen += await outcomes(sender.wait_closed, sender.send, sender.finish, sender.cancel)
    seen.append(await outcome(receiver.receive))


async def close_it(sender: Sender, receiver: Receiver, seen: list[Any], headers: Headers) -> None:
    await sender.send(b"one")
    await receiver.wait_readable()
    receiver.close()
    seen.append(await outcome(sender.wait_closed))
    seen += await outcomes(
        sender.send, sender.finish, sender.cancel, receiver.receive, receiver.close
    )


async def carry_channels(
    sender: Sender, receiver: Receiver, seen: list[Any], headers: Headers
) -> None:
    deep_sender, deep = channel()
    back, answers = channel(oneshot=True)
    await sender.send(b"", attachments=[(deep, headers), back])
    message = await receiver.receive()
    theirs, answer = (attachment.handle for attachment in message.attachments)
    seen.append([attachment.headers for attachment in message.attachments])
    assert isinstance(theirs, Receiver) and isinstance(answer, Sender)
    await deep_sender.send(b"deep")
    await answer.send(b"answer")
    seen.append(bytes((await theirs.receive()).payload))
    seen.append(bytes((await answers.receive()).payload))
    seen.append(await outcome(lambda: answer.send_nowait(b"second")))
    seen.append(await outcome(answers.receive))
    deep_sender.cancel()
    seen.append(await outcome(theirs.receive))


async def wait_for_room(sender: Sender, receiver: Receiver, seen: list[Any]) -> None:
    size = DEFAULT.flow.channel_high_water
    sender.send_nowait(bytes(size + 1))
    sender.send_nowait(b"small")
    seen.append(sender.writable)
    waiting = asyncio.create_task(sender.wait_writable())
    seen.append((await receiver.receive()).size == size + 1)
    await waiting
    seen.append((sender.writable, (await receiver.receive()).size))
    sender.cancel()


SCRIPTS = (send_and_finish, cancel_it, close_it, carry_channels)


@pytest.mark.requirement("AQ-42")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("keeps_sender", [True, False], ids=["keeps-sender", "keeps-receiver"])
async def test_code_cannot_tell_a_local_pair_from_a_networked_one(
    peers: Peers, script: Script, keeps_sender: bool
) -> None:
    local: list[Any] = []
    sender, receiver = channel()
    headers = peers.named((b"h", b"v"))
    await within(script(sender, receiver, local, headers))
    networked: list[Any] = []
    sender, receiver = channel()
    (theirs,) = await peers.call(receiver if keeps_sender else sender)
    pair: tuple[Any, Any] = (sender, theirs) if keeps_sender else (theirs, receiver)
    await within(script(*pair, networked, headers))
    assert networked == local and len(local) > 3


async def test_room_comes_back_alike(peers: Peers) -> None:
    if peers.carrier.loses:  # the same with less to carry
        sender, receiver = await peers.to_server()
        await within(send_and_finish(sender, receiver, [], ()))
        return
    local: list[Any] = []
    sender, receiver = channel()
    await within(wait_for_room(sender, receiver, local))
    networked: list[Any] = []
    await within(wait_for_room(*(await peers.to_server()), networked))
    assert networked == local == [False, True, (True, 5)]


async def outcome(call: Callable[[], Any]) -> str:
    """What a call says of the channel: the type of the error, or how it ended otherwise."""
    try:
        result = call()
        if asyncio.iscoroutine(result):
            await within(result)
    except (ChannelError, LocalProtocolError) as error:
        return type(error).__name__
    return "fine"


async def outcomes(*calls: Callable[[], Any]) -> list[str]:
    return [await outcome(call) for call in calls]


# What a pair had when it was networked


@pytest.mark.requirement("AQ-42")
async def test_what_was_sent_before_the_pair_was_networked_goes_first(peers: Peers) -> None:
    sender, receiver = channel()
    await sender.send(b"one")
    await sender.send([b"t", b"wo"])
    inner_sender, inner = channel(oneshot=True)
    await inner_sender.send(b"deep")
    await sender.send(b"three", attachments=[(inner, peers.named((b"h", b"v")))])
    sender.finish()
    (theirs,) = await peers.call(receiver)
    messages = [message async for message in theirs]
    assert [bytes(message.payload) for message in messages] == [b"one", b"two", b"three"]
    (attachment,) = messages[2].attachments
    assert attachment.headers == peers.named((b"h", b"v"))
    assert isinstance(attachment.handle, Receiver)
    assert bytes((await within(attachment.handle.receive())).payload) == b"deep"


@pytest.mark.requirement("AQ-42")
async def test_a_tree_made_in_the_process_is_networked_whole(peers: Peers) -> None:
    """Channels in channels in channels, all made before the first of them leaves."""

    def grow(depth: int, path: bytes) -> tuple[Receiver, list[tuple[bytes, Receiver]]]:
        sender, receiver = channel()
        answers: list[tuple[bytes, Receiver]] = []
        attached: list[Sender | Receiver] = []
        back, answer = channel(oneshot=True)
        attached.append(back)
        answers.append((path, answer))
        if depth:
            for branch in (b"a", b"b"):
                child, below = grow(depth - 1, path + branch)
                attached.append(child)
                answers += below
        sender.send_nowait(path, attachments=attached)
        sender.finish()
        return receiver, answers

    async def walk(receiver: Receiver) -> int:
        (message,) = [message async for message in receiver]
        back, *children = (attachment.handle for attachment in message.attachments)
        assert isinstance(back, Sender)
        await back.send(b"was at " + bytes(message.payload))
        return 1 + sum([await walk(child) for child in children if isinstance(child, Receiver)])

    root, answers = grow(5, b"")
    (theirs,) = await peers.call(root)
    assert await within(walk(theirs)) == len(answers) == 63
    for path, answer in answers:
        assert bytes((await within(answer.receive())).payload) == b"was at " + path
    await peers.forgotten()


@pytest.mark.requirement("AQ-R28")
async def test_a_pair_whose_finished_sender_is_gone_is_networked_all_the_same(
    peers: Peers,
) -> None:
    def answered() -> Receiver:
        sender, receiver = channel(oneshot=True)
        sender.send_nowait(b"the answer")
        return receiver

    def abandoned() -> Receiver:
        sender, receiver = channel()
        sender.send_nowait(b"the beginning")
        return receiver

    first, second = await peers.call(answered(), abandoned())
    assert bytes((await within(first.receive())).payload) == b"the answer"
    with pytest.raises(Cancelled):
        await within(second.receive())


async def test_a_pair_that_ended_at_home_ends_the_same_way_abroad(peers: Peers) -> None:
    sender, receiver = channel()
    sender.cancel()
    (theirs,) = await peers.call(receiver)
    assert isinstance(await ending(theirs), Cancelled)
    sender, receiver = channel()
    receiver.close()
    with pytest.raises(LocalProtocolError, match="finished or cancelled"):
        await peers.call(sender)
    sender, receiver = channel()
    sender.finish()
    (theirs,) = await peers.call(receiver)
    assert isinstance(await ending(theirs), Finished)
    assert await ending(sender) is None
    await peers.forgotten()


async def test_a_task_that_waits_does_not_notice_that_its_pair_is_networked(peers: Peers) -> None:
    sender, receiver = channel()
    reading = asyncio.create_task(receiver.receive())
    other, away = channel()
    other.send_nowait(bytes(DEFAULT.flow.channel_high_water))
    closing = asyncio.create_task(other.wait_closed())
    await asyncio.sleep(0)
    if not peers.carrier.loses:
        writing = asyncio.create_task(other.wait_writable())
        await asyncio.sleep(0)
        theirs, distant = await peers.call(sender, away)
        assert (await within(distant.receive())).size == DEFAULT.flow.channel_high_water
        await within(writing)
    else:
        (theirs,) = await peers.call(sender)
        away.close()
        distant = None
    await theirs.send(b"from afar")
    assert bytes((await within(reading)).payload) == b"from afar"
    if distant is not None:
        distant.close()
    with pytest.raises(ReceiverClosed):
        await within(closing)


async def test_a_queued_message_that_cannot_be_sent_ends_its_own_channel(peers: Peers) -> None:
    sender, receiver = channel()
    sender.send_nowait(b"fits")
    sender.send_nowait(bytes(DEFAULT.limits.frame_bytes + 1))
    other, fine = channel()
    theirs, works = await peers.call(receiver, fine)
    with pytest.raises(LocalProtocolError, match="frame_bytes"):
        await within(sender.wait_closed())
    assert isinstance(await ending(theirs), Cancelled)
    await other.send(b"x")
    assert bytes((await within(works.receive())).payload) == b"x"


# Inside the process


async def test_a_pair_works_inside_the_process() -> None:
    sender, receiver = channel()
    inner_sender, inner_receiver = channel(oneshot=True)
    await sender.send([b"a", b"b"], headers=((b"k", b"v"),), attachments=[inner_receiver])
    message = await receiver.receive()
    assert (message.payload, message.headers) == (b"ab", ((b"k", b"v"),))
    await inner_sender.send(b"x")
    handle = message.attachments[0].handle
    assert isinstance(handle, Receiver)
    assert bytes((await handle.receive()).payload) == b"x"
    sender.finish()
    with pytest.raises(Finished):
        await receiver.receive()
    await sender.wait_closed()
    other, theirs = channel()
    theirs.close()
    with pytest.raises(ReceiverClosed):
        await other.send(b"x")
    third, reader = channel()
    third.cancel()
    with pytest.raises(Cancelled):
        await reader.receive()


async def test_a_local_pair_lets_a_waiting_sender_go() -> None:
    async def fill(sender: Sender) -> None:
        while True:
            await sender.send(bytes(1 << 20))

    sender, receiver = channel()
    task = asyncio.create_task(fill(sender))
    await eventually(lambda: not sender.writable)
    receiver.close()
    with pytest.raises(ReceiverClosed):
        await within(task)
    sender, receiver = channel()
    task = asyncio.create_task(fill(sender))
    await eventually(lambda: not sender.writable)
    sender.cancel()
    with pytest.raises(Cancelled):
        await within(task)
    with pytest.raises(Cancelled):
        await receiver.receive()
    sender, receiver = channel(oneshot=True)
    await sender.send(b"kept")
    sender.cancel()  # too late: it was finished with its message
    assert (await receiver.receive()).payload == b"kept"


async def test_waiting_in_vain_leaves_nothing_behind() -> None:
    _sender, receiver = channel()
    for _ in range(10):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await receiver.receive()
    assert not receiver._waiting.waiters


@pytest.mark.parametrize("mode", Mode)
async def test_every_mode_is_in_order_inside_the_process(mode: Mode) -> None:
    sender, receiver = channel(mode=mode)

    async def numbers() -> AsyncIterator[int]:
        async for message in receiver:
            yield int(message.payload)

    for index in range(50):
        await sender.send(b"%d" % index)
    sender.finish()
    assert [number async for number in numbers()] == list(range(50))
