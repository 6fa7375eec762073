"""The addresses of one client: connections that are made again, and names that are resolved.

All of it lives on one event loop. What other threads may use says so.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast
from weakref import WeakSet

from aqueduct.address import Address
from aqueduct.carriers.binding import resolve as look_up
from aqueduct.client.client_connection import ClientConnection, connection_headers, plain
from aqueduct.client.connection_options import ConnectionOptions
from aqueduct.client.retry import Backoff
from aqueduct.errors import (
    AqueductError,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    LocalProtocolError,
)
from aqueduct.escaping import logger_of

__all__ = [
    "ClientAddress",
    "ClientEndpoint",
    "EndpointSet",
    "EndpointState",
    "addresses_of",
]

log = logger_of(__name__)

ClientAddress: TypeAlias = "str | Address | Sequence[str | Address]"
"""One address of a service, or several."""
_TROUBLE: Final = 5.0
"""Seconds for which calls begin elsewhere after an address did not answer."""
_AGAIN: Final = 1.0
"""Seconds between two lookups of a name whose addresses fail."""
_IDLE_LOOK: Final = 0.25


@dataclass(frozen=True, slots=True)
class EndpointState:
    """One address of a client at this moment, for people and tests."""

    address: str
    """Without its options. An address that a name resolved to has its IP address."""
    connected: bool
    connections: int
    """Made so far."""
    failures: int
    """In a row: attempts to connect, and connections that were lost."""
    outstanding_bytes: int
    """Sent and not yet answered, of all calls."""
    error: str
    """Why the last attempt or connection failed; empty when it is connected."""


class ClientEndpoint:
    """One address of a client, and its connection while there is one."""

    def __init__(self, address: Address, bare: str, options: ConnectionOptions) -> None:
        self.address = address
        self.bare = bare
        """The address without its options, for people."""
        self.link: ClientConnection | None = None
        """The connection; it may be over."""
        self.connections = 0
        self.retired = False
        """Whether its name resolves to it no more."""
        self._options = options
        policy = options.policy()
        self._backoff = Backoff(policy.backoff, policy.backoff_limit)
        self._connecting: asyncio.Task[ClientConnection] | None = None
        self.waiting = 0
        """How many wait for the attempt to connect."""
        self._trouble = 0.0
        self._error = ""
        self._lost: ClientConnection | None = None

    # For any thread

    @property
    def alive(self) -> bool:
        """Whether it is connected."""
        link = self.link
        if link is None:
            return False
        if not link.closed:
            return True
        if link is not self._lost:
            self._lost = link
            self._backoff.failed()
            self._error = str(link.connection.error)
        return False

    @property
    def load(self) -> int:
        """Bytes that have no answer."""
        return self.link.load if self.link is not None and self.alive else 0

    def in_trouble(self, now: float) -> bool:
        """Whether it failed a short time ago, by ``time.monotonic()``."""
        return self._trouble > now

    def note(self, *, trouble: bool) -> None:
        """Whether it answers, for calls that come later."""
        self._trouble = time.monotonic() + _TROUBLE if trouble else 0.0

    @property
    def state(self) -> EndpointState:
        """What there is to say of it."""
        alive = self.alive
        return EndpointState(
            self.bare,
            connected=alive,
            connections=self.connections,
            failures=0 if alive else self._backoff.failures,
            outstanding_bytes=self.load,
            error="" if alive else self._error,
        )

    # On the loop

    def connect_soon(self) -> asyncio.Task[ClientConnection]:
        """The task that connects. A caller that stops waiting leaves it running."""
        if self._connecting is None or self._connecting.done():
            loop = asyncio.get_running_loop()
            self._connecting = loop.create_task(self._connect())
            self._connecting.add_done_callback(_seen)
        return self._connecting

    def keep(self, now: float) -> None:
        """Connects, unless it is connected or failed a short time ago."""
        if not self.alive and self._backoff.until <= now:
            self.connect_soon()

    async def connected(self) -> ClientConnection:
        """The connection, made now if there is none. Raises ConnectFailed and the like."""
        if self.link is not None and self.alive:
            return self.link
        if self.retired:
            reason = "its name resolves to it no more"
            raise ConnectFailed(f"{self.bare}: {reason}", reason=reason)
        task = self.connect_soon()
        self.waiting += 1
        try:
            await asyncio.wait((task,))  # others wait, too: it is not cancelled with this one
        finally:
            self.waiting -= 1
        if task.cancelled():
            raise ConnectionLost(f"the client of {self.bare} is closed")
        return task.result()

    async def give_up(self) -> None:
        """Ends the attempt to connect."""
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))

    async def close(self) -> None:
        """Ends the attempt to connect, and the connection."""
        await self.give_up()
        if self.link is not None:
            await self.link.close()

    async def close_when_idle(self) -> None:
        """Closes the connection once its last call has ended."""
        self.retired = True
        await self.give_up()
        while self.link is not None and self.link.busy and self.alive:  # noqa: ASYNC110
            await asyncio.sleep(_IDLE_LOOK)
        await self.close()

    async def _connect(self) -> ClientConnection:
        options = self._options
        try:
            link = await ClientConnection.connect(
                self.address,
                name=self.bare,
                config=options.config,
                tls=options.tls,
                headers=connection_headers(options.headers),
                token=options.token,
                keep_alive=options.keep_alive,
                telemetry=options.telemetry,
            )
        except AqueductError as error:
            self._backoff.failed()
            self._error = str(error)
            if isinstance(error, ConnectFailed):
                self.note(trouble=True)
            raise
        self._backoff.succeeded()
        self.link = link
        self.connections += 1
        return link


def _seen(task: asyncio.Task[ClientConnection]) -> None:
    """Marks its error as seen: callers that wait get it, and perhaps none waits."""
    if not task.cancelled():
        task.exception()


class EndpointSet:
    """All addresses of one client.

    It belongs to the event loop and the process in which it is first used.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        options: ConnectionOptions,
        *,
        reconnects: bool = True,
    ) -> None:
        """``reconnects``: lost connections are made again, and names resolved, while it lives."""
        self._most = most = options.config.calls.client_addresses
        if len(addresses) > most:
            raise ConfigError(
                f"{len(addresses)} addresses are above the limit of {most} "
                "(Calls.client_addresses); give fewer, or raise it"
            )
        self._options = options
        self.telemetry = options.telemetry
        """The observer of calls."""
        self._named: list[Address] = []
        """Those that are names to be resolved, with all their records as endpoints."""
        self._fixed: list[ClientEndpoint] = []
        self._period = cast("float | None", options.resolve)
        for address in addresses:
            spread = reconnects and self._period_of(address) is not None
            if spread and _is_name(address):
                self._named.append(address)
            else:
                self._fixed.append(ClientEndpoint(address, plain(address), options))
        self._found: dict[tuple[str, str], ClientEndpoint] = {}
        self.targets: tuple[ClientEndpoint, ...] = tuple(self._fixed)
        """The addresses to call: another object when they have changed."""
        self.single = self._fixed[0] if len(self._fixed) == 1 and not self._named else None
        """The only address, if there are no others and will be none."""
        self.addresses = tuple(map(plain, addresses))
        """As they were given, without their options."""
        self.closed = False
        self.reconnects = reconnects
        """Whether a connection that is lost is made again."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self._pid: int | None = None
        """The process that used it first."""
        self._turn = 0
        self._retiring: set[ClientEndpoint] = set()
        self._resolved = float("-inf")
        self._unresolved: ConnectFailed | None = None
        self._resolving: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.queues: WeakSet[SimpleQueue[tuple[Any, Any]]] = WeakSet()
        """Of the threads that work with these addresses: a close wakes them."""

    @classmethod
    def of(cls, link: ClientConnection) -> EndpointSet:
        """The set of a connection that was made elsewhere: when it is over, all is."""
        options = ConnectionOptions(config=link.config, telemetry=link.telemetry)
        made = cls((), options, reconnects=False)
        unknown = Address("memory", "", 0)  # it is not connected again
        endpoint = ClientEndpoint(unknown, link.address, options)
        endpoint.link, endpoint.connections = link, 1
        made.targets, made.single, made.addresses = (endpoint,), endpoint, (link.address,)
        made.loop, made._pid = link.connection.loop, os.getpid()
        return made

    # For any thread

    @property
    def places(self) -> str:
        """The addresses, for people."""
        return ", ".join(self.addresses)

    @property
    def states(self) -> tuple[EndpointState, ...]:
        """Each address at this moment."""
        return tuple(endpoint.state for endpoint in self.targets)

    @property
    def alive(self) -> bool:
        """Whether any address is connected."""
        return any(endpoint.alive for endpoint in self.targets)

    @property
    def last(self) -> ClientConnection | None:
        """A connection that is up, or else one that was."""
        links = [endpoint.link for endpoint in self.targets if endpoint.link is not None]
        up = [link for link in links if not link.closed]
        return next(iter(up or links), None)

    def in_order(self) -> list[ClientEndpoint]:
        """The addresses with the fewest outstanding bytes first; in turns where these are equal."""
        targets, self._turn = self.targets, self._turn + 1
        first = self._turn % len(targets) if targets else 0
        return sorted(targets[first:] + targets[:first], key=lambda each: each.load)

    def best(self) -> ClientEndpoint | None:
        """The connected address with the fewest outstanding bytes."""
        found = [endpoint for endpoint in self.in_order() if endpoint.alive]
        now = time.monotonic()
        return next((each for each in found if not each.in_trouble(now)), next(iter(found), None))

    @property
    def stale(self) -> bool:
        """Whether a name is to be resolved again, or an address to be connected."""
        if self._named and time.monotonic() - self._resolved >= self._least_period():
            return True
        return not all(endpoint.alive for endpoint in self.targets)

    # On the loop

    def check_here(self) -> None:
        """Raises LocalProtocolError on another event loop, or in a forked child."""
        link = self.last
        if link is not None:
            link.connection.check_here()
            return
        if self._forked:
            raise LocalProtocolError(
                f"the client of {self.places} was used in process {self._pid}, and this is process "
                f"{os.getpid()}; make a client after the fork"
            )
        running = asyncio._get_running_loop()
        if self.loop is not None and running is not self.loop:
            raise LocalProtocolError(
                f"the client of {self.places} belongs to another event loop than the one that runs "
                "here; make a client on each loop"
            )

    def tend(self) -> None:
        """Has names resolved, and addresses connected, for which it is time."""
        if self.closed or not self.reconnects:
            return
        self._enter()
        now = time.monotonic()
        if self._named and now - self._resolved >= self._least_period():
            self._resolve_soon()
        for endpoint in self.targets:
            endpoint.keep(now)

    async def open(self) -> ClientConnection:
        """The first connection that comes up. Raises ConnectFailed if there is none."""
        self.check_here()
        await self.prepare()
        return await self._first()

    async def prepare(self) -> None:
        """Resolves names that never were. Raises ConnectFailed, and ConnectionLost if closed."""
        self._enter()
        self._check_open()
        if not self._named or self._found:
            return
        never = self._resolved == float("-inf")
        # Calls with other addresses do not wait for a name that has none: ``tend`` asks again.
        if never or (not self.targets and time.monotonic() - self._resolved >= _AGAIN):
            await asyncio.wait((self._resolve_soon(),))
            self._check_open()
        if not self.targets and self._unresolved is not None:
            raise self._unresolved

    async def lease(self, endpoint: ClientEndpoint) -> ClientConnection:
        """The connection of an address. One that fails has its name resolved again."""
        self._check_open()
        try:
            return await endpoint.connected()
        except AqueductError:
            if self._named and time.monotonic() - self._resolved >= _AGAIN:
                await asyncio.wait((self._resolve_soon(),))
            raise

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs ``work`` until it ends, or the client is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def give_up(self) -> None:
        """Ends what is being made and nobody waits for; it may be tried again."""
        for endpoint in self.targets:
            if not endpoint.waiting:
                await endpoint.give_up()

    async def close(self) -> None:
        """Closes all connections, and ends what is being made. In a forked child, nothing.

        Each call does all of it: the one before may have been cancelled, or be under way.
        """
        link, before, self.closed = self.last, self.closed, True
        try:
            if link is not None:
                await link.close()
            elif not self._forked:
                self.check_here()
        except LocalProtocolError:  # on another event loop
            self.closed = before
            raise
        if self._forked:
            return
        for news in tuple(self.queues):
            news.put((None, None))
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        endpoints = (*self.targets, *self._retiring)
        await asyncio.gather(*(endpoint.close() for endpoint in endpoints))

    # Within

    @property
    def _forked(self) -> bool:
        """Whether another process used it first."""
        return self._pid is not None and self._pid != os.getpid()

    def _enter(self) -> None:
        if self.loop is None:
            self.loop, self._pid = asyncio.get_running_loop(), os.getpid()

    def _check_open(self) -> None:
        if self.closed:
            raise ConnectionLost(f"the client of {self.places} is closed")

    async def _first(self) -> ClientConnection:
        targets = self.in_order()
        missing = [endpoint for endpoint in targets if not endpoint.alive]
        waiting = {endpoint.connect_soon() for endpoint in missing}
        best = self.best()
        if best is not None and best.link is not None:
            return best.link
        for endpoint in missing:
            endpoint.waiting += 1
        try:
            return await self._first_of(targets, waiting)
        finally:
            for endpoint in missing:
                endpoint.waiting -= 1

    async def _first_of(
        self, targets: list[ClientEndpoint], waiting: set[asyncio.Task[ClientConnection]]
    ) -> ClientConnection:
        failed: BaseException | None = None
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():
                    continue
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, ConnectFailed) and not isinstance(failed, AqueductError):
                    failed = error
                failed = failed or error
        self._check_open()
        if failed is None:  # their name resolves to none of them any more
            reason = "its addresses vanished while they were connected"
            raise ConnectFailed(f"{self.places}: {reason}", reason=reason)
        if len(targets) == 1 or not isinstance(failed, ConnectFailed):
            raise failed
        raise ConnectFailed(
            f"none of {len(targets)} addresses answers: "
            + "; ".join(f"{endpoint.bare}: {endpoint.state.error}" for endpoint in targets)
        ) from failed

    def _period_of(self, address: Address) -> float | None:
        return address.resolve if address.resolve is not None else self._period

    def _least_period(self) -> float:
        return min(self._period_of(address) or 0.0 for address in self._named)

    def _resolve_soon(self) -> asyncio.Task[None]:
        if self._resolving is None or self._resolving.done():
            self._resolving = self.spawn(self._resolve())
        return self._resolving

    async def _resolve(self) -> None:
        """Resolves all names. One that does not resolve keeps the records that it had."""
        found: dict[tuple[str, str], ClientEndpoint] = {}
        failed: ConnectFailed | None = None
        for address in self._named:
            try:
                records = await self._records(address)
            except ConnectFailed as error:
                failed = failed or error
                records = [ip for known, ip in self._found if known == str(address)]
            for ip in records:
                key = str(address), ip
                found[key] = self._found.get(key) or self._endpoint(address, ip)
        self._resolved = time.monotonic()
        found = self._limited(found)
        self._unresolved = failed
        if failed is not None and (found or self._fixed):
            log.warning("%s; the addresses from before are used", failed)
        gone = [self._found[key] for key in self._found.keys() - found.keys()]
        if gone or found.keys() != self._found.keys():
            self._found = found
            self.targets = (*self._fixed, *found.values())
        for endpoint in gone:
            self._retiring.add(endpoint)
            self.spawn(self._retire(endpoint))

    def _limited(
        self, found: dict[tuple[str, str], ClientEndpoint]
    ) -> dict[tuple[str, str], ClientEndpoint]:
        """As many as a client may have, those that are known already first."""
        most = self._most - len(self._fixed)
        if len(found) <= most:
            return found
        log.warning(
            "%s: %d records of the name are left alone: a client has at most %d addresses "
            "(Calls.client_addresses)",
            self.places,
            len(found) - most,
            self._most,
        )
        keys = sorted(found, key=lambda key: key not in self._found)[:most]
        return {key: found[key] for key in found if key in keys}

    async def _retire(self, endpoint: ClientEndpoint) -> None:
        await endpoint.close_when_idle()
        self._retiring.discard(endpoint)

    async def _records(self, address: Address) -> list[str]:
        name, resolver = address.host, self._options.resolver
        seconds = self._options.config.timing.connect_timeout
        cause: BaseException | None = None
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                if resolver is None:
                    infos = await look_up(name, address.port, socket.SOCK_STREAM)
                    records = [str(where[0]) for _, _, _, _, where in infos]
                else:
                    records = [str(ip_address(each)) for each in await resolver(name, address.port)]
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            cause = error  # of a task that the resolver waited for
            reason = f"the name {name!r} does not resolve (its lookup was cancelled)"
        except Exception as error:  # noqa: BLE001  a resolver is a program of its own
            cause = error
            if limit.expired():
                reason = f"the name {name!r} was not resolved within {seconds:g} s"
            else:
                known = isinstance(error, OSError | ValueError) and str(error)
                said = str(error) if known else f"{type(error).__name__}: {error}"
                reason = f"the name {name!r} does not resolve ({said})"
        else:
            if records:
                return list(dict.fromkeys(records))
            reason = f"the name {name!r} has no address"
        raise ConnectFailed(f"{plain(address)}: {reason}", reason=reason) from cause

    def _endpoint(self, address: Address, ip: str) -> ClientEndpoint:
        """The endpoint of one record: its certificate is that of the name."""
        options: Mapping[str, str] = address.options
        connection = self._options
        unnamed = connection.tls is None or connection.tls.server_name is None
        if address.certified and unnamed and "server_name" not in options:
            options = {**options, "server_name": address.host}
        options = MappingProxyType({k: v for k, v in options.items() if k != "resolve"})
        dialled = replace(address, host=ip, options=options)
        return ClientEndpoint(dialled, plain(dialled), connection)


def addresses_of(given: ClientAddress) -> tuple[Address, ...]:
    """The addresses, parsed. Raises ConfigError for none, and for one that is given twice."""
    several = [given] if isinstance(given, str | Address) else list(given)
    found = tuple(each if isinstance(each, Address) else Address.parse(each) for each in several)
    if not found:
        raise ConfigError(
            "address is an empty list; give at least one address of the service, such as "
            "aqueduct://localhost:4433"
        )
    seen: set[str] = set()
    for address in found:
        if str(address) in seen:
            raise ConfigError(f"the address {plain(address)} is given twice; name each once")
        seen.add(str(address))
    return found


def _is_name(address: Address) -> bool:
    if not address.host or address.scheme == "memory":
        return False
    try:
        ip_address(address.host.partition("%")[0])
    except ValueError:
        return True
    return False
