"""A question and its answer: the quick way to one message back, on both sides.

What the handles of a oneshot channel give as well, with three objects and a turn of the event loop
less: the task that waits is stepped where the answer is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from aqueduct._speedups.loop.waiter import Waiter

if TYPE_CHECKING:
    from aqueduct.protocol.channels.receiver import ReceiverHalf
    from aqueduct.protocol.channels.sender import SenderHalf

__all__ = ["PendingReply", "Responder"]


class PendingReply(Waiter):
    """What one task waits for: ``await`` returns with the next ``wake``, or raises ``failure``.

    ``Connection.ask`` gives it its channel; until ``Connection.forget`` the channel wakes it.
    """

    __slots__ = ("failure", "half")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.failure: Exception | None = None
        """What waiting raises from here on."""
        self.half: ReceiverHalf | None = None
        """Where the answer comes; None before it is asked for."""

    def __call__(self) -> PendingReply:
        """A half keeps a weak reference to its handle, and this in the place of one."""
        return self

    def wake(self) -> None:
        """Something may have changed. Steps the task that waits, if none is at work."""
        self.step()

    _changed = wake

    def fail(self, error: Exception) -> None:
        """Waiting raises this, now or when it begins."""
        self.failure = error
        self.wake()

    def __await__(self) -> Generator[Any, None, None]:
        while not self.woken and self.failure is None:
            self._asyncio_future_blocking = True
            yield self
        self.woken = False
        if self.failure is not None:
            raise self.failure


class Responder:
    """Where the answer to a question goes: ``Connection.replying`` gives it, ``reply`` uses it.

    Or ``Connection.sender`` makes a Sender of it.
    """

    __slots__ = ("half", "on_change")

    def __init__(self, half: SenderHalf) -> None:
        self.half = half
        self.on_change: Callable[[], None] | None = None
        """Called on the loop when the channel ended; as that of a Sender."""
        half.handle = self

    def __call__(self) -> Responder:
        """As of PendingReply."""
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
