"""``connect``: the side that makes the connections of a link, the first one and all later ones."""

from __future__ import annotations

import asyncio
import random
import socket
from dataclasses import replace
from typing import Final

from aqueduct.address import UNIX, Address
from aqueduct.arguments import checked
from aqueduct.carriers.certificates import ClientTls
from aqueduct.carriers.stream.sockets import check_path
from aqueduct.carriers.transports.dialing import Dialing
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import (
    AqueductError,
    ConfigError,
    ConnectFailed,
    LinkUnknown,
    RemoteProtocolError,
)
from aqueduct.escaping import logger_of
from aqueduct.forks import own_loop
from aqueduct.protocol.relink.handshake import ConnectorHandshake, LinkAgreement, Opening
from aqueduct.relink.connection import RelinkConnection
from aqueduct.relink.transport import LinkTransport

__all__ = ["ALPN", "TLS", "connect", "parse"]

log = logger_of(__name__)

TLS: Final = "aqueduct+tls"
ALPN: Final = "aqueduct-relink"
SCHEMES: Final = (TLS, "aqueduct+tcp", UNIX)


@checked()
async def connect(
    address: Address | str,
    *,
    endpoint: str = "",
    transactions: str = "none",
    id_size: int = 4,
    tls: ClientTls | None = None,
    config: Config = DEFAULT,
) -> RelinkConnection:
    """Opens a link with a program that serves Relink, within Timing.connect_timeout.

    ``address`` is ``aqueduct+tcp://``, ``aqueduct+tls://`` or ``aqueduct+unix://``. ``endpoint``:
    the name of what is served there. ``transactions``: whose channels use them, "none",
    "connector" (this side), "listener" or "both"; the listener must want the same. ``id_size``:
    bytes of the numbers of channels, 0 to 8.

    From then on cut connections are made again: at once, then with growing pauses
    (Relink.redial_first, Relink.redial_most), until none was there for Relink.keep. Raises
    ConfigError and ConnectFailed.
    """
    own_loop(asyncio.get_running_loop())
    opening = Opening(
        endpoint,
        id_size,
        id_size,
        connector_transactions=transactions in ("connector", "both"),
        listener_transactions=transactions in ("listener", "both"),
    )
    return await _Dialer(parse(address), opening, config, tls).first()


def parse(address: Address | str) -> Address:
    """An address that links can be had at. Raises ConfigError."""
    found = Address.parse(address) if isinstance(address, str) else address
    if found.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"{found}: links of Relink run over {known} alone")
    if found.unix:
        check_path(found)
    return found


