"""Columns as numpy arrays and back: what is copied, what is refused, what comes back the same."""

from __future__ import annotations

import datetime
import decimal
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.arrow.numpy_arrays import arrays_of, batch_of, check_schema
from aqueduct.errors import ConfigError

DAY = datetime.date(2026, 1, 2)
MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
FAR = datetime.datetime(9999, 1, 2)
TENSOR = pa.fixed_shape_tensor(pa.float32(), [2, 3])
TURNED = pa.fixed_shape_tensor(pa.int16(), [2, 3], permutation=[1, 0])
NUMBERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
]


def tensors(kind: pa.FixedShapeTensorType, rows: int = 4) -> pa.Array:
    size = kind.storage_type.list_size
    values = pa.array(np.arange(rows * size), kind.value_type)
    return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(values, size))


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.record_batch(columns)


VIEWS = {
    **{str(kind): pa.array([1, 2, 3, 4], kind) for kind in NUMBERS},
    "timestamp": pa.array([MOMENT] * 4, pa.timestamp("ms", "Europe/Berlin")),
    "duration": pa.array([1, 2, 3, 4], pa.duration("us")),
    "tensor": tensors(TENSOR),
    "turned": tensors(TURNED),
    "fixed list": pa.array([[1, 2]] * 4, pa.list_(pa.int32(), 2)),
    "list": pa.array([[1.0, 2.0, 3.0]] * 4, pa.list_(pa.float32())),
    "large list": pa.array([[1, 2]] * 4, pa.large_list(pa.int64())),
    "lists of lists": pa.array([[[1, 2], [3, 4], [5, 6]]] * 4, pa.list_(pa.list_(pa.int8(), 2))),
}
COPIES = {
    "bool": pa.array([True, False] * 2),
    "date32": pa.array([DAY] * 4, pa.date32()),
    "date64": pa.array([DAY] * 4, pa.date64()),
    "string": pa.array(["a", "bb", "", "ü"]),
    "large string": pa.array(["a", "bb", "", "ü"], pa.large_string()),
    "string view": pa.array(["a", "bb", "", "ü"], pa.string_view()),
    "binary": pa.array([b"a", b"", b"\xff", b"a"]),
    "fixed binary": pa.array([b"ab"] * 4, pa.binary(2)),
    "dictionary": pa.array(["a", "b", "a", "b"]).dictionary_encode(),
}


def addresses(column: pa.Array) -> list[tuple[int, int]]:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return [(each.address, each.address + each.size) for each in column.buffers() if each]


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("part", [slice(None), slice(1, 3)], ids=["whole", "part"])
def test_arrays_without_a_copy(name, part):
    column = VIEWS[name][part]
    array = arrays_of(batch(x=column))["x"]
    assert len(array) == len(column) and not array.flags.writeable
    start = array.__array_interface__["data"][0]
    assert any(first <= start < last for first, last in addresses(column))
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        assert np.array_equal(array, column.to_numpy_ndarray())
    elif name == "timestamp":
        assert array.dtype == np.dtype("M8[ms]")
        assert array[0].item() == MOMENT.replace(tzinfo=None)
    elif name == "duration":
        assert array.dtype == np.dtype("m8[us]")
    else:
        assert array.tolist() == column.to_pylist()


@pytest.mark.parametrize("name", COPIES)
def test_arrays_that_are_copies(name):
    column = COPIES[name][1:]
    array = arrays_of(batch(x=column))["x"]
    assert array.tolist() == column.to_pylist() or name == "date64"
    assert array.dtype.kind == {"bool": "b", "date32": "M", "date64": "M"}.get(name, "O")


@pytest.mark.parametrize("name", [*VIEWS, *COPIES])
@pytest.mark.parametrize("rows", [0, 4])
def test_what_is_returned_unchanged_comes_back_the_same(name, rows):
    column = {**VIEWS, **COPIES}[name][:rows]
    schema = pa.schema([("x", column.type)])
    if not rows and name == "lists of lists":
        return  # how long the inner ones are is not known
    found = batch_of(arrays_of(batch(x=column)), schema)
    found.validate(full=True)
    assert found.schema == schema
    assert found["x"].to_pylist() == column.to_pylist()


def test_numbers_that_go_back_are_not_copied():
    array = np.arange(1000, dtype="f4")
    column = batch_of(array, _schema(x=pa.float32()))["x"]
    assert column.buffers()[1].address == array.__array_interface__["data"][0]
    rows = batch_of(array.reshape(250, 4), _schema(x=pa.list_(pa.float32(), 4)))["x"]
    assert rows.flatten().buffers()[1].address == array.__array_interface__["data"][0]


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema(list(types.items()))


