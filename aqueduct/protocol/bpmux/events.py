"""What a Mux reports: small tuples, in order, drained by ``Mux.events_received``.

The first item says which; an entity is a ``state.Entity``. The last event of an entity is one of
ENDED, ACKNOWLEDGED, ABANDONED, or the whole PAYLOAD of a response (on REQ_OUT).
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from aqueduct._speedups.bpmux import entities

__all__ = [
    "ABANDONED",
    "ACKNOWLEDGED",
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

OPENED: Final = entities.OPENED
"""(OPENED, entity): the peer opened it: REQ_IN, SINK_IN or STREAM_IN. Of a Duplex it is the SINK_IN
half, and ``entity.twin`` the STREAM_IN half. Its opening payload follows, whatever its size."""
PAYLOAD: Final = entities.PAYLOAD
"""(PAYLOAD, entity, data, whole, payer, charged): bytes of a payload; ``whole`` with the last. Then
give ``charged`` bytes of credit back to ``payer`` when they are consumed: the entity itself, or
for an opening payload the top-level stream (BP-R5)."""
CREDIT: Final = entities.CREDIT
"""(CREDIT, entity): ``entity.credit_out`` grew."""
PING: Final = entities.PING
"""(PING, entity): the peer asks for a heartbeat. The core answers by itself."""
PONG: Final = entities.PONG
"""(PONG, entity, asked): the answer to the ping that was asked for at that time."""
PONG_MISSING: Final = entities.PONG_MISSING
"""(PONG_MISSING, entity, asked): no answer in time (BP-R11). Nothing else follows from it."""
ENDED: Final = entities.ENDED
"""(ENDED, entity, data, payer, charged): the peer ended it; ``data`` is the whole end payload."""
ACKNOWLEDGED: Final = entities.ACKNOWLEDGED
"""(ACKNOWLEDGED, entity): the peer has seen my end (of REQ_IN: my response)."""
ABANDONED: Final = entities.ABANDONED
"""(ABANDONED, entity): it could never be opened, because the top-level has ended and its opening
payload is charged there (BP-R5). The peer knows nothing of it, or, if pieces of the payload have
left, waits for the rest until it ends it."""
FAILED: Final = entities.FAILED
"""(FAILED, error): the peer broke the protocol (BP-4): terminate the connection. The last event."""

Event: TypeAlias = tuple[Any, ...]
