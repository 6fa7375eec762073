"""Every counter that a number of the peer reaches takes 64 bits (AQ-R2, AQ-R17)."""

from __future__ import annotations

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.errors import SequenceError
from aqueduct.protocol.common.receiver import ReceiverHalf
from tests.protocol.channels.peer import Peer, message, route

HIGHEST = (1 << 64) - 1
SUMS = [
    (1 << 63,),
    (HIGHEST,),
    ((1 << 63) - 1, 1),
    ((1 << 63) - 1, (1 << 63) - 1, 1),
    (1 << 63, (1 << 63) - 1),
    (1, (1 << 63) - 1, (1 << 63) - 1),
]


@pytest.mark.requirement("AQ-R17")
@pytest.mark.requirement("AQ-38")
@pytest.mark.parametrize("counts", SUMS)
def test_announcements_of_any_sum_are_nacked_when_they_are_due(counts: tuple[int, ...]) -> None:
    peer = Peer("client")
    for count in counts:
        peer.say(route(0), codec.encode_sent_unreliable(count))
        peer.pair.advance(5)  # each is due for itself
    half = peer.core.entrypoint
    assert isinstance(half, ReceiverHalf)
    assert half.nacked == sum(counts)
    assert peer.core.error is None
    told = [frame for frames in peer.told(0) for frame in frames if frame[0].startswith("ACK_NACK")]
    assert [sum(frame[2]) for frame in told] == list(counts)
    assert peer.core.snapshot()["channels"] == 1


@pytest.mark.requirement("AQ-R17")
def test_announcements_above_the_highest_sum_are_refused() -> None:
    peer = Peer("client")
    peer.say(route(0), codec.encode_sent_unreliable(HIGHEST))
    peer.pair.advance(5)
    peer.say(route(0), codec.encode_sent_unreliable(1))
    assert isinstance(peer.core.error, Exception)
    assert isinstance(peer.core.error.__cause__ or peer.core.error, Exception)
    assert "2^64 - 1" in str(peer.core.error)


@pytest.mark.parametrize("number", [(1 << 63) - 1, 1 << 63, HIGHEST - 1])
def test_messages_of_any_number_are_taken(number: int) -> None:
    peer = Peer("client")
    peer.say(route(0), message(number, b"payload"))
    found = peer.other.take_all(peer.core.entrypoint)
    assert [(each.number, bytes(each.payload)) for each in found] == [(number, b"payload")]
    peer.say(route(0), codec.encode_finish_sender(HIGHEST))
    peer.pair.advance(5)
    assert peer.core.error is None
    ranges = [frame[1] for frames in peer.told(0) for frame in frames if frame[0] == "ACK_RELIABLE"]
    assert ranges == [(number, 1)]


@pytest.mark.parametrize("sent", [0, 1, 3])
@pytest.mark.parametrize("ranges", [(0, HIGHEST), (1 << 63, 1), ((1 << 63) - 1, 1 << 63)])
def test_acks_far_beyond_what_was_sent_are_refused(sent: int, ranges: tuple[int, int]) -> None:
    peer = Peer("server")
    for _ in range(sent):
        peer.other.send(peer.core.entrypoint, b"payload")
    peer.pair.run()
    peer.say(route(0), codec.encode_ack_reliable(ranges))
    assert isinstance(peer.core.error, SequenceError) or "AQ-R16" in str(peer.core.error)
