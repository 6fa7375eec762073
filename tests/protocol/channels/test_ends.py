"""Ends that cross each other, come early or come late: what is left, and what the peer learns."""

from __future__ import annotations

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.errors import Cancelled, Finished, LostInTransit, ReceiverClosed
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.protocol.channels.test_lifecycle import open_channel
from tests.support.pair import Pair


def message(number: int, payload: bytes = b"", attached: tuple[int, ...] = ()) -> bytes:
    parts = codec.encode_message(number, payload, (), [(channel, ()) for channel in attached])
    return b"".join(bytes(part) for part in parts)


def speaking_for_the_client() -> Pair:
    """The client's core is up and muted: the test writes its sequences."""
    pair = Pair()
    pair.advance(1)
    pair.client.mute = True
    return pair


def say(pair: Pair, *frames: bytes, fin: bool = True) -> int:
    """One sequence of the client; returns its stream."""
    number = pair.link.client._opened
    pair.link.client.write(number, list(frames), fin)
    pair.link.client.flush()
    pair.run()
    return number


CHILD = 8  # client-created, the client sends
BACK = 2  # client-created, the server sends


@pytest.mark.requirement("AQ-R26")
@pytest.mark.requirement("AQ-R23")
@pytest.mark.parametrize(
    "ending", [codec.CANCEL_SENDER, codec.encode_finish_sender(1)], ids=["cancelled", "finished"]
)
def test_a_channel_that_ended_early_and_is_forgotten_leaves_nothing(ending: bytes) -> None:
    pair = speaking_for_the_client()
    server = pair.server.core
    say(pair, codec.encode_route_to(CHILD), message(0, b"early", (16,)), ending)
    pair.advance(1)
    say(pair, codec.encode_route_to(16), codec.CANCEL_SENDER)
    assert server.channels > 1  # it counts until its message or FORGET_CHANNEL comes
    say(pair, codec.encode_route_to(CHILD), codec.FORGET_CHANNEL)
    pair.advance(2)
    assert server.channels == 1
    assert server.snapshot()["budget_used_bytes"] == 0
    # Should its message come all the same, it is lost.
    say(pair, codec.encode_route_to(0), message(0, b"", (CHILD,)), fin=False)
    taken = pair.server.take(pair.receiver)
    assert taken is not None
    assert isinstance(taken.attachments[0][0].error, LostInTransit)
    assert server.channels == 1 and server.error is None


@pytest.mark.requirement("AQ-R26")
def test_a_sender_whose_receiver_closed_early_and_is_forgotten_leaves_nothing() -> None:
    pair = speaking_for_the_client()
    server = pair.server.core
    say(pair, codec.encode_route_to(BACK), codec.CLOSE_RECEIVER)
    assert server.channels == 2
    say(pair, codec.encode_route_to(BACK), codec.FORGET_CHANNEL)
    assert server.channels == 1


@pytest.mark.requirement("AQ-R26")
@pytest.mark.requirement("AQ-R23")
@pytest.mark.parametrize("end", ["cancelled", "finished", "closed"])
def test_a_forget_that_is_being_read_while_the_channel_ends_early_still_counts(end: str) -> None:
    pair = speaking_for_the_client()
    channel, frame = {
        "cancelled": (CHILD, codec.CANCEL_SENDER),
        "finished": (CHILD, codec.encode_finish_sender(0)),
        "closed": (BACK, codec.CLOSE_RECEIVER),
    }[end]
    forget = say(pair, codec.encode_route_to(channel), fin=False)
    say(pair, codec.encode_route_to(channel), frame)
    assert pair.server.core.channels == 2  # its message may still come
    pair.link.client.write(forget, [codec.FORGET_CHANNEL], True)
    pair.link.client.flush()
    pair.run()
    assert pair.server.core.channels == 1


@pytest.mark.requirement("AQ-R26")
@pytest.mark.requirement("AQ-34")
def test_a_forget_may_follow_finish_in_its_sequence() -> None:
    pair = speaking_for_the_client()
    finish = codec.encode_finish_sender(0)
    say(pair, codec.encode_route_to(CHILD), finish, codec.FORGET_CHANNEL)
    assert pair.server.core.error is None
    assert pair.server.core.channels == 1


