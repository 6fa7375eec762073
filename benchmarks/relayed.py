"""Batches of 1 MiB over TLS by way of another worker, beside the same without it.

    python -m benchmarks.relayed [--repeat N] [--quick] [--json FILE] [--only TEXT] [--list]

A client with ``resume`` talks to a service of two workers. It connects again until its connection
is relayed, or is not: then it is measured. Its calls are in the same worker all the time. Client
and workers are three processes; on fewer processors the relay takes time of the two others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aqueduct.carriers.stream import StreamCarrier
from aqueduct.client.client import Client
from aqueduct.service.service import Service
from benchmarks import certificate, processes, results
from benchmarks.peers import common
from benchmarks.runner import ROOT, Benchmark, Progress, run_command

MiB: Final = 1 << 20
BATCHES: Final = 1024
QUICK: Final = 16
TIMEOUT: Final = 120.0
TRIES: Final = 200
"""Connections until one is where it is wanted; each second one is."""
JSON: Final = pa.schema([pa.field("json", pa.string(), nullable=False)])
NAMES: Final = ("aqueduct/relayed", "aqueduct/direct")


@dataclass(frozen=True)
class Contestant:
    """A way to the worker that has the link."""

    name: str


@dataclass(frozen=True)
class Case:
    """A direction: ``sink`` goes to the service, ``source`` comes from it."""

    name: str
    mode: str
    contestants: tuple[Contestant, ...] = tuple(map(Contestant, NAMES))


PLAN: Final = tuple(Case(f"relayed-tls-{mode}-1m", mode) for mode in ("sink", "source"))


# ----------------------------------------------------------------- the workers


def _service() -> Service:
    service = Service("relayed")

    @service.handler("sink", input=common.SCHEMA, output=JSON)
    async def sink(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        totals = common.Totals()
        async for batch in batches:
            totals.add(batch)
        yield document(asdict(totals))

    @service.handler("source", input=JSON, output=common.SCHEMA)
    async def source(questions: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for question in questions:
            for batch in batches_of(content(question)):
                yield batch

    return service


def document(value: Any) -> pa.RecordBatch:
    return pa.record_batch([pa.array([json.dumps(value)])], schema=JSON)


def content(batch: pa.RecordBatch) -> Any:
    return json.loads(batch.column(0)[0].as_py())


def batches_of(count: int) -> Iterable[pa.RecordBatch]:
    return itertools.islice(itertools.cycle(common.make_batches(MiB)), count)


service: Final = _service()
"""What ``aqueduct serve benchmarks.relayed:service`` serves."""


# ----------------------------------------------------------------- the client


class Measured:
    """A client of a service of two workers."""

    def __init__(self, process: asyncio.subprocess.Process, client: Client) -> None:
        self._process = process
        self._client = client

    async def go(self, case: Case, name: str, count: int) -> dict[str, Any]:
        """Moves so many batches. Raises processes.Failed for a connection that stays elsewhere."""
        await self._find(relayed=name == NAMES[0])
        batches = list(batches_of(min(count, common.DISTINCT)))
        expected, got = common.Totals(), common.Totals()
        for batch in itertools.islice(itertools.cycle(batches), count):
            expected.add(batch)
        began = time.perf_counter()
        if case.mode == "sink":
            sent = itertools.islice(itertools.cycle(batches), count)
            async for answer in self._client.exchange("sink", sent, schema=common.SCHEMA):
                got = common.Totals(**content(answer))
        else:
            async for batch in self._client.exchange("source", [document(count)], schema=JSON):
                got.add(batch)
        seconds = time.perf_counter() - began
        if got != expected:
            raise processes.Failed(f"{got} came, and {expected} was sent")
        nbytes = sum(batch.nbytes for batch in batches) / len(batches) * count
        return {"seconds": seconds, "bytes": nbytes, "mib_s": nbytes / MiB / seconds}

    async def _find(self, *, relayed: bool) -> None:
        carrier = self._client.connection.carrier
        assert isinstance(carrier, StreamCarrier)
        for _ in range(TRIES):
            async for _ in self._client.exchange("source", [document(1)], schema=JSON):
                pass  # the connection is up
            if await self._relayed() == relayed:
                return
            carrier.cut("it is wanted at another worker")
        raise processes.Failed(f"no connection of {TRIES} came to the worker that it should")

    async def _relayed(self) -> bool:
        """What the workers say of the connection."""
        self._process.send_signal(signal.SIGUSR1)
        assert self._process.stderr is not None
        found: list[bool] = []
        for _ in range(2):
            while not (line := await self._process.stderr.readline()).startswith(b"{"):
                if not line:
                    raise processes.Failed("the service has ended")
            connections = json.loads(line)["connections"]
            found += [each["transport"]["link"]["relayed"] for each in connections]
        return any(found)


@asynccontextmanager
async def measured() -> AsyncIterator[Measured]:
    """Starts the service, and connects to it."""
    with tempfile.TemporaryDirectory() as folder:
        cert, key = certificate.write(Path(folder))
        command = [sys.executable, "-m", "aqueduct.cli", "serve", "benchmarks.relayed:service"]
        command += ["--listen", "aqueduct+tls://127.0.0.1:0?resume=60s", "--workers", "2"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--certificate", str(cert), "--key", str(key)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            limit=MiB,
        )
        try:
            assert process.stdout is not None
            address = (await process.stdout.readline()).decode().strip()
            if not address:
                raise processes.Failed("the service did not start")
            address = address.removeprefix("listening on ")
            async with await Client.connect(f"{address}&ca={cert}&server_name=localhost") as client:
                yield Measured(process, client)
        finally:
            process.kill()
            await process.wait()


def run(cases: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measures ``cases`` in turn and yields rows; what failed has ``error`` instead of numbers."""
    count = BATCHES // (QUICK if quick else 1)
    progress = Progress(repeats * sum(len(case.contestants) for case in cases))
    with asyncio.Runner() as runner:
        stack = measured()
        found = runner.run(stack.__aenter__())
        try:
            for repeat, case in itertools.product(range(repeats), cases):
                for contestant in case.contestants[:: -1 if repeat % 2 else 1]:
                    row: dict[str, Any] = {"case": case.name, "contestant": contestant.name}
                    row["repeat"] = repeat
                    try:
                        going = asyncio.wait_for(found.go(case, contestant.name, count), TIMEOUT)
                        row.update(runner.run(going))
                        said = f"{results.number(row['mib_s'])} MiB/s"
                    except (processes.Failed, TimeoutError) as error:
                        said = row["error"] = str(error) or f"no end after {TIMEOUT:g} s"
                    progress.done += 1
                    progress.show(f"{case.name} {contestant.name}: {said}")
                    yield row
        finally:
            runner.run(stack.__aexit__(None, None, None))
    progress.end()


def report(found: results.Run) -> str:
    """A line for each direction."""
    lines = []
    for case in found.cases():
        cells = []
        for name in NAMES:
            values = found.values(case, name, "mib_s").values()
            cells.append(str(results.Spread.of(values)) if values else "-")
        ratios = found.ratios(case, *NAMES, "mib_s")
        cells.append(str(results.Spread.of(ratios)) if ratios else "-")
        lines.append([case, *cells])
    return results.table(["case", "relayed MiB/s", "direct MiB/s", "relayed/direct"], lines)


def select(only: str) -> list[Case]:
    """The cases whose names have one of the words of ``only``."""
    words = [word for word in only.split(",") if word]
    return [case for case in PLAN if not words or any(word in case.name for word in words)]


def main(arguments: list[str] | None = None) -> int:
    benchmark = Benchmark(select, run, report, QUICK)
    return run_command(
        benchmark,
        arguments,
        summary=__doc__ or "",
        only="cases with one of these in their name, a,b,c",
        repeat=7,
    )


if __name__ == "__main__":
    sys.exit(main())
