"""A question and its answer: the quick way to one message back, on both sides.

What the handles of a oneshot channel give as well, with three objects and a turn of the event loop
less: the task that waits is stepped where the answer is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aqueduct.protocol.channels.receiving import ReceiverHalf
    from aqueduct.protocol.channels.sending import SenderHalf

__all__ = ["Asked", "Replying"]


class Asked:
    """What one task waits for: ``await`` returns with the next ``wake``, or raises ``failure``.

    It is as much of a future as tasks use. ``Connection.ask`` gives it its channel; until
    ``Connection.forget`` the channel wakes it.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_callback",
        "_cancelled",
        "_context",
        "_loop",
        "_woken",
        "failure",
        "half",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._callback: Callable[[Any], object] | None = None
        self._context: Context | None = None
        self._woken = False
        self._cancelled: asyncio.CancelledError | None = None
        self.failure: Exception | None = None
        """What waiting raises from here on."""
        self.half: ReceiverHalf | None = None
        """Where the answer comes; None before it is asked for."""

    def __call__(self) -> Asked:
        """A half keeps a weak reference to its handle, and this in the place of one."""
        return self

    def wake(self) -> None:
        """Something may have changed. Steps the task that waits, if none is at work."""
        self._woken = True
        callback = self._callback
        if callback is None:
            return
        self._callback = None
        context = self._context
        assert context is not None
        if asyncio.current_task(self._loop) is None:
            try:
                context.run(callback, self)
            except RuntimeError:  # who wakes it runs in the very context of the task
                self._loop.call_soon(callback, self, context=context)
        else:
            self._loop.call_soon(callback, self, context=context)

    _changed = wake

    def fail(self, error: Exception) -> None:
        """Waiting raises this, now or when it begins."""
        self.failure = error
        self.wake()

    def __await__(self) -> Generator[Any, None, None]:
        while not self._woken and self.failure is None:
            self._asyncio_future_blocking = True
            yield self
        self._woken = False
        if self.failure is not None:
            raise self.failure

    # What a task asks of a future

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the task."""
        return self._loop

    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: Context | None = None
    ) -> None:
        """The task begins to wait."""
        if self._woken:
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


class Replying:
    """Where the answer to a question goes: ``Connection.replying`` gives it, ``reply`` uses it.

    Or ``Connection.sender`` makes a Sender of it.
    """

    __slots__ = ("half", "on_change")

    def __init__(self, half: SenderHalf) -> None:
        self.half = half
        self.on_change: Callable[[], None] | None = None
        """Called on the loop when the channel ended; as that of a Sender."""
        half.handle = self

    def __call__(self) -> Replying:
        """As of Asked."""
        return self

    @property
    def error(self) -> Exception | None:
        """How the channel ended; None while it lives."""
        return self.half.error

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def forget(self) -> None:
        """``on_change`` is called no more."""
        self.on_change = None
        self.half.handle = None
