"""``Reload``: work in a thread, shared by all callers that wait for it, on any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from aqueduct import forks

__all__ = ["Reload"]


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
