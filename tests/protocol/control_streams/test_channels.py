"""The life of channels in the control-stream draft: frames, not only results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.channels.frames import FinishSender, SentUnreliable
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct._speedups.control_streams import control_frames as codec
from aqueduct.config import DEFAULT, Flow, Limits
from aqueduct.errors import (
    Cancelled,
    ConnectionLost,
    Finished,
    LocalProtocolError,
    MessageLost,
    ReceiverClosed,
)
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.events import SenderEnded
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.common.state import SenderState
from aqueduct.protocol.control_streams import ids
from tests.protocol.control_streams.lone import Lone, frames_of, message, mine
from tests.protocol.control_streams.pair import Pair, Side, attach

ACK = DEFAULT.timing.ack_delay


def channel_of(pair: Pair, *, keep_sender: bool, is_oneshot: bool = False) -> tuple[Any, Any]:
    """A channel that the client has created: its half and the server's, attached."""
    made = attach(keep_sender=keep_sender, is_oneshot=is_oneshot)
    pair.client.send(pair.sender, b"", made)
    pair.run()
    received = pair.server.take(pair.receiver)
    assert received is not None
    return made.half, received.attachments[0][0]


def payloads(side: Side, half: Any) -> list[bytes]:
    return [bytes(received.payload) for received in side.take_all(half)]


# ------------------------------------------------------------ sending


@pytest.mark.requirement("AQ0-22")
@pytest.mark.requirement("AQ0-13")
def test_ordered_messages_share_a_stream_and_unordered_ones_have_their_own() -> None:
    lone = Lone()
    for _ in range(3):
        lone.send(lone.sender, b"o")
    for _ in range(2):
        lone.send(lone.sender, b"u", mode=Mode.UNORDERED)
    assert [frame.num for frame in lone.frames(0)] == [0, 1, 2]
    assert [[f.num for f in lone.frames(n)] for n in (1, 2)] == [[3], [4]]
    assert [lone.end(n) for n in (0, 1, 2)] == [None, "fin", "fin"]


@pytest.mark.requirement("AQ0-22")
def test_datagrams_have_numbers_of_their_own_and_are_announced_in_time() -> None:
    lone = Lone()
    lone.control(0)
    lone.send(lone.sender, b"s")
    assert [lone.lossy(lone.sender, b"d") for _ in range(3)] == [0, 1, 2]
    number = mine(0) + 1
    assert lone.frames(number) == []
    lone.wait(DEFAULT.timing.sent_unreliable_delay)
    assert DEFAULT.timing.sent_unreliable_delay <= 0.1
    assert lone.frames(number) == [SentUnreliable(3)]
    lone.lossy(lone.sender, b"d")
    lone.wait(0.1)
    assert lone.frames(number)[1:] == [SentUnreliable(1)]


@pytest.mark.requirement("AQ0-22")
def test_what_was_sent_unreliably_is_announced_once_the_control_stream_is_there() -> None:
    lone = Lone()
    half = lone.create(keep_sender=True)
    lone.lossy(half, b"a")
    lone.wait(1)
    lone.lossy(half, b"b")
    lone.wait(1)
    number = lone.control(half.channel)
    assert lone.frames(number) == [SentUnreliable(2)]


@pytest.mark.requirement("AQ0-22")
def test_what_fits_no_datagram_goes_by_stream() -> None:
    lone = Lone()
    lone.lossy(lone.sender, bytes(2000))
    assert lone.frames(0)[0].size == 2000
    assert not any(effect[0] == effects.DATAGRAM for effect in lone.applied)


@pytest.mark.requirement("AQ0-7")
@pytest.mark.requirement("AQ0-21")
def test_ids_are_counted_in_eight_spaces() -> None:
    lone = Lone()
    made = [
        Attach(keep_sender=keep, is_oneshot=oneshot)
        for keep in (True, False)
        for oneshot in (False, True)
        for _ in range(2)
    ]
    lone.send(lone.sender, b"", *made)
    channels = [each.half.channel for each in made if each.half is not None]
    assert channels == [8, 16, 4, 12, 1, 9, 5, 13]
    assert lone.frames(0)[0].attached == tuple((channel, ()) for channel in channels)
    assert isinstance(made[0].half, SenderHalf) and isinstance(made[4].half, ReceiverHalf)


