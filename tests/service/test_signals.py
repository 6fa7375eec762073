"""What a process that serves does with signals, and that it ends in time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.config import DEFAULT, Timing
from aqueduct.errors import AqueductError, ConfigError, Refused
from tests.support.calls import until_seen
from tests.support.programs import FORMS, PATIENCE, program, python
from tests.support.selection import mostly_long

ADDRESS = "aqueduct+tcp://127.0.0.1:0"
ONE = pa.record_batch({"n": pa.array([1], pa.int64())})
HOLDING = ("function", "generator", "loop", "executor", "thread")
"""Handlers that would take ten minutes."""

SERVICE = """
import asyncio, concurrent.futures, json, multiprocessing, os, signal, sys, threading, time
import pyarrow as pa
import aqueduct

service = aqueduct.Service("ending")
fork = multiprocessing.get_context("fork")
pool = None

@service.handler("echo")
def echo(batch):
    return batch

@service.handler("function")
def function(batch):
    print("taken", flush=True)
    time.sleep(600)
    return batch

@service.handler("generator")
def generator(batches):
    for batch in batches:
        print("taken", flush=True)
        time.sleep(600)
        yield batch

@service.handler("loop")
async def loop(batches):
    async for batch in batches:
        print("taken", flush=True)
        time.sleep(600)  # which nobody should do
        yield batch

@service.handler("executor")
async def executor(batches):
    async for batch in batches:
        print("taken", flush=True)
        await asyncio.to_thread(time.sleep, 600)
        yield batch

@service.handler("thread")
def thread(batch):
    threading.Thread(target=time.sleep, args=(600,)).start()
    print("taken", flush=True)
    return batch

@service.handler("child")
def child(batch):
    process = fork.Process(target=time.sleep, args=(600,))
    process.start()
    print("taken", process.pid, flush=True)
    return batch

@service.handler("with a pool")
def with_a_pool(batch):
    global pool
    pool = fork.Pool(2)
    assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
    print("taken", flush=True)
    while not os.path.exists("gate"):
        time.sleep(0.01)
    pool.terminate()
    return batch
"""


class Calling:
    """A call that is under way in a thread."""

    def __init__(self, client: aqueduct.SyncClient, handler: str) -> None:
        self.found: object = None
        self._thread = threading.Thread(target=self._run, args=(client, handler), daemon=True)
        self._thread.start()

    def _run(self, client: aqueduct.SyncClient, handler: str) -> None:
        try:
            self.found = client.call(handler, ONE)
        except AqueductError as error:
            self.found = error

    def result(self) -> object:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.found


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie has."""
    try:
        with open(f"/proc/{pid}/stat") as found:
            return found.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def is_draining(client: aqueduct.SyncClient) -> bool:
    """Whether the service takes no more calls."""
    try:
        client.call("echo", ONE)
    except Refused as error:
        return error.draining
    return False


@pytest.mark.parametrize("form", FORMS)
def test_sigusr1_tells_the_state_and_ends_nothing(tmp_path, form):
    with program(tmp_path, SERVICE, form, ADDRESS) as running:
        with aqueduct.SyncClient(running.address) as client:
            assert client.call("echo", ONE) == ONE
            for _ in range(2):
                running.signal(signal.SIGUSR1)
                found = json.loads(running.error("{"))
                assert found["counters"]["calls"] == 1
                assert len(found["connections"]) == 1
            assert client.call("echo", ONE) == ONE
        running.signal(signal.SIGTERM)
        assert running.ended() == 0


@pytest.mark.parametrize("form", FORMS)
def test_one_ctrl_c_to_all_processes_of_a_service_with_a_pool_drains_it(tmp_path, form):
    with (
        program(tmp_path, SERVICE, form, ADDRESS) as running,
        aqueduct.SyncClient(running.address) as client,
        aqueduct.SyncClient(running.address) as other,
    ):
        call = Calling(client, "with a pool")
        assert running.line() == "taken"
        assert other.call("echo", ONE) == ONE
        os.killpg(running.process.pid, signal.SIGINT)
        until_seen(lambda: is_draining(other))
        assert running.process.poll() is None
        (tmp_path / "gate").touch()
        assert call.result() == ONE  # it had its time
        assert running.ended() == 0


