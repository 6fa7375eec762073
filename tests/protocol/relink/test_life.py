"""Which connection counts as silent, and how a side without a word shows that it lives."""

from __future__ import annotations

import pytest

from aqueduct._speedups.relink import packets
from aqueduct.config import Relink as Settings
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.cost import CHANNEL_COST
from tests.protocol.relink.pair import LinkPair, Lone
from tests.protocol.relink.test_resume import acknowledgement
from tests.protocol.relink.test_transactions import BOTH, message, operation

NOP = packets.encode_general(packets.NOP)
PING = packets.encode_general(packets.PING)
PONG = packets.encode_general(packets.PONG)
QUICK = Settings(ack_deadline=4, ack_delay=0)


@pytest.mark.requirement("RL-R17")
def test_messages_that_go_on_leaving_do_not_hide_a_dead_peer() -> None:
    alone = Lone(settings=QUICK)
    for second in range(4):
        alone.link.send(1, b"x")
        alone.take(second)
        alone.link.handle_deadline(second)
    assert alone.of(events.SILENT) == []
    alone.link.handle_deadline(4)
    assert alone.of(events.SILENT) == [("nothing was acknowledged for 4.0 s",)]


@pytest.mark.requirement("RL-R17")
def test_a_commit_without_any_answer_is_missed_as_a_message_is() -> None:
    alone = Lone(BOTH, settings=QUICK)
    alone.link.send(1, b"x")
    alone.take(0)
    alone.receive(acknowledgement(packets.RECEIVED, 0), now=1)
    alone.link.commit(1)
    alone.take(10)
    alone.link.handle_deadline(12)
    assert alone.take_all(12) == PING
    alone.receive(PONG, now=13)
    assert alone.link.next_deadline() == 13 + QUICK.ping_interval  # it lives, and works on it
    alone.link.commit(1)
    alone.link.send(1, b"y")
    alone.link.rollback(1)
    alone.take(20)
    alone.link.handle_deadline(24)
    assert len(alone.of(events.SILENT)) == 1


@pytest.mark.requirement("RL-R17")
def test_who_answers_pings_and_acknowledges_no_message_is_given_up() -> None:
    alone = Lone(settings=QUICK)
    alone.link.send(1, b"x")
    alone.take(10)
    assert alone.link.next_deadline() == 12
    alone.link.handle_deadline(12)
    assert alone.take_all(12) == PING
    alone.receive(PONG, now=13)  # it has read the message
    assert alone.link.next_deadline() == 15
    alone.link.handle_deadline(15)
    assert alone.take_all(15) == PING
    assert alone.of(events.SILENT) == []
    alone.receive(PONG, now=16)
    due = alone.link.next_deadline()
    assert due is not None
    assert due <= 16
    alone.link.handle_deadline(16)
    text = "the peer has read messages and acknowledged none for 6.0 s"
    assert alone.of(events.SILENT) == [(text,)]
    assert alone.link.next_deadline() is None


@pytest.mark.requirement("RL-R17")
def test_an_acknowledgement_right_behind_the_answer_counts() -> None:
    alone = Lone(settings=QUICK)
    alone.link.send(1, b"x")
    alone.link.send(1, b"y")
    alone.take(0)
    for now in (2, 4):
        alone.link.handle_deadline(now)
        assert alone.take_all(now) == PING
        alone.receive(PONG, now=now)
    alone.receive(acknowledgement(packets.RECEIVED, 0), now=4)
    alone.link.handle_deadline(5)
    assert alone.of(events.SILENT) == []
    assert alone.link.next_deadline() == 6


@pytest.mark.requirement("RL-R17")
def test_each_acknowledgement_gives_the_next_one_its_time() -> None:
    alone = Lone(settings=QUICK)
    for _ in range(40):
        alone.link.send(1, b"x")
    alone.take(0)
    for number in range(30):
        now = 3.0 * number
        alone.link.handle_deadline(now + 2)
        alone.receive(PONG * alone.take_all(now + 2).count(PING), now=now + 2.5)
        alone.receive(acknowledgement(packets.RECEIVED, number), now=now + 3)
    assert alone.of(events.SILENT) == []
    # A ping that left before the last acknowledgement says nothing of what is read since.
    alone.link.ping(90)
    alone.receive(acknowledgement(packets.RECEIVED, 39), now=91)
    alone.link.send(1, b"y")
    alone.take(91)
    alone.receive(PONG, now=92)
    assert alone.link.next_deadline() == 93
    alone.receive(acknowledgement(packets.RECEIVED, 40), now=93)
    assert alone.link.next_deadline() == 93 + QUICK.ping_interval


