"""Reading the peer's sequences: what each frame of a channel does to its half (sections 2 and 3).

The reader owns the streams of the peer and everything that follows from their frames: admission,
the ends of halves, and what is lost or dropped with them. Violations raise RemoteProtocolError;
the connection turns them into a close.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels.receiver import DirectRead
from aqueduct._speedups.channels.recv_streams import (
    HALF_ENDED,
    POSTPONED,
    RecvStream,
    RecvStreams,
)
from aqueduct.errors import SequenceError
from aqueduct.protocol.channels.registry import ChannelRegistry
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.dispatch import StreamDispatcher
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Half
from aqueduct.protocol.common.state import ReceiverState, SenderState

__all__ = ["FrameDispatcher", "Handlers"]

Handlers: TypeAlias = Mapping[int, Callable[[RecvStream, Any], None]]
"""What frames do, by their tags."""


class FrameDispatcher(StreamDispatcher):
    """The streams of the peer, and what their frames mean."""

    def __init__(
        self,
        shared: ConnectionContext,
        registry: ChannelRegistry,
        prelude: Handlers,
    ) -> None:
        incoming = RecvStreams(shared, open=ReceiverState.OPEN, ended=SenderState.ENDED)
        super().__init__(shared, registry, incoming)
        self._registry = registry
        self.config = shared.config
        self.inlet: Callable[[int], DirectRead | None] = incoming.inlet
        self._handlers: Handlers = {
            **prelude,
            codec.AckVersion.TAG: self._on_ack_version,
            codec.MessageFrame.TAG: self.arrivals.message,
            codec.MessageHead.TAG: self.arrivals.head,
            codec.RouteTo.TAG: self._on_route,
            codec.SentUnreliable.TAG: self._on_sent_unreliable,
            codec.FinishSender.TAG: self._on_finish,
            codec.CancelSender.TAG: self._on_cancel,
            codec.AckReliable.TAG: self._on_ack_reliable,
            codec.AckNackUnreliable.TAG: self._on_ack_nack_unreliable,
            codec.CloseReceiver.TAG: self._on_close_receiver,
            codec.ForgetChannel.TAG: self._on_forget,
        }
        self.incoming.plain = self._handlers
        self._handlers_after_finish = {
            **self._handlers,
            codec.MessageFrame.TAG: self._after_finish,
            codec.MessageHead.TAG: self._after_finish,
            codec.SentUnreliable.TAG: self._after_finish,
            codec.FinishSender.TAG: self._after_finish,
            codec.CancelSender.TAG: self._after_finish,
        }
        self._handlers_early_end = {
            **dict.fromkeys(self._handlers, self._on_late_frame),
            codec.ForgetChannel.TAG: self._on_forget,
        }

    # What the connection asks

    def feed(self, number: int, data: Any, fin: bool) -> None:
        """The next bytes of a stream. Raises RemoteProtocolError."""
        stream = self.incoming.streams.get(number)
        if stream is None:
            stream = self.incoming.opened(number, self._handlers)
            stream.decoder.pause = not self.gate_open
        elif stream.postponed:
            stream.decoder.feed(data)
            stream.fin = stream.fin or fin
            self.incoming.hold(stream)
            return
        if not stream.ignoring and len(data):
            stream.decoder.feed(data)
        stream.fin = stream.fin or fin
        self.read(stream)

    def feed_datagram(self, data: bytes) -> None:
        """One datagram: VERSION, ROUTE_TO, MESSAGEs (AQ-R11). Raises RemoteProtocolError."""
        limits = self.config.limits
        decoder = codec.FrameDecoder(
            from_server=self._shared.side == 0,
            datagram=True,
            frame_limit=limits.frame_bytes,
            header_limit=limits.header_bytes,
            attachment_limit=limits.attachments,
        )
        decoder.pause = not self.gate_open
        decoder.feed(data)
        half: Half | None = None
        first = True
        while (frame := decoder.next()) is not None:
            if first and not self.incoming.version_checked and frame.TAG != codec.Version.TAG:
                raise SequenceError("a datagram began without VERSION (AQ-28, AQ-R6)")
            first = False
            if isinstance(frame, codec.RouteTo):
                half = self._registry.routed(frame.channel)
                if half is None:
                    return
            elif isinstance(frame, codec.MessageFrame):
                if not isinstance(half, ReceiverHalf) or half.error is not None:
                    return
                self.arrivals.datagram(half, frame)
            else:
                self._handlers[frame.TAG](self.incoming.outside(self._handlers), frame)
        if decoder.paused:
            if first and not self.incoming.version_checked:
                raise SequenceError("a datagram began without VERSION (AQ-28, AQ-R6)")
            self.arrivals.keep_early(data)
            return
        decoder.end()

    def reset(self, number: int, code: int) -> None:
        """The peer gave up a stream: a partial frame is dropped without error (AQ-11)."""
        stream = self.incoming.streams.pop(number, None)
        if stream is not None:
            self._postponed.pop(stream, None)
            self.incoming.leave(stream)

    def linger(self) -> None:
        """A close waits for what is to leave, and needs nothing of the peer for that."""
        self.clear()

    def feed_late(self, number: int, data: Any, fin: bool) -> None:
        """Nothing is read any more."""

    # Reading a sequence

    def read(self, stream: RecvStream, frame: Any = None) -> None:
        """Reads what has come; ``frame`` is the first of it, if it was read already.

        The rest is postponed when enough was worked on in this turn.
        """
        while outcome := self.incoming.read(stream, frame):
            if outcome == HALF_ENDED:
                self._abandon(stream, stream.half)
                frame = None
                continue
            (self._postponed if outcome == POSTPONED else self._paused)[stream] = None
            return

    def _abandon(self, stream: RecvStream, half: Half) -> None:
        """Its channel has ended."""
        if stream.handlers is self._handlers_after_finish:
            self.incoming.leave(stream)  # read on: nothing may follow (AQ-R18)
            stream.decoder.auto_admit = -1
        elif self._registry.ended_early(half.channel) and not stream.inside_message:
            self.incoming.leave(stream)
            self._read_early_end(stream)  # a FORGET_CHANNEL may be on its way here
        else:
            self.incoming.ignore(stream)

    def _read_early_end(self, stream: RecvStream) -> None:
        stream.handlers = self._handlers_early_end
        stream.decoder.auto_admit = -1  # a message is not waited for

    def _on_ack_version(self, stream: RecvStream, frame: codec.AckVersion) -> None:
        self._shared.outgoing.version_acknowledged = True

    # Frames of a channel

    def _on_route(self, stream: RecvStream, frame: codec.RouteTo) -> None:
        half = self._registry.routed(frame.channel)
        if half is None:
            if self._registry.ended_early(frame.channel):
                self._read_early_end(stream)
            else:
                self.incoming.ignore(stream)
            return
        self.incoming.route(stream, half)
        if isinstance(half, ReceiverHalf):
            half.routed(stream)

    def _on_finish(self, stream: RecvStream, frame: codec.FinishSender) -> None:
        stream.handlers = self._handlers_after_finish
        self.endings.finish(stream.half, frame.sent_reliable)

    def _on_cancel(self, stream: RecvStream, frame: codec.CancelSender) -> None:
        self.endings.cancel(stream.half)

    def _on_sent_unreliable(self, stream: RecvStream, frame: codec.SentUnreliable) -> None:
        half: ReceiverHalf = stream.half
        half.announced(frame.count)

    def _on_ack_reliable(self, stream: RecvStream, frame: codec.AckReliable) -> None:
        self.endings.acked(stream.half, frame.block)

    def _on_ack_nack_unreliable(self, stream: RecvStream, frame: codec.AckNackUnreliable) -> None:
        if frame.channel != stream.half.channel:
            raise SequenceError("ACK_NACK_UNRELIABLE names another channel than ROUTE_TO (AQ-R14)")
        self.endings.ack_nacked(stream.half, frame.block)

    def _on_close_receiver(self, stream: RecvStream, frame: codec.CloseReceiver) -> None:
        self.endings.receiver_closed(stream.half)
        self.incoming.ignore(stream)

    def _on_forget(self, stream: RecvStream, frame: codec.ForgetChannel) -> None:
        # The last frame that matters in its sequence (AQ-R23).
        half, channel = stream.half, stream.decoder.route
        self.incoming.ignore(stream)
        if half is None:
            # The message that carries the channel will not come (AQ-R26).
            self.endings.drop(self._registry.forget_early_end(channel))
        else:
            self.endings.forgotten(half)

    def _after_finish(self, stream: RecvStream, frame: Any) -> None:
        what = codec.FRAME_NAMES.get(frame.TAG, "MESSAGE")
        raise SequenceError(f"{what} after FINISH_SENDER in one sequence (AQ-R18)")

    def _on_late_frame(self, stream: RecvStream, frame: Any) -> None:
        """For a channel that ended before its message came: only FORGET_CHANNEL matters."""
        self.incoming.ignore(stream)
