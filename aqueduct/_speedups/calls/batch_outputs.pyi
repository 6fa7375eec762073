from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.calls.batch_receiver import InputReceiver
from aqueduct._speedups.channels.sender import SenderBase

__all__ = ["OutputSender"]

@disjoint_base
class OutputSender:
    largest_out: int
    batches_out: int
    rows_out: int
    bytes_out: int
    settled: int
    settled_bytes: int
    encoder: Any
    def __new__(cls, input: InputReceiver) -> OutputSender: ...
    def leave_by(
        self, row: SenderBase | None, key: bytes, most: int, flush: Callable[[], object]
    ) -> None: ...
    def give(self, batch: Any, number: int) -> bool: ...
    def count(self, number: int, size: int) -> None: ...
