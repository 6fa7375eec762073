"""What is done to batches on their way: merged, cast, answered with nulls, left out."""

from __future__ import annotations

import datetime
import decimal
import logging

import pyarrow as pa
import pytest

from aqueduct.errors import BadCall, ConfigError, HandlerFailed, SchemaMismatch
from aqueduct.rpc.request import ONE_TO_ONE
from spark_udfs import exchange
from spark_udfs.calls.partition import BatchAnswer
from spark_udfs.functions.casts import Casting
from spark_udfs.functions.columns import ColumnShape, Shaper, merged
from tests.spark.services import NUMBERS, WORDS

NOBODY = "aqueduct://127.0.0.1:9"


def numbers(*counts):
    batches, start = [], 0
    for count in counts:
        batches.append(pa.record_batch({"id": range(start, start + count)}, schema=NUMBERS))
        start += count
    return batches


@pytest.fixture
def address(service, running):
    with running(service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as address:
        yield address


# Merging


@pytest.mark.parametrize(
    ("counts", "limits", "wanted"),
    [
        ([1, 1, 1, 1, 1], {"rows": 2}, [2, 2, 1]),
        ([3, 3, 3], {"rows": 5}, [3, 3, 3]),
        ([1, 9, 1, 1], {"rows": 5}, [1, 9, 2]),
        ([5, 5], {"rows": 5}, [5, 5]),
        ([0, 0, 0], {"rows": 5}, [0]),
        ([0, 4, 0, 1, 0], {"rows": 5}, [5, 0]),
        ([1, 1, 1, 1], {"size": 16}, [2, 2]),
        ([1, 1, 1, 1], {"rows": 3, "size": 16}, [2, 2]),
        ([1, 1, 1, 1], {"rows": 2, "size": 1 << 20}, [2, 2]),
        ([], {"rows": 2}, []),
    ],
)
def test_batches_are_merged_up_to_a_size(counts, limits, wanted):
    found = list(merged(iter(numbers(*counts)), **limits))
    assert [batch.num_rows for batch in found] == wanted
    values = pa.Table.from_batches(found, schema=NUMBERS)["id"].to_pylist()
    assert values == list(range(sum(counts)))
    assert all(batch.schema == NUMBERS for batch in found)


def test_a_large_batch_is_not_copied():
    batches = numbers(1, 1000)
    found = list(merged(iter(batches), rows=100))
    assert found[1] is batches[1]


def test_merging_reads_no_further_than_its_limit():
    read = []

    def source():
        for batch in numbers(*[1] * 10):
            read.append(batch)
            yield batch

    found = merged(source(), rows=3)
    next(found)
    assert len(read) == 3


def test_batches_without_columns_pass():
    bare = pa.RecordBatch.from_struct_array(pa.array([{}] * 5, pa.struct([])))
    assert [batch.num_rows for batch in merged(iter([bare, bare]), rows=100)] == [5, 5]


def test_dictionaries_that_differ_become_one():
    kind = pa.schema([("colour", pa.dictionary(pa.int8(), pa.string()))])
    colours: list[list] = [["red", "blue"], ["blue", None], ["green"]]
    batches = [pa.record_batch([pa.array(c, kind.field(0).type)], schema=kind) for c in colours]
    (found,) = merged(iter(batches), rows=100)
    assert found["colour"].to_pylist() == [value for each in colours for value in each]


def test_tiny_batches_travel_as_one(address, service):
    call = exchange(address, "double", merge_rows=100)
    (answer,) = call(iter(numbers(*[1] * 60)))
    assert answer["id"].to_pylist() == list(range(0, 120, 2))
    assert service.counters()["batches_in"] == 1


def test_merged_rows_are_joined(address, service):
    rows = [
        pa.record_batch({"id": batch["id"], "more": ["x"] * batch.num_rows})
        for batch in numbers(*[1] * 10)
    ]
    call = exchange(address, "double", merge_bytes="1k", columns="id", columns_mode="replace")
    (answer,) = call(iter(rows))
    assert answer.to_pydict() == {"id": list(range(0, 20, 2)), "more": ["x"] * 10}


# Casts


def test_input_is_cast_to_what_the_handler_declares(address):
    batch = pa.record_batch(
        {"WORD": pa.array(["a", "b"], pa.large_string()), "id": pa.array([1, 2], pa.int16())}
    )
    with pytest.raises(SchemaMismatch):
        list(exchange(address, "words")(iter([batch])))
    (answer,) = exchange(address, "words", cast=True)(iter([batch]))
    assert answer.schema == WORDS
    assert answer.to_pydict() == {"id": [1, 2], "word": ["a", "b"]}


def test_input_is_cast_to_what_is_declared_for_it(address):
    call = exchange(address, "echo", cast=True, input_schema=NUMBERS)
    (answer,) = call(iter([pa.record_batch({"id": pa.array(["7", "8"])})]))
    assert answer == pa.record_batch({"id": [7, 8]}, schema=NUMBERS)


def test_a_handler_that_takes_anything_gets_it_as_it_is(address):
    batch = pa.record_batch({"x": pa.array([1.5], pa.float32())})
    (answer,) = exchange(address, "echo", cast=True)(iter([batch]))
    assert answer == batch


def test_answers_are_cast_to_what_is_declared(address):
    wanted = pa.schema([("id", pa.string())])
    call = exchange(address, "double", cast=True, schema=wanted)
    (answer,) = call(iter(numbers(2)))
    assert answer == pa.record_batch({"id": ["0", "2"]}, schema=wanted)


@pytest.mark.parametrize(
    ("wanted", "values", "text"),
    [
        (
            pa.int64(),
            ["1", "2", "x3"],
            (
                "column 'a': wanted int64, got string, and the value 'x3' in row 2 of batch 1 "
                "cannot be cast: "
            ),
        ),
        (
            pa.int8(),
            [1, 300, 2, 400],
            (
                "column 'a': wanted int8, got int64, and the value 300 in row 1 of batch 1 "
                "cannot be cast: "
            ),
        ),
        (
            pa.int32(),
            [1.0, 2.5],
            (
                "column 'a': wanted int32, got double, and the value 2.5 in row 1 of batch 1 "
                "cannot be cast: "
            ),
        ),
        (
            pa.decimal128(4, 2),
            [decimal.Decimal("1.5"), decimal.Decimal("123.4")],
            (
                "column 'a': wanted decimal128(4, 2), got decimal128(4, 1), and the value "
                "Decimal('123.4') in row 1 of batch 1 cannot be cast: "
            ),
        ),
        (
            pa.timestamp("s"),
            [datetime.datetime(2026, 1, 2, 3, 4, 5, 6)],
            (
                "column 'a': wanted timestamp[s], got timestamp[us], and the value "
                "datetime.datetime(2026, 1, 2, 3, 4, 5, 6) in row 0 of batch 1 cannot be cast: "
            ),
        ),
    ],
    ids=["text", "range", "fraction", "decimal", "time"],
)
def test_a_value_that_cannot_be_cast_is_named(address, wanted, values, text):
    batch = pa.record_batch({"a": pa.array(values)})
    good = batch.slice(0, 0)
    call = exchange(address, "echo", cast=True, input_schema=pa.schema([("a", wanted)]))
    with pytest.raises(SchemaMismatch) as caught:
        list(call(iter([good, batch])))
    assert str(caught.value).startswith(f"the input of handler 'echo': {text}")
    assert (caught.value.column, caught.value.wanted) == ("a", str(wanted))


def test_a_null_where_none_may_be_is_named(address):
    call = exchange(address, "certain", cast=True)
    assert len(list(call(iter(numbers(3))))) == 1  # nullable, and without a null
    with pytest.raises(SchemaMismatch) as caught:
        list(call(iter([pa.record_batch({"id": pa.array([1, None])})])))
    assert str(caught.value).startswith(
        "the input of handler 'certain': column 'id': wanted int64 not null, got int64, and row 1 "
        "of batch 0 is null"
    )


@pytest.mark.parametrize(
    ("got", "wanted", "values", "column"),
    [
        (
            pa.list_(pa.int64()),
            pa.list_(pa.field("item", pa.int64(), nullable=False)),
            [[1], None, [2, None]],
            "a.item",
        ),
        (
            pa.struct([("x", pa.list_(pa.int64()))]),
            pa.struct([("x", pa.list_(pa.field("item", pa.int64(), nullable=False)))]),
            [None, {"x": [1]}, {"x": [None]}],
            "a.x.item",
        ),
        (
            pa.map_(pa.string(), pa.int64()),
            pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False)),
            [None, [("a", 1)], [("b", None)]],
            "a.value",
        ),
    ],
    ids=["list", "struct", "map"],
)
def test_a_null_inside_where_none_may_be_is_named(got, wanted, values, column):
    loose = pa.array(values, got)
    casting = Casting(pa.schema([("a", wanted)]), pa.schema([("a", got)]), where="here")
    good = pa.record_batch({"a": loose.slice(0, 2)})
    assert casting.one(good, 0)["a"].to_pylist() == good["a"].to_pylist()
    with pytest.raises(SchemaMismatch) as caught:
        casting.one(pa.record_batch({"a": loose}), 1)
    assert str(caught.value) == (
        f"here: column {column!r}: wanted int64 not null, got int64, and row 2 of batch 1 holds a "
        "null"
    )
    assert caught.value.column == column


