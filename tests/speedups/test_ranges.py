"""RangeSet: against its model, and how little of the tree an operation looks at."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aqueduct._speedups.base.ranges import RangeSet
from tests.reference.range_set import RangeSet as Model

TOP = 1 << 64
small = st.integers(0, 70)


def height_bound(ranges: int) -> float:
    """The height of an AVL tree is below this."""
    return 1.4405 * math.log2(ranges + 2)


class LikeTheModel(RuleBasedStateMachine):
    """The same operations on both, near 0, near 2^64, or far from both."""

    @initialize(base=st.sampled_from([0, 1000, TOP - 71, TOP // 2 - 35]))
    def begin(self, base: int) -> None:
        self.base = base
        self.compiled = RangeSet()
        self.model = Model()

    def span(self, first: int, size: int) -> tuple[int, int]:
        start = self.base + first
        return start, min(start + size + 1, self.base + 71)

    @rule(first=small, size=small)
    def add(self, first: int, size: int) -> None:
        span = self.span(first, size % 9)
        assert self.compiled.add(*span) == self.model.add(*span)

    @rule(first=small, size=small)
    def add_much(self, first: int, size: int) -> None:
        span = self.span(first, size)
        assert self.compiled.add(*span) == self.model.add(*span)

    @rule(first=small, size=small)
    def remove(self, first: int, size: int) -> None:
        span = self.span(first, size)
        assert self.compiled.remove(*span) == self.model.remove(*span)

    @rule(gap=st.integers(2, 5))
    def comb(self, gap: int) -> None:
        for first in range(0, 70, gap):
            span = self.span(first, 0)
            assert self.compiled.add(*span) == self.model.add(*span)

    @rule()
    def pop_first(self) -> None:
        assert self.compiled.pop_first() == self.model.pop_first()

    @rule()
    def clear(self) -> None:
        self.compiled.clear()
        self.model.clear()

    @rule()
    def go_on_with_a_copy(self) -> None:
        original, self.compiled = self.compiled, self.compiled.copy()
        assert original == self.compiled
        original.add(0, TOP)
        assert (original == self.compiled) == (self.model.count == TOP)

    @rule(first=small, size=small)
    def ask(self, first: int, size: int) -> None:
        start, stop = self.span(first, size)
        assert self.compiled.covers(start, stop) == self.model.covers(start, stop)
        assert self.compiled.missing(start, stop) == self.model.missing(start, stop)
        assert (start in self.compiled) == (start in self.model)

    @invariant()
    def same(self) -> None:
        assert list(self.compiled) == list(self.model)
        assert len(self.compiled) == len(self.model)
        assert self.compiled.count == self.model.count
        assert self.compiled.first() == self.model.first()
        assert self.compiled.last() == self.model.last()
        assert self.compiled._height <= height_bound(len(self.model))
        assert self.compiled == RangeSet(self.model)


TestLikeTheModel = LikeTheModel.TestCase


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000), st.integers(1, 60)), max_size=300))
def test_long_histories_like_the_model(steps: list[tuple[bool, int, int]]) -> None:
    compiled, model = RangeSet(), set[int]()
    for add, start, size in steps:
        span = set(range(start, start + size))
        if add:
            assert compiled.add(start, start + size) == len(span - model)
            model |= span
        else:
            assert compiled.remove(start, start + size) == len(span & model)
            model -= span
    assert [number for pair in compiled for number in range(*pair)] == sorted(model)
    assert compiled._height <= height_bound(len(compiled))


ORDERS = {
    "upwards": lambda numbers: numbers,
    "downwards": lambda numbers: numbers[::-1],
    "outwards": lambda numbers: [
        n for pair in zip(numbers[::-1], numbers, strict=True) for n in pair
    ],
    "at random": lambda numbers: random.Random(5).sample(numbers, len(numbers)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranges", [1 << 8, 1 << 16])
def test_an_operation_looks_at_few_nodes(order: str, ranges: int) -> None:
    """O(log n) with holes, counted in nodes, for every order that a peer can choose."""
    numbers = ORDERS[order](list(range(0, 4 * ranges, 4)))
    compiled = RangeSet()
    most = 4 * height_bound(ranges)

    def looks(operation: Any, *arguments: int) -> int:
        before = compiled._visits
        operation(*arguments)
        return compiled._visits - before

    assert max(looks(compiled.add, n, n + 1) for n in numbers) <= most
    assert len(compiled) == ranges
    assert compiled._height <= height_bound(ranges)
    asked = random.Random(1).sample(numbers, 200)
    for number in asked:
        assert looks(compiled.__contains__, number + 1) <= most
        assert looks(compiled.covers, number, number + 2) <= most
        assert looks(compiled.__contains__, number) <= most
        assert looks(compiled.missing, number, number + 4) <= most
        assert looks(compiled.add, number + 1, number + 4) <= most  # joins two ranges
        assert looks(compiled.remove, number + 1, number + 4) <= most  # splits them again
    assert len(compiled) == ranges
    assert max(looks(compiled.remove, n, n + 1) for n in numbers) <= most
    assert (len(compiled), compiled.count) == (0, 0)


def test_swallowing_many_ranges_costs_each_once() -> None:
    compiled = RangeSet()
    for number in range(0, 1 << 16, 2):
        compiled.add(number, number + 1)
    ranges, before = len(compiled), compiled._visits
    assert compiled.add(0, 1 << 16) == 1 << 15
    assert compiled._visits - before <= 3 * ranges * height_bound(ranges)
    assert list(compiled) == [(0, 1 << 16)]


def test_all_numbers() -> None:
    compiled = RangeSet()
    assert compiled.add(0, TOP) == TOP
    assert (compiled.count, list(compiled)) == (TOP, [(0, TOP)])
    assert compiled.add(5, 9) == 0
    assert compiled.covers(0, TOP)
    assert compiled.missing(0, TOP) == []
    assert TOP - 1 in compiled
    assert TOP not in compiled
    assert -1 not in compiled
    assert compiled.remove(TOP - 1, TOP) == 1
    assert compiled.count == TOP - 1
    assert compiled.add(TOP - 1, TOP) == 1
    assert compiled.count == TOP
    assert compiled.remove(0, TOP) == TOP
    assert (compiled.count, len(compiled)) == (0, 0)
    assert compiled.missing(0, TOP) == [(0, TOP)]
    assert compiled.remove(0, TOP) == 0


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (5, 5), (6, 5), (-1, 5), (0, TOP + 1), (TOP, TOP + 1), (-2, -1)]
)
@pytest.mark.parametrize("name", ["add", "remove", "covers", "missing"])
def test_ranges_that_cannot_be(name: str, start: int, stop: int) -> None:
    compiled = RangeSet([(1, 3)])
    with pytest.raises(ValueError, match=r"is empty|is not a range"):
        getattr(compiled, name)(start, stop)
    assert list(compiled) == [(1, 3)]


def test_values() -> None:
    compiled = RangeSet([(5, 7), (1, 3), (3, 4)])
    assert list(compiled) == [(1, 4), (5, 7)]
    assert repr(compiled) == "<RangeSet [1, 4), [5, 7)>"
    assert repr(RangeSet()) == "<RangeSet, empty>"
    assert repr(RangeSet((n, n + 1) for n in range(0, 20, 2))).endswith("[14, 15), ... 2 more>")
    assert compiled != RangeSet([(1, 4)])
    assert compiled != RangeSet([(1, 5), (6, 7)])
    assert compiled != [(1, 4), (5, 7)]
    assert bool(compiled)
    assert not RangeSet()
    with pytest.raises(TypeError):
        hash(compiled)
    with pytest.raises(TypeError):
        compiled.add(0.5, 1)  # type: ignore[arg-type]


def test_changes_during_iteration_are_seen_if_ahead() -> None:
    compiled = RangeSet([(0, 1), (10, 11), (20, 21)])
    seen = []
    for pair in compiled:
        seen.append(pair)
        if pair == (0, 1):
            compiled.remove(10, 11)
            compiled.add(30, 31)
    assert seen == [(0, 1), (20, 21), (30, 31)]
