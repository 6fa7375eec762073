"""What may be tried again after an error, when, and what is said when it may not."""

from __future__ import annotations

import copy
import random
import time
from typing import Any, TypeVar

from aqueduct.errors import AqueductError, Busy, CallError, ConnectionLost, HeadersRejected, Refused
from aqueduct.escaping import logger_of
from spark_udfs.calls.spec import CallSpec
from spark_udfs.worker.task import TaskContext

__all__ = ["Backoff", "Tries", "may_pass", "renumbered", "with_note"]

log = logger_of("spark_udfs")

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
        # Tasks that failed together should not come back together.
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
    """A copy of an error of one batch that names it by its number in the partition.

    A call counts its own batches, and the partition may be on its second call.
    """
    copied = copy.copy(error)
    old = getattr(error, "batch", None)
    said = str(error).replace(f", batch {old}: ", f", batch {batch}: ", 1)
    copied.args = (said, *error.args[1:])
    copied.__cause__ = error.__cause__
    if isinstance(copied, CallError):
        copied.batch = batch
    return copied


class Tries:
    """The calls for one piece of work, one after the other until one ends well."""

    def __init__(self, calling: CallSpec, place: TaskContext, what: object) -> None:
        self.calling = calling
        self.place = place
        self._what = what
        self.failures = 0
        """In a row; as many addresses are passed by."""
        self._backoffs = [Backoff(calling.backoff, calling.backoff_limit) for _ in calling.peers]
        self._end = None if calling.deadline is None else time.monotonic() + calling.deadline

    def head(self) -> dict[str, Any]:
        """What the next call says of itself."""
        head = self.calling.head(self.place)
        if self._end is not None:
            head["deadline"] = max(0.001, self._end - time.monotonic())
        if self.failures:  # or the service could not tell it from the call that broke
            head["attempt"] = f"{head['attempt'] or '0'}.{self.failures}"
        return head

    def failed(self, error: AqueductError) -> None:
        """Returns when the next call may be made. Raises ``error`` if it was the last one."""
        calling = self.calling
        if not may_pass(error):
            raise error
        if self.failures >= calling.retries:
            if not self.failures:
                raise error
            text = f"tried {self.failures + 1} times at {calling.places}"
            raise with_note(error, f"{text} (retries={calling.retries})") from error.__cause__
        self._backoffs[self.failures % len(self._backoffs)].failed()
        self.failures += 1
        until = max(time.monotonic(), self._backoffs[self.failures % len(self._backoffs)].until)
        if self._end is not None and until >= self._end:
            text = f"tried {self.failures} times within the deadline of {calling.deadline:g} s"
            raise with_note(error, text) from error.__cause__
        pause = max(0.0, until - time.monotonic())
        log.warning(
            "%s: %s: %s; it is sent again in %.1f s", self._what, type(error).__name__, error, pause
        )
        time.sleep(pause)
