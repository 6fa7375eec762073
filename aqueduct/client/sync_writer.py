"""``SyncWriter``: a ``Writer`` for threads. Made by ``SyncClient.writer``; ``with`` opens it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

import pyarrow as pa

from aqueduct.client.loop_thread import LoopThread
from aqueduct.client.write_segments import Ack, Committed
from aqueduct.client.writer import Writer
from aqueduct.errors import LocalProtocolError

__all__ = ["SyncAck", "SyncWriter"]

T = TypeVar("T")


class SyncAck:
    """The acknowledgement of one ``write``; see ``Ack``."""

    __slots__ = ("_ack", "_thread")

    def __init__(self, ack: Ack, thread: LoopThread) -> None:
        self._ack = ack
        self._thread = thread

    @property
    def number(self) -> int:
        """Of the write, from 0."""
        return self._ack.number

    @property
    def commit(self) -> int:
        """The number of the commit that the rows belong to."""
        return self._ack.commit

    @property
    def rows(self) -> int:
        """How many were written."""
        return self._ack.rows

    @property
    def done(self) -> bool:
        """Whether it is there, or the writer has failed."""
        return self._ack.done

    @property
    def error(self) -> BaseException | None:
        """Why the rows were not prepared; None if they are, or may still be."""
        return self._ack.error

    def result(self, timeout: float | None = None) -> None:
        """Waits until the rows are prepared, and raises why they will not be.

        Raises TimeoutError after ``timeout`` seconds; the writer's deadline bounds it, too.
        """
        if self._ack.done:
            if self._ack.error is not None:
                raise self._ack.error
            return
        self._thread.run(_settled(self._ack, timeout))

    def __repr__(self) -> str:
        return f"<Sync{repr(self._ack)[1:]}"


class SyncWriter:
    """Writes into one sink under one key, from any thread; see ``Writer`` for what holds.

    A forked child has no writer: its methods raise LocalProtocolError there, and ``close`` and
    ``abort`` are without effect.
    """

    def __init__(self, writer: Writer, thread: LoopThread) -> None:
        self._writer = writer
        self._thread = thread

    @property
    def sink(self) -> str:
        """What it writes into."""
        return self._writer.sink

    @property
    def key(self) -> str:
        """What names the rows."""
        return self._writer.key

    @property
    def committed(self) -> Committed:
        """What is there under the key; known once the writer is open."""
        return self._writer.committed

    @property
    def schema(self) -> pa.Schema | None:
        """Of the batches; None until the sink, or the first batch, has said it."""
        return self._writer.schema

    @property
    def kept_bytes(self) -> int:
        """Of batches without an acknowledgement."""
        return self._writer.kept_bytes

    @property
    def uncommitted(self) -> int:
        """Rows that were written and not committed."""
        return self._writer.uncommitted

    @property
    def closed(self) -> bool:
        """Whether it was closed or aborted."""
        return self._writer.closed

    def unacknowledged(self) -> list[pa.RecordBatch]:
        """The batches that are kept, in order. After a failure: those that were not prepared."""
        return self._writer.unacknowledged()

    def open(self) -> Self:
        """Claims the key; see ``Writer.open``. ``with`` does it."""
        self._run(self._writer.open())
        return self

    def write(self, batch: Any) -> SyncAck:
        """Takes rows, and returns their acknowledgement; see ``Writer.write``."""
        return SyncAck(self._run(self._writer.write(batch)), self._thread)

    def flush(self) -> None:
        """Returns once all that was written is acknowledged; see ``Writer.flush``."""
        self._run(self._writer.flush())

    def commit(self, note: Any = None) -> Committed:
        """Commits all that was written since the last commit; see ``Writer.commit``."""
        return self._run(self._writer.commit(note))

    def close(self) -> None:
        """Ends a writer of which everything is committed; see ``Writer.close``."""
        if not self._left:
            self._run(self._writer.close())

    def abort(self) -> None:
        """Ends the writer; the sink drops what is not committed. See ``Writer.abort``."""
        if not self._left:
            self._run(self._writer.abort())

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort()
            return
        try:
            self.close()
        except LocalProtocolError:
            if self._thread.alive:
                self.abort()
            raise

    def __repr__(self) -> str:
        return f"<Sync{repr(self._writer)[1:]}"

    # Within

    @property
    def _left(self) -> bool:
        """Whether nothing is left to be ended: by a fork, an earlier end, or a closed client."""
        return (
            self._thread.pid != os.getpid()
            or self._writer.closed
            or (not self._thread.alive and not self._writer.uncommitted)
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)


async def _settled(ack: Ack, timeout: float | None) -> None:
    async with asyncio.timeout(timeout):
        await ack
