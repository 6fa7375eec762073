"""``AdminThread``: the admin port, on an event loop in a thread of its own.

So it answers while handlers have all threads, or block the event loop of the service, and what it
does holds up no call.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Final

from aqueduct import forks
from aqueduct.admin.http_server import HttpServer, Route
from aqueduct.carriers.binding import host_port, resolve
from aqueduct.config import Admin
from aqueduct.errors import ConfigError
from aqueduct.rpc.threads import green

__all__ = ["AdminThread"]

_BACKLOG: Final = 64
_CLOSING: Final = 2.0
"""Seconds, at most, that the end of the thread is waited for."""


class AdminThread:
    """Answers at ``HOST:PORT``, from ``start`` to ``close``."""

    def __init__(self, place: str, routes: Mapping[str, Route], settings: Admin) -> None:
        """``place``: with port 0 it takes a free one.

        Raises ConfigError without the extra ``admin``, and where gevent has patched threads.
        """
        _require_extra()
        if patched := green():
            raise ConfigError(
                f"admin= (--admin) needs a real thread, and {patched} of this process are those "
                "of gevent.monkey or eventlet"
            )
        self._place = place
        self._server = HttpServer(routes, settings, _host_and_port(place)[0])
        self._sockets: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: Future[None] = Future()
        self.addresses: list[str] = []
        """Where it listens, such as ``http://127.0.0.1:9464``."""
        forks.own(self)

    def left_behind(self) -> None:
        """In a forked child: the port is its parent's."""
        self._loop = None

    @property
    def settings(self) -> Admin:
        """The limits of the server; may be set at any time."""
        return self._server.settings

    @settings.setter
    def settings(self, settings: Admin) -> None:
        self._server.settings = settings

    async def start(self) -> None:
        """Begins to answer. Raises ConfigError for a port that is taken, and such."""
        self._sockets = await _bind(self._place)
        self.addresses = [f"http://{host_port(sock.getsockname())}" for sock in self._sockets]
        begun: Future[None] = Future()
        thread = threading.Thread(
            target=self._run, args=(begun,), name="aqueduct-admin", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            for sock in self._sockets:
                sock.close()
            raise ConfigError(f"admin= (--admin) needs a thread, and has none: {error}") from error
        try:
            await asyncio.shield(asyncio.wrap_future(begun))
        except BaseException:  # cancelled, too: the thread is not left behind
            with contextlib.suppress(BaseException):
                begun.result(_CLOSING)
            await self.close()
            raise

    async def close(self) -> None:
        """Ends: nobody is answered any more."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(loop.stop)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(self._ended)), timeout=_CLOSING
            )

    # In the thread

    def _run(self, begun: Future[None]) -> None:
        loop = asyncio.new_event_loop()
        forks.own_loop(loop)
        try:
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(self._server.start(self._sockets))
            except BaseException as error:  # noqa: BLE001  who starts it gets it
                begun.set_exception(error)
                return
            self._loop = loop
            begun.set_result(None)
            loop.run_forever()
            self._server.close()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(asyncio.sleep(0))  # connections that were aborted end
        finally:
            loop.close()
            self._ended.set_result(None)


def _require_extra() -> None:
    """Raises ConfigError where a package of the extra ``admin`` is not installed."""
    try:
        import h11  # noqa: F401
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"admin= (--admin) needs a package that is missing ({error}): "
            "pip install 'aqueduct-arrow[admin]'"
        ) from error


def _host_and_port(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


async def _bind(place: str) -> list[socket.socket]:
    """A socket at each address of the host, all at one port. Raises ConfigError."""
    host, port = _host_and_port(place)
    where = f"admin= (--admin) {place}"
    try:
        found = await resolve(host, port, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where}: the name {host!r} does not resolve ({reason})") from error
    sockets: list[socket.socket] = []
    try:
        for family, target in dict.fromkeys((family, target) for family, *_, target in found):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            forks.own_socket(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((target[0], port, *target[2:]))
            port = sock.getsockname()[1]
            sock.listen(_BACKLOG)
            sock.setblocking(False)
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise ConfigError(f"{where} cannot be bound: {error.strerror}") from error
    return sockets
