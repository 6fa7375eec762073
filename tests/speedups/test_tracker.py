"""Message numbers: against the models, the rules by name, many holes."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels import tracker
from aqueduct.errors import FrameError, LimitExceeded, LocalProtocolError, SequenceError
from tests.reference import tracker as model

HIGHEST = (1 << 64) - 1
numbers = st.integers(0, 40)
# Only the first may be zero (AQ-20, AQ-21).
lengths = st.builds(
    lambda first, rest: [first, *rest], st.integers(0, 6), st.lists(st.integers(1, 6), max_size=7)
)


def block(*varints: int) -> bytes:
    """RANGES as they are on the wire."""
    return codec.AckReliable(varints).block


def same(compiled: Any, reference: Any, name: str, *arguments: Any) -> Any:
    """Calls both; the same result, or an error of the same type."""
    given = [block(*found) if isinstance(found, (list, tuple)) else found for found in arguments]
    try:
        expected = getattr(reference, name)(*arguments)
    except (SequenceError, LimitExceeded, LocalProtocolError) as error:
        with pytest.raises(type(error)):
            getattr(compiled, name)(*given)
        return None
    assert getattr(compiled, name)(*given) == expected
    return expected


class Reliable(RuleBasedStateMachine):
    """A sender, a receiver, and acks between them, beside their models."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.sent_model = tracker.SentNumbers(), model.SentNumbers()
        self.got, self.got_model = tracker.ReceivedNumbers(6), model.ReceivedNumbers(6)

    @rule(count=st.integers(1, 6))
    def take(self, count: int) -> None:
        for _ in range(count):
            same(self.sent, self.sent_model, "take")

    @rule(varints=lengths.filter(lambda found: len(found) % 2 == 0))
    def ack(self, varints: list[int]) -> None:
        same(self.sent, self.sent_model, "ack", varints)

    @rule(number=numbers)
    def receive(self, number: int) -> None:
        same(self.got, self.got_model, "add", number)

    @rule(number=numbers)
    def withdraw(self, number: int) -> None:
        same(self.got, self.got_model, "withdraw", number)

    @rule()
    def take_ack(self) -> None:
        varints = same(self.got, self.got_model, "take_ack")
        if varints:
            frame = codec.encode_ack_reliable(varints)  # what is taken can be sent
            assert frame[0] == 8
            same(self.sent, self.sent_model, "ack", varints)

    @invariant()
    def equal(self) -> None:
        for name in ("next", "unacked"):
            assert getattr(self.sent, name) == getattr(self.sent_model, name)
        assert list(self.sent.acked) == model.runs(self.sent_model.acked)
        for name in ("count", "highest", "pending"):
            assert getattr(self.got, name) == getattr(self.got_model, name)
        assert list(self.got.ranges) == model.runs(self.got_model.received)
        for number in range(0, 45, 5):
            assert (number in self.sent.acked) == (number in self.sent_model.acked)
            assert self.got.complete(number) == self.got_model.complete(number)
            assert (number in self.got) == (number in self.got_model.received)


