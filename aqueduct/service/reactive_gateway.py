"""The addresses of ReactiveSocket at which a service answers: each request becomes a call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final, Protocol

from aqueduct.address import Address
from aqueduct.carriers.certificates import ServerTls
from aqueduct.carriers.contract import Bound
from aqueduct.config import Config
from aqueduct.endpoint import Connection
from aqueduct.errors import BadCall, CallError, Refused
from aqueduct.escaping import logger_of
from aqueduct.reactivesocket import (
    ReactiveRequest,
    ReactiveSocketConnection,
    ReactiveSocketServer,
    serve,
)
from aqueduct.rpc.reactive_calls import (
    ARROW,
    ReactiveDefaults,
    ReactiveRequests,
    one_batch,
)
from aqueduct.rpc.request import CallHead, Kind
from aqueduct.rpc.status import Status
from aqueduct.service.call import CallHost, ServerCall
from aqueduct.service.call_connection import CallConnection
from aqueduct.service.reactive_call import ReactiveCall, ReactiveCaller

__all__ = [
    "CallDispatcher",
    "GatewayHost",
    "ReactiveGateway",
    "connection_of",
    "is_reactive",
    "snapshot_line",
    "snapshot_of",
]

log = logger_of(__name__)

_KINDS: Final[dict[str, Kind | None]] = {
    "request": "exchange",
    "fire": "sink",
    "stream": None,
    "subscribe": None,
}
"""What each request is as a call; None: without a body it asks a source."""
_LEASED: Final = 4096
"""Data of so many bytes count in memory until the call is done with them; others are copied."""


class CallDispatcher(Protocol):
    """What begins the calls of one connection."""

    @property
    def connection(self) -> CallConnection:
        """It."""

    @property
    def calls(self) -> set[ServerCall]:
        """Those of its calls that are open."""


class GatewayHost(CallHost, Protocol):
    """The service, as its gateway uses it."""

    config: Config

    def table_of(self, head: CallHead) -> CallHead:
        """The same call, or where it names a table the one of its rows."""

    def place(self, dispatcher: CallDispatcher, handler: str) -> int:
        """The number of a call for which there is room. Raises Refused and Busy."""

    def begin(self, dispatcher: CallDispatcher, running: ServerCall) -> None:
        """A call that has its ``place`` begins."""

    def refused(self, peer: str, error: CallError, *, unanswered: bool = False) -> None:
        """A call that never began is counted. ``unanswered``: nobody is told."""

    def opened(self, dispatcher: CallDispatcher) -> None:
        """A connection is there."""

    def closed(self, dispatcher: CallDispatcher) -> None:
        """A connection is over."""


class ReactiveGateway:
    """Listens for clients of ReactiveSocket, and hands what they ask to a service."""

    def __init__(self, host: GatewayHost) -> None:
        self._host = host
        self._servers: list[ReactiveSocketServer] = []
        self._ending: list[ReactiveSocketServer] = []
        """Those that accept no more."""
        self._dispatchers: dict[ReactiveSocketConnection, _ReactiveDispatcher] = {}

    @property
    def addresses(self) -> list[str]:
        """What clients connect to."""
        return [str(server.address) for server in self._servers]

    async def start(
        self, addresses: Sequence[str | Bound], origins: Sequence[str], tls: ServerTls | None
    ) -> None:
        """Begins to listen. Raises ConfigError."""
        try:
            for given in addresses:
                address = given.address if isinstance(given, Bound) else Address.parse(given)
                server = await serve(
                    self._connected,
                    given if isinstance(given, Bound) else address,
                    responder=self._answer,
                    authorize_setup=_look_at,
                    origins=origins if address.web else (),
                    config=self._host.config,
                    tls=tls if address.certified else None,
                )
                self._servers.append(server)
        except BaseException:
            await self.close()
            raise

    async def drain(self) -> None:
        """Accepts no more, and ends subscriptions: they would outlast any drain."""
        self._ending, self._servers = self._servers, []
        for server in self._ending:
            await server.accepting.close()
        for dispatcher in tuple(self._dispatchers.values()):
            for running in tuple(dispatcher.calls):
                if isinstance(running, ReactiveCall) and running.endless:
                    names: Any = {"peer": running.call.peer, "handler": running.call.handler}
                    text = f"the service {self._host.name!r} is ending"
                    running.abort(Refused(text, draining=True, **names))

    async def close(self, seconds: float = 0.0) -> None:
        """Closes every connection. One that has not closed after ``seconds`` is abandoned."""
        servers = [*self._servers, *self._ending]
        self._servers, self._ending = [], []
        if not servers:
            return
        closing = asyncio.gather(*(server.close() for server in servers))
        await asyncio.wait((closing,), timeout=seconds)
        if not closing.done():
            for server in servers:
                for connection in (*server.connections, *server.ending):
                    connection.abandon("the service has ended, and the peer took too long")
        await closing

    # Within

    async def _connected(self, connection: ReactiveSocketConnection) -> None:
        dispatcher = self._dispatcher(connection)
        self._host.opened(dispatcher)
        try:
            await connection.wait_closed()
        finally:
            self._dispatchers.pop(connection, None)
            self._host.closed(dispatcher)

    def _answer(self, request: ReactiveRequest) -> None:
        self._dispatcher(request.connection).answer(request)

    def _dispatcher(self, connection: ReactiveSocketConnection) -> _ReactiveDispatcher:
        found = self._dispatchers.get(connection)
        if found is None:
            found = self._dispatchers[connection] = _ReactiveDispatcher(self._host, connection)
        return found


class _ReactiveDispatcher:
    """The requests of one connection."""

    __slots__ = ("_host", "_requests", "calls", "connection")

    def __init__(self, host: GatewayHost, connection: ReactiveSocketConnection) -> None:
        self._host = host
        self.connection = ReactiveCaller(connection, host.config)
        self.calls: set[ServerCall] = set()
        """Those that are open."""
        self._requests = ReactiveRequests(
            ReactiveDefaults.decode(connection.setup, limits=host.config),
            connection.peer,
            host.config,
        )

    def answer(self, request: ReactiveRequest) -> None:
        """Begins the call that a request is, or refuses it."""
        host, data = self._host, request.data
        leased = len(data) >= _LEASED
        try:
            head, format, rest = self._requests.read(_KINDS[request.kind], data)
            payload: Any = None
            if head.kind != "source":
                payload = one_batch(rest) if format == ARROW else rest
                if not len(payload):
                    raise BadCall(
                        "the body has a schema and no batch, and a batch is wanted there",
                        peer=self.connection.peer,
                        handler=head.handler,
                    )
                if not leased:
                    payload = bytes(payload)  # where Arrow reads it in place
            head = host.table_of(head)
            number = host.place(self, head.handler)
        except CallError as error:
            unanswered = request.kind == "fire"
            host.refused(self.connection.peer, error, unanswered=unanswered)
            if not unanswered:
                self.connection.fail(request, Status.from_exception(error))
            request.release()
            return
        running = ReactiveCall(
            host, self.connection, head, number, request, format, payload, leased=leased
        )
        host.begin(self, running)


def _look_at(connection: ReactiveSocketConnection) -> str | None:
    """Why a SETUP is not taken; None: it is."""
    try:
        ReactiveDefaults.decode(connection.setup, limits=connection.config)
    except BadCall as error:
        return str(error)
    return None


def is_reactive(given: str | Bound) -> bool:
    """Whether an address is one of ReactiveSocket."""
    if isinstance(given, Bound):
        return given.address.reactive
    return isinstance(given, str) and given.lower().startswith("reactivesocket+")


def connection_of(connection: CallConnection) -> Connection | ReactiveSocketConnection:
    """The connection itself."""
    if isinstance(connection, ReactiveCaller):
        return connection.reactive
    assert isinstance(connection, Connection)
    return connection


def snapshot_of(connection: CallConnection) -> dict[str, Any]:
    """What a connection is doing, as plain values."""
    if isinstance(connection, ReactiveCaller):
        reactive = connection.reactive
        told = asdict(reactive.snapshot())
        return {"peer": reactive.peer, "carrier": "reactivesocket", **told}
    assert isinstance(connection, Connection)
    return connection.snapshot().to_dict()


def snapshot_line(connection: CallConnection) -> str:
    """The same as a line for logs."""
    if isinstance(connection, ReactiveCaller):
        return f"{connection.reactive!r}: {connection.reactive.snapshot()}"
    assert isinstance(connection, Connection)
    return str(connection.snapshot(channels=0))
