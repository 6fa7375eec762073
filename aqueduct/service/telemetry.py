"""What becomes of a service's calls, told to OpenTelemetry, for who wants that.

::

    service = aqueduct.Service("scores", telemetry=OpenTelemetry())

Each call that the service accepts is a span, the child of the one whose ``traceparent`` came with
the call's headers. While its handler runs it is the current one, in threads too. OpenTelemetry
is the extra ``aqueduct-arrow[telemetry]``; it is imported by the line above and not before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

from aqueduct.endpoint.accounts import process
from aqueduct.errors import ConfigError
from aqueduct.service.context import Call

__all__ = ["Observation", "Observer", "OpenTelemetry"]

_COUNTERS: Final = ("batches", "rows", "bytes")


class Observation(Protocol):
    """One call, observed."""

    def ended(self, status: str, message: str, counters: Mapping[str, int]) -> None:
        """Called once, when the call has its status ("ok", or why it failed)."""


class Observer(Protocol):
    """What ``Service(telemetry=...)`` takes."""

    def began(self, call: Call) -> Observation:
        """Called when a call was accepted, in the context in which its handler will run."""


class OpenTelemetry:
    """Tells of calls in spans and metrics.

    - ``tracer_provider``, ``meter_provider``: who takes them; None: the global ones, which
      programs set by ``opentelemetry.trace.set_tracer_provider`` or by the environment.

    Raises ConfigError without the package ``opentelemetry-api``.
    """

    def __init__(self, *, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        try:
            from opentelemetry import context, metrics, propagate, trace
        except ImportError as error:
            raise ConfigError(
                f"telemetry needs OpenTelemetry ({error}): pip install 'aqueduct-arrow[telemetry]'"
            ) from error
        self._tracer = trace.get_tracer("aqueduct", tracer_provider=tracer_provider)
        meter = metrics.get_meter("aqueduct", meter_provider=meter_provider)
        self._duration = meter.create_histogram(
            "aqueduct.server.duration", unit="s", description="Calls, from acceptance to status"
        )
        self._moved = {
            name: meter.create_counter(f"aqueduct.server.{name}", description=f"{name} moved")
            for name in _COUNTERS
        }

        def memory(options: Any) -> list[Any]:
            found = process()
            shares = {
                "received": found.receiving.used,
                "kept": found.receiving.kept,
                "sending": found.sending.used,
            }
            return [
                metrics.Observation(size, {"aqueduct.account": name})
                for name, size in shares.items()
            ]

        meter.create_observable_up_down_counter(
            "aqueduct.process.memory",
            callbacks=[memory],
            unit="By",
            description="Batches received, kept by handlers beyond need, and to be sent",
        )
        self._extract = propagate.extract
        self._attach = context.attach
        self._current = trace.set_span_in_context
        self._server = trace.SpanKind.SERVER
        self._error = trace.StatusCode.ERROR

    def began(self, call: Call) -> Observation:
        """Opens the span of a call."""
        attributes: dict[str, Any] = {
            "rpc.system": "aqueduct",
            "rpc.method": call.handler,
            "network.peer.address": call.peer,
            "aqueduct.kind": call.kind,
        }
        if call.run:
            attributes |= {"aqueduct.run": call.run, "aqueduct.attempt": call.attempt}
        if call.partition is not None:
            attributes["aqueduct.partition"] = call.partition.index
        parent = self._extract(call.headers)
        span = self._tracer.start_span(
            call.handler, context=parent, kind=self._server, attributes=attributes
        )
        # Each call has a context of its own, which ends with it: nothing is detached.
        self._attach(self._current(span, parent))
        return _Span(self, span, call.handler)


class _Span:
    __slots__ = ("_begun", "_handler", "_owner", "_span")

    def __init__(self, owner: OpenTelemetry, span: Any, handler: str) -> None:
        self._owner = owner
        self._span = span
        self._handler = handler
        self._begun = time.monotonic()

    def ended(self, status: str, message: str, counters: Mapping[str, int]) -> None:
        owner, span = self._owner, self._span
        named = {"rpc.method": self._handler}
        owner._duration.record(time.monotonic() - self._begun, {**named, "aqueduct.status": status})
        for name, counter in owner._moved.items():
            for way in ("in", "out"):
                moved = counters.get(f"{name}_{way}", 0)
                span.set_attribute(f"aqueduct.{name}_{way}", moved)
                if moved:
                    counter.add(moved, {**named, "aqueduct.direction": way})
        span.set_attribute("aqueduct.status", status)
        if status != "ok":
            span.set_status(owner._error, message)
        span.end()
