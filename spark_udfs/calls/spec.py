"""What a partition's calls are asked for, and what comes of each batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from aqueduct.carriers.certificates import ClientTls
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import CallError, ConfigError
from aqueduct.rpc.request import Partition
from spark_udfs.calls.pool import Peer
from spark_udfs.tokens import fresh
from spark_udfs.worker.task import TaskContext

__all__ = ["BatchAnswer", "CallSpec", "OnError", "Opened"]

OnError: TypeAlias = Literal["fail", "report"]
"""What becomes of a batch that its handler fails on: it ends the work, or it is an
``BatchAnswer``.
"""
Opened: TypeAlias = Callable[[pa.Schema, frozenset[str]], None]
"""Hears what the answers' schema is, and the handler's capabilities, before data flows."""


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What the service made of one batch: a batch, or an error."""

    number: int
    """Of the input batch that it belongs to, from 0."""
    batch: pa.RecordBatch | None
    error: CallError | None = None
    """Why there is no batch: HandlerFailed, for example. Only with ``on_error="report"``."""


@dataclass(frozen=True)
class CallSpec:
    """Whom to call, and how. ``spark_udfs.exchange`` has the meaning of each."""

    addresses: tuple[str, ...]
    """Batches for a function of one batch are spread over them; other handlers get one each."""
    handler: str
    schema: pa.Schema | None
    in_flight: int | None = None
    """None: the configuration's, which has more of small batches where one call takes all."""
    in_flight_bytes: int | None = None
    ordered: bool = True
    """False: the answers of a function of one batch come as they are made."""
    deadline: float | None = None
    """Seconds for the whole partition, with all that is done again."""
    batch_deadline: float | None = None
    """Seconds from the sending of a batch to its answer."""
    retries: int = 0
    """Calls made again in a row, without an answer between them, before an error is raised."""
    backoff: float = 0.1
    """Seconds of the pause before the first of them; doubles from one to the next, with jitter."""
    backoff_limit: float = 30.0
    """Seconds of the longest pause."""
    hedge: float = 0.5
    """Seconds after which a call that is not accepted is not waited for alone: the next address is
    called, too."""
    on_error: OnError = "fail"
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    """A callable is asked for each call."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    connection_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tls: ClientTls | None = None
    compression: str | None = None
    config: Config = DEFAULT
    write_key: str = ""
    """The same for every attempt of the job."""
    splits: bool = True
    """Whether rows of one batch may go as several requests of ReactiveSocket."""

    @property
    def keeps_order(self) -> bool:
        """Whether the service is to put the answers in order.

        Not where they come by several calls, nor where one that is late must not hold back others.
        """
        reports_late = self.batch_deadline is not None and self.on_error == "report"
        return self.ordered and len(self.addresses) == 1 and not reports_late

    @functools.cached_property  # all tasks of a worker have the same object
    def is_plain(self) -> bool:
        """Whether one call does, of which nothing is kept."""
        return (
            self.keeps_order
            and not self.is_reactive
            and not self.retries
            and self.batch_deadline is None
            and self.on_error == "fail"
        )

    @functools.cached_property
    def is_reactive(self) -> bool:
        """Whether batches are requests of ReactiveSocket, so that none is told of another."""
        return any(peer.reactive for peer in self.peers)

    def check_reactive(self) -> None:
        """Raises ConfigError for what ReactiveSocket does not carry, where that is asked for."""
        if not self.is_reactive:
            return
        if self.compression not in (None, "none"):
            raise self.not_carried(f"compression={self.compression!r}")
        if self.connection_headers:
            raise self.not_carried("connection_headers")

    def not_carried(self, what: str) -> ConfigError:
        """The error for what an address of ReactiveSocket among these does not carry."""
        place = next(peer.bare for peer in self.peers if peer.reactive)
        return ConfigError(
            f"{what} has no place at {place}: ReactiveSocket carries batches for functions of one "
            "batch, and no more; an aqueduct:// or aqueduct+tls:// address of the service does"
        )

    def peer(self, address: str) -> Peer:
        """Whom a lease is taken on, for one of the addresses."""
        return Peer(address, self.tls, self.connection_headers, self.config)

    def peer_of(self, place: TaskContext) -> Peer:
        """The one that a partition calls alone: they take turns."""
        peers = self.peers
        return peers[(place.partition or 0) % len(peers)]

    @functools.cached_property
    def peers(self) -> tuple[Peer, ...]:
        """One for each address."""
        return tuple(map(self.peer, self.addresses))

    @property
    def places(self) -> str:
        """The addresses without their options, for people."""
        return ", ".join(peer.bare for peer in self.peers)

    def head(self, place: TaskContext) -> dict[str, Any]:
        """What every call of a task says, whatever its kind. Asks for a token; see there."""
        return {"deadline": self.deadline, **self.own(place)}

    def own(self, place: TaskContext) -> dict[str, Any]:
        """What of that may differ from task to task."""
        return {
            "headers": dict(self.headers),
            "write_key": place.unit_key(self.write_key),
            "attempt": place.attempt_key,
            "token": self.fresh_token() if callable(self.token) else self.token,
            "partition": None if place.partition is None else Partition(place.partition),
        }

    def fresh_token(self) -> str | None:
        """What the next call shows. Raises ConfigError for what a callable raises."""
        return fresh(self.token)
