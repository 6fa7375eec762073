"""Accepting connections over byte streams, and what is refused at the door."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from aqueduct.address import UNIX, Address
from aqueduct.carriers.binding import listens
from aqueduct.carriers.certificates import ServerTls
from aqueduct.carriers.clock import clock_of
from aqueduct.carriers.contract import Carrier, Siblings
from aqueduct.carriers.places import Places, origin_of
from aqueduct.carriers.renewal import Renewed
from aqueduct.carriers.stream.binding import SocketFile, bind
from aqueduct.carriers.stream.connection import StreamCarrier
from aqueduct.carriers.stream.link import CarrierLink, LinkConnection, RelayedBy
from aqueduct.carriers.stream.link import opening as wanted_opening
from aqueduct.carriers.stream.siblings import Handed, SiblingDoor
from aqueduct.carriers.stream.sockets import gone, tune, why
from aqueduct.carriers.stream.tls import ALPN, LINK_ALPN
from aqueduct.carriers.tls_library import Context, Tls, server_context
from aqueduct.config import Config
from aqueduct.errors import ConfigError, ConnectionLost, RemoteProtocolError, SequenceError
from aqueduct.escaping import logger_of
from aqueduct.forks import own_socket
from aqueduct.protocol.relink.handshake import (
    ChosenLink,
    DistantLink,
    ListenerHandshake,
    Opening,
    RefusedLink,
    encode_hello,
)
from aqueduct.protocol.relink.link_table import KeptLinks, KnownLink, LinkPlace, LinkTable

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
    siblings: Siblings | None = None,
    bidi: bool = False,
) -> StreamListener:
    """Listens at every address of ``address.host``, or at its path.

    ``on_carrier`` gets each new connection. ``tls`` is for ``aqueduct+tls://`` alone. ``sockets``
    listen already, perhaps for other processes too, and are taken over. With ``siblings`` these
    are asked for links that are theirs. Raises ConfigError: the name does not resolve, the port or
    the path is taken, the certificate is missing or of no use. ``bidi``: clients that ask for
    bidirectional streams have them.
    """
    shown: Renewed[Context] | None = None
    if address.scheme == "aqueduct+tls":
        if tls is None:
            raise ConfigError(
                f"{address}: TLS needs a certificate: pass tls=ServerTls(certificate, key), or "
                "dev_certificate() for development"
            )
        protocols = *((LINK_ALPN,) if address.resume else ()), ALPN
        shown = Renewed(tls, lambda tls: server_context(tls, *protocols))
    file: SocketFile | None = None
    shared = sockets is not None
    if sockets is None:
        (bound,) = await bind(address, backlog=config.byte_stream.backlog)
        sockets = bound.sockets
        if address.scheme == UNIX:
            file = SocketFile(address.path)
    return StreamListener(address, config, shown, on_carrier, sockets, file, shared, siblings, bidi)


class StreamListener:
    """The sockets of one address and the connections that came through them."""

    def __init__(
        self,
        address: Address,
        config: Config,
        shown: Renewed[Context] | None,
        on_carrier: Callable[[Carrier], None],
        sockets: Sequence[socket.socket],
        file: SocketFile | None,
        shared: bool,
        siblings: Siblings | None = None,
        bidi: bool = False,
    ) -> None:
        if address.scheme != UNIX:
            address = address.with_port(sockets[0].getsockname()[1])
        self._address = address
        self._config = config
        self._shown = shown
        self._on_carrier = on_carrier
        self._sockets = list(sockets)
        self._file = file
        self._shared = shared
        self._bidi = bidi
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
        self._links: LinkTable[StreamCarrier] | None = None
        self._known: dict[StreamCarrier, KnownLink[StreamCarrier]] = {}
        self._links_timer: asyncio.TimerHandle | None = None
        self._door: SiblingDoor | None = None
        self._hurried: dict[
            KnownLink[StreamCarrier], tuple[asyncio.TimerHandle, socket.socket]
        ] = {}
        """Connections that resume a link too soon after another, and wait for a moment."""
        if address.resume is not None:
            settings = replace(config.relink, keep=address.resume.seconds)
            epoch, place = time.time_ns() // 1000, LinkPlace()
            if siblings is not None:
                self._door = SiblingDoor(siblings, config, self._taken, self._finish_if_idle)
                epoch = siblings.epoch
                place = LinkPlace(siblings.number, len(siblings.paths))
            together = KeptLinks.of(self._loop)
            self._links = LinkTable(
                epoch, settings, self._link_dropped, place=place, together=together
            )
        for sock in self._sockets:
            own_socket(sock)
            listens(sock)
            sock.setblocking(False)
        if shown is not None:
            shown.watch(config.timing.certificate_check)
        self._listen()

    @property
    def addresses(self) -> Sequence[str]:
        """What clients can connect to; with the fingerprint of a development certificate."""
        address = self._address
        options = {name: text for name, text in address.options.items() if name != "mode"}
        if self._shown is not None and self._shown.tls.development:
            options["fingerprint"] = self._shown.tls.fingerprint
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
            if self._shown is not None:
                self._shown.close()
            self._rest()
            if self._again is not None:
                self._again.cancel()
            for sock in self._sockets:
                sock.close()
            if self._file is not None:
                self._file.remove()
        suspended = [carrier for carrier in self._known if carrier.suspended]
        for carrier in (*self._half_open, *suspended):
            carrier.abandon(ConnectionLost(f"{carrier.peer}: the listener was closed"))
        if self._links_timer is not None:
            self._links_timer.cancel()
        if self._door is not None:
            self._door.close()
        self._finish_if_idle()

    async def wait_relays(self) -> None:
        """Returns when no connection passes through here to another process."""
        if self._door is not None:
            await self._door.wait_relays()

    def end_relays(self) -> None:
        """Cuts the connections that pass through here: their clients make others."""
        if self._door is not None:
            self._door.end_relays()

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
        known = self._known.pop(carrier, None)
        if known is not None and self._links is not None:
            self._forget_hurried(known)
            self._links.remove(known)
        if self._leave(carrier):
            if carrier.heard_at is not None:
                self._refused += 1
                self._warn("refused", "%s: %s (%d such since the start)", error, self._refused)
            else:  # a scanner looks whether the port is open
                logger.debug("%s: %s", self._address, error)

    @property
    def resumes(self) -> bool:
        """Whether links are offered."""
        return self._links is not None

    def choose(
        self, carrier: StreamCarrier, opening: Opening
    ) -> ChosenLink | RefusedLink | DistantLink:
        """Which link a client is given: its own, or a new one."""
        return self._choose(opening, self._proof_of(carrier))

    def _proof_of(self, carrier: StreamCarrier) -> Hashable:
        return self._address.scheme, carrier.peer_certificate_fingerprint

    def _choose(self, opening: Opening, proof: Hashable) -> ChosenLink | RefusedLink | DistantLink:
        assert self._links is not None
        if _without_link(opening) != wanted_opening():
            return RefusedLink(self._links.epoch, False, "it opens a link of another kind (RL-5)")
        chosen, _ = self._links.choose(opening, proof, self._loop.time())
        return chosen

    def agreed(self, carrier: StreamCarrier, connection: LinkConnection) -> None:
        """A client has its link: a new one, or one that goes on here."""
        links, agreement = self._links, connection.agreement
        assert links is not None
        if agreement.resumed:
            self._leave(carrier)
            carrier.vanish()
            self._go_on(connection)
            return
        opening, proof = _without_link(agreement.opening), self._proof_of(carrier)
        self._known[carrier] = links.add(agreement.link, opening, proof, carrier)
        link = CarrierLink(carrier, agreement, self._config, clock_of(self._loop), is_client=False)
        carrier.use_link(link, connection)

    def _go_on(self, connection: LinkConnection) -> None:
        """A link has another connection. If it has too many, it has to wait for this one."""
        assert self._links is not None
        known = self._links.find(connection.agreement.link)
        self._forget_hurried(known)
        delay = self._links.resume_delay(known, 1, self._loop.time())
        if delay:  # resuming costs work, and a peer may ask for it all the time
            handle = self._loop.call_later(delay, self._resume_link, known, connection)
            self._hurried[known] = handle, connection.sock
        else:
            self._resume_link(known, connection)

    def _resume_link(self, known: KnownLink[StreamCarrier], connection: LinkConnection) -> None:
        self._hurried.pop(known, None)
        link = known.owner.link
        assert link is not None
        assert self._links is not None
        self._links.connected(known)
        link.go_on(connection)

    def _forget_hurried(self, known: KnownLink[StreamCarrier]) -> None:
        """A connection that waits to resume this link is of no use any more."""
        found = self._hurried.pop(known, None)
        if found is not None:
            found[0].cancel()
            found[1].close()

    def distant(
        self,
        carrier: StreamCarrier,
        link: DistantLink,
        sock: socket.socket,
        tls: Tls | None,
        *,
        greeted: bool,
    ) -> RefusedLink | None:
        """A client asks for a link of another process: it is handed to that one."""
        door, links = self._door, self._links
        assert door is not None
        assert links is not None
        if tls is not None and door.full:
            return self._not_handed("Resume.relays is the limit")
        try:
            to = door.reach(link.number)
        except OSError as error:
            return self._not_handed(why(error))
        if to is None:  # with that process its links are gone
            return links.unknown(self._loop.time())
        fingerprint = carrier.peer_certificate_fingerprint
        handed = Handed(
            self._address.scheme, fingerprint, carrier.local, carrier.peer, greeted=greeted
        )
        self._leave(carrier)
        carrier.vanish()
        logger.debug("%s is handed to worker %d, which has its link", carrier.peer, link.number)
        if tls is not None:
            handed = replace(handed, cipher=tls.cipher, relayed=True)
            door.relay(to, handed, link.data, sock, tls)
            return None
        try:
            door.hand(to, handed, link.data, sock)
        except OSError as error:
            self._warn("handing", "%s: %s: %s", carrier.peer, self._not_handed(why(error)).why)
        return None

    def _not_handed(self, why: str) -> RefusedLink:
        """The client tries again: nobody says that its link is gone."""
        assert self._links is not None
        text = f"it cannot be handed to the worker that has its link: {why}"
        return RefusedLink(self._links.epoch, False, text)

    def _taken(self, handed: Handed, data: bytes, sock: socket.socket) -> None:
        """A sibling has handed over a connection whose link is here, or was."""
        if gone(sock):  # its client has dialled again meanwhile: the newer connection stays
            sock.close()
            return
        proof = handed.scheme, handed.fingerprint
        handshake = ListenerHandshake(partial(self._choose, proof=proof))
        skip = len(encode_hello()) if handed.greeted else 0
        try:
            agreement = handshake.receive_data(data)
            if agreement is None or not agreement.resumed:
                raise SequenceError("it was handed to the wrong worker")
        except RemoteProtocolError as error:
            self._refused += 1
            self._warn("refused", "%s: %s: %s", handed.peer, error)
            with sock, suppress(OSError):
                sock.send(handshake.output[skip:])
            return
        relayed = RelayedBy(handed.local, handed.peer, handed.cipher) if handed.relayed else None
        self._go_on(LinkConnection(sock, None, agreement, handshake.output[skip:], relayed))

    def cut(self, carrier: StreamCarrier) -> None:
        """The connection of a link is gone: its client has some time to come back."""
        assert self._links is not None
        if not self._accepting:  # nobody could come back
            reason = "the connection was cut, and the listener is closed"
            carrier.lose(ConnectionLost(f"{carrier.peer}: {reason}", reason=reason))
            return
        link = carrier.link
        assert link is not None
        held = link.core.held_bytes
        self._links.disconnected(self._known[carrier], held, self._loop.time())
        self._watch_links()

    def _watch_links(self) -> None:
        assert self._links is not None
        due = self._links.next_deadline()
        if due is not None and self._links_timer is None:
            self._links_timer = self._loop.call_at(due, self._look_at_links)

    def _look_at_links(self) -> None:
        assert self._links is not None
        self._links_timer = None
        self._links.handle_deadline(self._loop.time())
        self._watch_links()

    def _link_dropped(self, known: KnownLink[StreamCarrier], why: str) -> None:
        carrier = known.owner
        self._known.pop(carrier, None)
        self._forget_hurried(known)
        reason = f"its link was dropped: {why}"
        logger.info("%s: link %s was dropped: %s", carrier.peer, known.name, why)
        carrier.lose(ConnectionLost(f"{carrier.peer}: {reason}", reason=reason))

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
        """Leaves new connections in the kernel's backlog."""
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
                context=None if self._shown is None else self._shown.current,
                server_name=None,
                bidi=self._bidi,
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
        relays = 0 if self._door is None else self._door.relays
        if not self._accepting and not self._carriers and not relays:
            self._finished.set()

    def _warn(self, what: str, text: str, *arguments: object) -> None:
        now = self._loop.time()
        if now - self._warned.get(what, -_WARN_EVERY) >= _WARN_EVERY:
            self._warned[what] = now
            logger.warning(text, self._address, *arguments)


def _without_link(opening: Opening) -> Opening:
    return replace(opening, old_epoch=0, old_link=0, require_old_link=False)
