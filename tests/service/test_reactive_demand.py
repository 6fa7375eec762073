"""A credit is a batch: handlers go as far as clients ask, and no further than memory allows."""

from __future__ import annotations

import asyncio
import threading

import pyarrow as pa
import pytest

import aqueduct
from aqueduct._speedups.reactivesocket import reactive_frames as frames
from tests.reactivesocket.pairs import frame, within
from tests.service.reactive_clients import TCP, WORDS, asked, asking, by_hand, rows_of, words
from tests.support.calls import config, until

ALL = 2**63 - 1
BYTES = pa.schema([("data", pa.binary())])


def counting(form: str, end: int = 1000):
    """A service with a source that notes how far it was stepped."""
    service = aqueduct.Service("counting")
    steps: list[int] = []
    if form == "async":

        @service.handler("count", kind="source", output=WORDS)
        async def count():
            for number in range(end):
                steps.append(number)
                yield words(str(number))
    else:

        @service.handler("count", kind="source", output=WORDS)
        def count():
            for number in range(end):
                steps.append(number)
                yield words(str(number))

    return service, steps


async def items(peer, count):
    return [(await peer.read())[3] for _ in range(count)]


@pytest.mark.parametrize("kind", [frames.REQUEST_STREAM, frames.REQUEST_SUB])
@pytest.mark.parametrize("form", ["async", "thread"])
async def test_a_generator_is_stepped_as_far_as_the_client_asked(form, kind):
    service, steps = counting(form)
    async with service.serving(TCP, drain=0) as running, by_hand(running) as peer:
        peer.say(frame(kind, 1, asked("count"), n=0))
        peer.say(frame(frames.REQUEST_STREAM, 3, asked("count"), n=2))
        found = await items(peer, 2)
        assert rows_of(*found) == [["0"], ["1"]]
        await asyncio.sleep(0.05)
        assert steps == [0, 1]  # of the second alone: the first asked for nothing
        peer.say(frame(frames.REQUEST_N, 3, n=3))
        found += await items(peer, 3)
        peer.say(frame(frames.REQUEST_N, 3, n=1))
        peer.say(frame(frames.REQUEST_N, 3, n=1))
        found += await items(peer, 2)
        await asyncio.sleep(0.05)
        assert steps == list(range(7))
        assert [row[0] for row in rows_of(*found)] == [str(number) for number in range(7)]
        peer.say(frame(frames.REQUEST_N, 1, n=1))
        assert rows_of(*await items(peer, 1)) == [["0"]]
        await asyncio.sleep(0.05)
        assert steps == [*range(7), 0]
        peer.say(frame(frames.CANCEL, 1) + frame(frames.CANCEL, 3))
        await until(lambda: not running.calls)
        assert running.counters()["cancelled"] == 2


@pytest.mark.parametrize("form", ["async", "thread"])
async def test_a_stream_that_asked_for_more_than_there_is_completes(form):
    service, steps = counting(form, end=3)
    async with service.serving(TCP, drain=0) as running, by_hand(running) as peer:
        peer.say(frame(frames.REQUEST_STREAM, 1, asked("count"), n=4))
        await items(peer, 3)
        kind, flags, stream, data = await peer.read()
        assert (kind, flags & frames.COMPLETE, stream, data) == (
            frames.RESPONSE,
            frames.COMPLETE,
            1,
            b"",
        )
        assert steps == [0, 1, 2]


@pytest.mark.parametrize("form", ["coroutine", "function"])
async def test_a_function_is_not_called_before_its_answer_is_asked_for(form):
    service = aqueduct.Service("one")
    called = []
    if form == "coroutine":

        @service.handler("echo", input=WORDS)
        async def echo(batch):
            called.append(1)
            return batch
    else:

        @service.handler("echo", input=WORDS)
        def echo(batch):
            called.append(1)
            return batch

    async with service.serving(TCP, drain=0) as running, by_hand(running) as peer:
        peer.say(frame(frames.REQUEST_STREAM, 1, asked("echo", words("a")), n=0))
        await until(lambda: running.calls)
        await asyncio.sleep(0.05)
        assert not called
        peer.say(frame(frames.REQUEST_N, 1, n=1))
        _, flags, _, data = await peer.read()
        assert flags & frames.COMPLETE
        assert rows_of(data) == [["a"]]


