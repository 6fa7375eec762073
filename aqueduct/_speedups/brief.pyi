from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.entities import Entity, Reading
from aqueduct._speedups.turns import Outlet

__all__ = ["Arrivals", "acknowledge", "ended_sink", "only_ended", "send_opening"]

@disjoint_base
class Arrivals(Reading):
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

def ended_sink(
    identifier: int, buffers: Sequence[bytes | bytearray | memoryview], credit: int, keep: int
) -> Entity: ...
def send_opening(entity: Entity, room: int, top: Entity, most: int, out: Outlet) -> bool: ...
def acknowledge(entity: Entity, out: Outlet, maps: tuple[dict[int, Entity], ...]) -> None: ...
def only_ended(urgent: Iterable[Entity]) -> bool: ...
