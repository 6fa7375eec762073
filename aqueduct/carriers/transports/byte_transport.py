"""One connection: its bytes, by a transport of asyncio."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from aqueduct.carriers.binding import host_port
from aqueduct.carriers.stream.sockets import limit_silence, scratch, tune, untaken
from aqueduct.config import Config

__all__ = ["ByteTransport", "prepare"]

_WRITE: Final = 256 << 10
"""Bytes that are given to the kernel at once: more would be copied where it does not take them."""

_GATHER: Final = 4 << 10
"""Bytes of a buffer, in the mean, from which a copy costs more than to give each to the kernel."""


def prepare(sock: socket.socket, config: Config, silence: float) -> None:
    """Sets what every connection has. Raises OSError only if it is dead already.

    ``silence``: seconds that bytes may stay unacknowledged.
    """
    tune(sock, config)
    if sock.family != socket.AF_UNIX:
        # Pings find a dead peer sooner. This is for acknowledgements alone, which nothing answers;
        # less would cut off a peer whose application reads nothing for a while.
        limit_silence(sock, max(1.0, silence))


class ByteTransport(asyncio.BufferedProtocol):
    """A connection. Subclasses say what its bytes mean.

    They define ``made``, ``received``, ``take`` and ``lost``, and ``room`` with ``landed`` where
    large data are read to their place. After ``abort`` none of them is called.
    """

    def __init__(self, config: Config, name: str, peer: str = "") -> None:
        """``name``: of the memory to read into. ``peer``: its address, if it is known before."""
        self.config = config
        self.peer = peer
        self.connecting: asyncio.Future[Any] | None = None
        """What makes the connection; ``abort`` cancels it."""
        self.heard_at: float | None = None
        self.stepped_at: float | None = None
        """When the peer sent its last bytes, and completed a step of its handshake; None: never."""
        self.unsent = 0
        """Bytes that were taken and that asyncio does not have yet."""
        self.held = False
        """Whether nothing is read for now."""
        self.said = ""
        """Why the peer closes, if it says so."""
        self._transport: asyncio.Transport | None = None
        self._scratch = scratch(name)
        self._landing = False
        self._leaving: deque[Any] = deque()
        """Buffers that have not all left."""
        self._answer = b""
        self._writable = True
        self._closed = False
        self._draining = False
        """Nothing that comes is looked at."""
        self._deaf = False
        """Nobody hears of the end either."""
        self._linger: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    # What a subclass defines

    def made(self) -> None:
        """The connection is there."""

    def room(self) -> memoryview | None:
        """Where the next bytes go; None or empty: they are ``received``."""
        return None

    def landed(self, size: int, now: float) -> None:
        """So many bytes were read to ``room``."""

    def received(self, data: bytes, now: float) -> None:
        """The next bytes."""

    def take(self, limit: int) -> tuple[Iterable[Any], int]:
        """The buffers that are to leave next, of about ``limit`` bytes, and how many these are."""
        return (), 0

    @property
    def coming(self) -> int:
        """Bytes that came and that are kept here, as what is missing has not come."""
        return 0

    def farewell(self) -> bytes:
        """What leaves last, before the connection is closed."""
        return b""

    def drained(self) -> None:
        """The kernel takes bytes again."""

    def lost(self, error: Exception | None) -> None:
        """The connection is over; None: it was closed."""

    # What the owner does

    def flush(self) -> None:
        """Gives the kernel what may leave, as far as it takes it."""
        transport = self._transport
        if transport is None:
            return
        while self._writable and not self._closed and not transport.is_closing():
            if not self._leaving:
                if self._answer:
                    data, self._answer = self._answer, b""
                    transport.write(data)
                    continue
                buffers, size = self.take(_WRITE)
                if not size:
                    return
                self._leaving.extend(buffers)
                self.unsent += size
            self._write(transport)

    def hold(self, held: bool) -> None:
        """Reads nothing while ``held``."""
        self.held = held
        if self._transport is not None and not self._closed:
            if held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    @property
    def free(self) -> bool:
        """Whether bytes can leave at once."""
        transport = self._transport
        return (
            self._writable
            and transport is not None
            and not self._closed
            and not transport.is_closing()
        )

    @property
    def untaken(self) -> int:
        """Bytes that the kernel and asyncio have. While it is not ``free`` a change is progress."""
        sock, transport = self.extra("socket"), self._transport
        if sock is None or transport is None:
            return 0
        return untaken(sock) + transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Sends this next: of a handshake, or a close, which are short."""
        if self._leaving:
            self._leaving.append(data)  # it would stand within what has left in part
            self.unsent += len(data)
        elif self._transport is not None:
            self._transport.write(data)

    def answer(self, data: bytes) -> None:
        """Sends this between what is taken. Of several that find no room the last one leaves."""
        if self.free and not self._leaving:
            self.write(data)
        else:
            self._answer = data

    def finish(
        self, *, drain: bool = False, last: bool = False, until: float | None = None
    ) -> None:
        """Closes it once everything has left, or at the time ``until``.

        None: after Timing.close_linger.

        ``drain``: what the peer still sends is read and forgotten. Otherwise the kernel would tell
        the peer of a reset, at which it may not read what was said last. ``last``: what was said
        has the peer close the connection, so it is waited for where one half cannot be closed.
        """
        transport = self._transport
        if transport is None:
            self.abort()
        elif not self._closed:
            self._leaving.extend(self.take(_WRITE)[0])
            self._leaving.append(self.farewell())
            self._closed = True
            for buffer in self._leaving:
                transport.write(buffer)
            self._leaving.clear()
            self.unsent = 0
            if transport.is_closing():
                pass
            elif drain and transport.can_write_eof():
                self._draining = True
                try:
                    transport.write_eof()
                except OSError:  # the peer has reset it, and asyncio has not read that yet
                    transport.abort()
                else:
                    transport.resume_reading()
            elif drain and last:
                self._draining = True
                transport.resume_reading()
            else:
                transport.close()
            if until is None:
                until = self._loop.time() + self.config.timing.close_linger
            self._linger = self._loop.call_at(until, transport.abort)

    def abort(self) -> None:
        """Ends it now. Nobody hears of it any more."""
        self._deaf = self._closed = True
        self._leaving.clear()
        self.unsent = 0
        if self.connecting is not None:
            self.connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    def cut(self) -> None:
        """Ends it now; ``lost`` follows."""
        if self._transport is not None:
            self._transport.abort()

    def extra(self, name: str) -> Any:
        """What asyncio knows of the connection: ``socket``, ``ssl_object``."""
        return None if self._transport is None else self._transport.get_extra_info(name)

    def has_input(self) -> bool:
        """Whether the peer has sent bytes that are not read yet."""
        sock = self.extra("socket")
        if sock is None or sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN)
        return any(found & select.POLLIN for _, found in poll.poll(0))

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._deaf:
            transport.abort()  # it was given up before
            return
        # Acknowledgements overtake nothing that transport and kernel hold: let it be little.
        # Not 0: at that asyncio's TLS waits for room although nothing waits to leave.
        transport.set_write_buffer_limits(high=1, low=0)
        if not self.peer:
            self.peer = _name_of(transport.get_extra_info("peername"))
        self.made()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        room = None if self._draining or self._deaf else self.room()
        self._landing = room is not None and len(room) > 0
        return room if room is not None and self._landing else self._scratch

    def buffer_updated(self, size: int) -> None:
        """See asyncio."""
        now = self.heard_at = self._loop.time()
        if self._draining or self._deaf:
            return
        if self._landing:
            self.landed(size, now)
        else:
            self.received(bytes(self._scratch[:size]), now)

    def eof_received(self) -> bool:
        """See asyncio: a connection of which one half has ended is of no use."""
        return False

    def pause_writing(self) -> None:
        """See asyncio."""
        self._writable = False

    def resume_writing(self) -> None:
        """See asyncio."""
        self._writable = True
        if not self._closed:
            self.drained()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self._closed = True
        if self._linger is not None:
            self._linger.cancel()
        if not self._deaf:
            self._deaf = True
            self.lost(error)

    # Within

    def _write(self, transport: asyncio.Transport) -> None:
        """Writes about ``_WRITE`` bytes of what is to leave."""
        leaving, gathered, size = self._leaving, [], 0
        while leaving and size < _WRITE:
            buffer = leaving.popleft()
            room = _WRITE - size
            if len(buffer) > room:
                view = memoryview(buffer)
                leaving.appendleft(view[room:])
                buffer = view[:room]
            gathered.append(buffer)
            size += len(buffer)
        self.unsent -= size
        if size >= _GATHER * len(gathered) and len(gathered) > 1:
            gathered = self._write_gathered(transport, gathered)
        # Not by writelines, which forgets to say that there is enough in some versions of asyncio.
        if gathered:
            transport.write(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    def _write_gathered(self, transport: asyncio.Transport, buffers: list[Any]) -> list[Any]:
        """Writes large buffers without a copy; returns what the kernel does not take.

        Over TLS, or behind bytes that asyncio still has, all is returned.
        """
        sock = transport.get_extra_info("socket")
        if (
            transport.get_extra_info("ssl_object") is not None
            or sock is None
            or transport.get_write_buffer_size()
        ):
            return buffers
        try:
            sent = os.writev(sock.fileno(), buffers)
        except OSError:  # there is no room; asyncio tells of all else
            return buffers
        for place, buffer in enumerate(buffers):
            if sent < len(buffer):
                return [memoryview(buffer)[sent:], *buffers[place + 1 :]]
            sent -= len(buffer)
        return []


def _name_of(place: Any) -> str:
    """An address of the socket module as people write it."""
    if not isinstance(place, tuple):
        return os.fsdecode(place) if place else "a process of this machine"
    return host_port(place)
