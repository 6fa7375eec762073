"""One small batch after the other, each answered before the next: both sides look for input."""

from __future__ import annotations

import asyncio
from collections import Counter

import pyarrow as pa
import pytest

from aqueduct.carriers.stream.connection import StreamCarrier
from aqueduct.client.client import Client
from aqueduct.service.service import Service

BODY = pa.schema([pa.field("body", pa.binary())])
ROUNDS = 20


def body(size: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([bytes(size)], pa.binary())], schema=BODY)


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often input was expected, by whether it was the client that did."""
    counted: Counter[bool] = Counter()
    expect_input = StreamCarrier.expect_input

    def counting(carrier: StreamCarrier) -> None:
        counted[carrier.is_client] += 1
        expect_input(carrier)

    monkeypatch.setattr(StreamCarrier, "expect_input", counting)
    return counted


async def play(size: int, at_once: int, *, source: str) -> list[int]:
    """Batches of ``size`` bytes, ``at_once`` of them sent before an answer is waited for."""
    service = Service("ping-pong")
    answered = asyncio.Semaphore(at_once)
    sizes: list[int] = []

    @service.handler("echo", input=BODY, output=BODY)
    async def echo(batches):
        async for batch in batches:
            yield batch

    async def one_by_one():
        for _ in range(ROUNDS * at_once):
            await answered.acquire()
            yield body(size)

    batches = one_by_one() if source == "async" else (body(size) for _ in range(ROUNDS * at_once))
    async with (
        service.serving("aqueduct+tcp://127.0.0.1:0") as running,
        await Client.connect(running.addresses[0]) as client,
    ):
        async with asyncio.timeout(30):
            async for batch in client.exchange("echo", batches, schema=BODY):
                sizes.append(len(batch["body"][0].as_py()))
                answered.release()
    return sizes


async def test_a_client_polls_for_the_answer_to_one_small_batch(expected: Counter[bool]) -> None:
    assert await play(200, 1, source="async") == [200] * ROUNDS
    assert expected[True] >= ROUNDS
    assert expected[False] >= ROUNDS - 1  # the first time nothing was answered


@pytest.mark.parametrize(("size", "at_once", "source"), [(20_000, 1, "async"), (200, 8, "plain")])
async def test_a_client_does_not_poll_for_large_answers_or_many(
    expected: Counter[bool], size: int, at_once: int, source: str
) -> None:
    assert await play(size, at_once, source=source) == [size] * (ROUNDS * at_once)
    assert expected[True] <= ROUNDS
    assert expected[False] <= ROUNDS
