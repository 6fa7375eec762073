from collections.abc import Iterable
from typing import Final, final

__all__ = ["DEPTH_LIMIT", "KINDS", "NODES_LIMIT", "Columns"]

DEPTH_LIMIT: Final[int]
KINDS: Final[dict[str, int]]
NODES_LIMIT: Final[int]

@final
class Columns:
    @property
    def nodes(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def buffers(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    def __new__(cls, steps: Iterable[tuple[str, int, int, bool]]) -> Columns: ...
