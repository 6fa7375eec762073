"""Calls in the requests of ReactiveSocket: what is in a SETUP, a request, an item and an ERROR.

A request is header pairs (AQ-5), then its body. The headers are

| key | value |
|---|---|
| ``handler`` | the name of a handler or a table, UTF-8 |
| ``format`` | ``arrow`` (the default) or ``json``, of the body and the items |
| ``arguments`` | a JSON object of text: ``Call.headers`` |
| ``deadline`` | milliseconds for the whole call, decimal |
| ``token`` | what the service may ask for, any bytes |
| ``write-key`` | the same for every attempt at one piece of work |
| ``attempt`` | what tells the attempts apart |
| ``partition`` | ``INDEX`` or ``INDEX/COUNT``, decimal: the share of some work |

Other keys are left alone. The data of a SETUP are such pairs too, or nothing: ``format`` and
``token`` there hold for all requests of the connection that have none.

The body of ``arrow`` is an Arrow IPC stream of one batch, with its end marker or without. All items
of an answer together are an Arrow IPC stream without its end marker. The item of an answer without
batches is the schema alone, if an item was asked for. The body of ``json`` is an
array of objects or an object a line, as ``aqueduct.arrow.json_rows`` has them; an item is an array.
A body of no bytes is no batch: that asks a source.

The text of an ERROR is a word of ReactiveSocket (RS-R13), the code of a status, and its message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from aqueduct._speedups.arrow.flatbuffer import numbers
from aqueduct._speedups.base import varint
from aqueduct._speedups.channels.frames import decode_headers
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoded, Part
from aqueduct.arrow.ipc import ALIGNMENT, EXTENSION, deserialize_schema
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import (
    AqueductError,
    BadCall,
    BatchTooLarge,
    FrameError,
    LocalProtocolError,
)
from aqueduct.protocol.reactivesocket import reasons
from aqueduct.rpc import keys
from aqueduct.rpc.keys import Headers, one_each
from aqueduct.rpc.request import CallHead, Kind
from aqueduct.rpc.status import CANCELLED, Status
from aqueduct.rpc.unary import schema_prefix

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "ARROW",
    "ASK_BY_STREAM",
    "JSON",
    "ReactiveDefaults",
    "ReactiveItems",
    "ReactiveRequests",
    "decode_error",
    "encode_error",
    "encode_request",
    "encode_setup",
    "is_call_given_up",
    "one_batch",
    "split_rows",
]

ARROW: Final = "arrow"
JSON: Final = "json"
_FORMATS: Final = {ARROW.encode(): ARROW, JSON.encode(): JSON}

_HANDLER: Final = b"handler"
_FORMAT: Final = b"format"
_TOKEN: Final = b"token"
_PAD: Final = b"pad"
"""Any bytes, so many that the body begins where Arrow reads it in place."""
_KEYS: Final = {
    _HANDLER: keys.HANDLER,
    b"arguments": keys.METADATA,
    b"deadline": keys.DEADLINE,
    _TOKEN: keys.TOKEN,
    b"write-key": keys.WRITE_KEY,
    b"attempt": keys.ATTEMPT,
    b"partition": keys.PARTITION,
}
"""What each key is in the call convention."""
_NAMES: Final = {key: name for name, key in _KEYS.items()}
_KNOWN: Final = frozenset({*_KEYS, _FORMAT})
_VERSION: Final = (keys.CALL, b"%d" % keys.VERSION)

_CONTINUATION: Final = b"\xff\xff\xff\xff"
_END_MARKER: Final = _CONTINUATION + bytes(4)
_PREFIX: Final = 8
_MESSAGES: Final = 1024
"""So many messages of a body are looked at for its end marker; with more it is taken to have none.
"""
_KEPT: Final = 32
_KEPT_SIZE: Final = 16 << 10  # bytes of a head that is kept
_WORDS: Final = {
    CANCELLED: reasons.CANCELED,
    "busy": reasons.REJECTED,
    "refused": reasons.REJECTED,
    "bad-call": reasons.INVALID,
}
"""By the code of a status; all others are APPLICATION_ERROR."""


ASK_BY_STREAM: Final = "ask it by REQUEST_STREAM"
"""The end of what a service says of a handler that may answer a batch more than once."""

_DRAINING: Final = "draining"
"""What ``refused`` is called where the service is ending, so that another may take the call."""
_GIVEN_UP: Final = tuple(f"{code}:" for code in (CANCELLED, "busy", "refused", _DRAINING))
"""What the text of CANCELED begins with where a call of Aqueduct ended so."""


_JSON_HINT: Final = (
    "; JSON needs the header 'format' with the value 'json', in the request or in the SETUP"
)


# Headers


def _block(headers: Headers) -> bytes:
    """Header pairs as they stand before a body."""
    inner = b"".join(
        part for pair in headers for text in pair for part in (varint.encode(len(text)), text)
    )
    return varint.encode(len(inner)) + inner


def _pairs(data: memoryview, most: int) -> tuple[Headers, int]:
    """Header pairs, and where they end. Raises BadCall."""
    try:
        size, start = varint.decode(data[:10])
        if size > most:
            raise BadCall(
                f"the headers have {size} bytes, above the limit of {most} (Limits.header_bytes)"
            )
        if start + size > len(data):
            raise BadCall(f"the headers have {size} bytes, and {len(data) - start} came")
        return decode_headers(bytes(data[start : start + size])), start + size
    except FrameError as error:
        raise BadCall(
            f"the headers cannot be read: {error}; a request begins with header pairs, each length "
            "a varint (AQ-5)"
        ) from None


def _format_of(value: bytes | None, otherwise: str) -> str:
    if value is None:
        return otherwise
    found = _FORMATS.get(value)
    if found is None:
        raise BadCall(f"the format is {value[:40]!r}; there are arrow and json")
    return found


@dataclass(frozen=True, slots=True)
class ReactiveDefaults:
    """What a SETUP says for all requests of its connection."""

    format: str = ARROW
    token: bytes | None = None

    @classmethod
    def decode(cls, data: ReadableBuffer, *, limits: Config = DEFAULT) -> ReactiveDefaults:
        """Of the data of a SETUP, where nothing is everything by default. Raises BadCall."""
        view = memoryview(data).cast("B")
        if not len(view):
            return cls()
        headers, end = _pairs(view, limits.limits.header_bytes)
        if end != len(view):
            raise BadCall(f"{len(view) - end} bytes follow the headers of the SETUP")
        values = one_each(headers, frozenset({_FORMAT, _TOKEN}))
        return cls(_format_of(values.get(_FORMAT), ARROW), values.get(_TOKEN))


def encode_setup(*, format: str = ARROW, token: bytes | None = None) -> bytes:
    """The data of a SETUP."""
    headers: list[tuple[bytes, bytes]] = []
    if format != ARROW:
        headers.append((_FORMAT, format.encode()))
    if token is not None:
        headers.append((_TOKEN, token))
    return _block(tuple(headers)) if headers else b""


# Requests


class ReactiveRequests:
    """Reads the requests of one connection. Heads that came before are not read again."""

    __slots__ = ("_defaults", "_kept", "_most", "_peer")

    def __init__(self, defaults: ReactiveDefaults, peer: str, config: Config = DEFAULT) -> None:
        self._defaults = defaults
        self._peer = peer
        self._most = config.limits.header_bytes
        self._kept: dict[tuple[str, bytes], tuple[CallHead, str]] = {}

    def read(self, kind: Kind | None, data: memoryview) -> tuple[CallHead, str, memoryview]:
        """The call, its format, and what follows its schema. Raises BadCall.

        ``kind``: of the call; None: a source without a body, else an exchange. With JSON the head
        has no schema: that is the handler's.
        """
        size = len(data)
        # Most headers have up to 127 bytes, and most schemas are told by the first bytes.
        first = data[0] if size else 0
        at = 1 + first
        if first < 0x80 and at + _PREFIX <= size:
            if bytes(data[at : at + 4]) == _CONTINUATION:
                at += _PREFIX + int.from_bytes(data[at + 4 : at + _PREFIX], "little")
            key = (kind or "", bytes(data[:at])) if at <= min(size, _KEPT_SIZE) else None
        else:
            key = None
        if key is not None:
            found = self._kept.get(key)
            if found is not None:
                return *found, data[at:]
        head, format, end = self._decode(kind, data)
        if key is not None and end == at and EXTENSION not in key[1]:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[key] = head, format
        return head, format, data[end:]

    def _decode(self, kind: Kind | None, data: memoryview) -> tuple[CallHead, str, int]:
        handler = ""
        try:
            headers, end = _pairs(data, self._most)
            values = one_each(headers, _KNOWN)
            handler = values.get(_HANDLER, b"").decode("utf-8", "replace")
            format = _format_of(values.pop(_FORMAT, None), self._defaults.format)
            if _TOKEN not in values and self._defaults.token is not None:
                values[_TOKEN] = self._defaults.token
            if kind is None:
                kind = "source" if end == len(data) else "exchange"
            schema = memoryview(b"")
            if kind != "source":
                if end == len(data):
                    raise BadCall("the request has no body, and a batch is wanted there")
                if format == ARROW:
                    schema = _schema_of(data[end:], "the body", _JSON_HINT)
            return self._head(kind, values, schema, format), format, end + len(schema)
        except BadCall as error:
            raise BadCall(str(error), peer=self._peer, handler=handler) from error.__cause__

    def _head(
        self, kind: Kind, values: dict[bytes, bytes], schema: memoryview, format: str
    ) -> CallHead:
        # With JSON the schema comes later: until then the call is read as one without.
        read: Kind = kind if len(schema) else "source"
        pairs = [_VERSION, (keys.KIND, read.encode())]
        pairs += ((_KEYS[name], value) for name, value in values.items())
        try:
            head = CallHead.decode(pairs, schema)
        except BadCall as error:
            text = str(error)
            for key, name in _NAMES.items():
                text = text.replace(key.decode(), name.decode())
            raise BadCall(text) from error.__cause__
        return head if read == kind else replace(head, kind=kind)


def _schema_of(data: memoryview, what: str, hint: str = "") -> memoryview:
    """The schema message that a body or an item begins with. Raises BadCall."""
    if len(data) < _PREFIX or bytes(data[:4]) != _CONTINUATION:
        came = "does not begin with ff ff ff ff" if len(data) else "has no bytes"
        raise BadCall(f"{what} is no Arrow IPC stream: it {came}{hint}")
    size = _PREFIX + int.from_bytes(data[4:_PREFIX], "little")
    if size > len(data):
        raise BadCall(f"the schema of {what} has {size} bytes, and {len(data)} came")
    return data[:size]


def one_batch(rest: memoryview) -> memoryview:
    """What follows the schema of a body, without the end marker of its stream."""
    if len(rest) < _PREFIX or bytes(rest[-_PREFIX:]) != _END_MARKER:
        return rest
    at, end = 0, len(rest) - _PREFIX
    for _ in range(_MESSAGES):  # as the last bytes of a batch may look like an end marker
        if at == end:
            return rest[:end]
        size = int.from_bytes(rest[at + 4 : at + _PREFIX], "little")
        if bytes(rest[at : at + 4]) != _CONTINUATION or not 0 < size <= end - at - _PREFIX:
            break
        try:
            body: int = numbers(rest[at + _PREFIX : at + _PREFIX + size])[2]
        except ValueError:
            break
        at += _PREFIX + size + body
        if body < 0 or at > end:
            break
    return rest


def encode_request(
    head: CallHead,
    payload: Encoded | None = None,
    *,
    most: int = DEFAULT.reactivesocket.frame_bytes,
) -> list[Part]:
    """The data of a request whose body is a batch in Arrow, in buffers.

    ``payload``: of the batch, by an Encoder for ``head.schema``; None: there is no body. ``most``:
    bytes of a frame of the service. Raises LocalProtocolError, and BatchTooLarge above that.
    """
    headers = [(_NAMES[key], value) for key, value in head.encode()[0] if key in _NAMES]
    block = _block(tuple(headers))
    if payload is None or head.schema is None:
        return [block]
    prefix = schema_prefix(head.schema)
    padded = _aligned(headers)
    size = len(padded) + len(prefix) + payload.size
    if size > most:
        raise BatchTooLarge(
            f"the batch and its call have {size} bytes, and a request is not fragmented: above the "
            f"limit of {most} (ReactiveSocket.frame_bytes); send fewer rows at a time, or call an "
            "address of aqueduct:// or aqueduct+tcp://",
            handler=head.handler,
        )
    return [padded, prefix, *payload.buffers]


def _aligned(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Header pairs, and zeros, in a multiple of 64 bytes."""
    least = len(_block((*headers, (_PAD, b""))))
    block = _block((*headers, (_PAD, bytes(-least % ALIGNMENT))))
    if len(block) % ALIGNMENT:  # a length took one byte more
        block = _block((*headers, (_PAD, bytes(-(least + 1) % ALIGNMENT))))
    return block


