"""How many bytes rows have."""

from __future__ import annotations

import pyarrow as pa
import pytest

from aqueduct.arrow.sizes import array_bytes, batch_bytes

_CHOICE = pa.dense_union([pa.field("number", pa.int64()), pa.field("text", pa.string())])


def read_back(batch: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


@pytest.mark.parametrize(
    "kind",
    [
        _CHOICE,
        pa.list_(_CHOICE),
        pa.struct([("inner", pa.struct([("choice", _CHOICE)]))]),
        pa.dictionary(pa.int8(), pa.struct([("choice", _CHOICE)])),
        pa.sparse_union([pa.field("number", pa.int64())]),
    ],
    ids=str,
)
def test_unions_without_rows_have_few_bytes(kind: pa.DataType) -> None:
    batch = read_back(pa.record_batch({"choice": pa.nulls(0, kind)}))
    assert batch.schema.field(0).type == kind
    assert batch_bytes(batch) < 64


def test_a_slice_has_the_bytes_of_its_rows() -> None:
    batch = pa.record_batch({"number": pa.array(range(1000), pa.int64())})
    assert batch_bytes(batch) == 8000
    assert batch_bytes(batch.slice(0, 10)) == 80


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_slices_of_unions_have_the_bytes_of_their_rows(mode: str) -> None:
    codes, values = pa.array([0] * 1000, pa.int8()), pa.array(range(1000), pa.int64())
    if mode == "sparse":
        choice, each = pa.UnionArray.from_sparse(codes, [values]), 9
    else:
        places = pa.array(range(1000), pa.int32())
        choice, each = pa.UnionArray.from_dense(codes, places, [values]), 13
    batch = pa.record_batch({"choice": choice, "number": values})
    assert batch_bytes(batch) == 1000 * (each + 8)
    assert batch_bytes(batch.slice(500, 10)) == 10 * (each + 8)


WORDS = pa.array(["a text of many characters", None, "short"], pa.string_view())
PLACES = pa.array([0, 1, 3], pa.int32())


@pytest.mark.parametrize(
    ("array", "all_rows", "last_row"),
    [
        (WORDS, 1 + 3 * 16 + 25, 1 + 16 + 25),
        (pa.array([b"a text of many characters", b""], pa.binary_view()), 2 * 16 + 25, 16 + 25),
        (pa.ListArray.from_arrays(PLACES, WORDS), 2 * 4 + 74, 4 + 1 + 2 * 16 + 25),
        (pa.LargeListArray.from_arrays(PLACES.cast("int64"), WORDS), 2 * 8 + 74, 8 + 58),
        (pa.FixedSizeListArray.from_arrays(WORDS, 1), 74, 42),
        (pa.ListViewArray.from_arrays([0, 1], [1, 2], pa.array([1, 2, 3])), 2 * 8 + 24, 8 + 24),
        (pa.LargeListViewArray.from_arrays([0, 1], [1, 2], WORDS), 2 * 16 + 74, 16 + 74),
        (pa.StructArray.from_arrays([WORDS], ["word"]), 74, 42),
        (pa.DictionaryArray.from_arrays(pa.array([0, 2], pa.int8()), WORDS), 2 + 74, 1 + 74),
        (pa.MapArray.from_arrays(PLACES, pa.array([1, 2, 3]), WORDS), 8 + 24 + 74, 4 + 16 + 58),
        (pa.ExtensionArray.from_storage(pa.json_(pa.string_view()), WORDS), 74, 42),
    ],
    ids=lambda given: str(given.type) if isinstance(given, pa.Array) else "",
)
def test_views_are_counted_with_what_their_buffers_hold(
    array: pa.Array, all_rows: int, last_row: int
) -> None:
    for rows, wanted in ((array, all_rows), (array.slice(len(array) - 1), last_row)):
        assert array_bytes(rows) == wanted
        batch = pa.RecordBatch.from_arrays([rows, rows], ["one", "two"])
        assert batch_bytes(batch) == 2 * wanted
