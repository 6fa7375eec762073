"""``Report``: what a service tells its operators, as plain values; the document ``/state.json``.

A process makes one, ``aqueduct.admin.merging`` adds those of several workers up, and the metrics
are written from it. So all that an operator sees comes from one place.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal, TypeAlias, TypedDict

__all__ = [
    "BOUNDS",
    "COUNTS",
    "CallReport",
    "CallState",
    "CallsReport",
    "ConnectionReport",
    "ConnectionsReport",
    "ExecutorReport",
    "HandlerReport",
    "MemoryReport",
    "Phase",
    "Report",
    "ServiceReport",
    "SparkReport",
    "TaskReport",
    "WorkerReport",
    "library_version",
]

BOUNDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    1800.0,
)
"""Upper bounds of the buckets in which the seconds of calls are counted. One more has no bound."""

COUNTS: Final = (
    "calls",
    "batches_in",
    "rows_in",
    "bytes_in",
    "batches_out",
    "rows_out",
    "bytes_out",
    "resumes",
)
"""What a HandlerReport counts, beside its seconds and its errors. None of them ever falls."""

Phase: TypeAlias = Literal["starting", "serving", "draining"]
CallState: TypeAlias = Literal["running", "waiting"]


class ServiceReport(TypedDict):
    """The service itself."""

    name: str
    version: str
    """Of the library."""
    started: float
    """Seconds since 1970."""
    uptime: float
    """Seconds."""
    addresses: list[str]
    """Where it listens; empty while it does not."""
    phase: Phase
    ready: bool
    """Whether it should get new calls."""
    reasons: list[str]
    """Why it should not, for people; empty if it should."""
    live: bool
    """Whether its event loop turns."""
    loop_lag: float
    """Seconds in which the event loop has not turned, or that its last turn was late."""


class ConnectionReport(TypedDict):
    """One connection that is open."""

    peer: str
    carrier: str
    """quic, tls, tcp, unix, memory or reactivesocket."""
    since: float
    """Seconds since 1970."""
    rtt: float | None
    """The smoothed round trip, seconds; None: it is not known."""
    queued_bytes: int
    """What was sent and has not left."""
    calls: int
    """Its calls that are open."""
    resumes: int
    """How often it was cut and went on."""
    worker: int | None


class ConnectionsReport(TypedDict):
    """All connections."""

    total: int
    """Since the start. It never falls, as ``resumes``."""
    resumes: int
    open: int
    limit: int
    """Limits.connections, of all workers together."""
    listed: list[ConnectionReport]
    """The newest, at most Admin.listed of them."""


class CallReport(TypedDict):
    """One call in flight."""

    handler: str
    """Its registered name; empty if no handler has the name that was called."""
    kind: str
    peer: str
    number: int
    since: float
    """Seconds since 1970."""
    seconds: float
    """Since then."""
    state: CallState
    """"waiting": for its turn, in the queue of its handler."""
    rows_in: int
    rows_out: int
    bytes_in: int
    bytes_out: int
    worker: int | None


class CallsReport(TypedDict):
    """All calls."""

    open: int
    waiting: int
    """Those of them that wait for their turn."""
    limit: int
    """Calls.max_calls_process, of all workers together."""
    refused: int
    """Calls that never began; it never falls."""
    listed: list[CallReport]
    """Those that are open longest, at most Admin.listed of them."""


class HandlerReport(TypedDict):
    """What calls of one handler have done, since the start."""

    kind: str
    """exchange, source or sink; empty: calls of names that no handler has."""
    open: int
    waiting: int
    calls: int
    """Calls that came, refused ones included."""
    batches_in: int
    rows_in: int
    bytes_in: int
    batches_out: int
    rows_out: int
    bytes_out: int
    resumes: int
    """Cuts of their connection after which open calls went on."""
    errors: dict[str, int]
    """Calls that ended otherwise than ``ok``, by status."""
    seconds: float
    """The sum of what accepted calls took, from their message to their status."""
    buckets: list[int]
    """Those calls by what they took: one number for each of BOUNDS, and one for more."""


class MemoryReport(TypedDict):
    """One account of memory."""

    bytes: int
    limit: int | None
    """None: it has no bound of its own."""


class WorkerReport(TypedDict):
    """One worker process."""

    number: int
    pid: int | None
    """None: there is no process now."""
    phase: Phase
    ready: bool
    live: bool
    reasons: list[str]
    started: float | None
    """Seconds since 1970, of this process; None: there is none."""
    deaths: int
    """Processes of this worker that died."""
    age: float | None
    """Seconds since this worker's numbers came; None: none came yet."""


class ExecutorReport(TypedDict):
    """A Spark executor, as its connections and calls tell of it. All texts are the client's."""

    application: str
    """Spark's id; empty: it is not known."""
    name: str
    """Of the application."""
    host: str
    executor: str
    """What tells executors of one machine apart."""
    calls: int
    """Open ones included."""
    open_calls: int
    waiting_turn: int
    """Open calls that wait for their turn."""
    waiting_client: int
    """Open calls that wait for the client: for its next batch, or until it reads."""
    failed: int
    """Calls that ended with an error after they had begun."""
    idle: float | None
    """Seconds since the end of the last call; None: none has ended."""
    batches_in: int
    rows_in: int
    bytes_in: int
    batches_out: int
    rows_out: int
    bytes_out: int


class TaskReport(ExecutorReport):
    """One attempt of a task of it. A number that is not known is None."""

    stage: int | None
    partition: int | None
    task: int | str
    """Spark's number; text, if the client calls it otherwise."""
    handler: str
    """Of a call that is open, or else of the last one."""


class SparkReport(TypedDict):
    """The Spark executors and tasks whose calls the service remembers."""

    executors: list[ExecutorReport]
    """At most Admin.listed: those at work first, then the latest. So it is with the tasks."""
    executor_count: int
    tasks: list[TaskReport]
    task_count: int
    forgotten: int
    """Tasks that the processes of now remember no longer, see Calls.spark_tasks."""


class Report(TypedDict):
    """All of it."""

    service: ServiceReport
    connections: ConnectionsReport
    calls: CallsReport
    handlers: dict[str, HandlerReport]
    """By name. ``aqueduct.unknown`` has the calls of names that no handler has."""
    memory: dict[str, MemoryReport]
    """``received``, ``kept`` and ``sending``."""
    workers: list[WorkerReport]
    """Empty: the service has one process."""
    spark: SparkReport


@cache
def library_version() -> str:
    """The version of this library."""
    try:
        return version("aqueduct-arrow")
    except PackageNotFoundError:
        return "unknown"
