"""The admin port of a service: health, counts and state, while calls come, wait, fail and block."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.config import DEFAULT, Admin, Calls, Config, Limits
from aqueduct.errors import AqueductError, ConfigError, HandlerFailed, UnknownHandler
from aqueduct.service.operated import as_operated
from aqueduct.service.reporting import ServiceReporter
from aqueduct.service.server import RunningService
from aqueduct.settings.places import read_settings
from tests.service import reactive_clients
from tests.service.reactive_clients import TCP, asking
from tests.support.proxy import CuttingProxy

NUMBERS = pa.schema([("number", pa.int64())])
WAIT = 30.0
PORT = "127.0.0.1:0"


def numbers(*some: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(some, pa.int64())], schema=NUMBERS)


def asked(address: str, path: str, accept: str = "") -> tuple[int, str]:
    """Status and body of a GET."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=WAIT)
    try:
        connection.request("GET", path, headers={"Accept": accept})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


async def get(running: RunningService, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(asked, running.admin_addresses[0], path)


async def state(running: RunningService) -> dict[str, Any]:
    status, body = await get(running, "/state.json")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


async def until(
    running: RunningService, told: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """The first state of which ``told`` holds."""
    async with asyncio.timeout(WAIT):
        while not told(found := await state(running)):  # noqa: ASYNC110  it is another thread's
            await asyncio.sleep(0.02)
    return found


def configured(*, limits: Limits | None = None, calls: Calls | None = None, **admin: Any) -> Config:
    return replace(
        DEFAULT,
        admin=Admin(**admin),
        limits=limits or DEFAULT.limits,
        calls=calls or DEFAULT.calls,
    )


async def test_health_from_the_start_to_the_end() -> None:
    started, release = threading.Event(), threading.Event()
    service = aqueduct.Service("words")
    found: list[RunningService] = []

    @service.on_start
    def load() -> None:
        started.set()
        assert release.wait(WAIT)

    @service.handler(input=NUMBERS, output=NUMBERS)
    async def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
        await finish.wait()
        return batch

    finish, end = asyncio.Event(), asyncio.Event()
    address = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with service.serving("aqueduct+tcp://127.0.0.1:0", admin=PORT, drain=20) as running:
            found.append(running)
            address.set_result(running.addresses[0])
            await end.wait()

    with pytest.MonkeyPatch.context() as patch:
        places: asyncio.Queue[str] = asyncio.Queue()
        _note_addresses(patch, places)
        task = asyncio.create_task(serve())
        port = await places.get()
    assert await asyncio.to_thread(started.wait, WAIT)
    assert await asyncio.to_thread(asked, port, "/health/live") == (200, "live\n")
    assert await asyncio.to_thread(asked, port, "/health/ready") == (
        503,
        "not ready: the service is starting\n",
    )
    release.set()
    async with await aqueduct.Client.connect(await address) as client:
        running = found[0]
        assert running.admin_addresses == [port]
        await until(running, lambda told: told["service"]["ready"])
        assert await get(running, "/health/ready") == (200, "ready\n")
        call = asyncio.create_task(client.call("hold", numbers(1)))
        await until(running, lambda told: told["calls"]["open"])
        end.set()
        await until(running, lambda told: told["service"]["phase"] == "draining")
        assert await get(running, "/health/ready") == (
            503,
            "not ready: the service is draining\n",
        )
        assert await get(running, "/health/live") == (200, "live\n")
        finish.set()
        assert await call == numbers(1)
    await task
    with pytest.raises(OSError):
        await get(running, "/health/live")


def _note_addresses(patch: pytest.MonkeyPatch, places: asyncio.Queue[str]) -> None:
    """Where the port is before the service has begun, which nobody else is told."""
    from aqueduct.admin.thread import AdminThread

    start = AdminThread.start

    async def noting(self: AdminThread) -> None:
        await start(self)
        places.put_nowait(self.addresses[0])

    patch.setattr(AdminThread, "start", noting)


def counting() -> aqueduct.Service:
    service = aqueduct.Service("words", config=configured(listed=3))

    @service.handler(input=NUMBERS, output=NUMBERS)
    def double(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    @service.handler(input=NUMBERS, output=NUMBERS)
    async def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("the data are secret-data")

    @service.handler(input=NUMBERS, output=NUMBERS, max_concurrency=1)
    async def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
        await service.state.finish.wait()
        return batch

    service.state.finish = asyncio.Event()
    return service


async def test_calls_are_counted_by_handler() -> None:
    service = counting()
    async with (
        service.serving("aqueduct+tcp://127.0.0.1:0", TCP, admin=PORT, drain=0) as running,
        await aqueduct.Client.connect(running.addresses[0]) as client,
    ):
        for _ in range(3):
            await client.call("double", numbers(1, 2))
        many = [numbers(number) for number in range(5)]
        assert len([each async for each in client.exchange("double", many)]) == 5
        for _ in range(2):
            with pytest.raises(HandlerFailed):
                await client.call("fail", numbers(1))
        for number in range(20):
            with pytest.raises(UnknownHandler):
                await client.call(f"invented-{number}", numbers(1))
        with pytest.raises(AqueductError):
            await client.sink("double", [numbers(1)])
        found = await until(running, lambda told: told["calls"]["open"] == 0)
        handlers = found["handlers"]
        assert set(handlers) == {"aqueduct.describe", "double", "fail", "hold", "aqueduct.unknown"}
        double = handlers["double"]
        assert double["calls"] == 5
        assert (double["rows_in"], double["rows_out"], double["batches_in"]) == (11, 11, 8)
        assert double["bytes_in"] > 0 < double["bytes_out"]
        assert double["errors"] == {"unknown-handler": 1}, "it is no sink"
        assert sum(double["buckets"]) == 4
        assert double["seconds"] > 0
        assert handlers["fail"]["errors"] == {"handler-failed": 2}
        unknown = handlers["aqueduct.unknown"]
        assert (unknown["calls"], unknown["errors"]) == (20, {"unknown-handler": 20})
        assert sum(unknown["buckets"]) == 0
        counters = service.counters()
        for name in ("batches_in", "rows_in", "bytes_in", "batches_out", "rows_out", "bytes_out"):
            assert sum(each[name] for each in handlers.values()) == counters[name]
        assert found["calls"]["refused"] == counters["refused"] == 21
        assert found["connections"]["total"] == counters["connections"]
        status, text = await get(running, "/metrics")
        assert status == 200
        assert "invented" not in text
        assert 'aqueduct_calls_total{handler="double"} 5.0' in text
        metrics = await asyncio.to_thread(
            asked, running.admin_addresses[0], "/metrics", "application/openmetrics-text"
        )
        assert metrics[1].endswith("# EOF\n")


async def test_what_goes_on_and_nothing_that_is_secret() -> None:
    service = counting()
    service.authorize = lambda call: call.token == "secret-token"
    async with (
        service.serving("aqueduct+tcp://127.0.0.1:0", admin=PORT, drain=0) as running,
        await aqueduct.Client.connect(running.addresses[0], token="secret-token") as client,
    ):
        calls = [
            asyncio.create_task(
                client.call("hold", numbers(4711), headers={"secret-key": "secret-value"})
            )
            for _ in range(4)
        ]
        with pytest.raises(HandlerFailed):
            await client.call("fail", numbers(1))
        found = await until(running, lambda told: told["calls"]["waiting"] == 3)
        assert found["calls"]["open"] == 4
        listed = found["calls"]["listed"]
        assert [each["state"] for each in listed] == ["running", "waiting", "waiting"], "three"
        first = listed[0]
        assert (first["handler"], first["kind"], first["rows_in"]) == ("hold", "exchange", 1)
        assert first["seconds"] >= listed[1]["seconds"] > 0
        assert (found["handlers"]["hold"]["open"], found["handlers"]["hold"]["waiting"]) == (4, 3)
        (connection,) = found["connections"]["listed"]
        assert connection["peer"] == first["peer"]
        assert (connection["carrier"], connection["calls"]) == ("tcp", 4)
        assert connection["rtt"] > 0
        for path in ("/state.json", "/metrics", "/health/live", "/health/ready"):
            assert "secret" not in (await get(running, path))[1]
        service.state.finish.set()
        await asyncio.gather(*calls)


async def test_a_name_that_a_client_invents_is_not_shown_while_it_is_looked_at() -> None:
    service, entered, go_on = counting(), asyncio.Event(), asyncio.Event()

    async def wait(call: aqueduct.Call) -> bool:
        entered.set()
        await go_on.wait()
        return True

    service.authorize = wait
    async with (
        asking(service, admin=PORT) as (running, client),
    ):
        called = reactive_clients.asked("<b>invented", reactive_clients.words("x"))
        call = asyncio.ensure_future(client.request(called))
        await entered.wait()
        found = await until(running, lambda told: told["calls"]["open"])
        assert found["calls"]["listed"][0]["handler"] == ""
        assert found["handlers"]["aqueduct.unknown"]["open"] == 1
        (connection,) = found["connections"]["listed"]
        assert (connection["carrier"], connection["rtt"]) == ("reactivesocket", None)
        assert "invented" not in json.dumps(found)
        go_on.set()
        with suppress(AqueductError):
            await call


async def test_it_answers_while_all_handlers_are_busy_and_one_blocks_the_event_loop() -> None:
    service, hold = aqueduct.Service("words", config=configured(live_lag=0.4)), threading.Event()

    @service.handler(input=NUMBERS, output=NUMBERS)
    def busy(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert hold.wait(WAIT)
        return batch

    @service.handler(input=NUMBERS, output=NUMBERS)
    async def block(batch: pa.RecordBatch) -> pa.RecordBatch:
        found.append(asked(running.admin_addresses[0], "/health/live"))
        assert blocked.wait(WAIT)  # the event loop of the service does not turn
        return batch

    blocked, found = threading.Event(), []

    def look(address: str) -> None:
        try:
            while (answered := asked(address, "/health/live"))[0] == 200:
                pass
            found.append(answered)
            found.append((asked(address, "/health/ready")[0], asked(address, "/metrics")[1]))
        finally:
            blocked.set()

    async with (
        service.serving("aqueduct+tcp://127.0.0.1:0", admin=PORT, drain=0) as running,
        await aqueduct.Client.connect(running.addresses[0]) as client,
    ):
        working = [asyncio.create_task(client.call("busy", numbers(1))) for _ in range(4)]
        await until(running, lambda told: told["handlers"]["busy"]["open"] == 4)
        looking = asyncio.create_task(asyncio.to_thread(look, running.admin_addresses[0]))
        blocking = asyncio.create_task(client.call("block", numbers(1)))
        await looking
        await blocking
        hold.set()
        await asyncio.gather(*working)
        assert found[0][0] == 200
        assert found[1][0] == 503
        assert found[1][1].startswith("not live: the event loop has not turned for ")
        assert found[2][0] == 200, "its threshold is another one"
        assert 'aqueduct_open_calls{handler="block"} 1.0' in found[2][1]
        await until(running, lambda told: told["service"]["live"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"calls": Calls(max_calls_process=4), "ready_load": 0.5}, "it has 2 of 4 calls"),
        ({"limits": Limits(connections=2), "ready_load": 0.5}, "it has 1 of 2 connections"),
        ({"ready_memory": 1e-9}, "it has {} of {} bytes (received)"),
    ],
)
async def test_a_load_above_which_it_is_not_ready(settings: dict[str, Any], reason: str) -> None:
    service, finish = aqueduct.Service("words", config=configured(**settings)), asyncio.Event()

    @service.handler(input=NUMBERS, output=NUMBERS)
    async def hold(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            await finish.wait()
            yield batch

    async with service.serving("aqueduct+tcp://127.0.0.1:0", admin=PORT, drain=0) as running:
        assert (await get(running, "/health/ready"))[0] == 200
        async with await aqueduct.Client.connect(running.addresses[0]) as client:
            large = numbers(*range(10_000))
            calls = [asyncio.create_task(client.call("hold", large)) for _ in range(2)]
            found = await until(running, lambda told: not told["service"]["ready"])
            memory = found["memory"]["received"]
            found = await until(running, lambda told: told["calls"]["open"] == 2)
            expected = reason.format(memory["bytes"], memory["limit"])
            if "bytes" not in reason:
                assert found["service"]["reasons"] == [expected]
            else:
                assert found["service"]["reasons"][0].endswith("bytes (received)")
            assert (await get(running, "/health/ready"))[0] == 503
            finish.set()
            await asyncio.gather(*calls)
        await until(running, lambda told: told["service"]["ready"])


async def test_cuts_count_for_the_handlers_whose_calls_went_on() -> None:
    service = aqueduct.Service("words")

    @service.handler(input=NUMBERS, output=NUMBERS)
    async def echo(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield batch

    address = "aqueduct+tcp://127.0.0.1:0?resume=60s"
    async with (
        service.serving(address, admin=PORT, drain=0) as running,
        CuttingProxy(running.addresses[0]) as proxy,
        await aqueduct.Client.connect(proxy.address) as client,
    ):
        seen: list[int] = []
        reporter = ServiceReporter(running, asyncio.get_running_loop())

        async def batches() -> AsyncIterator[pa.RecordBatch]:
            for number in range(6):
                if number in (2, 4):
                    assert proxy.cut() == 1
                yield numbers(number)
                while len(seen) <= number:  # noqa: ASYNC110  the answer is here
                    await asyncio.sleep(0.01)

        async for _ in client.exchange("echo", batches(), schema=NUMBERS):
            report = reporter.make()
            seen.append(report["handlers"]["echo"]["resumes"])
        assert seen == [0, 0, 1, 1, 2, 2], "while the call goes on"
        found = await until(running, lambda told: not told["calls"]["open"])
        assert found["handlers"]["echo"]["resumes"] == found["connections"]["resumes"] == 2
        assert found["connections"]["listed"][0]["resumes"] == 2


async def test_counters_never_fall_while_calls_end() -> None:
    service = counting()
    async with (
        service.serving("memory://admin-counters", admin=PORT, drain=0) as running,
        await aqueduct.Client.connect(running.addresses[0]) as client,
    ):
        reporter = ServiceReporter(running, asyncio.get_running_loop())
        over, looks = threading.Event(), 0
        fell: list[str] = []

        def watch() -> None:
            nonlocal looks
            last: dict[str, Any] = {}
            while not over.wait(0.001):
                told = reporter.make()["handlers"]["double"]
                now = {name: told[name] for name in ("calls", "rows_in", "rows_out")}
                fell.extend(name for name in last if now[name] < last[name])
                if now["rows_in"] > 3 * service.counters()["calls"]:
                    fell.append("counted twice")
                last = now
                looks += 1

        watching = asyncio.create_task(asyncio.to_thread(watch))
        for _ in range(100):
            await client.call("double", numbers(1, 2, 3))
        over.set()
        await watching
        assert looks > 10
        assert fell == []
        told = reporter.make()["handlers"]["double"]
        assert (told["calls"], told["rows_in"], told["rows_out"]) == (100, 300, 300)


async def test_a_call_between_open_and_over_is_missed_by_no_report() -> None:
    service = counting()
    async with (
        service.serving("memory://admin-between", admin=PORT, drain=0) as running,
        await aqueduct.Client.connect(running.addresses[0]) as client,
    ):
        reporter = ServiceReporter(running, asyncio.get_running_loop())
        calling = asyncio.create_task(client.call("hold", numbers(1, 2)))
        await until(running, lambda told: told["handlers"]["hold"]["rows_in"] == 2)
        assert reporter.make()["handlers"]["hold"]["rows_in"] == 2
        (call,) = running.calls
        running.calls.discard(call)  # as a thread may see it while the call ends
        assert reporter.make()["handlers"]["hold"]["rows_in"] == 2
        running.calls.add(call)
        service.state.finish.set()
        await calling
        assert reporter.make()["handlers"]["hold"]["rows_in"] == 2


async def test_a_forked_child_does_not_keep_the_port() -> None:
    service, children = aqueduct.Service("words"), []

    @service.handler(input=NUMBERS, output=NUMBERS)
    def fork(batch: pa.RecordBatch) -> pa.RecordBatch:
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        children.append(child)
        return batch

    try:
        async with (
            service.serving("aqueduct+tcp://127.0.0.1:0", admin=PORT, drain=0) as running,
            await aqueduct.Client.connect(running.addresses[0]) as client,
        ):
            await client.call("fork", numbers(1))
            assert (await get(running, "/health/live"))[0] == 200
            place = running.admin_addresses[0].removeprefix("http://")
        with pytest.raises(OSError):
            await get(running, "/health/live")
        async with service.serving("aqueduct+tcp://127.0.0.1:0", admin=place, drain=0):
            assert (await get(running, "/health/live"))[0] == 200
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)  # noqa: ASYNC222  it was killed


def test_an_operator_may_set_it() -> None:
    names = ("certificate", "key", "key_password", "client_ca", "tls")
    given: dict[str, Any] = {
        **dict.fromkeys(names),
        "dev_certificate": False,
        "origins": (),
        "admin": None,
    }
    found = read_settings(environment={"AQUEDUCT_SERVE_ADMIN": "127.0.0.1:9464"})
    _, options = as_operated(found, ["memory://x"], given)
    assert options["admin"] == "127.0.0.1:9464"
    _, options = as_operated(read_settings(environment={}), [], {**given, "admin": "127.0.0.1:1"})
    assert options["admin"] == "127.0.0.1:1"
    with pytest.raises(ConfigError, match=r"AQUEDUCT_SERVE_ADMIN is .*must be HOST:PORT"):
        read_settings(environment={"AQUEDUCT_SERVE_ADMIN": "9464"})


@pytest.mark.parametrize("place", ["9464", "127.0.0.1", ":9464", "127.0.0.1:65536", "a b:1", 9464])
async def test_places_that_are_none(place: Any) -> None:
    service = aqueduct.Service("words")
    with pytest.raises(ConfigError, match=r"admin is .*; it must be HOST:PORT, such as 127\.0"):
        async with service.serving("memory://x", admin=place):
            pass


async def test_where_gevent_has_patched_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aqueduct.admin.thread.green", lambda: "the threads")
    with pytest.raises(ConfigError, match="needs a real thread, and the threads of this process"):
        async with aqueduct.Service("words").serving("memory://x", admin=PORT):
            pass


async def test_without_it_nothing_is_opened_and_no_package_is_needed() -> None:
    async with aqueduct.Service("words").serving("memory://no-admin") as running:
        assert running.admin_addresses == []
        assert not any(each.name == "aqueduct-admin" for each in threading.enumerate())
