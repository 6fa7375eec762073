"""Channels of this side: messages, and transactions of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Self

from aqueduct.arguments import Duration, checked
from aqueduct.carriers.transports.waiting import Waiters, raised
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.relink.cost import message_cost
from aqueduct.relink.link_face import LinkFace

__all__ = ["Bytes", "RelinkChannel", "RelinkTransaction"]

Bytes = bytes | bytearray | memoryview
"""A contiguous buffer. It must not change until the peer has received it."""


class RelinkChannel:
    """Sends messages to the peer, each once and in order. Made by ``RelinkConnection.channel``.

    A channel opens with its first message. It may be used again once it is closed. If the link uses
    transactions for this side, messages are sent in ``transaction``.
    """

    __slots__ = ("__weakref__", "_face", "_open", "_opener", "_turn", "_waiters", "identifier")

    def __init__(self, face: LinkFace, identifier: int) -> None:
        self.identifier = identifier
        self._face = face
        self._waiters = Waiters()
        self._turn = asyncio.Lock()
        self._open: deque[RelinkTransaction] = deque()
        """Committed transactions whose result is not known, in order."""
        self._opener: asyncio.Task[Any] | None = None
        """Who is in a transaction now."""

    @checked()
    async def send(self, *parts: Bytes, timeout: Duration | None = None) -> int:
        """Sends a message of these parts; returns its number on this channel, from 0.

        It waits while the peer has not consumed Relink.window_bytes of all channels together, or
        Relink.window_messages of this one, for at most ``timeout`` (seconds; None:
        Timing.progress_deadline). The parts are kept by reference until the peer has received
        them. While there is no connection messages wait to be sent. Raises LinkLost, TimeoutError
        (then nothing is sent), and LocalProtocolError.
        """
        if self._face.link.transactional:
            raise LocalProtocolError(
                f"{self!r} uses transactions: send within channel.transaction()"
            )
        async with self._face.deadline(timeout), self._turn:
            return await self._send(parts)

    def transaction(self, *, timeout: Duration | None = None) -> RelinkTransaction:
        """Messages that the peer processes together, or not at all, for ``async with``.

        Leaving the block commits, or rolls back if an exception leaves it. One transaction of a
        channel is open at a time; the next waits for at most ``timeout``.
        """
        if not self._face.link.transactional:
            raise LocalProtocolError(f"{self!r} does not use transactions; see connect")
        return RelinkTransaction(self, timeout)

    @checked()
    async def close(self, *, timeout: Duration | None = None) -> None:
        """Closes the channel, and waits until the peer has consumed or answered everything.

        Raises LinkLost, LocalProtocolError within a transaction of this task, and TimeoutError
        after ``timeout`` (seconds; None: Timing.progress_deadline). Its text says whether the
        channel is closed later, or stays open as other tasks were sending or in a transaction.
        """
        face, link = self._face, self._face.link
        face.usable()
        if self._opener is not None and self._opener is asyncio.current_task():
            raise LocalProtocolError(
                f"{self!r} is closed once its transaction has ended: leave its block before"
            )
        begun = False
        try:
            async with face.deadline(timeout), self._turn:
                begun = True
                link.close(self.identifier)
                face.advance()
                await self._waiters.until(
                    lambda: face.error is not None or self.identifier not in face.open
                )
        except TimeoutError:
            raise TimeoutError(
                f"{self!r} is closing: the peer has not done with everything yet"
                if begun
                else f"{self!r} stays open: other tasks were sending or in a transaction"
            ) from None
        if self.identifier in face.open:
            face.usable()

    def __repr__(self) -> str:
        return f"<RelinkChannel {self.identifier} of link {self._face.name}>"

    # What the connection tells

    def changed(self) -> None:
        """There is room, the peer has done with everything, or the link is over."""
        self._waiters.wake()

    def resulted(self, numbers: Sequence[int], *, committed: bool) -> None:
        """The results of these messages, in order."""
        waiting = self._open
        for number in numbers:
            # Whoever commits by the core has no transaction here.
            if waiting and waiting[0].resulted(number, committed=committed):
                waiting.popleft()
        self._waiters.wake()

    # Within

    async def _send(
        self, parts: Sequence[Bytes], transaction: RelinkTransaction | None = None
    ) -> int:
        """The same, in turn and with a deadline. ``transaction``: it must be open to the end."""
        face = self._face
        link, settings = face.link, face.config.relink
        flat = tuple(map(_flat, parts))
        size = sum(map(len, flat))
        if size > settings.message_bytes or len(flat) > settings.parts:
            raise LocalProtocolError(
                f"a message of {size} bytes in {len(flat)} parts; Relink.message_bytes is "
                f"{settings.message_bytes}, Relink.parts {settings.parts}"
            )
        await face.give_way()
        await self._waiters.until(
            lambda: (
                face.error is not None
                or face.closing
                or (transaction is not None and transaction.ended)
                or link.writable(self.identifier, size, len(flat))
            )
        )
        face.sendable()
        if transaction is not None:
            transaction.require_open()
        (number,) = link.send(self.identifier, flat)
        face.open[self.identifier] = self
        face.advance_soon()
        return number

    def _decide(self, transaction: RelinkTransaction, *, commit: bool) -> None:
        """The end of an open transaction."""
        if commit:
            self._face.link.commit(self.identifier, transaction.last)
            self._open.append(transaction)
        else:
            self._face.link.rollback(self.identifier, transaction.last)
        self._face.advance_soon()


def _flat(part: Bytes) -> Bytes:
    """The bytes of a buffer, without a copy."""
    if isinstance(part, bytes):
        return part
    view = memoryview(part)
    if not view.c_contiguous:
        raise LocalProtocolError("a part must be contiguous; copy it with bytes()")
    if not view.nbytes:
        return b""
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


class RelinkTransaction:
    """Messages of one channel that are committed together; see ``RelinkChannel.transaction``.

    It has at most Relink.window_messages messages, which cost at most Relink.window_bytes together:
    each costs its bytes, 128, and 64 for each part. One message alone may cost more. The peer may
    take several that were committed one after the other at once, and answers each.
    """

    __slots__ = (
        "_channel",
        "_cost",
        "_count",
        "_good",
        "_timeout",
        "_waiters",
        "committed",
        "ended",
        "last",
    )

    def __init__(self, channel: RelinkChannel, timeout: Any) -> None:
        self.committed: bool | None = None
        """The result; None: it is not known."""
        self.last = -1
        """The number of its last message."""
        self._channel = channel
        self._timeout = timeout
        self._cost = 0
        self._count = 0
        """How many messages it has."""
        self._good = True
        """Whether those that have one were committed."""
        self.ended = True
        """Whether it takes no messages: its block is not entered, or left."""
        self._waiters = channel._waiters

    async def __aenter__(self) -> Self:
        if self.last >= 0 or self.committed is not None:
            raise LocalProtocolError("this transaction was used before; make another one")
        face = self._channel._face
        async with face.deadline(self._timeout):
            await self._channel._turn.acquire()
        try:
            face.usable()
        except BaseException:
            self._channel._turn.release()
            raise
        self.ended = False
        self._channel._opener = asyncio.current_task()
        return self

    async def __aexit__(self, kind: object, *rest: object) -> None:
        if not self.ended:
            self._end(commit=kind is None)

    @checked()
    async def send(self, *parts: Bytes, timeout: Duration | None = None) -> int:
        """As ``RelinkChannel.send``. A transaction above the window raises LocalProtocolError."""
        channel = self._channel
        self.require_open()
        settings = channel._face.config.relink
        cost = message_cost(sum(memoryview(part).nbytes for part in parts), len(parts))
        if self._count and (
            self._cost + cost > settings.window_bytes or self._count >= settings.window_messages
        ):
            raise LocalProtocolError(
                f"a transaction of {self._count + 1} messages that count for {self._cost + cost} "
                "bytes can never be committed; commit some of them before. The limits are "
                f"{settings.window_messages} messages (Relink.window_messages) and "
                f"{settings.window_bytes} bytes (Relink.window_bytes), of which each message takes "
                "its bytes, 128, and 64 for each part"
            )
        async with channel._face.deadline(timeout):
            number = await channel._send(parts, self)
        self.last = number
        self._count += 1
        self._cost += cost
        return number

    def rollback(self) -> None:
        """Lets the peer ignore the messages; the block may be left then."""
        if not self.ended:
            self._end(commit=False)

    @property
    def result(self) -> Coroutine[Any, Any, bool]:
        """``await transaction.result``: whether the peer has committed it; see ``wait``."""
        return self.wait()

    async def wait(self, *, timeout: Duration | None = None) -> bool:
        """Whether the peer has processed the messages; False too if they were rolled back.

        Raises LinkLost if that is unknown, TimeoutError after ``timeout`` (seconds; None:
        Timing.progress_deadline), and LocalProtocolError within the block.
        """
        if not self.ended:
            raise LocalProtocolError("a transaction has a result once its block is left")
        face = self._channel._face
        async with face.deadline(timeout):
            await self._waiters.until(lambda: self.committed is not None or face.error is not None)
        if self.committed is None:
            assert face.error is not None
            raise raised(face.error)
        return self.committed

    # What the channel asks and tells

    def require_open(self) -> None:
        """Raises LocalProtocolError if it takes no messages."""
        if self.ended:
            raise LocalProtocolError(
                f"a transaction of {self._channel!r} takes messages within its block only; this "
                "one was not sent"
            )

    def resulted(self, number: int, *, committed: bool) -> bool:
        """This message has its result; whether all of the transaction have."""
        self._good = self._good and committed
        if number < self.last:
            return False
        self.committed = self._good
        return True

    # Within

    def _end(self, *, commit: bool) -> None:
        channel = self._channel
        self.ended = True
        channel._opener = None
        channel._turn.release()
        self._waiters.wake()  # tasks that wait to send: it is too late for their messages
        if not self._count:
            self.committed = commit  # of nothing
            return
        if not commit or channel._face.closing or channel._face.error is not None:
            self.committed = False  # a link that is closing has rolled it back
        if commit:
            channel._face.sendable()
        if not channel._face.closing and channel._face.error is None:
            channel._decide(self, commit=commit)
