"""Compression is agreed on: a call asks, the accept message answers, and both sides use it."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.config import Calls
from aqueduct.errors import BadCall, ConfigError
from aqueduct.rpc.keys import COMPRESSION
from aqueduct.rpc.request import Accepted, CallHead
from tests.support.calls import config, connected, everything, served

WORDS = pa.schema([pa.field("word", pa.string())])
WORDY = pa.record_batch([pa.array(["the same word again " * 50] * 1000)], schema=WORDS)
SIZE = WORDY.nbytes


@pytest.fixture
def service():
    service = aqueduct.Service("packing")

    @service.handler("echo", input=WORDS)
    async def echo(batches):
        async for batch in batches:
            yield batch

    @service.handler("many", kind="source", output=WORDS)
    def many():
        for _ in range(4):
            yield WORDY

    @service.handler("store", input=WORDS, kind="sink")
    def store(batches):
        for batch in batches:
            assert batch.equals(WORDY)

    return service


def sizes(service, before=None):
    found = service.counters()
    before = before or dict.fromkeys(found, 0)
    return found["bytes_in"] - before["bytes_in"], found["bytes_out"] - before["bytes_out"]


@pytest.mark.requirement("AC-41")
@pytest.mark.requirement("AC-39")
@pytest.mark.parametrize("name", ["lz4", "zstd"])
async def test_both_ways_once_it_is_agreed(service, name):
    async with connected(service, "quic") as client:

        async def batches():
            yield WORDY
            await told.wait()  # what leaves before the accept message comes cannot be compressed
            yield WORDY

        told = asyncio.Event()
        stream = client.exchange("echo", batches(), schema=WORDS, compression=name)
        assert await anext(stream) == WORDY
        told.set()
        assert await everything(stream) == [WORDY]
        came, left = sizes(service)
        assert SIZE < came < 1.1 * SIZE
        assert 0 < left < 0.1 * SIZE
        before = service.counters()
        # Later calls of this connection need not wait for that.
        stream = client.exchange("echo", [WORDY, WORDY], schema=WORDS, compression=name)
        assert await everything(stream) == [WORDY, WORDY]
        came, left = sizes(service, before)
        assert 0 < came < 0.1 * SIZE and 0 < left < 0.1 * SIZE


async def test_sources_and_sinks_too(service):
    async with connected(service) as client:
        stream = client.source("many", compression="lz4")
        assert await everything(stream) == [WORDY] * 4
        assert 0 < sizes(service)[1] < 0.1 * SIZE
        before = service.counters()
        await client.sink("store", [WORDY] * 3, compression="lz4")
        assert 0 < sizes(service, before)[0] < 0.1 * SIZE


@pytest.mark.requirement("AC-39")
async def test_never_by_itself(service):
    async with connected(service) as client:
        assert await everything(client.exchange("echo", [WORDY])) == [WORDY]
        assert await everything(client.source("many", compression="none")) == [WORDY] * 4
    came, left = sizes(service)
    assert came > SIZE and left > 5 * SIZE


async def test_the_address_may_ask_for_it(service):
    async with service.serving("memory://packing") as running:
        (address,) = running.addresses
        async with await Client.connect(f"{address}?compression=zstd") as client:
            assert await everything(client.source("many")) == [WORDY] * 4
            assert 0 < sizes(service)[1] < 0.1 * SIZE
            before = service.counters()
            assert await everything(client.source("many", compression="none")) == [WORDY] * 4
            assert sizes(service, before)[1] > 4 * SIZE


@pytest.mark.requirement("AC-39")
async def test_a_service_may_not_want_it():
    service = aqueduct.Service("plain", config=config(calls={"compressions": ()}))
    service.handler("echo")(lambda batch: batch)
    async with connected(service) as client:
        for _ in range(2):
            stream = client.exchange("echo", [WORDY], compression="lz4")
            assert await everything(stream) == [WORDY]
    came, left = sizes(service)
    assert came > 2 * SIZE and left > 2 * SIZE


def test_threads_may_ask_for_it(service):
    with served(service) as address, aqueduct.SyncClient(address) as client:
        for expected in (1.1 * SIZE, 0.1 * SIZE):
            before = service.counters()
            stream = client.exchange("echo", [WORDY], schema=WORDS, compression="lz4")
            assert list(stream) == [WORDY]
            assert 0 < sizes(service, before)[0] < expected
            assert 0 < sizes(service, before)[1] < 0.1 * SIZE
        assert list(client.source("many", compression="zstd")) == [WORDY] * 4
        client.sink("store", [WORDY], compression="lz4")
        with pytest.raises(ConfigError, match="one of lz4, zstd, none"):
            client.source("many", compression="gzip")


async def test_names_that_are_none(service):
    async with connected(service) as client:
        with pytest.raises(ConfigError, match="one of lz4, zstd, none"):
            client.source("many", compression="gzip")
    with pytest.raises(ConfigError, match="compressions has 'gzip'"):
        Calls(compressions=("gzip",))
    with pytest.raises(ConfigError, match="compression is 'gzip'"):
        await Client.connect("memory://x?compression=gzip")


@pytest.mark.requirement("AC-5")
def test_words_of_other_versions_are_no_matter():
    head = CallHead("h", "source", compressions=("brotli", "lz4"))
    headers, payload = head.encode()
    assert (COMPRESSION, b"brotli,lz4") in headers
    assert CallHead.decode(headers, b"".join(payload)).compressions == ("brotli", "lz4")
    headers, payload = Accepted(None, "lz4").encode()
    assert Accepted.decode(headers, b"", kind="sink") == Accepted(None, "lz4")


@pytest.mark.requirement("AC-40")
async def test_a_compression_that_was_not_asked_for_is_refused(service, monkeypatch):
    encode = Accepted.encode
    monkeypatch.setattr(
        Accepted, "encode", lambda accepted: encode(Accepted(accepted.schema, "zstd"))
    )
    async with connected(service) as client:
        with pytest.raises(BadCall, match="'zstd', which was not asked for"):
            await everything(client.source("many", compression="lz4"))
