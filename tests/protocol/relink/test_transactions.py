"""Commit and rollback, and their results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aqueduct._speedups.relink import packets
from aqueduct.config import Relink as Settings
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.cost import CHANNEL_COST, EMPTY_COST, message_cost
from aqueduct.protocol.relink.handshake import Opening
from tests.protocol.relink.pair import LinkPair, Lone

BOTH = Opening("test", connector_transactions=True, listener_transactions=True)


def operation(kind: int, sequence: int | None = None) -> bytes:
    form = packets.CHANNEL_OP if sequence is None else packets.SEQUENCE_OP
    return packets.encode_packet(form, kind, (1,), 1, sequence=sequence)


def message(*parts: bytes, channel: int = 1) -> bytes:
    head = packets.encode_message_head((channel,), 1, [len(part) for part in parts])
    return head + b"".join(part + bytes(-len(part) % 8) for part in parts)


@pytest.mark.requirement("RL-17")
@pytest.mark.requirement("RL-R9")
@pytest.mark.requirement("RL-R14")
def test_a_commit_is_answered_by_the_application() -> None:
    pair = LinkPair(BOTH)
    left, right = pair.left.link, pair.right.link
    for text in (b"a", b"b", b"c"):
        left.send(1, text)
    left.commit(1, 1)
    pair.settle()
    assert pair.right.of(events.COMMIT) == [(1, 0, 1)]
    right.complete(1, 0, committed=True)
    right.complete(1, 1, committed=False)
    with pytest.raises(LocalProtocolError, match="has a result, or was not committed"):
        right.complete(1, 2, committed=True)
    pair.settle()
    assert pair.left.of(events.RESULT) == [(1, [0], True), (1, [1], False)]
    assert left.unresolved() == {1: ([2], [])}
    left.commit(1)
    assert left.unresolved() == {1: ([2], [2])}


@pytest.mark.requirement("RL-17")
@pytest.mark.requirement("RL-R9")
def test_a_rollback_drops_the_content_at_once() -> None:
    pair = LinkPair(BOTH)
    left = pair.left.link
    left.send(1, bytes(1000))
    left.send(1, b"kept")
    assert left.held_bytes == CHANNEL_COST + message_cost(1000, 1) + message_cost(4, 1)
    left.rollback(1, 0)
    assert left.held_bytes == CHANNEL_COST + EMPTY_COST + message_cost(4, 1)
    left.commit(1)
    wire = pair.left.take_all()
    assert len(wire) < 100  # the message has no parts any more
    pair.right.link.receive_data(wire, 0.0)
    assert pair.right.of(events.ROLLBACK) == [(1, 0, 0)]
    assert pair.right.of(events.COMMIT) == [(1, 1, 1)]
    pair.right.link.complete(1, 1, committed=True)
    assert pair.right.link.held_bytes == CHANNEL_COST
    pair.settle()
    assert pair.left.of(events.RESULT) == [(1, [1], True)]


@pytest.mark.requirement("RL-R7")
@pytest.mark.requirement("RL-R13")
def test_a_rollback_of_messages_that_have_not_come_is_remembered() -> None:
    alone = Lone(BOTH)
    alone.receive(message(b"zero"), operation(packets.ROLLBACK, 2))
    assert alone.of(events.ROLLBACK) == [(1, 0, 2)]
    alone.receive(message(), message(), message(b"three"))
    assert [number for _, number, _ in alone.of(events.MESSAGE)] == [0, 3]
    alone.receive(operation(packets.COMMIT))
    assert alone.of(events.COMMIT) == [(1, 3, 3)]


@pytest.mark.requirement("RL-R15")
def test_undecided_messages_are_rolled_back_by_a_close() -> None:
    pair = LinkPair(BOTH)
    left = pair.left.link
    left.send(1, b"a")
    left.commit(1)
    left.send(1, b"b")
    left.close(1)
    pair.settle()
    assert pair.left.of(events.CLOSED) == []  # the commit has no result
    pair.right.link.complete(1, 0, committed=True)
    pair.settle()
    assert pair.left.of(events.RESULT) == [(1, [0], True)]
    assert pair.right.of(events.ROLLBACK) == [(1, 1, 1)]
    assert pair.left.of(events.CLOSED) == [(1,)]


@pytest.mark.requirement("RL-R15")
def test_a_close_by_the_peer_rolls_back_what_is_undecided() -> None:
    alone = Lone(BOTH)
    close = packets.encode_packet(packets.CHANNEL_OP, packets.CLOSE, (1,), 1)
    alone.receive(message(b"a"), message(b"b"), close)
    assert alone.of(events.ROLLBACK) == [(1, 0, 1)]
    assert alone.take_all().endswith(
        packets.encode_packet(packets.CHANNEL_ACK, packets.CLOSED, (1,), 1)
    )


@pytest.mark.requirement("RL-17")
@pytest.mark.requirement("RL-R7")
@pytest.mark.requirement("RL-R13")
def test_decisions_and_results_have_their_number() -> None:
    """A reader with a cursor for each type of packet finds the same messages (RL-R7)."""
    pair = LinkPair(BOTH)
    left = pair.left.link
    left.send(1, b"a")
    left.rollback(1)
    left.send(1, b"b")
    left.commit(1)
    wire = pair.left.take_all()
    assert operation(packets.ROLLBACK, 0) in wire
    assert operation(packets.COMMIT, 1) in wire
    pair.right.link.receive_data(wire, 0.0)
    pair.right.link.complete(1, 1, committed=True)
    assert (
        packets.encode_packet(packets.SEQUENCE_ACK, packets.COMMITTED, (1,), 1, sequence=1)
        in pair.right.take_all()
    )


@pytest.mark.parametrize("command", ["commit", "rollback"])
def test_decisions_need_transactions_and_messages(command: str) -> None:
    plain, pair = LinkPair(), LinkPair(BOTH)
    plain.left.link.send(1, b"a")
    with pytest.raises(LocalProtocolError, match="no transactions"):
        getattr(plain.left.link, command)(1)
    with pytest.raises(LocalProtocolError, match="is not open"):
        getattr(pair.left.link, command)(1)
    pair.left.link.send(1, b"a")
    with pytest.raises(LocalProtocolError, match="where 1 were sent"):
        getattr(pair.left.link, command)(1, 1)


@pytest.mark.requirement("RL-R10")
def test_results_are_kept_until_a_ping_says_that_they_were_read() -> None:
    """Alternating ones, of which no two are one run."""
    pair = LinkPair(BOTH)
    left, right = pair.left.link, pair.right.link
    kept = []
    for number in range(1000):
        left.send(1, b"a")
        left.commit(1)
        pair.move(0)
        right.complete(1, number, committed=number % 2 == 0)
        pair.move(1)
        kept.append(right._incoming.channels[1].kept_results)
    assert max(kept) <= 257
    assert len(pair.left.of(events.RESULT)) == 1000


@pytest.mark.requirement("RL-R10")
def test_results_of_several_channels_are_asked_about_in_turn() -> None:
    """Also those that were many while another channel was asked about, or without a connection."""
    pair = LinkPair(BOTH, Settings(unconfirmed_results=300))
    left, right = pair.left.link, pair.right.link
    for channel in (1, 2, 3):
        for number in range(600):
            left.send(channel, b"a")
            left.commit(channel, number)
    pair.move(0)
    incoming = right._incoming.channels
    for channel in (1, 2):
        for number in range(300):
            right.complete(channel, number, committed=number % 2 == 0)
    pair.settle()
    assert [incoming[channel].kept_results for channel in (1, 2)] == [0, 0]
    pair.cut()
    for number in range(300):
        right.complete(3, number, committed=number % 2 == 0)
    pair.connect()
    pair.settle()
    assert incoming[3].kept_results == 0
    right.complete(3, 300, committed=True)
    pair.settle()
    assert len(pair.left.of(events.RESULT)) == 901


def test_results_that_nobody_reads_have_a_limit() -> None:
    alone = Lone(BOTH, Settings(unconfirmed_results=300))
    for _ in range(301):
        alone.receive(message(b"a"), operation(packets.COMMIT))
    for number in range(300):
        alone.link.complete(1, number, committed=number % 2 == 0)
    with pytest.raises(LocalProtocolError, match="unconfirmed_results"):
        alone.link.complete(1, 300, committed=True)


@pytest.mark.requirement("RL-R15")
@pytest.mark.requirement("RL-R16")
@pytest.mark.parametrize("cut", [False, True], ids=["connected", "cut"])
@pytest.mark.parametrize("id_size", [0, 4])
def test_a_shutdown_rolls_back_what_is_undecided(id_size: int, cut: bool) -> None:
    pair = LinkPair(replace(BOTH, connector_id_size=id_size, listener_id_size=id_size))
    left, right = pair.left.link, pair.right.link
    left.send(0, b"committed")
    left.commit(0)
    left.send(0, b"undecided")
    pair.settle()
    left.send(0, b"never leaves")
    if cut:
        pair.cut()
    left.shutdown()
    right.shutdown()
    if cut:
        pair.connect()
    pair.settle()
    assert pair.right.of(events.ROLLBACK) == [(0, 1, 2)]
    right.complete(0, 0, committed=True)
    pair.settle()
    assert pair.left.of(events.RESULT) == [(0, [0], True)]
    assert pair.left.of(events.ENDED) == pair.right.of(events.ENDED) == [()]
