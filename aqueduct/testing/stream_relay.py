"""A proxy for byte streams that cuts, stalls, trickles, delays and cuts up anew; and counts.

Clients connect to the proxy, over TCP or Unix; each gets a connection of its own to the server.
What happens at which byte is the test's choice or the seed's, never the clock's: a way passes bytes
up to its ``limit``, in pieces of at most ``piece``, and never takes one byte from a sender
that it may not pass on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

__all__ = ["End", "Fate", "RelayedConnection", "StreamRelay", "Way"]

_PIECE = 65_536
_HELD = 256 * 1024
"""What a way holds at most of what was read and not passed on: more waits in the kernel."""
_WAITS = 0.1
"""Seconds for which bytes wait in a way that has a rate."""

Place = tuple[str, int] | str
"""A TCP address, or the path of a Unix socket."""


class End(Enum):
    """What happens at the limit of a way."""

    STALL = auto()
    """Nothing: the bytes wait, until ``Way.let`` raises the limit."""
    FIN = auto()
    """Both sides read an orderly end of the stream, behind the bytes that have passed."""
    RESET = auto()
    """Both sides are reset. A Unix socket has no reset: its peers find it closed."""
    HALF = auto()
    """The receiver of this way reads an end of the stream; the other way goes on."""


@dataclass(frozen=True)
class Fate:
    """What happens to one way of each connection."""

    limit: int | None = None
    """Bytes that pass until ``end`` happens; None: no end."""
    end: End = End.STALL
    piece: int = _PIECE
    """The largest number of bytes that are passed in one turn of the loop."""
    chop: bool = False
    """Whether the pieces have sizes from 1 to ``piece``, by the seed."""
    delay: float = 0.0
    """Seconds that each piece is late."""
    rate: float | None = None
    """Bytes a second that pass; None: as many as can."""


class StreamRelay:
    """See the module. ``up`` is the way from the client to the server, ``down`` the other.

    ``buffer`` is asked of the kernel for every socket of the proxy, so that little is
    there that has passed and was not read, or has left and has not passed.
    """

    def __init__(
        self,
        *,
        up: Fate = Fate(),
        down: Fate = Fate(),
        seed: int = 0,
        buffer: int | None = None,
    ) -> None:
        self.up = up
        self.down = down
        """The fates of connections that are accepted from now on."""
        self.links: list[RelayedConnection] = []
        """The connections in the order of their coming, those that are over too."""
        self._seed = seed
        self._buffer = buffer
        self._listener: socket.socket | None = None
        self._accepting: dict[asyncio.Task[None], socket.socket] = {}
        self.cut_early = 0
        """Connections that were cut before they reached the server; they are no ``links``."""
        self.on_limit: Callable[[], object] = lambda: None
        """Called when a connection is ended by the limit of a way."""

    def start(self, target: Place, listen: Place = ("127.0.0.1", 0)) -> Place:
        """Stands before the server at ``target``; returns the place for its clients."""
        self._loop = asyncio.get_running_loop()
        self._target = target
        self._listener = sock = self._socket(listen)
        if not isinstance(listen, str):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(listen)
        sock.listen(1024)
        self._loop.add_reader(sock, self._accept)
        if isinstance(listen, str):
            return listen
        host, port = sock.getsockname()[:2]
        return host, port

    @property
    def link(self) -> RelayedConnection:
        """The only connection there ever was."""
        (link,) = self.links
        return link

    @property
    def joining(self) -> int:
        """Connections of clients that have not reached the server yet."""
        return sum(not task.done() for task in self._accepting)

    def cut(self) -> int:
        """Resets all connections, those too that are just being made; returns how many."""
        while self._accept():
            pass
        found = 0
        for task, client in tuple(self._accepting.items()):
            if not task.done():
                _reset_at_close(client)
                task.cancel()
                self.cut_early += 1
                found += 1
        for link in self.links:
            if not link.over:
                link.cut(End.RESET)
                found += 1
        return found

    def close(self) -> None:
        """Ends it and all connections."""
        for task in self._accepting:
            task.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            name = self._listener.getsockname()
            self._listener.close()
            if isinstance(name, str):
                Path(name).unlink(missing_ok=True)
        for link in self.links:
            link.close()

    # Within

    def _socket(self, place: Place) -> socket.socket:
        family = socket.AF_UNIX
        if not isinstance(place, str):
            family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        if self._buffer is not None:
            # Before it connects or listens: a window that was announced is not taken back.
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, self._buffer)
        return sock

    def _accept(self) -> bool:
        """Takes a client that waits, if there is one."""
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        client.setblocking(False)
        task = self._loop.create_task(self._join(client))
        self._accepting[task] = client

        def done(task: asyncio.Task[None]) -> None:
            del self._accepting[task]
            if task.cancelled():  # maybe before its first step
                client.close()

        task.add_done_callback(done)
        return True

    async def _join(self, client: socket.socket) -> None:
        server = self._socket(self._target)
        try:
            async with asyncio.timeout(10):
                await self._loop.sock_connect(server, self._target)
        except BaseException as error:
            client.close()
            server.close()
            if isinstance(error, OSError):
                return  # the client finds out
            raise
        for sock in (client, server):
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = len(self.links)
        up = random.Random(f"{self._seed} {number} up")
        down = random.Random(f"{self._seed} {number} down")
        ways = (self.up, up), (self.down, down)
        self.links.append(RelayedConnection(client, server, *ways, lambda: self.on_limit()))


class RelayedConnection:
    """One connection: two ways."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        up: tuple[Fate, random.Random],
        down: tuple[Fate, random.Random],
        on_limit: Callable[[], object],
    ) -> None:
        self.up = Way(client, server, *up, self._end, on_limit)
        self.down = Way(server, client, *down, self._end, on_limit)
        self._sockets = (client, server)
        self.up.open()
        self.down.open()

    @property
    def over(self) -> bool:
        """Whether nothing will pass any more, either way."""
        return self.up.over and self.down.over

    def cut(self, end: End = End.RESET) -> None:
        """Ends both ways now, with FIN or RESET."""
        self._end(end)

    def close(self) -> None:
        """Closes both sockets."""
        for way in (self.up, self.down):
            way.shut()
        for sock in self._sockets:
            sock.close()

    # Within

    def _end(self, end: End) -> None:
        """A way came to its limit, or to the end of what its sender has to say (HALF)."""
        if end is End.FIN:
            self.up.finish()
            self.down.finish()
        elif end is End.RESET:
            for sock in self._sockets:
                _reset_at_close(sock)
            self.close()
        if self.over and self.up.ended and self.down.ended:
            self.close()


