"""Damaged answers of a service's own handlers: errors of the library that name the peer."""

from __future__ import annotations

import asyncio
import struct

import pyarrow as pa
import pytest

from aqueduct import Client, Service, SyncClient
from aqueduct.client.sink_writer import SinkWriter
from aqueduct.errors import BadCall
from aqueduct.rpc.describe import DESCRIBE, DESCRIBE_SCHEMA, Description
from aqueduct.rpc.sink_commit import COMMIT, DOCUMENT_SCHEMA, LOOK, WRITE
from tests.sinks.shelf import RUN, Shelf, attempt, service_with, write

DAMAGED = [b"\xff\xfe{}", b"{", b"[]", b'{"version": 99}', b'{"version": 1, "receipt": "\xc3"}']
ADDRESS = "aqueduct+tcp://127.0.0.1:0"


def text(data: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """The one text of an answer, with these bytes."""
    offsets = pa.py_buffer(struct.pack("=ii", 0, len(data)))
    column = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([column], schema=schema)


@pytest.mark.parametrize("data", DAMAGED)
async def test_a_damaged_description(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Description, "to_batch", lambda self: text(data, DESCRIBE_SCHEMA))
    async with Service("damaged").serving(ADDRESS) as running:
        address = running.addresses[0]
        async with await Client.connect(address) as client:
            with pytest.raises(BadCall) as caught:
                await client.describe()
        assert (caught.value.peer, caught.value.handler) == (address, DESCRIBE)

        def ask() -> None:
            with SyncClient(address) as sync:
                sync.describe()

        with pytest.raises(BadCall) as caught:
            await asyncio.to_thread(ask)
        assert caught.value.peer == address


@pytest.mark.parametrize("data", DAMAGED)
async def test_damaged_answers_of_a_sink(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes, the receipt of what was written, and the answer to a commit."""
    monkeypatch.setattr("aqueduct.service.sinks.to_batch", lambda _: text(data, DOCUMENT_SCHEMA))
    async with service_with(Shelf()).serving(ADDRESS) as running:
        address = running.addresses[0]

        def ask() -> list[tuple[str, str]]:
            named = []
            with SyncClient(address) as client:
                sink = SinkWriter(client, "shelf")
                for call in (
                    sink.look,
                    lambda: write(sink, attempt(), 1),
                    lambda: sink.commit(RUN, []),
                ):
                    with pytest.raises(BadCall) as caught:
                        call()
                    named.append((caught.value.peer, caught.value.handler))
            return named

        asked = await asyncio.to_thread(ask)
        assert asked == [(address, what + "shelf") for what in (LOOK, WRITE, COMMIT)]
