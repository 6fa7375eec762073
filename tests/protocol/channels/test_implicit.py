"""State that comes by ROUTE_TO or with a message, before or after the application hears of it."""

from __future__ import annotations

import dataclasses

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Flow
from aqueduct.errors import Finished
from aqueduct.protocol.common.events import Readable
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.sender import SenderHalf
from tests.protocol.channels.peer import CLOSE, Peer, message, route
from tests.protocol.channels.test_destroyed import BACK, CHILD, attached, created

requirement = pytest.mark.requirement
finish = codec.encode_finish_sender
CANCEL, SENT = codec.CANCEL_SENDER, codec.encode_sent_unreliable(1)


@requirement("AQ-40")
@requirement("AQ-R25")
@requirement("AQ-15")
def test_route_to_creates_state_and_the_application_hears_nothing() -> None:
    peer = Peer()
    peer.say(route(CHILD), message(0, b"early"), message(1, b"too"), fin=False)
    assert peer.core.channels == 2
    assert not any(
        isinstance(event, Readable) and event.half.channel == CHILD for event in peer.other.events
    )
    assert peer.other.take(peer.pair.receiver) is None
    peer.say(route(0), message(0, b"", (), [(CHILD, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    ((half, _),) = carrier.attachments
    assert isinstance(half, ReceiverHalf)
    assert [bytes(m.payload) for m in peer.other.take_all(half)] == [b"early", b"too"]
    assert peer.core.channels == 2  # no second state for it (AQ-42)


@requirement("AQ-R25")
@pytest.mark.parametrize("channel", [CHILD, BACK, 4, 6])
def test_an_implicit_channel_opens_its_control_stream_with_route_to_alone(channel: int) -> None:
    peer = Peer()
    peer.say(route(channel), fin=False)
    peer.pair.advance(0.0249)
    assert peer.streams(channel) == []
    peer.pair.advance(0.0002)
    assert peer.told(channel) == [[]]
    (said,) = peer.streams(channel)
    assert not said.fin
    peer.pair.advance(10)
    assert len(peer.streams(channel)) == 1


@requirement("AQ-R25")
def test_what_an_implicit_receiver_says_later_goes_by_that_stream() -> None:
    peer = Peer()
    peer.say(route(CHILD), fin=False)
    peer.pair.advance(1)
    peer.say(route(CHILD), message(0))
    peer.pair.advance(1)
    peer.say(route(CHILD), finish(1))
    assert peer.told(CHILD) == [[("ACK_RELIABLE", (0, 1)), CLOSE]]


@requirement("AQ-R25")
def test_an_ack_that_is_due_makes_route_to_alone_needless() -> None:
    peer = Peer()
    peer.say(route(CHILD), message(0), fin=False)
    peer.pair.advance(1)
    assert peer.told(CHILD) == [[("ACK_RELIABLE", (0, 1))]]


@requirement("AQ-R25")
def test_a_channel_whose_handle_was_given_says_nothing_needless() -> None:
    peer, _ = attached()
    peer.pair.advance(10)
    assert peer.streams(CHILD) == []


@requirement("AQ-R25")
@requirement("AQ-40")
@pytest.mark.parametrize("keep_sender", [True, False])
def test_the_creator_answers_nothing_while_it_has_state(keep_sender: bool) -> None:
    peer, half = created(keep_sender=keep_sender)
    before = len(peer.streams(half.channel))
    peer.say(route(half.channel), fin=False)
    peer.say(route(half.channel))
    peer.pair.advance(10)
    assert len(peer.streams(half.channel)) == before
    assert peer.core.channels == 2


@requirement("AQ-R25")
@requirement("AQ-R31")
def test_what_an_implicit_receiver_buffers_is_limited() -> None:
    flow = Flow(receive_budget=100_000, channel_receive_bytes=50_000, initial_window=4096)
    peer = Peer(config=dataclasses.replace(DEFAULT, flow=flow))
    for number in range(10):
        peer.say(route(CHILD), message(number, bytes(20_000)))
    half = peer.core._registry.known(CHILD)
    assert isinstance(half, ReceiverHalf)
    assert len(half.queue) == 2 and half.queue.charged <= 50_000


@requirement("AQ-42")
@pytest.mark.parametrize("keep_sender", [True, False])
def test_sending_creates_state_at_once_and_receiving_does_too(keep_sender: bool) -> None:
    peer, half = created(keep_sender=keep_sender)
    assert peer.core.channels == 2
    assert isinstance(half, SenderHalf) is keep_sender
    other = Peer()
    other.say(route(0), message(0, b"", (), [(CHILD, ()), (BACK, ())]), fin=False)
    assert other.core.channels == 3  # before the application took it
    assert isinstance(other.core._registry.known(CHILD), ReceiverHalf)
    assert isinstance(other.core._registry.known(BACK), SenderHalf)


@requirement("AQ-42")
def test_a_message_gives_the_state_of_its_channel_that_is_there() -> None:
    peer = Peer()
    peer.say(route(CHILD), message(0, b"early"), fin=False)
    half = peer.core._registry.known(CHILD)
    peer.say(route(0), message(0, b"", (), [(CHILD, ())]), fin=False)
    assert peer.core._registry.known(CHILD) is half
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None and carrier.attachments[0][0] is half
    assert [bytes(m.payload) for m in peer.other.take_all(half)] == [b"early"]


@requirement("AQ-R25")
@requirement("AQ-R31")
def test_implicit_channels_do_not_exceed_the_receive_budget() -> None:
    """Nobody could take their messages, so none of them is admitted beyond it."""
    flow = Flow(receive_budget=100_000, message_overhead=100)
    peer = Peer(config=dataclasses.replace(DEFAULT, flow=flow))
    for index in range(20):
        peer.say(route(CHILD + 8 * index), message(0, bytes(20_000)), fin=False)
    assert peer.core.error is None and peer.core.channels == 21
    assert 80_000 < peer.core.snapshot()["budget_used_bytes"] <= 100_000


# A channel that ended before the application got it


@requirement("AQ-R26")
@requirement("AQ-46")
@pytest.mark.parametrize(
    "late",
    [message(5), message(5, bytes(50_000)), finish(1), finish(7), CANCEL, SENT],
    ids=["message", "large message", "finish", "another finish", "cancel", "announcement"],
)
@pytest.mark.parametrize("begun_before", [False, True])
def test_late_frames_of_a_channel_that_ended_early_are_ignored(
    late: bytes, begun_before: bool
) -> None:
    peer = Peer()
    stream = peer.say(route(CHILD), fin=False) if begun_before else -1
    peer.say(route(CHILD), message(0, b"kept"), finish(1))
    assert peer.core.channels == 2
    if begun_before:
        peer.more(stream, late)
    else:
        stream = peer.say(route(CHILD), late, fin=False)
    peer.datagram(route(CHILD), message(0, b"late"))
    peer.look()
    assert peer.core.error is None and peer.stops == {stream: 0}
    peer.say(route(0), message(0, b"", (), [(CHILD, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    ((half, _),) = carrier.attachments
    assert isinstance(half, ReceiverHalf)
    assert [bytes(m.payload) for m in peer.other.take_all(half)] == [b"kept"]
    assert isinstance(half.error, Finished)
    assert peer.core.snapshot()["budget_used_bytes"] == 0


@requirement("AQ-R26")
@requirement("AQ-41")
@pytest.mark.parametrize("begun_before", [False, True])
@pytest.mark.parametrize("end", [CANCEL, finish(1)], ids=["cancelled", "finished"])
def test_a_forget_counts_for_a_channel_that_ended_early(end: bytes, begun_before: bool) -> None:
    peer = Peer()
    stream = peer.say(route(CHILD), fin=False) if begun_before else -1
    peer.say(route(CHILD), message(0, b"kept"), end)
    assert peer.core.channels == 2
    if begun_before:
        peer.more(stream, codec.FORGET_CHANNEL)
    else:
        peer.say(route(CHILD), codec.FORGET_CHANNEL)
    assert peer.core.channels == 1
    assert peer.core.snapshot()["budget_used_bytes"] == 0
