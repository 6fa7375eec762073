"""The bpmux core on one processor: what a chunk costs, sent with its scheduler, and received.

Run it with ``pytest benchmarks/micro/bench_bpmux.py``. ``operations`` in the extra information
says how
many chunks a round has. Payloads are passed on, not copied, so their size hardly matters above
4 KiB; the reference is the plain model of tests/reference, which receives whole chunks.
"""

from __future__ import annotations

from typing import Any

import pytest

from aqueduct.config import Bpmux as Settings
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import SINK_OUT, STREAM_IN, Entity
from tests.reference import bpmux as model

CHUNKS = 500
AMPLE = 1 << 60
SIZES = pytest.mark.parametrize("size", [100, 5000, 1 << 16])

Benchmark = Any


def talking() -> tuple[Mux, Entity, Mux, Entity]:
    """A sink with all credit from one core to another."""
    sender, receiver = Mux(Settings(chunk=1 << 16)), Mux()
    sink = sender.open_sink(credit=9, keep=9)
    receiver.receive_data(b"".join(sender.take(1 << 20)[0]))
    stream = receiver.find(STREAM_IN, 1)
    assert stream is not None
    receiver.credit(stream, AMPLE)
    sender.receive_data(b"".join(receiver.take(1 << 20)[0]))
    receiver.events_received()
    sender.events_received()
    return sender, sink, receiver, stream


def measure(benchmark: Benchmark, work: Any) -> Any:
    benchmark.extra_info["operations"] = CHUNKS
    return benchmark(work)


@pytest.mark.benchmark(group="bpmux: write and take, a chunk each")
@SIZES
def test_sending(benchmark: Benchmark, size: int) -> None:
    sender, sink, _, _ = talking()
    data = bytes(size)

    def work() -> int:
        total = 0
        for _ in range(CHUNKS):
            sender.write(sink, data)
            total += sender.take(1 << 18)[1]
        return total

    assert measure(benchmark, work) > CHUNKS * size


@pytest.mark.benchmark(group="bpmux: take of eight sinks in turn")
def test_scheduling(benchmark: Benchmark) -> None:
    sender, *_ = talking()
    sinks = [sender.open_sink() for _ in range(8)]
    sender.take(1 << 20)
    for sink in sinks:
        sink.credit_out = AMPLE
    data = bytes((CHUNKS << 16) // 8)

    def work() -> int:
        for sink in sinks:
            sender.write(sink, data)
        total = 0
        while not sender.idle:
            total += len(sender.take(1 << 16)[2])
        return total

    assert measure(benchmark, work) >= CHUNKS - 8
    assert sender.count(SINK_OUT) == 10


@pytest.mark.benchmark(group="bpmux: receive a chunk and drain its event")
@SIZES
@pytest.mark.parametrize("kind", ["compiled", "model"])
def test_receiving(benchmark: Benchmark, kind: str, size: int) -> None:
    data = model.encode(model.Chunk("Out-Sink", 1, bytes(size)))
    if kind == "model":
        endpoint = model.Endpoint()
        endpoint.maps["stream_in"][1] = model.Entity(credit_in=AMPLE)

        def work() -> int:
            for _ in range(CHUNKS):
                endpoint.receive(model.Chunk("Out-Sink", 1, data[-size:]))
            endpoint.delivered.clear()
            return CHUNKS
    else:
        _, _, receiver, stream = talking()

        def work() -> int:
            total = 0
            for _ in range(CHUNKS):
                receiver.receive_data(data)
                total += len(receiver.events_received())
            stream.credit_in = AMPLE
            return total

    assert measure(benchmark, work) == CHUNKS
