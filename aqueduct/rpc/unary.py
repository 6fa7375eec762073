"""Calls of one batch: the call and its batch in one message, the answers and the status in another.

What does not fit one message travels as an exchange does; see ``docs/protocols/arrow-calls.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from aqueduct.arrow.encode import Encoded, Part
from aqueduct.arrow.ipc import ALIGNMENT, by_identity, deserialize_schema, serialize_schema
from aqueduct.config import Calls
from aqueduct.errors import BadCall
from aqueduct.rpc import keys
from aqueduct.rpc.keys import Headers, number_of, one_each
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.status import OK

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "ANSWERS_LIMIT",
    "UnaryAnswer",
    "UnaryTemplate",
    "decode_answer",
    "decode_call",
    "encode_answer",
    "is_unary",
    "room_of",
    "schema_prefix",
]

ANSWERS_LIMIT: Final = 128
"""The most batches that one answer holds."""

_KIND: Final = (keys.KIND, keys.UNARY.encode())
_EXCHANGE: Final = (keys.KIND, b"exchange")
_KEYS: Final = frozenset({keys.BODY})
_ANSWER_KEYS: Final = frozenset({keys.STATUS, keys.ANSWERS})


class UnaryTemplate:
    """What the calls of one kind have in common; ``head`` is that of an exchange."""

    __slots__ = ("body", "head", "headers", "prefix")

    def __init__(self, head: CallHead) -> None:
        """Raises LocalProtocolError for what cannot be sent."""
        headers, payload = head.encode()
        payload[-1] = _padded(payload[-1], sum(map(len, payload)))
        self.head = head
        self.prefix = b"".join(payload)
        """The schemas, with which the payload begins."""
        self.body = len(self.prefix)
        """Where the batch begins."""
        named = [_KIND if pair[0] == keys.KIND else pair for pair in headers]
        self.headers: Headers = (*named, (keys.BODY, b"%d" % self.body))
        """Of the message."""


def is_unary(headers: Headers) -> bool:
    """Whether a message opens a call of one batch, which came with it."""
    return _KIND in headers


def decode_call(
    headers: Headers, payload: ReadableBuffer, *, peer: str = ""
) -> tuple[CallHead, int]:
    """The call that a message opens, and where its batch begins.

    The head is that of an exchange. Raises BadCall that says what is missing or wrong.
    """
    view = memoryview(payload).cast("B")
    values = one_each(headers, _KEYS)
    if keys.BODY not in values:
        raise BadCall(f"the call has no header {keys.BODY.decode()}", peer=peer)
    body = number_of(values[keys.BODY], keys.BODY, most=len(view))
    if body == len(view):
        raise BadCall("a call of the kind unary carries a batch, and none came", peer=peer)
    plain = [
        _EXCHANGE if pair == _KIND else pair
        for pair in headers
        if pair[0] != keys.COMPRESSION  # it has no meaning here
    ]
    return CallHead.decode(plain, view[:body], peer=peer), body


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
    return min(calls.unary_bytes, calls.fragment_bytes)


@by_identity
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
    view = memoryview(payload).cast("B")
    ends = _ends(headers, len(view))
    if ends is None:
        return None
    batches = [view[start:end] for start, end in pairwise(ends)]
    return UnaryAnswer(bytes(view[: ends[0]]), batches)


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