# ------------------------------------------------------------ control streams


@pytest.mark.requirement("AQ0-25")
@pytest.mark.requirement("AQ0-24")
@pytest.mark.requirement("AQ0-R11")
def test_who_did_not_create_opens_the_control_stream_at_once() -> None:
    lone = Lone("server")
    lone.say(message(0, 0, b"x", [8, 1]))
    assert lone.frames(mine(1)) == [codec.ChannelControl(8)]
    assert lone.frames(mine(2)) == [codec.ChannelControl(1)]
    got = lone.take(lone.receiver)
    assert got is not None and bytes(got.payload) == b"x"
    halves = [half for half, _ in got.attachments]
    assert isinstance(halves[0], ReceiverHalf) and isinstance(halves[1], SenderHalf)
    assert [half.channel for half in halves] == [8, 1]


@pytest.mark.requirement("AQ0-23")
@pytest.mark.requirement("AQ0-25")
def test_a_message_may_come_before_the_one_that_carries_its_channel() -> None:
    lone = Lone("server")
    lone.say(message(8, 0, b"first"))
    assert lone.frames(mine(1)) == [codec.ChannelControl(8)]
    lone.say(message(0, 0, b"", [8]))
    got = lone.take(lone.receiver)
    assert got is not None
    inner = lone.take(got.attachments[0][0])
    assert inner is not None and bytes(inner.payload) == b"first"
    assert lone.frames(mine(2)) == []  # no second one


@pytest.mark.requirement("AQ0-25")
def test_a_second_control_stream_and_one_without_a_half_are_lost() -> None:
    lone = Lone()
    half = lone.create(keep_sender=True)
    first = lone.control(half.channel)
    second = lone.control(half.channel)
    assert lone.end(first) is None and lone.end(second) == 2
    assert (effects.STOP, second, 2) in lone.applied
    lone.on(first, encoder.encode_control_close(()), fin=True)
    third = lone.control(half.channel)
    assert lone.end(third) == 2
    lone.on(third, encoder.encode_control_acks((5,)))  # which nobody reads
    assert lone.code is None


@pytest.mark.requirement("AQ0-R5")
@pytest.mark.parametrize("how", ["reset", "fin"])
def test_a_stream_that_ends_before_its_first_frame_is_dropped_and_takes_no_slot(how: str) -> None:
    lone = Lone()
    number = lone.open(VERSION[:9])
    if how == "reset":
        lone.reset(number, 1)
    else:
        lone.on(number, VERSION[9:], fin=True)
    assert lone.code is None
    assert lone.end(number) == 2
    assert number not in lone.core.incoming.streams


# ------------------------------------------------------------ acks


@pytest.mark.requirement("AQ0-26")
@pytest.mark.requirement("AQ0-15")
@pytest.mark.requirement("AQ0-R16")
def test_acks_start_at_the_lowest_number_that_was_not_acked() -> None:
    lone = Lone("server")
    first = mine(0)

    def acked(*numbers: int) -> Any:
        before = len(lone.frames(first))
        for number in numbers:
            lone.say(message(0, number))
        lone.wait(ACK)
        (frame,) = lone.frames(first)[before:]
        return frame

    assert 0 < ACK <= 1
    assert acked(0, 1) == codec.ControlAcks((2,))
    assert acked(2) == codec.ControlAcks((1,))
    assert acked(5, 6, 8) == codec.ControlAcks((0, 2, 2, 1, 1))  # from 3
    assert acked(9) == codec.ControlAcks((0, 6, 1))  # still from 3
    assert acked(3) == codec.ControlAcks((1,))
    assert acked(4) == codec.ControlAcks((1,))
    assert acked(7) == codec.ControlAcks((1,))
    lone.wait(5)
    assert len(lone.frames(first)) == 8  # and none twice


