"""UNRELIABLE mode: datagrams, their announcement, receipt deadlines, nacks and eviction."""

from __future__ import annotations

import dataclasses

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Flow, Limits
from aqueduct.errors import Finished, LocalProtocolError, LostInTransit, MessageLost
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.protocol.channels.test_lifecycle import open_channel
from tests.support.pair import Pair, Side


def datagrams(side: Side) -> int:
    return sum(1 for effect in side.applied if effect[0] == effects.DATAGRAM)


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-33")
@pytest.mark.requirement("AQ-38")
def test_datagrams_are_delivered_announced_and_acked() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    for index in range(10):
        pair.client.send(sender, b"%d" % index, mode=Mode.UNRELIABLE)
    pair.run()
    assert datagrams(pair.client) == 10
    assert [bytes(m.payload) for m in pair.server.take_all(receiver)] == [
        b"%d" % index for index in range(10)
    ]
    assert sender.unsettled
    pair.advance(DEFAULT.timing.sent_unreliable_delay + DEFAULT.timing.receipt_deadline + 0.1)
    assert not sender.unsettled
    pair.client.finish(sender)
    pair.run()
    assert sender.error is None
    assert isinstance(receiver.error, Finished)
    assert pair.client.core.channels == pair.server.core.channels == 1


@pytest.mark.requirement("AQ-R17")
def test_what_does_not_fit_a_datagram_goes_by_stream() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    pair.client.send(sender, bytes(5000), mode=Mode.UNRELIABLE)
    pair.run()
    assert datagrams(pair.client) == 0
    assert len(pair.server.take_all(receiver)) == 1
    without = Pair(datagram_limit=0)
    sender, receiver = open_channel(without, keep_sender=True)
    without.client.send(sender, b"small", mode=Mode.UNRELIABLE)
    without.run()
    assert datagrams(without.client) == 0
    assert len(without.server.take_all(receiver)) == 1


@pytest.mark.requirement("AQ-37")
@pytest.mark.requirement("AQ-38")
@pytest.mark.requirement("AQ-45")
def test_lost_datagrams_are_nacked_after_the_deadline_and_finish_waits_for_it() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    for index in range(6):
        pair.client.lose_datagrams = index in (1, 2, 5)
        pair.client.send(sender, b"%d" % index, mode=Mode.UNRELIABLE)
    pair.client.finish(sender)
    pair.run()
    assert receiver.error is None  # no nack earlier than otherwise
    pair.advance(DEFAULT.timing.receipt_deadline / 2)
    assert receiver.error is None
    pair.advance(DEFAULT.timing.receipt_deadline)
    assert isinstance(receiver.error, Finished)
    assert [bytes(m.payload) for m in pair.server.take_all(receiver)] == [b"0", b"3", b"4"]
    assert sender.error is None and not sender.unsettled


@pytest.mark.requirement("AQ-39")
@pytest.mark.requirement("AQ-R13")
def test_a_late_or_repeated_datagram_is_ignored() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    pair.client.lose_datagrams = True
    pair.client.send(sender, b"late", mode=Mode.UNRELIABLE)
    pair.client.lose_datagrams = False
    pair.advance(2)
    assert not sender.unsettled
    (late,) = [effect[1] for effect in pair.client.applied if effect[0] == effects.DATAGRAM]
    pair.link.client.send_datagram(late)
    pair.link.client.flush()
    pair.run()
    assert pair.server.take(receiver) is None
    pair.client.send(sender, b"once", mode=Mode.UNRELIABLE)
    again = [effect[1] for effect in pair.client.applied if effect[0] == effects.DATAGRAM][-1]
    pair.link.client.send_datagram(again)
    pair.link.client.flush()
    pair.run()
    assert [bytes(m.payload) for m in pair.server.take_all(receiver)] == [b"once"]
    assert pair.server.core.error is None


@pytest.mark.requirement("AQ-R13")
def test_a_repeated_datagram_takes_the_place_of_none() -> None:
    flow = Flow(channel_receive_bytes=2500, receive_budget=20_000, message_overhead=100)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    for payload in (b"first", b"second"):
        pair.client.send(pair.sender, payload + bytes(1000), mode=Mode.UNRELIABLE)
    again = [effect[1] for effect in pair.client.applied if effect[0] == effects.DATAGRAM][-1]
    pair.link.client.send_datagram(again)
    pair.link.client.flush()
    pair.run()
    taken = [bytes(m.payload).rstrip(b"\0") for m in pair.server.take_all(pair.receiver)]
    assert taken == [b"first", b"second"]