def test_an_array_keeps_the_memory_of_its_batch():
    made = batch(x=pa.array(np.arange(100_000)))
    array = arrays_of(made)["x"]
    before = pa.total_allocated_bytes()
    del made
    assert array[-1] == 99_999 and pa.total_allocated_bytes() == before


NULLS = [
    (
        pa.array([1, None, 3]),
        "column 'x' (int64) has 1 nulls, for which a numpy array has no place",
    ),
    (pa.array([1.0, None, None]), "column 'x' (double) has 2 nulls"),
    (pa.array(["a", None]), "column 'x' (string) has 1 nulls"),
    (pa.array([[1], None], pa.list_(pa.int8())), "has 1 nulls"),
    (pa.array([[1, None]], pa.list_(pa.int8())), "column 'x' (int8) has 1 nulls"),
    (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), "has 1 nulls"),
    (pa.array(["a", None]).dictionary_encode(), "has 1 nulls"),
    (pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", None])), "has 1 nulls"),
    (
        pa.ExtensionArray.from_storage(
            TENSOR, pa.array([[1.0, None, 1, 1, 1, 1]], pa.list_(pa.float32(), 6))
        ),
        "has 1 nulls",
    ),
]


@pytest.mark.parametrize(("column", "why"), NULLS)
def test_nulls_have_no_array(column, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        arrays_of(batch(x=column))
    with pytest.raises(ValueError, match=r"pyarrow\.compute\.fill_null"):
        arrays_of(batch(x=column))


def test_nulls_of_floats_become_nan_if_asked():
    found = arrays_of(batch(x=pa.array([1.0, None]), y=pa.array([[None, 2.0]] * 2)), nan=True)
    assert np.array_equal(found["x"], [1.0, np.nan], equal_nan=True)
    assert np.array_equal(found["y"], [[np.nan, 2.0]] * 2, equal_nan=True)
    with pytest.raises(ValueError, match=r"column 'x' .* has 1 nulls"):
        arrays_of(batch(x=pa.array([1, None])), nan=True)


def test_lists_of_several_lengths_have_no_array():
    column = pa.array([[1], [2], [3, 4]])
    why = "column 'x' (list<item: int64>) has lists of 1 values and, in row 2, of 2"
    with pytest.raises(ValueError, match=re.escape(why)):
        arrays_of(batch(x=column))
    assert arrays_of(batch(x=column[:2]))["x"].tolist() == [[1], [2]]


def test_only_types_of_a_fixed_size_tell_their_shape_without_rows():
    shapes = [
        (pa.list_(pa.float32()), (0, 0)),
        (pa.large_list(pa.float32()), (0, 0)),
        (pa.list_(pa.list_(pa.float32())), (0, 0, 0)),
        (pa.list_(pa.float32(), 4), (0, 4)),
        (pa.list_(pa.list_(pa.float32(), 4)), (0, 0, 4)),
        (TENSOR, (0, 2, 3)),
    ]
    for kind, shape in shapes:
        assert arrays_of(batch(x=pa.array([], kind)))["x"].shape == shape, kind


@pytest.mark.parametrize(
    "kind",
    [
        pa.decimal128(5),
        pa.time32("s"),
        pa.struct([("a", pa.int8())]),
        pa.map_(pa.string(), pa.int8()),
        pa.null(),
        pa.list_(pa.struct([("a", pa.int8())])),
        pa.dictionary(pa.int8(), pa.decimal128(5)),
        pa.month_day_nano_interval(),
    ],
)
def test_types_without_an_array(kind):
    with pytest.raises(ConfigError, match=r"^here: column 'x' has the type .*, which has no numpy"):
        check_schema(_schema(x=kind), "here")


def test_a_name_must_be_one_of_a_kind():
    schema = pa.schema([("x", pa.int8()), ("x", pa.int8())])
    with pytest.raises(ConfigError, match="there are several columns 'x'"):
        check_schema(schema, "here")


@pytest.mark.parametrize("column", [*VIEWS.values(), *COPIES.values()])
def test_types_with_an_array(column):
    check_schema(_schema(x=column.type), "here")


CASTS: list[tuple[Any, pa.DataType, Any]] = [
    (np.array([1, 2]), pa.int8(), [1, 2]),
    (np.array([1.0, 2.0]), pa.int32(), [1, 2]),
    (np.array([1, 2]), pa.float32(), [1.0, 2.0]),
    (np.array([0.1]), pa.float32(), [float(np.float32(0.1))]),
    (np.array([np.nan, np.inf]), pa.float32(), None),
    (np.array([1, 2], ">i4"), pa.int32(), [1, 2]),
    (np.arange(6)[::2], pa.int64(), [0, 2, 4]),
    ([1, 2], pa.int64(), [1, 2]),
    (np.array(["a", "bb"]), pa.string(), ["a", "bb"]),
    (np.array(["a"]), pa.large_string(), ["a"]),
    (np.array(["a", None], object), pa.string(), ["a", None]),
    (np.array(["a", "a"]), pa.dictionary(pa.int16(), pa.string()), ["a", "a"]),
    (
        np.array(["2026-01-02"], "M8[D]"),
        pa.timestamp("us", "UTC"),
        [MOMENT.replace(hour=0, minute=0, second=0)],
    ),
    (np.array(["2026-01-02T00:00"], "M8[s]"), pa.date32(), [DAY]),
    (np.array(["2026-01-02T00:00", "NaT"], "M8[ns]"), pa.date64(), [DAY, None]),
    (np.array([MOMENT.replace(hour=0, minute=0, second=0), None]), pa.date32(), [DAY, None]),
    (np.array([DAY, None]), pa.date64(), [DAY, None]),
    (np.array([MOMENT]), pa.timestamp("s", "UTC"), [MOMENT]),
    (np.array([FAR]), pa.timestamp("s"), [FAR]),
    (np.array([datetime.timedelta(seconds=1)]), pa.duration("s"), [datetime.timedelta(seconds=1)]),
    (np.array([1.0, None, 2], object), pa.int8(), [1, None, 2]),
    (np.array([2**63, None], object), pa.uint64(), [2**63, None]),
    (np.array([1.5, None], object), pa.float16(), [1.5, None]),
    (np.array([None], object), pa.float32(), [None]),
    (np.array([None], object), pa.duration("s"), [None]),
    (np.array([], object), pa.int64(), []),
    (np.array([2048, -2048]), pa.float16(), [2048.0, -2048.0]),
    (np.array([], "i8"), pa.float16(), []),
    (np.array([1.24, np.inf])[:1], pa.decimal128(5, 2), [decimal.Decimal("1.24")]),
    (np.array([1.1], "f4"), pa.decimal128(5, 2), [decimal.Decimal("1.10")]),
    (np.array([12, None]), pa.decimal128(5, 2), [decimal.Decimal(12), None]),
    (np.array([True]), pa.bool_(), [True]),
    (np.ma.array([1e9, 1], mask=[True, False]), pa.float16(), [None, 1.0]),
    (np.ma.array([1.5, 2], object, mask=[True, False]), pa.int8(), [None, 2]),
    (np.ma.array([1, 2], mask=[False, True]), pa.int64(), [1, None]),
    (np.ma.array([1.5, 2], mask=[False, True]), pa.float32(), [1.5, None]),
    (np.zeros((2, 0)), pa.list_(pa.float64()), [[], []]),
    (np.arange(4).reshape(2, 2).T, pa.list_(pa.int8(), 2), [[0, 2], [1, 3]]),
]


@pytest.mark.parametrize(("array", "kind", "values"), CASTS)
def test_arrays_are_cast_if_that_keeps_their_values(array, kind, values):
    column = batch_of({"x": array}, _schema(x=kind))["x"]
    column.validate(full=True)
    assert column.type == kind
    if values is not None:
        assert column.to_pylist() == values


WRONG: list[tuple[Any, pa.DataType, str]] = [
    (
        np.array([300]),
        pa.int8(),
        "an array of int64 of the shape (1,), is none for a column of int8",
    ),
    (np.array([1.5]), pa.int32(), "truncated"),
    (np.array([1e300]), pa.float32(), "a value is too large"),
    (np.array([1e300], object), pa.float32(), "a value is too large"),
    (np.array([70000]), pa.float16(), "a value is too large"),
    (np.array([70000, None], object), pa.float16(), "a value is too large"),
    (np.array([2049]), pa.float16(), "whole numbers up to 2048 alone are those of halffloat"),
    (np.array([1.5], object), pa.int64(), "truncated"),
    (np.array([decimal.Decimal("1.5")]), pa.int64(), "data loss"),
    (np.array([True], object), pa.int64(), "Expected integer, got bool"),
    (np.array([5], object), pa.timestamp("s"), "int64 is not cast to timestamp"),
    (
        np.array(["2026-01-02T03"], "M8[s]"),
        pa.date32(),
        "a time of day for which the column",
    ),
    (np.array(["2026-01-02T03"], "M8[ms]"), pa.date64(), "a time of day"),
    (np.array([MOMENT]), pa.date32(), "a time of day"),
    (np.array([MOMENT.replace(microsecond=1)]), pa.timestamp("s", "UTC"), "would lose data"),
    (np.array([FAR.replace(microsecond=1)]), pa.timestamp("s"), "would lose data"),
    (np.array([datetime.timedelta(microseconds=1)]), pa.duration("s"), "would lose data"),
    (np.array([1.239]), pa.decimal128(5, 2), "digits for which the column has no place"),
    (
        np.ma.array([[1.0, 2.0]], mask=[[True, False]]),
        pa.list_(pa.field("item", pa.float32(), nullable=False)),
        "it has masked values, and the lists of the column take no nulls",
    ),
    (
        np.array([[1.0, None]], object),
        pa.list_(pa.field("item", pa.float32(), nullable=False), 2),
        "the lists of the column take no nulls",
    ),
    (np.array([2**60 + 1]), pa.float64(), "not in range"),
    (np.array([True]), pa.int8(), "bool is not cast to int8"),
    (np.array([1]), pa.bool_(), "int64 is not cast to bool"),
    (np.array([1]), pa.string(), "int64 is not cast to string"),
    (np.array([1]), pa.timestamp("s"), "int64 is not cast to timestamp"),
    (np.array([1 + 1j]), pa.float64(), "none for a column of double"),
    (np.array([object()]), pa.int8(), "none for a column of int8"),
    (np.zeros((2, 2)), pa.float64(), "it has a value for each row"),
    (np.zeros(2), pa.list_(pa.float64()), "an array of two dimensions or more is wanted"),
    (np.zeros((2, 3)), pa.list_(pa.float64(), 2), "2 values in each row are wanted"),
    (np.zeros((2, 3, 2), "f4"), TENSOR, "the shape (rows, 2, 3) is wanted"),
    (np.zeros((2, 2, 3), "i2"), TURNED, "the shape (rows, 3, 2) is wanted"),
    (
        np.array(5),
        pa.int64(),
        "'x' is array(5), a single value; an array with a value for each row",
    ),
    ([[1], [1, 2]], pa.int64(), "'x' is no array"),
]


@pytest.mark.parametrize(("array", "kind", "why"), WRONG)
def test_arrays_that_are_none_for_their_column(array, kind, why):
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        batch_of({"x": array}, _schema(x=kind))
    assert str(caught.value).startswith("'x'")


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"x": [1]}, "must have the keys 'x', 'y'; it lacks 'y'"),
        ({"x": [1], "y": [1], "z": [1]}, "must have the keys 'x', 'y'; it has 'z'"),
        ({"x": [1], "y": [1, 2]}, "differ in rows: 'x' has 1, 'y' 2"),
        (np.zeros(2), "a ndarray was returned; a dict of arrays is wanted, with the keys 'x', 'y'"),
        (None, "a NoneType was returned"),
        (batch(x=pa.array([1])), "a RecordBatch was returned; a dict of numpy arrays is wanted"),
    ],
)
def test_results_that_make_no_batch(result, why):
    with pytest.raises((ValueError, TypeError), match=re.escape(why)):
        batch_of(result, _schema(x=pa.int64(), y=pa.int64()))


