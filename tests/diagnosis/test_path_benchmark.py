"""The benchmark of a path, against the handler that does nothing, which obeys as all do."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.diagnosis import PathBenchmark
from aqueduct.errors import BadCall, Refused, UnknownHandler
from aqueduct.rpc.benchmark import BENCHMARK, BENCHMARK_QUESTION, question
from aqueduct.testing import FaultyNetwork
from tests.carriers.streams import eventually

LIMIT = 4 << 20
service = aqueduct.Service("measured", benchmark=True)


@pytest.mark.parametrize("scheme", ["aqueduct", "aqueduct+tcp"])
async def test_small_calls_both_directions_and_loss_are_measured(scheme: str) -> None:
    found = PathBenchmark()
    # It ends by bytes, which a busy machine cannot change.
    async with service.serving(f"{scheme}://127.0.0.1:0", dev_certificate=True) as serving:
        async with await aqueduct.Client.connect(serving.addresses[0]) as client:
            await found.run(client, seconds=0.45, size=64 << 10, most=256 << 10)
    figures = found.to_dict()
    assert found.complete
    assert figures["carrier"] == ("quic" if scheme == "aqueduct" else "tcp")
    for way in (found.to_service, found.from_service):
        assert 64 << 10 <= way.bytes <= 256 << 10
        assert way.bytes % (64 << 10) == 0
        assert way.rate == way.bytes / way.seconds > 0
    call = figures["call"]
    assert call["count"] >= 1
    assert 0 < call["least"] <= call["p50"] <= call["p99"] <= call["most"]
    assert figures["round_trip"]["count"] == 10
    assert found.packets_lost is not None
    assert found.loaded_round_trip > 0


async def test_what_was_measured_stays_when_it_is_cancelled() -> None:
    found = PathBenchmark()
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        async with await aqueduct.Client.connect(serving.addresses[0]) as client:
            running = asyncio.create_task(found.run(client, seconds=3000, size=1, most=1))
            await eventually(lambda: len(found.calls) >= 3)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    figures = found.to_dict()
    assert not figures["complete"]
    assert figures["call"]["count"] >= 3
    assert figures["to_service"]["bytes"] == figures["to_service"]["bytes_per_second"] == 0
    assert found.loaded_round_trip > 0


async def test_a_slow_way_gets_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aqueduct.diagnosis.path_benchmark._SLOW", 0.0)
    monkeypatch.setattr("aqueduct.diagnosis.path_benchmark._TRIPS", 0)
    found = PathBenchmark()
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        async with await aqueduct.Client.connect(serving.addresses[0]) as client:
            await found.run(client, seconds=0.3, size=1 << 20, most=128 << 10)
    assert found.to_service.batch == found.from_service.batch == 64 << 10
    assert found.to_service.bytes == found.from_service.bytes == 128 << 10


async def test_a_way_that_stands_still_ends_in_time_with_what_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aqueduct.diagnosis.path_benchmark._GRACE", 0.2)
    found = PathBenchmark()
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        async with FaultyNetwork(serving.addresses[0]) as network:
            async with await aqueduct.Client.connect(network.address) as client:
                running = asyncio.create_task(
                    found.run(client, seconds=0.9, size=64 << 10, most=1 << 40)
                )
                await eventually(lambda: found.to_service.bytes > 0)
                network.stall()
                async with asyncio.timeout(20):
                    await running
                network.resume()
    assert found.to_service.cut
    assert found.to_service.rate > 0
    assert (found.from_service.cut, found.from_service.bytes) == (True, 0)


async def test_a_service_has_the_handler_only_if_it_was_asked_for() -> None:
    with aqueduct.testing.client(aqueduct.Service("plain")) as client:
        with pytest.raises(UnknownHandler):
            client.call(BENCHMARK, question(0))


async def test_the_handler_asks_authorize_as_all_do() -> None:
    closed = aqueduct.Service("closed", benchmark=True, authorize=lambda call: call.token == "t")
    with aqueduct.testing.client(closed) as client:
        with pytest.raises(Refused):
            client.call(BENCHMARK, question(0))
        assert client.call(BENCHMARK, question(5), token="t")["data"][0].as_py() != b""


async def test_the_handler_is_not_listed() -> None:
    assert [handler.name for handler in service.describe().handlers] == []


@pytest.mark.parametrize("asked", [-1, LIMIT + 1, 1 << 62])
async def test_an_answer_has_a_limit(asked: int) -> None:
    with aqueduct.testing.client(service) as client:
        with pytest.raises(BadCall, match=r"answer_bytes is between 0 and .*Calls\.fragment_bytes"):
            client.call(BENCHMARK, question(asked))
        rows = pa.record_batch([[1, 1], [b"", b""]], schema=BENCHMARK_QUESTION)
        with pytest.raises(BadCall, match="batches of one row"):
            client.call(BENCHMARK, rows)
        answer = client.call(BENCHMARK, question(LIMIT))
    assert len(answer["data"][0].as_py()) == LIMIT
