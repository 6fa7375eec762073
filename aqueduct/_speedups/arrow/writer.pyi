from typing import Any, final

import pyarrow as pa
from typing_extensions import disjoint_base

from aqueduct._speedups.arrow.columns import Columns
from aqueduct._speedups.arrow.nulls import NotNull
from aqueduct._speedups.base.buffers import BufferSlice

__all__ = ["BatchEncoder", "BatchWriter", "Encoded"]

@final
class Encoded:
    @property
    def buffers(self) -> list[bytes | memoryview | BufferSlice]: ...
    @property
    def size(self) -> int: ...
    def __init__(self, buffers: list[bytes | memoryview | BufferSlice], size: int) -> None: ...

@disjoint_base
class BatchEncoder:
    @property
    def schema(self) -> pa.Schema: ...
    broken: str | None
    _fast: BatchWriter | None
    def __init__(
        self, schema: pa.Schema, writer: BatchWriter | None, kind: type, refusal: type
    ) -> None: ...
    @property
    def lengthy(self) -> bool: ...
    def plain(self, batch: Any, quick: bool = True) -> Encoded | None: ...

@final
class BatchWriter:
    def __new__(cls, columns: Columns, nulls: NotNull | None = None) -> BatchWriter: ...
    def write(self, batch: Any) -> tuple[list[bytes | memoryview | BufferSlice], int] | None: ...
