"""``serve``: the side that links come to, and come back to."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import TypeAlias

from aqueduct.address import Address
from aqueduct.arguments import checked
from aqueduct.carriers.certificates import ServerTls
from aqueduct.carriers.contract import Bound
from aqueduct.carriers.stream.binding import bind
from aqueduct.carriers.stream.sockets import credentials_of
from aqueduct.carriers.transports.accepting import Accepting, Arriving, name_of_socket
from aqueduct.closing import AsyncClosing
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConfigError, ConnectionLost
from aqueduct.escaping import logger_of
from aqueduct.forks import own, own_loop
from aqueduct.protocol.relink.handshake import (
    ChosenLink,
    DistantLink,
    LinkAgreement,
    ListenerHandshake,
    Opening,
    RefusedLink,
)
from aqueduct.protocol.relink.link_table import KeptLinks, KnownLink, LinkTable
from aqueduct.relink.connection import RelinkConnection
from aqueduct.relink.dialing import ALPN, TLS, parse
from aqueduct.relink.transport import LinkTransport

__all__ = ["LinkHandler", "RelinkServer", "serve"]

log = logger_of(__name__)

LinkHandler: TypeAlias = Callable[[RelinkConnection], Awaitable[None]]


class RelinkServer(AsyncClosing):
    """What ``serve`` returns."""

    def __init__(
        self,
        handler: LinkHandler,
        bound: Bound,
        opening: Opening,
        id_size: int | None,
        config: Config,
        tls: ServerTls | None,
    ) -> None:
        """``opening`` has what connectors must want; ``id_size`` of ids in it, None: any."""
        self.config = config
        self.links: set[RelinkConnection] = set()
        """Those that live, with a connection or without one."""
        self._handler = handler
        self._opening = opening
        self._id_size = id_size
        loop = asyncio.get_running_loop()
        self._table: LinkTable[RelinkConnection] = LinkTable(
            time.time_ns() // 1000, config.relink, self._dropped, together=KeptLinks.of(loop)
        )
        self._known: dict[RelinkConnection, KnownLink[RelinkConnection]] = {}
        self._held_bytes = 0
        """What all links hold."""
        self._most_bytes = config.relink.all_links_bytes
        self._origins: dict[RelinkConnection, Hashable] = {}
        self._by_origin: Counter[Hashable] = Counter()
        """Where links began, and how many from there live."""
        self._resuming: dict[KnownLink[RelinkConnection], _Arrival] = {}
        """Connections whose link is resumed a little later."""
        self._watch: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = loop
        self.accepting = Accepting(
            bound,
            config,
            tls,
            lambda sock: _Arrival(self, sock),
            ALPN,
            patience=config.relink.handshake_deadline,
            silence=config.relink.silence,
        )
        self.address = self.accepting.address
        """What clients connect to, with the real port."""
        own(self)

    def __str__(self) -> str:
        return str(self.address)

    @property
    def handshakes(self) -> int:
        """Connections whose handshake is not complete: ByteStream.half_open at most."""
        return self.accepting.handshakes

    async def close(self) -> None:
        """Accepts no more, closes every link, and waits for the handlers' end.

        A link whose peer has not done with everything within Timing.close_linger is lost. A handler
        that does not end within that time after it was cancelled is named in the log.
        """
        self._closed = True
        await self.accepting.close()
        closing = [link.close() for link in tuple(self.links)]
        try:
            for found in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(found, ConnectionLost):
                    log.warning("%s", found)
                elif isinstance(found, Exception):
                    log.error("closing a link failed", exc_info=found)
        finally:
            if self._watch is not None:
                self._watch.cancel()
            tasks = self._tasks - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=self.config.timing.close_linger)
            for task in left:
                log.warning("a handler goes on after its server was closed: %r", task)

    def left_behind(self) -> None:
        """In a forked child: the parent listens."""
        self.accepting.left_behind()

    # RelinkOwner

    def up(self, connection: RelinkConnection) -> None:
        """Messages may flow."""

    def down(self, connection: RelinkConnection) -> None:
        """The link waits for its connector, as long as there is room for it."""
        known = self._known.get(connection)
        if known is not None:
            self._table.disconnected(known, connection.counted_bytes, self._loop.time())
            self._look()

    def grown(self, connection: RelinkConnection, size: int) -> None:
        """The link keeps more, or less."""
        known = self._known.get(connection)
        if known is None:
            return
        self._held_bytes += size
        self._table.grown(known, size)
        while size > 0 and self._held_bytes > self._most_bytes:
            largest = max(self._known, key=lambda link: link.counted_bytes)
            why = (
                f"it held {largest.counted_bytes} bytes of the {self._held_bytes} that all links "
                "hold; Relink.links_bytes is the limit"
            )
            self._dropped(self._known[largest], why)

    def over(self, connection: RelinkConnection) -> None:
        """The link has ended."""
        known = self._known.pop(connection, None)
        if known is not None:
            self._held_bytes -= connection.counted_bytes
            self._table.remove(known)
            arrival = self._resuming.get(known)
            if arrival is not None:
                arrival.give_up()
        self.links.discard(connection)
        origin = self._origins.pop(connection, None)
        if origin is not None:
            self._by_origin[origin] -= 1
            if not self._by_origin[origin]:
                del self._by_origin[origin]

    # What arrivals ask

    def choose(
        self, opening: Opening, proof: Hashable, origin: Hashable
    ) -> tuple[ChosenLink | RefusedLink | DistantLink, KnownLink[RelinkConnection] | None]:
        """Which link answers an opening."""
        wrong = self._disagreement(opening)
        if wrong or self._closed:
            return RefusedLink(self._table.epoch, False, wrong or "the server closes"), None
        chosen, known = self._table.choose(opening, proof, self._loop.time())
        if isinstance(chosen, ChosenLink) and known is None:
            crowded = self._crowded(origin)
            if crowded:
                return RefusedLink(self._table.epoch, True, crowded), None
        return chosen, known

    def begin(
        self, transport: LinkTransport, agreement: LinkAgreement, proof: Hashable, origin: Hashable
    ) -> None:
        """A new link."""
        connection = RelinkConnection(agreement, self.config, self, connector=False)
        known = self._table.add(agreement.link, agreement.opening, proof, connection)
        self._known[connection] = known
        self.links.add(connection)
        self._origins[connection] = origin
        self._by_origin[origin] += 1
        connection.attach(transport, agreement)
        task = self._loop.create_task(self._run(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def resume(self, arrival: _Arrival, known: KnownLink[RelinkConnection]) -> None:
        """An old link comes back; at once, unless it did so too often of late."""
        older = self._resuming.pop(known, None)
        if older is not None:
            older.give_up()  # the newest wins (RL-R18)
        channels = known.owner.open_channels
        delay = self._table.resume_delay(known, channels, self._loop.time())
        if delay:
            self._resuming[known] = arrival
            arrival.wait(delay)
        else:
            self.resumed(arrival, known)

    def resumed(self, arrival: _Arrival, known: KnownLink[RelinkConnection]) -> None:
        """The link has a connection again."""
        self._resuming.pop(known, None)
        self._table.connected(known)
        arrival.attach(known.owner)

    def gone(self, arrival: _Arrival) -> None:
        """An arrival has become the connection of a link, or nothing."""
        if arrival.known is not None and self._resuming.get(arrival.known) is arrival:
            del self._resuming[arrival.known]

    # Within

    def _disagreement(self, opening: Opening) -> str:
        """What a connector wants and cannot have (RL-5); empty: nothing."""
        wanted = self._opening
        if opening.endpoint != wanted.endpoint:
            return f"there is no endpoint {opening.endpoint!r} here"
        theirs = opening.connector_transactions, opening.listener_transactions
        if theirs != (wanted.connector_transactions, wanted.listener_transactions):
            return "it wants transactions for other channels than the listener"
        sizes = opening.connector_id_size, opening.listener_id_size
        if self._id_size is not None and sizes != (self._id_size, self._id_size):
            return f"it wants ids of {sizes[0]} and {sizes[1]} bytes, not of {self._id_size}"
        return ""

    def _crowded(self, origin: Hashable) -> str:
        """Why there can be no further link from there; empty: there can."""
        limits = self.config.limits
        if len(self.links) >= limits.connections:
            return f"there are {limits.connections} links, the limit (Limits.connections)"
        most = limits.connections_address
        if most is not None and self._by_origin[origin] >= most:
            return f"{most} links from this address are the limit (Limits.connections_address)"
        return ""

    def _dropped(self, known: KnownLink[RelinkConnection], why: str) -> None:
        log.warning("link %s with %s is dropped: %s", known.name, known.owner.peer, why)
        known.owner.lose("expired", why)

    def _look(self) -> None:
        """Drops links that waited for too long, and looks again when the next one has."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        now = self._loop.time()
        self._table.handle_deadline(now)
        due = self._table.next_deadline()
        if due is not None:
            self._watch = self._loop.call_at(due, self._look)

    async def _run(self, connection: RelinkConnection) -> None:
        try:
            await self._handler(connection)
        except ConnectionLost as error:
            if connection.error is None and not connection.closing:
                log.warning("the handler of %r ended by %s", connection, error)
                self._give_up(connection)
        except Exception:
            log.exception("the handler of %r failed", connection)
            self._give_up(connection)
        except asyncio.CancelledError:
            connection.give_up_batches()
            raise
        finally:
            with suppress(asyncio.CancelledError, ConnectionLost):
                await connection.close()

    def _give_up(self, connection: RelinkConnection) -> None:
        connection.give_up_batches()
        connection.abandon("the handler failed")


