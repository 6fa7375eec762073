"""What the work of tasks counts, and how it reaches the driver.

``TaskMetrics`` is one task's. A ``Tally`` is made on the driver and travels inside the function;
each task adds its numbers, and the driver reads the sum. It is a Spark accumulator:

- The numbers of a task arrive when the task has ended well. What failed, was killed, or was left
  early (``limit``, ``take``, an error of a later step) adds nothing; the worker's log and the
  service's counters have it.
- Spark counts each task of a job's last stage once, whatever was tried twice. Earlier stages count
  again when they are computed again.
- Spark Connect has no accumulators: there a tally stays at zero, and ``summary`` says so.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeAlias

from aqueduct.client.call_metrics import CallMetrics
from spark_udfs.worker.summary import TaskSummary

__all__ = ["Tally", "TaskMetrics", "Total"]

MiB: Final = 1 << 20


TaskMetrics: TypeAlias = CallMetrics
"""Counted by one task, of one partition."""


@dataclass(slots=True)
class Total(CallMetrics):
    """The sum of the numbers of tasks."""

    tasks: int = 0
    """How many were added."""

    def __add__(self, other: CallMetrics) -> Total:
        """A new sum; ``other`` without tasks of its own counts as one."""
        total = replace(self)
        for field in fields(CallMetrics):
            setattr(total, field.name, getattr(self, field.name) + getattr(other, field.name))
        total.tasks += other.tasks if isinstance(other, Total) else 1
        return total

    def __str__(self) -> str:
        """A few lines for people."""
        first, *others = self.rows()
        return "\n".join([first[1], *(f"{name:8}  {value}" for name, value in others)])

    def rows(self) -> list[tuple[str, str]]:
        """The same as names with what they are."""
        troubles = (
            _many(self.retries, "retry", "retries"),
            _many(self.reconnects, "reconnect"),
            _many(self.resumes, "resume"),
            _many(self.failed_batches, "failed batch", "failed batches"),
        )
        return [
            ("", _many(self.tasks, "task")),
            ("sent", self._moved("sent")),
            ("received", self._moved("received")),
            ("waited", f"{self.waiting_seconds:,.1f} s for the service"),
            ("", ", ".join(troubles)),
        ]

    def _moved(self, way: str) -> str:
        batches, rows, size = (
            getattr(self, f"{name}_{way}") for name in ("batches", "rows", "bytes")
        )
        return f"{_many(batches, 'batch', 'batches')}, {_many(rows, 'row')}, {size / MiB:,.1f} MiB"


class Tally:
    """The sum of what tasks count. Made on the driver, used in tasks, read on the driver.

    Thread-safe. A copy that a task has is for ``add`` alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = Total()  # of calls in this process, Spark or not
        self._accumulator: Any = None  # made when the function is first sent to executors
        self._begun = Total()  # what the accumulator had when ``clear`` was called

    def add(self, numbers: TaskMetrics) -> None:
        """Adds what one task counted; to be called once, before the task ends."""
        with self._lock:
            if self._accumulator is not None and self._accumulator._deserialized:
                self._accumulator.add(numbers)
            else:
                self._here += numbers

    @property
    def value(self) -> Total:
        """The sum so far, of the tasks that ended well."""
        with self._lock:
            return self._sum()

    def clear(self) -> None:
        """Begins again at zero."""
        with self._lock:
            self._here = Total()
            self._begun = Total() if self._accumulator is None else self._accumulator.value

    def summary(self) -> TaskSummary:
        """``value`` in a few lines for people, or why there is nothing to sum up."""
        total = self.value
        if total.tasks:
            return TaskSummary(str(total), rows=total.rows())
        if _remote():
            return TaskSummary(
                "no numbers: Spark Connect has no accumulators. Each task's are in the log of its "
                "Python worker (spark.sql.pyspark.worker.logging.enabled), in OpenTelemetry if "
                "the workers have it, and in the service's own counters"
            )
        return TaskSummary("no numbers yet: they come with each task that ends well")

    def _sum(self) -> Total:
        if self._accumulator is None:
            return self._here
        shipped: Total = self._accumulator.value
        total = self._here + shipped
        for field in fields(Total):
            begun = getattr(self._begun, field.name)
            setattr(total, field.name, getattr(total, field.name) - begun)
        return total

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        with self._lock:
            if self._accumulator is None:
                self._accumulator = _new_accumulator()
            return _travelled, (self._accumulator,)

    def __repr__(self) -> str:
        return f"<Tally of {_many(self.value.tasks, 'task')}>"


class _Sums:
    """How Spark adds: an ``AccumulatorParam``, without the import of PySpark."""

    def zero(self, value: Total) -> Total:
        return Total()

    def addInPlace(self, value: Total, other: TaskMetrics) -> Total:  # noqa: N802  Spark's name
        return value + other


def _travelled(accumulator: Any) -> Tally:
    """A tally as it comes out of a pickle."""
    tally = Tally()
    tally._accumulator = accumulator
    return tally


def _new_accumulator() -> Any:
    """Of the Spark context that is active here; None without one, and on Connect."""
    if "pyspark" not in sys.modules or _remote():
        return None
    from pyspark import SparkContext, TaskContext

    context = SparkContext._active_spark_context
    if context is None or TaskContext.get() is not None:
        return None
    return context.accumulator(Total(), _Sums())  # type: ignore[arg-type]


def _remote() -> bool:
    """Whether Spark is used here through Connect."""
    if "pyspark" not in sys.modules:
        return False
    from pyspark.sql.utils import is_remote

    return is_remote()


def _many(count: int, one: str, several: str = "") -> str:
    return f"{count:,} {one if count == 1 else several or one + 's'}"
