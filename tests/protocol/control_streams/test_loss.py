"""Channels lost in transit in the control-stream draft: links, cascades, ghosts."""

from __future__ import annotations

from typing import Any

import pytest

from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct._speedups.control_streams import control_frames as codec
from aqueduct.errors import Cancelled, Finished, LostInTransit, ReceiverClosed
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode
from tests.protocol.control_streams.lone import Lone, message, mine
from tests.protocol.control_streams.pair import Pair, attach


def carried(lone: Lone, half: Any, *, keep_sender: bool, lossy: bool = True) -> Any:
    """A new channel, attached to a message on ``half``."""
    made = Attach(keep_sender=keep_sender, is_oneshot=False)
    (lone.lossy if lossy else lone.send)(half, b"", made)
    return made.half


def told_lost(lone: Lone, since: int = 0) -> list[int]:
    """The channels of ClosedChannelLost, each alone on a stream that is finished."""
    found = []
    streams = dict.fromkeys(
        effect[1]
        for effect in lone.applied[since:]
        if effect[0] == effects.WRITE and effect[1] < mine(0)
    )
    for number in streams:
        frames = lone.frames(number)
        if type(frames[0]) is codec.ClosedChannelLost:
            assert len(frames) == 1 and lone.end(number) == "fin"
            found.append(frames[0].channel)
    return found


NACK = encoder.encode_control_ack_nacks((0, 1))
ACK = encoder.encode_control_ack_nacks((1,))


@pytest.mark.requirement("AQ0-32")
def test_an_ack_on_a_reachable_channel_reaches_what_hangs_on_it() -> None:
    lone = Lone()
    entry = lone.control(0)
    outer = carried(lone, lone.sender, keep_sender=True)
    inner = carried(lone, outer, keep_sender=True, lossy=False)
    assert not outer.accessible and not inner.accessible
    control = lone.control(outer.channel)
    lone.on(control, encoder.encode_control_acks((1,)))
    assert not inner.accessible  # outer is not reachable itself
    assert lone.core.pending_channels() == {outer.channel, inner.channel}
    lone.on(entry, ACK)
    assert outer.accessible and inner.accessible
    assert not lone.core.pending_channels()


@pytest.mark.requirement("AQ0-32")
def test_what_the_peer_created_is_reachable_from_the_start() -> None:
    lone = Lone("server")
    lone.say(message(0, 0, b"", [1]))
    got = lone.take(lone.receiver)
    assert got is not None
    assert got.attachments[0][0].accessible
    assert Lone().sender.accessible


@pytest.mark.requirement("AQ0-32")
@pytest.mark.requirement("AQ0-33")
@pytest.mark.parametrize("keep_sender", [True, False])
def test_a_nack_loses_an_attached_half(keep_sender: bool) -> None:
    lone = Lone(reads=False)
    half = carried(lone, lone.sender, keep_sender=keep_sender)
    if keep_sender:
        lone.send(half, b"under way")
    control = lone.control(half.channel)
    lone.control(0, NACK)
    assert isinstance(half.error, LostInTransit)
    assert lone.end(control) == 2
    if keep_sender:
        assert lone.end(0) == 2  # its messages
    assert told_lost(lone) == []
    assert lone.core.channels == 1
    # Whatever its control stream still says is ignored.
    lone.on(control, encoder.encode_control_close(()) if keep_sender else b"\x07\x00", fin=True)
    assert lone.code is None


@pytest.mark.requirement("AQ0-33")
@pytest.mark.requirement("AQ0-25")
@pytest.mark.parametrize("keep_sender", [True, False])
@pytest.mark.parametrize("closed", [True, False])
def test_a_half_that_was_never_attached_is_told_when_it_is_asked_for(
    keep_sender: bool, closed: bool
) -> None:
    lone = Lone()
    half = carried(lone, lone.sender, keep_sender=keep_sender)
    if closed:
        (lone.cancel if keep_sender else lone.close)(half)
    lone.control(0, NACK)
    assert told_lost(lone) == []
    assert lone.core.channels == 1
    assert lone.end(lone.control(half.channel)) == 2


