"""The trace that a caller's work belongs to, and who is told of its calls.

Without OpenTelemetry in the program, and without anybody who is told, a call costs one look at a
table of modules. OpenTelemetry is never imported here before the program has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Mapping
from typing import Protocol, TypeVar

from aqueduct.escaping import logger_of

__all__ = [
    "CallObservation",
    "CallObserver",
    "Unobserved",
    "current_trace",
    "observed",
    "reported",
]


log = logger_of(__name__)

T = TypeVar("T")


class CallObservation(Protocol):
    """One call of a client, observed."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What the call tells the service of its trace; the user's own headers go first."""

    def ended(self, error: BaseException | None) -> None:
        """Called when the call has ended, and may be called again; None: it has ended well."""


class CallObserver(Protocol):
    """What ``Client(telemetry=...)`` takes."""

    def calls(self, handler: str, kind: str, address: str) -> CallObservation:
        """Called before a call is made, in the context of the caller."""


class Unobserved:
    """A call, or one attempt at a call, of whose end nobody is told: it only joins a trace."""

    __slots__ = ("headers",)

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers

    def ended(self, error: BaseException | None) -> None:
        """Without effect."""


class _Guarded:
    """An observed call that goes on, whatever its observer raises."""

    __slots__ = ("_handler", "_observation", "headers")

    def __init__(self, observation: CallObservation, handler: str) -> None:
        """Raises what the observation's ``headers`` do."""
        self._observation = observation
        self._handler = handler
        self.headers = observation.headers

    def ended(self, error: BaseException | None) -> None:
        try:
            self._observation.ended(error)
        except Exception:
            log.exception("telemetry raised at the end of a call of %r", self._handler)


def observed(
    telemetry: CallObserver | None, handler: str, kind: str, address: str
) -> CallObservation | None:
    """How a call that begins now is observed; None: it is not. What telemetry raises is logged."""
    try:
        if telemetry is not None:
            return _Guarded(telemetry.calls(handler, kind, address), handler)
        if "opentelemetry.trace" not in sys.modules:
            return None
        carrier = current_trace()
    except Exception:
        log.exception("telemetry raised at the beginning of a call of %r", handler)
        return None
    return Unobserved(carrier) if carrier else None


async def reported(seen: CallObservation | None, work: Awaitable[T]) -> T:
    """What ``work`` returns, after ``seen`` was told how it ended."""
    if seen is None:
        return await work
    try:
        found = await work
    except BaseException as error:
        seen.ended(error)
        raise
    seen.ended(None)
    return found


def current_trace() -> dict[str, str]:
    """The headers that lead to the current span; none without one, or without OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry import context, propagate

    carrier: dict[str, str] = {}
    if context.get_current():  # a look at it costs less
        propagate.inject(carrier)
    return carrier
