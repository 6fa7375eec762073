"""The report of a service that runs, for its operators; made in any thread, while calls go on."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Protocol, cast

from aqueduct.admin.report import (
    BOUNDS,
    COUNTS,
    CallReport,
    CallsReport,
    ConnectionReport,
    ConnectionsReport,
    HandlerReport,
    MemoryReport,
    Phase,
    Report,
    ServiceReport,
    library_version,
)
from aqueduct.config import Config
from aqueduct.endpoint import Connection, accounts
from aqueduct.service.call import ServerCall
from aqueduct.service.call_connection import CallConnection
from aqueduct.service.call_totals import UNKNOWN, CallTotals, HandlerTotals
from aqueduct.service.handlers import Handler
from aqueduct.service.reactive_gateway import connection_of
from aqueduct.service.task_book import TaskBook

__all__ = ["LoopWatch", "ReportHost", "ServiceReporter"]


class ReportHost(Protocol):
    """The service, as its report needs it."""

    name: str
    config: Config
    calls: set[ServerCall]
    totals: CallTotals
    tasks: TaskBook
    since: dict[CallConnection, float]
    """When each connection that is open began."""

    @property
    def addresses(self) -> list[str]:
        """What clients connect to."""

    @property
    def phase(self) -> Phase:
        """What the service is at."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The registered ones."""

    def counters(self) -> dict[str, int]:
        """What was counted since the start."""


