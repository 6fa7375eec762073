"""Messages, their windows, and what is acknowledged, over one connection."""

from __future__ import annotations

import pytest

from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct._speedups.relink import packets
from aqueduct.config import Relink as Settings
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.cost import CHANNEL_COST
from aqueduct.protocol.relink.handshake import Opening
from tests.protocol.relink.pair import LinkPair, Lone

COST = 128 + 64
"""Bytes that a message of one part counts beside its own."""


@pytest.mark.requirement("RL-16")
def test_messages_come_whole_and_in_order_in_both_directions() -> None:
    pair = LinkPair()
    assert pair.left.link.send(7, b"one") == [0]
    assert pair.left.link.send(7, [b"t", b"", b"wo"]) == [1]
    assert pair.left.link.send(8, []) == [0]
    assert pair.right.link.send(7, bytes(100_000)) == [0]
    pair.settle()
    assert pair.right.messages == {7: [(b"one",), (b"t", b"", b"wo")], 8: [()]}
    assert pair.left.messages == {7: [(bytes(100_000),)]}


@pytest.mark.requirement("RL-15")
def test_a_large_part_lands_once_in_aligned_memory() -> None:
    pair = LinkPair()
    payload = bytes(range(256)) * 64
    pair.left.link.send(1, [b"small", payload])
    wire = pair.left.take_all()
    link = pair.right.link
    link.receive_data(wire[:16], 0.0)  # the head, and the small part with its padding
    room = link.room()
    assert room is not None
    assert len(room) == len(payload)
    room[:1000] = payload[:1000]
    link.landed(1000, 0.0)
    rest = link.room()
    assert rest is not None
    rest[:] = payload[1000:]
    link.landed(len(rest), 0.0)
    (_, _, parts) = pair.right.of(events.MESSAGE)[0]
    assert isinstance(parts[1], AlignedBuffer)
    assert (bytes(parts[0]), bytes(parts[1])) == (b"small", payload)


def test_buffers_of_a_message_leave_by_reference() -> None:
    pair = LinkPair()
    payload = bytearray(10_000)
    pair.left.link.send(1, payload)
    buffers, size = pair.left.link.take(1 << 20, 0.0)
    assert any(buffer is payload for buffer in buffers)
    assert size == 8 + 10_000


@pytest.mark.requirement("RL-12")
@pytest.mark.requirement("RL-16")
def test_a_message_to_several_channels_leaves_once() -> None:
    pair = LinkPair()
    pair.left.link.send(2, b"first")
    assert pair.left.link.send([1, 2, 2], b"all") == [0, 1, 2]
    wire = pair.left.take_all()
    assert wire.count(b"all") == 1
    pair.right.link.receive_data(wire, 0.0)
    pair.right.drain()
    assert pair.right.messages == {1: [(b"all",)], 2: [(b"first",), (b"all",), (b"all",)]}


@pytest.mark.requirement("RL-16")
@pytest.mark.requirement("RL-R10")
def test_a_window_that_is_full_refuses_and_says_when_there_is_room() -> None:
    pair = LinkPair(settings=Settings(window_messages=2, window_bytes=100 + 2 * COST))
    left = pair.left.link
    left.send(1, bytes(10))
    left.send(1, bytes(10))
    assert not left.writable(1)
    with pytest.raises(LocalProtocolError, match="window_messages"):
        left.send(1, b"")
    assert left.writable(2)
    pair.settle()
    assert pair.left.of(events.WRITABLE) == []  # received is not consumed
    pair.right.link.consume(1, 0)
    pair.settle()
    assert pair.left.of(events.WRITABLE) == [(1,)]
    assert left.send(1, bytes(500 - 410)) == [2]


@pytest.mark.requirement("RL-R10")
def test_a_message_above_the_window_goes_alone() -> None:
    pair = LinkPair(settings=Settings(window_bytes=100))
    pair.left.link.send(1, bytes(1000))
    with pytest.raises(LocalProtocolError, match="window_bytes"):
        pair.left.link.send(1, b"x")
    pair.settle()
    pair.right.link.consume(1, 0)
    pair.settle()
    pair.left.link.send(1, b"x")


def test_a_link_is_full_until_the_application_has_consumed() -> None:
    pair = LinkPair(settings=Settings(receive_bytes=10_000))
    pair.left.link.send(1, bytes(6000))
    pair.left.link.send(1, bytes(6000))
    pair.settle()
    assert pair.right.link.full
    pair.right.link.consume(1, 0)
    assert not pair.right.link.full
    assert pair.right.link.held_bytes == 6000 + COST + CHANNEL_COST


@pytest.mark.requirement("RL-10")
@pytest.mark.requirement("RL-R3")
@pytest.mark.parametrize("size", range(9))
def test_ids_have_the_size_that_was_agreed_on(size: int) -> None:
    pair = LinkPair(Opening("test", connector_id_size=size, listener_id_size=8 - size))
    highest = (1 << 8 * size) - 1
    pair.left.link.send(highest, b"x")
    pair.right.link.send((1 << 8 * (8 - size)) - 1, b"y")
    pair.settle()
    assert pair.right.messages == {highest: [(b"x",)]}
    pair.right.link.consume(highest, 0)
    pair.settle()
    assert pair.left.link.held_bytes == 1 + COST + 2 * CHANNEL_COST  # what it received
    with pytest.raises(LocalProtocolError, match="does not fit an id"):
        pair.left.link.send(highest + 1, b"x")


