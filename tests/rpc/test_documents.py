"""Documents: what is no text, no object, of another version or too large is refused by name."""

from __future__ import annotations

import base64
import tracemalloc

import pyarrow as pa
import pytest

from aqueduct.arrow.ipc import serialize_schema
from aqueduct.errors import BadCall
from aqueduct.rpc.documents import object_of, schema_of, text_of


def carried(*texts: str | None) -> pa.RecordBatch:
    return pa.record_batch({"document": pa.array(texts, pa.string())})


def test_a_text_is_found_among_batches_without_rows() -> None:
    assert text_of([carried(), carried("é"), carried()], "it", limit=2) == "é"


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "it is one text, and 0 came"),
        ([carried("a"), carried("b")], "it is one text, and 2 came"),
        ([carried(None)], "it is one text, and null came"),
        ([pa.record_batch({"n": [1]})], r"it is one text, and \(int64\) came"),
        ([pa.record_batch({"a": ["x"], "b": ["y"]})], r"it is one text, and \(string, string\)"),
        ([carried("éé")], r"it has 4 bytes, above the limit of 3 \(Some.bytes\)"),
        ([pa.record_batch({"d": pa.array([b"\xff"]).view(pa.string())})], "it is not UTF-8"),
    ],
)
def test_what_is_no_text(batches: list[pa.RecordBatch], message: str) -> None:
    with pytest.raises(BadCall, match=f"^{message}"):
        text_of(batches, "it", limit=3, name="Some.bytes")


def test_what_is_too_large_is_not_copied() -> None:
    batch = carried("x" * (32 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(BadCall, match="above the limit"):
            text_of([batch], "it", limit=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ('{"version": NaN}', "it is no JSON: NaN is no JSON"),
        ("[]", "it is a list, not an object"),
        ("{}", "it has no 'version' of the type int"),
        ('{"version": true}', "it has no 'version' of the type int"),
        ('{"version": 2}', "it is of version 2, and this side knows 1: give both sides the same"),
    ],
)
def test_what_is_no_object_of_this_version(text: str, message: str) -> None:
    with pytest.raises(BadCall, match=f"^{message}"):
        object_of(text, "it", version=1)
    assert object_of('{"version": 1, "a": 2}', "it", version=1) == {"version": 1, "a": 2}


def test_schemas() -> None:
    schema = pa.schema([("a", pa.int8())])
    assert schema_of(base64.b64encode(serialize_schema(schema)).decode(), "it") == schema
    for text, message in (("*", "it is not base64"), ("é", "it is not base64"), ("AAAA", "it: ")):
        with pytest.raises(BadCall, match=f"^{message}"):
            schema_of(text, "it")
