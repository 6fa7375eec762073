"""What a handler is called with, made by hand: a call, and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self, cast

import pyarrow as pa

from aqueduct.arguments import Duration, checked
from aqueduct.carriers.contract import PeerCredentials, PeerIdentity
from aqueduct.errors import AqueductError, Cancelled, ConfigError
from aqueduct.rpc.keys import Headers
from aqueduct.rpc.request import CallHead, Kind, Partition
from aqueduct.service.context import Call, cancel
from aqueduct.service.namespace import Namespace

__all__ = ["HandMadeBatches", "HandMadeCall", "batches", "call"]


class HandMadeCall(Call):
    """A Call that no client has made; see ``call``."""

    __slots__ = ()

    def cancel(self, reason: AqueductError | str = "the client abandoned the call") -> None:
        """Cancels the call, as a client does that goes away or waits no longer."""
        cancel(self, Cancelled(reason) if isinstance(reason, str) else reason)


@checked(connection_headers="headers")
def call(
    handler: str = "handler",
    *,
    kind: Kind = "exchange",
    schema: pa.Schema | None = None,
    output_schema: pa.Schema | None = None,
    headers: Mapping[str, str] | None = None,
    token: str | bytes | None = None,
    deadline: Duration | None = None,
    write_key: str = "",
    attempt: str = "",
    partition: Partition | None = None,
    peer: str = "memory://test#client",
    identity: PeerIdentity | None = None,
    credentials: PeerCredentials | None = None,
    connection_headers: Mapping[str, str] | None = None,
    state: Mapping[str, object] | None = None,
    number: int = 1,
) -> HandMadeCall:
    """A Call for a handler, or ``authorize``, that a test calls as the function that it is.

    The arguments are what the Call tells. ``identity`` is its ``peer_identity``, and
    ``credentials`` are its ``peer_credentials``. ``state`` has the attributes of its ``state``, as
    ``authorize`` would have set them. Its ``deadline`` runs from now on.

    Raises ConfigError, and LocalProtocolError for what a client could not send.
    """
    if kind not in ("exchange", "source", "sink"):
        raise ConfigError(f"call: kind is {kind!r}; it must be 'exchange', 'source' or 'sink'")
    head = CallHead(
        handler=handler,
        kind=kind,
        schema=schema,
        expected=output_schema if kind != "sink" else None,
        deadline=cast("float | None", deadline),
        write_key=write_key,
        attempt=attempt,
        token=token.encode("utf-8", "surrogateescape") if isinstance(token, str) else token,
        partition=partition,
        metadata=dict(headers or {}),
    )
    if kind == "source" or schema is not None:
        head.encode()
    greeting = tuple(
        (key.encode(), value.encode()) for key, value in (connection_headers or {}).items()
    )
    origin = _Origin(_Peer(peer, identity, credentials), greeting)
    given = None if state is None else Namespace(state, whose="call.state")
    made = HandMadeCall(origin, head, number, state=given)
    made.output_schema = output_schema
    return made


@dataclass(frozen=True)
class _Peer:
    """The peer that a call comes from."""

    peer: str
    peer_identity: PeerIdentity | None
    peer_credentials: PeerCredentials | None
    suspended: bool = False
    resumes: int = 0


@dataclass(frozen=True)
class _Origin:
    """Where a call comes from."""

    carrier: _Peer
    headers: Headers


class HandMadeBatches:
    """Batches for a handler, to be read by ``for`` and by ``async for``; see ``batches``."""

    def __init__(self, given: Iterator[pa.RecordBatch], call: HandMadeCall | None = None) -> None:
        self._given = given
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        if self._call is not None:
            self._call.check()
        return next(self._given)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        if self._call is not None and self._call.cancelled:
            raise asyncio.CancelledError
        for batch in self._given:
            return batch
        raise StopAsyncIteration


def batches(*given: pa.RecordBatch, call: HandMadeCall | None = None) -> HandMadeBatches:
    """What a generator, an async generator or a sink takes its batches from.

    Once ``call`` is cancelled there are no more: ``for`` raises its Cancelled, and ``async for``
    raises asyncio.CancelledError, as in a service.
    """
    for number, batch in enumerate(given):
        if not isinstance(batch, pa.RecordBatch):
            raise ConfigError(
                f"batches: batch {number} is of type {type(batch).__name__}; it must be a "
                "pyarrow.RecordBatch"
            )
    return HandMadeBatches(iter(given), call)
