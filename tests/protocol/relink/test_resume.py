"""Links that are cut: what is sent again, and what a resume may say."""

from __future__ import annotations

import pytest

from aqueduct._speedups.relink import packets
from aqueduct.config import Relink as Settings
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.cost import CHANNEL_COST
from aqueduct.protocol.relink.handshake import Opening
from aqueduct.protocol.relink.state import LinkState
from tests.protocol.relink.pair import LinkPair, Lone
from tests.protocol.relink.test_transactions import BOTH, message, operation

RESUME = packets.encode_general(packets.RESUME)


def acknowledgement(kind: int, sequence: int, channel: int = 1) -> bytes:
    return packets.encode_packet(packets.SEQUENCE_ACK, kind, (channel,), 1, sequence=sequence)


def resumed(opening: Opening | None = None, sent: int = 0, **settings: int) -> Lone:
    """A link with ``sent`` messages that have left, cut, and connected again."""
    alone = Lone(opening, Settings(**settings))
    for number in range(sent):
        alone.link.send(1, b"%d" % number)
    alone.take_all()
    alone.link.disconnected()
    alone.link.connected(1.0, resumed=True)
    return alone


@pytest.mark.requirement("RL-8")
@pytest.mark.requirement("RL-16")
@pytest.mark.requirement("RL-R11")
@pytest.mark.requirement("RL-R12")
def test_what_was_lost_is_sent_again_and_nothing_comes_twice() -> None:
    pair = LinkPair()
    pair.left.link.send(1, b"one")
    pair.settle()
    pair.left.link.send(1, b"two")
    pair.left.take_all()  # it gets lost
    pair.left.link.send(1, b"three")
    pair.cut()
    pair.left.link.send(1, b"four")
    pair.connect()
    assert pair.left.link.state is LinkState.RESUMING
    pair.settle()
    assert pair.right.messages[1] == [(b"one",), (b"two",), (b"three",), (b"four",)]
    assert pair.left.of(events.UP) == [(False,), (True,)]


@pytest.mark.requirement("RL-8")
@pytest.mark.requirement("RL-20")
@pytest.mark.requirement("RL-R11")
def test_only_acknowledgements_and_resume_leave_before_the_peer_s_resume() -> None:
    alone = Lone()
    alone.receive(message(b"a"), message(b"b"))
    alone.link.send(1, b"mine")
    alone.link.disconnected()
    alone.link.connected(1.0, resumed=True)
    assert alone.take_all() == acknowledgement(packets.RECEIVED, 1) + RESUME
    alone.receive(RESUME)
    assert b"mine" in alone.take_all()


@pytest.mark.requirement("RL-R12")
def test_a_message_of_pieces_is_handed_over_once_whatever_is_cut() -> None:
    pair = LinkPair(pieces=True)
    payload = bytes(range(250)) * 100
    pair.left.link.send(1, payload)
    pair.move(0, 5000)
    pair.cut()
    pair.connect()
    pair.settle(0.0)
    pair.move(0, 20_000)
    pair.cut()
    pair.connect()
    pair.settle()
    assert pair.right.messages[1] == [(payload,)]


def test_a_message_that_comes_again_with_other_sizes_is_an_error() -> None:
    alone = Lone(pieces=True)
    alone.receive(message(b"12345678")[:12])
    alone.link.disconnected()
    alone.link.connected(1.0, resumed=True)
    assert "other sizes" in alone.fails(RESUME, message(b"1234"))


@pytest.mark.requirement("RL-19")
def test_a_pong_is_not_kept_for_another_connection() -> None:
    alone = Lone()
    alone.receive(packets.encode_general(packets.PING))
    alone.link.disconnected()
    alone.link.connected(1.0, resumed=True)
    assert alone.take_all() == RESUME


@pytest.mark.requirement("RL-R10")
@pytest.mark.requirement("RL-R11")
def test_decisions_without_results_are_sent_again() -> None:
    pair = LinkPair(BOTH)
    left = pair.left.link
    for text in (b"a", b"b", b"c", b"d"):
        left.send(1, text)
    pair.settle()
    left.commit(1, 0)
    left.rollback(1, 1)
    left.commit(1, 2)
    pair.left.take_all()  # they get lost
    pair.cut()
    pair.connect()
    pair.settle()
    assert pair.right.of(events.COMMIT) == [(1, 0, 0), (1, 2, 2)]
    assert pair.right.of(events.ROLLBACK) == [(1, 1, 1)]


@pytest.mark.requirement("RL-20")
@pytest.mark.requirement("RL-R11")
@pytest.mark.requirement("RL-R12")
def test_results_that_were_lost_are_told_again_and_reported_once() -> None:
    pair = LinkPair(BOTH)
    left, right = pair.left.link, pair.right.link
    for _ in range(3):
        left.send(1, b"a")
    left.commit(1)
    pair.settle()
    right.complete(1, 0, committed=True)
    pair.settle()
    right.complete(1, 1, committed=False)
    pair.right.take_all()  # it gets lost
    pair.cut()
    right.complete(1, 2, committed=True)
    pair.connect()
    pair.settle()
    assert pair.left.of(events.RESULT) == [(1, [0], True), (1, [1], False), (1, [2], True)]


@pytest.mark.requirement("RL-R9")
@pytest.mark.requirement("RL-R11")
def test_a_message_that_was_rolled_back_is_sent_again_without_parts() -> None:
    alone = resumed(BOTH, sent=2)
    alone.link.rollback(1, 0)
    alone.receive(RESUME)
    wire = alone.take_all()
    assert b"0" not in wire.replace(message(b"1"), b"")
    assert wire == RESUME + message() + message(b"1") + operation(packets.ROLLBACK, 0)


