"""A close lets out what was sent before it, and what arrived before it can be read."""

from __future__ import annotations

import dataclasses

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Config, Flow
from aqueduct.errors import ConnectionLost, Finished, ReceiverClosed
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.events import Writable
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.protocol.channels.test_lifecycle import open_channel
from tests.support.pair import Pair, Side


def few_streams() -> Config:
    return dataclasses.replace(DEFAULT, flow=Flow(streams=8, unordered_streams=3))


def close(side: Side) -> None:
    side.core.close(0, "bye", side.pair.now)
    side.flush()


@pytest.mark.requirement("AQ-R32")
def test_a_close_lets_out_what_waits_above_the_transport() -> None:
    pair = Pair(few_streams())
    attaches = [Attach(keep_sender=True, is_oneshot=False) for _ in range(20)]
    pair.client.send(pair.sender, b"", *attaches)
    pair.run()
    carrier = pair.server.take(pair.receiver)
    assert carrier is not None
    for index, attach in enumerate(attaches):
        assert isinstance(attach.half, SenderHalf)
        for piece in range(5):
            pair.client.send(attach.half, b"%d-%d" % (index, piece), mode=Mode.UNORDERED)
        pair.client.finish(attach.half)
    assert pair.client.core.snapshot()["streams_waiting"] > 0
    close(pair.client)
    # For its own user the connection is over at once.
    assert isinstance(pair.client.ended, ConnectionLost)
    with pytest.raises(ConnectionLost):
        pair.client.send(pair.sender, b"too late")
    assert pair.server.ended is None
    pair.run()
    error = pair.server.ended
    assert error is not None and (error.code, error.reason, error.remote) == (0, "bye", True)
    for index, (half, _) in enumerate(carrier.attachments):
        assert isinstance(half, ReceiverHalf)
        got = {bytes(m.payload) for m in pair.server.take_all(half)}
        assert got == {b"%d-%d" % (index, piece) for piece in range(5)}
        assert isinstance(half.error, Finished)
    assert pair.client.core.snapshot()["queued_bytes"] == 0


@pytest.mark.requirement("AQ-R32")
def test_a_close_opens_the_streams_that_wait_in_turns() -> None:
    flow = Flow(streams=8, unordered_streams=100, wake_up=1)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    core = pair.client.core
    for index in range(40):
        pair.client.send(pair.sender, b"%d" % index, mode=Mode.UNORDERED)
    assert core.snapshot()["streams_waiting"] > 20
    close(pair.client)
    core.openable_changed(100, pair.now)
    steps = [len(core.effects_to_apply())]
    while core.goes_on:
        assert core.next_deadline() == pair.now
        core.handle_deadline(pair.now)
        steps.append(len(core.effects_to_apply()))
    assert core.snapshot()["streams_waiting"] == 0
    assert max(steps) <= 2 and core.next_deadline() is None


@pytest.mark.requirement("AQ-R32")
def test_a_close_that_cannot_let_everything_out_ends_in_time() -> None:
    pair = Pair(few_streams())
    pair.server.hold = 1000  # no slot returns
    for index in range(30):
        pair.client.send(pair.sender, b"%d" % index, mode=Mode.UNORDERED)
    close(pair.client)
    pair.run()
    assert pair.server.ended is None
    assert pair.client.core.next_deadline() == pair.now + DEFAULT.timing.close_linger
    pair.advance(DEFAULT.timing.close_linger)
    assert pair.server.ended is not None and pair.server.ended.code == 0
    assert pair.client.core.next_deadline() is None


def test_a_connection_that_is_lost_while_it_closes_is_over_once() -> None:
    pair = Pair(few_streams())
    pair.server.hold = 1000
    for index in range(30):
        pair.client.send(pair.sender, b"%d" % index, mode=Mode.UNORDERED)
    close(pair.client)
    pair.link.cut()
    assert sum(type(event).__name__ == "Closed" for event in pair.client.events) == 1
    assert pair.client.core.next_deadline() is None
    assert pair.client.core.effects_to_apply() == []


@pytest.mark.requirement("AQ-R10")
def test_an_answer_to_the_headers_after_the_end_goes_nowhere() -> None:
    pair = Pair(connect=False)
    pair.server.answer_headers = None
    pair.run()
    pair.link.cut()
    pair.server.core.accept_headers((), pair.now)
    assert pair.server.core.effects_to_apply() == []
    assert not any(pair.server.core.snapshot().values())


def test_a_close_with_an_error_does_not_wait() -> None:
    pair = Pair(few_streams())
    for index in range(30):
        pair.client.send(pair.sender, b"%d" % index, mode=Mode.UNORDERED)
    pair.client.core.close(6, "broken", pair.now)
    pair.client.flush()
    assert pair.client.close_code == 6


