"""UDP sockets: bursts in, runs of datagrams out, and the kernel's buffers."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Final

from aqueduct.address import Address
from aqueduct.carriers.binding import host_port
from aqueduct.carriers.quic.path_mtu import LARGEST
from aqueduct.config import Config
from aqueduct.escaping import logger_of
from aqueduct.forks import own_socket

__all__ = ["UdpSocket", "datagram_size", "host_port"]

logger = logger_of("aqueduct.carriers.quic")

BURST: Final = 128
"""Datagrams read in one wake-up, so that one socket starves nothing else on the loop."""
BURST_FRAMES: Final = 1024
"""Frames read in one wake-up: many tiny ones in a datagram are as much work as many datagrams."""
RUN_BYTES: Final = 65_507
"""The most bytes that cross the kernel in one call."""
RUN_PACKETS: Final = 64
"""The most datagrams that do."""
_RECEIVE_SIZE: Final = 65_536
_PENDING: Final = 256  # sends that wait for the kernel; above it they are lost, as on a wire
_UDP_SEGMENT: Final = 103  # linux/udp.h
_UDP_GRO: Final = 104
_NO_SEGMENTS: Final = frozenset({errno.EINVAL, errno.EIO, errno.EMSGSIZE, errno.ENOPROTOOPT})
_DESTINATION: Final = {socket.IPPROTO_IP: 8, socket.IPPROTO_IPV6: 50}  # IP_, IPV6_PKTINFO
_UINT16: Final = struct.Struct("=H")
_ANCILLARY: Final = socket.CMSG_SPACE(4) + socket.CMSG_SPACE(20)
_NO_BUFFERS_PAUSE: Final = 0.001  # seconds: a full device queue makes no socket unwritable
_warned: list[bool] = []  # once in a process

SocketAddress = Any
"""What the socket module calls an address: (host, port) or (host, port, flow, scope).