class LoopWatch:
    """Whether an event loop turns, as seen from other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked: float | None = None
        self._lag = 0.0

    @property
    def lag(self) -> float:
        """By how many seconds its last turn was late that was asked for."""
        return self._lag

    def look(self) -> float:
        """Seconds since the loop was asked to turn and has not; 0: it has answered.

        It is asked now if it has answered before.
        """
        asked = self._asked
        if asked is not None:
            return time.monotonic() - asked
        self._asked = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._turned)
        except RuntimeError:  # it has ended
            self._asked = None
        return 0.0

    def _turned(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            self._lag = time.monotonic() - asked


class ServiceReporter:
    """Makes reports of one service; a ``ReportSource``."""

    def __init__(self, host: ReportHost, loop: asyncio.AbstractEventLoop) -> None:
        """``loop``: the service's."""
        self._host = host
        self._watch = LoopWatch(loop)
        self._started = time.time()
        # ``time.monotonic`` is the clock of calls and connections.
        self._offset = self._started - time.monotonic()
        self._begun = time.monotonic()
        self._most: dict[str, dict[str, int]] = {}
        """The largest counts that were told, by handler."""
        self._resumes = 0
        """The same of all connections."""

    async def report(self) -> Report:
        """See ``ReportSource``."""
        return self.make()

    def make(self) -> Report:
        """The report, as of now."""
        host = self._host
        # First what is over, then what is open. What ends in between is missing for a moment,
        # and is not counted twice.
        handlers = self._handlers()
        calls = tuple(host.calls)
        self._add_open(handlers, calls)
        counters = host.counters()
        connections = self._connections(calls, counters)
        memory = self._memory()
        listed = heapq.nsmallest(host.config.admin.listed, calls, key=lambda call: call.begun)
        return {
            "service": self._service(calls, connections, memory),
            "connections": connections,
            "calls": CallsReport(
                open=len(calls),
                waiting=sum(1 for call in calls if _waits(call)),
                limit=host.config.calls.max_calls_process,
                refused=counters["refused"],
                listed=[self._call(call) for call in listed],
            ),
            "handlers": handlers,
            "memory": memory,
            "workers": [],
            "spark": host.tasks.report(calls, host.config.admin.listed),
        }

    # Its parts

    def _service(
        self,
        calls: Collection[ServerCall],
        connections: ConnectionsReport,
        memory: Mapping[str, MemoryReport],
    ) -> ServiceReport:
        host, settings = self._host, self._host.config.admin
        lag, phase = self._watch.look(), host.phase
        reasons = []
        if phase != "serving":
            reasons.append(f"the service is {phase}")
        if lag >= settings.ready_lag:
            reasons.append(f"its event loop has not turned for {lag:.0f} s")
        loads = [
            ("calls", len(calls), host.config.calls.max_calls_process, settings.ready_load),
            ("connections", connections["open"], connections["limit"], settings.ready_load),
        ]
        if settings.ready_memory is not None:
            for name in ("received", "sending"):
                used, limit = memory[name]["bytes"], memory[name]["limit"] or 0
                loads.append((f"bytes ({name})", used, limit, settings.ready_memory))
        reasons += (
            f"it has {used} of {limit} {what}"
            for what, used, limit, share in loads
            if used >= limit * share
        )
        return {
            "name": host.name,
            "version": library_version(),
            "started": self._started,
            "uptime": time.monotonic() - self._begun,
            "addresses": host.addresses,
            "phase": phase,
            "ready": not reasons,
            "reasons": reasons,
            "live": lag < settings.live_lag,
            "loop_lag": lag or self._watch.lag,
        }

    def _connections(
        self, calls: Collection[ServerCall], counters: Mapping[str, int]
    ) -> ConnectionsReport:
        host = self._host
        busy = Counter(id(call.connection) for call in calls)
        opened = tuple(host.since.items())
        self._resumes = max(self._resumes, counters["resumes"])
        newest = heapq.nlargest(host.config.admin.listed, opened, key=lambda pair: pair[1])
        return {
            "total": counters["connections"],
            "resumes": self._resumes,
            "open": len(opened),
            "limit": host.config.limits.connections,
            "listed": [
                ConnectionReport(
                    peer=connection.carrier.peer,
                    carrier=_carrier_of(connection),
                    since=since + self._offset,
                    rtt=getattr(connection.carrier, "rtt", None) or None,
                    queued_bytes=connection.core.outgoing.queued,
                    calls=busy[id(connection)],
                    resumes=connection.carrier.resumes,
                    worker=None,
                )
                for connection, since in newest
            ],
        }

    def _call(self, call: ServerCall) -> CallReport:
        moved, name = call.counters(), call.head.handler
        return {
            "handler": name if name in self._host.handlers else "",
            "kind": call.head.kind,
            "peer": call.call.peer,
            "number": call.call.number,
            "since": call.begun + self._offset,
            "seconds": time.monotonic() - call.begun,
            "state": "waiting" if _waits(call) else "running",
            "rows_in": moved["rows_in"],
            "rows_out": moved["rows_out"],
            "bytes_in": moved["bytes_in"],
            "bytes_out": moved["bytes_out"],
            "worker": None,
        }

    def _handlers(self) -> dict[str, HandlerReport]:
        totals = self._host.totals.by_handler
        found = {
            name: _handler_report(handler.kind, totals.get(name))
            for name, handler in tuple(self._host.handlers.items())
        }
        found[UNKNOWN] = _handler_report("", totals.get(UNKNOWN))
        return found

    def _add_open(
        self, handlers: Mapping[str, HandlerReport], calls: Collection[ServerCall]
    ) -> None:
        for call in calls:
            found: Any = handlers.get(call.head.handler) or handlers[UNKNOWN]
            found["open"] += 1
            found["waiting"] += _waits(call)
            found["resumes"] += call.resumes
            for name, count in call.counters().items():
                found[name] += count
        for handler, report in handlers.items():
            most, counted = self._most.setdefault(handler, {}), cast("dict[str, int]", report)
            for name in COUNTS:
                most[name] = counted[name] = max(most.get(name, 0), counted[name])

    def _memory(self) -> dict[str, MemoryReport]:
        process, flow = accounts.process(), self._host.config.flow
        return {
            "received": {"bytes": process.receiving.used, "limit": flow.process_receive_bytes},
            "kept": {"bytes": process.receiving.kept, "limit": None},
            "sending": {"bytes": process.sending.used, "limit": flow.process_send_bytes},
        }


def _handler_report(kind: str, totals: HandlerTotals | None) -> HandlerReport:
    moved: dict[str, int] = dict.fromkeys(COUNTS, 0) if totals is None else totals.moved
    return {
        "kind": kind,
        "open": 0,
        "waiting": 0,
        "calls": 0 if totals is None else totals.calls,
        "batches_in": moved["batches_in"],
        "rows_in": moved["rows_in"],
        "bytes_in": moved["bytes_in"],
        "batches_out": moved["batches_out"],
        "rows_out": moved["rows_out"],
        "bytes_out": moved["bytes_out"],
        "resumes": 0 if totals is None else totals.resumes,
        "errors": {} if totals is None else dict(totals.errors),
        "seconds": 0.0 if totals is None else totals.seconds,
        "buckets": [0] * (len(BOUNDS) + 1) if totals is None else list(totals.buckets),
    }


def _carrier_of(connection: CallConnection) -> str:
    own = connection_of(connection)
    if not isinstance(own, Connection):
        return "reactivesocket"
    return own.carrier.scheme.removeprefix("aqueduct").removeprefix("+") or "quic"


def _waits(call: ServerCall) -> bool:
    ticket = call.input.ticket
    return ticket is not None and ticket.waits