@pytest.mark.requirement("AQ0-26")
def test_acks_wait_for_the_control_stream() -> None:
    lone = Lone()
    half = lone.create(keep_sender=False)
    for number in (0, 2):
        lone.say(message(half.channel, number))
    lone.wait(5)
    assert lone.frames(lone.control(half.channel)) == [codec.ControlAcks((1, 1, 1))]


@pytest.mark.requirement("AQ0-15")
@pytest.mark.requirement("AQ0-26")
def test_a_sender_reads_acks_from_the_lowest_number_that_was_not_acked() -> None:
    lone = Lone()
    control = lone.control(0)
    for _ in range(10):
        lone.send(lone.sender, b"")
    for ranges, unacked in (
        ((2,), 8),
        ((0, 2, 1), 7),  # 4
        ((1, 2, 1), 5),  # 2, 5
        ((1,), 4),  # 3; 6 to 9 are left
        ((4,), 0),
    ):
        lone.on(control, encoder.encode_control_acks(ranges))
        assert lone.sender.numbers.unacked == unacked
    assert lone.code is None


@pytest.mark.requirement("AQ0-26")
@pytest.mark.requirement("AQ0-15")
@pytest.mark.requirement("AQ0-23")
def test_datagrams_are_acked_and_nacked_in_time_from_where_the_last_frame_ended() -> None:
    lone = Lone("server")
    control = mine(0)
    lone.datagram(message(0, 0))
    lone.datagram(message(0, 2))
    lone.on(control, encoder.encode_control_sent_unreliable(4))
    lone.wait(DEFAULT.timing.receipt_deadline - 0.01)
    assert lone.frames(control) == [codec.ChannelControl(0)]
    lone.wait(0.02)
    assert lone.frames(control)[1:] == [codec.ControlAckNacks((1, 1, 1, 1))]
    # What was nacked is not processed when it comes late, and is not acked.
    lone.datagram(message(0, 1, b"late"))
    lone.datagram(message(0, 4, b"next"))
    lone.on(control, encoder.encode_control_sent_unreliable(1))
    lone.wait(2)
    assert lone.frames(control)[2:] == [codec.ControlAckNacks((1,))]
    got = []
    while (each := lone.take(lone.receiver)) is not None:
        got.append(each.number)
    assert got == [0, 2, 4]


@pytest.mark.requirement("AQ0-26")
def test_a_slow_network_has_two_round_trips() -> None:
    lone = Lone("server")
    lone.core.rtt_measured(3.0)
    lone.on(mine(0), encoder.encode_control_sent_unreliable(1))
    lone.wait(5.9)
    assert len(lone.frames(mine(0))) == 1
    lone.wait(0.2)
    assert lone.frames(mine(0))[1:] == [codec.ControlAckNacks((0, 1))]


@pytest.mark.requirement("AQ0-R12")
def test_empty_ranges_and_counts_have_no_effect() -> None:
    lone = Lone()
    control = lone.control(0)
    lone.send(lone.sender, b"")
    for empty in (b"\x05\x00", b"\x06\x00"):
        lone.on(control, empty)
    assert lone.code is None and lone.sender.numbers.unacked == 1
    server = Lone("server")
    server.on(mine(0), b"\x04\x00")
    server.wait(5)
    assert server.code is None and len(server.frames(mine(0))) == 1


# ------------------------------------------------------------ finish


@pytest.mark.requirement("AQ0-27")
@pytest.mark.requirement("AQ0-14")
@pytest.mark.requirement("AQ0-R2")
def test_finish_announces_counts_and_ends_the_direction() -> None:
    lone = Lone()
    control = lone.control(0)
    lone.send(lone.sender, b"")
    lone.send(lone.sender, b"", mode=Mode.UNORDERED)
    lone.lossy(lone.sender)
    lone.finish(lone.sender)
    assert lone.frames(control) == [SentUnreliable(1), FinishSender(2)]
    assert lone.end(control) == "fin" and lone.end(0) == "fin"
    for wrong in (lone.send, lone.finish, lone.cancel):
        with pytest.raises(LocalProtocolError, match="already finished"):
            wrong(lone.sender)


