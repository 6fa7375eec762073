"""One connection of a link: its handshake, then its bytes, by a transport of asyncio."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections import deque
from typing import Any, Final, Protocol

from aqueduct.carriers.binding import host_port
from aqueduct.carriers.stream.sockets import scratch, tune
from aqueduct.config import Config
from aqueduct.errors import AqueductError
from aqueduct.protocol.relink.handshake import (
    ConnectorHandshake,
    LinkAgreement,
    ListenerHandshake,
)
from aqueduct.protocol.relink.link import Link

__all__ = ["Carried", "LinkTransport", "Shaker", "prepare"]

_WRITE: Final = 256 << 10
"""Bytes that are given to the kernel at once: more would be copied where it does not take them."""
_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", None)


class Shaker(Protocol):
    """Who makes a connection or has accepted it, until the handshake is over."""

    def made(self, transport: LinkTransport) -> bytes:
        """It is there. Returns what to send first; raises AqueductError if it is not wanted."""

    def agreed(self, transport: LinkTransport, agreement: LinkAgreement) -> None:
        """The handshake is over. ``carry`` is to follow, or ``abort``."""

    def failed(self, transport: LinkTransport, error: Exception | None) -> None:
        """The connection has ended before; None: the peer has closed it."""


class Carried(Protocol):
    """A link with what is around it."""

    link: Link

    def advance(self) -> None:
        """The link has got bytes, or can send some."""

    def transport_gone(self, transport: LinkTransport, error: Exception | None) -> None:
        """The connection is over."""


def prepare(sock: socket.socket, config: Config) -> None:
    """Sets what every connection has. Raises OSError only if it is dead already."""
    tune(sock, config)
    if _USER_TIMEOUT is not None and sock.family != socket.AF_UNIX:
        # Pings find a dead peer sooner. This is for acknowledgements alone, which nothing answers;
        # less would cut off a peer whose application reads nothing for a while.
        milliseconds = max(1000, round(config.relink.silence * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, milliseconds)


class LinkTransport(asyncio.BufferedProtocol):
    """A connection, first in the hands of a Shaker, then of a link.

    After ``abort`` it tells nobody anything: bytes that still come are refused (RL-R18). Large
    parts of messages are read to where the link has room for them.
    """

    def __init__(
        self,
        config: Config,
        shaker: Shaker,
        handshake: ConnectorHandshake | ListenerHandshake,
        peer: str = "",
    ) -> None:
        """``peer``: its address, if it is known before."""
        self.config = config
        self.peer = peer
        self.connecting: asyncio.Future[Any] | None = None
        """What makes the connection; ``abort`` cancels it."""
        self.heard_at: float | None = None
        self.stepped_at: float | None = None
        """When the peer sent its last bytes, and completed a step of its handshake; None: never."""
        self._shaker: Shaker | None = shaker
        self._handshake = handshake
        self._carried: Carried | None = None
        self._transport: asyncio.Transport | None = None
        self._scratch = scratch("relink")
        self._landing = False
        self._leaving: deque[Any] = deque()
        """Buffers of the link that have not all left."""
        self._writable = True
        self._closed = False
        self._linger: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    # What the owner does

    def carry(self, carried: Carried) -> None:
        """From now on it carries a link. What the handshake still has to say leaves before."""
        self._say()
        self._shaker, self._carried = None, carried
        self.hold(False)

    def flush(self) -> None:
        """Gives the kernel what may leave, as far as it takes it."""
        carried, transport = self._carried, self._transport
        if carried is None or transport is None:
            return
        while self._writable and not transport.is_closing():
            if not self._leaving:
                buffers, size = carried.link.take(_WRITE, self._loop.time())
                if not size:
                    return
                self._leaving.extend(buffers)
            self._write(transport)

    def hold(self, held: bool) -> None:
        """Reads nothing while ``held``."""
        if self._transport is not None and not self._closed:
            if held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def finish(self) -> None:
        """Closes it once everything has left, or after Timing.close_linger."""
        if self._transport is None:
            self.abort()
        elif not self._closed:
            self._closed = True
            for buffer in self._leaving:
                self._transport.write(buffer)
            self._leaving.clear()
            self._transport.close()
            linger = self.config.timing.close_linger
            self._linger = self._loop.call_later(linger, self._transport.abort)

    def abort(self) -> None:
        """Ends it now. Nobody hears of it any more."""
        self._shaker = self._carried = None
        self._closed = True
        self._leaving.clear()
        if self.connecting is not None:
            self.connecting.cancel()
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
        if self._shaker is None:
            transport.abort()  # it was given up before
            return
        # Acknowledgements overtake nothing that transport and kernel hold: let it be little.
        # Not 0: at that asyncio's TLS waits for room although nothing waits to leave.
        transport.set_write_buffer_limits(high=1, low=0)
        if not self.peer:
            self.peer = _name_of(transport.get_extra_info("peername"))
        try:
            first = self._shaker.made(self)
        except AqueductError as error:
            self._fail(error)
        else:
            transport.write(first)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        carried = self._carried
        room = None if carried is None else carried.link.room()
        self._landing = room is not None and len(room) > 0
        return room if room is not None and self._landing else self._scratch

    def buffer_updated(self, size: int) -> None:
        """See asyncio."""
        now = self.heard_at = self._loop.time()
        carried = self._carried
        if carried is None:
            self._shake(bytes(self._scratch[:size]))
        elif self._landing:
            carried.link.landed(size, now)
            carried.advance()
        else:
            carried.link.receive_data(bytes(self._scratch[:size]), now)
            carried.advance()

    def eof_received(self) -> bool:
        """See asyncio: a connection of which one half has ended is of no use."""
        return False

    def pause_writing(self) -> None:
        """See asyncio."""
        self._writable = False

    def resume_writing(self) -> None:
        """See asyncio."""
        self._writable = True
        carried = self._carried
        if carried is not None:
            carried.link.left(self._loop.time())
            carried.advance()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self._closed = True
        if self._linger is not None:
            self._linger.cancel()
        carried, shaker = self._carried, self._shaker
        self._carried = self._shaker = None
        if carried is not None:
            carried.transport_gone(self, error)
        elif shaker is not None:
            shaker.failed(self, error)

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
        # Not by writelines, which forgets to say that there is enough in some versions of asyncio.
        transport.write(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    def _shake(self, data: bytes) -> None:
        shaker, handshake = self._shaker, self._handshake
        if shaker is None:
            return  # it was given up; its last bytes
        try:
            agreement = handshake.receive_data(data)
        except AqueductError as error:
            self._say()
            self._fail(error)
            return
        if agreement is None:
            self._say()
            return
        self.stepped_at = self.heard_at
        self.hold(True)  # until ``carry``
        shaker.agreed(self, agreement)

    def _say(self) -> None:
        """Sends what the listener's side of the handshake has to say."""
        if isinstance(self._handshake, ListenerHandshake) and self._handshake.output:
            assert self._transport is not None
            self._transport.write(self._handshake.output)
            self._handshake.output = b""
            self.stepped_at = self.heard_at

    def _fail(self, error: Exception) -> None:
        shaker, self._shaker = self._shaker, None
        self.finish()
        if shaker is not None:
            shaker.failed(self, error)


def _name_of(place: Any) -> str:
    """An address of the socket module as people write it."""
    if not isinstance(place, tuple):
        return os.fsdecode(place) if place else "a process of this machine"
    return host_port(place)
