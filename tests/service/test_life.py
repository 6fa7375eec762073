"""A service from start to end: addresses, certificates, counters, drain, signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.errors import ConfigError, ConnectFailed, ConnectionLost, Refused
from tests.support.calls import (
    NUMBERS,
    TLS,
    Watched,
    config,
    connected,
    everything,
    numbers,
    served,
    serving,
    until,
    values,
)


@pytest.fixture
def service():
    service = aqueduct.Service("life")
    service.handler("echo")(lambda batch: batch)
    return service


async def test_a_service_listens_on_several_addresses(service):
    addresses = ("aqueduct://127.0.0.1:0", "memory://several", "aqueduct://localhost:0")
    async with service.serving(*addresses, dev_certificate=True) as running:
        assert len(running.addresses) == 3
        assert running.addresses[1] == "memory://several"
        assert len({address.split("?")[0] for address in running.addresses}) == 3
        for address in running.addresses:
            async with await Client.connect(address) as client:
                assert await everything(client.exchange("echo", [numbers(1)])) == [numbers(1)]
        assert service.counters()["connections"] == 3
        await until(lambda: not running.connections)
    assert running.addresses == []


async def test_a_development_certificate_is_pinned_by_the_address(service):
    async with service.serving("aqueduct://127.0.0.1:0", dev_certificate=True) as running:
        (address,) = running.addresses
        assert re.fullmatch(
            r"aqueduct://127\.0\.0\.1:\d+\?fingerprint=sha256:[0-9a-f]{64}", address
        )
        plain, pin = address.split("?fingerprint=")
        async with await Client.connect(address) as client:
            assert client.connection.fingerprint == pin
            assert client.address == plain
        tls = aqueduct.ClientTls(fingerprint=pin)
        async with await Client.connect(plain, tls=tls) as client:
            await client.ping()
        with pytest.raises(ConnectFailed):
            await Client.connect(plain)


async def test_a_certificate_from_files_or_bytes(service, tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(TLS.certificate)
    key.write_bytes(TLS.key)
    for its_certificate, its_key in ((certificate, key), (str(certificate), str(key))):
        async with service.serving(
            "aqueduct://localhost:0", certificate=its_certificate, key=its_key
        ) as running:
            (address,) = running.addresses
            assert "fingerprint" not in address
            async with await Client.connect(f"{address}?ca={certificate}") as client:
                await client.ping()
            tls = aqueduct.ClientTls(ca=TLS.certificate)
            async with await Client.connect(address, tls=tls) as client:
                await client.ping()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "QUIC needs a certificate"),
        (
            {"dev_certificate": True, "certificate": "x"},
            "certificate and dev_certificate exclude each other",
        ),
        ({"dev_certificate": True, "tls": TLS}, "dev_certificate and tls exclude each other"),
        ({"key": "x"}, "key= was given without certificate="),
        ({"certificate": "/nowhere.pem", "key": "/nowhere.key"}, "'/nowhere.pem' cannot be read"),
        ({"certificate": b"no PEM"}, "holds no certificate"),
    ],
)
async def test_certificates_that_cannot_work(service, options, words):
    with pytest.raises(ConfigError, match=words):
        async with service.serving("aqueduct://127.0.0.1:0", **options):
            pass


async def test_addresses_that_cannot_work(service):
    with pytest.raises(ConfigError, match="at least one address"):
        async with service.serving():
            pass
    with pytest.raises(ConfigError, match="'nowhere' is not an address"):
        async with service.serving("nowhere"):
            pass
    async with service.serving("aqueduct://127.0.0.1:0", dev_certificate=True) as running:
        taken = running.addresses[0].split("?")[0]
        with pytest.raises(ConfigError, match="Address already in use"):
            async with service.serving(taken, dev_certificate=True):
                pass


async def test_a_service_may_be_served_twice(service):
    async with serving(service) as first, serving(service) as second:
        for running in (first, second):
            async with await Client.connect(running.addresses[0]) as client:
                await everything(client.exchange("echo", [numbers(1, 2)]))
        assert first.counters()["rows_in"] == 2
        assert service.counters()["rows_in"] == 4
    assert service.counters()["rows_in"] == 4  # what has ended is not forgotten


async def test_the_counters(service):
    service.handler("fail")(lambda batch: 1 / 0)
    service.handler("sink", kind="sink")(lambda batches: {"n": sum(1 for _ in batches)})

    @service.handler("source", kind="source", output=NUMBERS)
    def source():
        yield numbers(1, 2, 3)

    @service.handler("hold")
    async def hold(batches, call):
        yield await anext(batches)
        await asyncio.sleep(3600)

    nothing = service.counters()
    assert set(nothing.values()) == {0}
    async with connected(service) as client:
        await everything(client.exchange("echo", [numbers(1, 2), numbers(3)]))
        await everything(client.source("source"))
        await client.sink("sink", [numbers(1)])
        for name in ("fail", "unknown"):
            with pytest.raises(aqueduct.AqueductError):
                await everything(client.exchange(name, [numbers(1)]))
        stream = client.exchange("hold", [numbers(1)])
        await anext(stream)
        during = service.counters()
        await stream.aclose()
        await until(lambda: service.counters()["cancelled"])
    after = service.counters()
    assert (during["open_calls"], during["open_connections"]) == (1, 1)
    assert (during["batches_in"], during["batches_out"]) == (5, 4)  # open calls count too
    wanted = {
        "calls": 6,
        "open_calls": 0,
        "waiting_calls": 0,
        "connections": 1,
        "open_connections": 0,
        "resumes": 0,
        "failed": 1,
        "cancelled": 1,
        "refused": 1,
        "batches_in": 5,
        "rows_in": 6,
        "batches_out": 4,
        "rows_out": 7,
    }
    assert {name: after[name] for name in wanted} == wanted
    assert after["bytes_in"] > 8 * 6 and after["bytes_out"] > 8 * 7
    assert list(after) == list(nothing)


@pytest.mark.requirement("AC-68")
def test_a_service_describes_itself():
    service = aqueduct.Service("life", description="What it is for.")
    service.handler("echo")(lambda batch: batch)
    service.handler("typed", input=NUMBERS, output=pa.schema([("x", pa.int8())]), concurrency=2)(
        lambda batch: batch
    )
    with served(service) as address, aqueduct.SyncClient(address) as client:
        described = client.describe()
    assert described == service.describe()
    assert [handler.name for handler in described.handlers] == ["echo", "typed"]
    assert (described.service, described.summary) == ("life", "What it is for.")


async def test_a_drain_lets_calls_end_and_takes_no_more(service):
    release = asyncio.Event()

    @service.handler("hold")
    async def hold(batches, call):
        async for batch in batches:
            await release.wait()
            yield batch

    async with serving(service, drain=None) as running:
        client = await Client.connect(running.addresses[0])
        stream = client.exchange("hold", [numbers(1), numbers(2)])
        await stream.opened()
        closing = asyncio.ensure_future(running.close())
        await until(lambda: running.addresses == [])
        with pytest.raises(Refused, match="the service 'life' is ending"):
            await everything(client.exchange("echo", [numbers(1)]))
        with pytest.raises(ConnectFailed):
            await Client.connect("memory://nobody")
        assert not closing.done()
        release.set()
        assert values(await everything(stream)) == [[1], [2]]
        await closing
        await until(lambda: client.closed)
        assert client.connection.error is not None
        assert "ended" in str(client.connection.error)
        await client.close()


@pytest.mark.parametrize("handler", ["async stuck", "stuck", "function", "coroutine"])
async def test_what_does_not_end_within_the_drain_is_ended(handler):
    watched = Watched(config=config(timing={"drain_timeout": 0.2}))
    async with serving(watched.service, drain=None) as running:
        client = await Client.connect(running.addresses[0])
        stream = client.exchange(handler, [numbers(1)])
        await watched.wait(watched.begun)
        await running.close()
        with pytest.raises(Refused, match="the service 'test' is ending"):
            await everything(stream)
        assert watched.call.cancelled
        await client.close()
    await watched.wait(watched.ended)


async def test_a_handler_that_never_ends_does_not_delay_the_end():
    service, release = aqueduct.Service("test"), threading.Event()
    begun = threading.Event()

    @service.handler("generator")
    def generator(batches):
        begun.set()
        release.wait(30)
        yield next(batches)

    @service.handler("function")
    def function(batch):
        begun.set()
        release.wait(30)
        return batch

    for handler in ("generator", "function"):
        begun.clear()
        async with serving(service) as running:
            client = await Client.connect(running.addresses[0])
            stream = client.exchange(handler, [numbers(1)])
            assert await asyncio.to_thread(begun.wait, 20)
        assert not release.is_set()  # and yet the service has ended
        with pytest.raises((Refused, ConnectionLost)):
            await everything(stream)
        await client.close()
    release.set()


async def test_a_drain_is_not_ready_first_then_takes_no_calls_then_ends_the_rest():
    made = aqueduct.Service(
        "ordered", config=config(timing={"drain_delay": 1.0, "drain_timeout": 20})
    )
    release, force = asyncio.Event(), asyncio.Event()

    @made.handler("hold")
    async def hold(batch):
        await release.wait()
        return batch

    @made.handler("echo")
    async def echo(batch):
        return batch

    async with serving(made, drain=None) as running:
        (address,) = running.addresses
        assert running.ready
        async with await Client.connect(address) as client:
            held = asyncio.create_task(client.call("hold", numbers(1)))
            await until(lambda: running.counters()["open_calls"])
            draining = asyncio.create_task(running.drain(force))
            await until(lambda: not running.ready)
            async with await Client.connect(address) as late:  # first: as before
                assert await late.call("echo", numbers(1)) == numbers(1)
                assert running.addresses == [address]
            await until(lambda: not running.addresses)
            with pytest.raises(Refused) as refused:  # second: none is taken
                await client.call("echo", numbers(1))
            assert refused.value.draining and not draining.done()
            release.set()
            assert await held == numbers(1)
        async with asyncio.timeout(10):  # third: the rest
            await draining
        assert not running.ready


@pytest.mark.parametrize("why", ["forced", "alone", "short"])
async def test_what_shortens_the_time_in_which_a_service_is_not_ready(why):
    watched = Watched(config=config(timing={"drain_delay": 600, "drain_timeout": 601}))
    force = asyncio.Event()
    async with serving(watched.service, drain=0) as running:
        if why == "forced":
            asyncio.get_running_loop().call_soon(force.set)
        seconds = 0.1 if why == "short" else 601
        async with asyncio.timeout(10):
            await running.drain(force, seconds, alone=why == "alone")
        assert not running.ready and not running.addresses


async def test_a_force_counts_also_before_open_calls_are_waited_for():
    watched = Watched()
    async with serving(watched.service, drain=0) as running:
        async with await Client.connect(running.addresses[0]) as client:
            stream = client.exchange("async stuck", [numbers(1)], schema=NUMBERS)
            await until(lambda: running.counters()["open_calls"])
            running.force()
            async with asyncio.timeout(20):
                await running.close(drain=601)
            with pytest.raises(Refused):
                await everything(stream)


def test_a_service_must_have_time_left_after_it_was_not_ready():
    with pytest.raises(ConfigError, match=r"Timing.drain_delay \(5 s\) must be below Timing"):
        config(timing={"drain_delay": 5, "drain_timeout": 5})


async def test_force_cuts_the_drain_short():
    watched = Watched()
    async with serving(watched.service, drain=None) as running:
        client = await Client.connect(running.addresses[0])
        stream = client.exchange("async stuck", [numbers(1)])
        await watched.wait(watched.begun)
        closing = asyncio.ensure_future(running.close())
        await until(lambda: running.addresses == [])
        running.force()
        await closing
        with pytest.raises(Refused):
            await everything(stream)
        await client.close()


APP = """
import sys, threading
import pyarrow as pa
import aqueduct

