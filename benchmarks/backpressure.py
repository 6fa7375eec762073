"""A consumer stops reading while far more is offered than anyone may hold.

    python benchmarks/backpressure.py [--offered 10g] [--after 1g] [--only sink,source,exchange]

For each kind of call: the producer offers ``--offered`` bytes, the consumer reads a little, stops
for ``--pause`` seconds, which is longer than the idle timeout, then reads ``--after`` bytes more
and checks every one of them. Nothing but flow control holds the producer back. Server and client
are processes of their own, over QUIC. The result tells how long the producer stood still, how far
it was ahead, and the peak of the memory of both processes (VmHWM). The exit status is 1 if a peak
is above ``--limit``, if the producer was not held back, or if anything was read wrongly.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aqueduct.client.client import Client
from aqueduct.config import Config, Timing
from aqueduct.service.service import Service
from benchmarks import processes, results
from benchmarks.peers import common

KINDS: Final = ("sink", "source", "exchange")
MiB: Final = 1 << 20
UNLIMITED: Final = 1 << 60
"""Of batches in flight, and of their bytes: flow control is on its own."""


@dataclass(frozen=True)
class Trial:
    """One trial; sizes in bytes, times in seconds."""

    kind: str
    offered: int
    before: int
    after: int
    pause: float
    idle: float
    batch: int = MiB

    @property
    def config(self) -> Config:
        # The progress deadline is above the pause: a consumer that rests is no call that hangs.
        timing = Timing(
            idle_timeout=self.idle,
            ping_interval=self.idle / 4,
            progress_deadline=10 * (self.pause + self.idle),
        )
        return Config(timing=timing)


class Producer:
    """Offers batches of which each is different, and notes how long nobody asked for one."""

    def __init__(self, trial: Trial) -> None:
        self.count = trial.offered // trial.batch
        self.pattern = Pattern(trial.batch)
        self.offered = 0
        self.stood_still = 0.0
        self.held_at = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        last = time.monotonic()
        while self.offered < self.count:
            batch = self.pattern.make(self.offered)
            now = time.monotonic()
            if now - last > self.stood_still:
                self.stood_still, self.held_at = now - last, self.offered
            last = now
            self.offered += 1
            yield batch

    def report(self) -> dict[str, Any]:
        """The longest time without being asked for a batch, and how many were given by then."""
        return {"held_at": self.held_at, "stood_still": self.stood_still}


class Consumer:
    """Reads a little, rests, reads the rest of what it wants, and checks all of it."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.pattern = Pattern(trial.batch)
        self.first = trial.before // trial.batch
        self.wanted = self.first + trial.after // trial.batch
        self.read = 0

    async def consume(self, batches: Any) -> None:
        async for batch in batches:
            self.pattern.check(self.read, batch)
            self.read += 1
            if self.read == self.first:
                await asyncio.sleep(self.trial.pause)
            if self.read == self.wanted:
                return
        raise AssertionError(f"the batches ended after {self.read}; {self.wanted} were wanted")

    def report(self) -> dict[str, Any]:
        return {"read": self.read, "read_after": max(0, self.read - self.first)}


