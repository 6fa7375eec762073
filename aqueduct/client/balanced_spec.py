"""What calls over several connections are asked for, and what comes of each batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import pyarrow as pa

from aqueduct.config import DEFAULT, Config
from aqueduct.errors import AqueductError, DeadlineExceeded
from aqueduct.rpc.request import Kind

__all__ = ["BalancedSpec", "BatchAnswer", "OnError", "Opened"]

OnError: TypeAlias = Literal["fail", "report"]
"""What becomes of a batch that its handler fails on: it ends the work, or it is an
``BatchAnswer``.
"""
Opened: TypeAlias = Callable[[pa.Schema, frozenset[str]], None]
"""Hears what the answers' schema is, and the handler's capabilities, before data flows."""


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What the service made of one batch: a batch, or an error."""

    number: int
    """Of the input batch that it belongs to, from 0."""
    batch: pa.RecordBatch | None
    error: AqueductError | None = None
    """Why there is no batch: HandlerFailed, for example. Only with ``on_error="report"``."""


@dataclass(frozen=True, kw_only=True)
class BalancedSpec:
    """One piece of work for a handler, which may take several calls."""

    insists: ClassVar[bool] = False
    """Whether failures that cannot be reported for single batches are an error."""
    handler: str
    kind: Kind = "exchange"
    in_flight: int | None = None
    """None: the configuration's, which has more of small batches where one call takes all."""
    in_flight_bytes: int | None = None
    ordered: bool = True
    """False: the answers of a function of one batch come as they are made."""
    deadline: float | None = None
    """Seconds for all of the work, with all that is done again."""
    batch_deadline: float | None = None
    """Seconds from the sending of a batch to its answer."""
    retries: int = 0
    """Calls made again in a row, without an answer between them, before an error is raised."""
    backoff: float = 0.1
    """Seconds of the pause before the first of them; doubles from one to the next, with jitter."""
    backoff_limit: float = 30.0
    """Seconds of the longest pause."""
    hedge: float = 0.5
    """Seconds after which a call that is not accepted is not waited for alone: the next address is
    called, too."""
    on_error: OnError = "fail"
    config: Config = DEFAULT

    @property
    def unit(self) -> str:
        """What the work is, for people."""
        return "the call"

    def late(self, places: str) -> DeadlineExceeded:
        """The error of work at ``places`` that was not done within its deadline."""
        return DeadlineExceeded(
            f"handler {self.handler!r} at {places}: {self.unit} was not done within its "
            f"deadline of {self.deadline:g} s",
            peer=places,
            handler=self.handler,
        )

    def keeps_order(self, addresses: int) -> bool:
        """Whether the service is to put the answers in order.

        Not where they come by several calls, nor where one that is late must not hold back others.
        """
        reports_late = self.batch_deadline is not None and self.on_error == "report"
        return self.ordered and addresses == 1 and not reports_late

    def options(self) -> dict[str, Any]:
        """What of that each call of an exchange is told."""
        return {
            "in_flight": self.in_flight,
            "in_flight_bytes": self.in_flight_bytes,
            "report_failures": self.on_error == "report",
        }
