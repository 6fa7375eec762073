"""What misbehaving peers do, in either dialect, and what it costs the core: memory and work."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from aqueduct.config import Calls, Config, Flow, Limits

__all__ = ["SMALL", "Cost", "KiB", "MiB", "Trick", "Tricks", "cost_of"]

KiB, MiB = 1 << 10, 1 << 20

SMALL = Config(
    limits=Limits(
        frame_bytes=1 * MiB,
        header_bytes=16 * KiB,
        block_bytes=256 * KiB,
        channels=500,
        received_ranges=200,
        destroyed_ranges=200,
        unacknowledged=500,
    ),
    flow=Flow(
        receive_budget=4 * MiB,
        channel_receive_bytes=1 * MiB,
        initial_window=16 * KiB,
        read_ahead=256 * KiB,
        connection_high_water=1 * MiB,
        channel_high_water=512 * KiB,
        streams=64,
    ),
    calls=Calls(fragment_bytes=256 * KiB),
)
"""Limits small enough to be reached at once; every bound of a trick is made of them."""


@dataclass
class Trick:
    """One way to misbehave."""

    play: Callable[[Any, int], None]
    """Given an attacker and a size."""
    size: int
    memory: int
    """The bound, whatever the size."""
    code: int | None = None
    """The close code, in the larger of both sizes."""
    config: Config = SMALL
    to: str = "server"
    """What the core under attack is."""
    options: dict[str, Any] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()

    def attack(self, make: Callable[[], Any]) -> Any:
        """Plays it in two sizes on what ``make`` makes, and checks what it costs.

        Returns the attacker of the larger size.
        """
        small, large = (cost_of(self.play, make, size) for size in (self.size, 2 * self.size))
        for cost in (small, large):
            assert cost.peak <= self.memory, "more memory than the bound"
        # A constant for what is done once; beyond it work grows as the trick does, or less.
        assert large.calls <= 2.3 * small.calls + 500, "more work than the trick's own"
        return large.attacker


class Tricks(dict[str, Trick]):
    """The tricks of one dialect, by name."""

    def add(self, name: str, *requirements: str, **settings: Any) -> Callable[[Any], Any]:
        """Decorates what plays a trick; ``settings`` are fields of Trick."""

        def added(play: Any) -> Any:
            self[name] = Trick(play, requirements=requirements, **settings)
            return play

        return added

    def cases(self) -> list[Any]:
        """The names for a test, with the requirements of each."""
        return [
            pytest.param(
                name, id=name, marks=[pytest.mark.requirement(r) for r in one.requirements]
            )
            for name, one in self.items()
        ]


@dataclass
class Cost:
    """What a trick cost the core, and the attacker's end of it."""

    attacker: Any
    peak: int
    """The most memory that was taken meanwhile, bytes."""
    kept: int
    """What of it stayed."""
    calls: int
    """Calls of functions, in Python and in the compiled modules."""


def cost_of(play: Callable[[Any, int], None], make: Callable[[], Any], n: int) -> Cost:
    """Plays a trick of size ``n``, twice: once for the memory, once for the work."""
    attacker = make()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        play(attacker, n)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1

    again = make()
    sys.setprofile(count)
    try:
        play(again, n)
    finally:
        sys.setprofile(None)
    return Cost(attacker, peak - before, after - before, calls)
