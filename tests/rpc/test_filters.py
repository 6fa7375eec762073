"""Filters: JSON there and back, and the same rows by Arrow as by a slow model of SQL's logic."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.config import Tables
from aqueduct.errors import BadCall, ConfigError
from aqueduct.rpc.filters import (
    OPERATIONS,
    Filter,
    all_of,
    filters_from_json,
    filters_to_json,
)

UTC = datetime.UTC
NOON = datetime.datetime(2026, 3, 29, 12, 0, 0, 123456)
SCHEMA = pa.schema(
    [
        ("i", pa.int32()),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("n", pa.struct([("x", pa.int64())])),
    ]
)


# The model: one row, three answers


def compare(operation, mine, value):
    """What Spark says: NaN equals itself and is above all other numbers."""

    def rank(number):
        nan = isinstance(number, float) and math.isnan(number)
        return (nan, 0 if nan else number)

    mine, value = rank(mine), rank(value)
    return {
        "equal": mine == value,
        "less": mine < value,
        "less_or_equal": mine <= value,
        "greater": mine > value,
        "greater_or_equal": mine >= value,
    }[operation]


def true_for(filter, row):
    """True, False, or None where SQL says null."""
    if filter.operation == "not":
        found = true_for(filter.parts[0], row)
        return None if found is None else not found
    if filter.operation in ("and", "or"):
        found = [true_for(part, row) for part in filter.parts]
        decisive = filter.operation == "or"
        return decisive if decisive in found else None if None in found else not decisive
    mine = row
    for step in filter.column:
        mine = None if mine is None else mine[step]
    value = filter.value
    if filter.operation in ("is_null", "is_not_null"):
        return (mine is None) == (filter.operation == "is_null")
    if filter.operation == "same":
        if mine is None or value is None:
            return mine is value
        return compare("equal", mine, value)
    if mine is None:
        return None
    if filter.operation == "in":
        if any(each is not None and compare("equal", mine, each) for each in value):
            return True
        return None if None in value else False
    if value is None:
        return None
    if isinstance(mine, str) and filter.operation in ("starts_with", "ends_with", "contains"):
        return {
            "starts_with": mine.startswith(value),
            "ends_with": mine.endswith(value),
            "contains": value in mine,
        }[filter.operation]
    return compare(filter.operation, mine, value)


INTEGERS = st.integers(-3, 3)
FLOATS = st.sampled_from([-1.5, 0.0, -0.0, 2.0, math.inf, -math.inf, math.nan])
TEXTS = st.sampled_from(["", "a", "ab", "ba", "b%"])
COLUMNS = {("i",): INTEGERS, ("f",): FLOATS, ("s",): TEXTS, ("n", "x"): INTEGERS}
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "i": st.none() | INTEGERS,
            "f": st.none() | FLOATS,
            "s": st.none() | TEXTS,
            "n": st.none() | st.fixed_dictionaries({"x": st.none() | INTEGERS}),
        }
    ),
    max_size=6,
)


@st.composite
def leaves(draw):
    column = draw(st.sampled_from(sorted(COLUMNS)))
    operations = set(OPERATIONS) - {"not", "and", "or"}
    if column != ("s",):
        operations -= {"starts_with", "ends_with", "contains"}
    operation = draw(st.sampled_from(sorted(operations)))
    if operation == "in":
        values = draw(st.lists(st.none() | COLUMNS[column], max_size=3))
        return Filter(operation, column, tuple(values))
    if operation in ("is_null", "is_not_null"):
        return Filter(operation, column)
    textual = operation in ("starts_with", "ends_with", "contains")
    return Filter(
        operation, column, draw(COLUMNS[column] if textual else st.none() | COLUMNS[column])
    )


FILTERS = st.recursive(
    leaves(),
    lambda inner: (
        inner.map(lambda part: Filter("not", parts=(part,)))
        | st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=1, max_size=3)).map(
            lambda pair: Filter(pair[0], parts=tuple(pair[1]))
        )
    ),
    max_leaves=6,
)


@pytest.mark.requirement("AC-79")
@pytest.mark.requirement("AC-80")
@given(FILTERS, ROWS)
def test_arrow_keeps_the_rows_that_the_model_keeps(filter, rows):
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    numbered = table.append_column("row", pa.array(range(len(rows)), pa.int64()))
    kept = numbered.filter(filter.expression(SCHEMA))["row"].to_pylist()
    assert kept == [number for number, row in enumerate(rows) if true_for(filter, row) is True]


@given(FILTERS)
def test_json_there_and_back(filter):
    text = json.dumps(filters_to_json([filter]), allow_nan=False)
    (back,) = filters_from_json(json.loads(text), 1000)
    assert repr(back) == repr(filter)  # NaN does not equal itself


@pytest.mark.requirement("AC-81")
@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, ["null", ""]),
        (True, ["bool", "true"]),
        (-(2**63), ["int", "-9223372036854775808"]),
        (0.1, ["float", "0.1"]),
        (Decimal("1.50"), ["decimal", "1.50"]),
        ("é\n", ["string", "é\n"]),
        (b"\x00\xff", ["binary", "AP8="]),
        (datetime.date(2026, 3, 29), ["date", "2026-03-29"]),
        (NOON, ["timestamp_ntz", "2026-03-29T12:00:00.123456"]),
        (NOON.replace(tzinfo=UTC), ["timestamp", "2026-03-29T12:00:00.123456+00:00"]),
    ],
)
def test_each_type_of_value_has_its_form(value, written):
    filter = Filter("equal", ("a",), value)
    assert filter.to_json() == {"op": "equal", "column": ["a"], "value": written}
    assert Filter.from_json(filter.to_json()) == filter


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.date32(), datetime.date(2026, 3, 29)),
        (pa.timestamp("us"), NOON),
        (pa.timestamp("ns"), NOON),
        (pa.timestamp("us", "Europe/Zurich"), NOON.replace(tzinfo=UTC)),
        (pa.decimal128(10, 2), Decimal("1.50")),
        (pa.binary(), b"\x00\xff"),
        (pa.bool_(), True),
        (pa.large_string(), "word"),
        (pa.dictionary(pa.int8(), pa.string()), "word"),
        (pa.uint64(), Decimal(2**63)),
    ],
)
@pytest.mark.parametrize("operation", ["equal", "same", "in", "greater_or_equal"])
def test_columns_of_many_types_are_compared(kind, value, operation):
    schema = pa.schema([("a", kind)])
    stored = int(value) if pa.types.is_unsigned_integer(kind) else value
    column = pa.array([stored, None], pa.string() if pa.types.is_dictionary(kind) else kind)
    table = pa.Table.from_arrays([column.cast(kind)], schema=schema)
    filter = Filter(operation, ("a",), (value,) if operation == "in" else value)
    assert table.filter(filter.expression(schema)).num_rows == 1
    assert table.filter(Filter("not", parts=(filter,)).expression(schema)).num_rows == (
        operation == "same"  # of null it says no, where the others say nothing
    )


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        (
            Filter("equal", ("z",), 1),
            "the table has no one column 'z'; it has ['i', 'f',",
        ),
        (Filter("equal", ("n", "z"), 1), "column 'n.z': struct<x: int64> has no field 'z'"),
        (Filter("equal", ("i", "x"), 1), "column 'i.x': int32 has no field 'x'"),
        (Filter("equal", ("s",), 5), "Arrow cannot tell s = 5: "),
        (Filter("contains", ("i",), "5"), "Arrow cannot tell i contains '5': "),
        (Filter("equal", ("i",), 2**80), f"Arrow cannot tell i = {2**80}: "),
        (Filter("in", ("i",), ("a", 1)), "Arrow cannot tell i in ('a', 1): "),
    ],
)
def test_what_arrow_cannot_tell(filter, message):
    with pytest.raises(ConfigError) as caught:
        filter.expression(SCHEMA)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("zone", [None, "UTC"])
@pytest.mark.parametrize("operation", ["less", "in"])
def test_a_wall_clock_is_no_point_in_time(zone, operation):
    value = NOON if zone else NOON.replace(tzinfo=UTC)
    filter = Filter(operation, ("t",), (value,) if operation == "in" else value)
    with pytest.raises(ConfigError, match="Arrow cannot tell t"):
        filter.expression(pa.schema([("t", pa.timestamp("us", zone))]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("like", ("a",), "x"), "'like' is no operation of a filter; there are equal, same, "),
        (("equal", (), 1), "a filter 'equal' has a column and no parts"),
        (("in", ("a",), [1]), "the value of a filter 'in' is a tuple"),
        (("contains", ("a",), 1), "the value of a filter 'contains' is text"),
        (("not", ("a",)), "a filter 'not' has parts and no column"),
        (("not", (), None, (Filter("is_null", ("a",)),) * 2), "a filter 'not' has parts and no"),
    ],
)
def test_what_is_no_filter(arguments, message):
    with pytest.raises(ConfigError) as caught:
        Filter(*arguments)
    assert str(caught.value).startswith(message)


def test_a_value_without_a_form():
    with pytest.raises(ConfigError, match=r"cannot have \[1\], of the type list"):
        Filter("equal", ("a",), [1]).to_json()


LEAF: dict[str, Any] = {"op": "is_null", "column": ["a"]}


def nested(depth):
    document: dict[str, Any] = LEAF
    for _ in range(depth):
        document = {"op": "not", "of": [document]}
    return document


@pytest.mark.requirement("AC-79")
@pytest.mark.requirement("AC-81")
@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ({}, "filters are a list, not dict"),
        ([LEAF] * 6, "6 filters came, above the limit of 5 (Tables.filters)"),
        (["a"], "a filter is an object, not str"),
        ([{}], "a filter None has a list 'column'"),
        ([{"op": ["in"], "column": ["a"], "value": ["int", "1"]}], "\"['in']\" is no operation"),
        ([{"op": "or", "of": LEAF}], "a filter 'or' has a list 'of'"),
        ([{"op": "or", "of": []}], "a filter 'or' has parts and no column"),
        ([{"op": "is_null", "column": [1]}], "the column of a filter is a list of names"),
        ([{"op": "is_null", "column": "a"}], "a filter 'is_null' has a list 'column'"),
        ([{"op": "equal", "column": ["a"]}], "a value is a pair of a type and text; types are nu"),
        ([{"op": "equal", "column": ["a"], "value": ["int", 1]}], "a value is a pair of a type"),
        ([{"op": "equal", "column": ["a"], "value": ["x", "1"]}], "a value is a pair of a type"),
        ([{"op": "equal", "column": ["a"], "value": ["int", "9" * 41]}], "'999"),
        ([{"op": "equal", "column": ["a"], "value": ["decimal", "nan"]}], "'nan' is no decimal"),
        ([{"op": "equal", "column": ["a"], "value": ["bool", "yes"]}], "'yes' is no bool"),
        ([{"op": "equal", "column": ["a"], "value": ["binary", "é"]}], "'é' is no binary"),
        ([{"op": "equal", "column": ["a"], "value": ["date", "2026-02-30"]}], "'2026-02-30' is no"),
        ([{"op": "equal", "column": ["a"], "value": ["timestamp", "2026-02-03T00:00"]}], "'2026-"),
        ([{"op": "in", "column": ["a"], "values": {}}], "a filter 'in' has a list 'values'"),
        ([{"op": "contains", "column": ["a"], "value": ["int", "1"]}], "the value of a filter 'c"),
    ],
)
def test_hostile_documents(documents, message):
    with pytest.raises(BadCall) as caught:
        filters_from_json(documents, 5)
    assert str(caught.value).startswith(message)


@pytest.mark.requirement("AC-79")
def test_depth_up_to_the_limit():
    assert filters_from_json([nested(31)], 50)[0].columns() == {"a"}
    with pytest.raises(BadCall, match="filters are nested more than 32 deep"):
        filters_from_json([nested(32)], 50)


@pytest.mark.requirement("AC-79")
@pytest.mark.parametrize(
    "document",
    [
        {"op": "and", "of": [LEAF] * 5},
        {"op": "not", "of": [{"op": "or", "of": [LEAF] * 4}]},
        {"op": "in", "column": ["a"], "values": [["int", "1"]] * 5},
        {"op": "or", "of": [{"op": "in", "column": ["a"], "values": [["int", "1"]] * 3}, LEAF]},
    ],
)
def test_filters_inside_others_and_values_count(document):
    assert len(filters_from_json([document], 6)) == 1
    with pytest.raises(BadCall, match=r"6 filters came, above the limit of 5 \(Tables.filters\)"):
        filters_from_json([document], 5)


def test_arrow_takes_as_many_filters_as_the_limit_allows():
    """It walks an expression by recursion, on the stack of a thread."""
    table = pa.table({"i": pa.array([1, 2, 3, None], pa.int32())})
    parts = tuple(Filter("equal", ("i",), value) for value in range(2, 2 + Tables().filters))
    either = Filter("or", parts=parts)
    assert table.filter(either.expression(table.schema))["i"].to_pylist() == [2, 3]
    neither = [Filter("not", parts=(part,)) for part in parts]
    assert table.filter(all_of(neither, table.schema))["i"].to_pylist() == [1]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["op", "column", "value", "values", "of"]), inner)
        ),
        max_leaves=8,
    )
)
def test_anything_is_a_filter_or_a_bad_call(document):
    try:
        found = Filter.from_json(document)
    except BadCall:
        return
    assert Filter.from_json(found.to_json()) == found


def test_all_of_them_at_once():
    table = pa.table({"i": [1, 2, 3, None]}, schema=pa.schema([("i", pa.int32())]))
    filters = [Filter("greater", ("i",), 1), Filter("less", ("i",), 3)]
    assert table.filter(all_of(filters, table.schema))["i"].to_pylist() == [2]
    assert all_of([], table.schema) is None


def test_words_for_people():
    filter = Filter(
        "and",
        parts=(
            Filter("in", ("n", "x"), (1, 2)),
            Filter("not", parts=(Filter("starts_with", ("s",), "a"),)),
            Filter("is_not_null", ("i",)),
        ),
    )
    assert str(filter) == "(n.x in (1, 2)) and (not (s starts_with 'a')) and (i is not null)"
    assert filter.columns() == {"n", "s", "i"}