class Unreliable(RuleBasedStateMachine):
    """The same for the numbers of datagrams."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.sent_model = tracker.UnreliableSent(), model.UnreliableSent()
        self.got, self.got_model = tracker.UnreliableReceived(6), model.UnreliableReceived(6)

    @rule(count=st.integers(1, 6))
    def take(self, count: int) -> None:
        for _ in range(count):
            same(self.sent, self.sent_model, "take")

    @rule()
    def announce(self) -> None:
        count = same(self.sent, self.sent_model, "take_announcement")
        same(self.got, self.got_model, "announce", count)

    @precondition(lambda self: self.sent_model.next)
    @rule(back=numbers)
    def receive(self, back: int) -> None:
        number = max(0, self.sent_model.next - 1 - back)
        same(self.got, self.got_model, "add", number)

    @rule(number=numbers)
    def withdraw(self, number: int) -> None:
        same(self.got, self.got_model, "withdraw", number)

    @rule(upto=st.none() | numbers)
    def settle(self, upto: int | None) -> None:
        self.answer(same(self.got, self.got_model, "take_ack_nack", upto))

    @rule()
    def close(self) -> None:
        self.answer(same(self.got, self.got_model, "take_last_acks"))

    def answer(self, varints: tuple[int, ...] | None) -> None:
        if varints:
            assert codec.encode_ack_nack_unreliable(0, varints)[0] == 9
            same(self.sent, self.sent_model, "ack_nack", varints)
            assert self.sent.settled == self.got.settled

    @rule(varints=lengths)
    def settle_wrongly(self, varints: list[int]) -> None:
        if sum(varints) > self.sent_model.unsettled:
            same(self.sent, self.sent_model, "ack_nack", varints)

    @invariant()
    def equal(self) -> None:
        for name in ("next", "unannounced", "unsettled", "settled"):
            assert getattr(self.sent, name) == getattr(self.sent_model, name)
        for name in ("announced", "settled", "refused", "highest", "all_settled"):
            assert getattr(self.got, name) == getattr(self.got_model, name)
        assert list(self.got.ranges) == model.runs(self.got_model.received)


TestReliable = Reliable.TestCase
TestUnreliable = Unreliable.TestCase


@pytest.mark.requirement("AQ-R16")
def test_acks_of_numbers_never_sent_change_nothing() -> None:
    sent = tracker.SentNumbers()
    for _ in range(5):
        sent.take()
    with pytest.raises(SequenceError, match="reaches 6, but only 5 messages were sent"):
        sent.ack(block(0, 2, 1, 3))
    assert (sent.unacked, len(sent.acked)) == (5, 0)
    assert sent.ack(block(0, 2, 1, 1)) == [(0, 2), (3, 4)]
    assert sent.ack(block(0, 4)) == [(2, 3)]
    assert sent.ack(block(0, 4)) == []
    assert list(sent.acked) == [(0, 4)]
    with pytest.raises(ValueError, match="pairs of gap and range"):
        sent.ack(block(0))
    with pytest.raises(ValueError, match="end inside a varint"):
        sent.ack(b"\x00\x81")
    with pytest.raises(FrameError):
        sent.ack(bytes(9) + b"\xff" * 10)
    assert list(sent.acked) == [(0, 4)]


def peak_of(work: Callable[[], object]) -> int:
    """Bytes of memory that ``work`` takes at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.requirement("AQ-R16")
@pytest.mark.parametrize("sent", [3, 1 << 22])
def test_a_large_block_of_ranges_makes_no_numbers_of_python(sent: int) -> None:
    """Two million gaps and ranges: as numbers they would take a hundred megabytes and a second."""
    ranges = b"\x01" * (1 << 22)
    numbers = tracker.SentNumbers(sent=sent)

    def work() -> None:
        if sent == 3:
            with pytest.raises(SequenceError, match="reaches 4, but only 3 messages"):
                numbers.ack(ranges, told=False)
        else:
            assert numbers.ack(ranges, told=False) == []

    assert peak_of(work) < 1 << 20
    assert numbers.unacked == (3 if sent == 3 else 1 << 21)
    if sent == 3:
        return
    assert numbers.ack(ranges) == []  # known already
    assert peak_of(lambda: numbers.ack(ranges)) < 1 << 20


@pytest.mark.requirement("AQ-R15")
def test_a_large_block_about_datagrams_makes_no_numbers_of_python() -> None:
    ranges = b"\x01" * (1 << 22)
    numbers = tracker.UnreliableSent(sent=1 << 22)
    found: list[object] = []
    assert peak_of(lambda: found.append(numbers.ack_nack(ranges, told=False))) < 1 << 20
    assert found == [([], [], 1 << 21)]
    with pytest.raises(SequenceError, match="reaches 4194305, but only 4194304 messages"):
        numbers.ack_nack(ranges, told=False)
    assert numbers.unsettled == 0


@pytest.mark.requirement("AQ-R13")
@pytest.mark.parametrize("kind", [tracker.SentNumbers, tracker.UnreliableSent])
def test_the_numbers_end_below_the_highest(kind: Any) -> None:
    sent = kind(sent=HIGHEST - 1)
    assert sent.take() == HIGHEST - 1
    with pytest.raises(LocalProtocolError, match="all its message numbers"):
        sent.take()
    assert sent.next == HIGHEST
    for received in (tracker.ReceivedNumbers(), tracker.UnreliableReceived()):
        assert received.add(HIGHEST - 1)
        with pytest.raises(SequenceError, match=r"2\^64 - 1"):
            received.add(HIGHEST)


