"""The whole life of a oneshot channel in one piece is read at once, with the same outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aqueduct._speedups.channels import codec, oneshot_frames
from aqueduct.errors import Finished
from aqueduct.protocol.channels.oneshot import Oneshots
from aqueduct.protocol.channels.receiver import ReceiverHalf
from aqueduct.protocol.channels.recv_streams import SMALL, RecvStreams
from aqueduct.protocol.channels.registry import Attach
from aqueduct.protocol.channels.sender import SenderHalf
from tests.protocol.channels.peer import Peer, message, route
from tests.protocol.channels.test_receiver_wire import ONESHOT, attached, finish
from tests.protocol.channels.test_sender_wire import opened

requirement = pytest.mark.requirement
CLOSE = codec.CLOSE_RECEIVER
Half = SenderHalf | ReceiverHalf


def acked(*ranges: int) -> bytes:
    return codec.encode_ack_reliable(ranges)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of streams that were made for what the peer sent."""
    made: list[int] = []
    original = RecvStreams.opened

    def counted(incoming: RecvStreams, number: int, handlers: Any) -> Any:
        made.append(number)
        return original(incoming, number, handlers)

    monkeypatch.setattr(RecvStreams, "opened", counted)
    return made


def sender() -> tuple[Peer, Half]:
    """A oneshot sender of ours whose message was sent."""
    peer, half = opened(is_oneshot=True)
    peer.other.send(half, b"x")
    peer.pair.run()
    return peer, half


def unsent() -> tuple[Peer, Half]:
    return opened(is_oneshot=True)


def carrying() -> tuple[Peer, Half]:
    """One whose message carries a channel."""
    peer, half = opened(is_oneshot=True)
    peer.other.send(half, b"x", Attach(keep_sender=True, is_oneshot=False))
    peer.pair.run()
    return peer, half


def receiver() -> tuple[Peer, Half]:
    return attached(ONESHOT)


def patient() -> tuple[Peer, Half]:
    peer, half = attached(ONESHOT)
    half.patient = True
    return peer, half


def state(peer: Peer, half: Half) -> tuple[Any, ...]:
    """All that can be told of a side."""
    core = peer.core
    incoming = core._reader.incoming
    return (
        core.snapshot(),
        None if core.error is None else str(core.error),
        (incoming.extra, incoming.lasting, incoming.held),
        [(type(event).__name__) for event in peer.other.events],
        peer.told(),
        peer.stops,
        (half.state, type(half.error), str(half.error), half.streams_in),
        [(m.number, m.headers, bytes(m.payload), m.charge) for m in peer.other.take_all(half)]
        if isinstance(half, ReceiverHalf)
        else half.settled,
        core.snapshot()["budget_used_bytes"],
    )


SEQUENCES: list[tuple[Callable[[], tuple[Peer, Half]], list[bytes], bool]] = [
    (receiver, [message(0, b"answer"), finish(1)], True),
    (receiver, [message(0, b"answer", ((b"key-000000", b"value"),)), finish(1)], True),
    (receiver, [message(0, b"", (), [(ONESHOT + 8, ())]), finish(1)], True),
    (receiver, [message(0, bytes(SMALL)), finish(1)], True),
    (receiver, [message(0, bytes(SMALL + 1)), finish(1)], False),
    (receiver, [message(0)], True),
    (receiver, [message(0), b"\xff"], True),  # behind the message nothing matters (AQ-R24)
    (patient, [message(0, b"answer"), finish(1)], True),
    (receiver, [message(1)], False),
    (receiver, [message(0)[:-1]], False),
    (receiver, [finish(0)], False),
    (receiver, [finish(1)], False),
    (receiver, [finish(1), message(0)], False),
    (receiver, [b"\xff"], False),
    (receiver, [route(8)], False),
    (receiver, [], False),
    (sender, [acked(0, 1), CLOSE], True),
    (sender, [acked(0, 1), acked(0, 1), CLOSE], False),
    (sender, [acked(0, 1)], False),
    (sender, [CLOSE], False),
    (sender, [acked(0, 2), CLOSE], False),
    (sender, [acked(1, 1), CLOSE], False),
    (sender, [acked(0, 1), CLOSE, CLOSE], False),
    (sender, [message(0)], False),
    (unsent, [acked(0, 1), CLOSE], False),
    (unsent, [CLOSE], False),
    (carrying, [acked(0, 1), CLOSE], False),
]


