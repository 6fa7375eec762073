"""What a pair of handles shares while it works inside the process, before it is networked.

A pipe behaves as a channel does: what ends it, in which order, with which errors. A half that is
attached to a message leaves its handle for a QueuedMessage; whoever gets the message gets a new
handle.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from aqueduct._speedups import channels as codec
from aqueduct._speedups.loop.pump import Pump
from aqueduct.config import DEFAULT
from aqueduct.errors import (
    Cancelled,
    Finished,
    LocalProtocolError,
    ReceiverClosed,
    SendQueueFull,
)
from aqueduct.protocol.common.connection import ConnectionCore
from aqueduct.protocol.common.events import Headers
from aqueduct.protocol.common.registry import Attach, Half
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.common.state import SenderState

__all__ = [
    "ChannelHost",
    "LocalChannel",
    "LocalMessage",
    "PairHandle",
    "QueuedMessage",
    "detached",
    "joined",
    "landed",
    "queue_full",
    "release",
    "send_with_channels",
]


class ChannelHost(Protocol):
    """The connection, as its handles know it."""

    core: ConnectionCore
    pump: Pump
    loop: asyncio.AbstractEventLoop
    home: object
    time: Callable[[], float]
    """The time of the loop."""

    def check_here(self) -> None:
        """Raises LocalProtocolError unless the caller is on the connection's event loop."""

    def dropped(self, half: Half) -> None:
        """A handle was garbage-collected, in any thread."""


class PairHandle(Protocol):
    """One of the two handles of a pair, as the pair knows it."""

    def told(self) -> bool:
        """Something changed. Whether ``changed`` is to be called, from outside."""

    def changed(self) -> None:
        """Calls what the owner of the handle wants called."""

    def networked(self, half: Any, host: ChannelHost) -> None:
        """The other half went away with a message; ``half`` is what stays here."""


class QueuedMessage:
    """A half of a local pair on its way to another owner."""

    __slots__ = ("is_sender", "pipe")

    def __init__(self, pipe: LocalChannel, is_sender: bool) -> None:
        self.pipe = pipe
        self.is_sender = is_sender


class LocalMessage:
    """One message that is not read yet."""

    __slots__ = ("headers", "mode", "number", "parcels", "payload", "size")

    def __init__(
        self,
        payload: Any,
        headers: Headers,
        parcels: list[tuple[QueuedMessage, Headers]],
        mode: Mode,
        number: int,
        size: int,
    ) -> None:
        self.payload = payload
        self.headers = headers
        self.parcels = parcels
        self.mode = mode
        self.number = number
        self.size = size


