"""A client on another event loop than its own, and on loops that nest."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct import endpoint
from aqueduct.errors import LocalProtocolError
from tests.support.programs import PATIENCE, python
from tests.support.selection import mostly_long

CARRIERS = {
    "tcp": "aqueduct+tcp://127.0.0.1:0",
    "tls": "aqueduct+tls://localhost:0",
    "unix": "aqueduct+unix://{folder}/service.sock",
    "quic": "aqueduct://127.0.0.1:0",
}
ONE = pa.record_batch({"n": pa.array([1], pa.int64())})


@pytest.fixture
def service():
    service = aqueduct.Service("there")
    service.handler("echo")(lambda batch: batch)

    @service.handler("silent")
    async def silent(batches):
        async for batch in batches:
            await asyncio.sleep(600)
            yield batch

    return service


def secure(carrier: str) -> bool:
    return carrier in ("tls", "quic")


async def on_another_loop(work) -> Any:
    """What ``work()`` returns or raises on a loop of another thread."""

    def run():
        async def within():
            async with asyncio.timeout(PATIENCE):
                return await work()

        return asyncio.run(within())

    return await asyncio.to_thread(run)


async def exchange(client):
    return [batch async for batch in client.exchange("echo", [ONE])]


USES = {
    "call": lambda client: client.call("echo", ONE),
    "call_table": lambda client: client.call_table("echo", ONE),
    "exchange": exchange,
    "sink": lambda client: client.sink("echo", [ONE]),
    "describe": lambda client: client.describe(),
    "ping": lambda client: client.ping(),
    "close": lambda client: client.close(),
    "connection.ping": lambda client: client.connection.ping(),
    "connection.close": lambda client: client.connection.close(),
    "connection.wait_closed": lambda client: client.connection.wait_closed(),
    "channel.send": lambda client: client.connection.entrypoint.send(b""),
}


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_client_on_another_loop_is_an_error_at_once(service, tmp_path, carrier):
    address = CARRIERS[carrier].format(folder=tmp_path)
    async with (
        service.serving(address, dev_certificate=secure(carrier), drain=0) as running,
        await aqueduct.Client.connect(running.addresses[0]) as client,
    ):
        for use in USES.values():
            with pytest.raises(LocalProtocolError, match="belongs to another event loop"):
                await on_another_loop(lambda use=use: use(client))
            assert await client.call("echo", ONE) == ONE  # it is as it was
        with pytest.raises(LocalProtocolError, match="belongs to another event loop"):
            await asyncio.to_thread(client.exchange, "echo", [ONE])  # and without one


async def test_a_stream_is_read_on_its_own_loop(service):
    async with (
        service.serving(CARRIERS["tcp"], drain=0) as running,
        await aqueduct.Client.connect(running.addresses[0]) as client,
        client.exchange("silent", [ONE]) as answers,
    ):
        await answers.opened()
        with pytest.raises(LocalProtocolError, match="belongs to another event loop"):
            await on_another_loop(lambda: anext(answers))
        assert await client.call("echo", ONE) == ONE


async def test_a_receiver_is_read_on_its_own_loop(tmp_path):
    """One of a connection, and one that became so with a message."""
    path = f"aqueduct+unix://{tmp_path}/channels.sock"
    async with (
        await endpoint.serve(lambda connection: None, path),
        await endpoint.connect(path) as connection,
    ):
        sender, receiver = endpoint.channel()
        await connection.entrypoint.send(b"", attachments=[sender])
        with pytest.raises(LocalProtocolError, match="belongs to another event loop"):
            await on_another_loop(receiver.receive)


def test_a_client_whose_loop_has_ended_says_so(service):
    address: list[str] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with service.serving(CARRIERS["tcp"], drain=0) as running:
            address.append(running.addresses[0])
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        code = """
import asyncio, sys
import pyarrow as pa
import aqueduct

ONE = pa.record_batch({"n": pa.array([1], pa.int64())})
client = asyncio.run(aqueduct.Client.connect(sys.argv[1]))
for work in (lambda: client.call("echo", ONE), client.ping, client.close):
    try:
        asyncio.run(work())
    except aqueduct.errors.LocalProtocolError as error:
        print(error)
"""
        done = python(code, address[0])
    finally:
        over.set()
        thread.join()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("has ended, and the connection with it" in line for line in lines)


async def test_a_closed_client_may_be_closed_anywhere(service):
    async with service.serving(CARRIERS["tcp"], drain=0) as running:
        client = await aqueduct.Client.connect(running.addresses[0])
        await client.close()
        await on_another_loop(client.close)


# Loops that nest

NESTING = ["nest_asyncio2", *(["nest_asyncio"] if sys.version_info < (3, 14) else [])]
"""The one that works with every Python, and the one that most people have."""

NESTED = """
import asyncio, sys
import pyarrow as pa
import importlib
import aqueduct

