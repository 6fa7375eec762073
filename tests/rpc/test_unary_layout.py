"""The messages of a call of one batch, byte for byte."""

from __future__ import annotations

import pyarrow as pa
import pytest

from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.ipc import deserialize_schema, serialize_schema
from aqueduct.errors import BadCall
from aqueduct.protocol.common.receiver import Received
from aqueduct.rpc.head_cache import HeadCache
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.unary import (
    ANSWERS_LIMIT,
    UnaryTemplate,
    decode_answer,
    decode_call,
    encode_answer,
    schema_prefix,
)

SCHEMA = pa.schema([("id", pa.int64())])
OTHER = pa.schema([("text", pa.string())])
BATCH = pa.record_batch([pa.array([1, 2, 3])], schema=SCHEMA)
PAYLOAD = b"".join(map(bytes, Encoder(SCHEMA).encode(BATCH).buffers))


@pytest.mark.requirement("AC-56")
def test_a_call_is_an_exchanges_with_a_body():
    question = UnaryTemplate(CallHead("echo", "exchange", schema=SCHEMA, write_key="r"))
    assert question.headers == (
        (b"arrow-call-405c16", b"1"),
        (b"arrow-handler-3c8e32", b"echo"),
        (b"arrow-kind-b4c4e5", b"unary"),
        (b"arrow-run-abde1f", b"r"),
        (b"arrow-body-7f0c2e", b"%d" % question.body),
    )
    plain = serialize_schema(SCHEMA)
    assert question.body % 64 == 0 and question.body - len(plain) < 64
    assert question.prefix[:4] == plain[:4] == b"\xff\xff\xff\xff"
    assert int.from_bytes(question.prefix[4:8], "little") == question.body - 8
    assert question.prefix[8 : len(plain)] == plain[8:]
    assert not any(question.prefix[len(plain) :])
    assert deserialize_schema(question.prefix).equals(SCHEMA)


@pytest.mark.requirement("AC-56")
def test_an_expected_schema_stands_between_and_is_padded_alone():
    question = UnaryTemplate(CallHead("echo", "exchange", schema=SCHEMA, expected=OTHER))
    plain = serialize_schema(SCHEMA)
    assert dict(question.headers)[b"arrow-expected-bc4eec"] == b"%d" % len(plain)
    assert question.prefix[: len(plain)] == plain
    assert question.body % 64 == 0
    again, body = decode_call(question.headers, question.prefix + PAYLOAD)
    assert again.schema == SCHEMA and again.expected == OTHER
    assert again.kind == "exchange" and body == question.body


def received(headers, payload):
    """A message as a connection gives it."""
    return Received(0, headers, (), payload, 0)


def asked(heads, question, payload=PAYLOAD):
    """What ``heads`` read in the message of ``question``."""
    return heads.read(received(question.headers, question.prefix + payload))


def test_what_was_decoded_before_is_found_again_by_all_of_its_bytes():
    heads = HeadCache("peer")
    first = UnaryTemplate(CallHead("echo", "exchange", schema=SCHEMA))
    head, rest = asked(heads, first)
    again, _ = asked(heads, first)
    assert head is again and bytes(rest) == PAYLOAD
    renamed = first.prefix.replace(b"id", b"ix")
    assert renamed != first.prefix
    other, _ = heads.read(received(first.headers, renamed + PAYLOAD))
    assert other.schema is not None and other.schema.names == ["ix"]
    with pytest.raises(BadCall, match="none came"):
        asked(heads, first, b"")


def test_a_message_of_another_kind_brings_no_batch():
    heads = HeadCache("peer")
    head = CallHead("echo", "exchange", schema=SCHEMA)
    headers, payload = head.encode()
    for _ in range(2):
        assert heads.read(received(headers, b"".join(payload))) == (head, None)
    question = UnaryTemplate(head)
    for _ in range(2):
        found, rest = asked(heads, question)
        assert found == head and bytes(rest) == PAYLOAD
    with pytest.raises(BadCall, match="none came"):  # known by its headers, and yet another
        asked(heads, question, b"")


def test_what_each_call_says_of_itself_is_read_each_time():
    heads = HeadCache("peer")
    for number in range(3):
        head = CallHead(
            "echo", "exchange", schema=SCHEMA, write_key=f"r{number}", attempt=str(number)
        )
        for _ in range(2):
            found, rest = asked(heads, UnaryTemplate(head))
            assert found == head and bytes(rest) == PAYLOAD
    other = UnaryTemplate(CallHead("echo", "exchange", schema=OTHER, write_key="r0"))
    assert asked(heads, other)[0].schema == OTHER