@pytest.mark.requirement("AQ-R26")
@pytest.mark.parametrize("end", ["cancelled", "finished", "closed", "forgotten"])
def test_an_attachment_is_delivered_in_the_state_that_it_reached_before(end: str) -> None:
    pair = speaking_for_the_client()
    channel = BACK if end == "closed" else CHILD
    frames = {
        "cancelled": [message(0, b"gone"), codec.CANCEL_SENDER],
        "finished": [message(0, b"kept"), message(1, b"too"), codec.encode_finish_sender(2)],
        "closed": [codec.CLOSE_RECEIVER],
        "forgotten": [codec.FORGET_CHANNEL],
    }[end]
    say(pair, codec.encode_route_to(channel), *frames)
    say(pair, codec.encode_route_to(0), message(0, b"", (channel,)), fin=False)
    taken = pair.server.take(pair.receiver)
    assert taken is not None
    ((half, _),) = taken.attachments
    kind = {
        "cancelled": Cancelled,
        "finished": Finished,
        "closed": ReceiverClosed,
        "forgotten": LostInTransit,
    }[end]
    if isinstance(half, ReceiverHalf):
        got = [bytes(m.payload) for m in pair.server.take_all(half)]
        assert got == ([b"kept", b"too"] if end == "finished" else [])
    assert isinstance(half.error, kind)
    assert pair.server.core.channels == 1
    assert pair.server.core.snapshot()["budget_used_bytes"] == 0


@pytest.mark.requirement("AQ-R27")
def test_a_finished_child_of_a_lost_message_leaves_nothing_on_either_side() -> None:
    pair = Pair()
    attach = Attach(keep_sender=True, is_oneshot=False)
    pair.client.lose_datagrams = True
    pair.client.send(pair.sender, b"carrier", attach, mode=Mode.UNRELIABLE)
    pair.client.lose_datagrams = False
    assert isinstance(attach.half, SenderHalf)
    pair.client.send(attach.half, b"delivered to nobody")
    pair.client.finish(attach.half)
    pair.advance(5)
    assert attach.half.error is None  # everything was received and acked
    assert pair.client.core.channels == pair.server.core.channels == 1
    assert pair.server.core.snapshot()["budget_used_bytes"] == 0


@pytest.mark.requirement("AQ-R24")
def test_acks_after_the_sender_was_destroyed_are_ignored() -> None:
    pair = speaking_for_the_client()
    stream = say(pair, codec.encode_route_to(BACK), fin=False)  # the receiver's control stream
    say(pair, codec.encode_route_to(BACK), codec.FORGET_CHANNEL)
    assert pair.server.core.channels == 1
    before = len(pair.server.events)
    pair.link.client.write(stream, [codec.encode_ack_reliable((0, 1)), codec.CLOSE_RECEIVER], True)
    pair.link.client.flush()
    pair.run()
    assert pair.server.core.error is None
    assert pair.server.core.channels == 1
    assert len(pair.server.events) == before


@pytest.mark.requirement("AQ-R24")
def test_a_sender_that_ended_reports_it_once() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    pair.server.close_receiver(receiver)
    pair.client.cancel(sender)  # crosses it
    pair.run()
    pair.advance(3)
    ended = [e for e in pair.client.events if type(e).__name__ == "SenderEnded"]
    assert len(ended) == 1
    assert pair.client.core.channels == pair.server.core.channels == 1


@pytest.mark.requirement("AQ-R20")
@pytest.mark.requirement("AQ-R26")
def test_what_a_cancel_drops_is_closed_and_cancelled_not_lost() -> None:
    pair = Pair()
    sender, _ = open_channel(pair, keep_sender=True)
    kept = Attach(keep_sender=True, is_oneshot=False)
    given = Attach(keep_sender=False, is_oneshot=False)
    pair.client.send(sender, b"", kept, given)
    pair.run()
    pair.client.cancel(sender)  # before the ack: the message is nacked by the close
    pair.advance(3)
    assert kept.half is not None and given.half is not None
    assert isinstance(kept.half.error, ReceiverClosed)
    assert isinstance(given.half.error, Cancelled)
    assert pair.client.core.channels == pair.server.core.channels == 1


