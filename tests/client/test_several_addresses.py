"""Clients with several addresses: what is tried again, where, and what is not."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest

import aqueduct
from aqueduct.errors import (
    Busy,
    Cancelled,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    HandlerFailed,
    LocalProtocolError,
    Refused,
)
from tests.support.calls import NUMBERS, config, everything, numbers, served, until, values
from tests.support.neighbours import ROOT, Neighbour, free_port

QUICK: Any = {"backoff": 0.01, "backoff_limit": 0.05}
TCP = "aqueduct+tcp://127.0.0.1:0"


class Asked:
    """A service that writes down what it was asked, and waits where it is told to."""

    def __init__(self, **options):
        self.service = aqueduct.Service("asked", **options)
        self.seen: list[int] = []
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.calls = 0

        @self.service.handler("echo", concurrency=4, idempotent=True)
        async def echo(batch):
            return self.note(batch)

        @self.service.handler("echo once")
        async def echo_once(batch):
            return self.note(batch)

        @self.service.handler("gated", concurrency=4, idempotent=True)
        async def gated(batch):
            self.begun.set()
            try:
                await self.gate.wait()
            finally:
                self.ended.set()
            return self.note(batch)

        @self.service.handler("gated once")
        async def gated_once(batch):
            return await gated(batch)

        @self.service.handler("total", output=NUMBERS)
        async def total(batches):
            self.begun.set()
            found = [self.note(batch)["id"][0].as_py() async for batch in batches]
            await self.gate.wait()
            yield numbers(sum(found))

        @self.service.handler("source", kind="source", output=NUMBERS)
        async def source(call):
            self.calls += 1
            self.begun.set()
            yield numbers(1)
            await self.gate.wait()
            yield numbers(2)

        @self.service.handler("late source", kind="source", output=NUMBERS)
        async def late_source(call):
            self.calls += 1
            self.begun.set()
            await self.gate.wait()
            yield numbers(1)

        @self.service.handler("sink", kind="sink")
        async def sink(batches):
            self.calls += 1
            async for batch in batches:
                self.note(batch)
                self.begun.set()
                await self.gate.wait()

        @self.service.handler("failing", idempotent=True)
        async def failing(batch):
            if self.note(batch)["id"][0].as_py() == 1:
                raise ValueError("one is no good")
            return batch

    def note(self, batch):
        self.seen.append(batch["id"][0].as_py())
        return batch


@asynccontextmanager
async def asked(count=2, *, addresses=(), **options):
    """Several services with their runs, and the addresses of all of them."""
    async with AsyncExitStack() as stack:
        services = [Asked(**options) for _ in range(count)]
        places = addresses or [TCP] * count
        runs = [
            await stack.enter_async_context(each.service.serving(place, drain=0))
            for each, place in zip(services, places, strict=True)
        ]
        yield services, runs, [run.addresses[0] for run in runs]


def cut(run):
    """Ends all connections of a service, as a network does."""
    for connection in run.connections:
        connection.close_soon(3, "cut")


@contextmanager
def silence():
    """The address of one who listens and never says anything."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield f"aqueduct+tls://127.0.0.1:{silent.getsockname()[1]}"


def _any_called(services):
    return lambda: any(each.calls for each in services)


def _closed(client):
    return lambda: client.closed


def nobody():
    return f"aqueduct+tcp://127.0.0.1:{free_port()}"


# ------------------------------------------------------------------ whom a call goes to


async def test_one_connection_for_each_address_is_made_at_the_entry():
    async with asked() as (_, _, places), aqueduct.Client(places) as client:
        await until(lambda: all(state.connected for state in client.endpoints))
        assert [state.address for state in client.endpoints] == places
        assert [state.connections for state in client.endpoints] == [1, 1]
        assert client.address == ", ".join(places)
        assert not client.closed
    assert client.closed


async def test_batches_are_spread_and_come_in_order():
    async with asked() as (services, _, places), aqueduct.Client(places) as client:
        await until(lambda: all(state.connected for state in client.endpoints))
        stream = client.exchange("echo", [numbers(n) for n in range(300)])
        assert values(await everything(stream)) == [[n] for n in range(300)]
        assert stream.number == 299 and stream.over and stream.schema == NUMBERS
        assert stream.capabilities == {"one-to-one", "idempotent"}
        assert all(each.seen for each in services)
        assert sorted(services[0].seen + services[1].seen) == list(range(300))
        async with client.exchange("echo", [numbers(1)], ordered=False) as loose:
            await loose.opened()
            assert "as-completed" in loose.capabilities


