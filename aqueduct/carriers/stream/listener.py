"""Accepting connections over byte streams, and what is refused at the door."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Final

from aqueduct.address import UNIX, Address
from aqueduct.carriers.binding import listens
from aqueduct.carriers.certificates import ServerTls
from aqueduct.carriers.contract import Carrier
from aqueduct.carriers.places import Places, origin_of
from aqueduct.carriers.stream.binding import SocketFile, bind
from aqueduct.carriers.stream.connection import StreamCarrier
from aqueduct.carriers.stream.sockets import tune
from aqueduct.carriers.stream.tls import ALPN
from aqueduct.carriers.tls_library import Context, server_context
from aqueduct.config import Config
from aqueduct.errors import ConfigError, ConnectionLost
from aqueduct.escaping import logger_of
from aqueduct.forks import own_socket

__all__ = ["StreamListener", "listen"]

logger = logger_of("aqueduct.carriers.stream")

_WARN_EVERY: Final = 10.0  # seconds between two warnings about the same thing
_ACCEPTED: Final = 64  # connections taken in one wake-up
_PAUSE: Final = 1.0  # seconds without accepting, when the process has no file descriptors left
_TURN: Final = 0.001  # seconds that others have for the next connection, for each one here,
_TURNS: Final = 4  # up to so many
_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def listen(
    address: Address,
    config: Config,
    tls: ServerTls | None,
    on_carrier: Callable[[Carrier], None],
    *,
    sockets: Sequence[socket.socket] | None = None,
) -> StreamListener:
    """Listens at every address of ``address.host``, or at its path.

    ``on_carrier`` gets each new connection. ``tls`` is for ``aqueduct+tls://`` alone. ``sockets``
    listen already, perhaps for other processes too, and are taken over. Raises ConfigError: the
    name does not resolve, the port or the path is taken, the certificate is missing or of no use.
    """
    context: Context | None = None
    if address.scheme == "aqueduct+tls":
        if tls is None:
            raise ConfigError(
                f"{address}: TLS needs a certificate: pass tls=ServerTls(certificate, key), or "
                "dev_certificate() for development"
            )
        context = server_context(tls, ALPN)
    file: SocketFile | None = None
    shared = sockets is not None
    if sockets is None:
        (bound,) = await bind(address, backlog=config.byte_stream.backlog)
        sockets = bound.sockets
        if address.scheme == UNIX:
            file = SocketFile(address.path)
    return StreamListener(address, config, tls, context, on_carrier, sockets, file, shared)


class StreamListener:
    """The sockets of one address and the connections that came through them."""

    def __init__(
        self,
        address: Address,
        config: Config,
        tls: ServerTls | None,
        context: Context | None,
        on_carrier: Callable[[Carrier], None],
        sockets: Sequence[socket.socket],
        file: SocketFile | None,
        shared: bool,
    ) -> None:
        if address.scheme != UNIX:
            address = address.with_port(sockets[0].getsockname()[1])
        self._address = address
        self._config = config
        self._tls = tls
        self._context = context
        self._on_carrier = on_carrier
        self._sockets = list(sockets)
        self._file = file
        self._shared = shared
        self._waits = False
        self._loop = asyncio.get_running_loop()
        self._carriers: set[StreamCarrier] = set()
        self._half_open: dict[StreamCarrier, asyncio.TimerHandle] = {}
        self._places: Places[StreamCarrier] = Places(
            config.byte_stream.half_open, config.timing.handshake_silence
        )
        self._again: asyncio.TimerHandle | None = None
        self._accepting = True
        self._listening = False
        self._warned: dict[str, float] = {}
        self._refused = 0
        self._finished = asyncio.Event()
        for sock in self._sockets:
            own_socket(sock)
            listens(sock)
            sock.setblocking(False)
        self._listen()

    @property
    def addresses(self) -> Sequence[str]:
        """What clients can connect to; with the fingerprint of a development certificate."""
        address = self._address
        options = {name: text for name, text in address.options.items() if name != "mode"}
        if self._context is not None and self._tls is not None and self._tls.development:
            options["fingerprint"] = self._tls.fingerprint
        return (str(Address(address.scheme, address.host, address.port, options, address.path)),)

    @property
    def half_open(self) -> int:
        """Connections whose handshake is not complete."""
        return len(self._half_open)

    @property
    def connections(self) -> int:
        """All connections, half-open ones included."""
        return len(self._carriers)

    def close(self) -> None:
        """Accepts no more; live connections go on."""
        if self._accepting:
            self._accepting = False
            self._rest()
            if self._again is not None:
                self._again.cancel()
            for sock in self._sockets:
                sock.close()
            if self._file is not None:
                self._file.remove()
        for carrier in list(self._half_open):
            carrier.abandon(ConnectionLost(f"{carrier.peer}: the listener was closed"))
        self._finish_if_idle()

    async def wait_closed(self) -> None:
        """Returns when closed, and the last connection has ended."""
        await self._finished.wait()

    # Host

    def secured(self, carrier: StreamCarrier) -> str | None:
        """TLS is up; nothing more is asked than what the library has checked."""

    def established(self, carrier: StreamCarrier) -> None:
        """Both sides know that they speak the same protocol: the connection is handed on."""
        if self._leave(carrier):
            self._on_carrier(carrier)

    def ended(self, carrier: StreamCarrier, error: ConnectionLost) -> None:
        """A connection is over, or was never one."""
        if self._leave(carrier):
            if carrier.heard:
                self._refused += 1
                self._warn("refused", "%s: %s (%d such since the start)", error, self._refused)
            else:  # who looks whether the port is open
                logger.debug("%s: %s", self._address, error)

    def released(self, carrier: StreamCarrier) -> None:
        """Its socket is closed."""
        self._carriers.discard(carrier)
        self._finish_if_idle()

    # the door

    def _listen(self) -> None:
        if self._accepting and not self._listening and not self._waits:
            self._listening = True
            for sock in self._sockets:
                self._loop.add_reader(sock.fileno(), self._acceptable, sock)

    def _rest(self) -> None:
        """Leaves who comes in the kernel's backlog."""
        if self._listening:
            self._listening = False
            for sock in self._sockets:
                self._loop.remove_reader(sock.fileno())

    def _leave(self, carrier: StreamCarrier) -> bool:
        """Its handshake is over, well or not; False: it was before."""
        timer = self._half_open.pop(carrier, None)
        if timer is None:
            return False
        timer.cancel()
        self._places.discard(carrier)
        self._listen()
        return True

    def _acceptable(self, listening: socket.socket) -> None:
        for _ in range(1 if self._shared else _ACCEPTED):
            silent: StreamCarrier | None = None
            if self._places.full:
                self._warn(
                    "half open",
                    "%s: %d connections are in their handshake (ByteStream.half_open); others wait "
                    "until one of these ends, or is given up for its silence",
                    len(self._half_open),
                )
                now = self._loop.time()
                silent = self._places.candidate(now)
                if silent is None:
                    self._rest()
                    self._listen_after(self._places.pause(now))
                    return
            try:
                sock, _ = listening.accept()
                own_socket(sock)
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SCARCE:
                    return  # it is the connection that failed, not the listener
                self._warn("scarce", "%s: no connection can be accepted: %s", error.strerror)
                self._rest()
                self._listen_after(_PAUSE)
                return
            if silent is not None:
                self._give_up(silent)
            self._accept(sock)
        if self._shared and self._carriers:
            # The next ones of a burst are for other processes: the longer, the more it has here.
            self._rest()
            self._waits = True
            self._loop.call_later(_TURN * min(len(self._carriers), _TURNS), self._resume)

    def _listen_after(self, seconds: float) -> None:
        if self._again is not None:
            self._again.cancel()
        self._again = self._loop.call_later(seconds, self._listen)

    def _give_up(self, carrier: StreamCarrier) -> None:
        """Another one needs its place."""
        reason = (
            f"{carrier.missing} did not come, and all places of handshakes are taken "
            "(ByteStream.half_open, Timing.handshake_silence)"
        )
        carrier.abandon(ConnectionLost(f"{carrier.peer}: {reason}", reason=reason))

    def _resume(self) -> None:
        self._waits = False
        self._listen()

    def _accept(self, sock: socket.socket) -> None:
        try:
            tune(sock, self._config)
            carrier = StreamCarrier(
                sock,
                self,
                self._config,
                scheme=self._address.scheme,
                is_client=False,
                context=self._context,
                server_name=None,
            )
        except OSError:
            sock.close()  # it has gone before it was looked at
            return
        timeout = self._config.timing.connect_timeout
        self._carriers.add(carrier)
        self._half_open[carrier] = self._loop.call_later(timeout, self._late, carrier)
        origin = origin_of(carrier.peer, carrier.peer_credentials)
        self._places.add(carrier, origin, self._loop.time())
        carrier.begin()

    def _late(self, carrier: StreamCarrier) -> None:
        timeout = self._config.timing.connect_timeout
        reason = f"{carrier.missing} did not come within {timeout:g} s"
        carrier.abandon(ConnectionLost(f"{carrier.peer}: {reason}", reason=reason))

    def _finish_if_idle(self) -> None:
        if not self._accepting and not self._carriers:
            self._finished.set()

    def _warn(self, what: str, text: str, *arguments: object) -> None:
        now = self._loop.time()
        if now - self._warned.get(what, -_WARN_EVERY) >= _WARN_EVERY:
            self._warned[what] = now
            logger.warning(text, self._address, *arguments)
