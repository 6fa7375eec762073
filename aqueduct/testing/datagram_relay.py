"""A UDP relay that loses, delays and reorders datagrams, by a seed; and listens in.

Clients send to the relay's port; each gets a socket of its own towards the server. What happens
to a datagram depends on the seed and on how many went the same way before it, not on the clock.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

__all__ = ["DatagramRelay"]

_SIZE: Final = 65_536
_BACKLOG: Final = 0.5
"""Seconds that a datagram waits at most where there is a ``rate``; one that had longer is lost."""


class DatagramRelay:
    """See the module.

    ``drop`` and ``reorder`` are probabilities; a reordered datagram leaves ``delay`` seconds
    later than the others, which leave at once (or all leave ``latency`` seconds later). ``rate``:
    bytes a second that pass each way; None: as many as can.
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
        rate: float | None = None,
        host: str = "127.0.0.1",
        listen: str | None = None,
    ) -> None:
        """``host`` is the server's, and ``listen`` where clients send; None: the same."""
        self._random: dict[str, random.Random] = {}
        self.drop = drop
        self.reorder = reorder
        self.duplicate = duplicate
        self.delay = delay
        self.latency = latency
        self.rate = rate
        self._host = host
        self._listen = listen or host
        self.cut = False
        """Whether nothing gets through any more."""
        self.silent: set[str] = set()
        """Ways, "up" and "down", on which nothing gets through."""
        self.limit: int | None = None
        """Bytes of a way after which a client is cut off for good; see ``count_from_here``."""
        self.on_limit: Callable[[], object] = lambda: None
        """Called when a client is cut off by ``limit``."""
        self.passed = 0
        self.dropped = 0
        self.heard: Callable[[str, bytes], None] = lambda way, data: None
        """Called with ("up" or "down", datagram) for each that arrives."""
        self._outer: socket.socket | None = None
        self._inner: dict[Any, socket.socket] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._busy: dict[str, float] = {}
        self._counts: Counter[tuple[Any, str]] = Counter()
        self._dead: set[Any] = set()
        self.bytes = Counter[str]()
        """Bytes that have passed, of each way."""
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """What happens from now on is that of ``seed``."""
        self._random = {way: random.Random(f"{seed} {way}") for way in ("up", "down")}

    async def start(self, port: int) -> int:
        """Relays to the server at ``port``; returns the port for clients."""
        self._loop = asyncio.get_running_loop()
        self._target = (self._host, port)
        self._outer = self._socket(self._listen)
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

    @property
    def clients(self) -> int:
        """How many clients there were, by their addresses."""
        return len(self._inner)

    def cut_off(self) -> int:
        """Nothing of the clients that are known now gets through any more; returns how many."""
        found = self._inner.keys() - self._dead
        self._dead |= found
        return len(found)

    def count_from_here(self) -> None:
        """What has passed does not count against ``limit``."""
        self._counts.clear()

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

    def _socket(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_DGRAM)
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        sock.bind((host, 0))
        return sock

    def _open_inner(self, client: Any) -> socket.socket:
        sock = self._inner[client] = self._socket("::" if ":" in self._host else "")
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
            if self._may_pass(client, "up", data):
                self.pass_on("up", data, sock.send)

    def _from_server(self, client: Any, sock: socket.socket) -> None:
        for _ in range(64):
            try:
                data = sock.recv(_SIZE)
            except OSError:
                return
            if self._may_pass(client, "down", data):
                self.pass_on("down", data, partial(self._to_client, client))

    def _to_client(self, client: Any, data: bytes) -> None:
        assert self._outer is not None
        self._outer.sendto(data, client)

    def _may_pass(self, client: Any, way: str, data: bytes) -> bool:
        if self.limit is not None and client not in self._dead:
            self._counts[client, way] += len(data)
            if self._counts[client, way] > self.limit:
                self._dead.add(client)
                self.on_limit()
        if client in self._dead:
            self.dropped += 1
            return False
        return True

    def pass_on(self, way: str, data: bytes, send: Callable[[bytes], Any]) -> None:
        """Does with a datagram what chance and settings want."""
        self.heard(way, data)
        chance = self._random[way]
        lost, late, twice = chance.random(), chance.random(), chance.random()
        queued = self._queued(way, len(data))
        if self.cut or way in self.silent or lost < self.drop or queued > _BACKLOG:
            self.dropped += 1
            return
        self.passed += 1
        self.bytes[way] += len(data)
        for _ in range(2 if twice < self.duplicate else 1):
            wait = queued + self.latency + (self.delay if late < self.reorder else 0.0)
            if wait:
                self._later(wait, data, send)
            else:
                _try(send, data)

    def _queued(self, way: str, size: int) -> float:
        """Seconds until a datagram has passed the ``rate``. One that waits too long takes none."""
        if self.rate is None:
            return 0.0
        now = self._loop.time()
        free = max(now, self._busy.get(way, 0.0)) + size / self.rate
        if free - now <= _BACKLOG or free - now <= size / self.rate:
            self._busy[way] = free
            return min(free - now, _BACKLOG)
        return free - now

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
