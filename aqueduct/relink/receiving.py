"""Channels of the peer: messages as they come, and batches of them that were committed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Self

from aqueduct.arguments import Duration, checked
from aqueduct.carriers.transports.waiting import Waiters, raised
from aqueduct.errors import ConnectionLost, Ended, LocalProtocolError
from aqueduct.relink.link_face import LinkFace

__all__ = ["RelinkBatch", "RelinkIncoming", "RelinkMessage"]

_NEVER: Final[deque[Any]] = deque(maxlen=0)
"""Of plain channels: they have no answers, and a deque takes 760 bytes."""


class RelinkMessage:
    """A message. ``parts`` are buffers: bytes, or aligned memory from 4,096 bytes on.

    ``number`` counts the messages of its channel, from 0.
    """

    __slots__ = ("number", "parts")

    def __init__(self, number: int, parts: Sequence[Any]) -> None:
        self.number = number
        self.parts = parts

    def __repr__(self) -> str:
        size = sum(memoryview(part).nbytes for part in self.parts)
        return f"<RelinkMessage {self.number}: {size} bytes in {len(self.parts)} parts>"


class _Answer:
    """What the application says to one commit. Its batch may be gone before."""

    __slots__ = ("committed", "last")

    def __init__(self, last: int) -> None:
        self.last = last
        self.committed: bool | None = None


class RelinkIncoming:
    """A channel of the peer, from its first message to its close.

    ``async for message in channel`` gives the messages of a plain channel. Asking for the next one
    says that the last is consumed: then the peer does not send it again, and has room for others.
    ``async for batch in channel.transactions()`` gives what was committed on a channel with
    transactions. Both end when the peer has closed the channel, and raise LinkLost.
    """

    __slots__ = (
        "_answers",
        "_came",
        "_closed",
        "_face",
        "_held",
        "_last",
        "_waiters",
        "announced",
        "identifier",
    )

    def __init__(self, face: LinkFace, identifier: int, *, transactional: bool) -> None:
        self.identifier = identifier
        self.announced = False
        """Whether the application has heard of it."""
        self._face = face
        self._waiters = Waiters()
        self._came: deque[Any] = deque()
        """Messages, or pairs of an answer and messages, that nobody has taken."""
        self._held: deque[RelinkMessage] | None = deque() if transactional else None
        """Messages that are neither committed nor rolled back; None: a plain channel."""
        self._answers: deque[_Answer] = deque() if transactional else _NEVER
        """To commits, in order: a result is about all commits before it (RL-R8)."""
        self._last: RelinkMessage | None = None
        """What was taken last and is not consumed."""
        self._closed = False

    @property
    def transactional(self) -> bool:
        """Whether its messages come in transactions."""
        return self._held is not None

    @property
    def waiting(self) -> int:
        """Messages, or batches, that came and were not taken."""
        return len(self._came)

    @property
    def closed(self) -> bool:
        """Whether the peer has closed it. What came before may wait yet."""
        return self._closed

    @checked()
    async def receive(self, *, timeout: Duration | None = None) -> RelinkMessage:
        """The next message of a plain channel; the last one counts as consumed.

        Raises Ended once the peer has closed the channel and all was taken, LinkLost, and
        TimeoutError if ``timeout`` (seconds) is given.
        """
        if self._held is not None:
            raise LocalProtocolError(f"{self!r} has transactions: use channel.transactions()")
        self.consume()
        message: RelinkMessage = await self._take(timeout)
        self._last = message
        return message

    def consume(self) -> None:
        """Says that the message that was taken last is done with. ``receive`` does so, too."""
        message, self._last = self._last, None
        if message is not None and self._face.error is None:
            self._face.link.consume(self.identifier, message.number)
            self._face.advance_soon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RelinkMessage:
        """The next message, until the peer closes the channel."""
        try:
            return await self.receive()
        except Ended:
            raise StopAsyncIteration from None

    def transactions(self) -> _Batches:
        """The batches that the peer commits, for ``async for``; see RelinkBatch."""
        if self._held is None:
            raise LocalProtocolError(f"{self!r} has no transactions: iterate over its messages")
        return _Batches(self)

    @checked()
    async def receive_batch(self, *, timeout: Duration | None = None) -> RelinkBatch:
        """The next batch that the peer commits. Raises as ``receive`` does."""
        if self._held is None:
            raise LocalProtocolError(f"{self!r} has no transactions: receive its messages")
        answer, messages = await self._take(timeout)
        return RelinkBatch(self, answer, messages)

    def __repr__(self) -> str:
        return f"<RelinkIncoming {self.identifier} of link {self._face.name}>"

    # What the connection tells

    def arrived(self, number: int, parts: Sequence[Any]) -> None:
        """A message is whole."""
        message = RelinkMessage(number, parts)
        if self._held is None:
            self._came.append(message)
            self._waiters.wake()
        else:
            self._held.append(message)

    def decided(self, last: int, *, commit: bool) -> None:
        """The peer commits or rolls back the messages up to this one."""
        held = self._held
        assert held is not None
        found = []
        while held and held[0].number <= last:
            found.append(held.popleft())
        if commit:
            answer = _Answer(last)
            self._answers.append(answer)
            if self._face.closing:
                self._refuse(answer)
                return
            self._came.append((answer, tuple(found)))
            self._waiters.wake()

    def ended(self) -> None:
        """The peer has closed it."""
        self._closed = True
        if self._answers:
            self._face.unanswered.add(self)
        self._waiters.wake()

    def changed(self) -> None:
        """The link is over."""
        self._waiters.wake()

    def refuse(self) -> None:
        """The application takes no more: batches that it has not taken are uncommitted."""
        if self._held is not None:
            waiting = tuple(self._came)
            self._came.clear()
            for answer, _ in waiting:
                self._refuse(answer)

    def give_up(self) -> None:
        """The application has failed: what it has not answered is not committed."""
        self.refuse()
        for answer in tuple(self._answers):
            if answer.committed is None:
                self._refuse(answer)

    # Within

    async def _take(self, timeout: Any) -> Any:
        face = self._face
        if self._came:
            await face.give_way()
        async with asyncio.timeout(timeout):
            await self._waiters.until(lambda: self._came or self._closed or face.error is not None)
        error = face.error
        if self._came and (error is None or not self.transactional):
            return self._came.popleft()
        if error is not None and not self._closed:
            raise raised(error)
        raise Ended(f"the peer has closed channel {self.identifier}")

    def _refuse(self, answer: _Answer) -> None:
        """Nobody works on this batch. A peer that reads no results is not told."""
        with suppress(LocalProtocolError):
            self._answer(answer, committed=False)

    def _answer(self, answer: _Answer, *, committed: bool) -> None:
        """Tells the results as far as they are known in order."""
        answer.committed = committed
        link, answers = self._face.link, self._answers
        if self._face.error is not None:
            return
        while answers and answers[0].committed is not None:
            link.complete(self.identifier, answers[0].last, committed=answers[0].committed)
            answers.popleft()
        if not answers:
            self._face.unanswered.discard(self)
        self._face.advance_soon()

    def _answer_late(self, answer: _Answer) -> None:
        """The batch is gone without an answer, in any thread."""
        if self._face.error is None:
            with suppress(RuntimeError):  # of a loop that has ended
                self._face.call_soon(lambda: self._answer(answer, committed=False))


class _Batches:
    """What ``RelinkIncoming.transactions`` returns."""

    __slots__ = ("_channel",)

    def __init__(self, channel: RelinkIncoming) -> None:
        self._channel = channel

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RelinkBatch:
        try:
            return await self._channel.receive_batch()
        except Ended:
            raise StopAsyncIteration from None


class RelinkBatch:
    """Messages that the peer has committed as one. It waits for the answer.

    ``async with batch`` answers: committed when the block is left, uncommitted if an exception
    leaves it. Else say ``committed`` or ``uncommitted``. A batch that is dropped without an answer,
    as by an exception, is uncommitted. Several may be worked on at once; the peer hears the answers
    in the order of the batches.
    """

    __slots__ = ("_answer", "channel", "messages")

    def __init__(
        self, channel: RelinkIncoming, answer: _Answer, messages: tuple[RelinkMessage, ...]
    ) -> None:
        self.channel = channel
        self.messages = messages
        self._answer = answer

    @property
    def answer(self) -> bool | None:
        """Whether it was answered with committed; None: it was not answered."""
        return self._answer.committed

    async def committed(self) -> None:
        """Tells the peer that the messages are processed.

        Raises LinkLost if the peer cannot hear it any more: it does not know then. Raises
        LocalProtocolError for a second answer.
        """
        self._say(committed=True)

    async def uncommitted(self) -> None:
        """Tells the peer that they could not be processed. The peer decides what follows (RL-R14).

        Raises as ``committed`` does.
        """
        self._say(committed=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *rest: object) -> None:
        if self._answer.committed is None:
            if kind is None:
                self._say(committed=True)
            else:
                with suppress(ConnectionLost):
                    self._say(committed=False)

    def __del__(self) -> None:
        if self._answer.committed is None:
            self.channel._answer_late(self._answer)

    def _say(self, *, committed: bool) -> None:
        if self._answer.committed is not None:
            raise LocalProtocolError("a batch has one answer")
        self.channel._face.usable()
        self.channel._answer(self._answer, committed=committed)

    def __repr__(self) -> str:
        return f"<RelinkBatch of {len(self.messages)} messages on {self.channel!r}>"
