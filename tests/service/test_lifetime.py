"""What a service does once in each process: its order, its errors, its deadlines, its forks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import aqueduct
from aqueduct.config import Config, Timing
from aqueduct.errors import ConfigError, LocalProtocolError, StartFailed
from aqueduct.service.lifetime import unless
from tests.support.calls import NUMBERS, config, connected, everything, numbers, serving, until
from tests.test_cli import COMMAND, environment


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def service(said: list[str]) -> aqueduct.Service:
    """Says what it does, in order."""
    service = aqueduct.Service("model")

    @service.on_start
    def load() -> None:
        assert threading.current_thread() is not threading.main_thread()
        service.state.weight = 3
        said.append("load")

    @service.on_stop
    def free() -> None:
        said.append("free")

    async def connect(service: aqueduct.Service) -> None:
        service.state.factor = service.state.weight * 2
        said.append("connect")

    async def disconnect(service: aqueduct.Service) -> None:
        said.append(f"disconnect {service.name}")

    assert service.on_start(connect) is connect
    assert service.on_stop(disconnect) is disconnect

    @service.handler(input=NUMBERS)
    def times(batch):
        said.append("call")
        return numbers(*(value * service.state.factor for value in batch["id"].to_pylist()))

    return service


STARTED = ["load", "connect"]
STOPPED = ["disconnect model", "free"]


async def test_starts_run_in_order_before_the_first_call_and_stops_in_reverse_after_the_last(
    service: aqueduct.Service, said: list[str]
) -> None:
    for _ in range(2):  # it may be served again later
        async with connected(service) as client:
            assert said == STARTED
            assert await client.call("times", numbers(2)) == numbers(12)
        assert said == [*STARTED, "call", *STOPPED]
        said.clear()


async def test_servings_at_the_same_time_have_one_start_and_one_stop(
    service: aqueduct.Service, said: list[str]
) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()

    @service.on_start
    async def wait() -> None:
        reached.set()
        await gate.wait()

    async with contextlib.AsyncExitStack() as stack:
        first = asyncio.ensure_future(stack.enter_async_context(serving(service)))
        await reached.wait()
        second = asyncio.ensure_future(stack.enter_async_context(serving(service)))
        third = asyncio.ensure_future(stack.enter_async_context(serving(service)))
        await asyncio.sleep(0)
        third.cancel()  # one that gives up takes nothing from the others
        await asyncio.wait((third,))
        assert third.cancelled() and not first.done() and not second.done()
        gate.set()
        await asyncio.gather(first, second)
        assert said == STARTED
        async with serving(service):
            assert said == STARTED
        assert said == STARTED
    assert said == [*STARTED, *STOPPED]


async def test_servings_of_two_event_loops_have_one_start(
    service: aqueduct.Service, said: list[str]
) -> None:
    inside, over = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        async with serving(service):
            inside.set()
            await asyncio.to_thread(over.wait, 20)

    other = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    other.start()
    try:
        assert await asyncio.to_thread(inside.wait, 20)
        async with serving(service):
            over.set()
            await asyncio.to_thread(other.join, 20)
            assert said == STARTED
    finally:
        over.set()
        other.join(20)
    assert said == [*STARTED, *STOPPED]


async def test_calls_that_are_open_at_the_end_are_over_before_the_stop(
    service: aqueduct.Service, said: list[str]
) -> None:
    begun = asyncio.Event()

    @service.handler(input=NUMBERS)
    async def slow(batch):
        begun.set()
        await until(lambda: not service_open.is_set())
        said.append("slow")
        return batch

    service_open = asyncio.Event()
    service_open.set()
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(service.serving("memory://lifetime"))
        client = await stack.enter_async_context(
            await aqueduct.Client.connect(running.addresses[0])
        )
        call = asyncio.ensure_future(client.call("slow", numbers(1)))
        await begun.wait()
        closing = asyncio.ensure_future(running.close())
        await asyncio.sleep(0)
        assert "free" not in said
        service_open.clear()
        assert await call == numbers(1)
        await closing
    assert said == [*STARTED, "slow", *STOPPED]


async def test_a_start_that_fails_is_named_and_undone_and_may_be_tried_again(
    service: aqueduct.Service, said: list[str]
) -> None:
    broken = [True]

    @service.on_start
    def licence() -> None:
        if broken:
            raise OSError("no such licence")

    @service.on_stop
    def give_back() -> None:
        said.append("give back")

    error = "on_start 'licence' of the service 'model' raised OSError: no such licence"
    with pytest.raises(StartFailed, match=f"^{error}$") as caught:
        async with serving(service):
            raise AssertionError("it is served")
    assert isinstance(caught.value.__cause__, OSError)
    # What was registered after the start that failed has nothing to undo.
    assert said == [*STARTED, *STOPPED]
    said.clear()
    broken.clear()
    async with connected(service) as client:
        assert await client.call("times", numbers(1)) == numbers(6)
    assert said == [*STARTED, "call", "give back", *STOPPED]


async def test_a_first_start_that_fails_stops_nothing(said: list[str]) -> None:
    service = aqueduct.Service("bare")
    service.on_stop(lambda: said.append("stop"))

    @service.on_start
    async def first() -> None:
        raise ValueError

    with pytest.raises(StartFailed, match=r"^on_start 'first' of .* raised ValueError$"):
        await serving(service).__aenter__()
    assert said == []


async def test_an_address_that_is_taken_ends_what_was_started(
    service: aqueduct.Service, said: list[str]
) -> None:
    async with aqueduct.Service("other").serving("memory://taken"):
        with pytest.raises(ConfigError, match="something in this process listens there already"):
            await service.serving("memory://taken").__aenter__()
        assert said == [*STARTED, *STOPPED]
    said.clear()
    with pytest.raises(ConfigError, match="unknown scheme"):
        await service.serving("http://nowhere").__aenter__()
    assert said == []  # that could be seen before


async def test_starts_have_a_deadline(said: list[str]) -> None:
    service = aqueduct.Service("late", config=config(timing={"start_timeout": 0.05}))
    release = threading.Event()
    service.on_start(lambda: said.append("quick"))

    @service.on_start
    def stuck() -> None:
        release.wait(20)

    text = r"'stuck' of the service 'late' was not done within 0\.05 s of the start \(Timing\.start"
    try:
        with pytest.raises(StartFailed, match=text):
            await serving(service).__aenter__()
    finally:
        release.set()
    assert said == ["quick"]


async def test_a_timeout_of_the_function_s_own_is_no_deadline() -> None:
    service = aqueduct.Service("asks")

    @service.on_start
    async def ask() -> None:
        raise TimeoutError("the registry is away")

    with pytest.raises(StartFailed, match="raised TimeoutError: the registry is away"):
        await serving(service).__aenter__()


async def test_stops_that_fail_or_hang_are_logged_and_the_others_run(
    said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    service = aqueduct.Service("ends", config=config(timing={"stop_timeout": 0.6}))
    release = threading.Event()
    service.on_stop(lambda: said.append("last"))

    @service.on_stop
    def stuck() -> None:
        release.wait(20)

    @service.on_stop
    async def broken() -> None:
        raise OSError("gone")

    with caplog.at_level(logging.ERROR):
        try:
            async with serving(service):
                pass
        finally:
            release.set()
    (took,) = re.findall(r"within ([0-9.]+) s", caplog.text)
    assert re.findall(r"on_stop .*", caplog.text) == [
        "on_stop 'broken' of the service 'ends' raised",
        f"on_stop 'stuck' of the service 'ends' was not done within {took} s (Timing.stop_timeout)",
    ]
    assert said == ["last"]  # one that hangs does not take all of the time
    assert "OSError: gone" in caplog.text


async def test_a_task_that_is_cancelled_again_and_again_still_stops(
    service: aqueduct.Service, said: list[str]
) -> None:
    stopping = asyncio.Event()

    @service.on_stop
    async def slow() -> None:
        stopping.set()
        await asyncio.sleep(3600)

    async def serve() -> None:
        async with serving(service):
            await asyncio.sleep(3600)

    task = asyncio.ensure_future(serve())
    await until(lambda: said == STARTED)
    task.cancel()
    await stopping.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert said == [*STARTED, *STOPPED]


async def test_a_start_that_is_cancelled_leaves_nothing_behind(
    service: aqueduct.Service, said: list[str]
) -> None:
    blocked = [True]

    @service.on_start
    async def block() -> None:
        said.append("block")
        if blocked:
            await asyncio.sleep(3600)

    task = asyncio.ensure_future(serving(service).__aenter__())
    await until(lambda: "block" in said)
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert said == [*STARTED, "block", *STOPPED]
    blocked.clear()
    async with serving(service):
        assert said[-3:] == [*STARTED, "block"]


def test_what_cannot_run_is_refused_where_it_is_registered() -> None:
    service = aqueduct.Service("strict")

    def yields():
        yield

    def wants_two(service, other):
        """Has two arguments."""

    with pytest.raises(
        ConfigError, match=r"Service.on_start: function is None; it must be a function"
    ):
        service.on_start(None)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"on_stop .* yields; write two functions"):
        service.on_stop(yields)
    with pytest.raises(ConfigError, match=r"on_start .*: it is called with \(service\), where"):
        service.on_start(wants_two)


async def test_nothing_is_registered_while_it_is_served(service: aqueduct.Service) -> None:
    async with serving(service):
        with pytest.raises(
            LocalProtocolError, match=r"on_stop .* came while the service is served"
        ):
            service.on_stop(print)


@pytest.mark.parametrize("name", ["start_timeout", "stop_timeout"])
def test_deadlines_are_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Timing\.{name} is 0"):
        Config(timing=Timing(**{name: 0}))


async def test_stops_have_a_share_of_the_drain(
    service: aqueduct.Service, caplog: pytest.LogCaptureFixture
) -> None:
    """What is kept for them is not the calls'."""
    begun = asyncio.Event()

    async def hold(batch):
        begun.set()
        await asyncio.sleep(3600)

    plain = aqueduct.Service("plain")
    for each in (service, plain):
        each.handler("hold", input=NUMBERS)(hold)
        begun.clear()
        async with each.serving("memory://shared", drain=1.2) as running:
            async with await aqueduct.Client.connect(running.addresses[0]) as client:
                call = asyncio.ensure_future(client.call("hold", numbers(1)))
                await begun.wait()
                await running.close(drain=1.2)
                with pytest.raises(aqueduct.AqueductError):
                    await call
    # A second is for the stops, and of the rest a quarter for the end of the calls.
    said = re.findall(r"(\w+): 1 calls did not end within ([0-9.]+) s", caplog.text)
    assert said == [("model", "0.15"), ("plain", "0.9")]


