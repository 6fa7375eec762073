"""What the work of one task counts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Numbers"]


@dataclass(slots=True)
class Numbers:
    """Counted by one task, of one partition. Bytes are those of encoded batches."""

    batches_sent: int = 0
    batches_received: int = 0
    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    waiting_seconds: float = 0.0
    """For the service: neither an answer nor room to send."""
    retries: int = 0
    """Calls made again after one that broke."""
    reconnects: int = 0
    """Connections made after the first of each address."""
    failed_batches: int = 0
    """Answered with a failure that the job tolerates (``on_error``)."""
