from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.arrow.writer import Encoded
from aqueduct._speedups.calls.batch_receiver import InputReceiver
from aqueduct._speedups.channels.sender import SenderBase

__all__ = ["OutputSender"]

@disjoint_base
class OutputSender(InputReceiver):
    largest_out: int
    batches_out: int
    rows_out: int
    bytes_out: int
    _settled: int
    _settled_bytes: int
    encoder: Any
    def leave_by(
        self, row: SenderBase | None, key: bytes, most: int, flush: Callable[[], object]
    ) -> None: ...
    def give(self, batch: Any, number: int) -> bool: ...
    def write(self, batch: Any, most: int) -> Encoded | None: ...
    def grew(self, size: int) -> None: ...
    def count(self, number: int, size: int) -> None: ...
