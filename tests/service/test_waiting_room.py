"""Calls that wait for their turn: ``max_concurrency`` of a handler, and its queue."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.errors import Busy, Cancelled, DeadlineExceeded, Refused, SchemaMismatch
from tests.support.calls import (
    NUMBERS,
    config,
    connected,
    everything,
    numbers,
    served,
    serving,
    until,
    values,
)


class Gate:
    """Handlers that all wait until they are let through, and count who is in."""

    def __init__(self, places: int = 2, concurrency: int = 1, **options: Any) -> None:
        """``options``: of the handlers, or the service."""
        self.inside = self.peak = 0
        self.came: list[int] = []
        self.lock = threading.Lock()
        self.open = threading.Event()
        self.service = aqueduct.Service("gate", **self.settings(options))
        register = self.service.handler
        options["max_concurrency"] = places

        @register("function", input=NUMBERS, concurrency=concurrency, **options)
        def function(batch):
            self.enter(batch["id"][0].as_py())
            return batch

        @register("coroutine", input=NUMBERS, concurrency=concurrency, **options)
        async def coroutine(batch):
            await self.enter_async(batch["id"][0].as_py())
            return batch

        @register("generator", input=NUMBERS, **options)
        def generator(batches):
            for batch in batches:
                self.enter(batch["id"][0].as_py())
                yield batch

        @register("async generator", input=NUMBERS, **options)
        async def async_generator(batches):
            async for batch in batches:
                await self.enter_async(batch["id"][0].as_py())
                yield batch

        @register("source", kind="source", output=NUMBERS, **options)
        def source():
            self.enter(0)
            yield numbers(0)

        @register("sink", kind="sink", input=NUMBERS, **options)
        def sink(batches):
            for batch in batches:
                self.enter(batch["id"][0].as_py())

        @register("async sink", kind="sink", input=NUMBERS, **options)
        async def async_sink(batches):
            async for batch in batches:
                await self.enter_async(batch["id"][0].as_py())

    @staticmethod
    def settings(options: dict[str, Any]) -> dict[str, Any]:
        return {name: options.pop(name) for name in ("config", "telemetry") if name in options}

    def enter(self, number: int) -> None:
        with self.lock:
            self.came.append(number)
            self.inside += 1
            self.peak = max(self.peak, self.inside)
        assert self.open.wait(20)
        with self.lock:
            self.inside -= 1

    async def enter_async(self, number: int) -> None:
        self.came.append(number)
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        try:
            await until(self.open.is_set)
        finally:
            self.inside -= 1

    @property
    def waiting(self) -> int:
        return self.service.counters()["waiting_calls"]

    async def idle(self) -> None:
        await until(lambda: not self.service.counters()["open_calls"])


HANDLERS = ["function", "coroutine", "generator", "async generator"]
KINDS = {"source": "source", "sink": "sink", "async sink": "sink"}


async def ask(client: Client, handler: str, number: int, **options: Any) -> list[list[int]]:
    """One call of any kind; gives its answers."""
    kind = KINDS.get(handler, "exchange")
    if kind == "source":
        return values(await everything(client.source(handler, **options)))
    if kind == "sink":
        await client.sink(handler, [numbers(number)], **options)
        return []
    return values(await everything(client.exchange(handler, [numbers(number)], **options)))


@pytest.mark.parametrize("handler", [*HANDLERS, *KINDS])
async def test_eight_calls_wait_for_two_places_and_none_fails(handler):
    gate = Gate()
    async with connected(gate.service) as client:
        calls = [asyncio.create_task(ask(client, handler, number)) for number in range(8)]
        await until(lambda: gate.inside == 2 and gate.waiting == 6)
        gate.open.set()
        found = await asyncio.gather(*calls)
        kind = KINDS.get(handler, "exchange")
        assert found == [[[number]] if kind == "exchange" else found[0] for number in range(8)]
        assert (gate.peak, gate.waiting) == (2, 0)
        assert len(gate.came) == 8
        counted = gate.service.counters()
        assert (counted["failed"], counted["refused"]) == (0, 0)


@pytest.mark.parametrize("handler", ["function", "coroutine"])
async def test_batches_of_all_calls_have_places_and_answers_are_in_order(handler):
    gate = Gate(places=3, concurrency=2)
    gate.open.set()
    async with connected(gate.service) as client:

        async def exchange(first: int) -> None:
            batches = [numbers(first + number) for number in range(40)]
            found = values(await everything(client.exchange(handler, batches)))
            assert found == [[first + number] for number in range(40)]

        single = (client.call(handler, numbers(number)) for number in range(20))
        await asyncio.gather(*(exchange(100 * number) for number in range(6)), *single)
    assert gate.peak <= 3
    assert len(gate.came) == 260


@pytest.mark.parametrize("handler", ["function", "async generator"])
async def test_busy_comes_only_when_the_queue_is_full(handler):
    gate = Gate(places=1, queue=2)
    async with connected(gate.service) as client:
        calls = [asyncio.create_task(client.call(handler, numbers(number))) for number in range(3)]
        await until(lambda: gate.waiting == 2)
        with pytest.raises(Busy, match=r"1 (calls|batches) running.*2 calls waiting.*\(queue\)"):
            await client.call(handler, numbers(3))
        assert gate.service.counters()["refused"] == 1
        calls[2].cancel()
        await until(lambda: gate.waiting == 1)
        calls.append(asyncio.create_task(client.call(handler, numbers(4))))
        await until(lambda: gate.waiting == 2)
        gate.open.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [each["id"].to_pylist() for each in found if isinstance(each, pa.RecordBatch)] == [
            [0],
            [1],
            [4],
        ]
        assert gate.came == [0, 1, 4]


async def test_a_queue_of_no_places_refuses_what_cannot_run_at_once():
    gate = Gate(places=1, queue=0)
    async with connected(gate.service) as client:
        first = asyncio.create_task(client.call("coroutine", numbers(1)))
        await until(lambda: gate.inside)
        with pytest.raises(Busy, match="0 calls waiting"):
            await client.call("coroutine", numbers(2))
        # It is let in, and finds no place once it has a batch.
        stream = client.exchange("function", [numbers(3)])
        gate.open.set()
        await first
        assert values(await everything(stream)) == [[3]]


async def test_a_call_that_has_begun_is_not_refused_for_its_later_batches():
    gate = Gate(places=1, queue=1)
    async with connected(gate.service) as client:
        streams = [
            asyncio.create_task(
                everything(client.exchange("function", [numbers(n + 10 * k) for k in range(5)]))
            )
            for n in range(2)
        ]
        await until(lambda: gate.waiting == 1)
        gate.open.set()
        assert [len(await stream) for stream in streams] == [5, 5]


@pytest.mark.parametrize("handler", ["function", "coroutine", "generator", "async sink"])
async def test_a_call_that_waits_too_long_ends(handler):
    gate = Gate(places=1, config=config(calls={"queue_deadline": 0.2}))
    async with connected(gate.service) as client:
        first = asyncio.create_task(ask(client, handler, 1))
        await until(lambda: gate.inside)
        with pytest.raises(Busy, match=r"waited 0.2 s for its turn \(Calls.queue_deadline\)"):
            await ask(client, handler, 2)
        assert not gate.waiting
        gate.open.set()
        await first
        await ask(client, handler, 3)
    assert gate.came == [1, 3]


@pytest.mark.parametrize("handler", ["function", "coroutine", "generator", "async generator"])
async def test_the_deadline_of_a_call_counts_its_wait(handler):
    gate = Gate(places=1)
    async with connected(gate.service) as client:
        first = asyncio.create_task(ask(client, handler, 1))
        await until(lambda: gate.inside)
        with pytest.raises(DeadlineExceeded):
            await ask(client, handler, 2, deadline=0.1)
        await until(lambda: not gate.waiting)
        gate.open.set()
        await first
        await gate.idle()
    assert gate.came == [1]


@pytest.mark.parametrize("carrier", ["memory", "tcp", "quic"])
@pytest.mark.parametrize("handler", ["function", "generator"])
async def test_a_client_that_goes_leaves_its_place_at_once(carrier, handler):
    gate = Gate(places=1)
    async with serving(gate.service, carrier) as running:
        address = running.addresses[0]
        async with await Client.connect(address) as client:
            first = asyncio.create_task(ask(client, handler, 1))
            await until(lambda: gate.inside)
            async with await Client.connect(address) as other:
                gone = [asyncio.create_task(ask(other, handler, n)) for n in (2, 3)]
                gone.append(asyncio.create_task(other.call(handler, numbers(4))))
                await until(lambda: gate.waiting == 3)
                gone[2].cancel()
                await until(lambda: gate.waiting == 2)
            await until(lambda: gate.waiting == 0)
            await asyncio.gather(*gone, return_exceptions=True)
            assert running.state()["turns"][handler] == {"running": 1, "waiting": 0}
            gate.open.set()
            await first
            assert await ask(client, handler, 5) == [[5]]
    assert gate.came == [1, 5]


async def test_a_function_whose_call_is_over_keeps_its_place_until_it_returns():
    gate = Gate(places=1)
    async with connected(gate.service) as client:
        first = asyncio.create_task(client.call("function", numbers(1)))
        await until(lambda: gate.inside)
        first.cancel()
        second = asyncio.create_task(client.call("function", numbers(2)))
        await until(lambda: gate.waiting)
        await until(lambda: gate.service.counters()["cancelled"] == 1)
        assert gate.inside == 1
        gate.open.set()
        assert await second == numbers(2)
        await gate.idle()
    assert gate.peak == 1


async def test_a_coroutine_whose_call_is_over_is_cancelled_and_gives_up_its_place():
    gate = Gate(places=1)
    async with connected(gate.service) as client:
        first = asyncio.create_task(client.call("coroutine", numbers(1)))
        await until(lambda: gate.inside)
        second = asyncio.create_task(client.call("coroutine", numbers(2)))
        await until(lambda: gate.waiting)
        first.cancel()
        await until(lambda: gate.came == [1, 2])
        assert gate.inside == 1
        gate.open.set()
        assert await second == numbers(2)


PATIENCE = 1.0


@pytest.mark.requirement("AC-103")
async def test_a_call_that_waits_is_not_stuck_for_its_client():
    gate = Gate(places=1, config=config(timing={"progress_deadline": PATIENCE}))
    handlers = [*HANDLERS, *KINDS]
    with served(gate.service, "tcp") as address:
        sync = aqueduct.SyncClient(address, config=gate.service.config)
        async with await Client.connect(address, config=gate.service.config) as client:
            first = [asyncio.create_task(ask(client, each, 1, deadline=20)) for each in handlers]
            await until(lambda: gate.inside == len(handlers))
            waiting = [asyncio.create_task(ask(client, each, 2)) for each in handlers]
            waiting += [
                asyncio.create_task(asks)
                for asks in (
                    client.call("function", numbers(3)),
                    client.call("async generator", numbers(3)),
                    asyncio.to_thread(sync.call, "function", numbers(3)),
                    asyncio.to_thread(lambda: list(sync.exchange("function", [numbers(3)]))),
                    asyncio.to_thread(sync.call, "generator", numbers(3)),
                )
            ]
            await until(lambda: gate.waiting == len(waiting))
            done, _ = await asyncio.wait(waiting, timeout=2.5 * PATIENCE)
            assert not done
            gate.open.set()
            await asyncio.gather(*first)
            found = await asyncio.gather(*waiting)
            assert found[:4] == [[[2]]] * 4
            assert found[-5:] == [numbers(3), numbers(3), numbers(3), [numbers(3)], numbers(3)]
        sync.close()


async def test_one_peer_that_floods_does_not_keep_others_waiting():
    order: list[str] = []
    gate = threading.Event()
    service = aqueduct.Service("fair")

    @service.handler("who", input=NUMBERS, max_concurrency=1)
    def who(batch, call):
        assert gate.wait(20)
        order.append(call.headers["who"])
        return batch

    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving(service, "tcp"))
        flood, *others = [
            await stack.enter_async_context(await Client.connect(running.addresses[0]))
            for _ in range(3)
        ]

        def call(client: Client, name: str) -> asyncio.Task[pa.RecordBatch]:
            return asyncio.create_task(client.call("who", numbers(1), headers={"who": name}))

        calls = [call(flood, "flood") for _ in range(60)]
        await until(lambda: service.counters()["waiting_calls"] == 59)
        calls += [call(each, f"peer{n}") for n, each in enumerate(others) for _ in range(3)]
        await until(lambda: service.counters()["waiting_calls"] == 65)
        gate.set()
        await asyncio.gather(*calls)
    assert sorted(order[1:10]) == ["flood"] * 3 + ["peer0"] * 3 + ["peer1"] * 3
    assert set(order[10:]) == {"flood"}


@pytest.mark.parametrize("handler", ["function", "generator"])
async def test_a_full_queue_of_one_peer_has_room_for_another(handler):
    gate = Gate(places=1, queue=4)
    async with serving(gate.service, "tcp") as running, AsyncExitStack() as stack:
        flood, other = [
            await stack.enter_async_context(await Client.connect(running.addresses[0]))
            for _ in range(2)
        ]
        calls = []
        for number in range(5):
            calls.append(asyncio.create_task(flood.call(handler, numbers(number))))
            await until(lambda: gate.inside + gate.waiting == len(calls))
        mine = [asyncio.create_task(other.call(handler, numbers(10 + n))) for n in range(2)]
        for call in (calls[4], calls[3]):
            with pytest.raises(Busy, match="gave its place in the queue to another peer"):
                await call
        with pytest.raises(Busy, match="4 calls waiting"):
            await other.call(handler, numbers(12))  # it has its share
        gate.open.set()
        await asyncio.gather(*mine, *calls[:3])
    assert sorted(gate.came) == [0, 1, 2, 10, 11]


@pytest.mark.parametrize("handler", ["function", "generator"])
async def test_a_call_that_is_refused_takes_nobody_s_place(handler):
    gate = Gate(places=1, queue=3)
    async with serving(gate.service, "tcp") as running, AsyncExitStack() as stack:
        flood, other = [
            await stack.enter_async_context(await Client.connect(running.addresses[0]))
            for _ in range(2)
        ]
        calls = [asyncio.create_task(flood.call(handler, numbers(n))) for n in range(4)]
        await until(lambda: gate.inside + gate.waiting == len(calls))
        for _ in range(2):
            with pytest.raises(SchemaMismatch):
                await other.call(handler, pa.record_batch({"word": ["none of its columns"]}))
        assert gate.waiting == 3
        gate.open.set()
        assert await asyncio.gather(*calls) == [numbers(n) for n in range(4)]


@pytest.mark.parametrize("handler", ["function", "coroutine"])
async def test_an_exchange_that_sends_nothing_takes_nobody_s_place(handler):
    gate = Gate(places=1, queue=3)
    over = asyncio.Event()

    async def nothing():
        await over.wait()
        for batch in list[pa.RecordBatch]():
            yield batch

    async with serving(gate.service, "tcp") as running, AsyncExitStack() as stack:
        flood, other = [
            await stack.enter_async_context(await Client.connect(running.addresses[0]))
            for _ in range(2)
        ]
        calls = [asyncio.create_task(flood.call(handler, numbers(n))) for n in range(4)]
        await until(lambda: gate.inside + gate.waiting == len(calls))
        silent = other.exchange(handler, nothing(), schema=NUMBERS)
        answers = asyncio.create_task(everything(silent))
        await until(lambda: gate.service.counters()["open_calls"] == 5)
        assert gate.waiting == 3
        over.set()
        assert await answers == []
        gate.open.set()
        assert await asyncio.gather(*calls) == [numbers(n) for n in range(4)]


@pytest.mark.parametrize("handler", ["function", "generator"])
async def test_calls_that_wait_are_served_while_the_service_drains(handler):
    gate = Gate(places=1)
    async with serving(gate.service) as running:
        async with await Client.connect(running.addresses[0]) as client:
            calls = [asyncio.create_task(ask(client, handler, number)) for number in range(4)]
            await until(lambda: gate.waiting == 3)
            closing = asyncio.create_task(running.close(drain=20))
            await until(lambda: running.addresses == [])
            gate.open.set()
            found = await asyncio.gather(*calls)
            assert found == [[[number]] for number in range(4)]
            await closing


@pytest.mark.parametrize("handler", ["function", "generator"])
async def test_calls_that_still_wait_at_the_end_of_a_drain_may_go_elsewhere(handler):
    gate = Gate(places=1)
    async with serving(gate.service) as running:
        async with await Client.connect(running.addresses[0]) as client:
            calls = [asyncio.create_task(ask(client, handler, number)) for number in range(3)]
            await until(lambda: gate.waiting == 2)
            closing = asyncio.create_task(running.close(drain=0.4))
            for call in calls[1:]:
                with pytest.raises(Refused, match="is ending") as caught:
                    await call
                assert caught.value.draining
            gate.open.set()
            await asyncio.gather(calls[0], return_exceptions=True)
            await closing
    assert gate.came == [0]


async def test_a_call_that_ends_before_its_turn_gives_it_on():
    gate = Gate(places=1)
    async with connected(gate.service) as client:
        first = asyncio.create_task(ask(client, "generator", 1))
        await until(lambda: gate.inside)
        second = asyncio.create_task(ask(client, "generator", 2))
        third = asyncio.create_task(ask(client, "generator", 3))
        await until(lambda: gate.waiting == 2)
        gate.open.set()
        second.cancel()
        assert await first == [[1]]
        assert await third == [[3]]
        with pytest.raises((asyncio.CancelledError, Cancelled)):
            await second
        await gate.idle()
        assert await ask(client, "generator", 4) == [[4]]


async def test_a_handler_that_fails_gives_its_place_back():
    service = aqueduct.Service("fails")

    @service.handler("fail", input=NUMBERS, max_concurrency=1)
    def fail(batch):
        raise ValueError("seven")

    @service.handler("fail async", input=NUMBERS, max_concurrency=1)
    async def fail_async(batch):
        raise ValueError("seven")

    @service.handler("fail generator", input=NUMBERS, max_concurrency=1)
    def fail_generator(batches):
        raise ValueError("seven")
        yield

    async with connected(service) as client:
        for name in ("fail", "fail async", "fail generator"):
            calls = (client.call(name, numbers(number)) for number in range(6))
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(each).__name__ for each in found] == ["HandlerFailed"] * 6
            assert all("seven" in str(each) for each in found)


async def test_the_handler_runs_in_the_context_of_its_call():
    number: ContextVar[int] = ContextVar("number", default=0)
    seen: list[int] = []

    def authorize(call):
        number.set(int(call.headers["number"]))

    service = aqueduct.Service("contexts", authorize=authorize)

    @service.handler("function", max_concurrency=1, concurrency=2)
    def function(batch, call):
        seen.append(number.get() - int(call.headers["number"]))
        return batch

    @service.handler("coroutine", max_concurrency=1, concurrency=2)
    async def coroutine(batch, call):
        seen.append(number.get() - int(call.headers["number"]))
        return batch

    async with connected(service) as client:
        await asyncio.gather(
            *(
                client.call(name, numbers(1), headers={"number": str(each)})
                for name in ("function", "coroutine")
                for each in range(1, 6)
            )
        )
    assert seen == [0] * 10
