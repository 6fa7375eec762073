"""``WatchedFiles`` and ``Reload``: when to read files again, and a thread that reads them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from aqueduct import forks

__all__ = ["Reload", "WatchedFiles"]

_COARSE: Final = 2.0
"""Seconds: a file that was changed so lately may change again without a new time."""


class WatchedFiles:
    """Files that are read again when one of them changes, or what a link on their path leads to.

    ``changed()``, then read all of them, then ``keep()`` if what they say is of use. Until then
    they count as changed. A file that changes between the two counts as changed, too.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.modes: list[int] = []
        """Of the files that are there, as ``changed`` saw them."""
        self.settled = False
        """Whether the last two calls of ``changed`` have seen the same: nobody writes them."""
        self._kept: object = None
        self._seen: object = None

    def changed(self) -> bool:
        """Whether the files are to be read. A missing file counts as changed.

        Raises ValueError for what is no file: to open a pipe might take for ever.
        """
        before, self._seen = self._seen, self._states()
        self.settled = self._seen == before
        return self._kept is None or self._seen != self._kept

    def keep(self) -> None:
        """What was read since ``changed`` is in use."""
        now = self._states()
        self._kept = now if now == self._seen and not self._fresh else None

    def _states(self) -> list[tuple[int, ...] | None]:
        states: list[tuple[int, ...] | None] = []
        self.modes, latest = [], 0.0
        for path in self.paths:
            try:
                found = os.stat(path)
            except OSError:  # who reads it says why
                states.append(None)
                continue
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{path} is no file")
            self.modes.append(found.st_mode)
            latest = max(latest, found.st_mtime, found.st_ctime)
            states.append(
                (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            )
        self._fresh = abs(time.time() - latest) < _COARSE
        return states


class Reload:
    """Runs ``work()`` in a daemon thread, once for all callers that wait at that time.

    The thread is no worker of the process's pool: a file system or a server that does not answer
    holds up nothing else. In a forked child nothing runs, and nobody waits.
    """

    def __init__(self, work: Callable[[], None], *, name: str, timeout: float) -> None:
        """``work`` should raise nothing. ``timeout``: seconds that a caller of ``run`` waits."""
        self._work = work
        self._name = name
        self._timeout = timeout
        self.left_behind()
        forks.own(self)

    def left_behind(self) -> None:
        """See forks.Inherited."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._running = False

    def begin(
        self, waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
    ) -> None:
        """Begins the work, unless it runs. ``waiter`` is told of its end.

        Raises RuntimeError if the system has no thread to give.
        """
        with self._lock:
            begins, self._running = not self._running, True
            if waiter is not None:
                self._waiting.append(waiter)
        if begins:
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            except BaseException:
                self._finish()
                raise

    async def run(self) -> None:
        """Begins the work, unless it runs, and returns at its end.

        Raises TimeoutError after ``timeout``; the work goes on. Raises RuntimeError if the system
        has no thread to give.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self.begin((loop, waiter))
        timer = loop.call_later(self._timeout, _expire, waiter, self._name, self._timeout)
        try:
            await waiter
        finally:
            timer.cancel()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._running = False
        for loop, waiter in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                loop.call_soon_threadsafe(_settle, waiter)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _expire(waiter: asyncio.Future[None], name: str, seconds: float) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError(f"{name} took longer than {seconds:g} s"))