@pytest.mark.requirement("AQ-R31")
def test_holes_are_limited() -> None:
    received = tracker.ReceivedNumbers(range_limit=3)
    assert [received.add(number) for number in (0, 2, 4)] == [True] * 3
    with pytest.raises(LimitExceeded, match=r"more than 2 holes \(Limits.received_ranges\)"):
        received.add(6)
    assert (received.count, received.pending, received.highest, 6 in received) == (3, 3, 4, False)
    assert received.add(1)  # joins two, so there is room again
    assert received.add(6)
    assert received.take_ack() == (0, 3, 1, 1, 1, 1)


def test_a_datagram_too_many_counts_as_lost() -> None:
    received = tracker.UnreliableReceived(range_limit=2)
    assert [received.add(number) for number in (0, 2, 4)] == [True, True, False]
    assert received.refused == 1
    received.announce(5)
    assert received.take_ack_nack() == (1, 1, 1, 2)
    assert not received.add(4)  # it was nacked (AQ-39)


@pytest.mark.requirement("AQ-39")
def test_what_was_nacked_stays_lost() -> None:
    received = tracker.UnreliableReceived()
    received.announce(3)
    assert received.add(1)
    assert not received.add(1)
    assert received.take_ack_nack() == (0, 1, 1, 1)
    assert [received.add(number) for number in range(4)] == [False, False, False, True]


@pytest.mark.requirement("AQ-R15")
@pytest.mark.requirement("AQ-R22")
def test_acks_before_the_announcement() -> None:
    received = tracker.UnreliableReceived()
    received.add(1)
    received.add(4)
    with pytest.raises(LocalProtocolError, match="known to have sent 5 messages"):
        received.take_ack_nack(6)
    assert received.take_ack_nack() == ()
    assert received.take_last_acks() == (0, 1, 1, 2, 1)
    assert received.take_last_acks() == ()
    received.announce(7)
    assert not received.all_settled
    assert received.take_ack_nack() == (0, 2)
    assert received.all_settled


@pytest.mark.requirement("AQ-R17")
def test_announcements_above_64_bits() -> None:
    received = tracker.UnreliableReceived()
    assert received.announce(0) == 0
    assert received.announce(HIGHEST) == HIGHEST
    with pytest.raises(SequenceError, match=r"2\^64 - 1"):
        received.announce(1)
    assert received.announced == HIGHEST
    sent = tracker.UnreliableSent()
    sent.take()
    assert (sent.take_announcement(), sent.take_announcement()) == (1, 0)
    with pytest.raises(SequenceError, match="reaches 2, but only 1"):
        sent.ack_nack(block(1, 1))
    assert sent.ack_nack(block(0, 1)) == ([], [(0, 1)], 1)


@given(st.permutations(range(30)))
@pytest.mark.requirement("AQ-R16")
def test_any_order_is_acked_once(order: list[int]) -> None:
    received, sent = tracker.ReceivedNumbers(), tracker.SentNumbers(sent=30)
    acked: list[int] = []
    for index, number in enumerate(order):
        assert received.add(number)
        if index % 4 == 3 or index == 29:
            for pair in sent.ack(block(*received.take_ack())):
                acked += range(*pair)
    assert sorted(acked) == list(range(30))
    assert sent.unacked == 0
    assert received.complete(30)
    assert received.take_ack() == ()


def test_holes_cost_a_logarithm() -> None:
    """Every other number of 2^17, then the rest: each step looks at a few nodes only."""
    received = tracker.ReceivedNumbers()
    most = 4 * 1.4405 * math.log2((1 << 16) + 2)
    for number in [*range(0, 1 << 17, 2), *range(1, 1 << 17, 2)]:
        before = received.ranges._visits
        received.add(number)
        assert received.ranges._visits - before <= most
    assert list(received.ranges) == [(0, 1 << 17)]
    assert received.take_ack() == (0, 1 << 17)


def test_reprs() -> None:
    sent, received = tracker.SentNumbers(), tracker.ReceivedNumbers()
    sent.take()
    received.add(0)
    assert repr(sent) == "<SentNumbers: 1 sent, 1 not acknowledged>"
    assert repr(received) == "<ReceivedNumbers: 1 in 1 ranges, 1 to ack>"
    assert repr(tracker.UnreliableSent()) == "<UnreliableSent: 0 sent, 0 not settled>"
    assert repr(tracker.UnreliableReceived()) == (
        "<UnreliableReceived: 0 announced, 0 settled, 0 to ack>"
    )