async def test_a_call_goes_where_the_fewest_bytes_are_outstanding():
    async with asked() as (services, _, places), aqueduct.Client(places) as client:
        await until(lambda: all(state.connected for state in client.endpoints))
        slow = asyncio.ensure_future(client.call("gated", numbers(7)))
        await until(lambda: any(each.begun.is_set() for each in services))
        busy = next(each for each in services if each.begun.is_set())
        other = next(each for each in services if each is not busy)
        assert sum(state.outstanding_bytes > 0 for state in client.endpoints) == 1
        for n in range(10):
            await client.call("echo", numbers(n))
        assert busy.seen == [] and other.seen == list(range(10))
        busy.gate.set()
        assert await slow == numbers(7)
        assert [state.outstanding_bytes for state in client.endpoints] == [0, 0]


async def test_an_address_where_nobody_listens_is_passed_by():
    async with asked(1) as (_, _, places):
        dead = nobody()
        async with aqueduct.Client([dead, *places]) as client:
            for n in range(3):
                assert await client.call("echo", numbers(n)) == numbers(n)
                assert values(await everything(client.exchange("echo", [numbers(n)]))) == [[n]]
            state = client.endpoints[0]
            assert (state.connected, state.address) == (False, dead)
            assert state.failures and "connection refused" in state.error


async def test_an_address_that_says_nothing_is_not_waited_for_alone():
    async with asked(2) as (services, runs, places):
        with silence() as silent:
            async with aqueduct.Client([silent, *places], hedge=0.02, **QUICK) as client:
                await until(lambda: sum(state.connected for state in client.endpoints) == 2)
                async with asyncio.timeout(8):  # less than Timing.connect_timeout
                    for n in range(6):
                        assert values(await everything(client.exchange("echo", [numbers(n)])))
                        assert await client.call("echo", numbers(n)) == numbers(n)
                        services[0].gate.set()
                        services[1].gate.set()
                        assert (await client.sink("sink", [numbers(n)]))["batches_in"] == 1
                    for run in runs:
                        await run.close(drain=0)
                    with pytest.raises(DeadlineExceeded):
                        await client.call("echo", numbers(1), deadline=0.1)


async def test_no_address_that_answers_is_an_error_that_names_each():
    dead = [nobody(), nobody()]
    with pytest.raises(ConnectFailed, match="none of 2 addresses answers") as caught:
        await aqueduct.Client.connect(dead)
    assert all(address in str(caught.value) for address in dead)


async def test_a_busy_service_is_passed_by():
    tight = config(calls={"max_calls_process": 1})
    async with asked(config=tight) as (services, _, places), aqueduct.Client(places) as client:
        await until(lambda: all(state.connected for state in client.endpoints))
        slow = [asyncio.ensure_future(client.call("gated", numbers(n))) for n in range(2)]
        await until(lambda: all(each.begun.is_set() for each in services))
        services[0].gate.set()
        await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
        assert await client.call("echo", numbers(5)) == numbers(5)  # whichever is asked first
        assert values(await everything(client.exchange("echo", [numbers(6)]))) == [[6]]
        services[1].gate.set()
        await asyncio.gather(*slow)


async def test_a_single_busy_service_is_asked_again(caplog):
    tight = config(calls={"max_calls_process": 1})
    async with asked(1, config=tight) as ([service], _, places):
        async with aqueduct.Client(places, **QUICK) as client:
            slow = asyncio.ensure_future(client.call("gated", numbers(1)))
            await service.begun.wait()
            with pytest.raises(Busy):
                await client.call("echo", numbers(2))
            again = asyncio.ensure_future(client.call("echo once", numbers(2), retries=1000))
            await until(lambda: caplog.text.count("what has no answer is asked again") > 2)
            service.gate.set()
            assert await again == numbers(2)
            await slow


# ------------------------------------------------------------------ what is sent again


