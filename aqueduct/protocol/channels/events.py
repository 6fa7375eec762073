"""What a connection core reports: past tense, immutable. Drained by ``events_received``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from aqueduct.errors import ConnectionLost

if TYPE_CHECKING:
    from aqueduct.protocol.channels.receiving import ReceiverHalf
    from aqueduct.protocol.channels.sending import SenderHalf

__all__ = ["Closed", "Event", "Headers", "HeadersReceived", "Readable", "SenderEnded", "Writable"]

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class HeadersReceived:
    """The peer's connection headers. A server answers by accept_headers or reject_headers."""

    headers: Headers


@dataclass(frozen=True, slots=True)
class Readable:
    """A receiver that had nothing now has a message, or reached its end."""

    half: ReceiverHalf


@dataclass(frozen=True, slots=True)
class Writable:
    """A sender that was above a high-water mark is below it again, or reached its end."""

    half: SenderHalf


@dataclass(frozen=True, slots=True)
class SenderEnded:
    """A sender reached its final state; ``half.error`` says how, None is success."""

    half: SenderHalf


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is over; every handle reads ``error``."""

    error: ConnectionLost


Event: TypeAlias = HeadersReceived | Readable | Writable | SenderEnded | Closed
