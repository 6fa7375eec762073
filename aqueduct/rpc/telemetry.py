"""What becomes of calls, told to OpenTelemetry, where that is asked for.

::

    service = aqueduct.Service("scores", telemetry=aqueduct.OpenTelemetry())
    client = await aqueduct.Client.connect(address, telemetry=aqueduct.OpenTelemetry())

Each call that the service accepts is a span, the child of the one whose ``traceparent`` came with
the call's headers. While its handler runs it is the current one, in threads too. Each call that a
client makes is a span, the child of the one that is current there. OpenTelemetry is the extra
``aqueduct-arrow[telemetry]``; it is imported by ``OpenTelemetry()`` and not before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final
from weakref import WeakMethod

from aqueduct.address import Address
from aqueduct.endpoint.accounts import process
from aqueduct.errors import Cancelled, ConfigError

__all__ = ["OpenTelemetry"]

_COUNTERS: Final = ("batches", "rows", "bytes")
_TOTALS: Final = {
    "connections": "Connections that were accepted",
    "resumes": "Connections that were cut and went on",
}


class OpenTelemetry:
    """Tells of calls in spans and metrics, for a ``Service``, a ``Client`` or both.

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
        self._services: list[tuple[str, WeakMethod[Callable[[], Mapping[str, int]]]]] = []

        def totals(counter: str) -> Callable[[Any], list[Any]]:
            def observe(options: Any) -> list[Any]:
                found: Counter[str] = Counter()
                for service, method in tuple(self._services):
                    counters = method()
                    if counters is not None:
                        found[service] += counters()[counter]
                return [
                    metrics.Observation(count, {"aqueduct.service": service})
                    for service, count in found.items()
                ]

            return observe

        for name, what in _TOTALS.items():
            meter.create_observable_counter(
                f"aqueduct.server.{name}", callbacks=[totals(name)], description=what
            )
        meter.create_observable_up_down_counter(
            "aqueduct.server.waiting",
            callbacks=[totals("waiting_calls")],
            description="Calls that wait for their turn",
        )
        self._call_duration = meter.create_histogram(
            "rpc.client.call.duration", unit="s", description="Calls of clients, to their end"
        )
        self._extract = propagate.extract
        self._inject = propagate.inject
        self._attach = context.attach
        self._current = trace.set_span_in_context
        self._server = trace.SpanKind.SERVER
        self._client = trace.SpanKind.CLIENT
        self._error = trace.StatusCode.ERROR

    def serves(self, service: str, counters: Callable[[], Mapping[str, int]]) -> None:
        """Has the counters of a service looked at, as long as there is one."""
        self._services = [each for each in self._services if each[1]() is not None]
        self._services.append((service, WeakMethod(counters)))

    def calls(self, handler: str, kind: str, address: str) -> _CallSpan:
        """Opens the span of a call that a client makes."""
        return _CallSpan(self, handler, kind, address)

    def began(self, call: Any) -> _Span:
        """Opens the span of a call that a service has accepted, an ``aqueduct.Call``."""
        attributes: dict[str, Any] = {
            "rpc.system.name": "aqueduct",
            "rpc.method": call.handler,
            "network.peer.address": call.peer,
            "aqueduct.kind": call.kind,
        }
        if call.write_key:
            attributes |= {"aqueduct.write_key": call.write_key, "aqueduct.attempt": call.attempt}
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


class _CallSpan:
    """A client's span of one call."""

    __slots__ = ("_begun", "_ended", "_named", "_owner", "_span", "headers")

    def __init__(self, owner: OpenTelemetry, handler: str, kind: str, address: str) -> None:
        self._owner = owner
        self._named: dict[str, Any] = {
            "rpc.system.name": "aqueduct",
            "rpc.method": handler,
            **_server(address),
        }
        self._span = owner._tracer.start_span(
            handler, kind=owner._client, attributes={**self._named, "aqueduct.kind": kind}
        )
        self._begun = time.monotonic()
        self._ended = False
        self.headers: dict[str, str] = {}
        # Not the current span: what the caller does beside the call is no part of it.
        owner._inject(self.headers, context=owner._current(self._span))

    def ended(self, error: BaseException | None) -> None:
        if self._ended:
            return
        self._ended = True
        owner, span, named = self._owner, self._span, self._named
        left = isinstance(error, Cancelled | GeneratorExit | asyncio.CancelledError)
        status = "ok" if error is None else getattr(error, "status", None)
        if left and not status:
            status = "cancelled"
        if status:
            named["rpc.response.status_code"] = status
            span.set_attribute("rpc.response.status_code", status)
        if error is not None and not left:
            named["error.type"] = kind = status or type(error).__qualname__
            span.set_attribute("error.type", kind)
            span.record_exception(error)
            span.set_status(owner._error, str(error))
        owner._call_duration.record(time.monotonic() - self._begun, named)
        span.end()


@lru_cache(maxsize=256)
def _server(address: str) -> dict[str, Any]:
    """Where a service is, by the conventions."""
    try:
        parsed = Address.parse(address)
    except ConfigError:  # the peer of a connection
        return {"server.address": address}
    if not parsed.port:
        return {"server.address": parsed.path or address}
    return {"server.address": parsed.host, "server.port": parsed.port}
