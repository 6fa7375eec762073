"""What a receiver says on the wire, and what it makes of what its sender says."""

from __future__ import annotations

import dataclasses

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Flow
from aqueduct.errors import Cancelled, Finished, LostInTransit, ReceiverClosed
from aqueduct.protocol.common.receiver import ReceiverHalf
from tests.protocol.channels.peer import Peer, message, route

requirement = pytest.mark.requirement
CHILD, ONESHOT = 8, 4  # the client creates both and sends on them
HIGHEST = (1 << 64) - 1

CANCEL = codec.CANCEL_SENDER
FORGET = codec.FORGET_CHANNEL
finish = codec.encode_finish_sender
sent = codec.encode_sent_unreliable
NONE_SENT = b"\x05\x00"  # accepted, and never said by our encoder


def attached(channel: int = CHILD, **flow: int) -> tuple[Peer, ReceiverHalf]:
    """A client that the test speaks for, and a receiver that the server's application got."""
    peer = Peer(config=dataclasses.replace(DEFAULT, flow=Flow(**flow)) if flow else DEFAULT)
    peer.say(route(0), message(0, b"", (), [(channel, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    ((half, _),) = carrier.attachments
    assert isinstance(half, ReceiverHalf)
    peer.pair.advance(1)
    return peer, half


def payloads(peer: Peer, half: ReceiverHalf) -> list[bytes]:
    return [bytes(m.payload) for m in peer.other.take_all(half)]


# Acks


@requirement("AQ-36")
@requirement("AQ-R16")
@requirement("AQ-20")
def test_acks_are_gaps_and_ranges_from_0() -> None:
    peer, half = attached()
    for numbers in ((1, 2, 5), (0, 7), (3, 4, 6)):
        for number in numbers:
            peer.say(route(CHILD), message(number))
        peer.pair.advance(0.1)
    assert peer.told(CHILD) == [
        [
            ("ACK_RELIABLE", (1, 2, 2, 1)),
            # Each counts from 0, and nothing is acked twice.
            ("ACK_RELIABLE", (0, 1, 6, 1)),
            ("ACK_RELIABLE", (3, 2, 1, 1)),
        ]
    ]
    assert half.error is None
    peer.pair.advance(10)
    assert len(peer.told(CHILD)[0]) == 3


@requirement("AQ-36")
@requirement("AQ-R33")
def test_an_ack_leaves_within_25_ms_and_not_at_once() -> None:
    peer, _ = attached()
    peer.say(route(CHILD), message(0))
    peer.pair.advance(0.020)
    peer.say(route(CHILD), message(1))
    assert peer.told(CHILD) == []
    peer.pair.advance(0.0051)
    assert peer.told(CHILD) == [[("ACK_RELIABLE", (0, 2))]]


@requirement("AQ-R22")
@requirement("AQ-43")
def test_everything_a_receiver_says_is_on_one_stream() -> None:
    peer, half = attached()
    assert peer.streams(CHILD) == []  # opened when it is needed
    for number in range(3):
        peer.say(route(CHILD), message(number))
        peer.pair.advance(0.1)
    peer.datagram(route(CHILD), message(0))
    peer.say(route(CHILD), sent(2), fin=False)
    peer.pair.advance(2)
    assert not peer.streams(CHILD)[0].fin
    peer.other.close_receiver(half)
    (said,) = peer.streams(CHILD)
    assert said.fin
    assert peer.frames(said) == [
        ("ROUTE_TO", CHILD),
        *[("ACK_RELIABLE", (number, 1)) for number in range(3)],
        ("ACK_NACK_UNRELIABLE", CHILD, (1, 1)),
        ("CLOSE_RECEIVER",),
    ]
    # Nothing for the channel follows.
    peer.say(route(CHILD), message(3))
    peer.datagram(route(CHILD), message(1))
    peer.pair.advance(10)
    assert len(peer.streams(CHILD)) == 1
    assert peer.frames(peer.streams(CHILD)[0])[-1] == ("CLOSE_RECEIVER",)


@requirement("AQ-43")
@requirement("AQ-R22")
def test_a_close_acks_everything_received_and_nacks_the_holes() -> None:
    peer, half = attached()
    peer.say(route(CHILD), message(0), message(2), fin=False)
    for number in (1, 3):
        peer.datagram(route(CHILD), message(number))
    peer.say(route(CHILD), sent(6), fin=False)
    peer.other.close_receiver(half)  # nothing was taken, and no delay has passed
    assert peer.told(CHILD) == [
        [
            ("ACK_RELIABLE", (0, 1, 1, 1)),
            ("ACK_NACK_UNRELIABLE", CHILD, (0, 1, 1, 1, 1)),  # 4 and 5: by the close
            ("CLOSE_RECEIVER",),
        ]
    ]
    assert isinstance(half.error, ReceiverClosed)
    assert peer.core.channels == 1


@requirement("AQ-43")
def test_what_a_closed_receiver_had_to_say_still_goes_out() -> None:
    """The state is destroyed at once, while the stream for its acks is not to be had yet."""
    peer, half = attached(streams=8)
    peer.side.hold = 1000  # no slots
    peer.side.flush()
    while peer.other.carrier.openable:
        peer.other.inject(route(0), fin=False)
    peer.look()
    peer.say(route(CHILD), message(0))
    peer.other.close_receiver(half)
    assert peer.core.channels == 1
    assert peer.streams(CHILD) == [] and peer.core.snapshot()["streams_waiting"] == 1
    peer.pair.advance(1)
    peer.side.hold = -5  # now there are
    peer.side.flush()
    assert peer.told(CHILD) == [[("ACK_RELIABLE", (0, 1)), ("CLOSE_RECEIVER",)]]


# Unreliable numbers


@requirement("AQ-37")
@requirement("AQ-38")
@requirement("AQ-21")
def test_announcements_sum_up_and_each_has_its_deadline() -> None:
    peer, _ = attached()
    for number in (0, 1, 4):
        peer.datagram(route(CHILD), message(number))
    stream = peer.say(route(CHILD), sent(3), fin=False)
    peer.pair.advance(0.5)
    peer.more(stream, sent(2))
    peer.pair.advance(0.49)
    assert peer.told(CHILD) == []
    peer.pair.advance(0.02)
    assert peer.told(CHILD) == [[("ACK_NACK_UNRELIABLE", CHILD, (2, 1))]]
    peer.pair.advance(0.5)
    assert peer.told(CHILD)[0][1:] == [("ACK_NACK_UNRELIABLE", CHILD, (0, 1, 1))]
    peer.pair.advance(10)
    assert len(peer.told(CHILD)[0]) == 2


@requirement("AQ-37")
@requirement("AQ-R33")
@pytest.mark.parametrize(("rtt", "deadline"), [(0.0, 1.0), (0.4, 1.0), (0.6, 1.2), (3.0, 6.0)])
def test_the_receipt_deadline_is_1_s_or_two_round_trips(rtt: float, deadline: float) -> None:
    peer, _ = attached()
    peer.core.rtt_measured(rtt)
    peer.say(route(CHILD), sent(1), fin=False)
    due = peer.core.next_deadline()
    assert due == pytest.approx(peer.pair.now + deadline)
    peer.core.handle_deadline(peer.pair.now + deadline - 0.001)
    peer.other.flush()
    assert peer.told(CHILD) == []
    peer.core.handle_deadline(peer.pair.now + deadline)
    peer.other.flush()
    assert peer.told(CHILD) == [[("ACK_NACK_UNRELIABLE", CHILD, (0, 1))]]


@requirement("AQ-37")
@requirement("AQ-38")
def test_channels_that_are_announced_at_one_time_have_a_deadline_each() -> None:
    peer, _ = attached()
    other = CHILD + 8
    peer.say(route(0), message(1, b"", (), [(other, ())]), fin=False)
    for channel in (CHILD, other):
        peer.say(route(channel), sent(1), fin=False)
    peer.pair.advance(2)
    for channel in (CHILD, other):
        assert ("ACK_NACK_UNRELIABLE", channel, (0, 1)) in peer.told(channel)[0]


@requirement("AQ-39")
@requirement("AQ-R13")
def test_datagrams_that_were_nacked_or_repeat_are_ignored() -> None:
    peer, half = attached()
    peer.datagram(route(CHILD), message(1, b"there"))
    peer.datagram(route(CHILD), message(1, b"twice"))  # before its ack
    peer.say(route(CHILD), sent(2), fin=False)
    peer.pair.advance(2)
    peer.datagram(route(CHILD), message(1, b"again"))  # after it
    peer.datagram(route(CHILD), message(0, b"late"))
    assert payloads(peer, half) == [b"there"]
    assert peer.core.error is None
    peer.pair.advance(2)
    assert peer.told(CHILD) == [[("ACK_NACK_UNRELIABLE", CHILD, (0, 1, 1))]]


@requirement("AQ-R17")
def test_datagrams_beyond_the_announcement_are_delivered() -> None:
    peer, half = attached()
    peer.say(route(CHILD), sent(1), NONE_SENT, fin=False)
    peer.datagram(route(CHILD), message(5, b"early"))
    peer.pair.advance(2)
    assert payloads(peer, half) == [b"early"]
    assert peer.told(CHILD) == [[("ACK_NACK_UNRELIABLE", CHILD, (0, 1))]]
    assert peer.core.error is None


@requirement("AQ-R17")
def test_announcements_above_64_bits_are_an_error() -> None:
    peer, _ = attached()
    peer.say(route(CHILD), sent(HIGHEST), fin=False)
    assert peer.core.error is None
    peer.say(route(CHILD), NONE_SENT, sent(1))
    assert peer.closed_with == 2


# Numbers


@requirement("AQ-R13")
@pytest.mark.parametrize("acked", [False, True])
@pytest.mark.parametrize("same_stream", [False, True])
def test_a_reliable_number_twice_is_an_error(acked: bool, same_stream: bool) -> None:
    peer, _ = attached()
    stream = peer.say(route(CHILD), message(3), fin=False)
    if acked:
        peer.pair.advance(1)
    assert peer.core.error is None
    if same_stream:
        peer.more(stream, message(3))
    else:
        peer.say(route(CHILD), message(3))
    assert peer.closed_with == 2


@requirement("AQ-R13")
@pytest.mark.parametrize("size", [0, 100_000])
def test_the_highest_number_is_an_error_of_the_endpoint(size: int) -> None:
    highest = b"\x04" + b"\xff" * 9 + b"\x01" + message(0, bytes(size))[2:]
    peer, _ = attached()
    peer.say(route(CHILD), highest)
    assert peer.closed_with == 2
    peer, half = attached()
    last = b"\x04\xfe" + b"\xff" * 8 + b"\x01" + message(0, bytes(size))[2:]
    peer.say(route(CHILD), last)
    assert payloads(peer, half) == [bytes(size)]
    peer, _ = attached()
    peer.datagram(route(CHILD), highest[:11] + message(0)[2:])
    assert peer.closed_with == 2


@requirement("AQ-R34")
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "with channels"])
@pytest.mark.parametrize("size", [1, 50_000], ids=["small", "large"])
def test_the_order_is_that_of_the_stream(size: int, plain: bool) -> None:
    """Of plain messages, which are read many at a time, and of those that each need a look."""
    peer, half = attached()
    said = []
    for number in (5, 0, 3, 1):
        channels = () if plain else [(CHILD + 8 * (number + 1), ())]
        said.append(message(number, b"%d" % number * size, (), channels))
    peer.say(route(CHILD), *said)
    assert [payload[:1] for payload in payloads(peer, half)] == [b"5", b"0", b"3", b"1"]


# Finish


@requirement("AQ-45")
@requirement("AQ-R22")
def test_a_finish_waits_for_every_reliable_message() -> None:
    peer, half = attached()
    peer.say(route(CHILD), message(1, b"1"))
    peer.say(route(CHILD), finish(3))
    peer.pair.advance(30)
    assert half.error is None and peer.core.channels == 2
    peer.say(route(CHILD), message(0, b"0"))
    assert half.error is None
    peer.say(route(CHILD), message(2, b"2"))
    assert isinstance(half.error, Finished) and peer.core.channels == 1
    # What arrived since the last ack is acked on the same stream, before the close.
    assert peer.told(CHILD) == [
        [("ACK_RELIABLE", (1, 1)), ("ACK_RELIABLE", (0, 1, 1, 1)), ("CLOSE_RECEIVER",)]
    ]
    assert payloads(peer, half) == [b"1", b"0", b"2"]


@requirement("AQ-45")
@requirement("AQ-38")
def test_a_finish_waits_for_every_unreliable_message_and_nacks_none_early() -> None:
    peer, half = attached()
    peer.datagram(route(CHILD), message(0))
    peer.say(route(CHILD), sent(2), finish(0))
    peer.pair.advance(0.99)
    assert half.error is None and peer.told(CHILD) == []
    peer.pair.advance(0.02)
    assert isinstance(half.error, Finished)
    assert peer.told(CHILD) == [[("ACK_NACK_UNRELIABLE", CHILD, (1, 1)), ("CLOSE_RECEIVER",)]]


@requirement("AQ-45")
@requirement("AQ-R18")
def test_datagrams_that_were_announced_may_come_after_the_finish() -> None:
    peer, half = attached()
    peer.say(route(CHILD), sent(2), finish(1))
    peer.datagram(route(CHILD), message(1, b"datagram"))
    peer.say(route(CHILD), message(0, b"stream"))
    assert half.error is None
    peer.datagram(route(CHILD), message(0, b"late"))
    peer.pair.advance(1.1)
    assert isinstance(half.error, Finished)
    assert payloads(peer, half) == [b"datagram", b"stream", b"late"]
    assert peer.told(CHILD)[0][-2:] == [
        ("ACK_NACK_UNRELIABLE", CHILD, (2,)),
        ("CLOSE_RECEIVER",),
    ]


@requirement("AQ-45")
@requirement("AQ-41")
@pytest.mark.parametrize("end", ["forgotten", "closed"])
def test_a_finish_is_preempted_by_destruction(end: str) -> None:
    peer, half = attached()
    peer.say(route(CHILD), message(1))
    peer.say(route(CHILD), finish(2))
    if end == "forgotten":
        peer.say(route(CHILD), FORGET)
    else:
        peer.other.close_receiver(half)
    peer.say(route(CHILD), message(0))
    peer.pair.advance(3)
    assert isinstance(half.error, LostInTransit if end == "forgotten" else ReceiverClosed)
    assert sum(frames.count(("CLOSE_RECEIVER",)) for frames in peer.told(CHILD)) == (
        end == "closed"
    )


@requirement("AQ-R21")
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5])
def test_a_finish_at_or_below_a_received_number_is_an_error(count: int) -> None:
    peer, half = attached()
    peer.say(route(CHILD), message(3))
    peer.say(route(CHILD), finish(count))
    assert peer.closed_with == (2 if count <= 3 else None)
    assert half.error is None or count <= 3


