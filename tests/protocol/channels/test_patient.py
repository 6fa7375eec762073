"""Receivers of oneshots that are patient: their end leaves in company, or with the acks."""

from __future__ import annotations

import pytest

from aqueduct.errors import Finished
from aqueduct.protocol.channels.receiving import ReceiverHalf
from aqueduct.protocol.channels.registry import Attach
from tests.protocol.channels.peer import Peer, message, route
from tests.protocol.channels.test_receiver_wire import ONESHOT, attached, finish, payloads

requirement = pytest.mark.requirement
CLOSED = [[("ACK_RELIABLE", (0, 1)), ("CLOSE_RECEIVER",)]]
SECOND = ONESHOT + 8


def patient() -> tuple[Peer, ReceiverHalf]:
    peer, half = attached(ONESHOT)
    half.patient = True
    peer.say(route(ONESHOT), message(0, b"x"), finish(1))
    assert isinstance(half.error, Finished)  # for its user it is over at once
    assert payloads(peer, half) == [b"x"]
    return peer, half


@requirement("AQ-R28")
@requirement("AQ-R33")
def test_its_end_leaves_with_the_delay_of_acks() -> None:
    peer, _ = patient()
    peer.pair.advance(0.024)
    assert peer.told(ONESHOT) == []
    peer.pair.advance(0.0011)
    assert peer.told(ONESHOT) == CLOSED
    peer.pair.advance(5)
    assert peer.told(ONESHOT) == CLOSED


@requirement("AQ-R28")
def test_its_end_leaves_with_what_is_sent_next() -> None:
    peer, _ = patient()
    peer.say(route(0), message(1, b"", (), [(SECOND, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    ((second, _),) = carrier.attachments
    assert peer.told(ONESHOT) == []
    peer.other.close_receiver(second)
    peer.other.flush()
    peer.pair.run()
    assert peer.told(ONESHOT) == CLOSED
    peer.pair.advance(5)
    assert peer.told(ONESHOT) == CLOSED


def test_a_close_of_the_connection_says_it_first() -> None:
    peer, _ = patient()
    peer.other.core.close(0, "", peer.pair.now)
    peer.other.flush()
    peer.pair.run()
    assert peer.told(ONESHOT) == CLOSED


def test_closing_it_again_says_nothing_more() -> None:
    peer, half = patient()
    peer.other.close_receiver(half)
    peer.pair.advance(1)
    assert peer.told(ONESHOT) == CLOSED


@requirement("AQ-R24")
def test_a_late_stream_of_it_is_forgotten_a_second_after_its_end_left() -> None:
    """A channel of ours: the FORGET_CHANNEL for a latecomer waits for the end to have had time."""
    peer = Peer("server")
    pair = peer.pair
    half = _asked(peer)
    channel = half.channel
    peer.say(route(channel), message(0, b"x"), finish(1))
    assert isinstance(half.error, Finished)
    peer.say(route(channel))  # before the end has left
    pair.advance(0.9)
    assert peer.told(channel) == CLOSED
    pair.advance(0.2)
    assert [("FORGET_CHANNEL",)] in peer.told(channel)


def _asked(peer: Peer) -> ReceiverHalf:
    attach = Attach(keep_sender=False, is_oneshot=True)
    peer.other.send(peer.pair.sender, b"?", attach)
    peer.pair.run()
    half = attach.half
    assert isinstance(half, ReceiverHalf)
    half.patient = True
    return half
