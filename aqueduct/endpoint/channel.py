"""What code holds: Sender, Receiver, and ``channel()`` that makes a linked pair.

A pair works inside the process until one half is attached to a message; then the other half is
networked, and the code that uses it cannot tell. A handle belongs to the event loop it is used on.
"""

from __future__ import annotations

import weakref
from asyncio import _get_running_loop
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, TypeAlias

from aqueduct._speedups.channels.frames import decode_headers
from aqueduct._speedups.channels.receiver import ReceiveQueue
from aqueduct._speedups.channels.sender import SenderBase
from aqueduct._speedups.loop.waiter import Waiter, WaiterSlot
from aqueduct.arguments import ARGUMENTS, checked
from aqueduct.endpoint.local_channel import (
    ChannelHost,
    LocalChannel,
    LocalMessage,
    QueuedMessage,
    detached,
    joined,
    landed,
    queue_full,
    release,
    send_with_channels,
)
from aqueduct.errors import Finished, LocalProtocolError, ReceiverClosed, WrongType
from aqueduct.protocol.channels import ids
from aqueduct.protocol.common.events import Headers
from aqueduct.protocol.common.receiver import Received, ReceiverHalf
from aqueduct.protocol.common.registry import Half
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.common.state import SenderState

__all__ = [
    "Attachment",
    "Headers",
    "Message",
    "Mode",
    "Receiver",
    "Sender",
    "channel",
    "handle_of",
    "message_of",
    "take",
]

Handle: TypeAlias = "Sender | Receiver"
ToAttach: TypeAlias = "Handle | tuple[Handle, Headers]"