@requirement("AQ-R21")
def test_the_queue_outlives_the_state() -> None:
    peer, half = attached()
    peer.say(route(CHILD), *(message(number, b"%d" % number) for number in range(3)), finish(3))
    assert peer.core.channels == 1
    assert len(half.queue) == 3
    peer.pair.advance(60)
    assert payloads(peer, half) == [b"0", b"1", b"2"]
    assert isinstance(half.error, Finished)


@requirement("AQ-R18")
@pytest.mark.parametrize(
    "frame",
    [message(2), message(9), message(2, bytes(50_000)), sent(1), finish(2), finish(3), CANCEL],
    ids=["message", "later", "large", "announcement", "finish", "another finish", "cancel"],
)
@pytest.mark.parametrize("same_stream", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_nothing_but_forget_follows_a_finish(frame: bytes, same_stream: bool, ended: bool) -> None:
    peer, half = attached()
    if ended:
        peer.say(route(CHILD), message(0))
    stream = peer.say(route(CHILD), message(1), finish(2), fin=False)
    assert (half.error is not None) is ended
    if same_stream:
        peer.more(stream, frame)
        assert peer.closed_with == 2
    else:
        peer.say(route(CHILD), frame)
        # For an ended channel the receiver cannot tell: it has no state.
        assert peer.closed_with == (None if ended else 2)


@requirement("AQ-R18")
def test_messages_that_a_finish_counts_may_come_after_it() -> None:
    peer, half = attached()
    peer.say(route(CHILD), finish(2))
    peer.say(route(CHILD), message(1))
    peer.say(route(CHILD), message(0))
    assert peer.core.error is None and isinstance(half.error, Finished)


# Cancel


@requirement("AQ-44")
@requirement("AQ-R20")
@requirement("AQ-R22")
def test_a_cancel_acks_what_was_taken_and_nothing_else() -> None:
    peer, half = attached()
    peer.say(route(CHILD), *(message(number) for number in range(4)), fin=False)
    peer.datagram(route(CHILD), message(0))
    peer.datagram(route(CHILD), message(1))
    for _ in range(5):  # four by stream, one datagram
        assert peer.other.take(half) is not None
    peer.say(route(CHILD), message(4), fin=False)
    peer.say(route(CHILD), CANCEL)
    assert isinstance(half.error, Cancelled)
    assert peer.other.take(half) is None
    assert peer.told(CHILD) == [
        [
            ("ACK_RELIABLE", (0, 4)),
            ("ACK_NACK_UNRELIABLE", CHILD, (1,)),
            ("CLOSE_RECEIVER",),
        ]
    ]
    assert peer.streams(CHILD)[0].fin and peer.core.channels == 1


@requirement("AQ-R20")
def test_a_cancel_after_the_acks_takes_none_back() -> None:
    peer, half = attached()
    peer.say(route(CHILD), message(0), fin=False)
    peer.pair.advance(1)
    peer.say(route(CHILD), CANCEL)
    assert peer.other.take(half) is None and isinstance(half.error, Cancelled)
    assert peer.told(CHILD) == [[("ACK_RELIABLE", (0, 1)), ("CLOSE_RECEIVER",)]]


@requirement("AQ-R20")
def test_a_cancel_leaves_a_hole_where_it_dropped() -> None:
    """What was overtaken by stream and not taken lies between numbers that were."""
    peer, half = attached()
    for number in (0, 2, 1):
        peer.say(route(CHILD), message(number))
    taken = [peer.other.take(half) for _ in range(2)]
    assert [received.number for received in taken if received is not None] == [0, 2]
    peer.say(route(CHILD), CANCEL)
    assert peer.told(CHILD) == [[("ACK_RELIABLE", (0, 1, 1, 1)), ("CLOSE_RECEIVER",)]]
