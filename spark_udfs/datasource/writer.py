"""``df.write.format("aqueduct")`` and ``df.writeStream.format("aqueduct")``: exactly once.

Each task is an attempt: it streams its partition to the sink, and its commit message is the
receipt. The driver commits exactly the attempts whose messages reached it, and repeats that until
the service answers. ``aqueduct.service.sinks`` says what the sink makes of it.

A write is named by the option ``write_key``, or else: a job by a name of its own, a batch of
a stream by the query's id, which its checkpoint keeps, and the batch's number.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from aqueduct.client.retry import may_pass
from aqueduct.client.sink_writer import SinkWriter
from aqueduct.client.sync_client import SyncClient
from aqueduct.client.sync_stream import SyncStream
from aqueduct.errors import (
    AqueductError,
    Busy,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    Refused,
    UnknownHandler,
)
from aqueduct.escaping import logger_of
from aqueduct.rpc.sink_commit import ABORT, COMMIT, LOOK, WRITE
from aqueduct.service.sinks import Attempt, PreparedAttempt, WriteKey
from spark_udfs.calls.partition import CallSpec
from spark_udfs.calls.pool import process_pool
from spark_udfs.calls.telemetry import working
from spark_udfs.datasource.options import Settings
from spark_udfs.datasource.query import tries as tries_of
from spark_udfs.datasource.types import check
from spark_udfs.functions.casts import Casting
from spark_udfs.spark_schemas import arrow_of
from spark_udfs.spark_types import retold
from spark_udfs.worker.metrics import Tally, TaskMetrics, Total
from spark_udfs.worker.task import TaskContext, here, locate

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = [
    "COMMIT_DEADLINE",
    "BatchSinkWriter",
    "CommitMessage",
    "Writing",
    "make_writer",
    "said",
]

log = logger_of(__name__)

T = TypeVar("T")

COMMIT_DEADLINE: Final = 600.0
"""Seconds for which a commit without an answer is repeated, unless the option of that name says
else."""
_YEAR: Final = 366 * 86_400.0
"""Seconds: the deadline of a commit that has none. Without one a slow commit would be ended by
Timing.progress_deadline of the service."""
_PAUSE_LIMIT: Final = 5.0


@dataclass(frozen=True)
class CommitMessage(WriterCommitMessage):
    """What a task tells the driver."""

    write_key: WriteKey
    execution: str
    prepared: PreparedAttempt | None
    """None: its partition was empty, so there was nothing to write."""
    numbers: TaskMetrics
    """What the task counted."""


def make_writer(settings: Settings, schema: StructType, overwrite: bool) -> BatchSinkWriter:
    """What writes rows of ``schema`` to the sink ``settings.handler``.

    Raises what ``Writing.look`` raises.
    """
    writing = Writing(settings, overwrite, uuid.uuid4().hex)
    writing.look(schema)
    return BatchSinkWriter(writing, settings.more.get("write_key") or uuid.uuid4().hex)


class BatchSinkWriter(DataSourceArrowWriter):
    """One job. A copy travels to each task, another one to the commit."""

    def __init__(self, writing: Writing, write_key: str) -> None:
        self.writing = writing
        self.write_key = WriteKey(write_key, writing.overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> CommitMessage:
        """In a task: writes its partition."""
        return self.writing.write(self.write_key, iterator, here())

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, when every partition has a message."""
        self.writing.commit(self.write_key, said(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, when the job has failed."""
        self.writing.abort(self.write_key, said(messages), self.writing.execution)


class Writing:
    """How a sink is written to, on the driver and in tasks. Picklable."""

    def __init__(self, settings: Settings, overwrite: bool, execution: str) -> None:
        self.settings = settings
        self.overwrite = overwrite
        self.execution = execution
        """Tells this try at the write from others, whose attempts Spark numbers from zero again."""
        self.schema: pa.Schema | None = None
        """What the sink takes; None: anything."""
        self.rows: pa.Schema | None = None
        """The schema of the rows, with metadata for types that Arrow lacks; None: not known yet."""

    def look(self, schema: StructType) -> None:
        """On the driver, before anything runs: asks for the sink's schema and compares.

        Raises ConfigError for a type that Spark hands to no function, SchemaMismatch,
        UnknownHandler, and what connecting raises.
        """
        settings, where = self.settings, self._where
        self.rows = rows = arrow_of(schema, where)
        found = self._patiently(lambda sink: sink.look(deadline=settings.deadline))
        self.schema = found.schema
        if self.schema is None:
            return
        if settings.cast:
            Casting(self.schema, rows, where=where)
        else:
            check(self.schema, rows, where, handler=settings.handler)

    @property
    def _where(self) -> str:
        return f"the rows to be written into the sink {self.settings.handler!r}"

    def write(
        self, write_key: WriteKey, batches: Iterator[pa.RecordBatch], place: TaskContext
    ) -> CommitMessage:
        """In a task: one attempt. Raises the errors of ``aqueduct.errors``, told where."""
        settings, numbers = self.settings, TaskMetrics()
        source = iter(batches)
        first = next(source, None)
        if first is None:
            return CommitMessage(write_key, self.execution, None, numbers)
        attempt = Attempt(
            write_key,
            execution=self.execution,
            stage=place.stage or 0,
            partition=place.partition or 0,
            task=place.task or 0,
        )
        rows: Iterator[pa.RecordBatch] = itertools.chain((first,), source)
        own = CallSpec(
            addresses=settings.addresses,
            handler=settings.handler,
            schema=self.schema,
            headers=settings.headers,
        )
        rows, schema = retold(rows, first.schema, self.rows)
        del first
        try:
            # As for a source, its log tells: there is no session where an accumulator could be.
            with working(
                own,
                tally=Tally(),
                trace=settings.trace,
                place=place,
                numbers=numbers,
                verb="write",
            ) as calling:
                headers = dict(calling.headers)
                prepared = self._prepare(attempt, rows, schema, headers, place, numbers)
            return CommitMessage(write_key, self.execution, prepared, numbers)
        except AqueductError as error:
            raise locate(
                _plainly(error),
                peer=settings.peer().bare,
                handler=settings.handler,
                place=place,
                numbers=numbers,
            ) from error.__cause__

    def commit(self, write_key: WriteKey, messages: Sequence[CommitMessage]) -> None:
        """On the driver: commits what the messages tell of, and nothing else.

        Raises how the sink failed, or why there was no answer for ``commit_deadline``.
        """
        prepared = [each.prepared for each in messages if each.prepared is not None]
        seconds = self.settings.more.get("commit_deadline", COMMIT_DEADLINE)
        until = None if seconds is None else time.monotonic() + seconds

        def commit(sink: SinkWriter) -> Any:
            left = _YEAR if until is None else max(until - time.monotonic(), 0.001)
            return sink.commit(write_key, prepared, deadline=left)

        result = self._patiently(commit, until=until)
        total = Total()
        for each in messages:
            total += each.numbers
        log.info(
            "%r: write %r is committed, %d rows of %d tasks: %s",
            self.settings.handler,
            write_key.key,
            total.rows_sent,
            len(prepared),
            result,
        )

    def abort(
        self, write_key: WriteKey, messages: Sequence[CommitMessage], execution: str | None
    ) -> None:
        """On the driver: aborts all attempts of the write, or of this execution of it."""
        prepared = [each.prepared for each in messages if each.prepared is not None]
        deadline = self.settings.deadline
        self._patiently(
            lambda sink: sink.abort(write_key, prepared, execution=execution, deadline=deadline)
        )

    def _prepare(
        self,
        attempt: Attempt,
        rows: Iterator[pa.RecordBatch],
        schema: pa.Schema,
        headers: dict[str, str],
        place: TaskContext,
        numbers: TaskMetrics,
    ) -> PreparedAttempt:
        """What the attempt comes to, cast and tried as the options say."""
        rows = numbers.counted(rows)
        cast = self.settings.cast
        if cast and self.schema is not None:
            rounding = cast == "round"
            casting = Casting(self.schema, schema, where=self._where, rounding=rounding)
            schema, rows = casting.schema, casting.all(rows)
        for tries in itertools.count():
            try:
                return self._attempt(attempt, rows, schema, headers, place, numbers, tries)
            except (Busy, ConnectFailed, Refused) as error:
                over = tries + 1 >= tries_of(self.settings) or numbers.batches_sent
                if over or not may_pass(error):
                    raise
            numbers.retries += 1
            _pause(self.settings, tries)
        raise AssertionError("unreachable")

    def _attempt(
        self,
        attempt: Attempt,
        rows: Iterator[pa.RecordBatch],
        schema: pa.Schema,
        headers: dict[str, str],
        place: TaskContext,
        numbers: TaskMetrics,
        tries: int,
    ) -> PreparedAttempt:
        settings = self.settings
        lease = process_pool().lease(settings.peer(attempt.partition + tries), task=place.task)
        numbers.reconnects += lease.reconnected
        failed, streams = True, list[SyncStream]()

        def opened(stream: SyncStream) -> None:
            streams.append(stream)
            lease.on_end(stream.close)

        try:
            prepared = self._sink(lease.client, headers, settings.fresh_token()).write(
                attempt,
                rows,
                schema=schema,
                deadline=settings.deadline,
                compression=settings.compression,
                on_open=opened,
            )
            failed = False
            return prepared
        finally:
            for stream in streams:
                numbers.bytes_sent += stream.bytes_sent
                numbers.waiting_seconds += stream.waited
            numbers.resumes += lease.take_resumes()
            # A Python worker ends with its failed task: let the service hear of it.
            lease.release(close=failed and place.task is not None)

    def _patiently(
        self,
        ask: Callable[[SinkWriter], T],
        *,
        until: float | Literal["retries"] | None = "retries",
    ) -> T:
        """What the sink answers, to be asked again where there was no answer.

        Until that time (None: for ever), or as often as a table is asked. Raises how it failed, at
        once if that is an answer.
        """
        settings = self.settings
        for tries in itertools.count():
            token = self._token(until)
            try:
                # The processes in which Spark has this done are not used for long.
                lease = process_pool().lease(settings.peer(tries))
                try:
                    return ask(self._sink(lease.client, settings.driver_headers, token))
                finally:
                    lease.release(close=True)
            except (Busy, ConnectionLost, Refused) as error:
                if not may_pass(error):
                    raise
                if until == "retries":
                    over = tries + 1 >= tries_of(settings)
                else:
                    over = until is not None and time.monotonic() >= until
                if over:
                    raise
                log.warning("%r: no answer, asked again: %s", settings.handler, error)
            except AqueductError as error:
                raise _plainly(error) from error.__cause__
            _pause(settings, tries)
        raise AssertionError("unreachable")

    def _token(self, until: float | Literal["retries"] | None) -> str | None:
        """What the next call shows. Until that time one that cannot be had is waited for.

        The tasks had one, and their work would be lost: who renews it may have removed it first.
        """
        for tries in itertools.count():
            try:
                return self.settings.fresh_token()
            except ConfigError as error:
                # Without a cause nothing failed: what it gave is no token, and will not be one.
                over = until == "retries" or (until is not None and time.monotonic() >= until)
                if over or error.__cause__ is None:
                    raise
                log.warning("%r: no token, asked again: %s", self.settings.handler, error)
            _pause(self.settings, tries)
        raise AssertionError("unreachable")

    def _sink(self, client: SyncClient, headers: dict[str, str], token: str | None) -> SinkWriter:
        return SinkWriter(client, self.settings.handler, token=token, headers=headers)


def _pause(settings: Settings, tries: int) -> None:
    seconds = min(settings.backoff * 2.0 ** min(tries, 30), _PAUSE_LIMIT)
    time.sleep(seconds * random.uniform(0.5, 1.0))


def _plainly(error: AqueductError) -> AqueductError:
    """``error`` with the sink's name in its text, instead of those of its handlers."""
    if isinstance(error, UnknownHandler):
        error = copy.copy(error)
        text = str(error).replace("no handler", "no sink")
        for prefix in (WRITE, COMMIT, ABORT, LOOK):
            text = text.replace(prefix, "")
        error.args = (text, *error.args[1:])
    return error


def said(messages: Sequence[WriterCommitMessage | None]) -> list[CommitMessage]:
    """Those of ``messages`` that tasks of this writer gave."""
    return [each for each in messages if isinstance(each, CommitMessage)]