@pytest.mark.parametrize("placed", [False, True])
def test_what_arrived_before_the_end_needs_no_room_to_be_read(placed: bool) -> None:
    flow = Flow(receive_budget=50_000, channel_receive_bytes=20_000, message_overhead=100)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    sender, receiver = open_channel(pair, keep_sender=True)
    if placed:
        receiver.queue.placement = lambda headers, size: bytearray(size)
    payloads = [bytes([index]) * 3000 for index in range(15)]
    for payload in payloads:
        pair.client.send(sender, payload)
    pair.client.finish(sender)
    pair.run()
    assert len(receiver.queue) < 10
    assert pair.server.core.held_streams == 1  # all of it is here
    close(pair.client)
    pair.run()
    assert pair.server.ended is not None
    assert [bytes(m.payload) for m in pair.server.take_all(receiver)] == payloads
    assert isinstance(receiver.error, Finished)
    assert isinstance(pair.receiver.error, ConnectionLost)


def test_half_a_message_is_lost_with_the_connection() -> None:
    pair = Pair()
    whole = b"".join(bytes(part) for part in codec.encode_message(1, bytes(100_000)))
    head = b"".join(bytes(part) for part in codec.encode_message(0, b"whole"))
    pair.client.inject(codec.encode_route_to(0), head, whole[:50_000], fin=False)
    pair.run()
    pair.link.cut()
    assert [bytes(m.payload) for m in pair.server.take_all(pair.receiver)] == [b"whole"]
    assert isinstance(pair.receiver.error, ConnectionLost)


@pytest.mark.requirement("AQ-34")
@pytest.mark.parametrize("ordered_too", [False, True])
@pytest.mark.parametrize("unreliable_too", [False, True])
def test_finish_is_said_after_the_last_message(ordered_too: bool, unreliable_too: bool) -> None:
    pair = Pair(few_streams())
    sender, receiver = open_channel(pair, keep_sender=True)
    pair.client.applied.clear()
    if unreliable_too:
        pair.client.send(sender, b"u", mode=Mode.UNRELIABLE)
    for index in range(20):
        pair.client.send(sender, b"%d" % index, mode=Mode.UNORDERED)
    if ordered_too:
        pair.client.send(sender, b"o")
    pair.client.finish(sender)
    pair.advance(3)
    assert isinstance(receiver.error, Finished)
    assert len(pair.server.take_all(receiver)) == 20 + ordered_too + unreliable_too
    assert sender.error is None and sender.state.name == "ENDED"
    frames = [
        bytes(part)
        for effect in pair.client.applied
        if effect[0] == effects.WRITE
        for part in effect[2]
    ]
    count = codec.encode_finish_sender(20 + ordered_too)
    assert frames[-1] == count or frames[-1].endswith(count)
    # Nothing but the prelude's acknowledgement and other channels' acks may follow it.
    assert sum(frame.endswith(count) for frame in frames) == 1


@pytest.mark.requirement("AQ-34")
def test_a_close_says_a_finish_that_waited() -> None:
    pair = Pair(few_streams())
    sender, receiver = open_channel(pair, keep_sender=True)
    for index in range(50):
        pair.client.send(sender, b"%d" % index, mode=Mode.UNORDERED)
    pair.client.finish(sender)
    close(pair.client)
    pair.run()
    assert len(pair.server.take_all(receiver)) == 50
    assert isinstance(receiver.error, Finished)


@pytest.mark.requirement("AQ-R19")
def test_a_receiver_that_closes_before_a_finish_that_waits() -> None:
    pair = Pair(few_streams())
    sender, receiver = open_channel(pair, keep_sender=True)
    for index in range(50):
        pair.client.send(sender, b"%d" % index, mode=Mode.UNORDERED)
    pair.client.finish(sender)
    pair.server.close_receiver(receiver)
    pair.advance(3)
    assert type(sender.error).__name__ == "ReceiverClosed"
    assert pair.client.core.snapshot()["queued_bytes"] == 0
    assert pair.client.core.snapshot()["streams_waiting"] == 0
    assert pair.client.core.channels == pair.server.core.channels == 1


@pytest.mark.requirement("AQ-R19")
def test_a_sender_whose_stream_was_stopped_waits_for_the_close_behind_it() -> None:
    """The two travel apart. A sender that saw room between them would send for ever."""
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    pair.client.send(sender, b"first")
    pair.run()
    assert sender.writable
    (number,) = (
        stream.number
        for stream in pair.client.core._shared.outgoing._open.values()
        if stream.half is sender
    )
    pair.client.core.receive_stop(number, 0, pair.now)
    assert sender.error is None and not sender.writable
    pair.client.core.wait_writable(sender)
    pair.client.flush()
    assert Writable(sender) not in pair.client.events
    pair.server.core.close_receiver(receiver, pair.now)
    pair.server.flush()
    pair.run()
    assert isinstance(sender.error, ReceiverClosed)
    assert Writable(sender) in pair.client.events


def test_a_sender_that_has_ended_waits_for_nothing() -> None:
    """What its user still asks for is refused at once."""
    pair = Pair()
    sender, _ = open_channel(pair, keep_sender=True)
    pair.client.send(sender, b"first")
    pair.client.finish(sender)
    pair.run()
    assert sender.error is None and sender.state.name == "ENDED"
    pair.client.core.wait_writable(sender)
    pair.client.flush()
    assert pair.client.events[-1] == Writable(sender)
    assert sender.writable
