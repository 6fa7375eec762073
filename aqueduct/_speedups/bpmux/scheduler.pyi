from collections import deque
from collections.abc import Sequence

from typing_extensions import disjoint_base

from aqueduct._speedups.bpmux.entities import Entity
from aqueduct._speedups.io.gather import IovecWriter
from aqueduct._speedups.io.tls_records import Records

__all__ = ["SchedulerBase", "write_out"]

@disjoint_base
class SchedulerBase:
    @property
    def urgent(self) -> deque[Entity]: ...
    @property
    def fresh(self) -> deque[Entity]: ...
    @property
    def bulky(self) -> deque[Entity]: ...
    @property
    def idle(self) -> bool: ...
    def __init__(self, chunk: int) -> None: ...
    def gather(self, out: IovecWriter, limit: int) -> None: ...
    def wake(self, entity: Entity) -> None: ...
    def goes_first(self, entity: Entity) -> bool: ...
    def hurry(self, entity: Entity) -> None: ...
    def give_back(self, entity: Entity, size: int) -> None: ...
    def write_run(
        self, entity: Entity, buffers: Sequence[bytes | bytearray | memoryview]
    ) -> bool: ...

def write_out(
    turns: SchedulerBase,
    out: IovecWriter,
    fd: int,
    limit: int,
    budget: int,
    written: list[tuple[Entity, int]],
    records: Records | None = None,
    offered: int = 0,
) -> int: ...
