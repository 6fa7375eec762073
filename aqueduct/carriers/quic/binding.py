"""Binding the UDP sockets of an address: for one process, or for several that share it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from aqueduct.address import Address
from aqueduct.carriers.binding import bind_ports
from aqueduct.carriers.contract import Bound
from aqueduct.errors import ConfigError
from aqueduct.forks import own_socket

__all__ = ["bind"]


async def bind(address: Address, copies: int) -> list[Bound]:
    """Binds every address of ``address.host`` for ``copies`` processes, at one port for all.

    Each process gets sockets of its own. The kernel deals the clients out by their address and
    port (SO_REUSEPORT), and deals again when a socket joins or leaves: so keep all of them open
    for as long as the address is served, whatever becomes of a process.

    Port 0 takes a free one. Raises ConfigError: the name does not resolve, the port is taken, or
    several processes are to take early data: none knows the tickets of the others.
    """
    if copies > 1 and address.early_data:
        raise ConfigError(
            f"{address}: early data (early_data=on) is for one process, since a ticket of another "
            f"one is not known to it, and here are {copies}; leave out early_data, or serve this "
            "address with one worker"
        )
    first = await bind_ports(address, socket.SOCK_DGRAM)
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
                own_socket(twin)
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
