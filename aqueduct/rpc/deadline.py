"""What keeps a call from waiting for ever, and what wakes its one task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from aqueduct.carriers.clock import clock_of

__all__ = ["Deadline", "ProgressTimer", "ThreadWakeup", "Wakeup", "WatchedCall"]


class Wakeup:
    """Wakes one waiting task; set before the wait, it is not lost. For one event loop."""

    __slots__ = ("_future", "_set")

    def __init__(self) -> None:
        self._set = False
        self._future: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wakes the task that waits, or the next that will."""
        self._set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        """Returns once ``set`` was called since the last wait."""
        if not self._set:
            self._future = asyncio.get_running_loop().create_future()
            try:
                await self._future
            finally:
                self._future = None
        self._set = False


class ThreadWakeup(Wakeup):
    """A Wakeup of the running event loop that threads may set."""

    __slots__ = ("_coming", "_loop")

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._coming = False

    def set_threadsafe(self) -> bool:
        """``set`` in the next turn of the loop. False: the loop is closed."""
        if not self._coming:
            self._coming = True
            try:
                self._loop.call_soon_threadsafe(self._arrive)
            except RuntimeError:
                return False
        return True

    def _arrive(self) -> None:
        self._coming = False
        self.set()


class Deadline:
    """The deadline of one call: its own in seconds, or else that of its progress.

    ``moved()`` says how far the call has come, in any value that compares. If it says the same
    for ``progress`` seconds (noticed at most a quarter late), or if ``deadline`` seconds are over,
    ``expired(seconds)`` is called, once.
    """

    __slots__ = ("_expired", "_handle", "_last", "_moved", "_since", "_watches")

    def __init__(
        self,
        watches: ProgressTimer,
        *,
        deadline: float | None,
        moved: Callable[[], object],
        expired: Callable[[float], None],
    ) -> None:
        self._watches = watches
        self._moved: Callable[[], object] | None = moved
        self._expired: Callable[[float], None] | None = expired
        self._handle: asyncio.TimerHandle | None = None
        loop = watches.loop
        if deadline is not None:
            self._handle = loop.call_later(deadline, self._late, deadline)
            return
        self._since = watches.time()
        self._last = moved()
        watches.add(self)

    def cancel(self) -> None:
        """Nothing is called from here on."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        elif self._moved is not None:
            self._watches.discard(self)
        self._moved = self._expired = None

    def look(self, now: float, progress: float) -> None:
        """What ProgressTimer calls now and then."""
        if self._moved is None:
            return
        moved = self._moved()
        if moved != self._last:
            self._last, self._since = moved, now
        elif now - self._since >= progress:
            self._late(progress)

    def _late(self, seconds: float) -> None:
        expired = self._expired
        assert expired is not None
        self.cancel()
        expired(seconds)


class WatchedCall(Protocol):
    """What may take no longer than its progress allows."""

    def look(self, now: float, progress: float) -> None:
        """Called now and then, at least four times in ``progress`` seconds."""


class ProgressTimer:
    """The calls of one client or service that are watched for progress: one timer for all."""

    __slots__ = ("_held", "_timer", "asking", "asking_bytes", "loop", "progress", "time")

    def __init__(self, loop: asyncio.AbstractEventLoop, progress: float) -> None:
        self.loop = loop
        self.time = clock_of(loop)
        self.progress = progress
        """Seconds without any movement that a call may take."""
        self.asking = 0
        """Calls of one batch of a client that are under way."""
        self.asking_bytes = 0
        """Bytes of their batches, encoded."""
        self._held: dict[WatchedCall, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watch: WatchedCall) -> None:
        """Looks at it from now on."""
        self._held[watch] = None
        if self._timer is None:
            self._timer = self.loop.call_later(self.progress / 4, self._look)

    def discard(self, watch: WatchedCall) -> None:
        """Looks at it no more."""
        self._held.pop(watch, None)

    def close(self) -> None:
        """The timer ends; nothing is watched any more."""
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now = self.time()
        for watch in tuple(self._held):
            watch.look(now, self.progress)
        if self._held and self._timer is None:
            self._timer = self.loop.call_later(self.progress / 4, self._look)