@pytest.mark.requirement("AQ-42")
@pytest.mark.parametrize("payload", ["text", 5, None])
def test_a_payload_that_is_none_leaves_no_channel(payload: object) -> None:
    pair = Pair()
    attach = Attach(keep_sender=True, is_oneshot=False)
    with pytest.raises(TypeError):
        pair.client.send(pair.sender, payload, attach)
    assert pair.client.core.channels == 1
    assert not pair.sender.unsettled


def test_a_channel_that_is_attached_to_itself_can_end() -> None:
    for end in (codec.CANCEL_SENDER, codec.FORGET_CHANNEL, codec.encode_finish_sender(1)):
        pair = speaking_for_the_client()
        say(pair, codec.encode_route_to(CHILD), message(0, b"", (CHILD,)), end)
        pair.advance(2)
        assert pair.server.core.error is None
        assert pair.server.core.channels == 1


@pytest.mark.requirement("AQ-R23")
@pytest.mark.requirement("AQ-R24")
def test_forgets_for_one_channel_are_a_second_apart_and_none_is_left_out() -> None:
    pair = Pair()
    attach = Attach(keep_sender=True, is_oneshot=False)
    pair.client.lose_datagrams = True
    pair.client.send(pair.sender, b"", attach, mode=Mode.UNRELIABLE)
    pair.advance(2)
    assert attach.half is not None and isinstance(attach.half.error, LostInTransit)
    forget = codec.encode_route_to(attach.half.channel) + codec.FORGET_CHANNEL

    def forgets() -> int:
        return sum(bytes(raw) == forget for raw in pair.server.raw.values())

    assert forgets() == 1  # of the cascade
    pair.advance(2)
    for _ in range(5):  # ghosts at the peer, made by sequences that came late
        pair.server.inject(codec.encode_route_to(attach.half.channel))
        pair.run()
    assert forgets() == 2
    pair.advance(0.9)
    assert forgets() == 2
    pair.advance(0.2)
    assert forgets() == 3
    pair.advance(5)
    assert forgets() == 3


@pytest.mark.requirement("AQ-35")
def test_streams_are_reset_in_the_order_in_which_they_were_opened() -> None:
    """The core is a function of its inputs: the same ones have the same effects."""
    pair = Pair()
    sender, _ = open_channel(pair, keep_sender=True)
    for _ in range(20):
        pair.client.send(sender, b"x", mode=Mode.UNORDERED)
    pair.client.cancel(sender)
    resets = [effect[1] for effect in pair.client.applied if effect[0] == effects.RESET]
    assert len(resets) == 20
    assert resets == sorted(resets)


@pytest.mark.requirement("AQ-R18")
@pytest.mark.parametrize("size", [9, 5_000, 9_003])
def test_part_of_a_message_after_the_finish_that_ended_its_channel_is_an_error(size: int) -> None:
    pair = speaking_for_the_client()
    finish = codec.encode_finish_sender(0)
    say(pair, codec.encode_route_to(0), finish, message(0, bytes(9_000))[:size], fin=False)
    assert pair.server.close_code == 2


@pytest.mark.requirement("AQ-R18")
def test_a_message_after_the_finish_is_an_error_if_its_channel_ends_meanwhile() -> None:
    pair = speaking_for_the_client()
    entry, rest = codec.encode_route_to(0), message(1, bytes(9_000))
    stream = say(pair, entry, codec.encode_finish_sender(1), rest[:1_000], fin=False)
    say(pair, entry, message(0))
    assert isinstance(pair.receiver.error, Finished)
    assert len(pair.server.take_all(pair.receiver)) == 1
    for piece, code in ((rest[1_000:5_000], None), (rest[5_000:], 2)):
        pair.link.client.write(stream, [piece], False)
        pair.link.client.flush()
        pair.run()
        assert pair.server.close_code == code
    assert pair.server.core.snapshot()["budget_used_bytes"] == 0