def split_rows(batch: pa.RecordBatch, size: int, most: int) -> Iterable[pa.RecordBatch]:
    """Slices of a batch of ``size`` bytes: so many that each may have up to ``most`` of them.

    They have as many rows as each other. A slice whose rows are longer may have more bytes.
    """
    parts = min(batch.num_rows, -(-size // max(most, 1)))
    if parts <= 1:
        return (batch,)
    rows = -(-batch.num_rows // parts)
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


# Items


class ReactiveItems:
    """Reads the items of one answer in Arrow: together they are a stream."""

    def __init__(self, *, handler: str = "", peer: str = "", config: Config = DEFAULT) -> None:
        self.schema: pa.Schema | None = None
        """Of the batches; None before the first item."""
        self._where = f"the answers of handler {handler!r}" if handler else "the answers"
        self._names: dict[str, Any] = {"handler": handler, "peer": peer}
        self._limit = config.calls.batch_limit
        self._decoder: Decoder | None = None
        self._count = 0

    def read(self, item: ReadableBuffer) -> pa.RecordBatch:
        """The batch of the next item, which points into it. Raises BadCall and BatchTooLarge.

        An answer without batches may be an item that is the schema alone: a batch without rows.
        """
        view = memoryview(item).cast("B")
        if self._decoder is None:
            try:
                message = _schema_of(view, "the item")
                self.schema = deserialize_schema(message, where="the schema")
            except BadCall as error:
                raise BadCall(f"{self._where}: {error}", **self._names) from error.__cause__
            self._decoder = Decoder(
                self.schema, dictionary_limit=self._limit, where=self._where, **self._names
            )
            view = one_batch(view[len(message) :])
            if not len(view):
                empty = [pa.nulls(0, field.type) for field in self.schema]
                return pa.RecordBatch.from_arrays(empty, schema=self.schema)
        number, self._count = self._count, self._count + 1
        return self._decoder.decode(one_batch(view), number=number)


# Errors


def encode_error(status: Status, *, begun: bool = False) -> tuple[str, str]:
    """The word and the text of an ERROR.

    ``begun``: the handler may have done some of the work, so the word is not REJECTED.
    """
    word = _WORDS.get(status.code, reasons.APPLICATION_ERROR)
    if begun and word == reasons.REJECTED:
        word = reasons.CANCELED
    code = _DRAINING if status.draining else status.code
    return word, f"{code}: {status.message or code}"


def is_call_given_up(text: str) -> bool:
    """Whether the text of a CANCELED is that of a call, and not of a connection."""
    return text.startswith(_GIVEN_UP)


def decode_error(
    text: str, *, peer: str = "", handler: str = "", batch: int | None = None
) -> AqueductError:
    """The error that the text of an ERROR is, behind its word.

    ``batch``: the number that the caller has for the batch of the request.
    """
    code, colon, message = text.partition(":")
    known = colon and code and code.replace("-", "").isalpha() and code.islower()
    status = Status(code, message.strip()) if known else Status("error", text)
    if code == _DRAINING:
        status = replace(status, code="refused", draining=True)
    if batch is not None:
        status = replace(status, batch=batch)
    error = status.to_exception(peer=peer, handler=handler)
    if error is None:
        return LocalProtocolError(f"{peer}: an ERROR says that all is well: {text}")
    return error
