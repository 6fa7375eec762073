"""Observers of a service's calls. ``aqueduct.OpenTelemetry`` is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from aqueduct.rpc.telemetry import OpenTelemetry
from aqueduct.service.context import Call

__all__ = ["CounterObserver", "Observation", "Observer", "OpenTelemetry"]


class Observation(Protocol):
    """One call, observed."""

    def ended(self, status: str, message: str, counters: Mapping[str, int]) -> None:
        """Called once, when the call has its status ("ok", or why it failed)."""


class Observer(Protocol):
    """What ``Service(telemetry=...)`` takes."""

    def began(self, call: Call) -> Observation:
        """Called when a call was accepted, in the context in which its handler will run."""


@runtime_checkable
class CounterObserver(Observer, Protocol):
    """The same, for one that looks at the counters of services too."""

    def serves(self, service: str, counters: Callable[[], Mapping[str, int]]) -> None:
        """Called as a service of this name is made; ``counters`` is its bound method."""
