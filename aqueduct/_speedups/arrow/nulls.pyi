from collections.abc import Sequence
from typing import Any, Final, final

__all__ = ["KINDS", "NotNull"]

KINDS: Final[dict[str, int]]

@final
class NotNull:
    @property
    def count(self) -> int: ...
    def __new__(
        cls, nodes: Sequence[tuple[str, bool, int, int, Sequence[tuple[int, int, int]]]]
    ) -> NotNull: ...
    def find(self, batch: Any) -> tuple[int, int] | None: ...
