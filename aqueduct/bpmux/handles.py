"""What two programs share over one connection: requests, sinks, streams and duplexes.

Each handle is this side's view of one entity (BP-5). How an entity ended stays on its handle: what
waits on it raises that, and so does every later use.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aqueduct.arguments import Duration, checked
from aqueduct.errors import Ended, LimitExceeded, LocalProtocolError
from aqueduct.protocol.bpmux.state import Entity

if TYPE_CHECKING:
    from aqueduct.bpmux.connection import Connection

__all__ = ["Buffer", "Call", "Duplex", "Half", "Request", "Sink", "Stream"]

Buffer = bytes | bytearray | memoryview
"""Bytes, contiguous. What is sent must not change until the sending call has returned."""


class Half:
    """What handles of one entity have in common."""

    def __init__(self, connection: Connection, entity: Entity) -> None:
        self.connection = connection
        self.error: Exception | None = None
        """How it ended: Ended by the peer, ConnectionLost; None: it has not."""
        self.ending = False
        """Whether this side has ended it."""
        self.acknowledged = False
        """Whether the peer has seen that."""
        self._entity = entity
        self._waiting: set[asyncio.Future[None]] = set()
        self._pings: deque[asyncio.Future[float]] = deque()
        entity.user = self
        connection._live.add(self)

    @property
    def identifier(self) -> int:
        """The number of the entity; one that has ended may be used again."""
        return self._entity.identifier

    @property
    def payload(self) -> bytes:
        """What the peer sent with the opening of this; empty if this side opened it."""
        return self._payload

    _payload = b""

    @checked()
    async def ping(self, *, timeout: Duration | None = None) -> float:
        """Asks the peer for a sign of life (BP-R11); returns the round-trip time, seconds.

        Raises TimeoutError, Ended, ConnectionLost. None of it ends anything.
        """
        pong: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._usable()
        self.connection._ping(self._entity)
        self._pings.append(pong)
        async with self.connection._deadline(timeout):
            return await pong

    def __repr__(self) -> str:
        kind = type(self).__name__
        ended = f" ended: {self.error}" if self.error is not None else ""
        return f"<bpmux {kind} {self.identifier} with {self.connection.peer}{ended}>"

    # What the connection tells.

    def _changed(self) -> None:
        """Whoever waits looks again."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _ended(self, error: Exception) -> None:
        """It is over; the first reason stays."""
        self.connection._live.discard(self)
        if self.error is None:
            self.error = error
            for pong in self._pings:
                if not pong.done():
                    pong.set_exception(error.with_traceback(None))
                    pong.exception()  # whoever asked may have gone
            self._pings.clear()
            self._changed()

    def _seen(self) -> None:
        """The peer has acknowledged this side's end."""
        self.acknowledged = True
        self.connection._live.discard(self)
        self._changed()

    def _ponged(self, seconds: float) -> None:
        """The oldest ping is answered."""
        if self._pings:
            pong = self._pings.popleft()
            if not pong.done():
                pong.set_result(seconds)

    # Within

    def _usable(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self.ending:
            raise LocalProtocolError(f"{self!r}: this side has ended it already")

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits until this is so, or raises how the entity ended. The caller has a deadline."""
        while not condition():
            if self.error is not None:
                raise self.error.with_traceback(None)
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(waiter)
            try:
                await waiter
            finally:
                self._waiting.discard(waiter)

    async def _left(self) -> None:
        """Waits until everything of it that was queued has left."""
        connection = self.connection
        connection._flush()
        connection._leaving.add(self)
        try:
            await self._until(lambda: not self._entity.items)
        finally:
            connection._leaving.discard(self)

    def _end(self, payload: Buffer) -> None:
        if self.error is None and not self.ending:
            self.connection.mux.end(self._entity, payload)
            self.ending = True
            self.connection._flush()
            self._changed()

    async def _wait_ended(self, timeout: Duration | None) -> bytes:
        async with self.connection._deadline(timeout):
            await self._until(lambda: self.error is not None or self.acknowledged)
        if self.error is None:
            return b""
        if isinstance(self.error, Ended):
            return self.error.payload
        raise self.error.with_traceback(None)


class Sink(Half):
    """Takes payloads to the peer, in order, as far as the peer gives credit."""

    def __init__(self, connection: Connection, entity: Entity, payload: bytes = b"") -> None:
        super().__init__(connection, entity)
        self._payload = payload
        self._turn = asyncio.Lock()
        self._most = entity.credit_out

    @checked()
    async def send(
        self, payload: Buffer, *, partial: bool | None = None, timeout: Duration | None = None
    ) -> None:
        """Sends one payload, and waits until it has left: until the peer gave credit for it.

        ``partial``: whether it travels in Partial mode (BP-16), in pieces as credit comes, and is
        put together by the peer; None: if it is larger than Mux.chunk or than any credit the peer
        ever gave. Without that mode a payload waits for credit for all of it, and travels in
        one chunk. ``timeout`` in seconds; None: Timing.progress_deadline.

        Raises Ended when the peer wants no more, ConnectionLost, LocalProtocolError after ``end``,
        and TimeoutError when no credit came: what had begun in Partial mode goes on, of anything
        else nothing was sent.
        """
        self._usable()
        size = memoryview(payload).nbytes
        mux = self.connection.mux
        async with self.connection._deadline(timeout), self._turn:
            if partial is None and size:
                await self._until(lambda: self._most > 0)
                partial = size > min(self._most, self.connection.config.mux.chunk)
            await self.connection._room()
            if not partial:
                await self._until(lambda: self._entity.credit_out >= size)
            self._usable()
            if partial:
                mux.write(self._entity, payload, total=size)
            else:
                mux.write(self._entity, payload, whole=True)
            await self._left()

    @checked()
    def end(self, payload: Buffer = b"") -> None:
        """Says that no payload follows; ``payload`` goes with it, as far as there is credit for it.

        Without effect on what has ended. What an earlier ``send`` queued leaves before.
        """
        self._end(payload)

    @checked()
    async def wait_ended(self, *, timeout: Duration | None = None) -> bytes:
        """Waits until the peer has seen ``end``, or has ended it itself; its end payload, or b"".

        Raises ConnectionLost, TimeoutError.
        """
        return await self._wait_ended(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def _changed(self) -> None:
        self._most = max(self._most, self._entity.credit_out)
        super()._changed()


class Stream(Half):
    """Gives the payloads that the peer sends, in order; taking one gives credit back (BP-R12)."""

    def __init__(
        self, connection: Connection, entity: Entity, window: int, payload: bytes = b""
    ) -> None:
        super().__init__(connection, entity)
        self.window = window
        """Bytes that the peer may send ahead of what is received here."""
        self._payload = payload
        self._queue: deque[tuple[bytes, int]] = deque()

    @checked()
    async def receive(self, *, timeout: Duration | None = None) -> bytes:
        """The next payload. ``timeout`` in seconds; None: Timing.progress_deadline.

        Raises Ended once the peer has ended it and all was received, ConnectionLost,
        LocalProtocolError after ``end``, TimeoutError.
        """
        if self.ending:
            raise LocalProtocolError(f"{self!r}: this side has ended it already")
        if not self._queue:
            async with self.connection._deadline(timeout):
                await self._until(lambda: bool(self._queue) or self.ending)
        if self.ending:
            raise LocalProtocolError(f"{self!r}: this side has ended it while it was read")
        payload, charged = self._queue.popleft()
        self.connection._consumed(self._entity, charged)
        return payload

    @checked()
    def end(self, payload: Buffer = b"") -> None:
        """Says that nothing more is wanted; what came and was not received is dropped."""
        self._queue.clear()
        self._end(payload)

    @checked()
    async def wait_ended(self, *, timeout: Duration | None = None) -> bytes:
        """Waits until the peer has seen ``end``, or has ended it itself; its end payload, or b"".

        Raises ConnectionLost, TimeoutError.
        """
        return await self._wait_ended(timeout)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next payload, until the peer ends it; its end payload is then in ``error``."""
        try:
            return await self.receive()
        except Ended:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def _arrived(self, payload: bytes, charged: int) -> None:
        if self.ending:
            return  # the peer had not seen the end
        if len(self._queue) >= self.window:
            # Empty payloads take no credit, but memory all the same.
            raise LimitExceeded(
                f"{len(self._queue)} payloads wait on {self!r}, whose window is {self.window}"
            )
        self._queue.append((payload, charged))
        self._changed()


class Duplex:
    """A sink and a stream of one identifier; each ends by itself (BP-R9)."""

    def __init__(self, sink: Sink, stream: Stream) -> None:
        self.sink = sink
        self.stream = stream

    @property
    def payload(self) -> bytes:
        """What the peer sent with the opening of this; empty if this side opened it."""
        return self.sink.payload

    @checked()
    async def send(
        self, payload: Buffer, *, partial: bool | None = None, timeout: Duration | None = None
    ) -> None:
        """See Sink.send."""
        await self.sink.send(payload, partial=partial, timeout=timeout)

    @checked()
    async def receive(self, *, timeout: Duration | None = None) -> bytes:
        """See Stream.receive."""
        return await self.stream.receive(timeout=timeout)

    @checked()
    def end(self, payload: Buffer = b"") -> None:
        """Ends both halves; the sink with this payload."""
        self.sink.end(payload)
        self.stream.end()

    def __aiter__(self) -> Stream:
        return self.stream

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.end()

    def __repr__(self) -> str:
        return f"<bpmux Duplex {self.sink.identifier} with {self.sink.connection.peer}>"


class Request(Half):
    """The peer asks something: ``payload``. It gets one answer, or the request is ended."""

    def __init__(self, connection: Connection, entity: Entity, payload: bytes) -> None:
        super().__init__(connection, entity)
        self._payload = payload

    @property
    def cancelled(self) -> bool:
        """Whether the peer wants no answer any more."""
        return isinstance(self.error, Ended)

    @checked()
    async def respond(self, payload: Buffer, *, timeout: Duration | None = None) -> None:
        """Answers, and waits until the answer has left; an answer to who cancelled is dropped.

        One larger than the credit that came with the request travels in Partial mode. Raises
        LocalProtocolError for a second answer, ConnectionLost, TimeoutError.
        """
        if self.cancelled:
            return
        self._usable()
        size = memoryview(payload).nbytes
        room = min(self._entity.credit_out, self.connection.config.mux.chunk)
        self.connection.mux.respond(self._entity, payload, total=size if size > room else 0)
        self.ending = True
        with suppress(Ended):
            async with self.connection._deadline(timeout):
                await self._left()

    @checked()
    def refuse(self, payload: Buffer = b"") -> None:
        """Ends it without an answer: the peer's ``request`` raises Ended with this payload."""
        self._end(payload)

    @checked()
    async def wait_cancelled(self, *, timeout: Duration | None = None) -> bytes:
        """Waits until the peer wants no answer any more, or has one; what it said with a cancel.

        Raises ConnectionLost, TimeoutError.
        """
        return await self._wait_ended(timeout)


class Call(Half):
    """A request of this side, on its way."""

    def __init__(self, connection: Connection, entity: Entity) -> None:
        super().__init__(connection, entity)
        self._answer: bytes | None = None

    async def answer(self) -> bytes:
        """The response. The caller has a deadline."""
        await self._until(lambda: self._answer is not None)
        assert self._answer is not None
        return self._answer

    def cancel(self) -> None:
        """No answer is wanted any more."""
        if self._answer is None:
            self._end(b"")
        if self._entity.gone:
            self.connection._live.discard(self)  # the peer never heard of it

    def _arrived(self, payload: bytes, charged: int) -> None:
        self._answer = payload
        self.connection._live.discard(self)
        self._changed()
