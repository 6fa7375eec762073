"""``connect``: the side that makes the connection and sends the SETUP."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from aqueduct.address import REACTIVE, Address
from aqueduct.arguments import checked
from aqueduct.carriers.certificates import ClientTls
from aqueduct.carriers.stream.sockets import check_path
from aqueduct.carriers.transports.byte_transport import ByteTransport
from aqueduct.carriers.transports.dialing import Dialing
from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint.accounts import process
from aqueduct.errors import ConfigError, ConnectFailed
from aqueduct.forks import own_loop
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection
from aqueduct.reactivesocket.connection import ReactiveSocketConnection
from aqueduct.reactivesocket.responding import Responder
from aqueduct.reactivesocket.transport import FrameTransport
from aqueduct.reactivesocket.web_transport import WebTransport, require_websockets

__all__ = ["ALPN", "connect", "parse"]

ALPN: Final = "reactivesocket"
TLS: Final = f"{REACTIVE}tls"


@checked()
async def connect(
    address: Address | str,
    *,
    setup: bytes = b"",
    responder: Responder | None = None,
    config: Config = DEFAULT,
    tls: ClientTls | None = None,
    origin: str | None = None,
) -> ReactiveSocketConnection:
    """Connects to a program that serves ReactiveSocket, within Timing.connect_timeout.

    ``address`` is ``reactivesocket+tcp://``, ``+tls://``, ``+unix://``, ``+ws://`` or ``+wss://``.
    ``setup``: the data of the SETUP. ``responder`` answers what the server asks; without one it is
    refused. ``origin``: what a WebSocket says of itself, as a web page would.

    The server says nothing if it takes the SETUP. If it does not, the first request raises
    ConnectFailed with its reason. Raises ConfigError and ConnectFailed.
    """
    found = parse(address)
    if origin is not None and not found.web:
        raise ConfigError(f"{found}: origin is for {REACTIVE}ws:// and {REACTIVE}wss:// alone")
    most = config.limits.connections
    if process().connections >= most:
        raise ConnectFailed(
            f"{found}: the process has {most} connections open, which is the limit "
            "(Limits.connections)"
        )
    loop = asyncio.get_running_loop()
    own_loop(loop)
    silence = 2 * config.timing.progress_deadline  # the connection itself looks before
    alpn, encrypted = ("http/1.1", f"{REACTIVE}wss") if found.web else (ALPN, TLS)
    dialing = Dialing(found, config, tls, alpn, encrypted=encrypted, silence=silence)
    core = ReactiveConnection(
        config.reactivesocket, client=True, setup=bytes(setup), framed=not found.web
    )
    attempt = _Attempt(dialing)
    connection = ReactiveSocketConnection(
        core, config, attempt, responder, setup=bytes(setup), peer=str(found)
    )
    if found.web:
        transport: ByteTransport = WebTransport(
            config, connection, found, str(found), client=True, origin=origin
        )
    else:
        transport = FrameTransport(config, connection, str(found))
    attempt.transport = transport
    connection.carry(transport)
    deadline = loop.time() + config.timing.connect_timeout
    sock: socket.socket | None = None
    process().opened()  # from here on: others may dial meanwhile
    try:
        async with asyncio.timeout_at(deadline):
            sock = await dialing.reach(deadline)
            await dialing.begin(transport, sock)
            await attempt.done
    except BaseException as error:
        connection.abandon("it was given up")
        if sock is not None and transport.extra("socket") is None:
            sock.close()
        how_long = f"{config.timing.connect_timeout:g} s (Timing.connect_timeout)"
        failure = dialing.failure(error, how_long)
        if failure is error:
            raise
        raise failure from (None if isinstance(error, TimeoutError) else error)
    return connection


def parse(address: Address | str) -> Address:
    """An address that ReactiveSocket is spoken at. Raises ConfigError."""
    found = Address.parse(address) if isinstance(address, str) else address
    if not found.reactive:
        known = ", ".join(f"{REACTIVE}{kind}://" for kind in ("tcp", "tls", "unix", "ws", "wss"))
        raise ConfigError(f"{found}: ReactiveSocket is spoken at {known} alone")
    if found.unix:
        check_path(found)
    if found.web:
        require_websockets(found)
    return found


class _Attempt:
    """The owner of a client's connection."""

    def __init__(self, dialing: Dialing) -> None:
        self.transport: ByteTransport
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._dialing = dialing

    def made(self, connection: ReactiveSocketConnection) -> None:
        """The transport is there, within TLS if that was asked for."""
        self._dialing.check(self.transport)

    def opened(self, connection: ReactiveSocketConnection) -> None:
        """Frames may flow."""
        if not self.done.done():
            self.done.set_result(None)

    async def offered(self, connection: ReactiveSocketConnection) -> str | None:
        """Of a server."""
        raise AssertionError("a client is asked for a SETUP")

    def over(self, connection: ReactiveSocketConnection) -> None:
        """The connection is over."""
        process().closed()
        if not self.done.done():
            error = connection.error
            if not isinstance(error, ConnectFailed):
                error = ConnectFailed(f"{connection.peer}: {error}", reason=str(error))
            self.done.set_exception(error)

    def released(self, connection: ReactiveSocketConnection) -> None:
        """Its transport is gone."""