@pytest.mark.parametrize("form", ["async", "thread"])
async def test_who_asks_for_all_and_stops_reading_costs_what_flow_allows(form):
    settings = config(flow={"channel_high_water": 1 << 20, "connection_high_water": 4 << 20})
    service = aqueduct.Service("much", config=settings)
    made = []
    batch = pa.record_batch({"data": [bytes(64 << 10)]}, schema=BYTES)
    if form == "async":

        @service.handler("much", kind="source", output=BYTES)
        async def much():
            while True:
                made.append(1)
                yield batch
    else:

        @service.handler("much", kind="source", output=BYTES)
        def much():
            while True:
                made.append(1)
                yield batch

    async with service.serving(TCP, drain=0) as running, by_hand(running) as peer:
        peer.say(frame(frames.REQUEST_STREAM, 1, asked("much"), n=ALL))
        before = -1
        while before != len(made):
            before = len(made)
            await asyncio.sleep(0.2)
        held = running.state()["connections"][0]["queued_bytes"]
        assert held <= (1 << 20) + 20 * (64 << 10)
        assert running.memory()["sending_bytes"] <= 8 << 20
        for _ in range(before + 10):  # it goes on where it stopped
            await within(peer.read())
        assert len(made) > before


async def test_one_stream_that_is_not_read_holds_up_no_other():
    service, _ = counting("async")
    async with service.serving(TCP, drain=0) as running, by_hand(running) as peer:
        for stream in range(1, 101, 2):
            peer.say(frame(frames.REQUEST_STREAM, stream, asked("count"), n=0))
        peer.say(frame(frames.REQUEST_STREAM, 201, asked("count"), n=1))
        assert (await peer.read())[2] == 201
        assert len(running.calls) == 51


async def test_a_client_may_take_its_time_and_a_handler_may_not():
    settings = config(timing={"progress_deadline": 0.3})
    service = aqueduct.Service("slow", config=settings)

    @service.handler("quiet", kind="source", output=WORDS)
    async def quiet():
        yield words("a")
        await asyncio.sleep(20)

    async with service.serving(TCP, drain=0) as running, by_hand(running) as peer:
        peer.say(frame(frames.REQUEST_SUB, 1, asked("quiet"), n=5))
        await peer.read()
        peer.say(frame(frames.REQUEST_STREAM, 3, asked("quiet"), n=1))
        await peer.read()
        await asyncio.sleep(0.8)
        assert len(running.calls) == 2  # a quiet subscription, and a client that asks for no more
        peer.say(frame(frames.REQUEST_N, 3, n=1))
        text = await peer.error(3)
        assert "deadline-exceeded: handler 'quiet' neither took nor yielded a batch" in text


@pytest.mark.parametrize("form", ["async", "thread"])
async def test_a_stream_that_asks_for_no_more_ends_in_time_and_a_subscription_does_not(form):
    service, _ = counting(form)
    service.config = config(timing={"progress_deadline": 0.4}, reactivesocket={"idle_demand": 1.5})
    async with service.serving(TCP, drain=0) as running, by_hand(running) as peer:
        peer.say(frame(frames.REQUEST_SUB, 1, asked("count"), n=1))
        await items(peer, 1)
        peer.say(frame(frames.REQUEST_STREAM, 3, asked("count"), n=1))
        for _ in range(10):  # one that asks now and then goes on
            await items(peer, 1)
            await asyncio.sleep(0.2)
            peer.say(frame(frames.REQUEST_N, 3, n=1))
        await items(peer, 1)
        text = await peer.error(3)
        assert "deadline-exceeded: the client asked handler 'count' for no more items" in text
        assert "for 1.5 s (ReactiveSocket.idle_demand)" in text
        await until(lambda: len(running.calls) == 1)
        peer.say(frame(frames.REQUEST_N, 1, n=1))
        await items(peer, 1)


async def test_who_reads_no_answer_is_given_up():
    settings = config(
        flow={"connection_high_water": 64 << 10}, reactivesocket={"unsent_answers": 50}
    )
    service = aqueduct.Service("small", config=settings)

    @service.handler("echo", input=WORDS)
    async def echo(batch):
        return batch

    other = words("x" * 3000)
    async with service.serving(TCP, drain=0) as running, by_hand(running) as peer:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        request, wrong = asked("echo", other), asked("nothing", other)
        stream = 1
        with pytest.raises(ConnectionError):
            while stream < 200_000:
                for data in (request, wrong):
                    peer.say(frame(frames.REQUEST_RESPONSE, stream, data))
                    stream += 2
                await within(peer.writer.drain())
        await until(lambda: not running.connections)
        await until(lambda: not running.calls)
        async with by_hand(running) as again:
            again.say(frame(frames.REQUEST_RESPONSE, 1, request))
            assert rows_of((await again.read())[3]) == [["x" * 3000]]


