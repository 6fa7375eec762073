"""``connect`` and ``serve``: from an address to a Connection."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress

from aqueduct._speedups import channels as codec
from aqueduct.address import Address
from aqueduct.arguments import checked
from aqueduct.carriers import memory, stream
from aqueduct.carriers.certificates import ClientTls, ServerTls
from aqueduct.carriers.contract import Bound, Carrier, Listener
from aqueduct.carriers.places import Places, origin_of
from aqueduct.closing import AsyncClosing
from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint.accounts import process
from aqueduct.endpoint.channel import Headers
from aqueduct.endpoint.connection import Connection, OnHeaders
from aqueduct.errors import ConfigError, ConnectFailed, ConnectionLost, LimitExceeded
from aqueduct.escaping import logger_of, shown
from aqueduct.forks import own_loop

__all__ = ["Server", "bind", "connect", "connect_for_calls", "serve", "serve_calls"]

log = logger_of(__name__)

OnConnection = Callable[[Connection], Awaitable[None] | None]


@checked(headers="message_headers")
async def connect(
    address: str | Address,
    *,
    headers: Headers = (),
    config: Config = DEFAULT,
    tls: ClientTls | None = None,
) -> Connection:
    """Connects and exchanges connection headers, within Timing.connect_timeout.

    Raises ConfigError for an address or TLS settings that cannot work, LocalProtocolError for
    headers that cannot, ConnectFailed with the reason otherwise, ConnectionLost (code 4) when the
    server refuses the headers.
    """
    return await _connect(address, headers, config, tls, header_blocks=False)


async def connect_for_calls(
    address: str | Address, *, headers: Headers, config: Config, tls: ClientTls | None
) -> Connection:
    """``connect`` for a client of Arrow calls: messages have headers in either dialect (AC-95)."""
    return await _connect(address, headers, config, tls, header_blocks=True)


async def _connect(
    address: str | Address,
    headers: Headers,
    config: Config,
    tls: ClientTls | None,
    *,
    header_blocks: bool,
) -> Connection:
    target = address if isinstance(address, Address) else Address.parse(address)
    _refuse_reactive(target)
    codec.encode_connection_headers(headers)
    text = _crowded(config)
    if text:
        raise ConnectFailed(f"{target}: {text}")
    loop = asyncio.get_running_loop()
    own_loop(loop)
    deadline = loop.time() + config.timing.connect_timeout
    carrier: Carrier
    if target.scheme == "memory":
        carrier = await memory.connect(target, config, bidi=target.control_streams)
    elif target.scheme == "aqueduct":
        from aqueduct.carriers import quic  # a tenth of a second that others need not wait

        carrier = await quic.connect(target, config, tls, bidi=target.control_streams)
    else:
        carrier = await stream.connect(target, config, tls, bidi=target.control_streams)
    connection = Connection(carrier, config, headers=headers, header_blocks=header_blocks)
    try:
        async with asyncio.timeout_at(deadline):
            await connection.wait_ready()
    except TimeoutError:
        what = "the transport is up, but no Aqueduct connection headers came"
        if carrier.early:
            what = "early data was sent, but the handshake was not complete"
        _give_up(connection)
        raise ConnectFailed(
            f"{target}: {what} within {config.timing.connect_timeout:g} s (Timing.connect_timeout)"
        ) from None
    except asyncio.CancelledError:
        _give_up(connection)
        raise
    except ConnectionLost as error:
        if not carrier.early:
            raise
        # With early data the carrier was there before it was known whether the server is.
        reason = error.reason or str(error)
        raise ConnectFailed(f"{target}: {reason}", reason=reason) from error
    return connection


def _give_up(connection: Connection) -> None:
    """Ends an attempt that nobody waits for any more: its event loop may end at once."""
    connection.close_soon()
    reason = "the attempt to connect was given up"
    connection.carrier.abandon(ConnectionLost(f"{connection.peer}: {reason}", reason=reason))


class Server(AsyncClosing):
    """What ``serve`` returns: listeners and their live connections."""

    def __init__(self, config: Config, *, header_blocks: bool = False) -> None:
        """``header_blocks``: of its connections."""
        self.config = config
        self._header_blocks = header_blocks
        self.connections: set[Connection] = set()
        self.accepted = 0
        """Connections ever accepted."""
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._unready: Places[Connection] = Places(
            config.limits.unready_connections, config.timing.handshake_silence
        )
        self._by_origin: Counter[Hashable] = Counter()

    @property
    def addresses(self) -> list[str]:
        """What clients connect to, with real ports."""
        return [address for listener in self._listeners for address in listener.addresses]

    def stop_listening(self) -> None:
        """Accepts no more; live connections go on."""
        self._closing = True
        for listener in self._listeners:
            listener.close()

    def end_relays(self) -> None:
        """Cuts the connections that pass through here: their clients make others."""
        for relaying in self._streams():
            relaying.end_relays()

    async def close(
        self, *, code: int = 0, reason: str = "the server is closing", relays: float = 0.0
    ) -> None:
        """Accepts no more, closes every connection and waits for their end.

        Connections that pass through here to another process have ``relays`` seconds.
        """
        self.stop_listening()
        for connection in tuple(self.connections):
            connection.close_soon(code, reason)
        if relays > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(relays):
                    for relaying in self._streams():
                        await relaying.wait_relays()
        self.end_relays()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=self.config.timing.close_linger)
        linger = self.config.timing.close_linger + 5
        for listener in self._listeners:
            with suppress(TimeoutError):
                async with asyncio.timeout(linger):
                    await listener.wait_closed()

    # Within

    def _streams(self) -> list[stream.StreamListener]:
        return [each for each in self._listeners if isinstance(each, stream.StreamListener)]

    def _accept(
        self,
        carrier: Carrier,
        on_connection: OnConnection,
        on_headers: OnHeaders | None,
        headers: Headers,
    ) -> None:
        text = _crowded(self.config)
        connection = Connection(
            carrier,
            self.config,
            headers=headers,
            on_headers=on_headers,
            header_blocks=self._header_blocks,
        )
        if text:
            log.warning("%r was refused: %s", connection, text)
            connection.close_soon(LimitExceeded.code, text)
            return
        if self._closing:
            connection.close_soon(0, "the server is closing")
            return
        loop = asyncio.get_running_loop()
        origin = origin_of(carrier.peer, carrier.peer_credentials)
        most = self.config.limits.connections_address
        if most is not None and self._by_origin[origin] >= most:
            connection.close_soon(
                LimitExceeded.code,
                f"{most} connections from this address are the limit (Limits.connections_address)",
            )
            return
        if self._unready.full:  # one more than that, while no peer is silent for long
            silent = self._unready.candidate(loop.time())
            if silent is not None:
                silent.close_soon(
                    LimitExceeded.code,
                    "no connection headers came, and others wait (Limits.unready_connections)",
                )
                self._unready.discard(silent)
        self._unready.add(connection, origin, loop.time())
        self._by_origin[origin] += 1
        self.connections.add(connection)
        self.accepted += 1
        task = loop.create_task(self._run(connection, origin, on_connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, connection: Connection, origin: Hashable, on_connection: OnConnection
    ) -> None:
        try:
            try:
                async with asyncio.timeout(self.config.timing.connect_timeout):
                    await connection.wait_ready()
            except TimeoutError:
                connection.close_soon(2, "no connection headers came in time")
                return
            except ConnectionLost:
                return
            finally:
                self._unready.discard(connection)
            try:
                result = on_connection(connection)
                if inspect.isawaitable(result):
                    await result
            except ConnectionLost:
                return
            except Exception:
                log.exception("the connection callback failed for %r", connection)
                connection.close_soon(6, "the service failed")
                return
            await connection.wait_closed()
        finally:
            await self._forget(connection, origin)

    async def _forget(self, connection: Connection, origin: Hashable) -> None:
        try:
            if not connection.closed:
                connection.close_soon()
            await connection.wait_closed()
        finally:
            self.connections.discard(connection)
            self._by_origin[origin] -= 1
            if not self._by_origin[origin]:
                del self._by_origin[origin]


async def bind(addresses: Sequence[str | Address], copies: int) -> list[list[Bound]]:
    """Binds the addresses for ``copies`` processes that will share them: a list for each.

    Hand them to ``serve`` in those processes, keep them here for as long as the addresses are
    served, and ``close`` them then. Raises ConfigError for what cannot be bound or shared.

    All processes accept from the same socket of a byte stream: whoever is free takes the next
    connection, and none waits for a process that is gone. For QUIC each has a socket of its own.
    """
    sets: list[list[Bound]] = [[] for _ in range(copies)]
    try:
        for text in addresses:
            address = _address(text)
            if address.scheme == "memory":
                raise ConfigError(f"{address}: processes cannot share what is in the memory of one")
            binding: Callable[[Address, int], Awaitable[list[Bound]]] = stream.bind
            if address.scheme == "aqueduct":
                from aqueduct.carriers import quic

                binding = quic.bind
            for bound, one in zip(await binding(address, copies), sets, strict=True):
                one.append(bound)
    except BaseException:
        for bound in (bound for one in sets for bound in one):
            bound.close()
        raise
    return sets


@checked(headers="message_headers", tls="server_tls")
async def serve(
    on_connection: OnConnection,
    addresses: str | Address | Bound | Sequence[str | Address | Bound],
    *,
    on_headers: OnHeaders | None = None,
    headers: Headers = (),
    config: Config = DEFAULT,
    tls: ServerTls | None = None,
) -> Server:
    """Listens on every address and calls ``on_connection`` for each accepted connection.

    ``on_headers(client_headers, connection)`` returns the server's connection headers, or True for
    ``headers``. It returns False, or raises, to refuse (close code 4). It is no coroutine
    function. Without it everybody is accepted and ``headers`` are sent. A
    connection lives until one side closes it; ``on_connection`` may return before. An address may
    be one that was bound before (``bind``): its sockets are taken over. Raises ConfigError, or
    OSError when an address cannot be bound.
    """
    if isinstance(addresses, (str, Address, Bound)):
        addresses = [addresses]
    return await _serve(Server(config), on_connection, addresses, on_headers, headers, tls)


async def serve_calls(
    on_connection: OnConnection,
    addresses: Sequence[str | Address | Bound],
    *,
    config: Config,
    tls: ServerTls | None,
) -> Server:
    """``serve`` for Arrow calls: messages have headers in either dialect (AC-95)."""
    server = Server(config, header_blocks=True)
    return await _serve(server, on_connection, addresses, None, (), tls)


async def _serve(
    server: Server,
    on_connection: OnConnection,
    addresses: Sequence[str | Address | Bound],
    on_headers: OnHeaders | None,
    headers: Headers,
    tls: ServerTls | None,
) -> Server:
    config = server.config
    codec.encode_connection_headers(headers)
    if inspect.iscoroutinefunction(on_headers):
        raise ConfigError(
            f"on_headers is the coroutine function {shown(on_headers)}, which is not awaited: pass "
            "a plain function, or decide in on_connection, which may be one"
        )
    if not addresses:
        raise ConfigError("serve needs at least one address to listen on")
    own_loop(asyncio.get_running_loop())

    def accept(carrier: Carrier) -> None:
        server._accept(carrier, on_connection, on_headers, headers)

    try:
        for given in addresses:
            bound = given if isinstance(given, Bound) else None
            address = _address(given)
            _refuse_reactive(address)
            sockets = None if bound is None else bound.sockets
            siblings = None if bound is None else bound.siblings
            bidi = address.control_streams
            listener: Listener
            if address.scheme == "memory":
                listener = await memory.listen(address, config, accept, bidi=bidi)
            elif address.scheme != "aqueduct":
                listener = await stream.listen(
                    address, config, tls, accept, sockets=sockets, siblings=siblings, bidi=bidi
                )
            elif tls is None:
                raise ConfigError(
                    f"{address}: QUIC needs a certificate: pass tls=ServerTls(certificate, key), "
                    "or dev_certificate() for development"
                )
            else:
                from aqueduct.carriers import quic

                listener = await quic.listen(
                    address, config, tls, accept, sockets=sockets, bidi=bidi
                )
            server._listeners.append(listener)
    except BaseException:
        await server.close()
        raise
    return server


def _crowded(config: Config) -> str:
    """Why this process may open no further connection; "" if it may."""
    limit = config.limits.connections
    if process().connections < limit:
        return ""
    return f"the process has {limit} connections open, which is the limit (Limits.connections)"


def _refuse_reactive(address: Address) -> None:
    """Raises ConfigError for an address of ReactiveSocket, which has no message channels."""
    if address.reactive:
        raise ConfigError(
            f"{address}: ReactiveSocket has requests and no message channels; "
            "aqueduct.reactivesocket has connect and serve for it"
        )


def _address(given: str | Address | Bound) -> Address:
    if isinstance(given, Bound):
        return given.address
    return given if isinstance(given, Address) else Address.parse(given)
