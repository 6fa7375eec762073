"""Requests of this side: one item, or a stream whose reading is the demand."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Self

from aqueduct._speedups.reactivesocket import reactive_frames as frames
from aqueduct.arguments import Duration, checked
from aqueduct.carriers.transports.waiting import raised
from aqueduct.errors import (
    AqueductError,
    ConnectionLost,
    LocalProtocolError,
    ReactiveError,
)
from aqueduct.protocol.reactivesocket.outbox import Buffer
from aqueduct.protocol.reactivesocket.reasons import decode_reason
from aqueduct.reactivesocket.face import ReactiveFace

__all__ = [
    "ERROR_MOST",
    "AwaitedItems",
    "Data",
    "ReactiveItem",
    "ReactiveStream",
    "ask",
    "error_of",
    "no_room",
]

Data = Buffer | Iterable[Buffer]
ERROR_MOST: Final = 64 << 10
"""Bytes of an ERROR that are kept: it is a text for people."""
_KINDS: Final = {frames.REQUEST_STREAM: "stream", frames.REQUEST_SUB: "subscription"}


class ReactiveItem:
    """An item that came. ``parts`` are buffers: bytes, or aligned memory from 4,096 bytes on.

    It counts in the memory of the process until it is freed, or ``release`` is called.
    """

    __slots__ = ("_cost", "_face", "parts")

    def __init__(self, parts: list[Any], cost: int, face: ReactiveFace) -> None:
        self.parts = parts
        self._cost = cost
        self._face = face

    @property
    def data(self) -> bytes | memoryview:
        """All of it as one buffer; parts are joined once."""
        if len(self.parts) > 1:
            self.parts = [b"".join(self.parts)]
        if not self.parts:
            return b""
        found = self.parts[0]
        return found if isinstance(found, bytes) else memoryview(found)

    def release(self) -> None:
        """It is done with: its bytes count no more. Its buffers stay what they are."""
        cost, self._cost = self._cost, 0
        if cost:
            self._face.give_back(cost)

    def __del__(self) -> None:
        self.release()

    def __repr__(self) -> str:
        size = sum(memoryview(part).nbytes for part in self.parts)
        return f"<ReactiveItem of {size} bytes>"


def error_of(data: bytes, peer: str) -> ReactiveError:
    """What an ERROR of the peer is raised as."""
    data = data[:ERROR_MOST]
    word, text = decode_reason(data)
    return ReactiveError(
        f"{peer} answers with an error: {word + ': ' if word else ''}{text or '(without a text)'}",
        word=word,
        text=text,
        data=data,
    )


def no_room(peer: str) -> str:
    """What a request has waited for that could not be sent."""
    return f"there was no room to send a request to {peer}"


class AwaitedItems:
    """What comes on one stream of this side, until somebody takes it."""

    __slots__ = ("came", "error", "expired", "face", "held", "over", "peer", "stream", "waiter")

    def __init__(self, face: ReactiveFace, peer: str) -> None:
        self.face = face
        self.peer = peer
        self.stream = 0
        self.came: deque[tuple[list[Any], int]] = deque()
        """Items that nobody has taken, with their cost."""
        self.held = 0
        """What these cost."""
        self.expired = False
        """It was waited for too long."""
        self.over = False
        """Nothing more comes."""
        self.error: AqueductError | None = None
        """Why not; None: it is complete."""
        self.waiter: asyncio.Future[None] | None = None

    def item(self, parts: list[Any], cost: int) -> None:
        """An item came."""
        self.came.append((parts, cost))
        self.held += cost
        self.face.untaken += cost
        self._wake()

    def end(self, error: AqueductError | None) -> None:
        """It is over."""
        if not self.over:
            self.over, self.error = True, error
            self._wake()

    def expire(self) -> None:
        """The deadline of the first item is over."""
        self.expired = True
        self.end(None)

    def take(self) -> ReactiveItem:
        """The next item."""
        parts, cost = self.came.popleft()
        self.held -= cost
        self.face.lend(cost)
        return ReactiveItem(parts, cost, self.face)

    def forget(self) -> None:
        """Nobody takes what came."""
        self.over = True
        self.came.clear()
        cost, self.held = self.held, 0
        if cost:
            self.face.let_go(cost)
        self._wake()

    async def wait(self) -> None:
        """Returns once there is an item, or it is over."""
        while not self.came and not self.over:
            if self.waiter is not None:
                raise LocalProtocolError(f"stream {self.stream} is read by another task already")
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


async def ask(face: ReactiveFace, peer: str, data: Data, *, timed: bool = False) -> ReactiveItem:
    """The one item that answers a request. There is room.

    ``timed``: within Timing.progress_deadline. Otherwise the caller has a deadline.
    """
    awaited = AwaitedItems(face, peer)
    stream = awaited.stream = face.core.request(frames.REQUEST_RESPONSE, data)
    face.requested[stream] = awaited
    face.advance_soon()
    if timed:
        face.deadlines.add(awaited)
    try:
        await awaited.wait()
        if awaited.came:
            return awaited.take()
    finally:
        if timed:
            face.deadlines.remove(awaited)
        if face.requested.pop(stream, None) is not None:
            face.core.cancel(stream)
            face.advance_soon()
        awaited.forget()
    if awaited.error is not None:
        raise raised(awaited.error)
    if awaited.expired:
        raise TimeoutError(
            f"{peer} gave no answer within {face.deadlines.seconds:g} s (Timing.progress_deadline)"
        )
    return ReactiveItem([], 0, face)  # a completion without an item


class ReactiveStream:
    """Items of the peer: ``async for item in stream``, or ``receive``. Made by a connection.

    Nothing is requested before the first item is asked for. At most ``n`` items are asked for and
    not taken, and fewer if so many of the largest that came would exceed ``bytes``. Asking for the
    next item gives the memory of the last one back.

    Leaving it cancels it: by ``async with``, ``aclose``, or by dropping it, as ``break`` does.
    """

    __slots__ = (
        "__weakref__",
        "_asked",
        "_awaited",
        "_data",
        "_face",
        "_kind",
        "_largest",
        "_last",
        "_most",
        "_most_bytes",
    )

    def __init__(
        self,
        face: ReactiveFace,
        kind: int,
        data: Data,
        peer: str,
        n: int,
        most_bytes: int,
    ) -> None:
        self._face = face
        self._kind = kind
        self._data: Data | None = data
        self._most = n
        self._most_bytes = most_bytes
        self._awaited = AwaitedItems(face, peer)
        self._asked = 0
        """Items that were asked for and not taken."""
        self._largest = 0
        """What the largest item cost; 0: none came."""
        self._last: ReactiveItem | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more comes, beside what waits here."""
        return self._awaited.over

    @property
    def waiting(self) -> int:
        """Items that came and were not taken."""
        return len(self._awaited.came)

    @checked()
    async def receive(self, *, timeout: Duration | None = None) -> ReactiveItem | None:
        """The next item; None once the stream is complete.

        Raises ReactiveError, ConnectionLost, RemoteProtocolError for what the peer did wrong on
        this stream, and TimeoutError after ``timeout`` (seconds; None: it waits for as long as the
        peer takes). The first item may wait for room to send its request. That has
        Timing.progress_deadline, and raises TimeoutError, too.
        """
        if timeout is None:
            return await self._next()
        async with self._face.deadline(timeout, f"no item came from {self._awaited.peer}"):
            return await self._next()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReactiveItem:
        """The next item, until the stream is complete."""
        found = await self._next()
        if found is None:
            raise StopAsyncIteration
        return found

    def cancel(self) -> None:
        """Wants no more of it. Items that wait here are forgotten."""
        awaited, face = self._awaited, self._face
        self._data = None
        if self._last is not None:
            self._last.release()
        awaited.forget()
        if face.requested.pop(awaited.stream, None) is not None:
            face.core.cancel(awaited.stream)
            face.advance_soon()

    async def aclose(self) -> None:
        """As ``cancel``."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        awaited = self._awaited
        if awaited.stream and not (awaited.over and not awaited.came):
            self._face.drop(awaited)

    def __repr__(self) -> str:
        return f"<ReactiveStream {self._awaited.stream}, a {_KINDS[self._kind]}>"

    # Within

    async def _next(self) -> ReactiveItem | None:
        face, awaited = self._face, self._awaited
        last, self._last = self._last, None
        if last is not None:
            last.release()
        if self._data is not None:
            if not face.free:
                async with face.deadline(None, no_room(awaited.peer)):
                    await face.wait_room()
            if self._data is not None:  # still: another task may have begun it, or cancelled it
                self._begin(self._data)
        if awaited.came:
            await face.give_way()
        elif not awaited.over:
            self._ask()
        await awaited.wait()
        if awaited.came:
            self._largest = max(self._largest, awaited.came[0][1])
            self._last = found = awaited.take()
            self._asked -= 1
            if not awaited.over:
                self._ask()
            return found
        if awaited.error is not None:
            raise raised(awaited.error)
        return None

    def _begin(self, data: Data) -> None:
        """Sends the request. If that fails, the next call tries again."""
        face = self._face
        if face.closing:
            raise ConnectionLost("this side closes the connection", code=0)
        # How large items are is not known yet: the first one tells.
        stream = self._awaited.stream = face.core.request(self._kind, data, n=1)
        self._data = None
        self._asked = 1
        face.requested[stream] = self._awaited
        face.advance_soon()

    def _ask(self) -> None:
        """Asks for more items, unless these would be few."""
        if not self._largest:
            return
        most = max(1, min(self._most, self._most_bytes // self._largest))
        more = most - self._asked
        if more > 0 and (2 * more >= most or not self._asked):
            self._asked += more
            self._face.core.request_n(self._awaited.stream, more)
            self._face.advance_soon()
