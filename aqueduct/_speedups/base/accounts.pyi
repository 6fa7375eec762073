from typing import Any

from typing_extensions import disjoint_base

__all__ = ["Account"]

@disjoint_base
class Account:
    used: int
    returned: int
    alive: int
    lent: int
    waiting: dict[Any, Any]
    pulling: dict[Any, Any]
    place: Any
    @property
    def kept(self) -> int: ...
    def charge(self, size: int) -> None: ...
    def join(self, member: Any) -> None: ...
    def press(self) -> None: ...
    def notify(self) -> None: ...
