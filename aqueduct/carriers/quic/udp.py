"""UDP sockets: bursts in, runs of datagrams out, and the kernel's buffers."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from aqueduct.address import Address
from aqueduct.carriers.binding import host_port
from aqueduct.config import Config
from aqueduct.escaping import logger_of
from aqueduct.forks import own_socket

__all__ = ["UdpSocket", "datagram_size", "host_port", "is_loopback"]

logger = logger_of("aqueduct.carriers.quic")

BURST: Final = 128
_EVENTS_OF_A_DATAGRAM: Final = 8  # of streams: as many are usual at most
"""Datagrams read in one wake-up, so that one socket starves nothing else on the loop."""
RUN_BYTES: Final = 65_000
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


class UdpSocket:
    """One non-blocking UDP socket on the running loop.

    ``on_datagrams(buffer, size, address)`` gets one or more datagrams that lie one after the
    other in ``buffer``, all of ``size`` bytes but for the last; the buffer is used again after
    the call. It may return how many events they led to, so that others have their turn.
    ``on_burst`` follows when nothing more was there to read. On Linux a run of equal
    datagrams crosses the kernel in one call, both ways (UDP_SEGMENT and UDP_GRO).
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        buffer_size: int,
        on_datagrams: Callable[[memoryview, int, SocketAddress], int | None],
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
            self._drained_at = self._loop.time()
        except OSError:
            pass  # what the network says of one peer
        return self._drained_at

    def send(self, datagrams: Sequence[tuple[bytes, SocketAddress]]) -> None:
        """Sends the datagrams in order, or keeps them until the kernel takes more."""
        for data, address in datagrams:
            self._send(([data], 1, len(data), address))

    def send_run(self, parts: list[bytes], size: int, address: SocketAddress) -> None:
        """Sends datagrams given as two parts each, all of ``size`` bytes but for the last."""
        if self._segmented or len(parts) == 2:
            self._send((parts, 2, size, address))
        else:
            for index in range(0, len(parts), 2):
                self._send((parts[index : index + 2], 2, size, address))

    def close(self) -> None:
        """Closes; what waits is dropped."""
        if not self.closed:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._pending.clear()
            self._sock.close()

    def _readable(self) -> None:
        failure: OSError | None = None
        received = 0
        try:
            while received < BURST and not self.closed:
                if self._gathered or self._multihomed:
                    size, ancillary, _, address = self._sock.recvmsg_into(
                        (self._buffer,), _ANCILLARY
                    )
                    segment = size
                    for level, kind, data in ancillary:
                        if level == socket.IPPROTO_UDP:
                            segment = int.from_bytes(data, sys.byteorder) or size
                        elif kind == _DESTINATION.get(level):
                            address = (*address, data)
                else:
                    size, address = self._sock.recvfrom_into(self._buffer)
                    segment = size
                if size:
                    count = -(-size // segment)
                    events = self._on_datagrams(
                        self._buffer[:size],
                        segment,
                        address if self._remote is None else self._remote,
                    )
                    self.datagrams_received += count
                    # Many tiny frames in a datagram are as much work as many datagrams.
                    received += max(count, (events or 0) // _EVENTS_OF_A_DATAGRAM)
        except BlockingIOError:
            self._drained_at = self._loop.time()
        except OSError as error:
            failure = error
        if received:
            self._on_burst()
        if failure is not None:
            self._on_error(failure)

    def _send(self, run: _Run) -> None:
        if self.closed:
            return
        if self._pending or not self._send_now(run):
            self._pending.append(run)
            if len(self._pending) > _PENDING:
                self._pending.popleft()

    def _writable(self) -> None:
        if self.closed:
            return
        self._loop.remove_writer(self._sock.fileno())
        while self._pending:
            if not self._send_now(self._pending[0]):
                return
            if not self._pending:  # closed by what the error led to
                return
            self._pending.popleft()
        self._on_writable()

    def _send_now(self, run: _Run) -> bool:
        """Sends; False: the kernel takes no more now. What it refuses for good is lost."""
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
            return False
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                self._loop.call_later(_NO_BUFFERS_PAUSE, self._writable)
                return False
            if count > 1 and error.errno in _NO_SEGMENTS:
                # This device, or a path with a smaller MTU, cannot: one by one from now on.
                self._segmented = False
                self.send_run(parts, size, address)
                return True
            self._on_error(error)
        else:
            self.datagrams_sent += count
        return True


def datagram_size(config: Config, address: Address, peer: SocketAddress) -> int:
    """Bytes of a UDP payload towards ``peer``: the address decides, then Quic.datagram_size."""
    chosen: int | str = address.options.get("datagram_size", "auto")
    if chosen == "auto":
        chosen = config.quic.datagram_size
    if chosen == "auto":
        return 16_000 if is_loopback(peer) else 1_200
    return int(chosen)


def is_loopback(address: SocketAddress) -> bool:
    """Whether the peer is this machine."""
    host = str(address[0])
    return host.startswith(("127.", "::ffff:127.")) or host == "::1"


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
