"""Where a piece of work runs in Spark, for errors and for telling attempts apart."""

from __future__ import annotations

import copy
import os
import socket
import sys
from dataclasses import dataclass

from aqueduct.errors import AqueductError, CallError, HandlerFailed, SchemaMismatch
from aqueduct.escaping import Lines, escape
from aqueduct.rpc.executor_name import ExecutorName
from spark_udfs.worker.metrics import TaskMetrics

__all__ = ["NOWHERE", "TaskContext", "application", "executor_name", "here", "locate"]


@dataclass(frozen=True, slots=True)
class TaskContext:
    """One attempt of one task. All None outside Spark."""

    partition: int | None = None
    stage: int | None = None
    attempt: int | None = None
    task: int | None = None
    """``taskAttemptId``: unlike ``attempt`` it does not start again in a new stage attempt."""

    def __str__(self) -> str:
        if self.task is None:
            return ""
        return (
            f"partition {self.partition} "
            f"(stage {self.stage}, attempt {self.attempt}, task {self.task})"
        )

    def unit_key(self, write_key: str) -> str:
        """The same for every attempt of this unit of work, and for no other unit."""
        return write_key if self.task is None else f"{write_key}/{self.stage}/{self.partition}"

    @property
    def attempt_key(self) -> str:
        """Tells the attempts of one unit apart."""
        return "" if self.task is None else str(self.task)


NOWHERE = TaskContext()


def here() -> TaskContext:
    """The place of the calling thread. To be called in the task's own thread as it starts."""
    pyspark = sys.modules.get("pyspark")
    if pyspark is None:
        return NOWHERE  # not a worker of Spark, whatever is installed
    context = pyspark.TaskContext.get()
    if context is None:
        return NOWHERE
    return TaskContext(
        partition=context.partitionId(),
        stage=context.stageId(),
        attempt=context.attemptNumber(),
        task=context.taskAttemptId(),
    )


def application() -> tuple[str, str] | None:
    """Id and name of the Spark application of this driver; None elsewhere, and on Connect."""
    pyspark = sys.modules.get("pyspark")
    context = None if pyspark is None else pyspark.SparkContext._active_spark_context
    if context is None:
        return None
    try:
        return str(context.applicationId), str(context.appName)
    except AttributeError:  # it has not begun, or is over
        return None


def executor_name(application: tuple[str, str]) -> ExecutorName:
    """The executor of this Python worker, for the services that it calls.

    Spark tells a worker on Kubernetes alone which executor it belongs to. All workers of an
    executor have the same parent process.
    """
    executor = os.environ.get("SPARK_EXECUTOR_ID") or f"process {os.getppid()}"
    return ExecutorName(*application, socket.gethostname(), executor)


def locate(
    error: AqueductError, *, peer: str, handler: str, place: TaskContext, numbers: TaskMetrics
) -> AqueductError:
    """A copy of ``error`` whose text says where it happened.

    A copy, because the end of a connection is one object that many calls raise. Everything goes
    into the message, as Spark carries an error to the driver as text and leaves out frames,
    causes and attributes. What the text already names is not repeated.
    """
    error = copy.copy(error)
    text = str(error) or type(error).__name__
    host = peer.partition("://")[2]
    where = [] if f"{handler!r}" in text and host in text else [f"{handler!r} at {peer}"]
    if place is not NOWHERE and str(place):
        where.append(str(place))
    batch = getattr(error, "batch", None)
    if batch is not None and f"batch {batch}" not in text:
        where.append(f"batch {batch}")
    sent, received = numbers.batches_sent, numbers.batches_received
    where.append(f"after {sent} batches sent and {received} received")
    if isinstance(error, SchemaMismatch) and error.column and error.column not in text:
        where.append(f"column {error.column!r}: wanted {error.wanted}, got {error.got}")
    lines = [escape(f"{text} [{'; '.join(where)}]")]
    if isinstance(error, HandlerFailed) and error.remote_traceback:
        remote = error.remote_traceback.rstrip()
        lines += ["", "In the service:", remote]
        notes = getattr(error, "__notes__", [])  # it may be there too, for Python to show
        error.__notes__ = [note for note in notes if remote not in note]
    error.args = (Lines("\n".join(lines)), *error.args[1:])
    if isinstance(error, CallError):
        error.peer = error.peer or peer
        error.handler = error.handler or handler
    return error
