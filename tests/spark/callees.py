"""Services for the tests of the engine; as a program, one of them in a process of its own.

``python -m tests.spark.callees ADDRESS`` listens there and prints its address.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import aqueduct
from aqueduct.config import Config, Timing
from spark_udfs.calls.partition import BatchAnswer, CallSpec, run
from spark_udfs.worker.metrics import TaskMetrics
from spark_udfs.worker.task import NOWHERE, TaskContext

ROOT = Path(__file__).parent.parent.parent
NUMBERS = pa.schema([("id", pa.int64())])


def batch(value: int, rows: int = 1) -> pa.RecordBatch:
    """One batch, told from others by its value."""
    return pa.record_batch({"id": pa.array([value] * rows, pa.int64())}, schema=NUMBERS)


def value_of(found: pa.RecordBatch | None) -> int:
    assert found is not None
    return int(found["id"][0].as_py())


class Callee:
    """A service that writes down what it was asked."""

    def __init__(self, name: str = "callee", **options: Any) -> None:
        timing = Timing(close_linger=0.2, drain_timeout=5)
        self.service = aqueduct.Service(name, **{"config": Config(timing=timing), **options})
        self.asked: Counter[int] = Counter()
        self.calls: dict[int, Any] = {}
        self.at_work = self.most_at_work = 0
        self.lock = threading.Lock()
        self.gates: dict[int, threading.Event] = {}

        @self.service.handler(
            "square", input=NUMBERS, output=NUMBERS, concurrency=8, idempotent=True
        )
        def square(batch, call):
            return self.squared(batch, call)

        @self.service.handler("square once", input=NUMBERS, output=NUMBERS, concurrency=8)
        def square_once(batch, call):
            return self.squared(batch, call)

        @self.service.handler("sums", input=NUMBERS, output=NUMBERS, idempotent=True)
        async def sums(batches, call):
            total = 0
            async for batch in batches:
                self.note(batch, call)
                total += pc.sum(batch["id"]).as_py()
                yield pa.record_batch({"id": [total]}, schema=NUMBERS)
            yield pa.record_batch({"id": [-total]}, schema=NUMBERS)

        @self.service.handler(
            "gated", input=NUMBERS, output=NUMBERS, concurrency=8, idempotent=True
        )
        async def gated(batch, call):
            value = self.note(batch, call)
            if value < 1000:  # others are let through
                await asyncio.to_thread(self.gate(value).wait, 30)
            return batch

        @self.service.handler("gated once", input=NUMBERS, output=NUMBERS, concurrency=8)
        async def gated_once(batch, call):
            return await gated(batch, call)

    def note(self, batch: pa.RecordBatch, call: Any) -> int:
        value = value_of(batch)
        with self.lock:
            self.asked[value] += 1
            self.calls[call.number] = call
        return value

    def squared(self, batch: pa.RecordBatch, call: Any) -> pa.RecordBatch:
        value = self.note(batch, call)
        with self.lock:
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            if value < 0:
                raise ValueError(f"{value} is below zero")
            return pa.record_batch({"id": pc.multiply(batch["id"], batch["id"])}, schema=NUMBERS)
        finally:
            with self.lock:
                self.at_work -= 1

    def gate(self, value: int) -> threading.Event:
        with self.lock:
            return self.gates.setdefault(value, threading.Event())


def calling(*addresses: str, handler: str = "square", **options: Any) -> CallSpec:
    """The engine's arguments. On a busy machine no call is so slow that another is begun."""
    usual = {"schema": None, "in_flight": 8, "in_flight_bytes": 1 << 20}
    given = {**usual, "backoff": 0.01, "hedge": 60.0, **options}
    return CallSpec(addresses=addresses, handler=handler, **given)


def answers(
    call: CallSpec,
    batches: Any,
    *,
    place: TaskContext = NOWHERE,
    numbers: TaskMetrics | None = None,
    **more: Any,
) -> Any:
    """What ``run`` gives, a generator."""
    counted = TaskMetrics() if numbers is None else numbers
    return run(call, batches, schema=NUMBERS, place=place, numbers=counted, **more)


def check_squares(found: list[BatchAnswer], count: int, *, ordered: bool = True) -> None:
    """That each of ``count`` batches has its one answer."""
    numbers = [answer.number for answer in found]
    assert (numbers if ordered else sorted(numbers)) == list(range(count))
    for answer in found:
        assert answer.error is None
        assert value_of(answer.batch) == answer.number**2


def until(condition: Any, seconds: float = 20) -> None:
    """Waits until ``condition()`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Neighbour:
    """A callee in a process of its own, on a port that does not change."""

    def __init__(self, options: str = "") -> None:
        self.port = free_port()
        self.address = f"aqueduct+tcp://127.0.0.1:{self.port}{options}"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.spark.callees", self.address],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        assert any(str(self.port) in line for line in self.process.stdout)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


if __name__ == "__main__":
    Callee().service.run(sys.argv[1])
