"""``TaskBook``: what a service knows of the Spark tasks that call it, for those who look on.

The connection of a task says which executor it is from, and each call has a partition, an attempt
and a write key anyway. So nothing is sent for this.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from operator import add
from typing import TYPE_CHECKING, Any, Final, cast

from aqueduct.admin.report import ExecutorReport, SparkReport, TaskReport
from aqueduct.admin.spark_merging import first
from aqueduct.escaping import escape
from aqueduct.rpc.executor_name import ExecutorName, executor_value
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.sink_commit import ATTEMPT_HEADER
from aqueduct.service.call_totals import COUNTED

if TYPE_CHECKING:
    from aqueduct.service.call import ServerCall

__all__ = ["TaskBook"]

_DIGITS: Final = 16
_LARGEST: Final = 1 << 53
"""Numbers above this are others in a browser."""
_DOCUMENT: Final = 4096
"""Characters of the document of an attempt (AC-84)."""
_CLIPPED: Final = 40
"""Characters of the name of a task that is no number."""


class _Record:
    """What the calls of one task, or of one executor, have come to."""

    __slots__ = ("calls", "counted", "ended", "executor", "failed", "handler", "place", "said")

    def __init__(self, executor: ExecutorName, head: CallHead | None = None) -> None:
        """``head``: of the first call of the task; None: of all tasks. It is not kept."""
        self.executor = executor
        self.said = None if head is None else _said_by(head)
        self.place: tuple[int | None, int | None, int | str] | None = None
        """Stage, partition and task, once somebody has looked."""
        self.handler = "" if head is None else head.handler
        """Of the last call."""
        self.calls = 0
        """That are over."""
        self.failed = 0
        self.counted = (0,) * len(COUNTED)
        self.ended = 0.0
        """When the last one was over."""

    def add(self, counted: Iterable[int], failed: bool, now: float) -> None:
        """A call is over."""
        self.calls += 1
        self.failed += failed
        self.ended = now
        self.counted = tuple(map(add, self.counted, counted))

    def row(self, now: float) -> ExecutorReport:
        """All of it as plain values."""
        name = self.executor
        batches_in, rows_in, bytes_in, batches_out, rows_out, bytes_out = self.counted
        return {
            "application": escape(name.application),
            "name": escape(name.name),
            "host": escape(name.host),
            "executor": escape(name.executor),
            "calls": self.calls,
            "open_calls": 0,
            "waiting_turn": 0,
            "waiting_client": 0,
            "failed": self.failed,
            "idle": max(0.0, now - self.ended) if self.calls else None,
            "batches_in": batches_in,
            "rows_in": rows_in,
            "bytes_in": bytes_in,
            "batches_out": batches_out,
            "rows_out": rows_out,
            "bytes_out": bytes_out,
        }

    def task(self, now: float) -> TaskReport:
        """The same of a task."""
        if self.place is None:
            assert self.said is not None
            self.place = _task_of(*self.said)
        stage, partition, task = self.place
        return {
            **self.row(now),
            "stage": stage,
            "partition": partition,
            "task": task,
            "handler": escape(self.handler),
        }


class TaskBook:
    """The tasks whose calls have ended, the last ``limit`` of them, and their executors.

    Lives on the service's event loop, but for ``report``.
    """

    def __init__(self, limit: int) -> None:
        """``limit``: of tasks, and of executors. 0: nothing is kept."""
        self._limit = limit
        # Those whose calls ended last stand last.
        self._tasks: dict[tuple[bytes, str], _Record] = {}
        self._executors: dict[bytes, _Record] = {}
        self._forgotten = 0

    def ended(self, running: ServerCall) -> None:
        """A call is over."""
        value = executor_value(running.connection.headers)
        if value is None or not self._limit:
            return
        executor = self._executors.pop(value, None)
        if executor is None:
            name = ExecutorName.decode(value)
            if name is None:
                return
            executor = _Record(name)
            if len(self._executors) >= self._limit:
                del self._executors[next(iter(self._executors))]
        self._executors[value] = executor
        counters, now = running.counters(), time.monotonic()
        counted = [counters[key] for key in COUNTED]
        executor.add(counted, running.failed, now)
        attempt = _attempt_of(running.head)
        if not attempt:
            return
        key = value, attempt
        task = self._tasks.pop(key, None)
        if task is None:
            task = _Record(executor.executor, running.head)
            if len(self._tasks) >= self._limit:
                del self._tasks[next(iter(self._tasks))]
                self._forgotten += 1
        self._tasks[key] = task
        task.handler = running.head.handler
        task.add(counted, running.failed, now)

    def report(self, open_calls: Iterable[ServerCall], most: int) -> SparkReport:
        """What is known as of now, at most ``most`` of each kind. For any thread.

        ``open_calls``: those that are under way.
        """
        now = time.monotonic()
        tasks: dict[tuple[bytes, str], TaskReport] = {
            key: record.task(now) for key, record in list(self._tasks.items())
        }
        executors = {value: record.row(now) for value, record in list(self._executors.items())}
        names: dict[bytes, ExecutorName | None] = {}
        for running in open_calls if self._limit else ():
            value = executor_value(running.connection.headers)
            if value is None:
                continue
            if value not in names:
                names[value] = ExecutorName.decode(value)
            name = names[value]
            if name is None:
                continue
            if value not in executors:
                executors[value] = _Record(name).row(now)
            _add_open(executors[value], running)
            attempt = _attempt_of(running.head)
            if attempt:
                key = value, attempt
                if key not in tasks:
                    tasks[key] = _Record(name, running.head).task(now)
                _add_open(tasks[key], running)
                tasks[key]["handler"] = escape(running.head.handler)
        return {
            "executors": first(executors.values(), most),
            "executor_count": len(executors),
            "tasks": first(tasks.values(), most),
            "task_count": len(tasks),
            "forgotten": self._forgotten,
        }


def _attempt_of(head: CallHead) -> str:
    """What all calls of one task have in common; a call that is made again has a dot and more."""
    return head.attempt.partition(".")[0]


def _said_by(head: CallHead) -> tuple[str, int | None, str, str | None]:
    """What a call says of its task; read only once somebody looks."""
    partition = None if head.partition is None else head.partition.index
    document = head.metadata.get(ATTEMPT_HEADER)
    if document is not None and len(document) > _DOCUMENT:
        document = None
    return head.write_key, partition, _attempt_of(head), document


def _task_of(
    write_key: str, partition: int | None, attempt: str, document: str | None
) -> tuple[int | None, int | None, int | str]:
    """Stage, partition and task: by the write key, or by the document of the attempt."""
    number = _number(attempt)
    task: int | str = escape(attempt[:_CLIPPED]) if number is None else number
    _, stage, last = f"//{write_key}".rsplit("/", 2)
    found = _number(stage) if last == str(partition) else None
    if document is not None:
        try:
            said = json.loads(document)
            own = said["stage"], said["task"]
        except (ValueError, TypeError, LookupError, RecursionError):
            pass  # the sink says what is wrong with it
        else:
            if all(type(each) is int and 0 <= each <= _LARGEST for each in own):
                found, task = own
    return found, partition, task


def _number(text: str) -> int | None:
    """What ``str`` made of a number; None for all else."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) < _DIGITS else None


def _add_open(report: ExecutorReport, running: ServerCall) -> None:
    row = cast("dict[str, Any]", report)
    ticket = running.input.ticket
    row["open_calls"] += 1
    row["calls"] += 1
    row["waiting_turn"] += ticket is not None and ticket.waits
    row["waiting_client"] += running.input.waits_for_client
    for key, count in running.counters().items():
        row[key] += count
