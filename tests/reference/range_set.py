"""The model of ``_speedups.ranges``: a sorted list of half-open ranges, rebuilt on each change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["RangeSet"]

TOP = 1 << 64


class RangeSet:
    """Half-open ranges of numbers below 2^64. Every operation is linear."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges: list[tuple[int, int]] = []
        for start, stop in ranges:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> int:
        before = self.count
        check(start, stop)
        low, high, others = start, stop, []
        for left, right in self.ranges:
            if left <= stop and start <= right:  # touching is enough
                low, high = min(low, left), max(high, right)
            else:
                others.append((left, right))
        self.ranges = sorted([*others, (low, high)])
        return self.count - before

    def remove(self, start: int, stop: int) -> int:
        before = self.count
        check(start, stop)
        left = [(low, min(high, start)) for low, high in self.ranges]
        right = [(max(low, stop), high) for low, high in self.ranges]
        self.ranges = sorted({(low, high) for low, high in left + right if low < high})
        return before - self.count

    def pop_first(self) -> tuple[int, int] | None:
        return self.ranges.pop(0) if self.ranges else None

    def clear(self) -> None:
        self.ranges = []

    def __contains__(self, number: int) -> bool:
        return any(low <= number < high for low, high in self.ranges)

    def __len__(self) -> int:
        return len(self.ranges)

    @property
    def count(self) -> int:
        return sum(high - low for low, high in self.ranges)

    def covers(self, start: int, stop: int) -> bool:
        return not self.missing(start, stop)

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        check(start, stop)
        rest = RangeSet([(start, stop)])
        for low, high in self.ranges:
            rest.remove(low, high)
        return rest.ranges

    def first(self) -> tuple[int, int] | None:
        return self.ranges[0] if self.ranges else None

    def last(self) -> tuple[int, int] | None:
        return self.ranges[-1] if self.ranges else None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.ranges)


def check(start: int, stop: int) -> None:
    if not 0 <= start < stop <= TOP:
        raise ValueError(f"[{start}, {stop}) is not a range within [0, 2^64)")
