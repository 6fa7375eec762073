"""Entities, the six maps that hold them, and how chunks find their way to them.

Everything is seen from this side: REQ_OUT are requests that we made, SINK_IN are sinks that the
peer gave us to write to. We write to sinks; we read from streams.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from aqueduct._speedups.bpmux import TYPE_NAMES
from aqueduct._speedups.buffers import Scatter

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
PLACES: Final = ("req_out", "req_in", "sink_out", "sink_in", "stream_out", "stream_in")

MIRROR: Final = (REQ_IN, REQ_OUT, STREAM_IN, STREAM_OUT, SINK_IN, SINK_OUT, SINK_IN)
"""The place that a received type names (BP-6); of a Duplex it is the half that its opening chunk
acts on (BP-R9)."""


class Item:
    """Something that waits to be sent on an entity: a payload, a run of bytes, or the end."""

    __slots__ = (
        "begun",
        "is_end",
        "is_response",
        "missing",
        "opening",
        "scatter",
        "total",
        "urgent",
        "whole",
    )

    def __init__(
        self,
        *,
        whole: bool = False,
        total: int = 0,
        is_end: bool = False,
        is_response: bool = False,
        urgent: bool = False,
    ) -> None:
        self.scatter = Scatter()
        self.whole = whole
        """One chunk; else, unless ``total`` is set, a run of bytes that may be cut anywhere."""
        self.total = total
        """Bytes of a payload in Partial mode that have not left, given or not; 0: none."""
        self.missing = total
        """Those of them that were not given yet."""
        self.begun = False
        """In Partial mode: the peer has its total size and will take nothing else."""
        self.opening = False
        """Pieces of an opening payload: all are charged to the top-level (BP-R10)."""
        self.is_end = is_end
        self.is_response = is_response
        self.urgent = urgent


class Entity:
    """One half of a conversation. What is here may be read; commands of Mux change it."""

    __slots__ = (
        "awaited",
        "credit_in",
        "credit_out",
        "deficit",
        "end_in",
        "end_out",
        "ending",
        "gone",
        "grant",
        "identifier",
        "in_urgent",
        "items",
        "joined",
        "keep",
        "lane",
        "open_type",
        "opened",
        "opening_in",
        "partial",
        "partial_end",
        "partial_type",
        "pings",
        "place",
        "pongs",
        "twin",
        "user",
    )

    def __init__(self, place: int, identifier: int) -> None:
        self.place = place
        self.identifier = identifier
        self.user: Any = None
        """Whatever the owner of the Mux wants to find here."""
        self.twin: Entity | None = None
        """The other half of a Duplex."""
        # The state of the protocol (BP-5).
        self.credit_out = 0
        """Bytes that we may send now."""
        self.credit_in = 0
        """Bytes that the peer may send now."""
        self.end_out = False
        """Our end has left; nothing else does (BP-R8)."""
        self.end_in = False
        """The peer's end is here; its acknowledgement has not left."""
        self.partial = 0
        """Bytes missing of a payload in Partial mode that we receive (BP-16); 0: no such mode."""
        self.partial_type = 0
        self.partial_end = False
        self.opening_in = False
        """The payload in Partial mode is the opening one, charged to the top-level (BP-R10)."""
        self.joined = bytearray()
        """Received bytes of a payload that is handed over as a whole."""
        self.gone = False
        """In no map any more."""
        # Sending.
        self.opened = True
        """The peer knows it, or will: its opening chunk was taken. False: not yet."""
        self.open_type = place
        self.items: deque[Item] = deque()
        self.ending = False
        """An end is queued or has left; nothing may be queued after it."""
        self.keep = 0
        """Bytes of credit_out that only ends and urgent messages may use."""
        self.grant = 0
        """Credit that waits to be sent."""
        self.pings = 0
        """Pings that wait to be sent."""
        self.pongs = 0
        """Pongs that wait to be sent."""
        self.awaited: deque[list[Any]] = deque()
        """Pings without an answer: [deadline, entity, asked]."""
        self.in_urgent = False
        self.lane = 0
        """Where the scheduler has it: 0 nowhere, 1 among the fresh, 2 among the bulky."""
        self.deficit = 0
        """Bytes that it may send before it is another's turn."""

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent."""
        return sum(item.scatter.nbytes for item in self.items)

    def __repr__(self) -> str:
        return f"<{PLACES[self.place]} {self.identifier}>"


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
        entity.items.clear()
        entity.joined.clear()
        entity.grant = entity.pings = entity.pongs = 0
        for ping in entity.awaited:
            ping[1] = None
        entity.awaited.clear()
        del self.maps[entity.place][entity.identifier]


def type_for(entity: Entity) -> int:
    """The type of the chunks that we send for it.

    The top-level is In-Sink 0 and In-Stream 0 from both sides (BP-R3): plain mirroring would name
    maps that never hold it.
    """
    if entity.identifier == 0 and entity.place in (SINK_OUT, STREAM_OUT):
        return entity.place + 1
    return entity.place
