"""What two programs share over one connection: requests, sinks, streams and duplexes.

Each handle is this side's view of one entity (BP-5). How an entity ended stays on its handle: what
waits on it raises that, and so does every later use.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from aqueduct.arguments import Duration, checked
from aqueduct.bpmux.link import BpmuxLink, again
from aqueduct.bpmux.payloads import Payloads
from aqueduct.errors import Ended, LimitExceeded, LocalProtocolError
from aqueduct.protocol.bpmux.state import Entity, Item

__all__ = [
    "BpmuxRequest",
    "BpmuxSink",
    "BpmuxStream",
    "Buffer",
    "Duplex",
    "EntityHandle",
    "PendingRequest",
]

Buffer = bytes | bytearray | memoryview
"""Bytes, contiguous. What is sent must not change until the sending call has returned."""


class EntityHandle:
    """What handles of one entity have in common."""

    __slots__ = (
        "__weakref__",
        "_end_held",
        "_link",
        "_payload",
        "_pings",
        "_queued",
        "_waiting",
        "acknowledged",
        "ending",
        "entity",
        "error",
    )

    def __init__(
        self, link: BpmuxLink, entity: Entity, payload: bytes = b"", queued: int = 0
    ) -> None:
        self._end_held: tuple[Entity, int, int] | None = None
        """For an end payload that nobody has taken: the paying entity, credit to give, bytes."""
        self._link = link
        self.error: Exception | None = None
        """How it ended: Ended by the peer, ConnectionLost; None: it has not."""
        self.ending = False
        """Whether this side has ended it."""
        self.acknowledged = False
        """Whether the peer has seen that."""
        self.entity = entity
        """The core's side of it; see aqueduct.protocol.bpmux."""
        self._payload = payload
        self._queued = 0
        """Bytes that wait to be sent."""
        self._queue(queued)
        self._waiting: set[asyncio.Future[None]] | None = None
        self._pings: deque[asyncio.Future[float]] | None = None
        entity.user = self
        link.live.add(self)

    def __del__(self) -> None:
        # An application that drops a handle does not want what waits on it.
        self._drop()

    @property
    def identifier(self) -> int:
        """The number of the entity; one that has ended may be used again."""
        return self.entity.identifier

    @property
    def payload(self) -> bytes:
        """What the peer sent with the opening of this; empty if this side opened it."""
        return self._payload

    @checked()
    async def ping(self, *, timeout: Duration | None = None) -> float:
        """Asks the peer for a heartbeat (BP-R11); returns the round-trip time, seconds.

        Raises TimeoutError, Ended, ConnectionLost. None of it ends anything.
        """
        pong: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._usable()
        self._link.ping(self.entity)
        if self._pings is None:
            self._pings = deque()
        self._pings.append(pong)
        async with self._link.deadline(timeout):
            return await pong

    def __repr__(self) -> str:
        kind = type(self).__name__
        ended = f" ended: {self.error}" if self.error is not None else ""
        return f"<bpmux {kind} {self.identifier} with {self._link.peer}{ended}>"

    # What the connection tells.

    def changed(self) -> None:
        """Waiting tasks look again."""
        if not self.entity.items:
            self._unqueue()
        for waiter in self._waiting or ():
            if not waiter.done():
                waiter.set_result(None)

    def ended(self, error: Exception | None, held: tuple[Entity, int, int] | None = None) -> None:
        """It is over, and the first reason stays; None: the peer has seen this side's end."""
        self._detach()
        if error is None:
            self.acknowledged = True
            self.changed()
        elif self.error is None:
            self.error = error
            self._end_held = held
            for pong in self._pings or ():
                if not pong.done():
                    pong.set_exception(again(error))
                    pong.exception()  # the task that asked may have ended
            self._pings = None
            self.changed()
        elif held is not None:
            self._link.consumed(*held)

    def ponged(self, seconds: float) -> None:
        """The oldest ping is answered."""
        if self._pings:
            pong = self._pings.popleft()
            if not pong.done():
                pong.set_result(seconds)

    # Within

    def _detach(self) -> None:
        """Removes the references of connection and entity: nothing more happens to the handle."""
        self._link.live.discard(self)
        self.entity.user = None
        self._unqueue()

    def _drop(self) -> None:
        """Drops what waits on the handle."""
        held, self._end_held = self._end_held, None
        if held is not None:
            self._link.let_go(*held)

    def _queue(self, size: int) -> None:
        self._queued += size
        self._link.queued += size

    def _unqueue(self) -> None:
        """None of it waits to be sent any more."""
        if self._queued:
            self._link.unqueue(self._queued)
            self._queued = 0

    def _raise_error(self) -> None:
        """Raises how it ended, if it has."""
        if self.error is not None:
            self._take_end()
            raise again(self.error)

    def _take_end(self) -> None:
        """The application takes the end payload, which counts no more."""
        held, self._end_held = self._end_held, None
        if held is not None:
            self._link.consumed(*held)

    def _usable(self) -> None:
        self._raise_error()
        if self.ending:
            raise LocalProtocolError(f"{self!r}: this side has ended it already")

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits until this is so, or raises how the entity ended. The caller has a deadline."""
        while not condition():
            self._raise_error()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self._waiting is None:
                self._waiting = set()
            self._waiting.add(waiter)
            try:
                await waiter
            finally:
                self._waiting.discard(waiter)

    async def _left(self, item: Item | None) -> None:
        """Waits until ``item`` has left. If the caller gives up before, it never leaves."""
        entity = self.entity
        self._link.flush()
        try:
            await self._until(lambda: item is None or item not in entity.items)
        except BaseException:
            if item is not None:
                self._link.mux.withdraw(entity, item)
            raise
        finally:
            if not entity.items:
                self._unqueue()

    def _end(self, payload: Buffer) -> None:
        if self.error is not None or self.ending:
            return
        size = memoryview(payload).nbytes
        self._link.require_room(size)
        self._link.mux.end(self.entity, payload)
        self._queue(size)
        self.ending = True
        self._link.flush()
        self.changed()

    def _take_back(self) -> bool:
        """Takes back an opening that has not left; whether it could (BP-R15).

        ``Duplex`` does it for its two halves.
        """
        entity = self.entity
        if self.error is not None or entity.twin is not None:
            return False
        if not self._link.mux.take_back(entity):
            return False
        self.ending = True
        self.ended(None)
        return True

    async def _wait_ended(self, timeout: Duration | None) -> bytes:
        async with self._link.deadline(timeout):
            await self._until(lambda: self.error is not None or self.acknowledged)
        if self.error is None:
            return b""
        self._take_end()
        if isinstance(self.error, Ended):
            return self.error.payload
        raise again(self.error)


class BpmuxSink(EntityHandle):
    """Takes payloads to the peer, in order, as far as the peer gives credit."""

    __slots__ = ("_turn", "most_credit")

    def __init__(
        self, link: BpmuxLink, entity: Entity, payload: bytes = b"", queued: int = 0
    ) -> None:
        super().__init__(link, entity, payload, queued)
        self._turn: asyncio.Lock | None = None
        self.most_credit = entity.credit_out
        """The most that there ever was of it."""

    @checked()
    async def send(
        self, payload: Buffer, *, partial: bool | None = None, timeout: Duration | None = None
    ) -> None:
        """Sends one payload, and waits until it has left: until the peer gave credit for it.

        ``partial``: whether it travels in Partial mode (BP-16), in pieces as credit comes, and is
        put together by the peer; None: if it is larger than Bpmux.chunk or than any credit the peer
        ever gave. Without that mode a payload waits for credit for all of it, and travels in
        one chunk. ``timeout`` in seconds; None: Timing.progress_deadline.

        Raises Ended when the peer wants no more, ConnectionLost, LocalProtocolError after ``end``,
        and TimeoutError when no credit came: what had begun in Partial mode goes on, of anything
        else nothing is sent.
        """
        self._usable()
        size = memoryview(payload).nbytes
        link = self._link
        mux = link.mux
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with link.deadline(timeout), self._turn:
            if partial is None and size:
                await self._until(lambda: self.most_credit > 0)
                partial = size > min(self.most_credit, link.config.bpmux.chunk)
            await link.room(size)
            if not partial:
                await self._until(lambda: self.entity.credit_out >= size)
            self._usable()
            self._queue(size)
            if partial:
                item = mux.write(self.entity, payload, total=size)
            else:
                item = mux.write(self.entity, payload, whole=True)
            await self._left(item)

    @checked()
    def end(self, payload: Buffer = b"") -> None:
        """Says that no payload follows; ``payload`` goes with it, and waits for credit.

        Without effect on what has ended. What an earlier ``send`` queued leaves before. If the
        connection is closed before there is credit, the end leaves without its payload.
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

    async def __aexit__(self, kind: object, *rest: object) -> None:
        if kind is None or not self._take_back():
            self.end()

    def changed(self) -> None:
        """As of every handle; the credit is looked at first."""
        self.most_credit = max(self.most_credit, self.entity.credit_out)
        super().changed()


