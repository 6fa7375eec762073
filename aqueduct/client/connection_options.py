"""How a client connects, and what it does about failures: each option once, for all clients.

``Client`` and ``SyncClient`` take them as keywords; see ``Client.connect`` for what they mean.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict, cast

from aqueduct.arguments import Duration
from aqueduct.carriers.certificates import ClientTls
from aqueduct.client.balanced_spec import BalancedSpec
from aqueduct.client.client_connection import ConnectionHeaders, connection_headers
from aqueduct.config import DEFAULT, Config
from aqueduct.rpc.tracing import CallObserver

__all__ = ["ClientOptions", "ConnectionOptions", "Resolver"]

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Gives the IP addresses of a name and a port. Raises OSError if there is none; any other error
counts the same."""


class ClientOptions(TypedDict, total=False):
    """The keywords, for type checkers."""

    config: Config
    tls: ClientTls | None
    headers: ConnectionHeaders
    token: str | bytes | None
    keep_alive: bool
    retries: int
    backoff: Duration
    backoff_limit: Duration
    hedge: Duration
    resolve: Duration | None
    resolver: Resolver | None
    telemetry: CallObserver | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The same with their defaults. Values were read by ``checked``."""

    config: Config = DEFAULT
    tls: ClientTls | None = None
    headers: ConnectionHeaders = field(default=(), repr=False)
    token: str | bytes | None = field(default=None, repr=False)
    keep_alive: bool = True
    retries: int = 0
    backoff: Duration = 0.1
    backoff_limit: Duration = 30.0
    hedge: Duration = 0.5
    resolve: Duration | None = None
    resolver: Resolver | None = None
    telemetry: CallObserver | None = None

    def __post_init__(self) -> None:
        # They are sent with each connection, and an iterator can be read once.
        object.__setattr__(self, "headers", connection_headers(self.headers))

    def policy(self) -> BalancedSpec:
        """What holds for all calls that do not say otherwise."""
        return BalancedSpec(
            handler="",
            retries=self.retries,
            backoff=cast("float", self.backoff),
            backoff_limit=cast("float", self.backoff_limit),
            hedge=cast("float", self.hedge),
            config=self.config,
        )