@pytest.mark.parametrize("form", ["coroutine", "function", "async generator", "generator"])
async def test_large_batches_go_there_and_back(form):
    service = aqueduct.Service("large", config=config(flow={"process_send_budget": 4 << 20}))
    if form == "coroutine":

        @service.handler("echo", input=BYTES)
        async def echo(batch):
            return batch
    elif form == "function":

        @service.handler("echo", input=BYTES)
        def echo(batch):
            return batch
    elif form == "async generator":

        @service.handler("echo", input=BYTES)
        async def echo(batches):
            async for batch in batches:
                for _ in range(5):
                    yield batch
    else:

        @service.handler("echo", input=BYTES)
        def echo(batches):
            for batch in batches:
                for _ in range(5):
                    yield batch

    batch = pa.record_batch({"data": [bytes(1 << 20)] * 3}, schema=BYTES)
    async with asking(service) as (running, client):
        for _ in range(3):
            if "generator" in form:
                count = 0
                async with client.stream(asked("echo", batch), n=3) as stream:
                    async for item in stream:
                        count += 1
                        if count == 1:
                            assert rows_of(item.data) == [batch["data"].to_pylist()]
                assert count == 5
            else:
                item = await client.request(asked("echo", batch))
                assert rows_of(item.data) == [batch["data"].to_pylist()]
                item.release()
        await until(lambda: not running.calls)
        await until(lambda: running.state()["connections"][0]["held_bytes"] == 0)


@pytest.mark.parametrize("kind", [frames.REQUEST_RESPONSE, frames.REQUEST_STREAM])
@pytest.mark.parametrize("form", ["coroutine", "function"])
async def test_answers_that_are_not_read_count_and_keep_handlers_from_making_more(form, kind):
    budget, size, count = 8 << 20, 1 << 20, 40
    flow = {"process_send_budget": budget, "connection_high_water": 2 << 20}
    service = aqueduct.Service("large", config=config(flow=flow))
    made = []
    answer = pa.record_batch({"data": [bytes(size)]}, schema=BYTES)
    if form == "coroutine":

        @service.handler("large", input=WORDS, output=BYTES)
        async def large(batch):
            made.append(1)
            return answer
    else:

        @service.handler("large", input=WORDS, output=BYTES)
        def large(batch):
            made.append(1)
            return answer

    request = asked("large", words("a"))
    demand = {} if kind == frames.REQUEST_RESPONSE else {"n": 1}
    async with service.serving(TCP, drain=0) as running, by_hand(running) as peer:
        peer.say(frame(kind, 1, request, **demand))
        assert rows_of((await peer.read())[3]) == [answer["data"].to_pylist()]
        await until(lambda: running.memory()["sending_bytes"] == 0)
        made.clear()
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for stream in range(3, 3 + 2 * count, 2):
            peer.say(frame(kind, stream, request, **demand))
        await until(lambda: len(running.calls) + len(made) >= count)
        before = -1
        while before != len(made):
            before = len(made)
            await asyncio.sleep(0.2)
        sending = running.memory()["sending_bytes"]
        assert (len(made) - 6) * size <= sending <= budget + size  # 6 are in buffers of sockets
        assert len(made) < count
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(count):
            await within(peer.read())
        await until(lambda: not running.calls)
        await until(lambda: running.memory()["sending_bytes"] == 0)


@pytest.mark.parametrize("form", ["coroutine", "function"])
async def test_an_answer_whose_client_has_gone_counts_no_more(form):
    flow = {"process_send_budget": 8 << 20, "connection_high_water": 2 << 20}
    service = aqueduct.Service("large", config=config(flow=flow))
    free, free_at_loop = threading.Event(), asyncio.Event()

    def answer():
        return pa.record_batch({"data": [bytes(1 << 20)]}, schema=BYTES)

    # How large answers are is not known before the first.
    if form == "coroutine":

        @service.handler("large", input=WORDS, output=BYTES)
        async def large(batch):
            await free_at_loop.wait()
            return answer()
    else:

        @service.handler("large", input=WORDS, output=BYTES)
        def large(batch):
            free.wait(20)
            return answer()

    async with service.serving(TCP, drain=0) as running:
        async with by_hand(running) as peer:
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for stream in range(1, 81, 2):
                request = asked("large", words("a"))
                peer.say(frame(frames.REQUEST_RESPONSE, stream, request))
            await until(lambda: len(running.calls) == 40)
            free.set()
            free_at_loop.set()
            await until(lambda: running.memory()["sending_bytes"] > 30 << 20)
        await until(lambda: not running.calls)
        await until(lambda: running.memory()["sending_bytes"] == 0)


@pytest.mark.parametrize("form", ["async", "thread"])
async def test_an_answer_without_a_batch_is_the_schema_where_an_item_was_asked_for(form):
    service, _ = counting(form, end=0)
    async with asking(service) as (_, client):
        async with client.stream(asked("count"), n=2) as stream:
            found = [bytes(item.data) async for item in stream]
        assert len(found) == 1
        with pa.ipc.open_stream(found[0]) as reader:
            assert reader.schema == WORDS
            assert list(reader) == []
        async with client.stream(asked("count", format="json"), n=2) as stream:
            assert [item async for item in stream] == []
