"""Connecting: the addresses of a name in turn, and a reason for each failure."""

from __future__ import annotations

import asyncio
import copy
import errno
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import AlertDescription, SessionTicket
from cryptography import x509

from aqueduct.address import Address
from aqueduct.carriers.binding import targets_of
from aqueduct.carriers.certificates import ClientTls, client_tls, fingerprint_of
from aqueduct.carriers.quic.connection import QuicCarrier
from aqueduct.carriers.quic.flow_control import capped_congestion_control, version_of
from aqueduct.carriers.quic.packets import FastConnection
from aqueduct.carriers.quic.path_mtu import BASE
from aqueduct.carriers.quic.tickets import STORE
from aqueduct.carriers.quic.tls import BIDI_ALPN, client_configuration, trust_of
from aqueduct.carriers.quic.udp import (
    BURST_FRAMES,
    SocketAddress,
    UdpSocket,
    datagram_size,
    host_port,
)
from aqueduct.carriers.tls_library import Trust
from aqueduct.config import Config
from aqueduct.errors import ConnectFailed, ConnectionLost

__all__ = ["connect", "shown_chain"]

_ALERTS: Final = {
    10: AlertDescription.certificate_expired,
    18: AlertDescription.unknown_ca,
    19: AlertDescription.unknown_ca,
    20: AlertDescription.unknown_ca,
    26: AlertDescription.unsupported_certificate,
}
"""What a server is told of some errors of OpenSSL, X509_V_ERR_."""
_REFUSED: Final = 3  # in a row, with nothing received between: the server is gone
_NOBODY: Final = (
    "connection refused: no program listens at this UDP port; is the server started, and is this "
    "its port?"
)


async def connect(
    address: Address, config: Config, tls: ClientTls | None = None, *, bidi: bool = False
) -> QuicCarrier:
    """Connects to ``address``; returns when the handshake is done.

    The addresses of the name are tried in turn, all within ``Timing.connect_timeout``. Raises
    ConnectFailed, which says for each what went wrong, and ConfigError for settings that cannot
    work. ``bidi``: with bidirectional streams, which the listener has to allow. If the address
    then has ``early_data=on`` and there is a ticket of the server, it returns at once, and the
    carrier is ``early``. The handshake has the same time, and the carrier ends without it. So only
    the last of several addresses is sent early data: no other one could be tried after it.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + config.timing.connect_timeout
    wanted = client_tls(address, tls)
    configuration = client_configuration(address, config, wanted, bidi=bidi)
    trust = trust_of(address, wanted)
    configuration.congestion_control_algorithm = capped_congestion_control(
        config.quic.congestion_control, config.quic.transport_buffer
    )
    targets = await targets_of(address, socket.SOCK_DGRAM, deadline)
    problems: list[str] = []
    for index, (family, where) in enumerate(targets):
        share = (deadline - loop.time()) / (len(targets) - index)
        last = index == len(targets) - 1
        attempt = _Attempt(address, config, wanted, trust, configuration, bidi, last)
        try:
            return await attempt.run(family, where, share)
        except ConnectFailed as error:
            if len(targets) == 1:
                raise
            problems.append(f"{host_port(where)}: {error.reason}")
    raise ConnectFailed(f"{address}: {'; '.join(problems)}", reason="; ".join(problems))


async def shown_chain(address: Address, config: Config) -> list[x509.Certificate]:
    """The certificates that a server shows, its own first; any will do. Raises ConnectFailed."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + config.timing.connect_timeout
    anything = client_tls(address, ClientTls(verify=False))
    configuration = client_configuration(address, config, anything, bidi=False)
    configuration.congestion_control_algorithm = capped_congestion_control(
        config.quic.congestion_control, config.quic.transport_buffer
    )
    (family, where), *_ = await targets_of(address, socket.SOCK_DGRAM, deadline)
    attempt = _Attempt(address, config, anything, None, configuration, False, True)
    carrier = await attempt.run(family, where, deadline - loop.time())
    carrier.close(0, "")
    return attempt.chain


