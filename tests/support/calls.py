"""Services for tests: on the loop of a test over both carriers, or in a thread for sync clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from tempfile import gettempdir
from typing import Any

import pyarrow as pa

import aqueduct
from aqueduct.arrow.encode import Encoder
from aqueduct.carriers.certificates import dev_certificate
from aqueduct.client.client import Client
from aqueduct.client.loop_thread import LoopThread
from aqueduct.client.task_client import TaskClient
from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint import Connection, channel, connect_for_calls
from aqueduct.rpc.fragments import fragments
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.status import Status
from aqueduct.service.server import RunningService

TLS = dev_certificate()
NUMBERS = pa.schema([("id", pa.int64())])
DRAFT = "?dialect=control-streams"
PAIRS = pa.schema([("id", pa.int64()), ("text", pa.string())])
_names = itertools.count(1)


def numbers(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(values, pa.int64())}, schema=NUMBERS)


def values(batches: list[pa.RecordBatch]) -> list[list[int]]:
    return [batch["id"].to_pylist() for batch in batches]


async def everything(
    stream: AsyncIterator[pa.RecordBatch], answers: list[pa.RecordBatch] | None = None
) -> list[pa.RecordBatch]:
    """All answers of a stream; those before an error are found in ``answers``."""
    found: list[pa.RecordBatch] = [] if answers is None else answers
    async for batch in stream:
        found.append(batch)  # noqa: PERF401  the caller looks at it, whatever the stream raises
    return found


def config(**parts: Mapping[str, object]) -> Config:
    """The defaults with some settings replaced: ``config(calls={"fragment_bytes": 100})``."""
    return replace(
        DEFAULT,
        **{name: replace(getattr(DEFAULT, name), **settings) for name, settings in parts.items()},
    )


def address_of(carrier: str) -> str:
    addresses = {
        "memory": f"memory://calls-{next(_names)}",
        "quic": "aqueduct://127.0.0.1:0",
        "tcp": "aqueduct+tcp://127.0.0.1:0",
        "tls": "aqueduct+tls://127.0.0.1:0",
        "draft": f"aqueduct+tcp://127.0.0.1:0{DRAFT}",
        "draft-memory": f"memory://calls-{next(_names)}{DRAFT}",
        "draft-quic": f"aqueduct://127.0.0.1:0{DRAFT}",
        "unix": f"aqueduct+unix://{gettempdir()}/aqueduct-{os.getpid()}-{next(_names)}",
    }
    return addresses[carrier]


@asynccontextmanager
async def serving(
    service: aqueduct.Service, carrier: str = "memory", *, drain: float | None = 0
) -> AsyncIterator[RunningService]:
    tls = TLS if carrier in ("quic", "draft-quic", "tls") else None
    async with service.serving(address_of(carrier), tls=tls, drain=drain) as running:
        yield running


@asynccontextmanager
async def connected(
    service: aqueduct.Service,
    carrier: str = "memory",
    *,
    client_config: Config | None = None,
    **options: Any,
) -> AsyncIterator[Client]:
    """A client of ``service``, which is served for as long as the block runs."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving(service, carrier))
        yield await stack.enter_async_context(
            await Client.connect(
                running.addresses[0], config=client_config or service.config, **options
            )
        )


@contextmanager
def served(service: aqueduct.Service, carrier: str = "quic") -> Iterator[str]:
    """The address of ``service``, served in a thread of its own."""
    thread = LoopThread("test-service")
    context = serving(service, carrier)
    try:
        running = thread.run(context.__aenter__())
        try:
            yield running.addresses[0]
        finally:
            thread.run(context.__aexit__(None, None, None))
    finally:
        thread.stop()


@contextmanager
def sync_client(
    service: aqueduct.Service, carrier: str = "quic", **options: Any
) -> Iterator[TaskClient]:
    """A sync client of ``service``, which is served in another thread."""
    options.setdefault("config", service.config)
    with served(service, carrier) as address, TaskClient(address, **options) as client:
        yield client


def holding(release: asyncio.Event) -> aqueduct.Service:
    """A service whose handler ``hold`` takes nothing until it is released; then it is an echo."""
    service = aqueduct.Service("test")

    @service.handler("hold")
    async def hold(batches, call):
        await release.wait()
        async for batch in batches:
            yield batch

    return service


