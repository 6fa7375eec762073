"""A forked child has neither its parent's sockets, nor its event loop, nor its signals."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
import socket
import stat
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct import forks
from aqueduct.config import Config, Timing
from tests.support.programs import FORMS, PATIENCE, program, python
from tests.support.selection import mostly_long

CARRIERS = {
    "tcp": "aqueduct+tcp://127.0.0.1:0",
    "tls": "aqueduct+tls://127.0.0.1:0",
    "unix": "aqueduct+unix://{folder}/service.sock",
    "quic": "aqueduct://127.0.0.1:0",
}
LOOP = "inherited on the loop"
# From 3.12 on Python warns of every fork of a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
ONE = pa.record_batch({"n": pa.array([1], pa.int64())})

SERVICE = """
import asyncio, concurrent.futures, json, multiprocessing, os, signal, subprocess, sys
import threading, time
import pyarrow as pa
import aqueduct

service = aqueduct.Service("forking")
fork = multiprocessing.get_context("fork")

def number(value):
    return pa.record_batch({"n": pa.array([value], pa.int64())})

def text(value):
    return pa.record_batch({"t": pa.array([value])})

def terminated(context=fork):
    process = context.Process(target=time.sleep, args=(600,))
    process.start()
    process.terminate()
    process.join(60)
    return number(process.exitcode)

@service.handler("echo")
def echo(batch):
    return batch

@service.handler("pid")
def pid(batch):
    return number(os.getpid())

@service.handler("process")
def process(batch):
    return terminated()

@service.handler("process on the loop")
async def process_on_the_loop(batches):
    async for batch in batches:
        yield terminated()

@service.handler("forkserver")
def forkserver(batch):
    return terminated(multiprocessing.get_context("forkserver"))

@service.handler("spawn")
def spawn(batch):
    return terminated(multiprocessing.get_context("spawn"))

@service.handler("preexec")
def preexec(batch):
    process = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: None)
    process.terminate()
    return number(process.wait(60))

