"""``connect`` and ``serve``: from a place to a BpmuxConnection."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias, cast

from aqueduct.address import UNIX, Address
from aqueduct.arguments import Size, checked
from aqueduct.bpmux.connection import BpmuxConnection, LoopProtocol, name_of
from aqueduct.carriers.binding import resolve
from aqueduct.carriers.stream.binding import bind
from aqueduct.carriers.stream.connect import dial
from aqueduct.carriers.stream.sockets import why
from aqueduct.closing import AsyncClosing
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConnectFailed, ConnectionLost
from aqueduct.escaping import logger_of
from aqueduct.forks import own, own_loop, sever

__all__ = ["BpmuxServer", "Handler", "Place", "connect", "serve"]

log = logger_of(__name__)

Place: TypeAlias = tuple[str, int] | str | os.PathLike[str]
"""(host, port) for TCP, or the path of a Unix socket."""
TCP: Final = "aqueduct+tcp"
Handler: TypeAlias = Callable[[BpmuxConnection], Awaitable[None]]

WINDOW: Final = 256 << 10


@checked()
async def connect(
    place: Place, *, window: Size = WINDOW, config: Config = DEFAULT
) -> BpmuxConnection:
    """Connects to a program that serves bpmux, within Timing.connect_timeout.

    ``window``: bytes, or text such as "256k", that the peer may send ahead on each stream; see
    Connection. Raises ConfigError and ConnectFailed.
    """
    loop = asyncio.get_running_loop()
    own_loop(loop)
    name, read = name_of(place), cast("int", window)  # as ``checked`` read it

    def link() -> LoopProtocol:
        return LoopProtocol(config, read, name)

    try:
        async with asyncio.timeout(config.timing.connect_timeout):
            if isinstance(place, tuple):
                deadline = loop.time() + config.timing.connect_timeout
                sock = await dial(Address(TCP, *place), config, deadline)
                _, made = await loop.create_connection(link, sock=sock)
            else:
                _, made = await loop.create_unix_connection(link, os.fspath(place))
    except TimeoutError:
        raise ConnectFailed(
            f"{name}: no answer within {config.timing.connect_timeout:g} s (Timing.connect_timeout)"
        ) from None
    except ConnectFailed as error:
        raise ConnectFailed(f"{name}: {error.reason}", reason=error.reason) from error
    except OSError as error:
        if error.errno:
            error = OSError(error.errno, os.strerror(error.errno))  # asyncio has a text of its own
        raise ConnectFailed(f"{name}: {why(error)}") from error
    return made.connection


class BpmuxServer(AsyncClosing):
    """What ``serve`` returns."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.connections: set[BpmuxConnection] = set()
        """Those that live."""
        self._listener: asyncio.Server
        self._release: Callable[[], None] | None = None
        self._place: tuple[str, int] | str
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def place(self) -> tuple[str, int] | str:
        """What clients connect to, with the real port."""
        return self._place

    def __str__(self) -> str:
        return name_of(self._place)

    @checked()
    async def close(self, payload: bytes = b"") -> None:
        """Accepts no more, closes every connection, and waits for the handlers' end.

        Closing again does the same to what is still there. A handler that does not end within
        Timing.close_linger after it was cancelled is named in the log.
        """
        self._closed = True
        self._listener.close()
        release, self._release = self._release, None
        if release is not None:
            release()
        try:
            closing = [connection.close(payload) for connection in tuple(self.connections)]
            for found in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(found, Exception):
                    log.error("closing a connection failed", exc_info=found)
        finally:
            tasks = self._tasks - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=self.config.timing.close_linger)
            for task in left:
                log.warning("a handler goes on after its server was closed: %r", task)

    def left_behind(self) -> None:
        """In a forked child: the parent listens."""
        sever([sock.fileno() for sock in self._listener.sockets])

    # Within

    def _made(self, connection: BpmuxConnection, handler: Handler) -> ConnectionLost | None:
        if self._closed:
            return ConnectionLost("this side closes its server")
        self.connections.add(connection)
        task = asyncio.get_running_loop().create_task(self._run(connection, handler))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    async def _run(self, connection: BpmuxConnection, handler: Handler) -> None:
        try:
            await handler(connection)
        except ConnectionLost:
            pass
        except Exception:
            log.exception("the handler of %r failed", connection)
            await connection.close(b"the handler failed")
        finally:
            with suppress(asyncio.CancelledError):
                await connection.close()
            self.connections.discard(connection)


@checked(handler="on_connection")
async def serve(
    handler: Handler, place: Place, *, window: Size = WINDOW, config: Config = DEFAULT
) -> BpmuxServer:
    """Listens; each connection is given to ``handler``, and closed when that returns.

    Port 0: one that is free. The file of a Unix socket is for its owner alone (mode 0600); one that
    nobody listens on is replaced. Raises ConfigError or OSError when the place cannot be had.
    """
    loop = asyncio.get_running_loop()
    own_loop(loop)
    server, read = BpmuxServer(config), cast("int", window)  # as ``checked`` read it

    def link() -> LoopProtocol:
        return LoopProtocol(config, read, "", lambda made: server._made(made, handler))

    if isinstance(place, tuple):
        name, port = place
        # Not by asyncio, whose threads are to be had no more once the main thread has ended.
        found = await resolve(name, port, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        hosts = list(dict.fromkeys(str(where[0]) for _, _, _, _, where in found))
        listener = await loop.create_server(link, hosts, port, backlog=config.byte_stream.backlog)
        host, port = listener.sockets[0].getsockname()[:2]
        server._place = host, port
    else:
        address = Address(UNIX, "", 0, path=os.fspath(place))
        (bound,) = await bind(address, backlog=config.byte_stream.backlog)
        (sock,) = bound.sockets
        server._place, server._release = address.path, bound.release
        listener = await loop.create_unix_server(
            link, sock=sock, backlog=config.byte_stream.backlog
        )
    server._listener = listener
    own(server)
    return server