@pytest.mark.requirement("AQ0-33")
@pytest.mark.requirement("AQ0-R11")
@pytest.mark.requirement("AQ0-R8")
@pytest.mark.parametrize("keep_sender", [True, False])
def test_a_half_that_has_ceased_is_told_by_a_frame_of_its_own(keep_sender: bool) -> None:
    lone = Lone()
    half = carried(lone, lone.sender, keep_sender=keep_sender)
    control = lone.control(half.channel)
    if keep_sender:
        lone.on(control, encoder.encode_control_close(()), fin=True)
    else:
        lone.close(half)
    assert lone.end(control) == "fin" and lone.core.channels == 1
    lone.control(0, NACK)
    assert told_lost(lone) == [half.channel]


@pytest.mark.requirement("AQ0-32")
@pytest.mark.requirement("AQ0-33")
def test_once_reachable_nothing_is_told() -> None:
    lone = Lone()
    half = carried(lone, lone.sender, keep_sender=True)
    control = lone.control(half.channel)
    lone.on(control, encoder.encode_control_close(()), fin=True)
    lone.on(lone.control(0, ACK), encoder.encode_control_close(()), fin=True)
    assert told_lost(lone) == []


@pytest.mark.requirement("AQ0-33")
@pytest.mark.parametrize("reached", [True, False])
def test_the_links_of_a_sender_that_has_ceased_still_decide(reached: bool) -> None:
    lone = Lone()
    outer = carried(lone, lone.sender, keep_sender=True)
    inner = carried(lone, outer, keep_sender=True, lossy=False)
    control = lone.control(outer.channel)
    lone.on(control, encoder.encode_control_close((1,)), fin=True)  # outer ceases, inner was acked
    assert inner.error is None
    lone.control(0, ACK if reached else NACK)
    if reached:
        assert inner.accessible and told_lost(lone) == []
    else:
        assert isinstance(inner.error, LostInTransit) and told_lost(lone) == [outer.channel]
    assert not lone.core._registry._pending_tables


@pytest.mark.requirement("AQ0-33")
def test_a_cascade_goes_through_halves_that_live_and_that_have_ceased() -> None:
    lone = Lone()
    halves = [lone.sender]
    controls = []
    for _ in range(6):
        half = carried(lone, halves[-1], keep_sender=True, lossy=len(halves) == 1)
        halves.append(half)
        controls.append(lone.control(half.channel))
    for k in (1, 3, 5):  # these cease, and had acked what they carried
        lone.on(controls[k - 1], encoder.encode_control_close((1,)), fin=True)
    last = carried(lone, halves[6], keep_sender=False, lossy=False)
    lone.control(0, NACK)
    assert sorted(told_lost(lone)) == [halves[k].channel for k in (1, 3, 5)]
    assert [lone.end(controls[k - 1]) for k in (2, 4, 6)] == [2, 2, 2]
    assert isinstance(last.error, LostInTransit)
    assert lone.core.channels == 1


@pytest.mark.requirement("AQ0-33")
def test_a_cascade_of_any_depth_takes_no_stack() -> None:
    lone = Lone()
    half: Any = lone.sender
    for _ in range(5000):
        half = carried(lone, half, keep_sender=True)
    lone.control(0, NACK)
    assert isinstance(half.error, LostInTransit)
    assert lone.core.channels == 1


@pytest.mark.requirement("AQ0-32")
def test_what_becomes_reachable_in_a_row_of_any_length_takes_no_stack() -> None:
    lone = Lone()
    half: Any = lone.sender
    halves = []
    for depth in range(3000):
        half = carried(lone, half, keep_sender=True, lossy=not depth)
        halves.append(half)
    for each in halves[:-1]:
        lone.control(each.channel, encoder.encode_control_acks((1,)))
    lone.control(0, ACK)
    lone.wait(0)  # so many frames are not read in one turn
    assert all(each.accessible for each in halves)


