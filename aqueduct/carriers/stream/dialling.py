"""How a client gets a link, and a connection for it again and again."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from aqueduct.address import Address, Resumption
from aqueduct.carriers.certificates import ClientTls
from aqueduct.carriers.contract import Buffer
from aqueduct.carriers.stream.connection import StreamCarrier
from aqueduct.carriers.stream.link import LinkConnection, opening
from aqueduct.carriers.stream.sockets import readable, scratch, why
from aqueduct.carriers.stream.tls import ALPN, LINK_ALPN, explain
from aqueduct.carriers.tls_library import Context, Tls
from aqueduct.carriers.verify import TlsError
from aqueduct.config import Config
from aqueduct.errors import (
    ConnectFailed,
    ConnectionLost,
    LinkUnknown,
    RemoteProtocolError,
)
from aqueduct.escaping import logger_of
from aqueduct.protocol.relink.handshake import ConnectorHandshake, LinkAgreement

__all__ = ["LinkDialler", "NoLinks"]

logger = logger_of("aqueduct.carriers.stream")

_READ: Final = 64 << 10

_plain_until: dict[str, float] = {}
"""Servers that know no links, and until when they are not asked again (Resume.plain_for)."""

Dial = Callable[[Address, Config, float], Awaitable[socket.socket]]


class NoLinks(Exception):
    """The server was reached, and does not speak Relink.

    ``silent``: it has ended the connection without a word, which may have other reasons.
    """

    def __init__(self, reason: str, *, silent: bool) -> None:
        super().__init__(reason)
        self.silent = silent


class LinkDialler:
    """Dials one address: for a new link, and then for the one that it has."""

    def __init__(
        self,
        address: Address,
        config: Config,
        dial: Dial,
        *,
        tls: ClientTls | None,
        context: Context | None,
        secured: Callable[[str | None], str | None],
    ) -> None:
        """``dial`` connects a socket; ``secured`` says what is wrong with a certificate."""
        resume = address.resume
        assert resume is not None
        self.resume: Resumption = resume
        self._address = address
        self._config = config
        self._dial = dial
        self._tls = tls
        self._context = context
        self._secured = secured
        self._task: asyncio.Task[None] | None = None
        self._plain = ""
        """Why the server has no links, of a connection that is being made."""
        # Of attempts in a row: a connection that ends soon and brings no message is no success.
        self._messages = -1
        self._since = 0.0
        self._pause = 0.0
        self._deadline = 0.0

    # A new link

    async def begin(
        self, deadline: float
    ) -> tuple[socket.socket, Tls | None, LinkAgreement | None]:
        """A connection with a new link; None for the link: the server has none to give.

        Raises ConnectFailed, also where ``resume=require`` meets such a server.
        """
        loop = asyncio.get_running_loop()
        # TLS agrees on the protocol by itself, so that it costs nothing to ask.
        known_plain = (
            self._context is None and _plain_until.get(str(self._address), 0.0) > loop.time()
        )
        if known_plain and not self.resume.required:
            sock = await self._dial(self._address, self._config, deadline)
            return sock, None, None
        tls: Tls | None
        agreement: LinkAgreement | None
        try:
            sock, tls, agreement = await self._ask(deadline)
        except NoLinks as error:
            tls, agreement = None, None
            reason = str(error)
        else:
            if agreement is not None:
                return sock, tls, agreement
            reason = "it speaks Aqueduct, but not Relink"
        if self.resume.required:
            if tls is not None:
                sock.close()
            raise self._failure(
                f"the server cannot resume ({reason}), and resume=require asks for it"
            )
        self._plain = reason
        if tls is None:
            sock = await self._dial(self._address, self._config, deadline)
        return sock, tls, None

    async def _ask(
        self, deadline: float, *, again: bool = True
    ) -> tuple[socket.socket, Tls | None, LinkAgreement | None]:
        """Asks a server for a new link; None for the link: TLS has agreed on none.

        A connection that ends without a word is tried ``again``: a proxy or a listener that ends
        closes connections just so, and says nothing of links. Raises NoLinks, ConnectFailed.
        """
        sock = await self._dial(self._address, self._config, deadline)
        try:
            return sock, *await self._open(sock, 0, 0, deadline)
        except NoLinks as error:
            sock.close()
            if not again or not error.silent:
                raise
        except (OSError, RemoteProtocolError, TlsError) as error:
            sock.close()
            if isinstance(error, ConnectionLost):
                raise
            what = why(error) if isinstance(error, OSError) else str(error)
            raise self._failure(f"the handshake of a link failed: {what}") from error
        except BaseException:
            sock.close()
            raise
        return await self._ask(deadline, again=False)

    def established(self) -> None:
        """The connection works. If it is plain, that is remembered, and said once."""
        reason, self._plain = self._plain, ""
        loop = asyncio.get_running_loop()
        address = str(self._address)
        if not reason or _plain_until.get(address, 0.0) > loop.time():
            return
        seconds = self._config.resume.plain_for
        for each in [each for each, end in _plain_until.items() if end <= loop.time()]:
            del _plain_until[each]
        _plain_until[address] = loop.time() + seconds
        logger.warning(
            "%s: the server cannot resume connections (%s); its connections are plain for the next "
            "%g s (Resume.plain_for)",
            address,
            reason,
            seconds,
        )

    # The link again

    def redial(self, carrier: StreamCarrier) -> None:
        """Dials until ``carrier`` has a connection again, or too much time has passed."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._redial(carrier))

    def stop(self) -> None:
        """The carrier is over."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    async def _redial(self, carrier: StreamCarrier) -> None:
        loop = asyncio.get_running_loop()
        settings = self._config.relink
        link = carrier.link
        assert link is not None
        reason = "each new connection was cut before a message came"
        lasted = loop.time() - self._since
        if link.messages != self._messages or lasted >= settings.ack_deadline:
            self._messages = link.messages
            self._pause, self._deadline = 0.0, loop.time() + self.resume.seconds
        deadline = self._deadline
        while True:
            left = deadline - loop.time()
            if left <= 0:
                break
            if self._pause:
                await asyncio.sleep(min(left, self._pause * random.uniform(0.5, 1.5)))
            self._pause = min(max(2 * self._pause, settings.redial_first), settings.redial_most)
            attempt = min(deadline, loop.time() + settings.handshake_deadline)
            sock: socket.socket | None = None
            try:
                sock = await self._dial(self._address, self._config, attempt)
                tls, agreement = await self._open(sock, link.epoch, link.identifier, attempt)
                if agreement is not None:
                    self._since = loop.time()
                    link.go_on(LinkConnection(sock, tls, agreement))
                    return
                reason = "the server does not speak Relink any more"
            except LinkUnknown as error:
                _close(sock)
                what = "the service " + ("restarted" if error.restarted else "dropped the link")
                carrier.lose(ConnectionLost(f"{carrier.peer}: {what}", reason=what))
                return
            except ConnectionLost as error:
                reason = error.reason or str(error)
            except (OSError, TimeoutError, NoLinks, RemoteProtocolError, TlsError) as error:
                reason = str(error) or type(error).__name__
            except Exception as error:  # of the library: calls must not wait for ever by it
                reason = f"a fault while dialling: {type(error).__name__}: {error}"
                logger.exception("%s: a fault while dialling", self._address)
            except BaseException:
                _close(sock)
                raise
            _close(sock)
        text = f"no connection for {self.resume.seconds:g} s (resume): {reason}"
        carrier.lose(ConnectionLost(f"{carrier.peer}: {text}", reason=text))

    # One connection

    async def _open(
        self, sock: socket.socket, epoch: int, link: int, deadline: float
    ) -> tuple[Tls | None, LinkAgreement | None]:
        """The handshakes of TLS and of the link. None for the link: TLS has agreed on none.

        Raises NoLinks, ConnectFailed, LinkUnknown, RemoteProtocolError.
        """
        try:
            async with asyncio.timeout_at(deadline):
                tls = None if self._context is None else await self._shake_hands(sock)
                if tls is not None and tls.protocol != LINK_ALPN:
                    return tls, None
                return tls, await self._agree(sock, tls, epoch, link)
        except TimeoutError:
            raise self._failure("the handshake of a link did not come in time") from None

    async def _shake_hands(self, sock: socket.socket) -> Tls:
        assert self._context is not None
        assert self._tls is not None
        loop = asyncio.get_running_loop()
        name = self._tls.server_name or self._address.host
        tls = Tls(sock, self._context, name, server=False, scratch=scratch("sealed"))
        while True:
            try:
                data = tls.handshake()
            except TlsError as error:
                with_alert = tls.pending()
                if with_alert:
                    await loop.sock_sendall(sock, with_alert)
                raise self._failure(explain(error, tls.first, name, server=False)) from error
            except OSError as error:
                raise self._failure(why(error)) from error
            if data:
                await loop.sock_sendall(sock, data)
            if tls.complete:
                break
            await readable(sock)
        identity = tls.identity
        reason = self._secured(None if identity is None else identity.fingerprint)
        if tls.protocol not in (LINK_ALPN, ALPN):
            reason = "the server speaks TLS but not Aqueduct (no common ALPN protocol)"
        if reason is not None:
            raise self._failure(reason)
        return tls

    async def _agree(
        self, sock: socket.socket, tls: Tls | None, epoch: int, link: int
    ) -> LinkAgreement:
        loop = asyncio.get_running_loop()
        handshake = ConnectorHandshake(opening(epoch, link))
        first: list[Buffer] = [handshake.first_flight]
        heard = False
        try:
            for piece in first if tls is None else tls.seal(first):
                await loop.sock_sendall(sock, piece)
            while True:
                data = await _receive(sock, tls)
                if not data:
                    break
                if not heard and tls is None and data[0]:
                    raise NoLinks(f"its first bytes are {bytes(data[:8])!r}", silent=False)
                heard = True
                agreement = handshake.receive_data(data)
                if agreement is not None:
                    return agreement
        except OSError as error:
            if heard or tls is not None:
                raise
            raise NoLinks(why(error), silent=True) from error
        if heard or tls is not None:
            raise self._failure("the server closed the connection in the handshake of a link")
        raise NoLinks("it closed the connection at the hello of a link", silent=True)

    def _failure(self, reason: str) -> ConnectFailed:
        return ConnectFailed(f"{self._address}: {reason}", reason=reason)


async def _receive(sock: socket.socket, tls: Tls | None) -> bytes:
    """The next bytes; empty: the end."""
    memory = bytearray(_READ)
    while True:
        try:
            size = (sock if tls is None else tls).recv_into(memory)
        except BlockingIOError:
            await readable(sock)
        else:
            return bytes(memory[:size])


def _close(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()
