"""A client of a service in this process, over a carrier in memory."""

from __future__ import annotations

import itertools
import os
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, cast

from aqueduct.arguments import UNGIVEN, Duration, checked
from aqueduct.carriers import memory
from aqueduct.carriers.contract import PeerCredentials, PeerIdentity
from aqueduct.carriers.memory import PretendedPeer
from aqueduct.client.client import Client, ConnectionHeaders
from aqueduct.client.loop_thread import ServingThread
from aqueduct.client.sync_client import SyncClient
from aqueduct.config import Config
from aqueduct.errors import ConfigError, LocalProtocolError
from aqueduct.service.server import RunningService
from aqueduct.service.service import Service

__all__ = ["ServedClient", "client"]

_names: Final = itertools.count(1)


@checked(headers="connection_headers", peer="endpoint")
def client(
    service: Service,
    *,
    config: Config | None = None,
    token: str | bytes | None = None,
    headers: ConnectionHeaders = (),
    peer: str = "",
    identity: PeerIdentity | None = None,
    credentials: PeerCredentials | None = UNGIVEN,
    drain: Duration | None = None,
) -> ServedClient:
    """A client of ``service``, which is served for it alone, for as long as a block runs.

    ``with`` gives a SyncClient, and serves on a thread of its own. ``async with`` gives a Client,
    and serves on the event loop of the block. No socket is opened. All else is real: ``on_start``,
    ``authorize``, limits, deadlines, tables and sinks.

    - ``config``: the client's; None: the service's own.
    - ``token`` and ``headers``: as of ``Client.connect``.
    - ``peer``, ``identity`` and ``credentials``: whom ``call.peer``, ``call.peer_identity`` and
      ``call.peer_credentials`` name. Without ``credentials`` it is this process.
    - ``drain``: as of ``Service.serving``.

    Raises ConfigError. The block raises what serving and connecting raise.
    """
    if not isinstance(service, Service):
        raise ConfigError(
            f"testing.client: service is of type {type(service).__name__}; it must be an "
            "aqueduct.Service"
        )
    for name, given, wanted in (
        ("identity", identity, PeerIdentity),
        ("credentials", None if credentials is UNGIVEN else credentials, PeerCredentials),
    ):
        if not isinstance(given, wanted | None):
            raise ConfigError(
                f"testing.client: {name} is of type {type(given).__name__}; it must be an "
                f"aqueduct.testing.{wanted.__name__}, or None"
            )
    if credentials is UNGIVEN:
        credentials = PeerCredentials(os.getpid(), os.geteuid(), os.getegid())
    pretended = PretendedPeer(peer, identity, credentials)
    return ServedClient(service, config or service.config, token, headers, pretended, drain)


class ServedClient:
    """What ``client`` gives: a block of ``with`` or ``async with``, one at a time."""

    def __init__(
        self,
        service: Service,
        config: Config,
        token: str | bytes | None,
        headers: ConnectionHeaders,
        pretended: PretendedPeer,
        drain: Duration | None,
    ) -> None:
        self.running: RunningService | None = None
        """The service while the block runs: its counters, calls and connections."""
        self._service = service
        self._config = config
        self._token = token
        self._headers = headers
        self._pretended = pretended
        self._drain = drain
        self._name = ""
        self._serving: AbstractAsyncContextManager[RunningService]
        self._thread: ServingThread
        self._client: Client | SyncClient

    async def __aenter__(self) -> Client:
        await self._begin()
        try:
            found = await Client.connect(
                self._address,
                config=self._config,
                token=self._token,
                headers=self._headers,
            )
        except BaseException:
            await self._end()
            raise
        self._client = found
        return found

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await cast("Client", self._client).close()
        finally:
            await self._end()

    def __enter__(self) -> SyncClient:
        self._check_free()
        thread = self._thread = ServingThread("aqueduct-testing")
        try:
            thread.run(self._begin())
            thread.serves(self._name)
            try:
                found = SyncClient(
                    self._address,
                    config=self._config,
                    token=self._token,
                    headers=self._headers,
                )
            except BaseException:
                thread.run(self._end())
                raise
        except BaseException:
            thread.end()
            raise
        self._client = found
        return found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        thread = self._thread
        if thread.pid != os.getpid():
            return  # a forked child: the service is its parent's
        try:
            cast("SyncClient", self._client).close()
            thread.run(self._end())
        finally:
            thread.end()

    # Within

    @property
    def _address(self) -> str:
        return f"memory://{self._name}"

    def _check_free(self) -> None:
        if self._name:
            raise LocalProtocolError(
                f"this client of the service {self._service.name!r} is in use by a block; make one "
                "for each block: aqueduct.testing.client(service)"
            )

    async def _begin(self) -> None:
        self._check_free()
        self._name = f"testing-{os.getpid()}-{next(_names)}"
        try:
            memory.pretended[self._name] = self._pretended
            self._serving = self._service.serving(self._address, drain=self._drain)
            self.running = await self._serving.__aenter__()
        except BaseException:
            self._forget()
            raise

    async def _end(self) -> None:
        try:
            await self._serving.__aexit__(None, None, None)
        finally:
            self._forget()

    def _forget(self) -> None:
        memory.pretended.pop(self._name, None)
        self._name = ""
        self.running = None
