from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.bpmux.entities import Entity, EntityReader
from aqueduct._speedups.bpmux.scheduler import SchedulerBase

__all__ = ["SingleChunkReader", "SingleChunkScheduler"]

@disjoint_base
class SingleChunkReader(EntityReader):
    def __init__(
        self,
        top: Entity,
        reported: list[tuple[Any, ...]],
        maps: tuple[dict[int, Entity], ...],
        whole: bool,
        *,
        urgent: deque[Entity],
        wake: Callable[[Entity], object],
        entities: int,
        brief: bool,
    ) -> None: ...
    def run(self, step: int = 0) -> int: ...
    def tell(
        self,
        arrival: Callable[[Entity, bytes | memoryview], bool] | None,
        piece: Callable[[Entity, bytes | memoryview], bool] | None,
        acknowledgement: Callable[[Entity], object] | None,
    ) -> None: ...

@disjoint_base
class SingleChunkScheduler(SchedulerBase):
    @property
    def _waiting(self) -> OrderedDict[Entity, None]: ...
    @property
    def only_acks(self) -> bool: ...
    def __init__(
        self,
        chunk: int,
        top: Entity,
        maps: tuple[dict[int, Entity], ...],
        *,
        most: int,
        entities: int,
    ) -> None: ...
    def open_ended(
        self,
        identifier: int,
        buffers: Sequence[bytes | bytearray | memoryview],
        credit: int,
        keep: int,
    ) -> Entity | None: ...
