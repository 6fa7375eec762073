"""Many large calls at once: how much memory a service takes beside its budget.

    python benchmarks/memory_budget.py [--calls 200] [--size 100m] [--budget 512m] [--only sink,...]

A client makes ``--calls`` calls of ``--size`` bytes over ``--connections`` connections, all at
once, to a service whose ``Flow.process_receive_budget`` and ``Flow.process_send_budget`` are
``--budget``. Both are processes of their own.

- ``sink``: each call sends one batch of that size, and the handler counts its rows.
- ``source``: each call is answered by one, whose reader pauses before it reads and after.
- ``exchange``: each call sends one such batch and is answered by it, to a reader that pauses so.
- ``clients``, ``threads``: each call pulls batches of a fifth of that size, made as it asks for
  them, and is answered by one row for each. All calls are of one process, which is an asyncio
  client or a ``SyncClient`` with a thread for each call. Half of the calls, at most 40.
- ``collect``: ``--collectors`` handlers keep ``--collected`` bytes each, in batches of 8 MiB; they
  have to finish, whatever that takes.

One such call is made first, and the memory that each process has then (VmRSS) is taken from its
peak in all that follows (VmHWM). The exit status is 1 if a call fails, or if a peak is above the
budget, one batch (of those that calls pull: two) and a tenth of all that.

The processes of ``clients`` and ``threads`` run with MALLOC_MMAP_THRESHOLD_=131072. Otherwise
glibc keeps freed memory for each thread, and the peak measures that instead of what calls hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aqueduct.client.client import Client
from aqueduct.client.sync_client import SyncClient
from aqueduct.config import Config, Flow, Timing
from aqueduct.service.service import Service
from benchmarks import processes, results
from benchmarks.backpressure import size_of
from benchmarks.peers import common

KINDS: Final = ("sink", "source", "exchange", "clients", "threads", "collect")
MiB: Final = 1 << 20
SCHEMA: Final = pa.schema([("x", pa.int64())])
COLLECTED: Final = 8 * MiB
"""Bytes of one batch of those that are collected."""
PULLED: Final = 5
"""Batches that a call of ``clients`` or ``threads`` pulls."""
PULLING: Final = ("clients", "threads")


@dataclass(frozen=True)
class Trial:
    """One trial; sizes in bytes, times in seconds."""

    kind: str
    calls: int
    size: int
    budget: int
    connections: int
    pause: float
    address: str = "aqueduct+tcp://127.0.0.1:0"
    limit: int = 0
    """What is allowed instead of what follows from the budget."""

    @property
    def config(self) -> Config:
        flow = Flow(process_receive_budget=self.budget, process_send_budget=self.budget)
        # Readers pause for as long as they like: nobody is to give up before they go on.
        return Config(flow=flow, timing=Timing(progress_deadline=600))

    @property
    def client_config(self) -> Config:
        """Where the service is measured, its clients send all that they have at once."""
        return self.config if self.kind in PULLING else Config(timing=self.config.timing)

    @property
    def environment(self) -> dict[str, str] | None:
        """Of both processes; None: that of this one."""
        if self.kind in PULLING:  # glibc keeps blocks of this size that are freed
            return {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
        return None

    @property
    def allowed(self) -> int:
        """Bytes that a peak may be above the memory after one call."""
        batches = 2 * self.pulled if self.kind in PULLING else self.size
        return self.limit or int((self.budget + batches) * 1.1)

    @property
    def pulled(self) -> int:
        """Bytes of one batch that a call pulls."""
        return self.size // PULLED


def batch_of(size: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(np.arange(size // 8))], schema=SCHEMA)


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")


class Peak:
    """What this process takes beside what it has at first."""

    def __init__(self) -> None:
        self.first = 0

    def begin(self) -> None:
        """The peak is counted anew from here on."""
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        self.first = memory("VmRSS")

    @property
    def above(self) -> int:
        return memory("VmHWM") - self.first


def serve(trial: Trial) -> None:
    """The server's process: listens, says where, and reports when its input is closed."""
    service, peak = Service("memory", config=trial.config), Peak()

    @service.handler("begin", kind="sink", input=SCHEMA)
    async def begin(batches: AsyncIterator[pa.RecordBatch]) -> None:
        peak.begin()

    @service.handler("sink", kind="sink", input=SCHEMA)
    def sink(batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            del batch
        return {"rows": rows}

    @service.handler("source", kind="source", output=SCHEMA)
    def source() -> Iterator[pa.RecordBatch]:
        yield batch_of(trial.size)

    @service.handler("exchange", input=SCHEMA, output=SCHEMA)
    def exchange(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = batch.num_rows
            del batch
            yield batch_of(rows * 8)

    @service.handler("one row", input=SCHEMA, output=SCHEMA)
    def one_row(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            del batch  # a slice of it would keep all of it
            yield batch_of(8)

    @service.handler("collect", kind="sink", input=SCHEMA)
    def collect(batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
        return {"rows": sum(batch.num_rows for batch in list(batches))}

    def report() -> None:
        sys.stdin.buffer.read()
        print(json.dumps({"above": peak.above}), flush=True)
        os._exit(0)

    async def run() -> None:
        async with service.serving(trial.address) as running:
            print(json.dumps({"address": running.addresses[0]}), flush=True)
            threading.Thread(target=report, daemon=True).start()
            await asyncio.Event().wait()

    asyncio.run(run())


def fresh(trial: Trial) -> Iterator[pa.RecordBatch]:
    """Batches that are made as they are asked for, and that nobody else keeps."""
    for _ in range(PULLED):
        yield batch_of(trial.pulled)


def call_in_threads(trial: Trial, address: str) -> dict[str, Any]:
    """The client's process, with a thread for each call."""
    client = SyncClient(address, config=trial.client_config)

    def one(_: int) -> int:
        stream = client.exchange("one row", fresh(trial), schema=SCHEMA)
        return sum(answer.num_rows for answer in stream)

    def tried(index: int) -> int | Exception:
        try:
            return one(index)
        except Exception as error:  # noqa: BLE001  it is reported
            return error

    assert one(0) == PULLED
    peak = Peak()
    client.sink("begin", [], schema=SCHEMA)
    peak.begin()
    began = time.monotonic()
    with ThreadPoolExecutor(trial.calls) as pool:
        found = list(pool.map(tried, range(trial.calls)))
    seconds = time.monotonic() - began
    above = peak.above
    client.close()
    failed = [str(each) for each in found if each != PULLED]
    return {"failed": failed[:3], "failures": len(failed), "seconds": seconds, "above": above}


async def call(trial: Trial, address: str) -> dict[str, Any]:
    """The client's process."""
    batch = batch_of(COLLECTED if trial.kind == "collect" else trial.size)

    async def one(client: Client) -> int:
        if trial.kind == "clients":
            stream = client.exchange("one row", fresh(trial), schema=SCHEMA)
            return sum([answer.num_rows async for answer in stream])
        if trial.kind in ("source", "exchange"):
            rows = 0
            if trial.kind == "source":
                stream = client.source("source")
            else:
                stream = client.exchange("exchange", [batch], schema=SCHEMA)
            await asyncio.sleep(trial.pause)
            async for answer in stream:
                rows += answer.num_rows
                await asyncio.sleep(trial.pause)
                del answer
            return rows
        batches = [batch] * max(1, trial.size // COLLECTED if trial.kind == "collect" else 1)
        return (await client.sink(trial.kind, batches, schema=SCHEMA))["rows"]

    clients = [
        await Client.connect(address, config=trial.client_config) for _ in range(trial.connections)
    ]
    wanted = trial.size // 8
    if trial.kind == "collect":
        wanted = trial.size // COLLECTED * (COLLECTED // 8)
    if trial.kind == "clients":
        wanted = PULLED
        del batch
    assert await one(clients[0]) == wanted
    peak = Peak()
    await clients[0].sink("begin", [], schema=SCHEMA)
    peak.begin()
    began = time.monotonic()
    found = await asyncio.gather(
        *(one(clients[index % len(clients)]) for index in range(trial.calls)),
        return_exceptions=True,
    )
    seconds = time.monotonic() - began
    failed = [str(each) for each in found if each != wanted]
    above = peak.above
    for client in clients:
        await client.close()
    return {"failed": failed[:3], "failures": len(failed), "seconds": seconds, "above": above}


def attempt(trial: Trial, timeout: float) -> dict[str, Any]:
    """Runs one trial; ``misses`` in the result says what was not as demanded."""
    command = [sys.executable, str(Path(__file__).resolve())]
    told = json.dumps(asdict(trial))
    result: dict[str, Any] = {**asdict(trial), "allowed": trial.allowed, "misses": []}
    try:
        server, client = processes.run_pair(
            [*command, "--server", told],
            [*command, "--client", told],
            timeout,
            environment=trial.environment,
        )
    except processes.Failed as error:
        return {**result, "misses": [str(error)]}
    result.update(
        seconds=client["seconds"], server_above=server["above"], client_above=client["above"]
    )
    if client["failures"]:
        result["misses"].append(f"{client['failures']} calls failed: {client['failed']}")
    if trial.kind != "collect":
        # What calls pull is of the client alone; ``sink`` measures who receives it.
        for side in ("client",) if trial.kind in PULLING else ("server", "client"):
            if result[f"{side}_above"] > trial.allowed:
                result["misses"].append(
                    f"the {side} took {result[f'{side}_above'] / MiB:.0f} MiB, and "
                    f"{trial.allowed / MiB:.0f} MiB are allowed"
                )
    return result


def show(rows: list[dict[str, Any]]) -> str:
    """The table of results."""
    header = ["kind", "calls", "size", "seconds", "server above", "client above", "result"]
    lines = []
    for row in rows:
        cells = ["-"] * 3
        if "seconds" in row:
            cells = [
                f"{row['seconds']:.1f}",
                f"{row['server_above'] / MiB:.0f} MiB",
                f"{row['client_above'] / MiB:.0f} MiB",
            ]
        size = f"{row['size'] / MiB:.0f} MiB"
        lines.append(
            [row["kind"], str(row["calls"]), size, *cells, "; ".join(row["misses"]) or "holds"]
        )
    return results.table(header, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=200, help="200")
    parser.add_argument("--size", type=size_of, default=10**8, help="of one call (100 MB)")
    parser.add_argument("--budget", type=size_of, default=512 * MiB, help="512m")
    parser.add_argument("--connections", type=int, default=16, help="16")
    parser.add_argument("--collectors", type=int, default=8, help="8")
    parser.add_argument("--collected", type=size_of, default=1 << 30, help="1g")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds that readers pause (0.5)")
    parser.add_argument("--listen", default="aqueduct+tcp://127.0.0.1:0", help="where to serve")
    parser.add_argument("--allowed", type=size_of, default=0, help="peak beside the first call")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one kind (600)")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of calls")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("address", nargs="?", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.server:
        common.end_with_parent()
        serve(Trial(**json.loads(args.server)))
        return 1
    if args.client:
        common.end_with_parent()
        trial, address = Trial(**json.loads(args.client)), json.loads(args.address)
        if trial.kind == "threads":
            found = call_in_threads(trial, address)
        else:
            found = asyncio.run(call(trial, address))
        print(json.dumps(found), flush=True)
        return 0
    kinds = args.only.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--only {','.join(sorted(unknown))}: known are {', '.join(KINDS)}")
    rows = []
    for kind in kinds:
        calls, size = args.calls, args.size
        if kind == "collect":
            calls, size = args.collectors, args.collected
        elif kind in PULLING:
            calls = min(calls // 2, 40)
        trial = Trial(
            kind,
            calls,
            size,
            args.budget,
            args.connections,
            args.pause,
            address=args.listen,
            limit=args.allowed,
        )
        print(f"{kind}: {calls} calls ...", file=sys.stderr, flush=True)
        rows.append(attempt(trial, args.timeout))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(show(rows))
    return 1 if any(row["misses"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