def test_what_a_call_says_of_itself_twice_or_wrongly_is_refused_by_name():
    heads = HeadCache("the peer")
    question = UnaryTemplate(CallHead("echo", "exchange", schema=SCHEMA, write_key="r"))
    asked(heads, question)
    for key, value, text in (
        (b"arrow-run-abde1f", b"q", "arrow-run-abde1f is there twice"),
        (b"arrow-attempt-4d8599", b"\xff", "arrow-attempt-4d8599 is not UTF-8"),
        (b"arrow-partition-cf36d2", b"3/3", "is not between 0 and 2"),
        (b"arrow-deadline-84b09e", b"0", "is not between 1 and"),
    ):
        with pytest.raises(BadCall, match=text) as caught:
            heads.read(received((*question.headers, (key, value)), question.prefix + PAYLOAD))
        assert caught.value.peer == "the peer"
        assert caught.value.handler == ("" if "twice" in text else "echo")


def test_what_is_kept_is_bounded():
    heads = HeadCache("peer")
    for number in range(100):
        head = CallHead("echo", "exchange", schema=SCHEMA, token=b"%d" % number)
        for _ in range(2):
            assert asked(heads, UnaryTemplate(head))[0] == head
        assert len(heads._kept) <= 32
    large = UnaryTemplate(
        CallHead("echo", "exchange", schema=SCHEMA, metadata={"a": "b" * (16 << 10)})
    )
    one, _ = asked(heads, large)
    two, _ = asked(heads, large)
    assert one is not two


@pytest.mark.requirement("AC-59")
def test_an_answer_counts_where_each_part_ends():
    prefix = schema_prefix(SCHEMA)
    encoded = [Encoder(SCHEMA).encode(BATCH) for _ in range(3)]
    headers, payload = encode_answer(prefix, encoded)
    size = len(PAYLOAD)
    ends = [len(prefix) + n * size for n in range(4)]
    assert headers == (
        (b"arrow-status-8b3ba8", b"ok"),
        (b"arrow-answers-91d3b6", b",".join(b"%d" % end for end in ends)),
    )
    whole = b"".join(map(bytes, payload))
    assert whole == prefix + PAYLOAD * 3
    answer = decode_answer(headers, whole)
    assert answer is not None and answer.read_schema() == SCHEMA
    assert [Decoder(SCHEMA).decode(part) for part in answer.batches] == [BATCH] * 3


@pytest.mark.requirement("AC-59")
def test_an_answer_without_batches_and_one_with_the_most():
    headers, payload = encode_answer(schema_prefix(SCHEMA), [])
    answer = decode_answer(headers, payload[0])
    assert answer is not None and answer.batches == []
    most = [Encoder(SCHEMA).encode(BATCH) for _ in range(ANSWERS_LIMIT)]
    headers, payload = encode_answer(schema_prefix(SCHEMA), most)
    answer = decode_answer(headers, b"".join(map(bytes, payload)))
    assert answer is not None and len(answer.batches) == ANSWERS_LIMIT
    headers, payload = encode_answer(schema_prefix(SCHEMA), [*most, most[0]])
    with pytest.raises(BadCall, match="more than 128"):
        decode_answer(headers, b"".join(map(bytes, payload)))


def test_other_messages_are_no_answers():
    assert decode_answer(((b"arrow-status-8b3ba8", b"busy"),), b"{}") is None
    assert decode_answer((), b"") is None


def test_an_answer_that_is_longer_or_shorter_than_it_says_is_refused():
    prefix, encoded = schema_prefix(SCHEMA), Encoder(SCHEMA).encode(BATCH)
    headers, payload = encode_answer(prefix, [encoded, encoded])
    whole = b"".join(map(bytes, payload))
    with pytest.raises(BadCall, match="8 bytes follow"):
        decode_answer(headers, whole + bytes(8))
    with pytest.raises(BadCall, match="is not between"):
        decode_answer(headers, whole[:-1])
    assert decode_answer(((b"arrow-status-8b3ba8", b"busy"), headers[1]), whole) is None
    answer = decode_answer((*headers, (b"mine", bytes(1000))), whole)
    assert answer is not None and list(answer.batches) == [PAYLOAD] * 2
