"""Calls of one batch: the call and its batch in one message, the answers and the status in another.

What does not fit one message travels as an exchange does; see ``docs/protocols/arrow-calls.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from aqueduct.arrow.encode import Encoded, Part
from aqueduct.arrow.ipc import ALIGNMENT, deserialize_schema, serialize_schema
from aqueduct.config import Calls
from aqueduct.errors import BadCall
from aqueduct.rpc import keys
from aqueduct.rpc.keys import Headers, number_of, one_each
from aqueduct.rpc.request import CachedHead, CachedHeads, CallHead, own_apart
from aqueduct.rpc.status import OK

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from aqueduct.protocol.channels.receiver import Received

__all__ = [
    "ANSWERS_LIMIT",
    "UnaryAnswer",
    "UnaryAnswers",
    "UnaryTemplate",
    "UnaryTemplates",
    "decode_answer",
    "encode_answer",
    "room_of",
    "schema_prefix",
]

ANSWERS_LIMIT: Final = 128
"""The most batches that one answer holds."""

_KIND: Final = (keys.KIND, keys.UNARY.encode())
_EXCHANGE: Final = (keys.KIND, b"exchange")
_KEYS: Final = frozenset({keys.BODY})
_ANSWER_KEYS: Final = frozenset({keys.STATUS, keys.ANSWERS})
_KEPT: Final = 32


class UnaryTemplate:
    """What the calls of one kind have in common; ``head`` is that of an exchange."""

    __slots__ = ("body", "head", "headers", "known", "prefix")

    def __init__(
        self, head: CallHead, headers: Headers, prefix: bytes, known: CachedHead | None = None
    ) -> None:
        self.head = head
        self.headers = headers
        """Of the message."""
        self.prefix = prefix
        """The schemas, with which its payload begins."""
        self.body = len(prefix)
        """Where the batch begins."""
        self.known = known
        """Of the service: what it knows of calls that are alike."""

    @classmethod
    def encode(cls, head: CallHead) -> UnaryTemplate:
        """Raises LocalProtocolError for what cannot be."""
        headers, payload = head.encode()
        payload[-1] = _padded(payload[-1], sum(map(len, payload)))
        prefix = b"".join(payload)
        named = [_KIND if pair[0] == keys.KIND else pair for pair in headers]
        named.append((keys.BODY, b"%d" % len(prefix)))
        return cls(head, tuple(named), prefix)

    @classmethod
    def decode(
        cls,
        headers: Headers,
        payload: ReadableBuffer,
        *,
        peer: str = "",
        calls: CachedHeads | None = None,
    ) -> UnaryTemplate:
        """The call that a message opens. Raises BadCall that says what is missing or wrong."""
        view = memoryview(payload).cast("B")
        values = one_each(headers, _KEYS)
        if keys.BODY not in values:
            raise BadCall(f"the call has no header {keys.BODY.decode()}", peer=peer)
        body = number_of(values[keys.BODY], keys.BODY, most=len(view))
        if body == len(view):
            raise BadCall("a call of the kind unary carries a batch, and none came", peer=peer)
        # A list takes one call of Python, where a tuple of what a generator gives takes many.
        plain = [
            _EXCHANGE if pair == _KIND else pair
            for pair in headers
            if pair[0] != keys.COMPRESSION  # it has no meaning here
        ]
        prefix = bytes(view[:body])
        if calls is None:
            return cls(CallHead.decode(plain, prefix, peer=peer), headers, prefix)
        head, known = calls.decode(tuple(plain), prefix)
        return cls(head, headers, prefix, known)


class UnaryTemplates:
    """The calls that a connection has decoded before: clients call the same again and again."""

    __slots__ = ("_alike", "_calls", "_peer", "_raw")

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._calls = CachedHeads(peer)
        self._alike: dict[Headers, UnaryTemplate] = {}
        """By the headers but for those that calls say of themselves."""
        self._raw: dict[bytes | Headers, UnaryTemplate] = {}
        """Those that say nothing of themselves, by what their headers were on the way."""

    def find(self, message: Received) -> tuple[CallHead, CachedHead | None, memoryview] | None:
        """The call that a message opens, what is known of such calls, and its batch's payload.

        None for calls of other kinds. Raises BadCall.
        """
        raw, payload = message.raw, message.payload
        found = self._raw.get(raw)
        if found is not None:
            view = memoryview(payload).cast("B")
            body = found.body
            if len(view) > body and bytes(view[:body]) == found.prefix:
                return found.head, found.known, view[body:]
        headers = message.headers
        if _KIND not in headers:
            return None
        view = memoryview(payload).cast("B")
        alike, own = own_apart(headers)
        found = self._alike.get(alike)
        if found is None or len(view) <= found.body or bytes(view[: found.body]) != found.prefix:
            found = UnaryTemplate.decode(headers, view, peer=self._peer, calls=self._calls)
            known = found.known
            if known is None:
                return found.head, None, view[found.body :]
            if len(self._alike) >= _KEPT:
                self._alike.clear()
            found = self._alike[alike] = UnaryTemplate(known.head, alike, found.prefix, known)
        known = found.known
        assert known is not None
        rest = view[found.body :]
        if own:
            return known.with_own(own), known, rest
        if len(self._raw) >= _KEPT:
            self._raw.clear()
        self._raw[raw] = found
        return found.head, known, rest


class UnaryAnswer:
    """What came back: the schema message, and the payloads of the batches."""

    __slots__ = ("batches", "schema")

    def __init__(self, schema: bytes, batches: list[memoryview]) -> None:
        self.schema = schema
        self.batches = batches

    def read_schema(self) -> pa.Schema:
        """Raises BadCall."""
        return deserialize_schema(self.schema, where="the output schema")


def room_of(calls: Calls) -> int:
    """The most bytes of a message with a call's batch, or with its answers."""
    return min(calls.unary_bytes, calls.cut)


