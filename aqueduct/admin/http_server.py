"""A small HTTP server for operators: GET and HEAD, one request on each connection.

It runs on an event loop of its own, see ``aqueduct.admin.thread``. ``h11`` reads and writes the
protocol: it does no I/O, so that limits and deadlines stay here.

- A peer has ``Admin.request_deadline`` for its request and for reading the response.
- Above ``Admin.connections`` the connection that has waited longest for its request is closed.
- A request names its host, which must be one of this server's: a web page of another site could
  otherwise reach the server through a name that it makes resolve to this machine (DNS rebinding).
  HTTP/1.0 needs no Host header: probes leave it away, and no browser does.
- A forked child keeps none of the connections that it finds open.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aqueduct import forks
from aqueduct.config import Admin
from aqueduct.escaping import logger_of

if TYPE_CHECKING:
    import h11

__all__ = ["HttpRequest", "HttpResponse", "HttpServer", "Route", "text"]

log = logger_of(__name__)

_METHODS: Final = ("GET", "HEAD")
_ABSOLUTE: Final = re.compile(r"(?ai)http://([^/?#]*)([^#]*)")
"""A target with the name of its host, as a proxy gets it."""
_HOST: Final = re.compile(r"(?ai)(\[[0-9a-f:.%]+\]|[^\s:/@\[\]]+)(?::\d{1,5})?")
_ALWAYS: Final = (
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
    ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)
"""Headers of every response, unless its route has others of these names."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What a route is asked. Bodies are not read."""

    path: str
    """Without the query."""
    query: str
    """What follows the question mark."""
    headers: Mapping[str, str]
    """By names in small letters; the last of several counts."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What a route answers."""

    body: bytes
    content_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    """Beside the usual ones, or in place of them."""


Route: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse]]


def text(said: str, status: int = 200, **headers: str) -> HttpResponse:
    """A response of plain text. Underscores in the names of ``headers`` stand for dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpResponse(f"{said}\n".encode(), "text/plain; charset=utf-8", status, named)


class HttpServer:
    """Answers requests by a table of routes. Lives on one event loop."""

    def __init__(self, routes: Mapping[str, Route], settings: Admin, host: str) -> None:
        """``host``: the name or address that the server is told to listen at."""
        self.settings = settings
        """May be set at any time."""
        self._routes = dict(routes)
        self._host = host.lower()
        self._exchanges: dict[_Exchange, None] = {}
        self._listening: list[asyncio.Server] = []
        forks.own(self)

    def left_behind(self) -> None:
        """See forks.Inherited."""
        forks.sever(exchange.descriptor for exchange in tuple(self._exchanges))

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Begins to answer at sockets that are bound."""
        loop = asyncio.get_running_loop()
        for sock in sockets:
            server = await loop.create_server(lambda: _Exchange(self), sock=sock)
            self._listening.append(server)

    def close(self) -> None:
        """Ends all connections."""
        for server in self._listening:
            server.close()
        for exchange in tuple(self._exchanges):
            exchange.abort()

    async def answer(
        self, method: str, target: str, headers: Mapping[str, str], *, host: str | None
    ) -> HttpResponse:
        """The response to a request. ``host``: the Host header; None: there may be none."""
        if absolute := _ABSOLUTE.fullmatch(target):
            host, target = absolute[1], absolute[2]
            target = target if target.startswith("/") else f"/{target}"
        if host is not None and not self._is_own(host):
            return text(
                "this server does not have that name: add it to Admin.hosts, or use an IP address",
                421,
            )
        if method not in _METHODS:
            return text("only GET and HEAD are known here", 405, Allow=", ".join(_METHODS))
        path, _, query = target.partition("?")
        route = self._routes.get(path)
        if route is None:
            return text("there is no such page", 404)
        try:
            return await route(HttpRequest(path, query, headers))
        except Exception:
            log.exception("the admin server could not answer %s", path)
            return text("the page could not be made; the log says why", 500)

    # What the exchanges ask

    def opened(self, exchange: _Exchange) -> bool:
        """Whether there is room for one more connection; another may end for it."""
        if len(self._exchanges) >= self.settings.connections:
            idle = next((each for each in self._exchanges if not each.asked), None)
            if idle is None:
                return False
            idle.abort()
            self._exchanges.pop(idle, None)
        self._exchanges[exchange] = None
        return True

    def closed(self, exchange: _Exchange) -> None:
        """A connection is over."""
        self._exchanges.pop(exchange, None)

    # Within

    def _is_own(self, given: str) -> bool:
        """Whether a Host header may stand in a request: no stranger's name does.

        An IP address is no name that somebody could have made to lead here.
        """
        found = _HOST.fullmatch(given)
        if found is None:
            return False
        name = found[1].lower().rstrip(".")
        if name in ("localhost", self._host) or name in map(str.lower, self.settings.hosts):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


class _Exchange(asyncio.Protocol):
    """One connection: a request, and its response."""

    def __init__(self, server: HttpServer) -> None:
        import h11

        self._server = server
        self._http = h11.Connection(
            h11.SERVER, max_incomplete_event_size=server.settings.request_bytes
        )
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle
        self._task: asyncio.Task[None] | None = None
        self._room = server.settings.request_bytes
        self.asked = False
        """Whether the request is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        seconds = self._server.settings.request_deadline
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.abort)
        if not self._server.opened(self):
            self.abort()

    def data_received(self, data: bytes) -> None:
        import h11

        if self.asked:
            return  # a body, or another request: neither is read
        self._room -= len(data)
        if self._room < 0:
            self.asked = True
            self._send(text("the request is too large (Admin.request_bytes)", 431))
            return
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self.asked = True
            self._send(text("this is no request that can be read", error.error_status_hint))
            return
        if isinstance(event, h11.Request):
            self.asked = True
            self._task = asyncio.get_running_loop().create_task(self._answer(event))

    def eof_received(self) -> bool:
        return self.asked  # a client may be done with writing, and wait for the response

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self._server.closed(self)
        if self._task is not None:
            self._task.cancel()

    @property
    def descriptor(self) -> int:
        """Of its socket; -1: it is closed."""
        found: int = self._transport.get_extra_info("socket").fileno()
        return found

    def abort(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()

    async def _answer(self, request: h11.Request) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers
        }
        method, target = request.method.decode("latin-1"), request.target.decode("latin-1")
        old = request.http_version < b"1.1"
        response = await self._server.answer(
            method, target, headers, host=headers.get("host", None if old else "")
        )
        self._send(response, bodiless=method == "HEAD")

    def _send(self, response: HttpResponse, *, bodiless: bool = False) -> None:
        """``bodiless``: without the body, as HEAD wants it."""
        import h11

        named = {name.lower(): (name, value) for name, value in _ALWAYS}
        named.update({name.lower(): (name, value) for name, value in response.headers.items()})
        named["content-type"] = ("Content-Type", response.content_type)
        named["content-length"] = ("Content-Length", str(len(response.body)))
        reason = HTTPStatus(response.status).phrase
        events: list[Any] = [
            h11.Response(status_code=response.status, headers=list(named.values()), reason=reason)
        ]
        if not bodiless:
            events.append(h11.Data(data=response.body))
        events.append(h11.EndOfMessage())
        try:
            self._transport.write(b"".join(self._http.send(event) or b"" for event in events))
        finally:
            self._transport.close()
