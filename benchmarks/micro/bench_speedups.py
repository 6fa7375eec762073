"""The compiled modules beside their models of tests/reference, on one core.

Run it with ``pytest benchmarks/micro/bench_speedups.py``. Each group does the same work twice;
what is
timed stands in its name, and ``operations`` in the extra information says how many of it a round
has. The models are slow on purpose: they are the yardstick of what compiling gives, not of others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from aqueduct._speedups import channels as codec
from aqueduct._speedups.base import buffers, ranges, varint
from aqueduct._speedups.channels import tracker
from tests.reference import codec as model_codec
from tests.reference import range_set as model_ranges
from tests.reference import tracker as model_tracker

PAYLOAD = bytes(range(200))
HEADERS = ((b"batch-4f1c9a", b"\x01"),)
MESSAGES = 1000
HOLES = 400
MiB = 1 << 20
ROUTE = codec.encode_route_to(0)

Benchmark = Any


def measure(benchmark: Benchmark, operations: int, work: Callable[[], Any]) -> Any:
    """Times ``work``, which does ``operations`` of what the group is about."""
    benchmark.extra_info["operations"] = operations
    return benchmark(work)


def messages(headers: codec.Headers) -> bytes:
    return ROUTE + b"".join(
        b"".join(codec.encode_message(num, PAYLOAD, headers)) for num in range(MESSAGES)
    )


@pytest.mark.benchmark(group="varint: encode and decode 1 to 10 bytes")
@pytest.mark.parametrize("kind", ["compiled", "model"])
def test_varints(benchmark: Benchmark, kind: str) -> None:
    numbers = [1 << shift for shift in range(64)]
    if kind == "compiled":

        def work() -> list[int]:
            return [varint.decode(varint.encode(number))[0] for number in numbers]
    else:

        def work() -> list[int]:
            encoded = [model_codec.varint(number) for number in numbers]
            return [model_codec.Model(data, False, False).number() for data in encoded]

    assert measure(benchmark, len(numbers), work) == numbers


@pytest.mark.parametrize("headers", [(), HEADERS], ids=["plain", "with a header"])
@pytest.mark.parametrize("kind", ["compiled", "model"])
@pytest.mark.benchmark(group="codec: encode messages of 200 bytes")
def test_encode(benchmark: Benchmark, kind: str, headers: codec.Headers) -> None:
    if kind == "compiled":
        encode = codec.encode_message

        def work() -> int:
            return sum(len(encode(num, PAYLOAD, headers)[0]) for num in range(MESSAGES))
    else:

        def work() -> int:
            return sum(
                len(model_codec.encode_frame(("MESSAGE", num, headers, (), PAYLOAD)))
                for num in range(MESSAGES)
            )

    assert measure(benchmark, MESSAGES, work) == len(messages(headers)) - len(ROUTE)


@pytest.mark.parametrize("headers", [(), HEADERS], ids=["plain", "with a header"])
@pytest.mark.parametrize("kind", ["compiled", "model"])
@pytest.mark.benchmark(group="codec: decode messages of 200 bytes")
def test_decode(benchmark: Benchmark, kind: str, headers: codec.Headers) -> None:
    data = messages(headers)
    if kind == "compiled":

        def work() -> int:
            decoder = codec.FrameDecoder(from_server=False)
            decoder.feed(data)
            count = 0
            while decoder.next() is not None:
                count += 1
            return count
    else:

        def work() -> int:
            return len(model_codec.decode(data, from_server=False)[0])

    assert measure(benchmark, MESSAGES, work) == MESSAGES + 1


@pytest.mark.parametrize("chunk", [1200, 16_000, 64 << 10, 256 << 10])
@pytest.mark.benchmark(group="codec: decode one message of 1 MiB, fed in chunks")
def test_land(benchmark: Benchmark, chunk: int) -> None:
    head, body = codec.encode_message(0, random.Random(1).randbytes(MiB))
    data = bytes(head) + bytes(body)
    pieces = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    decoder = codec.FrameDecoder(from_server=False)
    decoder.feed(ROUTE)
    decoder.next()

    def work() -> Any:
        frame = None
        for piece in pieces:
            decoder.feed(piece)
            frame = decoder.next()
        return frame

    assert bytes(measure(benchmark, MiB, work).payload) == body


@pytest.mark.benchmark(group="codec: encode one message of 1 MiB")
def test_pass_on(benchmark: Benchmark) -> None:
    payload = bytes(MiB)
    before = buffers.bytes_copied()
    assert measure(benchmark, 1, lambda: codec.encode_message(0, payload))[1] is payload
    assert buffers.bytes_copied() == before


@pytest.mark.benchmark(group="buffers: 100 buffers through a scatter list")
@pytest.mark.parametrize("kind", ["compiled", "joined"])
def test_scatter(benchmark: Benchmark, kind: str) -> None:
    parts = [bytes(8192)] * 100

    def scattered() -> int:
        scatter = buffers.GatherList()
        scatter.extend(parts)
        taken = 0
        while scatter.nbytes:
            taken += sum(map(len, scatter.take(60_000)))
        return taken

    def joined() -> int:
        whole, taken = b"".join(parts), 0
        while taken < len(whole):
            taken += len(whole[taken : taken + 60_000])
        return taken

    work = scattered if kind == "compiled" else joined
    assert measure(benchmark, len(parts), work) == 100 * 8192


@pytest.mark.benchmark(group="ranges: every other number at random, then the rest")
@pytest.mark.parametrize("kind", ["compiled", "model"])
def test_ranges(benchmark: Benchmark, kind: str) -> None:
    shuffle = random.Random(3).sample
    order = [
        *shuffle(range(0, 2 * HOLES, 2), HOLES),
        *shuffle(range(1, 2 * HOLES, 2), HOLES),
    ]
    make: Any = ranges.RangeSet if kind == "compiled" else model_ranges.RangeSet

    def work() -> Any:
        numbers = make()
        for number in order:
            numbers.add(number, number + 1)
        return numbers

    assert list(measure(benchmark, len(order), work)) == [(0, 2 * HOLES)]


@pytest.mark.benchmark(group="ranges: one number more among 100,000 holes, and one less")
def test_ranges_with_many_holes(benchmark: Benchmark) -> None:
    numbers = ranges.RangeSet((number, number + 1) for number in range(0, 400_000, 4))

    def work() -> None:
        for number in range(2, 400_000, 4000):
            numbers.add(number, number + 1)
            numbers.remove(number, number + 1)

    measure(benchmark, 200, work)
    assert len(numbers) == 100_000


@pytest.mark.benchmark(group="tracker: messages received in order, acked by tens, settled")
@pytest.mark.parametrize("kind", ["compiled", "model"])
def test_tracker(benchmark: Benchmark, kind: str) -> None:
    module: Any = tracker if kind == "compiled" else model_tracker

    def work() -> bool:
        sent, received = module.SentNumbers(), module.ReceivedNumbers()
        for _ in range(20):
            for _ in range(10):
                received.add(sent.take())
            ranges = received.take_ack()
            sent.ack(codec.AckReliable(ranges).block if kind == "compiled" else ranges)
        return bool(sent.unacked == 0 and received.complete(200))

    assert measure(benchmark, 200, work)