when, nest_asyncio = sys.argv[2], importlib.import_module(sys.argv[3])
if when == "first":
    nest_asyncio.apply()
ONE = pa.record_batch({"n": pa.array([1], pa.int64())})
service = aqueduct.Service("nested")
service.handler("echo")(lambda batch: batch)
inner = None

@service.handler("call")
async def call(batch):
    return asyncio.get_event_loop().run_until_complete(inner.call("echo", batch))

@service.handler("generator")
async def generator(batches):
    async for batch in batches:
        yield asyncio.get_event_loop().run_until_complete(inner.call("echo", batch))

async def all_of(stream):
    return [batch async for batch in stream]

async def use(client, run):
    for _ in range(3):
        assert await client.call("echo", ONE) == ONE
        assert run(client.call("echo", ONE)) == ONE
        assert run(all_of(client.exchange("echo", [ONE] * 20))) == [ONE] * 20
        async with client.exchange("echo", [ONE] * 20) as answers:
            async for answer in answers:
                assert run(client.call("echo", answer)) == ONE
        await asyncio.gather(*(all_of(client.exchange("echo", [ONE] * 5)) for _ in range(5)))

async def main():
    global inner
    if when == "inside":
        nest_asyncio.apply()
    run = asyncio.get_event_loop().run_until_complete
    async with await aqueduct.Client.connect(sys.argv[1]) as client:
        await use(client, run)
    async with service.serving("aqueduct+tcp://127.0.0.1:0", drain=1) as running:
        address = running.addresses[0]
        async with await aqueduct.Client.connect(address) as client:
            async with await aqueduct.Client.connect(address) as inner:
                await use(client, run)
                for handler in ("call", "generator"):
                    assert await client.call(handler, ONE) == ONE
                    assert run(client.call(handler, ONE)) == ONE

asyncio.run(main())
with aqueduct.SyncClient(sys.argv[1]) as client:
    for _ in range(3):
        assert client.call("echo", ONE) == ONE
        assert list(client.exchange("echo", [ONE] * 20)) == [ONE] * 20
"""


@pytest.mark.parametrize(
    ("carrier", "when", "module"),
    mostly_long(
        [
            *((carrier, when, NESTING[0]) for carrier in CARRIERS for when in ("first", "inside")),
            *(("tcp", "first", module) for module in NESTING[1:]),
        ],
        *(("tls", "first", NESTING[0]), ("quic", "first", NESTING[0])),
        *(("tcp", "inside", NESTING[0]), ("quic", "inside", NESTING[0])),
        *(("tcp", "first", module) for module in NESTING[1:]),
    ),
)
async def test_a_loop_may_be_run_within_itself_by_nest_asyncio(
    service, tmp_path, carrier, when, module
):
    address = CARRIERS[carrier].format(folder=tmp_path)
    async with service.serving(address, dev_certificate=secure(carrier), drain=0) as running:
        done = await asyncio.to_thread(python, NESTED, running.addresses[0], when, module)
    assert (done.returncode, done.stderr) == (0, "")


LATE = """
import asyncio, sys
import pyarrow as pa
import importlib
import aqueduct

nest_asyncio = importlib.import_module(sys.argv[2])
ONE = pa.record_batch({"n": pa.array([1], pa.int64())})

async def main():
    run = asyncio.get_event_loop().run_until_complete
    async with await aqueduct.Client.connect(sys.argv[1]) as client:
        assert await client.call("echo", ONE) == ONE
        nest_asyncio.apply()
        try:
            assert run(client.call("echo", ONE)) == ONE
            print("works")
        except aqueduct.errors.LocalProtocolError as error:
            print(error)
        await asyncio.sleep(0)
        assert run(client.call("echo", ONE)) == ONE

asyncio.run(main())
"""


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_loop_that_nests_later_works_or_is_an_error(service, tmp_path, carrier):
    """The task may be stepped by what reads from its peer: that cannot read meanwhile."""
    address = CARRIERS[carrier].format(folder=tmp_path)
    async with service.serving(address, dev_certificate=secure(carrier), drain=0) as running:
        done = await asyncio.to_thread(python, LATE, running.addresses[0], NESTING[0])
    assert (done.returncode, done.stderr) == (0, "")
    words = "call nest_asyncio.apply() before the first call"
    assert done.stdout == "works\n" or words in done.stdout
