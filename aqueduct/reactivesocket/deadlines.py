"""Deadlines: one that says what was waited for, and one timer for however many as long ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from types import TracebackType
from typing import Protocol, Self

__all__ = ["RequestDeadlines", "Timed", "WaitDeadline"]


class WaitDeadline:
    """The deadline of one wait, as ``asyncio.timeout``, whose TimeoutError says what was missing.

    ``missing`` may change meanwhile. ``setting``: where the time comes from.
    """

    __slots__ = ("_seconds", "_setting", "_timeout", "missing")

    def __init__(self, seconds: float, missing: str, setting: str = "") -> None:
        self.missing = missing
        self._seconds = seconds
        self._setting = setting
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            setting = self._setting and f" ({self._setting})"
            raise TimeoutError(f"{self.missing} within {self._seconds:g} s{setting}") from late


class Timed(Protocol):
    """Something that waits."""

    def expire(self) -> None:
        """Its deadline is over."""


class RequestDeadlines:
    """Whoever waits for an answer, each for the same time.

    A timer for each of them would cost more than the answer: most are never due.
    """

    __slots__ = ("_loop", "_timer", "_waiting", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[Timed, float] = OrderedDict()
        """When each is due. All wait as long, so the first is due first."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiting: Timed) -> None:
        """It waits from now on."""
        due = self._waiting[waiting] = self._loop.time() + self.seconds
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._timed)

    def remove(self, waiting: Timed) -> None:
        """It waits no more."""
        self._waiting.pop(waiting, None)

    def stop(self) -> None:
        """The connection is over, which tells them all."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._waiting:
            waiting, due = next(iter(self._waiting.items()))
            if due > now:
                self._timer = self._loop.call_at(due, self._timed)
                break
            del self._waiting[waiting]
            waiting.expire()
