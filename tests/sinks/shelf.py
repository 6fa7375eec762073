"""A sink that keeps everything in memory and notes what it was asked, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

import aqueduct
from aqueduct.client.sink_writer import SinkWriter
from aqueduct.service.context import Call
from aqueduct.service.sinks import Attempt, PreparedAttempt, WriteKey
from tests.support.calls import NUMBERS, config, numbers

RUN = WriteKey("run 1")


def attempt(
    partition: int = 0, task: int = 0, write_key: WriteKey = RUN, execution: str = "e"
) -> Attempt:
    return Attempt(write_key, execution=execution, stage=3, partition=partition, task=task)


def service_with(shelf: Any, settings: aqueduct.Config | None = None, **options: Any) -> Any:
    service = aqueduct.Service("test", config=settings or config())
    options.setdefault("schema", NUMBERS)
    service.sink("shelf", shelf, **options)
    return service


def write(sink: SinkWriter, which: Attempt, *rows: int) -> PreparedAttempt:
    return sink.write(which, [numbers(row) for row in rows], schema=NUMBERS)


class Shelf:
    """Rows of ``NUMBERS``. ``asked`` has every call in order: its name, and whom it is about."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.staged: dict[str, list[int]] = {}
        self.there: dict[str, list[int]] = {}
        self.left: list[tuple[PreparedAttempt, float]] = []
        self.aborted = threading.Event()
        self.fail: dict[str, Exception] = {}
        self.blocked = threading.Event()
        """Set by the test to let a ``commit`` go on."""
        self.blocked.set()
        self.committing = threading.Event()

    def note(self, what: str, *details: Any) -> None:
        self.asked.append((what, *details))
        if what in self.fail:
            raise self.fail[what]

    def open(self, attempt: Attempt, call: Call) -> Book:
        self.note("open", attempt.partition, attempt.task)
        assert call.schema is not None and call.schema.equals(NUMBERS)
        return Book(self, attempt)

    def commit(self, write_key: WriteKey, prepared: Sequence[PreparedAttempt]) -> Any:
        self.committing.set()
        assert self.blocked.wait(20)
        self.note(
            "commit", write_key.key, [(p.attempt.partition, p.attempt.task) for p in prepared]
        )
        if write_key.key in self.there:
            return {"repeated": True}
        rows = [value for each in prepared for value in self.staged.pop(each.attempt.id)]
        if write_key.overwrite:
            self.there.clear()
        self.there[write_key.key] = rows
        return {"repeated": False, "rows": len(rows)}

    def abort(self, write_key: WriteKey, prepared: Sequence[PreparedAttempt]) -> None:
        self.note(
            "abort run", write_key.key, [(p.attempt.partition, p.attempt.task) for p in prepared]
        )
        for each in prepared:
            self.staged.pop(each.attempt.id, None)
        self.aborted.set()

    def leftovers(self) -> list[tuple[PreparedAttempt, float]]:
        return self.left

    @property
    def rows(self) -> list[int]:
        return sorted(value for values in self.there.values() for value in values)

    def asked_for(self, *names: str) -> list[tuple[Any, ...]]:
        return [each for each in self.asked if each[0] in names]


class Book:
    def __init__(self, shelf: Shelf, attempt: Attempt) -> None:
        self.shelf = shelf
        self.attempt = attempt
        self.values: list[int] = []
        self.thread = threading.get_ident()

    def note(self, what: str, *details: Any) -> None:
        assert threading.get_ident() == self.thread
        self.shelf.note(what, self.attempt.partition, self.attempt.task, *details)

    def write(self, batch: pa.RecordBatch) -> None:
        self.note("write", batch.num_rows)
        self.values += batch["id"].to_pylist()

    def prepare(self) -> Any:
        self.note("prepare")
        self.shelf.staged[self.attempt.id] = self.values
        return {"rows": len(self.values), "of": (1, None)}

    def abort(self) -> None:
        self.note("abort")
        self.shelf.staged.pop(self.attempt.id, None)
        self.shelf.aborted.set()


class AsyncShelf(Shelf):
    """The same with methods on the event loop."""

    async def open(self, attempt: Attempt, call: Call) -> AsyncBook:  # type: ignore[override]
        await asyncio.sleep(0)
        return AsyncBook(super().open(attempt, call))

    async def commit(self, write_key: WriteKey, prepared: Sequence[PreparedAttempt]) -> Any:
        while not self.blocked.is_set():
            self.committing.set()
            await asyncio.sleep(0.001)
        return super().commit(write_key, prepared)

    async def abort(  # type: ignore[override]
        self, write_key: WriteKey, prepared: Sequence[PreparedAttempt]
    ) -> None:
        await asyncio.sleep(0)
        super().abort(write_key, prepared)


class AsyncBook:
    def __init__(self, book: Book) -> None:
        self.book = book

    async def write(self, batch: pa.RecordBatch) -> None:
        await asyncio.sleep(0)
        self.book.write(batch)

    async def prepare(self) -> Any:
        await asyncio.sleep(0)
        return self.book.prepare()

    async def abort(self) -> None:
        await asyncio.sleep(0)
        self.book.abort()


class NotedShelf(Shelf):
    """The same with notes, as writers need it."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {}

    def commit(
        self, write_key: WriteKey, prepared: Sequence[PreparedAttempt], note: Any = None
    ) -> Any:
        result = super().commit(write_key, prepared)
        if result["repeated"] is False:
            self.notes[write_key.key] = note
        return result

    def committed(self, write_key: WriteKey) -> Any:
        self.note("committed", write_key.key)
        return {"note": self.notes[write_key.key]} if write_key.key in self.there else None
