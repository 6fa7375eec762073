from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.arrow.reader import BatchReader
from aqueduct._speedups.calls.batch_sender import Window
from aqueduct._speedups.channels.receiver import Inbox, Lease

__all__ = ["Answers", "Arrivals", "Inputs"]

@disjoint_base
class Arrivals:
    partial: bool
    moved: int
    lease: Lease | None
    def __new__(cls, *arguments: object, **options: object) -> Arrivals: ...
    @property
    def holds_payload(self) -> bool: ...
    @property
    def quiet(self) -> bool: ...
    def arrive_by(
        self, inbox: Inbox | None, room_came: Callable[[], None], key: bytes, limit: int
    ) -> None: ...
    def read_by(self, reader: BatchReader | None) -> None: ...
    def read(self, payload: Any) -> Any: ...
    def take_whole(self) -> Any: ...

@disjoint_base
class Inputs(Arrivals):
    batches_in: int
    rows_in: int
    bytes_in: int
    taken: int
    def __new__(cls, *arguments: object, **options: object) -> Inputs: ...
    def next_batch(self) -> Any: ...

@disjoint_base
class Answers(Arrivals):
    number: int
    def __new__(cls, window: Window | None) -> Answers: ...
    on_change: Callable[[], None] | None
    def heard(self) -> None: ...
    def next_batch(self) -> Any: ...
