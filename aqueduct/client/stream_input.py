"""What a call sends that comes as a stream of another library: Polars, DuckDB, pandas, nanoarrow.

Such a stream may take its time with each batch, as a query does. So an asyncio client opens and
reads it in threads. The next batch is read when there is room for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from aqueduct.arrow.capsules import as_batch, as_batches, fitted, open_reader
from aqueduct.errors import LocalProtocolError
from aqueduct.rpc.threads import Job

__all__ = ["StreamInput", "StreamReader", "batch_apart", "batches_apart"]

T = TypeVar("T")


class StreamReader:
    """The batches of one stream: an iterator. It may be closed in any thread, at any time."""

    def __init__(self, given: Any, *, where: str, schema: pa.Schema | None = None) -> None:
        """``where`` begins errors. ``schema``: in whose layout batches are wanted."""
        self._given: Any = given
        self._where = where
        self._schema = schema
        self._lock = threading.Lock()
        # Under the lock.
        self._reader: pa.RecordBatchReader | None = None
        self._busy = self._closed = False

    def open(self) -> pa.Schema:
        """Opens the stream, if it is not open; returns the schema of its batches.

        None of them is read. Raises WrongType, and what the other library raises.
        """
        schema = self._alone(lambda: self._opened().schema)
        if schema is None:
            raise LocalProtocolError(f"{self._where} was closed before it was open")
        return schema

    def __iter__(self) -> StreamReader:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = self._alone(self._read)
        if batch is None:
            raise StopIteration
        return batch

    def read(self) -> pa.RecordBatch | None:
        """The next batch; None at the end, and after ``close``."""
        return self._alone(self._read)

    def close(self) -> None:
        """Releases the stream. A thread that reads just then does so itself, when it has read."""
        with self._lock:
            self._closed = True
            reader = None if self._busy else self._taken()
        if reader is not None:
            reader.close()

    # Within

    def _alone(self, work: Callable[[], T]) -> T | None:
        """``work``, while nobody closes the stream; None after its end."""
        with self._lock:
            if self._closed:
                return None
            self._busy = True
        try:
            return work()
        finally:
            with self._lock:
                self._busy = False
                reader = self._taken() if self._closed else None
            if reader is not None:
                reader.close()

    def _taken(self) -> pa.RecordBatchReader | None:
        """The reader, if it is to be closed here: one that was given is its owner's."""
        reader, given = self._reader, self._given
        self._reader = self._given = None
        return None if reader is given else reader

    def _opened(self) -> pa.RecordBatchReader:
        if self._reader is None:
            self._reader = open_reader(self._given, where=self._where)
            if self._reader is not self._given:
                self._given = None
        return self._reader

    def _read(self) -> pa.RecordBatch | None:
        try:
            batch = self._opened().read_next_batch()
            return batch if self._schema is None else fitted(batch, self._schema)
        except StopIteration:
            return None
        except Exception as error:
            error.add_note(f"It was raised as {self._where} was read.")
            raise


class StreamInput:
    """The batches of one stream: an async iterator, for one task. Each is read in a thread."""

    def __init__(self, given: Any, *, where: str, schema: pa.Schema | None = None) -> None:
        """The arguments are those of a StreamReader."""
        self._reader = StreamReader(given, where=where, schema=schema)

    async def opened(self) -> pa.Schema:
        """Opens the stream; returns the schema of its batches, as ``StreamReader.open`` does."""
        return await _in_thread(self._reader.open)

    def __aiter__(self) -> StreamInput:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        batch = await _in_thread(self._reader.read)
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def aclose(self) -> None:
        """Releases the stream; see ``StreamReader.close``. It waits for no batch."""
        await _in_thread(self._reader.close)


async def batch_apart(given: Any, *, where: str) -> pa.RecordBatch:
    """``as_batch`` in a thread of its own: a query may stand behind ``given``.

    If the task is cancelled, the thread goes on, and what it reads is dropped.
    """
    return await _in_thread(partial(as_batch, given, where=where))


async def batches_apart(
    given: Any, schema: pa.Schema | None, *, where: str
) -> list[pa.RecordBatch]:
    """``as_batches`` in a thread of its own; see ``batch_apart``."""
    return await _in_thread(partial(as_batches, given, schema, where=where))


async def _in_thread(work: Callable[[], T]) -> T:
    job = Job(work, blocks=True)
    try:
        return await job.wait()
    finally:
        job.forget()