@pytest.mark.requirement("AQ0-27")
def test_finish_waits_for_the_control_stream() -> None:
    lone = Lone()
    half = lone.create(keep_sender=True)
    lone.send(half, b"")
    lone.lossy(half)
    lone.finish(half)
    lone.wait(5)
    with pytest.raises(LocalProtocolError):
        lone.send(half)
    control = lone.control(half.channel)
    assert lone.frames(control) == [SentUnreliable(1), FinishSender(1)]
    assert lone.end(control) == "fin"


@pytest.mark.requirement("AQ0-27")
@pytest.mark.requirement("AQ0-28")
@pytest.mark.requirement("AQ0-30")
@pytest.mark.parametrize("mode", [Mode.ORDERED, Mode.UNORDERED])
@pytest.mark.parametrize("keep_sender", [True, False])
def test_a_finished_channel_delivers_all_and_both_ends_agree(mode: Mode, keep_sender: bool) -> None:
    pair = Pair()
    here, there = channel_of(pair, keep_sender=keep_sender)
    sides = (pair.client, pair.server) if keep_sender else (pair.server, pair.client)
    sender, receiver = (here, there) if keep_sender else (there, here)
    for index in range(5):
        sides[0].send(sender, b"%d" % index, mode=mode)
    sides[0].finish(sender)
    pair.advance(0.1)
    assert sorted(payloads(sides[1], receiver)) == [b"0", b"1", b"2", b"3", b"4"]
    assert isinstance(receiver.error, Finished)
    assert sender.state is SenderState.ENDED and sender.error is None
    assert SenderEnded(sender) in sides[0].events
    pair.advance(2)
    assert pair.client.core.channels == pair.server.core.channels == 1
    assert pair.client.ended is pair.server.ended is None


@pytest.mark.requirement("AQ0-28")
def test_a_receiver_waits_for_messages_and_gives_datagrams_their_time() -> None:
    lone = Lone("server")
    control = mine(0)
    lone.say(message(0, 1, b"b"))
    lone.on(
        control,
        encoder.encode_control_sent_unreliable(2),
        encoder.encode_control_finish(2),
        fin=True,
    )
    lone.datagram(message(0, 1, b"d"))
    lone.say(message(0, 0, b"a"))
    lone.wait(0.5)
    assert lone.receiver.error is None  # datagram 0 may still come
    assert lone.end(control) is None
    lone.wait(1)
    assert isinstance(lone.receiver.error, Finished)
    assert lone.frames(control)[-2:] == [codec.ControlAckNacks((0, 1, 1)), codec.ControlClose((2,))]
    assert lone.end(control) == "fin"
    got = []
    while (each := lone.take(lone.receiver)) is not None:
        got.append(bytes(each.payload))
    assert got == [b"b", b"d", b"a"]


# ------------------------------------------------------------ close


@pytest.mark.requirement("AQ0-29")
@pytest.mark.requirement("AQ0-16")
@pytest.mark.requirement("AQ0-R1")
def test_a_close_repeats_every_ack_from_zero() -> None:
    lone = Lone("server")
    for number in (0, 1, 4):
        lone.say(message(0, number))
    lone.wait(ACK)
    lone.say(message(0, 6))
    for number in (1, 3):
        lone.datagram(message(0, number))
    lone.on(mine(0), encoder.encode_control_sent_unreliable(6))
    lone.close(lone.receiver)
    assert lone.frames(mine(0))[2:] == [
        codec.ControlAckNacks((0, 1, 1, 1, 1)),  # 4 and 5 are left to the close
        codec.ControlClose((2, 2, 1, 1, 1)),
    ]
    assert lone.end(mine(0)) == "fin"
    assert lone.core.channels == 0
    lone.say(message(0, 7, b"late"))
    lone.wait(2)
    assert lone.core.channels == 0 and lone.code is None
    assert len(lone.frames(mine(0))) == 4


