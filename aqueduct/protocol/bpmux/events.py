"""What a Mux reports: small tuples, in order, drained by ``Mux.events_received``.

The first item says which; an entity is a ``state.Entity``. The last event of an entity is one of
ENDED, ACKNOWLEDGED, ABANDONED, or the whole PAYLOAD of a response (on REQ_OUT).
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

__all__ = [
    "ABANDONED",
    "ACKNOWLEDGED",
    "ARRIVED",
    "CREDIT",
    "ENDED",
    "FAILED",
    "OPENED",
    "PAYLOAD",
    "PING",
    "PONG",
    "PONG_MISSING",
    "Event",
]

OPENED: Final = 0
"""(OPENED, entity): the peer opened it: REQ_IN, SINK_IN or STREAM_IN. Of a Duplex it is the SINK_IN
half, and ``entity.twin`` the STREAM_IN half. Its opening payload follows, whatever its size."""
PAYLOAD: Final = 1
"""(PAYLOAD, entity, data, whole, purse, charged): bytes of a payload; ``whole`` with the last. Then
give ``charged`` bytes of credit back to ``purse`` when they are consumed: the entity itself, or
for an opening payload the top-level stream (BP-R5)."""
CREDIT: Final = 2
"""(CREDIT, entity): ``entity.credit_out`` grew."""
PING: Final = 3
"""(PING, entity): the peer asks for a heartbeat. The core answers by itself."""
PONG: Final = 4
"""(PONG, entity, asked): the answer to the ping that was asked for at that time."""
PONG_MISSING: Final = 5
"""(PONG_MISSING, entity, asked): no answer in time (BP-R11). Nothing else follows from it."""
ENDED: Final = 6
"""(ENDED, entity, data, purse, charged): the peer ended it; ``data`` is the whole end payload."""
ACKNOWLEDGED: Final = 7
"""(ACKNOWLEDGED, entity): the peer has seen my end (of REQ_IN: my response)."""
ABANDONED: Final = 8
"""(ABANDONED, entity): it could never be opened, because the top-level has ended and its opening
payload is charged there (BP-R5). The peer knows nothing of it, or, if pieces of the payload have
left, waits for the rest until it ends it."""
FAILED: Final = 9
"""(FAILED, error): the peer broke the protocol (BP-4): terminate the connection. The last event."""

ARRIVED: Final = 10
"""(ARRIVED, entity, data, purse, charged): in a ``brief`` Mux, for a stream of the peer that came
and went in one chunk: OPENED, the whole PAYLOAD, CREDIT and ENDED, with an empty end payload."""

Event: TypeAlias = tuple[Any, ...]
