"""The sender half of a channel: numbers, streams, finish and cancel (section 3.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, TypeAlias, cast

from aqueduct._speedups.base.buffers import size_of
from aqueduct._speedups.channels import codec
from aqueduct._speedups.channels.oneshot_frames import encode_alone
from aqueduct._speedups.channels.receiver import EMPTY
from aqueduct._speedups.channels.sender import SenderBase, SendStream
from aqueduct._speedups.channels.tracker import UnreliableSent
from aqueduct.errors import (
    Cancelled,
    LocalProtocolError,
    LostInTransit,
    ReceiverClosed,
    SequenceError,
)
from aqueduct.protocol.channels import effects, ids
from aqueduct.protocol.channels.context import ConnectionContext, HalfError
from aqueduct.protocol.channels.events import Headers, SenderEnded, Writable
from aqueduct.protocol.channels.state import SENDER, SenderInput, SenderState

__all__ = ["Mode", "SenderHalf"]

RESET_CANCELLED: Final = 1
RESET_LOST: Final = 2


Links: TypeAlias = dict[int, tuple[int, ...]]
"""Message number -> channels attached to that message."""

# In place of what an idle channel does not need; they cannot be changed.
NO_LINKS: Final = cast(Links, EMPTY)
NO_CHANNELS: Final = cast("list[int]", ())
NO_STREAMS: Final = cast("dict[SendStream, None]", EMPTY)
NONE_WAITING: Final = cast("deque[SendStream]", ())


class Mode(Enum):
    """How the messages of a channel travel (AQ-31)."""

    ORDERED = "ordered"
    """One stream for all messages: order is kept."""
    UNORDERED = "unordered"
    """A stream for each message: none waits for another."""
    UNRELIABLE = "unreliable"
    """A datagram for each message, or a stream when it does not fit; it may be lost."""


class SenderHalf(SenderBase):
    """One sender half. Made by the connection; its user sends, finishes or cancels."""

    is_sender: Final = True

    __slots__ = (
        "__weakref__",
        "_shared",
        "channel",
        "handle",
    )

    def __init__(
        self, shared: ConnectionContext, channel: int, *, accessible: bool, given: bool
    ) -> None:
        self._shared = shared
        self.channel = channel
        self._ledger = shared.outgoing
        self.state = SenderState.OPEN
        self.given = given
        """Whether the application got the handle, or will with the message that carries it."""
        self.accessible = accessible
        """AQ-R27.1; final once true."""
        self.handle: Any = None
        """The endpoint's handle, for its wake-ups."""
        self.oneshot = bool(channel & ids.ONESHOT)
        """Whether the channel takes one message in all (AQ-R28)."""
        # Of SenderBase, where they begin empty:
        # waits_for_ample: whether who waits for room waits for ``ample`` room.
        # nacked: unreliable messages that were lost.
        # links: by unacknowledged reliable number, what hangs on it (AQ-R27.2).
        # unreliable_links: the same for unreliable numbers.
        # acked_links: only while pending, channels attached to messages acked meanwhile.
        # streams_in: the peer's streams that are routed here: acks, and what it should not send.
        # _finish_waits: whether FINISH_SENDER is due once every message has its stream (AQ-34).

    # What its user asks

    def has_room(self, mode: Mode) -> bool:
        """Whether a message need not wait: below the marks, and nothing of it would be dropped."""
        shared = self._shared
        return self.writable and (
            mode is not Mode.UNRELIABLE or shared.datagram_room > 0 or not shared.datagram_limit
        )

    @property
    def ample(self) -> bool:
        """Whether it is so far below its own mark that several messages have room."""
        return self.queued <= self._shared.config.flow.channel_high_water >> 1

    @property
    def full(self) -> bool:
        """Whether the hard limits are reached, above which nothing is queued without waiting."""
        return (
            self.queued >= self._shared.config.flow.channel_hard_limit
            or self._unsettled >= self._shared.config.limits.unacknowledged
        )

    @property
    def settled(self) -> bool:
        """Whether everything sent was acknowledged, or nacked if it went unreliably."""
        return self._unsettled == 0

    @property
    def sent(self) -> int:
        """Messages ever sent."""
        return self._numbers.next + (self._unreliable.next if self._unreliable else 0)

    def check_sendable(self) -> None:
        """Raises how the channel ended, or LocalProtocolError after finish or cancel."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # or each use would lengthen it
        if self.state is not SenderState.OPEN:
            self._step(SenderInput.SEND)
        if self.oneshot and self.sent:
            raise LocalProtocolError(
                f"{ids.describe(self.channel)} takes one message; it was already sent"
            )

    def send(
        self,
        payload: Any,
        headers: Headers,
        attachments: Sequence[tuple[int, Headers]],
        mode: Mode,
    ) -> int:
        """Queues one message and returns its number. The caller has called check_sendable.

        Raises LocalProtocolError for what cannot be encoded, with nothing changed.
        """
        if mode is Mode.UNRELIABLE:
            sent = self._send_datagram(payload, headers, attachments)
            if sent is not None:
                return sent
        if self.oneshot:
            # The whole life of the channel in one sequence (AQ-R28).
            frame, size = encode_alone(self.channel, payload, headers, attachments)
        else:
            frame = codec.encode_message(self._numbers.next, payload, headers, attachments)
            size = size_of(frame)
        if size > self._shared.config.limits.frame_bytes:
            raise self._too_large(size)
        number = self._numbers.take()
        if attachments:
            if self.links is NO_LINKS:
                self.links = {}
            self.links[number] = tuple([channel for channel, _ in attachments])
        if self.oneshot:
            self.state = SenderState.FINISHED
            stream = self._message_stream = SendStream(self, False)
            self._shared.outgoing.write(stream, frame, True)
        elif mode is Mode.ORDERED:
            if self._message_stream is None:
                self._message_stream = SendStream(self, control=False)
                self._shared.outgoing.write(
                    self._message_stream, [codec.encode_route_to(self.channel), *frame]
                )
            else:
                self._shared.outgoing.append(self._message_stream, frame, size)
        else:
            frame.insert(0, codec.encode_route_to(self.channel))
            self._write_alone(frame, at_once=bool(attachments))
        return number

    def _post(self, payload: Any, headers: Headers) -> int:
        """``post`` where there is no stream yet, or no use in it."""
        self.check_sendable()
        return self.send(payload, headers, (), Mode.ORDERED)

    def finish(self) -> None:
        """Queues FINISH_SENDER behind everything sent (AQ-34)."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # or each use would lengthen it
        self._step(SenderInput.FINISH)
        self.announce()  # before FINISH_SENDER, on the same stream (AQ-R17)
        self._finish_waits = True
        self.stream_opened()

    def _write_finish(self) -> None:
        frame = codec.encode_finish_sender(self._numbers.next)
        stream = self._message_stream
        if stream is not None and not stream.dead and self._control is None:
            self._shared.outgoing.write(stream, [frame], fin=True)  # AQ-R18
            return
        if stream is not None and not stream.dead:
            self._shared.outgoing.write(stream, [], fin=True)
        self._write_control([frame], fin=True)

    def cancel(self) -> None:
        """CANCEL_SENDER on the control stream; message streams are reset (AQ-35)."""
        if self.error is not None:
            return
        self._step(SenderInput.CANCEL)
        self._write_control([codec.CANCEL_SENDER], fin=True)
        self._reset_messages(RESET_CANCELLED)
        self.error = Cancelled("the sender was cancelled here")
        self._shared.events.append(Writable(self))

    # What the peer says

    def acked(self, ranges: bytes) -> list[int]:
        """ACK_RELIABLE. Returns channels that became accessible by it (AQ-R27.3)."""
        reached = _take_links(self.links, self._numbers.ack(ranges, bool(self.links)))
        self.links = self.links or NO_LINKS
        return self._reached(reached)

    def ack_nacked(self, ranges: bytes) -> tuple[list[int], list[int]]:
        """ACK_NACK_UNRELIABLE. Returns (channels now accessible, channels lost) (AQ-R27.4)."""
        if self._unreliable is None:
            raise SequenceError("ACK_NACK_UNRELIABLE for datagrams that were never sent (AQ-R15)")
        told = bool(self.unreliable_links)
        acked, nacked, missed = self._unreliable.ack_nack(ranges, told)
        self.nacked += missed
        self._shared.datagrams_nacked += missed
        lost = _take_links(self.unreliable_links, nacked)
        reached = _take_links(self.unreliable_links, acked)
        self.unreliable_links = self.unreliable_links or NO_LINKS
        return self._reached(reached), lost

    def receiver_closed(self) -> list[int]:
        """CLOSE_RECEIVER: the rest is nacked (AQ-R19). Returns channels lost by it."""
        success = self.state is SenderState.FINISHED and self.settled
        lost = self._take_all_links()
        self._step(SenderInput.CLOSE_RECEIVED)
        self._reset_messages(RESET_CANCELLED)
        if self._control is not None:
            self._shared.outgoing.reset(self._control, RESET_CANCELLED)
        self._end(None if success else ReceiverClosed("the peer closed the receiver"))
        return lost

    def taken(self) -> None:
        """``acked`` and ``receiver_closed`` of a oneshot channel where nothing hangs on either."""
        self._numbers.ack_range(0, 1)
        self._step(SenderInput.CLOSE_RECEIVED)
        self._end(None)

    def lost(self) -> list[int]:
        """FORGET_CHANNEL, or the cascade: everything attached is lost too (AQ-R27.5)."""
        links = [*self._take_all_links(), *self.take_acked_links()]
        if self.state is SenderState.ENDED:
            return links  # ended while pending, and its tables stayed (AQ-R27.7)
        self._step(SenderInput.LOST)
        self._reset_messages(RESET_LOST)
        if self._control is not None:
            self._shared.outgoing.reset(self._control, RESET_LOST)
        self._end(
            LostInTransit("the message that carried this channel was lost, or the peer forgot it")
        )
        return links

    def disconnected(self, error: HalfError, *, draining: bool) -> None:
        """The connection is over; if it drains, what was sent before still goes out."""
        self._step(SenderInput.DISCONNECTED)
        if not draining:
            self.queued = 0
            self._unordered_waiting = NONE_WAITING
        self._end(error)

    def carried(self) -> list[int]:
        """Channels attached to messages here whose standing is not final (AQ-R27.2)."""
        tables = (*self.links.values(), *self.unreliable_links.values(), self.acked_links)
        return [channel for channels in tables for channel in channels]

    def take_acked_links(self) -> list[int]:
        """What was acked while this one was pending: it shares what becomes of it."""
        taken, self.acked_links = self.acked_links, NO_CHANNELS
        return taken

    def stopped(self) -> None:
        """The peer stopped a stream of this half: its receiver is to be closed soon."""
        if self.error is None:
            shared = self._shared
            shared.stopped_due.append((shared.now + shared.config.timing.progress_deadline, self))

    def stop_due(self) -> None:
        """It was not: nothing that was sent will be acknowledged, and nothing more be sent."""
        if self.error is not None or self.state is SenderState.ENDED:
            return
        if self.state is SenderState.OPEN:
            dead = any(stream and stream.dead for stream in (self._message_stream, self._control))
            if self.settled and not dead:
                return  # the stream had left whole, and its messages were acknowledged since
            self.cancel()
        limit = self._shared.config.timing.progress_deadline
        self.error = ReceiverClosed(
            f"the peer stopped reading {ids.describe(self.channel)} and did not close its "
            f"receiver within {limit:g} s (Timing.progress_deadline)"
        )
        self._shared.events += [Writable(self), SenderEnded(self)]

    # What the streams say

    def left_by(self, stream: object) -> None:
        """One of the peer's streams says no more here; nothing is held for it."""

    def stream_left(self, stream: SendStream) -> None:
        """A stream of ours is through, or dead: the next unordered message may go."""
        if stream in self._unordered_open:
            del self._unordered_open[stream]
            while (
                self._unordered_waiting
                and len(self._unordered_open) < self._shared.config.flow.unordered_streams
            ):
                waiting = self._unordered_waiting.popleft()
                self._unordered_open[waiting] = None
                self._shared.outgoing.let_go(waiting)
            self._unordered_waiting = self._unordered_waiting or NONE_WAITING
            self._unordered_open = self._unordered_open or NO_STREAMS
            if self._finish_waits:
                self.stream_opened()

    def stream_opened(self) -> None:
        """A message that waited has its stream: FINISH_SENDER may be due (AQ-34)."""
        if not self._finish_waits or self._unordered_waiting:
            return
        stream = self._message_stream
        if self._control is not None and stream is not None and stream.unopened:
            return  # FINISH_SENDER would go by another stream
        if any(stream.unopened for stream in self._unordered_open):
            return
        self._finish_waits = False
        self._write_finish()

    def ack_due(self) -> None:
        """An implicitly created half opens its control stream with ROUTE_TO alone (AQ-R25)."""
        if self._control is None and self.state is SenderState.OPEN and not self.sent:
            self._write_control([], fin=False)

    def announce(self) -> None:
        """SENT_UNRELIABLE for what it is owed for (AQ-33)."""
        if self._unreliable is None or self.state not in (SenderState.OPEN, SenderState.FINISHED):
            return
        count = self._unreliable.take_announcement()
        if count:
            self._write_control([codec.encode_sent_unreliable(count)], fin=False)

    # Within

    def _too_large(self, size: int) -> LocalProtocolError:
        limit = self._shared.config.limits.frame_bytes
        return LocalProtocolError(
            f"a message of {size} bytes is above Limits.frame_bytes ({limit}); "
            "send it in pieces, or raise the limit on both sides"
        )

    @property
    def _unsettled(self) -> int:
        unreliable = self._unreliable
        return self._numbers.unacked + (unreliable.unsettled if unreliable is not None else 0)

    def _send_datagram(
        self, payload: Any, headers: Headers, attachments: Sequence[tuple[int, Headers]]
    ) -> int | None:
        """The message's number, or None when it does not fit a datagram (AQ-R17)."""
        shared = self._shared
        unreliable = self._unreliable or UnreliableSent()
        frame = codec.encode_message(unreliable.next, payload, headers, attachments)
        frame.insert(0, codec.encode_route_to(self.channel))
        if not shared.outgoing.version_acknowledged:
            frame.insert(0, codec.VERSION)  # counts towards the size (AQ-R6)
        if size_of(frame) > shared.datagram_limit:
            return None
        self._unreliable = unreliable
        if not unreliable.unannounced:
            due = shared.now + shared.config.timing.sent_unreliable_delay
            shared.announce_due.append((due, self))
        number = unreliable.take()
        if attachments:
            if self.unreliable_links is NO_LINKS:
                self.unreliable_links = {}
            self.unreliable_links[number] = tuple(channel for channel, _ in attachments)
        if shared.datagram_room > 0:
            shared.datagram_room -= 1
            shared.datagrams_told += 1
            shared.effects.append((effects.DATAGRAM, b"".join(frame)))
        else:
            shared.datagrams_dropped += 1  # as the transport would (AQ-R17)
        if self.oneshot:
            self.announce()
            self.state = SenderState.FINISHED
            self._write_control([codec.encode_finish_sender(0)], fin=True)  # AQ-R28
        return number

    def _reached(self, channels: list[int]) -> list[int]:
        """Channels of acked messages: accessible now, or once this one is (AQ-R27.3)."""
        if self.accessible:
            return channels
        if channels:
            if self.acked_links is NO_CHANNELS:
                self.acked_links = []
            self.acked_links.extend(channels)
        return []

    def _take_all_links(self) -> list[int]:
        links = [
            channel
            for table in (self.links, self.unreliable_links)
            for channels in table.values()
            for channel in channels
        ]
        self.links = self.unreliable_links = NO_LINKS
        return links

    def _step(self, what: SenderInput) -> SenderState:
        following = SENDER[self.state, what]
        if following is None:
            raise LocalProtocolError(
                f"cannot {what.name.lower()} {ids.describe(self.channel)}: "
                f"it is already {self.state.name.lower()}"
            )
        self.state = following
        return following

    def _end(self, error: HalfError | None) -> None:
        if self.error is None:
            self.error = error
        self._shared.events.append(Writable(self))
        self._shared.events.append(SenderEnded(self))

    def _write_control(self, buffers: list[Any], *, fin: bool) -> None:
        if self._control is None:
            self._control = SendStream(None, control=True)
            self._control.speaker = self  # who ends if the peer stops it
            buffers = [codec.encode_route_to(self.channel), *buffers]
        self._shared.outgoing.write(self._control, buffers, fin=fin)

    def _write_alone(self, buffers: list[Any], *, at_once: bool) -> None:
        """A sequence with one message on a stream of its own; ``at_once``: before its turn.

        What carries channels goes before anything that is sent on them, or they could take every
        stream and wait for it for ever.
        """
        stream = SendStream(self, control=False)
        full = len(self._unordered_open) >= self._shared.config.flow.unordered_streams
        if full and not at_once:
            self._shared.outgoing.hold_back(stream, buffers)
            if self._unordered_waiting is NONE_WAITING:
                self._unordered_waiting = deque()
            self._unordered_waiting.append(stream)
            return
        if self._unordered_open is NO_STREAMS:
            self._unordered_open = {}  # not a set: effects keep an order
        self._unordered_open[stream] = None
        self._shared.outgoing.write(stream, buffers, fin=True)

    def _reset_messages(self, code: int) -> None:
        waiting, self._unordered_waiting = self._unordered_waiting, NONE_WAITING
        self._finish_waits = False
        for stream in waiting:
            self._shared.outgoing.reset(stream, code)
        for stream in tuple(self._unordered_open):
            self._shared.outgoing.reset(stream, code)
        if self._message_stream is not None:
            self._shared.outgoing.reset(self._message_stream, code)


def _take_links(links: Links, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Removes the entries of the numbers in ``ranges`` and returns their channels."""
    taken: list[int] = []
    if not links:
        return taken
    for start, stop in ranges:
        if stop - start < len(links):
            numbers = [number for number in range(start, stop) if number in links]
        else:
            numbers = [number for number in links if start <= number < stop]
        for number in numbers:
            taken.extend(links.pop(number))
    return taken
