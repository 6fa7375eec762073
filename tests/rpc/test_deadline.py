"""Deadlines of calls, and of their progress: nobody waits for ever, and nobody is hurried."""

from __future__ import annotations

import asyncio
import time

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import DeadlineExceeded
from aqueduct.rpc.keys import ALIVE
from aqueduct.rpc.request import CallHead
from tests.support.calls import (
    NUMBERS,
    RawCall,
    Watched,
    config,
    connected,
    everything,
    numbers,
    raw_connection,
    serving,
    sync_client,
    values,
)
from tests.support.selection import mostly_long

IMPATIENT = config(timing={"progress_deadline": 0.4})
"""For what must expire."""
PATIENT = config(timing={"progress_deadline": 1.2})
"""For what must not, on a machine that may be busy."""


@pytest.fixture(params=["memory", "quic", "draft"])
def carrier(request):
    return request.param


@pytest.mark.requirement("AC-10")
@pytest.mark.parametrize("handler", ["stuck", "async stuck", "function", "coroutine"])
async def test_a_deadline_ends_both_sides(carrier, handler):
    watched = Watched()
    async with connected(watched.service, carrier) as client:
        with pytest.raises(DeadlineExceeded, match=f"'{handler}'.* did not end within") as caught:
            await everything(client.exchange(handler, [numbers(1)], deadline=0.3))
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.handler == handler
        await watched.wait(watched.ended)
        assert watched.call.deadline < 0.3
        await watched.idle()


async def test_a_deadline_ends_a_call_that_moves(carrier):
    watched = Watched()
    async with connected(watched.service, carrier) as client:
        with pytest.raises(DeadlineExceeded, match="did not end within"):
            await everything(client.source("async source", deadline=0.3))
        await watched.wait(watched.ended)


@pytest.mark.parametrize("handler", ["stuck", "async stuck", "function", "coroutine"])
async def test_a_handler_that_never_takes_nor_yields_is_caught_by_the_service(carrier, handler):
    watched = Watched(config=IMPATIENT)
    async with connected(watched.service, carrier, client_config=config()) as client:
        with pytest.raises(DeadlineExceeded, match=r"neither took nor yielded a batch for 0.4 s"):
            await everything(client.exchange(handler, [numbers(1)]))
        await watched.wait(watched.ended)
        with pytest.raises(DeadlineExceeded):
            watched.call.check()
        await watched.idle()
        assert watched.service.counters()["failed"] == 1


@pytest.mark.parametrize("handler", ["stuck", "async stuck", "function", "coroutine"])
async def test_a_service_that_does_not_answer_is_caught_by_the_client(carrier, handler):
    watched = Watched()
    async with connected(watched.service, carrier, client_config=IMPATIENT) as client:
        with pytest.raises(DeadlineExceeded, match=r"nothing moved for 0.4 s"):
            await everything(client.exchange(handler, [numbers(1)]))
        await watched.wait(watched.ended)  # and told so
        await watched.idle()


def test_a_service_that_does_not_answer_is_caught_by_a_sync_client():
    watched = Watched()
    with sync_client(watched.service, config=IMPATIENT) as client:
        with pytest.raises(DeadlineExceeded, match=r"nothing moved for 0.4 s"):
            list(client.exchange("stuck", [numbers(1)]))
        assert watched.ended.wait(20)
        with pytest.raises(DeadlineExceeded, match=r"did not end within (the deadline of )?0.2 s"):
            list(client.exchange("async stuck", [numbers(1)], deadline=0.2))
        with pytest.raises(DeadlineExceeded):
            list(client.source("async source", deadline=0.2))


async def test_a_call_with_a_deadline_has_no_other(carrier):
    service = aqueduct.Service("test", config=IMPATIENT)

    @service.handler("slow")
    async def slow(batches, call):
        async for batch in batches:
            await asyncio.sleep(1.0)
            yield batch

    async with connected(service, carrier) as client:
        stream = client.exchange("slow", [numbers(1)], deadline=30)
        assert await everything(stream) == [numbers(1)]


