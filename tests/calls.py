"""Services for tests: on the loop of a test over both carriers, or in a thread for sync clients."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa

import aqueduct
from aqueduct.carriers.quic.tls import dev_certificate
from aqueduct.client import Client
from aqueduct.config import DEFAULT, Config
from aqueduct.serving import Serving
from aqueduct.sync import SyncClient
from aqueduct.threads import LoopThread

TLS = dev_certificate()
NUMBERS = pa.schema([("id", pa.int64())])
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


def config(**parts: dict[str, object]) -> Config:
    """The defaults with some settings replaced: ``config(calls={"cut": 100})``."""
    return replace(
        DEFAULT,
        **{name: replace(getattr(DEFAULT, name), **settings) for name, settings in parts.items()},
    )


def address_of(carrier: str) -> str:
    return f"memory://calls-{next(_names)}" if carrier == "memory" else "aqueduct://127.0.0.1:0"


@asynccontextmanager
async def serving(
    service: aqueduct.Service, carrier: str = "memory", *, drain: float | None = 0
) -> AsyncIterator[Serving]:
    tls = None if carrier == "memory" else TLS
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
def served(service: aqueduct.Service) -> Iterator[str]:
    """The address of ``service``, served over QUIC in a thread of its own."""
    thread = LoopThread("test-service")
    context = serving(service, "quic")
    try:
        running = thread.run(context.__aenter__())
        try:
            yield running.addresses[0]
        finally:
            thread.run(context.__aexit__(None, None, None))
    finally:
        thread.stop()


@contextmanager
def sync_client(service: aqueduct.Service, **options: Any) -> Iterator[SyncClient]:
    """A sync client of ``service``, which is served in another thread."""
    options.setdefault("config", service.config)
    with served(service) as address, SyncClient(address, **options) as client:
        yield client