@requirement("AQ-R28")
@requirement("AQ-R19")
@requirement("AQ-R24")
@requirement("AQ-36")
@requirement("AQ-45")
@pytest.mark.parametrize(("make", "frames", "short"), SEQUENCES)
def test_a_sequence_read_at_once_does_what_its_frames_do(
    make: Callable[[], tuple[Peer, Half]],
    frames: list[bytes],
    short: bool,
    streams: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for at_once in (True, False):
        peer, half = make()
        streams.clear()
        if not at_once:
            monkeypatch.setattr(Oneshots, "read", lambda self, data: False)
        peer.say(b"".join([route(half.channel), *frames]))
        assert bool(streams) is not (short and at_once), "the way it was meant to take"
        peer.pair.advance(0.1)
        found.append(state(peer, half))
    assert found[0] == found[1]


@requirement("AQ-R13")
@requirement("AQ-R28")
def test_what_comes_twice_is_ignored_the_second_time() -> None:
    peer, half = attached(ONESHOT)
    for _ in range(2):
        peer.say(route(ONESHOT) + message(0, b"x") + finish(1))
    assert peer.core.error is None
    assert isinstance(half.error, Finished)
    assert [bytes(m.payload) for m in peer.other.take_all(half)] == [b"x"]


def test_a_channel_without_room_waits_for_it(streams: list[int]) -> None:
    """The budget is full: the message is not let in without asking."""
    peer, half = attached(ONESHOT, receive_budget=2 * SMALL)
    streams.clear()
    half.charged = peer.core._shared.budget_used = 1
    peer.say(route(ONESHOT) + message(0, b"x") + finish(1))
    assert streams
    assert [bytes(m.payload) for m in peer.other.take_all(half)] == [b"x"]


def test_before_versions_are_agreed_every_sequence_is_looked_at(streams: list[int]) -> None:
    """A client that has not seen ACK_VERSION says VERSION first (AQ-28)."""
    peer, half = attached(ONESHOT)
    streams.clear()
    peer.say(codec.VERSION + route(ONESHOT) + message(0, b"x") + finish(1))
    assert streams
    assert isinstance(half.error, Finished)


# The pieces of it


@pytest.mark.parametrize("channel", [0, 1, 127, 128, 16383, 16384, 2**64 - 1])
def test_what_answers_a_oneshot_is_known_by_its_bytes(channel: int) -> None:
    said = route(channel) + acked(0, 1) + CLOSE
    assert oneshot_frames.encode_taken(channel) == said
    for data in (said, memoryview(said)):
        assert oneshot_frames.is_taken(data)
        assert oneshot_frames.route_of(data) == channel
    for size in range(len(said)):
        assert not oneshot_frames.is_taken(said[:size])
    assert not oneshot_frames.is_taken(said + b"\0")
    assert not oneshot_frames.is_taken(route(channel) + acked(0, 2) + CLOSE)


@pytest.mark.parametrize(
    "data", [b"", b"\3", b"\3\x80", b"\3\x80\0", b"\4\0", b"\3" + b"\xff" * 10, [1], None]
)
def test_what_does_not_begin_with_a_route_has_none(data: Any) -> None:
    assert oneshot_frames.route_of(data) == -1


@pytest.mark.parametrize("payload", [b"", b"x", bytes(5000), [b"a", bytes(5000), b"b"]])
def test_a_sequence_alone_is_route_message_and_finish(payload: Any) -> None:
    headers = ((b"key", b"value"),)
    buffers, size = oneshot_frames.encode_alone(300, payload, headers, [(8, ())])
    frame = b"".join(codec.encode_message(0, payload, headers, [(8, ())]))
    assert b"".join(buffers) == route(300) + frame + codec.encode_finish_sender(1)
    assert size == len(frame)


def test_one_decoder_reads_many_and_keeps_nothing() -> None:
    decoder = codec.FrameDecoder(from_server=False, frame_limit=100)
    good = route(4) + message(0, b"x" * 50) + finish(1)
    for data in (good, route(4) + message(0, bytes(101)), good[:-10], b"\xff", route(4), b"", good):
        found = oneshot_frames.message_of(decoder, data, SMALL)
        assert (found is not None) is (data == good)
        if found is not None:
            assert found.payload == b"x" * 50
        assert (decoder.consumed, decoder.buffered, decoder.error) == (0, 0, None)
    assert oneshot_frames.message_of(decoder, good, 49) is None  # it would be asked for
