"""``serve``: the side that clients connect to."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from typing import TypeAlias

from aqueduct.address import REACTIVE, Address
from aqueduct.arguments import checked
from aqueduct.carriers.certificates import ServerTls
from aqueduct.carriers.contract import Bound
from aqueduct.carriers.stream.binding import bind
from aqueduct.carriers.transports.accepting import Accepting, Arriving, name_of_socket
from aqueduct.carriers.transports.byte_transport import ByteTransport
from aqueduct.closing import AsyncClosing
from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint.accounts import process
from aqueduct.errors import ConfigError, ConnectionLost
from aqueduct.escaping import logger_of
from aqueduct.forks import own, own_loop
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection
from aqueduct.protocol.reactivesocket.state import ReactiveState
from aqueduct.reactivesocket.connection import ReactiveSocketConnection
from aqueduct.reactivesocket.dialing import ALPN, TLS, parse
from aqueduct.reactivesocket.responding import Responder
from aqueduct.reactivesocket.transport import FrameTransport
from aqueduct.reactivesocket.web_transport import WebTransport

__all__ = ["AuthorizeSetup", "OnConnection", "ReactiveSocketServer", "serve"]

log = logger_of(__name__)

OnConnection: TypeAlias = Callable[[ReactiveSocketConnection], Awaitable[None]]
AuthorizeSetup: TypeAlias = Callable[
    [ReactiveSocketConnection], Awaitable[bool | str | None] | bool | str | None
]


class ReactiveSocketServer(AsyncClosing):
    """What ``serve`` returns."""

    def __init__(
        self,
        on_connection: OnConnection | None,
        bound: Bound,
        responder: Responder | None,
        authorize_setup: AuthorizeSetup | None,
        origins: Sequence[str],
        config: Config,
        tls: ServerTls | None,
        setup_required: bool,
    ) -> None:
        self.config = config
        self.connections: set[ReactiveSocketConnection] = set()
        """Those whose SETUP was taken, and that live."""
        self.ending: set[ReactiveSocketConnection] = set()
        """Those that are over, and whose transport is not gone."""
        self.responder = responder
        self.setup_required = setup_required
        self.origins = tuple(origins)
        self._on_connection = on_connection
        self._authorize = authorize_setup
        self._by_origin: Counter[Hashable] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        """What answered requests of connections that are over, and has not ended."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self.accepting = Accepting(
            bound,
            config,
            tls,
            lambda sock: _Arrival(self, sock),
            "http/1.1" if bound.address.web else ALPN,
            patience=config.timing.connect_timeout,
            silence=2 * config.timing.progress_deadline,  # the connection itself looks before
        )
        self.address = self.accepting.address
        """What clients connect to, with the real port."""
        own(self)

    def __str__(self) -> str:
        return str(self.address)

    @property
    def handshakes(self) -> int:
        """Connections without a SETUP: ByteStream.half_open at most."""
        return self.accepting.handshakes

    async def stop(self) -> None:
        """Accepts no more. Connections go on."""
        self._closed = True
        await self.accepting.close()

    async def close(self) -> None:
        """Accepts no more, closes every connection, and waits for the end of its tasks.

        These are ``on_connection`` and what answers requests. A task that does not end within
        Timing.close_linger after it was cancelled is named in the log.
        """
        await self.stop()
        connections = (*self.connections, *self.ending)
        answering = {task for connection in connections for task in connection.answering()}
        answering |= self._answering
        closing = [connection.close() for connection in tuple(self.connections)]
        try:
            for found in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(found, Exception):
                    log.error("closing a connection failed", exc_info=found)
        finally:
            tasks = self._tasks - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            for connection in tuple(self.ending):
                connection.abandon("the server closes")
            await asyncio.sleep(0)  # asyncio lets go of sockets a step later
        # What answers was cancelled with its connection: a second time would disturb its end.
        if tasks := (tasks | answering) - {asyncio.current_task()}:
            _, left = await asyncio.wait(tasks, timeout=self.config.timing.close_linger)
            for task in left:
                log.warning("a task goes on after its server was closed: %r", task)

    def left_behind(self) -> None:
        """In a forked child: the parent listens."""
        self.accepting.left_behind()

    # What arrivals ask

    async def look_at(self, connection: ReactiveSocketConnection, origin: Hashable) -> str | None:
        """Why a SETUP is not taken; None: it is."""
        crowded = self._crowded(origin)
        if crowded or self._authorize is None:
            return crowded
        found = self._authorize(connection)
        if inspect.isawaitable(found):
            found = await found
        if isinstance(found, str):
            return found
        if found is None or found is True:
            return self._crowded(origin)
        return "the server does not take it"

    def begin(self, connection: ReactiveSocketConnection, origin: Hashable) -> None:
        """Its SETUP is taken."""
        self.connections.add(connection)
        self._by_origin[origin] += 1
        process().opened()
        if self._on_connection is not None:
            task = self._loop.create_task(self._run(self._on_connection, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def end(self, connection: ReactiveSocketConnection) -> None:
        """It is over."""
        self.connections.discard(connection)
        self.ending.add(connection)
        for task in connection.answering():
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    def released(self, connection: ReactiveSocketConnection, origin: Hashable) -> None:
        """Its socket is gone. Until then it counts: the peer has a part in how long that takes."""
        self.ending.discard(connection)
        process().closed()
        self._by_origin[origin] -= 1
        if not self._by_origin[origin]:
            del self._by_origin[origin]

    # Within

    def _crowded(self, origin: Hashable) -> str | None:
        """Why there can be no further connection from there; None: there can."""
        if self._closed:
            return "the server closes"
        limits = self.config.limits
        if process().connections >= limits.connections:
            return f"there are {limits.connections} connections, the limit (Limits.connections)"
        most = limits.connections_address
        if most is not None and self._by_origin[origin] >= most:
            return (
                f"{most} connections from this address are the limit (Limits.connections_address)"
            )
        return None

    async def _run(self, on_connection: OnConnection, connection: ReactiveSocketConnection) -> None:
        try:
            await on_connection(connection)
        except ConnectionLost as error:
            if connection.error is None:
                log.warning("on_connection of %r ended by %s", connection, error)
        except Exception:
            log.exception("on_connection of %r failed", connection)
        finally:
            with suppress(asyncio.CancelledError):
                await connection.close()


class _Arrival(Arriving):
    """The owner of a server's connection."""

    def __init__(self, server: ReactiveSocketServer, sock: socket.socket) -> None:
        config = server.config
        core = ReactiveConnection(
            config.reactivesocket,
            client=False,
            setup_required=server.setup_required,
            framed=not server.address.web,
        )
        name = name_of_socket(sock)
        self._server = server
        self._taken = False
        """Whether its SETUP was."""
        self._connection = ReactiveSocketConnection(core, config, self, server.responder, peer=name)
        if server.address.web:
            transport: ByteTransport = WebTransport(
                config,
                self._connection,
                server.address,
                name,
                client=False,
                origins=server.origins,
                setup_required=server.setup_required,
            )
        else:
            transport = FrameTransport(config, self._connection, name)
        self._connection.carry(transport)
        super().__init__(server.accepting, sock, transport)

    def give_up(self) -> None:
        """It took too long, or others need its place."""
        self.settle()
        why = "no SETUP came in time"
        if self._connection.core.state is not ReactiveState.NEW:
            why = "authorize_setup has not said in time whether its SETUP is taken"
        self._connection.abandon(why)

    # ReactiveOwner

    def made(self, connection: ReactiveSocketConnection) -> None:
        """Its transport is there."""

    def opened(self, connection: ReactiveSocketConnection) -> None:
        """Frames may flow."""

    async def offered(self, connection: ReactiveSocketConnection) -> str | None:
        """Its SETUP is there."""
        why = await self._server.look_at(connection, self.origin)
        if why is None and not connection.closed:
            self._taken = True
            self.settle()
            self._server.begin(connection, self.origin)
        return why

    def over(self, connection: ReactiveSocketConnection) -> None:
        """It is over. If its SETUP was not taken, it keeps its place until its socket is gone."""
        if self._taken:
            self._server.end(connection)

    def released(self, connection: ReactiveSocketConnection) -> None:
        """Its transport is gone."""
        self.settle()
        if self._taken:
            self._server.released(connection, self.origin)


@checked(
    on_connection="on_connection_or_none",
    address="listening",
    authorize_setup="authorize",
    tls="server_tls",
)
async def serve(
    on_connection: OnConnection | None,
    address: Address | str | Bound,
    *,
    responder: Responder | None = None,
    authorize_setup: AuthorizeSetup | None = None,
    origins: Sequence[str] = (),
    config: Config = DEFAULT,
    tls: ServerTls | None = None,
    setup_required: bool = True,
) -> ReactiveSocketServer:
    """Listens for clients of ReactiveSocket.

    ``on_connection`` runs in a task for each connection, which is closed when it returns; None: the
    connection lives until one side closes it. ``responder`` answers what clients ask.
    ``authorize_setup(connection)`` looks at ``connection.setup`` and who the peer is: True and None
    take it, False or a text do not, and the client is told the text; it may be a coroutine
    function.

    ``address`` as for ``connect``, or what was bound before. ``tls`` is for ``+tls://`` and
    ``+wss://`` alone, and needed there. ``origins``: of web pages that may connect; a WebSocket
    without an origin is none. Without ``setup_required`` clients need not send a SETUP.

    Port 0: one that is free; see ``ReactiveSocketServer.address``. The file of a Unix socket is for
    its owner alone, unless the address has a mode. Raises ConfigError.
    """
    bound = address if isinstance(address, Bound) else None
    found = parse(address if bound is None else bound.address)  # type: ignore[arg-type]
    if found.certified != (tls is not None):
        raise ConfigError(
            f"{found}: tls, with the certificate to show, is for {TLS}:// and {REACTIVE}wss:// "
            "alone and needed there; dev_certificate() makes one"
        )
    if origins and not found.web:
        raise ConfigError(
            f"{found}: origins are of web pages, which connect to {REACTIVE}ws:// and "
            f"{REACTIVE}wss:// alone"
        )
    own_loop(asyncio.get_running_loop())
    if bound is None:
        (bound,) = await bind(found, backlog=config.byte_stream.backlog)
    return ReactiveSocketServer(
        on_connection,
        bound,
        responder,
        authorize_setup,
        origins,
        config,
        tls,
        setup_required,
    )
