"""The core of a connection: frames in, frames out, no clock, no sockets.

Order of calls: feed what arrived (``start``, ``receive_*``, ``openable_changed``, ``written``,
``handle_deadline``) or give a command (``send``, ``finish``, ``close_receiver`` ...); then drain
``events_received`` and ``effects_to_apply``, and set a timer for ``next_deadline``. Every input
takes ``now`` in seconds of any monotonic clock. A violation by the peer never raises from a
``receive_*``: the core closes, an effect carries the code of AQ-R30 and an event the error.

What is the same in both dialects stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from traceback import clear_frames
from typing import Any, Final, Protocol

from aqueduct._speedups.channels.receiver import DirectRead, ReceiveBudget
from aqueduct.errors import (
    ConnectionLost,
    HeadersRejected,
    InternalError,
    LimitExceeded,
    LocalProtocolError,
    RemoteProtocolError,
)
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.arrivals import Arrivals
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.endings import Endings
from aqueduct.protocol.common.events import Closed, Event, Headers, Writable
from aqueduct.protocol.common.receiver import Received, ReceiverHalf
from aqueduct.protocol.common.registry import Attach, Half, Registry
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.common.snapshot import CoreView, core_view
from aqueduct.protocol.common.stalls import StallWatch

__all__ = ["ConnectionCore", "Dispatcher", "Prelude"]

REASON_LIMIT: Final = 256


class Dispatcher(Protocol):
    """Reads the streams of the peer, in one dialect."""

    incoming: Any
    """The streams of the peer: ``streams`` by number, ``held`` of them, and slots to be given."""
    inlet: Callable[[int], DirectRead | None]
    """See ConnectionCore."""
    arrivals: Arrivals
    endings: Endings
    stalls: StallWatch
    gate_open: bool
    """Whether the peer's connection headers are in and accepted."""

    def feed(self, number: int, data: Any, fin: bool) -> None:
        """The next bytes of a stream. Raises RemoteProtocolError."""

    def feed_datagram(self, data: bytes) -> None:
        """One datagram. Raises RemoteProtocolError."""

    def reset(self, number: int, code: int) -> None:
        """The peer gave up a stream: a partial frame is dropped. Raises RemoteProtocolError."""

    def open_gate(self) -> None:
        """The peer's connection headers are in and accepted: what waits for them is read.

        Raises RemoteProtocolError.
        """

    def drain(self) -> None:
        """The connection is over: messages that are here whole need no room any more."""

    @property
    def goes_on(self) -> bool:
        """Whether ``read_on`` is to be called once others had their turn."""

    def read_on(self) -> None:
        """Others had their turn: what was put off is read. Raises RemoteProtocolError."""

    def read(self, stream: Any, frame: Any = None) -> None:
        """Reads what has come on a stream. Raises RemoteProtocolError."""

    def linger(self) -> None:
        """A close waits for what is to leave: only what this needs is read."""

    def feed_late(self, number: int, data: Any, fin: bool) -> None:
        """The next bytes of a stream after ``linger``."""

    def clear(self) -> None:
        """The connection is over."""


class Prelude(Protocol):
    """What a side says before its channels, in one dialect."""

    owes: bool
    """Whether something is to be said with what leaves next, whatever that is."""
    peer_headers: Headers | None
    """The peer's connection headers, once they are in."""

    def send(self, headers: Headers) -> None:
        """The connection headers of this side go out."""

    def send_owed(self) -> None:
        """What ``owes`` stands for goes out."""


