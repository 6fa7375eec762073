"""The Arrow call convention, version 1: what opens a call and what answers first.

A call is one message on the entrypoint. Its attachments are the channels of the call, in the order
that ``PLACES`` gives for its kind. Nothing is waited for: the client may send batches in the same
breath. ``docs/protocols/arrow-calls.md`` has the convention byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import pyarrow as pa

from aqueduct.arrow.ipc import deserialize_schema, serialize_schema
from aqueduct.errors import BadCall, LocalProtocolError
from aqueduct.rpc import keys
from aqueduct.rpc.keys import Headers, number_of, one_each, text_of, text_value

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from aqueduct.rpc.tracing import CallObservation

__all__ = [
    "AS_COMPLETED",
    "FAILURES",
    "IDEMPOTENT",
    "KINDS",
    "ONE_TO_ONE",
    "PLACES",
    "Accepted",
    "CallChannels",
    "CallHead",
    "Kind",
    "Partition",
    "check_attachments",
    "own_headers",
]

Kind: TypeAlias = Literal["exchange", "source", "sink"]
"""Batches both ways, to the client alone, or to the server alone."""

KINDS: Final[tuple[Kind, ...]] = ("exchange", "source", "sink")


AS_COMPLETED: Final = "as-completed"
"""To be asked for: the answers come as they are made, each with the number of its batch."""
FAILURES: Final = "failures"
"""To be asked for: a batch on which the handler fails is answered with that, the call goes on."""
ONE_TO_ONE: Final = "one-to-one"
"""A capability of a handler: each batch has one answer, which depends on no other batch."""
IDEMPOTENT: Final = "idempotent"
"""A capability of a handler: a batch may be handed to the handler again."""


@dataclass(frozen=True, slots=True)
class CallChannels:
    """Where a call's channels are among the attachments of its message."""

    to_server: int | None
    """The Receiver of the client's batches (ORDERED); a source has none."""
    to_client: int
    """The Sender of the accept message and of the server's batches (ORDERED)."""
    status: int
    """The Sender of the final status (a oneshot channel)."""

    @property
    def count(self) -> int:
        """How many there are."""
        return self.status + 1


PLACES: Final[Mapping[Kind, CallChannels]] = MappingProxyType(
    {
        "exchange": CallChannels(0, 1, 2),
        "source": CallChannels(None, 0, 1),
        "sink": CallChannels(0, 1, 2),
    }
)

_NAME_LIMIT: Final = 256
_TOKEN_LIMIT: Final = 16 << 10
_METADATA_LIMIT: Final = 32 << 10
_SCHEMAS_LIMIT: Final = 8 << 20
_DEADLINE_LIMIT: Final = 10 * 366 * 86_400 * 1000

_CALL_KEYS: Final = frozenset(
    {
        keys.CALL,
        keys.HANDLER,
        keys.KIND,
        keys.DEADLINE,
        keys.WRITE_KEY,
        keys.ATTEMPT,
        keys.TOKEN,
        keys.PARTITION,
        keys.METADATA,
        keys.EXPECTED,
        keys.COMPRESSION,
        keys.ASKED,
    }
)
_ACCEPTED_KEYS: Final = frozenset({keys.ACCEPTED, keys.COMPRESSION, keys.CAPABILITIES})


@dataclass(frozen=True, slots=True)
class Partition:
    """The share of some work that one call is: number ``index`` of ``count``, if that is known."""

    index: int
    count: int | None = None

    def __str__(self) -> str:
        return str(self.index) if self.count is None else f"{self.index}/{self.count}"


