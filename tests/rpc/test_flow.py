"""Back pressure: who may run ahead of whom, by how much, and that nothing deadlocks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aqueduct
from aqueduct.client import call as call_module
from tests.support.calls import (
    NUMBERS,
    config,
    connected,
    everything,
    holding,
    numbers,
    sync_client,
    until,
    values,
)

KiB, MiB = 1 << 10, 1 << 20

# Every window so small that any fault in the waiting shows at once.
NARROW = config(
    calls={"fragment_bytes": 16 * KiB, "in_flight_batches": 2, "in_flight_bytes": 64 * KiB},
    flow={
        "receive_budget": 256 * KiB,
        "channel_receive_bytes": 64 * KiB,
        "initial_window": 8 * KiB,
        "read_ahead": 16 * KiB,
        "admitted_window": 32 * KiB,
        "channel_high_water": 32 * KiB,
        "connection_high_water": 128 * KiB,
    },
)

WINDOWS = (64 + 32 + 32 + 16 + 8) // 10
"""Batches of 10 KiB that fit the channel's share at the receiver, and the sender's queue."""
AHEAD = 16
"""Small batches that lie ready before a thread, or come from one."""


def blob(number, size):
    return pa.record_batch(
        {"id": pa.array([number], pa.int64()), "blob": pa.array([bytes(size)], pa.binary())}
    )


BLOBS = blob(0, 1).schema


@pytest.fixture(params=["memory", "quic", "draft"])
def carrier(request):
    return request.param


def hundredfold_and_sort(**options):
    service = aqueduct.Service("test", **options)

    @service.handler("hundredfold")
    def hundredfold(batches):
        for batch in batches:
            for _ in range(100):
                yield batch

    @service.handler("async hundredfold")
    async def async_hundredfold(batches, call):
        async for batch in batches:
            for _ in range(100):
                yield batch

    @service.handler("sort")
    def sort(batches, call):
        table = pa.Table.from_batches(batches, schema=call.schema)
        yield from table.sort_by([("id", "descending")]).to_batches(max_chunksize=1)

    @service.handler("async sort")
    async def async_sort(batches, call):
        table = pa.Table.from_batches([batch async for batch in batches], schema=call.schema)
        for batch in table.sort_by([("id", "descending")]).to_batches(max_chunksize=1):
            yield batch

    @service.handler("filter")
    def filter_(batches, call):
        for batch in batches:
            if batch["id"][0].as_py() % 7 == 0:
                yield batch

    return service


@pytest.mark.requirement("AC-33")
@pytest.mark.parametrize("handler", ["hundredfold", "async hundredfold"])
@pytest.mark.parametrize("in_flight", [1, 3])
async def test_a_hundred_answers_to_each_batch(carrier, handler, in_flight):
    async with connected(hundredfold_and_sort(config=NARROW), carrier) as client:
        batches = [blob(n, 4 * KiB) for n in range(10)]
        answers = await everything(client.exchange(handler, batches, in_flight=in_flight))
    assert [answer["id"][0].as_py() for answer in answers] == [n // 100 for n in range(1000)]


@pytest.mark.requirement("AC-35")
@pytest.mark.parametrize("handler", ["sort", "async sort", "filter"])
@pytest.mark.parametrize("in_flight", [1, 3])
async def test_no_answer_before_the_end(carrier, handler, in_flight):
    async with connected(hundredfold_and_sort(config=NARROW), carrier) as client:
        batches = [blob(n, 4 * KiB) for n in range(100)]
        answers = await everything(client.exchange(handler, batches, in_flight=in_flight))
    wanted = range(0, 100, 7) if handler == "filter" else range(99, -1, -1)
    assert [answer["id"][0].as_py() for answer in answers] == list(wanted)


@pytest.mark.parametrize("handler", ["hundredfold", "async hundredfold"])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_hundred_answers_to_each_batch_for_a_sync_client(handler, in_flight):
    with sync_client(hundredfold_and_sort(config=NARROW)) as client:
        batches = (blob(n, 4 * KiB) for n in range(10))
        stream = client.exchange(handler, batches, schema=BLOBS, in_flight=in_flight)
        numbers_seen = [answer["id"][0].as_py() for answer in stream]
    assert numbers_seen == [n // 100 for n in range(1000)]


@pytest.mark.parametrize("handler", ["sort", "async sort", "filter"])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_no_answer_before_the_end_for_a_sync_client(handler, in_flight):
    with sync_client(hundredfold_and_sort(config=NARROW)) as client:
        batches = (blob(n, 4 * KiB) for n in range(100))
        stream = client.exchange(handler, batches, schema=BLOBS, in_flight=in_flight)
        numbers_seen = [answer["id"][0].as_py() for answer in stream]
    wanted = range(0, 100, 7) if handler == "filter" else range(99, -1, -1)
    assert numbers_seen == list(wanted)


def test_sinks_of_any_appetite():
    service = aqueduct.Service("test", config=NARROW)
    service.handler("all", kind="sink")(lambda batches: {"n": sum(1 for _ in batches)})
    service.handler("none", kind="sink")(lambda batches: {"n": 0})
    with sync_client(service) as client:
        batches = [blob(n, 40 * KiB) for n in range(50)]
        assert client.sink("all", batches, in_flight=1)["n"] == 50
        assert client.sink("none", batches)["n"] == 0


class Counting:
    """An input that knows how far it was read."""

    def __init__(self, batch, count=100_000):
        self.batch, self.count, self.pulled = batch, count, 0

    def __iter__(self):
        for _ in range(self.count):
            self.pulled += 1
            yield self.batch

    async def __aiter__(self):
        for batch in self:
            yield batch


async def settled(counter):
    """What ``counter`` says once it says the same for a while."""
    last, same = None, 0
    while same < 10:
        await asyncio.sleep(0.02)
        now = counter()
        last, same = now, same + 1 if now == last else 0
    return last


@pytest.mark.parametrize("handler", ["function", "generator", "async generator"])
@pytest.mark.parametrize("form", ["iterable", "async iterable"])
async def test_no_more_than_in_flight_is_sent_and_not_answered(carrier, handler, form):
    release = threading.Event()
    service = aqueduct.Service("test")

    @service.handler("function")
    def function(batch):
        release.wait(30)
        return batch

    @service.handler("generator")
    def generator(batches):
        for batch in batches:
            release.wait(30)
            yield batch

    @service.handler("async generator")
    async def async_generator(batches, call):
        async for batch in batches:
            await until(release.is_set)
            yield batch

    source = Counting(numbers(1), 200)
    async with connected(service, carrier) as client:
        batches = source if form == "async iterable" else iter(source)
        stream = client.exchange(handler, batches, schema=NUMBERS, in_flight=5)
        try:
            reading = asyncio.ensure_future(everything(stream))
            assert await settled(lambda: source.pulled) == 5
        finally:
            release.set()
        assert len(await reading) == 200


@pytest.mark.parametrize(
    ("size", "settings", "expected"),
    [
        (100, {}, 64),
        (100 * KiB, {}, 21),  # the last makes two MiB of them
        (100 * KiB, {"small_bytes": 1 << 20}, 11),
        (300 * KiB, {}, 8),
        (100, {"small_bytes": 0}, 8),
        (100, {"small_batches": 20}, 20),
        (100, {"small_batches": 1}, 8),
        (10_000, {"in_flight_bytes": 35_000}, 4),
    ],
)
async def test_there_may_be_more_of_small_batches_unless_told_otherwise(
    carrier, size, settings, expected
):
    release = asyncio.Event()
    service = holding(release)

    async with connected(service, carrier, client_config=config(calls=settings)) as client:
        source = Counting(blob(1, size), 100)
        reading = asyncio.ensure_future(everything(client.exchange("hold", source, schema=BLOBS)))
        assert await settled(lambda: source.pulled) == expected
        release.set()
        assert len(await reading) == 100


async def test_the_bytes_in_flight_count_too(carrier):
    release = asyncio.Event()
    service = holding(release)

    source = Counting(blob(1, 10_000), 50)
    async with connected(service, carrier) as client:
        stream = client.exchange(
            "hold", source, schema=BLOBS, in_flight=1000, in_flight_bytes=35_000
        )
        assert await settled(lambda: source.pulled) == 4
        release.set()
        assert len(await everything(stream)) == 50
        # One batch may always be under way, however large.
        source = Counting(blob(1, 100_000), 3)
        stream = client.exchange("hold", source, schema=BLOBS, in_flight_bytes=1)
        assert len(await everything(stream)) == 3


@pytest.mark.parametrize("handler", ["generator", "coroutine"])
async def test_a_sink_is_held_back_by_bytes_unless_told_otherwise(carrier, handler):
    release = threading.Event()
    service = aqueduct.Service("test")

    @service.handler("generator", kind="sink")
    def generator(batches):
        release.wait(30)
        return {"n": sum(1 for _ in batches)}

    @service.handler("coroutine", kind="sink")
    async def coroutine(batches):
        await until(release.is_set)
        return {"n": len([batch async for batch in batches])}

    narrow = config(calls={"in_flight_bytes": 95_000})
    async with connected(service, carrier, client_config=narrow) as client:
        for wanted, in_flight in ((10, None), (3, 3)):
            release.clear()
            source = Counting(blob(1, 10_000), 200)
            sink = asyncio.ensure_future(
                client.sink(handler, source, schema=BLOBS, in_flight=in_flight)
            )
            assert await settled(lambda source=source: source.pulled) == wanted
            release.set()
            assert (await sink)["n"] == 200


async def test_marks_of_a_sink_wake_the_sending_task_alone(carrier, monkeypatch):
    service = aqueduct.Service("test")

    @service.handler("count", kind="sink")
    async def count(batches):
        return {"n": len([batch async for batch in batches])}

    waits = marks = 0
    call: Any = vars(call_module)["ClientCall"]
    wait = call.wait_answer
    answers: Any = vars(call_module)["AnswerReceiver"]

    def waited(self):
        nonlocal waits
        waits += 1
        return wait(self)

    class Marked(answers):
        def heard(self):
            nonlocal marks
            before = self.moved
            super().heard()
            marks += self.moved - before

    monkeypatch.setattr(call, "wait_answer", waited)
    monkeypatch.setattr(call_module, "AnswerReceiver", Marked)
    narrow = config(calls={"in_flight_bytes": 95_000})
    async with connected(service, carrier, client_config=narrow) as client:
        source = (blob(number, 10_000) for number in range(200))
        assert (await client.sink("count", source, schema=BLOBS))["n"] == 200
    assert marks >= 10
    assert waits <= 3  # for the accept message, and the end


@pytest.mark.parametrize("handler", ["generator", "async generator"])
async def test_a_consumer_that_stops_reading_holds_the_source_back(carrier, handler):
    service = aqueduct.Service("test", config=NARROW)
    yielded = 0

    @service.handler("generator", kind="source", output=BLOBS)
    def generator(call):
        nonlocal yielded
        while True:
            yielded += 1
            yield blob(yielded, 10 * KiB)

    @service.handler("async generator", kind="source", output=BLOBS)
    async def async_generator(call):
        nonlocal yielded
        while True:
            yielded += 1
            yield blob(yielded, 10 * KiB)

    async with connected(service, carrier) as client:
        stream = client.source(handler)
        assert (await anext(stream))["id"][0].as_py() == 1
        ahead = await settled(lambda: yielded)
        in_hand = AHEAD if handler == "generator" else 0
        assert 3 <= ahead <= WINDOWS + in_hand + 4
        for number in range(2, 60):
            assert (await anext(stream))["id"][0].as_py() == number
        assert await settled(lambda: yielded) <= 60 + ahead
        await stream.aclose()


@pytest.mark.parametrize("handler", ["function", "generator", "async generator"])
async def test_a_consumer_that_stops_reading_holds_an_exchange_back(carrier, handler):
    service = aqueduct.Service("test", config=NARROW)
    service.handler("function", concurrency=2)(lambda batch: batch)

    @service.handler("generator")
    def generator(batches):
        yield from batches

    @service.handler("async generator")
    async def async_generator(batches, call):
        async for batch in batches:
            yield batch

    source = Counting(blob(1, 10 * KiB), 300)
    async with connected(service, carrier) as client:
        # So many in flight that only the windows of the channels are left to hold it back.
        stream = client.exchange(
            handler, source, schema=BLOBS, in_flight=10_000, in_flight_bytes=1 << 30
        )
        await stream.opened()
        assert await settled(lambda: source.pulled) <= 2 * (WINDOWS + AHEAD + 4)
        assert len(await everything(stream)) == 300


def test_a_sync_consumer_that_stops_reading_holds_the_source_back():
    service = aqueduct.Service("test", config=NARROW)
    yielded = 0

    @service.handler("source", kind="source", output=BLOBS)
    def source(call):
        nonlocal yielded
        while True:
            yielded += 1
            yield blob(yielded, 10 * KiB)

    with sync_client(service) as client, client.source("source") as stream:
        assert next(stream)["id"][0].as_py() == 1
        ahead = asyncio.run(settled(lambda: yielded))
        assert ahead <= WINDOWS + 2 * AHEAD + 4  # before the one thread, and before the other
        for number in range(2, 60):
            assert next(stream)["id"][0].as_py() == number


def test_a_sync_client_sends_one_and_waits_for_its_answer_if_told_so():
    service = aqueduct.Service("test")
    service.handler("echo")(lambda batch: batch)
    answered = [0]

    def dialogue():
        for number in range(20):
            assert answered[-1] == number  # the answer to the one before is here
            yield numbers(number + 1)

    with sync_client(service) as client:
        for answer in client.exchange("echo", dialogue(), schema=NUMBERS, in_flight=1):
            answered.append(answer["id"][0].as_py())  # noqa: PERF401
    assert answered == list(range(21))


async def test_a_handler_that_does_not_take_holds_the_client_back(carrier):
    release = asyncio.Event()
    service = aqueduct.Service("test", config=NARROW)

    @service.handler("sink", kind="sink")
    async def sink(batches, call):
        await release.wait()
        return {"n": sum([1 async for _ in batches])}

    source = Counting(blob(1, 10 * KiB), 100)
    async with connected(service, carrier) as client:
        sending = asyncio.ensure_future(
            client.sink("sink", source, schema=BLOBS, in_flight=10_000, in_flight_bytes=1 << 30)
        )
        assert await settled(lambda: source.pulled) <= WINDOWS + 4
        release.set()
        assert (await sending)["n"] == 100


async def test_one_slow_call_does_not_starve_another(carrier):
    release = asyncio.Event()
    service = aqueduct.Service("test", config=NARROW)

    @service.handler("hold")
    async def hold(batches, call):
        await release.wait()
        async for batch in batches:
            yield batch

    service.handler("echo")(lambda batch: batch)
    async with connected(service, carrier) as client:
        held = [
            client.exchange("hold", Counting(blob(n, 10 * KiB), 40), schema=BLOBS, in_flight=40)
            for n in range(3)
        ]
        for stream in held:
            await stream.opened()
        batches = [blob(n, 10 * KiB) for n in range(40)]
        assert await everything(client.exchange("echo", batches)) == batches
        release.set()
        assert [len(await everything(stream)) for stream in held] == [40] * 3


async def test_concurrency_is_kept_and_answers_are_put_in_order(carrier):
    lock, at_work, most = threading.Lock(), 0, 0
    all_there = threading.Barrier(4, timeout=20)
    service = aqueduct.Service("test")

    @service.handler("function", concurrency=4)
    def function(batch):
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        number = batch["id"][0].as_py()
        if number < 4:
            all_there.wait()  # breaks unless four are worked on at once
        with lock:
            at_work -= 1
        return numbers(number * 2)

    async with connected(service, carrier) as client:
        batches = [numbers(n) for n in range(40)]
        answers = await everything(client.exchange("function", batches, in_flight=40))
    assert values(answers) == [[2 * n] for n in range(40)]
    assert most == 4


async def test_a_slow_batch_is_waited_for_with_few_others_done():
    release, done = threading.Event(), []
    service = aqueduct.Service("test")

    @service.handler("function", concurrency=2)
    def function(batch):
        number = batch["id"][0].as_py()
        if number == 0:
            release.wait(30)
        done.append(number)
        return batch

    base = pa.array(range(MiB // 8), pa.int64())
    batches = [pa.record_batch({"id": pc.add(base, n)}, schema=NUMBERS) for n in range(30)]
    async with connected(service) as client:
        stream = client.exchange("function", batches, in_flight=30)
        reading = asyncio.ensure_future(everything(stream))
        assert await settled(lambda: len(done)) == 3  # twice the concurrency, less the slow one
        release.set()
        assert len(await reading) == 30
