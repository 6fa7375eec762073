"""The peer's streams: what each holds, and its credit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aqueduct._speedups.channels.frames import MessageHead
from aqueduct._speedups.channels.receiver import DirectRead, ReceiveQueue
from aqueduct._speedups.channels.stream_credit import CreditedStream, StreamCredit
from aqueduct._speedups.control_streams.control_frames import ControlFrameDecoder
from aqueduct.errors import LimitExceeded
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.control_streams.bidi_streams import BIDI

__all__ = ["ControlRecvStream", "ControlRecvStreams"]


class ControlRecvStream(CreditedStream):
    """One stream of the peer, or its direction of a bidirectional one."""

    __slots__ = (
        "begun",
        "decoder",
        "finished",
        "gave_up",
        "half",
        "head",
        "held",
        "ignoring",
        "inlet",
        "owner",
        "partial",
        "postponed",
        "queue",
        "weight",
    )

    def __init__(self, number: int, limit: int, decoder: ControlFrameDecoder) -> None:
        super().__init__(number, limit)
        self.decoder = decoder
        self.half: ReceiverHalf | None = None
        """The receiver of the message that is arriving."""
        self.queue: ReceiveQueue | None = None
        self.head: MessageHead | None = None
        """Of a message that waits for room."""
        self.partial = -1
        """Bytes of the admitted message that is still landing; -1: none is."""
        self.owner: Any = None
        """Of a control stream: the half that it is attached to."""
        self.begun = False
        """Whether a frame came, and was checked."""
        self.finished = False
        """Whether FinishSender or CloseReceiver came."""
        self.gave_up: int | None = None
        """The code of its reset, which came before its ChannelControl was read."""
        self.held = False
        """Whether it has ended, and its bytes wait here."""
        self.inlet: DirectRead | None = None
        """What reads large payloads straight to their place, once there was one."""
        self.ignoring = False
        self.postponed = False
        self.weight = 0
        """Bytes of headers and attachments that are not admitted, and of a control stream."""

    @property
    def inside_message(self) -> bool:
        """Whether a message has begun here and is not whole."""
        return self.head is not None or self.partial >= 0


class ControlRecvStreams:
    """All of the peer's streams, by number, and the effects that concern them."""

    def __init__(
        self,
        shared: ConnectionContext,
        decoder: Callable[[int], ControlFrameDecoder],
    ) -> None:
        """``decoder``: makes that of a stream, by its number."""
        self._shared = shared
        self.granting = StreamCredit(shared)
        """What the peer may send on each of them."""
        self._decoder = decoder
        self._initial = shared.config.flow.initial_window
        self._lasting = self._weight = 0
        flow = shared.config.flow
        self._most_lasting = flow.channel_streams
        self._admitted = flow.admitted_window
        self._step = max(1, flow.streams // 32)
        self._most_weight = flow.receive_budget + shared.config.limits.frame_bytes
        self.streams: dict[int, ControlRecvStream] = {}
        self.most = flow.wake_up
        """What is worked on before others have their turn."""
        self.held = 0
        """Streams that have ended and whose bytes still wait here."""

    @property
    def extra(self) -> int:
        """Slots that the peer is due beside its budget; below zero: to be kept back.

        A stream of messages may last as long as its channel: two of each may. In steps: each change
        costs a frame.
        """
        lasting = min(self._lasting, self._most_lasting, 2 * len(self._shared.outgoing.live))
        return lasting - lasting % self._step - self.held

    def opened(self, number: int) -> ControlRecvStream:
        """A stream that was not there before."""
        stream = ControlRecvStream(number, self._initial, self._decoder(number))
        self.streams[number] = stream
        return stream

    def arriving(self, stream: ControlRecvStream, half: ReceiverHalf) -> None:
        """A message of a channel begins on it."""
        stream.half = half
        half.routed(stream)

    def arrived(self, stream: ControlRecvStream) -> None:
        """That message is whole, or given up."""
        half, stream.half = stream.half, None
        if half is not None:
            half.left_by(stream)
        stream.queue = None

    def begin(self, stream: ControlRecvStream, *, lasts: bool) -> None:
        """Its first frame is there."""
        stream.begun = True
        if lasts:
            self._lasting += 1

    def inlet(self, number: int) -> DirectRead | None:
        """Opens the inlet of a stream for the payload that is landing.

        None: its bytes are to be fed to whoever reads it.
        """
        stream = self.streams.get(number)
        if stream is None or stream.partial < 0 or stream.ignoring or stream.postponed:
            return None
        if stream.inlet is None:
            stream.inlet = DirectRead.landing(stream.decoder.buffer)
        return stream.inlet if stream.inlet.lands() else None

    def inlet_done(self, number: int) -> tuple[ControlRecvStream, None] | None:
        """Takes what came by the inlet of a stream; the stream if it is to be read on."""
        stream = self.streams[number]
        assert stream.inlet is not None
        whole = stream.inlet.stopped
        stream.inlet.close()
        if whole:
            return stream, None
        self.credit(stream)
        return None

    def hold(self, stream: ControlRecvStream) -> None:
        """Its bytes wait; if it has ended, so does its slot: one of those for messages."""
        if stream.fin and not stream.held and stream.number < BIDI:
            stream.held = True
            self.held += 1

    def unhold(self, stream: ControlRecvStream) -> None:
        """Its bytes wait no more."""
        if stream.held:
            stream.held = False
            self.held -= 1

    def leave(self, stream: ControlRecvStream, *, lasted: bool) -> None:
        """A stream ended, or was reset: returns what it holds."""
        self.streams.pop(stream.number, None)
        self.unhold(stream)
        self.arrived(stream)
        if lasted and stream.begun:
            self._lasting -= 1
        self._weight -= stream.weight
        stream.weight = 0
        self.granting.leave(stream)

    def weigh(self, stream: ControlRecvStream) -> None:
        """What is held of it without admission is bounded in sum, like what is admitted.

        Raises LimitExceeded.
        """
        decoder = stream.decoder
        weight = decoder.gathered
        if stream.head is not None:
            weight += stream.head.overhead
        if stream.number >= BIDI:
            weight += decoder.buffered
        self._weight += weight - stream.weight
        stream.weight = weight
        if self._weight > self._most_weight:
            raise LimitExceeded(
                f"{self._weight} bytes of attachments, headers and control streams wait for the "
                "rest of their messages, or for room; Flow.receive_budget and Limits.frame_bytes "
                f"allow {self._most_weight}"
            )

    def credit(self, stream: ControlRecvStream) -> None:
        """Lets the peer send what the stream should have now."""
        if not stream.ignoring:
            decoder = stream.decoder
            reach = decoder.consumed + min(decoder.remaining, self._admitted)
            self.granting.renew(stream, reach)

    def clear(self) -> None:
        """The connection is over."""
        self.streams.clear()
        self.held = self._lasting = self._weight = 0