def test_where_no_cast_leads_nothing_is_sent(address, service):
    batch = pa.record_batch({"id": pa.array([[1]])})
    with pytest.raises(SchemaMismatch) as caught:
        list(exchange(address, "double", cast=True)(iter([batch])))
    assert str(caught.value).startswith(
        "the input of handler 'double': column 'id' has another type: wanted int64, got "
        "list<item: int64>; there is no cast: build it as int64, or change what is declared"
    )
    assert service.counters()["rows_in"] == 0


def test_columns_too_many_are_not_dropped(address):
    batch = pa.record_batch({"id": [1], "more": [2]})
    with pytest.raises(SchemaMismatch, match="column 'more' is not wanted"):
        list(exchange(address, "double", cast=True)(iter([batch])))


def test_zones_and_inner_names_need_no_cast():
    got = pa.schema([("t", pa.timestamp("us", "Europe/Zurich")), ("l", pa.list_(pa.int64()))])
    inner = pa.list_(pa.field("element", pa.int64()))
    wanted = pa.schema([("t", pa.timestamp("us", "UTC")), ("l", inner)])
    casting = Casting(wanted, got, where="here")
    batch = pa.record_batch([pa.array([0], got.field(0).type), pa.array([[1]])], schema=got)
    assert casting.schema == got
    assert casting.one(batch, 0)["l"].buffers()[3].address == batch["l"].buffers()[3].address