@pytest.mark.parametrize("handler", ["gated", "gated once"])
async def test_a_lost_call_of_one_batch_is_made_again_if_it_is_idempotent(handler):
    async with asked() as (services, runs, places):
        async with aqueduct.Client(places, retries=3, **QUICK) as client:
            await until(lambda: all(state.connected for state in client.endpoints))
            slow = asyncio.ensure_future(client.call(handler, numbers(7)))
            await until(lambda: any(each.begun.is_set() for each in services))
            first = next(n for n, each in enumerate(services) if each.begun.is_set())
            cut(runs[first])
            await services[first].ended.wait()
            for each in services:
                each.gate.set()
            if handler == "gated":
                assert await slow == numbers(7)
                assert services[0].seen + services[1].seen == [7]
            else:
                with pytest.raises(ConnectionLost, match="not declared idempotent"):
                    await slow
                assert services[0].seen + services[1].seen == []


async def test_without_retries_a_lost_call_is_an_error():
    async with asked() as (services, runs, places), aqueduct.Client(places) as client:
        await until(lambda: all(state.connected for state in client.endpoints))
        slow = asyncio.ensure_future(client.call("gated", numbers(7)))
        await until(lambda: any(each.begun.is_set() for each in services))
        first = next(n for n, each in enumerate(services) if each.begun.is_set())
        cut(runs[first])
        with pytest.raises(ConnectionLost, match=r"tried once .* \(retries=0\)"):
            await slow
        assert services[1 - first].seen == []
        assert await client.call("echo", numbers(1)) == numbers(1)


async def test_a_source_is_called_again_before_its_first_batch_alone():
    for handler, found in (("late source", [[1]]), ("source", None)):
        async with asked() as (services, runs, places):
            async with aqueduct.Client(places, retries=3, **QUICK) as client:
                await until(lambda: all(state.connected for state in client.endpoints))
                stream = client.source(handler)
                if found is None:
                    assert await anext(stream) == numbers(1)
                reading = asyncio.ensure_future(everything(stream))
                await until(_any_called(services))
                first = next(n for n, each in enumerate(services) if each.calls)
                cut(runs[first])
                if found is None:
                    with pytest.raises(ConnectionLost, match="a source is not resumed"):
                        await reading
                    assert services[0].calls + services[1].calls == 1
                else:
                    for each in services:
                        each.gate.set()
                    assert values(await reading) == found
                    assert services[0].calls + services[1].calls == 2


async def test_a_sink_that_was_sent_something_is_not_called_again():
    async with asked() as (services, runs, places):
        async with aqueduct.Client([nobody(), *places], retries=3, **QUICK) as client:
            sinking = asyncio.ensure_future(client.sink("sink", [numbers(1), numbers(2)]))
            await until(lambda: any(each.begun.is_set() for each in services))
            first = next(n for n, each in enumerate(services) if each.begun.is_set())
            cut(runs[first])
            with pytest.raises(ConnectionLost, match="what was sent is not sent again"):
                await sinking
            assert services[1 - first].calls == 0
            for each in services:
                each.gate.set()
            assert (await client.sink("sink", [numbers(3)]))["batches_in"] == 1


async def test_a_handler_that_is_no_function_of_one_batch_has_one_address():
    async with asked() as (services, runs, places):
        async with aqueduct.Client(places, retries=3, **QUICK) as client:
            for each in services:
                each.gate.set()
            stream = client.exchange("total", [numbers(n) for n in range(10)])
            assert values(await everything(stream)) == [[45]]
            assert stream.counters["batches_in"] == 10
            assert sorted(map(len, (each.seen for each in services))) == [0, 10]
            services[0].gate.clear()
            services[1].gate.clear()
            reading = asyncio.ensure_future(everything(client.exchange("total", [numbers(1)])))
            await until(lambda: sum(len(each.seen) for each in services) == 11)
            for run in runs:
                cut(run)
            with pytest.raises(ConnectionLost, match="no function of one batch"):
                await reading


async def test_an_error_of_the_handler_is_not_tried_again():
    async with asked() as (services, _, places):
        async with aqueduct.Client(places, retries=3, **QUICK) as client:
            with pytest.raises(HandlerFailed, match="one is no good"):
                await client.call("failing", numbers(1))
            with pytest.raises(HandlerFailed, match="batch 1: "):
                await everything(client.exchange("failing", [numbers(0), numbers(1)]))
            stream = client.exchange(
                "failing", [numbers(0), numbers(1), numbers(2)], report_failures=True
            )
            assert await anext(stream) == numbers(0)
            with pytest.raises(HandlerFailed):
                await anext(stream)
            assert stream.number == 1 and not stream.over
            assert await anext(stream) == numbers(2)
            assert sum(each.seen.count(1) for each in services) == 3


