"""How a client comes to a connection: a socket, and TLS where the address has it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
from typing import Final

from aqueduct.address import Address
from aqueduct.carriers.certificates import ClientTls, client_tls
from aqueduct.carriers.stream.connect import dial
from aqueduct.carriers.tls_stdlib import client_context
from aqueduct.carriers.transports.byte_transport import ByteTransport, prepare
from aqueduct.carriers.transports.reasons import reason_of
from aqueduct.carriers.verify import ascii_name
from aqueduct.config import Config
from aqueduct.errors import AqueductError, ConfigError, ConnectFailed
from aqueduct.forks import own_socket

__all__ = ["Dialing"]

_FULL_PAUSE: Final = 0.01  # seconds between two looks at a Unix socket with a full backlog


class Dialing:
    """One address, with what its connections have in common."""

    def __init__(
        self,
        address: Address,
        config: Config,
        tls: ClientTls | None,
        *protocols: str,
        encrypted: str,
        silence: float,
    ) -> None:
        """``protocols`` are spoken within TLS. ``silence``: see ``prepare``. Raises ConfigError.

        ``encrypted``: the scheme to use for TLS, for errors.
        """
        self.address = address
        self._config = config
        self._silence = silence
        self._tls: ClientTls | None = None
        self._context: ssl.SSLContext | None = None
        self._server_name = ""
        if address.certified:
            self._tls = wanted = client_tls(address, tls)
            self._server_name = ascii_name(wanted.server_name or address.host)
            self._context = client_context(wanted, self._server_name, *protocols)
        elif tls is not None:
            raise ConfigError(f"{address}: there is no TLS here; use {encrypted}://")

    async def reach(self, deadline: float) -> socket.socket:
        """A socket that is connected. Raises OSError, ConnectFailed. The caller has a deadline."""
        if self.address.unix:
            sock = await _dial_unix(self.address)
        else:
            sock = await dial(self.address, self._config, deadline)
        try:
            prepare(sock, self._config, self._silence)
        except BaseException:
            sock.close()
            raise
        return sock

    async def begin(self, transport: ByteTransport, sock: socket.socket) -> None:
        """Has the transport use the socket, within TLS where the address says so."""
        await asyncio.get_running_loop().create_connection(
            lambda: transport,
            sock=sock,
            ssl=self._context,
            server_hostname=None if self._context is None else self._server_name,
        )

    def check(self, transport: ByteTransport) -> None:
        """Compares a pinned certificate. Raises ConnectFailed."""
        wanted = None if self._tls is None else self._tls.fingerprint
        if wanted is not None:
            shown = transport.extra("ssl_object").getpeercert(binary_form=True)
            found = f"sha256:{hashlib.sha256(shown or b'').hexdigest()}"
            if found != wanted:
                raise ConnectFailed(
                    f"{self.address}: the server's certificate is {found}, not {wanted}; if the "
                    "server has a new certificate, pin that one with ?fingerprint="
                )

    def failure(self, error: BaseException, how_long: str) -> BaseException:
        """What to raise for an error of ``reach``, ``begin`` or the handshake that followed.

        ``how_long``: what a TimeoutError has waited for.
        """
        if isinstance(error, TimeoutError):
            text = f"{self.address}: no answer within {how_long}"
            return ConnectFailed(text, reason="no answer")
        if isinstance(error, OSError) and not isinstance(error, AqueductError):
            reason = self._reason(error)
            return ConnectFailed(f"{self.address}: {reason}", reason=reason)
        return error

    def _reason(self, error: OSError) -> str:
        reason = reason_of(error, self._server_name)
        return f"{self.address.path!r}: {reason}" if self.address.unix else reason


async def _dial_unix(address: Address) -> socket.socket:
    """A socket connected to the path. Raises OSError. The caller has a deadline."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    own_socket(sock)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(os.fspath(address.path))
                return sock
            except BlockingIOError:
                # Its backlog is full. No readiness tells when there is room (connect(2), EAGAIN).
                await asyncio.sleep(_FULL_PAUSE)
    except BaseException:
        sock.close()
        raise