def test_moments_of_pandas_keep_their_nanoseconds():
    pandas = pytest.importorskip("pandas")
    moments = np.array([pandas.Timestamp(1, unit="ns")], object)
    assert batch_of(moments, _schema(x=pa.timestamp("ns")))["x"].cast(pa.int64())[0].as_py() == 1
    with pytest.raises(ValueError, match="would lose data"):
        batch_of(moments, _schema(x=pa.timestamp("us")))


def test_masked_values_need_a_column_that_takes_nulls():
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    with pytest.raises(ValueError, match="'x' has masked values, and its column takes no nulls"):
        batch_of(np.ma.array([1, 2], mask=[True, False]), schema)
    assert batch_of(np.ma.array([1, 2]), schema)["x"].to_pylist() == [1, 2]


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
    ),
    st.integers(0, 3),
)
def test_tensors_of_any_layout_are_those_of_arrow(layout, rows):
    shape, order = layout
    kind = pa.fixed_shape_tensor(pa.int32(), shape, permutation=order)
    column = tensors(kind, rows)
    array = arrays_of(batch(x=column))["x"]
    assert array.shape == (rows, *(shape[place] for place in order))
    plain = np.arange(rows * int(np.prod(shape))).reshape(rows, *shape)
    assert np.array_equal(array, plain.transpose(0, *(place + 1 for place in order)))
    again = batch_of({"x": np.ascontiguousarray(array)}, _schema(x=kind))["x"]
    assert again.storage.equals(column.storage)
