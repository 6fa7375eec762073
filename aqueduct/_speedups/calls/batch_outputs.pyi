from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.arrow.writer import Encoded
from aqueduct._speedups.calls.batch_receiver import Inputs
from aqueduct._speedups.channels.sender import Posting

__all__ = ["Outputs"]

@disjoint_base
class Outputs(Inputs):
    largest_out: int
    batches_out: int
    rows_out: int
    bytes_out: int
    _settled: int
    _settled_bytes: int
    encoder: Any
    def leave_by(
        self, row: Posting | None, key: bytes, most: int, flush: Callable[[], object]
    ) -> None: ...
    def give(self, batch: Any, number: int) -> bool: ...
    def write(self, batch: Any, most: int) -> Encoded | None: ...
    def grew(self, size: int) -> None: ...
    def count(self, number: int, size: int) -> None: ...
