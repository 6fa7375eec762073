"""What a peer may not do: each ends the link, and says why."""

from __future__ import annotations

import pytest

from aqueduct._speedups.relink import packets
from aqueduct.config import Relink as Settings
from aqueduct.errors import LimitExceeded, LocalProtocolError
from aqueduct.protocol.relink.cost import CHANNEL_COST
from aqueduct.protocol.relink.handshake import Opening
from aqueduct.protocol.relink.link import Link
from tests.protocol.relink.pair import Lone
from tests.protocol.relink.test_resume import acknowledgement
from tests.protocol.relink.test_transactions import BOTH, message, operation

CLOSE = packets.encode_packet(packets.CHANNEL_OP, packets.CLOSE, (1,), 1)
CLOSED = packets.encode_packet(packets.CHANNEL_ACK, packets.CLOSED, (1,), 1)


def sender(opening: Opening | None = None, sent: int = 1) -> Lone:
    """A link that has sent so many messages on channel 1."""
    alone = Lone(opening)
    for _ in range(sent):
        alone.link.send(1, b"x")
    alone.take_all()
    return alone


@pytest.mark.requirement("RL-R8")
def test_acknowledgements_beyond_what_was_sent() -> None:
    for kind in (packets.RECEIVED, packets.CONSUMED):
        assert "1 were sent (RL-R8)" in sender().fails(acknowledgement(kind, 1))


@pytest.mark.requirement("RL-R8")
def test_acknowledgements_of_a_message_that_waits_to_leave() -> None:
    alone = sender()
    alone.link.send(1, b"y")
    assert "1 were sent (RL-R8)" in alone.fails(acknowledgement(packets.RECEIVED, 1))


@pytest.mark.requirement("RL-R8")
def test_acknowledgements_that_are_stale_have_no_effect() -> None:
    alone = sender(sent=3)
    alone.receive(acknowledgement(packets.CONSUMED, 2), acknowledgement(packets.CONSUMED, 0))
    alone.receive(acknowledgement(packets.RECEIVED, 1))
    assert alone.link.error is None
    assert alone.link.held_bytes == CHANNEL_COST


@pytest.mark.requirement("RL-R15")
def test_acknowledgements_for_a_channel_that_never_was() -> None:
    assert "channel 1, which is not open" in Lone().fails(acknowledgement(packets.RECEIVED, 0))


@pytest.mark.requirement("RL-R15")
def test_acknowledgements_for_a_channel_that_was_just_closed_are_ignored() -> None:
    alone = sender()
    alone.receive(acknowledgement(packets.CONSUMED, 0))
    alone.link.close(1)
    alone.take_all()
    alone.receive(CLOSED, acknowledgement(packets.RECEIVED, 0))
    assert alone.link.error is None


@pytest.mark.requirement("RL-18")
def test_closed_without_a_close() -> None:
    assert "no close was sent" in sender().fails(CLOSED)


@pytest.mark.requirement("RL-R9")
def test_results_without_transactions_or_without_a_commit() -> None:
    assert "no transactions" in sender().fails(acknowledgement(packets.COMMITTED, 0))
    assert "was not committed" in sender(BOTH).fails(acknowledgement(packets.COMMITTED, 0))
    alone = sender(BOTH, sent=2)
    alone.link.commit(1, 0)
    alone.link.rollback(1, 1)
    assert "was not committed" in alone.fails(acknowledgement(packets.COMMITTED, 1))


@pytest.mark.requirement("RL-R8")
def test_decisions_without_transactions_messages_or_a_channel() -> None:
    alone = Lone()
    alone.receive(message(b"x"))
    assert "no transactions" in alone.fails(operation(packets.COMMIT))
    assert "is not open" in Lone(BOTH).fails(operation(packets.COMMIT))
    alone = Lone(BOTH)
    alone.receive(message(b"x"))
    assert "commits message 1, and 1 came" in alone.fails(operation(packets.COMMIT, 1))


@pytest.mark.requirement("RL-R15")
def test_a_message_between_close_and_closed() -> None:
    alone = Lone()
    alone.receive(message(b"x"), CLOSE)
    assert "after its close" in alone.fails(message(b"y"))


@pytest.mark.requirement("RL-18")
@pytest.mark.requirement("RL-R15")
def test_a_close_of_an_unknown_channel_is_answered() -> None:
    alone = Lone()
    alone.receive(CLOSE)
    assert alone.take_all() == CLOSED


def test_more_closes_than_answers_that_are_read() -> None:
    alone = Lone(settings=Settings(unanswered_pings=10, channels=5))
    alone.receive(15 * CLOSE)
    assert alone.take_all() == 15 * CLOSED
    assert "Relink.unanswered_pings" in alone.fails(20 * CLOSE)


@pytest.mark.requirement("RL-21")
@pytest.mark.requirement("RL-R16")
def test_a_new_channel_after_the_shutdown() -> None:
    alone = Lone()
    alone.receive(message(b"x"), packets.encode_general(packets.SHUTDOWN), message(b"y"))
    other = packets.encode_message_head((2,), 1, ())
    assert "after the shutdown (RL-R16)" in alone.fails(other)


def test_more_channels_than_the_limit() -> None:
    alone = Lone(settings=Settings(channels=2))
    heads = [packets.encode_message_head((channel,), 1, ()) for channel in range(3)]
    assert "Relink.channels" in alone.fails(*heads)
    assert isinstance(alone.link.error, LimitExceeded)
    alone = Lone(settings=Settings(channels=2))
    alone.link.send([0, 1], b"")
    with pytest.raises(LocalProtocolError, match=r"Relink\.channels"):
        alone.link.send(2, b"")


def test_more_pings_than_are_answered() -> None:
    alone = Lone(settings=Settings(unanswered_pings=10))
    ping = packets.encode_general(packets.PING)
    alone.receive(10 * ping)
    assert alone.take_all() == 10 * packets.encode_general(packets.PONG)
    assert "Relink.unanswered_pings" in alone.fails(11 * ping)


@pytest.mark.parametrize(
    ("settings", "data"),
    [
        (Settings(parts=3), packets.encode_message_head((1,), 1, (0, 0, 0, 0))),
        (Settings(targets=3), packets.encode_message_head((1,) * 4, 1, (), multicast=True)),
        (Settings(message_bytes=10), packets.encode_message_head((1,), 1, (6, 5))),
    ],
    ids=["parts", "targets", "message_bytes"],
)
def test_what_is_declared_above_a_limit(settings: Settings, data: bytes) -> None:
    alone = Lone(settings=settings)
    assert "Relink." in alone.fails(data)
    assert isinstance(alone.link.error, LimitExceeded)


@pytest.mark.requirement("RL-1")
def test_bytes_that_are_no_packet() -> None:
    assert "RL-1" in Lone().fails(b"\xff" * 8)


def test_nothing_has_an_effect_after_a_failure() -> None:
    alone = Lone()
    alone.fails(b"\xff" * 8)
    assert alone.receive(message(b"x")) == []
    alone.link.handle_deadline(1000.0)
    assert alone.link.next_deadline() is None
    with pytest.raises(LocalProtocolError, match="has ended"):
        alone.link.send(1, b"x")


def test_pieces_and_transactions_exclude_each_other() -> None:
    with pytest.raises(LocalProtocolError, match="come whole"):
        Link(BOTH, connector=True, pieces=True)
