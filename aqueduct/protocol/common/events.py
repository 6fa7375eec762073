"""What a connection core reports: past tense, immutable. Drained by ``events_received``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from aqueduct._speedups.channels.events import Readable, SenderEnded, Writable
from aqueduct.errors import ConnectionLost

__all__ = ["Closed", "Event", "Headers", "HeadersReceived", "Readable", "SenderEnded", "Writable"]

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class HeadersReceived:
    """The peer's connection headers. A server answers by accept_headers or reject_headers."""

    headers: Headers


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is over; every handle reads ``error``."""

    error: ConnectionLost


Event: TypeAlias = HeadersReceived | Readable | Writable | SenderEnded | Closed
