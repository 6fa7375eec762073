"""After a pause a client that is held open has its connection, and another makes a new one."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.config import DEFAULT

SCHEMA = pa.schema([("n", pa.int64())])
QUICK = dataclasses.replace(
    DEFAULT, timing=dataclasses.replace(DEFAULT.timing, idle_timeout=1.0, ping_interval=0.2)
)


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_a_pause_between_calls(keep_alive: bool) -> None:
    service = aqueduct.Service("idle", config=QUICK)

    @service.handler("echo")
    def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    batch = pa.record_batch({"n": [1, 2]}, schema=SCHEMA)
    async with service.serving("aqueduct://127.0.0.1:0", dev_certificate=True) as running:
        async with await aqueduct.Client.connect(
            running.addresses[0], config=QUICK, keep_alive=keep_alive
        ) as client:
            await asyncio.sleep(2.5)
            assert client.closed is not keep_alive
            answers = [answer async for answer in client.exchange("echo", [batch])]
            assert answers == [batch]
            assert client.endpoints[0].connections == (1 if keep_alive else 2)


async def test_a_closed_client_leaves_memory_at_once() -> None:
    """No timer of its calls holds it, and its connection, until it is due."""
    service = aqueduct.Service("brief")

    @service.handler("echo")
    def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    batch = pa.record_batch({"n": [1, 2]}, schema=SCHEMA)
    async with service.serving("memory://brief") as running:
        client = await aqueduct.Client.connect(running.addresses[0])
        assert [one async for one in client.exchange("echo", [batch])] == [batch]
        await client.close()
        watched = weakref.ref(client)
        del client
        for _ in range(5):
            await asyncio.sleep(0)  # what was about to run lets go of it
        gc.collect()
        assert watched() is None
