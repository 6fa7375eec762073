from collections import deque
from collections.abc import Sequence

from typing_extensions import disjoint_base

from aqueduct._speedups.bpmux.entities import Entity
from aqueduct._speedups.io.gather import Outlet
from aqueduct._speedups.io.tls_records import Records

__all__ = ["Turns", "write_out"]

@disjoint_base
class Turns:
    @property
    def urgent(self) -> deque[Entity]: ...
    @property
    def fresh(self) -> deque[Entity]: ...
    @property
    def bulky(self) -> deque[Entity]: ...
    @property
    def idle(self) -> bool: ...
    def __init__(self, chunk: int) -> None: ...
    def gather(self, out: Outlet, limit: int) -> None: ...
    def wake(self, entity: Entity) -> None: ...
    def goes_first(self, entity: Entity) -> bool: ...
    def hurry(self, entity: Entity) -> None: ...
    def give_back(self, entity: Entity, size: int) -> None: ...
    def write_run(
        self, entity: Entity, buffers: Sequence[bytes | bytearray | memoryview]
    ) -> bool: ...

def write_out(
    turns: Turns,
    out: Outlet,
    fd: int,
    limit: int,
    budget: int,
    written: list[tuple[Entity, int]],
    records: Records | None = None,
    offered: int = 0,
) -> int: ...