class _Attempt:
    """One address: the socket, and the Host of the one connection on it."""

    def __init__(
        self,
        address: Address,
        config: Config,
        tls: ClientTls,
        trust: Trust | None,
        configuration: QuicConfiguration,
        bidi: bool,
        last: bool,
    ) -> None:
        self._bidi = bidi
        self._last = last
        self._address = address
        self._config = config
        self._tls = tls
        self._trust = trust
        self._configuration = copy.copy(configuration)
        self._early = bidi and address.early_data
        self._complete = False
        self._overdue: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._refusals = 0
        self._carrier: QuicCarrier | None = None
        self._socket: UdpSocket | None = None

    @property
    def chain(self) -> list[x509.Certificate]:
        """What the server has shown."""
        return self._quic.peer_chain

    async def run(self, family: int, where: SocketAddress, timeout: float) -> QuicCarrier:
        """Connects to one socket address. Raises ConnectFailed."""
        try:
            sock = socket.socket(family, socket.SOCK_DGRAM)
        except OSError as error:
            raise self._failure(f"no socket of this kind can be had ({error.strerror})") from error
        try:
            sock.connect(where)
        except OSError as error:
            sock.close()
            raise self._failure(self._unreachable(error)) from error
        self._socket = UdpSocket(
            sock,
            buffer_size=self._config.quic.socket_buffer,
            on_datagrams=self._arrived,
            on_burst=self._burst,
            on_error=self._failed,
            on_writable=self._writable,
            connected=True,
        )
        remote = sock.getpeername()
        size = datagram_size(self._config, self._address)
        self._configuration.max_datagram_size = size or BASE
        # A ticket is for the one server that gave it, and for one that is trusted in the same way.
        self._server = where, self._configuration.server_name, self._tls
        chain = self._remembered()
        self._quic = FastConnection(
            self._configuration,
            streams=self._config.flow.streams,
            initial_window=self._config.flow.initial_window,
            gaps=self._config.quic.gaps,
            discover=size is None,
            bidi=self._config.limits.channels + 1 if self._bidi else 0,
            early=bool(chain),
            **self._handlers(),
        )
        self._quic.remembered_chain = chain
        carrier = self._carrier = QuicCarrier(
            self._quic,
            self,
            is_client=True,
            peer=host_port(remote),
            local=host_port(sock.getsockname()),
            config=self._config,
        )
        self._quic.connect(remote, now=self._loop.time())
        if self._quic.early_data is not None and self._quic.early_data.allowed:
            carrier.begin_early()  # its first packet leaves with what the user writes at once
            self._overdue = self._loop.call_later(timeout, self._give_up, carrier, timeout)
            self._done.set_result(None)
            return carrier
        carrier.transmit()
        try:
            async with asyncio.timeout(timeout):
                await self._done
        except TimeoutError as error:
            failure = self._failure(self._silence(timeout))
            carrier.abandon(failure)
            raise failure from error
        except BaseException as error:
            carrier.abandon(ConnectionLost(f"{self._address}: {error!r}"))
            raise
        return carrier

    # early data

    def _remembered(self) -> Sequence[x509.Certificate]:
        """Makes ready what an earlier connection has left: whose certificates; empty: no ticket."""
        if not self._early or not self._last:
            return ()
        self._configuration.token = STORE.take_token(self._server)
        remembered = STORE.take(self._server, time.monotonic())
        if remembered is None or self._distrust(remembered.chain) is not None:
            return ()
        self._configuration.session_ticket = remembered.ticket
        # No other version: a server that asked for one could not read what is early data here.
        self._configuration.supported_versions = [remembered.version]
        return remembered.chain

    def _handlers(self) -> dict[str, Any]:
        """What aioquic calls with what the server gives for a further connection."""
        if not self._early:
            return {}
        return {"session_ticket_handler": self._keep_ticket, "token_handler": self._keep_token}

    def _keep_ticket(self, ticket: SessionTicket) -> None:
        settings = self._config.quic
        lifetime = (ticket.not_valid_after - ticket.not_valid_before).total_seconds()
        until = time.monotonic() + min(lifetime, settings.ticket_lifetime)
        chain, version = self._quic.peer_chain, version_of(self._quic)
        STORE.keep(self._server, ticket, chain, version, until, settings.tickets)

    def _keep_token(self, token: bytes) -> None:
        STORE.keep_token(self._server, token, self._config.quic.tickets)

    def _give_up(self, carrier: QuicCarrier, timeout: float) -> None:
        reason = self._silence(timeout)
        carrier.abandon(ConnectionLost(f"{self._address}: {reason}", reason=reason))

    # Host

    @property
    def blocked(self) -> bool:
        assert self._socket is not None
        return self._socket.blocked

    def send(self, datagrams: Sequence[tuple[bytes, SocketAddress]]) -> None:
        assert self._socket is not None
        self._socket.send(datagrams)

    def send_run(self, parts: list[bytes], size: int, address: SocketAddress) -> bool:
        assert self._socket is not None
        return self._socket.send_run(parts, size, address)

    def send_later(self, carrier: QuicCarrier) -> None:
        """``_writable`` follows."""

    def route(self, connection_id: bytes, carrier: QuicCarrier) -> None:
        """One socket, one connection: nothing to choose."""

    def unroute(self, connection_id: bytes) -> None:
        """Nothing to choose."""

    def accepted_early(self, carrier: QuicCarrier) -> None:
        """A client hears of it with the end of the handshake."""

    def established(self, carrier: QuicCarrier) -> None:
        self._complete = True
        if self._overdue is not None:
            self._overdue.cancel()
        found = self._distrust(self._quic.peer_chain)
        if found is None:
            if not self._done.done():
                self._done.set_result(None)
            return
        alert, reason = found
        # The peer is told, and never learns that the handshake was complete here.
        self._quic.close(
            QuicErrorCode.CRYPTO_ERROR + alert,
            frame_type=0,
            reason_phrase="the certificate is not accepted",
        )
        if carrier.early:
            carrier.abandon(ConnectionLost(f"{self._address}: {reason}", reason=reason))
        self._end(self._failure(reason))

    def _distrust(self, chain: Sequence[x509.Certificate]) -> tuple[AlertDescription, str] | None:
        """Why the server's certificate is not accepted: for the server, and for people."""
        wanted = self._tls.fingerprint
        got = fingerprint_of(chain[0]) if chain else None
        if wanted is not None and got != wanted:
            return AlertDescription.bad_certificate, (
                f"the server's certificate is {got}, not {wanted}; if the server has a new "
                "certificate, pin that one with ?fingerprint="
            )
        if self._trust is None:
            return None
        if not chain:
            return AlertDescription.certificate_required, "the server shows no certificate"
        flaw = self._trust.verify(chain)
        if flaw is None:
            return None
        reason = flaw.explain("server", self._configuration.server_name or "")
        return _ALERTS.get(flaw.code, AlertDescription.bad_certificate), reason

    def ended(self, carrier: QuicCarrier, error: ConnectionLost) -> None:
        if not self._done.done():
            self._end(self._why(error))
        if self._overdue is not None:
            self._overdue.cancel()
            if not self._complete:
                STORE.forget(
                    self._server
                )  # the next handshake is a full one, which may fare better
        if self._socket is not None:
            self._socket.close()

    # the socket

    def _arrived(self, buffer: memoryview, size: int, address: SocketAddress) -> tuple[int, int]:
        carrier = self._carrier
        assert carrier is not None
        self._refusals = 0
        now = self._loop.time()
        count = frames = 0
        for at in range(0, len(buffer), size):
            frames += carrier.receive(buffer[at : at + size], address, now)
            count += 1
            if frames >= BURST_FRAMES:
                break
        carrier.deliver()
        return count, frames

    def _burst(self) -> None:
        assert self._carrier is not None
        self._carrier.after_input()

    def _failed(self, error: OSError) -> None:
        assert self._carrier is not None
        if error.errno != errno.ECONNREFUSED:
            reason = self._unreachable(error)
            if not self._done.done():
                self._end(self._failure(reason))
            elif not self._complete:
                self._carrier.lose(ConnectionLost(f"{self._carrier.peer}: {reason}", reason=reason))
            return
        self._refusals += 1
        if not self._done.done():
            self._end(self._failure(_NOBODY))
        elif self._refusals >= _REFUSED or not self._complete:
            reason = "no server listens at its UDP port any more"
            self._carrier.lose(ConnectionLost(f"{self._carrier.peer}: {reason}", reason=reason))

    def _writable(self) -> None:
        if self._carrier is not None:
            self._carrier.transmit()

    # reasons

    def _end(self, failure: ConnectFailed) -> None:
        if not self._done.done():
            self._done.set_exception(failure)

    def _failure(self, reason: str) -> ConnectFailed:
        return ConnectFailed(f"{self._address}: {reason}", reason=reason)

    def _unreachable(self, error: OSError) -> str:
        if error.errno == errno.EMSGSIZE:
            size = self._configuration.max_datagram_size
            advice = "; use ?datagram_size=1200" if size > BASE else ", which QUIC needs"
            return f"the network here takes no datagrams of {size} bytes{advice}"
        return f"it cannot be reached ({error.strerror})"

    def _silence(self, timeout: float) -> str:
        if self._quic.started:
            return f"the handshake was not finished in {round(timeout, 1):g} s"
        return (
            f"nothing answers UDP at {host_port(self._quic.get_peer_address())} within "
            f"{round(timeout, 1):g} s; check the host, the port, and that firewalls let UDP pass"
        )

    def _why(self, error: ConnectionLost) -> ConnectFailed:
        """What the end of a connection means that never came up."""
        end = self._quic.termination
        if end is None:
            return self._failure(error.reason or str(error))
        text = end.reason_phrase
        alert = end.error_code - QuicErrorCode.CRYPTO_ERROR
        if alert == AlertDescription.no_application_protocol:
            if self._bidi:
                return self._failure(
                    f"it allows no bidirectional streams (no common ALPN protocol: {BIDI_ALPN})"
                )
            return self._failure("it speaks QUIC but not Aqueduct (no common ALPN protocol)")
        if text == "Could not find a common protocol version":
            return self._failure("it speaks no version of QUIC that is known here (1 and 2)")
        who = "the server" if self._quic.closed_by_peer else "this side"
        return self._failure(f"{who} ended the handshake: {text or hex(end.error_code)}")