@pytest.mark.requirement("AQ0-34")
@pytest.mark.parametrize("keep_sender", [True, False])
def test_a_half_whose_control_stream_is_reset_as_lost_ceases(keep_sender: bool) -> None:
    lone = Lone(reads=False)
    half = carried(lone, lone.sender, keep_sender=keep_sender)
    control = lone.control(half.channel)
    inner = carried(lone, half, keep_sender=True, lossy=False) if keep_sender else None
    lone.reset(control, 2)
    assert isinstance(half.error, LostInTransit)
    assert lone.end(control) == 2
    if inner is not None:
        assert isinstance(inner.error, LostInTransit)
    assert lone.core.channels == 1


@pytest.mark.requirement("AQ0-34")
@pytest.mark.requirement("AQ0-R6")
def test_what_was_not_taken_of_a_lost_channel_is_lost_with_its_attachments() -> None:
    lone = Lone("server")
    lone.say(message(0, 0, b"", [8]))
    got = lone.take(lone.receiver)
    assert got is not None
    half: Any = got.attachments[0][0]
    lone.say(message(8, 0, b"", [1, 16]))
    lone.say(message(16, 0, b"", [9, 24]))  # not even its carrier is taken
    lone.reset(mine(1), 2)
    assert lone.take(half) is None and isinstance(half.error, LostInTransit)
    # Their control streams are reset with the code of loss, not with that of a cancel.
    assert [lone.end(mine(k)) for k in range(1, 6)] == [2] * 5
    assert lone.core.channels == 1
    assert told_lost(lone) == []


@pytest.mark.requirement("AQ0-R6")
@pytest.mark.requirement("AQ0-R11")
def test_a_channel_of_the_peer_is_never_told_lost_by_a_frame() -> None:
    lone = Lone("server")
    lone.say(message(0, 0, b"", [8]))
    assert lone.take(lone.receiver) is not None
    lone.say(message(8, 0, b"", [1]))
    lone.core.receive_stop(mine(2), 2, lone.now)  # so its direction is dead
    lone.apply()
    lone.reset(mine(1), 2)
    assert lone.core.channels == 1
    assert told_lost(lone) == []


@pytest.mark.requirement("AQ0-R6")
def test_what_was_finished_within_a_dropped_message_is_dropped_too() -> None:
    lone = Lone("server")
    lone.say(message(8, 0, b"", [16]))
    lone.on(mine(1), encoder.encode_control_finish(1), fin=True)  # it has ended, and waits
    lone.say(message(16, 0, bytes(1000)))
    assert lone.core.channels == 3
    lone.say(encoder.encode_closed_channel_lost(8))
    assert lone.core.channels == 1
    assert lone.end(mine(2)) == 2
    assert lone.core.snapshot()["budget_used_bytes"] == 0


@pytest.mark.requirement("AQ0-33")
@pytest.mark.requirement("AQ0-23")
def test_closed_channel_lost_takes_a_channel_that_nobody_got() -> None:
    lone = Lone("server")
    lone.say(message(8, 0, b"before its carrier"))
    lone.say(encoder.encode_closed_channel_lost(8))
    assert lone.core.channels == 1
    assert lone.end(mine(1)) == 2
    # Neither a late message nor the late carrier makes it live again.
    lone.say(message(8, 1, b"late"))
    lone.say(message(0, 0, b"", [8]))
    got = lone.take(lone.receiver)
    assert got is not None
    half = got.attachments[0][0]
    assert isinstance(half, ReceiverHalf) and isinstance(half.error, LostInTransit)
    assert lone.core.channels == 1 and lone.frames(mine(2)) == []


@pytest.mark.requirement("AQ0-23")
@pytest.mark.requirement("AQ0-R14")
def test_there_are_no_ghosts_here() -> None:
    lone = Lone("server")
    lone.say(message(0, 0, b"", [8]))
    got = lone.take(lone.receiver)
    assert got is not None
    lone.close(got.attachments[0][0])
    lone.say(message(8, 0, b"late"))
    lone.datagram(message(8, 0, b"late"))
    assert lone.core.channels == 1 and lone.frames(mine(2)) == []


