"""What code holds: Sender, Receiver, Message, and ``channel()`` that makes a linked pair.

A pair works inside the process until one half is attached to a message; then the other half is
networked, and the code that uses it cannot tell. A handle belongs to the event loop it is used on.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from aqueduct.config import DEFAULT
from aqueduct.errors import (
    Cancelled,
    Finished,
    LocalProtocolError,
    ReceiverClosed,
)
from aqueduct.protocol.channels.events import Headers
from aqueduct.protocol.channels.receiving import ReceiverHalf
from aqueduct.protocol.channels.sending import Mode, SenderHalf

if TYPE_CHECKING:
    from aqueduct.endpoint.connection import Connection

__all__ = ["Attachment", "Headers", "Message", "Mode", "Receiver", "Sender", "channel"]

Handle: TypeAlias = "Sender | Receiver"
ToAttach: TypeAlias = "Handle | tuple[Handle, Headers]"


class Attachment:
    """A channel half that came with a message: ``handle`` and the channel's ``headers``."""

    __slots__ = ("handle", "headers")

    def __init__(self, handle: Handle, headers: Headers) -> None:
        self.handle = handle
        self.headers = headers


class Message:
    """One received message. ``payload`` is bytes or any object with the buffer protocol."""

    __slots__ = ("attachments", "headers", "number", "payload")

    def __init__(
        self, payload: Any, headers: Headers, attachments: tuple[Attachment, ...], number: int
    ) -> None:
        self.payload = payload
        self.headers = headers
        self.attachments = attachments
        self.number = number

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return len(self.payload)

    def __repr__(self) -> str:
        return (
            f"<Message {self.number}: {self.size} bytes, {len(self.headers)} headers, "
            f"{len(self.attachments)} attachments>"
        )