class ConnectionCore:
    """One side of one connection, whatever its dialect: that is in its parts."""

    def __init__(
        self,
        shared: ConnectionContext,
        headers: Headers,
        registry: Registry,
        prelude: Prelude,
        reader: Dispatcher,
    ) -> None:
        """``headers``: of a client, which says them at the start."""
        self.is_client = shared.side == 0
        self.config = shared.config
        self.error: ConnectionLost | None = None
        """Why the connection is over, once it is."""
        self._headers = headers
        self._headers_sent = False
        self._shared = shared
        self.budget: ReceiveBudget = shared
        """What its receivers hold, and which of them wait for room."""
        self._registry = registry
        self._prelude = prelude
        self._reader = reader
        self._closing: tuple[int, str] | None = None
        """Code and reason of a close that waits for what waits above the transport."""
        self.close_by = 0.0
        """Until when a close lets queued data out; set by ``close``."""
        # For a driver that asks after each input whether there is anything to do.
        self.events = shared.events
        """What ``events_received`` gives next: always the same list."""
        self.effects = shared.effects
        """What ``effects_to_apply`` gives next: always the same list."""
        self.outgoing = shared.outgoing
        self.incoming = reader.incoming
        """The streams of the peer."""
        self.inlet: Callable[[int], DirectRead | None] = reader.inlet
        """Where the next bytes of a stream go, until ``inlet_done`` and before anything else; None:
        they go to ``receive_stream``."""

    # Getters

    @property
    def entrypoint(self) -> Half:
        """The client's one sender, the server's one receiver at the start (AQ-25)."""
        return self._registry.entrypoint

    @property
    def peer_headers(self) -> Headers | None:
        """The peer's connection headers, once they are in."""
        return self._prelude.peer_headers

    @property
    def ready(self) -> bool:
        """Whether the peer's connection headers are in (and, on a server, were accepted)."""
        return self._reader.gate_open

    @property
    def channels(self) -> int:
        """Channels with state."""
        return len(self._registry)

    @property
    def held_streams(self) -> int:
        """Streams of the peer that ended while their bytes still wait here.

        For admission, or for the connection headers. Their slots are not to be given again yet.
        """
        held: int = self.incoming.held
        return held

    def pending_channels(self) -> set[int]:
        """Channels created here whose message is neither acked nor nacked for good (AQ-R27.1)."""
        return self._registry.pending()

    def snapshot(self) -> dict[str, int]:
        """Counts for people: channels, streams, queues and budget in bytes."""
        return {
            "channels": len(self._registry),
            "streams_in": len(self.incoming.streams),
            "streams_out": self._shared.outgoing.open,
            "streams_waiting": self._shared.outgoing.waiting,
            "queued_bytes": self._shared.outgoing.queued,
            "budget_used_bytes": self._shared.budget_used,
            "starved_receivers": len(self._shared.starved),
        }

    def view(self, channels: int) -> CoreView:
        """The state of the connection for people, with at most that many of its channels."""
        return core_view(self._shared, self._registry, self.incoming, channels)

    # Inputs from the carrier

    def start(self, now: float, datagram_limit: int = 0, early: bool = False) -> None:
        """The transport is up: the client says its headers at once.

        ``datagram_limit``: the largest datagram in bytes, 0 if there are none. ``early``: see
        Carrier; only the control-stream draft has early data.
        """
        if self.error is not None:
            return
        self._shared.now = now
        self._shared.datagram_limit = datagram_limit
        self._shared.outgoing.connected = True
        if self.is_client:
            self._headers_sent = True
            self._prelude.send(self._headers)

    def early_decided(self, accepted: bool, now: float) -> None:
        """The transport's handshake is complete, or a replay is ruled out; see the contract."""

    def openable_changed(self, count: int, now: float) -> None:
        """The carrier can open ``count`` more streams."""
        self._shared.now = now
        if self.error is None or self._closing is not None:
            self._shared.outgoing.openable_changed(count)
            self._close_if_drained()

    def datagram_room_changed(self, count: int, now: float, limit: int | None = None) -> None:
        """The carrier takes ``count`` datagrams now, those in waiting effects included.

        ``limit``: the largest one in bytes, where that may have changed.
        """
        shared = self._shared
        shared.now = now
        if limit is not None:
            shared.datagram_limit = limit
        was, shared.datagram_room = shared.datagram_room, count - shared.datagrams_told
        if was <= 0 < shared.datagram_room and shared.blocked and self.error is None:
            self._reader.endings.unblock(list(shared.blocked))

    def written(self, stream: int, size: int) -> bool:
        """Bytes of a stream of ours left the carrier. Returns ``waits``."""
        try:
            half = self._shared.outgoing.written(stream, size)
        except LocalProtocolError as error:  # in debug: a buffer changed
            self.fail_internal(error)
            return True
        if half is not None and half in self._shared.blocked:
            self._reader.endings.unblock((half,))
        if self._closing is not None:
            self._close_if_drained()
        return bool(self.events or self.effects or self.outgoing.fell)  # ``waits``

    def receive_stream(self, number: int, data: Any, fin: bool, now: float) -> None:
        """The next bytes of one of the peer's streams."""
        if self.error is not None:
            if self._closing is not None:
                self._shared.now = now
                self._reader.feed_late(number, data, fin)
                self._close_if_drained()
            return
        self._shared.now = now
        try:
            self._reader.feed(number, data, fin)
        except RemoteProtocolError as error:
            self._fail(error)
        if self._shared.starved or self._shared.relieved:
            self.use_room(self._shared.now)

    def inlet_done(self, number: int, now: float) -> None:
        """The inlet of the stream has what there is; it is closed."""
        if self.error is not None:
            return
        self._shared.now = now
        try:
            if (behind := self.incoming.inlet_done(number)) is not None:
                self._reader.read(*behind)
        except RemoteProtocolError as error:
            self._fail(error)
        if self._shared.starved or self._shared.relieved:
            self.use_room(self._shared.now)

    def receive_reset(self, number: int, code: int, now: float) -> None:
        """The peer gave up a stream: a partial frame is dropped without error (AQ-11)."""
        self._shared.now = now
        if self.error is None:
            try:
                self._reader.reset(number, code)
            except RemoteProtocolError as error:
                self._fail(error)
            self.use_room(self._shared.now)

    def receive_stop(self, number: int, code: int, now: float) -> None:
        """The peer reads no more of a stream of ours. What matters comes as a close.

        If it does not, within Timing.progress_deadline, the channel ends: its user would wait for
        ever.
        """
        self._shared.now = now
        if self.error is None or self._closing is not None:
            half = self._shared.outgoing.stopped(number)
            if half is not None:
                if half.error is None:
                    due = now + self.config.timing.progress_deadline
                    self._shared.stopped_due.append((due, half))
                if self._shared.blocked:
                    self._reader.endings.unblock([half])
            self._close_if_drained()

    def receive_datagram(self, data: bytes, now: float) -> None:
        """One datagram."""
        if self.error is not None:
            return
        self._shared.now = now
        try:
            self._reader.feed_datagram(data)
        except RemoteProtocolError as error:
            self._fail(error)
        self.use_room(self._shared.now)

    def connection_lost(self, error: ConnectionLost) -> None:
        """The transport is gone. Every handle reads ``error`` (AQ-R27.9).

        Not so a receiver whose messages and whose finish were all here already.
        """
        self._closing = None
        if self.error is None:
            try:
                self._reader.drain()
            except RemoteProtocolError as violation:
                error.__cause__ = violation
        self._end(error)
        self._reader.clear()
        self._shared.outgoing.clear()
        self._shared.effects.clear()

    @property
    def goes_on(self) -> bool:
        """Whether there is more to do once others had their turn (Flow.wake_up)."""
        if self.error is not None and self._closing is None:
            return False
        return self._reader.goes_on or self._shared.outgoing.goes_on

    def next_deadline(self) -> float | None:
        """When ``handle_deadline`` has something to do, or None.

        It is the time of the last input if there is more to do once others had their turn.
        """
        shared = self._shared
        if self.goes_on:
            return shared.now
        if self.error is not None:
            return self.close_by if self._closing is not None else None
        while shared.ack_due and shared.ack_due[0][1].error is not None:
            shared.ack_due.popleft()  # it has ended, and its close has acknowledged all
        deadline = self._registry.kept_until()
        while shared.stopped_due and shared.stopped_due[0][1].error is not None:
            shared.stopped_due.popleft()
        for queue in (
            shared.ack_due,
            shared.close_due,
            shared.announce_due,
            shared.receipt_due,
            shared.stopped_due,
        ):
            if queue and (deadline is None or queue[0][0] < deadline):
                deadline = queue[0][0]
        due = self._reader.stalls.deadline()
        if due is not None and (deadline is None or due < deadline):
            deadline = due
        return deadline

    def rtt_measured(self, rtt: float) -> None:
        """The carrier's smoothed round trip, seconds: datagrams are waited for by it (AQ-37)."""
        self._shared.rtt = rtt
        self._registry.rtt_measured(rtt)

    def handle_deadline(self, now: float) -> None:
        """Sends the acks, announcements and ends that are due."""
        shared = self._shared
        shared.now = now
        if self.error is not None:
            if self._closing is not None and now >= self.close_by:
                self._close_now(*self._closing)
            elif self._closing is not None:
                shared.outgoing.open_on()
                with suppress(RemoteProtocolError):  # too late to be told
                    self._reader.read_on()
                self._close_if_drained()
            return
        try:
            self._reader.read_on()
        except RemoteProtocolError as error:
            self._fail(error)
            return
        shared.outgoing.open_on()
        if shared.close_due and shared.close_due[0][0] <= now:
            self._registry.write_closes()
        while shared.ack_due and shared.ack_due[0][0] <= now:
            shared.ack_due.popleft()[1].ack_due()
        while shared.announce_due and shared.announce_due[0][0] <= now:
            shared.announce_due.popleft()[1].announce()
        while shared.receipt_due and shared.receipt_due[0][0] <= now:
            _, half, upto = shared.receipt_due.popleft()
            alive = half.error is None
            half.receipt_due(upto)
            if alive and half.error is not None:
                self._reader.endings.half_ended(half)
        while shared.stopped_due and shared.stopped_due[0][0] <= now:
            shared.stopped_due.popleft()[1].stop_due()
        due = self._reader.stalls.deadline()
        if due is not None and due <= now:
            self._reader.stalls.sweep(now)
        self._registry.work_due(now)
        self.use_room(self._shared.now)

    # Commands of the application

    def accept_headers(self, headers: Headers, now: float) -> None:
        """A server answers the client's headers with its own and opens the gate (AQ-R10)."""
        if self.error is not None:
            return  # the connection ended before the answer
        self._shared.now = now
        if self.is_client or self.peer_headers is None or self._headers_sent:
            raise LocalProtocolError("only a server answers, once, after the client's headers")
        self._headers_sent = True
        self._prelude.send(headers)
        try:
            self._reader.open_gate()
        except RemoteProtocolError as error:
            self._fail(error)
        self.use_room(self._shared.now)

    def reject_headers(self, reason: str) -> None:
        """A server refuses the client (close code 4)."""
        self._fail(HeadersRejected(reason or "the service refused the connection headers"))

    def check_attach(self, count: int) -> None:
        """Raises LocalProtocolError when ``count`` more channels cannot be created here."""
        limits = self.config.limits
        if count > limits.attachments:
            raise LocalProtocolError(
                f"{count} attachments in one message; Limits.attachments is {limits.attachments}"
            )
        if len(self._registry) + count > limits.channels:
            raise LocalProtocolError(
                f"{len(self._registry)} channels are open; Limits.channels is {limits.channels}"
            )

    def send(
        self,
        half: SenderHalf,
        payload: Any,
        now: float,
        *,
        headers: Headers = (),
        attachments: Sequence[Attach] = (),
        mode: Mode = Mode.ORDERED,
    ) -> int:
        """Queues a message whatever is queued already (see ``SenderHalf.writable``).

        Each attachment's ``half`` is what stays here. Returns the message's number. Raises how
        the channel ended, or LocalProtocolError.
        """
        self._shared.now = now
        half.check_sendable()
        if not attachments:
            return half.send(payload, headers, (), mode)
        self.check_attach(len(attachments))
        channels: list[tuple[int, Headers]] = []
        with_headers = False
        for attach in attachments:
            with_headers = with_headers or bool(attach.headers)
            half_here = attach.half = self._registry.create(
                keep_sender=attach.keep_sender, is_oneshot=attach.is_oneshot
            )
            channels.append((half_here.channel, attach.headers))
        try:
            if with_headers:
                self._registry.check_headers(attachments)
            return half.send(payload, headers, channels, mode)
        except BaseException:
            for attach in attachments:
                self._registry.discard(attach.half)
            raise

    def finish(self, half: SenderHalf, now: float) -> None:
        """No more messages on this channel."""
        self._shared.now = now
        half.finish()

    def cancel(self, half: SenderHalf, now: float) -> None:
        """Abandons the channel: what is under way may be lost."""
        self._shared.now = now
        half.cancel()

    def receive(self, half: ReceiverHalf, now: float) -> Received | None:
        """Takes the next message; its budget returns and held streams go on."""
        self._shared.now = now
        received = half.queue.take()
        if received is not None:
            if received.attachments:
                for attached, _ in received.attachments:
                    if isinstance(attached, ReceiverHalf):
                        attached.queue.assure()
            if self._shared.starved or self._shared.relieved:
                self.use_room(self._shared.now)
        return received

    def use_room(self, now: float) -> None:
        """What fell of the budget goes to messages that wait for it: held streams go on."""
        shared = self._shared
        shared.now = now
        if (shared.starved or shared.relieved) and self.error is None:
            try:
                self._reader.arrivals.resume()
            except RemoteProtocolError as error:
                self._fail(error)

    def close_receiver(self, half: ReceiverHalf, now: float, error: Any = None) -> None:
        """The application reads no more of this channel (AQ-43)."""
        self._shared.now = now
        self._reader.endings.close_receiver(half, error)
        self.use_room(self._shared.now)

    def drop_attachment(self, half: Half, now: float) -> None:
        """An attachment that the application never took (AQ-R26)."""
        self._shared.now = now
        self._reader.endings.release(half)
        self.use_room(self._shared.now)

    def wait_writable(
        self, half: SenderHalf, mode: Mode = Mode.ORDERED, ample: bool = False
    ) -> None:
        """Asks for a Writable event once ``half`` has (``ample``) room for the mode, or ended."""
        if self.error is not None or not self._reader.endings.block(half, mode, ample):
            self._shared.events.append(Writable(half))

    def close(self, code: int = 0, reason: str = "", now: float | None = None) -> None:
        """The application closes the connection (AQ-R32): every handle reads it at once.

        With code 0, what was sent before goes out first, for at most Timing.close_linger: here
        what waits above the transport, or for the peer to open a control stream; in the carrier the
        rest (see ``close_by``).
        """
        if self.error is not None:
            return
        if now is not None:
            self._shared.now = now
        self._registry.write_closes()
        self.close_by = self._shared.now + self.config.timing.close_linger
        error = ConnectionLost("the connection was closed here", code=code, reason=reason)
        if code == 0 and self._shared.outgoing.connected and self._registry.unsaid:
            self._closing = (code, reason)
            self._end(error)
            return
        self._end(error)
        self._close_now(code, reason)

    # Outputs

    @property
    def waits(self) -> bool:
        """Whether there are events or effects to be drained."""
        return bool(self.events or self.effects or self.outgoing.fell)

    def events_received(self) -> list[Event]:
        """What happened since the last call."""
        shared = self._shared
        if shared.outgoing.fell:
            shared.outgoing.fell = False
            self._reader.endings.unblock(list(shared.blocked))
        taken = shared.events[:]
        shared.events.clear()
        return taken

    def effects_to_apply(self) -> list[effects.Effect]:
        """What the carrier is to do, in order."""
        shared = self._shared
        if self.error is None:
            if self._prelude.owes:
                self._prelude.send_owed()
            try:
                shared.outgoing.check_stalled()
            except LimitExceeded as error:
                self._fail(error)
        wanted = shared.effects
        if not wanted:
            return []
        if shared.closing and (
            len(shared.closing) >= shared.closes_together
            or shared.now >= shared.close_due[0][0] - shared.closes_wait
        ):
            self._registry.write_closes()
        shared.outgoing.effects_taken()
        shared.datagrams_told = 0
        taken = wanted[:]
        wanted.clear()
        return taken

    # Failure and end

    def _close_if_drained(self) -> None:
        if self._closing is not None and not self._registry.unsaid:
            self._close_now(*self._closing)

    def _close_now(self, code: int, reason: str) -> None:
        self._closing = None
        self._shared.effects.append((effects.CLOSE, code, reason[:REASON_LIMIT]))
        self._reader.clear()
        self._shared.outgoing.clear()

    def _fail(self, error: RemoteProtocolError) -> None:
        if self.error is not None:
            return
        reason = str(error)[:REASON_LIMIT]
        self._shared.effects.append((effects.CLOSE, error.code, reason))
        lost = ConnectionLost(
            f"the peer broke the protocol: {error}", code=error.code, reason=reason
        )
        lost.__cause__ = error
        clear_frames(error.__traceback__)  # they hold what the peer sent
        self._end(lost)

    def fail_internal(self, error: BaseException) -> None:
        """A fault of ours while working on an input: close with code 6 rather than hang."""
        fault = InternalError(f"{type(error).__name__}: {error}")
        fault.__cause__ = error
        self._fail(fault)

    def _end(self, error: ConnectionLost) -> None:
        if self.error is not None:
            return
        self.error = error
        self._shared.detach()
        self._registry.disconnect(error, draining=self._closing is not None)
        if self._closing is None:
            self._reader.clear()
        else:
            self._reader.linger()
        self._shared.ack_due.clear()
        self._shared.announce_due.clear()
        self._shared.receipt_due.clear()
        self._shared.blocked.clear()
        for waiting in (self._shared.starved, self._shared.relieved, self._shared.closing):
            waiting.clear()
        self._shared.close_due.clear()
        if self._closing is None:
            self._shared.outgoing.clear()
        self._shared.events.append(Closed(error))