@pytest.mark.requirement("AQ0-29")
@pytest.mark.requirement("AQ0-R12")
def test_an_empty_close_is_normal_and_begins_with_a_hole_if_it_must() -> None:
    lone = Lone("server")
    lone.say(message(0, 0, b"", [8, 16]))
    got = lone.take(lone.receiver)
    assert got is not None
    lone.say(message(16, 2))
    for half, _ in got.attachments:
        lone.close(half)
    assert lone.frames(mine(1)) == [codec.ChannelControl(8), codec.ControlClose(())]
    assert lone.frames(mine(2)) == [codec.ChannelControl(16), codec.ControlClose((0, 2, 1))]


@pytest.mark.requirement("AQ0-29")
def test_a_close_waits_for_the_control_stream() -> None:
    lone = Lone()
    half = lone.create(keep_sender=False)
    lone.say(message(half.channel, 0))
    lone.datagram(message(half.channel, 0))
    lone.close(half)
    lone.wait(5)
    assert isinstance(half.error, ReceiverClosed)
    assert lone.core.channels == 2  # it still has state, which counts
    lone.say(message(half.channel, 1, b"late"))
    control = lone.control(half.channel)
    assert lone.frames(control) == [codec.ControlAckNacks((1,)), codec.ControlClose((1,))]
    assert lone.end(control) == "fin"
    assert lone.core.channels == 1
    # What its sender still says is not heard.
    lone.on(control, encoder.encode_control_sent_unreliable(9), encoder.encode_control_finish(0))
    assert lone.code is None


@pytest.mark.requirement("AQ0-30")
@pytest.mark.requirement("AQ0-R4")
@pytest.mark.requirement("AQ0-R1")
def test_a_sender_works_through_the_close_ends_and_lets_its_streams_go() -> None:
    lone = Lone(reads=False)
    control = lone.control(0)
    inner = [attach(keep_sender=True) for _ in range(3)]
    for each in inner:
        lone.send(lone.sender, b"", each)
    lone.on(control, encoder.encode_control_acks((1,)))
    # 0 is acked again, which is no fault here, and 1 is not; the rest is nacked.
    lone.on(control, encoder.encode_control_close((1, 1, 1)), fin=True)
    assert isinstance(lone.sender.error, ReceiverClosed)
    assert lone.end(control) == "fin" and lone.end(0) == 1
    states = [each.half.state.name for each in inner]  # type: ignore[union-attr]
    assert states == ["OPEN", "ENDED", "OPEN"]
    assert lone.core.channels == 2 and lone.code is None


@pytest.mark.requirement("AQ0-R1")
def test_a_negative_range_over_what_was_acked_is_ignored() -> None:
    lone = Lone()
    control = lone.control(0)
    inner = attach(keep_sender=True)
    lone.send(lone.sender, b"", inner)
    lone.send(lone.sender, b"")
    lone.on(control, encoder.encode_control_acks((1,)))
    lone.on(control, encoder.encode_control_close((0, 1, 1)), fin=True)
    assert lone.code is None
    assert isinstance(inner.half, SenderHalf)
    assert inner.half.error is None and inner.half.accessible


@pytest.mark.requirement("AQ0-30")
def test_success_is_a_finish_and_everything_settled() -> None:
    for ranges, error in (((2,), None), ((1,), ReceiverClosed)):
        lone = Lone()
        control = lone.control(0)
        lone.send(lone.sender)
        lone.send(lone.sender)
        lone.finish(lone.sender)
        lone.on(control, encoder.encode_control_close(ranges), fin=True)
        assert type(lone.sender.error) is (error or type(None))


# ------------------------------------------------------------ cancel


