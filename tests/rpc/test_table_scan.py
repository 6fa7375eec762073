"""Questions to tables, answers and readings: there and back, bounded, and what is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.config import Tables
from aqueduct.errors import BadCall, ConfigError
from aqueduct.rpc.filters import Filter
from aqueduct.rpc.table_scan import (
    ANSWER,
    QUESTION,
    Limit,
    ScanPlan,
    ScanRead,
    ScanRequest,
    offset_text,
    split_text,
)

LIMITS = Tables()
SCHEMA = pa.schema([("a", pa.int64()), pa.field("b", pa.string(), nullable=False)])
TIGHT = Tables(
    question_bytes=400,
    question_parts=20,
    answer_bytes=700,
    filters=2,
    splits=3,
    split_bytes=16,
    offset_bytes=16,
)


def asked(**members):
    document = {"version": 1, "ask": "plan", **members}
    return pa.RecordBatch.from_arrays([pa.array([json.dumps(document)])], schema=QUESTION)


def answered(**members):
    document = {"version": 1, **members}
    return pa.RecordBatch.from_arrays([pa.array([json.dumps(document)])], schema=ANSWER)


@pytest.mark.parametrize(
    "question",
    [
        ScanRequest("schema"),
        ScanRequest("plan", columns=(), filters=(Filter("equal", ("a",), 1),), partitions=7),
        ScanRequest("plan", columns=("a", "é\n")),
        ScanRequest("initial"),
        ScanRequest("latest", start={"row": 1}, limit=Limit(rows=5, until={"row": 9})),
        ScanRequest("latest", start={}, limit=Limit(bytes=1 << 40, files=2)),
        ScanRequest("between", columns=("a",), start={"row": 1}, end={"row": 2}, partitions=1),
        ScanRequest("commit", end={"deep": [{"x": None}, True, 1.5]}),
    ],
)
def test_a_question_there_and_back(question):
    assert ScanRequest.decode(question.encode(LIMITS), LIMITS) == question


@pytest.mark.parametrize(
    "answer",
    [
        ScanPlan(),
        ScanPlan(SCHEMA, streams=True),
        ScanPlan(SCHEMA, taken=("yes", "partly", "no"), splits=(None, 1, "é", {"from": [1, 2.5]})),
        ScanPlan(offset={"row": 2**70}),
    ],
)
def test_an_answer_there_and_back(answer):
    back = ScanPlan.decode(answer.encode(LIMITS), LIMITS)
    assert back == answer
    assert back.schema is None or back.schema.equals(SCHEMA, check_metadata=True)


@pytest.mark.requirement("AC-74")
@pytest.mark.requirement("AC-75")
@pytest.mark.requirement("AC-77")
def test_the_words_of_the_documents():
    question = ScanRequest("latest", start={"row": 1}, limit=Limit(rows=5))
    assert json.loads(question.encode(LIMITS)["question"][0].as_py()) == {
        "version": 1,
        "ask": "latest",
        "columns": None,
        "filters": [],
        "partitions": None,
        "start": {"row": 1},
        "end": None,
        "limit": {"rows": 5, "bytes": None, "files": None, "until": None},
    }
    answer = ScanPlan(SCHEMA, taken=("yes",), splits=("a",))
    document = json.loads(answer.encode(LIMITS)["answer"][0].as_py())
    assert document.pop("schema")["text"] == "a: int64\nb: string not null"
    assert document == {
        "version": 1,
        "streams": False,
        "taken": ["yes"],
        "splits": ["a"],
        "offset": None,
    }
    reading = ScanRead({"file": "x"}, (Filter("is_null", ("a",)),))
    assert reading.encode() == (
        '{"version":1,"split":{"file":"x"},"filters":[{"op":"is_null","column":["a"]}]}'
    )
    assert ScanRead.decode(reading.encode(), LIMITS) == reading


@pytest.mark.requirement("AC-73")
@pytest.mark.requirement("AC-74")
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (asked(ask="guess"), "a table cannot be asked 'guess'; it can be schema, plan, initial"),
        (asked(ask=["plan"]), "a table cannot be asked ['plan']"),
        (asked(version=2), "the question is of version 2, and this side knows 1: give both sides"),
        (asked(columns="a"), "'columns' is list or null, not str"),
        (asked(columns=[1]), "columns are names"),
        (asked(filters={}), "filters are a list, not dict"),
        (asked(filters=[{"op": "is_null", "column": ["a"]}] * 3), "3 filters came, above the li"),
        (asked(partitions=0), "'partitions' is a whole number above zero"),
        (asked(partitions=True), "'partitions' is int or null, not bool"),
        (asked(partitions=2**63), "'partitions' is a whole number above zero"),
        (asked(start=[1]), "'start' is dict or null, not list"),
        (asked(end={"row": "x" * 20}), "'end' has 30 bytes of JSON, above the limit of 16 (Table"),
        (asked(limit=5), "'limit' is dict or null, not int"),
        (asked(limit={"rows": -1}), "'rows' is a whole number above zero"),
        (asked(limit={"until": "z"}), "'until' is dict or null, not str"),
        (asked(more="x" * 1000), "the question has 1"),
        (asked(more=[[]] * 19), "the question has 21 lists and objects, above the limit of 20 (Ta"),
        (asked().slice(0, 0), "the question is one text, and 0 came"),
        (
            pa.RecordBatch.from_arrays([pa.array(["[1]"])], schema=QUESTION),
            "the question is a list, not an object",
        ),
        (pa.RecordBatch.from_arrays([pa.array(["{"])], schema=QUESTION), "the question is no JSON"),
        (
            pa.RecordBatch.from_arrays([pa.array(['{"version":1,"ask":NaN}'])], schema=QUESTION),
            "the question is no JSON: NaN is no JSON",
        ),
        (
            pa.RecordBatch.from_arrays([pa.array(["[" * 300])], schema=QUESTION),
            "the question has 300 lists and objects",
        ),
        (
            pa.RecordBatch.from_arrays([pa.array([b"\xff"]).view(pa.string())], schema=QUESTION),
            "the question is not UTF-8",
        ),
    ],
)
def test_hostile_questions(batch, message):
    with pytest.raises(BadCall) as caught:
        ScanRequest.decode(batch, TIGHT)
    assert str(caught.value).startswith(message)


def test_a_question_that_is_nested_without_end():
    for depth, message in ((LIMITS.question_parts, "is no JSON"), (500_000, "500000 lists and")):
        batch = pa.RecordBatch.from_arrays([pa.array(["[" * depth])], schema=QUESTION)
        with pytest.raises(BadCall, match=f"the question (has )?{message}"):
            ScanRequest.decode(batch, LIMITS)


@pytest.mark.requirement("AC-73")
@pytest.mark.requirement("AC-75")
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (answered(taken=["maybe"]), "what becomes of a filter is one of yes, partly, no"),
        (answered(splits=[1] * 4), "the table has 4 splits, above the limit of 3 (Tables.splits)"),
        (answered(splits=[1, "x" * 20]), "split 1 has 22 bytes of JSON, above the limit of 16 ("),
        (answered(streams="yes"), "'streams' is bool or null, not str"),
        (answered(offset={"row": "x" * 20}), "'offset' has 30 bytes of JSON, above the limit of"),
        (answered(schema={"ipc": 1}), "the schema of the answer has no 'ipc'"),
        (answered(schema={"ipc": "é"}), "the schema of the answer is not base64"),
        (answered(schema={"ipc": "AAAA"}), "the schema of the answer: not a schema"),
        (answered(schema=[]), "'schema' is dict or null, not list"),
        (answered(more="x" * 2000), "the answer has 2"),
    ],
)
def test_hostile_answers(batch, message):
    with pytest.raises(BadCall) as caught:
        ScanPlan.decode(batch, TIGHT)
    assert str(caught.value).startswith(message)


@pytest.mark.requirement("AC-77")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "the call has no 'aqueduct-read' in its metadata: which split?"),
        ("", "the reading of a split is no JSON"),
        ("{}", "the reading of a split has no 'version' of the type int"),
        ('{"version":1,"split":"' + "x" * 20 + '"}', "the split has 22 bytes of JSON, above the"),
        ('{"version":1,"filters":3}', "filters are a list, not int"),
    ],
)
def test_hostile_readings(text, message):
    with pytest.raises(BadCall) as caught:
        ScanRead.decode(text, TIGHT)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", [{1, 2}, object(), float("nan"), {"a": b"x"}])
def test_what_has_no_form_in_json(value):
    with pytest.raises(BadCall, match="split 3 has no form in JSON"):
        split_text(value, LIMITS, "split 3")
    with pytest.raises(BadCall, match=r"the offset is a dict, not|has no form in JSON"):
        offset_text(value, LIMITS, "the offset")


@pytest.mark.requirement("AC-73")
def test_too_large_to_be_sent():
    with pytest.raises(ConfigError, match=r"above the limit of 400 \(Tables.question_bytes\)"):
        ScanRequest("plan", columns=tuple("column" + str(n) for n in range(50))).encode(TIGHT)
    with pytest.raises(BadCall, match=r"above the limit of 700 \(Tables.answer_bytes\)"):
        ScanPlan(SCHEMA, splits=("x" * 100,) * 7).encode(TIGHT)


@pytest.mark.parametrize("name", sorted(Tables.__slots__))
def test_limits_are_above_zero(name):
    with pytest.raises(ConfigError, match=f"Tables.{name} is 0; it must be above zero"):
        replace(LIMITS, **{name: 0})


@given(
    st.dictionaries(
        st.sampled_from(
            ["ask", "columns", "filters", "partitions", "start", "end", "limit", "schema", "offset"]
        ),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=4) | st.booleans() | st.just("plan"),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
            max_leaves=5,
        ),
    )
)
def test_any_document_is_one_or_a_bad_call(members):
    try:
        question = ScanRequest.decode(asked(**members), LIMITS)
    except BadCall:
        pass
    else:
        assert ScanRequest.decode(question.encode(LIMITS), LIMITS) == question
    try:
        answer = ScanPlan.decode(answered(**members), LIMITS)
    except BadCall:
        return
    assert ScanPlan.decode(answer.encode(LIMITS), LIMITS) == answer