@service.handler("posix_spawn")
def posix_spawn(batch):
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
    os.kill(pid, signal.SIGTERM)
    return number(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

@service.handler("another service")
def another_service(batch):
    "A child that calls its parent's service, and runs one of its own until it is told to end."
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            address = batch["address"][0].as_py()
            with aqueduct.SyncClient(address) as client:
                one = number(1)
                assert client.call("echo", one) == one
            sys.stdout = os.fdopen(writing, "w")  # where the address of the child's goes
            service.run("aqueduct+tcp://127.0.0.1:0", drain=5)
            os._exit(3)
        finally:
            os._exit(4)
    os.close(writing)
    with open(reading) as lines:
        address = lines.readline().strip()
    with aqueduct.SyncClient(address) as client:
        assert client.call("pid", number(1)) == number(child)
    os.kill(child, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return pa.record_batch({"address": pa.array([str(status)])})

@service.handler("pool")
def pool(batch):
    with fork.Pool(2) as workers:
        return number(sum(workers.map(abs, [-1, -2])) - 3 - 15)

@service.handler("executor")
def executor(batch):
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as workers:
        return number(sum(workers.map(abs, [-1, -2])) - 3 - 15)

def child_that_stays(result):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        os.write(writing, json.dumps(result()).encode())
        os.close(writing)
        signal.pause()
        os._exit(1)
    os.close(writing)
    with open(reading) as lines:
        return child, lines.read()

@service.handler("child")
def child(batch):
    return number(child_that_stays(lambda: None)[0])

def inherited():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass  # of the list itself
    return {
        "files": found,
        "wakeup": signal.set_wakeup_fd(-1),
        "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "usr1": signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
        "int": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,  # it is the service's
        "blocked": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    }

ENDS = {
    "returns": lambda: None,
    "exits": lambda: sys.exit(7),
    "exits with a text": lambda: sys.exit("no"),
    "raises": lambda: 1 / 0,
}

def waited(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

@service.handler("child of a function")
def child_of_a_function(batch, call):
    child = os.fork()
    if child:
        return number(waited(child))
    ENDS[call.headers["end"]]()
    return number(-1)

@service.handler("child of a generator")
def child_of_a_generator(batches, call):
    for batch in batches:
        child = os.fork()
        if child:
            yield number(waited(child))
        else:
            ENDS[call.headers["end"]]()
            yield number(-1)

@service.handler("child at the end")
def child_at_the_end(batches, call):
    for batch in batches:
        pass
    child = os.fork()
    if child:
        yield number(waited(child))
    else:
        ENDS[call.headers["end"]]()

@service.handler("child of a coroutine")
async def child_of_a_coroutine(batch, call):
    never = asyncio.get_running_loop().create_future()
    child = os.fork()
    if child:
        return number(waited(child))
    ENDS[call.headers["end"]]()
    if "awaits" in call.headers:
        await never
    return number(-1)

@service.handler("child of an async generator")
async def child_of_an_async_generator(batches, call):
    never = asyncio.get_running_loop().create_future()
    async for batch in batches:
        child = os.fork()
        if child:
            yield number(waited(child))
        else:
            ENDS[call.headers["end"]]()
            if "awaits" in call.headers:
                await never
            yield number(-1)

@service.handler("child at the async end")
async def child_at_the_async_end(batches, call):
    never = asyncio.get_running_loop().create_future()
    async for batch in batches:
        pass
    child = os.fork()
    if child:
        yield number(waited(child))
    else:
        ENDS[call.headers["end"]]()
        if "awaits" in call.headers:
            await never

TEXT = pa.schema([("t", pa.string())])

@service.handler("inherited", output=TEXT)
def what_a_child_inherits(batch):
    return text(child_that_stays(inherited)[1])

@service.handler("inherited on the loop", output=TEXT)
async def what_a_child_of_the_loop_inherits(batches):
    async for batch in batches:
        yield text(child_that_stays(inherited)[1])
"""


def called(client: aqueduct.SyncClient, handler: str) -> Any:
    """The one value of a handler's answer."""
    ((value,),) = client.call(handler, ONE, output_schema=None).to_pydict().values()
    return value


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("run", ("pool", "executor", "forkserver", "spawn", "preexec", "posix_spawn")),
        ("serve", ()),
        ("workers", ("pool",)),
    ],
    ids=FORMS,
)
def test_a_child_that_is_terminated_leaves_the_service_as_it_is(tmp_path, form, more):
    with program(tmp_path, SERVICE, form, CARRIERS["tcp"]) as running:
        with aqueduct.SyncClient(running.address) as client:
            pid = called(client, "pid")
            for handler in ("process", "process on the loop", *more):
                for _ in range(2):
                    assert called(client, handler) == -signal.SIGTERM, handler
                assert client.call("echo", ONE) == ONE
                assert called(client, "pid") == pid, handler  # it is the very process
        running.signal(signal.SIGTERM)
        assert running.ended() == 0
        # Told of once: of the signal that was the service's.
        drained = [line for line in running.errors() if "signal" in line]
        assert len(drained) == (0 if form == "run" else 1)


CHILDREN = ("child of a function", "child of a generator", "child at the end")
CHILDREN_OF_THE_LOOP = (
    "child of a coroutine",
    "child of an async generator",
    "child at the async end",
)


@pytest.mark.parametrize("form", ["run", "workers"])
def test_a_child_that_comes_to_its_handler_s_end_ends_there(tmp_path, form):
    ends = {"returns": 0, "exits": 7, "exits with a text": 1, "raises": 1}
    with program(tmp_path, SERVICE, form, CARRIERS["tcp"]) as running:
        with aqueduct.SyncClient(running.address) as client:
            for handler in CHILDREN + CHILDREN_OF_THE_LOOP:
                for end, status in ends.items():
                    answer = client.call(handler, ONE, headers={"end": end}, deadline=PATIENCE)
                    assert answer["n"].to_pylist() == [status], (handler, end)
        running.signal(signal.SIGTERM)
        assert running.ended() == 0


@pytest.mark.parametrize("form", ["run", "workers"])
def test_a_child_that_awaits_something_in_a_handler_ends_and_says_why(tmp_path, form):
    with program(tmp_path, SERVICE, form, CARRIERS["tcp"]) as running:
        with aqueduct.SyncClient(running.address) as client:
            for handler in CHILDREN_OF_THE_LOOP:
                headers = {"end": "returns", "awaits": "yes"}
                answer = client.call(handler, ONE, headers=headers, deadline=PATIENCE)
                assert answer["n"].to_pylist() == [1], handler
                assert client.call("echo", ONE) == ONE
        running.signal(signal.SIGTERM)
        assert running.ended() == 0
    errors = running.errors()
    said = [line for line in errors if "awaits something on the event loop" in line]
    assert len(said) == len(CHILDREN_OF_THE_LOOP), errors
    assert not [line for line in errors if "Errno" in line]


@pytest.mark.parametrize("form", mostly_long(FORMS, "serve", "workers"))
def test_a_child_may_have_clients_and_a_service_of_its_own(tmp_path, form):
    with program(tmp_path, SERVICE, form, CARRIERS["tcp"]) as running:
        with aqueduct.SyncClient(running.address) as client:
            asked = pa.record_batch({"address": pa.array([running.address])})
            answer = client.call("another service", asked)
            assert answer.to_pydict() == {"address": ["3"]}  # it was drained, and returned
            assert client.call("echo", ONE) == ONE
        running.signal(signal.SIGTERM)
        assert running.ended() == 0


@pytest.mark.parametrize(
    ("form", "carrier"),
    mostly_long(
        [
            *((form, "tcp") for form in FORMS),
            *(("run", name) for name in CARRIERS if name != "tcp"),
        ],
        *(("run", "tcp"), ("workers", "tcp"), ("run", "quic")),
    ),
)
def test_a_child_has_no_socket_no_loop_and_no_signal_of_its_parent(tmp_path, form, carrier):
    address = CARRIERS[carrier].format(folder=tmp_path)
    with program(tmp_path, SERVICE, form, address) as running:
        for handler in ("inherited", LOOP):
            with aqueduct.SyncClient(running.address) as client:
                found = json.loads(called(client, handler))
                assert client.call("echo", ONE) == ONE
            kinds = [name for name in found["files"] if name.startswith(("socket:", "anon_inode:"))]
            assert kinds == [], handler
            assert not any("aqueduct-rings" in name for name in found["files"])
            assert found["wakeup"] == -1
            assert found["term"]
            assert found["usr1"]
            assert found["blocked"] == []
            assert found["int"]
        running.signal(signal.SIGTERM)
        assert running.ended() == 0


@pytest.mark.parametrize(
    ("carrier", "form"),
    mostly_long(
        itertools.product(CARRIERS, ("run", "serve")),
        *(("tcp", "run"), ("tls", "serve"), ("unix", "serve"), ("quic", "run")),
    ),
)
async def test_a_service_that_is_killed_leaves_its_address_to_the_next_one(tmp_path, form, carrier):
    """Although a child of it lives on, and keeps what it has."""
    address = CARRIERS[carrier].format(folder=tmp_path)
    timing = Timing(ping_interval=0.2, idle_timeout=PATIENCE)
    with program(tmp_path, SERVICE, form, address) as running:
        async with await aqueduct.Client.connect(
            running.address, config=Config(timing=timing)
        ) as client:
            answer = await client.call("child", ONE)
            (child,) = answer.column(0).to_pylist()
            running.process.kill()
            await asyncio.to_thread(running.ended)
            async with asyncio.timeout(PATIENCE / 2):  # sooner than by silence
                await client.connection.wait_closed()
            os.kill(child, 0)  # it lives
            next_one = aqueduct.Service("next")
            next_one.handler("echo")(lambda batch: batch)
            place = running.address.partition("?")[0]
            secure = carrier in ("tls", "quic")
            async with (
                next_one.serving(place, dev_certificate=secure, drain=0) as serving,
                await aqueduct.Client.connect(serving.addresses[0]) as other,
            ):
                assert await other.call("echo", ONE) == ONE
            os.kill(child, signal.SIGKILL)


async def test_a_worker_that_is_killed_is_replaced_though_a_child_of_it_lives(tmp_path):
    with program(tmp_path, SERVICE, "workers", CARRIERS["tcp"]) as running:
        async with await aqueduct.Client.connect(running.address) as client:
            (child,) = (await client.call("child", ONE)).column(0).to_pylist()
            (pid,) = (await client.call("pid", ONE)).column(0).to_pylist()
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE / 2):
                await client.connection.wait_closed()
            os.kill(child, 0)
        async with await aqueduct.Client.connect(running.address) as client:
            assert (await client.call("pid", ONE)).column(0).to_pylist() != [pid]
        running.signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.ended) == 0


