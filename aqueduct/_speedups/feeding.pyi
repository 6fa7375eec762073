from collections.abc import Callable, Iterator
from typing import Any, final

from typing_extensions import disjoint_base

from aqueduct._speedups.posting import Posting

__all__ = ["Feed", "Window"]

@final
class Window:
    @property
    def sent(self) -> int: ...
    @property
    def settled(self) -> int: ...
    @property
    def open(self) -> bool: ...
    def __init__(self, batches: int, size: int) -> None: ...
    def send(self, size: int) -> int: ...
    def settle(self, number: int) -> None: ...

@disjoint_base
class Feed:
    @property
    def window(self) -> Window | None: ...
    row: Posting | None
    compression: str
    over: bool
    moved: int
    def __init__(
        self, window: Window | None, key: bytes, most: int, flush: Callable[[], object]
    ) -> None: ...
    def feed(self, source: Any, batches: Iterator[Any], count: int) -> bool | None: ...
    def give(self, source: Any, batch: Any) -> None: ...
