"""Every public object may be closed again, at once and afterwards, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from aqueduct import Call, Client, Connection, Service, SyncClient, connect, serve

BATCH = pa.record_batch({"x": [1]})


def service() -> Service:
    made = Service("again")

    @made.handler("echo")
    def echo(batches: Iterator[pa.RecordBatch], call: Call) -> Iterator[pa.RecordBatch]:
        yield from batches

    return made


@pytest.mark.parametrize("carrier", ["tcp", "unix"])
async def test_connections_and_servers_of_channels(carrier: str, tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    address = "aqueduct+tcp://127.0.0.1:0" if carrier == "tcp" else f"aqueduct+unix://{tmp_path}/s"
    async with await serve(arrived.set_result, address) as server:
        async with await connect(server.addresses[0]) as client:
            other = await arrived
            await asyncio.gather(client.close(), client.close(), other.close(), other.close())
            await client.close()
        await asyncio.gather(server.close(), server.close())
        await server.close()
    await server.close()
    assert asyncio.all_tasks() == before


async def test_clients_and_services() -> None:
    before = asyncio.all_tasks()
    async with service().serving("aqueduct+tcp://127.0.0.1:0") as running:
        async with await Client.connect(running.addresses[0]) as client:
            await client.describe()
            await asyncio.gather(client.close(), client.close())
            await client.close()
        sync = await asyncio.to_thread(SyncClient, running.addresses[0])
        await asyncio.to_thread(sync.describe)
        await asyncio.gather(*(asyncio.to_thread(sync.close) for _ in range(3)))
        with sync:
            pass
        await asyncio.gather(running.close(), running.close())
    await running.close()
    assert asyncio.all_tasks() == before
