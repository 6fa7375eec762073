"""Input that is looked for rather than slept for: counted in turns of the loop, never in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.carriers.stream import busy_poll
from aqueduct.carriers.stream.busy_poll import Poller, poller_of
from aqueduct.client.client import Client
from aqueduct.config import ByteStream, Config
from aqueduct.errors import ConfigError
from tests.carriers.streams import SCHEMES, TLS, listen_at
from tests.carriers.users import Pair, linked, met
from tests.support.calls import NUMBERS, numbers

LONG = Config(byte_stream=ByteStream(poll=1000.0))
"""Looks until input comes."""
SHORT = Config(byte_stream=ByteStream(poll=1e-9))
"""Whatever comes is too late."""
OFF = Config(byte_stream=ByteStream(poll=0))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else uses this machine's processors does not count."""
    monkeypatch.setattr(busy_poll, "_YIELDED", float("inf"))


def poller() -> Poller:
    return poller_of(asyncio.get_running_loop())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def connected(kind: str, config: Config) -> AsyncIterator[Pair]:
    async with linked(kind, config) as pair:
        await pair.client.until(lambda: pair.client.begun)
        await pair.server.until(lambda: pair.server.begun)
        yield pair


def test_seconds_below_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Stream\.poll is -0\.1"):
        ByteStream(poll=-0.1)


@pytest.mark.parametrize("kind", SCHEMES)
async def test_the_loop_looks_until_input_comes(kind: str) -> None:
    async with connected(kind, LONG) as pair:
        pair.client.carrier.expect_input()
        before = poller().turns
        await turns(50)
        assert poller().busy
        assert poller().turns >= before + 49
        pair.server.send(0, b"an answer")
        await pair.client.until(lambda: pair.client.total)
        assert not poller().busy
        before = poller().turns
        await turns(50)
        assert poller().turns == before


@pytest.mark.parametrize("kind", SCHEMES)
async def test_what_comes_in_vain_ends_it_and_what_comes_in_time_begins_it_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(kind, SHORT) as pair:
        carrier = pair.client.carrier
        for count in (1, 2):
            carrier.expect_input()
            assert poller().busy
            await turns(2)
            assert not poller().busy
            assert poller().turns == count  # one turn, in which the time was over
        for _ in range(10):
            carrier.expect_input()
            assert not poller().busy
            await turns(2)
        assert poller().turns == 2
        # Too late for a limit that nothing keeps.
        pair.server.send(0, b"late")
        await pair.client.until(lambda: pair.client.total == 4)
        carrier.expect_input()
        assert not poller().busy
        # The same, had the limit been longer.
        monkeypatch.setattr(carrier.transport.expectation, "_limit", 1000.0)  # type: ignore[attr-defined]
        pair.server.send(0, b"soon")
        await pair.client.until(lambda: pair.client.total == 8)
        carrier.expect_input()
        assert poller().busy


async def test_what_came_in_time_allows_few_looks_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected("tcp", LONG) as pair:
        carrier = pair.client.carrier
        for count in range(1, 21):
            carrier.expect_input()
            pair.server.send(0, b"x")
            await pair.client.until(lambda: pair.client.total == count)  # noqa: B023
        monkeypatch.setattr(carrier.transport.expectation, "_limit", 1e-9)  # type: ignore[attr-defined]
        looked = 0
        for _ in range(20):
            carrier.expect_input()
            looked += poller().busy
            await turns(2)
            assert not poller().busy
        assert looked == 4


@pytest.mark.parametrize("kind", SCHEMES)
async def test_nothing_looks_where_it_is_turned_off(kind: str) -> None:
    async with connected(kind, OFF) as pair:
        pair.client.carrier.expect_input()
        assert not poller().busy
        await turns(5)
        assert poller().turns == 0


@pytest.mark.parametrize("connections", [1, 3])
async def test_it_ends_where_others_want_the_processor(
    connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_poll, "_YIELDED", 1e-12)  # whenever they may have it, they take it
    monkeypatch.setattr(busy_poll, "_REST", 1000.0)
    async with AsyncExitStack() as stack:
        pairs = [
            await stack.enter_async_context(connected("tcp", LONG)) for _ in range(connections)
        ]
        pair = pairs[0]
        before = poller().turns
        for one in pairs:
            one.client.carrier.expect_input()
        await turns(20)
        assert not poller().busy
        assert poller().turns == before + 2  # one in which the loop's own work comes first
        pair.client.carrier.expect_input()
        assert not poller().busy  # for a while
        poller().rests = 0.0
        pair.client.carrier.expect_input()
        assert poller().busy
        pair.server.send(0, b"an answer")
        await pair.client.until(lambda: pair.client.total)


