"""Whose turn it is: the calls of one handler, of which so many run at once, in a fair order.

A *place* is what a call needs to run: a generator has one for the whole call, a function of one
batch for each batch. Peers take turns, and so do the calls of each. Nothing here knows event loops
or threads: the owner holds a lock, and tells the time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar

__all__ = ["Fit", "Line", "Turns"]

T = TypeVar("T")


class Fit(Enum):
    """What becomes of an item that may join a run."""

    TAKEN = "taken"
    PASSED = "passed over"
    FULL = "not wanted, nor any other"


class Line(Generic[T]):
    """What one call has waiting, in order."""

    __slots__ = (
        "active",
        "begun",
        "concurrency",
        "gone",
        "items",
        "owner",
        "peer",
        "queued",
        "since",
    )

    def __init__(self, peer: object, concurrency: int = 1, owner: Any = None) -> None:
        """``concurrency``: how many runs it may be part of at once. ``owner``: for its owner."""
        self.peer = peer
        self.concurrency = concurrency
        self.owner = owner
        self.items: deque[T] = deque()
        self.active = 0
        """Runs that it is part of now."""
        self.begun = False
        """Whether it was part of one."""
        self.gone = False
        """Whether its call is over."""
        self.queued = False
        """Whether it waits for a turn."""
        self.since: float | None = None
        """Since when it has nothing running, and something waiting; None: it does not wait."""


class Turns(Generic[T]):
    """The lines of all calls of a handler. ``places``: runs at once."""

    def __init__(self, places: int, queue: int) -> None:
        """``queue``: calls that may wait before they have run."""
        self.places = places
        self.queue = queue
        self.running = 0
        """Places that are taken."""
        self.newcomers = 0
        """Calls that wait and have not run yet."""
        self.waiting: OrderedDict[Line[T], None] = OrderedDict()
        """Calls that wait, those that waited longest first."""
        # Queues of which any member can leave at no cost, as a deque has it not.
        self._order: OrderedDict[object, OrderedDict[Line[T], None]] = OrderedDict()
        self._new: dict[object, OrderedDict[Line[T], None]] = {}

    @property
    def full(self) -> bool:
        """Whether a call that has not run yet finds neither a place nor room to wait."""
        return self.running >= self.places and self.newcomers >= self.queue

    def displaced(self, peer: object) -> Line[T] | None:
        """Whose room to wait a call of ``peer`` may have; None: it is its own peer's fault.

        The newest call of the peer with the most that wait, if they are more than those of ``peer``
        will be.
        """
        if not self._new:
            return None
        crowd = max(self._new.values(), key=len)
        if len(crowd) <= len(self._new.get(peer, ())) + 1:
            return None
        return next(reversed(crowd))

    def add(self, line: Line[T], item: T, now: float) -> None:
        """``item`` waits for its turn."""
        line.items.append(item)
        self._settle(line, now)

    def take(self, now: float, choose: Callable[[T], Fit] | None = None) -> list[tuple[Line[T], T]]:
        """The next run, with a place; an empty list: nothing waits, or no place is free.

        It is one item, or with ``choose`` all that this takes, asked in turn. It takes the first.
        """
        found: list[tuple[Line[T], T]] = []
        if self.running >= self.places:
            return found
        passed: list[Line[T]] = []
        while self._order:
            peer = next(iter(self._order))
            line = next(iter(self._order[peer]))
            fit = Fit.TAKEN if choose is None else choose(line.items[0])
            if fit is Fit.FULL:
                break
            self._unqueue(line)
            if fit is Fit.PASSED:
                passed.append(line)
                continue
            found.append((line, line.items.popleft()))
            if peer in self._order:
                self._order.move_to_end(peer)
            if choose is None:
                break
            if line.items:
                self._queue(line)
        for line in reversed(passed):  # they keep their turn
            self._queue(line)
            self._order[line.peer].move_to_end(line, last=False)
            self._order.move_to_end(line.peer, last=False)
        if found:
            self.running += 1
            for line in dict.fromkeys(line for line, _ in found):
                line.active += 1
                self._forget(line)
                line.begun = True
                self._settle(line, now)
        return found

    def done(self, lines: list[Line[T]], now: float) -> None:
        """A run of these lines, each named once, has ended."""
        self.running -= 1
        for line in lines:
            line.active -= 1
            self._settle(line, now)

    def leave(self, line: Line[T]) -> None:
        """The call is over: what it has waiting is dropped."""
        line.gone = True
        line.items.clear()
        self._settle(line, 0.0)

    # Within

    def _settle(self, line: Line[T], now: float) -> None:
        """Brings the line where it belongs."""
        ready = bool(line.items) and line.active < line.concurrency
        if ready and not line.queued:
            self._queue(line)
        elif line.queued and not ready:
            self._unqueue(line)
        if not line.items or line.active:
            self._forget(line)
        elif line.since is None:
            line.since = now
            self.waiting[line] = None
            if not line.begun:
                self._new.setdefault(line.peer, OrderedDict())[line] = None
                self.newcomers += 1

    def _forget(self, line: Line[T]) -> None:
        """It does not wait any more."""
        if line.since is None:
            return
        line.since = None
        del self.waiting[line]
        if not line.begun:
            self.newcomers -= 1
            found = self._new[line.peer]
            del found[line]
            if not found:
                del self._new[line.peer]

    def _queue(self, line: Line[T]) -> None:
        self._order.setdefault(line.peer, OrderedDict())[line] = None
        line.queued = True

    def _unqueue(self, line: Line[T]) -> None:
        found = self._order[line.peer]
        del found[line]
        line.queued = False
        if not found:
            del self._order[line.peer]
