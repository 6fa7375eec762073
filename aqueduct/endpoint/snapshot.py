"""A connection as one looks at it from outside: what ``Connection.snapshot`` gives."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from aqueduct.protocol.common.snapshot import CoreView, ReceiverView, SenderView

__all__ = ["ConnectionSnapshot", "ReceiverView", "SenderView"]


@dataclass(frozen=True, slots=True)
class ConnectionSnapshot(CoreView):
    """One connection at one moment: plain values, which stay as they are."""

    peer: str
    local: str
    side: str
    """"client" or "server"."""
    carrier: str
    state: str
    """"connecting", "open" or "closed"."""
    error: str
    """Why it is over."""
    age: float
    """Seconds since it was made."""
    rtt: float
    """The smoothed round-trip time, seconds; 0.0 before the first sample."""
    congestion_window: int
    """Bytes that may be under way; 0: the carrier has no such window, as the next two."""
    bytes_in_flight: int
    packets_lost: int
    """Packets of the transport that were declared lost, and sent again."""
    streams_openable: int
    """Streams that we may open now."""
    datagram_room: int
    """Datagrams that the carrier takes now."""
    transport: dict[str, object]
    """What else the carrier tells of itself."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, numbers and strings."""
        return asdict(self)

    def to_json(self) -> str:
        """The same as one line of JSON."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def __str__(self) -> str:
        """One line for logs, without the channels."""
        text = (
            f"{self.side} {self.local} - {self.peer} ({self.carrier}, {self.state}, "
            f"{self.age:.1f} s): {self.channel_count} channels, {self.queued_bytes} bytes queued, "
            f"{self.streams_out} streams out, {self.streams_waiting} waiting, {self.streams_in} "
            f"in, budget {self.receive_budget_used} of {self.receive_budget}, "
            f"process {self.process_receive_used} of {self.process_receive_budget}, "
            f"{self.process_kept} kept, sends {self.process_send_used} of "
            f"{self.process_send_budget}, "
            f"rtt {self.rtt * 1000:.3f} ms, "
            f"window {self.congestion_window}, {self.bytes_in_flight} in flight, "
            f"{self.packets_lost} packets lost, datagrams {self.datagrams_nacked} nacked, "
            f"{self.datagrams_missed} missed, {self.datagrams_evicted} evicted"
        )
        return f"{text}: {self.error}" if self.error else text
