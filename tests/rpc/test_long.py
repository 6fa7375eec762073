"""Work on one message that takes long: it goes to threads, and the event loop answers others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.ipc import LONG_SCHEMA, is_wide, serialize_schema
from aqueduct.client.unary import UnaryCaller
from aqueduct.config import Calls, Config
from aqueduct.errors import BadCall, Cancelled, DeadlineExceeded, SchemaMismatch
from aqueduct.rpc import threads
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.threads import Job, apart, at_work
from tests.support.calls import NUMBERS, numbers, serving, sync_client
from tests.support.endpoints import eventually

COLUMNS = 2000
WIDE = pa.schema([(f"a column with a name, number {n}", pa.int64()) for n in range(COLUMNS)])
PATIENCE = 60  # seconds


def wide(*rows):
    return pa.RecordBatch.from_arrays([pa.array(rows, pa.int64())] * COLUMNS, schema=WIDE)


def dictionary(seed=1, size=5 << 20):
    """A batch that takes long because of its dictionary."""
    text = random.Random(seed).randbytes(size // 2).hex()
    values = pa.array([text[: size // 2], text[size // 2 :]])
    array = pa.DictionaryArray.from_arrays(pa.array([seed % 2, 1, 0], pa.int8()), values)
    return pa.record_batch([array], ["word"])


def views(rows, text="a text that is longer than twelve bytes"):
    array = pa.array([f"{text} {n}" for n in range(rows)], pa.string_view())
    return pa.record_batch([array], ["v"])


@pytest.fixture(params=["memory", "quic"])
def carrier(request):
    return request.param


def make():
    service = aqueduct.Service("long")

    @service.handler("function")
    def function(batch):
        return batch

    @service.handler("concurrent", concurrency=4)
    def concurrent(batch):
        return batch

    @service.handler("coroutine", concurrency=2)
    async def coroutine(batch):
        return batch

    @service.handler("generator")
    def generator(batches):
        yield from batches

    @service.handler("async generator")
    async def async_generator(batches):
        async for batch in batches:
            yield batch

    @service.handler("impatient")
    async def impatient(batches):
        """Gives up waiting for its next batch again and again, and loses none."""
        while True:
            waiting = asyncio.ensure_future(anext(batches, None))
            await asyncio.sleep(0)
            waiting.cancel()
            try:
                batch = await waiting
            except asyncio.CancelledError:
                batch = await anext(batches, None)
            if batch is None:
                return
            yield batch

    @service.handler("halves", output=NUMBERS)
    async def halves(batches):
        async for batch in batches:
            half = numbers(*range(batch["id"][0].as_py()))
            yield half
            yield half

    @service.handler("wide", input=WIDE, output=WIDE)
    async def wide_handler(batch):
        return batch

    @service.handler("wide source", kind="source", output=WIDE)
    async def source():
        yield wide(1)

    @service.handler("count", kind="sink")
    async def count(batches):
        rows = 0
        async for batch in batches:
            rows += batch.num_rows
        return {"rows": rows}

    return service


@contextlib.asynccontextmanager
async def both(carrier):
    """A client, and what serves it."""
    service = make()
    async with serving(service, carrier) as running:
        address = running.addresses[0]
        async with await aqueduct.Client.connect(address, config=service.config) as client:
            yield client, running


SHAPES = ["function", "concurrent", "coroutine", "generator", "async generator", "impatient"]


class Gate:
    """Keeps all threads for long work busy, and lets what waits for them through in rounds."""

    def __init__(self):
        self._events = []

    async def close(self):
        """Returns when no thread is left; what was given to them before is done, or being done."""
        event, arrived = threading.Event(), []
        loop = asyncio.get_running_loop()
        all_busy = asyncio.Event()
        count = at_work()

        def keep():
            arrived.append(1)
            if len(arrived) == count:
                loop.call_soon_threadsafe(all_busy.set)
            assert event.wait(PATIENCE)

        jobs = [Job(keep) for _ in range(count)]
        self.open()
        self._events.append(event)
        async with asyncio.timeout(PATIENCE):
            await all_busy.wait()
        assert jobs

    def open(self):
        """Whoever waits goes on."""
        for event in self._events:
            event.set()
        self._events.clear()


@contextlib.asynccontextmanager
async def gate():
    found = Gate()
    await found.close()
    try:
        yield found
    finally:
        found.open()


async def rounds(call, client):
    """How many pieces of work one call gave to threads, at least one after the other.

    In each round another call of the same client is answered while the long one is under way.
    """
    async with asyncio.timeout(PATIENCE), gate() as closed:
        task = asyncio.ensure_future(call)
        for count in itertools.count():
            for _ in range(3):
                assert (await client.call("coroutine", numbers(count))).equals(numbers(count))
            if task.done():
                return count, task.result()
            await closed.close()
    raise AssertionError


async def all_of(stream):
    return [batch async for batch in stream]


async def test_calls_with_very_many_columns_leave_the_loop_to_others(carrier):
    async with both(carrier) as (client, _):
        batch = wide(1, 2)
        # Encoding, reading the schema, two comparisons of schemas, decoding and encoding in the
        # service, reading the answer.
        count, answer = await rounds(client.call("wide", batch, output_schema=WIDE), client)
        assert answer.equals(batch) and count >= 5


@pytest.mark.parametrize("handler", ["function", "coroutine", "async generator"])
async def test_streams_with_very_many_columns_leave_the_loop_to_others(carrier, handler):
    async with both(carrier) as (client, _):
        batch = wide(1, 2)
        stream = client.exchange(handler, [batch], output_schema=WIDE)
        count, answers = await rounds(all_of(stream), client)
        assert answers == [batch] and count >= 5


async def test_sources_with_very_many_columns_leave_the_loop_to_others(carrier):
    async with both(carrier) as (client, _):
        count, answers = await rounds(all_of(client.source("wide source")), client)
        assert answers == [wide(1)] and count >= 2


@pytest.mark.parametrize("handler", ["function", "coroutine", "async generator"])
async def test_large_dictionaries_leave_the_loop_to_others(carrier, handler):
    async with both(carrier) as (client, _):
        batch = dictionary()
        count, answers = await rounds(all_of(client.exchange(handler, [batch])), client)
        assert answers == [batch] and count >= 4


async def test_a_call_with_a_large_dictionary_leaves_the_loop_to_others():
    async with both("memory") as (client, _):
        batch = dictionary()
        count, answer = await rounds(client.call("coroutine", batch), client)
        assert answer.equals(batch) and count >= 4


async def test_compressed_batches_leave_the_loop_to_others(carrier):
    async with both(carrier) as (client, _):
        await all_of(client.exchange("async generator", [numbers(1)], compression="zstd"))
        words = [f"{n}" for n in random.Random(1).sample(range(1 << 40), 100_000)]
        batch = pa.record_batch([pa.array(words)], ["x"])
        stream = client.exchange("async generator", [batch], compression="zstd")
        count, answers = await rounds(all_of(stream), client)
        assert answers == [batch] and count >= 4


@pytest.mark.parametrize("handler", ["function", "coroutine", "async generator"])
async def test_large_slices_leave_the_loop_to_others(carrier, handler):
    async with both(carrier) as (client, _):
        words = pa.array(["word"] * 1_100_000)
        batch = pa.record_batch([words], ["x"]).slice(1)
        # All offsets are made anew, here and there.
        stream = client.exchange(handler, [batch], deadline=PATIENCE)
        count, answers = await rounds(all_of(stream), client)
        assert answers == [batch] and count >= 1


async def test_answers_that_are_put_together_leave_the_loop_to_others():
    async with both("memory") as (client, _):
        count, answer = await rounds(client.call("halves", numbers(1 << 19)), client)
        assert answer.num_rows == 1 << 20 and count >= 1


async def test_descriptions_with_very_many_columns_leave_the_loop_to_others(carrier):
    async with both(carrier) as (client, _):
        count, description = await rounds(client.describe(), client)
        assert count >= 2
        found = {handler.name: handler.input for handler in description.handlers}
        assert found["wide"].equals(WIDE)


@pytest.mark.parametrize("handler", SHAPES)
async def test_batches_that_take_long_keep_their_place_among_others(carrier, handler):
    async with both(carrier) as (client, _):
        large = views(80_000)
        assert Encoder(large.schema).slow(large) and not Encoder(large.schema).slow(views(3))
        batches = [large, views(1), views(2), large.slice(9), large.slice(3, 0), views(3), large]
        async with asyncio.timeout(PATIENCE):
            assert await all_of(client.exchange(handler, batches)) == batches


@pytest.mark.parametrize("handler", SHAPES)
async def test_dictionaries_that_take_long_keep_their_order(handler):
    async with both("memory") as (client, _):
        first, second = dictionary(1), dictionary(2)
        batches = [first, first.slice(1), second, second.slice(2), first]
        async with asyncio.timeout(PATIENCE):
            assert await all_of(client.exchange(handler, batches)) == batches


async def test_an_async_iterable_may_give_batches_that_take_long():
    async def several():
        for start in range(3):
            yield wide(start)
            await asyncio.sleep(0)

    async with both("memory") as (client, _):
        stream = client.exchange("async generator", several(), schema=WIDE)
        async with asyncio.timeout(PATIENCE):
            assert await all_of(stream) == [wide(0), wide(1), wide(2)]
        counters = await client.sink("count", several(), schema=WIDE)
        assert counters["rows"] == 3


async def test_a_sync_client_sends_and_reads_very_many_columns():
    with sync_client(make()) as client:
        assert client.call("wide", wide(1)).equals(wide(1))
        assert list(client.exchange("generator", [wide(1), wide(2)])) == [wide(1), wide(2)]
        assert list(client.source("wide source")) == [wide(1)]


async def all_ended(running):
    await eventually(lambda: not running.calls)


@pytest.mark.parametrize("passed", [0, 1, 2, 3, 4, 5, 6, 7])
async def test_a_call_may_be_cancelled_while_a_thread_is_at_it(passed):
    async with both("memory") as (client, running):
        async with gate() as closed:
            calls = [
                asyncio.ensure_future(client.call("wide", wide(1))),
                asyncio.ensure_future(all_of(client.exchange("async generator", [wide(1)]))),
            ]
            for _ in range(passed):
                await client.call("coroutine", numbers(1))
                await closed.close()
            for call in calls:
                call.cancel()
            for call in calls:
                with contextlib.suppress(asyncio.CancelledError):
                    await call
            assert (await client.call("coroutine", numbers(1))).equals(numbers(1))
        await all_ended(running)
        assert (await client.call("wide", wide(1))).equals(wide(1))


@pytest.mark.parametrize("passed", [0, 2, 4])
async def test_deadlines_hold_while_a_thread_is_at_it(passed):
    async with both("memory") as (client, running):
        async with asyncio.timeout(PATIENCE), gate() as closed:
            stream = client.exchange("async generator", [wide(1)], deadline=1.0)
            call = asyncio.ensure_future(client.call("wide", wide(1), deadline=1.0))
            reading = asyncio.ensure_future(all_of(stream))
            for _ in range(passed):
                await client.call("coroutine", numbers(1))
                await closed.close()
            for each in (call, reading):
                with pytest.raises(DeadlineExceeded):
                    await each
        await all_ended(running)


async def test_a_stream_may_be_closed_while_its_answer_is_being_decoded():
    async with both("memory") as (client, running):
        stream = client.exchange("async generator", [wide(1)])
        async with asyncio.timeout(PATIENCE):
            await stream.opened()
            async with gate():
                reading = asyncio.ensure_future(anext(stream))
                await client.call("coroutine", numbers(1))
                await stream.aclose()
                with pytest.raises(Cancelled):
                    await reading
        await all_ended(running)


async def test_a_reader_that_is_cancelled_loses_no_answer_that_takes_long():
    async with both("memory") as (client, _):
        stream = client.exchange("async generator", [wide(n) for n in range(3)])
        found: list[pa.RecordBatch] = []
        async with asyncio.timeout(PATIENCE):
            while len(found) < 3:
                reading = asyncio.ensure_future(anext(stream))
                for _ in range(len(found) + 2):
                    await asyncio.sleep(0)
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    found.append(await reading)
                    continue
                found.append(await anext(stream))
        assert found == [wide(n) for n in range(3)]
        await stream.aclose()


async def test_errors_of_long_work_name_what_is_wrong(carrier):
    async with both(carrier) as (client, _):
        other = pa.RecordBatch.from_arrays(
            [pa.array([1.5])] * COLUMNS, names=[field.name for field in WIDE]
        )
        with pytest.raises(SchemaMismatch, match=r"input of handler 'wide': column .* number 0"):
            await client.call("wide", other)
        with pytest.raises(SchemaMismatch, match="the output of handler 'wide': column"):
            await client.call("wide", wide(1), output_schema=other.schema)
        with pytest.raises(SchemaMismatch, match="the input of handler 'function': column"):
            await all_of(client.exchange("function", [wide(1), other], schema=WIDE))
        assert (await client.call("wide", wide(1))).equals(wide(1))


async def test_a_wide_schema_that_is_damaged_is_refused(carrier):
    async with both(carrier) as (client, _):
        head = CallHead(handler="wide", kind="exchange", schema=WIDE)
        caller = UnaryCaller(client.connection, head, peer=client.address)
        prefix = bytearray(caller.template.prefix)
        prefix[2000:3000] = b"\xff" * 1000
        caller.template.prefix = bytes(prefix)
        encoded = Encoder(WIDE).encode(wide(1))
        with pytest.raises(BadCall, match="not a schema"):
            await client.link.ask(caller, encoded)
        assert (await client.call("wide", wide(1))).equals(wide(1))


async def test_only_what_takes_long_goes_to_threads():
    small = numbers(1)
    assert not Encoder(NUMBERS).slow(small) and not Decoder(NUMBERS).slow(b"x" * 1000)
    assert not Encoder(NUMBERS).slow("no batch at all")
    many = pa.record_batch([pa.array(range(1 << 20))], ["id"])
    assert not Encoder(many.schema).slow(many)
    long = Encoder(pa.schema([("x", pa.list_(pa.list_(pa.null())))]))
    inner = pa.ListArray.from_arrays(pa.array([0] * 1_200_001, pa.int32()), pa.nulls(0))
    outer = pa.ListArray.from_arrays(pa.array([1, 1_200_000], pa.int32()), inner)
    few_rows = pa.record_batch([outer], schema=long.schema)
    assert not long.slow(few_rows) and long.plain(few_rows) is not None
    inner = pa.ListArray.from_arrays(pa.array([1] * 1_200_001, pa.int32()), pa.nulls(1))
    outer = pa.ListArray.from_arrays(pa.array([1, 1_200_000], pa.int32()), inner)
    few_rows = pa.record_batch([outer], schema=long.schema)
    assert long.plain(few_rows) is None and long.lengthy and long.slow(few_rows)
    encoded = long.encode(few_rows)
    assert long.plain(numbers(1)) is None and not long.lengthy
    assert encoded.size > 4 << 20
    assert Encoder(many.schema).slow(many, "zstd")
    assert not Decoder(many.schema).slow(bytes(8 << 20))
    assert Decoder(many.schema, checks="full").slow(bytes(8 << 20))
    assert Decoder(many.schema, compressions=("zstd",)).slow(bytes(1 << 20))
    assert Encoder(WIDE).slow(wide(1)) and Decoder(WIDE).slow(b"x")
    assert is_wide(WIDE) and not is_wide(NUMBERS) and not is_wide(None)
    assert len(serialize_schema(WIDE)) >= LONG_SCHEMA


async def test_long_work_runs_in_a_few_threads_in_order():
    here, order = threading.get_ident(), []

    def work(number):
        order.append(number)
        return threading.get_ident()

    async with gate() as closed:
        jobs = [asyncio.ensure_future(apart(work, number)) for number in range(20)]
        forgotten = Job(lambda: order.append("never"))
        forgotten.forget()
        await asyncio.sleep(0)
        closed.open()
        found = await asyncio.gather(*jobs)
    assert here not in found and len(set(found)) <= at_work()
    assert sorted(order) == list(range(20))


async def test_what_long_work_raises_is_raised_where_it_is_waited_for():
    with pytest.raises(ZeroDivisionError):
        await apart(lambda: 1 // 0)


async def test_clients_and_services_say_how_many_threads_do_long_work(monkeypatch):
    """The largest Calls.work_threads of the process holds."""
    monkeypatch.setattr(threads, "_crew", threads._Crew("test-work", 1))
    one = Config(calls=Calls(work_threads=1))
    async with aqueduct.Service("one", config=one).serving("aqueduct+tcp://127.0.0.1:0") as running:
        assert at_work() == 1
        more = Config(calls=Calls(work_threads=3))
        async with await aqueduct.Client.connect(running.addresses[0], config=more):
            assert at_work() == 3
        async with await aqueduct.Client.connect(running.addresses[0], config=one):
            assert at_work() == 3
        busy, seen, gate = asyncio.Event(), [], threading.Event()
        loop = asyncio.get_running_loop()

        def work():
            seen.append(threading.get_ident())
            if len(seen) == 3:
                loop.call_soon_threadsafe(busy.set)
            assert gate.wait(PATIENCE)

        jobs = [asyncio.ensure_future(apart(work)) for _ in range(5)]
        async with asyncio.timeout(PATIENCE):
            await busy.wait()
        assert len(set(seen)) == len(seen) == 3  # the others wait
        gate.set()
        await asyncio.gather(*jobs)
        assert len(set(seen)) <= 3