@pytest.mark.requirement("AQ0-R14")
@pytest.mark.requirement("AQ0-23")
def test_a_message_for_a_receiver_of_ours_that_is_gone_is_discarded() -> None:
    lone = Lone()
    half = lone.create(keep_sender=False)
    control = lone.control(half.channel)
    lone.close(half)
    lone.say(message(half.channel, 0, b"late", [3]))
    lone.datagram(message(half.channel, 0, b"late"))
    assert lone.core.channels == 1 and lone.code is None
    assert lone.frames(control) == [codec.ControlClose(())]


@pytest.mark.requirement("AQ0-25")
@pytest.mark.requirement("AQ0-34")
def test_a_ghost_of_the_peer_is_sent_away() -> None:
    """The peer may make one for a message that comes behind the close (AQ0-25)."""
    lone = Lone()
    half = lone.create(keep_sender=True)
    lone.send(half, b"x")
    lone.on(lone.control(half.channel), encoder.encode_control_close((1,)), fin=True)
    ghost = lone.control(half.channel, encoder.encode_control_acks((1,)))
    assert lone.end(ghost) == 2
    assert lone.code is None


@pytest.mark.requirement("AQ0-33")
@pytest.mark.requirement("AQ0-34")
@pytest.mark.parametrize("keep_sender", [True, False])
def test_a_lost_datagram_ends_its_channels_at_both_sides(keep_sender: bool) -> None:
    pair = Pair()
    made = attach(keep_sender=keep_sender)
    pair.client.lose_datagrams = True
    pair.client.send(pair.sender, b"", made, mode=Mode.UNRELIABLE)
    if keep_sender:
        pair.client.send(made.half, b"arrives before its carrier is lost")
    pair.advance(3)
    assert made.half is not None and isinstance(made.half.error, LostInTransit)
    assert pair.client.core.channels == pair.server.core.channels == 1
    assert pair.client.ended is pair.server.ended is None
    assert not pair.server.core._registry._ended_early


@pytest.mark.requirement("AQ0-30")
@pytest.mark.requirement("AQ0-33")
def test_a_close_loses_what_it_does_not_ack() -> None:
    lone = Lone()
    inner = carried(lone, lone.sender, keep_sender=True, lossy=False)
    loose = carried(lone, lone.sender, keep_sender=True)
    lone.control(0, encoder.encode_control_close(()), fin=True)
    assert isinstance(lone.sender.error, ReceiverClosed)
    assert isinstance(inner.error, LostInTransit) and isinstance(loose.error, LostInTransit)
    assert lone.core.channels == 0


@pytest.mark.requirement("AQ0-24")
@pytest.mark.requirement("AQ0-R16")
def test_a_dropped_attachment_is_closed_or_cancelled_not_lost() -> None:
    lone = Lone("server")
    lone.say(message(0, 0, b"", [8, 1]))
    lone.close(lone.receiver)
    assert lone.end(mine(1)) == "fin" and lone.end(mine(2)) == 1
    assert lone.frames(mine(0))[-1] == codec.ControlClose((1,))


@pytest.mark.requirement("AQ0-24")
def test_a_channel_that_ended_before_its_carrier_is_given_as_it_ended() -> None:
    lone = Lone("server")
    lone.say(message(8, 0, b"all"))
    lone.on(mine(1), encoder.encode_control_finish(1), fin=True)
    lone.say(message(16, 0, b"dropped"))
    lone.reset(mine(2), 1)
    lone.say(message(0, 0, b"", [8, 16]))
    got = lone.take(lone.receiver)
    assert got is not None
    finished, cancelled = (half for half, _ in got.attachments)
    inner = lone.take(finished)
    assert inner is not None and bytes(inner.payload) == b"all"
    assert isinstance(finished.error, Finished) and isinstance(cancelled.error, Cancelled)
    assert lone.core.channels == 1
