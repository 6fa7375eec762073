"""The services of the Spark benchmark, each a process: ours and Flight's, with the same handlers.

    python -m benchmarks.spark.services aqueduct ADDRESS
    python -m benchmarks.spark.services flight LOCATION

The process prints ``{"address": ...}``, answers every line of its standard input with what it has
counted, and ends with its standard input. ``Running`` is the other end of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as fl

from aqueduct.service.service import Service
from benchmarks.peers import common
from benchmarks.processes import Failed
from benchmarks.runner import ROOT
from benchmarks.spark.functions import GENERATED

__all__ = ["SLOW", "SWALLOW", "Running"]

SLOW: Final = 0.02
"""Seconds that ``slow`` takes for a batch."""
SWALLOW: Final = 0.02
"""Seconds that ``swallow`` takes for one of 4 MiB: slower by far than who sends it."""


class Running:
    """A service in a process of its own, which ends with ``close``."""

    def __init__(self, library: str, address: str) -> None:
        command = [sys.executable, "-m", "benchmarks.spark.services", library, address]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.address: str = self._answer()["address"]

    def counters(self) -> dict[str, int]:
        """What the service counted; empty for Flight's, which counts nothing."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        counted: dict[str, int] = self._answer()
        return counted

    def resident(self) -> int:
        """Bytes that the process holds now (VmRSS)."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) << 10
        raise Failed("the service has no memory: it ended")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"the service ended with status {self.process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def _commands(counters: Any, address: str) -> Iterator[None]:
    def answer() -> None:
        for _ in sys.stdin:
            print(json.dumps(counters()), flush=True)

    print(json.dumps({"address": address}), flush=True)
    threading.Thread(target=answer, daemon=True).start()
    yield


def make() -> Service:
    service = Service("benchmark")

    @service.handler("echo")
    async def echo(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield batch

    @service.handler("score")
    async def score(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch  # what most services are: a function of one batch

    @service.handler("slow", concurrency=16)
    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(SLOW)
        return batch

    @service.handler("swallow", input=common.SCHEMA, output=GENERATED)
    def swallow(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(SWALLOW)
        row = {"rows": [batch.num_rows], "total": [pc.sum(batch["id"])]}
        return pa.record_batch(row, schema=GENERATED)

    return service


async def serve(address: str) -> None:
    service = make()
    async with service.serving(address, dev_certificate=True) as serving:
        with _commands(service.counters, serving.addresses[0]):
            await asyncio.Event().wait()


class Flight(fl.FlightServerBase):  # type: ignore[misc]
    """The same handlers by DoExchange; the first word of the descriptor names one."""

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        pause = {"echo": 0.0, "score": 0.0, "slow": SLOW}[descriptor.path[0].decode()]
        writer.begin(reader.schema)
        for chunk in reader:
            if pause:
                time.sleep(pause)
            writer.write_batch(chunk.data)


def main() -> None:
    common.end_with_parent()
    library, address = sys.argv[1:]
    if library == "aqueduct":
        asyncio.run(serve(address))
    else:
        server = Flight(address)
        where = f"{address.rpartition(':')[0]}:{server.port}" if server.port > 0 else address
        with _commands(dict, where):
            server.serve()


if __name__ == "__main__":
    main()
