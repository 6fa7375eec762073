"""Binding at every address of a name, at one port for all; and how addresses are written."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from aqueduct.address import Address
from aqueduct.errors import ConfigError, ConnectFailed
from aqueduct.escaping import logger_of
from aqueduct.forks import own_socket

__all__ = [
    "SocketAddress",
    "bind_ports",
    "holds_up",
    "host_port",
    "is_loopback",
    "listens",
    "resolve",
    "targets_of",
]

logger = logger_of("aqueduct.carriers")

T = TypeVar("T")

SocketAddress: TypeAlias = Any
"""What the socket module calls an address: (host, port) or (host, port, flow, scope)."""

_Found: TypeAlias = tuple[Any, Any, int, str, Any]
"""Family, type, protocol, name, and a SocketAddress."""

_PORT_TRIES: Final = 16
_listening: Final[
    WeakKeyDictionary[
        asyncio.AbstractEventLoop, tuple[int, WeakValueDictionary[int, socket.socket]]
    ]
] = WeakKeyDictionary()
"""For each event loop the thread in which it began to accept connections, and the sockets."""


def host_port(address: SocketAddress) -> str:
    """An address as people write it."""
    host = str(address[0]).removeprefix("::ffff:")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def is_loopback(address: SocketAddress) -> bool:
    """Whether a socket that is bound there can be reached from this machine alone."""
    return _plain(str(address[0])).is_loopback


async def resolve(host: str, port: int, kind: int, *, flags: int = 0) -> list[_Found]:
    """The addresses of a host, as ``socket.getaddrinfo`` gives them.

    A numeric address needs no thread. A name is found even after the main thread has ended, when
    the event loop's executor refuses work. Raises OSError and UnicodeError.
    """
    try:
        numeric = flags | socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, type=kind, flags=numeric)
    except socket.gaierror:
        pass  # it is a name
    loop = asyncio.get_running_loop()
    try:
        return await loop.getaddrinfo(host, port, type=kind, flags=flags)
    except RuntimeError:  # of the executor
        return await _in_a_thread(partial(socket.getaddrinfo, host, port, type=kind, flags=flags))


async def targets_of(
    address: Address, kind: int, deadline: float
) -> list[tuple[int, SocketAddress]]:
    """The families and socket addresses to connect to, each once, in the resolver's order.

    ``deadline`` is a time of the loop. Raises ConnectFailed.
    """
    name = repr(address.host)
    if not address.port:
        raise _unusable(address, "no server listens at port 0: it stands for any free port")
    try:
        async with asyncio.timeout_at(deadline):
            found = await resolve(address.host, address.port, kind)
    except TimeoutError:
        raise _unusable(address, f"the name {name} was not resolved in time") from None
    except OSError as error:
        reason = f"the name {name} does not resolve ({error.strerror})"
        raise _unusable(address, reason) from error
    except UnicodeError as error:
        raise _unusable(address, f"{name} is no name of a host ({error})") from error
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def _unusable(address: Address, reason: str) -> ConnectFailed:
    return ConnectFailed(f"{address}: {reason}", reason=reason)


async def _in_a_thread(work: Callable[[], T]) -> T:
    """Calls ``work`` in a daemon thread of its own. Returns or raises what it does."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(found: T | None, error: Exception | None) -> None:
        if answer.done():  # no task waits any more
            return
        if error is None:
            answer.set_result(cast("T", found))
        else:
            answer.set_exception(error)

    def run() -> None:
        found, failed = None, None
        try:
            found = work()
        except Exception as error:  # noqa: BLE001  the waiting task gets it
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, found, failed)

    threading.Thread(target=run, name="aqueduct-resolve", daemon=True).start()
    return await answer


def listens(sock: socket.socket) -> None:
    """Notes that the running loop accepts connections on this socket."""
    loop = asyncio.get_running_loop()
    if loop not in _listening:
        _listening[loop] = threading.get_ident(), WeakValueDictionary()
    _listening[loop][1][id(sock)] = sock


