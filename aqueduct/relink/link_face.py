"""What the handles of a link have in common: the core, and what waits on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakValueDictionary

from aqueduct.carriers.transports.waiting import Waiters, raised
from aqueduct.config import Config
from aqueduct.errors import ConnectionLost
from aqueduct.protocol.relink.link import Link

__all__ = ["LinkFace"]

_IN_A_ROW: Final = 64
"""So many messages are sent or taken without a pause; then other tasks have a turn."""


class LinkFace:
    """The core of a link, as channels use it.

    ``advance`` lets leave what may, and is the connection's.
    """

    def __init__(
        self,
        link: Link,
        config: Config,
        name: str,
        advance: Callable[[], None],
    ) -> None:
        self.link = link
        self.config = config
        self.name = name
        """What errors and logs call the link: a hash of its id, which is a secret."""
        self.error: ConnectionLost | None = None
        """Why the link is over, once it is."""
        self.closing = False
        """Whether this side closes the link: then nothing more is sent."""
        self.advance = advance
        self.channels: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """Those of this side that somebody has."""
        self.open: dict[int, Any] = {}
        """Those that have sent something since they were closed last."""
        self.unanswered: set[Any] = set()
        """Channels of the peer that it has closed, and whose batches are not all answered."""
        self.changes = Waiters()
        """Woken when the link goes up or down, or is over."""
        self._loop = asyncio.get_running_loop()
        self._soon: asyncio.Handle | None = None
        self._in_a_row = 0

    def usable(self) -> None:
        """Raises why the link is over, if it is."""
        if self.error is not None:
            raise raised(self.error)

    def sendable(self) -> None:
        """Raises why nothing more can be sent, if so."""
        self.usable()
        if self.closing:
            raise ConnectionLost(f"this side closes the link {self.name}", code=0)

    def deadline(self, timeout: Any) -> asyncio.Timeout:
        """Of one wait; None: Timing.progress_deadline."""
        return asyncio.timeout(self.config.timing.progress_deadline if timeout is None else timeout)

    def advance_soon(self) -> None:
        """As ``advance``, once the tasks that can run have run: their messages leave together."""
        if self._soon is None and self.error is None:
            self._soon = self._loop.call_soon(self._advance)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Calls it in the event loop, from any thread. RuntimeError: the loop has ended."""
        self._loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        """Nothing is to leave any more."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    async def give_way(self) -> None:
        """Lets other tasks run after several messages without a wait."""
        self._in_a_row += 1
        if self._in_a_row >= _IN_A_ROW:
            self._in_a_row = 0
            await asyncio.sleep(0)

    def _advance(self) -> None:
        self._soon = None
        self.advance()