# Failures


def failed(number):
    return BatchAnswer(
        number, None, HandlerFailed(f"batch {number}: ValueError: no", kind="ValueError")
    )


def shaped(shape, answers, rows, *, opened):
    """What comes of ``answers`` to ``rows``."""
    shaper = Shaper(shape, rows[0].schema, handler="h")

    def call(batches, schema):
        assert len(list(batches)) == len(rows)
        shaper.opened(opened, frozenset({ONE_TO_ONE}))
        yield from answers

    return list(shaper.run(iter(rows), call))


SCORES = pa.schema([pa.field("score", pa.float64(), nullable=False)])


def scores(*values):
    return pa.record_batch({"score": pa.array(values, pa.float64())}, schema=SCORES)


def test_rows_of_a_failed_batch_stay_with_nulls_and_the_reason(caplog):
    shape = ColumnShape(columns=("id",), on_error="null", error_column="why")
    answers = [BatchAnswer(0, scores(0.5, 1.5)), failed(1), BatchAnswer(2, scores(2.5))]
    found = pa.Table.from_batches(shaped(shape, answers, numbers(2, 2, 1), opened=SCORES))
    reason = "HandlerFailed: batch 1: ValueError: no"
    assert found.to_pydict() == {
        "id": [0, 1, 2, 3, 4],
        "score": [0.5, 1.5, None, None, 2.5],
        "why": [None, None, reason, reason, None],
    }
    assert found.schema.field("score").nullable
    assert [record.getMessage() for record in caplog.records] == [
        "the rows of batch 1 are kept with nulls: batch 1: ValueError: no",
        "batches that handler 'h' failed on: 1; nulls instead",
    ]


def test_without_columns_as_many_rows_of_nulls_come():
    answers = [failed(0), BatchAnswer(1, scores(1.5))]
    found = shaped(ColumnShape(on_error="null"), answers, numbers(2, 1), opened=SCORES)
    assert [batch["score"].to_pylist() for batch in found] == [[None, None], [1.5]]
    assert len({batch.schema for batch in found}) == 1


def test_replaced_columns_are_null_too():
    shape = ColumnShape(columns=("id",), mode="replace", on_error="null")
    (found,) = shaped(shape, [failed(0)], numbers(2), opened=NUMBERS)
    assert found.to_pydict() == {"id": [None, None]}


def test_rows_of_a_failed_batch_are_left_out(caplog):
    shape = ColumnShape(columns=("id",), on_error="skip")
    answers = [failed(0), BatchAnswer(2, scores(2.5)), failed(1)]
    (found,) = shaped(shape, answers, numbers(2, 2, 1), opened=SCORES)
    assert found.to_pydict() == {"id": [4], "score": [2.5]}
    assert caplog.records[-1].getMessage() == (
        "batches that handler 'h' failed on: 2; their rows are left out"
    )


def test_not_every_failure_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        shaped(
            ColumnShape(on_error="skip"),
            [failed(n) for n in range(30)],
            numbers(*[1] * 30),
            opened=SCORES,
        )
    assert len(caplog.records) == 11


def test_a_batch_without_an_answer_is_an_error_too():
    with pytest.raises(BadCall, match="gave no answer to 1 of its batches, the first of them"):
        shaped(ColumnShape(on_error="skip"), [failed(0)], numbers(1, 1), opened=SCORES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"error_column": "why"},
            (
                "error_column='why' needs on_error='null', and it is 'fail': no other keeps the "
                "rows that failed"
            ),
        ),
        (
            {"error_column": "why", "on_error": "skip"},
            (
                "error_column='why' needs on_error='null', and it is 'skip': no other keeps the "
                "rows that failed"
            ),
        ),
        (
            {"on_error": "null", "schema": SCORES},
            (
                "on_error='null' writes nulls where a batch failed, and schema declares column "
                "'score' as double not null; declare it nullable, or take on_error='skip'"
            ),
        ),
    ],
)
def test_what_does_not_go_together_fails_on_the_driver(options, message):
    with pytest.raises(ConfigError) as caught:
        exchange(NOBODY, "x", **options)
    assert str(caught.value) == message


def test_the_error_column_must_have_a_name_of_its_own():
    shape = ColumnShape(columns=("id",), on_error="null", error_column="Score")
    with pytest.raises(ConfigError) as caught:
        shaped(shape, [], numbers(1), opened=SCORES)
    assert str(caught.value) == (
        "error_column='Score' is the name of a column already: 'id', 'score'; take another name"
    )
