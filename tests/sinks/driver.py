"""What a driver of Spark does with a sink, as far as a sink can tell: tasks, retries, the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from aqueduct import SyncClient
from aqueduct.client.sink_writer import SinkWriter
from aqueduct.errors import AqueductError, CallError, ConnectionLost
from aqueduct.service.sinks import Attempt, PreparedAttempt, WriteKey
from tests.sinks.killing import IDS, Deathbed

__all__ = ["Driver", "JobFailed"]

T = TypeVar("T")


class JobFailed(Exception):
    """A task failed too often, or the commit did."""


class Driver:
    """Plays one job after the other. Tasks have numbers of their own, as in one application."""

    def __init__(self, bed: Deathbed) -> None:
        self.bed = bed
        self._tasks = itertools.count()
        self._client: SyncClient | None = None

    def write(
        self,
        write_key: WriteKey,
        execution: str,
        partition: int,
        ids: Sequence[int],
        *,
        failures: int = 4,
    ) -> PreparedAttempt:
        """A task: its attempts until one has a receipt. Raises JobFailed."""
        for _ in range(failures):
            attempt = Attempt(
                write_key, execution=execution, stage=2, partition=partition, task=next(self._tasks)
            )
            try:
                return self.sink().write(attempt, _batches(ids), schema=IDS)
            except AqueductError:
                continue
        raise JobFailed(f"partition {partition} failed {failures} times")

    def commit(self, write_key: WriteKey, prepared: Sequence[PreparedAttempt]) -> None:
        """Until there is an answer. Raises JobFailed if that is an error."""
        self._until_answered(lambda sink: sink.commit(write_key, prepared, deadline=60))

    def abort(
        self, write_key: WriteKey, prepared: Sequence[PreparedAttempt], execution: str | None = None
    ) -> None:
        """Until there is an answer."""
        self._until_answered(
            lambda sink: sink.abort(write_key, prepared, execution=execution, deadline=60)
        )

    def sink(self) -> SinkWriter:
        """On a connection that lives, as far as that is known."""
        if self._client is None or self._client.closed:
            if self._client is not None:
                self._client.close()
            self._client = self.bed.connect()
        return SinkWriter(self._client, "sink")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _until_answered(self, ask: Callable[[SinkWriter], T]) -> T:
        while True:
            try:
                return ask(self.sink())
            except ConnectionLost:
                continue
            except CallError as error:
                raise JobFailed(str(error)) from error


def _batches(ids: Sequence[int]) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(ids), 2):
        yield pa.record_batch({"id": pa.array(ids[first : first + 2], pa.int64())}, schema=IDS)
