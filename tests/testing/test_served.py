"""A client of a service in this process: both faces, and all of the service but the network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.carriers import memory
from aqueduct.config import Calls, Config
from aqueduct.errors import (
    Busy,
    ConfigError,
    ConnectFailed,
    HandlerFailed,
    LocalProtocolError,
    Refused,
    StartFailed,
)
from aqueduct.testing import PeerCredentials, PeerIdentity
from tests.support.calls import NUMBERS, everything, numbers

WHO = pa.schema([("who", pa.string())])


def who(*values: str) -> pa.RecordBatch:
    return pa.record_batch({"who": list(values)}, schema=WHO)


@pytest.fixture
def service() -> aqueduct.Service:
    service = aqueduct.Service("words")
    service.on_start(lambda: setattr(service.state, "plus", 10))
    service.on_stop(lambda: delattr(service.state, "plus"))

    @service.handler(input=NUMBERS)
    def add(batch):
        return numbers(*(value + service.state.plus for value in batch["id"].to_pylist()))

    @service.handler(input=NUMBERS)
    async def echo(batches):
        async for batch in batches:
            yield batch

    @service.handler(kind="source", output=WHO)
    def caller(call):
        credentials, identity = call.peer_credentials, call.peer_identity
        yield who(call.peer, str(credentials and credentials.uid), str(identity and identity.names))

    @service.handler(input=NUMBERS)
    def fail(batch):
        raise ValueError("no")

    @service.table(schema=NUMBERS)
    def log():
        yield numbers(1, 2)

    @service.sink
    class Store:
        """Keeps nothing."""

        def open(self, attempt, call):
            raise OSError("full")

        def commit(self, write_key, prepared):
            """Is done."""

        def abort(self, write_key, prepared):
            """Is done."""

    return service


def test_with_gives_a_client_for_threads(service: aqueduct.Service) -> None:
    with aqueduct.testing.client(service) as client:
        assert isinstance(client, aqueduct.SyncClient)
        assert client.call("add", numbers(1)) == numbers(11)
        batches = [numbers(value) for value in range(200)]
        assert list(client.exchange("echo", batches)) == batches
        description = client.describe()
        assert [table.name for table in description.tables] == ["log"]
        assert [sink.name for sink in description.sinks] == ["Store"]
        with pytest.raises(HandlerFailed, match="ValueError: no"):
            client.call("fail", numbers(1))
        assert threading.active_count() > 1
    assert client.closed
    assert "plus" not in service.state  # it was stopped


async def test_async_with_gives_one_for_asyncio(service: aqueduct.Service) -> None:
    async with aqueduct.testing.client(service) as client:
        assert isinstance(client, aqueduct.Client)
        assert await client.call("add", numbers(1)) == numbers(11)
        assert await everything(client.exchange("echo", [numbers(1)])) == [numbers(1)]
    assert client.closed and "plus" not in service.state


async def test_a_sync_client_can_be_used_where_an_event_loop_runs(
    service: aqueduct.Service,
) -> None:
    with aqueduct.testing.client(service) as client:  # it is served by a thread of its own
        assert client.call("add", numbers(1)) == numbers(11)


def test_blocks_may_be_nested_and_repeated(service: aqueduct.Service) -> None:
    made = aqueduct.testing.client(service)
    with made as first:
        with aqueduct.testing.client(service) as second:
            assert first.address != second.address
            assert first.call("add", numbers(1)) == second.call("add", numbers(1))
        with pytest.raises(LocalProtocolError, match="is in use by a block; make one for each"):
            made.__enter__()
        # A client that is closed, and others of the same address, leave the service running.
        with aqueduct.SyncClient(first.address) as third:
            assert third.call("add", numbers(2)) == numbers(12)
        assert first.call("add", numbers(3)) == numbers(13)
        address = first.address
        first.close()
        with aqueduct.SyncClient(address) as fourth:
            assert fourth.call("add", numbers(2)) == numbers(12)
    with made as again:
        assert again.call("add", numbers(3)) == numbers(13)
    with pytest.raises(ConnectFailed, match="nothing in this process listens there"):
        aqueduct.SyncClient(address)
    assert memory.pretended == {}


def test_the_client_may_seem_to_be_anybody(service: aqueduct.Service) -> None:
    identity = PeerIdentity("sha256:" + 64 * "0", "CN=tester", ("tester.example",))

    def asked(**options) -> list[str]:
        with aqueduct.testing.client(service, **options) as client:
            found: list[str] = next(client.source("caller"))["who"].to_pylist()
            return found

    peer, uid, names = asked()
    assert peer.startswith("memory://testing-") and uid.isdigit() and names == "None"
    assert asked(peer="10.0.0.7:4000", identity=identity, credentials=None) == [
        "10.0.0.7:4000",
        "None",
        "('tester.example',)",
    ]
    assert asked(credentials=PeerCredentials(1, 4711, 1))[1] == "4711"


def test_authorize_sees_the_token_and_the_headers() -> None:
    seen: list[object] = []

    def authorize(call: aqueduct.Call) -> bool:
        seen.append((call.token, call.connection_headers, call.headers))
        return call.token == "good"

    service = aqueduct.Service("guarded", authorize=authorize)
    service.handler("echo")(lambda batch: batch)
    with aqueduct.testing.client(service, token="good", headers={"agent": "test"}) as client:
        assert client.call("echo", numbers(1), headers={"a": "b"}) == numbers(1)
        with pytest.raises(Refused):
            client.call("echo", numbers(1), token="bad")
    assert seen[0] == ("good", {"agent": "test"}, {"a": "b"})


async def test_limits_are_those_of_the_service() -> None:
    service = aqueduct.Service("small", config=Config(calls=Calls(max_calls_process=1)))
    release = asyncio.Event()

    @service.handler(input=NUMBERS)
    async def hold(batch):
        await release.wait()
        return batch

    served = aqueduct.testing.client(service, config=Config(calls=Calls(in_flight_batches=3)))
    async with served as client:
        assert client.config.calls.in_flight_batches == 3
        first = asyncio.ensure_future(client.call("hold", numbers(1)))
        while not (served.running and served.running.calls):  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(Busy, match="max_calls_process"):
            await client.call("hold", numbers(1))
        release.set()
        assert await first == numbers(1)
    assert served.running is None


def test_a_start_that_fails_leaves_no_thread(service: aqueduct.Service) -> None:
    @service.on_start
    def broken() -> None:
        raise OSError("no such licence")

    before = threading.active_count()
    made = aqueduct.testing.client(service)
    for _ in range(2):
        with pytest.raises(StartFailed, match="no such licence"):
            made.__enter__()
    assert not [each for each in threading.enumerate() if each.name == "aqueduct-testing"]
    assert threading.active_count() <= before + 1
    assert memory.pretended == {}


async def test_a_start_that_fails_leaves_nothing_on_the_loop(service: aqueduct.Service) -> None:
    @service.on_start
    def broken() -> None:
        raise OSError("no such licence")

    with pytest.raises(StartFailed):
        await aqueduct.testing.client(service).__aenter__()
    assert memory.pretended == {}


def test_an_error_in_the_block_ends_the_service_and_is_raised(service: aqueduct.Service) -> None:
    with pytest.raises(KeyError, match="mine"):
        with aqueduct.testing.client(service):
            raise KeyError("mine")
    assert "plus" not in service.state
    assert not [each for each in threading.enumerate() if each.name == "aqueduct-testing"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"identity": "CN=me"}, "identity is of type str; it must be an aqueduct.testing.PeerIden"),
        ({"credentials": 5}, "credentials is of type int; it must be an aqueduct.testing.PeerCred"),
        ({"drain": "soon"}, "client: drain is 'soon'"),
        ({"token": 5}, "client: token is"),
        ({"config": 5}, "client: config is 5"),
    ],
)
def test_wrong_arguments_are_named(service, arguments, text) -> None:
    with pytest.raises(ConfigError, match=text):
        aqueduct.testing.client(service, **arguments)


def test_what_is_no_service_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"service is of type str; it must be an aqueduct\.Serv"):
        aqueduct.testing.client("words:service")  # type: ignore[arg-type]


@pytest.fixture
def client(service: aqueduct.Service) -> Iterator[aqueduct.SyncClient]:
    with aqueduct.testing.client(service) as client:
        yield client


def test_a_fixture_is_one_with_block(client: aqueduct.SyncClient) -> None:
    assert client.call("add", numbers(1)) == numbers(11)