# Clients

CLIENT = """
import asyncio, os, sys
import pyarrow as pa
import aqueduct
from aqueduct.errors import AqueductError

ONE = pa.record_batch({"n": pa.array([1], pa.int64())})

def in_child(work):
    "What work() raised or returned in a forked child."
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = repr(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as said:
        found = said.read()
    os.waitpid(child, 0)
    return found

address = sys.argv[1]
loop = asyncio.new_event_loop()
client = loop.run_until_complete(aqueduct.Client.connect(address))
ask = lambda: client.call("echo", ONE)
assert loop.run_until_complete(ask()) == ONE

async def channel():
    sender = client.connection.entrypoint
    await sender.send(b"")

async def read_on(stream):
    async for batch in stream:
        pass

async def begin():
    return client.source("endless")

stream = loop.run_until_complete(begin())
works = {
    "call": ask,
    "exchange": lambda: begin(),
    "sink": lambda: client.sink("store", [ONE]),
    "describe": lambda: client.describe(),
    "ping": lambda: client.ping(),
    "stream": lambda: read_on(stream),
    "channel": channel,
    "close": lambda: client.close(),
}
for name, work in works.items():
    print(name, "again", in_child(lambda: loop.run_until_complete(work())), flush=True)
    print(name, "new", in_child(lambda: asyncio.run(work())), flush=True)
    assert loop.run_until_complete(ask()) == ONE  # the parent's goes on

async def both():
    # A fork while the loop runs, whose child uses a loop of its own.
    said = in_child(lambda: asyncio.run(ask()))
    return said, await ask()

said, answer = loop.run_until_complete(both())
print("running new", said, flush=True)
assert answer == ONE
loop.run_until_complete(client.close())
"""


