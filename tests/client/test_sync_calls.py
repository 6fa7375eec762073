"""Calls of one batch by a sync client: by the thread that waits, where nobody else is at it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import (
    ConnectionLost,
    DeadlineExceeded,
    HandlerFailed,
    LocalProtocolError,
    SchemaMismatch,
)
from tests.support.calls import NUMBERS, config, numbers, served, sync_client, values

LONG = 20.0


@pytest.fixture
def held():
    """Keeps the handler ``hold`` until it is set."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def begun():
    """Set when ``hold`` has begun."""
    return threading.Event()


@pytest.fixture
def service(held, begun):
    service = aqueduct.Service("test", config=config(calls={"unary_bytes": 4096}))

    @service.handler("double", input=NUMBERS, output=NUMBERS)
    async def double(batches):
        async for batch in batches:
            if batch.num_rows and batch["id"][0].as_py() < 0:
                raise ValueError("below zero")
            yield pa.record_batch({"id": pa.compute.multiply(batch["id"], 2)}, schema=NUMBERS)

    @service.handler("many", input=NUMBERS, output=NUMBERS)
    async def many(batches):
        async for batch in batches:
            for number in batch["id"].to_pylist():
                yield numbers(*range(number))

    @service.handler("told", input=NUMBERS, output=pa.schema([("said", pa.string())]))
    async def told(batches, call):
        async for _ in batches:
            said = [call.write_key, call.attempt, call.token or "", *map(str, call.headers.items())]
            yield pa.record_batch({"said": said})

    @service.handler("hold", input=NUMBERS, output=NUMBERS)
    def hold(batch, call):
        begun.set()
        while not held.wait(0.01):
            call.check()
        return batch

    return service


@pytest.fixture(params=["tcp", "quic", "draft"])
def carrier(request):
    return request.param


@pytest.fixture
def client(service, carrier):
    with sync_client(service, carrier) as client:
        yield client


def test_a_call_that_takes_longer_is_gone_on_with_by_the_loop(client, held, begun):
    with ThreadPoolExecutor() as pool:
        call = pool.submit(client.call, "hold", numbers(3))
        assert begun.wait(LONG)
        assert values([client.call("double", numbers(4))]) == [[8]]
        held.set()
        assert values([call.result(LONG)]) == [[3]]


def test_calls_are_answered_while_another_thread_waits(client, held, begun):
    with ThreadPoolExecutor() as pool:
        call = pool.submit(client.call, "hold", numbers(3))
        assert begun.wait(LONG)
        for number in range(5):
            assert values([client.call("double", numbers(number))]) == [[2 * number]]
        held.set()
        assert values([call.result(LONG)]) == [[3]]


def test_calls_are_answered_while_batches_are_under_way(client):
    asked, more = threading.Event(), threading.Event()

    def batches():
        yield numbers(1)
        asked.set()
        assert more.wait(LONG)
        yield numbers(2)

    with ThreadPoolExecutor() as pool:
        rest = pool.submit(list, client.exchange("double", batches(), schema=NUMBERS))
        assert asked.wait(LONG)
        for number in range(5):
            assert values([client.call("double", numbers(number))]) == [[2 * number]]
        more.set()
        assert values(rest.result(LONG)) == [[2], [4]]


def test_calls_may_be_made_within_another_event_loop(client):
    async def calls():
        for number in range(5):
            assert values([client.call("double", numbers(number))]) == [[2 * number]]

    asyncio.run(calls())


def test_many_threads_call_at_once(client):
    def calls(first):
        return [values([client.call("double", numbers(first + k))]) for k in range(50)]

    with ThreadPoolExecutor(8) as pool:
        for first, found in zip(range(8), pool.map(calls, range(8)), strict=True):
            assert found == [[[2 * (first + k)]] for k in range(50)]


def test_what_a_call_says_of_itself_arrives(client):
    for _ in range(2):
        said = client.call(
            "told", numbers(1), write_key="r", attempt="a", token="t", headers={"key": "value"}
        )
        assert said["said"].to_pylist() == ["r", "a", "t", "('key', 'value')"]


def test_a_token_is_the_client_s_or_the_call_s(service):
    with sync_client(service, "tcp", token="of all") as client:
        for _ in range(2):
            assert client.call("told", numbers(1))["said"].to_pylist()[2] == "of all"
            assert client.call("told", numbers(1), token="one")["said"].to_pylist()[2] == "one"


def test_batches_and_answers_of_all_sizes(client):
    for _ in range(2):
        long = list(range(2000))
        assert client.call("double", numbers(*long))["id"].to_pylist() == [2 * k for k in long]
        assert client.call("many", numbers(2000))["id"].to_pylist() == long
        table = client.call_table("many", numbers(3, 0, 2))
        assert [chunk.to_pylist() for chunk in table["id"].chunks] == [[0, 1, 2], [], [0, 1]]
        assert client.call_table("double", numbers(1)).to_pydict() == {"id": [2]}
        assert client.call("many", numbers()).num_rows == 0
        assert client.call("many", numbers()).schema == NUMBERS


def test_errors_leave_the_client_as_it_was(client):
    for _ in range(2):
        with pytest.raises(HandlerFailed, match="ValueError: below zero"):
            client.call("double", numbers(-1))
        with pytest.raises(SchemaMismatch, match="id"):
            client.call("double", pa.record_batch({"id": ["text"]}))
        with pytest.raises(SchemaMismatch, match="id"):
            client.call("double", numbers(1), output_schema=pa.schema([("id", pa.string())]))
        with pytest.raises(LocalProtocolError, match=r"takes one pyarrow.RecordBatch, not list"):
            client.call("double", [numbers(1)])
        with pytest.raises(DeadlineExceeded, match=r"did not end within .*0\.05 s"):
            client.call("hold", numbers(1), deadline=0.05)
        assert values([client.call("double", numbers(4))]) == [[8]]


def test_a_service_that_goes_away(service, carrier):
    with served(service, carrier) as address:
        client = aqueduct.SyncClient(address, config=service.config)
    with pytest.raises(ConnectionLost):
        client.call("double", numbers(1))
    client.close()
    with pytest.raises(LocalProtocolError, match="the client is closed"):
        client.call("double", numbers(1))


def test_calls_with_deadlines_leave_no_timers(service):
    with sync_client(service, "tcp") as client:
        for number in range(600):
            answer = client.call("double", numbers(number), deadline=LONG)
            assert values([answer]) == [[2 * number]]
        assert len(client._thread.loop._scheduled) < 300  # type: ignore[attr-defined]
