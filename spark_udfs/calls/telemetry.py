"""A task's work as users see it elsewhere: in the tally, the worker's log, and OpenTelemetry.

Whoever does the work of a task does it inside ``working``. That adds the task's numbers to the
tally, writes one record into the worker's log, and, where a trace is wanted, opens a span that is a
child of the driver's and the parent of the handler's.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Final

from aqueduct.errors import ConfigError
from aqueduct.escaping import logger_of
from aqueduct.rpc.tracing import current_trace
from spark_udfs.calls.partition import CallSpec
from spark_udfs.worker.metrics import Tally, TaskMetrics
from spark_udfs.worker.task import TaskContext

__all__ = ["Setup", "Trace", "carrier_of", "traced", "working"]

log = logger_of("spark_udfs")

Setup = Callable[[], object]
"""Sets OpenTelemetry up in a Python worker: providers and exporters."""

_FLUSH: Final = 2000
"""Milliseconds that spans of a task that failed may take to leave: its process ends."""
_prepared: set[str] = set()


class Trace:
    """The trace that a function belongs to: of the span in which it was made, or sent.

    Without OpenTelemetry, and where no span is current, there is none, and it costs nothing.
    """

    def __init__(self, setup: Setup | None = None) -> None:
        self.setup = setup
        """Called in each Python worker before its first span."""
        self.carrier = current_trace()
        """The headers that lead to the driver's span, by the propagators that are set there."""

    @property
    def wanted(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self.carrier) or self.setup is not None

    def prepare(self) -> None:
        """Sets this process up, once. Raises ConfigError for what ``setup`` raises."""
        if self.setup is None:
            return
        # A function that travels is another object in each task: it is known by its name.
        name = getattr(self.setup, "__qualname__", None)
        key = repr(self.setup) if name is None else f"{self.setup.__module__}.{name}"
        if key in _prepared:
            return
        _prepared.add(key)
        try:
            self.setup()
        except Exception as error:
            raise ConfigError(
                f"telemetry, which is called once in each Python worker, raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def of(self, carrier: dict[str, str]) -> Trace:
        """The same of another span of the driver's."""
        return _travelled(self.setup, carrier)

    def __reduce__(self) -> tuple[Any, tuple[Any, dict[str, str]]]:
        return _travelled, (self.setup, current_trace() or self.carrier)


def traced() -> dict[str, str]:
    """The options by which a reading or writing of the Data Source joins the current span.

    ``spark.read.format("aqueduct").options(**traced())``: Spark makes the source in another
    process, which does not know of the span. Empty without one, or without OpenTelemetry.
    """
    carrier = current_trace()
    return {"trace": json.dumps(carrier)} if carrier else {}


def carrier_of(given: Any) -> dict[str, str]:
    """What ``traced`` has made text of. Raises ValueError."""
    found = json.loads(given)
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ValueError
    return found


def _travelled(setup: Setup | None, carrier: dict[str, str]) -> Trace:
    trace = Trace(setup)
    trace.carrier = carrier
    return trace


class working:  # noqa: N801  a context manager, as those of contextlib
    """Around the work of one task, however it ends. Gives what is to be called.

    That is ``calling``, with the headers of the span if there is one.
    """

    __slots__ = ("_calling", "_numbers", "_place", "_span", "_tally")

    def __init__(
        self,
        calling: CallSpec,
        *,
        tally: Tally,
        trace: Trace,
        place: TaskContext,
        numbers: TaskMetrics,
        verb: str = "exchange",
    ) -> None:
        self._calling, self._place, self._numbers = calling, place, numbers
        self._tally = tally
        self._span = _span(calling, trace, place, verb)

    def __enter__(self) -> CallSpec:
        return self._calling if self._span is None else self._span.calling

    def __exit__(self, kind: object, failure: BaseException | None, traceback: object) -> None:
        self._tally.add(self._numbers)
        _record(self._calling, self._place, self._numbers, failure)
        if self._span is not None:
            self._span.end(self._numbers, failure)


def _record(
    calling: CallSpec, place: TaskContext, numbers: TaskMetrics, failure: BaseException | None
) -> None:
    """One record in the log of the Python worker, with the numbers as its context."""
    if "PYSPARK_SPARK_SESSION_UUID" in os.environ and log.level == logging.NOTSET:
        log.setLevel(logging.INFO)  # Spark makes a table of the log: the records are wanted
    if not log.isEnabledFor(logging.INFO):
        return
    outcome = _outcome(failure)
    context = {"handler": calling.handler, "outcome": outcome}
    context |= {name: f"{value}" for name, value in asdict(numbers).items()}
    if place.task is not None:
        context |= {name: f"{value}" for name, value in asdict(place).items()}
    log.info(
        "%r, %s: %s; %d batches and %d rows sent, %d batches and %d rows received, "
        "%.3f s waited, %d retries, %d reconnects, %d resumes, "
        "%d failed batches",
        calling.handler,
        place if place.task is not None else "without a task",
        outcome,
        numbers.batches_sent,
        numbers.rows_sent,
        numbers.batches_received,
        numbers.rows_received,
        numbers.waiting_seconds,
        numbers.retries,
        numbers.reconnects,
        numbers.resumes,
        numbers.failed_batches,
        extra={"context": context},
    )


def _outcome(failure: BaseException | None) -> str:
    if failure is None:
        return "well"
    if isinstance(failure, GeneratorExit):
        return "left early"
    return f"failed with {type(failure).__name__}"


class _Span:
    """One task's, of kind client."""

    def __init__(self, calling: CallSpec, trace: Trace, place: TaskContext, verb: str) -> None:
        from opentelemetry import metrics, propagate
        from opentelemetry import trace as api

        self._api = api
        self._handler = calling.handler
        self._in_task = place.task is not None
        self._metrics = metrics
        attributes: dict[str, Any] = {
            "rpc.system.name": "aqueduct",
            "rpc.method": calling.handler,
            "server.address": calling.places,
        }
        if place.task is not None:
            names = {"stage": place.stage, "partition": place.partition, "attempt": place.attempt}
            names["task"] = place.task
            attributes |= {f"spark.{name}": value for name, value in names.items()}
        parent = propagate.extract(current_trace() or trace.carrier)
        self._span = api.get_tracer("aqueduct").start_span(
            f"{verb} {calling.handler}",
            context=parent,
            kind=api.SpanKind.CLIENT,
            attributes=attributes,
        )
        # Not the current span: the code around a generator runs between its steps.
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context=api.set_span_in_context(self._span, parent))
        self.calling = replace(calling, headers=_joined(carrier, calling))

    def end(self, numbers: TaskMetrics, failure: BaseException | None) -> None:
        span = self._span
        for name, value in asdict(numbers).items():
            span.set_attribute(f"aqueduct.{name}", value)
        span.set_attribute("aqueduct.outcome", _outcome(failure))
        if failure is not None and not isinstance(failure, GeneratorExit):
            span.record_exception(failure)
            span.set_status(self._api.StatusCode.ERROR, str(failure))
        span.end()
        meter = self._metrics.get_meter("aqueduct")
        named = {"rpc.method": self._handler}
        for name, value in asdict(numbers).items():
            if value:
                meter.create_counter(f"aqueduct.client.{name}").add(value, named)
        if failure is not None and self._in_task:
            flush = getattr(self._api.get_tracer_provider(), "force_flush", None)
            if flush is not None:
                flush(_FLUSH)


def _span(calling: CallSpec, trace: Trace, place: TaskContext, verb: str) -> _Span | None:
    if trace.setup is None and not trace.carrier and "opentelemetry.trace" not in sys.modules:
        return None
    if place.task is not None and trace.setup is not None:
        trace.prepare()
    if not trace.wanted and not current_trace():
        return None
    try:
        return _Span(calling, trace, place, verb)
    except ImportError:  # the driver has OpenTelemetry and this executor has not
        return _Passing(replace(calling, headers=_joined(trace.carrier, calling)))


class _Passing(_Span):
    """No span: the handler's is the child of the driver's."""

    def __init__(self, calling: CallSpec) -> None:
        self.calling = calling

    def end(self, numbers: TaskMetrics, failure: BaseException | None) -> None:
        pass


def _joined(carrier: dict[str, str], calling: CallSpec) -> tuple[tuple[str, str], ...]:
    """The headers of a call; those that its user gave go first."""
    return tuple({**carrier, **dict(calling.headers)}.items())
