"""Entities, the six maps that hold them, and how chunks find their way to them.

Everything is seen from this side: REQ_OUT are requests that we made, SINK_IN are sinks that the
peer gave us to write to. We write to sinks; we read from streams.
"""

from __future__ import annotations

from typing import Final

from aqueduct._speedups.bpmux.chunks import TYPE_NAMES
from aqueduct._speedups.bpmux.entities import PLACES, Entity, Item

__all__ = [
    "DUPLEX",
    "HIGHEST",
    "MIRROR",
    "PLACES",
    "REQ_IN",
    "REQ_OUT",
    "SINK_IN",
    "SINK_OUT",
    "STREAM_IN",
    "STREAM_OUT",
    "TYPE_NAMES",
    "Entity",
    "Item",
    "State",
    "type_for",
]

HIGHEST: Final = (1 << 64) - 1

# A place in the state is also the type of the chunks that we send for it (BP-2, BP-R2).
REQ_OUT: Final = 0
REQ_IN: Final = 1
SINK_OUT: Final = 2
SINK_IN: Final = 3
STREAM_OUT: Final = 4
STREAM_IN: Final = 5
DUPLEX: Final = 6

MIRROR: Final = (REQ_IN, REQ_OUT, STREAM_IN, STREAM_OUT, SINK_IN, SINK_OUT, SINK_IN)
"""The place that a received type names (BP-6); of a Duplex it is the half that its opening chunk
acts on (BP-R9)."""


class State:
    """The six maps (BP-5), and the two entities that a connection begins with."""

    __slots__ = ("maps", "top_sink", "top_stream")

    def __init__(self) -> None:
        self.maps: tuple[dict[int, Entity], ...] = tuple({} for _ in PLACES)
        self.top_sink = Entity(SINK_OUT, 0)
        """The top-level: what we send on it, and what our opening payloads are charged to."""
        self.top_stream = Entity(STREAM_OUT, 0)
        """The top-level: what the peer sends on it, and its opening payloads."""
        self.maps[SINK_OUT][0] = self.top_sink
        self.maps[STREAM_OUT][0] = self.top_stream

    def add(self, place: int, identifier: int) -> Entity:
        """A new entity in its map."""
        entity = Entity(place, identifier)
        self.maps[place][identifier] = entity
        return entity

    def remove(self, entity: Entity) -> None:
        """Takes it from its map; its identifier may be used again (BP-R8)."""
        entity.gone = True
        entity.twin = None
        entity.drop()
        entity.joined = b""
        entity.grant = entity.pings = entity.pongs = 0
        entity.forget_pings()
        del self.maps[entity.place][entity.identifier]


def type_for(entity: Entity) -> int:
    """The type of the chunks that we send for it.

    The top-level is In-Sink 0 and In-Stream 0 from both sides (BP-R3): plain mirroring would name
    maps that never hold it.
    """
    if entity.identifier == 0 and entity.place in (SINK_OUT, STREAM_OUT):
        return entity.place + 1
    return entity.place