async def test_a_forced_end_tells_how_long_calls_had(caplog: pytest.LogCaptureFixture) -> None:
    service, begun, force = aqueduct.Service("held"), asyncio.Event(), asyncio.Event()

    @service.handler("hold", input=NUMBERS)
    async def hold(batch):
        begun.set()
        await asyncio.sleep(3600)

    async with service.serving("memory://forced") as running:
        async with await aqueduct.Client.connect(running.addresses[0]) as client:
            call = asyncio.ensure_future(client.call("hold", numbers(1)))
            await begun.wait()
            draining = asyncio.ensure_future(running.drain(force, 3600))
            await asyncio.sleep(0.2)
            force.set()
            await draining
            with pytest.raises(aqueduct.AqueductError):
                await call
    (told,) = re.findall(r"1 calls did not end within ([0-9.]+) s", caplog.text)
    assert 0.1 < float(told) < 60


async def test_unless_cancels_what_is_under_way() -> None:
    async def forever() -> str:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)
        return "never"

    async def at_once() -> str:
        return "done"

    ended: list[bool] = []
    event = asyncio.Event()
    assert await unless(event, at_once()) == "done"
    event.set()
    assert await unless(event, forever()) is None
    task = asyncio.ensure_future(unless(asyncio.Event(), forever()))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled() and ended == [True, True]