On a socket bound to every address of this machine one item more follows: at which one of them the
peer's datagram came, for the answer to leave from there.
"""

_Run = tuple[list[bytes], int, int, SocketAddress]
# Parts of datagrams, parts of each, bytes of each but the last, and where to.


class _Outcome(Enum):
    """What became of a datagram."""

    SENT = auto()
    BLOCKED = auto()
    """The kernel takes no more now."""
    LOST = auto()
    """The network or the kernel refuses it for another reason."""
    TOO_LARGE = auto()
    """This machine sends none of its size."""


class UdpSocket:
    """One non-blocking UDP socket on the running loop.

    ``on_datagrams(buffer, size, address)`` gets one or more datagrams that lie one after the
    other in ``buffer``, all of ``size`` bytes but for the last; the buffer is used again after
    the call. It returns how many it has read, and how many frames they had; when these are
    BURST_FRAMES it may leave the rest for the next turn of the loop. ``on_burst`` follows when
    nothing more was there to read, or others have their turn. On Linux a run of equal
    datagrams crosses the kernel in one call, both ways (UDP_SEGMENT and UDP_GRO).
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        buffer_size: int,
        on_datagrams: Callable[[memoryview, int, SocketAddress], tuple[int, int]],
        on_burst: Callable[[], None],
        on_error: Callable[[OSError], None],
        on_writable: Callable[[], None],
        connected: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        own_socket(sock)
        self._on_datagrams = on_datagrams
        self._on_burst = on_burst
        self._on_error = on_error
        self._on_writable = on_writable
        self._remote = sock.getpeername() if connected else None
        self._pending: deque[_Run] = deque()
        self._buffer = memoryview(bytearray(_RECEIVE_SIZE))
        self._unread: tuple[memoryview, int, SocketAddress] | None = None
        """What is left of a run, for the next turn."""
        self._segmented = _set(sock, socket.IPPROTO_UDP, _UDP_SEGMENT, 0)
        self._gathered = _set(sock, socket.IPPROTO_UDP, _UDP_GRO, 1)
        self._multihomed = not connected and _learn_destinations(sock)
        _forbid_fragments(sock)
        self._drained_at = self._loop.time()
        self.datagrams_sent = 0
        self.datagrams_received = 0
        sock.setblocking(False)
        _enlarge(sock, buffer_size)
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def address(self) -> SocketAddress:
        """The local address."""
        return self._sock.getsockname()

    @property
    def blocked(self) -> bool:
        """Whether datagrams wait for the kernel; ``on_writable`` follows."""
        return bool(self._pending)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._sock.fileno() < 0

    def read_until(self) -> float:
        """The loop's time up to which all that came has been read."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            if self._unread is None:
                self._drained_at = self._loop.time()
        except OSError:
            pass  # what the network says of one peer
        return self._drained_at

    def send(self, datagrams: Sequence[tuple[bytes, SocketAddress]]) -> None:
        """Sends the datagrams in order, or keeps them until the kernel takes more."""
        for data, address in datagrams:
            self._send(([data], 1, len(data), address))

    def send_run(self, parts: list[bytes], size: int, address: SocketAddress) -> bool:
        """Sends datagrams given as two parts each, all of ``size`` bytes but for the last.

        False: this machine sends none of that size.
        """
        if self._segmented or len(parts) == 2:
            return self._send((parts, 2, size, address))
        return all(
            self._send((parts[index : index + 2], 2, size, address))
            for index in range(0, len(parts), 2)
        )

    def close(self) -> None:
        """Closes; what waits is dropped."""
        if not self.closed:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._pending.clear()
            self._unread = None
            self._sock.close()

    def _readable(self) -> None:
        if self._unread is None:  # else ``_go_on`` will read
            self._read()

    def _go_on(self) -> None:
        """Others had their turn."""
        if self._unread is not None:
            self._read()

    def _read(self) -> None:
        failure: OSError | None = None
        received = frames = 0
        try:
            while received < BURST and frames < BURST_FRAMES and not self.closed:
                run = self._unread or self._receive()
                self._unread = None
                data, segment, address = run
                if not data or segment > LARGEST:
                    received += 1
                    continue
                count, of_them = self._on_datagrams(*run)
                received += count
                frames += of_them
                self.datagrams_received += count
                if count * segment < len(data) and not self.closed:
                    left = memoryview(bytes(data[count * segment :]))
                    self._unread = left, segment, address
                    self._loop.call_soon(self._go_on)
        except BlockingIOError:
            self._drained_at = self._loop.time()
        except OSError as error:
            failure = error
        if received:
            self._on_burst()
        if failure is not None:
            self._on_error(failure)

    def _receive(self) -> tuple[memoryview, int, SocketAddress]:
        """What the kernel has, as ``on_datagrams`` gets it. Raises OSError."""
        if self._gathered or self._multihomed:
            size, ancillary, _, address = self._sock.recvmsg_into((self._buffer,), _ANCILLARY)
            segment = size
            for level, kind, data in ancillary:
                if level == socket.IPPROTO_UDP:
                    segment = int.from_bytes(data, sys.byteorder) or size
                elif kind == _DESTINATION.get(level):
                    address = (*address, data)
        else:
            size, address = self._sock.recvfrom_into(self._buffer)
            segment = size
        return self._buffer[:size], segment, address if self._remote is None else self._remote

    def _send(self, run: _Run) -> bool:
        """Sends, or keeps it until the kernel takes more; False: it is too large."""
        if self.closed:
            return True
        outcome = _Outcome.BLOCKED if self._pending else self._send_now(run)
        if outcome is _Outcome.BLOCKED:
            self._pending.append(run)
            if len(self._pending) > _PENDING:
                self._pending.popleft()
        return outcome is not _Outcome.TOO_LARGE

    def _writable(self) -> None:
        if self.closed:
            return
        self._loop.remove_writer(self._sock.fileno())
        while self._pending:
            if self._send_now(self._pending[0]) is _Outcome.BLOCKED:
                return
            if not self._pending:  # closed by what the error led to
                return
            self._pending.popleft()
        self._on_writable()

    def _send_now(self, run: _Run, *, again: bool = False) -> _Outcome:
        """Sends. What the kernel refuses for good is lost."""
        parts, each, size, address = run
        count = len(parts) // each
        try:
            control: list[tuple[int, int, bytes]] = []
            if count > 1:
                control.append((socket.IPPROTO_UDP, _UDP_SEGMENT, _UINT16.pack(size)))
            if self._remote is not None:
                self._sock.sendmsg(parts, control)
            elif self._multihomed:
                address, source = _source(address)
                control.append(source)
                self._sock.sendmsg(parts, control, 0, address)
            else:
                self._sock.sendmsg(parts, control, 0, address)
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._writable)
            return _Outcome.BLOCKED
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                self._loop.call_later(_NO_BUFFERS_PAUSE, self._writable)
                return _Outcome.BLOCKED
            if error.errno == errno.EMSGSIZE and not again:
                # A router may have said it of an earlier one; the kernel tells that once.
                return self._send_now(run, again=True)
            if count > 1 and error.errno in _NO_SEGMENTS:
                return self._send_apart(run, error)
            self._on_error(error)
            return _Outcome.TOO_LARGE if error.errno == errno.EMSGSIZE else _Outcome.LOST
        self.datagrams_sent += count
        return _Outcome.SENT

    def _send_apart(self, run: _Run, refusal: OSError) -> _Outcome:
        """The kernel takes no such run: its datagrams are too large, or the device takes no runs.

        The first one shows which of the two it is.
        """
        parts, each, size, address = run
        outcome = self._send_now((parts[:each], each, size, address))
        if outcome is _Outcome.SENT and not self.closed:
            self._segmented = False
            logger.info(
                "%s: the device cannot cut a run of datagrams (%s), so each is sent by itself",
                host_port(self.address),
                refusal.strerror,
            )
            self.send_run(parts[each:], size, run[3])
        return outcome


def datagram_size(config: Config, address: Address) -> int | None:
    """Bytes of a UDP payload: the address decides, then Quic.datagram_size.

    None: as many as the path takes, which is found out.
    """
    chosen: int | str = address.options.get("datagram_size", "auto")
    if chosen == "auto":
        chosen = config.quic.datagram_size
    return None if chosen == "auto" else int(chosen)


def _set(sock: socket.socket, level: int, option: int, value: int) -> bool:
    """Sets an option of Linux; False: it is not to be had."""
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(level, option, value)
    except OSError:
        return False
    return True


def _learn_destinations(sock: socket.socket) -> bool:
    """Lets a socket of every address tell at which one each datagram came."""
    host = sock.getsockname()[0]
    if sock.family == socket.AF_INET:
        return host == "0.0.0.0" and _set(sock, socket.IPPROTO_IP, 8, 1)  # IP_PKTINFO
    return host == "::" and _set(sock, socket.IPPROTO_IPV6, 49, 1)  # IPV6_RECVPKTINFO


def _source(address: SocketAddress) -> tuple[SocketAddress, tuple[int, int, bytes]]:
    """Where to send, and the control message that says from where."""
    *target, arrival = address
    if len(target) == 2:
        source = bytes(4) + arrival[4:8] + bytes(4)  # no interface; the local address
        return tuple(target), (socket.IPPROTO_IP, 8, source)
    return tuple(target), (socket.IPPROTO_IPV6, 50, arrival[:16] + bytes(4))


def _forbid_fragments(sock: socket.socket) -> None:
    """QUIC's packets must not be cut by the network (RFC 9000 section 14): too large, no answer."""
    if sock.family == socket.AF_INET6:
        _set(sock, socket.IPPROTO_IPV6, 23, 3)  # IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE
    _set(sock, socket.IPPROTO_IP, 10, 3)  # IP_MTU_DISCOVER, IP_PMTUDISC_PROBE


def _enlarge(sock: socket.socket, size: int) -> None:
    short: dict[str, int] = {}
    for option, name in ((socket.SO_RCVBUF, "rmem_max"), (socket.SO_SNDBUF, "wmem_max")):
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, size)
        except OSError:
            pass  # some systems refuse instead of giving less; what is there is checked next
        got = sock.getsockopt(socket.SOL_SOCKET, option)
        if sys.platform == "linux":
            got //= 2  # twice of what was asked is reported, for the kernel's own overhead
        if got < size:
            short[name] = got
    if short and not _warned:
        _warned.append(True)
        logger.warning(
            "the kernel gives a UDP socket %d bytes of buffer instead of %d, so bursts may be "
            "lost. Allow more with: sysctl -w %s",
            min(short.values()),
            size,
            " ".join(f"net.core.{name}={size}" for name in short),
        )