async def test_failures_of_single_batches_are_not_reported_by_other_handlers():
    async with asked() as (services, _, places), aqueduct.Client(places) as client:
        for each in services:
            each.gate.set()
        stream = client.exchange("total", [numbers(2)], report_failures=True)
        assert values(await everything(stream)) == [[2]]
        assert "failures" not in stream.capabilities


async def test_an_entry_that_is_cancelled_leaves_nothing_behind():
    before = asyncio.all_tasks()
    with silence() as place:
        client = aqueduct.Client([place, place + "?verify=off"])
        entering = asyncio.ensure_future(client.__aenter__())
        await asyncio.sleep(0)
        await until(lambda: len(asyncio.all_tasks() - before) >= 3)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert asyncio.all_tasks() - before == set()
        with pytest.raises(DeadlineExceeded):
            await client.call("echo", numbers(1), deadline=0.05)
        await client.close()


async def test_an_entry_that_is_cancelled_leaves_attempts_that_others_wait_for():
    with silence() as place:
        client = aqueduct.Client([place, place + "?verify=off"])
        entries = [asyncio.ensure_future(client.__aenter__()) for _ in range(2)]
        call = asyncio.ensure_future(client.call("echo", numbers(1)))
        await until(lambda: all(each.waiting >= 2 for each in client._endpoints.targets[:1]))
        entries[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await entries[0]
        for _ in range(20):  # turns of the loop in which the others would hear of it
            await asyncio.sleep(0)
        assert not entries[1].done() and not call.done()
        await client.close()
        for each in (entries[1], call):
            with pytest.raises(ConnectionLost, match="is closed"):
                await each


async def test_a_close_that_is_cancelled_can_be_made_up_for():
    async with asked(3) as (_, _, places):
        client = aqueduct.Client(places)
        await client.__aenter__()
        await until(lambda: all(state.connected for state in client.endpoints))
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await client.close()
        assert not any(state.connected for state in client.endpoints)


async def test_a_second_close_waits_for_the_first():
    async with asked(3) as (_, _, places):
        client = aqueduct.Client(places)
        await client.__aenter__()
        await until(lambda: all(state.connected for state in client.endpoints))
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        await client.close()
        assert not any(state.connected for state in client.endpoints)
        await closing


def test_a_client_belongs_to_the_process_that_uses_it_first():
    """It may be made before a fork, as a global of a program that forks workers."""
    program = (
        "import asyncio, os, aqueduct\n"
        "client = aqueduct.Client(['memory://a', 'memory://b'])\n"
        "pid = os.fork()\n"
        "async def main():\n"
        "    client.check_here()\n"
        "    client._endpoints.tend()\n"
        "    await client.close()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        asyncio.run(main())\n"
        "        print('used in the child', flush=True)\n"
        "    finally:\n"
        "        os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert "used in the child" in done.stdout, done.stderr


async def test_a_batch_has_a_deadline_of_its_own():
    async with asked(1) as ([service], _, places), aqueduct.Client(places) as client:
        stream = client.exchange("gated", [numbers(1)], batch_deadline="50ms")
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0.05 s \(batch_deadline\)"):
            await everything(stream)
        with pytest.raises(DeadlineExceeded, match=r"(not done|not end) within"):
            await everything(client.exchange("gated", [numbers(1)], deadline=0.05, retries=1))
        service.gate.set()


async def test_a_service_that_is_ending_is_passed_by():
    async with asked() as (services, runs, places), aqueduct.Client(places) as client:
        await until(lambda: all(state.connected for state in client.endpoints))
        held = [asyncio.ensure_future(client.call("gated once", numbers(n))) for n in range(2)]
        await until(lambda: all(each.begun.is_set() for each in services))
        ending = asyncio.ensure_future(runs[0].close(drain=20))
        await until(lambda: not runs[0].addresses)
        for n in range(10, 14):  # no handler of the first has seen them
            assert await client.call("echo once", numbers(n)) == numbers(n)
        for n in range(10, 14):
            assert values(await everything(client.exchange("echo once", [numbers(n)]))) == [[n]]
        for each in services:
            each.gate.set()
        assert await asyncio.gather(*held) == [numbers(0), numbers(1)]
        await ending


async def test_a_call_that_an_ending_service_gives_up_may_have_been_worked_on():
    async with asked() as (services, runs, places):
        async with aqueduct.Client(places, retries=3, **QUICK) as client:
            await until(lambda: all(state.connected for state in client.endpoints))
            held = asyncio.ensure_future(client.call("gated once", numbers(1)))
            await until(lambda: any(each.begun.is_set() for each in services))
            first = next(n for n, each in enumerate(services) if each.begun.is_set())
            await runs[first].close(drain=0)
            with pytest.raises((Refused, ConnectionLost), match="not declared idempotent"):
                await held
            assert not services[1 - first].begun.is_set()


# ------------------------------------------------------------------ one address


async def test_a_lost_connection_is_made_again_for_the_next_call():
    place = nobody()
    client: Any = None
    for n in range(3):
        async with asked(1, addresses=[place]) as (_, [run], _):
            client = client or await aqueduct.Client.connect(place)
            if n == 1:
                assert values(await everything(client.exchange("echo", [numbers(n)]))) == [[n]]
            assert await client.call("echo", numbers(n)) == numbers(n)
            assert client.endpoints[0].connections == n + 1
            await run.close(drain=0)
            await until(_closed(client))
        with pytest.raises(ConnectFailed, match=re.escape(place) + ".*connection refused"):
            await client.call("echo", numbers(n))
        with pytest.raises(ConnectFailed, match=re.escape(place) + ".*connection refused"):
            await everything(client.exchange("echo", [numbers(n)]))
    await client.close()
    with pytest.raises(ConnectionLost):
        await client.call("echo", numbers(1))


async def test_a_call_waits_for_a_service_that_comes_back():
    place = nobody()
    async with asked(1, addresses=[place]):
        client = await aqueduct.Client.connect(place, retries=10_000, **QUICK)
    waiting = asyncio.ensure_future(client.call("echo once", numbers(3)))
    await until(lambda: client.endpoints[0].failures > 3)
    async with asked(1, addresses=[place]):
        assert await waiting == numbers(3)
        await client.close()


async def test_a_client_of_a_connection_is_not_connected_again():
    from aqueduct.endpoint import connect_for_calls

    async with asked(1) as (_, [run], [place]):
        address = aqueduct.address.Address.parse(place)
        connection = await connect_for_calls(
            address, headers=(), config=aqueduct.Config(), tls=None
        )
        client = aqueduct.Client(connection, address="here")
        async with client as entered:
            assert entered is client and client.connection is connection
            assert await client.call("echo", numbers(1)) == numbers(1)
            await run.close(drain=0)
            await until(lambda: client.closed)
            with pytest.raises(ConnectionLost):
                await client.call("echo", numbers(1))
            with pytest.raises(ConnectionLost):
                await everything(client.exchange("echo", [numbers(1)]))


async def test_a_client_connects_for_its_first_call_at_the_latest():
    async with asked(1) as (_, _, places):
        client = aqueduct.Client(places[0])
        assert not client.closed
        with pytest.raises(ConnectionLost, match="is not connected"):
            _ = client.connection
        assert values(await everything(client.exchange("echo", [numbers(1)]))) == [[1]]
        await client.close()
        with pytest.raises(ConnectionLost):
            await client.call("echo", numbers(1))
        unused = aqueduct.Client(places[0])
        await unused.close()
        with pytest.raises(ConnectionLost, match="is closed"):
            await unused.call("echo", numbers(1))


# ------------------------------------------------------------------ tasks


async def test_input_that_is_not_there_yet_holds_up_no_answer():
    async with asked() as (_, _, places), aqueduct.Client(places) as client:
        more = asyncio.Event()
        closed = asyncio.Event()

        async def batches():
            try:
                yield numbers(1)
                await more.wait()
                yield numbers(2)
                await asyncio.sleep(3600)
            finally:
                closed.set()

        async with client.exchange("echo", batches(), schema=NUMBERS) as stream:
            assert await stream.opened() == NUMBERS
            assert stream.capabilities >= {"one-to-one", "idempotent"}
            assert await anext(stream) == numbers(1)
            more.set()
            assert await anext(stream) == numbers(2)
        assert closed.is_set()
        with pytest.raises(Cancelled):
            await anext(stream)


async def test_an_error_of_the_input_is_that_of_the_call():
    async with asked() as (_, _, places), aqueduct.Client(places) as client:

        async def batches():
            yield numbers(1)
            raise ValueError("the input is no good")

        stream = client.exchange("echo", batches(), schema=NUMBERS)
        with pytest.raises(ValueError, match="the input is no good"):
            await everything(stream)
        with pytest.raises(ZeroDivisionError):
            await everything(client.exchange("echo", (1 // n for n in [0]), schema=NUMBERS))


async def test_a_reader_that_is_cancelled_loses_no_answer():
    async with asked() as (services, _, places), aqueduct.Client(places) as client:
        stream = client.exchange("gated", [numbers(n) for n in range(4)])
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await anext(stream)
        for each in services:
            each.gate.set()
        assert values(await everything(stream)) == [[n] for n in range(4)]


async def test_a_reader_that_takes_its_time_bounds_what_is_asked():
    async with asked() as (services, _, places), aqueduct.Client(places) as client:
        stream = client.exchange("echo", (numbers(n) for n in range(10_000)), schema=NUMBERS)
        assert await anext(stream) == numbers(0)
        await asyncio.sleep(0.5)  # time to ask far too much
        assert sum(len(each.seen) for each in services) < 200
        await stream.aclose()


async def test_a_stream_that_is_closed_or_dropped_stops_the_handlers():
    async with asked() as (services, _, places), aqueduct.Client(places) as client:
        for drop in (False, True):
            stream = client.exchange("gated", [numbers(1)])
            await stream.opened()
            await until(lambda: any(each.begun.is_set() for each in services))
            if drop:
                del stream
                gc.collect()
            else:
                await stream.aclose()
            await until(lambda: any(each.ended.is_set() for each in services))
            await until(lambda: not any(each.service.counters()["open_calls"] for each in services))
            for each in services:
                each.begun.clear()
                each.ended.clear()


async def test_close_ends_calls_that_wait_for_a_connection():
    before = asyncio.all_tasks()
    client = aqueduct.Client([nobody(), nobody()], retries=10_000, backoff=30)
    waiting = [
        asyncio.ensure_future(client.call("echo", numbers(1))),
        asyncio.ensure_future(everything(client.exchange("echo", [numbers(1)]))),
    ]
    await until(lambda: all(state.failures for state in client.endpoints))
    async with asyncio.timeout(10):
        await client.close()
        for each in waiting:
            with pytest.raises(ConnectionLost, match="is closed"):
                await each
    assert asyncio.all_tasks() - before == set()


async def test_the_client_belongs_to_one_loop():
    async with asked() as (_, _, places), aqueduct.Client(places) as client:
        with pytest.raises(LocalProtocolError, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, client.call("echo", numbers(1)))
        with pytest.raises(LocalProtocolError, match="belongs to another event loop"):
            await asyncio.to_thread(client.exchange, "echo", [numbers(1)])
        assert await client.call("echo", numbers(1)) == numbers(1)


# ------------------------------------------------------------------ threads


@pytest.fixture
def two_served():
    services = [aqueduct.Service(f"served {n}") for n in range(2)]
    for service in services:
        service.handler("echo", idempotent=True)(lambda batch: batch)

        @service.handler("source", kind="source", output=NUMBERS)
        def source(call):
            yield numbers(1)
            yield numbers(2)

        @service.handler("sink", kind="sink")
        def sink(batches):
            for _ in batches:
                pass

    with served(services[0], "tcp") as one, served(services[1], "tcp") as other:
        yield [one, other]


def test_a_sync_client_has_all_of_it(two_served):
    with aqueduct.SyncClient([nobody(), *two_served], retries=2) as client:
        assert client.call("echo", numbers(1)) == numbers(1)
        stream = client.exchange("echo", [numbers(n) for n in range(100)])
        assert stream.opened() == NUMBERS
        assert values(list(stream)) == [[n] for n in range(100)]
        assert stream.number == 99 and stream.over
        assert stream.bytes_sent > 0 and stream.bytes_received > 0 and stream.waited > 0
        assert values(list(client.source("source"))) == [[1], [2]]
        assert client.sink("sink", [numbers(1)])["batches_in"] == 1
        assert client.ping() > 0
        assert [state.connected for state in client.endpoints] == [False, True, True]
        left = client.exchange("echo", (numbers(n) for n in range(100)), schema=NUMBERS)
        next(left)
        left.close()
        with pytest.raises(Cancelled):
            next(left)
        with pytest.raises(LocalProtocolError, match="async iterables are for"):
            client.exchange("echo", _no_batches(), schema=NUMBERS)
    with pytest.raises(aqueduct.AqueductError, match="closed"):
        client.call("echo", numbers(1))


async def _no_batches():
    for value in range(0):
        yield numbers(value)


def test_several_threads_share_a_sync_client(two_served):
    found = []

    def work(client, first):
        for n in range(first, first + 20):
            found.append(client.call("echo", numbers(n))["id"][0].as_py())  # noqa: PERF401
        stream = client.exchange("echo", [numbers(n) for n in range(first, first + 20)])
        found.extend(value[0] for value in values(list(stream)))

    with aqueduct.SyncClient(two_served) as client:
        threads = [threading.Thread(target=work, args=(client, 20 * n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(found) == sorted([*range(80), *range(80)])


def test_a_sync_client_connects_again():
    service = aqueduct.Service("again")
    service.handler("echo")(lambda batch: batch)
    place = Neighbour()
    client: Any = None
    try:
        for n in range(2):
            place.launch()
            place.wait()
            client = client or aqueduct.SyncClient(place.address)
            assert client.call("square", numbers(n)) == numbers(n * n)
            assert values(list(client.exchange("square", [numbers(n)]))) == [[n * n]]
            place.kill()
            with pytest.raises(ConnectionLost):
                while True:
                    client.call("square", numbers(n))
        with pytest.raises(ConnectFailed, match=re.escape(place.address)):
            client.call("square", numbers(1))
        with pytest.raises(ConnectFailed, match=re.escape(place.address)):
            client.source("source")
    finally:
        place.kill()
        if client is not None:
            client.close()


def test_a_sync_client_with_several_addresses_is_of_no_use_after_a_fork(two_served):
    with aqueduct.SyncClient(two_served) as client:
        stream = client.exchange("echo", [numbers(1)])
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for use in (
                    lambda: client.call("echo", numbers(1)),
                    lambda: client.exchange("echo", [numbers(1)]),
                    lambda: next(stream),
                    client.ping,
                ):
                    with pytest.raises(LocalProtocolError, match="make a client after the fork"):
                        use()
                client.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert values(list(stream)) == [[1]]


def test_closing_a_sync_client_ends_what_waits_for_a_connection(two_served):
    failed: list[BaseException] = []
    client = aqueduct.SyncClient(two_served[0], retries=10_000, backoff=30)
    client._endpoints.targets[0].address = client._endpoints.targets[0].address.with_port(1)

    def call():
        try:
            client.call("echo", numbers(1))
        except aqueduct.AqueductError as error:
            failed.append(error)

    client._thread.run(client._client.connection.close())
    thread = threading.Thread(target=call)
    thread.start()
    while not client.endpoints[0].failures > 1:
        threading.Event().wait(0.01)
    client.close()
    thread.join(20)
    assert len(failed) == 1


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"address": []}, "address is an empty list"),
        ({"address": ["memory://a", "memory://a"]}, "given twice"),
        ({"address": ["memory://a", "nothing"]}, "is not an address"),
        ({"address": ["memory://a", 5]}, "address"),
        ({"address": "memory://a", "retries": -1}, "retries"),
        ({"address": "memory://a", "backoff": 0}, "backoff"),
        ({"address": "memory://a", "backoff_limit": "x"}, "backoff_limit"),
        ({"address": "memory://a", "hedge": -1}, "hedge"),
        ({"address": "memory://a", "resolve": 0}, "resolve"),
        ({"address": "memory://a", "resolver": 5}, "resolver"),
    ],
)
async def test_arguments_that_cannot_work_are_refused_at_once(given, error):
    with pytest.raises(ConfigError, match=error):
        await aqueduct.Client.connect(**given)
    with pytest.raises(ConfigError, match=error):
        aqueduct.SyncClient(**given)
    address = given.pop("address")
    with pytest.raises(ConfigError, match=error):
        aqueduct.Client(address, **given)


# ------------------------------------------------------------------ deaths


@pytest.mark.checkout
def test_the_example():
    done = subprocess.run(
        [sys.executable, "examples/several_addresses.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (
        0,
        "300 answers, all in order: True\nconnected: [False, True, True]\n",
    ), done.stderr
