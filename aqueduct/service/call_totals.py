"""What the calls of a service have done, counted by handler: the one place where it is counted.

Calls count on the event loop of the service. Any thread may read: numbers only grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Mapping
from typing import Final

from aqueduct import errors
from aqueduct.admin.report import BOUNDS
from aqueduct.errors import CallError
from aqueduct.rpc.describe import RESERVED_PREFIX
from aqueduct.rpc.status import CANCELLED

__all__ = ["COUNTED", "UNKNOWN", "CallTotals", "HandlerTotals"]

COUNTED: Final = ("batches_in", "rows_in", "bytes_in", "batches_out", "rows_out", "bytes_out")
"""What a call counts, and a service sums up."""
UNKNOWN: Final = f"{RESERVED_PREFIX}unknown"
"""Has the calls of names that no handler has: clients may invent any number of them."""
_OTHER: Final = "other"
_STATUSES: Final = frozenset(
    {
        CANCELLED,
        *(
            kind.status
            for kind in (getattr(errors, name) for name in errors.__all__)
            if issubclass(kind, CallError)
        ),
    }
)


class HandlerTotals:
    """What calls of one handler have done."""

    __slots__ = ("buckets", "calls", "errors", "moved", "resumes", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        """Those that came, also those that were refused."""
        self.moved = dict.fromkeys(COUNTED, 0)
        """What those have moved that are over."""
        self.errors: dict[str, int] = {}
        """How many ended otherwise than well, by status."""
        self.seconds = 0.0
        """What accepted calls took, in all."""
        self.buckets = [0] * (len(BOUNDS) + 1)
        """Accepted calls by what they took; see ``BOUNDS``."""
        self.resumes = 0
        """Cuts of the connections of calls that went on and are over."""

    def failed(self, status: str) -> None:
        """A call ended with this status, which is not ``ok``."""
        if status not in _STATUSES:  # an error of the handler's own making
            status = _OTHER
        self.errors[status] = self.errors.get(status, 0) + 1

    def took(self, seconds: float) -> None:
        """An accepted call has its status, so long after its message."""
        self.seconds += seconds
        self.buckets[bisect_left(BOUNDS, seconds)] += 1

    def ended(self, moved: Mapping[str, int], resumes: int) -> None:
        """A call is over, its handler too."""
        sums = self.moved
        for name, count in moved.items():
            sums[name] += count
        self.resumes += resumes


class CallTotals:
    """The totals of all handlers of a service."""

    def __init__(self, handlers: Container[str]) -> None:
        """``handlers``: the registered ones; some may be registered later."""
        self._handlers = handlers
        self.by_handler: dict[str, HandlerTotals] = {}
        """Of each handler that was called, and of ``UNKNOWN``."""

    def of(self, name: str) -> HandlerTotals:
        """The totals in which a call of this name counts."""
        found = self.by_handler.get(name)
        if found is None:
            if name not in self._handlers:
                name = UNKNOWN
            found = self.by_handler.setdefault(name, HandlerTotals())
        return found

    def moved(self) -> dict[str, int]:
        """What calls have moved that are over."""
        totals = tuple(self.by_handler.values())
        return {name: sum(each.moved[name] for each in totals) for name in COUNTED}
