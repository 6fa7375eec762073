"""What may be tried again after an error, when, and what is said when it may not."""

from __future__ import annotations

import copy
import random
import time
from typing import TypeVar

from aqueduct.errors import AqueductError, Busy, CallError, ConnectionLost, HeadersRejected, Refused

__all__ = ["Backoff", "may_pass", "renumbered", "with_note"]

Error = TypeVar("Error", bound=AqueductError)


def may_pass(error: BaseException) -> bool:
    """Whether another call, later or elsewhere, may fare better.

    The connection is lost or never came up, the service has no room, or it is ending. What a
    service says of the call itself (its token, its schema, its handler) it would say again.
    """
    if isinstance(error, ConnectionLost):
        return error.code != HeadersRejected.code
    return isinstance(error, Busy) or (isinstance(error, Refused) and error.draining)


class Backoff:
    """The pauses of one address: each twice the one before, up to a limit, with jitter."""

    __slots__ = ("_first", "_limit", "failures", "until")

    def __init__(self, first: float, limit: float) -> None:
        self._first = first
        self._limit = limit
        self.failures = 0
        """In a row."""
        self.until = 0.0
        """When the pause is over, by time.monotonic()."""

    def failed(self) -> None:
        """Begins the next pause."""
        # So many doublings reach any limit, and still fit a float.
        pause = min(self._limit, self._first * 2.0 ** min(self.failures, 60))
        self.failures += 1
        # Callers that failed together should not come back together.
        self.until = time.monotonic() + pause * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        """The next pause is the first again."""
        self.failures = 0


def with_note(error: Error, text: str) -> Error:
    """A copy of ``error`` that says more. A copy, as one lost connection is many calls' error."""
    copied = copy.copy(error)
    said = str(error) or type(error).__name__
    copied.args = (f"{said}; {text}", *error.args[1:])
    copied.__cause__ = error.__cause__
    return copied


def renumbered(error: Error, batch: int) -> Error:
    """A copy of an error of one batch that names it by its number in the whole input.

    A call counts its own batches, and this may be the second call.
    """
    copied = copy.copy(error)
    old = getattr(error, "batch", None)
    said = str(error).replace(f", batch {old}: ", f", batch {batch}: ", 1)
    copied.args = (said, *error.args[1:])
    copied.__cause__ = error.__cause__
    if isinstance(copied, CallError):
        copied.batch = batch
    return copied
