"""What tasks wait for: a future that steps its task where it is woken.

An asyncio Future that is set has its task wait for another turn of the event loop, which is several
times the work of what most messages lead to. So what wakes a task within a turn of the loop, and
has nothing else to do behind it, steps the task itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any, Protocol

__all__ = ["Stepper", "Waiter", "Waiting"]


class Waiter:
    """What one task waits for: ``await`` returns once it is ``woken``.

    It is as much of a future as tasks use. Wake it by ``step`` or ``step_soon``, on its loop.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_callback",
        "_cancelled",
        "_context",
        "_loop",
        "woken",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._callback: Callable[[Any], object] | None = None
        self._context: Context | None = None
        self._cancelled: asyncio.CancelledError | None = None
        self.woken = False
        """Whether the task may go on. Set it before a step that is somebody else's to make."""

    def step(self) -> None:
        """Wakes the task, and steps it at once unless some task is at work already."""
        self.woken = True
        callback = self._callback
        if callback is None:
            return
        if asyncio.current_task(self._loop) is not None:
            self.step_soon()
            return
        self._callback = None
        context = self._context
        assert context is not None
        try:
            context.run(callback, self)
        except RuntimeError:  # who wakes it runs in the very context of the task
            self._loop.call_soon(callback, self, context=context)

    def step_soon(self) -> None:
        """Wakes the task; it goes on in the next turn of the loop."""
        self.woken = True
        callback, self._callback = self._callback, None
        if callback is not None:
            self._loop.call_soon(callback, self, context=self._context)

    def __await__(self) -> Generator[Any, None, None]:
        while not self.woken:
            self._asyncio_future_blocking = True
            yield self

    # What a task asks of a future

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the task."""
        return self._loop

    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: Context | None = None
    ) -> None:
        """The task begins to wait."""
        if self.woken:
            self._loop.call_soon(callback, self, context=context)
        else:
            self._callback, self._context = callback, context

    def cancel(self, msg: object = None) -> bool:
        """The task is cancelled while it waits. False: it is about to go on."""
        callback, self._callback = self._callback, None
        if callback is None:
            return False
        self._cancelled = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        self._loop.call_soon(callback, self, context=self._context)
        return True

    def result(self) -> None:
        """What the task wakes with."""
        cancelled, self._cancelled = self._cancelled, None
        if cancelled is not None:
            raise cancelled


class Stepper(Protocol):
    """Who steps tasks when there is nothing else to do: the Pump of a connection."""

    def step(self, waiter: Waiter) -> None:
        """Has the task of ``waiter`` go on: at the end of what is being done, or else soon."""


class Waiting:
    """Tasks that wait for a handle to change."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: list[Waiter] | None = None

    def wake(self, stepper: Stepper | None = None) -> None:
        """Lets all of them look again: when ``stepper`` has them step, or soon."""
        waiters, self.waiters = self.waiters, None
        for waiter in waiters or ():
            if stepper is None:
                waiter.step_soon()
            else:
                stepper.step(waiter)

    async def wait(self) -> None:
        """Returns with the next ``wake``."""
        waiter = Waiter(asyncio.get_running_loop())
        if self.waiters is None:
            self.waiters = [waiter]
        else:
            self.waiters.append(waiter)
        try:
            await waiter
        finally:
            if (
                self.waiters and waiter in self.waiters
            ):  # given up: nothing may have changed for a long time
                self.waiters.remove(waiter)
