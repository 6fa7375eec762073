"""Frame sequences: their grammar, their ends, and the entrypoint that is there from the start."""

from __future__ import annotations

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.protocol.common.events import Readable
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import SenderHalf
from tests.protocol.channels.peer import Peer, message, route
from tests.protocol.channels.test_prelude import ACK, ENTRY, HEADERS, VERSION, fresh, payloads
from tests.support.pair import Pair

requirement = pytest.mark.requirement


@requirement("AQ-8")
@requirement("AQ-10")
def test_each_stream_is_a_sequence_of_its_own() -> None:
    peer = Peer()
    first = peer.say(ENTRY, message(0, b"one"), fin=False)
    second = peer.say(route(8), message(0, b"other"), fin=False)
    peer.more(first, message(1, b"two"))
    peer.more(second, message(1, b"more"))
    peer.more(first, message(2, b"three"), codec.encode_finish_sender(3), fin=True)
    assert payloads(peer) == [b"one", b"two", b"three"]
    assert type(peer.pair.receiver.error).__name__ == "Finished"
    other = peer.core._registry.known(8)
    assert isinstance(other, ReceiverHalf)
    assert [bytes(m.payload) for m in other.queue] == [b"other", b"more"]
    # The route of one stream is none for another.
    peer.say(message(3))
    assert peer.closed_with == 2


@requirement("AQ-8")
@requirement("AQ-10")
def test_each_datagram_is_a_sequence_of_its_own() -> None:
    peer = Peer()
    peer.datagram(ENTRY, message(0, b"one"), message(1, b"two"))
    peer.datagram(ENTRY, message(2, b"three"))
    assert payloads(peer) == [b"one", b"two", b"three"]
    peer.datagram(message(3))
    assert peer.closed_with == 2


@requirement("AQ-9")
@requirement("AQ-30")
@pytest.mark.parametrize(
    "frames",
    [
        [message(0)],
        [codec.FORGET_CHANNEL],
        [ENTRY, ENTRY],
        [ENTRY, VERSION],
        [ENTRY, ACK],
        [ENTRY, HEADERS],
        [ENTRY, message(0), route(8)],
    ],
    ids=["message", "forget", "two routes", "version", "ack", "headers", "route later"],
)
def test_other_sequences_are_errors(frames: list[bytes]) -> None:
    peer = Peer()
    peer.say(*frames)
    assert peer.closed_with == 2


@requirement("AQ-11")
@requirement("AQ-R34")
@requirement("AQ-R7")
@pytest.mark.parametrize("cut", [1, 3, 6, 20])
def test_a_reset_drops_the_partial_frame_and_no_more(cut: int) -> None:
    peer = Peer()
    stream = peer.say(ENTRY, message(0, b"whole"), message(1, bytes(20))[:cut], fin=False)
    peer.reset(stream, 7)
    assert peer.core.error is None
    assert payloads(peer) == [b"whole"]
    # Nothing else happened: the channel lives, the number is free, nothing is acknowledged.
    peer.pair.advance(1)
    assert peer.told(0) == [[("ACK_RELIABLE", (0, 1))]]
    peer.say(ENTRY, message(1, b"again"))
    assert payloads(peer) == [b"again"]
    assert peer.core.snapshot()["budget_used_bytes"] == 0


@requirement("AQ-R7")
@pytest.mark.parametrize("cut", [1, 3, 6, 20])
def test_the_end_of_a_stream_inside_a_frame_is_an_error(cut: int) -> None:
    peer = Peer()
    peer.say(ENTRY, message(0, b"whole"), message(1, bytes(20))[:cut])
    assert peer.closed_with == 1


@requirement("AQ-R7")
def test_empty_sequences_are_ignored_even_before_the_version() -> None:
    peer = fresh()
    peer.say()
    peer.datagram()
    assert peer.core.error is None
    peer.say(VERSION, HEADERS)
    assert peer.core.ready
    peer.say()
    peer.datagram()
    assert peer.core.error is None


@requirement("AQ-R12")
def test_route_to_alone_has_its_effects() -> None:
    peer = Peer()
    peer.say(route(8))
    assert peer.core.channels == 2  # created
    peer.datagram(route(10))
    assert peer.core.channels == 3
    server = Peer("server")
    attach = Attach(keep_sender=True, is_oneshot=False)
    server.other.send(server.pair.sender, b"", attach)
    assert isinstance(attach.half, SenderHalf)
    server.other.cancel(attach.half)
    server.say(route(8), codec.CLOSE_RECEIVER)
    server.say(route(8))
    assert server.told(8)[-1] == [("FORGET_CHANNEL",)]  # answered


# The entrypoint


@requirement("AQ-25")
def test_at_the_start_there_is_the_entrypoint_alone() -> None:
    pair = Pair()
    assert pair.client.core.channels == pair.server.core.channels == 1
    assert isinstance(pair.client.core.entrypoint, SenderHalf)
    assert isinstance(pair.server.core.entrypoint, ReceiverHalf)
    assert pair.sender.channel == pair.receiver.channel == 0
    # It has state from the start: nothing is created, nothing forgotten.
    server = Peer("server")
    server.say(ENTRY)
    server.pair.advance(2)
    assert server.told() == [] and server.core.channels == 1
    client = Peer()
    client.say(ENTRY)
    client.pair.advance(2)
    assert client.told() == [] and client.core.channels == 1


@requirement("AQ-25")
def test_the_server_has_the_entrypoint_and_hears_of_its_messages() -> None:
    pair = Pair()
    pair.client.send(pair.sender, b"hello")
    pair.run()
    heard = [event for event in pair.server.events if isinstance(event, Readable)]
    assert [event.half for event in heard] == [pair.receiver]
