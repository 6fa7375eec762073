"""Names whose records are the addresses of a client: resolved again while it lives."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

import aqueduct
from aqueduct.address import Address
from aqueduct.carriers.certificates import dev_certificate
from aqueduct.client.task_client import TaskClient
from aqueduct.errors import ConfigError, ConnectFailed, ConnectionLost, DeadlineExceeded
from tests.support.calls import config, everything, numbers, served, until, values

QUICK: Any = {"backoff": 0.01, "backoff_limit": 0.05}
NAME = "several.example"


class Records:
    """A name server of one name."""

    def __init__(self, *records: str) -> None:
        self.records: tuple[str, ...] = records
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, name: str, port: int) -> tuple[str, ...]:
        self.asked.append((name, port))
        await asyncio.sleep(0)
        if not self.records:
            raise OSError("no such name")
        return self.records


def echo(seen: list[str], place: str) -> aqueduct.Service:
    service = aqueduct.Service(place)

    @service.handler("echo", idempotent=True)
    async def same(batch):
        seen.append(place)
        return batch

    @service.handler("hold", kind="source", output=numbers().schema)
    async def hold(call):
        yield numbers(1)
        await asyncio.sleep(3600)

    return service


@asynccontextmanager
async def listening(*places: str, scheme: str = "aqueduct+tcp", tls: Any = None):
    """Services at several addresses of this machine, all at one port, and what they saw."""
    seen: list[str] = []
    async with AsyncExitStack() as stack:
        port, runs = 0, {}
        for place in places:
            run = await stack.enter_async_context(
                echo(seen, place).serving(f"{scheme}://{place}:{port}", tls=tls, drain=0)
            )
            port = Address.parse(run.addresses[0]).port
            runs[place] = run
        yield port, seen, runs


async def ask(client: aqueduct.Client, count: int = 20) -> None:
    for n in range(count):
        assert await client.call("echo", numbers(n)) == numbers(n)


def places(client: aqueduct.Client) -> list[str]:
    return [state.address.rpartition("//")[2].rpartition(":")[0] for state in client.endpoints]


async def test_all_records_of_a_name_are_addresses():
    async with listening("127.0.0.1", "127.0.0.2") as (port, seen, _):
        records = Records("127.0.0.1", "127.0.0.2", "127.0.0.1")
        address = f"aqueduct+tcp://{NAME}:{port}"
        async with aqueduct.Client(address, resolve="1h", resolver=records) as client:
            assert records.asked == [(NAME, port)]
            assert places(client) == ["127.0.0.1", "127.0.0.2"]
            assert client.address == address
            await until(lambda: all(state.connected for state in client.endpoints))
            await ask(client)
            assert set(seen) == {"127.0.0.1", "127.0.0.2"}
            stream = client.exchange("echo", [numbers(n) for n in range(100)])
            assert values(await everything(stream)) == [[n] for n in range(100)]
            assert len(records.asked) == 1


async def test_records_come_and_go():
    async with listening("127.0.0.1", "127.0.0.2", "127.0.0.3") as (port, seen, runs):
        records = Records("127.0.0.1", "127.0.0.2")
        address = f"aqueduct+tcp://{NAME}:{port}?resolve=20ms"
        async with aqueduct.Client(address, resolver=records) as client:
            await until(lambda: all(state.connected for state in client.endpoints))
            held = [client.source("hold") for _ in range(2)]  # one at each
            for stream in held:
                assert await anext(stream) == numbers(1)
            records.records = ("127.0.0.2", "127.0.0.3")
            while places(client) != ["127.0.0.2", "127.0.0.3"]:
                await ask(client, 1)
                await asyncio.sleep(0.01)
            await until(lambda: all(state.connected for state in client.endpoints))
            seen.clear()
            await ask(client)
            assert set(seen) == {"127.0.0.2", "127.0.0.3"}
            # The connection of the record that vanished closes when its last call has ended.
            gone = runs["127.0.0.1"]
            assert len(gone.connections) == 1
            for stream in held:
                await stream.aclose()
            await until(lambda: not gone.connections)


async def test_close_ends_the_connections_of_records_that_vanished():
    before = asyncio.all_tasks()
    async with listening("127.0.0.1", "127.0.0.2") as (port, _, runs):
        records = Records("127.0.0.1")
        address = f"aqueduct+tcp://{NAME}:{port}?resolve=10ms"
        async with aqueduct.Client(address, resolver=records) as client:
            held = client.source("hold")
            assert await anext(held) == numbers(1)
            records.records = ("127.0.0.2",)
            while places(client) != ["127.0.0.2"]:
                await ask(client, 1)
                await asyncio.sleep(0.01)
            assert len(runs["127.0.0.1"].connections) == 1
        await until(lambda: not runs["127.0.0.1"].connections)
        with pytest.raises(ConnectionLost):
            await anext(held)
    await until(lambda: not asyncio.all_tasks() - before)


async def test_more_records_than_a_client_may_have_are_left_alone(caplog):
    few = config(calls={"client_addresses": 2})
    async with listening("127.0.0.1") as (port, _, _):
        records = Records("127.0.0.9", "127.0.0.1")
        address = f"aqueduct+tcp://{NAME}:{port}?resolve=10ms"
        async with aqueduct.Client(address, resolver=records, config=few) as client:
            records.records = ("127.0.0.8", "127.0.0.7", "127.0.0.1", "127.0.0.6")
            while "127.0.0.8" not in places(client):
                await ask(client, 1)
                await asyncio.sleep(0.01)
            assert places(client) == ["127.0.0.8", "127.0.0.1"]  # what is known stays
        assert "2 records of the name are left alone" in caplog.text
        with pytest.raises(ConfigError, match=r"3 addresses are above the limit of 2"):
            aqueduct.Client([f"memory://{n}" for n in range(3)], config=few)


async def test_many_first_calls_resolve_a_name_once():
    async with listening("127.0.0.1") as (port, _, _):
        records = Records("127.0.0.1")
        address = f"aqueduct+tcp://{NAME}:{port}?resolve=1h"
        client = aqueduct.Client(address, resolver=records)
        await asyncio.gather(*(ask(client, 1) for _ in range(20)))
        assert len(records.asked) == 1
        assert client.endpoints[0].connections == 1
        await client.close()


async def test_an_address_that_fails_has_the_name_resolved_again():
    async with listening("127.0.0.1", "127.0.0.2") as (port, seen, runs):
        records = Records("127.0.0.1")
        address = f"aqueduct+tcp://{NAME}:{port}"
        client = await aqueduct.Client.connect(
            address, resolve="1h", resolver=records, retries=50, **QUICK
        )
        async with client:
            client._endpoints._resolved -= 2  # seconds: it may be asked again
            await runs["127.0.0.1"].close(drain=0)
            records.records = ("127.0.0.2",)
            await until(lambda: client.closed)
            await ask(client, 3)
            assert seen == ["127.0.0.2"] * 3


async def test_a_name_that_resolves_no_more_keeps_its_records(caplog):
    async with listening("127.0.0.1") as (port, _, _):
        records = Records("127.0.0.1")
        address = f"aqueduct+tcp://{NAME}:{port}"
        async with aqueduct.Client(address, resolve=0.01, resolver=records) as client:
            records.records = ()
            while "the addresses from before are used" not in caplog.text:
                await ask(client, 1)
                await asyncio.sleep(0.01)
            await ask(client, 3)
        assert f"the name '{NAME}' does not resolve (no such name)" in caplog.text


async def test_a_name_that_does_not_resolve_is_an_error():
    address = f"aqueduct+tcp://{NAME}"
    for records in (Records(), Records("nothing")):
        client = aqueduct.Client(address, resolve="1h", resolver=records)
        with pytest.raises(ConnectFailed, match=f"the name '{NAME}' does not resolve"):
            await client.call("echo", numbers(1))
        with pytest.raises(ConnectFailed, match=f"the name '{NAME}' does not resolve"):
            await everything(client.exchange("echo", [numbers(1)]))
        with pytest.raises(ConnectFailed, match=f"the name '{NAME}' does not resolve"):
            await client.connect(address, resolve="1h", resolver=records)
        await client.close()


class Failing(Records):
    """A name server whose program fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    async def __call__(self, name: str, port: int) -> tuple[str, ...]:
        self.asked.append((name, port))
        await asyncio.sleep(0)
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("it broke"), r"does not resolve \(RuntimeError: it broke\)"),
        (KeyError("records"), r"does not resolve \(KeyError: 'records'\)"),
        (TimeoutError("too slow"), r"does not resolve \(too slow\)"),
        (OSError(), r"does not resolve \(OSError: \)"),
        (asyncio.CancelledError(), r"does not resolve \(its lookup was cancelled\)"),
    ],
    ids=lambda given: "" if isinstance(given, str) else type(given).__name__,
)
async def test_any_error_of_a_resolver_is_that_of_the_call(error, said):
    address = f"aqueduct+tcp://{NAME}"
    records = Failing(error)
    async with asyncio.timeout(20):
        client = aqueduct.Client(address, resolve="1h", resolver=records)
        for _ in range(3):
            with pytest.raises(ConnectFailed, match=said) as failed:
                await client.call("echo", numbers(1))
            assert failed.value.__cause__ is error
        assert len(records.asked) == 1  # its calls came within a second
        client._endpoints._resolved -= 2  # seconds
        with pytest.raises(ConnectFailed, match=said):
            await everything(client.exchange("echo", [numbers(1)]))
        assert len(records.asked) == 2
        await client.close()
        with pytest.raises(ConnectFailed, match=said):
            await aqueduct.Client.connect(address, resolve="1h", resolver=records)