def schema_prefix(schema: pa.Schema) -> bytes:
    """A schema message, padded so that what follows begins at a multiple of 64."""
    message = serialize_schema(schema)
    return _padded(message, len(message))


def encode_answer(prefix: bytes, answers: Sequence[Encoded]) -> tuple[Headers, list[Part]]:
    """The message of a call that ended well: its headers and the payload's buffers."""
    end = len(prefix)
    text = b"%d" % end
    payload: list[Part] = [prefix]
    for answer in answers:
        end += answer.size
        text = b"%b,%d" % (text, end)
        payload += answer.buffers
    return ((keys.STATUS, OK.encode()), (keys.ANSWERS, text)), payload


def decode_answer(headers: Headers, payload: ReadableBuffer) -> UnaryAnswer | None:
    """What a call that ended well was answered; None if the message is another.

    Raises BadCall for an answer that is not what it should be.
    """
    return UnaryAnswers().decode(headers, payload)


class UnaryAnswers:
    """Decodes answers to calls that are alike: they are often cut alike, too."""

    __slots__ = ("_ends", "_headers", "_size")

    def __init__(self) -> None:
        # Of the last one.
        self._headers: Headers | None = None
        self._size = 0
        self._ends: list[int] = []

    def decode(self, headers: Headers, payload: ReadableBuffer) -> UnaryAnswer | None:
        """See ``decode_answer``."""
        view = memoryview(payload).cast("B")
        size = len(view)
        if size == self._size and headers == self._headers:
            ends = self._ends
        else:
            found = _ends(headers, size)
            if found is None:
                return None
            ends = found
            if len(headers) == len(_ANSWER_KEYS):  # nothing of others, which could be large
                self._headers, self._size, self._ends = headers, size, ends
        start = ends[0]
        schema = bytes(view[:start])
        batches: list[memoryview] = []
        for end in ends[1:]:
            batches.append(view[start:end])
            start = end
        return UnaryAnswer(schema, batches)


def _ends(headers: Headers, size: int) -> list[int] | None:
    """Where the schema of an answer ends and each of its batches; None if it is no answer."""
    values = one_each(headers, _ANSWER_KEYS)
    places = values.get(keys.ANSWERS)
    if places is None or values.get(keys.STATUS) != b"ok":
        return None
    texts = places.split(b",", ANSWERS_LIMIT + 1)
    if len(texts) > ANSWERS_LIMIT + 1:
        raise BadCall(f"an answer holds more than {ANSWERS_LIMIT} batches")
    end = number_of(texts[0], keys.ANSWERS, most=size)
    ends = [end]
    for text in texts[1:]:
        end = number_of(text, keys.ANSWERS, least=end + 1, most=size)
        ends.append(end)
    if end != size:
        raise BadCall(f"{size - end} bytes follow the answers")
    return ends


def _padded(message: bytes, size: int) -> bytes:
    """A message longer by what ``size`` lacks to a multiple of 64; its length counts the zeros."""
    padding = -size % ALIGNMENT
    length = int.from_bytes(message[4:8], "little") + padding
    return b"".join((message[:4], length.to_bytes(4, "little"), message[8:], bytes(padding)))
