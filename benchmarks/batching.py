"""Many callers of a model that takes one run at a time: with batching, without, beside Ray Serve.

    python -m benchmarks.batching [--repeat N] [--quick] [--json FILE] [--only TEXT] [--list]

The model stands for a GPU: it holds one lock for 5 ms and 2 us a row. Each caller sends 8 rows, and
again once it has its answer. ``crowd`` has 64 callers, ``lonely`` one. ``batched`` puts rows of
different calls together, ``waits`` waits for them for up to 5 ms, ``plain`` does neither. All have
``max_concurrency=1``. Service and callers are a process each, over TCP. Both call ``gc.freeze()``,
so that no collection goes through what was imported.

With ``AQUEDUCT_RAY_PYTHON``, a Python that has ``ray[serve]``, the same model runs as a deployment
of Ray Serve, with ``@serve.batch`` and without. Its callers use a handle.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa

import aqueduct
from benchmarks import processes, results
from benchmarks.peers import common
from benchmarks.peers.ray_batching import ROW_SECONDS, ROWS, RUN_SECONDS, percentiles
from benchmarks.runner import (
    ROOT,
    Benchmark,
    measure_in_turn,
    report_ratios,
    run_command,
    select_words,
)

QUICK: Final = 10
TIMEOUT: Final = 180.0
SECONDS: Final = 5.0
TABLE: Final = ("rows_s", "p50_us", "p99_us")
NUMBERS: Final = pa.schema([("x", pa.int64())])
RAY: Final = os.environ.get("AQUEDUCT_RAY_PYTHON", "")


@dataclass(frozen=True)
class Contestant:
    """A way to serve the model."""

    name: str


@dataclass(frozen=True)
class Case:
    """How many callers there are."""

    name: str
    callers: int
    contestants: tuple[Contestant, ...]


@dataclass(frozen=True)
class Told:
    """What both processes know of a measurement."""

    how: str
    callers: int
    seconds: float


_NAMES: Final = ("aqueduct/plain", "aqueduct/batched", "aqueduct/waits") + (
    ("ray/plain", "ray/batched") if RAY else ()
)
_CONTESTANTS: Final = tuple(map(Contestant, _NAMES))
PLAN: Final = (Case("lonely", 1, _CONTESTANTS), Case("crowd", 64, _CONTESTANTS))
BATCHING: Final[dict[str, dict[str, Any]]] = {
    "aqueduct/plain": {"max_concurrency": 1},
    "aqueduct/batched": {"batch": aqueduct.Batching()},
    "aqueduct/waits": {"batch": aqueduct.Batching(wait=0.005)},
}


# ----------------------------------------------------------------- the two processes


async def serve(told: Told) -> None:
    """The service."""
    service, lock = aqueduct.Service("model"), threading.Lock()

    @service.handler("score", input=NUMBERS, **BATCHING[told.how])
    def score(batch: pa.RecordBatch) -> pa.RecordBatch:
        with lock:
            time.sleep(RUN_SECONDS + ROW_SECONDS * batch.num_rows)
        return batch

    @service.on_start
    def freeze() -> None:
        gc.collect()
        gc.freeze()

    usage = common.Usage()

    def report() -> None:
        sys.stdin.buffer.read()
        print(json.dumps(usage.report()), flush=True)
        os._exit(0)

    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        threading.Thread(target=report, daemon=True).start()
        print(json.dumps({"address": serving.addresses[0]}), flush=True)
        await asyncio.Event().wait()


async def call(told: Told, address: str) -> dict[str, Any]:
    """The callers."""
    took: list[float] = []
    async with await aqueduct.Client.connect(address) as client:

        async def caller(number: int) -> None:
            batch = pa.record_batch({"x": range(number, number + ROWS)}, schema=NUMBERS)
            while time.perf_counter() < end:
                began = time.perf_counter()
                answer = await client.call("score", batch)
                if began >= start:
                    took.append(time.perf_counter() - began)
                if not answer.equals(batch):
                    raise AssertionError("the answer is another caller's")

        await client.call("score", pa.record_batch({"x": [1]}, schema=NUMBERS))
        gc.collect()
        gc.freeze()
        start = time.perf_counter() + told.seconds / 10
        end = start + told.seconds
        await asyncio.gather(*(caller(number) for number in range(told.callers)))
    return percentiles(took, told.seconds)


# ----------------------------------------------------------------- the benchmark


def measure(told: Told) -> dict[str, Any]:
    """One measurement, in fresh processes. Raises Failed."""
    text = json.dumps(asdict(told))
    if told.how.startswith("ray/"):
        script = str(ROOT / "benchmarks" / "peers" / "ray_batching.py")
        return processes.run([RAY, script, text], TIMEOUT)
    command = [sys.executable, str(ROOT / "benchmarks" / "batching.py")]
    _, client = processes.run_pair(
        [*command, "--server", text], [*command, "--client", text], TIMEOUT
    )
    return client


def run(cases: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measures ``cases`` in turn and yields rows."""

    def numbers(case: Case, contestant: Contestant) -> dict[str, Any]:
        seconds = SECONDS / (QUICK if quick else 1)
        return measure(Told(contestant.name, case.callers, seconds))

    yield from measure_in_turn(cases, repeats, TABLE, numbers)


def report(found: results.Run) -> str:
    """A line for each contestant and number."""
    return report_ratios(found, TABLE)


def select(only: str) -> list[Case]:
    """The cases that ``only`` names."""
    return select_words(PLAN, only)


def main(arguments: list[str] | None = None) -> int:
    """The command, or one of the two processes of a measurement. The exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--server"]:
        common.end_with_parent()
        asyncio.run(serve(Told(**json.loads(arguments[1]))))
    if arguments[:1] == ["--client"]:
        common.end_with_parent()
        told, address = Told(**json.loads(arguments[1])), json.loads(arguments[2])
        print(json.dumps(asyncio.run(call(told, address))), flush=True)
        os._exit(0)
    benchmark = Benchmark(select, run, report, QUICK)
    return run_command(
        benchmark, arguments, summary=__doc__ or "", only="words in cases and peers", repeat=5
    )


if __name__ == "__main__":
    sys.exit(main())