async def test_a_resolver_that_fails_is_not_asked_by_every_call(caplog):
    async with listening("127.0.0.1") as (port, seen, _):
        given = [f"aqueduct+tcp://127.0.0.1:{port}", f"aqueduct+tcp://{NAME}:{port}?resolve=1h"]
        records = Failing(RuntimeError("the registry broke"))
        async with aqueduct.Client(given, resolver=records) as client:
            await ask(client, 5)
            for n in range(3):
                await everything(client.exchange("echo", [numbers(n)]))
        assert len(seen) == 8 and len(records.asked) == 1
    assert "RuntimeError: the registry broke); the addresses from before are used" in caplog.text


async def forever(name: str, port: int) -> tuple[str, ...]:
    """A name server that never answers."""
    await asyncio.Event().wait()
    return ()


async def test_the_deadline_of_a_call_holds_for_its_name_too():
    address = f"aqueduct+tcp://{NAME}"
    client = aqueduct.Client(address, resolve="1h", resolver=forever)
    said = (
        rf"handler 'echo' at aqueduct\+tcp://{NAME}:4433: .* not done within its deadline of 0.02 s"
    )
    async with asyncio.timeout(8):  # a lookup may take 10 s
        with pytest.raises(DeadlineExceeded, match=said):
            await client.call("echo", numbers(1), deadline="20ms")
        with pytest.raises(DeadlineExceeded, match=said):
            await everything(client.exchange("echo", [numbers(1)], deadline="20ms"))
        await client.close()