class Attachment:
    """A channel half that came with a message: ``handle`` and the channel's ``headers``."""

    __slots__ = ("_headers", "handle")

    def __init__(self, handle: Handle, headers: bytes | Headers) -> None:
        self.handle = handle
        self._headers = headers

    @property
    def headers(self) -> Headers:
        """(key, value) pairs of bytes; made when they are asked for."""
        self._headers = decode_headers(self._headers)
        return self._headers


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
        connection: ChannelHost | None,
        *,
        mode: Mode = Mode.ORDERED,
        pipe: LocalChannel | None = None,
    ) -> None:
        self._half = half
        self._connection = connection
        self._mode = mode
        self._pipe = pipe
        self._waiting = WaiterSlot(None if connection is None else connection.loop)
        self._sent_away = False
        self.on_change: Callable[[], None] | None = None
        """Called on the loop when the channel ended, or is writable again after notify_writable.

        It must be quick and not raise; for code that has no task to wait in.
        """
        if half is not None:
            half.handle = weakref.ref(self)
        elif pipe is not None:
            pipe.sender = weakref.ref(self)

    @property
    def error(self) -> Exception | None:
        """How the channel ended: a ChannelError or ConnectionLost.

        None while it lives, and after a finish that was delivered.
        """
        if self._half is not None:
            return self._half.error
        return self._pipe.sender_error if self._pipe is not None else None

    @property
    def oneshot(self) -> bool:
        """Whether the channel takes one message in all."""
        if self._half is not None:
            return ids.oneshot(self._half.channel)
        return self._local().oneshot

    @property
    def queued(self) -> int:
        """Bytes sent and not yet gone to the network."""
        if self._half is not None:
            return self._half.queued
        return self._pipe.queued if self._pipe is not None else 0

    @property
    def writable(self) -> bool:
        """Whether a send in the mode of this sender would not have to wait.

        That is below Flow.channel_high_water and its relatives, and with room for a datagram.
        """
        half = self._half
        if half is not None:
            if self._mode is Mode.ORDERED:  # ``has_room``
                return half.writable or half.error is not None
            return half.error is not None or half.has_room(self._mode)
        return self._has_room(self._mode)

    async def wait_writable(self, *, ample: bool = False) -> None:
        """Returns once a send need not wait, or the channel has ended.

        ``ample`` as in ``notify_writable``.
        """
        await self._wait_room(self._mode, ample)

    def notify_writable(self, *, ample: bool = False) -> None:
        """Asks for one call of ``on_change`` once a send need not wait.

        ``ample``: once half of Flow.channel_high_water is free, if that is what was reached.
        """
        self._notify(self._mode, ample)

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
        ``channel()``, or (half, channel headers). In UNRELIABLE mode there is room when the
        transport takes a datagram, so nothing is dropped on this side. Raises how the channel
        ended (ChannelError, ConnectionLost), or LocalProtocolError for a misuse.
        """
        mode = mode or self._mode
        connection = self._connection
        if connection is not None and _get_running_loop() is not connection.home:
            connection.check_here()
        if not self._has_room(mode):
            await self._wait_room(mode)
        return self._send(payload, headers, attachments, mode, copy)

    def send_nowait(
        self,
        payload: Any = b"",
        *,
        headers: Headers = (),
        attachments: Sequence[ToAttach] = (),
        mode: Mode | None = None,
        copy: bool = False,
        force: bool = False,
    ) -> int:
        """The same without waiting, for a sender that wants no back pressure.

        An UNRELIABLE message that finds no room for a datagram is dropped: it counts as sent, and
        as lost on the way (AQ-R17). Everything else is queued, until Flow.channel_hard_limit bytes
        or Limits.unacknowledged messages are under way: then SendQueueFull is raised and nothing
        was sent. ``force`` queues above that, too, for the rest of something begun.
        """
        if not force and self._half is not None and self._half.full and self._half.error is None:
            raise queue_full(self._half.queued)
        return self._send(payload, headers, attachments, mode or self._mode, copy, force)

    def post(self, payload: Any, headers: Headers = ()) -> int:
        """``send_nowait`` by force and in order, without attachments: for a long row of messages.

        Its sender looks at ``writable`` itself.
        """
        if self._half is None or self._sent_away:
            return self._send(payload, headers, (), Mode.ORDERED, False)
        assert self._connection is not None
        number = self._half.post(payload, headers)
        if number is None:
            core, now = self._connection.core, self._connection.time()
            number = core.send(self._half, payload, now, headers=headers)
        self._connection.pump.flush_soon()
        return number

    @property
    def row(self) -> SenderBase | None:
        """What takes the messages of ``post``, for one flush after many; None in a pair."""
        return None if self._sent_away else self._half

    def finish(self) -> None:
        """No more messages: the receiver reads what was sent, then Finished. Returns at once."""
        self._check_here()
        if self._half is not None:
            assert self._connection is not None
            self._connection.core.finish(self._half, self._connection.time())
            self._connection.pump.flush_soon()
        else:
            self._local().finish()

    def cancel(self) -> None:
        """Abandons the channel; without effect on one that was finished, or ended.

        Undelivered messages are dropped and the receiver reads Cancelled.
        """
        if self._half is not None:
            if self._half.state is SenderState.OPEN:
                assert self._connection is not None
                self._connection.core.cancel(self._half, self._connection.time())
                self._connection.pump.flush_soon()
        elif not self._sent_away:
            self._local().cancel()

    async def wait_closed(self) -> None:
        """Waits for the receiver's word.

        Returns after a finish that was delivered whole, raises how it ended otherwise.
        """
        while True:
            self._check_here()
            if self.error is not None:
                raise self.error.with_traceback(None)
            if self._half is not None:
                if self._half.state is SenderState.ENDED:
                    return
            else:
                pipe = self._local()
                if pipe.finished:
                    pipe.settled = True
                    return
                pipe.bind()
            await self._waiting.wait()

    # Within

    def _has_room(self, mode: Mode) -> bool:
        if self._half is not None:
            return self._half.error is not None or self._half.has_room(mode)
        return self._sent_away or self._local().writable

    async def _wait_room(self, mode: Mode, ample: bool = False) -> None:
        while not self._has_room(mode):
            if self._half is None:
                self._local().bind()
            self._notify(mode, ample)
            await self._waiting.wait()

    def _notify(self, mode: Mode, ample: bool = False) -> None:
        if self._half is not None:
            assert self._connection is not None
            self._connection.core.wait_writable(self._half, mode, ample)
            self._connection.pump.flush_soon()
        elif not self._sent_away:
            self._local().notify_writable()

    def _send(
        self,
        payload: Any,
        headers: Headers,
        attachments: Sequence[ToAttach],
        mode: Mode,
        copy: bool,
        force: bool = True,
    ) -> int:
        self._check_here()
        if mode.__class__ is not Mode:
            ARGUMENTS["mode"].value(mode, "Sender.send: mode")
        try:
            if copy:
                payload = detached(payload)
            if self._half is not None:
                host = self._connection
                assert host is not None
                if attachments:
                    self._half.check_sendable()
                    parcels = _packed(attachments, self)
                    number = send_with_channels(host, self._half, payload, headers, parcels, mode)
                else:
                    number = host.core.send(
                        self._half, payload, host.time(), headers=headers, mode=mode
                    )
                host.pump.flush_soon()
            else:
                pipe = self._local()
                pipe.check_sendable()
                parcels = _packed(attachments, self)
                number = pipe.send(payload, headers, parcels, mode, force=force)
        except TypeError:  # nothing was sent; what is wrong is looked for only now
            ARGUMENTS["message_payload"].value(payload, "Sender.send: payload")
            ARGUMENTS["message_headers"].value(headers, "Sender.send: headers")
            raise
        for entry in attachments:
            (entry[0] if isinstance(entry, tuple) else entry)._sent_away = True
        return number

    def changed(self) -> None:
        """Something changed. Only the connection or the pair calls this."""
        connection = self._connection
        self._waiting.wake(None if connection is None else connection.pump)
        if self.on_change is not None:
            self.on_change()

    def told(self) -> bool:
        """Something changed in the pair. Whether ``changed`` is to be called, from outside."""
        if self._sent_away:
            return False
        self._waiting.wake()
        return self.on_change is not None

    def networked(self, half: SenderHalf, host: ChannelHost) -> None:
        """The other half of the pair went away with a message."""
        self._half, self._connection = half, host
        self._waiting.loop = host.loop
        half.handle = weakref.ref(self)

    def _check_here(self) -> None:
        if self._sent_away:
            raise LocalProtocolError(_SENT_AWAY)

    def _local(self) -> LocalChannel:
        assert self._pipe is not None
        return self._pipe

    def _check_attachable(self) -> None:
        _check_attachable(self)
        assert self._pipe is not None
        if self._pipe.finished or self._pipe.sender_error is not None:
            raise LocalProtocolError(
                "a finished or cancelled sender cannot be sent, nor one whose receiver was closed: "
                "its channel is over; make another pair with channel()"
            )

    def __del__(self) -> None:
        if self._sent_away:
            return
        half = self._half
        if half is not None and self._connection is not None:
            if half.state is SenderState.OPEN:
                self._connection.dropped(half)
        elif half is None and self._pipe is not None:
            self._pipe.dropped(True)


class Receiver:
    """The receiving half of a channel. Also an async iterator that ends with Finished."""

    __slots__ = (
        "__weakref__",
        "_announce",
        "_connection",
        "_half",
        "_pipe",
        "_placement",
        "_placement_key",
        "_sent_away",
        "_waiting",
        "on_change",
    )

    def __init__(
        self,
        half: ReceiverHalf | None,
        connection: ChannelHost | None,
        *,
        pipe: LocalChannel | None = None,
    ) -> None:
        self._half = half
        self._connection = connection
        self._pipe = pipe
        self._placement: Callable[[Headers, int], Any] | None = None
        self._placement_key: bytes | None = None
        self._announce: Callable[[Headers], tuple[int, int] | None] | None = None
        self._waiting = WaiterSlot(None if connection is None else connection.loop)
        self._sent_away = False
        self.on_change: Callable[[], None] | None = None
        """Called on the loop when a message or the end came to a channel that had nothing to read.

        It must be quick and not raise; for code that has no task to wait in. Who waits for the
        channel is woken after it, by what it leaves there.
        """
        if half is not None:
            half.handle = weakref.ref(self)
        elif pipe is not None:
            pipe.receiver = weakref.ref(self)

    @property
    def error(self) -> Exception | None:
        """What a read raises once everything delivered is read; None while it lives."""
        if self._half is not None:
            return self._half.error
        return self._pipe.receiver_error if self._pipe is not None else None

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
            self._half.queue.placement = hook

    @property
    def placement_key(self) -> bytes | None:
        """Unless None, ``placement`` is asked for messages with a header of this key alone.

        All others land in fresh memory, with less ado. Set it before data flows.
        """
        return self._placement_key

    @placement_key.setter
    def placement_key(self, key: bytes | None) -> None:
        self._placement_key = key
        if self._half is not None:
            self._half.queue.placement_key = key

    @property
    def announce(self) -> Callable[[Headers], tuple[int, int] | None] | None:
        """Tells the size of a batch that comes in several messages.

        Called with the headers of a message with the ``placement_key``, before it arrives; returns
        where in the batch it begins and the bytes of the batch, which find room together. None: it
        is not part of one.
        """
        return self._announce

    @announce.setter
    def announce(self, hook: Callable[[Headers], tuple[int, int] | None] | None) -> None:
        self._announce = hook
        if self._half is not None:
            self._half.queue.announce = hook

    async def receive(self) -> Message:
        """The next message.

        Raises Finished, Cancelled, ReceiverClosed, LostInTransit, MessageLost or ConnectionLost
        once everything delivered is read.
        """
        while True:
            message = self.receive_nowait()
            if message is not None:
                return message
            await self.wait_change()

    async def wait_readable(self) -> None:
        """Returns once ``receive_nowait`` gives a message or raises."""
        while not self.readable:
            await self.wait_change()

    def wait_change(self) -> Waiter:
        """What a caller is to await at once that has just found it not readable.

        It returns with the next message or the end.
        """
        if self._half is None and self._pipe is not None:
            self._pipe.bind()
        return self._waiting.wait()

    @property
    def arriving(self) -> bool:
        """Whether a part of a message that is not whole is here: the sender has not stopped."""
        half = self._half
        if half is not None:
            for stream in half.streams:  # of ORDERED messages one, and this is asked often
                if stream.inside_message:
                    return True
        return False

    @property
    def queue(self) -> ReceiveQueue | None:
        """Where messages wait for ``receive``; None as long as the channel is not networked.

        For compiled modules that take very many: who takes one by itself tells
        ``Connection.room_came`` when that makes room that others wait for.
        """
        return None if self._half is None else self._half.queue

    def end_patiently(self) -> None:
        """What a networked receiver owes at its end may leave with what is sent next."""
        assert self._half is not None
        self._half.patient = True

    def receive_nowait(self) -> Message | None:
        """The next message, or None if there is none now; raises like ``receive``."""
        if self._sent_away:
            raise LocalProtocolError(_SENT_AWAY)
        if self._pipe is not None and self._pipe.queue:
            local = self._pipe.take()
            assert local is not None
            return self._unpacked(local)
        if self._half is not None:
            assert self._connection is not None
            received = take(self._connection, self._half)
            if received is not None:
                return message_of(received, self._connection)
        error = self.error
        if error is not None:
            raise error.with_traceback(None)  # or each use would lengthen it
        return None

    def close(self) -> None:
        """Reads no more: the sender learns ReceiverClosed. Without effect on an ended channel."""
        if self._half is not None:
            assert self._connection is not None
            if self._pipe is not None:
                self._pipe.drop_queue()
            self._close(self._half, self._connection)
        elif self._pipe is not None and not self._sent_away:
            self._pipe.close()

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        try:
            return await self.receive()
        except Finished:
            raise StopAsyncIteration from None

    # Within

    @property
    def readable(self) -> bool:
        """Whether ``receive_nowait`` gives a message or raises."""
        pipe, half = self._pipe, self._half
        if half is not None:
            if half.queue or half.error is not None:
                return True
            return self._sent_away or (pipe is not None and bool(pipe.queue))
        return self._sent_away or (
            pipe is not None and (bool(pipe.queue) or pipe.receiver_error is not None)
        )

    def _unpacked(self, local: LocalMessage) -> Message:
        """A message of the pipe as its reader gets it."""
        try:
            key = self._placement_key
            if self._placement is None or (key is not None and key not in dict(local.headers)):
                payload: Any = joined(local.payload)
            else:
                payload = landed(local.payload, local.headers, local.size, self._placement)
        except Exception as error:  # it ends the channel
            assert self._pipe is not None
            release([local])
            if self._half is None:
                self._pipe.close(error)
            else:
                assert self._connection is not None
                self._pipe.drop_queue()
                self._close(self._half, self._connection, error)
            raise
        attachments = tuple(
            Attachment(
                Sender(None, None, pipe=parcel.pipe)
                if parcel.is_sender
                else Receiver(None, None, pipe=parcel.pipe),
                channel_headers,
            )
            for parcel, channel_headers in local.parcels
        )
        return Message(payload, local.headers, attachments, local.number)

    def changed(self) -> None:
        """As that of a Sender."""
        if self.on_change is not None:
            self.on_change()
        if self._waiting.waiters is not None:
            half, connection = self._half, self._connection
            if (half is not None and half.queue) or self.readable:  # the first one nearly always
                self._waiting.wake(None if connection is None else connection.pump)

    def told(self) -> bool:
        """As that of a Sender."""
        if self._sent_away:
            return False
        self._waiting.wake()
        return self.on_change is not None

    def networked(self, half: ReceiverHalf, host: ChannelHost) -> None:
        """As that of a Sender."""
        self._half, self._connection = half, host
        self._waiting.loop = host.loop
        half.handle = weakref.ref(self)
        half.queue.placement, half.queue.placement_key = self._placement, self._placement_key
        half.queue.announce = self._announce
        self.changed()

    def _close(self, half: ReceiverHalf, host: ChannelHost, error: Exception | None = None) -> None:
        host.core.close_receiver(half, host.time(), error)
        host.pump.flush_soon()

    def _check_attachable(self) -> None:
        _check_attachable(self)
        assert self._pipe is not None
        if isinstance(self._pipe.receiver_error, ReceiverClosed):
            raise LocalProtocolError(
                "a closed receiver cannot be sent: its channel is over; make another pair with "
                "channel()"
            )

    def __del__(self) -> None:
        if self._sent_away:
            return
        half = self._half
        if half is not None and self._connection is not None and (half.error is None or half.queue):
            self._connection.dropped(half)
        if self._pipe is not None and (half is None or self._pipe.queue):
            self._pipe.dropped(False)


def take(host: ChannelHost, half: ReceiverHalf) -> Received | None:
    """The next message of a half; None if there is none now. Raises how the channel ended."""
    if half.queue:
        core, pump = host.core, host.pump
        received = core.receive(half, host.time())
        if not pump.flushing and core.waits:
            pump.flush_soon()  # room came back, and a credit is due
        if received is not None:
            return received
    if half.error is not None:
        raise half.error.with_traceback(None)  # or each use would lengthen it
    return None


def handle_of(half: Half, host: ChannelHost) -> Handle:
    """What code holds of a half that came with a message."""
    return Sender(half, host) if isinstance(half, SenderHalf) else Receiver(half, host)


def message_of(received: Received, host: ChannelHost) -> Message:
    """What was received, as its reader gets it."""
    attachments = tuple(
        [Attachment(handle_of(half, host), headers) for half, headers in received.attachments]
    )
    return Message(received.payload, received.headers, attachments, received.number)


_SENT_AWAY: Final = (
    "this half was already sent away with a message; its owner is who receives that. Use the other "
    "half, or make another pair with channel()"
)


def _packed(attachments: Sequence[ToAttach], sender: Sender) -> list[tuple[QueuedMessage, Headers]]:
    """The handles of a message, checked; nothing has changed yet."""
    parcels: list[tuple[QueuedMessage, Headers]] = []
    pipes: set[int] = set()
    for entry in attachments:
        handle, headers = entry if isinstance(entry, tuple) else (entry, ())
        if not isinstance(handle, (Sender, Receiver)):
            raise WrongType(
                f"attachments are halves of channel() pairs, or (half, headers), not {handle!r}"
            )
        if handle._pipe is not None and id(handle._pipe) in pipes:
            raise LocalProtocolError(
                "one channel is attached twice to a message: keep one half of each pair"
            )
        handle._check_attachable()
        pipe = handle._pipe
        assert pipe is not None
        if pipe is sender._pipe:
            raise LocalProtocolError(
                "a channel cannot carry its own receiver: no peer could read it; send it on another"
            )
        pipes.add(id(pipe))
        parcels.append((QueuedMessage(pipe, isinstance(handle, Sender)), headers))
    return parcels


def _check_attachable(handle: Handle) -> None:
    if handle._sent_away:
        raise LocalProtocolError(_SENT_AWAY)
    pipe = handle._pipe
    if pipe is None:
        raise LocalProtocolError(
            "a handle that came with a message (or with the connection) cannot be sent on: attach "
            "a half of a channel() of your own, and pass the messages along"
        )
    if pipe.handed:
        raise LocalProtocolError(
            "one half of this pair was already sent away, so this one cannot be sent on: this "
            "side must keep it. Make another pair with channel()"
        )


@checked()
def channel(*, oneshot: bool = False, mode: Mode = Mode.ORDERED) -> tuple[Sender, Receiver]:
    """A linked pair of handles, (sender, receiver).

    Attach one of them to a message and keep the other. ``oneshot``: one message in total;
    ``mode``: how the messages travel unless a send says otherwise.
    """
    pipe = LocalChannel(oneshot)
    return Sender(None, None, mode=mode, pipe=pipe), Receiver(None, None, pipe=pipe)