@pytest.mark.requirement("AQ-R31")
def test_a_full_queue_loses_its_oldest_unreliable_message() -> None:
    flow = Flow(channel_receive_bytes=10_000, receive_budget=20_000, message_overhead=100)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    sender, receiver = open_channel(pair, keep_sender=True)
    pair.client.send(sender, bytes(3000))  # reliable: never evicted
    inner = Attach(keep_sender=True, is_oneshot=False)
    pair.client.send(sender, b"first", inner, mode=Mode.UNRELIABLE)
    for index in range(30):
        pair.client.send(sender, b"%04d" % index + bytes(996), mode=Mode.UNRELIABLE)
    pair.run()
    assert receiver.queue.charged <= 10_000
    taken = [bytes(m.payload) for m in pair.server.take_all(receiver)]
    assert taken[0] == bytes(3000)
    assert [int(p[:4]) for p in taken[1:]] == list(range(30 - len(taken) + 1, 30))
    assert receiver.queue.charged == 0
    pair.advance(2)
    assert not sender.unsettled  # evicted ones were received: acked, and their attachments released
    assert isinstance(inner.half, SenderHalf) and inner.half.error is not None
    pair.client.finish(sender)
    pair.run()
    assert isinstance(receiver.error, Finished)


@pytest.mark.requirement("AQ-R28")
def test_an_unreliable_oneshot_arrives_or_is_lost() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True, is_oneshot=True)
    pair.client.send(sender, b"there", mode=Mode.UNRELIABLE)
    with pytest.raises(LocalProtocolError):
        pair.client.send(sender, b"again", mode=Mode.UNRELIABLE)
    pair.run()
    assert [bytes(m.payload) for m in pair.server.take_all(receiver)] == [b"there"]
    assert isinstance(receiver.error, Finished)
    pair.advance(3)
    assert sender.error is None
    sender, receiver = open_channel(pair, keep_sender=True, is_oneshot=True)
    pair.client.lose_datagrams = True
    pair.client.send(sender, b"lost", mode=Mode.UNRELIABLE)
    pair.advance(3)
    assert isinstance(receiver.error, MessageLost)
    assert pair.client.core.channels == pair.server.core.channels == 1
    assert pair.server.core.error is None and pair.client.core.error is None


@pytest.mark.requirement("AQ-R27")
def test_channels_in_a_lost_datagram_are_lost_with_all_that_hangs_on_them() -> None:
    pair = Pair()
    attach = Attach(keep_sender=True, is_oneshot=False)
    pair.client.lose_datagrams = True
    pair.client.send(pair.sender, b"carrier", attach, mode=Mode.UNRELIABLE)
    pair.client.lose_datagrams = False
    assert isinstance(attach.half, SenderHalf)
    deeper = Attach(keep_sender=False, is_oneshot=False)
    pair.client.send(attach.half, b"on a ghost", deeper)
    pair.advance(0.5)
    assert pair.server.core.channels > 1  # implicit state, nothing given to the application
    pair.advance(3)
    assert isinstance(attach.half.error, LostInTransit)
    assert isinstance(deeper.half, ReceiverHalf)
    assert isinstance(deeper.half.error, LostInTransit)
    assert pair.client.core.channels == pair.server.core.channels == 1


@pytest.mark.requirement("AQ-R10")
def test_early_datagrams_wait_for_the_headers_a_few_of_them() -> None:
    config = dataclasses.replace(DEFAULT, limits=Limits(early_datagrams=3))
    pair = Pair(config, connect=False)
    pair.server.answer_headers = None
    pair.run()
    for index in range(5):
        pair.client.send(pair.sender, b"%d" % index, mode=Mode.UNRELIABLE)
    pair.run()
    assert pair.server.take(pair.receiver) is None
    pair.server.core.accept_headers((), pair.now)
    pair.run()
    assert [bytes(m.payload) for m in pair.server.take_all(pair.receiver)] == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("datagram", "code"),
    [
        (codec.encode_connection_headers(()), 2),
        (codec.encode_route_to(0) + codec.CANCEL_SENDER, 2),
        (codec.encode_route_to(0) + b"\x04", 1),
        (b"\x00", 1),
    ],
)
@pytest.mark.requirement("AQ-R11")
def test_other_frames_in_datagrams_are_errors(datagram: bytes, code: int) -> None:
    pair = Pair()
    pair.link.client.send_datagram(datagram)
    pair.link.client.flush()
    pair.run()
    assert pair.server.close_code == code


@pytest.mark.requirement("AQ-37")
@pytest.mark.requirement("AQ-R33")
@pytest.mark.parametrize(("rtt", "deadline"), [(0.0, 1.0), (0.4, 1.0), (0.7, 1.4)])
def test_the_receipt_deadline_follows_a_long_round_trip(rtt: float, deadline: float) -> None:
    pair = Pair()
    pair.server.core.rtt_measured(rtt)
    pair.client.lose_datagrams = True
    pair.client.send(pair.sender, b"lost", mode=Mode.UNRELIABLE)
    pair.advance(0.05)  # SENT_UNRELIABLE arrives now
    pair.advance(deadline - 0.001)
    assert pair.sender.unsettled
    pair.advance(0.002)
    assert not pair.sender.unsettled
