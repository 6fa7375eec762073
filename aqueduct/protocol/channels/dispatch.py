"""Reading the peer's sequences: what each frame of a channel does to its half (sections 2 and 3).

The reader owns the streams of the peer and everything that follows from their frames: admission,
the ends of halves, and what is lost or dropped with them. Violations raise RemoteProtocolError;
the connection turns them into a close.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels.receiver import Received, ReceiveQueue
from aqueduct._speedups.channels.recv_streams import (
    HALF_ENDED,
    POSTPONED,
    RecvStream,
    RecvStreams,
)
from aqueduct.errors import Busy, RemoteProtocolError, SequenceError
from aqueduct.protocol.channels.context import ConnectionContext
from aqueduct.protocol.channels.events import Writable
from aqueduct.protocol.channels.receiver import ReceiverHalf
from aqueduct.protocol.channels.registry import Half, Registry
from aqueduct.protocol.channels.sender import Mode, SenderHalf
from aqueduct.protocol.channels.state import ReceiverState, SenderState

__all__ = ["FrameDispatcher", "Handlers"]

Handlers: TypeAlias = Mapping[int, Callable[[RecvStream, Any], None]]
"""What frames do, by their tags."""

SWEEP: Final = 1.0
"""Seconds, at most, between two looks for batches that come too slowly."""


class FrameDispatcher:
    """The streams of the peer, and what their frames mean."""

    def __init__(
        self,
        shared: ConnectionContext,
        registry: Registry,
        fail: Callable[[RemoteProtocolError], None],
        prelude: Handlers,
    ) -> None:
        self._shared = shared
        self._registry = registry
        self._fail = fail
        self.config = shared.config
        self._admission = shared.admission
        self.incoming = RecvStreams(shared, open=ReceiverState.OPEN, ended=SenderState.ENDED)
        self.gate_open = False
        """Whether the peer's connection headers are in and accepted (AQ-R10)."""
        self._early: list[bytes] = []
        """Datagrams whose ROUTE_TO waits for the gate."""
        self._slow: dict[RecvStream, tuple[int, float]] = {}
        """For each slow stream: the bytes it had reached, and its seconds since then."""
        self._swept = 0.0
        self._sweep_due: float | None = None
        self._idle_at = -1
        """The bytes in use when a sweep found nothing under way; -1: none has."""
        self._sweep_interval = min(SWEEP, shared.config.timing.stall_deadline / 4)
        """Seconds from one sweep to the next."""
        self._idle_places: dict[ReceiveQueue, float] = {}
        """For each batch above a budget: its seconds since it was whole, while it is in use."""
        self._ample = shared.config.flow.channel_high_water >> 1
        # Many go one by one from the front, which a dict would look for from its beginning.
        self._postponed: OrderedDict[RecvStream, None] = OrderedDict()
        """Streams that go on in the next turn: enough was worked on in this one."""
        self._paused: dict[RecvStream, None] = {}
        """Streams whose ROUTE_TO waits for the gate."""
        self._handlers: Handlers = {
            **prelude,
            codec.AckVersion.TAG: self._on_ack_version,
            codec.MessageFrame.TAG: self._on_message,
            codec.MessageHead.TAG: self._on_head,
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
            stream.decoder.pause_at_route = not self.gate_open
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
        decoder.pause_at_route = not self.gate_open
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
                self._on_datagram_message(half, frame)
            else:
                self._handlers[frame.TAG](self.incoming.outside(self._handlers), frame)
        if decoder.paused:
            if first and not self.incoming.version_checked:
                raise SequenceError("a datagram began without VERSION (AQ-28, AQ-R6)")
            self._keep_early(data)
            return
        decoder.end()

    def _keep_early(self, data: bytes) -> None:
        """Datagrams that wait for the connection headers: a few, the others drop (AQ-R10)."""
        limits = self.config.limits
        size = sum(map(len, self._early))
        if (
            len(self._early) < limits.early_datagrams
            and size + len(data) <= limits.early_datagram_bytes
        ):
            self._early.append(data)

    def reset(self, number: int) -> None:
        """The peer gave up a stream: a partial frame is dropped without error (AQ-11)."""
        stream = self.incoming.streams.pop(number, None)
        if stream is not None:
            self._postponed.pop(stream, None)
            self.incoming.leave(stream)

    def open_gate(self) -> None:
        """ROUTE_TO and what is behind it may be read from now on."""
        self.gate_open = True
        paused, self._paused = self._paused, {}
        for stream in self.incoming.streams.values():
            stream.decoder.pause_at_route = False
        for stream in paused:
            if stream.number in self.incoming.streams:
                self.incoming.unhold(stream)
                try:
                    self.read(stream)
                except RemoteProtocolError as error:
                    self._fail(error)
        early, self._early = self._early, []
        for data in early:
            try:
                self.feed_datagram(data)
            except RemoteProtocolError as error:
                self._fail(error)
                return

    def drain(self) -> None:
        """The connection is over: messages that are here whole need no room any more."""
        self.incoming.most = 1 << 62  # no other turn comes
        self.read_on()
        for stream in tuple(self.incoming.streams.values()):
            while (head := stream.head) is not None and stream.decoder.buffered >= head.size:
                self._admission.wait_no_more(stream.queue, stream)
                stream.head = None
                stream.queue.charge(self._admission.cost(head.size + head.overhead), 1)
                self._admitted(stream, head)
                self.read(stream)

    def clear(self) -> None:
        """The connection is over."""
        self.incoming.clear()
        self._paused.clear()
        self._postponed.clear()
        self._early.clear()
        self._slow.clear()
        self._idle_places.clear()

    def close_receiver(self, half: ReceiverHalf, error: Any = None) -> None:
        """The application reads no more of this channel (AQ-43)."""
        self._drop(self._close(half, error))

    def release(self, half: Half) -> None:
        """A half without a user: its receiver is closed, its sender cancelled (AQ-R26)."""
        self._drop(self._release(half))

    # Reading a sequence

    @property
    def goes_on(self) -> bool:
        """Whether ``read_on`` is to be called once others had their turn."""
        return self._shared.work >= max(1, self.incoming.most >> 3)

    def read_on(self) -> None:
        """Others had their turn: streams that were postponed are read. Raises as ``read``."""
        self._shared.work = 0
        while self._postponed and self._shared.work < self.incoming.most:
            stream, _ = self._postponed.popitem(last=False)
            stream.postponed = False
            self.incoming.unhold(stream)
            self.read(stream)

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

    def _abandon_streams(self, half: Half) -> None:
        if isinstance(half, ReceiverHalf):
            for stream in tuple(half.streams):
                self._abandon(stream, half)

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

    def _on_head(self, stream: RecvStream, frame: codec.MessageHead) -> None:
        half: ReceiverHalf = stream.half
        half.check_number(frame.num)
        if half.queue.waiting or not self._admission.admit_head(half.queue, frame):
            self._admission.wait(half.queue, stream, frame)
        else:
            self._admitted(stream, frame)

    def _admitted(self, stream: RecvStream, head: codec.MessageHead) -> None:
        """Its payload may land: where the application wants it, or in fresh memory."""
        half = stream.half
        stream.partial = head.size + head.overhead
        try:
            target = half.queue.place(head)
            if stream.ignoring:  # the hook closed its own receiver
                return
            stream.decoder.admit(target)
        except Exception as error:  # noqa: BLE001 - the hook's error, or that of its buffer, ends the channel
            self.close_receiver(half, error)
            return
        self.incoming.grant_read_ahead(stream, head.size)

    def _on_message(self, stream: RecvStream, frame: codec.MessageFrame) -> None:
        half: ReceiverHalf = stream.half
        size = frame.size + frame.overhead
        charge = self._admission.cost(size)
        if stream.partial < 0:
            half.check_number(frame.num)
            half.queue.charge(charge, 1)
        else:
            if stream.partial != size:
                half.queue.charge(size - stream.partial)
            half.check_number(frame.num)  # two streams may have declared one number (AQ-R13)
        stream.partial = -1
        attachments = frame.attached and self._registry.attached(frame.attached)
        half.message(Received.of(frame, attachments or (), charge))
        if half.error is not None:
            self.half_ended(half)

    def _on_datagram_message(self, half: ReceiverHalf, frame: codec.MessageFrame) -> None:
        size = frame.size + frame.overhead
        evicted: list[Received] = []
        wanted = half.wants_datagram(frame.num, size, evicted)
        if evicted:
            self._shared.datagrams_evicted += len(evicted)
            self._drop(evicted)
        if not wanted:
            return
        attachments = frame.attached and self._registry.attached(frame.attached)
        half.datagram(
            Received.of(frame, attachments or (), self._admission.cost(size), reliable=False)
        )
        if half.error is not None:
            self.half_ended(half)

    def half_ended(self, half: ReceiverHalf) -> None:
        """A receiver closed by itself: it leaves the tables, its sequences are ignored."""
        self._registry.receiver_closed(half)
        self._abandon_streams(half)

    def _on_finish(self, stream: RecvStream, frame: codec.FinishSender) -> None:
        half: ReceiverHalf = stream.half
        stream.handlers = self._handlers_after_finish
        half.finish(frame.sent_reliable)
        if half.error is not None:
            self.half_ended(half)

    def _on_cancel(self, stream: RecvStream, frame: codec.CancelSender) -> None:
        half: ReceiverHalf = stream.half
        # What is dropped first, or its channels would look lost to the peer (AQ-R20, AQ-R26).
        self._drop(half.cancel())
        half.cancelled()
        self.half_ended(half)

    def _on_sent_unreliable(self, stream: RecvStream, frame: codec.SentUnreliable) -> None:
        half: ReceiverHalf = stream.half
        half.announced(frame.count)

    def _on_ack_reliable(self, stream: RecvStream, frame: codec.AckReliable) -> None:
        half: SenderHalf = stream.half
        self._registry.reached(half.acked(frame.block))
        if self._shared.blocked:
            self.unblock([half])

    def _on_ack_nack_unreliable(self, stream: RecvStream, frame: codec.AckNackUnreliable) -> None:
        half: SenderHalf = stream.half
        if frame.channel != half.channel:
            raise SequenceError("ACK_NACK_UNRELIABLE names another channel than ROUTE_TO (AQ-R14)")
        reached, lost = half.ack_nacked(frame.block)
        self._registry.reached(reached)
        self._lose(lost)
        if self._shared.blocked:
            self.unblock([half])

    def _on_close_receiver(self, stream: RecvStream, frame: codec.CloseReceiver) -> None:
        half: SenderHalf = stream.half
        lost = half.receiver_closed()
        self._registry.sender_closed(half)
        self._shared.blocked.pop(half, None)
        self._lose(lost)
        self.incoming.ignore(stream)

    def _on_forget(self, stream: RecvStream, frame: codec.ForgetChannel) -> None:
        # The last frame that matters in its sequence (AQ-R23).
        half, channel = stream.half, stream.decoder.route
        self.incoming.ignore(stream)
        if half is None:
            # The message that carries the channel will not come (AQ-R26).
            self._drop(self._registry.forget_early_end(channel))
            return
        links, dropped = self._registry.lose(half, tell_peer=False)
        self._abandon_streams(half)
        if isinstance(half, SenderHalf):
            self._shared.blocked.pop(half, None)
        self._drop(dropped)
        self._lose(links)

    def _after_finish(self, stream: RecvStream, frame: Any) -> None:
        what = codec.FRAME_NAMES.get(frame.TAG, "MESSAGE")
        raise SequenceError(f"{what} after FINISH_SENDER in one sequence (AQ-R18)")

    def _on_late_frame(self, stream: RecvStream, frame: Any) -> None:
        """For a channel that ended before its message came: only FORGET_CHANNEL matters."""
        self.incoming.ignore(stream)

    # Loss in transit (AQ-R27) and what is dropped with it

    def _lose(self, channels: list[int]) -> None:
        """Works the cascade with an explicit list (AQ-R27.8)."""
        while channels:
            channel = channels.pop()
            half = self._registry.known(channel)
            if half is None:
                self._registry.forget(channel)  # its own half ended before (AQ-R27.6)
                continue
            links, dropped = self._registry.lose(half, tell_peer=True)
            self._abandon_streams(half)
            if isinstance(half, SenderHalf):
                self._shared.blocked.pop(half, None)
            self._drop(dropped)
            channels.extend(links)

    def _drop(self, dropped: Sequence[Received]) -> None:
        """Undelivered messages: their attachments are closed or cancelled (AQ-R26)."""
        work = list(dropped)
        while work:
            for half, _ in work.pop().attachments:
                work.extend(self._release(half))

    def _release(self, half: Half) -> list[Received]:
        if isinstance(half, SenderHalf):
            if half.error is None and half.state.name == "OPEN":
                half.cancel()
            return []
        return self._close(half)

    def _close(self, half: ReceiverHalf, error: Any = None) -> list[Received]:
        alive = half.error is None
        dropped = half.close(error)
        if alive:
            self.half_ended(half)
        return dropped

    # Room that came back

    def resume(self) -> None:
        """Reads on where messages waited for room. Raises RemoteProtocolError.

        Channels with room of their own again come first, then the others in the order in which
        they began to wait for the budget; above it, the first of those whose reader waits.
        """
        shared = self._shared
        while shared.relieved or (shared.freed and shared.starved):
            if shared.relieved:
                self._resume_one(shared.relieved.popitem()[0])
                continue
            shared.freed = False
            while shared.starved:
                queue = next(iter(shared.starved))
                self._resume_one(queue)
                if queue in shared.starved:
                    break
            if shared.place is None:
                awaited = next(
                    (queue for queue in shared.starved if self._admission.is_awaited(queue)), None
                )
                if awaited is not None:
                    self._resume_one(awaited)
        shared.freed = False
        if not shared.starved:
            shared.process.waiting.pop(shared, None)

    def _resume_one(self, queue: ReceiveQueue) -> None:
        while queue.waiting:
            stream = next(iter(queue.waiting))
            head = stream.head
            assert head is not None
            if not self._admission.admit_head(queue, head):
                break
            self._admission.wait_no_more(queue, stream)
            stream.head = None
            self._admitted(stream, head)
            self.read(stream)
        self._admission.queue_up(queue)

    # Batches that come too slowly

    def sweep_deadline(self) -> float | None:
        """When ``sweep`` is due; None: nobody waits for room of batches that come here."""
        shared = self._shared
        if not (shared.starved or shared.process.waiting):
            self._sweep_due, self._idle_at = None, -1
        elif self._sweep_due is None and shared.budget_used != self._idle_at:
            self._swept = shared.now
            self._slow.clear()
            self._idle_places.clear()
            self._sweep_due = shared.now + self._sweep_interval
        return self._sweep_due

    def sweep(self, now: float) -> None:
        """Fails batches that came too slowly for too long while others wait for their room."""
        flow = self.config.flow
        rate, limit = flow.stall_rate, self.config.timing.stall_deadline
        # A blocked loop did not read meanwhile, so that time does not count against a batch.
        passed = min(now - self._swept, 2 * self._sweep_interval)
        self._swept = now
        self._sweep_due = now + self._sweep_interval
        slow, self._slow = self._slow, {}
        for stream in tuple(self.incoming.streams.values()):
            half = stream.half
            if not isinstance(half, ReceiverHalf) or half.error is not None:
                continue
            queue = half.queue
            if stream.head is not None or not (stream.partial >= 0 or queue.pledged or queue.owed):
                continue  # it waits itself, or nothing is missing
            come = stream.decoder.consumed
            since, waited = slow.get(stream, (come, 0.0))
            waited += passed
            if come - since >= rate * limit:
                since, waited = come, 0.0
            if waited >= limit and self._blocks_others(half):
                self._fail_stalled(half, come - since, waited)
            else:
                self._slow[stream] = since, waited
        idle, self._idle_places = self._idle_places, {}
        for place in (self._shared.place, self._shared.process.place):
            if isinstance(place, ReceiveQueue) and place.budget is self._shared:
                self._pass_on(place, idle.get(place, 0.0) + passed)
        if not (self._slow or self._idle_places):
            self._sweep_due, self._idle_at = None, self._shared.budget_used  # until that changes

    def _pass_on(self, place: ReceiveQueue, idle: float) -> None:
        """A whole batch that is in use for too long loses its place above the budget.

        Its handler may itself wait for one of those that wait for the place.
        """
        if place.growing:
            idle = 0.0
        if idle >= self.config.timing.stall_deadline:
            place.leave_place()
        else:
            self._idle_places[place] = idle

    def _blocks_others(self, half: ReceiverHalf) -> bool:
        shared = self._shared
        here = len(shared.starved) - (half.queue in shared.starved)
        others = len(shared.process.waiting) - (shared in shared.process.waiting)
        return here > 0 or others > 0

    def _fail_stalled(self, half: ReceiverHalf, gained: int, waited: float) -> None:
        flow, timing = self.config.flow, self.config.timing
        shared = self._shared
        if shared.starved:
            budget = f"the connection's budget of {flow.receive_budget} bytes (Flow.receive_budget)"
        else:
            budget = (
                f"the process's budget of {shared.process_budget} bytes "
                "(Flow.process_receive_budget)"
            )
        self.close_receiver(
            half,
            Busy(
                f"a batch gained {gained} bytes in {waited:.1f} s while others wait for room in "
                f"{budget}; at least {flow.stall_rate} bytes a second are wanted for "
                f"{timing.stall_deadline:g} s (Flow.stall_rate, Timing.stall_deadline)"
            ),
        )

    def block(self, half: SenderHalf, mode: Mode, ample: bool) -> bool:
        """Whether ``half`` has to wait for room; then ``unblock`` tells it.

        Who sends without end waits for ``ample`` room: woken for each little of it, it would be
        woken for each message.
        """
        blocked = self._shared.blocked
        before = blocked.get(half)
        ample = ample and (before is None or before[1])
        if half.error is not None or half.has_room(mode):
            return False
        blocked[half] = mode, ample
        return True

    def unblock(self, halves: Sequence[SenderHalf | None]) -> None:
        """Tells those of ``halves`` that wait for room and now have it."""
        blocked = self._shared.blocked
        for half in halves:
            if half is None or half not in blocked:
                continue
            mode, ample = blocked[half]
            # Ample: so far below its own mark that several messages have room.
            if half.has_room(mode) and (not ample or half.queued <= self._ample):
                del blocked[half]
                self._shared.events.append(Writable(half))
