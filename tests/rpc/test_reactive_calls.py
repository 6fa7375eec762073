"""Calls in requests of ReactiveSocket: headers, bodies, items and errors, read with suspicion."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aqueduct._speedups.base import varint
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.json_rows import fits_json
from aqueduct.errors import (
    BadCall,
    BatchTooLarge,
    Busy,
    CallError,
    Cancelled,
    HandlerFailed,
    Refused,
    UnknownHandler,
)
from aqueduct.rpc.reactive_calls import (
    JSON,
    ReactiveDefaults,
    ReactiveItems,
    ReactiveRequests,
    decode_error,
    encode_error,
    encode_request,
    encode_setup,
    is_call_given_up,
    one_batch,
    split_rows,
)
from aqueduct.rpc.request import CallHead, Partition
from aqueduct.rpc.status import Status
from aqueduct.rpc.unary import schema_prefix
from tests.arrow.strategies import shown_rightly, streams

WORDS = pa.schema([("word", pa.string())])
BATCH = pa.record_batch({"word": ["a", "bb"]}, schema=WORDS)
END = b"\xff\xff\xff\xff\0\0\0\0"


def block(*pairs):
    inner = b"".join(varint.encode(len(part)) + part for pair in pairs for part in pair)
    return varint.encode(len(inner)) + inner


def stream_of(*batches, end=True):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data = sink.getvalue().to_pybytes()
    return data if end else data[: -len(END)]


def read(data, kind=None, **said):
    return ReactiveRequests(ReactiveDefaults(**said), "peer").read(kind, memoryview(data))


def test_a_request_says_what_a_call_says():
    head = CallHead(
        "count",
        "exchange",
        schema=WORDS,
        deadline=1.5,
        write_key="k",
        attempt="2",
        token=b"\xff",
        partition=Partition(1, 3),
        metadata={"region": "é"},
    )
    data = b"".join(encode_request(head, Encoder(WORDS).encode(BATCH)))
    found, format, rest = read(data)
    assert (found, format) == (head, "arrow")
    schema, batch = data[: -len(rest)], bytes(rest)
    assert len(schema) % 64 == 0
    assert pa.ipc.open_stream(schema_prefix(WORDS) + batch).read_all().to_batches() == [BATCH]


@given(st.integers(0, 300))
def test_the_body_begins_where_arrow_reads_it_in_place(size):
    head = CallHead("h", "exchange", schema=WORDS, metadata={"a": "x" * size})
    payload = Encoder(WORDS).encode(BATCH)
    data = b"".join(encode_request(head, payload))
    assert (len(data) - payload.size) % 64 == 0
    assert read(data)[0] == head


def test_a_request_without_a_body_asks_a_source():
    head = CallHead("all", "source")
    assert read(b"".join(encode_request(head))) == (head, "arrow", memoryview(b""))
    with pytest.raises(BadCall, match="the request has no body, and a batch is wanted there"):
        read(b"".join(encode_request(head)), "sink")


def test_heads_that_came_before_are_the_same_object():
    requests = ReactiveRequests(ReactiveDefaults(), "peer")
    data = block((b"handler", b"h")) + stream_of(BATCH)
    first, _, rest = requests.read(None, memoryview(data))
    again, _, other = requests.read(None, memoryview(data))
    assert first is again
    assert rest == other
    sink, _, _ = requests.read("sink", memoryview(data))
    assert sink.kind == "sink"
    longer = block((b"handler", b"h"), (b"x", b"y" * 200)) + stream_of(BATCH)
    assert requests.read(None, memoryview(longer))[0] == first
    for number in range(100):
        data = block((b"handler", b"h%d" % number)) + stream_of(BATCH)
        assert requests.read(None, memoryview(data))[0].handler == f"h{number}"


def test_json_has_no_schema_in_the_request():
    data = block((b"handler", b"h"), (b"format", b"json")) + b'[{"word":"a"}]'
    head, format, rest = read(data)
    assert (head.kind, head.schema, format) == ("exchange", None, JSON)
    assert rest == b'[{"word":"a"}]'
    assert read(block((b"handler", b"h")) + b"[]", format=JSON)[1] == JSON
    assert read(block((b"handler", b"h"), (b"format", b"arrow")), format=JSON)[1] == "arrow"


def test_the_setup_says_what_requests_leave_out():
    said = ReactiveDefaults.decode(encode_setup(format=JSON, token=b"t"))
    assert said == ReactiveDefaults(JSON, b"t")
    assert encode_setup() == b""
    assert ReactiveDefaults.decode(b"") == ReactiveDefaults()
    assert read(block((b"handler", b"h")), token=b"t")[0].token == b"t"
    assert read(block((b"handler", b"h"), (b"token", b"own")), token=b"t")[0].token == b"own"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (block((b"format", b"xml")), "the format is b'xml'; there are arrow and json"),
        (block((b"token", b"a"), (b"token", b"b")), "the header token is there twice"),
        (block((b"token", b"a")) + b"x", "1 bytes follow the headers of the SETUP"),
        (b"\xff", "the headers cannot be read"),
        (b"\x05ab", "the headers have 5 bytes, and 2 came"),
    ],
)
def test_a_setup_that_cannot_be_read_is_refused(data, says):
    with pytest.raises(BadCall, match=says):
        ReactiveDefaults.decode(data)


H = (b"handler", b"h")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the headers cannot be read"),
        (b"GET / HTTP/1.1\r\n", "the headers have 71 bytes, and 15 came"),
        (varint.encode(1 << 20) + bytes(1 << 20), "above the limit of 65536 .Limits.header_bytes"),
        (block((b"", b"x")), "the headers cannot be read: .*empty key"),
        (block((b"x", b"y")), "the call has no header handler"),
        (block((b"handler", b"\xff")), "the header handler is not UTF-8"),
        (block((b"handler", b"")), "'' cannot be the name of a handler"),
        (block(H, H), "the header handler is there twice"),
        (block(H, (b"deadline", b"0")), "the header deadline is 0, which is not between"),
        (block(H, (b"arguments", b"[]")), "the header arguments is not a JSON object of strings"),
        (block(H, (b"partition", b"3/2")), "the header partition is 3"),
        (block(H, (b"format", b"csv")), "the format is b'csv'"),
        (block(H) + b"[]", "the body is no Arrow IPC stream: .* 'format' with the value 'json'"),
        (block(H) + stream_of(BATCH)[:40], "the schema of the body has [0-9]+ bytes, and 40 came"),
        (block(H) + b"\xff\xff\xff\xff\x08\0\0\0" + bytes(8), "the input schema: not a schema"),
    ],
)
def test_requests_that_cannot_be_read_are_refused(data, says):
    with pytest.raises(BadCall, match=says) as caught:
        read(data)
    assert caught.value.peer == "peer"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_bad_call(data):
    for given_ in (data, block(H) + data, block(H, (b"format", b"json")) + data):
        try:
            read(given_)
        except BadCall:
            pass


def test_the_end_marker_is_cut_off_and_nothing_else():
    rest = stream_of(BATCH)[len(WORDS.serialize()) :]
    assert one_batch(memoryview(rest)) == rest[: -len(END)]
    assert one_batch(memoryview(rest[: -len(END)])) == rest[: -len(END)]
    looks = pa.record_batch({"n": pa.array([0] * 7 + [0xFFFFFFFF], pa.int64())})
    body = stream_of(looks, end=False)[len(looks.schema.serialize()) :]
    assert body.endswith(END)
    assert one_batch(memoryview(body)) == body
    assert one_batch(memoryview(body + END)) == body
    assert not len(one_batch(memoryview(END)))


@given(st.binary(max_size=100))
def test_what_is_cut_off_is_at_most_an_end_marker(data):
    found = one_batch(memoryview(data + END))
    assert found in (data, data + END)


@given(streams(dictionaries=True))
def test_items_are_a_stream_together(batches):
    schema = batches[0].schema
    try:
        fits_json(schema)
    except BadCall:  # names that repeat: Python cannot show its rows either
        assume(False)
    encoder, items = Encoder(schema), ReactiveItems(handler="h")
    parts = []
    for number, batch in enumerate(batches):
        payload = b"".join(encoder.encode(batch).buffers)
        item = payload if number else schema_prefix(schema) + payload
        parts.append(item)
        found = items.read(item)
        assert found.to_pylist() == batch.to_pylist() or not shown_rightly(schema)
    assert items.schema == schema
    together = pa.ipc.open_stream(b"".join(parts))
    found = [each.to_pylist() for each in together]
    assert found == [each.to_pylist() for each in batches] or not shown_rightly(schema)


def test_items_that_cannot_be_read_say_whose_they_are():
    with pytest.raises(BadCall, match="the answers of handler 'h': the item is no Arrow") as caught:
        ReactiveItems(handler="h").read(b"[]")
    assert "header" not in str(caught.value)  # which is for those who ask
    with pytest.raises(BadCall, match="the item is no Arrow IPC stream: it has no bytes"):
        ReactiveItems(handler="h").read(b"")
    items = ReactiveItems(handler="h")
    items.read(stream_of(BATCH))
    with pytest.raises(BadCall, match="batch 1 of the answers of handler 'h' cannot be read"):
        items.read(b"x" * 16)


@pytest.mark.parametrize("end", [b"", END])
def test_an_item_may_be_the_schema_alone(end):
    items = ReactiveItems(handler="h")
    batch = items.read(schema_prefix(WORDS) + end)
    assert (batch.num_rows, batch.schema, items.schema) == (0, WORDS, WORDS)


def test_a_batch_above_the_frame_names_the_limit():
    payload = Encoder(WORDS).encode(BATCH)
    head = CallHead("h", "exchange", schema=WORDS)
    size = sum(map(len, encode_request(head, payload)))
    assert encode_request(head, payload, most=size)
    with pytest.raises(BatchTooLarge, match=f"{size} bytes, .* limit of {size - 1} .*frame_bytes"):
        encode_request(head, payload, most=size - 1)


def test_rows_are_split_evenly():
    batch = pa.record_batch({"n": pa.array(range(10))})
    assert [part.num_rows for part in split_rows(batch, 100, 100)] == [10]
    assert [part.num_rows for part in split_rows(batch, 100, 30)] == [3, 3, 3, 1]
    assert [part.num_rows for part in split_rows(batch, 1000, 1)] == [1] * 10
    assert pa.Table.from_batches(split_rows(batch, 100, 30)).equals(pa.table(batch))


@pytest.mark.parametrize(
    ("error", "word", "kind"),
    [
        (UnknownHandler("no handler 'x'"), "APPLICATION_ERROR", UnknownHandler),
        (Busy("256 calls"), "REJECTED", Busy),
        (BadCall("no"), "INVALID", BadCall),
        (HandlerFailed("raised ValueError: a: b"), "APPLICATION_ERROR", HandlerFailed),
        (Cancelled("gone"), "CANCELED", Cancelled),
    ],
)
def test_an_error_is_a_word_a_code_and_a_text(error, word, kind):
    found, text = encode_error(Status.from_exception(error))
    assert found == word
    again = decode_error(text, peer="p", handler="h")
    assert type(again) is kind
    assert str(again) == f"handler 'h' at p: {error}"


def test_an_error_of_other_programs_is_an_error_of_the_call():
    assert type(decode_error("Sorry: no")) is CallError
    assert "Sorry: no" in str(decode_error("Sorry: no"))
    assert "all is well" in str(decode_error("ok: fine"))


def test_a_service_that_is_ending_says_so():
    status = Status("refused", message="it ends", draining=True)
    word, text = encode_error(status)
    assert (word, text) == ("REJECTED", "draining: it ends")
    error = decode_error(text, peer="peer", handler="x", batch=3)
    assert isinstance(error, Refused)
    assert error.draining and error.batch == 3
    assert str(error) == "handler 'x' at peer, batch 3: it ends"
    again = decode_error(encode_error(Status("refused", message="no"))[1])
    assert isinstance(again, Refused) and not again.draining


@pytest.mark.parametrize(
    "status",
    [Status("busy", message="m"), Status("refused", message="m", draining=True)],
)
def test_what_has_begun_is_cancelled_and_not_rejected(status):
    word, text = encode_error(status, begun=True)
    assert word == "CANCELED"
    assert is_call_given_up(text)
    assert encode_error(status) == ("REJECTED", text)
    assert type(decode_error(text)) is {"busy": Busy, "refused": Refused}[status.code]
    assert not is_call_given_up("this side closes the connection")
