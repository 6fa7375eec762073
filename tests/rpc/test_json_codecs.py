"""The codecs of JSON rows: what belongs in a thread, and the limits that they hold."""

from __future__ import annotations

import pyarrow as pa
import pytest

from aqueduct.errors import BatchTooLarge
from aqueduct.rpc.json_codecs import JsonDecoder, JsonEncoder


def decoder(fields, **options):
    return JsonDecoder(pa.schema(fields), where="the rows", **{"values": 1_000_000, **options})


@pytest.mark.parametrize(
    "fields",
    [
        {"a": pa.list_(pa.float32(), 768)},
        {f"c{place}": pa.int8() for place in range(1000)},
        {"a": pa.list_(pa.struct([(f"x{place}", pa.int8()) for place in range(1000)]))},
    ],
    ids=["fixed list", "columns", "structs"],
)
def test_rows_that_make_many_values_belong_in_a_thread(fields):
    assert decoder(fields).slow(memoryview(b'[{"a":[{},{}]},{}]'))


def test_short_rows_do_not_belong_in_a_thread():
    assert not decoder({"a": pa.int64(), "b": pa.string()}).slow(memoryview(b'[{"a":1}]' * 100))
    assert decoder({"a": pa.int64()}).slow(memoryview(b'[{"a":1}]' * 10_000))


@pytest.mark.parametrize(
    "column",
    [
        pa.RunEndEncodedArray.from_arrays([5000], ["x"]),
        pa.nulls(5000),
        pa.array([True] * 5000),
    ],
    ids=["runs", "nulls", "bits"],
)
def test_many_rows_of_few_bytes_belong_in_a_thread(column):
    batch = pa.record_batch({"a": column})
    assert batch.nbytes < 5000
    encoder = JsonEncoder(batch.schema, where="the output")
    assert encoder.slow(batch)
    assert not encoder.slow(batch.slice(0, 100))


def test_the_bytes_of_a_batch_have_the_limit_of_calls():
    with pytest.raises(BatchTooLarge, match=r"limit of 1000 \(Calls.batch_limit\)"):
        decoder({"a": pa.binary(600)}, batch_limit=1000).decode(b"[{},{}]")
