"""What a sender says on the wire, and what it makes of what its receiver says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Flow
from aqueduct.errors import Cancelled, LocalProtocolError, ReceiverClosed
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.common.state import SenderState
from tests.protocol.channels.peer import Peer, message, route
from tests.reference.codec import Frame

requirement = pytest.mark.requirement


def opened(is_oneshot: bool = False, **flow: int) -> tuple[Peer, SenderHalf]:
    """A server that the test speaks for, and a channel on which its client sends."""
    config = dataclasses.replace(DEFAULT, flow=Flow(**flow)) if flow else DEFAULT
    peer = Peer("server", config)
    attach = Attach(keep_sender=True, is_oneshot=is_oneshot)
    peer.other.send(peer.pair.sender, b"", attach)
    assert isinstance(attach.half, SenderHalf)
    return peer, attach.half


def numbers(sequences: list[list[Frame]]) -> list[int]:
    return [frame[1] for frames in sequences for frame in frames if frame[0] == "MESSAGE"]


# Modes and numbers


@requirement("AQ-31")
@requirement("AQ-32")
def test_each_mode_has_its_carrier_and_each_carrier_its_numbers() -> None:
    peer, half = opened()
    order = [Mode.ORDERED, Mode.UNRELIABLE, Mode.UNORDERED, Mode.UNRELIABLE, Mode.ORDERED]
    given = [peer.other.send(half, b"x", mode=mode) for mode in (*order, *order)]
    assert given == [0, 0, 1, 1, 2, 3, 2, 4, 3, 5]
    streams = [frames for frames in peer.told(half.channel) if frames[0][0] == "MESSAGE"]
    # One stream for all that is ORDERED, one more for each UNORDERED message.
    assert sorted(map(numbers, ([frames] for frames in streams))) == [[0, 2, 3, 5], [1], [4]]
    assert [frames[0] for frames in peer.datagram_frames()] == [("ROUTE_TO", half.channel)] * 4
    assert numbers(peer.datagram_frames()) == [0, 1, 2, 3]


@requirement("AQ-31")
@requirement("AQ-R17")
def test_what_does_not_fit_a_datagram_takes_a_reliable_number() -> None:
    peer, half = opened()
    for size in (10, 5000, 10):
        peer.other.send(half, bytes(size), mode=Mode.UNRELIABLE)
    peer.other.finish(half)
    assert numbers(peer.datagram_frames()) == [0, 1]
    assert numbers(peer.told(half.channel)) == [0]
    # It is counted by FINISH_SENDER and not announced.
    assert [("SENT_UNRELIABLE", 2), ("FINISH_SENDER", 1)] in peer.told(half.channel)


@requirement("AQ-32")
@pytest.mark.parametrize("mode", list(Mode))
def test_a_send_that_fails_takes_no_number(mode: Mode) -> None:
    peer, half = opened()
    peer.other.send(half, b"x", mode=mode)
    attach = Attach(keep_sender=True, is_oneshot=False)
    bad_headers: Any = ((b"", b""),)
    for payload, headers in ((bytes(17 << 20), ()), ("text", ()), (b"", bad_headers)):
        with pytest.raises((LocalProtocolError, TypeError)):
            peer.other.send(half, payload, attach, headers=headers, mode=mode)
    assert peer.core.channels == 2
    assert peer.other.send(half, b"y", mode=mode) == 1
    assert numbers([*peer.told(half.channel), *peer.datagram_frames()]) == [0, 1]


@requirement("AQ-R17")
def test_a_peer_without_datagrams_gets_everything_by_stream() -> None:
    peer = Peer("server", datagram_limit=0)
    for _ in range(3):
        peer.other.send(peer.pair.sender, b"x", mode=Mode.UNRELIABLE)
    peer.pair.advance(1)
    assert peer.datagram_frames() == []
    assert numbers(peer.told(0)) == [0, 1, 2]
    assert not any(frame[0] == "SENT_UNRELIABLE" for said in peer.told(0) for frame in said)


# SENT_UNRELIABLE


@requirement("AQ-33")
@requirement("AQ-R18")
@requirement("AQ-17")
def test_announcements_count_what_is_new_on_one_stream() -> None:
    peer, half = opened()
    for count in (3, 1, 5):
        for _ in range(count):
            peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
        peer.pair.advance(1)
    announced = [("SENT_UNRELIABLE", 3), ("SENT_UNRELIABLE", 1), ("SENT_UNRELIABLE", 5)]
    assert peer.told(half.channel) == [announced]
    peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
    peer.other.finish(half)  # what is owed goes first, on the same stream
    assert peer.told(half.channel) == [[*announced, ("SENT_UNRELIABLE", 1), ("FINISH_SENDER", 0)]]
    (said,) = peer.streams(half.channel)
    assert said.fin


@requirement("AQ-33")
@requirement("AQ-R33")
def test_an_announcement_leaves_within_50_ms_and_not_at_once() -> None:
    peer, half = opened()
    peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
    peer.pair.advance(0.049)
    assert peer.told(half.channel) == []
    peer.pair.advance(0.001)
    assert peer.told(half.channel) == [[("SENT_UNRELIABLE", 1)]]


@requirement("AQ-R17")
def test_a_datagram_that_the_transport_drops_counts_as_sent() -> None:
    peer, half = opened()
    peer.other.lose_datagrams = True
    peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
    peer.other.lose_datagrams = False
    assert peer.other.send(half, b"y", mode=Mode.UNRELIABLE) == 1
    peer.pair.advance(1)
    assert peer.told(half.channel) == [[("SENT_UNRELIABLE", 2)]]
    peer.pair.advance(10)  # nothing new: a COUNT of 0 is never sent
    assert peer.told(half.channel) == [[("SENT_UNRELIABLE", 2)]]


# Finish


@requirement("AQ-34")
@requirement("AQ-18")
@requirement("AQ-R18")
def test_finish_of_an_ordered_channel_stands_at_the_end_of_its_messages() -> None:
    peer, half = opened()
    for _ in range(3):
        peer.other.send(half, b"x")
    assert len(peer.streams(half.channel)) == 1  # no control stream before one is needed
    peer.other.finish(half)
    (said,) = peer.streams(half.channel)
    assert peer.frames(said)[-1] == ("FINISH_SENDER", 3) and said.fin
    peer.pair.advance(5)
    assert len(peer.streams(half.channel)) == 1


@requirement("AQ-34")
@requirement("AQ-R18")
@pytest.mark.parametrize("modes", [[], [Mode.UNORDERED], [Mode.UNORDERED, Mode.ORDERED]])
@pytest.mark.parametrize("unreliable", [0, 2])
def test_finish_goes_by_the_stream_of_the_announcements(modes: list[Mode], unreliable: int) -> None:
    peer, half = opened()
    for mode in modes:
        peer.other.send(half, b"x", mode=mode)
    for _ in range(unreliable):
        peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
        peer.pair.advance(0.1)
    peer.other.finish(half)
    sequences = peer.told(half.channel)
    finish = ("FINISH_SENDER", len(modes))
    (control,) = [frames for frames in sequences if finish in frames]
    assert control[-1] == finish
    assert sum(frame[0] == "SENT_UNRELIABLE" for frame in control) == unreliable
    assert not any(frames is not control and "SENT" in str(frames) for frames in sequences)
    if unreliable:
        assert numbers([control]) == []
    assert all(said.fin for said in peer.streams(half.channel))
    # Nothing for the channel follows, whatever comes or is tried.
    with pytest.raises(LocalProtocolError):
        peer.other.send(half, b"x")
    peer.pair.advance(10)
    assert peer.told(half.channel) == sequences


@requirement("AQ-34")
@pytest.mark.parametrize("mode", [Mode.UNORDERED, Mode.ORDERED])
def test_a_finish_waits_for_messages_that_have_no_stream_yet(mode: Mode) -> None:
    peer, half = opened(streams=8)
    peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
    peer.pair.advance(0.1)  # so there is a control stream
    peer.side.hold = 1000  # no slot comes back
    peer.side.flush()
    while peer.core.snapshot()["streams_waiting"] == 0:
        peer.other.send(peer.pair.sender, b"", mode=Mode.UNORDERED)
    assert peer.other.carrier.openable > 0  # what is left is for control streams
    for _ in range(3):
        peer.other.send(half, b"y", mode=mode)
    peer.other.finish(half)
    assert peer.told(half.channel) == [[("SENT_UNRELIABLE", 1)]]
    peer.side.hold = 0
    peer.side.flush()
    peer.pair.run()
    sequences = peer.told(half.channel)
    assert sequences[0] == [("SENT_UNRELIABLE", 1), ("FINISH_SENDER", 3)]
    assert numbers(sequences[1:]) == [0, 1, 2]


@requirement("AQ-34")
@requirement("AQ-R29")
def test_a_finish_takes_another_stream_when_its_own_was_stopped() -> None:
    peer, half = opened()
    peer.other.send(half, b"x")
    (number,) = [n for n, said in peer.look().items() if b"x" in said.data]
    peer.side.carrier.stop(number, 0)
    peer.side.carrier.flush()
    peer.pair.run()
    peer.other.finish(half)
    assert peer.told(half.channel)[1:] == [[("FINISH_SENDER", 1)]]


@requirement("AQ-35")
@requirement("AQ-R18")
def test_nothing_is_announced_after_a_cancel() -> None:
    peer, half = opened()
    peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
    peer.other.cancel(half)
    peer.pair.advance(5)
    assert peer.told(half.channel) == [[("CANCEL_SENDER",)]]
    assert peer.streams(half.channel)[0].fin and peer.core.error is None


@requirement("AQ-R18")
@requirement("AQ-35")
def test_finish_and_cancel_exclude_each_other() -> None:
    peer, half = opened()
    peer.other.finish(half)
    before = peer.told(half.channel)
    for call in (peer.other.finish, peer.other.cancel):
        with pytest.raises(LocalProtocolError):
            call(half)
    peer.pair.advance(2)
    assert peer.told(half.channel) == before == [[("FINISH_SENDER", 0)]]
    peer, half = opened()
    peer.other.cancel(half)
    with pytest.raises(Cancelled):
        peer.other.finish(half)
    with pytest.raises(Cancelled):
        peer.other.send(half, b"x")
    peer.other.cancel(half)  # what is cancelled stays cancelled
    peer.pair.advance(2)
    assert peer.told(half.channel) == [[("CANCEL_SENDER",)]]


@requirement("AQ-R18")
@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_an_ended_sender_keeps_its_state_until_it_is_answered(end: str) -> None:
    peer, half = opened()
    getattr(peer.other, end)(half)
    peer.pair.advance(60)
    assert peer.core.channels == 2
    # It has state, so a ROUTE_TO is not answered.
    before = len(peer.look())
    peer.say(route(half.channel), fin=False)
    assert len(peer.look()) == before
    peer.say(route(half.channel), codec.CLOSE_RECEIVER)
    assert peer.core.channels == 1 and half.state is SenderState.ENDED


# Cancel


@requirement("AQ-35")
@requirement("AQ-19")
@requirement("AQ-R18")
@requirement("AQ-R29")
def test_cancel_resets_the_streams_of_messages_and_not_its_own() -> None:
    peer, half = opened(initial_window=4096)
    for _ in range(2):
        peer.other.send(half, bytes(100_000), mode=Mode.UNORDERED)
    peer.other.send(half, bytes(100_000))
    peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
    peer.pair.advance(0.1)
    peer.other.cancel(half)
    streams = peer.streams(half.channel)
    (control,) = [said for said in streams if ("CANCEL_SENDER",) in peer.frames(said)]
    assert control.reset is None and control.fin
    assert peer.frames(control) == [
        ("ROUTE_TO", half.channel),
        ("SENT_UNRELIABLE", 1),
        ("CANCEL_SENDER",),
    ]
    others = [said.reset for said in streams if said is not control]
    assert others == [1, 1, 1]
    assert half.queued == 0


@requirement("AQ-35")
@requirement("AQ-R18")
def test_cancel_opens_a_control_stream_if_there_is_none() -> None:
    peer, half = opened(initial_window=4096)
    peer.other.send(half, bytes(100_000))
    peer.other.cancel(half)
    messages, control = peer.streams(half.channel)
    assert messages.reset == 1
    assert peer.frames(control) == [("ROUTE_TO", half.channel), ("CANCEL_SENDER",)]
    assert control.reset is None and control.fin


# What the receiver says


@requirement("AQ-R16")
@requirement("AQ-20")
def test_acks_count_from_0_each_time_and_repeats_are_ignored() -> None:
    peer, half = opened()
    for _ in range(6):
        peer.other.send(half, b"x")
    stream = peer.say(route(half.channel), codec.encode_ack_reliable((1, 2)), fin=False)
    assert list(half.numbers.acked) == [(1, 3)]  # gaps are no nacks
    peer.more(stream, codec.encode_ack_reliable((1, 3)))
    assert list(half.numbers.acked) == [(1, 4)]
    peer.more(stream, codec.encode_ack_reliable((0, 1, 3, 2)), codec.encode_ack_reliable((0, 6)))
    assert not half.unsettled and peer.core.error is None
    peer.more(stream, codec.encode_ack_reliable((0, 7)))
    assert peer.closed_with == 2


@requirement("AQ-R15")
@requirement("AQ-38")
@requirement("AQ-21")
def test_unreliable_acks_go_on_where_the_last_one_ended() -> None:
    peer, half = opened()
    kept = [Attach(keep_sender=True, is_oneshot=False) for _ in range(6)]
    for attach in kept:
        peer.other.send(half, b"x", attach, mode=Mode.UNRELIABLE)
    peer.say(route(0), codec.encode_ack_reliable((0, 1)))
    stream = peer.say(
        route(half.channel), codec.encode_ack_nack_unreliable(half.channel, (1, 1)), fin=False
    )

    def fates() -> str:
        halves: list[Any] = [attach.half for attach in kept]
        return "".join(
            "lost" if half.error else "acked " if half.accessible else "? " for half in halves
        )

    assert fates() == "acked lost? ? ? ? "
    peer.more(stream, codec.encode_ack_nack_unreliable(half.channel, (0, 2)))
    assert fates() == "acked lostlostlost? ? "
    peer.more(stream, codec.encode_ack_nack_unreliable(half.channel, (2,)))
    assert fates() == "acked lostlostlostacked acked "
    assert not half.unsettled and peer.core.error is None
    peer.more(stream, codec.encode_ack_nack_unreliable(half.channel, (0, 1)))
    assert peer.closed_with == 2


@requirement("AQ-R15")
def test_acks_before_the_announcement_are_legal() -> None:
    peer, half = opened()
    peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
    peer.say(route(half.channel), codec.encode_ack_nack_unreliable(half.channel, (1,)))
    assert not half.unsettled and peer.core.error is None


@requirement("AQ-R14")
def test_ack_nack_for_another_channel_than_its_route() -> None:
    peer, half = opened()
    for sender in (half, peer.pair.sender):
        peer.other.send(sender, b"x", mode=Mode.UNRELIABLE)
    peer.say(route(half.channel), codec.encode_ack_nack_unreliable(0, (1,)))
    assert peer.closed_with == 2
    assert half.unsettled


@requirement("AQ-R19")
@requirement("AQ-22")
@requirement("AQ-R29")
def test_close_receiver_resets_everything_with_code_1() -> None:
    peer, half = opened(initial_window=4096)
    peer.other.send(half, bytes(100_000))
    peer.other.send(half, bytes(100_000), mode=Mode.UNORDERED)
    peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
    peer.pair.advance(0.1)
    assert [said.reset for said in peer.streams(half.channel)] == [None] * 3
    peer.say(route(half.channel), codec.CLOSE_RECEIVER)
    assert [said.reset for said in peer.streams(half.channel)] == [1] * 3
    assert isinstance(half.error, ReceiverClosed) and half.state is SenderState.ENDED
    assert peer.core.channels == 1 and half.queued == 0


@requirement("AQ-R19")
@requirement("AQ-34")
def test_a_finish_that_waited_is_not_said_after_the_close() -> None:
    peer, half = opened(initial_window=4096, unordered_streams=2)
    for _ in range(6):
        peer.other.send(half, bytes(100_000), mode=Mode.UNORDERED)
    peer.other.finish(half)
    assert len(peer.streams(half.channel)) == 2
    peer.say(route(half.channel), codec.CLOSE_RECEIVER)
    peer.pair.advance(5)
    assert [said.reset for said in peer.streams(half.channel)] == [1, 1]
    assert half.queued == 0 and peer.core.snapshot()["streams_waiting"] == 0


@requirement("AQ-R19")
@pytest.mark.parametrize(
    ("acks", "success"),
    [
        ([codec.encode_ack_reliable((0, 2)), b"nack"], True),
        ([codec.encode_ack_reliable((0, 2))], False),
        ([codec.encode_ack_reliable((0, 1)), b"nack"], False),
        ([], False),
    ],
    ids=["all settled", "a datagram open", "a message open", "nothing"],
)
@pytest.mark.parametrize("finished", [True, False])
def test_what_close_receiver_means_to_the_application(
    acks: list[bytes], success: bool, finished: bool
) -> None:
    peer, half = opened()
    for mode in (Mode.ORDERED, Mode.ORDERED, Mode.UNRELIABLE):
        peer.other.send(half, b"x", mode=mode)
    if finished:
        peer.other.finish(half)
    nack = codec.encode_ack_nack_unreliable(half.channel, (0, 1))  # a nack settles as well
    frames = [nack if frame == b"nack" else frame for frame in acks]
    peer.say(route(half.channel), *frames, codec.CLOSE_RECEIVER)
    assert half.state is SenderState.ENDED
    if success and finished:
        assert half.error is None
    else:
        assert isinstance(half.error, ReceiverClosed)


@requirement("AQ-R24")
@requirement("AQ-R22")
def test_what_follows_close_receiver_in_its_sequence_is_ignored() -> None:
    peer, half = opened()
    peer.say(
        route(half.channel), codec.CLOSE_RECEIVER, codec.encode_ack_reliable((0, 9)), fin=False
    )
    peer.pair.advance(3)
    assert peer.core.error is None
    assert peer.told(half.channel) == []  # and not answered


@requirement("AQ-16")
def test_a_message_on_the_wire() -> None:
    peer, half = opened()
    kept = Attach(keep_sender=True, is_oneshot=False, headers=((b"c", b"1"),))
    given = Attach(keep_sender=False, is_oneshot=True)
    peer.other.send(half, b"payload", kept, given, headers=((b"k", b"v"), (b"k", b"")))
    ((frame,),) = peer.told(half.channel)
    attached = ((16, ((b"c", b"1"),)), (6, ()))
    assert frame == ("MESSAGE", 0, ((b"k", b"v"), (b"k", b"")), attached, b"payload")
    assert message(0, b"payload", ((b"k", b"v"), (b"k", b"")), attached) in bytes(
        peer.streams(half.channel)[0].data
    )
