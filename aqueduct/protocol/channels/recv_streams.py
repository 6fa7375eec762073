"""The peer's streams: one frame sequence each, what they hold, and their credit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aqueduct._speedups.channels.codec import FrameDecoder
from aqueduct._speedups.channels.recv_streams import RecvStream, RecvStreamsBase
from aqueduct.errors import LimitExceeded
from aqueduct.protocol.channels import effects
from aqueduct.protocol.channels.state import ReceiverState

if TYPE_CHECKING:
    from aqueduct.protocol.channels.context import ConnectionContext
    from aqueduct.protocol.channels.receiver import ReceiverHalf
    from aqueduct.protocol.channels.sender import SenderHalf

__all__ = ["SMALL", "Handlers", "RecvStream", "RecvStreams"]

Handlers: TypeAlias = "Mapping[int, Callable[[RecvStream, Any], None]]"

SMALL: Final = 16 << 10
"""Payloads up to this are admitted without asking while there is room for many of them."""

LASTING_STREAMS: Final = 2
"""Of a sender: the stream of ORDERED messages, and that of SENT_UNRELIABLE. Of a receiver: acks."""


class RecvStreams(RecvStreamsBase):
    """All of the peer's streams, and the effects that concern them."""

    def __init__(self, shared: ConnectionContext) -> None:
        super().__init__(shared, open=ReceiverState.OPEN, small=SMALL)
        self._shared = shared
        self._flow = shared.config.flow
        self._from_server = shared.side == 0
        self.held = 0
        """Streams that ended and whose bytes still wait here."""
        self.lasting = 0
        """Streams that may last as long as their channel: the first two of each."""
        self.extra = 0
        """Stream slots that the peer is due beside its budget; below zero: to be kept back."""
        self._step = max(1, self._flow.streams // 32)
        self._gathered = 0
        self._nothing = FrameDecoder(from_server=self._from_server)

    def opened(self, number: int, handlers: Handlers) -> RecvStream:
        """A stream that was not there before."""
        stream = self.streams[number] = self.outside(handlers, number)
        return stream

    def outside(self, handlers: Handlers, number: int = -1) -> RecvStream:
        """One that is in no table."""
        return RecvStream(number, self._flow.initial_window, handlers, self.decoder())

    def decoder(self) -> FrameDecoder:
        """One for a sequence of the peer's."""
        limits = self._shared.config.limits
        return FrameDecoder(
            from_server=self._from_server,
            frame_limit=limits.frame_bytes,
            header_limit=limits.header_bytes,
            attachment_limit=limits.attachments,
            block_limit=limits.block_bytes,
        )

    def route(self, stream: RecvStream, half: ReceiverHalf | SenderHalf) -> None:
        """Its ROUTE_TO named a channel that has state."""
        stream.half = half
        half.streams_in += 1
        if half.streams_in <= LASTING_STREAMS:
            self._count(lasting=1)

    def hold(self, stream: RecvStream) -> None:
        """Its bytes wait; if it has ended, so does its slot."""
        if stream.fin and not stream.held:
            stream.held = True
            self._count(held=1)

    def unhold(self, stream: RecvStream) -> None:
        """Its bytes wait no more."""
        if stream.held:
            stream.held = False
            self._count(held=-1)

    def ended(self, stream: RecvStream) -> None:
        """Its last byte was read."""
        self.streams.pop(stream.number, None)
        self.leave(stream)

    def leave(self, stream: RecvStream) -> None:
        """A stream ended, was reset, or is ignored from here on: return what it holds."""
        half = stream.half
        self.unhold(stream)
        self._gathered -= stream.gathered
        stream.gathered = 0
        if half is not None:
            half.streams_in -= 1
            if half.streams_in < LASTING_STREAMS:
                self._count(lasting=-1)
            half.left_by(stream)
        if stream.granted:
            self._shared.spent(-stream.granted)
            stream.granted = 0
        stream.half = None

    def ignore(self, stream: RecvStream) -> None:
        """The rest of the sequence does not matter (AQ-R24)."""
        self.leave(stream)
        if stream.ignoring:
            return
        stream.ignoring = True
        stream.decoder = self._nothing  # what it had buffered may go
        if stream.fin:
            self.streams.pop(stream.number, None)
        else:
            self._shared.effects.append((effects.STOP, stream.number, 0))

    def clear(self) -> None:
        """The connection is over."""
        self.streams.clear()
        self.held = self.lasting = self.extra = 0

    def _count(self, *, lasting: int = 0, held: int = 0) -> None:
        """What lasts does not count against the budget of slots.

        Or the streams of idle channels would keep all others from ever having one, acks among
        them. In steps: each change costs a frame.
        """
        self.lasting += lasting
        self.held += held
        lasting = min(self.lasting, self._flow.channel_streams)
        self.extra = lasting - lasting % self._step - self.held

    def _weigh(self, stream: RecvStream, gathered: int) -> None:
        """Blocks are not admitted: in sum they are bounded like what is."""
        self._gathered += gathered - stream.gathered
        stream.gathered = gathered
        bound = self._flow.receive_budget + self._shared.config.limits.frame_bytes
        if self._gathered > bound:
            raise LimitExceeded(
                f"{self._gathered} bytes of headers and attachments wait to be whole; "
                f"Flow.receive_budget and Limits.frame_bytes allow {bound}"
            )
