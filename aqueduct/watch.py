"""What keeps a call from waiting for ever, and what wakes its one task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Signal", "Watch"]


class Signal:
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


class Watch:
    """The deadline of one call: its own in seconds, or else that of its progress.

    ``moved()`` says how far the call has come, in any value that compares. If it says the same
    for ``progress`` seconds (noticed at most a quarter late), or if ``deadline`` seconds are over,
    ``expired(seconds)`` is called, once.
    """

    __slots__ = ("_expired", "_handle", "_last", "_loop", "_moved", "_progress", "_since")

    def __init__(
        self,
        *,
        deadline: float | None,
        progress: float,
        moved: Callable[[], object],
        expired: Callable[[float], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._moved: Callable[[], object] | None = moved
        self._expired: Callable[[float], None] | None = expired
        self._progress = progress
        self._since = self._loop.time()
        self._last = moved()
        self._handle: asyncio.TimerHandle | None
        if deadline is not None:
            self._handle = self._loop.call_later(deadline, self._late, deadline)
        else:
            self._handle = self._loop.call_later(progress / 4, self._look)

    def cancel(self) -> None:
        """Nothing is called from here on."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._moved = self._expired = None

    def _look(self) -> None:
        assert self._moved is not None
        now, moved = self._loop.time(), self._moved()
        if moved != self._last:
            self._last, self._since = moved, now
        elif now - self._since >= self._progress:
            self._late(self._progress)
            return
        self._handle = self._loop.call_later(self._progress / 4, self._look)

    def _late(self, seconds: float) -> None:
        expired = self._expired
        assert expired is not None
        self.cancel()
        expired(seconds)