class _Arrival(Arriving):
    """A connection that came, until it has a link. The Shaker of its transport."""

    def __init__(self, server: RelinkServer, sock: socket.socket) -> None:
        self.known: KnownLink[RelinkConnection] | None = None
        """The link that it resumes; None: a new one, or not known yet."""
        self._server = server
        self._proof: Hashable = None
        self._agreement: LinkAgreement | None = None
        self._ended = False
        handshake, name = ListenerHandshake(self._choose), name_of_socket(sock)
        transport = LinkTransport(server.config, self, handshake, name)
        super().__init__(server.accepting, sock, transport)
        self.link_transport = transport

    def wait(self, seconds: float) -> None:
        """Resumes the link after a time."""
        self._loop.call_later(seconds, self._resume_late)

    def attach(self, connection: RelinkConnection) -> None:
        """Has the connection carry a link."""
        assert self._agreement is not None
        self.settle()
        connection.attach(self.link_transport, self._agreement)

    # Shaker

    def made(self, transport: LinkTransport) -> bytes:
        """It is there."""
        scheme = self._server.address.scheme
        shown: Hashable = None
        if scheme == TLS:
            found = transport.extra("ssl_object").getpeercert(binary_form=True)
            shown = hashlib.sha256(found).digest() if found else None
        else:
            credentials = credentials_of(self.sock)
            shown = None if credentials is None else credentials.uid
        self._proof = scheme, shown
        return b""

    def agreed(self, transport: LinkTransport, agreement: LinkAgreement) -> None:
        """The connector has said what it wants, and there is a link for it."""
        self._agreement = agreement
        if self.known is not None:
            self._server.resume(self, self.known)
        else:
            self.settle()
            self._server.begin(transport, agreement, self._proof, self.origin)

    def failed(self, transport: LinkTransport, error: Exception | None) -> None:
        """It was refused, or has ended."""
        if error is not None:
            log.info("%s gets no link: %s", transport.peer, error)
        self.settle()

    def settle(self) -> None:
        """It needs no place any more."""
        self._ended = True
        super().settle()
        self._server.gone(self)

    # Within

    def _choose(self, opening: Opening) -> ChosenLink | RefusedLink | DistantLink:
        chosen, self.known = self._server.choose(opening, self._proof, self.origin)
        return chosen

    def _resume_late(self) -> None:
        if self.known is not None and not self._ended:
            self._server.resumed(self, self.known)


