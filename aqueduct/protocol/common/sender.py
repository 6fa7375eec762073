"""The sender half of a channel: numbers, streams, finish and cancel (section 3.3).

How its frames look is for a FrameWriter.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from aqueduct._speedups.base.buffers import size_of
from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.channels.frames import ONESHOT
from aqueduct._speedups.channels.sender import SenderBase, SendStream
from aqueduct._speedups.channels.tracker import UnreliableSent
from aqueduct.errors import (
    Cancelled,
    LocalProtocolError,
    LostInTransit,
    ReceiverClosed,
    SequenceError,
)
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.context import ConnectionContext, HalfError
from aqueduct.protocol.common.events import Headers, SenderEnded, Writable
from aqueduct.protocol.common.frame_writer import FrameWriter
from aqueduct.protocol.common.links import SentLinks, UnorderedStreams, take_links
from aqueduct.protocol.common.state import SENDER, SenderInput, SenderState

__all__ = ["RESET_CANCELLED", "RESET_LOST", "Mode", "SenderHalf"]

RESET_CANCELLED: Final = 1
RESET_LOST: Final = 2


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
        "_writer",
        "channel",
        "handle",
    )

    def __init__(
        self,
        shared: ConnectionContext,
        writer: FrameWriter,
        channel: int,
        *,
        accessible: bool,
        given: bool,
    ) -> None:
        self._shared = shared
        self._writer = writer
        self.channel = channel
        self.state = SenderState.OPEN
        self.given = given
        """Whether the application got the handle, or will with the message that carries it."""
        self.accessible = accessible
        """AQ-R27.1; final once true."""
        self.handle: Any = None
        """The endpoint's handle, for its wake-ups."""
        self.oneshot = bool(channel & ONESHOT)
        """Whether the channel takes one message in all (AQ-R28)."""
        # Of SenderBase, where they begin empty:
        # links: SentLinks, once a message had attachments.
        # unordered: UnorderedStreams, once a message was UNORDERED.
        # streams_in: the peer's streams that are routed here: acks, and what it should not send.
        # finish_waits: whether the finish is to be said once every message has its stream (AQ-34).

    def describe(self) -> str:
        """The channel for people."""
        return self._writer.describe(self.channel)

    # What its user asks

    def has_room(self, mode: Mode) -> bool:
        """Whether a message need not wait: below the marks, and nothing of it would be dropped."""
        shared = self._shared
        return self.writable and (
            mode is not Mode.UNRELIABLE or shared.datagram_room > 0 or not shared.datagram_limit
        )

    @property
    def full(self) -> bool:
        """Whether the hard limits are reached, above which nothing is queued without waiting."""
        return (
            self.queued >= self._shared.config.flow.channel_hard_limit
            or self.unsettled >= self._shared.config.limits.unacknowledged
        )

    @property
    def sent(self) -> int:
        """Messages ever sent."""
        return self.numbers.next + (self.unreliable.next if self.unreliable else 0)

    def check_sendable(self) -> None:
        """Raises how the channel ended, or LocalProtocolError after finish or cancel."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # or each use would lengthen it
        if self.state is not SenderState.OPEN:
            self._step(SenderInput.SEND)
        if self.oneshot and self.sent:
            raise LocalProtocolError(f"{self.describe()} takes one message; it was already sent")

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
        writer = self._writer
        frame = writer.message(self, self.numbers.next, payload, headers, attachments)
        size = size_of(frame)
        outgoing = self._shared.outgoing
        outgoing.check_size(size)
        number = self.numbers.take()
        if attachments:
            if self.links is None:
                self.links = SentLinks()
            self.links.reliable[number] = tuple([channel for channel, _ in attachments])
        if self.oneshot:
            self._step(SenderInput.FINISH)
            stream = self.message_stream = SendStream(self, False)
            outgoing.write(stream, writer.oneshot(self, frame), True)
        elif mode is Mode.ORDERED:
            if self.message_stream is None:
                self.message_stream = SendStream(self, control=False)
                outgoing.write(self.message_stream, [*writer.begin(self), *frame])
            else:
                outgoing.append(self.message_stream, frame, size)
        else:
            frame = [*writer.begin(self), *frame]
            if self.unordered is None:
                self.unordered = UnorderedStreams(outgoing)
            most = self._shared.config.flow.unordered_streams
            stream = SendStream(self, control=False)
            self.unordered.write(stream, frame, most, at_once=bool(attachments))
        return number

    def finish(self) -> None:
        """Queues the finish behind everything sent (AQ-34)."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # or each use would lengthen it
        self._step(SenderInput.FINISH)
        self.announce()  # before the finish, on the same stream (AQ-R17)
        self._writer.finish(self)

    def cancel(self) -> None:
        """The peer is told by the control stream; message streams are reset (AQ-35)."""
        if self.error is not None:
            return
        self._step(SenderInput.CANCEL)
        self._writer.cancel(self)
        self._reset_messages(RESET_CANCELLED)
        self.error = Cancelled("the sender was cancelled here")
        self._shared.events.append(Writable(self))

    # What the peer says

    def acked(self, ranges: bytes) -> list[int]:
        """Messages were acked. Returns channels that became accessible by it (AQ-R27.3)."""
        links: SentLinks | None = self.links
        if links is None:
            self.numbers.ack(ranges, False)
            return []
        reached = take_links(links.reliable, self.numbers.ack(ranges, bool(links.reliable)))
        return links.reached(reached, self.accessible)

    def ack_nacked(self, ranges: bytes) -> tuple[list[int], list[int]]:
        """Datagrams were acked or nacked.

        Returns (channels now accessible, channels lost) (AQ-R27.4).
        """
        if self.unreliable is None:
            raise SequenceError(
                f"{self.describe()}: datagrams were acked or nacked, but none was sent (AQ-R15)"
            )
        links = self.links
        told = links is not None and bool(links.unreliable)
        acked, nacked, missed = self.unreliable.ack_nack(ranges, told)
        self._shared.datagrams_nacked += missed
        if links is None:
            return [], []
        lost = take_links(links.unreliable, nacked)
        return links.reached(take_links(links.unreliable, acked), self.accessible), lost

    def receiver_closed(self) -> list[int]:
        """The receiver has closed: the rest is nacked (AQ-R19). Returns channels lost by it."""
        success = self.state is SenderState.FINISHED and not self.unsettled
        lost = self.links.take_unsettled() if self.links is not None else []
        self._step(SenderInput.CLOSE_RECEIVED)
        self._reset_messages(RESET_CANCELLED)
        self._writer.end_sender(self, RESET_CANCELLED)
        self._end(None if success else ReceiverClosed("the peer closed the receiver"))
        return lost

    def lost(self) -> list[int]:
        """The channel is lost, and everything attached to its messages (AQ-R27.5)."""
        links: list[int] = []
        if self.links is not None:
            links += self.links.take_unsettled()
            links += self.links.take_acked()
        if self.state is SenderState.ENDED:
            return links  # ended while pending, and its tables stayed (AQ-R27.7)
        self._step(SenderInput.LOST)
        self._reset_messages(RESET_LOST)
        self._writer.end_sender(self, RESET_LOST)
        self._end(
            LostInTransit("the message that carried this channel was lost, or the peer forgot it")
        )
        return links

    def disconnected(self, error: HalfError, *, draining: bool) -> None:
        """The connection is over; if it drains, what was sent before still goes out."""
        self._step(SenderInput.DISCONNECTED)
        if not draining:
            self.queued = 0
            self.unordered = None
        self._end(error)

    def stop_due(self) -> None:
        """It was not: nothing that was sent will be acknowledged, and nothing more be sent."""
        if self.error is not None or self.state is SenderState.ENDED:
            return
        if self.state is SenderState.OPEN:
            dead = any(stream and stream.dead for stream in (self.message_stream, self.control))
            if not self.unsettled and not dead:
                return  # the stream had left whole, and its messages were acknowledged since
            self.cancel()
        limit = self._shared.config.timing.progress_deadline
        self.error = ReceiverClosed(
            f"the peer stopped reading {self.describe()} and did not close its "
            f"receiver within {limit:g} s (Timing.progress_deadline)"
        )
        self._shared.events += [Writable(self), SenderEnded(self)]

    # What the streams say

    def stream_left(self, stream: SendStream) -> None:
        """A stream of ours is through, or dead: the next unordered message may go."""
        if self.unordered is not None:
            self.unordered.left(stream, self._shared.config.flow.unordered_streams)
            self.stream_opened()

    def stream_opened(self) -> None:
        """A message that waited has its stream: the finish may be due (AQ-34)."""
        if self.finish_waits:
            self._writer.stream_opened(self)

    def ack_due(self) -> None:
        """An implicitly created half opens its control stream (AQ-R25)."""
        if self.control is None and self.state is SenderState.OPEN and not self.sent:
            self._writer.open(self)

    def announce(self) -> None:
        """Tells how many datagrams were sent since the last time (AQ-33)."""
        if self.unreliable is None or self.state not in (SenderState.OPEN, SenderState.FINISHED):
            return
        if not self._writer.can_say(self):
            return
        count = self.unreliable.take_announcement()
        if count:
            self._writer.announce(self, count)

    # Within

    @property
    def unsettled(self) -> int:
        """Messages neither acknowledged nor nacked."""
        unreliable = self.unreliable
        return self.numbers.unacked + (unreliable.unsettled if unreliable is not None else 0)

    def _send_datagram(
        self, payload: Any, headers: Headers, attachments: Sequence[tuple[int, Headers]]
    ) -> int | None:
        """The message's number, or None when it does not fit a datagram (AQ-R17)."""
        shared = self._shared
        unreliable = self.unreliable or UnreliableSent()
        message = self._writer.message(self, unreliable.next, payload, headers, attachments)
        frame = [*self._writer.begin(self), *message]
        if not shared.outgoing.version_acknowledged:
            frame.insert(0, VERSION)  # counts towards the size (AQ-R6)
        if size_of(frame) > shared.datagram_limit:
            return None
        self.unreliable = unreliable
        if not unreliable.unannounced:
            due = shared.now + shared.config.timing.sent_unreliable_delay
            shared.announce_due.append((due, self))
        number = unreliable.take()
        if attachments:
            if self.links is None:
                self.links = SentLinks()
            self.links.unreliable[number] = tuple(channel for channel, _ in attachments)
        if shared.datagram_room > 0:
            shared.datagram_room -= 1
            shared.datagrams_told += 1
            shared.effects.append((effects.DATAGRAM, b"".join(frame)))
        else:
            shared.datagrams_dropped += 1  # as the transport would (AQ-R17)
        if self.oneshot:
            self.announce()
            self._step(SenderInput.FINISH)
            self._writer.finish(self)  # AQ-R28
        return number

    def _step(self, what: SenderInput) -> SenderState:
        following = SENDER[self.state, what]
        if following is None:
            raise LocalProtocolError(
                f"cannot {what.name.lower()} {self.describe()}: "
                f"it is already {self.state.name.lower()}"
            )
        self.state = following
        return following

    def _end(self, error: HalfError | None) -> None:
        if self.error is None:
            self.error = error
        self._shared.events.append(Writable(self))
        self._shared.events.append(SenderEnded(self))

    def _reset_messages(self, code: int) -> None:
        self.finish_waits = False
        if self.unordered is not None:
            self.unordered.reset(code)
        if self.message_stream is not None:
            self._shared.outgoing.reset(self.message_stream, code)
