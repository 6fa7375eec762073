"""The model of ``_speedups.tracker``: plain sets of numbers, for small numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aqueduct.errors import LimitExceeded, LocalProtocolError, SequenceError

__all__ = ["ReceivedNumbers", "SentNumbers", "UnreliableReceived", "UnreliableSent"]

Pairs = list[tuple[int, int]]


def runs(numbers: Iterable[int]) -> Pairs:
    """Numbers as ascending half-open ranges."""
    pairs: Pairs = []
    for number in sorted(numbers):
        if pairs and pairs[-1][1] == number:
            pairs[-1] = (pairs[-1][0], number + 1)
        else:
            pairs.append((number, number + 1))
    return pairs


def alternate(varints: Sequence[int], start: int) -> tuple[list[int], list[int]]:
    """The numbers of the odd and of the even varints, counted on from ``start``."""
    sides: tuple[list[int], list[int]] = ([], [])
    for index, length in enumerate(varints):
        sides[index % 2].extend(range(start, start + length))
        start += length
    return sides


class SentNumbers:
    def __init__(self) -> None:
        self.next = 0
        self.acked: set[int] = set()

    @property
    def unacked(self) -> int:
        return self.next - len(self.acked)

    def take(self) -> int:
        self.next += 1
        return self.next - 1

    def ack(self, varints: Sequence[int]) -> Pairs:
        if sum(varints) > self.next:
            raise SequenceError("never sent")
        newly = set(alternate(varints, 0)[1]) - self.acked
        self.acked |= newly
        return runs(newly)


class ReceivedNumbers:
    def __init__(self, range_limit: int = 65536) -> None:
        self.range_limit = range_limit
        self.received: set[int] = set()
        self.to_ack: set[int] = set()

    def add(self, number: int) -> bool:
        if number in self.received:
            return False
        if len(runs(self.received | {number})) > self.range_limit:
            raise LimitExceeded("Limits.received_ranges")
        self.received.add(number)
        self.to_ack.add(number)
        return True

    @property
    def count(self) -> int:
        return len(self.received)

    @property
    def highest(self) -> int:
        return max(self.received, default=-1)

    @property
    def pending(self) -> int:
        return len(self.to_ack)

    def complete(self, total: int) -> bool:
        return set(range(total)) <= self.received

    def withdraw(self, number: int) -> bool:
        known = number in self.to_ack
        self.to_ack.discard(number)
        return known

    def take_ack(self) -> tuple[int, ...]:
        varints: list[int] = []
        at = 0
        for start, stop in runs(self.to_ack):
            varints += [start - at, stop - start]
            at = stop
        self.to_ack = set()
        return tuple(varints)


class UnreliableSent:
    def __init__(self) -> None:
        self.next = self.announced = self.settled = 0

    @property
    def unannounced(self) -> int:
        return self.next - self.announced

    @property
    def unsettled(self) -> int:
        return self.next - self.settled

    def take(self) -> int:
        self.next += 1
        return self.next - 1

    def take_announcement(self) -> int:
        count = self.unannounced
        self.announced = self.next
        return count

    def ack_nack(self, varints: Sequence[int]) -> tuple[Pairs, Pairs, int]:
        if self.settled + sum(varints) > self.next:
            raise SequenceError("never sent")
        acked, nacked = alternate(varints, self.settled)
        self.settled += sum(varints)
        return runs(acked), runs(nacked), len(nacked)


class UnreliableReceived:
    def __init__(self, range_limit: int = 65536) -> None:
        self.range_limit = range_limit
        self.announced = self.settled = self.refused = 0
        self.received: set[int] = set()

    def announce(self, count: int) -> int:
        self.announced += count
        return self.announced

    def add(self, number: int) -> bool:
        if number < self.settled or number in self.received:
            return False
        if len(runs(self.received | {number})) > self.range_limit:
            self.refused += 1
            return False
        self.received.add(number)
        return True

    def withdraw(self, number: int) -> bool:
        known = number in self.received
        self.received.discard(number)
        return known

    @property
    def highest(self) -> int:
        return max(self.received, default=-1)

    @property
    def all_settled(self) -> bool:
        return self.settled >= self.announced

    def take_ack_nack(self, upto: int | None = None) -> tuple[int, ...]:
        stop = self.announced if upto is None else upto
        if stop > max(self.announced, self.highest + 1):
            raise LocalProtocolError("not known to be sent")
        if stop <= self.settled:
            return ()
        varints = [0]
        acking = True
        for number in range(self.settled, stop):
            if (number in self.received) != acking:
                acking = not acking
                varints.append(0)
            varints[-1] += 1
        self.settled = stop
        self.received = {number for number in self.received if number >= stop}
        return tuple(varints)

    def take_last_acks(self) -> tuple[int, ...]:
        return self.take_ack_nack(self.highest + 1)