@pytest.mark.requirement("RL-R17")
def test_any_byte_is_life_while_a_message_may_be_on_its_way() -> None:
    """The ping waits behind it, and so the receiver says nop."""
    alone = Lone(settings=QUICK)
    alone.link.send(1, b"x")
    asked = [alone.take_all(0)]
    for second in range(1, 100):
        alone.receive(NOP, now=second)
        alone.link.handle_deadline(second)
        asked.append(alone.take_all(second))
    assert [data for data in asked[1:] if data] == [PING]
    assert alone.of(events.SILENT) == []
    alone.receive(PONG, now=100)
    assert alone.link.next_deadline() == 102


@pytest.mark.requirement("RL-R17")
def test_a_peer_that_has_not_resumed_yet_ignores_no_message() -> None:
    alone = Lone(settings=QUICK)
    alone.link.send(1, b"x")
    alone.take(0)
    alone.link.disconnected()
    alone.link.connected(0.0, resumed=True)
    alone.take_all(0)
    for second in range(1, 12):
        alone.link.handle_deadline(second)
        alone.receive(PONG * alone.take_all(second).count(PING), now=second)
    assert alone.of(events.SILENT) == []


@pytest.mark.requirement("RL-R17")
def test_a_large_message_that_takes_long_to_leave_is_no_silence() -> None:
    alone = Lone(settings=QUICK)
    alone.link.send(1, bytes(1 << 20))
    alone.take(0, 1 << 20)
    for second in range(20):
        alone.link.left(second)
        alone.link.handle_deadline(second)
    assert alone.of(events.SILENT) == []
    alone.link.handle_deadline(19 + 4)
    assert len(alone.of(events.SILENT)) == 1


@pytest.mark.requirement("RL-R17")
def test_who_gets_a_large_message_says_nop_while_it_comes() -> None:
    alone = Lone(settings=QUICK)
    wire = message(bytes(10_000))
    said = []
    for second in range(8):
        alone.link.receive_data(wire[second * 1000 : second * 1000 + 1000], second)
        alone.link.handle_deadline(second)
        said.append(alone.take_all(second))
    assert said == [b"", *[NOP] * 7]
    alone.link.handle_deadline(9)
    assert alone.take_all(9) == b""  # nothing came
    alone.receive(wire[8000:], now=9)
    alone.take_all(9)
    due = alone.link.next_deadline()
    assert due == 9 + QUICK.ping_interval


@pytest.mark.requirement("RL-R17")
def test_who_is_full_lives_and_does_not_miss_its_peer() -> None:
    settings = Settings(ack_deadline=4, ack_delay=0, receive_bytes=1000)
    alone = Lone(settings=settings)
    alone.receive(message(bytes(2000)))
    alone.take_all()
    alone.link.send(2, b"x")
    alone.take(0)
    assert alone.link.full
    for second in range(1, 100):
        alone.link.handle_deadline(second)
        assert alone.take_all(second) == NOP
    assert alone.of(events.SILENT) == []
    alone.link.consume(1, 0)
    alone.take_all(99)
    assert alone.link.next_deadline() == 99 + 2  # half of the deadline: then it is asked
    alone.link.handle_deadline(103)
    assert len(alone.of(events.SILENT)) == 1


@pytest.mark.requirement("RL-R10")
def test_empty_messages_fill_a_receiver_too() -> None:
    alone = Lone(settings=Settings(receive_bytes=128_000))
    alone.receive(message() * 999)
    assert not alone.link.full
    alone.receive(message())
    assert alone.link.full
    alone.link.consume(1, 999)
    assert alone.link.held_bytes == CHANNEL_COST


@pytest.mark.requirement("RL-R10")
def test_a_channel_has_as_many_unconsumed_messages_as_the_setting_says() -> None:
    pair = LinkPair(settings=Settings(window_messages=3))
    left = pair.left.link
    for _ in range(3):
        assert left.writable(1, 1)
        left.send(1, b"x")
    assert not left.writable(1, 1)
    assert left.writable(2, 1)  # each channel has its own
    with pytest.raises(LocalProtocolError, match=r"Relink\.window_messages"):
        left.send(1, b"x")
    pair.settle()
    assert not left.writable(1, 1)
    pair.right.link.consume(1, 0)
    pair.settle()
    assert left.writable(1, 1)


