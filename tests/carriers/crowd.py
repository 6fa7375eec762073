"""A crowd of clients, in a process of its own: ``python -m tests.carriers.crowd ADDRESS CLIENTS``.

Connects them all, then exchanges on all channels of all of them at once, and compares every byte.
Tells on standard output when it is connected, and what came back.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from dataclasses import replace

from aqueduct import Connection, channel, connect
from aqueduct.config import DEFAULT

__all__ = ["CHANNELS", "PATIENT", "SIZE", "body"]

CHANNELS = 10
SIZE = 64 << 10
PATIENT = replace(
    DEFAULT,
    timing=replace(DEFAULT.timing, connect_timeout=60.0, idle_timeout=120.0, close_linger=30.0),
)
"""A thousand at once on one processor: nobody is lost because it waits its turn."""


def body(client: int, number: int) -> bytes:
    """What this channel of this client sends."""
    return hashlib.sha256(b"%d %d" % (client, number)).digest() * (SIZE // 32)


async def _exchange(connection: Connection, client: int, number: int) -> int:
    """Sends, and gets the same back on another channel; the bytes that were right."""
    there, receiver = channel()
    sender, back = channel()
    await connection.entrypoint.send(b"", attachments=[receiver, sender])
    data = body(client, number)
    await there.send(data)
    there.finish()
    message = await back.receive()
    assert bytes(message.payload) == data, (client, number)
    assert not [more async for more in back]
    return len(data)


async def _main(address: str, clients: int) -> None:
    room = asyncio.Semaphore(64)

    async def one() -> Connection:
        async with room:
            return await connect(address, config=PATIENT)

    connections = await asyncio.gather(*(one() for _ in range(clients)))
    print(f"connected {len(connections)}", flush=True)
    sys.stdin.readline()
    counts = await asyncio.gather(
        *(
            _exchange(connection, client, number)
            for client, connection in enumerate(connections)
            for number in range(CHANNELS)
        )
    )
    print(f"exchanged {sum(counts)}", flush=True)
    sys.stdin.readline()
    await asyncio.gather(*(connection.close() for connection in connections))
    print("closed", flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2])))
