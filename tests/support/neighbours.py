"""Services in processes of their own, on ports that do not change, to be killed and started again.

``python -m tests.support.neighbours ADDRESS`` listens there and prints its address.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import aqueduct
from aqueduct.config import Config, Timing
from tests.support.calls import NUMBERS

ROOT = Path(__file__).parent.parent.parent


def neighbour() -> aqueduct.Service:
    """A service of squares."""
    service = aqueduct.Service("neighbour", config=Config(timing=Timing(close_linger=0.2)))

    @service.handler("square", input=NUMBERS, output=NUMBERS, concurrency=4, idempotent=True)
    async def square(batch: pa.RecordBatch) -> pa.RecordBatch:
        await asyncio.sleep(0)
        return pa.record_batch({"id": pc.multiply(batch["id"], batch["id"])}, schema=NUMBERS)

    return service


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Neighbour:
    """The same in a process of its own."""

    def __init__(self) -> None:
        self.address = f"aqueduct+tcp://127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[str] | None = None

    def launch(self) -> None:
        """Starts the process, and does not wait for it."""
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.support.neighbours", self.address],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def wait(self) -> None:
        """Returns when it listens."""
        assert self.process is not None and self.process.stdout is not None
        assert any(self.address in line for line in self.process.stdout)

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


if __name__ == "__main__":
    neighbour().run(sys.argv[1])