class LocalChannel:
    """The channel between two handles of one process."""

    __slots__ = (
        "_numbers",
        "finished",
        "handed",
        "loop",
        "oneshot",
        "queue",
        "queued",
        "receiver",
        "receiver_error",
        "sender",
        "sender_error",
        "settled",
        "wants_room",
    )

    def __init__(self, oneshot: bool) -> None:
        self.oneshot = oneshot
        self.queue: deque[LocalMessage] = deque()
        self.queued = 0
        """Bytes in the queue."""
        self.finished = False
        self.sender_error: Exception | None = None
        self.receiver_error: Exception | None = None
        """What a read raises once the queue is empty."""
        self.handed = False
        """One half was sent away."""
        self.settled = False
        """Somebody has seen that everything was delivered: that is final."""
        self.wants_room = False
        """The sender asked to be called once there is room."""
        self.sender: weakref.ref[PairHandle]
        self.receiver: weakref.ref[PairHandle]
        self._numbers = [0, 0]
        self.loop = _running_loop()
        """The event loop that the pair belongs to, None while it was used on none."""

    # The sender's side

    @property
    def writable(self) -> bool:
        """Whether a send need not wait."""
        return self.sender_error is not None or self.queued < DEFAULT.flow.channel_high_water

    def check_sendable(self) -> None:
        """Raises how the channel ended, or LocalProtocolError after finish."""
        if self.sender_error is not None:
            raise self.sender_error.with_traceback(None)
        if self.finished:
            raise LocalProtocolError(
                "nothing can be sent after finish, or after a oneshot's message"
            )

    def send(
        self,
        payload: Any,
        headers: Headers,
        parcels: list[tuple[QueuedMessage, Headers]],
        mode: Mode,
        *,
        force: bool,
    ) -> int:
        """Queues a message and returns its number; the caller has called ``check_sendable``."""
        full = not self.writable
        if full and not force and self.queued >= DEFAULT.flow.channel_hard_limit:
            raise queue_full(self.queued)
        for _, channel_headers in ((None, headers), *parcels):
            if channel_headers:
                codec.encode_connection_headers(channel_headers)  # what the wire refuses
        size = _size(payload)
        number = self._numbers[mode is Mode.UNRELIABLE]
        self._numbers[mode is Mode.UNRELIABLE] += 1
        message = LocalMessage(payload, headers, parcels, mode, number, size)
        if self.oneshot:
            self._finish()
        if full and not force and mode is Mode.UNRELIABLE:
            for parcel, _ in parcels:
                parcel.pipe.handed = True
            release([message])  # it would be dropped on the way, too
            return number
        for parcel, _ in parcels:
            parcel.pipe.handed = True
        self.queue.append(message)
        self.queued += size
        if len(self.queue) == 1:
            self._tell(self.receiver)
        return number

    def notify_writable(self) -> None:
        """The sender wants to be told once a send need not wait."""
        self.wants_room = True
        if self.writable:
            self._tell(self.sender)

    def finish(self) -> None:
        """No more messages."""
        if self.sender_error is not None:
            raise self.sender_error.with_traceback(None)
        if self.finished:
            raise LocalProtocolError("the sender is already finished")
        self._finish()
        if self.oneshot:
            self.receiver_error = Cancelled("the sender finished without sending its one message")
        self._tell(self.receiver)

    def cancel(self) -> None:
        """The sender gives up; too late once it has finished (AQ-R18)."""
        if self.finished or self.sender_error is not None:
            return
        self.sender_error = Cancelled("the sender was cancelled here")
        self.receiver_error = Cancelled("the peer cancelled the channel")
        self.drop_queue()
        self._tell(self.sender)
        self._tell(self.receiver)

    # The receiver's side

    def take(self) -> LocalMessage | None:
        """The next message."""
        if not self.queue:
            return None
        message = self.queue.popleft()
        self.queued -= message.size
        if self.wants_room and self.writable:
            self._tell(self.sender)
        return message

    def close(self, error: Exception | None = None) -> None:
        """The receiver reads no more; ``error`` is what ended it instead of its owner."""
        unfinished = self.receiver_error is None or error is not None
        if unfinished:
            self.receiver_error = error or ReceiverClosed("the receiver was closed here")
            if self.sender_error is None and not self.settled:
                self.sender_error = ReceiverClosed("the peer closed the receiver")
        self.drop_queue()
        if unfinished:
            self._tell(self.sender)
            self._tell(self.receiver)

    # Both

    def bind(self) -> None:
        """A task waits on the running loop: the pair belongs to it from now on."""
        running = _running_loop()
        if self.loop is None or self.loop.is_closed():
            self.loop = running
        elif running is not None and running is not self.loop:
            raise LocalProtocolError(
                "this pair belongs to another event loop: make it with channel() on the loop that "
                "uses it, or come there with loop.call_soon_threadsafe"
            )

    def drop(self, is_sender: bool) -> None:
        """This half cannot be used any more: its sender is cancelled, its receiver closed."""
        (self.cancel if is_sender else self.close)()

    def dropped(self, is_sender: bool) -> None:
        """A handle was garbage-collected, in any thread."""
        if is_sender:
            if self.finished or self.sender_error is not None:
                return
        elif self.receiver_error is not None and not self.queue:
            return
        if self.loop is not None:
            with suppress(RuntimeError):  # the loop is closed: no task waits any more
                self.loop.call_soon_threadsafe(self.drop, is_sender)
                return
        self.drop(is_sender)

    def wake_later(self, handle: PairHandle) -> None:
        """Calls what the handle's owner wants called, as a connection would: not from within."""
        self.wants_room = False
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon(handle.changed)
        else:
            handle.changed()

    # Within

    def _finish(self) -> None:
        self.finished = True
        self.receiver_error = Finished("the sender finished and everything was delivered")
        self._tell(self.sender)  # to be written into the receiver's queue is to be delivered

    def drop_queue(self) -> None:
        """What was not read is dropped, with what it carries."""
        dropped = list(self.queue)
        self.queue.clear()
        self.queued = 0
        release(dropped)

    def _tell(self, reference: weakref.ref[PairHandle]) -> None:
        handle = reference()
        if handle is not None and handle.told():
            self.wake_later(handle)


def send_with_channels(
    host: ChannelHost,
    half: SenderHalf,
    payload: Any,
    headers: Headers,
    parcels: Sequence[tuple[QueuedMessage, Headers]],
    mode: Mode,
) -> int:
    """Queues a message that carries halves of pairs, and behind it what was sent in those."""
    networked: list[tuple[LocalChannel, SenderHalf]] = []
    number = _send(host, half, payload, headers, parcels, mode, networked)
    # In any depth, so with a list and not by recursion.
    for pipe, inner in networked:
        _flush_pipe(host, pipe, inner, networked)
    return number


