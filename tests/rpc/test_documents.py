"""Documents: what is no text, no object, of another version or too large is refused by name."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.arrow.ipc import serialize_schema
from aqueduct.errors import BadCall
from aqueduct.rpc import documents
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


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)


@pytest.fixture(scope="module")
def in_pieces() -> Iterator[None]:
    """Each text is a long one, and each piece a few characters."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("_LONG", 0), ("_PIECE", 12), ("_SMALL", 5)):
            patch.setattr(documents, name, size)
        yield


@given(VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]), st.sampled_from(["", " \n"]))
@pytest.mark.usefixtures("in_pieces")
def test_a_long_text_is_read_as_a_short_one(
    value: Any, ascii_only: bool, indent: Any, space: str
) -> None:
    text = space + json.dumps(value, ensure_ascii=ascii_only, indent=indent) + space
    assert documents._loads(text) == json.loads(text)


def _refused(name: str) -> None:
    """Python reads NaN and the infinities, which are no JSON."""
    raise ValueError(name)


@given(st.text('[]{}",:1- \nax', max_size=40) | st.text(max_size=10))
@pytest.mark.usefixtures("in_pieces")
def test_what_is_no_json_is_none_in_pieces(text: str) -> None:
    try:
        wanted = json.loads(text, parse_constant=_refused)
    except ValueError:
        with pytest.raises(ValueError):
            documents._loads(text)
    else:
        assert documents._loads(text) == wanted


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"a":[' * 100_000 + "1"])
def test_a_long_text_that_is_too_deep_is_refused(text: str) -> None:
    with pytest.raises(BadCall, match="is no JSON"):
        object_of(text, "it", version=1)


@pytest.mark.parametrize(
    "document",
    [
        {"version": 1, "list": list(range(100_000))},
        {"version": 1, **{f"key {n}": n for n in range(20_000)}},
        {"version": 1, "deep": [[[[[["x" * 40] * 20] * 20] * 20]]]},
        {"version": 1, "one": {"two": [{"three": {str(n): [n] for n in range(10_000)}}]}},
    ],
    ids=["list", "keys", "deep", "receipt"],
)
def test_no_piece_of_a_long_text_is_long(document: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python lets no other thread run while it reads one."""
    sizes: list[int] = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, text: str, at: int = 0) -> tuple[Any, int]:
            value, end = super().raw_decode(text, at)
            sizes.append(end - at)
            return value, end

    monkeypatch.setattr(documents, "_DECODER", Counting())
    assert object_of(json.dumps(document), "it", version=1) == document
    assert max(sizes) <= 4096
    assert len(sizes) > 10
