"""A client of three services, of which one dies in the middle of a call.

    python examples/several_addresses.py

Each service has a process of its own. Every batch is answered once, and in its order.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pyarrow as pa
import pyarrow.compute as pc

import aqueduct

BATCHES = 300
SCHEMA = pa.schema([("x", pa.int64())])

service = aqueduct.Service("squares")


@service.handler(input=SCHEMA, output=SCHEMA, concurrency=4, idempotent=True)
def square(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The squares of a batch."""
    return pa.record_batch({"x": pc.multiply(batch["x"], batch["x"])}, schema=SCHEMA)


def start(address: str) -> subprocess.Popen[str]:
    """One of the services, when it listens."""
    command = [sys.executable, "-u", __file__, address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any(address in line for line in process.stdout)
    return process


def free_address() -> str:
    """One that nobody listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"aqueduct+tcp://127.0.0.1:{sock.getsockname()[1]}"


async def main() -> None:
    """Three services, one call, one death."""
    addresses = [free_address() for _ in range(3)]
    services = [start(address) for address in addresses]
    batches = (pa.record_batch({"x": [x]}, schema=SCHEMA) for x in range(BATCHES))
    found = []
    try:
        async with aqueduct.Client(addresses, retries=5) as client:
            async with client.exchange("square", batches, schema=SCHEMA) as answers:
                async for answer in answers:
                    found += answer["x"].to_pylist()
                    if len(found) == 100:
                        services[0].kill()
            print(f"{len(found)} answers, all in order: {found == [x * x for x in range(BATCHES)]}")
            connected = [state.connected for state in client.endpoints]
            print(f"connected: {connected}")
    finally:
        for process in services:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        service.run(sys.argv[1])
    else:
        asyncio.run(main())
