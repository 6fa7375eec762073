"""Oneshot channels: one message in total, whichever way it goes (AQ-R28)."""

from __future__ import annotations

import pytest

from aqueduct.errors import Cancelled, Finished, LocalProtocolError, MessageLost
from aqueduct.protocol.common.sender import Mode
from tests.protocol.channels.peer import message, route
from tests.protocol.channels.test_receiver_wire import (
    NONE_SENT,
    ONESHOT,
    attached,
    finish,
    payloads,
    sent,
)
from tests.protocol.channels.test_sender_wire import numbers, opened

requirement = pytest.mark.requirement


# The sender


@requirement("AQ-R28")
def test_a_reliable_oneshot_is_one_sequence() -> None:
    for mode in (Mode.ORDERED, Mode.UNORDERED):
        peer, half = opened(is_oneshot=True)
        assert peer.other.send(half, b"x", mode=mode) == 0
        (said,) = peer.streams(half.channel)
        assert peer.frames(said)[1:] == [("MESSAGE", 0, (), (), b"x"), ("FINISH_SENDER", 1)]
        assert said.fin
        with pytest.raises(LocalProtocolError):
            peer.other.send(half, b"y")


@requirement("AQ-R28")
def test_an_unreliable_oneshot_is_a_datagram_and_a_control_stream() -> None:
    peer, half = opened(is_oneshot=True)
    peer.other.send(half, b"x", mode=Mode.UNRELIABLE)
    assert numbers(peer.datagram_frames()) == [0]
    (said,) = peer.streams(half.channel)
    assert peer.frames(said)[1:] == [("SENT_UNRELIABLE", 1), ("FINISH_SENDER", 0)]
    assert said.fin


# The receiver


@requirement("AQ-R28")
@pytest.mark.parametrize("carrier", ["stream", "datagram"])
def test_a_oneshot_receiver_closes_with_its_message(carrier: str) -> None:
    peer, half = attached(ONESHOT)
    if carrier == "stream":
        peer.say(route(ONESHOT), message(0, b"x"), fin=False)
    else:
        peer.datagram(route(ONESHOT), message(0, b"x"))
    assert isinstance(half.error, Finished)  # without waiting for FINISH_SENDER
    assert peer.told(ONESHOT)[0][-1] == ("CLOSE_RECEIVER",)
    assert peer.told(ONESHOT)[0][0] == (
        ("ACK_RELIABLE", (0, 1)) if carrier == "stream" else ("ACK_NACK_UNRELIABLE", ONESHOT, (1,))
    )
    assert payloads(peer, half) == [b"x"]
    # What is normal afterwards changes nothing.
    peer.say(route(ONESHOT), finish(1) if carrier == "stream" else sent(1) + finish(0))
    peer.pair.advance(3)
    assert peer.core.error is None and len(peer.told(ONESHOT)) == 1


@requirement("AQ-R28")
@pytest.mark.parametrize(
    "frames",
    [
        [message(1)],
        [sent(2)],
        [sent(1), sent(1)],
        [finish(2)],
        [sent(1), message(0)],
        [sent(1), finish(1)],
    ],
    ids=["number", "count", "sum of counts", "finish", "both spaces", "counted in both"],
)
def test_a_oneshot_has_one_message(frames: list[bytes]) -> None:
    peer, _ = attached(ONESHOT)
    peer.say(route(ONESHOT), *frames)
    assert peer.closed_with == 2


@requirement("AQ-R28")
def test_a_oneshot_with_a_message_in_each_space_is_an_error() -> None:
    peer, _ = attached(ONESHOT)
    peer.say(route(ONESHOT), finish(1))  # so its message is to come by stream
    peer.datagram(route(ONESHOT), message(0))
    assert peer.closed_with == 2


@requirement("AQ-R17")
@requirement("AQ-R28")
def test_an_announcement_of_nothing_changes_nothing() -> None:
    peer, half = attached(ONESHOT)
    peer.say(route(ONESHOT), NONE_SENT, NONE_SENT, message(0, b"x"), finish(1))
    assert peer.core.error is None and isinstance(half.error, Finished)
    assert payloads(peer, half) == [b"x"]
    peer, half = attached(ONESHOT)
    peer.say(route(ONESHOT), NONE_SENT, finish(0))
    assert isinstance(half.error, Cancelled)


@requirement("AQ-R28")
def test_a_oneshot_that_finishes_without_a_message() -> None:
    peer, half = attached(ONESHOT)
    peer.say(route(ONESHOT), finish(0))
    assert isinstance(half.error, Cancelled)
    assert peer.told(ONESHOT) == [[("CLOSE_RECEIVER",)]]
    peer, half = attached(ONESHOT)
    peer.say(route(ONESHOT), sent(1), finish(0))
    assert half.error is None
    peer.pair.advance(1.1)
    assert isinstance(half.error, MessageLost)
    assert peer.told(ONESHOT) == [[("ACK_NACK_UNRELIABLE", ONESHOT, (0, 1)), ("CLOSE_RECEIVER",)]]


@requirement("AQ-R28")
def test_a_lost_oneshot_is_not_waited_for_beyond_its_nack() -> None:
    peer, half = attached(ONESHOT)
    peer.say(route(ONESHOT), sent(1), fin=False)  # its FINISH_SENDER never comes
    peer.pair.advance(1.1)
    assert isinstance(half.error, MessageLost) and peer.core.channels == 1
