"""How much a sender has under way on all channels, and when a receiver stops to read."""

from __future__ import annotations

import pytest

from aqueduct._speedups.relink import packets
from aqueduct.config import Relink as Settings
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.cost import CHANNEL_COST, message_cost
from tests.protocol.relink.pair import LinkPair, Lone
from tests.protocol.relink.test_transactions import BOTH, message

COST = message_cost(0, 1)
WINDOW = Settings(window_bytes=10_000, receive_bytes=30_000, ack_delay=0)


@pytest.mark.requirement("RL-R10")
def test_all_channels_of_a_link_share_one_window() -> None:
    pair = LinkPair(settings=WINDOW)
    left = pair.left.link
    for channel in (1, 2, 3):
        left.send(channel, bytes(3000))
    for channel in (1, 2, 3):
        assert not left.writable(channel, 3000)
    pair.settle()
    pair.right.link.consume(2, 0)
    pair.settle()
    assert sorted(pair.left.of(events.WRITABLE)) == [(1,), (2,), (3,)]


@pytest.mark.requirement("RL-R10")
def test_an_idle_channel_sends_its_next_message_above_a_full_window() -> None:
    pair = LinkPair(settings=WINDOW)
    left = pair.left.link
    left.send(1, bytes(9800 - COST))
    for number in range(5):
        assert not left.writable(1, 1000)
        assert left.send(2, bytes(1000)) == [number]
        assert not left.writable(2, 1000)
        pair.settle()
        pair.right.link.consume(2, number)
        pair.settle()
    left.send(2, bytes(50_000))  # alone it may be above the window, which is not full
    with pytest.raises(LocalProtocolError, match="channel 3 has no room"):
        left.send(3, b"x")


@pytest.mark.requirement("RL-R10")
def test_idle_channels_have_one_more_window_together() -> None:
    left = Lone(settings=WINDOW).link
    left.send(1, bytes(9800))
    opened = 1
    while left.writable(opened + 1, 800):
        opened += 1
        left.send(opened, bytes(800))
    assert 20_000 - 1000 < left.held_bytes - opened * CHANNEL_COST <= 20_000
    assert opened > 8


@pytest.mark.requirement("RL-R10")
def test_what_is_waited_for_on_an_idle_channel_is_acknowledged_at_once() -> None:
    alone = Lone(settings=Settings(receive_bytes=30_000))
    alone.receive(message(bytes(9000), channel=1), message(b"x", channel=2))
    alone.link.handle_deadline(1.0)
    alone.take_all(1.0)
    alone.link.consume(2, 0)
    assert not alone.link.idle


@pytest.mark.requirement("RL-R10")
def test_who_waits_for_the_peer_reads_up_to_twice_as_much() -> None:
    alone = Lone(settings=WINDOW)
    alone.receive(*[message(bytes(10_000 - COST))] * 3)
    assert alone.link.full
    alone.link.send(7, b"x")
    assert not alone.link.full
    alone.receive(*[message(bytes(10_000 - COST))] * 3)
    assert alone.link.full
    alone.link.consume(1, 0)
    assert not alone.link.full


@pytest.mark.requirement("RL-R17")
def test_the_time_until_a_link_waits_for_its_peer_is_no_silence() -> None:
    alone = Lone(settings=Settings(receive_bytes=10_000, ack_deadline=4))
    alone.receive(message(bytes(10_000)))
    alone.link.handle_deadline(100.0)
    alone.take_all(100.0)
    assert alone.link.full
    alone.link.send(7, b"x")
    assert not alone.link.full
    alone.link.handle_deadline(101.0)
    assert alone.of(events.SILENT) == []


@pytest.mark.requirement("RL-R10")
def test_a_close_is_waited_for_too() -> None:
    alone = Lone(settings=WINDOW)
    alone.receive(*[message(bytes(10_000 - COST))] * 3)
    alone.link.send(7, b"x")
    alone.take_all()
    alone.receive(consumed(7))
    assert alone.link.full
    alone.link.close(7)
    assert not alone.link.full
    alone.receive(packets.encode_packet(packets.CHANNEL_ACK, packets.CLOSED, (7,), 1))
    assert alone.of(events.CLOSED) == [(7,)]
    assert alone.link.full


def consumed(channel: int) -> bytes:
    return packets.encode_packet(packets.CHANNEL_ACK, packets.CONSUMED, (channel,), 1)


@pytest.mark.requirement("RL-R10")
def test_the_oldest_transaction_has_the_window_for_itself() -> None:
    """Each of two transactions has half of the window, and one of them gets on."""
    pair = LinkPair(BOTH, WINDOW)
    left = pair.left.link
    for channel in (1, 2):
        left.send(channel, bytes(4500))
    assert not left.writable(2, 4500)
    left.send(1, bytes(4500))
    assert not left.writable(1, 4500)  # the window of one transaction
    pair.settle()
    left.commit(1)
    assert pair.left.of(events.WRITABLE) == [(2,)]  # now it is the oldest
    left.send(2, bytes(4500))
    left.commit(2)
    pair.settle()
    assert pair.right.of(events.COMMIT) == [(1, 0, 1), (2, 0, 1)]


@pytest.mark.requirement("RL-R10")
def test_a_transaction_gets_on_beside_results_that_are_missing() -> None:
    pair = LinkPair(BOTH, WINDOW)
    left = pair.left.link
    left.send(1, bytes(9000))
    left.commit(1)
    for _ in range(9):
        left.send(2, bytes(800))
    left.commit(2)
    assert not left.writable(2, 800)
    pair.settle()
    assert pair.right.of(events.COMMIT) == [(1, 0, 0), (2, 0, 8)]


@pytest.mark.requirement("RL-R10")
def test_a_sender_with_the_defaults_never_fills_a_receiver_with_the_defaults() -> None:
    settings = Settings()
    largest = message_cost(settings.message_bytes, settings.parts)
    assert settings.receive_bytes > max(2 * settings.window_bytes, settings.window_bytes + largest)