@pytest.mark.requirement("RL-R11")
@pytest.mark.requirement("RL-R15")
def test_a_close_without_its_answer_is_sent_again() -> None:
    alone = Lone()
    alone.link.send(1, b"x")
    alone.take_all()
    alone.receive(acknowledgement(packets.CONSUMED, 0))
    alone.link.close(1)
    close = packets.encode_packet(packets.CHANNEL_OP, packets.CLOSE, (1,), 1)
    assert alone.take_all() == close
    alone.link.disconnected()
    alone.link.connected(1.0, resumed=True)
    alone.receive(acknowledgement(packets.RECEIVED, 0), RESUME)
    assert alone.take_all() == RESUME + close


@pytest.mark.requirement("RL-R11")
@pytest.mark.requirement("RL-R15")
def test_a_channel_that_is_closing_and_left_out_of_the_resume_is_closed() -> None:
    """Its answer got lost, and the receiver knows the channel no more (RL-R15)."""
    alone = Lone()
    alone.link.send(1, b"x")
    alone.take_all()
    alone.receive(acknowledgement(packets.CONSUMED, 0))
    alone.link.close(1)
    alone.take_all()
    alone.link.disconnected()
    alone.link.connected(1.0, resumed=True)
    alone.receive(RESUME)
    assert alone.of(events.CLOSED) == [(1,)]


@pytest.mark.requirement("RL-R11")
def test_an_acknowledged_channel_that_is_left_out_of_the_resume_is_an_error() -> None:
    alone = Lone()
    alone.link.send(1, b"x")
    alone.take_all()
    alone.receive(acknowledgement(packets.RECEIVED, 0))
    alone.link.disconnected()
    alone.link.connected(1.0, resumed=True)
    assert "says nothing of it" in alone.fails(RESUME)


@pytest.mark.requirement("RL-21")
@pytest.mark.requirement("RL-R11")
@pytest.mark.requirement("RL-R16")
def test_a_shutdown_is_sent_again() -> None:
    alone = Lone()
    alone.link.shutdown()
    shutdown = packets.encode_general(packets.SHUTDOWN)
    assert alone.take_all() == shutdown
    alone.link.disconnected()
    alone.link.connected(1.0, resumed=True)
    assert alone.link.shut_down
    alone.receive(shutdown)  # as its first packet; there is nothing else to do
    alone.receive(RESUME)
    assert alone.take_all() == RESUME + shutdown
    assert alone.of(events.ENDED) == [()]


@pytest.mark.requirement("RL-20")
@pytest.mark.requirement("RL-R12")
def test_results_and_consumption_wait_for_the_next_connection() -> None:
    pair = LinkPair()
    pair.left.link.send(1, b"x")
    pair.settle()
    pair.cut()
    pair.right.link.consume(1, 0)
    pair.connect()
    pair.settle()
    assert pair.left.link.held_bytes == CHANNEL_COST


@pytest.mark.requirement("RL-R8")
@pytest.mark.requirement("RL-R11")
@pytest.mark.requirement("RL-R18")
class TestWhatAResumeMayNotSay:
    def test_that_more_was_received_than_was_sent(self) -> None:
        assert "3 were sent" in resumed(sent=3).fails(acknowledgement(packets.RECEIVED, 3))

    def test_that_less_was_received_than_before(self) -> None:
        alone = Lone()
        for _ in range(3):
            alone.link.send(1, b"x")
        alone.take_all()
        alone.receive(acknowledgement(packets.RECEIVED, 2))
        alone.link.disconnected()
        alone.link.connected(1.0, resumed=True)
        assert "acknowledged 2 before" in alone.fails(acknowledgement(packets.RECEIVED, 1))

    def test_that_nothing_was_consumed_which_is_what_another_implementation_says(self) -> None:
        alone = resumed(sent=1)
        nothing = acknowledgement(packets.CONSUMED, 0xFFFFFFFF)
        alone.receive(acknowledgement(packets.RECEIVED, 0xFFFFFFFF), nothing, RESUME)
        assert alone.link.error is None
        assert message(b"0") in alone.take_all()

    def test_anything_twice(self) -> None:
        assert "RESUME on a link that is UP" in resumed().fails(RESUME, RESUME)

    def test_anything_on_a_new_link(self) -> None:
        assert "RESUME on a link that is UP" in Lone().fails(RESUME)

    def test_that_messages_came_which_were_not_sent_again(self) -> None:
        alone = resumed(sent=3)
        alone.receive(acknowledgement(packets.RECEIVED, 0), RESUME)
        assert "1 were sent" in alone.fails(acknowledgement(packets.RECEIVED, 2))


@pytest.mark.requirement("RL-R11")
def test_a_message_before_the_resume_needs_an_acknowledged_channel() -> None:
    alone = Lone()
    alone.receive(message(b"a"))
    alone.link.disconnected()
    alone.link.connected(1.0, resumed=True)
    alone.receive(message(b"b"))
    assert alone.messages[1] == [(b"a",), (b"b",)]
    other = packets.encode_message_head((2,), 1, ())
    assert "before the resume" in alone.fails(other)


@pytest.mark.requirement("RL-R11")
def test_an_operation_before_the_resume_is_an_error() -> None:
    alone = resumed(BOTH)
    assert "before the resume" in alone.fails(operation(packets.COMMIT))


@pytest.mark.requirement("RL-R12")
@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 12, 16, 20, 23, 24])
def test_a_conversation_is_cut_at_any_byte(cut: int) -> None:
    pair = LinkPair()
    pair.left.link.send(1, b"question")
    pair.move(0, cut)
    pair.cut()
    pair.connect()
    pair.settle()
    assert pair.right.messages[1] == [(b"question",)]
