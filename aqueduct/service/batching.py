"""Rows of different calls, put together for one call of their handler and taken apart again.

::

    @service.handler("score", input=ROWS, output=SCORES, batch=aqueduct.Batching(rows=4096))
    def score(batch):               # rows of one call, or of many
        return predict(batch)       # one row for each

A function may take a second argument, ``calls``: a tuple of CallRows, which says whose rows the
batch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import pyarrow as pa

from aqueduct.arguments import check_fields
from aqueduct.arrow.joining import joined
from aqueduct.config import Bytes, Count, Seconds
from aqueduct.errors import HandlerFailed
from aqueduct.service.context import Call
from aqueduct.service.turns import Fit

__all__ = ["BatchFilter", "Batching", "CallRows", "QueuedBatch", "split", "wrong_count"]

_KEPT: Final = 1 << 10
"""Smaller answers are copied as they are encoded."""


@dataclass(frozen=True, slots=True)
class Batching:
    """How rows of different calls are put together: ``@service.handler(batch=Batching(...))``."""

    rows: Count = 4096
    """Rows of one run at most. A batch that alone has more runs alone."""
    bytes: Bytes = 8 << 20
    """Their bytes at most, in the same way."""
    wait: Seconds = 0.0
    """How long the first row waits for more, at most, while the handler is free. It only waits when
    others have called a moment ago, until as many have called again. 0: it never does."""
    retry_alone: bool = False
    """Whether, after an error, the batches of each call are tried alone, so that others do not
    fail. The handler sees those rows again."""

    zero_allowed: ClassVar[tuple[str, ...]] = ("wait",)

    def __post_init__(self) -> None:
        check_fields(self)


class CallRows(NamedTuple):
    """Which rows of a batch are those of one call."""

    call: Call
    start: int
    """The first one."""
    rows: int
    """How many."""


class QueuedBatch:
    """One batch of a call that waits for its turn."""

    __slots__ = ("batch", "lease", "number", "size")

    def __init__(self, number: int, batch: pa.RecordBatch, lease: Any) -> None:
        """``lease``: what the batch is charged."""
        self.number = number
        self.batch = batch
        self.lease = lease
        self.size = batch.get_total_buffer_size()
        """Bytes: what a payload unpacks to."""


class BatchFilter:
    """Chooses the batches of one run: those that are alike, as many as fit."""

    __slots__ = ("_most", "_most_bytes", "_schema", "rows", "size")

    def __init__(self, batching: Batching) -> None:
        self._most = batching.rows
        self._most_bytes = batching.bytes
        self._schema: pa.Schema | None = None
        self.rows = 0
        self.size = 0

    def __call__(self, work: QueuedBatch) -> Fit:
        """What becomes of the next batch; the first one fits."""
        schema, batch = self._schema, work.batch
        rows, size = self.rows + batch.num_rows, self.size + work.size
        if schema is None:
            self._schema = batch.schema
        elif batch.schema is not schema and not batch.schema.equals(schema, check_metadata=True):
            return Fit.PASSED
        elif rows > self._most or size > self._most_bytes:
            return Fit.FULL
        self.rows, self.size = rows, size
        return Fit.TAKEN


def split(answer: pa.RecordBatch, counts: Sequence[int]) -> list[pa.RecordBatch]:
    """The answer to each of several batches, by their numbers of rows."""
    found, start, nbytes = [], 0, answer.get_total_buffer_size()
    for count in counts:
        part = answer.slice(start, count)
        start += count
        if 4 * count <= answer.num_rows and nbytes * count >= _KEPT * answer.num_rows:
            part = joined((part, part.slice(0, 0)))  # a slow reader does not keep the others'
        found.append(part)
    return found


def wrong_count(handler: str, asked: int, parts: int, got: int) -> HandlerFailed:
    """The error of a handler that gives more rows or fewer than it got."""
    of = f" (put together of {parts} batches)" if parts > 1 else ""
    detail = (
        f"a handler with batch= gives one row for each row that it gets; for {asked} rows{of} it "
        f"gave {got}"
    )
    return HandlerFailed(f"handler {handler!r}: {detail}", kind="ValueError", detail=detail)
