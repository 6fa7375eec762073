"""Adds the reports of several workers up. Counters never fall, also when a worker has died."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from aqueduct.admin.report import (
    BOUNDS,
    COUNTS,
    CallReport,
    ConnectionReport,
    HandlerReport,
    MemoryReport,
    Phase,
    Report,
    WorkerReport,
    library_version,
)
from aqueduct.admin.spark_merging import merged

__all__ = ["WorkerReports"]

_LATE: Final = 5.0
"""Seconds after which a worker that tells nothing is not ready."""


@dataclass(slots=True)
class _Worker:
    """One worker: the process that is there now, and what died."""

    pid: int | None = None
    started: float | None = None
    report: Report | None = None
    """The last one of this process."""
    came: float = 0.0
    """When it came, by ``time.monotonic``."""
    deaths: int = 0


class WorkerReports:
    """The last report of each of ``count`` workers, and the counts of processes that have ended.

    What a process counts after its last report and before it is killed is lost.
    """

    def __init__(self, count: int, service: str) -> None:
        """``service``: what it is called until a worker tells its name."""
        self._workers = [_Worker() for _ in range(count)]
        self._name = service
        self._started = time.time()
        self._begun = time.monotonic()
        self._handlers: dict[str, HandlerReport] = {}
        """The counts of processes that have ended."""
        self._total = self._resumes = self._refused = 0
        """Of connections and calls of those processes."""

    # What becomes of workers

    def began(self, number: int, pid: int) -> None:
        """A process of this worker was started."""
        worker = self._workers[number]
        worker.pid, worker.started = pid, time.time()

    def came(self, number: int, report: Report) -> None:
        """A report of this worker's process."""
        worker = self._workers[number]
        worker.report, worker.came = report, time.monotonic()

    def ended(self, number: int, *, well: bool) -> None:
        """The process of this worker has ended; ``well``: it was told to."""
        worker = self._workers[number]
        last = worker.report
        worker.pid = worker.started = worker.report = None
        worker.deaths += not well
        if last is not None:
            self._total += last["connections"]["total"]
            self._resumes += last["connections"]["resumes"]
            self._refused += last["calls"]["refused"]
            _add(self._handlers, last["handlers"])

    # The sum

    def make(
        self, phase: Phase, addresses: list[str], listed: int, live_lag: float = 60.0
    ) -> Report:
        """The report of the service. ``listed``: connections, and calls, that it lists at most.

        ``live_lag``: seconds after which a worker that tells nothing is not live.
        """
        now = time.monotonic()
        workers = [self._worker(number, now, live_lag) for number in range(len(self._workers))]
        found = [
            (number, worker.report)
            for number, worker in enumerate(self._workers)
            if worker.report is not None
        ]
        reports = [report for _, report in found]
        for report in reports:
            self._name = report["service"]["name"]
        handlers = copy.deepcopy(self._handlers)
        for each in handlers.values():
            each["open"] = each["waiting"] = 0
        for report in reports:
            _add(handlers, report["handlers"], now=True)
        reasons = [] if phase == "serving" else [f"the service is {phase}"]
        for worker in workers:
            reasons += (f"worker {worker['number']}: {reason}" for reason in worker["reasons"])
        connections = [
            ConnectionReport(**{**each, "worker": number})
            for number, report in found
            for each in report["connections"]["listed"]
        ]
        calls = [
            CallReport(**{**each, "worker": number})
            for number, report in found
            for each in report["calls"]["listed"]
        ]
        connections.sort(key=lambda each: -each["since"])
        calls.sort(key=lambda each: each["since"])
        return {
            "service": {
                "name": self._name,
                "version": library_version(),
                "started": self._started,
                "uptime": now - self._begun,
                "addresses": addresses,
                "phase": phase,
                "ready": not reasons,
                "reasons": reasons,
                # A worker that is replaced, or has not begun, is no reason to end them all.
                "live": any(worker["live"] for worker in workers) or not found,
                "loop_lag": max((each["service"]["loop_lag"] for each in reports), default=0.0),
            },
            "connections": {
                "total": self._total + sum(each["connections"]["total"] for each in reports),
                "resumes": self._resumes + sum(each["connections"]["resumes"] for each in reports),
                "open": sum(each["connections"]["open"] for each in reports),
                "limit": sum(each["connections"]["limit"] for each in reports),
                "listed": connections[:listed],
            },
            "calls": {
                "open": sum(each["calls"]["open"] for each in reports),
                "waiting": sum(each["calls"]["waiting"] for each in reports),
                "limit": sum(each["calls"]["limit"] for each in reports),
                "refused": self._refused + sum(each["calls"]["refused"] for each in reports),
                "listed": calls[:listed],
            },
            "handlers": handlers,
            "memory": _memory(reports),
            "workers": workers,
            "spark": merged([report["spark"] for report in reports], listed),
        }

    def _worker(self, number: int, now: float, live_lag: float) -> WorkerReport:
        worker = self._workers[number]
        report = worker.report
        if report is None:
            return {
                "number": number,
                "pid": worker.pid,
                "phase": "starting",
                "ready": False,
                "live": False,
                "reasons": ["it has not begun to listen"],
                "started": worker.started,
                "deaths": worker.deaths,
                "age": None,
            }
        service, age = report["service"], now - worker.came
        reasons = list(service["reasons"])
        if age >= _LATE:
            reasons.append(f"it has told nothing for {age:.0f} s")
        return {
            "number": number,
            "pid": worker.pid,
            "phase": service["phase"],
            "ready": not reasons,
            "live": service["live"] and age < live_lag,
            "reasons": reasons,
            "started": worker.started,
            "deaths": worker.deaths,
            "age": age,
        }


def _add(
    sums: dict[str, HandlerReport], reports: Mapping[str, HandlerReport], *, now: bool = False
) -> None:
    """Adds counts to sums; ``now``: what is open, too."""
    for name, report in reports.items():
        found = sums.get(name)
        if found is None:
            found = sums[name] = copy.deepcopy(report)
            if not now:
                found["open"] = found["waiting"] = 0
            continue
        total, counted = cast("dict[str, Any]", found), cast("dict[str, Any]", report)
        for count in (*COUNTS, "seconds", *(("open", "waiting") if now else ())):
            total[count] += counted[count]
        for status, count in report["errors"].items():
            found["errors"][status] = found["errors"].get(status, 0) + count
        for place in range(len(BOUNDS) + 1):
            found["buckets"][place] += report["buckets"][place]


def _memory(reports: Iterable[Report]) -> dict[str, MemoryReport]:
    sums: dict[str, MemoryReport] = {}
    for report in reports:
        for name, account in report["memory"].items():
            found = sums.setdefault(name, {"bytes": 0, "limit": None})
            found["bytes"] += account["bytes"]
            if account["limit"] is not None:
                found["limit"] = (found["limit"] or 0) + account["limit"]
    return sums
