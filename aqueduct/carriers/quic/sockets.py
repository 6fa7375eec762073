"""UDP sockets: bursts in, runs of datagrams out, and the kernel's buffers."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from aqueduct.address import Address
from aqueduct.config import Config

__all__ = ["UdpSocket", "datagram_size", "host_port", "is_loopback"]

logger = logging.getLogger("aqueduct.quic")

BURST: Final = 64
"""Datagrams read in one wake-up, so that one socket starves nothing else on the loop."""
_RECEIVE_SIZE: Final = 16_384  # no QUIC packet of ours is larger
_PENDING: Final = 1024  # datagrams that wait for the kernel; above it they are lost, as on a wire
_NO_BUFFERS_PAUSE: Final = 0.001  # seconds: a full device queue makes no socket unwritable
_warned: set[str] = set()

SocketAddress = Any
"""What the socket module calls an address: (host, port) or (host, port, flow, scope)."""


class UdpSocket:
    """One non-blocking UDP socket on the running loop."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        buffer_size: int,
        on_datagrams: Callable[[list[tuple[bytes, SocketAddress]]], None],
        on_error: Callable[[OSError], None],
        on_writable: Callable[[], None],
        connected: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_datagrams = on_datagrams
        self._on_error = on_error
        self._on_writable = on_writable
        self._remote = sock.getpeername() if connected else None
        self._pending: deque[tuple[bytes, SocketAddress]] = deque()
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

    def send(self, datagrams: Sequence[tuple[bytes, SocketAddress]]) -> None:
        """Sends the datagrams in order, or keeps them until the kernel takes more."""
        if self.closed:
            return
        if self._pending:
            self._pending.extend(datagrams)
        else:
            done = self._send_now(datagrams)
            if done == len(datagrams):
                return
            self._pending.extend(datagrams[done:])
        while len(self._pending) > _PENDING:
            self._pending.popleft()

    def close(self) -> None:
        """Closes; what waits is dropped."""
        if not self.closed:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._pending.clear()
            self._sock.close()

    def _readable(self) -> None:
        batch: list[tuple[bytes, SocketAddress]] = []
        receive, remote = self._sock.recv, self._remote
        failure: OSError | None = None
        try:
            if remote is not None:
                while len(batch) < BURST:
                    batch.append((receive(_RECEIVE_SIZE), remote))
            else:
                receive_from = self._sock.recvfrom
                while len(batch) < BURST:
                    batch.append(receive_from(_RECEIVE_SIZE))
        except BlockingIOError:
            pass
        except OSError as error:
            failure = error
        if batch:
            self.datagrams_received += len(batch)
            self._on_datagrams(batch)
        if failure is not None:
            self._on_error(failure)

    def _writable(self) -> None:
        if self.closed:
            return
        self._loop.remove_writer(self._sock.fileno())
        pending = list(self._pending)
        self._pending.clear()
        done = self._send_now(pending)
        if done < len(pending):
            self._pending.extend(pending[done:])
        elif not self.closed:
            self._on_writable()

    def _send_now(self, datagrams: Sequence[tuple[bytes, SocketAddress]]) -> int:
        """Sends; returns how many are done with (sent, or refused for good)."""
        for index, (data, address) in enumerate(datagrams):
            try:
                if self._remote is not None:
                    self._sock.send(data)
                else:
                    self._sock.sendto(data, address)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._writable)
                return index
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    self._loop.call_later(_NO_BUFFERS_PAUSE, self._writable)
                    return index
                self._on_error(error)
                if self.closed:
                    return len(datagrams)
            self.datagrams_sent += 1
        return len(datagrams)


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


def host_port(address: SocketAddress) -> str:
    """An address as people write it."""
    host = str(address[0]).removeprefix("::ffff:")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def _enlarge(sock: socket.socket, size: int) -> None:
    for option, name in ((socket.SO_RCVBUF, "rmem_max"), (socket.SO_SNDBUF, "wmem_max")):
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, size)
        except OSError:
            pass  # some systems refuse instead of giving less; what is there is checked next
        got = sock.getsockopt(socket.SOL_SOCKET, option)
        if sys.platform == "linux":
            got //= 2  # twice of what was asked is reported, for the kernel's own overhead
        if got < size and name not in _warned:
            _warned.add(name)
            logger.warning(
                "the kernel gives a UDP socket %d bytes of buffer instead of %d; bursts may be "
                "lost. Allow more with: sysctl -w net.core.%s=%d",
                got,
                size,
                name,
                size,
            )
