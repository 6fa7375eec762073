"""How sync clients end: with the interpreter, without a main thread, and where they cannot work."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.config import Config, Timing
from aqueduct.errors import ConnectFailed, LocalProtocolError
from tests.support.calls import until
from tests.support.programs import PATIENCE, python
from tests.support.selection import mostly_long

CARRIERS = {
    "tcp": "aqueduct+tcp://127.0.0.1:0",
    "tls": "aqueduct+tls://localhost:0",
    "unix": "aqueduct+unix://{folder}/service.sock",
    "quic": "aqueduct://127.0.0.1:0",
}
ONE = pa.record_batch({"n": pa.array([1], pa.int64())})

START = """
import sys
import pyarrow as pa
import aqueduct
from aqueduct.config import Config, Timing

# What waited for these before is ended by the deadline of the test.
patient = Config(timing=Timing(connect_timeout=600, close_linger=600, progress_deadline=600))
ONE = pa.record_batch({"n": pa.array([1], pa.int64())})
address = sys.argv[1]

def tried(name, work):
    try:
        print(name, work(), flush=True)
    except aqueduct.errors.AqueductError as error:
        print(name, type(error).__name__, error, flush=True)
"""


@pytest.fixture
def service():
    service = aqueduct.Service("there")
    service.handler("echo")(lambda batch: batch)

    @service.handler("endless", kind="source", output=ONE.schema)
    async def endless():
        while True:
            yield ONE

    @service.handler("silent")
    async def silent(batches):
        async for batch in batches:
            await asyncio.sleep(600)
            yield batch

    return service


def secure(carrier: str) -> bool:
    return carrier in ("tls", "quic")


async def run(service, carrier, folder, code, *arguments):
    """What the program prints, with the address of the service as its argument."""
    address = CARRIERS[carrier].format(folder=folder)
    async with service.serving(address, dev_certificate=secure(carrier), drain=0) as running:
        done = await asyncio.to_thread(python, START + code, running.addresses[0], *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


AT_EXIT = {
    "closed in __del__": """
class Owner:
    def __init__(self):
        self.client = aqueduct.SyncClient(address, config=patient)
    def __del__(self):
        self.client.close()
        print("closed")

owner = Owner()
owner.itself = owner  # so that it is found by the last collection alone
sys.modules["owner"] = owner
assert owner.client.call("echo", ONE) == ONE
""",
    "never closed": """
client = aqueduct.SyncClient(address, config=patient)
assert client.call("echo", ONE) == ONE
print("closed")
""",
    "an open answer": """
client = aqueduct.SyncClient(address, config=patient)
answers = client.source("endless")
next(answers)
print("closed")
""",
    "an answer that is waited for": """
import threading
client = aqueduct.SyncClient(address, config=patient)
answers = client.exchange("silent", [ONE])
answers.opened()
def wait():
    try:
        next(answers)
    except aqueduct.errors.AqueductError:
        pass
threading.Thread(target=wait, daemon=True).start()
print("closed")
""",
    "within a generator": """
def batches():
    with aqueduct.SyncClient(address, config=patient) as client:
        with client.source("endless") as answers:
            yield from answers

kept = batches()
next(kept)
sys.modules["kept"] = kept
print("closed")
""",
    "by an exit handler": """
import atexit
client = aqueduct.SyncClient(address, config=patient)
atexit.register(lambda: print("closed" if client.call("echo", ONE) == ONE else "wrong"))
""",
}


@pytest.mark.parametrize(
    ("carrier", "how"),
    mostly_long(
        itertools.product(("tcp", "quic"), AT_EXIT),
        *(("tcp", how) for how in AT_EXIT),
        *(("quic", "never closed"), ("quic", "an answer that is waited for")),
    ),
)
async def test_a_client_does_not_hold_up_the_end_of_the_interpreter(
    service, tmp_path, carrier, how
):
    assert await run(service, carrier, tmp_path, AT_EXIT[how]) == "closed\n"


async def test_the_service_is_told_of_clients_that_end_with_the_interpreter(service, tmp_path):
    """They are closed, and not found out to be silent."""
    address = CARRIERS["quic"]
    config = Config(timing=Timing(idle_timeout=600, ping_interval=300))
    service.config = config
    async with service.serving(address, dev_certificate=True, drain=0) as running:
        code = START + "client = aqueduct.SyncClient(address)\nclient.call('echo', ONE)\n"
        done = await asyncio.to_thread(python, code, running.addresses[0])
        assert (done.returncode, done.stderr) == (0, "")
        await until(lambda: not running.connections)


async def test_calls_as_the_interpreter_ends_are_errors_at_once(service, tmp_path):
    said = await run(
        service,
        "tcp",
        tmp_path,
        """