async def test_records_beside_other_addresses():
    async with listening("127.0.0.1", "127.0.0.2") as (port, seen, _):
        given = [f"aqueduct+tcp://127.0.0.1:{port}", f"aqueduct+tcp://{NAME}:{port}?resolve=1h"]
        for records in (Records("127.0.0.2"), Records()):
            async with aqueduct.Client(given, resolver=records) as client:
                await ask(client, 5)
        assert "127.0.0.1" in seen


async def test_without_resolve_a_name_is_one_address():
    async with listening("127.0.0.1") as (port, _, _):
        async with aqueduct.Client(f"aqueduct+tcp://localhost:{port}") as client:
            await ask(client, 1)
            assert [state.address for state in client.endpoints] == [
                f"aqueduct+tcp://localhost:{port}"
            ]


async def test_the_resolver_of_the_system():
    async with listening("127.0.0.1") as (port, _, _):
        address = f"aqueduct+tcp://localhost:{port}?resolve=30s"
        async with aqueduct.Client(address) as client:
            assert "127.0.0.1" in places(client)
            await ask(client, 3)


@pytest.mark.parametrize("scheme", ["aqueduct+tls", "aqueduct"])
async def test_the_certificate_is_that_of_the_name(scheme):
    tls = dev_certificate([NAME])
    ours = aqueduct.ClientTls(ca=tls.certificate)
    async with listening("127.0.0.1", scheme=scheme, tls=tls) as (port, _, _):
        records = Records("127.0.0.1")
        for name in (NAME, "other.example"):
            address = f"{scheme}://{name}:{port}"
            client = aqueduct.Client(address, tls=ours, resolve="1h", resolver=records)
            if name == NAME:
                async with client:
                    await ask(client, 1)
            else:
                with pytest.raises(ConnectFailed, match=r"other\.example"):
                    await client.call("echo", numbers(1))
                await client.close()


def test_a_sync_client_resolves_names_too():
    seen: list[str] = []
    with served(echo(seen, "here"), "tcp") as address:
        port = Address.parse(address).port
        records = Records("127.0.0.1")
        with aqueduct.SyncClient(
            f"aqueduct+tcp://{NAME}:{port}", resolve=0.01, resolver=records
        ) as client:
            assert client.call("echo", numbers(1)) == numbers(1)
            while len(records.asked) < 3:
                assert values(list(client.exchange("echo", [numbers(1)]))) == [[1]]
            assert [state.connected for state in client.endpoints] == [True]
        assert seen


def test_for_a_task_of_spark_a_name_is_one_address():
    with served(echo([], "here"), "tcp") as address:
        port = Address.parse(address).port
        with TaskClient(f"aqueduct+tcp://localhost:{port}?resolve=30s") as client:
            assert client.call("echo", numbers(1)) == numbers(1)
            assert len(client.endpoints) == 1


@pytest.mark.parametrize("given", ["0", "-1s", "soon", "1 month"])
def test_the_option_of_an_address_is_a_duration(given):
    with pytest.raises(ConfigError, match=r"resolve is .* it must be a duration above zero"):
        Address.parse(f"aqueduct://a.example?resolve={given}")
    assert Address.parse("aqueduct://a.example?resolve=2min").resolve == 120
    assert Address.parse("aqueduct://a.example").resolve is None
