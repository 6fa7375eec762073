"""How a server comes to its connections: it accepts them, and gives places to half-open ones."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Hashable
from typing import Final

from aqueduct.address import Address
from aqueduct.carriers.binding import host_port, listens
from aqueduct.carriers.certificates import ServerTls
from aqueduct.carriers.contract import Bound
from aqueduct.carriers.places import Places, origin_of
from aqueduct.carriers.renewal import Renewed
from aqueduct.carriers.stream.sockets import credentials_of
from aqueduct.carriers.tls_stdlib import server_context
from aqueduct.carriers.transports.byte_transport import ByteTransport, prepare
from aqueduct.carriers.transports.reasons import reason_of
from aqueduct.config import Config
from aqueduct.escaping import logger_of
from aqueduct.forks import own_socket, sever

__all__ = ["Accepting", "Arriving", "name_of_socket"]

log = logger_of(__name__)

_NO_DESCRIPTOR_PAUSE: Final = 0.1
"""Seconds until a connection is accepted again after the system refused one."""


class Arriving:
    """A connection that came, until its handshake is over: then ``settle``, or ``give_up``."""

    def __init__(self, place: Accepting, sock: socket.socket, transport: ByteTransport) -> None:
        self.transport = transport
        self.sock = sock
        self.origin: Hashable = origin_of(transport.peer, credentials_of(sock))
        """What counts as one address."""
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(place.patience, self.give_up)

    @property
    def heard_at(self) -> float | None:
        """When the peer sent its last bytes."""
        return self.transport.heard_at

    @property
    def stepped_at(self) -> float | None:
        """When the peer completed a step of its handshake."""
        return self.transport.stepped_at

    def has_input(self) -> bool:
        """Whether the peer has sent bytes that are not read yet."""
        return self.transport.has_input()

    def begin(self, context: ssl.SSLContext | None) -> None:
        """Makes the transport; over TLS that takes a handshake of its own."""
        transport = self.transport
        task = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: transport, self.sock, ssl=context)
        )
        transport.connecting = task
        task.add_done_callback(self._connected)

    def give_up(self) -> None:
        """Ends the connection: it took too long, or others need its place."""
        self.settle()
        self.transport.abort()

    def settle(self) -> None:
        """It needs no place any more: it has become something, or nothing."""
        self._timer.cancel()
        self._place.gone(self)

    def _connected(self, task: asyncio.Task[object]) -> None:
        self.transport.connecting = None
        if task.cancelled():
            self.sock.close()
        elif (error := task.exception()) is not None:
            why = reason_of(error, server=True) if isinstance(error, OSError) else error
            log.info("%s: no connection: %s", self.transport.peer, why)
            self.settle()


class Accepting:
    """The sockets that a server listens at.

    Each connection becomes what ``arrive`` makes of it. ByteStream.half_open of them may be in
    their handshake. When all places are taken, silent peers lose theirs to new ones.
    """

    def __init__(
        self,
        bound: Bound,
        config: Config,
        tls: ServerTls | None,
        arrive: Callable[[socket.socket], Arriving],
        *protocols: str,
        patience: float,
        silence: float,
    ) -> None:
        """``protocols`` are spoken within TLS. ``patience``: seconds for a handshake.

        ``silence``: see ``prepare``.
        """
        self.config = config
        self.patience = patience
        self.address = bound.address
        """What clients connect to, with the real port."""
        self._shown: Renewed[ssl.SSLContext] | None = None
        if tls is not None:
            self._shown = Renewed(tls, lambda tls: server_context(tls, *protocols))
            self._shown.watch(config.timing.certificate_check)
            if tls.development:
                options = {**bound.address.options, "fingerprint": tls.fingerprint}
                found = bound.address
                self.address = Address(found.scheme, found.host, found.port, options, found.path)
        self._bound = bound
        self._arrive = arrive
        self._silence = silence
        self._places: Places[Arriving] = Places(
            config.byte_stream.half_open, config.timing.handshake_silence
        )
        self._arrivals: set[Arriving] = set()
        self._loop = asyncio.get_running_loop()
        self._accepting = [self._loop.create_task(self._accept(sock)) for sock in bound.sockets]

    @property
    def handshakes(self) -> int:
        """Connections whose handshake is not complete: ByteStream.half_open at most."""
        return len(self._places)

    def gone(self, arrival: Arriving) -> None:
        """It needs no place any more."""
        self._places.discard(arrival)
        self._arrivals.discard(arrival)

    async def close(self) -> None:
        """Accepts no more, also if this is cancelled. Connections in their handshake end."""
        if self._shown is not None:
            self._shown.close()
        for accepting in self._accepting:
            accepting.cancel()
        try:
            await asyncio.gather(*self._accepting, return_exceptions=True)
        finally:
            for arrival in tuple(self._arrivals):
                arrival.give_up()
            self._bound.close()

    def left_behind(self) -> None:
        """In a forked child: the parent listens."""
        sever([sock.fileno() for sock in self._bound.sockets])

    # Within

    async def _accept(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        listens(sock)
        while True:
            await self._make_room()
            await self._readable(sock)
            try:
                peer, _ = sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue  # another process took it, or its client gave it up
            except OSError as error:
                log.warning("%s: a connection cannot be accepted: %s", self.address, error.strerror)
                await asyncio.sleep(_NO_DESCRIPTOR_PAUSE)
                continue
            own_socket(peer)
            peer.setblocking(False)
            try:
                prepare(peer, self.config, self._silence)
                arrival = self._arrive(peer)
            except OSError:
                peer.close()  # it is dead already
                continue
            self._arrivals.add(arrival)
            self._places.add(arrival, arrival.origin, self._loop.time())
            arrival.begin(None if self._shown is None else self._shown.current)

    async def _readable(self, sock: socket.socket) -> None:
        """Waits for a connection. Accepted within a wait, its socket could be lost by a close."""
        ready = asyncio.Event()
        self._loop.add_reader(sock, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(sock)

    async def _make_room(self) -> None:
        """Waits until one more handshake may begin. Silent peers lose their places for it."""
        while self._places.full:
            silent = self._places.candidate(self._loop.time())
            if silent is None:
                await asyncio.sleep(self._places.pause(self._loop.time()))
            else:
                silent.give_up()


def name_of_socket(sock: socket.socket) -> str:
    """The peer of a socket that was accepted, as people write it. Raises OSError."""
    if sock.family == socket.AF_UNIX:
        return "a process of this machine"
    return host_port(sock.getpeername())
