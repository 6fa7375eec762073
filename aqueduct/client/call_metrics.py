"""``CallMetrics``: what the calls for one piece of work count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

__all__ = ["CallMetrics"]


@dataclass(slots=True)
class CallMetrics:
    """Counted by all calls for one piece of work. Bytes are those of encoded batches."""

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
    resumes: int = 0
    """Cuts after which a connection went on with its calls (``?resume=`` of the address)."""
    failed_batches: int = 0
    """Answered with a failure that the caller tolerates (``on_error``)."""

    def counted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """``batches``, counted as they are sent."""
        for batch in batches:
            self.batches_sent += 1
            self.rows_sent += batch.num_rows
            yield batch

    def moved(self, sent: int, received: int, waited: float) -> None:
        """Adds the bytes of a call, and the seconds that it waited."""
        self.bytes_sent += sent
        self.bytes_received += received
        self.waiting_seconds += waited