@pytest.mark.requirement("AQ0-31")
@pytest.mark.requirement("AQ0-18")
def test_a_cancel_resets_the_control_stream_and_the_messages() -> None:
    lone = Lone(reads=False)
    control = lone.control(0)
    lone.send(lone.sender, b"o")
    lone.send(lone.sender, b"u", mode=Mode.UNORDERED)
    lone.cancel(lone.sender)
    assert [lone.end(n) for n in (control, 0, 1)] == [1, 1, 1]
    assert lone.frames(control) == []
    with pytest.raises(Cancelled):
        lone.send(lone.sender)
    # Its state stays until the receiver has closed.
    assert lone.core.channels == 1
    lone.on(control, encoder.encode_control_close(()), fin=True)
    assert lone.core.channels == 0


@pytest.mark.requirement("AQ0-31")
def test_a_cancel_waits_for_the_control_stream_but_not_its_messages() -> None:
    lone = Lone(reads=False)
    half = lone.create(keep_sender=True)
    lone.send(half, b"o")
    lone.lossy(half)
    lone.cancel(half)
    assert lone.end(1) == 1
    lone.wait(5)
    control = lone.control(half.channel)
    assert lone.end(control) == 1 and lone.written(control) == b""


@pytest.mark.requirement("AQ0-31")
@pytest.mark.requirement("AQ0-R16")
def test_a_cancelled_receiver_drops_what_was_not_taken() -> None:
    lone = Lone("server")
    lone.say(message(0, 0, b"", [8]))
    got = lone.take(lone.receiver)
    assert got is not None
    half: Any = got.attachments[0][0]
    lone.say(message(8, 0, b"taken"))
    lone.say(message(8, 1, b"dropped", [1]))
    lone.datagram(message(8, 0, b"dropped"))
    assert lone.take(half) is not None
    lone.reset(mine(1), 1)
    assert lone.take(half) is None
    assert isinstance(half.error, Cancelled)
    # What was taken is acked, and what was not is not.
    assert lone.frames(mine(1)) == [codec.ChannelControl(8), codec.ControlClose((1,))]
    assert lone.end(mine(1)) == "fin"
    # The sender in the dropped message is cancelled, not lost (AQ-R26).
    assert lone.end(mine(2)) == 1


@pytest.mark.requirement("AQ0-31")
@pytest.mark.requirement("AQ0-14")
def test_a_cancel_may_follow_a_finish() -> None:
    lone = Lone("server")
    lone.say(message(0, 0, b"taken"))
    assert lone.take(lone.receiver) is not None
    lone.say(message(0, 1, b"dropped", [1]))
    lone.on(mine(0), encoder.encode_control_finish(3))
    lone.reset(mine(0), 1)
    assert lone.code is None and isinstance(lone.receiver.error, Cancelled)
    assert lone.take(lone.receiver) is None
    # What was dropped is not acked (AQ0-R1), and its sender is cancelled.
    assert lone.frames(mine(0)) == [codec.ChannelControl(0), codec.ControlClose((1,))]
    assert lone.end(mine(0)) == "fin" and lone.core.channels == 1
    assert lone.end(mine(1)) == 1


@pytest.mark.requirement("AQ0-R5")
@pytest.mark.parametrize("how", ["written", "heard"])
def test_who_opened_the_control_stream_resets_it_when_its_first_frame_is_there(how: str) -> None:
    lone = Lone("server", reads=False)
    lone.say(message(0, 0, b"", [1]))
    got = lone.take(lone.receiver)
    assert got is not None
    half: Any = got.attachments[0][0]
    lone.cancel(half)
    assert lone.end(mine(1)) is None and lone.frames(mine(1)) == [codec.ChannelControl(1)]
    if how == "written":
        lone.leaves()
    else:
        lone.on(mine(1), encoder.encode_control_close(())[:1])
    assert lone.end(mine(1)) == 1


@pytest.mark.requirement("AQ0-R5")
def test_a_cancel_before_a_slot_is_there_is_told_later() -> None:
    lone = Lone("server", bidi_slots=1)
    lone.say(message(0, 0, b"", [1]))
    got = lone.take(lone.receiver)
    assert got is not None
    lone.cancel(got.attachments[0][0])
    assert lone.written(mine(1)) == b""
    lone.core.bidi_openable_changed(1, 0.0)
    lone.apply()
    assert lone.frames(mine(1)) == [codec.ChannelControl(1)] and lone.end(mine(1)) == 1


