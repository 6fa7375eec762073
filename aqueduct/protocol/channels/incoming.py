"""The peer's streams: one frame sequence each, what they hold, and their credit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aqueduct._speedups.codec import Decoder, MessageHead
from aqueduct._speedups.runs import Inlet
from aqueduct.config import Config
from aqueduct.errors import LimitExceeded
from aqueduct.protocol.channels import effects

if TYPE_CHECKING:
    from aqueduct.protocol.channels.receiving import ReceiverHalf
    from aqueduct.protocol.channels.sending import SenderHalf
    from aqueduct.protocol.channels.shared import Shared

__all__ = ["SMALL", "Handlers", "InStream", "Incoming"]

Handlers: TypeAlias = "Mapping[int, Callable[[InStream, Any], None]]"

SMALL: Final = 16 << 10
"""Payloads up to this are admitted without asking while there is room for many of them."""

READ_AHEAD_FROM: Final = 32 << 10
"""Messages from this size on earn their stream read-ahead (see ``Incoming.grant_read_ahead``)."""

LASTING_STREAMS: Final = 2
"""Of a sender: the stream of ORDERED messages, and that of SENT_UNRELIABLE. Of a receiver: acks."""


class InStream:
    """One stream of the peer."""

    __slots__ = (
        "begun",
        "decoder",
        "fin",
        "gathered",
        "granted",
        "half",
        "handlers",
        "head",
        "held",
        "ignoring",
        "inlet",
        "limit",
        "number",
        "partial",
    )

    def __init__(self, number: int, config: Config, handlers: Handlers, decoder: Decoder) -> None:
        self.number = number
        self.decoder = decoder
        self.handlers = handlers
        """What each frame does, by tag; they change with FINISH_SENDER (AQ-R18)."""
        self.half: ReceiverHalf | SenderHalf | None = None
        """What ROUTE_TO named, while it has state."""
        self.begun = False
        """Whether the first frame was seen and checked (AQ-28, AQ-R7)."""
        self.fin = False
        self.ignoring = False
        """The rest is dropped: the channel has no state, or the stream was stopped (AQ-R24)."""
        self.head: MessageHead | None = None
        """A message that waits for admission."""
        self.held = False
        """Ended, and its bytes still wait here."""
        self.limit = config.flow.initial_window
        """What the peer may send, from the start of the stream (design: Flow)."""
        self.granted = 0
        """Read-ahead beyond the initial window, charged to the budget until the stream ends."""
        self.gathered = 0
        """Bytes of a block of headers or attachments that is not whole yet."""
        self.inlet: Inlet | None = None
        """For a carrier that reads straight to where bytes belong; made when one asks."""
        self.partial = -1
        """Payload bytes of the admitted message that is still landing; -1: none."""

    @property
    def inside_message(self) -> bool:
        """Whether a message has begun here and is not whole."""
        return self.head is not None or self.partial >= 0


class Incoming:
    """All of the peer's streams, and the effects that concern them."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._flow = shared.config.flow
        self._sent = 0
        """Bytes that this side had sent when the last credit of a large stream was given."""
        self._from_server = shared.side == 0
        self.streams: dict[int, InStream] = {}
        self.held = 0
        """Streams that ended and whose bytes still wait here."""
        self.lasting = 0
        """Streams that may last as long as their channel: the first two of each."""
        self.extra = 0
        """Stream slots that the peer is due beside its budget; below zero: to be kept back."""
        self._step = max(1, self._flow.streams // 32)
        self._gathered = 0
        self._nothing = Decoder(from_server=self._from_server)

    def opened(self, number: int, handlers: Handlers) -> InStream:
        """A stream that was not there before."""
        stream = self.streams[number] = self.outside(handlers, number)
        return stream

    def outside(self, handlers: Handlers, number: int = -1) -> InStream:
        """One that is in no table."""
        return InStream(number, self._shared.config, handlers, self.decoder())

    def decoder(self) -> Decoder:
        """One for a sequence of the peer's."""
        limits = self._shared.config.limits
        return Decoder(
            from_server=self._from_server,
            frame_limit=limits.frame_bytes,
            header_limit=limits.header_bytes,
            attachment_limit=limits.attachments,
            block_limit=limits.block_bytes,
        )

    def route(self, stream: InStream, half: ReceiverHalf | SenderHalf) -> None:
        """Its ROUTE_TO named a channel that has state."""
        stream.half = half
        half.streams_in += 1
        if half.streams_in <= LASTING_STREAMS:
            self._count(lasting=1)

    def hold(self, stream: InStream) -> None:
        """Its bytes wait; if it has ended, so does its slot."""
        if stream.fin and not stream.held:
            stream.held = True
            self._count(held=1)

    def unhold(self, stream: InStream) -> None:
        """Its bytes wait no more."""
        if stream.held:
            stream.held = False
            self._count(held=-1)

    def credit(self, stream: InStream) -> None:
        """Lets the peer send what the stream should have now."""
        if stream.fin:
            return
        flow = self._flow
        decoder = stream.decoder
        if decoder.gathered != stream.gathered:
            self._weigh(stream, decoder.gathered)
        reach = decoder.reach(flow.admitted_window) + flow.initial_window
        # Half a window at a time: a credit costs a frame.
        due = reach + stream.granted - stream.limit
        if due >= flow.initial_window >> 1 and due >= stream.granted >> 1:
            if stream.granted:
                self._run(stream, due, stream.limit - reach)
                if reach + stream.granted <= stream.limit:
                    return
            stream.limit = reach + stream.granted
            self._shared.effects.append((effects.CREDIT, stream.number, stream.limit))

    def grant_read_ahead(self, stream: InStream, size: int) -> None:
        """Lets a stream of large messages send the next one while this one is worked on.

        Without it each message would wait a round trip for its credit. What is granted is
        charged to the budget and at most half of the budget goes this way.
        """
        flow = self._flow
        wanted = min(2 * size, self._shared.read_ahead_both)
        if (
            size >= READ_AHEAD_FROM
            and wanted > stream.granted
            and self._shared.budget_used + wanted <= flow.receive_budget >> 1
        ):
            self._shared.budget_used += wanted - stream.granted
            stream.granted = wanted

    def _run(self, stream: InStream, taken: int, ahead: int) -> None:
        """Doubles the read-ahead of a stream that uses it: several messages are under way then.

        Up to a quarter of the budget goes this way, so that others can still begin theirs. While
        this side sends as much as it receives it may be less (see ``Flow.loopback_read_ahead``).
        ``taken``: bytes since the last credit; ``ahead``: those that the peer may still send.
        """
        shared = self._shared
        sent = shared.outgoing.charged
        both = 2 * (sent - self._sent) >= taken
        self._sent = sent
        limit = shared.read_ahead_both if both else shared.read_ahead
        more = min(stream.granted, limit - stream.granted)
        if more < 0:  # what the peer may send already is not taken back
            more = max(limit, ahead) - stream.granted
            shared.freed = True
        elif shared.budget_used + more > self._flow.receive_budget >> 2:
            return
        shared.budget_used += more
        stream.granted += more

    def ended(self, stream: InStream) -> None:
        """Its last byte was read."""
        self.streams.pop(stream.number, None)
        self.leave(stream)

    def leave(self, stream: InStream) -> None:
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
            self._shared.budget_used -= stream.granted
            self._shared.freed = True
            stream.granted = 0
        stream.half = None

    def ignore(self, stream: InStream) -> None:
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

    def _weigh(self, stream: InStream, gathered: int) -> None:
        """Blocks are not admitted: in sum they are bounded like what is."""
        self._gathered += gathered - stream.gathered
        stream.gathered = gathered
        bound = self._flow.receive_budget + self._shared.config.limits.frame_bytes
        if self._gathered > bound:
            raise LimitExceeded(
                f"{self._gathered} bytes of headers and attachments wait to be whole; "
                f"Flow.receive_budget and Limits.frame_bytes allow {bound}"
            )
