"""The documents of writes: there and back, and whatever strangers make of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.errors import BadCall
from aqueduct.rpc.sink_commit import (
    Attempt,
    PreparedAttempt,
    Receipt,
    Settlement,
    SinkDescription,
    WriteKey,
    document_of,
    to_batch,
)

LIMIT = 1 << 20
KEYS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=64)
NUMBERS = st.integers(0, (1 << 63) - 1)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
RUNS = st.builds(WriteKey, KEYS, st.booleans())
ATTEMPTS = st.builds(Attempt, RUNS, execution=KEYS, stage=NUMBERS, partition=NUMBERS, task=NUMBERS)


@given(ATTEMPTS)
def test_an_attempt_there_and_back(attempt: Attempt) -> None:
    assert Attempt.from_json(attempt.to_json()) == attempt


@given(RUNS, st.lists(st.tuples(NUMBERS, JSON), max_size=5, unique_by=lambda each: each[0]))
def test_a_settlement_there_and_back(write_key: WriteKey, entries: list[tuple[int, Any]]) -> None:
    prepared = tuple(
        PreparedAttempt(Attempt(write_key, partition=number, task=7), receipt)
        for number, receipt in entries
    )
    for execution, note in ((None, None), ("e", {"at": 7})):
        settlement = Settlement(write_key, prepared, execution, note)
        batch = to_batch(settlement.to_json())
        assert Settlement.from_json([batch], limit=LIMIT) == settlement


@given(JSON, NUMBERS, NUMBERS)
def test_a_receipt_there_and_back(receipt: Any, batches: int, rows: int) -> None:
    made = Receipt(receipt, batches, rows)
    assert Receipt.from_json(made.to_json(limit=LIMIT), limit=LIMIT) == made


@pytest.mark.parametrize("schema", [None, pa.schema([("id", pa.int64()), ("t", pa.string())])])
def test_a_description_there_and_back(schema: pa.Schema | None) -> None:
    made = SinkDescription(schema, 7.5)
    assert SinkDescription.from_json(made.to_json(), limit=LIMIT) == made


@given(ATTEMPTS, ATTEMPTS)
def test_ids_are_names_of_files_and_differ(one: Attempt, other: Attempt) -> None:
    for found in (one.id, one.write_key.id):
        assert re.fullmatch("[0-9a-f]{32}", found)
    fields = ("execution", "stage", "partition", "task")
    same = one.write_key.key == other.write_key.key and all(
        getattr(one, name) == getattr(other, name) for name in fields
    )
    assert (one.id == other.id) is same
    assert (one.write_key.id == other.write_key.id) is (one.write_key.key == other.write_key.key)


def test_overwriting_is_no_part_of_an_id() -> None:
    assert WriteKey("a").id == WriteKey("a", overwrite=True).id


@pytest.mark.requirement("AC-86")
def test_ids_stay_what_they_are() -> None:
    """Sinks have files and tables by these names, which an update of the library must find."""
    attempt = Attempt(WriteKey("run"), execution="e", stage=1, partition=2, task=3)
    assert attempt.write_key.id == "acba25512100f80b56fc3ccd14c65be5"
    assert attempt.id == "443edddb74c5853dd0b6fb24289b50ff"


@pytest.mark.requirement("AC-83")
@given(JSON, st.sampled_from([Attempt, Settlement, Receipt, SinkDescription]))
def test_any_json_is_a_document_or_a_bad_call(document: Any, kind: Any) -> None:
    if isinstance(document, dict):
        document = {"version": 1, **document}
    _read(kind, json.dumps(document))


@given(
    st.sampled_from([Attempt, Settlement, Receipt, SinkDescription]),
    st.sampled_from(
        ["version", "run", "overwrite", "execution", "attempts", "receipt", "schema", "rows"]
    ),
    JSON,
)
def test_any_member_replaced_is_a_document_or_a_bad_call(kind: Any, name: str, value: Any) -> None:
    attempt = Attempt(WriteKey("run"))
    whole: dict[str, Any] = {
        **json.loads(attempt.to_json()),
        **json.loads(Settlement(attempt.write_key, (PreparedAttempt(attempt, 1),)).to_json()),
        **json.loads(Receipt(1, 2, 3).to_json(limit=LIMIT)),
        **json.loads(SinkDescription(pa.schema([("id", pa.int64())]), 1.0).to_json()),
    }
    _read(kind, json.dumps(whole))
    _read(kind, json.dumps({**whole, name: value}))
    _read(kind, json.dumps({key: each for key, each in whole.items() if key != name}))


@given(st.text())
def test_any_text_is_a_bad_call(text: str) -> None:
    for kind in (Attempt, Settlement, Receipt, SinkDescription):
        _read(kind, text)


def _read(kind: Any, text: str) -> None:
    try:
        kind.from_json(text) if kind is Attempt else kind.from_json(text, limit=LIMIT)
    except BadCall:
        pass


@pytest.mark.requirement("AC-83")
@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object(), [float("inf")]])
def test_what_json_cannot_hold(value: Any) -> None:
    with pytest.raises(BadCall, match="a receipt cannot be written as JSON"):
        Receipt(value, 0, 0).to_json(limit=LIMIT)
    prepared = PreparedAttempt(Attempt(WriteKey("run")), value)
    with pytest.raises(BadCall, match="a receipt cannot be written as JSON"):
        Settlement(prepared.attempt.write_key, (prepared,)).to_json()


def test_a_receipt_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(BadCall, match="cannot be written as JSON"):
        Receipt(endless, 0, 0).to_json(limit=LIMIT)


@pytest.mark.parametrize(
    ("schema", "text"), [(7, "no 'schema'"), ("*", "not base64"), ("AAAA", "its schema")]
)
def test_a_description_with_no_schema_in_its_schema(schema: Any, text: str) -> None:
    document = {"version": 1, "schema": schema, "time_to_live": 1}
    with pytest.raises(BadCall, match=text):
        SinkDescription.from_json(json.dumps(document), limit=LIMIT)


def test_no_rows_are_no_document() -> None:
    with pytest.raises(BadCall, match="x is one text, and 0 came"):
        document_of([], "x", limit=LIMIT)