SCHEMA = pa.schema([("id", pa.int64())])
service = aqueduct.Service("app")
release = threading.Event()

@service.handler("echo")
def echo(batch):
    return batch

@service.handler("slow")
def slow(batches, call):
    for batch in batches:
        print("taken", flush=True)
        sys.stdin.readline()
        yield batch

@service.handler("never")
def never(batches, call):
    next(batches)
    print("taken", flush=True)
    release.wait()
    yield from ()

service.run("aqueduct://127.0.0.1:0", "memory://app", dev_certificate=True)
print("ended", flush=True)
"""


class App:
    """The program above, in a process of its own."""

    def __init__(self, directory: Path) -> None:
        path = directory / "app.py"
        path.write_text(textwrap.dedent(APP))
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.address = self.line()
        assert self.line() == "memory://app"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()


@pytest.fixture
def app(tmp_path):
    app = App(tmp_path)
    yield app
    app.process.kill()
    app.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_ends(app, number):
    with aqueduct.SyncClient(app.address) as client:
        assert list(client.exchange("echo", [numbers(1)])) == [numbers(1)]
        stream = client.exchange("slow", [numbers(1)])
        answers: list[Any] = []
        reading = threading.Thread(target=lambda: answers.extend(stream))
        reading.start()
        assert app.line() == "taken"
        app.process.send_signal(number)
        with contextlib.suppress(aqueduct.AqueductError):
            while True:  # until the signal has arrived
                list(client.exchange("echo", [numbers(1)]))
        app.say("go on")
        reading.join(20)
        assert answers == [numbers(1)]
    assert app.line() == "ended"
    assert app.process.wait(20) == 0


def test_a_second_signal_ends_the_drain_though_a_handler_never_ends(app):
    with aqueduct.SyncClient(app.address) as client:
        stream = client.exchange("never", [numbers(1)])
        failed: list[BaseException] = []

        def read():
            try:
                list(stream)
            except aqueduct.AqueductError as error:
                failed.append(error)

        reading = threading.Thread(target=read)
        reading.start()
        assert app.line() == "taken"
        app.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(aqueduct.AqueductError):
            while True:
                list(client.exchange("echo", [numbers(1)]))
        app.process.send_signal(signal.SIGTERM)
        reading.join(20)
        assert isinstance(failed[0], Refused)
    assert app.line() == "ended"
    assert app.process.wait(20) == 0


def test_a_service_that_is_killed_is_noticed(app):
    timing = {"idle_timeout": 3.0, "ping_interval": 0.5}
    with aqueduct.SyncClient(app.address, config=config(timing=timing)) as client:
        stream = client.exchange("never", [numbers(1)])
        stream.opened()
        app.process.kill()
        with pytest.raises(ConnectionLost):
            list(stream)
        assert client.closed


def test_a_service_may_run_in_any_thread():
    """Signals belong to the main thread; elsewhere the service runs until its process ends."""
    code = """
    import threading, aqueduct
    service = aqueduct.Service("thread")
    service.handler("echo")(lambda batch: batch)
    def run():
        service.run("aqueduct://127.0.0.1:0", dev_certificate=True)
    threading.Thread(target=run, daemon=True).start()
    input()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    with aqueduct.SyncClient(address) as client:
        assert list(client.exchange("echo", [numbers(1)])) == [numbers(1)]
    process.communicate("\n", timeout=20)
    assert process.returncode == 0
