"""What a partition's calls are asked for, and what comes of each batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from aqueduct.carriers.certificates import ClientTls
from aqueduct.client.balanced_spec import BalancedSpec, BatchAnswer, OnError, Opened
from aqueduct.errors import ConfigError
from aqueduct.rpc.request import Partition
from spark_udfs.calls.pool import Peer
from spark_udfs.tokens import fresh
from spark_udfs.worker.task import TaskContext, application

__all__ = ["BatchAnswer", "CallSpec", "OnError", "Opened"]


@dataclass(frozen=True, kw_only=True)
class CallSpec(BalancedSpec):
    """Whom to call, and how. ``spark_udfs.exchange`` has the meaning of each."""

    insists: ClassVar[bool] = True
    addresses: tuple[str, ...]
    """Batches for a function of one batch are spread over them; other handlers get one each."""
    schema: pa.Schema | None
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    """A callable is asked for each call."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    connection_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tls: ClientTls | None = None
    compression: str | None = None
    write_key: str = ""
    """The same for every attempt of the job."""
    splits: bool = True
    """Whether rows of one batch may go as several requests of ReactiveSocket."""
    application: tuple[str, str] = field(default=("", ""), compare=False)
    """Id and name of the Spark application; set when this is sent to executors."""

    @property
    def unit(self) -> str:
        """What the work is, for people."""
        return "the partition"

    @functools.cached_property  # all tasks of a worker have the same object
    def is_plain(self) -> bool:
        """Whether one call does, of which nothing is kept."""
        return (
            self.keeps_order(len(self.addresses))
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
        return Peer(address, self.tls, self.connection_headers, self.config, self.application)

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

    def __getstate__(self) -> dict[str, Any]:
        """On the driver, where it is known which application the tasks belong to."""
        state = {**self.__dict__, "application": application() or self.application}
        state.pop("peers", None)  # they have it too
        return state

    def fresh_token(self) -> str | None:
        """What the next call shows. Raises ConfigError for what a callable raises."""
        return fresh(self.token)
