from typing import Any, final

from aqueduct._speedups.arrow_columns import Columns

__all__ = ["BatchWriter"]

@final
class BatchWriter:
    def __new__(cls, columns: Columns) -> BatchWriter: ...
    def write(self, batch: Any) -> tuple[list[bytes | memoryview], int] | None: ...
