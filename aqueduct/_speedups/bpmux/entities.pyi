from collections import deque
from typing import Any, final

from aqueduct._speedups.base.buffers import GatherList

__all__ = [
    "ABANDONED",
    "ACKNOWLEDGED",
    "CREDIT",
    "DUPLEX",
    "ENDED",
    "FAILED",
    "OPENED",
    "PAYLOAD",
    "PING",
    "PLACES",
    "PONG",
    "PONG_MISSING",
    "REQ_IN",
    "REQ_OUT",
    "SINK_IN",
    "SINK_OUT",
    "STREAM_IN",
    "STREAM_OUT",
    "Entity",
    "Item",
    "State",
    "type_for",
]

ABANDONED: int
ACKNOWLEDGED: int
CREDIT: int
DUPLEX: int
ENDED: int
FAILED: int
OPENED: int
PAYLOAD: int
PING: int
PONG: int
PONG_MISSING: int
REQ_IN: int
REQ_OUT: int
SINK_IN: int
SINK_OUT: int
STREAM_IN: int
STREAM_OUT: int

PLACES: tuple[str, ...]

@final
class Item:
    @property
    def scatter(self) -> GatherList: ...
    @property
    def whole(self) -> bool: ...
    @property
    def is_end(self) -> bool: ...
    @property
    def is_response(self) -> bool: ...
    @property
    def urgent(self) -> bool: ...
    total: int
    missing: int
    begun: bool
    opening: bool
    def __new__(
        cls,
        *,
        whole: bool = False,
        total: int = 0,
        is_end: bool = False,
        is_response: bool = False,
        urgent: bool = False,
    ) -> Item: ...

@final
class Entity:
    @property
    def place(self) -> int: ...
    @property
    def identifier(self) -> int: ...
    @property
    def queued(self) -> int: ...
    number: int
    user: Any
    twin: Entity | None
    credit_out: int
    credit_in: int
    end_out: bool
    end_in: bool
    partial: int
    partial_type: int
    partial_end: bool
    opening_in: bool
    joined: bytes | bytearray
    gone: bool
    opened: bool
    open_type: int
    items: deque[Item]
    ending: bool
    keep: int
    grant: int
    pings: int
    pongs: int
    awaited: deque[list[Any]]
    in_urgent: bool
    queue: int
    deficit: int
    def __init__(self, place: int, identifier: int) -> None: ...
    def add(self, item: Item, place: int = -1) -> None: ...
    def drop(self) -> None: ...
    def join(self, data: bytes | memoryview) -> None: ...
    def forget_pings(self) -> None: ...
    def wait_for_pong(self, ping: list[Any]) -> None: ...

@final
class State:
    @property
    def maps(self) -> tuple[dict[int, Entity], ...]: ...
    @property
    def top_sink(self) -> Entity: ...
    @property
    def top_stream(self) -> Entity: ...
    def add(self, place: int, identifier: int) -> Entity: ...
    def remove(self, entity: Entity) -> None: ...

def type_for(entity: Entity) -> int: ...
