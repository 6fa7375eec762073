"""The places of entities, and how chunks find their way to them.

A place is also the type of the chunks that we send for it (BP-2, BP-R2).

Everything is seen from this side: REQ_OUT are requests that we made, SINK_IN are sinks that the
peer gave us to write to. We write to sinks; we read from streams.
"""

from __future__ import annotations

from typing import Final

from aqueduct._speedups.bpmux.chunks import TYPE_NAMES
from aqueduct._speedups.bpmux.entities import (
    DUPLEX,
    PLACES,
    REQ_IN,
    REQ_OUT,
    SINK_IN,
    SINK_OUT,
    STREAM_IN,
    STREAM_OUT,
    Entity,
    Item,
    State,
    type_for,
)

__all__ = [
    "DUPLEX",
    "HIGHEST",
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