class BpmuxStream(EntityHandle):
    """Gives the payloads that the peer sends, in order; taking one gives credit back (BP-R12)."""

    __slots__ = ("_queue_in", "window")

    def __init__(
        self,
        link: BpmuxLink,
        entity: Entity,
        window: int,
        payload: bytes = b"",
        queued: int = 0,
    ) -> None:
        self._queue_in: Payloads | None = None
        super().__init__(link, entity, payload, queued)
        self.window = window
        """Bytes that the peer may send ahead of what is received here."""

    @checked()
    async def receive(self, *, timeout: Duration | None = None) -> bytes:
        """The next payload. ``timeout`` in seconds; None: Timing.progress_deadline.

        Raises Ended once the peer has ended it and all was received, ConnectionLost,
        LocalProtocolError after ``end``, TimeoutError.
        """
        if self.ending:
            raise LocalProtocolError(f"{self!r}: this side has ended it already")
        if self._waits:
            await self._link.give_way()
        if not self._waits:
            with self._link.reading(self.entity):
                async with self._link.deadline(timeout):
                    await self._until(lambda: self._waits or self.ending)
        if self.ending:
            raise LocalProtocolError(f"{self!r}: this side has ended it while it was read")
        assert self._queue_in is not None
        payload, charged = self._queue_in.take()
        self._link.unread -= 1
        self._link.consumed(self.entity, charged, len(payload))
        return payload

    @checked()
    def end(self, payload: Buffer = b"") -> None:
        """Says that nothing more is wanted; what came and was not received is dropped."""
        self._drop_queue()
        if not self._take_back():
            self._end(payload)
        self._link.flush()

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

    async def __aexit__(self, *exc: object) -> None:
        self.end()

    @property
    def _waits(self) -> bool:
        return self._queue_in is not None and self._queue_in.count > 0

    def _drop(self) -> None:
        super()._drop()
        self._drop_queue()

    def _drop_queue(self) -> None:
        queue = self._queue_in
        if queue is not None and queue.count:
            self._link.unread -= queue.count
            self._link.let_go(self.entity, 0, queue.size)
            queue.clear()

    def arrived(self, payload: bytes, charged: int) -> None:
        """The connection has a payload; ``charged`` bytes of credit are to be given for it."""
        link = self._link
        if self.ending:
            link.let_go(self.entity, 0, len(payload))
            return  # the peer had not seen the end
        if self._queue_in is None:
            self._queue_in = Payloads()
        if self._queue_in.count >= self.window:
            # Empty payloads take no credit, but memory all the same.
            raise LimitExceeded(
                f"{self._queue_in.count} payloads wait on {self!r}, whose window is {self.window}"
            )
        self._queue_in.append(payload, charged)
        link.count_unread()
        self.changed()


