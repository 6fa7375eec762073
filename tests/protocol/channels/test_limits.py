"""Codes, limits, delays: the numbers that the endpoint is held to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aqueduct import errors
from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Config, Flow, Limits, Timing
from aqueduct.errors import Cancelled, ConfigError, Finished, LocalProtocolError
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.protocol.channels.peer import Peer, message, route
from tests.support.pair import Pair

requirement = pytest.mark.requirement
ENTRY = route(0)


def limited(**limits: int) -> Config:
    calls = dataclasses.replace(DEFAULT.calls, fragment_bytes=1000)
    return dataclasses.replace(DEFAULT, limits=Limits(**limits), calls=calls)


def flowing(**flow: int) -> Config:
    return dataclasses.replace(DEFAULT, flow=Flow(**flow))


# Codes


@requirement("AQ-R30")
@pytest.mark.parametrize(
    ("code", "frames"),
    [
        (1, [ENTRY, b"\x0c"]),
        (1, [ENTRY, b"\x06"]),
        (1, [b"\x02\x02\x00\x00"]),
        (2, [ENTRY, ENTRY]),
        (2, [ENTRY, message(0), message(0)]),
        (3, [codec.VERSION[:-1] + b"S"]),
        (5, [ENTRY, message(0, bytes(9000))]),
    ],
)
def test_what_the_peer_breaks_decides_the_code(code: int, frames: list[bytes]) -> None:
    peer = Peer(config=limited(frame_bytes=8000, header_bytes=4000))
    peer.say(*frames)
    assert peer.closed_with == code
    error = peer.other.ended
    assert error is not None and error.code == code and error.reason and not error.remote
    told = peer.side.ended
    assert told is not None and (told.code, told.reason, told.remote) == (code, error.reason, True)


@requirement("AQ-R30")
def test_every_code_stands_on_its_error() -> None:
    kinds = (
        errors.FrameError,
        errors.SequenceError,
        errors.VersionError,
        errors.HeadersRejected,
        errors.LimitExceeded,
        errors.InternalError,
    )
    assert [kind.code for kind in kinds] == [1, 2, 3, 4, 5, 6]


@requirement("AQ-R30")
def test_a_fault_of_ours_closes_with_code_6() -> None:
    pair = Pair()
    pair.server.core.fail_internal(RuntimeError("a bug"))
    pair.run()
    assert pair.server.close_code == 6
    assert pair.client.ended is not None and pair.client.ended.code == 6


@requirement("AQ-R30")
@requirement("AQ-R32")
def test_closing_sends_no_error() -> None:
    pair = Pair()
    pair.client.core.close(reason="done", now=pair.now)
    pair.run()
    assert pair.client.close_code == 0
    assert pair.server.ended is not None
    assert (pair.server.ended.code, pair.server.ended.reason) == (0, "done")


@requirement("AQ-R29")
@pytest.mark.parametrize("code", [0, 1, 2, 3, 77, 1 << 40])
def test_no_received_code_changes_anything(code: int) -> None:
    peer = Peer(config=flowing(initial_window=4096))
    peer.say(ENTRY, message(0, b"", (), [(8, ()), (2, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    (receiver, _), (sender, _) = carrier.attachments
    assert isinstance(receiver, ReceiverHalf) and isinstance(sender, SenderHalf)
    stream = peer.say(route(8), message(0, b"whole"), message(1)[:2], fin=False)
    peer.reset(stream, code)
    peer.other.send(sender, bytes(50_000))
    (said,) = peer.streams(2)
    number = next(key for key, value in peer.look().items() if value is said)
    peer.side.carrier.stop(number, code)
    peer.side.carrier.flush()
    peer.pair.run()
    # Neither is an end of the channel: that is said by frames alone.
    assert receiver.error is None and sender.error is None
    assert peer.core.channels == 3 and peer.core.error is None
    peer.say(route(8), message(1, b"again"), codec.encode_finish_sender(2))
    assert [bytes(m.payload) for m in peer.other.take_all(receiver)] == [b"whole", b"again"]
    assert isinstance(receiver.error, Finished)
    peer.say(route(2), codec.CLOSE_RECEIVER)
    assert sender.error is not None and peer.core.channels == 1


# Limits


@requirement("AQ-R31")
def test_the_limits_have_the_defaults_of_the_protocol() -> None:
    limits = DEFAULT.limits
    assert limits.frame_bytes == 16 << 20
    assert limits.header_bytes == 64 << 10
    assert limits.attachments == 1024
    assert limits.channels == 100_000
    assert limits.unacknowledged == 1 << 20
    assert limits.received_ranges == 65_536


@requirement("AQ-R31")
@pytest.mark.parametrize(
    ("limits", "good", "bad"),
    [
        (
            {"frame_bytes": 5000, "header_bytes": 2000},
            [ENTRY, message(0, bytes(4994))],
            [ENTRY, message(0, bytes(4995))[:30]],
        ),
        (
            {"header_bytes": 20},
            [ENTRY, message(0, b"", ((b"k", bytes(17)),))],
            [ENTRY, message(0, b"", ((b"k", bytes(18)),))[:3]],
        ),
        (
            {"header_bytes": 20},
            [ENTRY, message(0, b"", (), ((8, ((b"k", bytes(17)),)),))],
            [ENTRY, message(0, b"", (), ((8, ((b"k", bytes(18)),)),))],
        ),
        (
            {"block_bytes": 30},
            [ENTRY, message(0, b"", (), ((8, ((b"k", bytes(25)),)),))],
            [ENTRY, message(0, b"", (), ((8, ((b"k", bytes(26)),)),))[:6]],
        ),
        (
            {"attachments": 2},
            [ENTRY, message(0, b"", (), [(8, ()), (16, ())])],
            [ENTRY, message(0, b"", (), [(8, ()), (16, ()), (24, ())])],
        ),
        (
            {"channels": 3},
            [ENTRY, message(0, b"", (), [(8, ()), (16, ())])],
            [ENTRY, message(0, b"", (), [(8, ()), (16, ()), (24, ())])],
        ),
        (
            {"received_ranges": 3},
            [ENTRY, message(0), message(2), message(4), message(5)],
            [ENTRY, message(0), message(2), message(4), message(6)],
        ),
    ],
    ids=["frame", "headers", "channel headers", "block", "attachments", "channels", "holes"],
)
def test_a_peer_above_a_limit_is_closed_with_code_5(
    limits: dict[str, int], good: list[bytes], bad: list[bytes]
) -> None:
    peer = Peer(config=limited(**limits))
    peer.say(*good, fin=False)
    assert peer.core.error is None
    assert peer.other.take(peer.pair.receiver) is not None
    peer = Peer(config=limited(**limits))
    peer.say(*bad, fin=False)  # what is declared is enough: the bytes need not come
    assert peer.closed_with == 5
    (name,) = [name for name in limits if name in str(peer.core.error)]
    assert name


@requirement("AQ-R31")
def test_the_largest_frame_is_the_same_on_both_sides() -> None:
    pair = Pair(limited(frame_bytes=5000, header_bytes=2000))
    size = 5000 - len(message(0, bytes(4000))) + 4000
    with pytest.raises(LocalProtocolError, match=r"Limits\.frame_bytes"):
        pair.client.send(pair.sender, bytes(size + 1))
    pair.client.send(pair.sender, bytes(size))
    pair.run()
    assert pair.server.core.error is None
    assert [len(m.payload) for m in pair.server.take_all(pair.receiver)] == [size]


@requirement("AQ-R31")
def test_a_block_that_the_peer_would_refuse_is_refused_here() -> None:
    pair = Pair(limited(block_bytes=2000))
    fits, not_so = (
        Attach(keep_sender=True, is_oneshot=False, headers=((b"k", bytes(size)),))
        for size in (1900, 2000)
    )
    with pytest.raises(LocalProtocolError, match=r"Limits\.block_bytes is 2000"):
        pair.client.send(pair.sender, b"", not_so)
    assert pair.client.core.channels == 1
    pair.client.send(pair.sender, b"", fits)
    pair.run()
    assert len(pair.server.take_all(pair.receiver)) == 1


@requirement("AQ-R31")
def test_channels_by_route_to_are_limited_too() -> None:
    peer = Peer(config=limited(channels=3))
    for channel in (8, 2):
        peer.say(route(channel), fin=False)
    assert peer.core.error is None
    peer.datagram(route(16))
    assert peer.closed_with == 5


@requirement("AQ-R31")
def test_above_the_unacknowledged_messages_sending_waits() -> None:
    peer = Peer("server", limited(unacknowledged=4))
    half = peer.pair.sender
    for mode in (Mode.ORDERED, Mode.UNRELIABLE, Mode.UNORDERED, Mode.ORDERED):
        assert half.writable
        peer.other.send(half, b"x", mode=mode)
    assert not half.writable
    stream = peer.say(ENTRY, codec.encode_ack_reliable((1, 1)), fin=False)
    assert half.writable
    peer.other.send(half, b"x")
    assert not half.writable
    peer.more(stream, codec.encode_ack_nack_unreliable(0, (0, 1)))
    assert half.writable


# Back pressure


def full() -> tuple[Peer, ReceiverHalf]:
    """A channel whose queue is full, with two streams that stand before their next MESSAGE."""
    peer = Peer(
        config=flowing(receive_budget=1 << 20, channel_receive_bytes=20_000, initial_window=4096)
    )
    peer.say(ENTRY, message(0, b"", (), [(8, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    half = carrier.attachments[0][0]
    assert isinstance(half, ReceiverHalf)
    for start in (0, 10):
        peer.say(
            route(8), *(message(start + n, b"%d" % (start + n) + bytes(9000)) for n in range(4))
        )
    return peer, half


@requirement("AQ-R31")
def test_a_full_queue_stops_each_stream_before_its_next_message() -> None:
    peer, half = full()
    assert half.queue.charged <= 20_000
    assert len(half.queue) == 2 and len(half.queue.waiting) == 2
    # Not more than their windows beyond what was admitted is let in.
    received = sum(len(raw) for raw in peer.other.raw.values())
    assert received <= 20_000 + 2 * 4096 + 200
    numbers = []
    while (taken := peer.other.take(half)) is not None:
        assert half.queue.charged <= 20_000
        numbers.append(taken.number)
        peer.pair.run()
    assert sorted(numbers) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert [n for n in numbers if n < 10] == [0, 1, 2, 3]


@requirement("AQ-R31")
@pytest.mark.parametrize("where", ["another stream", "another channel"])
def test_a_full_queue_holds_no_control_frame_back(where: str) -> None:
    peer, half = full()
    if where == "another stream":
        peer.say(route(8), codec.CANCEL_SENDER)
        assert isinstance(half.error, Cancelled)
        assert half.queue.charged == 0 and peer.core.channels == 1
    else:
        peer.say(route(16), codec.encode_finish_sender(0))
        peer.say(ENTRY, message(1, b"", (), [(16, ())]), fin=False)
        carrier = peer.other.take(peer.pair.receiver)
        assert carrier is not None
        assert isinstance(carrier.attachments[0][0].error, Finished)


@requirement("AQ-R31")
def test_a_full_queue_loses_the_oldest_unreliable_message_of_its_channel() -> None:
    peer = Peer(config=flowing(channel_receive_bytes=10_000, message_overhead=100))
    peer.say(ENTRY, message(0, b"", (), [(8, ()), (16, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    first, second = (half for half, _ in carrier.attachments)
    assert isinstance(first, ReceiverHalf) and isinstance(second, ReceiverHalf)
    peer.datagram(route(16), message(0, bytes(900)))
    peer.say(route(8), message(0, b"r" * 3900))
    for number in range(20):
        peer.datagram(route(8), message(number, b"%03d" % number + bytes(897)))
    taken = [bytes(m.payload)[:3] for m in peer.other.take_all(first)]
    # The reliable one stays, and the other channel is left alone.
    assert taken == [b"rrr", *(b"%03d" % number for number in range(14, 20))]
    assert len(peer.other.take_all(second)) == 1


@requirement("AQ-R31")
def test_holes_of_datagrams_are_limited_and_no_error() -> None:
    peer = Peer(config=limited(received_ranges=3))
    for number in (0, 2, 4, 6, 5):
        peer.datagram(ENTRY, message(number, b"%d" % number))
    got = [bytes(m.payload) for m in peer.pair.server.take_all(peer.pair.receiver)]
    assert got == [b"0", b"2", b"4", b"5"]  # 6 counts as lost on the way
    assert peer.core.error is None
    assert peer.core.snapshot()["budget_used_bytes"] == 0


# Delays


@requirement("AQ-R33")
def test_the_delays_have_the_defaults_of_the_protocol() -> None:
    timing = DEFAULT.timing
    assert (timing.ack_delay, timing.sent_unreliable_delay) == (0.025, 0.05)
    assert (timing.receipt_deadline, timing.destroyed_memory) == (1.0, 1.0)
    Timing(ack_delay=1.0)
    with pytest.raises(ConfigError, match="at most 1 s"):
        Timing(ack_delay=1.001)


@requirement("AQ-R33")
@pytest.mark.parametrize("start", [-50.0, 0.0, 1e9])
def test_all_delays_run_by_the_clock_that_is_given(start: float) -> None:
    timing: dict[str, Any] = {"ack_delay": 0.5, "sent_unreliable_delay": 0.75}
    config = dataclasses.replace(DEFAULT, timing=Timing(**timing, receipt_deadline=2.0))
    pair = Pair(config, connect=False)
    pair.now = start
    pair.run()
    attach = Attach(keep_sender=True, is_oneshot=False)
    pair.client.send(pair.sender, b"", attach)
    pair.client.send(pair.sender, b"", mode=Mode.UNRELIABLE)
    pair.run()
    due = (pair.server.core.next_deadline(), pair.client.core.next_deadline())
    assert due == (start + 0.5, start + 0.75)
    pair.advance(0.75)
    pair.run()
    assert pair.server.core.next_deadline() == pytest.approx(start + 0.75 + 2.0)
    assert pair.sender.unsettled
    pair.advance(2.0)
    assert not pair.sender.unsettled
    assert pair.server.core.next_deadline() is None
