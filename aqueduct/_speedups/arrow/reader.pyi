from collections.abc import Callable
from typing import Any, final

from _typeshed import ReadableBuffer

from aqueduct._speedups.arrow.columns import Columns
from aqueduct._speedups.arrow.nulls import NotNull

__all__ = ["BatchReader"]

@final
class BatchReader:
    def __new__(
        cls,
        columns: Columns,
        import_: Callable[[int, Any], Any],
        schema: Any,
        inside: bool = True,
        nulls: NotNull | None = None,
    ) -> BatchReader: ...
    def read(self, payload: ReadableBuffer) -> Any: ...
