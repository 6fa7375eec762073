"""A peer that stops a sender's stream and never closes its receiver: nobody waits for ever."""

from __future__ import annotations

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT
from aqueduct.errors import ReceiverClosed
from aqueduct.protocol.common.events import SenderEnded, Writable
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.protocol.channels.peer import CLOSE, Peer, route

DEADLINE = DEFAULT.timing.progress_deadline


def sender_of(peer: Peer) -> SenderHalf:
    half = peer.core.entrypoint
    assert isinstance(half, SenderHalf)
    return half


@pytest.mark.parametrize("mode", [Mode.ORDERED, Mode.UNORDERED])
def test_a_sender_ends_when_its_stopped_stream_is_not_followed_by_a_close(mode: Mode) -> None:
    peer = Peer("server")
    half = sender_of(peer)
    peer.other.send(half, bytes(100_000), mode=mode)
    peer.look()
    (number,) = [n for n, said in peer._streams.items() if len(said.data) > 1000]
    peer.core.receive_stop(number, 0, peer.pair.now)
    assert half.writable == (mode is Mode.UNORDERED)
    peer.core.wait_writable(half, mode, False)
    peer.pair.advance(DEADLINE - 1)
    assert half.error is None
    peer.pair.advance(2)
    assert isinstance(half.error, ReceiverClosed)
    assert "did not close its receiver within 60 s (Timing.progress_deadline)" in str(half.error)
    assert Writable(half) in peer.other.events and SenderEnded(half) in peer.other.events
    with pytest.raises(ReceiverClosed):
        half.check_sendable()
    # The peer is told, so that its receiver ends as well.
    assert ("CANCEL_SENDER",) in [frame for frames in peer.told(0) for frame in frames]


def test_a_sender_that_finished_ends_as_well() -> None:
    peer = Peer("server")
    half = sender_of(peer)
    peer.other.send(half, bytes(100_000))
    peer.other.finish(half)
    peer.look()
    (number,) = [n for n, said in peer._streams.items() if len(said.data) > 1000]
    peer.core.receive_stop(number, 0, peer.pair.now)
    peer.pair.advance(DEADLINE + 1)
    assert isinstance(half.error, ReceiverClosed)


def test_a_close_that_follows_the_stop_is_what_the_sender_learns() -> None:
    peer = Peer("server")
    half = sender_of(peer)
    peer.other.send(half, bytes(100_000))
    peer.look()
    (number,) = [n for n, said in peer._streams.items() if len(said.data) > 1000]
    peer.core.receive_stop(number, 0, peer.pair.now)
    peer.say(route(0), codec.CLOSE_RECEIVER)
    assert isinstance(half.error, ReceiverClosed)
    assert str(half.error) == "the peer closed the receiver"
    peer.pair.advance(DEADLINE + 1)
    assert str(half.error) == "the peer closed the receiver"
    assert CLOSE not in [frame for frames in peer.told(0) for frame in frames]
    assert peer.core.next_deadline() is None


def control_stream(peer: Peer) -> int:
    """The stream that the sender opened last, for its control frames."""
    return max(peer.look())


def test_a_sender_ends_when_the_stream_of_its_sent_unreliable_is_stopped() -> None:
    peer = Peer("server")
    half = sender_of(peer)
    before = set(peer.look())
    peer.other.send(half, b"lost", mode=Mode.UNRELIABLE)
    peer.core.handle_deadline(peer.pair.now + DEFAULT.timing.sent_unreliable_delay)
    number = control_stream(peer)
    assert number not in before
    peer.core.receive_stop(number, 0, peer.pair.now)
    peer.pair.advance(DEADLINE - 1)
    assert half.error is None
    peer.pair.advance(2)
    assert isinstance(half.error, ReceiverClosed)
    assert SenderEnded(half) in peer.other.events


def test_a_sender_that_finished_ends_when_the_stream_of_its_finish_is_stopped() -> None:
    peer = Peer("server")
    half = sender_of(peer)
    before = set(peer.look())
    peer.other.send(half, b"alone", mode=Mode.UNORDERED)
    peer.core.finish(half, peer.pair.now)
    number = max(peer.core._shared.outgoing._open)  # it has not left yet
    assert number not in before
    peer.core.receive_stop(number, 0, peer.pair.now)
    peer.pair.advance(DEADLINE + 1)
    assert isinstance(half.error, ReceiverClosed)
    assert SenderEnded(half) in peer.other.events


def test_a_control_stream_that_was_sent_whole_keeps_no_sender() -> None:
    peer = Peer("server")
    half = sender_of(peer)
    peer.other.send(half, b"alone", mode=Mode.UNORDERED)
    peer.core.finish(half, peer.pair.now)
    assert half.control is not None
    assert half.control.speaker is half
    peer.look()
    assert half.control.speaker is None


@pytest.mark.parametrize("mode", [Mode.ORDERED, Mode.UNORDERED, Mode.UNRELIABLE])
@pytest.mark.parametrize("finished", [False, True])
def test_a_sender_ends_when_a_stream_is_stopped_that_had_left_whole(
    mode: Mode, finished: bool
) -> None:
    peer = Peer("server")
    half = sender_of(peer)
    before = set(peer.look())
    peer.other.send(half, b"alone", mode=mode)
    if finished or mode is not Mode.UNORDERED:
        peer.other.finish(half)
    number = max(set(peer.look()) - before)
    assert number not in peer.core._shared.outgoing._open  # all of it has left
    peer.core.receive_stop(number, 0, peer.pair.now)
    peer.pair.advance(DEADLINE - 1)
    assert half.error is None
    peer.pair.advance(2)
    assert isinstance(half.error, ReceiverClosed)
    assert "(Timing.progress_deadline)" in str(half.error)
    assert SenderEnded(half) in peer.other.events
    assert not peer.core._shared.outgoing._left or number not in peer.core._shared.outgoing._left


def test_a_sender_of_which_everything_is_acknowledged_goes_on_after_a_late_stop() -> None:
    peer = Peer("server")
    half = sender_of(peer)
    before = set(peer.look())
    peer.other.send(half, b"one", mode=Mode.UNORDERED)
    first = max(set(peer.look()) - before)
    peer.other.send(half, b"two", mode=Mode.UNORDERED)
    (second,) = set(peer.look()) - before - {first}
    peer.core.receive_stop(first, 0, peer.pair.now)
    half.acked(bytes((0, 2)))
    assert not half.unsettled
    peer.core.receive_stop(second, 0, peer.pair.now)
    peer.pair.advance(DEADLINE + 1)
    assert half.error is None
    half.check_sendable()


def test_a_stop_of_no_stream_or_a_second_one_is_without_effect() -> None:
    peer = Peer("server")
    half = sender_of(peer)
    before = set(peer.look())
    peer.other.send(half, b"one", mode=Mode.UNORDERED)
    number = max(set(peer.look()) - before)
    for stopped in (number, number, 77, 2**61):
        peer.core.receive_stop(stopped, 0, peer.pair.now)
    assert len(peer.core._shared.stopped_due) == 1


def test_streams_of_channels_that_have_ended_are_forgotten() -> None:
    peer = Peer("server")
    outgoing = peer.core._shared.outgoing
    half = sender_of(peer)
    for _ in range(500):
        peer.other.send(half, b"x", mode=Mode.UNORDERED)
        peer.look()
    assert 0 < len(outgoing._left) <= 2 * DEFAULT.flow.streams
    outgoing.live.clear()
    for _ in range(600):
        peer.other.send(half, b"x", mode=Mode.UNORDERED)
        peer.look()
    assert len(outgoing._left) <= 16