@checked(handler="on_connection", tls="server_tls")
async def serve(
    handler: LinkHandler,
    address: Address | str,
    *,
    endpoint: str = "",
    transactions: str = "none",
    id_size: int | None = None,
    tls: ServerTls | None = None,
    config: Config = DEFAULT,
) -> RelinkServer:
    """Listens; each link is given to ``handler`` once, and closed when that returns.

    ``address``, ``endpoint`` and ``transactions`` as for ``connect``; connectors that want another
    endpoint or other transactions are refused. ``id_size``: bytes of the numbers of channels, None:
    what the connector wants. ``tls`` is for ``aqueduct+tls://`` alone, and needed there.

    Port 0: one that is free; see ``RelinkServer.address``. The file of a Unix socket is for its
    owner alone. Over plain TCP whoever reads the wire can take a link. Raises ConfigError.
    """
    found = parse(address)
    if (found.scheme == TLS) != (tls is not None):
        raise ConfigError(
            f"{found}: tls, with the certificate to show, is for {TLS}:// alone and needed there; "
            "dev_certificate() makes one"
        )
    own_loop(asyncio.get_running_loop())
    opening = Opening(
        endpoint,
        connector_transactions=transactions in ("connector", "both"),
        listener_transactions=transactions in ("listener", "both"),
    )
    (bound,) = await bind(found, backlog=config.byte_stream.backlog)
    return RelinkServer(handler, bound, opening, id_size, config, tls)
