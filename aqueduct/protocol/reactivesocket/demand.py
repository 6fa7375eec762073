"""How many items may be sent on a stream (RS-R6)."""

from __future__ import annotations

from typing import Final

from aqueduct.errors import SequenceError

__all__ = ["UNBOUNDED", "Demand", "check_initial", "check_more"]

UNBOUNDED: Final = (1 << 63) - 1
"""The most that can be asked for. It is not counted down."""


class Demand:
    """Items that were asked for and have not come."""

    __slots__ = ("items",)

    def __init__(self, items: int) -> None:
        self.items = items

    def add(self, items: int) -> None:
        """More are asked for."""
        self.items = min(self.items + items, UNBOUNDED)

    def take(self) -> bool:
        """Whether one more item may come; it counts."""
        if self.items < UNBOUNDED:
            if not self.items:
                return False
            self.items -= 1
        return True


def check_initial(items: int) -> int:
    """The number of a request. Raises SequenceError for one that cannot be."""
    if items > UNBOUNDED:
        raise SequenceError(f"a request for {items} items; 2^63 - 1 are the most (RS-R6)")
    return items


def check_more(items: int) -> int:
    """The number of a REQUEST_N. Raises SequenceError for one that cannot be."""
    if not 0 < items <= UNBOUNDED:
        raise SequenceError(f"a REQUEST_N of {items} items; it has 1 to 2^63 - 1 (RS-R6)")
    return items
