from typing import Any, final

from typing_extensions import disjoint_base

__all__ = [
    "CLOSE",
    "CREDIT",
    "DATAGRAM",
    "RESET",
    "STOP",
    "WRITE",
    "Readable",
    "SenderEnded",
    "Writable",
]

WRITE: int
RESET: int
STOP: int
CREDIT: int
DATAGRAM: int
CLOSE: int

@disjoint_base
class HalfEvent:
    @property
    def half(self) -> Any: ...
    def __init__(self, half: Any) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Readable(HalfEvent): ...

@final
class Writable(HalfEvent): ...

@final
class SenderEnded(HalfEvent): ...
