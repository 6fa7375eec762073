"""Calls that end before their end: abandoned, or cut off; and who is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.errors import Cancelled, ConnectionLost, HandlerFailed
from aqueduct.rpc.request import CallHead, Kind
from tests.support.calls import (
    ENDS,
    NUMBERS,
    RawCall,
    Watched,
    config,
    connected,
    everything,
    holding,
    numbers,
    raw_connection,
    served,
    serving,
    sync_client,
    until,
    values,
)


@pytest.fixture(params=["memory", "quic", "draft"])
def carrier(request):
    return request.param


@pytest.mark.requirement("AC-38")
@pytest.mark.parametrize("handler", list(ENDS))
async def test_a_stream_that_is_closed_ends_the_handler(carrier, handler):
    watched = Watched()
    async with connected(watched.service, carrier) as client:
        stream = client.exchange(handler, _slowly(), schema=NUMBERS)
        await watched.wait(watched.begun)
        assert not watched.call.cancelled
        await stream.aclose()
        await stream.aclose()
        await watched.wait(watched.ended)
        await watched.wait(watched.told)
        assert watched.how in ENDS[handler]
        assert watched.call.cancelled
        with pytest.raises(Cancelled, match="the client abandoned the call"):
            watched.call.check()
        with pytest.raises(Cancelled, match=f"handler '{handler}' at .* was closed here"):
            await anext(stream)
        await watched.idle()
        counters = watched.service.counters()
        assert (counters["cancelled"], counters["failed"]) == (1, 0)


async def _slowly():
    yield numbers(1)
    await asyncio.sleep(3600)


@pytest.mark.parametrize("handler", ["source", "async source"])
async def test_a_source_that_is_left_early_is_ended(carrier, handler):
    watched = Watched()
    async with connected(watched.service, carrier) as client:
        async with client.source(handler) as stream:
            async for batch in stream:
                assert batch == numbers(1)
                break
        await watched.wait(watched.ended)
        assert watched.how in ("GeneratorExit", "CancelledError")
        await watched.idle()


@pytest.mark.requirement("AC-38")
@pytest.mark.parametrize("handler", ["sink", "async sink"])
async def test_a_sink_that_is_cancelled_ends_the_handler(carrier, handler):
    watched = Watched()
    async with connected(watched.service, carrier) as client:
        sending = asyncio.ensure_future(client.sink(handler, _slowly(), schema=NUMBERS))
        await watched.wait(watched.begun)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await watched.wait(watched.ended)
        assert watched.how in ("Cancelled", "CancelledError")
        await watched.idle()


async def test_a_stream_that_is_dropped_ends_the_handler(carrier):
    watched = Watched()
    async with connected(watched.service, carrier) as client:
        stream = client.exchange("async stuck", _slowly(), schema=NUMBERS)
        await watched.wait(watched.begun)
        del stream
        gc.collect()
        await watched.wait(watched.ended)
        await watched.idle()
        answers = await everything(client.exchange("generator", [numbers(1)]))
        assert answers == [numbers(1)]


async def test_a_reader_that_is_cancelled_may_read_on(carrier):
    release = asyncio.Event()
    service = holding(release)

    async with connected(service, carrier) as client:
        stream = client.exchange("hold", [numbers(n) for n in range(3)])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        release.set()
        assert values(await everything(stream)) == [[0], [1], [2]]


async def impatiently(batches):
    """All of them, by a reader that is cancelled again and again."""
    found: list[pa.RecordBatch] = []
    while True:
        reading = asyncio.ensure_future(anext(batches, None))
        await asyncio.sleep(0)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            batch = await reading
            if batch is None:
                return found
            found.append(batch)
        await asyncio.sleep(0.0001)  # or nothing else would ever run


async def test_no_batch_is_lost_to_a_reader_that_is_cancelled(carrier):
    service = aqueduct.Service("test")

    @service.handler("impatient")
    async def impatient(batches, call):
        for batch in await impatiently(batches):
            yield batch

    batches = [numbers(n) for n in range(200)]
    async with connected(service, carrier) as client:
        async with asyncio.timeout(30):
            answers = await impatiently(client.exchange("impatient", batches, in_flight=200))
    assert answers == batches


@pytest.mark.parametrize("handler", ["generator", "stuck", "async stuck"])
@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_a_sync_stream_that_is_left_ends_the_handler(handler, how):
    watched = Watched()
    with sync_client(watched.service) as client:
        batches = [numbers(n) for n in range(100)]
        stream = client.exchange(handler, batches, in_flight=2)
        stream.opened()
        if handler == "generator":
            assert next(stream) == numbers(0)
        assert watched.begun.wait(20)
        if how == "drop":
            del stream
            gc.collect()
        elif how == "with":
            with stream:
                pass
        else:
            stream.close()
            stream.close()
            with pytest.raises(Cancelled, match="was closed here"):
                next(stream)
        assert watched.ended.wait(20)
        assert watched.how in ENDS[handler]
        assert list(client.exchange("generator", batches)) == batches


def test_a_generator_around_a_sync_stream_ends_it_with_itself():
    watched = Watched()
    with sync_client(watched.service) as client:

        def answers():
            with client.source("source") as stream:
                yield from stream

        iterator = answers()
        next(iterator)
        iterator.close()
        assert watched.ended.wait(20)


# ------------------------------------------------------------------ lost connections


@pytest.mark.parametrize("handler", list(ENDS))
async def test_a_client_that_is_gone_ends_the_handler(carrier, handler):
    watched = Watched()
    async with serving(watched.service, carrier) as running:
        client = await Client.connect(running.addresses[0])
        stream = client.exchange(handler, _slowly(), schema=NUMBERS)
        await watched.wait(watched.begun)
        await client.close()
        assert client.closed
        await watched.wait(watched.ended)
        with pytest.raises(ConnectionLost):
            await everything(stream)
        with pytest.raises(ConnectionLost):
            client.exchange(handler, [numbers(1)])
        assert watched.call.cancelled
        assert isinstance(watched.call.reason, ConnectionLost)
        await watched.idle()
        assert watched.service.counters()["cancelled"] == 1


@pytest.mark.parametrize("handler", ["generator", "async generator", "sink"])
async def test_a_client_that_vanishes_in_the_middle_of_a_batch(carrier, handler):
    watched = Watched(config=config(calls={"fragment_bytes": 1000}))
    async with serving(watched.service, carrier) as running:
        connection = await raw_connection(running.addresses[0])
        kind: Kind = "sink" if handler == "sink" else "exchange"
        call = RawCall(connection, CallHead(handler, kind, schema=NUMBERS))
        call.send(numbers(*range(1000)), cut=1000, fragments_sent=4)
        await watched.wait(watched.begun)
        await call.output.receive()  # the accept message
        await connection.close()
        await watched.wait(watched.ended)
        assert watched.how in ("ConnectionLost", "CancelledError")
        assert watched.service.counters()["batches_in"] == 0
        await watched.idle()


@pytest.mark.requirement("AC-37")
@pytest.mark.parametrize("how", ["finish", "cancel"])
async def test_a_batch_that_is_never_whole(how):
    watched = Watched()
    async with serving(watched.service) as running:
        async with await raw_connection(running.addresses[0]) as connection:
            call = RawCall(connection, CallHead("generator", "exchange", schema=NUMBERS))
            call.send(numbers(*range(1000)), cut=1000, fragments_sent=4)
            call.sender.finish() if how == "finish" else call.sender.cancel()
            error = await call.end()
            if how == "finish":
                assert "the input ended in the middle of batch 0" in str(error)
            else:
                assert isinstance(error, Cancelled)


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_a_service_that_is_gone_is_noticed(face):
    """In the middle of an answer, while the client sends and reads."""
    watched = Watched()
    closing = threading.Event()

    def use(address):
        seen = 0
        with aqueduct.SyncClient(address) as client:
            with pytest.raises(ConnectionLost):
                for _ in client.source("source"):
                    seen += 1
                    if seen == 10:
                        closing.set()
            with pytest.raises(ConnectionLost):
                client.source("source")
            assert client.closed

    async with serving(watched.service, "quic") as running:
        address = running.addresses[0]
        if face == "sync":
            using = asyncio.ensure_future(asyncio.to_thread(use, address))
            await watched.wait(closing)
        else:
            client = await Client.connect(address)
            stream = client.source("source")
            await anext(stream)
        for connection in tuple(running.connections):
            await connection.close(0, "gone")
    if face == "sync":
        await using
    else:
        with pytest.raises(ConnectionLost):
            await everything(stream)
        await client.close()


def test_a_sync_client_that_is_closed_ends_its_streams():
    watched = Watched()
    with served(watched.service) as address:
        client = aqueduct.SyncClient(address)
        streams = [client.exchange("async stuck", [numbers(1)]) for _ in range(3)]
        for stream in streams:
            stream.opened()
        failed = []

        def read(stream):
            try:
                next(stream)
            except ConnectionLost as error:
                failed.append(error)

        threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        assert watched.begun.wait(20)
        client.close()
        client.close()
        for thread in threads:
            thread.join(20)
        assert len(failed) == 3
        assert client.closed
        with pytest.raises(aqueduct.AqueductError, match="closed"):
            client.source("source")
        with pytest.raises(aqueduct.AqueductError, match="closed"):
            client.ping()


async def test_a_handler_that_swallows_its_cancellation_is_closed_all_the_same(carrier):
    closed = asyncio.Event()
    service = aqueduct.Service("test")

    @service.handler("stubborn")
    async def stubborn(batches, call):
        try:
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    pass
                yield numbers(1)
        finally:
            closed.set()

    async with connected(service, carrier) as client:
        stream = client.exchange("stubborn", _slowly(), schema=NUMBERS)
        await stream.opened()
        await stream.aclose()
        async with asyncio.timeout(20):
            await closed.wait()


async def test_wait_cancelled_and_late_callbacks():
    service, seen = aqueduct.Service("test"), []
    done = asyncio.Event()

    @service.handler("waits")
    async def waits(batches, call):
        try:
            await call.wait_cancelled()
        except asyncio.CancelledError:
            call.on_cancel(lambda: seen.append("at once"))
            done.set()
            raise
        yield numbers(1)

    @service.handler("raises")
    async def raises(batches, call):
        call.on_cancel(lambda: 1 / 0)
        call.on_cancel(lambda: seen.append("after"))
        await asyncio.sleep(3600)
        yield numbers(1)

    async with connected(service) as client:
        for handler in ("waits", "raises"):
            stream = client.exchange(handler, _slowly(), schema=NUMBERS)
            await stream.opened()
            await asyncio.sleep(0.05)
            await stream.aclose()
        async with asyncio.timeout(20):
            await done.wait()
            await until(lambda: "after" in seen)
        assert seen == ["at once", "after"]


async def test_callbacks_of_a_call_that_ends_well_are_not_called():
    service, calls = aqueduct.Service("test"), []

    @service.handler("echo")
    def echo(batch, call):
        calls.append(call)
        call.on_cancel(lambda: calls.append("cancelled"))
        return batch

    async with connected(service) as client:
        await everything(client.exchange("echo", [numbers(1)]))
        with pytest.raises(HandlerFailed):
            service.handler("fail")(lambda batch: 1 / 0)
            await everything(client.exchange("fail", [numbers(1)]))
    assert len(calls) == 1 and not calls[0].cancelled


CLIENT = """
import sys
import pyarrow as pa
import aqueduct

client = aqueduct.SyncClient(sys.argv[1])
batch = pa.record_batch({"id": pa.array([1], pa.int64())})
list(client.exchange(sys.argv[2], [batch]))
"""


@pytest.mark.parametrize("handler", ["stuck", "async stuck"])
def test_a_client_that_was_killed_is_noticed_by_its_silence(handler):
    watched = Watched(config=config(timing={"idle_timeout": 3.0, "ping_interval": 0.5}))
    with served(watched.service) as address:
        process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, address, handler],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert watched.begun.wait(20)
            assert not watched.ended.is_set()
        finally:
            process.kill()
            process.wait()
        assert watched.ended.wait(20)
        assert isinstance(watched.call.reason, ConnectionLost)
