"""Clients of ReactiveSocket for the tests of the gateway: by our own face, and frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa

import aqueduct
from aqueduct._speedups.base import varint
from aqueduct._speedups.reactivesocket import reactive_frames as frames
from aqueduct.address import Address
from aqueduct.reactivesocket import ReactiveSocketConnection, connect
from aqueduct.rpc.reactive_calls import ReactiveItems
from aqueduct.service.server import RunningService
from tests.reactivesocket.pairs import Peer, frame

__all__ = ["TCP", "WORDS", "asked", "asking", "by_hand", "headers", "ipc", "rows_of", "words"]

TCP = "reactivesocket+tcp://127.0.0.1:0"
WORDS = pa.schema([("word", pa.string())])


def words(*values: str) -> pa.RecordBatch:
    return pa.record_batch({"word": list(values)}, schema=WORDS)


def headers(**values: str | bytes) -> bytes:
    """Header pairs, as a program in any language writes them."""
    inner = b""
    for key, value in values.items():
        data = value if isinstance(value, bytes) else value.encode()
        for part in (key.replace("_", "-").encode(), data):
            inner += varint.encode(len(part)) + part
    return varint.encode(len(inner)) + inner


def ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def asked(handler: str, batch: pa.RecordBatch | None = None, **more: str | bytes) -> bytes:
    """The data of a request."""
    return headers(handler=handler, **more) + (b"" if batch is None else ipc(batch))


def rows_of(*items: Any) -> list[list[Any]]:
    """The one column of each batch, read as a stream of Arrow."""
    stream = pa.ipc.open_stream(b"".join(bytes(item) for item in items))
    return [batch.column(0).to_pylist() for batch in stream]


@asynccontextmanager
async def asking(
    service: aqueduct.Service, address: str = TCP, *, setup: bytes = b"", **options: Any
) -> AsyncIterator[tuple[RunningService, ReactiveSocketConnection]]:
    options.setdefault("drain", 0)
    async with (
        service.serving(address, **options) as running,
        await connect(running.addresses[-1], setup=setup) as client,
    ):
        yield running, client


@asynccontextmanager
async def by_hand(running: RunningService, setup: bytes = b"") -> AsyncIterator[Peer]:
    where = Address.parse(running.addresses[-1])
    peer = Peer(*await asyncio.open_connection(where.host, where.port))
    peer.say(frame(frames.SETUP, 0, setup))
    try:
        yield peer
    finally:
        peer.close()


async def batches_of(stream: Any) -> list[list[Any]]:
    items = ReactiveItems()
    return [items.read(item.data).column(0).to_pylist() async for item in stream]
