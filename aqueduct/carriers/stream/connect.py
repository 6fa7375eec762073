"""Connecting: the addresses of a name, one soon after the other, and a reason for each failure."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections.abc import Iterable
from typing import Final

from aqueduct.address import Address
from aqueduct.carriers.binding import SocketAddress, host_port, targets_of
from aqueduct.carriers.certificates import ClientTls, client_tls
from aqueduct.carriers.stream.connection import StreamCarrier
from aqueduct.carriers.stream.dialling import LinkDialler
from aqueduct.carriers.stream.link import LinkConnection
from aqueduct.carriers.stream.sockets import check_path, tune, why
from aqueduct.carriers.stream.tls import ALPN, LINK_ALPN
from aqueduct.carriers.tls_library import Context, Tls, client_context
from aqueduct.carriers.verify import ascii_name
from aqueduct.config import Config
from aqueduct.errors import ConfigError, ConnectFailed, ConnectionLost
from aqueduct.forks import own_socket
from aqueduct.protocol.relink.handshake import (
    ChosenLink,
    DistantLink,
    LinkAgreement,
    Opening,
    RefusedLink,
)

__all__ = ["connect", "dial"]

_FULL_PAUSE: Final = 0.01  # seconds between two looks at a Unix socket with a full backlog

_Target = tuple[int, SocketAddress]  # family and where


async def connect(
    address: Address, config: Config, tls: ClientTls | None = None, *, bidi: bool = False
) -> StreamCarrier:
    """Connects to ``address``; returns when the peer has said that it speaks the same protocol.

    The addresses of a name are tried side by side, each begun ``ByteStream.attempt_delay`` after
    the
    one before it or when that failed, all within ``Timing.connect_timeout``. Raises ConnectFailed,
    which says for each what went wrong, and ConfigError for settings that cannot work. ``bidi``:
    with bidirectional streams, which the listener has to allow.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + config.timing.connect_timeout
    wanted: ClientTls | None = None
    context: Context | None = None
    resume = address.resume
    if address.scheme == "aqueduct+tls":
        wanted = client_tls(address, tls)
        name = ascii_name(wanted.server_name or address.host)
        protocols = (ALPN,) if resume is None else (LINK_ALPN, ALPN)
        context = client_context(wanted, name, *protocols)
    elif tls is not None:
        raise ConfigError(
            f"{address}: there is no TLS on this carrier, so ClientTls cannot be heeded; use "
            "aqueduct+tls:// or aqueduct://"
        )
    attempt = _Attempt(address, wanted)
    opened: Tls | None = None
    agreement: LinkAgreement | None = None
    if resume is not None:
        attempt.dialler = LinkDialler(
            address, config, dial, tls=wanted, context=context, secured=attempt.check
        )
        sock, opened, agreement = await attempt.dialler.begin(deadline)
    elif address.unix:
        sock = await _dial_unix(address, config, deadline)
    else:
        sock = await dial(address, config, deadline)
    try:
        carrier = StreamCarrier(
            sock,
            attempt,
            config,
            scheme=address.scheme,
            is_client=True,
            context=context,
            server_name=None if wanted is None else wanted.server_name or address.host,
            tls=opened,
            agreement=agreement,
            bidi=bidi,
        )
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):  # the peer has gone before it was looked at
            raise _failure(address, why(error)) from error
        raise
    return await attempt.run(carrier, deadline, config)


class _Attempt:
    """The Host of one connection that is being made."""

    def __init__(self, address: Address, tls: ClientTls | None) -> None:
        self.dialler: LinkDialler | None = None
        """Of a connection that can be resumed."""
        self._address = address
        self._tls = tls
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = loop.create_future()
        self._released: asyncio.Future[None] = loop.create_future()

    async def run(self, carrier: StreamCarrier, deadline: float, config: Config) -> StreamCarrier:
        """Waits for the handshakes. Raises ConnectFailed."""
        carrier.begin()
        try:
            async with asyncio.timeout_at(deadline):
                await self._done
        except TimeoutError:
            failure = _failure(
                self._address,
                f"{carrier.peer} was reached, but {carrier.missing} did not come within "
                f"{config.timing.connect_timeout:g} s (Timing.connect_timeout)",
            )
            carrier.abandon(failure)
            raise failure from None
        except ConnectFailed as failure:
            try:
                await self._released  # the peer is told why, and has a little time to take it
            finally:
                carrier.abandon(failure)
            raise
        except BaseException as error:
            carrier.abandon(ConnectionLost(f"{self._address}: {error!r}"))
            raise
        return carrier

    # Host

    resumes = False

    def check(self, fingerprint: str | None) -> str | None:
        """Compares a pinned certificate; a reason to go no further."""
        wanted = None if self._tls is None else self._tls.fingerprint
        if wanted is None or fingerprint == wanted:
            return None
        return (
            f"the server's certificate is {fingerprint}, not {wanted}; if the server has a new "
            "certificate, pin that one with ?fingerprint="
        )

    def secured(self, carrier: StreamCarrier) -> str | None:
        """TLS is up."""
        return self.check(carrier.peer_certificate_fingerprint)

    def choose(
        self, carrier: StreamCarrier, opening: Opening
    ) -> ChosenLink | RefusedLink | DistantLink:
        """Of a listener."""
        raise AssertionError("a client is asked for a link")

    def agreed(self, carrier: StreamCarrier, connection: LinkConnection) -> None:
        """Of a listener."""
        raise AssertionError("a client is asked for a link")

    def distant(
        self,
        carrier: StreamCarrier,
        link: DistantLink,
        sock: socket.socket,
        tls: Tls | None,
        *,
        greeted: bool,
    ) -> RefusedLink | None:
        """Of a listener."""
        raise AssertionError("a client is asked for a link")

    def cut(self, carrier: StreamCarrier) -> None:
        """The connection of its link is gone."""
        assert self.dialler is not None
        self.dialler.redial(carrier)

    def established(self, carrier: StreamCarrier) -> None:
        """Both sides know that they speak the same protocol."""
        if self.dialler is not None:
            self.dialler.established()
        if not self._done.done():
            self._done.set_result(None)

    def ended(self, carrier: StreamCarrier, error: ConnectionLost) -> None:
        """The connection is over."""
        if self.dialler is not None:
            self.dialler.stop()
        if not self._done.done():
            failure = _failure(self._address, error.reason or str(error))
            failure.code = error.code
            failure.remote = error.remote
            self._done.set_exception(failure)

    def released(self, carrier: StreamCarrier) -> None:
        """The socket is closed."""
        if not self._released.done():
            self._released.set_result(None)


