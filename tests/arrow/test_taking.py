"""Rows taken out of arrays of every type."""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aqueduct.arrow.taking import rows_where, taken
from tests.arrow.strategies import make_array, types
from tests.support.selection import some_examples

VIEWS = pa.array(["a", None, "a text of many characters"], pa.string_view())
RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), VIEWS.slice(1))
THREE = pa.array([0, 2, 2, 3], pa.int32())
ARRAYS = {
    "text": VIEWS,
    "bytes": pa.array([b"a", None, b"bytes, many of them"], pa.binary_view()),
    "runs": RUNS,
    "list": pa.ListArray.from_arrays(THREE, VIEWS),
    "list of runs": pa.ListArray.from_arrays(THREE, RUNS),
    "large list": pa.array([["a"], None, ["b", None]], pa.large_list(pa.string_view())),
    "fixed list": pa.array([["a", "b"], None, ["c", None]], pa.list_(pa.string_view(), 2)),
    "list view": pa.array([["a"], None, ["b", None]], pa.list_view(pa.string_view())),
    "struct": pa.array([{"x": "a"}, None, {"x": None}], pa.struct([("x", pa.string_view())])),
    "map": pa.array([[("a", 1)], None, []], pa.map_(pa.string_view(), pa.int8())),
    "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, None, 2]), VIEWS),
    "sparse union": pa.UnionArray.from_sparse(
        pa.array([0, 1, 0], pa.int8()), [VIEWS, pa.array([1, 2, 3])]
    ),
    "dense union": pa.UnionArray.from_dense(
        pa.array([0, 1, 0], pa.int8()), pa.array([2, 0, 0], pa.int32()), [VIEWS, pa.array([1])]
    ),
    "extension": pa.ExtensionArray.from_storage(pa.json_(pa.string_view()), VIEWS),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_rows_are_taken_out_of_views_runs_and_what_holds_them(array):
    values = array.to_pylist()  # PyArrow 21 reads slices of sparse unions wrong
    for start in range(3):
        part = array.slice(start)
        last = len(part) - 1
        for rows in ([], [0], [last, 0], [last] * 3):
            found = taken(part, pa.array(rows, pa.int64()))
            found.validate(full=True)
            assert found.type == array.type
            assert found.to_pylist() == [values[start + row] for row in rows]


@some_examples
@given(types(), st.integers(0, 1000), st.data())
def test_rows_are_taken_out_of_every_type(kind, seed, data):
    whole = make_array(kind, 20, random.Random(seed))
    start = data.draw(st.integers(0, 20))
    array = whole.slice(start, data.draw(st.integers(0, 20 - start)))
    most = len(array) - 1
    rows = data.draw(st.lists(st.integers(0, most), max_size=20)) if most >= 0 else []
    found = taken(array, pa.array(rows, pa.int64()))
    found.validate(full=True)
    assert found.type == kind
    assert len(found) == len(rows)
    assume(has_own_names(kind))  # else there are no Python values to compare
    assert repr(found.to_pylist()) == repr([array[row].as_py() for row in rows])


def has_own_names(kind):
    """Whether no struct in a type has two fields of one name."""
    if isinstance(kind, pa.BaseExtensionType):
        return has_own_names(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return has_own_names(kind.value_type)
    inner = [kind.field(place) for place in range(kind.num_fields)]
    unique = not pa.types.is_struct(kind) or len({each.name for each in inner}) == len(inner)
    return unique and all(has_own_names(each.type) for each in inner)


def test_rows_of_a_dense_union_are_taken_in_any_order():
    union = pa.UnionArray.from_dense(
        pa.array([0, 1, 0], pa.int8()),
        pa.array([0, 0, 1], pa.int32()),
        [pa.array(["a", "b"], pa.string_view()), pa.array([1])],
    )
    found = taken(union, pa.array([2, 1, 0, 2], pa.int64()))
    found.validate(full=True)
    assert found.to_pylist() == ["b", 1, "a", "b"]


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_a_condition_keeps_rows_with_columns_of_every_type(array):
    batch = pa.record_batch([array, pa.array([1, None, 3])], names=["c", "k"])
    for condition, rows in ((pc.field("k") > 1, [2]), (pc.field("k") < 9, [0, 2])):
        (found,) = rows_where(batch, condition, {"k"})
        assert found.schema == batch.schema
        assert found["k"].to_pylist() == [batch["k"][row].as_py() for row in rows]
        assert found["c"].to_pylist() == [array[row].as_py() for row in rows]
    nothing = rows_where(batch, pc.field("k") > 9, {"k"})
    assert sum(each.num_rows for each in nothing) == 0
