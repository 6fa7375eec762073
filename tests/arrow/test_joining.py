"""Batches joined to one, with dictionaries that Arrow joins wrongly or not at all."""

from __future__ import annotations

import struct
from math import copysign

import pyarrow as pa
import pytest
from hypothesis import given

from aqueduct.arrow.joining import joined
from tests.arrow.strategies import shown_rightly, streams
from tests.support.selection import some_examples


def halves(*values: float) -> pa.Array:
    data = pa.py_buffer(struct.pack(f"<{len(values)}e", *values))
    return pa.Array.from_buffers(pa.float16(), len(values), [None, data])


def words(values: pa.Array) -> pa.Array:
    """A null, and each value once."""
    indices = pa.array([None, *range(len(values))], pa.int8())
    return pa.DictionaryArray.from_arrays(indices, values)


def whole(*arrays: pa.Array) -> pa.Array:
    batches = [pa.record_batch({"a": array}) for array in arrays]
    found = joined(batches)
    found.validate(full=True)
    assert found.schema.equals(batches[0].schema, check_metadata=True)
    return found.column(0)


STRUCT = pa.struct({"x": pa.float32()})
VALUES = [
    (halves(1.5), halves(2.5, 1.5, -8.0)),
    (pa.array([{"x": 1}], STRUCT), pa.array([{"x": 2}, None], STRUCT)),
    (pa.array([[1]]), pa.array([[2, 3], []])),
    (pa.array(["a"]), pa.array(["b", "a"])),
    (pa.nulls(1), pa.nulls(2)),
    tuple(pa.uuid().wrap_array(pa.array([text * 16], pa.binary(16))) for text in (b"a", b"b")),
    (words(pa.array([[1]])), words(pa.array([[2]]))),
]


@pytest.mark.parametrize("values", VALUES, ids=lambda values: str(values[0].type))
def test_dictionaries_of_any_values(values):
    one, other = map(words, values)
    rows = one.to_pylist() + other.to_pylist()
    assert whole(one, other).to_pylist() == rows
    assert whole(one.slice(1), other).to_pylist() == rows[1:]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64(), STRUCT], ids=str)
def test_zeros_keep_their_signs(kind):
    arrays = []
    for zero in (0.0, -0.0):
        flat = halves(zero) if kind == pa.float16() else pa.array([zero], pa.float32())
        arrays.append(words(pa.array([{"x": zero}], STRUCT) if kind == STRUCT else flat.cast(kind)))
    found = [row for row in whole(*arrays).to_pylist() if row is not None]
    assert [copysign(1, row["x"] if kind == STRUCT else row) for row in found] == [1, -1]


@pytest.mark.parametrize(
    "around",
    [
        lambda values: pa.StructArray.from_arrays([values], names=["x"]),
        lambda values: pa.ListArray.from_arrays([0, 1, len(values)], values),
        lambda values: pa.ListViewArray.from_arrays([1, 0], [1, 1], values),
        lambda values: pa.FixedSizeListArray.from_arrays(values, 1),
        lambda values: pa.MapArray.from_arrays([0, 1, 2], pa.array(["k", "l"]), values.slice(0, 2)),
        lambda values: pa.UnionArray.from_sparse(pa.array([0] * len(values), pa.int8()), [values]),
        lambda values: pa.RunEndEncodedArray.from_arrays(range(1, len(values) + 1), values),
    ],
    ids=["struct", "list", "view", "fixed", "map", "union", "runs"],
)
def test_dictionaries_of_halves_within_a_column(around):
    one, other = around(words(halves(1.5, 2.5))), around(words(halves(-8.0, 2.5)))
    assert whole(one, other).to_pylist() == one.to_pylist() + other.to_pylist()


@some_examples
@given(streams())
def test_any_batches(batches):
    try:
        found = joined(batches)
    except pa.ArrowException:
        return
    found.validate(full=True)
    assert found.schema.equals(batches[0].schema, check_metadata=True)
    for place, column in enumerate(found.columns if shown_rightly(found.schema) else ()):
        try:
            values = [value for batch in batches for value in batch.column(place).to_pylist()]
        except ValueError:  # fields with one name are no dictionary of Python
            continue
        assert column.to_pylist() == values


def test_more_values_than_the_indices_can_number():
    lists = [[number] for number in range(200)]
    parts = [words(pa.array(lists[:100])), words(pa.array(lists[100:]))]
    with pytest.raises(pa.ArrowInvalid):
        whole(*parts)
