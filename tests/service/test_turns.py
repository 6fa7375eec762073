"""A client that sends very much at once: a service works on it in turns, and answers others."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct import channel
from aqueduct.config import Tables
from aqueduct.endpoint import connect
from aqueduct.errors import HandlerFailed, UnknownHandler
from aqueduct.rpc.describe import Description
from aqueduct.rpc.filters import Filter
from aqueduct.rpc.sink_commit import ABORT, COMMIT, Settlement, to_batch
from aqueduct.rpc.table_scan import PLAN, READ, READING, ScanPlan, ScanRead, ScanRequest
from aqueduct.service.context import Call
from aqueduct.service.sinks import WriteKey
from tests.sinks.shelf import AsyncShelf, service_with
from tests.support.calls import NUMBERS, connected, everything, numbers, serving, until
from tests.support.collector import uncollected

ATTACHED = 1000
"""Channels that come with one message, which is no call."""
MESSAGES = 12


@pytest.mark.parametrize("carrier", ["unix", "quic"])
async def test_messages_with_many_attachments_are_refused_in_turns(carrier: str) -> None:
    service = aqueduct.Service("turns")
    async with serving(service, carrier) as running:
        turns: list[int] = []

        async def count() -> None:
            while True:
                turns.append(running.counters()["refused"])
                await asyncio.sleep(0)

        connection = await connect(running.addresses[0])
        counting = asyncio.create_task(count())
        handles = []
        for _ in range(MESSAGES):
            pairs = [channel() for _ in range(ATTACHED)]
            connection.entrypoint.send_nowait(b"", attachments=[there for _, there in pairs])
            handles += [here for here, _ in pairs]
        async with asyncio.timeout(60):
            while turns[-1:] != [MESSAGES]:  # noqa: ASYNC110  each turn is looked at
                await asyncio.sleep(0)
        counting.cancel()
        # A turn of the loop may have two of the core: what came, and what it had left for later.
        assert max(after - before for before, after in pairwise(turns)) <= 4
        for handle in handles:
            handle.cancel()
        await connection.close()


@pytest.fixture
def threads_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], set[int]]:
    """For a method of a class: the threads that will have called it."""

    def watch(kind: type, name: str) -> set[int]:
        threads: set[int] = set()
        method = getattr(kind, name)

        def called(*arguments: Any, **named: Any) -> Any:
            threads.add(threading.get_ident())
            return method(*arguments, **named)

        monkeypatch.setattr(kind, name, called)
        return threads

    return watch


async def test_questions_to_a_table_on_the_loop_are_read_in_threads(
    threads_of: Callable[[type, str], set[int]],
) -> None:
    class Numbers:
        schema = NUMBERS

        async def splits(self, request: Any) -> list[int]:
            assert threading.get_ident() == here
            return [1]

        async def read(self, split: int, request: Any) -> AsyncIterator[pa.RecordBatch]:
            assert threading.get_ident() == here
            yield numbers(1, 2)

    here = threading.get_ident()
    service = aqueduct.Service("turns")
    service.table("numbers", Numbers(), filters="applied")
    limits, few = Tables(), (Filter("less", ("id",), 2),)
    question = ScanRequest("plan", filters=few).encode(limits)
    headers = {READING: ScanRead(1, few).encode()}
    long = [(Filter, "expression"), (ScanPlan, "encode"), (ScanRead, "decode")]
    threads = [threads_of(*each) for each in long]
    asked = threads_of(ScanRequest, "decode")
    async with connected(service) as client:
        answer = await client.call(PLAN + "numbers", question)
        found = [batch async for batch in client.source(READ + "numbers", headers=headers)]
    assert ScanPlan.decode(answer, limits).taken == ("yes",)
    assert found == [numbers(1)]
    for each in (*threads, asked):
        assert each and here not in each


async def test_what_a_sink_on_the_loop_is_to_settle_is_read_in_threads(
    threads_of: Callable[[type, str], set[int]],
) -> None:
    threads = threads_of(Settlement, "from_json")
    document = to_batch(Settlement(WriteKey("run 1")).to_json())
    async with connected(service_with(AsyncShelf())) as client:
        await client.call(COMMIT + "shelf", document)
        await client.call(ABORT + "shelf", document)
    assert threads and threading.get_ident() not in threads


async def test_a_service_describes_itself_once_for_all_who_ask() -> None:
    class Counting(aqueduct.Service):
        described = 0

        def describe(self) -> Description:
            self.described += 1
            return super().describe()

    service = Counting("turns")
    async with connected(service) as client:
        found = await asyncio.gather(*(client.describe() for _ in range(20)))
        assert service.described == 1
        assert {each.handlers for each in found} == {()}
        service.handler("late")(lambda batch: batch)
        assert [each.name for each in (await client.describe()).handlers] == ["late"]
        assert service.described == 2


def calls() -> list[Call]:
    """All that there are in this process: a test before may have left one, in a thread of its."""
    return [each for each in gc.get_objects() if type(each) is Call]


def new_calls(before: list[Call]) -> list[Call]:
    known = set(map(id, before))
    return [each for each in calls() if id(each) not in known]


@pytest.mark.parametrize("handler", ["unknown", "coroutine", "function", "late"])
async def test_a_call_that_fails_is_freed_without_a_collection_of_garbage(
    handler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Or very many would make collections long, which hold up all threads."""
    caplog.set_level(logging.CRITICAL, "aqueduct")  # pytest keeps what is logged
    service = aqueduct.Service("turns")

    @service.handler("coroutine")
    async def coroutine(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("no")

    @service.handler("function")
    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("no")

    @service.handler("late")
    async def late(batch: pa.RecordBatch) -> pa.RecordBatch:
        await asyncio.sleep(0)
        raise ValueError("no")

    async with connected(service) as client:
        with uncollected():
            before = calls()
            for _ in range(3):
                with suppress(UnknownHandler, HandlerFailed):
                    await client.call(handler, numbers(1))
            await until(lambda: not new_calls(before))


async def test_a_call_that_is_cancelled_is_freed_without_a_collection_of_garbage() -> None:
    service = aqueduct.Service("turns")
    began = asyncio.Event()

    @service.handler("wait")
    async def wait(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        began.set()
        async for batch in batches:
            yield batch

    async def given() -> AsyncIterator[pa.RecordBatch]:
        yield numbers(1)
        await asyncio.Event().wait()

    async with connected(service) as client:
        with uncollected():
            before = calls()
            for _ in range(3):
                began.clear()
                stream = client.exchange("wait", given(), schema=NUMBERS)
                asking = asyncio.ensure_future(everything(stream))
                async with asyncio.timeout(60):
                    await began.wait()
                asking.cancel()
                await asyncio.wait([asking])
            del asking, stream
            await until(lambda: not new_calls(before))
