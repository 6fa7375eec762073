"""What a batch costs before and after the wire: encoded, decoded, cut and put together.

    pytest benchmarks/micro/bench_arrow.py

A row has 60 bytes: an int64, four doubles, and a string of 16 bytes with its offset. Beside such
batches there are those with nulls in each column, slices of them, and one value of 200 bytes, as
requests have. ``slow`` is the same without the compiled writer and reader: Arrow's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct.arrow.decode import Checks, Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.ipc import deserialize_schema, serialize_schema
from aqueduct.rpc.fragments import Assembler, fragments

SCHEMA = pa.schema(
    [("id", pa.int64()), *((name, pa.float64()) for name in "abcd"), ("s", pa.string())]
)
ROW_BYTES = 8 + 4 * 8 + 4 + 16
SIZES = {"64k": 64 << 10, "1m": 1 << 20}


def make_batch(size: int) -> pa.RecordBatch:
    rows, chance = size // ROW_BYTES, np.random.default_rng(7)
    offsets = np.arange(0, 16 * (rows + 1), 16, dtype=np.int32)
    text = chance.integers(97, 123, 16 * rows, dtype=np.uint8)
    columns = [pa.array(np.arange(rows)), *(pa.array(chance.random(rows)) for _ in "abcd")]
    columns.append(pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(text)))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def make_coded_batch(size: int) -> pa.RecordBatch:
    batch = make_batch(size)
    kinds = pa.DictionaryArray.from_arrays(
        pa.array(np.arange(batch.num_rows, dtype=np.int32) % 100), [f"kind {i}" for i in range(100)]
    )
    return batch.append_column("kind", kinds)


def payload_of(encoder: Encoder, batch: pa.RecordBatch) -> AlignedBuffer:
    encoded = encoder.encode(batch)
    payload = AlignedBuffer(encoded.size)
    memoryview(payload)[:] = b"".join(encoded.buffers)
    return payload


def with_nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same with a null in each column, so that each has a bitmap."""
    last = pa.array([row != batch.num_rows - 1 for row in range(batch.num_rows)])
    columns = [pc.if_else(last, column, None) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


BATCHES: dict[str, pa.RecordBatch] = {
    **{name: make_batch(size) for name, size in SIZES.items()},
    "64k-nulls": with_nulls(make_batch(64 << 10)),
    "64k-slice": with_nulls(make_batch(128 << 10)).slice(1001, 1092),
    "request": pa.record_batch([pa.array([b"p" * 200])], names=["x"]),
}


@pytest.mark.parametrize("way", ["fast", "slow"])
@pytest.mark.parametrize("name", BATCHES)
def test_encode(benchmark: Any, name: str, way: str) -> None:
    batch = BATCHES[name]
    encoder = Encoder(batch.schema)
    if way == "slow":
        encoder._fast = None
    assert benchmark(encoder.encode, batch).size > batch.num_rows * ROW_BYTES


@pytest.mark.parametrize("way", ["fast", "slow"])
@pytest.mark.parametrize("checks", ["layout", "memory", "full"])
@pytest.mark.parametrize("name", BATCHES)
def test_decode(benchmark: Any, name: str, checks: Checks, way: str) -> None:
    batch = BATCHES[name]
    payload = payload_of(Encoder(batch.schema), batch)
    decoder = Decoder(batch.schema, checks=checks)
    if way == "slow":
        decoder._fast = None
    assert benchmark(decoder.decode, payload).equals(batch)


def test_one_message(benchmark: Any) -> None:
    """A batch in one message: cut, placed and taken."""
    encoded, assembler = Encoder(SCHEMA).encode(BATCHES["64k"]), Assembler()
    payload = payload_of(Encoder(SCHEMA), BATCHES["64k"])

    def travel() -> Any:
        [(headers, _)] = fragments(encoded, 7)
        assert assembler.place(headers, encoded.size) is None
        return assembler.add(headers, payload)

    assert benchmark(travel) == (7, payload)


def test_schema_written_and_read(benchmark: Any) -> None:
    """As each call does, with a schema that was there before."""
    assert benchmark(lambda: deserialize_schema(serialize_schema(SCHEMA))).equals(SCHEMA)


@pytest.mark.parametrize("size", SIZES)
def test_encode_with_a_dictionary(benchmark: Any, size: str) -> None:
    batch = make_coded_batch(SIZES[size])
    encoder = Encoder(batch.schema)
    assert benchmark(encoder.encode, batch).size > batch.nbytes / 2


@pytest.mark.parametrize("size", SIZES)
def test_decode_with_a_dictionary(benchmark: Any, size: str) -> None:
    batch = make_coded_batch(SIZES[size])
    encoder, decoder = Encoder(batch.schema), Decoder(batch.schema)
    decoder.decode(payload_of(encoder, batch))
    payload = payload_of(encoder, batch)  # its dictionary was sent with the first
    assert benchmark(decoder.decode, payload).equals(batch)


def test_cut_and_assemble(benchmark: Any) -> None:
    """64 MiB in fragments of 4 MiB, without the copy into place."""
    encoded = Encoder(SCHEMA).encode(make_batch(64 << 20))

    def travel() -> Any:
        assembler, found = Assembler(), None
        for headers, buffers in fragments(encoded, 0):
            target = assembler.place(headers, sum(map(len, buffers)))
            assert target is not None
            found = assembler.add(headers, target)
        return found

    assert len(benchmark(travel)[1]) == encoded.size


def test_new_encoder(benchmark: Any) -> None:
    assert benchmark(Encoder, SCHEMA)


def test_new_decoder(benchmark: Any) -> None:
    assert benchmark(Decoder, SCHEMA)