class Duplex:
    """A sink and a stream of one identifier; each ends by itself (BP-R9)."""

    __slots__ = ("sink", "stream")

    def __init__(self, sink: BpmuxSink, stream: BpmuxStream) -> None:
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
        """See BpmuxSink.send."""
        await self.sink.send(payload, partial=partial, timeout=timeout)

    @checked()
    async def receive(self, *, timeout: Duration | None = None) -> bytes:
        """See BpmuxStream.receive."""
        return await self.stream.receive(timeout=timeout)

    @checked()
    def end(self, payload: Buffer = b"") -> None:
        """Ends both halves; the sink with this payload."""
        self.sink.end(payload)
        self.stream.end()

    def __aiter__(self) -> BpmuxStream:
        return self.stream

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *rest: object) -> None:
        link = self.sink._link
        if kind is not None and link.mux.take_back(self.sink.entity):
            for half in (self.sink, self.stream):
                half.ending = True
                half.ended(None)
        else:
            self.end()

    def __repr__(self) -> str:
        return f"<bpmux Duplex {self.sink.identifier} with {self.sink._link.peer}>"


class BpmuxRequest(EntityHandle):
    """The peer asks something: ``payload``. It gets one answer, or the request is ended."""

    __slots__ = ()

    @property
    def cancelled(self) -> bool:
        """Whether the peer wants no answer any more."""
        return isinstance(self.error, Ended)

    @checked()
    async def respond(self, payload: Buffer, *, timeout: Duration | None = None) -> None:
        """Answers, and waits until the answer has left; the answer of a cancelled one is dropped.

        One larger than the credit that came with the request travels in Partial mode. Raises
        LocalProtocolError for a second answer, ConnectionLost, TimeoutError: then nothing is sent
        if nothing had left, and the request can still be answered.
        """
        if self.cancelled:
            return
        self._usable()
        size = memoryview(payload).nbytes
        link = self._link
        with suppress(Ended):
            async with link.deadline(timeout):
                if not link.has_room(size):
                    await link.room(size)
                    self._usable()
                room = min(self.entity.credit_out, link.config.bpmux.chunk)
                total = size if size > room else 0
                self._queue(size)
                item = link.mux.respond(self.entity, payload, total=total)
                self.ending = True
                try:
                    await self._left(item)
                finally:
                    self.ending = self.entity.ending

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


class PendingRequest(EntityHandle):
    """A request of this side, on its way."""

    __slots__ = ("_answer",)

    def __init__(self, link: BpmuxLink, entity: Entity, queued: int) -> None:
        super().__init__(link, entity, queued=queued)
        self._answer: bytes | None = None

    async def answer(self) -> bytes:
        """The response. The caller has a deadline."""
        with self._link.reading(self.entity):
            await self._until(lambda: self._answer is not None)
        assert self._answer is not None
        return self._answer

    def cancel(self) -> None:
        """Gives up the request. If it has not left, it never leaves (BP-R15)."""
        if self._answer is not None:
            self._link.let_go(self.entity, 0, len(self._answer))
        elif self.error is None and not self._take_back():
            self.ending = True
            if not self.entity.ending and not self.entity.end_in and not self.entity.gone:
                self._link.mux.end(self.entity, drop=True)
            self._link.flush()

    def arrived(self, payload: bytes, charged: int) -> None:
        """The connection has the answer."""
        if self.ending:
            self._link.let_go(self.entity, 0, len(payload))
        else:
            self._answer = payload
        self._detach()
        self.changed()