@pytest.mark.requirement("RL-16")
def test_acknowledgements_wait_for_their_time_or_for_many_bytes() -> None:
    pair = LinkPair(settings=Settings(ack_delay=0.5, ack_bytes=1000))
    pair.left.link.send(1, b"x")
    pair.move(0)
    assert pair.right.link.idle
    assert pair.right.link.next_deadline() == pytest.approx(pair.now + 0.5)
    pair.right.link.handle_deadline(pair.now + 0.5)
    assert pair.right.take_all() == packets.encode_packet(
        packets.SEQUENCE_ACK, packets.RECEIVED, (1,), 1, sequence=0
    )
    pair.left.link.send(1, bytes(1000))
    pair.move(0)
    assert not pair.right.link.idle


@pytest.mark.requirement("RL-19")
def test_a_ping_is_answered_and_the_time_is_told() -> None:
    pair = LinkPair()
    pair.left.link.ping(pair.now)
    pair.move(0)
    pair.now += 0.25
    pair.move(1)
    assert pair.left.of(events.PONG) == [(0.25,)]


@pytest.mark.requirement("RL-18")
@pytest.mark.requirement("RL-R15")
def test_a_close_is_answered_once_all_is_consumed_and_the_channel_opens_again() -> None:
    pair = LinkPair()
    pair.left.link.send(5, b"x")
    pair.left.link.close(5)
    pair.settle()
    assert pair.right.of(events.CLOSE) == [(5,)]
    assert pair.left.of(events.CLOSED) == []
    with pytest.raises(LocalProtocolError, match="is closing"):
        pair.left.link.send(5, b"y")
    pair.right.link.consume(5, 0)
    pair.settle()
    assert pair.left.of(events.CLOSED) == [(5,)]
    assert pair.left.link.send(5, b"again") == [0]
    pair.settle()
    assert pair.right.messages[5] == [(b"x",), (b"again",)]


@pytest.mark.requirement("RL-21")
@pytest.mark.requirement("RL-R16")
@pytest.mark.parametrize("size", [0, 1])
def test_a_link_ends_when_both_sides_have_shut_down(size: int) -> None:
    pair = LinkPair(Opening("test", connector_id_size=size, listener_id_size=size))
    pair.left.link.send(0, b"last")
    pair.left.link.shutdown()
    with pytest.raises(LocalProtocolError, match="shut down"):
        pair.left.link.send(0, b"more")
    pair.settle()
    assert pair.right.of(events.SHUTDOWN) == []  # the message is not consumed
    pair.right.link.consume(0, 0)
    pair.settle()
    assert pair.right.of(events.SHUTDOWN) == [()]
    pair.right.link.send(0, b"still")
    pair.settle()
    assert pair.left.messages == {0: [(b"still",)]}
    pair.left.link.consume(0, 0)
    pair.right.link.shutdown()
    pair.settle()
    assert pair.left.of(events.ENDED) == pair.right.of(events.ENDED) == [()]
    with pytest.raises(LocalProtocolError, match="has ended"):
        pair.right.link.send(0, b"more")


@pytest.mark.requirement("RL-R17")
def test_a_silent_peer_is_asked_and_then_given_up() -> None:
    alone = Lone(settings=Settings(ping_interval=15, silence=45))
    assert alone.link.next_deadline() == 15
    alone.link.handle_deadline(15)
    assert alone.take_all() == packets.encode_general(packets.PING)
    alone.link.handle_deadline(44)
    assert alone.of(events.SILENT) == []
    alone.link.handle_deadline(45)
    assert alone.of(events.SILENT) == [("no byte came for 45.0 s",)]
    assert alone.link.next_deadline() is None


@pytest.mark.requirement("RL-R17")
def test_a_peer_that_acknowledges_nothing_is_probed_and_given_up_after_the_deadline() -> None:
    alone = Lone(settings=Settings(ack_deadline=5))
    alone.link.send(1, b"x")
    alone.link.take(1 << 20, 1.0)
    assert alone.link.next_deadline() == 3.5
    alone.link.handle_deadline(3.5)
    assert alone.take_all(3.5) == packets.encode_general(packets.PING)
    alone.link.handle_deadline(6.0)
    assert alone.of(events.SILENT) == [("nothing was acknowledged for 5.0 s",)]


@pytest.mark.requirement("RL-R6")
@pytest.mark.parametrize("pieces", [False, True])
def test_a_message_to_nobody_has_no_effect(pieces: bool) -> None:
    nobody = packets.encode_message_head([], 1, [8], multicast=True)
    alone = Lone(pieces=pieces)
    alone.drain()
    assert alone.receive(nobody) == []
    assert alone.link.expected() == 0
    assert alone.receive(b"12345678", packets.encode_general(packets.PING)) == []
    assert alone.take_all() == packets.encode_general(packets.PONG)