@pytest.mark.parametrize(
    ("form", "handler"),
    mostly_long(
        itertools.product(FORMS, HOLDING),
        *(("run", handler) for handler in HOLDING),
        *(("serve", "loop"), ("workers", "function")),
    ),
)
def test_no_handler_holds_the_end_beyond_the_drain(tmp_path, form, handler):
    """Each of them would take ten minutes."""
    with program(tmp_path, SERVICE, form, ADDRESS, "--drain", "1") as running:
        client = aqueduct.SyncClient(running.address)
        call = Calling(client, handler)
        assert running.line() == "taken"
        if handler == "thread":
            assert call.result() == ONE
        running.signal(signal.SIGTERM)
        assert running.ended() in (0, 1)
        if handler != "thread":
            assert isinstance(call.result(), AqueductError)
        client.close()


@pytest.mark.parametrize("form", mostly_long(FORMS, "workers"))
def test_no_child_outlives_a_service_that_ended_at_its_deadline(tmp_path, form):
    with program(tmp_path, SERVICE, form, ADDRESS, "--drain", "2") as running:
        with aqueduct.SyncClient(running.address) as client:
            assert client.call("child", ONE) == ONE
        pid = int(running.line().removeprefix("taken "))
        running.signal(signal.SIGTERM)
        assert running.ended() == 1
        until_seen(lambda: is_gone(pid))


@pytest.mark.parametrize("form", FORMS)
def test_a_second_signal_ends_a_service_whose_loop_is_held(tmp_path, form):
    with program(tmp_path, SERVICE, form, ADDRESS, "--drain", "600") as running:
        client = aqueduct.SyncClient(running.address)
        call = Calling(client, "loop")
        assert running.line() == "taken"
        running.signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while running.process.poll() is None:  # signals that come together are one
            assert time.monotonic() < deadline
            running.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(0.5)
        assert running.ended() in (1, 128 + signal.SIGTERM)
        assert isinstance(call.result(), AqueductError)
        client.close()


def test_a_program_goes_on_after_run_as_long_as_it_likes():
    """Nothing was left that would hold its end up."""
    code = """
    import os, signal, threading, time
    import aqueduct

    service = aqueduct.Service("short")
    def end():
        while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    service.run("memory://short", drain=0.5)
    deadline = time.monotonic() + 3  # well beyond the drain
    while time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [each for each in threading.enumerate() if "deadline" in each.name]
    print("went on")
    """
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "memory://short\nwent on\n"), done.stderr


def test_run_within_a_running_loop_says_what_to_do_instead():
    code = """
    import asyncio
    import aqueduct

    async def notebook():
        try:
            aqueduct.Service("there").run("memory://there")
        except aqueduct.errors.LocalProtocolError as error:
            print(error)

    asyncio.run(notebook())
    """
    done = python(code)
    assert done.returncode == 0
    assert done.stderr == ""  # and no coroutine was left unawaited
    assert "async with service.serving(" in done.stdout


def test_signals_are_as_before_once_run_has_returned():
    code = """
    import os, signal, threading, time
    import aqueduct

    def mine(number, frame):
        raise SystemExit(5)

    signal.signal(signal.SIGTERM, mine)
    signal.signal(signal.SIGUSR1, mine)
    def end():
        while signal.getsignal(signal.SIGTERM) is mine:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=end, daemon=True).start()
    aqueduct.Service("short").run("memory://short")
    assert signal.getsignal(signal.SIGTERM) is mine
    assert signal.getsignal(signal.SIGUSR1) is mine
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    """
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_drain_is_shorter_than_the_grace_of_kubernetes():
    assert DEFAULT.timing.drain_timeout == 25
    with pytest.raises(ConfigError, match=r"Timing\.drain_timeout"):
        Timing(drain_timeout=-1)


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", ""])
def test_a_drain_that_is_no_time_is_wrong_usage(text):
    code = """
    import sys
    from aqueduct.cli import main
    main(["serve", "app:service", "--listen", "memory://a", "--drain=" + sys.argv[1]])
    """
    done = python(code, text)
    assert done.returncode == 2
    assert "argument --drain: the value is" in done.stderr and "a duration" in done.stderr


@pytest.mark.parametrize("form", mostly_long(FORMS, "run", "serve"))
def test_the_setting_counts_where_no_drain_is_given(tmp_path, form):
    source = SERVICE.replace(
        'aqueduct.Service("ending")',
        'aqueduct.Service("ending", config=aqueduct.config.Config('
        "timing=aqueduct.config.Timing(drain_timeout=2)))",
    ).replace("import aqueduct\n", "import aqueduct\nimport aqueduct.config\n")
    with program(tmp_path, source, form, ADDRESS) as running:
        client = aqueduct.SyncClient(running.address)
        call = Calling(client, "loop")
        assert running.line() == "taken"
        running.signal(signal.SIGTERM)
        assert running.ended() == 1
        assert isinstance(call.result(), AqueductError)
        client.close()