class Pattern:
    """Batches that can be told apart and checked whole, made without being kept."""

    def __init__(self, nbytes: int) -> None:
        self.base = common.make_batches(nbytes)[0]

    def make(self, number: int) -> pa.RecordBatch:
        ids = pa.array(self._ids(number))
        return self.base.set_column(0, self.base.schema.field(0), ids)

    def check(self, number: int, batch: pa.RecordBatch) -> None:
        if not batch.equals(self.make(number)):
            raise AssertionError(f"batch {number} is not what was sent")

    def _ids(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        rows = self.base.num_rows
        return np.arange(number * rows, (number + 1) * rows, dtype=np.int64)


def serve(trial: Trial) -> None:
    """The server's process: listens, says where, and reports when its input is closed."""
    producer, consumer = Producer(trial), Consumer(trial)
    service = Service("backpressure", config=trial.config)

    @service.handler("sink", input=common.SCHEMA, kind="sink")
    async def sink(batches: AsyncIterator[pa.RecordBatch]) -> None:
        await consumer.consume(batches)

    @service.handler("source", output=common.SCHEMA, kind="source")
    async def source() -> AsyncIterator[pa.RecordBatch]:
        for batch in producer:
            yield batch

    @service.handler("exchange", input=common.SCHEMA, output=common.SCHEMA)
    async def exchange(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield batch

    def report() -> None:
        sys.stdin.buffer.read()
        found = {"sink": consumer.report(), "source": producer.report()}.get(trial.kind, {})
        print(json.dumps({**found, "memory": common.peak_memory()}), flush=True)
        os._exit(0)

    async def run() -> None:
        async with service.serving("aqueduct://127.0.0.1:0", dev_certificate=True) as running:
            print(json.dumps({"address": running.addresses[0]}), flush=True)
            threading.Thread(target=report, daemon=True).start()
            await asyncio.Event().wait()

    asyncio.run(run())


async def call(trial: Trial, address: str) -> dict[str, Any]:
    """The client's process."""
    producer, consumer = Producer(trial), Consumer(trial)
    async with await Client.connect(address, config=trial.config) as client:
        if trial.kind == "sink":
            await client.sink(
                "sink",
                producer,
                schema=common.SCHEMA,
                in_flight=UNLIMITED,
                in_flight_bytes=UNLIMITED,
            )
        elif trial.kind == "source":
            stream = client.source("source")
            await consumer.consume(stream)
            await stream.aclose()
        else:
            stream = client.exchange(
                "exchange",
                producer,
                schema=common.SCHEMA,
                in_flight=UNLIMITED,
                in_flight_bytes=UNLIMITED,
            )
            await consumer.consume(stream)
            await stream.aclose()
    sent = producer.report() if trial.kind != "source" else {}
    read = consumer.report() if trial.kind != "sink" else {}
    return {**sent, **read, "memory": common.peak_memory()}


def attempt(trial: Trial, limit: int) -> dict[str, Any]:
    """Runs one trial; ``misses`` in the result says what was not as demanded."""
    command = [sys.executable, str(Path(__file__).resolve())]
    told = json.dumps(asdict(trial))
    timeout = trial.pause + 60 + trial.after / (10 * MiB)
    result: dict[str, Any] = {"kind": trial.kind, "misses": []}
    try:
        server, client = processes.run_pair(
            [*command, "--server", told], [*command, "--client", told], timeout
        )
    except processes.Failed as error:
        return {**result, "misses": [str(error)]}
    for side, report in (("server", server), ("client", client)):
        result[f"{side}_memory"] = report.pop("memory")
        result.update(report)
        if result[f"{side}_memory"] > limit:
            result["misses"].append(f"the {side} needed {result[f'{side}_memory'] / MiB:.0f} MiB")
    result["ahead"] = result["held_at"] * trial.batch - trial.before
    if result["read_after"] * trial.batch < trial.after // trial.batch * trial.batch:
        result["misses"].append(f"only {result['read_after']} batches were read after the pause")
    if result["stood_still"] <= trial.idle:
        result["misses"].append(
            f"the producer stood still for {result['stood_still']:.1f} s, less than the idle "
            f"timeout of {trial.idle:g} s: nothing held it back"
        )
    return result


def show(rows: list[dict[str, Any]]) -> str:
    """The table of results."""
    header = ["kind", "producer stood still", "ahead", "read after", "server", "client", "result"]
    lines = []
    for row in rows:
        if "ahead" in row:
            cells = [
                f"{row['stood_still']:.1f} s",
                f"{row['ahead'] / MiB:.0f} MiB",
                f"{row['read_after']} batches",
                f"{row['server_memory'] / MiB:.0f} MiB",
                f"{row['client_memory'] / MiB:.0f} MiB",
            ]
        else:
            cells = ["-"] * 5
        lines.append([row["kind"], *cells, "; ".join(row["misses"]) or "holds"])
    return results.table(header, lines)


def size_of(text: str) -> int:
    """1g, 512m, 64k or plain bytes."""
    unit = {"k": 10, "m": 20, "g": 30}.get(text[-1:].lower())
    try:
        return int(float(text[:-1]) * (1 << unit)) if unit else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, like 512m") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--offered", type=size_of, default=10 << 30, help="10g")
    parser.add_argument("--before", type=size_of, default=64 << 20, help="64m")
    parser.add_argument("--after", type=size_of, default=1 << 30, help="1g")
    parser.add_argument("--limit", type=size_of, default=256 << 20, help="peak memory, 256m")
    parser.add_argument("--pause", type=float, default=15.0, help="seconds (15)")
    parser.add_argument("--idle", type=float, default=5.0, help="idle timeout in seconds (5)")
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
        trial = Trial(**json.loads(args.client))
        print(json.dumps(asyncio.run(call(trial, json.loads(args.address)))), flush=True)
        return 0
    kinds = args.only.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--only {','.join(sorted(unknown))}: known are {', '.join(KINDS)}")
    if args.pause <= args.idle:
        parser.error("--pause must be longer than --idle: that is the point")
    rows = []
    for kind in kinds:
        print(f"{kind}: a pause of {args.pause:g} s ...", file=sys.stderr, flush=True)
        trial = Trial(kind, args.offered, args.before, args.after, args.pause, args.idle)
        rows.append(attempt(trial, args.limit))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(show(rows))
    return 1 if any(row["misses"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