def _send(
    host: ChannelHost,
    half: SenderHalf,
    payload: Any,
    headers: Headers,
    parcels: Sequence[tuple[QueuedMessage, Headers]],
    mode: Mode,
    networked: list[tuple[LocalChannel, SenderHalf]],
) -> int:
    for parcel, _ in parcels:
        parcel.pipe.bind()
    wanted = [
        Attach(
            keep_sender=not parcel.is_sender,
            is_oneshot=parcel.pipe.oneshot,
            headers=channel_headers,
        )
        for parcel, channel_headers in parcels
    ]
    number = host.core.send(
        half, payload, host.time(), headers=headers, attachments=wanted, mode=mode
    )
    for (parcel, _), attach in zip(parcels, wanted, strict=True):
        _network(host, parcel.pipe, attach.half, networked)
    return number


def _network(
    host: ChannelHost,
    pipe: LocalChannel,
    half: Half | None,
    networked: list[tuple[LocalChannel, SenderHalf]],
) -> None:
    """One half of a pair goes away with a message: the other one is networked from here on.

    A handle that has come to its end stays as it is: how it ended is final.
    """
    pipe.handed = True
    if isinstance(half, SenderHalf):
        sender = pipe.sender()
        if sender is not None and pipe.sender_error is None and not pipe.settled:
            sender.networked(half, host)
        networked.append((pipe, half))
        return
    assert half is not None
    receiver = pipe.receiver()
    if receiver is None or pipe.receiver_error is not None:
        host.core.close_receiver(half, host.time())
        return
    receiver.networked(half, host)


def _flush_pipe(
    host: ChannelHost,
    pipe: LocalChannel,
    half: SenderHalf,
    networked: list[tuple[LocalChannel, SenderHalf]],
) -> None:
    """What was sent before the channel was networked goes out first."""
    waiting = list(pipe.queue)
    pipe.queue.clear()
    pipe.queued = 0
    sender = pipe.sender()
    try:
        for message in waiting:
            _send(
                host,
                half,
                message.payload,
                message.headers,
                message.parcels,
                message.mode,
                networked,
            )
    except Exception as error:  # noqa: BLE001 - it belongs to this channel, not to the one that carries it
        host.core.cancel(half, host.time())
        half.error = error
    else:
        if pipe.finished:
            if half.state is SenderState.OPEN:  # a oneshot's message is its end
                host.core.finish(half, host.time())
        elif pipe.sender_error is not None or sender is None:
            host.core.cancel(half, host.time())
    if sender is not None:
        sender.changed()


def release(messages: list[LocalMessage]) -> None:
    """Undelivered messages: what they carry is cancelled or closed, in any depth (AQ-R26)."""
    work = list(messages)
    while work:
        for parcel, _ in work.pop().parcels:
            pipe = parcel.pipe
            work.extend(pipe.queue)
            pipe.queue.clear()
            pipe.queued = 0
            pipe.drop(parcel.is_sender)


def queue_full(queued: int) -> SendQueueFull:
    """What a send that may not wait raises at the hard limit."""
    return SendQueueFull(
        f"{queued} bytes are queued on this channel, or too many of its messages are not "
        "acknowledged (Flow.channel_hard_limit, Limits.unacknowledged): wait_writable() first, or "
        "send() instead of send_nowait()"
    )


def joined(payload: Any) -> bytes:
    """A payload as its receiver gets it: one object that nobody else changes."""
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, (list, tuple)):
        return b"".join(map(_view, payload))
    return bytes(_view(payload))


def detached(payload: Any) -> Any:
    """A copy of a payload."""
    if isinstance(payload, (list, tuple)):
        return [bytes(memoryview(buffer)) for buffer in payload]
    return bytes(memoryview(payload))


def landed(payload: Any, headers: Headers, size: int, hook: Callable[[Headers, int], Any]) -> Any:
    """A payload where the receiver's ``placement`` wants it. Raises what the hook raises."""
    target = hook(headers, size)
    if target is None:
        return joined(payload)
    view = _view(target)
    if view.nbytes != size or (size and view.readonly):
        raise LocalProtocolError(
            f"the target has {view.nbytes} bytes and is "
            f"{'read-only' if view.readonly else 'writable'}; the payload needs {size} writable "
            "bytes"
        )
    view[:] = joined(payload)
    return target


def _size(payload: Any) -> int:
    buffers = payload if isinstance(payload, (list, tuple)) else (payload,)
    return sum(_view(buffer).nbytes for buffer in buffers)


def _view(buffer: Any) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise BufferError("a payload's buffers must be contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None