@pytest.mark.requirement("AQ0-31")
@pytest.mark.parametrize("keep_sender", [True, False])
def test_a_cancel_reaches_the_other_side(keep_sender: bool) -> None:
    pair = Pair()
    here, there = channel_of(pair, keep_sender=keep_sender)
    side, sender, receiver = (
        (pair.client, here, there) if keep_sender else (pair.server, there, here)
    )
    side.send(sender, b"x")
    side.cancel(sender)
    pair.advance(2)
    assert isinstance(receiver.error, Cancelled)
    assert pair.client.core.channels == pair.server.core.channels == 1


# ------------------------------------------------------------ oneshot


@pytest.mark.requirement("AQ0-R16")
@pytest.mark.requirement("AQ0-28")
@pytest.mark.parametrize("keep_sender", [True, False])
def test_a_oneshot_takes_one_message_and_finishes_on_its_control_stream(keep_sender: bool) -> None:
    pair = Pair()
    here, there = channel_of(pair, keep_sender=keep_sender, is_oneshot=True)
    side, sender, receiver = (
        (pair.client, here, there) if keep_sender else (pair.server, there, here)
    )
    side.send(sender, b"once")
    with pytest.raises(LocalProtocolError):
        side.send(sender, b"twice")
    pair.run()
    other = pair.server if keep_sender else pair.client
    assert payloads(other, receiver) == [b"once"]
    assert isinstance(receiver.error, Finished)
    pair.advance(2)
    said = next(
        frames_of(side.applied, number, server=side is pair.server, channel=sender.channel)
        for number in (effect[1] for effect in side.applied if effect[0] == effects.WRITE)
        if number >= mine(1)
    )
    assert FinishSender(1) in said
    assert sender.error is None
    assert pair.client.core.channels == pair.server.core.channels == 1


@pytest.mark.requirement("AQ0-R16")
def test_a_oneshot_by_datagram_is_announced_and_finished_with_zero() -> None:
    lone = Lone()
    half = lone.create(keep_sender=True, is_oneshot=True)
    lone.lossy(half, b"x")
    assert lone.frames(lone.control(half.channel)) == [SentUnreliable(1), FinishSender(0)]


@pytest.mark.requirement("AQ0-R16")
@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([encoder.encode_control_finish(0)], Cancelled),
        (
            [encoder.encode_control_sent_unreliable(1), encoder.encode_control_finish(0)],
            MessageLost,
        ),
    ],
)
def test_a_oneshot_without_its_message(frames: list[bytes], error: type[Exception]) -> None:
    lone = Lone()
    half = lone.create(keep_sender=False, is_oneshot=True)
    control = lone.control(half.channel, *frames, fin=True)
    lone.wait(2)
    assert type(half.error) is error
    assert type(lone.frames(control)[-1]) is codec.ControlClose
    assert lone.end(control) == "fin" and lone.core.channels == 1


@pytest.mark.requirement("AQ0-R16")
def test_a_oneshot_receiver_closes_with_its_message_before_it_is_attached() -> None:
    lone = Lone()
    half = lone.create(keep_sender=False, is_oneshot=True)
    lone.say(message(half.channel, 0, b"x"))
    assert isinstance(half.error, Finished)
    got = lone.take(half)
    assert got is not None and bytes(got.payload) == b"x"
    control = lone.control(half.channel, encoder.encode_control_finish(1), fin=True)
    assert lone.frames(control) == [codec.ControlClose((1,))]
    assert lone.code is None and lone.core.channels == 1


# ------------------------------------------------------------ back pressure, limits


def tight() -> Any:
    flow = Flow(channel_receive_bytes=8192, receive_budget=1 << 20, initial_window=4096)
    return dataclasses.replace(DEFAULT, flow=flow)


