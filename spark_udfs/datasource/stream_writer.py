"""``df.writeStream.format("aqueduct")``: each batch of a query is a write of its own.

A batch is named by the query's id, which its checkpoint keeps, and the batch's number; or by the
option ``write_key`` and the number. This page needs PySpark 4.1.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from aqueduct.errors import Busy, ConfigError, ConnectionLost
from aqueduct.escaping import logger_of
from aqueduct.service.sinks import WriteKey
from spark_udfs.datasource.options import Settings
from spark_udfs.datasource.writer import CommitMessage, Writing, said
from spark_udfs.worker.task import here

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["StreamSinkWriter", "make_stream_writer"]

log = logger_of(__name__)

_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"


def make_stream_writer(settings: Settings, schema: StructType, overwrite: bool) -> StreamSinkWriter:
    """The same for one batch of a stream.

    Spark makes another one for its commit, which has to wait for a service that is not there for
    longer than this. So such a service is left to the tasks and to ``commit``.
    """
    writing = Writing(settings, overwrite, uuid.uuid4().hex)
    try:
        writing.look(schema)
    except (Busy, ConnectionLost) as error:
        log.warning("%r cannot be looked at before it is written to: %s", settings.handler, error)
    return StreamSinkWriter(writing, settings.more.get("write_key") or "")


class StreamSinkWriter(DataSourceStreamArrowWriter):
    """One batch of a streaming query. The one that commits is not the one that travels to tasks."""

    def __init__(self, writing: Writing, write_key: str) -> None:
        self.writing = writing
        self.write_key = write_key
        """What stands for the query; "" for its id, which only tasks know."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> CommitMessage:
        """In a task: writes its partition."""
        query = self.write_key or _local_property(_QUERY)
        write_key = WriteKey(f"{query}/{_local_property(_BATCH)}", self.writing.overwrite)
        return self.writing.write(write_key, iterator, here())

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver, when every partition has a message."""
        told = said(messages)
        self.writing.commit(self._write_key(told, batchId), told)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver, when the batch has failed."""
        told = said(messages)
        if told or self.write_key:
            execution = told[0].execution if told else None
            self.writing.abort(self._write_key(told, batchId), told, execution)
        # Else no task has told which query it was: the batch's next commit throws away what was
        # prepared, or its time to live ends.

    def _write_key(self, told: list[CommitMessage], batch: int) -> WriteKey:
        if told:
            return told[0].write_key
        if not self.write_key:
            raise ConfigError(
                "no partition told which streaming query it belongs to; name it by "
                '.option("write_key", NAME)'
            )
        return WriteKey(f"{self.write_key}/{batch}", self.writing.overwrite)


def _local_property(name: str) -> str:
    from pyspark import TaskContext

    context = TaskContext.get()
    value = None if context is None else context.getLocalProperty(name)
    if not value:
        raise ConfigError(
            f"the task has no {name}: a streaming query sets it; name the query by "
            '.option("write_key", NAME)'
        )
    return str(value)