class Owner:
    def __init__(self):
        self.address = address
        self.connect = aqueduct.SyncClient
        self.client = aqueduct.SyncClient(address, config=patient)
        self.answers = self.client.source("endless")
        next(self.answers)
    def __del__(self):
        tried("call", lambda: self.client.call("echo", ONE, deadline=300.0))
        tried("exchange", lambda: list(self.client.exchange("echo", [ONE], deadline=300.0)))
        tried("answers", lambda: list(self.answers))
        tried("ping", lambda: self.client.ping(timeout=300.0))
        tried("client", lambda: self.connect(self.address, config=patient))

owner = Owner()
owner.itself, owner.tools = owner, (tried, ONE, aqueduct, patient)
sys.modules["owner"] = owner
del sys.modules["__main__"]  # what it needs lives as long as it does
""",
    )
    lines = said.splitlines()
    assert [line.split()[0] for line in lines] == ["call", "exchange", "answers", "ping", "client"]
    assert all("LocalProtocolError" in line or "ConnectionLost" in line for line in lines)
    assert "the interpreter is ending" in lines[-1]


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_clients_and_services_need_no_main_thread(service, tmp_path, carrier):
    """Names and numbers are found, though asyncio's executor takes nothing any more."""
    said = await run(
        service,
        carrier,
        tmp_path,
        """
import asyncio, threading

def late():
    threading.main_thread().join()
    for place in {address, address.replace("127.0.0.1", "localhost")}:
        with aqueduct.SyncClient(place) as client:
            assert client.call("echo", ONE) == ONE
    asyncio.run(serve())

async def serve():
    service = aqueduct.Service("late")
    service.handler("echo")(lambda batch: batch)
    for place in sys.argv[2:]:
        async with service.serving(place, dev_certificate=True, drain=0) as running:
            async with await aqueduct.Client.connect(running.addresses[0]) as client:
                assert await client.call("echo", ONE) == ONE
    print("served")

threading.Thread(target=late).start()
""",
        "aqueduct+tcp://127.0.0.1:0",
        "aqueduct+tcp://localhost:0",
        "aqueduct://[::1]:0",
        "aqueduct://localhost:0",
        f"aqueduct+unix://{tmp_path}/late.sock",
    )
    assert said == "served\n"


def test_run_needs_no_main_thread():
    code = """
    import os, threading
    import aqueduct

    def late():
        threading.main_thread().join()
        aqueduct.Service("late").run("aqueduct+tcp://localhost:0")

    def end():
        input()
        os._exit(7)

    threading.Thread(target=late).start()
    threading.Thread(target=end).start()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("aqueduct+tcp://localhost:")
    process.communicate("\n", PATIENCE)
    assert process.returncode == 7


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
async def test_a_name_is_looked_up_though_the_executor_takes_nothing(service, name, monkeypatch):
    loop = asyncio.get_running_loop()

    def refuse(*ignored):
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(loop, "run_in_executor", refuse)
    for scheme in ("aqueduct+tcp", "aqueduct"):
        async with (
            service.serving(f"{scheme}://{name}:0", dev_certificate=True, drain=0) as running,
            await aqueduct.Client.connect(running.addresses[0]) as client,
        ):
            assert await client.call("echo", ONE) == ONE


@pytest.mark.parametrize("scheme", ["aqueduct+tcp", "aqueduct"])
async def test_a_name_that_there_is_not_is_an_error(scheme):
    with pytest.raises(ConnectFailed, match="does not resolve"):
        await aqueduct.Client.connect(f"{scheme}://there.is.none.invalid:4433")


# The service of the same loop

PLACES = {
    **CARRIERS,
    "every address": "aqueduct+tcp://0.0.0.0:0",
    "every address of IPv6": "aqueduct://[::]:0",
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_sync_client_of_the_same_loop_s_service_is_an_error_at_once(
    service, tmp_path, place, caplog
):
    address = PLACES[place].format(folder=tmp_path)
    # Neither of these is waited for.
    config = Config(timing=Timing(connect_timeout=600, progress_deadline=600))
    async with service.serving(address, dev_certificate=True, drain=0) as running:
        there = running.addresses[0]
        there = there.replace("0.0.0.0", "127.0.0.1").replace("[::]", "localhost")
        with pytest.raises(LocalProtocolError, match=r"served by the event loop.*to_thread"):
            aqueduct.SyncClient(there, config=config)
        client = await asyncio.to_thread(aqueduct.SyncClient, there, config=config)
        works = (
            lambda: client.call("echo", ONE),
            lambda: client.exchange("echo", [ONE]),
            lambda: client.source("endless"),
            lambda: client.sink("echo", [ONE]),
            client.describe,
            client.ping,
        )
        for work in works:
            with pytest.raises(LocalProtocolError, match="served by the event loop"):
                work()
        assert await asyncio.to_thread(client.call, "echo", ONE) == ONE
        await asyncio.to_thread(client.close)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_sync_client_of_a_service_whose_loop_stands_still_is_an_error_at_once(
    service, tmp_path, carrier
):
    """The loop is this thread's, and between two of its runs."""
    loop = asyncio.new_event_loop()
    address = CARRIERS[carrier].format(folder=tmp_path)
    config = Config(timing=Timing(connect_timeout=600))
    serving = service.serving(address, dev_certificate=secure(carrier), drain=0)
    running = loop.run_until_complete(serving.__aenter__())
    try:
        with pytest.raises(LocalProtocolError, match="served by the event loop of this thread"):
            aqueduct.SyncClient(running.addresses[0], config=config)
    finally:
        loop.run_until_complete(serving.__aexit__(None, None, None))
        loop.close()