@pytest.mark.requirement("AQ0-R3")
@pytest.mark.requirement("AQ0-R16")
def test_a_full_queue_stops_its_streams_but_not_what_controls_it() -> None:
    pair = Pair(tight())
    here, there = channel_of(pair, keep_sender=True)
    for index in range(20):
        pair.client.send(here, bytes([index]) * 2000)
    pair.advance(0.1)
    assert there.queue.charged <= 8192
    assert len(there.queue) < 20
    got = []
    for _ in range(30):
        got += [bytes(each.payload)[0] for each in pair.server.take_all(there)]
        pair.run()
    assert got == list(range(20))
    for _ in range(20):
        pair.client.send(here, bytes(2000))
    pair.run()
    pair.client.cancel(here)
    pair.run()
    assert isinstance(there.error, Cancelled)
    assert pair.server.core.snapshot()["budget_used_bytes"] == 0


@pytest.mark.requirement("AQ0-R16")
@pytest.mark.requirement("AQ0-R3")
def test_a_full_queue_evicts_the_oldest_datagram() -> None:
    lone = Lone("server", tight())
    for number in range(30):
        lone.datagram(message(0, number, bytes(1000)))
    taken = []
    while (each := lone.take(lone.receiver)) is not None:
        taken.append(each.number)
    assert taken and taken[-1] == 29 and taken[0] > 0


@pytest.mark.requirement("AQ0-35")
def test_what_was_here_whole_can_be_read_after_the_end() -> None:
    lone = Lone("server", tight())
    for number in range(4):
        lone.say(message(0, number, bytes(3000)))
    lone.on(mine(0), encoder.encode_control_finish(4), fin=True)
    lone.core.connection_lost(ConnectionLost("the network is gone"))
    lone.apply()
    got = []
    while (each := lone.take(lone.receiver)) is not None:
        got.append(each.number)
    assert got == [0, 1, 2, 3]
    assert isinstance(lone.receiver.error, Finished)


@pytest.mark.requirement("AQ0-R16")
def test_the_peer_may_open_so_many_channels_only() -> None:
    config = dataclasses.replace(DEFAULT, limits=Limits(channels=5))
    for spread in (True, False):
        lone = Lone("server", config)
        channels = [8 * k for k in range(1, 7)]
        if spread:
            for channel in channels:
                lone.say(message(channel, 0))
        else:
            lone.say(message(0, 0, b"", channels))
        assert lone.code == 5


@pytest.mark.requirement("AQ0-R16")
def test_receivers_that_wait_for_their_control_stream_count_as_channels() -> None:
    lone = Lone("client", dataclasses.replace(DEFAULT, limits=Limits(channels=5)))
    with pytest.raises(LocalProtocolError, match=r"Limits\.channels is 5"):
        for _ in range(10):
            lone.close(lone.create(keep_sender=False))


@pytest.mark.requirement("AQ0-R16")
def test_a_sender_waits_at_so_many_unacknowledged_messages() -> None:
    lone = Lone("client", dataclasses.replace(DEFAULT, limits=Limits(unacknowledged=3)))
    for _ in range(3):
        assert lone.sender.writable
        lone.send(lone.sender)
    assert not lone.sender.writable
    lone.control(0, encoder.encode_control_acks((1,)))
    assert lone.sender.writable


@pytest.mark.requirement("AQ0-R7")
def test_payloads_are_given_as_bytes_in_the_order_of_their_stream() -> None:
    lone = Lone("server")
    lone.say(b"".join(message(0, number, b"%d" % number) for number in (3, 1, 2)))
    got = []
    while (each := lone.take(lone.receiver)) is not None:
        got.append((each.number, bytes(each.payload)))
    assert got == [(3, b"3"), (1, b"1"), (2, b"2")]


@pytest.mark.requirement("AQ0-7")
def test_a_channel_is_told_to_people_by_its_bits() -> None:
    assert "client-created, server sends" in ids.describe(ids.make(0, 1, False, 3))
    assert Lone().sender.describe() == ids.describe(0)
