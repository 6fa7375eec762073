"""One QUIC connection as a Carrier: events in, effects out, timers, and the close."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from aioquic.quic import events
from aioquic.quic.packet import QuicErrorCode

from aqueduct.carriers.certificates import identity_of
from aqueduct.carriers.contract import BIDI, Buffer, CarrierUser, PeerIdentity
from aqueduct.carriers.quic.packets import FastConnection, PacketBuilder
from aqueduct.carriers.quic.send_buffer import SendBuffer
from aqueduct.carriers.quic.udp import SocketAddress
from aqueduct.config import Config
from aqueduct.errors import ConnectionLost, LocalProtocolError
from aqueduct.escaping import logger_of

__all__ = ["QuicCarrier", "QuicHost"]

logger = logger_of("aqueduct.carriers.quic")

_REASON_LIMIT: Final = 512  # bytes of UTF-8: a CONNECTION_CLOSE has to fit one packet
_CONFIRMATION: Final = 1.0  # seconds a close waits for the peer to finish the handshake
_CLOSE_COPIES: Final = 2  # a client's CONNECTION_CLOSE is not repeated: its socket is gone
_STOPPED_KEPT: Final = 4096
_STREAM_EVENTS: Final = (
    tuple,
    events.StreamDataReceived,
    events.StreamReset,
    events.StopSendingReceived,
)


class QuicHost(PacketBuilder, Protocol):
    """Whose sockets a carrier uses: a connector's or a listener's."""

    def send_later(self, carrier: QuicCarrier) -> None:
        """Calls ``carrier.transmit`` when the socket takes datagrams again."""

    def route(self, connection_id: bytes, carrier: QuicCarrier) -> None:
        """Datagrams for this connection id are the carrier's."""

    def unroute(self, connection_id: bytes) -> None:
        """No more."""

    def accepted_early(self, carrier: QuicCarrier) -> None:
        """A server has a ticket back, and the user may have what comes with it."""

    def established(self, carrier: QuicCarrier) -> None:
        """The handshake is complete."""

    def ended(self, carrier: QuicCarrier, error: ConnectionLost) -> None:
        """The carrier needs nothing any more."""