@pytest.mark.requirement("RL-17")
def test_what_the_sender_has_not_decided_about_stops_no_reading() -> None:
    alone = Lone(BOTH, settings=Settings(receive_bytes=10_000))
    alone.receive(message(bytes(6000)))
    assert not alone.link.full
    alone.receive(operation(packets.COMMIT), message(bytes(6000)))
    assert not alone.link.full
    alone.receive(operation(packets.COMMIT))
    assert alone.link.full
    alone.link.complete(1, 0, committed=True)
    assert not alone.link.full
    alone.receive(message(bytes(6000)))
    assert "neither committed nor rolled back" in alone.fails(message(bytes(6000)))


@pytest.mark.requirement("RL-R10")
def test_a_sender_leaves_no_more_undecided_than_one_window_over_all_channels() -> None:
    pair = LinkPair(BOTH, Settings(window_bytes=10_000))
    left = pair.left.link
    left.send(1, bytes(6000))
    assert left.writable(3, 3000)
    left.send(2, bytes(3000))
    assert not left.writable(3, 2000)
    with pytest.raises(LocalProtocolError, match="window_bytes"):
        left.send(3, bytes(2000))
    left.commit(1)
    assert pair.left.of(events.WRITABLE) == [(3,)]
    left.send(3, bytes(2000))
    left.rollback(2)
    left.commit(3)
    pair.settle()
    assert pair.right.of(events.COMMIT) == [(1, 0, 0), (3, 0, 0)]


@pytest.mark.requirement("RL-R10")
@pytest.mark.parametrize("parts", [(), (b"",), (b"x",) * 9, (bytes(5000),)], ids=len)
def test_what_fits_the_window_fits_a_receiver_of_the_same_size(parts: tuple[bytes, ...]) -> None:
    """Both count alike, so a transaction that the sender allows never ends the link."""
    pair = LinkPair(BOTH, Settings(window_bytes=10_000, receive_bytes=10_000))
    left, count = pair.left.link, 0
    while left.writable(1, sum(map(len, parts)), len(parts)):
        left.send(1, parts)
        count += 1
    with pytest.raises(LocalProtocolError, match=r"counts for \d+ bytes: wait until"):
        left.send(1, parts)
    pair.settle()
    assert left.held_bytes == pair.right.link.held_bytes > CHANNEL_COST + 10_000 - 5200
    left.commit(1)
    pair.settle()
    assert pair.right.of(events.COMMIT) == [(1, 0, count - 1)]
    pair.right.link.complete(1, count - 1, committed=True)
    pair.settle()
    assert left.writable(1, 9000)


@pytest.mark.requirement("RL-R9")
def test_what_is_rolled_back_counts_no_more_at_both_sides() -> None:
    pair = LinkPair(BOTH, Settings(window_bytes=10_000))
    left, right = pair.left.link, pair.right.link
    left.send(1, b"waits for its result")
    left.commit(1)
    for _ in range(10):
        left.send(1, bytes(8000))
        pair.settle()
        left.rollback(1)
        pair.settle()
    left.send(1, bytes(4000))
    left.rollback(1)  # before it comes
    pair.settle()
    assert left.held_bytes == right.held_bytes < 4000 + CHANNEL_COST
    right.complete(1, 0, committed=True)
    pair.settle()
    assert left.held_bytes == right.held_bytes == CHANNEL_COST


@pytest.mark.requirement("RL-R11")
def test_commits_that_a_cut_swallowed_come_again_one_by_one() -> None:
    alone = Lone(BOTH)
    for number in range(3):
        alone.link.send(1, b"x")
        alone.link.commit(1, number)
    alone.take_all()
    alone.link.disconnected()
    alone.link.connected(1.0, resumed=True)
    alone.take_all(1.0)
    resume = packets.encode_general(packets.RESUME)
    alone.receive(acknowledgement(packets.RECEIVED, 2), resume, now=1.0)
    assert alone.take_all(1.0) == b"".join(operation(packets.COMMIT, number) for number in range(3))


@pytest.mark.requirement("RL-R10")
def test_open_channels_and_what_has_come_of_a_message_are_held() -> None:
    pair = LinkPair()
    left, right = pair.left.link, pair.right.link
    for channel in range(10):
        left.send(channel, b"x")
    pair.settle()
    for channel in range(10):
        right.consume(channel, 0)
    pair.settle()
    assert left.held_bytes == right.held_bytes == 10 * CHANNEL_COST
    left.send(0, [b"small", bytes(10_000)])
    pair.move(0, 5000)
    coming = right.held_bytes - 10 * CHANNEL_COST
    assert 4500 < coming < 5500
    pair.cut()
    assert right.held_bytes == 10 * CHANNEL_COST
    pair.connect()
    pair.settle()
    right.consume(0, 1)
    for channel in range(10):
        left.close(channel)
    pair.settle()
    assert left.held_bytes == right.held_bytes == 0