@pytest.fixture
def service():
    service = aqueduct.Service("there")
    service.handler("echo")(lambda batch: batch)

    @service.handler("endless", kind="source", output=ONE.schema)
    async def endless():
        while True:
            yield ONE

    return service


@pytest.mark.parametrize("carrier", mostly_long(CARRIERS, "tcp", "quic"))
async def test_a_client_in_a_forked_child_is_an_error_and_the_parent_s_goes_on(
    service, tmp_path, carrier
):
    address = CARRIERS[carrier].format(folder=tmp_path)
    async with service.serving(
        address, dev_certificate=carrier in ("tls", "quic"), drain=0
    ) as running:
        done = await asyncio.to_thread(python, CLIENT, running.addresses[0])
        assert service.counters()["connections"] == 1
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 17
    for line in lines:
        name, _, found = line.split(" ", 2)
        if name == "close":
            assert found == "None"
        elif name == "stream":
            assert found.startswith("ConnectionLost: "), line
        else:
            assert found.startswith("LocalProtocolError: "), line
        assert name == "close" or "connect after the fork" in found


SYNC = """
import os, sys, threading
import pyarrow as pa
import aqueduct

ONE = pa.record_batch({"n": pa.array([1], pa.int64())})
client = aqueduct.SyncClient(sys.argv[1])
assert client.call("echo", ONE) == ONE
answers = client.source("endless")
next(answers)
child = os.fork()
if not child:
    for work in (lambda: client.call("echo", ONE), lambda: next(answers), client.ping):
        try:
            for _ in range(100_000):  # what was read before is the child's, too
                work()
        except aqueduct.errors.AqueductError as error:
            assert "the fork" in str(error), error
        else:
            os._exit(2)
    answers.close()
    client.close()
    assert client.closed
    del answers, client
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for _ in range(100):
    next(answers)
assert client.call("echo", ONE) == ONE
answers.close()
client.close()
"""


@pytest.mark.parametrize("carrier", mostly_long(CARRIERS, "tls", "quic"))
async def test_a_sync_client_in_a_forked_child_is_an_error_and_the_parent_s_goes_on(
    service, tmp_path, carrier
):

    address = CARRIERS[carrier].format(folder=tmp_path)
    async with service.serving(
        address, dev_certificate=carrier in ("tls", "quic"), drain=0
    ) as running:
        done = await asyncio.to_thread(python, SYNC, running.addresses[0])
        assert service.counters()["connections"] == 1
    assert (done.returncode, done.stderr) == (0, "")


# The mechanism