class QuicCarrier:
    """One connection. See ``aqueduct.carriers.contract.Carrier`` for what the methods promise."""

    def __init__(
        self,
        quic: FastConnection,
        host: QuicHost,
        *,
        is_client: bool,
        peer: str,
        local: str,
        config: Config,
    ) -> None:
        self.is_client = is_client
        self.scheme = "aqueduct"
        self.suspended = False
        self.bidi = False
        self.early = False
        self.loopback = False
        self.resumes = 0
        self.peer_credentials = None
        self.peer = peer
        self.local = local
        self.error: ConnectionLost | None = None
        self.farewell: list[tuple[bytes, SocketAddress]] = []
        """What tells the peer of a close made here, to be repeated if it sends on."""
        self._quic = quic
        self._host = host
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._user: CarrierUser | None = None
        self._begun = False
        self._before_user: deque[Any] = deque()
        self._established = False
        self._processing = False
        self._reported = False
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._senders: dict[int, SendBuffer] = {}
        self._stopped: dict[int, None] = {}
        self._openable = self._bidi_openable = 0
        self._datagram_room = quic.datagram_room
        self._datagram_limit = quic.datagram_limit
        self._theirs = 3 if is_client else 2
        self._pings = 0
        self._close: tuple[int, str] | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._identity: PeerIdentity | None = None
        self.heard_at: float | None = None
        """The loop's time when the peer's last datagram came."""
        self._received = 0
        self._acknowledged = 0

    # what the contract promises

    @property
    def peer_certificate_fingerprint(self) -> str | None:
        """``sha256:HEX`` of the peer's certificate, if it showed one."""
        identity = self.peer_identity
        return None if identity is None else identity.fingerprint

    @property
    def peer_identity(self) -> PeerIdentity | None:
        """Who the peer's certificate says it is; None on a server, to which none is shown."""
        if self._identity is None:
            chain = self._quic.peer_chain
            if chain:
                self._identity = identity_of(chain[0])
        return self._identity

    @property
    def rtt(self) -> float:
        """The smoothed round-trip time, seconds; 0.0 before the first sample."""
        return self._quic.rtt

    @property
    def datagram_limit(self) -> int:
        """The largest payload of ``send_datagram``, bytes."""
        return self._quic.datagram_limit

    @property
    def datagram_room(self) -> int:
        """How many datagrams the queue takes now."""
        return self._quic.datagram_room

    @property
    def openable(self) -> int:
        """How many more streams may be opened now."""
        return 0 if self.error is not None else self._quic.openable

    @property
    def bidi_openable(self) -> int:
        """How many more bidirectional streams may be opened now."""
        streams = self._quic.bidi_streams
        return 0 if self.error is not None or streams is None else streams.openable

    def attach(self, user: CarrierUser) -> None:
        """Installs the user. Raises LocalProtocolError if there is one."""
        if self._user is not None:
            raise LocalProtocolError("this carrier has a user already")
        self._user = user
        self._loop.call_soon(self._begin)

    def write(self, stream: int, buffers: Sequence[Buffer], fin: bool) -> None:
        """Queues bytes on my stream; see the contract."""
        if self.error is not None or self._close is not None:
            return
        sender = self._senders.get(stream)
        if sender is None:
            sender = self._open(stream)
            if sender is None:
                return
        elif sender.closed:
            raise LocalProtocolError(f"stream {stream} ended; nothing can be written to it")
        sender.append(buffers, fin)

    def reset(self, stream: int, code: int) -> None:
        """Gives up my stream."""
        if self.error is not None or self._close is not None:
            return
        streams = self._quic.bidi_streams
        bidi = streams is not None and streams.has(stream)
        if not (0 <= stream < self._quic.opened or bidi):
            raise LocalProtocolError(f"stream {stream} was never opened")
        self._stopped.pop(stream, None)
        sender = self._senders.pop(stream, None)
        if sender is None and streams is not None and bidi and stream & 1:
            sender = streams.sender(streams.id_of(stream))  # nothing was written to it
        if sender is not None:
            sender.reset(code)

    def stop(self, stream: int, code: int) -> None:
        """Asks the peer to send no more on its stream."""
        stream_id = self._id_of(stream)
        if stream_id is not None:
            self._quic.stop(stream_id, code)

    def credit(self, stream: int, limit: int) -> None:
        """Lets the peer send on its stream up to ``limit`` bytes in all."""
        stream_id = self._id_of(stream)
        if stream_id is not None:
            self._quic.credit(stream_id, limit)

    def extra_streams(self, count: int) -> None:
        """Gives the peer more stream slots, or keeps some back."""
        self._quic.extra_streams(count)

    def send_datagram(self, data: bytes) -> bool:
        """Queues a datagram; False if it was dropped."""
        if self.error is not None or self._close is not None:
            return False
        taken = self._quic.send_datagram(data)
        self._datagram_room = self._quic.datagram_room
        return taken

    def ping(self) -> None:
        """Makes the peer's transport answer."""
        if self.error is None:
            self._pings += 1
            self._quic.send_ping(self._pings)

    def expect_input(self) -> None:
        """The listener's socket is for all connections; it is not looked at for one."""

    def flush(self) -> None:
        """Lets queued bytes leave, together with what else is queued in this turn of the loop."""
        if not self._flush_scheduled and not self._processing and self.error is None:
            self._flush_scheduled = True
            self._loop.call_soon(self.transmit)

    def snapshot(self) -> dict[str, object]:
        """Counters and windows."""
        return {
            "carrier": "quic",
            "received": self._received,
            "acknowledged": self._acknowledged,
            **self._quic.counters(),
        }

    def close(self, code: int, reason: str, *, linger: float = 0.0) -> None:
        """Closes once everything is acknowledged, or ``linger`` seconds are over."""
        if self.error is not None or self._close is not None:
            return
        self._close = (code, _cut(reason))
        if self._quic.unconfirmed:
            # Before that, a peer that decrypts the handshake's packets learns of a close but
            # not of its code (RFC 9000 section 10.2.3).
            linger = max(linger, _CONFIRMATION)
        if linger > 0:
            self._close_timer = self._loop.call_later(linger, self._close_now)
        self._loop.call_soon(self._close_if_drained, linger <= 0)

    # what the host calls

    def begin_early(self) -> None:
        """A client has a ticket: the user may send before the handshake is complete."""
        assert self._quic.bidi_streams is not None
        self._quic.bidi_streams.agreed = True  # as when the ticket was given
        self.early = self.bidi = self._established = True

    @property
    def started(self) -> bool:
        """Whether anything of the peer was understood."""
        return self._quic.started

    @property
    def stepped_at(self) -> float | None:
        """None: after its first packet, the only step is the end of the handshake."""
        return None

    def has_input(self) -> bool:
        """What the peers of a socket have sent is read together: nothing is left unread."""
        return False

    def receive(self, data: memoryview, address: SocketAddress, now: float) -> int:
        """Takes one datagram; how many frames it had. ``deliver`` and ``after_input`` must follow.

        Where frames are not counted, each byte is taken for one.
        """
        self.heard_at = now
        before = self._quic.frames.total
        try:
            self._quic.receive(data, address, now)
        except Exception:  # what a peer sends must not end the loop
            logger.exception("%s: aioquic failed on a datagram", self.peer)
            self._quic.close(QuicErrorCode.INTERNAL_ERROR, 0, "internal error")
        return self._quic.frames.total - before

    def deliver(self) -> None:
        """Hands on what has arrived, while it is in the processor's cache."""
        self._processing = True
        try:
            self._take_events()
        finally:
            self._processing = False

    def after_input(self) -> None:
        """Reports what has arrived, and sends what the user and the transport answer."""
        self._report()
        if self.error is None:
            self.transmit()

    def transmit(self) -> None:
        """Sends what may leave now."""
        self._flush_scheduled = False
        if self.error is not None:
            return
        if not self._host.blocked and self._quic.transmit(self._loop.time(), self._host):
            self.flush()
        if self._host.blocked:
            self._host.send_later(self)
        room, limit = self._quic.datagram_room, self._quic.datagram_limit
        if room != self._datagram_room or limit != self._datagram_limit:
            self._datagram_room, self._datagram_limit = room, limit
            if self._begun and self._user is not None:
                self._user.datagram_room_changed()
        if self._quic.has_events:
            self._take_events()  # new connection ids, to be routed
        if self._quic.termination is not None:
            self._finish(self._explain(self._quic.termination))
        self._arm()

    def lose(self, error: ConnectionLost) -> None:
        """Ends the connection without a word to the peer."""
        self._finish(error)

    def abandon(self, error: ConnectionLost) -> None:
        """Ends the connection; the peer is told if it can be."""
        if self.error is None:
            self._quic.close(error_code=QuicErrorCode.NO_ERROR, frame_type=0)
            self.farewell = self._quic.datagrams_to_send(self._loop.time())
            self._host.send(self.farewell)
            self._finish(error)

    # inside

    def _open(self, stream: int) -> SendBuffer | None:
        if stream >= BIDI:
            return self._open_bidi(stream)
        if stream < self._quic.opened:
            if stream in self._stopped:
                return None
            raise LocalProtocolError(f"stream {stream} ended; nothing can be written to it")
        if stream > self._quic.opened:
            raise LocalProtocolError(
                f"stream {stream}: the next one to open is {self._quic.opened}"
            )
        if self._quic.openable < 1:
            raise LocalProtocolError(f"stream {stream}: the peer allows no more streams now")
        sender = self._senders[stream] = self._quic.open()
        sender.number = stream
        self._openable = self._quic.openable
        return sender

    def _open_bidi(self, stream: int) -> SendBuffer | None:
        """What sends on a bidirectional stream, of mine if it is the next; None: it was stopped."""
        streams = self._quic.bidi_streams
        if streams is None:
            raise LocalProtocolError(f"stream {stream}: there are no bidirectional streams here")
        following = BIDI | streams.opened << 1
        if streams.has(stream):
            if stream in self._stopped:
                return None
            sender = streams.sender(streams.id_of(stream)) if stream & 1 else None
            if sender is None or sender.closed:
                raise LocalProtocolError(f"stream {stream} ended; nothing can be written to it")
        elif stream & 1:
            raise LocalProtocolError(f"the peer never opened its stream {stream}")
        elif stream > following:
            raise LocalProtocolError(f"stream {stream}: the next one to open is {following}")
        elif streams.openable < 1:
            raise LocalProtocolError(f"stream {stream}: the peer allows no more streams now")
        else:
            sender = streams.open()
            self._bidi_openable = streams.openable
        self._senders[stream] = sender
        sender.number = stream
        return sender

    def _id_of(self, stream: int) -> int | None:
        """The id in QUIC of a stream on which the peer sends; None: the connection ends."""
        if self.error is not None or self._close is not None:
            return None
        streams = self._quic.bidi_streams
        if streams is not None and streams.has(stream):
            return streams.id_of(stream)
        if not 0 <= stream < self._quic.opened_by_peer:
            raise LocalProtocolError(f"the peer never opened its stream {stream}")
        return stream * 4 + self._theirs

    def _begin(self) -> None:
        """The user is there: it hears of everything from the start."""
        assert self._user is not None
        lost_before = self.error
        self._begun = True
        if self._established:
            self._reported = True
            self._openable = self._quic.openable
            self._bidi_openable = self.bidi_openable
            self._user.connected()
            self._report()
        if lost_before is not None:
            self._user.closed(lost_before)
        elif self.error is None:
            self.transmit()

    def _report(self) -> None:
        """Takes the events of the transport and tells the user."""
        if self.error is not None:
            return
        self._processing = True
        try:
            self._take_events()
            self._report_progress()
        finally:
            self._processing = False
        if self._quic.termination is not None:
            self._finish(self._explain(self._quic.termination))
        elif self._close is not None:
            self._close_if_drained(False)

    def _report_progress(self) -> None:
        """What has no events of its own: streams to open, bytes acknowledged, a burst's end."""
        quic = self._quic
        if self._begun and self._user is not None:
            if quic.openable > self._openable:
                self._user.openable_changed()
                self._reported = True
            self._openable = quic.openable
            if self.bidi:
                if self.bidi_openable > self._bidi_openable:
                    self._user.openable_changed()
                    self._reported = True
                self._bidi_openable = self.bidi_openable
            for sender, size in quic.take_released():
                if size:
                    self._acknowledged += size
                    self._user.written(sender.number, size)
                    self._reported = True
            for sender in quic.take_finished():
                self._senders.pop(sender.number, None)
            if self._reported:
                self._reported = False
                self._user.end_of_input()

    def _take_events(self) -> None:
        if self.error is not None:
            return
        while self._begun and self._before_user:
            self._handle(self._before_user.popleft())
        user, quic = self._user, self._quic
        event: Any = quic.next_event()
        while event is not None and self.error is None:
            if type(event) is tuple and self._begun and user is not None:  # the common case
                stream_id, data, fin = event
                self._received += len(data)
                if fin:
                    quic.ended(stream_id)
                self._reported = True
                number = stream_id >> 2 if stream_id & 2 else _bidi_number(quic, stream_id)
                user.stream_data(number, data, fin)
            elif not self._begun and isinstance(event, _STREAM_EVENTS):
                self._before_user.append(event)
            else:
                self._handle(event)
            event = quic.next_event()

    def _handle(self, event: Any) -> None:
        user = self._user
        if isinstance(event, events.StreamDataReceived):
            event = event.stream_id, event.data, event.end_stream
        if type(event) is tuple:
            assert user is not None
            stream_id, data, fin = event
            self._reported = True
            self._received += len(data)
            if fin:
                self._quic.ended(stream_id)
            number = stream_id >> 2 if stream_id & 2 else _bidi_number(self._quic, stream_id)
            user.stream_data(number, data, fin)
        elif isinstance(event, events.StreamReset):
            assert user is not None
            self._reported = True
            self._quic.ended(event.stream_id)
            stream_id = event.stream_id
            number = stream_id >> 2 if stream_id & 2 else _bidi_number(self._quic, stream_id)
            user.stream_reset(number, event.error_code)
        elif isinstance(event, events.StopSendingReceived):
            if user is not None:
                self._peer_stops(user, event.stream_id, event.error_code)
        elif isinstance(event, events.DatagramFrameReceived):
            if self._begun and user is not None:
                self._reported = True
                user.datagram_received(event.data)
        elif isinstance(event, events.PingAcknowledged):
            if self._begun and user is not None and event.uid:  # 0: the transport's own
                self._reported = True
                user.ponged()
        elif isinstance(event, events.HandshakeCompleted):
            self._established = True
            self.bidi = self._quic.bidi_streams is not None
            self._host.established(self)
            if self.early and self.error is None:
                self._decide(event.early_data_accepted)
        elif isinstance(event, events.ProtocolNegotiated):
            early = self._quic.early_data
            if not self.is_client and early is not None and early.allowed:
                # The ticket is used up, so what comes is no replay: it is not ``early``.
                self._established = self.bidi = True
                self._host.accepted_early(self)
        elif isinstance(event, events.ConnectionIdIssued):
            self._host.route(event.connection_id, self)
        elif isinstance(event, events.ConnectionIdRetired):
            self._host.unroute(event.connection_id)

    def _decide(self, accepted: bool) -> None:
        """A client hears what has become of its early data."""
        self.early = False
        if not accepted:
            self._identity = None
            self._senders.clear()
            self._stopped.clear()
            self._openable = self._quic.openable
            self._bidi_openable = self.bidi_openable
        if self._begun and self._user is not None:
            self._reported = True
            self._user.early_decided(accepted)

    def _peer_stops(self, user: CarrierUser, stream_id: int, code: int) -> None:
        streams = self._quic.bidi_streams
        number = self._quic.forgotten + (stream_id >> 2)
        unwritten = False
        if not stream_id & 2 and streams is not None:
            if not streams.stopped(stream_id):
                return
            number = streams.number_of(stream_id)
            unwritten = number & 1 == 1  # of the peer's, it may be
        elif number >= self._quic.opened:
            return
        if self._senders.pop(number, None) is not None or unwritten:
            self._stopped[number] = None
            if len(self._stopped) > _STOPPED_KEPT:
                del self._stopped[next(iter(self._stopped))]
        self._reported = True
        user.stream_stopped(number, code)

    def _arm(self) -> None:
        at = self._quic.get_timer()
        if at is None or self.error is not None:
            return
        if self._timer is not None:
            if self._timer_at <= at:
                return  # it looks again when it fires
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._fire)

    def _fire(self) -> None:
        self._timer = None
        at = self._quic.get_timer()
        now = max(self._loop.time(), self._timer_at)
        if at is not None and at <= now:
            self._quic.handle_timer(now)
            self._report()
            if self.error is None:
                self.transmit()
        else:
            self._arm()

    def _close_if_drained(self, at_once: bool) -> None:
        if self.error is not None:
            return
        if at_once or (not self._quic.unconfirmed and self._quic.drained()):
            self._close_now()
        else:
            self.flush()

    def _close_now(self) -> None:
        if self.error is not None or self._close is None:
            return
        code, reason = self._close
        self._quic.close(error_code=code, reason_phrase=reason)
        self.farewell = self._quic.datagrams_to_send(self._loop.time())
        for _ in range(_CLOSE_COPIES):
            self._host.send(self.farewell)
        text = f"the connection to {self.peer} was closed here"
        self._finish(
            ConnectionLost(f"{text}: {reason}" if reason else text, code=code, reason=reason)
        )

    def _explain(self, end: events.ConnectionTerminated) -> ConnectionLost:
        if self._quic.closed_by_peer and end.frame_type is None:
            text = f"{self.peer} closed the connection (code {end.error_code})"
            return ConnectionLost(
                f"{text}: {end.reason_phrase}" if end.reason_phrase else text,
                code=end.error_code,
                reason=end.reason_phrase,
                remote=True,
            )
        reason = end.reason_phrase or _error_name(end.error_code)
        if reason == "Idle timeout":
            reason = f"nothing was heard for {self._quic.idle_timeout:.3g} s"
            return ConnectionLost(f"{self.peer} is gone: {reason}", reason=reason)
        if self._quic.closed_by_peer:
            text = f"{self.peer} closed the connection at the transport"
            return ConnectionLost(f"{text}: {reason}", reason=reason, remote=True)
        return ConnectionLost(
            f"the connection to {self.peer} failed at the transport: {reason}", reason=reason
        )

    def _finish(self, error: ConnectionLost) -> None:
        if self.error is not None:
            return
        self.error = error
        for timer in (self._timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        for sender in self._senders.values():
            sender.drop()
        self._senders.clear()
        self._before_user.clear()
        self._host.ended(self, error)
        if self._begun and self._user is not None:
            self._user.closed(error)


def _bidi_number(quic: FastConnection, stream_id: int) -> int:
    """The number of a bidirectional stream that has this id in QUIC."""
    assert quic.bidi_streams is not None
    return quic.bidi_streams.number_of(stream_id)


def _cut(reason: str) -> str:
    data = reason.encode()
    return reason if len(data) <= _REASON_LIMIT else data[:_REASON_LIMIT].decode(errors="ignore")


def _error_name(code: int) -> str:
    try:
        return QuicErrorCode(code).name.lower().replace("_", " ")
    except ValueError:
        return f"error {code:#x}"