async def test_a_handler_that_calls_its_own_service_from_the_loop_hears_why(service):
    address = ""

    @service.handler("itself")
    async def itself(batches):
        async for batch in batches:
            with aqueduct.SyncClient(address) as client:
                yield client.call("echo", batch)

    @service.handler("itself in a thread")
    def itself_in_a_thread(batch):
        with aqueduct.SyncClient(address) as client:
            return client.call("echo", batch)

    async with service.serving(CARRIERS["tcp"], drain=0) as running:
        address = running.addresses[0]
        async with await aqueduct.Client.connect(address) as client:
            with pytest.raises(aqueduct.errors.HandlerFailed, match="served by the event loop"):
                await client.call("itself", ONE)
            assert await client.call("itself in a thread", ONE) == ONE


async def test_a_sync_client_of_another_loop_s_service_works_within_a_loop(service):
    """It blocks the loop for a moment, which is its owner's affair."""
    address: list[str] = []
    ready, over = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        async with service.serving(CARRIERS["tcp"], drain=0) as running:
            address.append(running.addresses[0])
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        other = aqueduct.Service("here")
        async with other.serving(CARRIERS["tcp"], drain=0):
            with aqueduct.SyncClient(address[0]) as client:
                assert client.call("echo", ONE) == ONE
    finally:
        over.set()
        thread.join()


# gevent

HEARS = """
from gevent import monkey
monkey.patch_all()
import asyncio

async def main():
    await asyncio.get_running_loop().getaddrinfo("localhost", 0)

asyncio.run(main())
"""


