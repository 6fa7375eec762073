"""The two clients themselves: connecting, pinging, closing, forking."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.endpoint import connect
from aqueduct.errors import ConfigError, DeadlineExceeded, HeadersRejected, LocalProtocolError
from tests.support.calls import (
    NUMBERS,
    config,
    connected,
    everything,
    numbers,
    served,
    serving,
    sync_client,
    until,
    values,
)


@pytest.fixture(params=["memory", "quic", "draft"])
def carrier(request):
    return request.param


@pytest.fixture
def service():
    service = aqueduct.Service("test")
    service.handler("echo")(lambda batch: batch)
    return service


def test_what_the_package_exports():
    for name in aqueduct.__all__:
        assert getattr(aqueduct, name).__name__ == name
    assert set(aqueduct.__all__) <= set(dir(aqueduct))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = aqueduct.nothing


async def test_a_ping_takes_time(service, carrier):
    async with connected(service, carrier) as client:
        assert 0 < await client.ping() < 30
        assert await client.ping(timeout=20) > 0
    with pytest.raises(aqueduct.AqueductError):
        await client.ping(timeout=1)


async def test_a_ping_that_is_not_answered(service, monkeypatch):
    async with connected(service) as client:

        async def silence():
            await asyncio.sleep(3600)

        monkeypatch.setattr(client.connection, "ping", silence)
        with pytest.raises(DeadlineExceeded, match=r"did not answer a ping within 0.05 s"):
            await client.ping(timeout=0.05)


def test_a_sync_client_pings_and_describes(service):
    with sync_client(service) as client:
        assert client.ping() > 0
        assert client.describe().service == "test"
        assert "SyncClient of aqueduct://127.0.0.1:" in repr(client)
        assert "fingerprint" not in repr(client)
    assert repr(client).endswith("closed>")


def test_a_first_answer_is_given_before_the_second_batch_is_read(service, monkeypatch):
    monkeypatch.setattr("aqueduct.client.sync_stream._EARLY", 20)
    seen = []

    def slowly():
        yield numbers(1)
        seen.append("asked for the second")
        yield numbers(2)

    with sync_client(service) as client:
        stream = client.exchange("echo", slowly(), schema=NUMBERS)
        assert next(stream) == numbers(1)
        assert seen == []
        assert list(stream) == [numbers(2)]
        assert seen == ["asked for the second"]


def test_a_first_answer_that_takes_its_time_holds_up_nothing(service, monkeypatch):
    monkeypatch.setattr("aqueduct.client.sync_stream._EARLY", 0.001)

    @service.handler("count")
    def count(batches, call):
        yield numbers(sum(batch.num_rows for batch in batches))

    with sync_client(service) as client:
        batches = [numbers(1), numbers(2)]
        assert list(client.exchange("count", batches, schema=NUMBERS)) == [numbers(2)]


def test_a_call_may_go_together_with_its_first_batch(service):
    with sync_client(service) as client:

        def batches():
            client.ping()  # whatever was sent before has come
            seen.append(service.counters()["calls"])
            yield numbers(1)

        for ask, calls in ((False, 0), (True, 1)):
            seen: list[int] = []
            before = service.counters()["calls"]
            stream = client.exchange_later("echo", batches(), schema=NUMBERS)
            if ask:
                assert stream.opened() == NUMBERS
            assert list(stream) == [numbers(1)]
            assert seen == [before + calls]
        before = service.counters()["calls"]
        assert list(client.exchange_later("echo", [], schema=NUMBERS)) == []
        assert service.counters()["calls"] == before + 1
        client.exchange_later("echo", batches(), schema=NUMBERS).close()
        client.ping()
        assert service.counters()["calls"] == before + 1


async def test_a_client_may_be_made_of_a_connection(service):
    async with serving(service) as running:
        connection = await connect(running.addresses[0], headers=((b"who", b"me"),))
        async with Client(connection, token="x") as client:
            assert await everything(client.exchange("echo", [numbers(1)])) == [numbers(1)]
        assert connection.closed


@pytest.mark.parametrize(
    "headers", [{"who": "me"}, [("who", "me")], (("who", "me"),), [(b"who", b"me")]]
)
async def test_connection_headers_in_every_form(headers):
    service, seen = aqueduct.Service("test"), []

    @service.handler("echo")
    def echo(batch, call):
        seen.append(dict(call.connection_headers))
        return batch

    async with connected(service, headers=headers) as client:
        await everything(client.exchange("echo", [numbers(1)]))
    assert seen == [{"who": "me"}]


async def test_an_address_that_is_none():
    with pytest.raises(ConfigError, match="is not an address"):
        await Client.connect("localhost:4433")


async def test_a_stream_knows_its_schema_once_it_is_open(service, carrier):
    async with connected(service, carrier) as client:
        stream = client.exchange("echo", [numbers(1)])
        assert stream.schema is None
        assert await stream.opened() == NUMBERS
        assert await stream.opened() == NUMBERS
        assert await everything(stream) == [numbers(1)]
        assert stream.counters["rows_out"] == 1
        assert await stream.opened() == NUMBERS
        with pytest.raises(aqueduct.AqueductError, match="no handler 'x'"):
            await client.exchange("x", [numbers(1)]).opened()


def test_a_sync_stream_knows_its_schema_once_it_is_open(service):
    expected = pa.schema([pa.field("id", pa.int64(), metadata={"a": "b"})])
    with sync_client(service) as client:
        stream = client.exchange("echo", [numbers(1)], output_schema=expected)
        assert stream.counters == {}
        opened = stream.opened()
        assert opened is not None and opened.equals(expected, check_metadata=True)
        assert list(stream) == [numbers(1)]
        assert stream.schema is opened
        assert stream.counters["rows_out"] == 1
        stream = client.exchange("x", [numbers(1)])
        for _ in range(2):
            with pytest.raises(aqueduct.AqueductError, match="no handler 'x'"):
                stream.opened()
        # Whoever opens a source late finds all that came meanwhile.
        stream = client.source("aqueduct.describe")
        assert len(list(stream)) == 1
        assert stream.opened() is not None


@pytest.fixture
def no_collector():
    """What is in a cycle stays: a batch of 64 MiB should not wait for the collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_nothing_of_a_call_stays_with_the_client(service, carrier):
    async with connected(service, carrier) as client:
        stream = client.exchange("echo", (numbers(n) for n in range(30)), schema=NUMBERS)
        await everything(stream)
        call = weakref.ref(stream._call)
        assert client.link._calls == set()
        del stream
        await until(lambda: call() is None)
        for _ in range(3):
            stream = client.exchange("x", [numbers(1)])
            with pytest.raises(aqueduct.AqueductError):
                await everything(stream)
            await stream.aclose()
        assert client.link._calls == set()