async def test_it_rests_the_longer_the_more_often_others_want_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected("unix", LONG) as pair:
        carrier, found = pair.client.carrier, poller()
        rests = []
        monkeypatch.setattr(busy_poll, "_YIELDED", 1e-12)
        for _ in range(10):
            found.rests = 0.0
            carrier.expect_input()
            await met(lambda: not found.busy)
            rests.append(found._rest)
        assert rests == sorted(rests) and rests[0] < rests[-1] == busy_poll._MOST_REST
        monkeypatch.setattr(busy_poll, "_YIELDED", float("inf"))
        for count in range(1, 11):
            found.rests = 0.0
            carrier.expect_input()
            await turns(3)
            assert found.busy
            pair.server.send(0, b"x")
            await pair.client.until(lambda: pair.client.total == count)  # noqa: B023
        assert busy_poll._REST <= found._rest < busy_poll._MOST_REST


async def test_one_poller_serves_all_connections() -> None:
    async with AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(connected("unix", LONG)) for _ in range(8)]
        for pair in pairs:
            pair.client.carrier.expect_input()
            pair.server.carrier.expect_input()
        before = poller().turns
        await turns(100)
        assert 99 <= poller().turns - before <= 101
        for pair in pairs:
            pair.client.send(0, b"a call")
            await pair.server.until(lambda: pair.server.total == 6)  # noqa: B023
        assert poller().busy  # the clients' answers
        for pair in pairs:
            pair.server.send(0, b"an answer")
            await pair.client.until(lambda: pair.client.total == 9)  # noqa: B023
        assert not poller().busy


@pytest.mark.parametrize("kind", SCHEMES)
async def test_the_end_of_the_connection_ends_it(kind: str) -> None:
    async with connected(kind, LONG) as pair:
        pair.client.carrier.expect_input()
        await turns(3)
        pair.client.carrier.close(0, "enough")
        await pair.client.until(lambda: pair.client.lost)
        assert not poller().busy
        pair.client.carrier.expect_input()
        assert not poller().busy
        before = poller().turns
        await turns(20)
        assert poller().turns == before


@asynccontextmanager
async def calling(scheme: str, folder: Path, config: Config) -> AsyncIterator[Client]:
    service = aqueduct.Service("test", config=config)

    @service.handler("double", input=NUMBERS, output=NUMBERS)
    async def double(batch: pa.RecordBatch) -> pa.RecordBatch:
        return numbers(*(2 * value for value in batch["id"].to_pylist()))

    @service.handler("stuck", input=NUMBERS, output=NUMBERS)
    async def stuck(batch: pa.RecordBatch) -> pa.RecordBatch:
        await asyncio.Event().wait()
        return batch

    tls = TLS if scheme == "tls" else None
    async with (
        service.serving(listen_at(scheme, folder), tls=tls, drain=0) as running,
        await Client.connect(running.addresses[0], config=config) as client,
    ):
        yield client


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_calls_of_one_batch_are_looked_for(scheme: str, tmp_path: Path) -> None:
    async with calling(scheme, tmp_path, LONG) as client:
        await turns(20)
        assert poller().turns == 0  # nobody has called: nothing is due
        for value in range(5):
            answer = await client.call("double", numbers(value))
            assert answer["id"].to_pylist() == [2 * value]
            assert poller().turns > value


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_streams_of_batches_are_not(scheme: str, tmp_path: Path) -> None:
    async with calling(scheme, tmp_path, LONG) as client:
        batches = [numbers(value) for value in range(50)]
        found = [
            batch["id"].to_pylist()
            async for batch in client.exchange("double", batches, schema=NUMBERS)
        ]
        assert found == [[2 * value] for value in range(50)]
        assert poller().turns == 0


async def test_nothing_is_looked_for_where_calls_are_rare(tmp_path: Path) -> None:
    async with calling("tcp", tmp_path, SHORT) as client:
        for _ in range(10):
            await client.call("double", numbers(1))
            await met(lambda: not poller().busy)
        # Two in vain for each of the two sides, at most two turns each.
        assert 2 <= poller().turns <= 8


async def test_a_call_that_takes_long_is_not_looked_for_to_its_end(tmp_path: Path) -> None:
    async with calling("tcp", tmp_path, Config(byte_stream=ByteStream(poll=0.02))) as client:
        task = asyncio.ensure_future(client.call("stuck", numbers(1)))
        await met(lambda: poller().turns)
        await met(lambda: not poller().busy)
        before = poller().turns
        await turns(50)
        assert poller().turns == before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