class _Waiting:
    """Tasks that wait for a handle to change."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:  # given up: nothing may have changed for a long time
                self._waiters.remove(waiter)


class _Pipe:
    """What a pair shares before it is networked."""

    __slots__ = (
        "error",
        "finished",
        "handed",
        "mode",
        "oneshot",
        "queue",
        "queued",
        "receiver",
        "sender",
    )

    def __init__(self, oneshot: bool, mode: Mode) -> None:
        self.oneshot = oneshot
        self.mode = mode
        self.queue: deque[tuple[Any, Headers, tuple[ToAttach, ...], Mode, int]] = deque()
        self.queued = 0
        self.finished = False
        self.error: Exception | None = None
        self.handed = False
        """One half was sent away."""
        self.sender: weakref.ref[Sender]
        self.receiver: weakref.ref[Receiver]

    def end(self, error: Exception) -> None:
        """One side gave up: what was not read is dropped."""
        self.clear()
        if self.error is None:
            self.error = error

    def clear(self) -> None:
        """Nobody will read what is queued."""
        self.queue.clear()
        self.queued = 0


class Sender:
    """The sending half of a channel."""

    __slots__ = (
        "__weakref__",
        "_connection",
        "_half",
        "_mode",
        "_pipe",
        "_sent_away",
        "_waiting",
        "on_change",
    )

    def __init__(
        self,
        half: SenderHalf | None,
        connection: Connection | None,
        *,
        mode: Mode = Mode.ORDERED,
        pipe: _Pipe | None = None,
    ) -> None:
        self._half = half
        self._connection = connection
        self._mode = mode
        self._pipe = pipe
        self._waiting = _Waiting()
        self._sent_away = False
        self.on_change: Callable[[], None] | None = None
        """Called on the loop when the channel ended, or is writable again after notify_writable.

        It must be quick and not raise; for code that has no task to wait in.
        """
        if half is not None:
            half.handle = weakref.ref(self)

    @property
    def error(self) -> Exception | None:
        """How the channel ended: a ChannelError or ConnectionLost.

        None while it lives, and after a finish that was delivered.
        """
        if self._half is not None:
            return self._half.error
        return self._pipe.error if self._pipe is not None else None

    @property
    def queued(self) -> int:
        """Bytes sent and not yet gone to the network."""
        if self._half is not None:
            return self._half.queued
        return self._pipe.queued if self._pipe is not None else 0

    @property
    def writable(self) -> bool:
        """Whether a send would not have to wait (Flow.channel_high_water and its relatives)."""
        if self._half is not None:
            return self._half.error is not None or self._half.writable
        pipe = self._pipe
        return (
            pipe is None or pipe.error is not None or pipe.queued < DEFAULT.flow.channel_high_water
        )

    async def wait_writable(self) -> None:
        """Returns once a send need not wait, or the channel has ended."""
        while not self.writable:
            self.notify_writable()
            await self._waiting.wait()

    def notify_writable(self) -> None:
        """Asks for one call of ``on_change`` once a send need not wait."""
        if self._half is not None and self._connection is not None:
            self._connection.wait_writable(self._half)

    async def send(
        self,
        payload: Any = b"",
        *,
        headers: Headers = (),
        attachments: Sequence[ToAttach] = (),
        mode: Mode | None = None,
        copy: bool = False,
    ) -> int:
        """Waits for room, then queues a message and returns its number.

        ``payload``: a buffer or a sequence of buffers, which must not change until they have
        left, unless ``copy`` detaches them; ``attachments``: halves of pairs from
        ``channel()``. Raises how the channel ended (ChannelError, ConnectionLost), or
        LocalProtocolError for a misuse.
        """
        if not self.writable:
            await self.wait_writable()
        return self.send_nowait(
            payload, headers=headers, attachments=attachments, mode=mode, copy=copy
        )

    def send_nowait(
        self,
        payload: Any = b"",
        *,
        headers: Headers = (),
        attachments: Sequence[ToAttach] = (),
        mode: Mode | None = None,
        copy: bool = False,
    ) -> int:
        """The same without waiting, whatever is queued already."""
        self._check_here()
        if copy:
            payload = _detached(payload)
        if self._half is not None:
            assert self._connection is not None
            return self._connection.send(
                self._half, payload, headers, attachments, mode or self._mode
            )
        pipe = self._local()
        if pipe.error is not None:
            raise pipe.error
        if pipe.finished or (pipe.oneshot and pipe.queue):
            raise LocalProtocolError(
                "nothing can be sent after finish, or after a oneshot's message"
            )
        for entry in attachments:
            handle = entry[0] if isinstance(entry, tuple) else entry
            handle._check_attachable()
        size = _size(payload)
        pipe.queue.append((payload, headers, tuple(attachments), mode or self._mode, size))
        pipe.queued += size
        if pipe.oneshot:
            pipe.finished = True
        _wake(pipe.receiver)
        return len(pipe.queue) - 1

    def finish(self) -> None:
        """No more messages: the receiver reads what was sent, then Finished. Returns at once."""
        self._check_here()
        if self._half is not None:
            assert self._connection is not None
            self._connection.finish(self._half)
            return
        pipe = self._local()
        if pipe.error is not None:
            raise pipe.error
        if pipe.finished:
            raise LocalProtocolError("the sender is already finished")
        pipe.finished = True
        _wake(pipe.receiver)

    def cancel(self) -> None:
        """Abandons the channel; without effect on one that ended.

        Undelivered messages are dropped and the receiver reads Cancelled.
        """
        if self._half is not None:
            assert self._connection is not None
            self._connection.cancel(self._half)
        elif self._pipe is not None and not self._sent_away and not self._pipe.finished:
            self._pipe.end(Cancelled("the sender was cancelled"))
            self._waiting.wake()
            _wake(self._pipe.receiver)

    async def wait_closed(self) -> None:
        """Waits for the receiver's word.

        Returns after a finish that was delivered whole, raises how it ended otherwise.
        """
        self._check_here()
        while True:
            half = self._half
            if half is not None:
                if half.error is not None:
                    raise half.error
                if half.state.name == "ENDED":
                    return
            elif self._pipe is not None:
                if self._pipe.error is not None:
                    raise self._pipe.error
                if self._pipe.finished and not self._pipe.queue:
                    return
            await self._waiting.wait()

    # Within

    def _wake(self) -> None:
        self._waiting.wake()
        if self.on_change is not None:
            self.on_change()

    def _check_here(self) -> None:
        if self._sent_away:
            raise LocalProtocolError(
                "this half was sent away with a message; its owner is the peer"
            )

    def _local(self) -> _Pipe:
        assert self._pipe is not None
        return self._pipe

    def _check_attachable(self) -> None:
        self._check_here()
        if self._half is not None:
            raise LocalProtocolError("a received or networked sender cannot be sent on")
        pipe = self._local()
        if pipe.handed:
            raise LocalProtocolError("the other half of this pair was already sent away")
        if pipe.finished or pipe.error is not None:
            raise LocalProtocolError("a finished or cancelled sender cannot be sent")

    def __del__(self) -> None:
        half, connection = self._half, self._connection
        if half is not None and connection is not None:
            connection.dropped(half)


class Receiver:
    """The receiving half of a channel. Also an async iterator that ends with Finished."""

    __slots__ = (
        "__weakref__",
        "_connection",
        "_half",
        "_pipe",
        "_placement",
        "_sent_away",
        "_waiting",
        "on_change",
    )

    def __init__(
        self,
        half: ReceiverHalf | None,
        connection: Connection | None,
        *,
        pipe: _Pipe | None = None,
    ) -> None:
        self._half = half
        self._connection = connection
        self._pipe = pipe
        self._placement: Callable[[Headers, int], Any] | None = None
        self._waiting = _Waiting()
        self._sent_away = False
        self.on_change: Callable[[], None] | None = None
        """Called on the loop when a message or the end came to a channel that had nothing to read.

        It must be quick and not raise; for code that has no task to wait in.
        """
        if half is not None:
            half.handle = weakref.ref(self)

    @property
    def error(self) -> Exception | None:
        """What a read raises once everything delivered is read; None while it lives."""
        if self._half is not None:
            return self._half.error
        pipe = self._pipe
        if pipe is None:
            return None
        if pipe.error is None and pipe.finished:
            return Finished("the sender finished")
        return pipe.error

    @property
    def placement(self) -> Callable[[Headers, int], Any] | None:
        """Where payloads land. Set it before data flows.

        Called with a message's headers and payload size in bytes before the payload arrives;
        returns a writable buffer of that size, or None for fresh memory aligned to 64 bytes.
        What it raises ends the channel.
        """
        return self._placement

    @placement.setter
    def placement(self, hook: Callable[[Headers, int], Any] | None) -> None:
        self._placement = hook
        if self._half is not None:
            self._half.placement = hook

    async def receive(self) -> Message:
        """The next message.

        Raises Finished, Cancelled, ReceiverClosed, LostInTransit, MessageLost or ConnectionLost
        once everything delivered is read.
        """
        while True:
            message = self.receive_nowait()
            if message is not None:
                return message
            await self._waiting.wait()

    async def wait_readable(self) -> None:
        """Returns once ``receive_nowait`` gives a message or raises."""
        while not self._readable():
            await self._waiting.wait()

    def receive_nowait(self) -> Message | None:
        """The next message, or None if there is none now; raises like ``receive``."""
        if self._sent_away:
            raise LocalProtocolError(
                "this half was sent away with a message; its owner is the peer"
            )
        pipe = self._pipe
        if pipe is not None and pipe.queue:
            payload, headers, attachments, _, size = pipe.queue.popleft()
            pipe.queued -= size
            _wake(pipe.sender)
            given = tuple(
                Attachment(entry[0], entry[1])
                if isinstance(entry, tuple)
                else Attachment(entry, ())
                for entry in attachments
            )
            return Message(_joined(payload), headers, given, 0)
        if self._half is not None:
            assert self._connection is not None
            message = self._connection.receive(self._half)
            if message is not None:
                return message
        error = self.error
        if error is not None:
            raise error
        return None

    def close(self) -> None:
        """Reads no more: the sender learns ReceiverClosed. Without effect on an ended channel."""
        if self._half is not None:
            assert self._connection is not None
            if self._pipe is not None:
                self._pipe.queue.clear()
            self._connection.close_receiver(self._half)
        elif self._pipe is not None and not self._sent_away:
            if self._pipe.finished:
                self._pipe.clear()  # it ended before
            else:
                self._pipe.end(ReceiverClosed("the receiver was closed"))
            self._waiting.wake()
            _wake(self._pipe.sender)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        try:
            return await self.receive()
        except Finished:
            raise StopAsyncIteration from None

    # Within

    def _readable(self) -> bool:
        if self._pipe is not None and self._pipe.queue:
            return True
        if self._half is not None and self._half.queue:
            return True
        return self.error is not None

    def _wake(self) -> None:
        self._waiting.wake()
        if self.on_change is not None:
            self.on_change()

    def _check_attachable(self) -> None:
        if self._sent_away:
            raise LocalProtocolError("this half was already sent away with a message")
        if self._half is not None:
            raise LocalProtocolError("a received or networked receiver cannot be sent on")
        assert self._pipe is not None
        if self._pipe.handed:
            raise LocalProtocolError("the other half of this pair was already sent away")

    def __del__(self) -> None:
        half, connection = self._half, self._connection
        if half is not None and connection is not None:
            connection.dropped(half)


def channel(*, oneshot: bool = False, mode: Mode = Mode.ORDERED) -> tuple[Sender, Receiver]:
    """A linked pair of handles, (sender, receiver).

    Attach one of them to a message and keep the other. ``oneshot``: one message in total;
    ``mode``: how the messages travel unless a send says otherwise.
    """
    pipe = _Pipe(oneshot, mode)
    sender = Sender(None, None, mode=mode, pipe=pipe)
    receiver = Receiver(None, None, pipe=pipe)
    pipe.sender = weakref.ref(sender)
    pipe.receiver = weakref.ref(receiver)
    return sender, receiver


def _wake(reference: weakref.ref[Any]) -> None:
    handle = reference()
    if handle is not None:
        handle._wake()


def _size(payload: Any) -> int:
    if isinstance(payload, (list, tuple)):
        return sum(memoryview(buffer).nbytes for buffer in payload)
    return memoryview(payload).nbytes


def _detached(payload: Any) -> Any:
    if isinstance(payload, (list, tuple)):
        return [bytes(memoryview(buffer)) for buffer in payload]
    return bytes(memoryview(payload))


def _joined(payload: Any) -> Any:
    """A scattered payload as one buffer: inside the process there is no wire to gather on."""
    if isinstance(payload, (list, tuple)):
        return b"".join(bytes(memoryview(buffer)) for buffer in payload)
    return payload
