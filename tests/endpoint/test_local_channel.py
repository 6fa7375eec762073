"""Pairs inside the process: a channel like any other, until and after one half is sent away."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aqueduct.endpoint import Mode, Receiver, Sender, channel
from aqueduct.errors import Cancelled, Finished, LocalProtocolError, ReceiverClosed
from tests.support.endpoints import PLACES, Place, eventually, place

pytestmark = [pytest.mark.requirement("AQ-42")]


@pytest.fixture(params=PLACES)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with place(request.param) as found:
        yield found


@pytest.fixture(params=["memory", "quic"])
async def network(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with place(request.param) as found:
        yield found


# ------------------------------------------------------------ code cannot tell


async def read_all(receiver: Receiver) -> list[tuple[Any, ...]]:
    """All messages as plain values, and how it ended."""
    got: list[tuple[Any, ...]] = []
    try:
        while True:
            async with asyncio.timeout(10):
                message = await receiver.receive()
            inner = [
                (entry.headers, await read_all(entry.handle))
                for entry in message.attachments
                if isinstance(entry.handle, Receiver)
            ]
            got.append((bytes(message.payload), message.headers, message.number, inner))
    except (Finished, Cancelled) as end:
        return [*got, (type(end).__name__,)]


Program = Callable[[Sender], None]


def plain(sender: Sender) -> None:
    for index in range(5):
        sender.send_nowait(b"%d" % index, headers=((b"n", b"%d" % index),))
    sender.finish()


def scattered(sender: Sender) -> None:
    sender.send_nowait([b"a", bytearray(b"b"), memoryview(b"cd")[1:]])
    sender.send_nowait(memoryview(b"abcdefgh").cast("H"))
    sender.send_nowait([])
    changing = bytearray(b"before")
    sender.send_nowait(changing, copy=True)
    changing[:] = b"after!"
    sender.finish()


def oneshot_used(sender: Sender) -> None:
    sender.send_nowait(b"one")
    with pytest.raises(LocalProtocolError):
        sender.send_nowait(b"two")
    with pytest.raises(LocalProtocolError):
        sender.finish()
    sender.cancel()  # too late


def unused(sender: Sender) -> None:
    sender.finish()


def cancelled(sender: Sender) -> None:
    sender.cancel()


def nested(sender: Sender) -> None:
    for depth in range(3):
        inner_sender, inner = channel(oneshot=depth == 2)
        sender.send_nowait(b"%d" % depth, attachments=[(inner, ((b"depth", b"%d" % depth),))])
        sender.finish()
        sender = inner_sender
    sender.send_nowait(b"deepest")


def refused_then_fine(sender: Sender) -> None:
    with pytest.raises(LocalProtocolError):
        sender.send_nowait(b"x", headers=((b"", b"v"),))
    with pytest.raises(TypeError):
        sender.send_nowait(b"x", headers=(("text", b"v"),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        sender.send_nowait("text")
    with pytest.raises(BufferError):
        sender.send_nowait(memoryview(b"abcd")[::2])
    with pytest.raises(TypeError):
        sender.send_nowait(b"x", attachments=["text"])  # type: ignore[list-item]
    sender.send_nowait(b"fine")
    sender.finish()


PROGRAMS: dict[str, tuple[Program, dict[str, Any], list[Any]]] = {
    "plain": (
        plain,
        {},
        [*((b"%d" % n, ((b"n", b"%d" % n),), n, []) for n in range(5)), ("Finished",)],
    ),
    "scattered": (
        scattered,
        {},
        [
            (b"abd", (), 0, []),
            (b"abcdefgh", (), 1, []),
            (b"", (), 2, []),
            (b"before", (), 3, []),
            ("Finished",),
        ],
    ),
    "oneshot": (oneshot_used, {"oneshot": True}, [(b"one", (), 0, []), ("Finished",)]),
    "unused oneshot": (unused, {"oneshot": True}, [("Cancelled",)]),
    "empty": (unused, {}, [("Finished",)]),
    "cancelled": (cancelled, {}, [("Cancelled",)]),
    "nested": (
        nested,
        {},
        [
            (b"0", (), 0, [(((b"depth", b"0"),), [
                (b"1", (), 0, [(((b"depth", b"1"),), [
                    (b"2", (), 0, [(((b"depth", b"2"),), [
                        (b"deepest", (), 0, []), ("Finished",)])]),
                    ("Finished",)])]),
                ("Finished",)])]),
            ("Finished",),
        ],
    ),
    "refused": (refused_then_fine, {}, [(b"fine", (), 0, []), ("Finished",)]),
}  # fmt: skip


@pytest.mark.requirement("AQ-R28")
@pytest.mark.requirement("AQ-34")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_does_the_same_everywhere(world: Place, name: str, when: str) -> None:
    """``when`` the program runs: before its channel is sent away, or after."""
    program, options, expected = PROGRAMS[name]
    if when == "before":
        sender, receiver = channel(**options)
        program(sender)
        (receiver,) = await world.across(receiver)
    else:
        sender, receiver = await world.pair(**options)
        program(sender)
    assert await read_all(receiver) == expected


@pytest.mark.parametrize("mode", list(Mode))
async def test_every_mode_before_and_after(world: Place, mode: Mode) -> None:
    sender, receiver = channel(mode=mode)
    for index in range(20):
        sender.send_nowait(b"%d" % index)
    (receiver,) = await world.across(receiver)
    for index in range(20, 40):
        await sender.send(b"%d" % index)
    sender.finish()
    got = [message[0] for message in (await read_all(receiver))[:-1]]
    if mode is Mode.ORDERED:
        assert got == [b"%d" % index for index in range(40)]
    else:
        assert sorted(got) == sorted(b"%d" % index for index in range(40))
    await sender.wait_closed()


async def test_placement_before_and_after(world: Place) -> None:
    asked: list[tuple[Any, int]] = []
    memory = bytearray(5)

    def place_it(headers: Any, size: int) -> Any:
        asked.append((headers, size))
        return memory if size == 5 else None

    def refuse(headers: Any, size: int) -> Any:
        raise ZeroDivisionError("no")

    sender, receiver = await world.backward()
    receiver.placement = place_it
    sender.send_nowait(b"12345", headers=((b"k", b"v"),))
    message = await receiver.receive()
    assert message.payload is memory
    assert bytes(memory) == b"12345"
    sender.send_nowait(b"123")
    assert bytes((await receiver.receive()).payload) == b"123"
    assert asked == [(((b"k", b"v"),), 5), ((), 3)]
    receiver.placement = refuse
    sender.send_nowait(b"x")
    with pytest.raises(ZeroDivisionError):
        await receiver.receive()
    with pytest.raises(ReceiverClosed):
        async with asyncio.timeout(10):
            await sender.wait_closed()


async def test_placement_for_messages_with_a_key(world: Place) -> None:
    memory = bytearray(5)
    sender, receiver = await world.backward()
    receiver.placement, receiver.placement_key = lambda headers, size: memory, b"key"
    for headers in ((), ((b"k", b"v"),), ((b"key", b""),)):
        sender.send_nowait(b"12345", headers=headers)
    payloads = [(await receiver.receive()).payload for _ in range(3)]
    assert [payload is memory for payload in payloads] == [False, False, True]
    assert [bytes(payload) for payload in payloads] == [b"12345"] * 3


async def test_a_finish_is_delivered_without_being_read(world: Place) -> None:
    sender, receiver = await world.pair()
    sender.send_nowait(b"unread")
    sender.finish()
    async with asyncio.timeout(10):
        await sender.wait_closed()
    receiver.close()  # too late to matter
    await sender.wait_closed()
    with pytest.raises(Finished):
        await receiver.receive()


async def test_back_pressure_holds_in_every_place(world: Place) -> None:
    sender, receiver = await world.pair()
    sent = 0

    async def fill() -> None:
        nonlocal sent
        while True:
            await sender.send(bytes(1 << 20))
            sent += 1

    task = asyncio.create_task(fill())
    await eventually(lambda: not sender.writable)
    told = asyncio.Event()
    sender.on_change = told.set
    sender.notify_writable()
    before = sent
    for _ in range(before):
        await receiver.receive()
    async with asyncio.timeout(10):
        await told.wait()
    await eventually(lambda: sent > before)
    task.cancel()


async def test_callbacks_come_from_the_loop_and_not_from_within(world: Place) -> None:
    sender, receiver = await world.backward()
    calls: list[int] = []
    receiver.on_change = lambda: calls.append(len(calls))
    sender.send_nowait(b"a")
    sender.send_nowait(b"b")
    assert not calls
    await eventually(lambda: calls)
    assert bytes((await receiver.receive()).payload) == b"a"
    sender.finish()
    await eventually(lambda: receiver.error is not None)


async def test_a_sender_sent_away_goes_on_behind_what_was_sent_here(world: Place) -> None:
    sender, receiver = channel()
    sender.send_nowait(b"here")
    (away,) = await world.across(sender)
    await away.send(b"there")
    away.finish()
    assert [m[0] for m in await read_all(receiver)] == [b"here", b"there", "Finished"]
    with pytest.raises(LocalProtocolError, match="already sent away"):
        sender.send_nowait(b"x")
    with pytest.raises(LocalProtocolError, match="already sent away"):
        await sender.send(b"x")
    with pytest.raises(LocalProtocolError, match="already sent away"):
        sender.finish()


async def test_pairs_in_pairs_of_any_depth_are_networked(network: Place) -> None:
    depth = 2000
    sender, top = channel()
    kept: list[Any] = []
    for _ in range(depth):
        inner_sender, inner = channel()
        sender.send_nowait(b"", attachments=[inner])
        kept.append(sender)
        sender = inner_sender
    sender.send_nowait(b"the bottom")
    (receiver,) = await network.across(top)
    for _ in range(depth):
        kept.append(receiver)
        receiver = (await receiver.receive()).attachments[0].handle
    assert bytes((await receiver.receive()).payload) == b"the bottom"


# ------------------------------------------------------------ refused


async def twice(world: Place) -> list[Any]:
    _sender, receiver = channel()
    await world.across(receiver)
    return [receiver]


async def both_halves(world: Place) -> list[Any]:
    sender, receiver = channel()
    await world.across(receiver)
    return [sender]


async def both_at_once(world: Place) -> list[Any]:
    return list(channel())


async def one_twice_at_once(world: Place) -> list[Any]:
    _sender, receiver = channel()
    return [receiver, receiver]


async def received(world: Place) -> list[Any]:
    _sender, receiver = channel()
    return await world.across(receiver)


async def received_sender(world: Place) -> list[Any]:
    sender, _receiver = channel()
    return await world.across(sender)


async def finished_sender(world: Place) -> list[Any]:
    sender, _receiver = channel()
    sender.finish()
    return [sender]


async def used_oneshot(world: Place) -> list[Any]:
    sender, _receiver = channel(oneshot=True)
    sender.send_nowait(b"x")
    return [sender]


async def cancelled_sender(world: Place) -> list[Any]:
    sender, _receiver = channel()
    sender.cancel()
    return [sender]


async def sender_of_a_closed_receiver(world: Place) -> list[Any]:
    sender, receiver = channel()
    receiver.close()
    return [sender]


async def closed_receiver(world: Place) -> list[Any]:
    _sender, receiver = channel()
    receiver.close()
    return [receiver]


async def entrypoint(world: Place) -> list[Any]:
    return [world.client.entrypoint]


REFUSED: dict[str, tuple[Any, str]] = {
    "a handle attached twice": (twice, "already sent away"),
    "both halves": (both_halves, "already sent away, so this one cannot be sent on"),
    "both halves at once": (both_at_once, "twice"),
    "one half twice at once": (one_twice_at_once, "twice"),
    "a received receiver": (received, "cannot be sent on"),
    "a received sender": (received_sender, "cannot be sent on"),
    "a finished sender": (finished_sender, "a finished or cancelled sender"),
    "a used oneshot": (used_oneshot, "a finished or cancelled sender"),
    "a cancelled sender": (cancelled_sender, "a finished or cancelled sender"),
    "a closed receiver's sender": (sender_of_a_closed_receiver, "nor one whose receiver"),
    "a closed receiver": (closed_receiver, "a closed receiver"),
    "an entrypoint": (entrypoint, "cannot be sent on"),
}


@pytest.mark.requirement("AQ-R4")
@pytest.mark.parametrize(
    ("kind", "name"), [(k, n) for k in PLACES for n in REFUSED if k != "local" or "entry" not in n]
)
async def test_what_cannot_be_attached_is_refused_with_an_explanation(kind: str, name: str) -> None:
    async with place(kind) as world:
        make, words = REFUSED[name]
        handles = await make(world)
        good_sender, good = channel()
        with pytest.raises(LocalProtocolError, match=words) as refused:
            await world.across(good, *handles)
        advice = ("channel()", "keep one half")
        assert any(text in str(refused.value) for text in advice), "it says what to do"
        # Nothing has changed: neither what was attached beside it, nor the channel.
        (theirs,) = await world.across(good)
        good_sender.send_nowait(b"fine")
        assert bytes((await theirs.receive()).payload) == b"fine"


async def test_a_channel_does_not_carry_itself() -> None:
    sender, receiver = channel()
    with pytest.raises(LocalProtocolError, match="its own receiver"):
        sender.send_nowait(b"", attachments=[receiver])
    sender.send_nowait(b"fine")
    assert (await receiver.receive()).payload == b"fine"


async def test_a_pair_of_another_loop_is_refused(network: Place) -> None:
    made: list[tuple[Sender, Receiver]] = []
    ready, done = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        made.append(channel())
        ready.set()
        await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    await asyncio.to_thread(ready.wait)
    try:
        sender, receiver = made[0]
        with pytest.raises(LocalProtocolError, match="another event loop"):
            await network.across(receiver)
        with pytest.raises(LocalProtocolError, match="another event loop"):
            async with asyncio.timeout(1):
                await receiver.receive()
    finally:
        done.set()
        await asyncio.to_thread(thread.join)
    # That loop is over: the pair belongs to nobody, and may come here.
    (theirs,) = await network.across(receiver)
    sender.send_nowait(b"x")
    assert bytes((await theirs.receive()).payload) == b"x"


async def test_the_receiver_of_a_cancelled_sender_may_be_sent(world: Place) -> None:
    sender, receiver = channel()
    sender.send_nowait(b"dropped")
    sender.cancel()
    (theirs,) = await world.across(receiver)
    with pytest.raises(Cancelled):
        await theirs.receive()
    assert isinstance(sender.error, Cancelled)


async def test_an_end_that_was_seen_is_final(network: Place) -> None:
    sender, receiver = channel()
    sender.send_nowait(b"x")
    sender.finish()
    await sender.wait_closed()
    (theirs,) = await network.across(receiver)
    assert bytes((await theirs.receive()).payload) == b"x"
    await network.client.close(7, "gone")
    await sender.wait_closed()
    assert sender.error is None


# ------------------------------------------------------------ dropped halves


def drop(*handles: Any) -> None:
    del handles
    gc.collect()


@pytest.mark.requirement("AQ-R26")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another thread"])
async def test_a_dropped_sender_reads_as_cancelled(world: Place, elsewhere: bool) -> None:
    holder = list(await world.pair())
    receiver = holder.pop()
    holder[0].send_nowait(b"unread")
    waiting = asyncio.ensure_future(read_all(receiver))
    await asyncio.sleep(0)
    if elsewhere:
        await asyncio.to_thread(holder.clear)
    else:
        holder.clear()
    async with asyncio.timeout(10):
        assert (await waiting)[-1] == ("Cancelled",)


@pytest.mark.requirement("AQ-R26")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another thread"])
async def test_a_dropped_receiver_reads_as_closed(world: Place, elsewhere: bool) -> None:
    holder = list(await world.pair())
    sender = holder.pop(0)
    told = asyncio.Event()
    sender.on_change = told.set
    waiting = asyncio.ensure_future(sender.wait_closed())
    await asyncio.sleep(0)
    if elsewhere:
        await asyncio.to_thread(holder.clear)
    else:
        holder.clear()
    with pytest.raises(ReceiverClosed):
        async with asyncio.timeout(10):
            await waiting
    with pytest.raises(ReceiverClosed):
        sender.send_nowait(b"x")
    await told.wait()


async def test_a_dropped_sender_that_had_finished_takes_nothing_back(world: Place) -> None:
    def answered() -> Receiver:
        sender, receiver = channel()
        sender.send_nowait(b"kept")
        sender.finish()
        return receiver

    (receiver,) = await world.across(answered())
    gc.collect()
    assert [m[0] for m in await read_all(receiver)] == [b"kept", "Finished"]


def test_a_pair_that_no_loop_uses_needs_none() -> None:
    sender, receiver = channel()
    del sender
    gc.collect()
    with pytest.raises(Cancelled):
        receiver.receive_nowait()
    sender, receiver = channel()
    del receiver
    gc.collect()
    with pytest.raises(ReceiverClosed):
        sender.send_nowait(b"x")


@pytest.mark.requirement("AQ-R26")
@pytest.mark.requirement("AQ-R20")
@pytest.mark.parametrize("how", ["close", "cancel", "drop the receiver", "drop both"])
async def test_what_unread_messages_carry_is_closed_and_cancelled(world: Place, how: str) -> None:
    sender, receiver = await world.pair()
    kept_sender, away = channel()
    away_sender, kept_receiver = channel()
    sender.send_nowait(b"", attachments=[away, away_sender])
    await asyncio.sleep(0.05)
    if how == "close":
        receiver.close()
    elif how == "cancel":
        sender.cancel()
    else:
        del receiver
        if how == "drop both":
            del sender
        gc.collect()
    async with asyncio.timeout(10):
        with pytest.raises(ReceiverClosed):
            await kept_sender.wait_closed()
        with pytest.raises(Cancelled):
            await kept_receiver.receive()


@pytest.mark.parametrize("carried", ["receivers", "senders"])
async def test_dropping_what_is_nested_deep_takes_no_stack(carried: str) -> None:
    depth = 3000
    first, top = channel()
    sender, ends = first, list[Any]()
    for _ in range(depth):
        inner_sender, inner = channel()
        if carried == "receivers":
            sender.send_nowait(b"", attachments=[inner])
            sender = inner_sender
            ends.append(inner_sender)
        else:
            # The message that carries each sender was sent by the one that is carried outside.
            inner_sender.send_nowait(b"", attachments=[sender] if sender is not first else [])
            sender = inner_sender
            ends.append(inner)
    if carried == "senders":
        first.send_nowait(b"", attachments=[sender])
    top.close()
    for end in ends:
        assert isinstance(end.error, ReceiverClosed if carried == "receivers" else Cancelled)


async def test_after_a_local_message_the_old_handle_is_gone_and_the_new_one_works() -> None:
    way, end = channel()
    sender, receiver = channel()
    way.send_nowait(
        b"",
        attachments=[
            receiver,
        ],
    )
    with pytest.raises(LocalProtocolError, match="already sent away"):
        await receiver.receive()
    receiver.close()  # without effect: it is nobody's any more
    drop(receiver)
    (attachment,) = (await end.receive()).attachments
    sender.send_nowait(b"x")
    assert isinstance(attachment.handle, Receiver)
    assert (await attachment.handle.receive()).payload == b"x"
