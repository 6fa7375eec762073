"""What a writer keeps: batches without an acknowledgement, by the attempt that carries them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from aqueduct.arrow.sizes import batch_bytes
from aqueduct.rpc.deadline import Wakeup
from aqueduct.rpc.sink_commit import PreparedAttempt

__all__ = ["Ack", "Committed", "Segment", "size_of"]

_HEAD: Final = 512
"""Bytes that count for a batch beyond its values: batches without rows take memory, too."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What is there under the key of a writer."""

    commits: int = 0
    """How many; the next one has this number."""
    rows: int = 0
    """Of all of them."""
    note: Any = None
    """What the program gave with the last one."""
    result: Any = None
    """What the sink's ``commit`` returned, if this writer has made the last one."""


class Ack:
    """The acknowledgement of one ``write``. Await it: its rows are prepared then.

    Acknowledgements come in the order of writing. An awaited one ends the attempt that carries its
    rows. Raises why the writer failed, if it did before.
    """

    __slots__ = ("_end", "_future", "commit", "number", "rows", "size")

    def __init__(
        self,
        number: int,
        commit: int,
        rows: int,
        size: int,
        future: asyncio.Future[None],
        end: Callable[[], None],
    ) -> None:
        """``end`` ends the attempt that carries the rows. A program that waits calls it."""
        self.number = number
        """Of the write, from 0."""
        self.commit = commit
        """The number of the commit that the rows belong to."""
        self.rows = rows
        self.size = size
        """Bytes that are kept for it until it is there."""
        self._future = future
        self._end = end

    @property
    def done(self) -> bool:
        """Whether it is there, or the writer has failed."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """Why the rows were not prepared; None if they are, or may still be."""
        return self._future.exception() if self._future.done() else None

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        if not self._future.done():
            self._end()
            await asyncio.wait((self._future,))  # a task that is cancelled leaves it to others
        self._future.result()

    def settle(self, error: BaseException | None = None) -> None:
        """For the writer: the rows are prepared, or will not be."""
        if self._future.done():
            return
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
            self._future.exception()  # nobody has to look at it

    def __repr__(self) -> str:
        state = "waiting" if not self.done else "failed" if self.error else "prepared"
        return f"<Ack of write {self.number}, {self.rows} rows: {state}>"


class Segment:
    """Batches that one attempt carries. Kept until an attempt has its receipt."""

    __slots__ = (
        "_news",
        "accepted",
        "acks",
        "batches",
        "ended",
        "number",
        "prepared",
        "rows",
        "size",
        "task",
        "timer",
        "wanted",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        """The partition of its attempts."""
        self.batches: list[pa.RecordBatch] = []
        self.acks: list[Ack] = []
        self.rows = 0
        self.size = 0
        self.wanted = False
        """Whether it shall end as soon as may be: somebody waits for its receipt."""
        self.ended = False
        """Whether nothing is added any more."""
        self.accepted = 0.0
        """When a service last accepted an attempt at it (monotonic); 0.0: none has."""
        self.prepared: PreparedAttempt | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._news = Wakeup()

    def add(self, batches: list[pa.RecordBatch], ack: Ack) -> None:
        """More rows, of one write."""
        self.batches += batches
        self.acks.append(ack)
        self.rows += ack.rows
        self.size += ack.size
        self._news.set()

    def end(self) -> None:
        """No more rows will come."""
        self.ended = True
        self._news.set()

    async def feed(self) -> AsyncIterator[pa.RecordBatch]:
        """All batches, from the first, as they come. For one attempt at a time."""
        sent = 0
        while True:
            while sent < len(self.batches):
                sent += 1
                yield self.batches[sent - 1]
            if self.ended:
                return
            await self._news.wait()

    def close(self) -> None:
        """No attempt is made any more."""
        if self.timer is not None:
            self.timer.cancel()
        if self.task is not None:
            self.task.cancel()

    def release(self) -> None:
        """Its batches need not be kept."""
        self.batches.clear()
        self.acks.clear()
        if self.timer is not None:
            self.timer.cancel()


def size_of(batches: list[pa.RecordBatch]) -> int:
    """Bytes that are kept for them."""
    return sum(batch_bytes(batch) + _HEAD for batch in batches)