def _failure(address: Address, reason: str) -> ConnectFailed:
    return ConnectFailed(f"{address}: {reason}", reason=reason)


async def _resolve(address: Address, deadline: float) -> list[_Target]:
    """The addresses of the name, families in turn (RFC 8305 section 4). Raises ConnectFailed."""
    targets = await targets_of(address, socket.SOCK_STREAM, deadline)
    first = [target for target in targets if target[0] == targets[0][0]]
    others = [target for target in targets if target[0] != targets[0][0]]
    pairs = itertools.zip_longest(first, others)
    return [target for pair in pairs for target in pair if target is not None]


async def dial(address: Address, config: Config, deadline: float) -> socket.socket:
    """The first socket that connects to an address of the host. Raises ConnectFailed."""
    return await _dial(address, config, await _resolve(address, deadline), deadline)


async def _dial(
    address: Address, config: Config, targets: Iterable[_Target], deadline: float
) -> socket.socket:
    """The same for these addresses."""
    loop = asyncio.get_running_loop()
    waiting = list(targets)
    running: dict[asyncio.Task[socket.socket], SocketAddress] = {}
    problems: list[str] = []
    winner: socket.socket | None = None
    try:
        while winner is None and (waiting or running) and loop.time() < deadline:
            if waiting:
                family, where = waiting.pop(0)
                running[loop.create_task(_connect_one(family, where, config))] = where
            pause = deadline - loop.time()
            if waiting:
                pause = min(pause, config.byte_stream.attempt_delay)
            done, _ = await asyncio.wait(
                running, timeout=max(pause, 0), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                where = running.pop(task)
                error = task.exception()
                if error is None and winner is None:
                    winner = task.result()
                elif error is None:
                    task.result().close()
                elif isinstance(error, OSError):
                    problems.append(f"{host_port(where)}: {why(error)}")
                else:
                    raise error
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_close_late)
    if winner is not None:
        return winner
    timeout = config.timing.connect_timeout
    problems += [
        f"{host_port(where)}: nothing answers TCP within {timeout:g} s; check the host, the port, "
        "and firewalls"
        for where in running.values()
    ]
    problems += [f"{host_port(where)}: there was no time left for it" for _, where in waiting]
    raise _failure(address, "; ".join(problems))


async def _connect_one(family: int, where: SocketAddress, config: Config) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    own_socket(sock)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
        if sock.getsockname() == sock.getpeername():
            # Both ends are this one: the kernel chose the port that was asked for (RFC 9293).
            raise OSError(errno.ECONNREFUSED, "connection refused")
        tune(sock, config)
    except BaseException:
        sock.close()
        raise
    return sock


def _close_late(task: asyncio.Task[socket.socket]) -> None:
    """An attempt that was given up, and came through all the same."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _dial_unix(address: Address, config: Config, deadline: float) -> socket.socket:
    """A socket connected to the path. Raises ConnectFailed, ConfigError."""
    check_path(address)
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    own_socket(sock)
    try:
        tune(sock, config)
        while True:
            try:
                sock.connect(address.path)
                return sock
            except BlockingIOError:
                # Its backlog is full. No readiness tells when there is room (connect(2), EAGAIN).
                if loop.time() >= deadline:
                    raise _failure(
                        address, "the server accepts no connections in time: its backlog is full"
                    ) from None
                await asyncio.sleep(_FULL_PAUSE)
    except OSError as error:
        sock.close()
        if isinstance(error, ConnectionLost):
            raise
        raise _failure(address, _unix_reason(address, error)) from error
    except BaseException:
        sock.close()
        raise


def _unix_reason(address: Address, error: OSError) -> str:
    path = address.path
    known = {
        errno.ENOENT: f"there is no socket file {path!r}; is the server started, and is this its "
        "path?",
        errno.ENOTDIR: f"a part of {path!r} is no directory",
        errno.ECONNREFUSED: f"no server listens at {path!r}: the server that made the file is gone",
        errno.EACCES: f"not permitted: this user (uid {os.geteuid()}) has no right to write to "
        f"{path!r}, or to enter its directory; the server chooses the rights with ?mode=",
        errno.EPROTOTYPE: f"{path!r} is a socket of another kind",
    }
    return known.get(error.errno or 0) or f"{path!r}: {error.strerror}"
