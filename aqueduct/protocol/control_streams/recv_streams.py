"""The peer's streams: what each holds, and its credit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from aqueduct._speedups.channels.frames import MessageHead
from aqueduct._speedups.channels.receiver import ReceiveQueue
from aqueduct._speedups.control_streams.control_frames import ControlFrameDecoder
from aqueduct.errors import LimitExceeded
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.control_streams.bidi_streams import BIDI

__all__ = ["ControlRecvStream", "ControlRecvStreams"]

READ_AHEAD_FROM: Final = 32 << 10
"""Messages from this size on earn their stream read-ahead."""


class ControlRecvStream:
    """One stream of the peer, or its direction of a bidirectional one."""

    __slots__ = (
        "begun",
        "decoder",
        "fin",
        "finished",
        "gave_up",
        "granted",
        "half",
        "head",
        "held",
        "ignoring",
        "limit",
        "number",
        "owner",
        "partial",
        "postponed",
        "queue",
        "weight",
    )

    def __init__(self, number: int, limit: int, decoder: ControlFrameDecoder) -> None:
        self.number = number
        self.limit = limit
        """What the peer may send, in bytes from the start of the stream."""
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
        self.fin = False
        self.held = False
        """Whether it has ended, and its bytes wait here."""
        self.ignoring = False
        self.postponed = False
        self.granted = 0
        """Read-ahead beyond the initial window, charged to the budget until the stream ends."""
        self.weight = 0
        """Bytes of frames that are not whole, and of a control stream that waits."""


class ControlRecvStreams:
    """All of the peer's streams, by number, and the effects that concern them."""

    def __init__(
        self,
        shared: ConnectionContext,
        decoder: Callable[[int], ControlFrameDecoder],
    ) -> None:
        """``decoder``: makes that of a stream, by its number."""
        self._shared = shared
        self._decoder = decoder
        self._initial = shared.config.flow.initial_window
        self._lasting = self._weight = 0
        flow = shared.config.flow
        self._most_lasting = flow.channel_streams
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
        if stream.granted:
            self._shared.reserve(-stream.granted)
            stream.granted = 0

    def weigh(self, stream: ControlRecvStream) -> None:
        """What is held of it without admission is bounded in sum, like what is admitted.

        Raises LimitExceeded.
        """
        decoder = stream.decoder
        weight = decoder.gathered
        if stream.number >= BIDI:
            weight += decoder.buffered
        self._weight += weight - stream.weight
        stream.weight = weight
        if self._weight > self._most_weight:
            raise LimitExceeded(
                f"{self._weight} bytes of attachments, headers and control streams wait to be "
                f"whole; Flow.receive_budget and Limits.frame_bytes allow {self._most_weight}"
            )

    def credit(self, stream: ControlRecvStream) -> None:
        """Lets the peer send what the stream should have now, half a window at a time."""
        if stream.fin or stream.ignoring:
            return
        decoder = stream.decoder
        reach = decoder.consumed + decoder.remaining + self._initial + stream.granted
        if reach - stream.limit >= self._initial >> 1:
            stream.limit = reach
            self._shared.effects.append((effects.CREDIT, stream.number, reach))

    def grant_read_ahead(self, stream: ControlRecvStream, size: int) -> None:
        """Lets a stream of large messages send the next one while this one is worked on."""
        shared = self._shared
        wanted = min(2 * size, shared.read_ahead_both)
        if (
            size >= READ_AHEAD_FROM
            and wanted > stream.granted
            and shared.budget_used + wanted <= shared.budget >> 1
            and shared.process.used + wanted <= shared.process_budget >> 1
        ):
            shared.reserve(wanted - stream.granted)
            stream.granted = wanted

    def clear(self) -> None:
        """The connection is over."""
        self.streams.clear()
        self.held = self._lasting = self._weight = 0
