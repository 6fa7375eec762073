"""One connection over a byte stream: its handshakes, and its end."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from aqueduct._speedups.bpmux.chunks import END, encode_head, encode_rest
from aqueduct._speedups.io.tls_records import Records
from aqueduct._speedups.stream.transport import StreamTransport
from aqueduct.carriers.clock import clock_of
from aqueduct.carriers.contract import CarrierUser, PeerIdentity
from aqueduct.carriers.stream.bpmux_streams import BpmuxStreams, close_payload, read_close
from aqueduct.carriers.stream.busy_poll import ReplyExpectation, poller_of
from aqueduct.carriers.stream.link import CarrierLink, LinkConnection, framed
from aqueduct.carriers.stream.memory_upgrade import MemoryUpgrade
from aqueduct.carriers.stream.sockets import (
    credentials_of,
    ends_of,
    on_loopback,
    scratch,
    take_of,
    tcp_info,
    why,
)
from aqueduct.carriers.stream.tls import ALPN, LINK_ALPN, REFUSAL, explain, speaks_tls, spoken
from aqueduct.carriers.tls_library import Context, Tls
from aqueduct.carriers.verify import TlsError
from aqueduct.config import Config
from aqueduct.errors import (
    ConnectionLost,
    InternalError,
    LocalProtocolError,
    RemoteProtocolError,
)
from aqueduct.escaping import logger_of
from aqueduct.protocol.bpmux.state import type_for
from aqueduct.protocol.relink.handshake import (
    ChosenLink,
    DistantLink,
    LinkAgreement,
    ListenerHandshake,
    Opening,
    RefusedLink,
    encode_reply,
)

__all__ = ["StreamCarrier", "StreamHost"]

logger = logger_of("aqueduct.carriers.stream")

_A_LOOK: Final = 0.05  # seconds for the loop to read what is there
_TAKE: Final = 256 << 10  # bytes taken from the core at once, at most
_LINK_TAKE: Final = 1 << 20
"""The same for a message of a link, behind which nothing more can be offered. Not over TLS: the C
library would ask the system anew each time for so much memory of records."""
_OFFERED: Final = 3
"""Chunks that TCP is offered in the same call, if they are next in any case. With one more, or with
none, a sink of 1 MiB batches is slower."""


class StreamHost(Protocol):
    """The maker of a carrier: a connector or a listener."""

    def secured(self, carrier: StreamCarrier) -> str | None:
        """TLS is up. A text: the peer is refused for this reason."""

    def established(self, carrier: StreamCarrier) -> None:
        """Both sides know that they speak the same protocol."""

    def ended(self, carrier: StreamCarrier, error: ConnectionLost) -> None:
        """The connection is over."""

    def released(self, carrier: StreamCarrier) -> None:
        """Its socket is closed, which may be a while later."""

    @property
    def resumes(self) -> bool:
        """Whether links are offered to clients; of a listener."""

    def choose(
        self, carrier: StreamCarrier, opening: Opening
    ) -> ChosenLink | RefusedLink | DistantLink:
        """Which link a client is given; of a listener."""

    def agreed(self, carrier: StreamCarrier, connection: LinkConnection) -> None:
        """A client has a link on this connection; of a listener."""

    def distant(
        self,
        carrier: StreamCarrier,
        link: DistantLink,
        sock: socket.socket,
        tls: Tls | None,
        *,
        greeted: bool,
    ) -> RefusedLink | None:
        """A client asks for a link of another process; None: it is there; of a listener.

        ``greeted``: the client has been sent a hello.
        """

    def cut(self, carrier: StreamCarrier) -> None:
        """The connection of its link is gone: another one is wanted."""


class StreamCarrier:
    """One connection. See ``aqueduct.carriers.contract.Carrier`` for what the methods promise.

    ``transport`` reads and writes the socket. ``streams`` knows what the bytes mean, and tells the
    user. The carrier itself sees to the handshakes, the silence of the peer, and the close.
    """

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
        tls: Tls | None = None,
        agreement: LinkAgreement | None = None,
        bidi: bool = False,
    ) -> None:
        """With ``tls``, or with an ``agreement`` about a link, these handshakes are over."""
        unix = self._unix = sock.family == socket.AF_UNIX
        self.is_client = is_client
        self.early = False
        self.scheme = scheme
        self.loopback = not unix and on_loopback(sock)
        self.peer_credentials = credentials_of(sock)
        self.local, self.peer = ends_of(sock, self.peer_credentials)
        self.peer_identity: PeerIdentity | None = None if tls is None else tls.identity
        """Who the peer's certificate says it is, if it showed one."""
        self.error: ConnectionLost | None = None
        self._sock = sock
        self._host = host
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._time = clock_of(self._loop)
        if context is not None and tls is None:
            sealed = scratch("sealed")
            tls = Tls(sock, context, server_name, server=not is_client, scratch=sealed)
        self._tls = tls
        self._server_name = server_name or ""
        self._ahead = scratch("plain")[: config.byte_stream.read_ahead]
        self.streams = BpmuxStreams(self, config, self._time, is_client=is_client, bidi=bidi)
        self.bidi = False
        self.link: CarrierLink | None = None
        """What goes on if the connection breaks; None: the connection is lost then."""
        self._records: Records | None = None if tls is None else tls.records
        if agreement is not None:
            self.link = CarrierLink(self, agreement, config, self._time, is_client=is_client)
            self._records = self.link.connected(LinkConnection(sock, tls, agreement))
        self.transport = self._new_transport()
        if unix:
            MemoryUpgrade(self.transport, config.byte_stream).prepare(is_client=is_client)
        self._door: ListenerHandshake | None = None
        """The handshake of a link, while it goes on."""
        self._first = b""
        """What the peer has sent first, a few bytes."""
        self._stepped_at: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._close: tuple[int, str] | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._told = False
        # What the contract promises, and others do.
        streams = self.streams
        self.datagram_limit = streams.datagram_limit
        self.write = streams.write
        self.reset = streams.reset
        self.stop = streams.stop
        self.credit = streams.credit
        self.extra_streams = streams.extra_streams
        self.send_datagram = streams.send_datagram
        self.ping = streams.ping
        self.flush = self.transport.flush

    def _new_transport(self) -> StreamTransport:
        """Of the socket that the connection has now."""
        sock, settings = self._sock, self._config.byte_stream
        # A Unix socket would hold more than its buffer: it cannot say how much is unsent.
        plain = self._records is None and not self._unix
        most = _TAKE if self.link is None or self._tls is not None else _LINK_TAKE
        return StreamTransport(
            self,
            self.streams,
            sock,
            self._loop,
            self._time,
            records=self._records,
            ahead=self._ahead,
            turn=settings.wake_up,
            chunks=self._config.bpmux.wake_up,
            take_of=lambda: take_of(sock, most),
            offered=_OFFERED if plain else 0,
        )

    # what the contract promises

    @property
    def peer_certificate_fingerprint(self) -> str | None:
        """``sha256:HEX`` of the peer's certificate, if it showed one."""
        return None if self.peer_identity is None else self.peer_identity.fingerprint

    @property
    def rtt(self) -> float:
        """The smoothed round-trip time, seconds; 0.0 before the first sample."""
        return self.streams.rtt

    @property
    def openable(self) -> int:
        """How many more streams may be opened now."""
        return self.streams.openable

    @property
    def bidi_openable(self) -> int:
        """How many more bidirectional streams may be opened now."""
        return self.streams.bidi_openable

    @property
    def datagram_room(self) -> int:
        """How many datagrams the queue takes now."""
        return self.streams.datagram_room

    def attach(self, user: CarrierUser) -> None:
        """Installs the user. Raises LocalProtocolError if there is one."""
        if self.streams.user is not None:
            raise LocalProtocolError("this carrier has a user already")
        self.streams.user = user
        self._loop.call_soon(self._begin)

    def expect_input(self) -> None:
        """See the contract."""
        transport, limit = self.transport, self._config.byte_stream.poll
        if not limit or not transport.reading or self.streams.over:
            return
        if transport.expectation is None:
            transport.expectation = ReplyExpectation(
                poller_of(self._loop), self._sock.fileno(), limit, transport.readable
            )
        transport.expectation.expect(self._time())

    def snapshot(self) -> dict[str, object]:
        """Counters and windows."""
        found = self.streams.snapshot()
        found["carrier"] = self.scheme.removeprefix("aqueduct+")
        found["in_flight"] = self.transport.out.left
        if self.link is not None:
            found["link"] = self.link.snapshot()
        if self._tls is not None:
            found["cipher"] = self._tls.cipher
        elif self.link is not None and self.link.relayed is not None:
            found["cipher"] = self.link.relayed.cipher
        if self._unix:
            found["by_memory"] = self.transport.out.shares
        info = None if self.transport.released else tcp_info(self._sock)
        if info is not None:
            found["kernel_rtt"], found["packets_lost"] = info
        return found

    def close(self, code: int, reason: str, *, linger: float = 0.0) -> None:
        """Closes once everything has left, or ``linger`` seconds are over."""
        streams = self.streams
        if streams.over or streams.closing:
            return
        streams.collect()
        if linger > 0:
            self.flush()  # nothing else may come that lets it leave
        streams.closing = True
        self._close = (code, reason)
        if linger > 0:
            self._close_timer = self._loop.call_later(linger, self._close_now)
        self.transport.hurry_acks()
        self._loop.call_soon(self._close_if_drained, linger <= 0)

    # what the host calls

    @property
    def missing(self) -> str:
        """What has not come yet of the handshakes."""
        if self._tls is not None and not self._tls.complete:
            return "the handshake of TLS"
        if self._door is not None:
            return "the handshake of a link"
        return "the first credit of bpmux"

    @property
    def heard_at(self) -> float | None:
        """The loop's time when the peer's last bytes came; None: it has sent nothing."""
        heard = self._first if self._tls is None else self._tls.first
        return self.transport.last_input if heard else None

    @property
    def stepped_at(self) -> float | None:
        """The loop's time when TLS went on by a whole message; None: it has not."""
        return self._stepped_at

    def has_input(self) -> bool:
        """Whether the peer has sent bytes that are not read yet, or has closed."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass  # reading says what it is
        return True

    def begin(self) -> None:
        """Starts: the handshake of TLS if there is one, and what each side says first."""
        self.transport.resume()
        self._idle_timer = self._loop.call_later(self._config.timing.idle_timeout, self._idle)
        if self._tls is not None and not self._tls.complete:
            if self.is_client:
                self._shake_hands()
        elif self.is_client or not self._host.resumes:
            self._greet()
            self._loop.call_soon(self.transport.readable)  # what came with a handshake

    def lose(self, error: ConnectionLost) -> None:
        """Ends the connection without a word to the peer."""
        self._finish(error)
        if self.transport.released:  # there is no socket, or it is closed already
            self.released()
        else:
            self.transport.release()

    def _greet(self) -> None:
        """What each side says first."""
        self.transport.secure = True
        self.streams.greet()
        self.transport.transmit()

    abandon = lose

    # what the transport calls

    def early_input(self) -> int:
        """Reads during the handshakes, or before there is a user; returns the bytes read.

        Raises BlockingIOError if nothing is there, and RemoteProtocolError.
        """
        tls = self._tls
        if tls is not None and not tls.complete and not self._shake_hands():
            raise BlockingIOError
        size = (self._records or self._sock).recv_into(self._ahead)
        if not size:
            self._end_of_stream()
            raise BlockingIOError
        self.transport.reader.count(size)
        data = bytes(self._ahead[:size])
        if self._at_door(data):
            raise BlockingIOError
        if not self.streams.established and not self._hear(data):
            raise BlockingIOError
        self.streams.mux.receive_data(data)
        self.streams.take_events()
        return size

    def failed(self, error: Exception | None) -> None:
        """The peer broke the protocol, TLS or the socket failed; None: the peer closed its side."""
        if error is None:
            self._end_of_stream()
        elif isinstance(error, RemoteProtocolError):
            self._violated(error)
        elif isinstance(error, (TlsError, OSError)) and self.cut(str(error)):
            pass
        elif isinstance(error, TlsError):
            self.lose(self._failed(self._explain(error)))
        elif isinstance(error, OSError):
            self.lose(self._failed(why(error)))
        else:
            logger.error("%s: a fault while reading", self.peer, exc_info=error)
            self._finish(self._failed("internal error"))
            self._say(InternalError.code, "internal error")

    def drained(self) -> None:
        """What could be written was, and the streams are closing."""
        if self._close is not None:
            self._close_if_drained(False)

    def released(self) -> None:
        """The socket is closed."""
        self._tell_user()
        self._host.released(self)

    # what the streams call

    def established(self) -> None:
        """Both sides know that they speak the same protocol."""
        self.transport.pause()
        self.bidi = self.streams.bidi
        self._host.established(self)

    def closed_by_peer(self, last: bytes) -> None:
        """The peer has ended the top-level, with this payload."""
        code, reason = read_close(last)
        text = f"{self.peer} closed the connection (code {code})"
        self.lose(
            ConnectionLost(
                f"{text}: {reason}" if reason else text, code=code, reason=reason, remote=True
            )
        )

    # handshakes

    def _hear(self, data: bytes) -> bool:
        """Looks at the first bytes of the peer, which may speak something else."""
        if len(self._first) < 8:
            self._first += data[:8]
        # What each side says first has the top bit set; text and records of TLS do not.
        if self._tls is not None or self.link is not None:
            return True
        if len(self._first) < 4 or not self._first[:4].isascii():
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

    def _shake_hands(self) -> bool:
        """Goes on with TLS; True when it is complete."""
        tls = self._tls
        assert tls is not None
        try:
            data = tls.handshake()
        except TlsError as error:
            foreign = not self.is_client and tls.first and not speaks_tls(tls.first)
            self._finish(self._failed(self._explain(error)))
            self.transport.part(REFUSAL if foreign else tls.pending())
            return False
        except OSError as error:
            self.lose(self._failed(why(error)))
            return False
        self._first = tls.first
        if data or tls.complete:
            self._stepped_at = self._time()
        if data:
            self.transport.out.add(data)
        if tls.complete and not self._secured(tls):
            return False
        self.transport.transmit()
        return tls.complete

    def _secured(self, tls: Tls) -> bool:
        """TLS is up: is the peer who it should be, and does it speak the same protocol?"""
        self.peer_identity = tls.identity
        reason = self._host.secured(self)
        if tls.protocol == LINK_ALPN and not self.is_client:
            self._door = ListenerHandshake(partial(self._host.choose, self))
        elif tls.protocol != ALPN:
            reason = f"{self._who} speaks TLS but not Aqueduct (no common ALPN protocol)"
        if reason is None:
            if self._door is None:
                self.transport.secure = True
                self.streams.greet()
            return True
        self._finish(self._failed(reason))
        self.transport.part(tls.farewell())
        return False

    def _begin(self) -> None:
        """The user is there: it hears of everything from the start."""
        streams, transport = self.streams, self.transport
        user = streams.user
        assert user is not None
        lost_before = self.error
        streams.begun = True
        if streams.established:
            streams.reported = True
            user.connected()
        if lost_before is not None:
            self._tell_user()
        elif not streams.over:
            streams.ping(asked=False)
            transport.resume()
            self._loop.call_soon(transport.readable)  # what TLS holds makes no socket readable
            transport.processing = True
            try:
                streams.report_early()
            except RemoteProtocolError as error:
                self._violated(error)
            finally:
                transport.processing = False
            transport.settle()

    # a link

    @property
    def suspended(self) -> bool:
        """See the contract."""
        return self.link is not None and self.link.down_since is not None and not self.streams.over

    @property
    def resumes(self) -> int:
        """See the contract."""
        return 0 if self.link is None else self.link.core.resumes

    def _at_door(self, data: bytes) -> bool:
        """Goes on with the handshake of a link; whether ``data`` belonged to it."""
        if self._door is None:
            if self.is_client or self._first or self._tls is not None or not self._host.resumes:
                return False
            self._first = data[:8]
            if data[0]:  # no hello of a link
                self._greet()
                return False
            self._door = ListenerHandshake(partial(self._host.choose, self))
        door = self._door
        refused: str | None = None
        try:
            agreement = door.receive_data(data)
        except RemoteProtocolError as error:
            agreement, refused = None, str(error)
        greeting, door.output = door.output, b""
        if (agreement or door.distant) and self.transport.out.left:
            agreement, greeting = None, b""
            refused = "the client has not taken what it was sent before: it may try again"
        elif door.distant is not None:
            found = self._host.distant(
                self, door.distant, self._sock, self._tls, greeted=not greeting
            )
            if found is not None:
                refused = found.why
                greeting += encode_reply(found.epoch, 0) if found.answered else b""
        if refused is not None:
            self._finish(self._failed(f"the handshake of a link: {refused}"))
            self.transport.part(_seal(self._tls, greeting))
        elif agreement is not None:
            self._door = None
            self.transport.detach()
            self._host.agreed(self, LinkConnection(self._sock, self._tls, agreement, greeting))
        elif greeting and door.distant is None:  # a peer may wait for it (RL-R5)
            self.transport.out.add(_seal(self._tls, greeting))
            self.transport.transmit()
        return True

    def use_link(self, link: CarrierLink, connection: LinkConnection) -> None:
        """Goes on with this connection of its link."""
        self.link, self._sock, self._tls = link, connection.sock, connection.tls
        relayed = connection.relayed
        with suppress(OSError):  # the peer has gone again, and reading will say so
            if relayed is None:
                self.local, self.peer = ends_of(self._sock, self.peer_credentials)
            else:
                self.local, self.peer = relayed.local, relayed.peer
        self._records = link.connected(connection)
        transport = self.transport = self._new_transport()
        self.flush = transport.flush
        transport.secure = True
        if connection.answer:
            transport.out.add(_seal(self._tls, connection.answer))
        transport.resume()
        if connection.agreement.resumed:
            logger.info("%s: the link goes on", self.peer)
            transport.transmit()
        else:
            self._greet()
        self._loop.call_soon(transport.readable)  # what came with the handshake

    def vanish(self) -> None:
        """Its socket is another carrier's now, or another process's: it was no connection."""
        self.transport.detach()
        self._told = True
        self._finish(self._failed("it was handed to the link that it resumes"), tell=False)
        self._host.released(self)

    def cut(self, why: str) -> bool:
        """The connection is gone; whether its link waits for another one."""
        streams, link = self.streams, self.link
        if link is None or streams.over or (self.is_client and not streams.established):
            return False
        if not self.suspended:
            logger.info("%s: the connection is cut (%s); its link waits", self.peer, why)
            link.cut()
            self._records = None
            self._host.cut(self)
        return True

    # the end

    def _close_if_drained(self, at_once: bool) -> None:
        if self.streams.over:
            return
        waits = self.suspended or self.transport.out.left or self.streams.unsent
        if at_once or not waits:
            self._close_now()

    def _close_now(self) -> None:
        if self.streams.over or self._close is None:
            return
        code, reason = self._close
        text = f"the connection to {self.peer} was closed here"
        # A user that closes knows why. Once it is told, it may end its loop: not before the peer
        # has taken the close, and the socket is gone.
        self._finish(
            ConnectionLost(f"{text}: {reason}" if reason else text, code=code, reason=reason),
            tell=False,
        )
        self._say(code, reason)

    def _violated(self, error: RemoteProtocolError) -> None:
        """The peer broke the protocol (BP-4): it is told, and the connection ends."""
        protocol = "bpmux" if self.link is None else "bpmux or Relink"
        reason = f"the peer broke {protocol}: {error}"
        if not self.streams.established and self._first:
            reason += f"; {spoken(self._first)}"
        self._finish(ConnectionLost(f"{self.peer}: {reason}", code=error.code, reason=reason))
        self._say(error.code, str(error))

    def _say(self, code: int, reason: str) -> None:
        """The close, after what has been taken from the core; nothing else leaves any more."""
        if self.transport.released:  # there is no socket
            self.released()
            return
        top = self.streams.mux.top_sink
        payload = close_payload(code, reason)
        if len(payload) > top.credit_out:
            payload = b""
        chunk = encode_head(type_for(top), END, 0) + encode_rest(END, 0, len(payload)) + payload
        if self.link is not None:
            chunk = framed(chunk) if self.link.clear else b""
        if self._tls is not None:
            if not self._tls.complete:
                chunk = b""
            else:
                chunk = b"".join(self._tls.seal([chunk])) + self._tls.farewell()
        self.transport.part(chunk)

    def _end_of_stream(self) -> None:
        """The peer has closed its side, or half of it, which is the same here."""
        mux = self.streams.mux
        if self.cut(f"{self._who} closed the connection"):
            return
        mux.receive_eof()
        if mux.error is not None:
            reason = f"{self._who} closed the connection inside a chunk"
        elif self.heard_at is None:
            reason = f"{self._who} closed the connection without a word"
        else:
            reason = f"{self._who} closed the connection without saying why"
        self.lose(self._failed(reason))

    def _idle(self) -> None:
        timeout = self._config.timing.idle_timeout
        left = self.transport.last_input + timeout - self._time()
        if self.suspended:
            self._idle_timer = self._loop.call_later(timeout, self._idle)
        elif left > 0:
            self._idle_timer = self._loop.call_later(left, self._idle)
        elif (
            self.transport.reader.relax()
        ):  # a little of a chunk may have come without waking a task
            self._idle_timer = self._loop.call_later(_A_LOOK, self._idle)
        elif self.cut(f"nothing was heard for {timeout:.3g} s"):
            self._idle_timer = self._loop.call_later(timeout, self._idle)
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
        if self.streams.over:
            return
        self.error = error
        for timer in (self._idle_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        self.streams.end()
        if self.link is not None:
            self.link.end()
        self._host.ended(self, error)
        if tell:
            self._tell_user()

    def _tell_user(self) -> None:
        user, error = self.streams.user, self.error
        if self.streams.begun and user is not None and error is not None and not self._told:
            self._told = True
            user.closed(error)


def _seal(tls: Tls | None, data: bytes) -> bytes:
    """These bytes as the socket has them."""
    return data if tls is None else b"".join(tls.seal([data]))
