"""Reports made by hand."""

from __future__ import annotations

from typing import Any

from aqueduct.admin.report import BOUNDS, HandlerReport, Report


def handler(**given: Any) -> HandlerReport:
    """The counts of one handler; those that are not given are zero."""
    made: Any = dict.fromkeys(
        (
            "open",
            "waiting",
            "calls",
            "batches_in",
            "rows_in",
            "bytes_in",
            "batches_out",
            "rows_out",
            "bytes_out",
            "resumes",
        ),
        0,
    )
    made |= {"kind": "exchange", "errors": {}, "seconds": 0.0, "buckets": [0] * (len(BOUNDS) + 1)}
    made |= given
    found: HandlerReport = made
    return found


def report(*, connections: int = 0, lag: float = 0.0, **handlers: HandlerReport) -> Report:
    """The report of one process, with so many connections in all, of which one is open."""
    return {
        "service": {
            "name": "words",
            "version": "1.2.3",
            "started": 1000.0,
            "uptime": 5.0,
            "addresses": ["aqueduct+tcp://127.0.0.1:1"],
            "phase": "serving",
            "ready": True,
            "reasons": [],
            "live": lag < 60,
            "loop_lag": lag,
        },
        "connections": {
            "total": connections,
            "resumes": 2 * connections,
            "open": 1,
            "limit": 100,
            "listed": [
                {
                    "peer": "127.0.0.1:2",
                    "carrier": "tcp",
                    "since": 1000.0 + connections,
                    "rtt": 0.001,
                    "queued_bytes": 0,
                    "calls": 1,
                    "resumes": 0,
                    "worker": None,
                }
            ],
        },
        "calls": {
            "open": 3,
            "waiting": 1,
            "limit": 50,
            "refused": 4,
            "listed": [],
        },
        "handlers": handlers,
        "memory": {
            "received": {"bytes": 10, "limit": 1000},
            "kept": {"bytes": 1, "limit": None},
            "sending": {"bytes": 20, "limit": 2000},
        },
        "workers": [],
        "spark": {
            "executors": [],
            "executor_count": 0,
            "tasks": [],
            "task_count": 0,
            "forgotten": 0,
        },
    }
