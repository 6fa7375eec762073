"""A UDP relay that loses, delays and reorders datagrams, by a seed; and listens in.

Clients send to the relay's port; each gets a socket of its own towards the server. What happens
to a datagram depends on the seed and on how many went the same way before it, not on the clock.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

_SIZE = 65_536


class Relay:
    """See the module.

    ``drop`` and ``reorder`` are probabilities; a reordered datagram leaves ``delay`` seconds
    later than the others, which leave at once (or all leave ``latency`` seconds later).
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        drop: float = 0.0,
        reorder: float = 0.0,
        duplicate: float = 0.0,
        delay: float = 0.0,
        latency: float = 0.0,
        host: str = "127.0.0.1",
    ) -> None:
        self._random = {way: random.Random(f"{seed} {way}") for way in ("up", "down")}
        self._drop = drop
        self._reorder = reorder
        self._duplicate = duplicate
        self._delay = delay
        self._latency = latency
        self._host = host
        self.cut = False
        """Whether nothing gets through any more."""
        self.passed = 0
        self.dropped = 0
        self.heard: Callable[[str, bytes], None] = lambda way, data: None
        """Called with ("up" or "down", datagram) for each that arrives."""
        self._outer: socket.socket | None = None
        self._inner: dict[Any, socket.socket] = {}
        self._timers: set[asyncio.TimerHandle] = set()

    async def start(self, port: int) -> int:
        """Relays to the server at ``port``; returns the port for clients."""
        self._loop = asyncio.get_running_loop()
        self._target = (self._host, port)
        self._outer = self._socket((self._host, 0))
        self._loop.add_reader(self._outer, self._from_client)
        bound: int = self._outer.getsockname()[1]
        return bound

    def close(self) -> None:
        """Ends it; what is delayed is lost."""
        for timer in self._timers:
            timer.cancel()
        for sock in (self._outer, *self._inner.values()):
            if sock is not None and sock.fileno() >= 0:
                self._loop.remove_reader(sock)
                sock.close()

    def move(self) -> None:
        """The clients' datagrams reach the server from new ports from now on (as by a NAT)."""
        for client, sock in list(self._inner.items()):
            self._loop.remove_reader(sock)
            sock.close()
            self._open_inner(client)

    def inject(self, data: bytes) -> None:
        """Sends ``data`` both ways on each open path, as from the right address."""
        assert self._outer is not None
        for client, sock in self._inner.items():
            sock.send(data)
            self._outer.sendto(data, client)

    def _socket(self, address: Any) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_DGRAM)
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        sock.bind(address)
        return sock

    def _open_inner(self, client: Any) -> socket.socket:
        sock = self._inner[client] = self._socket((self._host, 0))
        sock.connect(self._target)
        self._loop.add_reader(sock, self._from_server, client, sock)
        return sock

    def _from_client(self) -> None:
        assert self._outer is not None
        for _ in range(64):
            try:
                data, client = self._outer.recvfrom(_SIZE)
            except OSError:
                return
            sock = self._inner.get(client) or self._open_inner(client)
            self._pass("up", data, sock.send)

    def _from_server(self, client: Any, sock: socket.socket) -> None:
        for _ in range(64):
            try:
                data = sock.recv(_SIZE)
            except OSError:
                return
            self._pass("down", data, partial(self._to_client, client))

    def _to_client(self, client: Any, data: bytes) -> None:
        assert self._outer is not None
        self._outer.sendto(data, client)

    def _pass(self, way: str, data: bytes, send: Callable[[bytes], Any]) -> None:
        self.heard(way, data)
        chance = self._random[way]
        lost, late, twice = chance.random(), chance.random(), chance.random()
        if self.cut or lost < self._drop:
            self.dropped += 1
            return
        self.passed += 1
        for _ in range(2 if twice < self._duplicate else 1):
            wait = self._latency + (self._delay if late < self._reorder else 0.0)
            if wait:
                self._later(wait, data, send)
            else:
                _try(send, data)

    def _later(self, wait: float, data: bytes, send: Callable[[bytes], Any]) -> None:
        def go() -> None:
            self._timers.discard(timer)
            _try(send, data)

        timer = self._loop.call_later(wait, go)
        self._timers.add(timer)


def _try(send: Callable[[bytes], Any], data: bytes) -> None:
    try:
        send(data)
    except OSError:
        pass  # a full or closed socket loses it, as a network does