def in_child(work) -> int:
    """The exit status of a forked child in which ``work`` returns whether all is well."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if work() else 1)
        except BaseException:  # noqa: BLE001
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_socket_of_the_parent_is_closed_in_a_child():
    one, other = socket.socketpair()
    with one, other:
        forks.own_socket(one)

        def looked() -> bool:
            return os.fstat(one.fileno()).st_rdev == os.stat(os.devnull).st_rdev

        assert in_child(looked) == 0
        one.sendall(b"a")
        assert other.recv(1) == b"a"
        one.shutdown(socket.SHUT_WR)
        assert other.recv(1) == b""


def test_a_child_without_free_descriptors_closes_its_sockets():
    one, other = socket.socketpair()
    with one, other:
        forks.own_socket(one)

        def crowded() -> bool:
            """In a process that can open no file more."""
            forks.own_socket(one)
            most = one.fileno() + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            with contextlib.suppress(OSError):
                while True:
                    os.dup(0)
            return in_child(lambda: stat.S_ISCHR(os.fstat(one.fileno()).st_mode)) == 0

        assert in_child(crowded) == 0


def test_an_error_in_a_child_does_not_stop_what_others_close(caplog):
    class Broken:
        def left_behind(self) -> None:
            raise RuntimeError("broken")

    class Other:
        told = False

        def left_behind(self) -> None:
            self.told = True

    broken, others = Broken(), [Other() for _ in range(5)]
    every: list[forks.Inherited] = [*others[:2], broken, *others[2:]]
    for each in every:
        forks.own(each)
    assert in_child(lambda: all(other.told for other in others)) == 0
    assert not any(other.told for other in others)
    assert broken is not None


def test_a_signal_that_comes_with_the_fork_is_the_child_s():
    """It is not written to the wake-up socket of the parent's loop."""
    code = """
    import asyncio, os, signal
    from aqueduct import forks

    async def main():
        loop = asyncio.get_running_loop()
        forks.own_loop(loop)
        came = []
        loop.add_signal_handler(signal.SIGTERM, came.append, 1)
        for _ in range(200):
            child = os.fork()
            if not child:
                signal.pause()
                os._exit(1)
            os.kill(child, signal.SIGTERM)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == -signal.SIGTERM, status
        await asyncio.sleep(0)
        assert came == []
        os.kill(os.getpid(), signal.SIGTERM)  # the parent has its own as before
        while not came:
            await asyncio.sleep(0.01)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()

    asyncio.run(main())
    """
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_that_returns_into_the_parent_s_loop_ends_and_the_parent_goes_on():
    code = """
    import asyncio, os
    from aqueduct import forks

    async def main():
        loop = asyncio.get_running_loop()
        forks.own_loop(loop)
        child = os.fork()
        if not child:
            raise SystemExit(9)  # through asyncio.run, which closes the loop
        os.waitpid(child, 0)
        woken = asyncio.Event()
        await asyncio.to_thread(loop.call_soon_threadsafe, woken.set)
        await woken.wait()
        print("woken")

    asyncio.run(main())
    """
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "woken\n"), done.stderr


def test_an_answer_that_had_come_before_the_fork_is_the_parent_s_alone():
    code = """
    import asyncio, os, sys, threading
    import pyarrow as pa
    import aqueduct

    service = aqueduct.Service("three")

    @service.handler("three", output=pa.schema([("n", pa.int64())]))
    def three(batches):
        for batch in batches:
            yield from (pa.record_batch({"n": [number]}) for number in range(3))

    ready, addresses = threading.Event(), []

    async def main():
        async with service.serving("aqueduct+tcp://127.0.0.1:0", drain=0) as running:
            addresses.extend(running.addresses)
            ready.set()
            await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
    assert ready.wait(60)
    client = aqueduct.SyncClient(addresses[0])
    question = pa.record_batch({"n": [1]})
    answers = iter(client.exchange("three", [question]))
    found = [next(answers)]
    # One connection carries both calls, so the rest of the first is here once this is over.
    assert len(list(client.exchange("three", [question]))) == 3
    child = os.fork()
    if not child:
        try:
            next(answers)
        except aqueduct.errors.LocalProtocolError as error:
            assert "did not survive the fork" in str(error)
            sys.exit(7)
        sys.exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    found.extend(answers)
    print([batch.column(0)[0].as_py() for batch in found])
    """
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2]\n", "")


def test_arrow_s_threads_work_in_a_child_and_at_the_end_of_both():
    """With an answer open, of which a service in the same process still computes the rest."""
    code = """
    import asyncio, os, sys, threading
    import pyarrow as pa
    import aqueduct

    OUTPUT = pa.schema([("n", pa.int64()), ("text", pa.string())])
    service = aqueduct.Service("busy")

    def sorted_rows(count):
        rows = {"n": range(count), "text": ["long enough"] * count}
        return pa.table({name: pa.array(row) for name, row in rows.items()}).sort_by("n")

    @service.handler("many", output=OUTPUT)
    def many(batches):
        for batch in batches:
            while True:
                yield from sorted_rows(100_000).to_batches()

    ready, addresses = threading.Event(), []

    async def main():
        async with service.serving("aqueduct+tcp://127.0.0.1:0", drain=0) as running:
            addresses.extend(running.addresses)
            ready.set()
            await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
    assert ready.wait(60)
    client = aqueduct.SyncClient(addresses[0] + "?compression=zstd")
    answers = iter(client.exchange("many", [pa.record_batch({"n": [1]})]))
    assert next(answers).num_rows == 100_000
    child = os.fork()
    if not child:
        assert sorted_rows(100_000).group_by("n").aggregate([("n", "sum")]).num_rows == 100_000
        try:
            next(answers)
        except aqueduct.errors.LocalProtocolError as error:
            assert "did not survive the fork" in str(error)
            sys.exit(7)
        sys.exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert next(answers).num_rows == 100_000
    print("over")
    """
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