def own_headers(
    write_key: str = "",
    attempt: str = "",
    token: bytes | None = None,
    partition: Partition | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[tuple[bytes, bytes]]:
    """What calls that are otherwise alike say of themselves. Raises LocalProtocolError."""
    headers = []
    if write_key:
        headers.append((keys.WRITE_KEY, text_value(write_key, "write key", limit=_NAME_LIMIT)))
    if attempt:
        headers.append((keys.ATTEMPT, text_value(attempt, "attempt", limit=_NAME_LIMIT)))
    if token is not None:
        if len(token) > _TOKEN_LIMIT:
            raise LocalProtocolError(
                f"the token of a call has {len(token)} bytes, above the limit of {_TOKEN_LIMIT}"
            )
        headers.append((keys.TOKEN, bytes(token)))
    if partition is not None:
        index, count = partition.index, partition.count
        if not 0 <= index <= keys.NUMBER_LIMIT or (count is not None and count <= index):
            raise LocalProtocolError(f"{partition!r} is no share of anything")
        headers.append((keys.PARTITION, str(partition).encode()))
    if metadata:
        headers.append((keys.METADATA, _metadata_value(metadata)))
    return headers


@dataclass(frozen=True, slots=True)
class CallHead:
    """What a call says of itself. An empty string, or None, is what is not said."""

    handler: str
    """The name of the handler."""
    kind: Kind
    """What batches go where."""
    schema: pa.Schema | None = None
    """Of the batches to the server; None for a source."""
    expected: pa.Schema | None = None
    """Of the batches to the client, if the caller knows what it wants; None for a sink."""
    deadline: float | None = None
    """Seconds that the caller will wait for the end, from the arrival of the message."""
    write_key: str = ""
    """The same for every attempt at the same work."""
    attempt: str = ""
    """Tells the attempts apart."""
    token: bytes | None = field(default=None, repr=False)
    """What the service may ask for."""
    partition: Partition | None = None
    """The share of the work that this call is."""
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The user's own headers."""
    compressions: tuple[str, ...] = ()
    """What the caller reads and wants the batches compressed by, the dearest first."""
    capabilities: frozenset[str] = frozenset()
    """Of AS_COMPLETED and FAILURES; words that a service does not know are not granted."""

    observed: CallObservation | None = field(default=None, repr=False, compare=False)
    """The observer of its end; of the caller alone."""

    _encoded: tuple[Headers, tuple[bytes, ...]] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def encode(self) -> tuple[Headers, list[bytes]]:
        """The headers and the payload's buffers. Raises LocalProtocolError for what cannot be."""
        encoded = self._encoded
        if encoded is None:  # a call is looked at before it is handed to another thread
            encoded = self._encode()
            object.__setattr__(self, "_encoded", encoded)
        headers, payload = encoded
        return headers, list(payload)

    def _encode(self) -> tuple[Headers, tuple[bytes, ...]]:
        self._check()
        headers = [
            (keys.CALL, b"%d" % keys.VERSION),
            (keys.HANDLER, text_value(self.handler, "handler's name", limit=_NAME_LIMIT)),
            (keys.KIND, self.kind.encode()),
        ]
        if self.deadline is not None:
            headers.append((keys.DEADLINE, b"%d" % _milliseconds(self.deadline)))
        headers += own_headers(
            self.write_key, self.attempt, self.token, self.partition, self.metadata
        )
        if self.compressions:
            headers.append((keys.COMPRESSION, ",".join(self.compressions).encode()))
        if self.capabilities:
            headers.append((keys.ASKED, ",".join(sorted(self.capabilities)).encode()))
        payload = [] if self.schema is None else [serialize_schema(self.schema)]
        if self.expected is not None:
            headers.append((keys.EXPECTED, b"%d" % sum(map(len, payload))))
            payload.append(serialize_schema(self.expected))
        size = sum(map(len, payload))
        if size > _SCHEMAS_LIMIT:
            raise LocalProtocolError(
                f"the schemas of the call have {size} bytes, above the limit of {_SCHEMAS_LIMIT}; "
                "do their fields carry large metadata?"
            )
        return tuple(headers), tuple(payload)

    @classmethod
    def decode(
        cls,
        headers: Iterable[tuple[bytes, bytes]],
        payload: ReadableBuffer,
        *,
        peer: str = "",
    ) -> CallHead:
        """The call that a message opens. Raises BadCall that says what is missing or wrong."""
        handler = ""
        try:
            values = one_each(headers, _CALL_KEYS)
            _check_version(values.get(keys.CALL), keys.CALL, "call")
            handler = _decode_handler(_required(values, keys.HANDLER))
            kind = _decode_kind(_required(values, keys.KIND))
            schema, expected = _decode_schemas(kind, values.get(keys.EXPECTED), payload)
            deadline = values.get(keys.DEADLINE)
            return cls(
                handler=handler,
                kind=kind,
                schema=schema,
                expected=expected,
                deadline=None if deadline is None else _decode_deadline(deadline),
                write_key=text_of(
                    values.get(keys.WRITE_KEY, b""), keys.WRITE_KEY, limit=_NAME_LIMIT
                ),
                attempt=text_of(values.get(keys.ATTEMPT, b""), keys.ATTEMPT, limit=_NAME_LIMIT),
                token=_decode_token(values.get(keys.TOKEN)),
                partition=_decode_partition(values.get(keys.PARTITION)),
                metadata=_decode_metadata(values.get(keys.METADATA)),
                compressions=_decode_words(values.get(keys.COMPRESSION), keys.COMPRESSION),
                capabilities=frozenset(_decode_words(values.get(keys.ASKED), keys.ASKED)),
            )
        except BadCall as error:
            raise BadCall(str(error), peer=peer, handler=handler) from error.__cause__

    def _check(self) -> None:
        if not self.handler or not self.handler.isprintable():
            raise LocalProtocolError(f"{self.handler!r} cannot be the name of a handler")
        if self.kind not in KINDS:
            raise LocalProtocolError(f"the kind of a call is one of {KINDS}, not {self.kind!r}")
        if (self.schema is None) != (self.kind == "source"):
            which = "has no input schema" if self.kind == "source" else "needs an input schema"
            raise LocalProtocolError(f"a call of the kind {self.kind} {which}")
        if self.expected is not None and self.kind == "sink":
            raise LocalProtocolError("a call of the kind sink expects no output schema")
        if self.capabilities and self.kind != "exchange":
            raise LocalProtocolError(f"a call of the kind {self.kind} asks for no capabilities")


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first message to the client: the call is accepted, and these batches will come."""

    schema: pa.Schema | None = None
    """Of the batches to the client; None says that a sink is ready."""
    compression: str = ""
    """Which of the caller's compressions is used from now on, both ways; "" for none."""
    capabilities: frozenset[str] = frozenset()
    """What the handler is (ONE_TO_ONE, IDEMPOTENT), and which of those asked for are granted."""

    def encode(self) -> tuple[Headers, list[bytes]]:
        """The headers and the payload's buffers."""
        payload = [] if self.schema is None else [serialize_schema(self.schema)]
        headers = [(keys.ACCEPTED, b"%d" % keys.VERSION)]
        if self.compression:
            headers.append((keys.COMPRESSION, self.compression.encode()))
        if self.capabilities:
            headers.append((keys.CAPABILITIES, ",".join(sorted(self.capabilities)).encode()))
        return tuple(headers), payload

    @classmethod
    def decode(
        cls,
        headers: Iterable[tuple[bytes, bytes]],
        payload: ReadableBuffer,
        *,
        kind: Kind,
        peer: str = "",
        handler: str = "",
    ) -> Accepted:
        """The accept message of a call of this kind. Raises BadCall if the message is not one."""
        try:
            values = one_each(headers, _ACCEPTED_KEYS)
            _check_version(values.get(keys.ACCEPTED), keys.ACCEPTED, "accept message")
            chosen = values.get(keys.COMPRESSION, b"")
            compression = text_of(chosen, keys.COMPRESSION, limit=_NAME_LIMIT)
            words = _decode_words(values.get(keys.CAPABILITIES), keys.CAPABILITIES)
            capabilities = frozenset(words)
            size = memoryview(payload).nbytes
            if kind == "sink":
                if size:
                    raise BadCall(f"the accept message of a sink is empty, and {size} bytes came")
                return cls(None, compression, capabilities)
            if not size:
                raise BadCall(
                    f"the accept message of a call of the kind {kind} has no output schema"
                )
            schema = deserialize_schema(payload, where="the output schema")
            return cls(schema, compression, capabilities)
        except BadCall as error:
            raise BadCall(str(error), peer=peer, handler=handler) from error.__cause__


def check_attachments(kind: Kind, count: int) -> CallChannels:
    """Where the channels of such a call are. Raises BadCall if their number is another."""
    places = PLACES[kind]
    if count != places.count:
        raise BadCall(f"a call of the kind {kind} carries {places.count} channels, not {count}")
    return places


def _required(values: dict[bytes, bytes], key: bytes) -> bytes:
    value = values.get(key)
    if value is None:
        raise BadCall(f"the call has no header {key.decode()}")
    return value


def _check_version(value: bytes | None, key: bytes, name: str) -> None:
    if value is None:
        raise BadCall(
            f"not an Arrow {name}: it has no header {key.decode()}; "
            f"is the peer's Arrow call convention version {keys.VERSION}?"
        )
    version = number_of(value, key)
    if version != keys.VERSION:
        # A service reads calls, and its error is read by the caller: the text must hold for both.
        sides = ("the caller", "the service")
        writer, reader = sides if name == "call" else sides[::-1]
        raise BadCall(
            f"the {name} follows version {version} of the Arrow call convention, and {reader} "
            f"knows version {keys.VERSION} only; update the aqueduct-arrow of "
            f"{writer if version < keys.VERSION else reader}"
        )


def _decode_handler(value: bytes) -> str:
    handler = text_of(value, keys.HANDLER, limit=_NAME_LIMIT)
    if not handler.isprintable() or not handler:
        raise BadCall(f"{handler!r} cannot be the name of a handler")
    return handler


def _decode_kind(value: bytes) -> Kind:
    for kind in KINDS:
        if value == kind.encode():
            return kind
    raise BadCall(f"the call is of the kind {value[:40]!r}; there are {', '.join(KINDS)}")


def _decode_schemas(
    kind: Kind, expected: bytes | None, payload: ReadableBuffer
) -> tuple[pa.Schema | None, pa.Schema | None]:
    """The input schema and the expected output schema, which follow each other in the payload."""
    view = memoryview(payload).cast("B")
    size = len(view)
    if size > _SCHEMAS_LIMIT:
        raise BadCall(f"the schemas have {size} bytes, above the limit of {_SCHEMAS_LIMIT}")
    end = size if expected is None else number_of(expected, keys.EXPECTED, most=size)
    if kind == "source" and end:
        raise BadCall(f"a call of the kind source has no input schema, and {end} bytes came")
    if kind == "sink" and expected is not None:
        raise BadCall("a call of the kind sink expects no output schema, and one came")
    return (
        None if kind == "source" else deserialize_schema(view[:end], where="the input schema"),
        None if expected is None else deserialize_schema(view[end:], where="the expected schema"),
    )


def _milliseconds(deadline: float) -> int:
    if not 0 < deadline * 1000 <= _DEADLINE_LIMIT:
        raise LocalProtocolError(
            f"the deadline of a call is {deadline!r} s; it must be above 0 and at most "
            f"{_DEADLINE_LIMIT // 1000} s"
        )
    return max(1, round(deadline * 1000))


def _decode_deadline(value: bytes) -> float:
    return number_of(value, keys.DEADLINE, least=1, most=_DEADLINE_LIMIT) / 1000


def _decode_token(value: bytes | None) -> bytes | None:
    if value is not None and len(value) > _TOKEN_LIMIT:
        raise BadCall(f"the token has {len(value)} bytes, above the limit of {_TOKEN_LIMIT}")
    return value


def _decode_partition(value: bytes | None) -> Partition | None:
    if value is None:
        return None
    index, slash, count = value.partition(b"/")
    if not slash:
        return Partition(number_of(index, keys.PARTITION))
    total = number_of(count, keys.PARTITION, least=1)
    return Partition(number_of(index, keys.PARTITION, most=total - 1), total)


def _decode_words(value: bytes | None, key: bytes) -> tuple[str, ...]:
    if value is None:
        return ()
    # Words that are unknown here are for others.
    return tuple(text_of(value, key, limit=_NAME_LIMIT).split(","))


def _metadata_value(metadata: Mapping[str, str]) -> bytes:
    for pair in metadata.items():
        if not all(isinstance(part, str) for part in pair):
            raise LocalProtocolError(f"the metadata of a call is text to text, not {pair!r}")
    text = json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))
    return text_value(text, "metadata", limit=_METADATA_LIMIT)


def _decode_metadata(value: bytes | None) -> Mapping[str, str]:
    if value is None:
        return MappingProxyType({})
    text = text_of(value, keys.METADATA, limit=_METADATA_LIMIT)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"the header {keys.METADATA.decode()} is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(item, str) for item in found.values()):
        raise BadCall(f"the header {keys.METADATA.decode()} is not a JSON object of strings")
    return MappingProxyType(found)
