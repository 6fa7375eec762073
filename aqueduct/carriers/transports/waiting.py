"""How tasks wait for what a connection brings, and copies of errors that are kept."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Waiters", "raised"]

_Error = TypeVar("_Error", bound=Exception)


def raised(error: _Error) -> _Error:
    """A copy of an error that is kept, to be raised.

    An error that was raised refers to the frames it came through, and these to the handle. A kept
    one would make a cycle, which only the garbage collector could free.
    """
    found = copy.copy(error)
    found.__cause__ = error.__cause__
    return found


class Waiters:
    """Tasks that wait until something is so; ``wake`` lets them look again."""

    __slots__ = ("_futures",)

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[None]] | None = None
        """None: nobody has waited. There are many of these, and an empty set takes memory."""

    def wake(self) -> None:
        """Something has changed."""
        for future in self._futures or ():
            if not future.done():
                future.set_result(None)

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until this is so. The caller has a deadline."""
        while not condition():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self._futures is None:
                self._futures = set()
            self._futures.add(future)
            try:
                await future
            finally:
                self._futures.discard(future)
