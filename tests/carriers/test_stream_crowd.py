"""A thousand connections of ten channels each on one server, all busy at once."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from pathlib import Path

import pytest

from aqueduct import Connection, Message, Receiver, Sender, serve
from tests.carriers.crowd import CHANNELS, PATIENT, SIZE
from tests.carriers.streams import eventually, listen_at, nothing_left
from tests.support.selection import mostly_long

MiB = 1 << 20
ROOT = Path(__file__).parent.parent.parent
MEMORY = MiB
"""What the server may take for a connection: all bytes that are under way, 640 KiB, since it may be
able to answer none of them before the last has come, and 384 KiB for the connection with its ten
pairs of channels, their tasks, and what the allocator keeps."""

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.timeout(400),
]  # on a busy machine; alone it takes 30 s


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Echo:
    """Sends back whatever comes on a channel, on another; counts bytes, and its own memory."""

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, connection: Connection) -> None:
        async for message in connection.entrypoint:
            task = asyncio.create_task(self.answer(message))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def answer(self, message: Message) -> None:
        receiver, sender = (attachment.handle for attachment in message.attachments)
        assert isinstance(receiver, Receiver) and isinstance(sender, Sender)
        async for part in receiver:
            self.bytes += len(part.payload)
            await sender.send(part.payload)
        sender.finish()
        if self.bytes % MiB == 0:
            self.peak = max(self.peak, resident())


@pytest.mark.parametrize(
    ("scheme", "clients"), mostly_long([("tcp", 200), ("tcp", 1000), ("unix", 1000)], ("tcp", 200))
)
async def test_many_connections_exchange_at_once(scheme: str, clients: int, tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    async with nothing_left(), asyncio.timeout(380):
        await crowd(scheme, clients, tmp_path)


async def crowd(scheme: str, count: int, folder: Path) -> None:
    echo = Echo()
    listen = listen_at(scheme, folder)
    async with await serve(echo.serve, listen, config=PATIENT) as server:
        clients = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.carriers.crowd",
            server.addresses[0],
            f"{count}",
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert clients.stdin is not None and clients.stdout is not None
        try:
            assert await clients.stdout.readline() == b"connected %d\n" % count
            assert len(server.connections) == count
            before = resident()
            clients.stdin.write(b"go\n")
            total = count * CHANNELS * SIZE
            assert await clients.stdout.readline() == b"exchanged %d\n" % total
            assert echo.bytes == total
            assert max(echo.peak, resident()) - before <= count * MEMORY
            await eventually(lambda: not echo.tasks)
            for connection in server.connections:
                shot = connection.snapshot()
                assert (shot.queued_bytes, shot.receive_budget_used) == (0, 0)
                assert connection.error is None
            clients.stdin.write(b"close\n")
            assert await clients.stdout.readline() == b"closed\n"
            assert await clients.wait() == 0
            await eventually(lambda: not server.connections)
        finally:
            if clients.returncode is None:
                clients.kill()
                await clients.wait()
            clients.stdin.close()
