"""Reading the peer's streams in the control-stream draft: what each frame does to its half."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from aqueduct._speedups.channels.frames import (
    FinishSender,
    MessageFrame,
    MessageHead,
    SentUnreliable,
    Version,
)
from aqueduct._speedups.channels.receiver import DirectRead
from aqueduct._speedups.control_streams import control_frames as codec
from aqueduct.errors import Cancelled, RemoteProtocolError, SequenceError
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.arrivals import Arrivals
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.effects import BIDI
from aqueduct.protocol.common.endings import Endings
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.sender import RESET_LOST, SenderHalf
from aqueduct.protocol.common.stalls import StallWatch
from aqueduct.protocol.common.state import ReceiverState
from aqueduct.protocol.control_streams import ids
from aqueduct.protocol.control_streams.bidi_streams import BidiStreams, is_mine
from aqueduct.protocol.control_streams.early import EarlyReads
from aqueduct.protocol.control_streams.prelude import ControlPrelude
from aqueduct.protocol.control_streams.recv_streams import ControlRecvStream, ControlRecvStreams
from aqueduct.protocol.control_streams.registry import ControlRegistry

__all__ = ["ControlDispatcher"]


class ControlDispatcher:
    """The streams of the peer, and what their frames mean."""

    def __init__(
        self,
        shared: ConnectionContext,
        registry: ControlRegistry,
        bidi: BidiStreams,
        prelude: ControlPrelude,
        fail: Callable[[RemoteProtocolError], None],
    ) -> None:
        self._shared = shared
        self._registry = registry
        self._bidi = bidi
        self._prelude = prelude
        self._fail = fail
        self._most = shared.config.flow.wake_up
        self.gate_open = False
        """Whether the peer's connection headers are in and accepted (AQ0-20, AQ0-R10)."""
        self.incoming = ControlRecvStreams(shared, self._decoder_of)
        self.inlet: Callable[[int], DirectRead | None] = _no_inlet
        self.endings = Endings(shared, registry, self._abandon, lose_dropped=True)
        self.arrivals = Arrivals(shared, registry, self.endings, self.incoming, self.read)
        self.stalls = StallWatch(shared, self.incoming, self.endings.close_receiver)
        self._postponed: OrderedDict[ControlRecvStream, None] = OrderedDict()
        """Streams that go on in the next turn: enough was worked on in this one."""
        self._paused: dict[ControlRecvStream, None] = {}
        """Streams that wait for the gate."""
        self.early: EarlyReads | None = None
        """Of a server, what may be a replay."""
        self._handlers: dict[type, Callable[[ControlRecvStream, Any], None]] = {
            Version: self._on_version,
            codec.ConnectionControl: self._on_connection_control,
            codec.ChannelControl: self._on_channel_control,
            MessageHead: self._on_head,
            MessageFrame: self._on_message,
            codec.ClosedChannelLost: self._on_closed_lost,
        }
        self._control_handlers: dict[type, Callable[[Any, Any], None]] = {
            SentUnreliable: self._on_sent_unreliable,
            FinishSender: self._on_finish,
            codec.ControlAcks: self._on_acks,
            codec.ControlAckNacks: self._on_ack_nacks,
            codec.ControlClose: self._on_close,
        }

    # What the connection asks

    def feed(self, number: int, data: Any, fin: bool) -> None:
        """The next bytes of a stream. Raises RemoteProtocolError."""
        stream = self.incoming.streams.get(number)
        if stream is None:
            stream = self._opened(number)
        stream.fin = stream.fin or fin
        if number >= BIDI and is_mine(number):
            self._bidi.heard(number)
        if stream.ignoring:
            if stream.fin:
                self._leave(stream)
            return
        if len(data):
            stream.decoder.feed(data)
        if stream.postponed:
            self.incoming.hold(stream)
            if self.early is not None:
                self.early.came(len(data))
        else:
            self.read(stream)

    def feed_datagram(self, data: bytes) -> None:
        """One datagram of messages. Raises RemoteProtocolError."""
        if self.early is not None:
            self.arrivals.keep_early(data)
            return
        decoder = self._decoder("datagram")
        decoder.feed(data)
        decoder.end()
        first = True
        while (frame := decoder.next()) is not None:
            if first:
                self._check_version(frame, "a datagram")
            first = False
            if type(frame) is MessageFrame:
                half = self._registry.received(decoder.channel)
                if half is not None and half.error is None:
                    self.arrivals.datagram(half, frame)
        if decoder.paused:
            if first:
                self._check_version(None, "a datagram")
            self.arrivals.keep_early(data)

    def reset(self, number: int, code: int) -> None:
        """The peer gave up a stream. A control stream has ended with that (AQ0-31, AQ0-34).

        What came before on a control stream is read first: the peer may have waited with its reset
        until it had arrived (AQ0-R5).
        """
        stream = self.incoming.streams.get(number)
        if stream is None:
            if number < BIDI or (is_mine(number) and number not in self._bidi.owners):
                return
            stream = self._opened(number)
        unread = stream in self._paused or stream.postponed
        if unread and number >= BIDI and stream.owner is None:
            stream.gave_up = code  # its ChannelControl comes first, or its half would wait for ever
        else:
            self._give_up(stream, code)

    def open_gate(self) -> None:
        """The peer's connection headers are in and accepted: what waits for them is read."""
        self.gate_open = True
        paused, self._paused = self._paused, {}
        for stream in self.incoming.streams.values():
            stream.decoder.pause = False
        try:
            for stream in paused:
                if stream.number in self.incoming.streams:
                    self.incoming.unhold(stream)
                    self.read(stream)
            for data in self.arrivals.take_early():
                self.feed_datagram(data)
        except RemoteProtocolError as error:
            self._fail(error)

    def drain(self) -> None:
        """The connection is over: messages that are here whole need no room any more."""
        self._most = 1 << 62  # no other turn comes
        self.read_on()
        for stream in tuple(self.incoming.streams.values()):
            while (head := stream.head) is not None and stream.decoder.buffered >= head.size:
                assert stream.half is not None
                queue = stream.half.queue
                self._shared.admission.wait_no_more(queue, stream)  # type: ignore[arg-type]
                stream.head = None
                queue.charge(self._shared.admission.cost(head.size + head.overhead), 1)
                self.arrivals.admitted(stream, head)
                self.read(stream)

    @property
    def goes_on(self) -> bool:
        """Whether ``read_on`` is to be called once others had their turn."""
        return self._shared.work >= max(1, self._most >> 3)

    def read_on(self) -> None:
        """Others had their turn: what was put off is read. Raises RemoteProtocolError."""
        self._shared.work = 0
        while self._postponed and self._shared.work < self._most:
            stream, _ = self._postponed.popitem(last=False)
            stream.postponed = False
            self.incoming.unhold(stream)
            self.read(stream)

    def read_early(self) -> None:
        """What was held may be no replay any more. Raises RemoteProtocolError."""
        early, self.early = self.early, None
        if early is not None:
            self._postponed.update(early.streams)
            self.read_on()
            for data in self.arrivals.take_early():
                self.feed_datagram(data)

    def read(self, stream: ControlRecvStream, frame: Any = None) -> None:
        """Reads what has come on a stream. Raises RemoteProtocolError."""
        shared, decoder = self._shared, stream.decoder
        while not stream.ignoring and stream.head is None:
            if shared.work >= self._most:
                stream.postponed = True
                self._postponed[stream] = None
                self.incoming.hold(stream)
                return
            frame = decoder.next()
            if frame is None:
                break
            if not stream.begun:
                self._check_version(frame, "a stream")
                self.incoming.begin(stream, lasts=stream.number < BIDI)
            handler = self._handlers.get(type(frame))
            if handler is not None:
                handler(stream, frame)
            else:
                self._on_control(stream, frame)
        if stream.gave_up is not None:
            self._give_up(stream, stream.gave_up)
            return
        if stream.ignoring:
            if stream.fin:
                self._leave(stream)
            return
        self.incoming.weigh(stream)
        if decoder.paused:
            if not stream.begun:
                self._check_version(None, "a stream")
            self._paused[stream] = None
            self.incoming.hold(stream)
        elif stream.head is not None:
            self.incoming.hold(stream)
            self.incoming.credit(stream)
        elif stream.fin:
            self._ended(stream)
        else:
            self.incoming.credit(stream)

    def clear(self) -> None:
        """The connection is over."""
        self.incoming.clear()
        self.arrivals.take_early()
        self.stalls.clear()
        self._bidi.clear()
        self.early = None
        self._paused.clear()
        self._postponed.clear()

    # Streams

    def _decoder(self, carrier: str, channel: int = -1) -> codec.ControlFrameDecoder:
        limits = self._shared.config.limits
        decoder = codec.ControlFrameDecoder(
            from_server=self._shared.side == 0,
            carrier=carrier,
            channel=channel,
            frame_limit=limits.frame_bytes,
            header_limit=limits.header_bytes,
            attachment_limit=limits.attachments,
            block_limit=limits.block_bytes,
        )
        decoder.pause = not self.gate_open
        if carrier == "uni":
            decoder.auto_admit = -1
        return decoder

    def _decoder_of(self, number: int) -> codec.ControlFrameDecoder:
        if number < BIDI:
            return self._decoder("uni")
        if not is_mine(number):
            return self._decoder("opener")
        owner = self._bidi.owners.get(number)
        return self._decoder("answer", -1 if owner is None else owner.channel)

    def _opened(self, number: int) -> ControlRecvStream:
        stream = self.incoming.opened(number)
        if self.early is not None:
            self.early.opened(stream)
        if number >= BIDI and is_mine(number):
            stream.owner = self._bidi.owners.pop(number, None)
        return stream

    def _leave(self, stream: ControlRecvStream) -> None:
        self.incoming.leave(stream, lasted=stream.number < BIDI)
        self._bidi.answered(stream.number)

    def _ended(self, stream: ControlRecvStream) -> None:
        """All of it was read, and the peer sends no more on it."""
        stream.decoder.end()
        self._leave(stream)
        if self._prelude.is_stream(stream.number):
            raise SequenceError("the connection control stream was finished (AQ0-19)")
        self._end_answer(stream)
        half = stream.owner
        live = half is not None and self._registry.live(half.channel) is half
        if live and not stream.finished:
            what = "CloseReceiver" if isinstance(half, SenderHalf) else "FinishSender"
            raise SequenceError(
                f"the control stream of {ids.describe(half.channel)} was finished without {what} "
                "(AQ0-R4)"
            )

    def _give_up(self, stream: ControlRecvStream, code: int) -> None:
        self._postponed.pop(stream, None)
        self._paused.pop(stream, None)
        if self.early is not None:
            self.early.streams.pop(stream, None)
        self._leave(stream)
        if self._prelude.is_stream(stream.number):
            raise SequenceError("the connection control stream was reset (AQ0-19)")
        self._end_answer(stream)
        if stream.owner is not None:
            self._control_reset(stream.owner, code)
        if stream.number >= BIDI and is_mine(stream.number):
            self._bidi.heard(stream.number)

    def _end_answer(self, stream: ControlRecvStream) -> None:
        """A stream that ended before its ChannelControl takes no slot for ever (AQ0-R5)."""
        number = stream.number
        if number >= BIDI and not is_mine(number) and stream.owner is None and not stream.ignoring:
            self._bidi.reset(self._bidi.answer(number), RESET_LOST)

    def _abandon(self, stream: ControlRecvStream, half: ReceiverHalf) -> None:
        """The receiver of the message that arrives on a stream has ended."""
        waited = stream.head is not None
        landing = waited or stream.partial >= 0
        self.incoming.arrived(stream)
        if landing:
            stream.decoder.skip()
        if waited:
            stream.postponed = True  # the rest is read in a turn of its own
            self._postponed[stream] = None
            self._shared.work = max(self._shared.work, self._most)

    def _control_reset(self, half: SenderHalf | ReceiverHalf, code: int) -> None:
        alive = half.error is None
        if code == RESET_LOST:
            if self._registry.live(half.channel) is half:
                self.endings.forgotten(half)
            else:
                self.endings.drop_lost(self._registry.forget_early_end(half.channel))
        elif isinstance(half, SenderHalf):
            if self._registry.live(half.channel) is half:
                self.endings.receiver_closed(half)
        elif alive and half.state is ReceiverState.FINISHING:
            # FinishSender is the last frame, and a reset may still follow it (AQ0-14, AQ0-31).
            self.endings.close_receiver(half, Cancelled("the peer cancelled the channel"))
        elif alive:
            self.endings.cancel(half)

    # Frames

    def _check_version(self, frame: Any, what: str) -> None:
        """Until a server has answered, its client begins everything with Version (AQ0-20)."""
        if self._prelude.version_required and type(frame) is not Version:
            raise SequenceError(f"{what} began without Version (AQ0-20)")

    def _on_version(self, stream: ControlRecvStream, frame: Version) -> None:
        self._shared.work += 1

    def _on_connection_control(
        self, stream: ControlRecvStream, frame: codec.ConnectionControl
    ) -> None:
        self._prelude.received(stream.number, frame.headers)

    def _on_channel_control(self, stream: ControlRecvStream, frame: codec.ChannelControl) -> None:
        self._shared.work += 1
        answer = self._bidi.answer(stream.number)
        half = self._registry.attach(frame.channel, answer)
        if half is None:
            self._bidi.reset(answer, RESET_LOST)
            self._shared.effects.append((effects.STOP, stream.number, RESET_LOST))
            stream.ignoring = True
        else:
            stream.owner = half

    def _on_head(self, stream: ControlRecvStream, frame: MessageHead) -> None:
        half = self._registry.received(stream.decoder.channel)
        if half is None or half.error is not None:
            self._shared.work += 1
            stream.decoder.skip()
            return
        self.incoming.arriving(stream, half)
        self.arrivals.head(stream, frame)

    def _on_message(self, stream: ControlRecvStream, frame: MessageFrame) -> None:
        self.arrivals.message(stream, frame)
        self.incoming.arrived(stream)

    def _on_closed_lost(self, stream: ControlRecvStream, frame: codec.ClosedChannelLost) -> None:
        self._shared.work += 1
        half = self._registry.live(frame.channel)
        self._registry.closed_lost(frame.channel)
        if half is not None:
            self.endings.forgotten(half)
        else:
            self.endings.drop_lost(self._registry.forget_early_end(frame.channel))

    def _on_control(self, stream: ControlRecvStream, frame: Any) -> None:
        """A frame of a control stream. Those for a half that has ceased say nothing."""
        self._shared.work += 1
        half = stream.owner
        stream.finished = type(frame) in (FinishSender, codec.ControlClose)
        if self._registry.live(half.channel) is half:
            self._control_handlers[type(frame)](half, frame)

    def _on_sent_unreliable(self, half: ReceiverHalf, frame: SentUnreliable) -> None:
        half.announced(frame.count)

    def _on_finish(self, half: ReceiverHalf, frame: FinishSender) -> None:
        self.endings.finish(half, frame.sent_reliable)

    def _on_acks(self, half: SenderHalf, frame: codec.ControlAcks) -> None:
        start, stop = half.numbers.acked.first() or (0, 0)
        self._acked(half, frame.ranges, 0 if start else stop, once=True)

    def _on_ack_nacks(self, half: SenderHalf, frame: codec.ControlAckNacks) -> None:
        if frame.block:  # empty ranges have no effect (AQ0-R12)
            self.endings.ack_nacked(half, frame.block)

    def _on_close(self, half: SenderHalf, frame: codec.ControlClose) -> None:
        self._acked(half, frame.ranges, 0, once=False)
        self.endings.receiver_closed(half)

    def _acked(self, half: SenderHalf, ranges: tuple[int, ...], start: int, *, once: bool) -> None:
        """Ranges from ``start``: acked, not acked, acked ...; ``once``: none was acked before."""
        gap, pairs, total, at, sent = start, [], 0, start, half.numbers.next
        for place, size in enumerate(ranges):
            at += size
            if place % 2:
                gap += size
            elif size:
                if at > sent:  # at once: what was sent bounds the work
                    raise SequenceError(
                        f"an ack reaches {at} on {half.describe()}, but only {sent} messages were "
                        "sent (AQ-R16)"
                    )
                pairs += [gap, size]
                total += size
                gap = 0
        before = half.numbers.unacked
        self.endings.acked(half, codec.ControlAcks(tuple(pairs)).block)
        if once and before - half.numbers.unacked != total:
            raise SequenceError(
                f"AckReliable repeats numbers that were acked before on {half.describe()} (AQ0-26)"
            )


def _no_inlet(number: int) -> None:
    return None
