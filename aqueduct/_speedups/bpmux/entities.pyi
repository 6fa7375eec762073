from collections import deque
from typing import Any, final

from typing_extensions import disjoint_base

from aqueduct._speedups.base.buffers import GatherList
from aqueduct._speedups.bpmux.chunks import ChunkDecoder

__all__ = ["Entity", "EntityReader", "Item"]

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
    lane: int
    deficit: int
    def __init__(self, place: int, identifier: int) -> None: ...
    def add(self, item: Item, place: int = -1) -> None: ...
    def drop(self) -> None: ...
    def join(self, data: bytes | memoryview) -> None: ...
    def forget_pings(self) -> None: ...
    def wait_for_pong(self, ping: list[Any]) -> None: ...

@disjoint_base
class EntityReader:
    @property
    def decoder(self) -> ChunkDecoder: ...
    entity: Entity
    purse: Entity
    opening: bool
    last: bool
    allowance: int
    unread: bool
    def __init__(
        self,
        top: Entity,
        reported: list[tuple[Any, ...]],
        maps: tuple[dict[int, Entity], ...],
        kind: int,
        whole: bool,
    ) -> None: ...
    def run_plain(self) -> int: ...
