"""What streams say of themselves in a shell, a debugger and a log."""

from __future__ import annotations

from typing import Protocol

from aqueduct.errors import Cancelled
from aqueduct.escaping import escape

__all__ = ["stream_text"]


class _Stream(Protocol):
    @property
    def number(self) -> int: ...

    @property
    def over(self) -> bool: ...


def stream_text(stream: _Stream, handler: str, place: str, error: BaseException | None) -> str:
    """``<Stream of 'score' at 10.0.0.7:4433: open, last answer to batch 41>``."""
    if isinstance(error, Cancelled):
        state = "closed"
    elif error is not None:
        state = f"failed with {type(error).__name__}"
    else:
        state = "ended" if stream.over else "open"
    number = stream.number
    answered = "no answer yet" if number < 0 else f"last answer to batch {number}"
    where = f" of {handler!r} at {escape(place)}" if place else ""
    return f"<{type(stream).__name__}{where}: {state}, {answered}>"
