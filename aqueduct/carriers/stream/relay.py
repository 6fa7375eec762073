"""The way of a TLS connection through this process, to the one that has its link."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Sequence
from typing import Final

from aqueduct.carriers.contract import Buffer
from aqueduct.carriers.stream.sockets import scratch
from aqueduct.carriers.tls_library import Tls
from aqueduct.escaping import logger_of

__all__ = ["Relay"]

logger = logger_of("aqueduct.carriers.stream")

_PIECES: Final = 64  # buffers in one call of the kernel


class Relay:
    """Decrypts for the Unix socket ``other`` what comes on ``sock``, and encrypts what it answers.

    ``first`` is written to ``other`` before anything else. Both sockets belong to the relay, which
    closes them and calls ``over`` when one of them fails, or both have ended. When one has ended,
    the rest has ``linger`` seconds, also if the client takes nothing meanwhile. Nothing more is
    read while what was read has not left: at most 64 KiB each way are held here. ``turn`` bytes
    are read before others have their turn.
    """

    def __init__(
        self,
        sock: socket.socket,
        tls: Tls,
        other: socket.socket,
        first: bytes,
        *,
        linger: float,
        turn: int,
        over: Callable[[Relay], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._linger = linger
        self._over = over
        self._closing = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        records = tls.records
        self._inward = _Way(
            self, sock, other, records.recv_into, lambda data: [data], lambda: b"", turn
        )
        self._outward = _Way(
            self, other, sock, other.recv_into, lambda data: tls.seal([data]), tls.farewell, turn
        )
        self._inward.begin([first])
        self._outward.begin([])

    def ending(self) -> None:
        """One source has ended: what is left has some time."""
        if not self._closing:
            self._closing = True
            self._wait(self.close)

    def ended(self) -> None:
        """One way has come to its end."""
        if self._inward.over and self._outward.over:
            self.close()

    def blocked(self) -> None:
        """One target takes nothing: no event tells then that the source has gone."""
        if self._timer is None and not self._closed:
            self._wait(self._look)

    def _wait(self, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._linger, then)

    def _look(self) -> None:
        self._timer = None
        ways = [way for way in (self._inward, self._outward) if way.blocked]
        if any(_hung_up(way.source) for way in ways):
            self.ending()
        elif ways:
            self._wait(self._look)

    def close(self) -> None:
        """Ends it now."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for way in (self._inward, self._outward):
            way.rest()
        for way in (self._inward, self._outward):
            way.source.close()
        self._over(self)


class _Way:
    """One direction: what ``read`` finds in ``source`` leaves by ``target`` as ``wrap`` says."""

    def __init__(
        self,
        relay: Relay,
        source: socket.socket,
        target: socket.socket,
        read: Callable[[memoryview], int],
        wrap: Callable[[memoryview], Sequence[Buffer]],
        last: Callable[[], bytes],
        turn: int,
    ) -> None:
        self.source = source
        self.over = False
        self.blocked = False
        """Whether the target takes nothing now."""
        self._relay = relay
        self._target = target
        self._read = read
        self._wrap = wrap
        self._last = last
        self._turn = turn
        self._loop = asyncio.get_running_loop()
        self._room = scratch("relayed")
        self._waiting: list[memoryview] = []
        """What was read, and the kernel did not take."""
        self._ending = False
        self._again: asyncio.Handle | None = None

    def begin(self, first: Sequence[Buffer]) -> None:
        """Sends ``first``, then what comes."""
        self._loop.add_reader(self.source.fileno(), self._readable)
        # What TLS holds makes no socket readable.
        self._again = self._loop.call_soon(self._start, first)

    def rest(self) -> None:
        """Nothing more passes."""
        self.over = True
        self._loop.remove_reader(self.source.fileno())
        self._loop.remove_writer(self._target.fileno())
        if self._again is not None:
            self._again.cancel()

    def _start(self, first: Sequence[Buffer]) -> None:
        self._again = None
        if self._send(first):
            self._readable()

    def _readable(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        budget, room = self._turn, self._room
        try:
            while budget > 0:
                size = self._read(room)
                if not size:
                    self._end()
                    return
                if not self._send(self._wrap(room[:size])):
                    return
                if size < len(room):
                    return  # there is no more now
                budget -= size
        except BlockingIOError:
            return
        except OSError:  # TlsError is one
            self._relay.close()
            return
        except Exception:  # memory may be short: what was taken from the records would be missing
            logger.exception("a relayed connection was cut by a fault")
            self._relay.close()
            return
        self._again = self._loop.call_soon(self._readable)

    def _send(self, pieces: Sequence[Buffer]) -> bool:
        """Whether all of it has left; else the rest is kept, and no more is read until then."""
        left = [memoryview(piece) for piece in pieces if piece]
        try:
            self._write(left)
        except OSError:
            self._relay.close()
            return False
        if not left:
            return True
        # The memory is for all relays of the thread.
        self._waiting = [memoryview(bytes(piece)) for piece in left]
        self.blocked = True
        self._loop.remove_reader(self.source.fileno())
        self._loop.add_writer(self._target.fileno(), self._writable)
        self._relay.blocked()
        return False

    def _write(self, left: list[memoryview]) -> None:
        """Takes from ``left`` what the kernel takes."""
        try:
            while left:
                count = self._target.sendmsg(left[:_PIECES])
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
        except BlockingIOError:
            pass

    def _writable(self) -> None:
        try:
            self._write(self._waiting)
        except OSError:
            self._relay.close()
            return
        if self._waiting:
            return
        self.blocked = False
        self._loop.remove_writer(self._target.fileno())
        if self._ending:
            self._shut()
        else:
            self._loop.add_reader(self.source.fileno(), self._readable)
            self._readable()

    def _end(self) -> None:
        """The source has ended: so does the target, once it has everything."""
        self._ending = True
        self._relay.ending()
        self._loop.remove_reader(self.source.fileno())
        if self._send([self._last()]):
            self._shut()

    def _shut(self) -> None:
        self.over = True
        try:
            self._target.shutdown(socket.SHUT_WR)
        except OSError:
            self._relay.close()
            return
        self._relay.ended()


def _hung_up(sock: socket.socket) -> bool:
    """Whether its peer has closed it. Bytes that nobody has read yet hide that from reading."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))