class Way:
    """The bytes from one socket to the other."""

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        fate: Fate,
        chance: random.Random,
        end: Callable[[End], None],
        on_limit: Callable[[], object],
    ) -> None:
        self.fate = fate
        self._on_limit = on_limit
        self.limit = fate.limit
        """Bytes that may pass in all; see ``let``."""
        self.read = 0
        """Bytes taken from the sender."""
        self.passed = 0
        """Bytes given to the kernel for the receiver."""
        self.heard: bytearray | None = None
        """Set to a bytearray, it gets the bytes that pass."""
        self.over = False
        """Whether nothing will ever pass any more."""
        self.ended = False
        """Whether the sender has ended its side."""
        self._source = source
        self._target = target
        self._chance = chance
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._held: deque[tuple[float, memoryview]] = deque()
        """What was read and has not passed, each with the time from which it may."""
        self._timer: asyncio.TimerHandle | None = None
        self._blocked = False
        self._finishing = False
        self._busy = 0.0
        """Until when what was read takes to pass, at this rate."""

    def open(self) -> None:
        """Begins."""
        self._arm()
        self._check()

    def let(self, count: int) -> None:
        """``count`` more bytes may pass than could so far."""
        if self.limit is not None:
            self.limit += count
            self._arm()

    def stall(self) -> None:
        """No byte more is taken from the sender, until ``let`` or ``resume``."""
        self.limit = self.read
        self.fate = replace(self.fate, end=End.STALL)
        self._arm()

    def resume(self) -> None:
        """All bytes pass as they come, for ever."""
        self.limit = None
        self._arm()

    def change(self, fate: Fate, *, anew: bool = True) -> None:
        """Another fate, from here on: its limit counts what comes from now.

        Without ``anew`` a limit that is the same goes on counting from where it did.
        """
        if self.over:
            return
        if anew or fate.limit != self.fate.limit:
            self.limit = None if fate.limit is None else self.read + fate.limit
        self.fate = fate
        self._busy = 0.0
        if not fate.delay and fate.rate is None:
            self._held = deque((0.0, data) for _, data in self._held)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._write()

    def finish(self) -> None:
        """The receiver reads an end behind what was read; what still comes is thrown away."""
        if not self._finishing:
            self._finishing = True
            self._write()

    def shut(self) -> None:
        """The sockets are about to be closed."""
        self.over = self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._source.fileno() >= 0:
            self._loop.remove_reader(self._source)
        if self._target.fileno() >= 0:
            self._loop.remove_writer(self._target)

    # Within

    def _room(self) -> int:
        held, piece, rate = _HELD, self.fate.piece, self.fate.rate
        if rate is not None:  # little at a time, and little that waits
            held = min(held, math.ceil(rate * (self.fate.delay + _WAITS)))
            piece = min(piece, math.ceil(rate * _WAITS / 4))
        most = held - (self.read - self.passed)
        if self.limit is not None:
            most = min(most, self.limit - self.read)
        return max(0, min(most, piece))

    def _arm(self) -> None:
        """Reads only while there is room: an event that nobody wants would come for ever."""
        if self._source.fileno() < 0:
            return
        # Once it is over the rest is read too: to close with bytes unread would be a reset.
        wanted = self.over or (not self._finishing and self._room() > 0)
        if wanted and not self.ended:
            self._loop.add_reader(self._source, self._read)
        else:
            self._loop.remove_reader(self._source)

    def _read(self) -> None:
        most = _PIECE if self.over else self._room()
        if self.fate.chop and not self.over:
            most = self._chance.randint(1, most)
        try:
            data = self._source.recv(most)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(End.RESET)  # what one side suffers the other learns
            return
        if not data:
            self.ended = True
            self._arm()
            self.finish()
            self._end(End.HALF)
        elif not self.over:
            self.read += len(data)
            due = 0.0
            if self.fate.delay or self.fate.rate is not None:
                self._busy = max(self._busy, self._loop.time())
                self._busy += len(data) / self.fate.rate if self.fate.rate is not None else 0.0
                due = self._busy + self.fate.delay
            self._held.append((due, memoryview(data)))
            self._write()

    def _write(self) -> None:
        """Passes on what may leave now."""
        self._wait_for_room(False)
        while self._held:
            due, data = self._held[0]
            if due > self._loop.time():
                if self._timer is None:
                    self._timer = self._loop.call_at(due, self._on_timer)
                self._arm()  # what is held for the delay may be all that there is room for
                return
            try:
                sent = self._target.send(data)
            except (BlockingIOError, InterruptedError):
                self._wait_for_room(True)
                break
            except OSError:
                self._end(End.RESET)
                return
            self.passed += sent
            if self.heard is not None:
                self.heard += data[:sent]
            if sent < len(data):
                self._held[0] = (due, data[sent:])
            else:
                self._held.popleft()
        if self._finishing and not self._held and not self.over:
            self.over = True
            with contextlib.suppress(OSError):
                self._target.shutdown(socket.SHUT_WR)
            self._end(End.HALF)
        self._arm()
        self._check()

    def _on_timer(self) -> None:
        self._timer = None
        self._write()

    def _wait_for_room(self, wanted: bool) -> None:
        if wanted == self._blocked:
            return
        self._blocked = wanted
        if wanted:
            self._loop.add_writer(self._target, self._write)
        elif self._target.fileno() >= 0:
            self._loop.remove_writer(self._target)

    def _check(self) -> None:
        """Does what happens at the limit, once."""
        if self._finishing or self.limit is None or self.passed < self.limit:
            return
        if self.fate.end is End.HALF:
            self.finish()
        elif self.fate.end is End.RESET:
            self.over = True
            self._on_limit()  # it is counted before either side can know of it
            self._end(End.RESET)
        elif self.fate.end is not End.STALL:
            self._end(self.fate.end)
            self._on_limit()


def _reset_at_close(sock: socket.socket) -> None:
    """Has ``close`` reset a TCP socket; a Unix one has no such thing."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
