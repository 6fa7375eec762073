from collections.abc import Callable
from typing import Any, Final, final

from aqueduct._speedups.bpmux.entities import Entity
from aqueduct._speedups.bpmux.entity_receiver import EntityReceiver
from aqueduct._speedups.channels.receiver import DirectRead
from aqueduct._speedups.io.shared_ring import Rings
from aqueduct._speedups.io.tls_records import Records

__all__ = ["Outcome", "SocketReader"]

class Outcome:
    DRAINED: Final = 0
    END: Final = 1
    CORE: Final = 2
    TURN: Final = 3
    WHOLE: Final = 4
    LEFT: Final = 5

@final
class SocketReader:
    @property
    def entity(self) -> Entity | None: ...
    @property
    def inlet(self) -> DirectRead | None: ...
    @property
    def step(self) -> int: ...
    @property
    def drained(self) -> bool: ...
    def __new__(
        cls,
        receiver: EntityReceiver,
        fd: int,
        records: Records | None,
        ahead: memoryview,
        open: Callable[[Entity], Any],
        close: Callable[[], Any],
    ) -> SocketReader: ...
    def count(self, size: int) -> None: ...
    def share(self, rings: Rings | None) -> None: ...
    def expect_memory(self, accept: Callable[[int], Any] | None) -> None: ...
    @property
    def shares(self) -> bool: ...
    def use(self, entity: Entity | None, inlet: DirectRead | None) -> None: ...
    def read(self, budget: int) -> tuple[int, int]: ...
    def allow(self, chunks: int) -> None: ...
    def relax(self) -> bool: ...
