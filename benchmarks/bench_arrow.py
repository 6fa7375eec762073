"""What a batch costs before and after the wire: encoded, decoded, cut and put together.

    pytest benchmarks/bench_arrow.py

A row has 60 bytes: an int64, four doubles, and a string of 16 bytes with its offset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from aqueduct._speedups.buffers import AlignedBuffer
from aqueduct.arrow.cut import Assembler, pieces
from aqueduct.arrow.decode import Checks, Decoder
from aqueduct.arrow.encode import Encoder

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


@pytest.mark.parametrize("size", SIZES)
def test_encode(benchmark: Any, size: str) -> None:
    batch, encoder = make_batch(SIZES[size]), Encoder(SCHEMA)
    assert benchmark(encoder.encode, batch).size > batch.nbytes


@pytest.mark.parametrize("checks", ["layout", "memory", "full"])
@pytest.mark.parametrize("size", SIZES)
def test_decode(benchmark: Any, size: str, checks: Checks) -> None:
    batch = make_batch(SIZES[size])
    payload = payload_of(Encoder(SCHEMA), batch)
    decoder = Decoder(SCHEMA, checks=checks)
    assert benchmark(decoder.decode, payload).equals(batch)


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
    """64 MiB in pieces of 4 MiB, without the copy into place."""
    encoded = Encoder(SCHEMA).encode(make_batch(64 << 20))

    def travel() -> Any:
        assembler, found = Assembler(), None
        for headers, buffers in pieces(encoded, 0):
            target = assembler.place(headers, sum(map(len, buffers)))
            assert target is not None
            found = assembler.add(headers, target)
        return found

    assert len(benchmark(travel)[1]) == encoded.size


def test_new_encoder(benchmark: Any) -> None:
    assert benchmark(Encoder, SCHEMA)


def test_new_decoder(benchmark: Any) -> None:
    assert benchmark(Decoder, SCHEMA)
