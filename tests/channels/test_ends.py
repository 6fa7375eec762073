"""How channels end, over every carrier: each end has an error of its own, kept on both sides."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import pytest

from aqueduct import Mode, Receiver, Sender, channel
from aqueduct.errors import (
    Cancelled,
    ConnectionLost,
    Finished,
    LocalProtocolError,
    LostInTransit,
    ReceiverClosed,
)
from tests.channels.peers import Peers, ending, eventually, payloads, within

END: Any = {
    "finish": (lambda pair: pair[0].finish(), None, Finished),
    "cancel": (lambda pair: pair[0].cancel(), Cancelled, Cancelled),
    "close": (lambda pair: pair[1].close(), ReceiverClosed, ReceiverClosed),
}


async def channels_of_all_kinds(peers: Peers) -> list[tuple[Sender, Receiver]]:
    """Up and down, made by the client and by the server, in each mode; one message in each."""
    client, server = await peers.opened()
    peers.kept += [client, server]
    pairs = []
    for here, there in ((client, server), (server, client)):
        for keeps_sender in (True, False):
            for mode in Mode:
                sender, receiver = channel(mode=mode)
                away = receiver if keeps_sender else sender
                await here.out.send(b"", attachments=[away])
                (attachment,) = (await within(there.into.receive())).attachments
                handle: Any = attachment.handle
                pairs.append((sender, handle) if keeps_sender else (handle, receiver))
    for sender, receiver in pairs:
        await sender.send(b"first", mode=Mode.ORDERED)
        assert bytes((await within(receiver.receive())).payload) == b"first"
    return pairs


async def read_end(receiver: Receiver) -> type[Exception] | type[None]:
    return type(await ending(receiver))


@pytest.mark.requirement("AQ-35")
@pytest.mark.requirement("AQ-43")
@pytest.mark.requirement("AQ-44")
@pytest.mark.requirement("AQ-45")
@pytest.mark.requirement("AQ-R18")
@pytest.mark.requirement("AQ-R19")
@pytest.mark.requirement("AQ-R20")
@pytest.mark.parametrize("how", END)
async def test_each_end_has_its_error_and_keeps_it(peers: Peers, how: str) -> None:
    act, at_sender, at_receiver = END[how]
    pairs = await channels_of_all_kinds(peers)
    for pair in pairs:
        act(pair)
    for sender, receiver in pairs:
        sent = await ending(sender)
        assert (type(sent) if sent else None) is at_sender
        read = await ending(receiver)
        assert type(read) is at_receiver
        # Sticky: asked again, by whatever call, it is the same.
        assert sender.error is sent and await ending(sender) is sent
        assert receiver.error is read and await ending(receiver) is read
        if at_sender is None:
            with pytest.raises(LocalProtocolError, match="already"):
                await within(sender.send(b"x"))
            with pytest.raises(LocalProtocolError, match="already"):
                sender.finish()
        else:
            with pytest.raises(at_sender):
                await within(sender.send(b"x"))
            with pytest.raises(at_sender):
                sender.finish()
        sender.cancel()  # no effect on what ended
        receiver.close()
        assert sender.error is sent and receiver.error is read
    await peers.forgotten(channels=2)


@pytest.mark.requirement("AQ-R27")
@pytest.mark.requirement("AQ-R32")
async def test_with_the_connection_every_handle_reads_connection_lost(peers: Peers) -> None:
    pairs = await channels_of_all_kinds(peers)
    over = [pairs.pop() for _ in range(3)]
    over[0][0].finish()
    over[1][0].cancel()
    over[2][1].close()
    before = [(await ending(sender), await ending(receiver)) for sender, receiver in over]
    await within(peers.client.close(0, "bye"))
    await within(peers.server.wait_closed())
    for sender, receiver in pairs:
        for handle in (sender, receiver):
            error = await ending(handle)
            assert type(error) is ConnectionLost and await ending(handle) is error
        with pytest.raises(ConnectionLost):
            sender.send_nowait(b"x")
    # What had ended before keeps its own end.
    for (sender, receiver), (sent, read) in zip(over, before, strict=True):
        assert sender.error is sent and receiver.error is read
    error = peers.server.error
    assert error is not None and (error.code, error.reason, error.remote) == (0, "bye", True)


@pytest.mark.requirement("AQ-R21")
async def test_what_was_sent_before_a_finish_is_read_before_finished(peers: Peers) -> None:
    for mode in (Mode.ORDERED, Mode.UNORDERED):
        sender, receiver = await peers.to_server(mode)
        for index in range(40):
            await sender.send(b"%02d" % index)
        sender.finish()
        await within(sender.wait_closed())  # the protocol state is gone, the queue is not
        assert sorted(await payloads(receiver)) == [b"%02d" % index for index in range(40)]


@pytest.mark.requirement("AQ-R20")
@pytest.mark.requirement("AQ-R26")
async def test_a_cancel_drops_what_was_not_read_and_frees_what_came_with_it(peers: Peers) -> None:
    sender, receiver = await peers.to_server()
    kept_sender, away = channel()
    back, kept_receiver = channel()
    await sender.send(b"read")
    await sender.send(b"not read", attachments=[away, back])
    await sender.send(bytes(50_000))
    assert bytes((await within(receiver.receive())).payload) == b"read"
    await eventually(lambda: peers.server.core.snapshot()["budget_used_bytes"] > 50_000)
    sender.cancel()
    assert await read_end(receiver) is Cancelled
    # They came, and nobody took them; or were they taken back before the ack: then they are lost.
    assert type(await ending(kept_sender)) in (ReceiverClosed, LostInTransit)
    assert type(await ending(kept_receiver)) in (Cancelled, LostInTransit)
    await peers.forgotten()


@pytest.mark.requirement("AQ-R28")
async def test_a_oneshot_sender_that_is_dropped_unused_cancels(peers: Peers) -> None:
    sender, away = channel(oneshot=True)
    (theirs,) = await peers.call(away)
    del sender
    received, mine = channel(oneshot=True)
    (handle,) = await peers.call(received)
    del handle
    await asyncio.to_thread(gc.collect)
    assert isinstance(theirs, Receiver)
    for receiver in (theirs, mine):
        with pytest.raises(Cancelled):
            await within(receiver.receive())
    await peers.forgotten()


async def test_dropped_handles_end_their_channels(peers: Peers) -> None:
    sender, receiver = channel()
    (theirs,) = await peers.call(receiver)
    del theirs
    await asyncio.to_thread(gc.collect)
    with pytest.raises(ReceiverClosed):
        await within(sender.wait_closed())
    other, mine = channel()
    (theirs,) = await peers.call(other)
    del theirs
    await asyncio.to_thread(gc.collect)
    with pytest.raises(Cancelled):
        await within(mine.receive())
    await peers.forgotten()


async def test_handles_dropped_in_another_thread(peers: Peers) -> None:
    sender, receiver = channel()
    handles = await peers.call(receiver)
    await asyncio.to_thread(handles.clear)
    with pytest.raises(ReceiverClosed):
        await within(sender.wait_closed())


@pytest.mark.requirement("AQ-R26")
async def test_a_dropped_receiver_returns_what_it_had_not_read(peers: Peers) -> None:
    sender, receiver = channel()
    inner_sender, inner = channel()
    (theirs,) = await peers.call(receiver)
    await sender.send(bytes(100_000), attachments=[inner])
    sender.finish()
    await within(sender.wait_closed())
    assert peers.server.core.snapshot()["budget_used_bytes"] > 100_000
    del theirs  # it had been finished, and nobody read it
    await asyncio.to_thread(gc.collect)
    await eventually(lambda: peers.server.core.snapshot()["budget_used_bytes"] == 0)
    with pytest.raises(ReceiverClosed):
        await within(inner_sender.wait_closed())
    await peers.forgotten()


async def test_a_dropped_connection_handle_is_not_waited_for(peers: Peers) -> None:
    sender, _receiver = channel()
    await peers.call(sender)
    with pytest.raises(LocalProtocolError, match="sent away"):
        await sender.wait_closed()


@pytest.mark.requirement("AQ-R32")
async def test_the_connection_lives_on_when_the_entrypoint_has_ended(peers: Peers) -> None:
    sender, receiver = await peers.to_server()
    peers.client.entrypoint.finish()
    assert await read_end(peers.server.entrypoint) is Finished
    await within(peers.client.entrypoint.wait_closed())
    await sender.send(b"on and on")
    assert bytes((await within(receiver.receive())).payload) == b"on and on"


async def test_closing_the_connection_lets_queued_data_out(peers: Peers) -> None:
    sender, receiver = await peers.to_server()
    # All of it has to pass within Timing.close_linger, on a path that loses a tenth.
    payload = random.Random(1).randbytes(100_000 if peers.carrier.loses else 3 << 20)
    await sender.send(payload)
    sender.finish()
    closing = asyncio.create_task(peers.client.close(0, "bye"))
    assert bytes((await within(receiver.receive())).payload) == payload
    await within(closing)
    await within(peers.server.wait_closed())
    error = peers.server.error
    assert error is not None and (error.code, error.reason, error.remote) == (0, "bye", True)
    with pytest.raises(ConnectionLost):
        await peers.client.entrypoint.send(b"x")


async def test_a_close_lets_out_what_waits_for_a_stream(peers: Peers) -> None:
    sender, receiver = await peers.to_server(Mode.UNORDERED)
    for index in range(500):
        sender.send_nowait(b"%d" % index)
    sender.finish()
    closing = asyncio.create_task(peers.client.close())
    assert set(await within(payloads(receiver))) == {b"%d" % n for n in range(500)}
    await within(closing)
    await within(peers.server.wait_closed())
    with pytest.raises(ConnectionLost):
        await peers.client.ping()


async def test_what_a_callback_raises_closes_with_an_internal_error(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = await peers.to_server()

    def broken() -> None:
        raise ZeroDivisionError("a fault above")

    receiver.on_change = broken
    await within(sender.send(b"x"))
    await within(peers.client.wait_closed())
    assert peers.client.error is not None and peers.client.error.code == 6
    assert "a fault above" in caplog.text


async def test_ping_and_snapshot(peers: Peers) -> None:
    assert 0 <= await within(peers.client.ping()) < 30
    snapshot = peers.client.snapshot()
    assert snapshot.channel_count == len(snapshot.channels) == 1
    assert all(isinstance(value, (int, float, str)) for value in snapshot.transport.values())
