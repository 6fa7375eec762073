"""Attempts at a sink of several addresses: each is begun at one of them, and once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

import aqueduct
from aqueduct.client.sink_writer import SinkWriter
from aqueduct.errors import ConnectionLost
from aqueduct.rpc.sink_commit import WRITE
from tests.sinks.shelf import NotedShelf, attempt, write
from tests.support.calls import NUMBERS, config, numbers, until
from tests.support.proxy import CuttingProxy


class Gated:
    """Two services of one sink, which accept an attempt when the test says so."""

    def __init__(self) -> None:
        self.shelf = NotedShelf()
        self.asked: list[int] = []
        """Which of them was asked for an attempt."""
        self.gate = asyncio.Event()
        self.proxies: list[CuttingProxy] = []

    def service(self, number: int) -> aqueduct.Service:
        async def authorize(call: Any) -> bool:
            if call.handler.startswith(WRITE):
                self.asked.append(number)
                await self.gate.wait()
            return True

        service = aqueduct.Service("test", config=config(), authorize=authorize)
        service.sink("shelf", self.shelf, schema=NUMBERS)
        return service

    @property
    def addresses(self) -> list[str]:
        return [proxy.address for proxy in self.proxies]


@asynccontextmanager
async def gated() -> AsyncIterator[Gated]:
    two = Gated()
    async with AsyncExitStack() as stack:
        for number in range(2):
            serving = two.service(number).serving("aqueduct+tcp://127.0.0.1:0", drain=0)
            running = await stack.enter_async_context(serving)
            proxy = await stack.enter_async_context(CuttingProxy(running.addresses[0]))
            two.proxies.append(proxy)
        try:
            yield two
        finally:
            two.gate.set()


async def both_up(client: aqueduct.Client) -> None:
    await until(lambda: all(each.connected for each in client.endpoints))


async def test_an_attempt_is_never_begun_at_a_second_address() -> None:
    async with gated() as two, aqueduct.Client(two.addresses, hedge=0.01) as client:
        await both_up(client)
        async with client.writer("shelf", key="k") as writer:
            await writer.write(numbers(1))
            await until(lambda: two.asked)
            await asyncio.sleep(0.1)  # ten times as long as another call would wait
            assert len(two.asked) == 1
            two.gate.set()
            await writer.commit()
    assert two.shelf.rows == [1] and len(two.shelf.asked_for("open")) == 1


async def test_after_a_loss_it_is_another_attempt() -> None:
    async with gated() as two, aqueduct.Client(two.addresses) as client:
        await both_up(client)
        async with client.writer("shelf", key="k") as writer:
            await writer.write(numbers(1))
            await until(lambda: two.asked)
            two.proxies[two.asked[0]].cut()
            await until(lambda: len(two.asked) > 1)
            two.gate.set()
            await writer.commit()
    assert two.shelf.rows == [1]
    tasks = [task for _, _, task in two.shelf.asked_for("open")]
    assert max(tasks) > 0 and len(set(tasks)) == len(tasks)


async def test_a_thread_s_attempt_fails_with_its_connection() -> None:
    async with gated() as two:

        def work() -> None:
            with aqueduct.SyncClient(two.addresses, retries=5, backoff=0.01) as client:
                write(SinkWriter(client, "shelf"), attempt(), 1)

        working = asyncio.ensure_future(asyncio.to_thread(work))
        await until(lambda: two.asked)
        two.proxies[two.asked[0]].cut()
        with pytest.raises(ConnectionLost):
            await working
        assert len(two.asked) == 1
