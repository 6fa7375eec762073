"""What a peer can make a side keep without admission, and what rows of messages come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import LimitExceeded, LocalProtocolError
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.sender import SenderHalf
from tests.protocol.control_streams.lone import Lone, frames_of, message
from tests.reference.control_streams import header_block

KiB = 1 << 10
MiB = 1 << 20
SMALL: Config = replace(
    DEFAULT,
    flow=replace(DEFAULT.flow, receive_budget=1 * MiB),
    calls=replace(DEFAULT.calls, fragment_bytes=512 * KiB),
    limits=replace(DEFAULT.limits, frame_bytes=1 * MiB),
)


def kept(lone: Lone) -> int:
    """Bytes of frames that are not whole, and of those that wait."""
    return sum(
        stream.decoder.gathered + stream.decoder.buffered
        for stream in lone.core.incoming.streams.values()
    )


@pytest.mark.requirement("AQ0-R3")
def test_attachments_that_are_never_whole_are_bounded_in_sum() -> None:
    lone = Lone("server", SMALL)
    begun = bytes([3, 0, 0]) + bytes([0xFF, 0xFF, 0x1F])  # a message with 512 KiB of attachments
    for _ in range(30):
        number = lone.say(begun, fin=False)
        for _ in range(3):
            if lone.core.error is None:
                lone.on(number, bytes(60 * KiB))
    assert lone.core.error is not None
    assert "or for room; Flow.receive_budget" in str(lone.core.error)
    assert kept(lone) == 0, "a connection that is over keeps nothing"


@pytest.mark.requirement("AQ0-R3")
def test_headers_of_messages_that_wait_for_room_are_bounded_in_sum() -> None:
    lone = Lone("server", SMALL, header_blocks=True)
    block = header_block(((b"k", bytes(60 * KiB)),))
    for number in range(100):
        if lone.core.error is None:
            sent = VERSION + message(0, number, block + bytes(5000))
            stream = lone.say(sent[: 40 * KiB], fin=False)
            lone.on(stream, sent[40 * KiB : -5000])
            assert (
                sum(
                    stream.head.overhead
                    for stream in lone.core.incoming.streams.values()
                    if stream.head is not None
                )
                < 3 * MiB
            )
    assert lone.core.error is not None
    assert isinstance(lone.core.error.__cause__, LimitExceeded)


@pytest.mark.requirement("AQ0-R3")
@pytest.mark.parametrize("greet", [True, False], ids=["after the headers", "before them"])
def test_headers_that_are_never_whole_are_bounded_in_sum(greet: bool) -> None:
    lone = Lone("server", SMALL, greet=greet)
    for _ in range(100):
        if lone.core.error is None:
            lone.open(VERSION + bytes([1]) + b"\xff\xff\x03" + bytes(60 * KiB))
            assert kept(lone) < 3 * MiB
    assert lone.core.error is not None
    assert isinstance(lone.core.error.__cause__, LimitExceeded)


@pytest.mark.requirement("AQ0-R3")
def test_what_is_whole_weighs_nothing_any_more() -> None:
    lone = Lone("server", SMALL)
    for number in range(100):
        stream = lone.say(message(0, number, bytes(50 * KiB))[:20], fin=False)
        lone.on(stream, message(0, number, bytes(50 * KiB))[20:], fin=True)
        assert lone.take(lone.receiver) is not None
    assert lone.core.error is None
    assert lone.core.incoming._weight == 0


def test_streams_without_messages_of_a_channel_earn_no_slots() -> None:
    lone = Lone("server")
    for _ in range(300):
        lone.say(VERSION, fin=False)
    assert 0 <= lone.core.incoming.extra <= 2 * lone.core.channels


def test_rows_of_messages_are_framed_as_the_draft_does() -> None:
    lone = Lone("client")
    half: Any = lone.core.entrypoint
    assert isinstance(half, SenderHalf)
    lone.core.send(half, b"one", 0.0)
    with pytest.raises(LocalProtocolError, match="have no headers"):
        half.post(b"two", ((b"k", b"v"),))
    assert half.post(b"two", ()) == 1
    lone.apply()
    found = frames_of(lone.applied, 0, server=False)
    assert [bytes(frame.payload) for frame in found if hasattr(frame, "payload")] == [
        b"one",
        b"two",
    ]
    assert not any(effect[0] == effects.CLOSE for effect in lone.applied)


@pytest.mark.requirement("AQ0-R16")
def test_control_streams_that_the_peer_never_ends_are_bounded() -> None:
    """Their channels have ended, so they count as channels no more."""
    config = replace(DEFAULT, limits=replace(DEFAULT.limits, channels=50))
    lone = Lone("server", config)
    for index in range(200):
        channel = 4 | index << 3  # a oneshot on which the client sends
        lone.say(message(0, index, b"", [channel]))
        lone.say(message(channel, 0, b"x"))
        lone.take(lone.receiver)
        if lone.core.error is not None:
            break
    assert lone.core.channels <= 2
    assert "control streams open" in str(lone.core.error)
    assert index <= 110
