"""Looking for input that is due within moments, where to sleep for it would cost more.

A process that sleeps until its socket is readable is woken with cold caches, by way of the kernel's
scheduler: that takes longer than the work on a small call. So a connection whose user expects input
has the event loop look for it, for at most ``ByteStream.poll`` seconds, and let others have the
processor between two looks.

Nothing is looked for unless it came in time of late, nor while others want the processor. Who is to
send the input may be one of them, woken on the processor of who waits for it: as long as both have
work, the kernel soon gives each one of its own. What is looked for in vain is counted: all in all
that is at most a few times more often than what came in time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

from aqueduct._speedups.io.busy_poll import look

__all__ = ["Poller", "ReplyExpectation", "poller_of"]

_TRIES: Final = 2  # looks in vain before there has been any in time
_MOST_TRIES: Final = 4
_LOOKING: Final = 50e-6  # seconds, in one turn of the loop
_YIELDED: Final = 100e-6  # seconds without the processor: another process has work for it
_REST: Final = 0.05  # seconds in which nothing is looked for after that; each time many more
_MOST_REST: Final = 2.0  # seconds; a little less after each look that was not in vain
_SOCKETS: Final = 2  # looked at one by one; of more, the loop's own look will do


class ReplyExpectation:
    """The input of one connection, where it is expected within ``limit`` seconds."""

    __slots__ = ("_limit", "_poller", "_since", "_tries", "fd", "read", "until")

    def __init__(self, poller: Poller, fd: int, limit: float, read: Callable[[], None]) -> None:
        self._poller = poller
        self._limit = limit
        self._tries = _TRIES
        self._since = -1.0
        """Since when it is expected; below zero: it is not."""
        self.until = 0.0
        """How long it is looked for."""
        self.read = read
        """Reads what is there."""
        self.fd = fd
        """Where it comes."""

    def expect(self, now: float) -> None:
        """Input is due."""
        self._since = now
        if self._tries and now >= self._poller.rests:
            self.until = now + self._limit
            self._poller.add(self)

    def arrived(self, now: float) -> None:
        """There was input."""
        since = self._since
        if since >= 0:
            self._since = -1.0
            self._poller.discard(self)
            if now - since <= self._limit and self._tries < _MOST_TRIES:
                self._tries += 1

    def missed(self) -> None:
        """It did not come in time."""
        self._tries -= 1
        self._poller.discard(self)

    def forget(self) -> None:
        """Nothing is to be looked for; nothing is learnt from what comes."""
        self._since = -1.0
        self._poller.discard(self)


class Poller:
    """Looks for the input of the connections of one event loop that expect some."""

    __slots__ = (
        "__weakref__",
        "_fresh",
        "_lookouts",
        "_rest",
        "_scheduled",
        "rests",
        "turns",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._lookouts: dict[ReplyExpectation, None] = {}
        """The one that is given up first comes first."""
        self._scheduled = False
        self._fresh = False
        """One was added since the last turn: others have work to do first."""
        self._rest = _REST
        self.rests = 0.0
        """Until when nothing is looked for: others want the processor."""
        self.turns = 0
        """Of the loop, that did not let it sleep."""

    @property
    def busy(self) -> bool:
        """Whether anything is looked for."""
        return bool(self._lookouts)

    def add(self, lookout: ReplyExpectation) -> None:
        """Looks for its input, beside what else the loop has to do."""
        self._lookouts.pop(lookout, None)
        self._lookouts[lookout] = None
        self._fresh = True
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def discard(self, lookout: ReplyExpectation) -> None:
        """Looks for its input no more."""
        self._lookouts.pop(lookout, None)

    def _turn(self) -> None:
        self._scheduled = False
        lookouts = self._lookouts
        if not lookouts:
            return
        self.turns += 1
        loop = asyncio.get_running_loop()
        now = loop.time()
        while lookouts:
            first = next(iter(lookouts))
            if first.until > now:
                break
            first.missed()
        if self._fresh:
            self._fresh = False
        elif len(lookouts) <= _SOCKETS:
            self._look(loop)
        else:
            os.sched_yield()
            later = loop.time()
            if later - now > _YIELDED:
                self.gave_way(later)
        if lookouts and not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._turn)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Looks a few times, then it is others' turn."""
        found = look([lookout.fd for lookout in self._lookouts], _LOOKING, _YIELDED)
        if found == -2:
            self.gave_way(loop.time())
        elif found >= 0:
            self.found()
            for lookout in self._lookouts:
                if lookout.fd == found:
                    lookout.read()
                    return

    def found(self) -> None:
        """A look was not in vain."""
        self._rest = max(self._rest * 0.95, _REST)

    def gave_way(self, now: float) -> None:
        """Another process took the processor. It may have it for a while.

        To give it away is dear then: processes that slept run before this one has another turn.
        """
        self.rests = now + self._rest
        self._rest = min(4 * self._rest, _MOST_REST)
        for lookout in tuple(self._lookouts):
            lookout.forget()


_pollers: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, Poller]] = WeakKeyDictionary()


def poller_of(loop: asyncio.AbstractEventLoop) -> Poller:
    """The one poller of a loop, whatever connections there are."""
    poller = _pollers.get(loop)
    if poller is None:
        poller = _pollers[loop] = Poller(loop)
    return poller
