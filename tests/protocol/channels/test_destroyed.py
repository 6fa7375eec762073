"""State that comes by ROUTE_TO and goes by FORGET_CHANNEL: ghosts, late frames, answers."""

from __future__ import annotations

import dataclasses

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Config, Flow, Limits
from aqueduct.errors import Cancelled, Finished, LostInTransit, ReceiverClosed
from aqueduct.protocol.channels.forgetting import Forgetting
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach, Half
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.common.tombstones import Tombstones
from tests.protocol.channels.peer import CLOSE, FORGET, Peer, message, route

requirement = pytest.mark.requirement
CHILD, BACK, THIRD = 8, 2, 16  # client-created: the client sends, the server sends, the client
CANCEL = codec.CANCEL_SENDER
FORGOTTEN = codec.FORGET_CHANNEL
finish = codec.encode_finish_sender
ack = codec.encode_ack_reliable


def attached(channel: int = CHILD, config: Config = DEFAULT) -> tuple[Peer, Half]:
    """A client that the test speaks for, and a half that the server's application got."""
    peer = Peer(config=config)
    peer.say(route(0), message(0, b"", (), [(channel, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    peer.pair.advance(1)
    return peer, carrier.attachments[0][0]


def created(*, keep_sender: bool, config: Config = DEFAULT) -> tuple[Peer, Half]:
    """A server that the test speaks for, and a half of a channel that the client created."""
    peer = Peer("server", config)
    attach = Attach(keep_sender=keep_sender, is_oneshot=False)
    peer.other.send(peer.pair.sender, b"", attach)
    assert attach.half is not None
    return peer, attach.half


def destroyed(*, keep_sender: bool, config: Config = DEFAULT) -> tuple[Peer, int]:
    """The same, and its state is gone."""
    peer, half = created(keep_sender=keep_sender, config=config)
    if isinstance(half, SenderHalf):
        peer.say(route(half.channel), codec.CLOSE_RECEIVER)
    else:
        peer.other.close_receiver(half)
    assert peer.core.channels == 1
    return peer, half.channel


def forgets(peer: Peer, channel: int) -> int:
    return peer.told(channel).count([FORGET])


# Channels of ours without state


@requirement("AQ-40")
@requirement("AQ-R24")
@requirement("AQ-15")
def test_a_route_to_a_channel_of_ours_without_state_is_answered_at_once() -> None:
    peer, channel = destroyed(keep_sender=True)
    peer.pair.advance(1)
    stream = peer.say(route(channel), ack((0, 9)), fin=False)  # its rest is ignored
    assert forgets(peer, channel) == 1
    assert peer.streams(channel)[-1].fin
    assert peer.core.error is None and peer.core.channels == 1
    assert peer.stops == {stream: 0}  # and never left unread


@requirement("AQ-40")
@requirement("AQ-R24")
def test_a_datagram_to_a_channel_of_ours_without_state_is_answered_too() -> None:
    peer, channel = destroyed(keep_sender=False)
    peer.datagram(route(channel), message(0, b"late"))
    assert forgets(peer, channel) == 0
    peer.pair.advance(1.01)
    assert forgets(peer, channel) == 1
    assert peer.core.channels == 1 and peer.core.error is None


@requirement("AQ-R24")
def test_such_channels_are_answered_for_the_life_of_the_connection() -> None:
    peer, channel = destroyed(keep_sender=True)
    for count in range(1, 4):
        peer.pair.advance(1000)
        peer.say(route(channel))
        assert forgets(peer, channel) == count


@requirement("AQ-R24")
@pytest.mark.parametrize(("rtt", "wait"), [(0.0, 1.0), (0.4, 1.0), (2.0, 4.0)])
def test_after_our_close_receiver_the_answer_waits(rtt: float, wait: float) -> None:
    peer, half = created(keep_sender=False)
    peer.core.rtt_measured(rtt)
    assert isinstance(half, ReceiverHalf)
    peer.other.close_receiver(half)
    peer.say(route(half.channel), message(0, b"late"), finish(1))
    peer.pair.advance(wait - 0.01)
    assert peer.told(half.channel) == [[CLOSE]]
    peer.pair.advance(0.02)
    assert peer.told(half.channel) == [[CLOSE], [FORGET]]
    peer.pair.advance(100)
    assert forgets(peer, half.channel) == 1


@requirement("AQ-R23")
@requirement("AQ-R24")
def test_one_forget_answers_what_came_before_and_none_is_left_out() -> None:
    peer, channel = destroyed(keep_sender=True)
    peer.pair.advance(1)
    for _ in range(4):
        peer.say(route(channel))
    assert forgets(peer, channel) == 1
    peer.pair.advance(0.99)
    assert forgets(peer, channel) == 1
    peer.pair.advance(0.02)
    assert forgets(peer, channel) == 2  # for the three that came after the first
    peer.pair.advance(10)
    assert forgets(peer, channel) == 2


@requirement("AQ-R23")
@requirement("AQ-R24")
def test_answers_that_waited_leave_one_by_one_and_count_as_sent() -> None:
    peer = Peer("server")
    halves = []
    for _ in range(2):
        attach = Attach(keep_sender=False, is_oneshot=False)
        peer.other.send(peer.pair.sender, b"", attach)
        assert isinstance(attach.half, ReceiverHalf)
        halves.append(attach.half)
    first, second = (half.channel for half in halves)
    for half in halves:
        peer.other.close_receiver(half)
        peer.say(route(half.channel))
        peer.pair.advance(0.5)
    peer.pair.advance(0.01)
    assert (forgets(peer, first), forgets(peer, second)) == (1, 0)
    peer.say(route(first))  # another ghost, a moment later
    peer.pair.advance(0.51)
    assert (forgets(peer, first), forgets(peer, second)) == (1, 1)
    peer.pair.advance(0.5)
    assert (forgets(peer, first), forgets(peer, second)) == (2, 1)


@requirement("AQ-R24")
def test_what_is_remembered_for_a_second_goes_afterwards() -> None:
    forgetting = Forgetting(1.0)
    for tenth in range(1000):
        forgetting.closed(tenth << 3, tenth / 10)
        assert forgetting.ask(tenth << 3 | 1, tenth / 10)
    assert len(forgetting._closed) <= 11 and len(forgetting._sent) <= 11
    assert not forgetting.kept
    assert not forgetting.ask(999 << 3, 100.0)
    assert forgetting.kept[0][0] == pytest.approx(99.9 + 1.0)


@requirement("AQ-R4")
@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("space", [0, 2, 4, 6])
def test_a_channel_of_ours_that_was_never_handed_out_is_an_error(side: str, space: int) -> None:
    peer = Peer(side)
    channel = space | (side == "client") | 8
    peer.say(route(channel))
    assert peer.closed_with == 2 and forgets(peer, channel) == 0


@requirement("AQ-R4")
@requirement("AQ-16")
@pytest.mark.parametrize("end", [None, CANCEL, FORGOTTEN])
def test_a_channel_is_attached_once_even_after_its_end(end: bytes | None) -> None:
    peer, _ = attached()
    if end is not None:
        peer.say(route(CHILD), end)
    peer.say(route(0), message(1, b"", (), [(CHILD, ())]))
    assert peer.closed_with == 2


# Channels of the peer without state


@requirement("AQ-46")
@requirement("AQ-R24")
@pytest.mark.parametrize("end", ["closed", "cancelled", "finished", "forgotten"])
@pytest.mark.parametrize("after", [0.0, 0.5, 5.0, 5000.0])
def test_what_reaches_a_destroyed_channel_of_the_peer_makes_no_ghost(
    end: str, after: float
) -> None:
    peer, half = attached()
    assert isinstance(half, ReceiverHalf)
    if end == "closed":
        peer.other.close_receiver(half)
    else:
        peer.say(
            route(CHILD), {"cancelled": CANCEL, "finished": finish(0), "forgotten": FORGOTTEN}[end]
        )
    assert peer.core.channels == 1
    peer.pair.advance(after)
    before = len(peer.look())
    late = peer.say(route(CHILD), message(7, bytes(100_000)), finish(2), fin=False)
    peer.datagram(route(CHILD), message(3))
    peer.pair.advance(2)
    assert peer.core.channels == 1 and peer.core.error is None
    assert len(peer.look()) == before  # not answered
    assert peer.stops[late] == 0
    assert peer.core.snapshot()["budget_used_bytes"] == 0


@requirement("AQ-R24")
def test_the_rest_of_an_ignored_sequence_is_not_even_decoded() -> None:
    peer, half = attached()
    assert isinstance(half, ReceiverHalf)
    peer.other.close_receiver(half)
    stream = peer.say(route(CHILD), fin=False)
    peer.more(stream, b"\x00\xff no frames at all", fin=True)
    assert peer.core.error is None


@requirement("AQ-R24")
def test_destroyed_indexes_are_ranges_and_above_the_limit_the_lowest_go() -> None:
    ids = Tombstones(3)
    for index in (*range(100), 200, 300):
        ids.add(index << 3)
        ids.add(index << 3 | 4)  # another space
    assert ids.ranges == 6
    assert all(index << 3 in ids for index in (0, 50, 99, 200, 300))
    ids.add(400 << 3)
    assert ids.ranges == 6
    assert [index << 3 in ids for index in (0, 99, 200, 300, 400)] == [False] * 2 + [True] * 3
    assert 99 << 3 | 4 in ids
    assert DEFAULT.limits.destroyed_ranges == 1 << 16


@requirement("AQ-R24")
def test_the_connection_holds_destroyed_indexes_to_their_limit() -> None:
    peer = Peer(config=dataclasses.replace(DEFAULT, limits=Limits(destroyed_ranges=2)))
    for index in (1, 3, 5):
        peer.say(route(index << 3), CANCEL)
        peer.say(route(index << 3), FORGOTTEN)
    peer.say(route(5 << 3))
    peer.say(route(3 << 3))
    assert peer.core.channels == 1
    peer.say(route(1 << 3))  # it is not remembered, which is allowed
    assert peer.core.channels == 2


@requirement("AQ-R24")
@requirement("AQ-7")
def test_an_index_is_given_when_the_message_goes_out() -> None:
    peer = Peer("server")
    early, late = (Attach(keep_sender=True, is_oneshot=False) for _ in range(2))
    peer.other.send(peer.pair.sender, b"", late)
    peer.other.send(peer.pair.sender, b"", early)
    for keep_sender in (True, False):
        for is_oneshot in (True, False):
            for _ in range(2):
                attach = Attach(keep_sender=keep_sender, is_oneshot=is_oneshot)
                peer.other.send(peer.pair.sender, b"", attach)
    ((*messages,),) = peer.told(0)
    attachments = [frame[3][0][0] for frame in messages]
    assert attachments[:2] == [8, 16]
    assert attachments[2:] == [4, 12, 24, 32, 6, 14, 2, 10]


# A channel that ends while one of its sequences is read


@requirement("AQ-R24")
@pytest.mark.parametrize("creator", ["peer", "this side"])
@pytest.mark.parametrize("end", ["close", "cancel", "oneshot"])
def test_the_rest_of_a_sequence_under_way_is_ignored(creator: str, end: str) -> None:
    if creator == "peer":
        peer, half = attached(4 if end == "oneshot" else CHILD)
    else:
        peer = Peer("server")
        attach = Attach(keep_sender=False, is_oneshot=end == "oneshot")
        peer.other.send(peer.pair.sender, b"", attach)
        assert attach.half is not None
        half = attach.half
    assert isinstance(half, ReceiverHalf)
    channel = half.channel
    whole = message(0, bytes(50_000))
    stream = peer.say(route(channel), whole[:20_000], fin=False)
    if end == "close":
        peer.other.close_receiver(half)
    elif end == "cancel":
        peer.say(route(channel), CANCEL)
    else:
        peer.say(route(channel), message(0))
    assert half.error is not None
    peer.look()
    assert peer.stops[stream] == 0
    peer.more(stream, whole[20_000:], message(9), b"\x00", fin=True)
    peer.pair.advance(5)
    assert peer.core.error is None
    assert forgets(peer, channel) == 0
    assert len(peer.other.take_all(half)) == (end == "oneshot")
    assert peer.core.snapshot()["budget_used_bytes"] == 0


@requirement("AQ-41")
@requirement("AQ-R24")
@requirement("AQ-R27")
@pytest.mark.parametrize("end", ["forgotten", "lost"])
@pytest.mark.parametrize("waits", [False, True])
def test_the_sequences_of_a_lost_receiver_are_not_read_on(end: str, waits: bool) -> None:
    flow = Flow(channel_receive_bytes=60_000)
    config = dataclasses.replace(DEFAULT, flow=flow)
    if end == "forgotten":
        peer, half = attached(CHILD, config)
    else:
        peer = Peer("server", config)
        attach = Attach(keep_sender=False, is_oneshot=False)
        peer.other.send(peer.pair.sender, b"", attach, mode=Mode.UNRELIABLE)
        assert attach.half is not None
        half = attach.half
    assert isinstance(half, ReceiverHalf)
    if waits:  # its queue is full, so the next message is not even admitted
        peer.say(route(half.channel), message(1, bytes(50_000)))
    whole = message(0, bytes(50_000))
    stream = peer.say(route(half.channel), whole[:20_000], fin=False)
    if end == "forgotten":
        peer.say(route(half.channel), FORGOTTEN)
    else:
        peer.say(route(0), codec.encode_ack_nack_unreliable(0, (0, 1)))
        assert forgets(peer, half.channel) == 1
    peer.look()
    assert isinstance(half.error, LostInTransit) and peer.stops == {stream: 0}
    peer.more(stream, whole[20_000:], message(9), b"\x00", fin=True)
    peer.pair.advance(0.1)
    assert peer.core.error is None and peer.core.channels == 1
    assert peer.other.take(half) is None
    assert peer.core.snapshot()["budget_used_bytes"] == 0


# FORGET_CHANNEL received


@requirement("AQ-R27")
@requirement("AQ-41")
@requirement("AQ-R23")
@requirement("AQ-R29")
@requirement("AQ-23")
@pytest.mark.parametrize("state", ["open", "finished", "cancelled"])
def test_forget_channel_aborts_a_sender(state: str) -> None:
    flow = Flow(initial_window=4096)
    peer, half = attached(BACK, dataclasses.replace(DEFAULT, flow=flow))
    assert isinstance(half, SenderHalf)
    inner = Attach(keep_sender=True, is_oneshot=False)
    deep = Attach(keep_sender=True, is_oneshot=False)
    peer.other.send(half, b"", inner)
    peer.other.send(half, bytes(100_000), deep)
    peer.other.send(half, bytes(100_000), mode=Mode.UNORDERED)
    if state != "open":
        getattr(peer.other, {"finished": "finish", "cancelled": "cancel"}[state])(half)
    peer.say(route(BACK), ack((0, 1)), fin=False)
    peer.say(route(BACK), FORGOTTEN)
    codes = sorted(str(said.reset) for said in peer.streams(BACK))
    assert codes == (["1", "1", "None"] if state == "cancelled" else ["2", "2"])
    assert half.queued == 0
    assert isinstance(half.error, Cancelled if state == "cancelled" else LostInTransit)
    # Rule 5 of AQ-R27: what hangs on it is lost, but for what was accessible already.
    assert inner.half is not None and inner.half.error is None
    assert deep.half is not None and isinstance(deep.half.error, LostInTransit)
    assert peer.core.channels == 2
    # The peer is told of the one that was lost with it, not of the one that it forgot.
    assert [forgets(peer, channel) for channel in (BACK, inner.half.channel)] == [0, 0]
    assert forgets(peer, deep.half.channel) == 1


@requirement("AQ-41")
@requirement("AQ-R23")
@requirement("AQ-R26")
def test_forget_channel_destroys_a_receiver_and_drops_its_queue() -> None:
    peer, half = attached()
    assert isinstance(half, ReceiverHalf)
    peer.say(route(CHILD), message(0, bytes(9000), (), [(THIRD, ()), (BACK, ())]), fin=False)
    peer.pair.advance(0.1)
    assert peer.core.channels == 4
    peer.say(route(CHILD), FORGOTTEN)
    assert isinstance(half.error, LostInTransit)
    assert peer.other.take(half) is None
    assert peer.core.snapshot()["budget_used_bytes"] == 0
    assert [said.reset for said in peer.streams(CHILD)] == [2]
    assert CLOSE not in peer.told(CHILD)[0]
    # The attachments in the queue: closed and cancelled, not lost.
    assert peer.told(THIRD)[-1][-1] == CLOSE
    assert peer.told(BACK)[-1] == [("CANCEL_SENDER",)]


@requirement("AQ-R23")
def test_a_forget_leaves_a_finished_queue_to_the_application_that_has_the_handle() -> None:
    peer, half = attached()
    assert isinstance(half, ReceiverHalf)
    peer.say(route(CHILD), message(0, b"kept"), finish(1))
    peer.say(route(CHILD), FORGOTTEN)
    assert [bytes(m.payload) for m in peer.other.take_all(half)] == [b"kept"]
    assert isinstance(half.error, Finished)


@requirement("AQ-R23")
@requirement("AQ-41")
@pytest.mark.parametrize("after", [message(0), finish(9), b"\x00no frame", route(8)])
def test_what_follows_a_forget_in_its_sequence_is_ignored(after: bytes) -> None:
    peer, half = attached()
    peer.say(route(CHILD), FORGOTTEN, after)
    assert peer.core.error is None
    assert isinstance(half.error, LostInTransit)
    assert peer.core.channels == 1


@requirement("AQ-R23")
@pytest.mark.parametrize("channel", [CHILD, BACK])
def test_a_forget_for_a_channel_without_state_records_it_as_destroyed(channel: int) -> None:
    peer = Peer()
    peer.say(route(channel), FORGOTTEN)
    assert peer.core.channels == 1
    before = len(peer.look())
    peer.say(route(channel))
    peer.pair.advance(5)
    assert peer.core.channels == 1 and len(peer.look()) == before
    # Should the message with it come all the same, the handle is lost from the start.
    peer.say(route(0), message(0, b"", (), [(channel, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    assert isinstance(carrier.attachments[0][0].error, LostInTransit)
    assert peer.core.channels == 1


@requirement("AQ-41")
def test_a_forget_overrides_a_close_that_crosses_it() -> None:
    peer, half = attached(BACK)
    assert isinstance(half, SenderHalf)
    peer.other.send(half, b"x")
    peer.say(route(BACK), FORGOTTEN)
    peer.say(route(BACK), ack((0, 1)), codec.CLOSE_RECEIVER)
    assert isinstance(half.error, LostInTransit) and not isinstance(half.error, ReceiverClosed)
    assert peer.core.error is None
