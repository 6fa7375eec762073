"""TCP and Unix sockets: their options, the names of their ends, and who is at the other one."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import os
import socket
import struct
import sys
import termios
import threading
from contextlib import suppress
from typing import Final

from aqueduct.address import Address
from aqueduct.carriers.binding import host_port
from aqueduct.carriers.contract import PeerCredentials
from aqueduct.config import Config
from aqueduct.errors import ConfigError
from aqueduct.escaping import logger_of

__all__ = [
    "check_path",
    "credentials_of",
    "ends_of",
    "gone",
    "limit_silence",
    "on_loopback",
    "readable",
    "scratch",
    "take_of",
    "tcp_info",
    "tune",
    "untaken",
    "why",
]

logger = logger_of("aqueduct.carriers.stream")

_SCRATCH: Final = 64 << 10
_local: Final = threading.local()
_LONGEST: Final = (1 << 31) - 1  # milliseconds, as the kernel has an int for them
_PROBES: Final = 3  # of the kernel, unanswered: the peer is gone
_NOTSENT_LOWAT: Final = getattr(
    socket, "TCP_NOTSENT_LOWAT", 0x201 if sys.platform == "darwin" else None
)
_CONGESTION: Final = getattr(socket, "TCP_CONGESTION", None)
_KEEPIDLE: Final = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
_KEEPINTVL: Final = getattr(socket, "TCP_KEEPINTVL", None)
_KEEPCNT: Final = getattr(socket, "TCP_KEEPCNT", None)
_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", None)
_PATH_LIMIT: Final = 107 if sys.platform == "linux" else 103  # sockaddr_un, less the final zero
_UCRED: Final = struct.Struct("=iII")  # Linux: pid, uid, gid
_XUCRED: Final = struct.Struct("=IIhxxI")  # macOS: version, uid, number of groups, first of them
_HEAD: Final = 16  # bytes for the head of a chunk
_TCP_INFO: Final = 11
_RTT_AT: Final = 68  # tcpi_rtt in struct tcp_info of linux/tcp.h, microseconds
_RETRANS_AT: Final = 100  # tcpi_total_retrans


def scratch(name: str) -> memoryview:
    """Memory to read into that is copied from at once: one of each name for all of a thread."""
    found: memoryview | None = getattr(_local, name, None)
    if found is None:
        found = memoryview(bytearray(_SCRATCH))
        setattr(_local, name, found)
    return found


def tune(sock: socket.socket, config: Config) -> None:
    """Sets what every connection has, once it is one. Raises OSError only if it is dead already."""
    stream = config.byte_stream
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        # Nothing waits there to be sent: what is written is in the reader's queue.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, stream.unix_buffer)
        return
    # No SO_RCVBUF: a fixed one of 256 KiB to 1 MiB halves the speed of TCP, which sizes it itself.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _NOTSENT_LOWAT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, stream.notsent_lowat)
    if stream.keepalive:
        seconds = max(1, round(stream.keepalive))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if _KEEPIDLE is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _KEEPIDLE, seconds)
        if _KEEPINTVL is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _KEEPINTVL, max(1, seconds // _PROBES))
        if _KEEPCNT is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _KEEPCNT, _PROBES)
    if stream.loopback_congestion and _CONGESTION is not None and on_loopback(sock):
        try:
            name = stream.loopback_congestion.encode()
            sock.setsockopt(socket.IPPROTO_TCP, _CONGESTION, name)
        except OSError as error:
            _complain(stream.loopback_congestion, why(error))


def limit_silence(sock: socket.socket, seconds: float) -> None:
    """Has the kernel give up a TCP connection whose bytes stay unacknowledged for so long.

    Its own patience is a quarter of an hour. A peer that lets nothing in, as it reads nothing, is
    given up too. Without effect where the system has no TCP_USER_TIMEOUT (RL-R17 asks for pings).
    """
    if _USER_TIMEOUT is not None:
        milliseconds = min(max(1, round(seconds * 1000)), _LONGEST)
        # The peer may have gone meanwhile, and some systems refuse the option: reading tells.
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, milliseconds)


def gone(sock: socket.socket) -> bool:
    """Whether the peer has closed the connection, with nothing left to read before that."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def readable(sock: socket.socket) -> None:
    """Returns when there is something to read, or the end."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not came.done():
            came.set_result(None)

    loop.add_reader(sock.fileno(), ready)
    try:
        await came
    finally:
        loop.remove_reader(sock.fileno())


def on_loopback(sock: socket.socket) -> bool:
    """Whether both ends are on this machine: then all of it goes by the loopback interface."""
    try:
        here: str = sock.getsockname()[0]
        there: str = sock.getpeername()[0]
    except OSError:
        return False  # it is dead already: the next read reports it
    return here == there or there.startswith(("127.", "::ffff:127."))


@functools.cache  # once for all connections
def _complain(name: str, reason: str) -> None:
    logger.warning(
        "ByteStream.loopback_congestion is %r; the system refuses it (%s) and its own is taken. "
        "Those it allows are in /proc/sys/net/ipv4/tcp_allowed_congestion_control",
        name,
        reason,
    )


def take_of(sock: socket.socket, most: int) -> int:
    """How many bytes of payload the kernel is best given at once, at most ``most``.

    With the head of their chunk these are whole segments: what is left over would be a packet of
    its own, each time. Over the loopback interface, whose segments have 64 KiB, such packets take
    a tenth of the sender's processor.
    """
    try:  # a Unix socket has no such thing
        segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    except OSError:
        return most
    if not 0 < segment <= most:
        return most
    return most - most % segment - _HEAD


def check_path(address: Address) -> None:
    """Raises ConfigError for a path that no Unix socket can have."""
    size = len(os.fsencode(address.path))
    if size > _PATH_LIMIT:
        raise ConfigError(
            f"{address}: the path has {size} bytes; this system allows {_PATH_LIMIT} for a Unix "
            "socket: take a shorter one, for example in /run or /tmp"
        )


def credentials_of(sock: socket.socket) -> PeerCredentials | None:
    """The process at the other end of a Unix socket; None: not one, or the system is silent."""
    if sock.family != socket.AF_UNIX:
        return None
    try:
        if sys.platform == "linux":
            data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            return PeerCredentials(*_UCRED.unpack(data))
        if sys.platform == "darwin":
            data = sock.getsockopt(0, 1, 76)  # SOL_LOCAL, LOCAL_PEERCRED: struct xucred
            _, uid, _, gid = _XUCRED.unpack_from(data)
            return PeerCredentials(sock.getsockopt(0, 2), uid, gid)  # LOCAL_PEERPID
    except OSError:
        pass  # the peer is gone already
    return None


def ends_of(sock: socket.socket, credentials: PeerCredentials | None) -> tuple[str, str]:
    """How to call this end and the other: an address, or a path, or a process without one."""
    here, there = sock.getsockname(), sock.getpeername()
    if sock.family != socket.AF_UNIX:
        return host_port(here), host_port(there)
    other = "another process" if credentials is None else f"process {credentials.pid}"
    return _path(here) or f"process {os.getpid()}", _path(there) or other


def tcp_info(sock: socket.socket) -> tuple[float, int] | None:
    """The kernel's smoothed round-trip time, seconds, and segments sent again; None: unknown."""
    if sys.platform != "linux" or sock.family == socket.AF_UNIX:
        return None
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _RETRANS_AT + 4)
    except OSError:
        return None
    if len(data) < _RETRANS_AT + 4:
        return None
    micros = int.from_bytes(data[_RTT_AT : _RTT_AT + 4], sys.byteorder)
    return micros / 1e6, int.from_bytes(data[_RETRANS_AT : _RETRANS_AT + 4], sys.byteorder)


def untaken(sock: socket.socket) -> int:
    """Bytes that were sent and that the other side has not taken; 0 where no kernel tells."""
    try:
        return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # it is closed
        return 0


def why(error: OSError) -> str:
    """What an error of the network means, in words."""
    known = {
        errno.ECONNREFUSED: "connection refused: no program listens there; is the server started, "
        "and is this its port?",
        errno.ECONNRESET: "the peer reset the connection",
        errno.EPIPE: "the peer has closed its end",
        errno.ETIMEDOUT: "the peer answers no more",
        errno.EHOSTUNREACH: "it cannot be reached (no route to host)",
        errno.ENETUNREACH: "it cannot be reached (network is unreachable)",
    }
    return known.get(error.errno or 0) or error.strerror or str(error)


def _path(name: object) -> str:
    return os.fsdecode(name) if isinstance(name, (str, bytes)) else ""
