"""Receivers of oneshots that are patient: their end leaves in company, or with the acks."""

from __future__ import annotations

import dataclasses

import pytest

from aqueduct.config import DEFAULT, Config
from aqueduct.errors import Finished
from aqueduct.protocol.common.context import CLOSES
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from tests.protocol.channels.peer import Peer, message, route
from tests.protocol.channels.test_receiver_wire import ONESHOT, finish, payloads

requirement = pytest.mark.requirement
CLOSED = [[("ACK_RELIABLE", (0, 1)), ("CLOSE_RECEIVER",)]]
THIRD, FOURTH = ONESHOT + 8 * 100, ONESHOT + 8 * 101


def patient(config: Config = DEFAULT) -> tuple[Peer, ReceiverHalf]:
    peer = Peer(config=config)
    half = _attach(peer, ONESHOT)
    peer.pair.advance(1)
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
def test_its_end_leaves_with_what_is_sent_later() -> None:
    peer, _ = patient()
    peer.pair.advance(0.0035)
    _speak(peer, THIRD)
    assert peer.told(ONESHOT) == CLOSED
    peer.pair.advance(5)
    assert peer.told(ONESHOT) == CLOSED


@requirement("AQ-R28")
@requirement("AQ-R33")
def test_a_few_leave_together() -> None:
    """Of questions in quick succession: not each answer's end goes with the next question."""
    peer, _ = patient()
    channels = [ONESHOT, *(_more(peer, place) for place in range(1, CLOSES - 1))]
    _speak(peer, THIRD)
    assert [peer.told(channel) for channel in channels] == [[]] * (CLOSES - 1)
    channels.append(_more(peer, CLOSES - 1))
    assert [peer.told(channel) for channel in channels] == [[]] * CLOSES
    _speak(peer, FOURTH)
    assert [peer.told(channel) for channel in channels] == [CLOSED] * CLOSES
    peer.pair.advance(5)
    assert [peer.told(channel) for channel in channels] == [CLOSED] * CLOSES


def test_where_channels_are_few_no_close_waits_for_others() -> None:
    limits = dataclasses.replace(DEFAULT.limits, channels=100)
    peer, _ = patient(dataclasses.replace(DEFAULT, limits=limits))
    _speak(peer, THIRD)
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


def _more(peer: Peer, place: int) -> int:
    """Another patient receiver whose end has come."""
    channel = ONESHOT + 8 * place
    half = _attach(peer, channel)
    half.patient = True
    peer.say(route(channel), message(0, b"x"), finish(1))
    assert payloads(peer, half) == [b"x"]
    return channel


def _speak(peer: Peer, channel: int) -> None:
    """Has the side under test send something: the end of a receiver that is not patient."""
    peer.other.close_receiver(_attach(peer, channel))
    peer.other.flush()
    peer.pair.run()
    assert peer.told(channel) == [[("CLOSE_RECEIVER",)]]


def _attach(peer: Peer, channel: int) -> ReceiverHalf:
    number = (channel - ONESHOT) // 8
    peer.say(route(0), message(number, b"", (), [(channel, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    ((half, _),) = carrier.attachments
    assert isinstance(half, ReceiverHalf)
    return half


def _asked(peer: Peer) -> ReceiverHalf:
    attach = Attach(keep_sender=False, is_oneshot=True)
    peer.other.send(peer.pair.sender, b"?", attach)
    peer.pair.run()
    half = attach.half
    assert isinstance(half, ReceiverHalf)
    half.patient = True
    return half