async def test_slow_is_not_stuck(carrier):
    service = aqueduct.Service("test", config=PATIENT)

    @service.handler("slow")
    async def slow(batches, call):
        async for batch in batches:
            await asyncio.sleep(0.3)
            yield batch

    async with connected(service, carrier) as client:
        answers = await everything(client.exchange("slow", [numbers(n) for n in range(7)]))
        assert len(answers) == 7


@pytest.mark.requirement("AC-66")
@pytest.mark.parametrize(
    "handler",
    mostly_long(["generator", "async generator", "source", "function"], "generator", "source"),
)
async def test_an_application_may_take_its_time(carrier, handler):
    """The client's own work between two batches is no fault of the service, nor of the client."""
    service = aqueduct.Service("test", config=PATIENT)
    service.handler("function")(lambda batch: batch)

    @service.handler("generator")
    def generator(batches):
        yield from batches

    @service.handler("async generator")
    async def async_generator(batches, call):
        async for batch in batches:
            yield batch

    big = pa.record_batch({"id": pa.array(range(1 << 20), pa.int64())})

    @service.handler("source", kind="source", output=NUMBERS)
    def source(call):
        for _ in range(12):  # more than there is room for
            yield big

    async def input_that_thinks():
        yield numbers(1)
        await asyncio.sleep(2.4)
        yield numbers(2)

    async with connected(service, carrier) as client:
        if handler == "source":
            stream = client.source("source")
            await anext(stream)
            await asyncio.sleep(2.4)
            assert len(await everything(stream)) == 11
        else:
            stream = client.exchange(handler, input_that_thinks(), schema=NUMBERS)
            assert values(await everything(stream)) == [[1], [2]]


def test_the_application_of_a_sync_client_may_take_its_time():
    service = aqueduct.Service("test", config=PATIENT)

    @service.handler("echo")
    def echo(batches, call):
        yield from batches

    def input_that_thinks():
        yield numbers(1)
        time.sleep(2.4)
        yield numbers(2)

    with sync_client(service) as client:
        stream = client.exchange("echo", input_that_thinks(), schema=NUMBERS)
        assert values([next(stream)]) == [[1]]
        assert values(list(stream)) == [[2]]


@pytest.mark.parametrize("handler", ["generator", "async generator"])
async def test_a_client_that_is_silent_is_given_up(carrier, handler):
    watched = Watched(config=IMPATIENT)
    async with serving(watched.service, carrier) as running:
        async with await raw_connection(running.addresses[0]) as connection:
            error = await RawCall(connection, CallHead(handler, "exchange", schema=NUMBERS)).end()
            assert isinstance(error, DeadlineExceeded)
            assert "for more batches and the client was silent" in str(error)
            await watched.wait(watched.ended)


@pytest.mark.requirement("AC-67")
@pytest.mark.parametrize(
    "handler", mostly_long(["generator", "async generator", "stuck"], "async generator", "stuck")
)
@pytest.mark.parametrize("where", mostly_long(["memory", "draft-memory"], "memory"))
async def test_signs_of_life_keep_what_waits_for_the_client_alone(where, handler):
    watched = Watched(config=PATIENT)
    async with serving(watched.service, where) as running:
        async with await raw_connection(running.addresses[0]) as connection:
            call = RawCall(connection, CallHead(handler, "exchange", schema=NUMBERS))
            if handler == "stuck":
                call.send(numbers(1))
            ended = asyncio.ensure_future(call.end())
            for _ in range(24):
                connection.entrypoint.send_nowait(b"", headers=((ALIVE, b"1"),))
                await asyncio.wait((ended,), timeout=0.1)
            # A handler that is at fault gets no more time by it.
            assert ended.done() == (handler == "stuck")
            if handler == "stuck":
                assert "neither took nor yielded" in str(await ended)
            else:
                call.sender.finish()
                assert await ended is None
