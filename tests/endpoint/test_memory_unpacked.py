"""What a compressed batch unpacks to counts against the receive budget while it is worked on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pyarrow as pa
import pytest

from aqueduct import Service
from aqueduct.endpoint.accounts import process
from tests.support.calls import connected, until

MiB = 1 << 20
SCHEMA = pa.schema([("x", pa.int64())])
SIZE = 8 * MiB


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["thread", "async", "each"])
async def test_a_compressed_batch_is_charged_what_it_unpacks_to(name: str) -> None:
    batch = pa.record_batch([pa.array([7] * (SIZE // 8), pa.int64())], schema=SCHEMA)
    service, seen = Service("unpacks"), []

    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(process().receiving.used)
        return batch.slice(0, 1)

    @service.handler("thread", input=SCHEMA, output=SCHEMA)
    def thread(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield look(batch)

    @service.handler("async", input=SCHEMA, output=SCHEMA)
    async def in_task(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield look(batch)

    @service.handler("each", input=SCHEMA, output=SCHEMA)
    def each(batch: pa.RecordBatch) -> pa.RecordBatch:
        return look(batch)

    async with connected(service, "tcp") as client:
        before = process().receiving.used
        told = asyncio.Event()

        async def batches() -> AsyncIterator[pa.RecordBatch]:
            yield batch.slice(0, 1)
            await told.wait()  # what leaves before the accept message comes cannot be compressed
            yield batch

        stream = client.exchange(name, batches(), schema=SCHEMA, compression="lz4")
        await anext(stream)
        told.set()
        assert (await anext(stream)).num_rows == 1
        assert await anext(stream, None) is None
        counters = service.counters()
        await until(lambda: process().receiving.used <= before)
    assert counters["bytes_in"] < MiB  # it came compressed
    assert seen[1] - before >= SIZE
