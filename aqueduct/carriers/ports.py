"""Binding at every address of a name, at one port for all; and how addresses are written."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from aqueduct.address import Address
from aqueduct.errors import ConfigError
from aqueduct.escaping import logger_of

__all__ = ["SocketAddress", "bind_ports", "host_port", "is_loopback"]

logger = logger_of("aqueduct.carriers")

SocketAddress: TypeAlias = Any
"""What the socket module calls an address: (host, port) or (host, port, flow, scope)."""

_PORT_TRIES: Final = 16


def host_port(address: SocketAddress) -> str:
    """An address as people write it."""
    host = str(address[0]).removeprefix("::ffff:")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def is_loopback(address: SocketAddress) -> bool:
    """Whether a socket that is bound there can be reached from this machine alone."""
    found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


async def bind_ports(
    address: Address, kind: int, *, backlog: int | None = None
) -> list[socket.socket]:
    """A socket of ``kind`` at each address of ``address.host``; they listen if ``backlog`` is set.

    Port 0 takes a free one. Raises ConfigError: the name does not resolve, or the port is taken.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            address.host, address.port, type=kind, flags=socket.AI_PASSIVE
        )
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
