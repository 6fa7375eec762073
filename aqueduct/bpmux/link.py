"""The core of bpmux over a transport of asyncio, as handles use it.

The connection feeds what comes and hears of it. Handles send by this, and wait by it for room.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol, TypeVar

from aqueduct.config import Config
from aqueduct.errors import ConnectionLost, LimitExceeded, SendQueueFull
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import Entity

__all__ = ["BpmuxLink", "Handle", "again"]

_PAYLOAD_COST: Final = 16
"""Bytes that each waiting payload counts beside its own."""
_IN_A_ROW: Final = 64
"""So many payloads are taken without a pause; then other tasks of the event loop have a turn."""
_Error = TypeVar("_Error", bound=Exception)


def again(error: _Error) -> _Error:
    """A copy of an error that is kept, to be raised.

    An error that was raised refers to the frames it came through, and these to the handle. A kept
    one would make a cycle, which only the garbage collector could free.
    """
    found = copy.copy(error)
    found.__cause__ = error.__cause__
    return found


class Handle(Protocol):
    """What is told of an entity; it is the ``user`` of that."""

    def changed(self) -> None:
        """There is more credit, or something has left."""

    def ended(self, error: Exception | None, held: tuple[Entity, int, int] | None = None) -> None:
        """It is over: by ``error``, or as the peer has seen this side's end."""


class BpmuxLink:
    """The core, its transport, and what limits bytes that wait in both directions."""

    def __init__(self, transport: asyncio.Transport, config: Config, peer: str) -> None:
        self.config = config
        self.peer = peer
        self.transport = transport
        self.mux = Mux(config.bpmux, whole=True)
        self.error: ConnectionLost | None = None
        """Why it is over, once it is."""
        self.live: set[Handle] = set()
        """Of entities that have not ended."""
        self.writable = asyncio.Event()
        """Set while the transport takes bytes."""
        self.writable.set()
        self.queued = 0
        """Bytes that wait to be sent."""
        self.unread = 0
        """Payloads that wait to be received."""
        self.progress = 0.0
        """When something moved that is open."""
        self.flushed: Callable[[], None] | None = None
        """Called after each ``flush``."""
        self._loop = asyncio.get_running_loop()
        self._sendable = asyncio.Event()
        """Set when fewer bytes wait to be sent."""
        self._in_a_row = 0
        self._flushing: asyncio.Handle | None = None

    def flush(self) -> None:
        """Gives the transport what may leave, unless it has enough, or is closing.

        After a loss, asyncio's ``writelines`` of Python 3.12 and 3.13 would watch a socket that is
        closed: the next one with its number would never be heard.
        """
        while self.writable.is_set() and self.error is None and not self.transport.is_closing():
            buffers, size, written = self.mux.take(self.config.bpmux.chunk)
            if not size:
                break
            self.transport.writelines(buffers)
            for entity, _ in written:
                if entity.user is not None:
                    entity.user.changed()
            if written:
                self.progress = self._loop.time()
        if self.flushed is not None:
            self.flushed()

    def over(self, error: ConnectionLost) -> None:
        """Nothing is sent any more; every handle is told why."""
        self.error = error
        self.flushed = None
        if self._flushing is not None:
            self._flushing.cancel()
        for handle in tuple(self.live):
            handle.ended(error)
        self.writable.set()  # the waiting task finds the error
        self._sendable.set()

    def usable(self) -> None:
        """Raises why it is over, if it is."""
        if self.error is not None:
            raise again(self.error)

    def deadline(self, timeout: Any) -> asyncio.Timeout:
        """Of one wait; None: Timing.progress_deadline."""
        return asyncio.timeout(self.config.timing.progress_deadline if timeout is None else timeout)

    def ping(self, entity: Entity) -> None:
        """Asks for a heartbeat."""
        self.mux.ping(entity, self._loop.time())
        self.flush()

    # Bytes that came

    def consumed(self, payer: Entity, charged: int, held: int) -> None:
        """The application has taken ``held`` bytes; ``charged`` of credit are given for them."""
        self.mux.consumed(payer, charged, held)
        self.flush()

    def let_go(self, payer: Entity, charged: int, held: int) -> None:
        """As ``consumed``, from anywhere: nothing is sent before the event loop's next turn."""
        self.mux.consumed(payer, charged, held)
        if self._flushing is None and self.error is None:
            with suppress(RuntimeError):  # another thread's garbage collection, or a closed loop
                self._flushing = self._loop.call_soon(self._flush_late)

    def _flush_late(self) -> None:
        self._flushing = None
        self.flush()

    @contextmanager
    def reading(self, entity: Entity) -> Iterator[None]:
        """While the application waits for the next payload of this entity (BP-R12)."""
        self.mux.wait_for(entity)
        self.flush()
        try:
            yield
        finally:
            self.mux.wait_no_more(entity)

    async def give_way(self) -> None:
        """Lets other tasks run after several payloads that were taken without a wait."""
        self._in_a_row += 1
        if self._in_a_row >= _IN_A_ROW:
            self._in_a_row = 0
            await asyncio.sleep(0)

    def count_unread(self) -> None:
        """One more payload waits to be received."""
        self.unread += 1
        limit = self.config.bpmux.connection_bytes
        if self.unread * _PAYLOAD_COST > limit:
            raise LimitExceeded(
                f"{self.unread} payloads wait to be received, each of which counts "
                f"{_PAYLOAD_COST} bytes; Bpmux.connection_bytes is {limit} (BP-R12)"
            )

    # Bytes that wait to be sent

    def has_room(self, size: int) -> bool:
        """Whether ``size`` bytes more may wait to be sent. One payload always may."""
        return not self.queued or self.queued + size <= self.config.bpmux.connection_bytes

    def require_room(self, size: int) -> None:
        """Raises SendQueueFull unless ``size`` bytes more may wait."""
        if size and not self.has_room(size):
            raise SendQueueFull(
                f"{self.queued} bytes wait to be sent to {self.peer}, and {size} more are above "
                f"Bpmux.connection_bytes ({self.config.bpmux.connection_bytes}); nothing was sent"
            )

    async def room(self, size: int) -> None:
        """Waits until the transport takes more, and ``size`` bytes more may be queued."""
        await self.writable.wait()
        while self.error is None and not self.has_room(size):
            self._sendable.clear()
            await self._sendable.wait()
        self.usable()

    def unqueue(self, size: int) -> None:
        """So many bytes wait no more."""
        self.queued -= size
        self._sendable.set()