# Processes

APP = """
import asyncio
import os
import pathlib
import time

import aqueduct

service = aqueduct.Service("crew")


def say(what):
    with open("said", "a") as file:
        file.write(f"{what} {os.getpid()}\\n")


@service.on_start
def load():
    say("load")
    if pathlib.Path("broken").exists():
        raise RuntimeError("no such licence")
    if pathlib.Path("slow").exists():
        time.sleep(3600)


@service.on_stop
async def free():
    say("free")
"""


def serve(folder: Path, *options: str) -> subprocess.Popen[str]:
    (folder / "crew.py").write_text(APP)
    return subprocess.Popen(
        [*COMMAND, "serve", "crew:service", "--listen", "aqueduct+tcp://127.0.0.1:0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
    )


def test_each_worker_starts_and_stops_once(tmp_path: Path) -> None:
    process = serve(tmp_path, "--workers", "2")
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening on")
        loaded = (tmp_path / "said").read_text().split()
        assert loaded[::2] == ["load", "load"]
        assert len({*loaded[1::2], str(process.pid)}) == 3
        process.terminate()
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    said = (tmp_path / "said").read_text().split()
    assert said[4::2] == ["free", "free"]
    assert {*said[5::2]} == {*loaded[1::2]}


def test_a_start_that_fails_ends_the_command_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    process = serve(tmp_path, "--workers", "2")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    said = "on_start 'load' of the service 'crew' raised RuntimeError: no such licence"
    assert said in errors and "Traceback" not in errors


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_ends_a_service_that_is_still_starting(tmp_path: Path, workers: str) -> None:
    (tmp_path / "slow").touch()
    process = serve(tmp_path, "--workers", workers)
    try:
        for _ in range(6000):
            if (tmp_path / "said").exists():
                break
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)  # before the 25 s of a drain are over
    finally:
        process.kill()
    assert (process.returncode, errors.count("Traceback")) == (0, 0), errors


FORKS = """
import asyncio
import os

import aqueduct

service = aqueduct.Service("forks")
starts = []
service.on_start(lambda: starts.append(os.getpid()))


async def main():
    async with service.serving("memory://forked"):
        pass


pid = os.getpid()
loop = asyncio.new_event_loop()
context = service.serving("memory://forks")
loop.run_until_complete(context.__aenter__())
child = os.fork()
if child == 0:
    asyncio.run(main())
    assert starts == [pid, os.getpid()], starts
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
loop.run_until_complete(context.__aexit__(None, None, None))
print(len(starts))
"""


def test_a_forked_child_that_serves_starts_for_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


async def test_streams_of_the_state_are_seen_by_async_handlers(service: aqueduct.Service) -> None:
    @service.handler(input=NUMBERS)
    async def add(batches):
        async for batch in batches:
            yield numbers(*(value + service.state.weight for value in batch["id"].to_pylist()))

    async with connected(service) as client:
        assert await everything(client.exchange("add", [numbers(1)])) == [numbers(4)]
