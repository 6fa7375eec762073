"""A service, or a client that tells how large its datagrams are, for a host of ``networks``."""

from __future__ import annotations

import asyncio
import sys
import time

import pyarrow as pa

import aqueduct

BATCH = pa.record_batch({"id": pa.array(range(8192), pa.int64())})


async def serve(address: str) -> None:
    service = aqueduct.Service("path-mtu")

    @service.handler("echo")
    def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    async with service.serving(address, dev_certificate=True) as running:
        print(running.addresses[0])
        await asyncio.Event().wait()


async def ask(address: str) -> None:
    """Calls without end; each line of stdin is answered by "size, longest call in seconds"."""
    loop = asyncio.get_running_loop()
    async with await aqueduct.Client.connect(address) as client:
        longest, asked = 0.0, loop.run_in_executor(None, sys.stdin.readline)
        while True:
            began = time.monotonic()
            answer = await client.call("echo", BATCH)
            assert answer.equals(BATCH)
            longest = max(longest, time.monotonic() - began)
            if asked.done():
                if not asked.result():
                    return
                size = client.connection.snapshot().transport["datagram_size"]
                print(f"{size} {longest:.3f}")
                longest, asked = 0.0, loop.run_in_executor(None, sys.stdin.readline)


if __name__ == "__main__":
    role, where = sys.argv[1:]
    asyncio.run(serve(where) if role == "serve" else ask(where))
