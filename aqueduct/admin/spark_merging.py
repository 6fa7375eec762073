"""Adds up what the workers of one service know of Spark tasks: a task may call several of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from aqueduct.admin.report import ExecutorReport, SparkReport, TaskReport

__all__ = ["first", "merged"]

R = TypeVar("R", bound=ExecutorReport)

_PLACE: Final = ("application", "host", "executor")
_TASK: Final = (*_PLACE, "stage", "partition", "task")
_SUMMED: Final = (
    "calls",
    "open_calls",
    "waiting_turn",
    "waiting_client",
    "failed",
    "batches_in",
    "rows_in",
    "bytes_in",
    "batches_out",
    "rows_out",
    "bytes_out",
)


def first(rows: Iterable[R], most: int) -> list[R]:
    """At most so many: those at work, then those that were last."""
    return heapq.nsmallest(most, rows, key=_order)


def merged(reports: Sequence[SparkReport], most: int) -> SparkReport:
    """The sum. Where workers left some off, the counts are those of all."""
    executors: dict[tuple[Any, ...], ExecutorReport] = {}
    tasks: dict[tuple[Any, ...], TaskReport] = {}
    for report in reports:
        _join(executors, report["executors"], _PLACE)
        _join(tasks, report["tasks"], _TASK)
    return {
        "executors": first(executors.values(), most),
        "executor_count": len(executors)
        + sum(each["executor_count"] - len(each["executors"]) for each in reports),
        "tasks": first(tasks.values(), most),
        "task_count": len(tasks) + sum(each["task_count"] - len(each["tasks"]) for each in reports),
        "forgotten": sum(each["forgotten"] for each in reports),
    }


def _join(sums: dict[tuple[Any, ...], R], rows: Iterable[R], names: Sequence[str]) -> None:
    for row in rows:
        told = cast("Mapping[str, Any]", row)
        key = tuple(told[name] for name in names)
        found = sums.get(key)
        if found is None:
            sums[key] = row.copy()
            continue
        total = cast("dict[str, Any]", found)
        for name in _SUMMED:
            total[name] += told[name]
        known = [each for each in (total["idle"], told["idle"]) if each is not None]
        total["idle"] = min(known, default=None)


def _order(row: ExecutorReport) -> tuple[bool, float]:
    return not row["open_calls"], row["idle"] or 0.0