@functools.cache
def asyncio_works_with_all_patched() -> bool:
    """Whether asyncio by itself hears of its threads; gevent 26.9 stops that in Python 3.14.10."""
    try:
        return (
            subprocess.run([sys.executable, "-c", HEARS], timeout=10, check=False).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


def skip_if_asyncio_hangs(patched: dict[str, bool]) -> None:
    if not patched and not asyncio_works_with_all_patched():
        pytest.skip("asyncio itself hangs once this gevent has patched everything")


@pytest.mark.parametrize(
    ("patched", "sync", "served"),
    [
        ({}, "the threads, selectors and queues of this process", "works"),
        ({"thread": False}, "the selectors and queues of this process", "all of the threads"),
        ({"select": False, "queue": False}, "the threads of this process", "all of the threads"),
        ({"thread": False, "select": False, "queue": False}, "works", "works"),
    ],
)
async def test_what_gevent_has_patched_works_or_is_named(service, tmp_path, patched, sync, served):
    await asyncio.to_thread(skip_if_asyncio_hangs, patched)
    code = (
        """
from gevent import monkey
monkey.patch_all(**PATCHED)
"""
        + START.strip()
        + """
import asyncio

def sync():
    with aqueduct.SyncClient(address) as client:
        assert client.call("echo", ONE) == ONE
        assert list(client.exchange("echo", [ONE, ONE])) == [ONE, ONE]
    return "works"

async def serve():
    service = aqueduct.Service("green")
    service.handler("echo")(lambda batch: batch)
    async with service.serving("aqueduct+tcp://localhost:0", drain=0) as running:
        async with await aqueduct.Client.connect(running.addresses[0]) as client:
            assert await client.call("echo", ONE) == ONE
    return "works"

tried("sync", sync)
tried("served", lambda: asyncio.run(serve()))
"""
    )
    code = code.replace("PATCHED", json.dumps(patched).replace("false", "False"))
    async with service.serving(CARRIERS["tcp"], drain=0) as running:
        done = await asyncio.to_thread(python, code, running.addresses[0])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("sync ")
    assert sync in lines[0]
    assert lines[1].startswith("served ")
    assert served in lines[1]
    for line in lines:
        assert line.endswith("works") or "LocalProtocolError" in line


LATE = """
import asyncio, sys
import pyarrow as pa
import aqueduct

ONE = pa.record_batch({"n": pa.array([1], pa.int64())})
address = sys.argv[1]
FIRST
made = aqueduct.SyncClient(address) if MADE else None
if made is not None:
    assert made.call("echo", ONE) == ONE

from gevent import monkey
monkey.patch_all(**PATCHED)

def tried(name, work):
    try:
        print(name, work(), flush=True)
    except aqueduct.errors.AqueductError as error:
        print(name, type(error).__name__, error, flush=True)

def sync():
    with aqueduct.SyncClient(address) as client:
        assert client.call("echo", ONE) == ONE
    return "works"

async def asynchronous():
    async with await aqueduct.Client.connect(address) as client:
        assert await client.call("echo", ONE) == ONE
    return "works"

async def serve():
    service = aqueduct.Service("green")
    service.handler("echo")(lambda batch: batch)
    async with service.serving("aqueduct+tcp://localhost:0", drain=0):
        return "works"

def call():
    assert made.call("echo", ONE) == ONE
    return "works"

def exchange():
    assert list(made.exchange("echo", [ONE, ONE])) == [ONE, ONE]
    return "works"

if made is not None:
    tried("call", call)
    tried("exchange", exchange)
    made.close()
tried("sync", sync)
tried("asynchronous", lambda: asyncio.run(asynchronous()))
tried("serve", lambda: asyncio.run(serve()))
"""


LATE_BEGINS = {
    "nothing was used": ("", False),
    "names were imported": ("from aqueduct import Client, SyncClient, Service", False),
    "a client was made": ("", True),
}
LATE_PATCHES: dict[str, tuple[dict[str, bool], str | None]] = {
    "all": ({}, "the threads and selectors and queues"),
    "no threads": ({"thread": False}, "the selectors and queues"),
    "threads": ({"select": False, "queue": False}, "the threads"),
    "nothing of ours": ({"thread": False, "select": False, "queue": False}, None),
}


@pytest.mark.parametrize(
    ("begin", "patch"),
    mostly_long(
        itertools.product(LATE_BEGINS, LATE_PATCHES),
        *((begin, "all") for begin in LATE_BEGINS),
        *(("names were imported", "no threads"), ("a client was made", "threads")),
        *(("names were imported", "nothing of ours"), ("a client was made", "nothing of ours")),
    ),
)
async def test_a_late_patch_of_gevent_is_an_error_at_once(service, begin, patch):
    (first, made), (patched, named) = LATE_BEGINS[begin], LATE_PATCHES[patch]
    if not first and not made:
        await asyncio.to_thread(skip_if_asyncio_hangs, patched)
    code = LATE.replace("PATCHED", json.dumps(patched).replace("false", "False"))
    code = code.replace("MADE", str(made)).replace("FIRST", first)
    async with service.serving(CARRIERS["tcp"], drain=0) as running:
        done = await asyncio.to_thread(python, code, running.addresses[0])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = [*(["call", "exchange"] if made else []), "sync", "asynchronous", "serve"]
    assert [line.split()[0] for line in lines] == names
    for line in lines:
        if named is None:
            assert line.endswith("works"), line
        elif not first and not made:  # the modules that matter are imported after the patch
            assert line.endswith("works") or "gevent.monkey or eventlet" in line
        else:
            assert f"patched {named} of this process after aqueduct was imported" in line
            assert "patch at the beginning of the program" in line