class _Dialer:
    """The owner of a connector's link."""

    def __init__(
        self, address: Address, opening: Opening, config: Config, tls: ClientTls | None
    ) -> None:
        self._address = address
        self._opening = opening
        self._config = config
        silence = config.relink.silence
        self._dialing = Dialing(address, config, tls, ALPN, encrypted=TLS, silence=silence)
        self._connection: RelinkConnection | None = None
        self._redialling: asyncio.Task[None] | None = None
        self._failures = 0
        """Attempts since messages have flowed last."""
        self._tried_at = 0.0
        """When the last attempt began, by the loop's clock."""
        self._loop = asyncio.get_running_loop()

    async def first(self) -> RelinkConnection:
        """The link with its first connection."""
        seconds = self._config.timing.connect_timeout
        limit = f"{seconds:g} s (Timing.connect_timeout)"
        try:
            await self._attempt(self._loop.time() + seconds, limit)
        except RemoteProtocolError as error:
            raise ConnectFailed(f"{self._address}: {error}", reason=str(error)) from error
        except BaseException:
            if self._connection is not None:
                self._connection.abandon("the task that connected was cancelled")
            raise
        assert self._connection is not None
        return self._connection

    # RelinkOwner

    def up(self, connection: RelinkConnection) -> None:
        """Messages may flow."""
        self._failures = 0

    def down(self, connection: RelinkConnection) -> None:
        """The connection was cut."""
        if self._redialling is None or self._redialling.done():
            self._redialling = self._loop.create_task(self._redial(connection))

    def grown(self, connection: RelinkConnection, size: int) -> None:
        """Another amount is kept. What this side sends has the window for a limit."""

    def over(self, connection: RelinkConnection) -> None:
        """The link needs no connection any more."""
        task = self._redialling
        if task is not None and task is not asyncio.current_task(self._loop):
            task.cancel()

    # Shaker

    def made(self, transport: LinkTransport) -> bytes:
        """A connection is there: it is looked at, and greeted."""
        self._dialing.check(transport)
        return self._handshake.first_flight

    def agreed(self, transport: LinkTransport, agreement: LinkAgreement) -> None:
        """The listener has answered."""
        if self._done.done():  # the attempt was given up
            transport.abort()
            return
        if self._connection is None:
            self._connection = RelinkConnection(agreement, self._config, self, connector=True)
            self._opening = replace(
                self._opening,
                require_old_link=True,
                old_epoch=agreement.epoch,
                old_link=agreement.link,
            )
        self._done.set_result(None)
        self._connection.attach(transport, agreement)

    def failed(self, transport: LinkTransport, error: Exception | None) -> None:
        """The connection has ended before."""
        if not self._done.done():
            self._done.set_exception(
                error or ConnectFailed(f"{self._address}: it was closed before its handshake")
            )

    # Within

    async def _redial(self, connection: RelinkConnection) -> None:
        try:
            await self._until_up(connection)
        except Exception:
            log.exception("link %s cannot be resumed", connection.name)
            connection.lose("expired", "this side failed to redial")

    async def _until_up(self, connection: RelinkConnection) -> None:
        """Makes connections until the link is resumed, or is over."""
        settings, loop = self._config.relink, self._loop
        last = connection.cut_by
        while connection.error is None and (since := connection.down_since) is not None:
            deadline = since + settings.keep
            await asyncio.sleep(min(self._pause(), max(0.0, deadline - loop.time())))
            now = loop.time()
            if now >= deadline:
                why = f"there was no connection for {settings.keep:g} s (Relink.keep): {last}"
                connection.lose("expired", why)
                return
            self._failures += 1
            most = min(settings.handshake_deadline, deadline - now)
            try:
                await self._attempt(now + most, f"{most:g} s")
            except LinkUnknown as error:
                connection.unknown(error)
                return
            except (AqueductError, OSError) as error:
                last = str(error)
                log.info("link %s is not resumed yet: %s", connection.name, last)
                continue
            await connection.settled()
            last = connection.cut_by

    def _pause(self) -> float:
        """Seconds before the next attempt: none before the first, unless cuts come by the dozen."""
        settings = self._config.relink
        if not self._failures:
            return max(0.0, self._tried_at + 1 / settings.resumes - self._loop.time())
        doubled = settings.redial_first * 2.0 ** min(self._failures - 1, 32)
        return min(doubled, settings.redial_most) * random.uniform(0.5, 1.5)

    async def _attempt(self, deadline: float, how_long: str) -> None:
        """One connection, until its handshake is over and it has the link.

        Raises ConnectFailed, RemoteProtocolError.
        """
        loop, address, config = self._loop, self._address, self._config
        handshake_deadline = config.relink.handshake_deadline
        self._tried_at = loop.time()
        self._handshake = ConnectorHandshake(self._opening)
        self._done: asyncio.Future[None] = loop.create_future()
        self._done.add_done_callback(lambda done: done.cancelled() or done.exception())
        transport = LinkTransport(config, self, self._handshake, str(address))
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout_at(deadline):
                sock = await self._dialing.reach(deadline)
                if loop.time() + handshake_deadline < deadline:
                    deadline = loop.time() + handshake_deadline
                    how_long = f"{handshake_deadline:g} s (Relink.handshake_deadline)"
                async with asyncio.timeout_at(deadline):
                    await self._dialing.begin(transport, sock)
                    await self._done
        except BaseException as error:
            if self._done.done() and not self._done.cancelled() and not self._done.exception():
                if isinstance(error, TimeoutError):
                    return  # the deadline came with the answer: the connection has the link
                raise  # this task was cancelled then
            self._done.cancel()
            transport.abort()
            if sock is not None and transport.extra("socket") is None:
                sock.close()
            failure = self._dialing.failure(error, how_long)
            if failure is error:
                raise
            raise failure from (None if isinstance(error, TimeoutError) else error)
