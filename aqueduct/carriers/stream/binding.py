"""Binding the sockets of an address: of TCP for every address of a name, or one socket file."""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import Final

from aqueduct.address import Address
from aqueduct.carriers.binding import bind_ports, host_port, is_loopback
from aqueduct.carriers.contract import Bound
from aqueduct.carriers.stream.sockets import check_path
from aqueduct.config import DEFAULT
from aqueduct.errors import ConfigError
from aqueduct.escaping import logger_of
from aqueduct.forks import own_socket

__all__ = ["SocketFile", "bind"]

logger = logger_of("aqueduct.carriers.stream")

_MODE: Final = "0600"
_PLAIN: Final = {
    "aqueduct+tcp": "aqueduct+tls:// or aqueduct://",
    "reactivesocket+tcp": "reactivesocket+tls://",
    "reactivesocket+ws": "reactivesocket+wss://",
}
"""Schemes without encryption, and what has it."""


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


async def bind(
    address: Address, copies: int = 1, *, backlog: int = DEFAULT.byte_stream.backlog
) -> list[Bound]:
    """Listens at every address of ``address.host``, at one port; or at its path.

    Of several ``copies``, for processes that share the address, each has the same sockets: who
    accepts first has the connection, and none is lost with a process that ends.

    Port 0 takes a free one. Raises ConfigError: the name does not resolve, the port or the path is
    taken, or this user may not have it.
    """
    if address.unix:
        first = [_bind_unix(address, backlog)]
        release = SocketFile(address.path).remove
    else:
        first = await bind_ports(address, socket.SOCK_STREAM, backlog=backlog)
        address = address.with_port(first[0].getsockname()[1])
        release = None
        _warn_if_exposed(address, first)
    twins = [[_twin(sock) for sock in first] for _ in range(copies - 1)]
    return [Bound(address, tuple(sockets), release) for sockets in (first, *twins)]


def _twin(sock: socket.socket) -> socket.socket:
    twin = sock.dup()
    own_socket(twin)
    return twin


def _warn_if_exposed(address: Address, sockets: list[socket.socket]) -> None:
    exposed = [sock.getsockname() for sock in sockets if not is_loopback(sock.getsockname())]
    if exposed and address.scheme in _PLAIN:
        logger.warning(
            "%s: others between %s and its clients can read and change the bytes, for TCP "
            "alone is not encrypted; %s is",
            address,
            ", ".join(map(host_port, exposed)),
            _PLAIN[address.scheme],
        )


def _bind_unix(address: Address, backlog: int) -> socket.socket:
    check_path(address)
    _clear(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    own_socket(sock)
    try:
        sock.bind(address.path)
        try:
            # No client can connect before it listens, so none connects with other rights.
            os.chmod(address.path, int(address.options.get("mode", _MODE), 8))
            sock.listen(backlog)
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
            pass  # a process ended without removing it: no server listens
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
            f"{address}: no server listens there, but the file cannot be removed ({error.strerror})"
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
