"""Binding the UDP sockets of an address: for one process, or for several that share it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Final

from aqueduct.address import Address
from aqueduct.carriers.contract import Bound
from aqueduct.carriers.quic.sockets import SocketAddress, host_port
from aqueduct.errors import ConfigError

__all__ = ["bind"]

logger = logging.getLogger("aqueduct.quic")

_PORT_TRIES: Final = 16


async def bind(address: Address, copies: int) -> list[Bound]:
    """Binds every address of ``address.host`` for ``copies`` processes, at one port for all.

    Each process gets sockets of its own. The kernel deals the clients out by their address and
    port (SO_REUSEPORT), and deals again when a socket joins or leaves: so keep all of them open
    for as long as the address is served, whatever becomes of a process.

    Port 0 takes a free one. Raises ConfigError: the name does not resolve, or the port is taken.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            address.host, address.port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"{address}: the name {address.host!r} does not resolve ({error.strerror})"
        ) from error
    targets = list(dict.fromkeys((family, where) for family, _, _, _, where in found))
    for attempt in range(_PORT_TRIES):
        try:
            first = _bind_all(address, targets)
            break
        except _PortTaken as error:
            # A free port of the first address may be taken at the second: try another.
            if address.port != 0 or attempt == _PORT_TRIES - 1:
                raise ConfigError(str(error)) from error
    port = first[0].getsockname()[1]
    sets = [first]
    if copies > 1:
        sets += _share(address, first, copies - 1)
    return [Bound(address.with_port(port), tuple(sockets)) for sockets in sets]


def _share(
    address: Address, first: Sequence[socket.socket], more: int
) -> list[list[socket.socket]]:
    # The first were bound as if alone, so a port that others share already was refused; only now
    # may it be shared.
    sets: list[list[socket.socket]] = [[] for _ in range(more)]
    try:
        for sock in first:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            for copy in sets:
                twin = socket.socket(sock.family, socket.SOCK_DGRAM)
                copy.append(twin)
                twin.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if sock.family == socket.AF_INET6:
                    only = sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                    twin.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
                twin.bind(sock.getsockname())
    except OSError as error:
        for other in (*first, *(twin for copy in sets for twin in copy)):
            other.close()
        raise ConfigError(f"{address} cannot be shared: {error.strerror}") from error
    return sets


class _PortTaken(Exception):
    pass


def _bind_all(
    address: Address, targets: Sequence[tuple[int, SocketAddress]]
) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    port = address.port
    problems: list[str] = []
    for family, where in targets:
        where = (where[0], port, *where[2:])
        try:
            sock = socket.socket(family, socket.SOCK_DGRAM)
        except OSError as error:
            problems.append(f"{host_port(where)}: {error.strerror}")
            continue
        try:
            if family == socket.AF_INET6:
                # "::" alone takes IPv4 too; beside an IPv4 address each has its own socket.
                only = len(targets) > 1 or where[0] != "::"
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            sock.bind(where)
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
