"""A question and its answer: the quick way to one message back, on both sides.

What the handles of a oneshot channel give as well, with three objects and a turn of the event loop
less: who asked is told where the answer is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aqueduct.protocol.common.receiver import ReceiverHalf
    from aqueduct.protocol.common.sender import SenderHalf

__all__ = ["PendingReply", "Responder"]


class PendingReply:
    """Where the answer to a question comes: ``Connection.ask`` gives it its channel.

    ``Connection.answer`` says what has come there, until ``Connection.forget``.
    """

    __slots__ = ("half", "on_change")

    def __init__(self, on_change: Callable[[], None]) -> None:
        """``on_change`` is called on the loop whenever an answer, or the end, may be there."""
        self.half: ReceiverHalf | None = None
        """None before it is asked for, and after it is forgotten."""
        self.on_change: Callable[[], None] | None = on_change

    def __call__(self) -> PendingReply:
        """A half keeps a weak reference to its handle, and this in the place of one."""
        return self

    def changed(self) -> None:
        """As of a Receiver."""
        if self.on_change is not None:
            self.on_change()


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

    def changed(self) -> None:
        """As of a Sender."""
        if self.on_change is not None:
            self.on_change()

    def forget(self) -> None:
        """``on_change`` is called no more."""
        self.on_change = None
        self.half.handle = None
