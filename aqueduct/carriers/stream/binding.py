"""Binding the sockets of an address: of TCP for every address of a name, or one socket file."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Sequence
from typing import Final

from aqueduct.address import UNIX, Address
from aqueduct.carriers.stream.sockets import SocketAddress, check_path, host_port
from aqueduct.config import Config
from aqueduct.errors import ConfigError

__all__ = ["SocketFile", "bind"]

logger = logging.getLogger("aqueduct.stream")

_PORT_TRIES: Final = 16
_MODE: Final = "0600"


class SocketFile:
    """The file of a Unix socket that this process made."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._owner = os.getpid()
        self._found = self._look()

    def remove(self) -> None:
        """Removes it, unless another server has taken the path, or a fork of this process asks."""
        if self._owner == os.getpid() and self._found == self._look() is not None:
            try:
                os.unlink(self._path)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", self._path, error.strerror)

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


async def bind(address: Address, config: Config) -> list[socket.socket]:
    """Sockets that listen at every address of ``address.host``, at one port; or at its path.

    Port 0 takes a free one. Raises ConfigError: the name does not resolve, the port or the path is
    taken, or this user may not have it.
    """
    if address.scheme == UNIX:
        return [_bind_unix(address, config)]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"{address}: the name {address.host!r} does not resolve ({error.strerror})"
        ) from error
    targets = list(dict.fromkeys((family, where) for family, _, _, _, where in found))
    for attempt in range(_PORT_TRIES):
        try:
            return _bind_all(address, targets, config)
        except _PortTaken as error:
            # A free port of the first address may be taken at the second: try another.
            if address.port != 0 or attempt == _PORT_TRIES - 1:
                raise ConfigError(str(error)) from error
    raise AssertionError("unreachable")


class _PortTaken(Exception):
    pass


def _bind_all(
    address: Address, targets: Sequence[tuple[int, SocketAddress]], config: Config
) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    port = address.port
    problems: list[str] = []
    for family, where in targets:
        where = (where[0], port, *where[2:])
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            problems.append(f"{host_port(where)}: {error.strerror}")
            continue
        try:
            if family == socket.AF_INET6:
                # "::" alone takes IPv4 too; beside an IPv4 address each has its own socket.
                only = len(targets) > 1 or where[0] != "::"
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            # A server that starts again may have its port, though old connections linger on it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(config.stream.backlog)
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


def _bind_unix(address: Address, config: Config) -> socket.socket:
    check_path(address)
    _clear(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(address.path)
        try:
            # Nobody can connect before it listens, so nobody comes through with other rights.
            os.chmod(address.path, int(address.options.get("mode", _MODE), 8))
            sock.listen(config.stream.backlog)
        except OSError:
            os.unlink(address.path)
            raise
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{address} cannot be listened at: {_unix_reason(address, error)}"
        ) from error
    return sock


def _clear(address: Address) -> None:
    """Removes the file of a server that is gone. Raises ConfigError for one that is not."""
    path = address.path
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{address}: {path!r} exists and is no socket; it is left alone")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return  # binding says what is wrong, if anything is
        raise ConfigError(f"{address}: {error.strerror}") from error
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            pass  # nobody listens: it was left by a process that ended without removing it
        except BlockingIOError:
            raise ConfigError(f"{address}: another process listens there") from None
        except OSError as error:
            raise ConfigError(f"{address}: {_unix_reason(address, error)}") from error
        else:
            raise ConfigError(f"{address}: another process listens there")
    try:
        os.unlink(path)
    except OSError as error:
        raise ConfigError(
            f"{address}: nobody listens there, but the file cannot be removed ({error.strerror})"
        ) from error


def _unix_reason(address: Address, error: OSError) -> str:
    directory = os.path.dirname(address.path)
    known = {
        errno.ENOENT: f"the directory {directory!r} does not exist",
        errno.ENOTDIR: f"a part of {directory!r} is no directory",
        errno.EACCES: f"not permitted: this user (uid {os.geteuid()}) may not make a socket in "
        f"{directory!r}",
        errno.EADDRINUSE: "another process has just taken the path",
        errno.EROFS: f"{directory!r} is on a file system that is read-only",
    }
    return known.get(error.errno or 0) or error.strerror or str(error)
