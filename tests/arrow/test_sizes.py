"""How many bytes rows have."""

from __future__ import annotations

import pyarrow as pa
import pytest

from aqueduct.arrow.sizes import batch_bytes

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