async def raw_connection(address: str) -> Connection:
    """A connection of a client of calls, which says nothing by itself."""
    return await connect_for_calls(address, headers=(), config=DEFAULT, tls=None)


class RawCall:
    """A call made by hand, on a connection that says nothing by itself."""

    def __init__(self, connection, head=None, *, kind="exchange", headers=None, payload=b""):
        self.sender, receiver = channel()
        output_sender, self.output = channel()
        status_sender, self.status = channel(oneshot=True)
        if headers is None:
            headers, payload = (head or CallHead("echo", kind, schema=NUMBERS)).encode()
        connection.entrypoint.send_nowait(
            payload, headers=headers, attachments=[receiver, output_sender, status_sender]
        )

    def send(self, batch, *, cut=1 << 30, fragments_sent=None):
        for headers, payload in list(fragments(Encoder(NUMBERS).encode(batch), 0, cut))[
            :fragments_sent
        ]:
            self.sender.send_nowait(payload, headers=headers)

    async def end(self):
        """The error of its status, or None."""
        async with asyncio.timeout(20):
            message = await self.status.receive()
        return Status.decode(message.headers, message.payload).to_exception()


async def until(condition: Callable[[], object]) -> None:
    """Waits until ``condition()`` holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  it may be another thread that changes it
            await asyncio.sleep(0.01)


def until_seen(condition: Callable[[], object]) -> None:
    """The same for a test without an event loop."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came to be so"
        time.sleep(0.001)


class Watched:
    """A service whose handlers say how they ended, to be waited for from any thread."""

    def __init__(self, **options):
        self.service = aqueduct.Service("test", **options)
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.told = threading.Event()
        self.how = ""
        self.call: Any = None

        @self.service.handler("generator")
        def generator(batches, call):
            with self.watching(call):
                yield from batches

        @self.service.handler("async generator")
        async def async_generator(batches, call):
            with self.watching(call):
                async for batch in batches:
                    yield batch

        @self.service.handler("stuck")
        def stuck(batches, call):
            with self.watching(call):
                next(batches)
                self.told.wait(30)
                yield numbers(7)

        @self.service.handler("async stuck")
        async def async_stuck(batches, call):
            with self.watching(call):
                await anext(batches)
                await asyncio.sleep(3600)
                yield numbers(7)

        @self.service.handler("function")
        def function(batch, call):
            with self.watching(call):
                self.told.wait(30)
                return batch

        @self.service.handler("coroutine")
        async def coroutine(batch, call):
            with self.watching(call):
                await asyncio.sleep(3600)
                return batch

        @self.service.handler("source", kind="source", output=NUMBERS)
        def source(call):
            with self.watching(call):
                while True:
                    yield numbers(1)

        @self.service.handler("async source", kind="source", output=NUMBERS)
        async def async_source(call):
            with self.watching(call):
                while True:
                    yield numbers(1)

        @self.service.handler("sink", kind="sink")
        def sink(batches, call):
            with self.watching(call):
                for _ in batches:
                    pass

        @self.service.handler("async sink", kind="sink")
        async def async_sink(batches, call):
            with self.watching(call):
                async for _ in batches:
                    pass

    @contextlib.contextmanager
    def watching(self, call):
        self.call = call
        call.on_cancel(self.told.set)
        self.begun.set()
        try:
            yield
            self.how = "returned"
        except BaseException as error:
            self.how = type(error).__name__
            raise
        finally:
            self.ended.set()

    async def wait(self, event):
        assert await asyncio.to_thread(event.wait, 20)

    async def idle(self):
        """Waits until the service has no open call."""
        await until(lambda: not self.service.counters()["open_calls"])


# How the handlers of Watched may end when their call is cancelled.
ENDS = {
    "generator": {"Cancelled", "GeneratorExit"},
    "async generator": {"CancelledError", "GeneratorExit"},
    "stuck": {"Cancelled", "GeneratorExit"},
    "async stuck": {"CancelledError"},
    "function": {"returned"},
    "coroutine": {"CancelledError"},
}