def holds_up(address: Address) -> bool:
    """Whether an event loop of the calling thread serves this address.

    That service stands still while the thread waits. If the ports are equal, the host is looked up.
    """
    if not _listening:
        return False
    running = asyncio._get_running_loop()
    for reference in _listening.keyrefs():
        loop = reference()
        if loop is None:
            continue
        thread, sockets = _listening[loop]
        if loop is running or (thread == threading.get_ident() and not loop.is_running()):
            for found in sockets.valuerefs():
                sock = found()
                if sock is not None and _accepts(sock, address):
                    return True
    return False


def _accepts(sock: socket.socket, address: Address) -> bool:
    """Whether a client that connects to the address comes to this socket."""
    kind = socket.SOCK_DGRAM if address.scheme == "aqueduct" else socket.SOCK_STREAM
    if sock.fileno() < 0 or sock.type != kind:
        return False
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return address.unix and _same_file(os.fsdecode(name), address.path)
    if address.unix or name[1] != address.port:
        return False
    try:
        found = socket.getaddrinfo(address.host, address.port, type=kind)
    except (OSError, UnicodeError):
        return False
    return any(_reaches(where, name) for _, _, _, _, where in found)


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _reaches(where: SocketAddress, bound: SocketAddress) -> bool:
    """Whether a client that connects to ``where`` comes to a socket that is bound to ``bound``."""
    host, own = (_plain(str(address[0])) for address in (where, bound))
    if not own.is_unspecified:
        return host == own
    if host.is_loopback or host.is_unspecified:
        return True
    family = socket.AF_INET if host.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(host), 0))
        except OSError:
            return False
    return True


def _plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(host.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


async def bind_ports(
    address: Address, kind: int, *, backlog: int | None = None
) -> list[socket.socket]:
    """A socket of ``kind`` at each address of ``address.host``; they listen if ``backlog`` is set.

    Port 0 takes a free one. Raises ConfigError: the name does not resolve, or the port is taken.
    """
    try:
        found = await resolve(address.host, address.port, kind, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{address}: the name {address.host!r} does not resolve ({reason})"
        ) from error
    targets = list(dict.fromkeys((family, where) for family, _, _, _, where in found))
    for attempt in range(_PORT_TRIES):
        try:
            return _bind_all(address, kind, targets, backlog)
        except _PortTaken as error:
            # A free port of the first address may be taken at the second: try another.
            if address.port != 0 or attempt == _PORT_TRIES - 1:
                raise ConfigError(str(error)) from error
    raise AssertionError("unreachable")


class _PortTaken(Exception):
    pass


def _bind_all(
    address: Address,
    kind: int,
    targets: Sequence[tuple[int, SocketAddress]],
    backlog: int | None,
) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    port = address.port
    problems: list[str] = []
    for family, where in targets:
        where = (where[0], port, *where[2:])
        try:
            sock = socket.socket(family, kind)
        except OSError as error:
            problems.append(f"{host_port(where)}: {error.strerror}")
            continue
        own_socket(sock)
        try:
            if family == socket.AF_INET6:
                # "::" alone takes IPv4 too; beside an IPv4 address each has its own socket.
                only = len(targets) > 1 or where[0] != "::"
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            if backlog is not None:
                # A server that starts again has its port, though old connections linger on it.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            if backlog is not None:
                sock.listen(backlog)
        except OSError as error:
            sock.close()
            if sockets and address.port == 0:
                for other in sockets:
                    other.close()
                raise _PortTaken(f"{host_port(where)}: {error.strerror}") from error
            problems.append(f"{host_port(where)}: {error.strerror}")
            continue
        sockets.append(sock)
        port = sock.getsockname()[1]
    if not sockets:
        raise ConfigError(f"{address} cannot be listened at: {'; '.join(problems)}")
    if problems:
        logger.warning("%s: not everywhere: %s", address, "; ".join(problems))
    return sockets
