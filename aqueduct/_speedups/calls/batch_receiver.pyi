from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.arrow.reader import BatchReader
from aqueduct._speedups.calls.batch_sender import InFlightWindow
from aqueduct._speedups.channels.receiver import MemoryLease, ReceiveQueue

__all__ = ["AnswerReceiver", "BatchReceiver", "InputReceiver"]

@disjoint_base
class BatchReceiver:
    partial: bool
    moved: int
    lease: MemoryLease | None
    def __new__(cls, *arguments: object, **options: object) -> BatchReceiver: ...
    @property
    def holds_payload(self) -> bool: ...
    @property
    def quiet(self) -> bool: ...
    def arrive_by(
        self, queue: ReceiveQueue | None, room_came: Callable[[], None], key: bytes, limit: int
    ) -> None: ...
    def read_by(self, reader: BatchReader | None) -> None: ...
    def read(self, payload: Any) -> Any: ...
    def take_whole(self) -> Any: ...

@disjoint_base
class InputReceiver(BatchReceiver):
    batches_in: int
    rows_in: int
    bytes_in: int
    taken: int
    def __new__(cls, *arguments: object, **options: object) -> InputReceiver: ...
    def next_batch(self) -> Any: ...

@disjoint_base
class AnswerReceiver(BatchReceiver):
    number: int
    def __new__(cls, window: InFlightWindow | None) -> AnswerReceiver: ...
    on_change: Callable[[], None] | None
    def heard(self) -> None: ...
    def next_batch(self) -> Any: ...