@pytest.mark.usefixtures("no_collector")
def test_nothing_of_a_call_stays_with_a_sync_client(service):
    with sync_client(service) as client:
        stream = client.exchange("echo", [numbers(1)])
        list(stream)
        call = weakref.ref(stream._call)
        del stream
        asyncio.run(until(lambda: call() is None))
        assert client._client._calls == set()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("handler", ["function", "generator", "async generator"])
async def test_nothing_of_a_call_stays_with_the_service(service, carrier, handler):
    seen = []

    def see(batch):
        seen.append(weakref.ref(batch))
        return numbers(2)

    service.handler("function")(see)

    @service.handler("generator")
    def generator(batches):
        for batch in batches:
            yield see(batch)

    @service.handler("async generator")
    async def async_generator(batches, call):
        async for batch in batches:
            yield see(batch)

    async with connected(service, carrier) as client:
        await everything(client.exchange(handler, [numbers(1)]))
        await until(lambda: not service.counters()["open_calls"])
        await until(lambda: seen[0]() is None)


def test_a_client_of_the_parent_is_of_no_use_after_a_fork(service):
    with sync_client(service) as client:
        stream = client.exchange("echo", [numbers(1)], in_flight=1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert client.closed
                for use in (lambda: client.exchange("echo", [numbers(1)]), client.ping):
                    with pytest.raises(LocalProtocolError, match="make a client after the fork"):
                        use()
                client.close()  # and does nothing
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert values(list(stream)) == [[1]]
        assert not client.closed


def test_clients_made_after_a_fork_work(service):
    with served(service) as address:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with aqueduct.SyncClient(address) as client:
                    status = (
                        0 if values(list(client.exchange("echo", [numbers(7)]))) == [[7]] else 2
                    )
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


def test_a_sync_client_ends_its_thread(service):
    before = set(threading.enumerate())
    with served(service) as address:
        client = aqueduct.SyncClient(address)
        (thread,) = {
            thread
            for thread in set(threading.enumerate()) - before
            if thread.name == "aqueduct-sync-client"
        }
        assert thread.daemon
        client.close()
        assert not thread.is_alive()
        with pytest.raises(aqueduct.AqueductError):
            aqueduct.SyncClient(address.replace("sha256:", "sha256:0000")[: len(address)])
    assert "aqueduct-sync-client" not in {thread.name for thread in threading.enumerate()}


async def test_a_service_that_refuses_the_connection_headers(service):
    # Nothing of Service refuses them; a server beneath it may.
    from aqueduct.endpoint import serve

    def refuse(headers, connection):
        raise HeadersRejected("not you")

    async with await serve(lambda connection: None, "memory://refusing", on_headers=refuse):
        with pytest.raises(aqueduct.AqueductError, match="not you"):
            await Client.connect("memory://refusing")


async def test_signs_of_life_are_sent_only_while_there_are_calls():
    impatient = config(timing={"progress_deadline": 0.15})
    service = aqueduct.Service("test")

    @service.handler("hold")
    async def hold(batches, call):
        async for batch in batches:
            yield batch

    async with connected(service, client_config=impatient) as client:
        entrypoint = client.connection.entrypoint
        stream = client.exchange("hold", _never(), schema=NUMBERS)
        before = entrypoint._half.sent
        await until(lambda: entrypoint._half.sent >= before + 3)
        await stream.aclose()
        await until(lambda: client.link._beat is None)


async def _never():
    await asyncio.sleep(3600)
    yield numbers(1)
