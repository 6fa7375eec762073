"""Calls of a task that are made again, one after the other."""

from __future__ import annotations

import time
from typing import Any

from aqueduct.client.retry import Backoff, may_pass, with_note
from aqueduct.errors import AqueductError
from aqueduct.escaping import logger_of
from spark_udfs.calls.spec import CallSpec
from spark_udfs.worker.task import TaskContext

__all__ = ["Tries"]

log = logger_of("spark_udfs")


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
