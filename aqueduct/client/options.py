"""What a call may be told: each option once, for ``Client``, ``SyncClient`` and all others.

The public functions take their options as keywords. ``takes`` writes them into the signature that
``help`` and ``inspect.signature`` show; type checkers know them by the ``TypedDict`` of the kind of
call. ``CallOptions`` has the default of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias, TypedDict, TypeVar, cast

import pyarrow as pa

from aqueduct._speedups.calls.batch_sender import InFlightWindow
from aqueduct.arguments import Duration, Size, signature_of
from aqueduct.arrow.capsules import ArrowArrayTable, ArrowStreamTable
from aqueduct.arrow.compression import codec_of
from aqueduct.config import Config
from aqueduct.rpc.request import AS_COMPLETED, FAILURES, CallHead, Kind, Partition
from aqueduct.rpc.tracing import CallObservation

__all__ = [
    "CallOptions",
    "ExchangeOptions",
    "OneBatch",
    "SinkOptions",
    "SourceOptions",
    "SyncBatches",
    "UnaryOptions",
    "WorkOptions",
    "joined",
    "takes",
    "token_bytes",
]

F = TypeVar("F", bound=Callable[..., Any])

OneBatch: TypeAlias = "pa.RecordBatch | ArrowStreamTable | ArrowArrayTable"
"""A batch, or what becomes one: a table of pyarrow, Polars, DuckDB, pandas or nanoarrow."""
SyncBatches: TypeAlias = "Iterable[OneBatch] | ArrowStreamTable | ArrowArrayTable"

_NO_CAPABILITIES: Final[frozenset[str]] = frozenset()


class WorkOptions(TypedDict, total=False):
    """Which piece of work a call is, and for whom."""

    headers: Mapping[str, str] | None
    write_key: str
    attempt: str
    token: str | bytes | None
    partition: Partition | None


class UnaryOptions(WorkOptions, total=False):
    """Of a call of one batch."""

    schema: pa.Schema | None
    output_schema: pa.Schema | None
    deadline: Duration | None
    retries: int | None


class SourceOptions(WorkOptions, total=False):
    """Of a call of a source."""

    output_schema: pa.Schema | None
    deadline: Duration | None
    compression: str | None
    retries: int | None


class SinkOptions(WorkOptions, total=False):
    """Of a call of a sink."""

    schema: pa.Schema | None
    in_flight: int | None
    in_flight_bytes: Size | None
    deadline: Duration | None
    compression: str | None
    retries: int | None


class ExchangeOptions(WorkOptions, total=False):
    """Of an exchange."""

    schema: pa.Schema | None
    output_schema: pa.Schema | None
    in_flight: int | None
    in_flight_bytes: Size | None
    deadline: Duration | None
    compression: str | None
    ordered: bool
    report_failures: bool
    retries: int | None
    batch_deadline: Duration | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """All that a call may be told; see ``Client.exchange``. Values were read by ``checked``."""

    schema: pa.Schema | None = None
    output_schema: pa.Schema | None = None
    in_flight: int | None = None
    in_flight_bytes: Size | None = None
    deadline: Duration | None = None
    headers: Mapping[str, str] | None = None
    write_key: str = ""
    attempt: str = ""
    token: str | bytes | None = None
    partition: Partition | None = None
    compression: str | None = None
    ordered: bool = True
    report_failures: bool = False
    retries: int | None = None
    batch_deadline: Duration | None = None

    def head(
        self,
        kind: Kind,
        handler: str,
        schema: pa.Schema | None,
        token: bytes | None,
        compression: str = "",
        observed: CallObservation | None = None,
    ) -> CallHead:
        """What a call says of itself, if its client has this ``token`` and ``compression``.

        ``observed``: the observation of the call, which joins the trace of its headers.
        Raises ConfigError for a compression that is none.
        """
        name = compression if self.compression is None else codec_of(self.compression)
        return CallHead(
            handler=handler,
            kind=kind,
            schema=schema,
            expected=self.output_schema,
            deadline=cast("float | None", self.deadline),
            write_key=self.write_key,
            attempt=self.attempt,
            token=token if self.token is None else token_bytes(self.token),
            partition=self.partition,
            metadata=self.headers or {} if observed is None else joined(observed, self.headers),
            compressions=(name,) if name else (),
            capabilities=self._capabilities(),
            observed=observed,
        )

    def window(self, config: Config, *, sink: bool = False) -> InFlightWindow:
        """The window of a call that sends batches.

        Who says how many batches gets as many; otherwise there may be more of them if they are
        small. A sink answers nothing: unless it is told how many batches, their bytes alone count.
        """
        calls, given = config.calls, self.in_flight_bytes
        size = calls.in_flight_bytes if given is None else cast("int", given)
        if self.in_flight is not None:
            return InFlightWindow(self.in_flight, size)
        if sink:
            return InFlightWindow(size, size)
        return InFlightWindow(calls.in_flight_batches, size, calls.small_batches, calls.small_bytes)

    def _capabilities(self) -> frozenset[str]:
        """What the call asks for beyond the usual."""
        if self.ordered and not self.report_failures:
            return _NO_CAPABILITIES
        asked = {AS_COMPLETED: not self.ordered, FAILURES: self.report_failures}
        return frozenset(word for word, wanted in asked.items() if wanted)


def joined(observed: CallObservation, headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of a call that is observed; those that its user gave go first."""
    return {**observed.headers, **(headers or {})}


def takes(options: type, defaults: type | None = None) -> Callable[[F], F]:
    """Decorates a function whose ``**options`` are those of a TypedDict: its signature names each.

    ``defaults``: the dataclass that has them; CallOptions, unless there is one.

    Stands below ``checked``, which then reads each as an argument of that name.
    """
    named = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=each.type,
        )
        for each in fields(CallOptions if defaults is None else defaults)
        if each.name in options.__annotations__
    ]

    def decorate(function: F) -> F:
        signature = signature_of(function)
        *others, _ = signature.parameters.values()
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*others, *named]
        )
        return function

    return decorate


def token_bytes(token: str | bytes | None) -> bytes | None:
    """A token as it is sent."""
    return token.encode("utf-8", "surrogateescape") if isinstance(token, str) else token
