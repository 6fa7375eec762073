"""One connection over a byte stream: the socket's readiness, handshakes, timers, and the close."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final, Protocol

from aqueduct._speedups.bpmux.chunks import END, encode_head, encode_rest
from aqueduct.carriers.contract import CarrierUser, PeerIdentity
from aqueduct.carriers.stream.bpmux_streams import STREAMS, close_payload, read_close
from aqueduct.carriers.stream.sockets import credentials_of, ends_of, scratch, tcp_info, why
from aqueduct.carriers.stream.tls import ALPN, REFUSAL, explain, speaks_tls, spoken
from aqueduct.carriers.stream.transport import StreamTransport
from aqueduct.carriers.tls_library import Context, Tls
from aqueduct.carriers.verify import TlsError
from aqueduct.config import Config
from aqueduct.errors import (
    ConnectionLost,
    FrameError,
    InternalError,
    LocalProtocolError,
    RemoteProtocolError,
)
from aqueduct.escaping import logger_of
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.state import Entity, type_for

__all__ = ["StreamCarrier", "StreamHost"]

logger = logger_of("aqueduct.carriers.stream")

_A_LOOK: Final = 0.05  # seconds for the loop to read what is there
_MEASURE_EVERY: Final = 5.0  # seconds between two measurements of the round trip, at least


class StreamHost(Protocol):
    """Who made a carrier: a connector or a listener."""

    def secured(self, carrier: StreamCarrier) -> str | None:
        """TLS is up. A text: the peer is refused for this reason."""

    def established(self, carrier: StreamCarrier) -> None:
        """Both sides know that they speak the same protocol."""

    def ended(self, carrier: StreamCarrier, error: ConnectionLost) -> None:
        """The connection is over."""

    def released(self, carrier: StreamCarrier) -> None:
        """Its socket is closed, which may be a while later."""


class StreamCarrier(StreamTransport):
    """One connection. See ``aqueduct.carriers.contract.Carrier`` for what the methods promise."""

    def __init__(
        self,
        sock: socket.socket,
        host: StreamHost,
        config: Config,
        *,
        scheme: str,
        is_client: bool,
        context: Context | None,
        server_name: str | None,
    ) -> None:
        tls = None
        if context is not None:
            sealed = scratch("sealed")
            tls = Tls(sock, context, server_name, server=not is_client, scratch=sealed)
        super().__init__(sock, config, tls, is_client=is_client)
        self.scheme = scheme
        self.peer_credentials = credentials_of(sock)
        self.local, self.peer = ends_of(sock, self.peer_credentials)
        self.rtt = 0.0
        self.error: ConnectionLost | None = None
        self._host = host
        self._server_name = server_name or ""
        self.peer_identity: PeerIdentity | None = None
        """Who the peer's certificate says it is, if it showed one."""
        self._first = b""
        self._stepped_at: float | None = None
        """What the peer has sent first, a few bytes."""
        self._early: list[events.Event] = []
        self._idle_timer: asyncio.TimerHandle | None = None
        self._close: tuple[int, str] | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._told = False

    # what the contract promises

    @property
    def peer_certificate_fingerprint(self) -> str | None:
        """``sha256:HEX`` of the peer's certificate, if it showed one."""
        return None if self.peer_identity is None else self.peer_identity.fingerprint

    def attach(self, user: CarrierUser) -> None:
        """Installs the user. Raises LocalProtocolError if there is one."""
        if self._user is not None:
            raise LocalProtocolError("this carrier has a user already")
        self._user = user
        self._loop.call_soon(self._begin)

    def ping(self) -> None:
        """Makes the peer's transport answer."""
        self._ping(asked=True)

    def snapshot(self) -> dict[str, object]:
        """Counters and windows."""
        found: dict[str, object] = {
            "carrier": self.scheme.removeprefix("aqueduct+"),
            "sent": self._sent,
            "received": self._received,
            "in_flight": self._out.left,
            "queued": sum(entity.queued for entity in self._senders.values()),
            "datagrams_queued": len(self._datagrams),
            "opened": self._opened,
            "open": len(self._senders),
            "openable": self.openable,
            "peer_opened": self._peer_opened,
            "peer_open": len(self._incoming),
            "top_credit": self._mux.top_sink.credit_out,
        }
        if self._tls is not None:
            found["cipher"] = self._tls.cipher
        if self._sock.family == socket.AF_UNIX:
            found["by_memory"] = self._out.shares
        info = None if self._released else tcp_info(self._sock)
        if info is not None:
            found["kernel_rtt"], found["packets_lost"] = info
        return found

    def close(self, code: int, reason: str, *, linger: float = 0.0) -> None:
        """Closes once everything has left, or ``linger`` seconds are over."""
        if self._over or self._closing:
            return
        self._collect()
        self._closing = True
        self._close = (code, reason)
        if linger > 0:
            self._close_timer = self._loop.call_later(linger, self._close_now)
        self._hurry_acks()
        self._loop.call_soon(self._close_if_drained, linger <= 0)

    # what the host calls

    @property
    def missing(self) -> str:
        """What has not come yet of the handshakes."""
        if self._tls is not None and not self._tls.complete:
            return "the handshake of TLS"
        return "the first credit of bpmux"

    @property
    def heard(self) -> bool:
        """Whether the peer has sent anything."""
        return bool(self._first if self._tls is None else self._tls.first)

    @property
    def heard_at(self) -> float | None:
        """The loop's time when the peer's last bytes came; None: it has sent nothing."""
        return self._last_input if self.heard else None

    @property
    def stepped_at(self) -> float | None:
        """The loop's time when TLS went on by a whole message; None: it has not."""
        return self._stepped_at

    def has_input(self) -> bool:
        """Whether the peer has sent something that nobody has read yet, or has closed."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass  # reading says what it is
        return True

    def begin(self) -> None:
        """Starts: the handshake of TLS if there is one, and what each side says first."""
        self._resume()
        self._idle_timer = self._loop.call_later(self._config.timing.idle_timeout, self._idle)
        if self._tls is None:
            self._greet()
            self._transmit()
        elif self.is_client:
            self._shake_hands()

    def lose(self, error: ConnectionLost) -> None:
        """Ends the connection without a word to the peer."""
        self._finish(error)
        self._release()

    abandon = lose

    # reading

    def _take_events(self) -> None:
        found = self._mux.events_received()
        if self._begun:
            if found:
                self._dispatch(found)
        else:
            self._early += found
            self._before_begin()

    def _before_begin(self) -> None:
        """Looks for what each side says first; all else waits for the user."""
        if self._established:
            return
        rest: list[events.Event] = []
        for event in self._early:
            kind = event[0]
            if kind == events.FAILED:
                raise event[1]
            top = event[1] is self._mux.top_stream
            if kind == events.PAYLOAD and top and not self._allowed:
                self._first_limit(event[2], event[3])
            elif kind == events.ENDED and top:
                self._closed_by_peer(event[2])
                return
            elif kind != events.CREDIT:
                rest.append(event)
        self._early = rest
        if not self._announced and self._mux.top_sink.credit_out:
            self._collect()  # what this side allows
        if self._allowed and self._announced:
            self._established = True
            self._pause()
            self._host.established(self)

    def _first_limit(self, data: Any, whole: bool) -> None:
        self._message += data
        if whole:
            data = bytes(self._message)
            self._message.clear()
            self._give_back += len(data)
            if data[:1] != STREAMS or not self._allow(data):
                raise FrameError("its first message does not say how many streams it allows")

    def _hear(self, data: bytes) -> bool:
        """Looks at the first bytes of the peer, which may speak something else."""
        if len(self._first) < 8:
            self._first += data[:8]
        # What each side says first has the top bit set; text and records of TLS do not.
        if self._tls is not None or len(self._first) < 4 or not self._first[:4].isascii():
            return True
        if not self.is_client:
            hint = f"this port is plain, for {self.scheme}://"
        elif speaks_tls(self._first):
            hint = "use aqueduct+tls://"
        else:
            hint = "is this its port?"
        self.lose(
            self._failed(f"{self._who} does not speak Aqueduct: {spoken(self._first)}; {hint}")
        )
        return False

    def _read_failed(self, error: Exception) -> None:
        if isinstance(error, RemoteProtocolError):
            self._violated(error)
        elif isinstance(error, TlsError):
            self.lose(self._failed(self._explain(error)))
        elif isinstance(error, OSError):
            self.lose(self._failed(why(error)))
        else:
            logger.error("%s: a fault while reading", self.peer, exc_info=error)
            self._finish(self._failed("internal error"))
            self._say(InternalError.code, "internal error")

    def _write_failed(self, error: OSError) -> None:
        self._loop.call_soon(self._read_last, error)

    def _read_last(self, error: OSError) -> None:
        if self._begun and not self._over:
            self._readable()
        if not self._over:
            self.lose(self._failed(why(error)))

    # handshakes

    def _shake_hands(self) -> bool:
        """Goes on with TLS; True when it is complete."""
        tls = self._tls
        assert tls is not None
        try:
            data = tls.handshake()
        except TlsError as error:
            foreign = not self.is_client and tls.first and not speaks_tls(tls.first)
            self._finish(self._failed(self._explain(error)))
            self._part(REFUSAL if foreign else tls.pending())
            return False
        except OSError as error:
            self.lose(self._failed(why(error)))
            return False
        self._first = tls.first
        if data or tls.complete:
            self._stepped_at = self._time()
        if data:
            self._add_words(data)
        if tls.complete and not self._secured(tls):
            return False
        self._transmit()
        return tls.complete

    def _secured(self, tls: Tls) -> bool:
        """TLS is up: is the peer who it should be, and does it speak the same protocol?"""
        self.peer_identity = tls.identity
        reason = self._host.secured(self)
        if tls.protocol != ALPN:
            reason = f"{self._who} speaks TLS but not Aqueduct (no common ALPN protocol)"
        if reason is None:
            self._secure = True
            self._greet()
            return True
        self._finish(self._failed(reason))
        self._part(tls.farewell())
        return False

    def _begin(self) -> None:
        """The user is there: it hears of everything from the start."""
        user = self._user
        assert user is not None
        lost_before = self.error
        self._begun = True
        if self._established:
            self._reported = True
            user.connected()
        if lost_before is not None:
            self._tell_user()
        elif not self._over:
            self._ping(asked=False)
            self._resume()
            self._loop.call_soon(self._readable)  # what TLS holds makes no socket readable
            early, self._early = self._early, []
            self._processing = True
            try:
                self._dispatch(early)
            except RemoteProtocolError as error:
                self._violated(error)
            finally:
                self._processing = False
            self._tell_directly()
            self._settle()

    def _ping(self, *, asked: bool) -> None:
        if not (self._over or self._closing):
            now = self._time()
            self._measure_at = now + _MEASURE_EVERY
            self._pings.append(asked)
            self._mux.ping(self._mux.top_stream, now)

    def _ponged(self, entity: Entity, asked: float, user: CarrierUser) -> None:
        sample = max(self._time() - asked, 1e-6)
        self.rtt = sample if not self.rtt else self.rtt + (sample - self.rtt) / 8
        if self._pings and self._pings.popleft():
            self._reported = True
            user.ponged()

    # the end

    def _drained(self) -> None:
        if self._close is not None:
            self._close_if_drained(False)

    def _gone(self) -> None:
        self._tell_user()
        self._host.released(self)

    def _close_if_drained(self, at_once: bool) -> None:
        if self._over:
            return
        if at_once or not (self._out.left or not self._mux.idle or self._unsent()):
            self._close_now()

    def _close_now(self) -> None:
        if self._over or self._close is None:
            return
        code, reason = self._close
        text = f"the connection to {self.peer} was closed here"
        # Who closes knows why already, and may end its loop once it is told: not before the peer
        # has taken the close, and the socket is gone.
        self._finish(
            ConnectionLost(f"{text}: {reason}" if reason else text, code=code, reason=reason),
            tell=False,
        )
        self._say(code, reason)

    def _closed_by_peer(self, data: bytes) -> None:
        code, reason = read_close(data)
        text = f"{self.peer} closed the connection (code {code})"
        self.lose(
            ConnectionLost(
                f"{text}: {reason}" if reason else text, code=code, reason=reason, remote=True
            )
        )

    def _violated(self, error: RemoteProtocolError) -> None:
        """The peer broke the protocol (BP-4): it is told, and the connection ends."""
        reason = f"the peer broke bpmux: {error}"
        if not self._established and self._first:
            reason += f"; {spoken(self._first)}"
        self._finish(ConnectionLost(f"{self.peer}: {reason}", code=error.code, reason=reason))
        self._say(error.code, str(error))

    def _say(self, code: int, reason: str) -> None:
        """The close, after what has been taken from the core; nothing else leaves any more."""
        top = self._mux.top_sink
        payload = close_payload(code, reason)
        if len(payload) > top.credit_out:
            payload = b""
        chunk = encode_head(type_for(top), END, 0) + encode_rest(END, 0, len(payload)) + payload
        if self._tls is not None:
            if not self._tls.complete:
                chunk = b""
            else:
                chunk = b"".join(self._tls.seal([chunk])) + self._tls.farewell()
        self._part(chunk)

    def _end_of_stream(self) -> None:
        """The peer has closed its side, or half of it, which is the same here."""
        self._mux.receive_eof()
        if self._mux.error is not None:
            reason = f"{self._who} closed the connection inside a chunk"
        elif not self.heard:
            reason = f"{self._who} closed the connection without a word"
        else:
            reason = f"{self._who} closed the connection without saying why"
        self.lose(self._failed(reason))

    def _idle(self) -> None:
        timeout = self._config.timing.idle_timeout
        left = self._last_input + timeout - self._time()
        if left > 0:
            self._idle_timer = self._loop.call_later(left, self._idle)
        elif self._intake.relax():  # a little of a chunk may have come without waking anybody
            self._idle_timer = self._loop.call_later(_A_LOOK, self._idle)
        else:
            reason = f"nothing was heard for {timeout:.3g} s"
            self.lose(ConnectionLost(f"{self.peer} is gone: {reason}", reason=reason))

    @property
    def _who(self) -> str:
        return "the server" if self.is_client else "the client"

    def _explain(self, error: TlsError) -> str:
        assert self._tls is not None
        return explain(error, self._tls.first, self._server_name, server=not self.is_client)

    def _failed(self, reason: str) -> ConnectionLost:
        return ConnectionLost(f"{self.peer}: {reason}", reason=reason)

    def _finish(self, error: ConnectionLost, *, tell: bool = True) -> None:
        """The connection is over for its user, who is told now, or when the socket is closed."""
        if self._over:
            return
        self._over = True
        self.error = error
        for timer in (self._idle_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        self._senders.clear()
        self._incoming.clear()
        self._datagrams.clear()
        self._early.clear()
        self._mux.drop()
        self._host.ended(self, error)
        if tell:
            self._tell_user()

    def _tell_user(self) -> None:
        if self._begun and self._user is not None and self.error is not None and not self._told:
            self._told = True
            self._user.closed(self.error)
