"""Calls of one batch: one message there and one back, or an exchange when these are too small."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.endpoint import serve
from aqueduct.errors import (
    BadCall,
    BatchTooLarge,
    Busy,
    DeadlineExceeded,
    HandlerFailed,
    LocalProtocolError,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from aqueduct.protocol.common.context import CLOSES
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.status import Status
from tests.support.calls import (
    NUMBERS,
    PAIRS,
    Watched,
    config,
    connected,
    numbers,
    serving,
    sync_client,
    until,
    values,
)
from tests.support.selection import mostly_long

WORDS = pa.schema([("word", pa.dictionary(pa.int32(), pa.string()))])
SHAPES = ("async generator", "generator", "coroutine", "function")
SMALL = config(calls={"unary_bytes": 2048})


@pytest.fixture(params=["memory", "quic", "draft"])
def carrier(request):
    return request.param


def shapes(seen=None, **options):
    """A service whose handlers echo, one for each shape; ``seen`` collects their calls."""
    service = aqueduct.Service("test", **options)
    seen = [] if seen is None else seen

    @service.handler("async generator")
    async def async_generator(batches, call):
        seen.append(call)
        async for batch in batches:
            yield batch

    @service.handler("generator")
    def generator(batches, call):
        seen.append(call)
        yield from batches

    @service.handler("coroutine")
    async def coroutine(batch, call):
        seen.append(call)
        return batch

    @service.handler("function")
    def function(batch, call):
        seen.append(call)
        return batch

    @service.handler("times", output=NUMBERS)
    async def times(batches, call):
        seen.append(call)
        async for batch in batches:
            for value in range(batch["id"][0].as_py()):
                yield numbers(*range(value, value + 100))

    @service.handler("times in a thread", output=NUMBERS)
    def times_in_a_thread(batches, call):
        seen.append(call)
        for batch in batches:
            for value in range(batch["id"][0].as_py()):
                yield numbers(*range(value, value + 100))

    return service


@pytest.mark.requirement("AC-55")
@pytest.mark.parametrize("handler", SHAPES)
async def test_a_batch_goes_there_and_one_comes_back(carrier, handler):
    service = shapes()
    async with connected(service, carrier) as client:
        for value in range(5):
            assert await client.call(handler, numbers(value)) == numbers(value)
        for schema in (NUMBERS, WORDS):  # dictionaries stand on those before, so not across calls
            batch = pa.record_batch(
                [pa.array([1] * 3 if schema is NUMBERS else ["a", "b", "a"]).cast(schema[0].type)],
                schema=schema,
            )
            for _ in range(3):
                assert await client.call(handler, batch) == batch
        await until(lambda: not service.counters()["open_calls"])
        counters = service.counters()
        assert counters["calls"] == 11
        assert counters["batches_in"] == counters["batches_out"] == 11
        assert counters["rows_in"] == counters["rows_out"] == 5 + 18
        assert counters["bytes_in"] > 0 and counters["bytes_out"] > 0
        assert not any(counters[name] for name in ("failed", "cancelled", "refused"))


async def test_it_opens_no_channel_but_the_oneshot_of_its_answer():
    service = shapes()
    begun = asyncio.Event()
    going = asyncio.Event()

    @service.handler("waits")
    async def waits(batch):
        begun.set()
        await going.wait()
        return batch

    async with connected(service) as client:
        task = asyncio.create_task(client.call("waits", numbers(1)))
        await begun.wait()
        assert client.connection.snapshot().channel_count == 2
        going.set()
        assert await task == numbers(1)


def noted(said, name, method):
    def noting(*arguments):
        said.append(name)
        return method(*arguments)

    return noting


@pytest.mark.parametrize("address", ["memory://unary-streams", "aqueduct+tcp://127.0.0.1:0"])
async def test_a_call_stops_no_stream_and_waits_with_its_close(address):
    """Two streams of bytes each, and no word about them but what later calls take along."""
    patient = config(timing={"ack_delay": 1.0})
    service = shapes(config=patient)
    async with (
        service.serving(address) as running,
        await aqueduct.Client.connect(running.addresses[0], config=patient) as client,
    ):
        (connection,) = running.connections
        said: list[str] = []
        for side, carrier in (
            ("client", client.connection.carrier),
            ("server", connection.carrier),
        ):
            for name in ("write", "stop", "reset"):
                setattr(carrier, name, noted(said, f"{side} {name}", getattr(carrier, name)))
        for _ in range(20):
            assert await client.call("coroutine", numbers(1)) == numbers(1)
        # The closes of a few calls leave together, those of the last ones later. (If the machine
        # stood still, each call but the first may have taken along the close of the last one.)
        assert 40 - CLOSES <= said.count("client write") <= 39
        assert said.count("server write") == 20
        assert set(said) == {"client write", "server write"}


async def test_the_end_of_a_call_is_acknowledged_with_the_next_chunk_or_a_little_later():
    """On byte streams: no packet of its own for it, and it does come."""
    async with (
        shapes().serving("aqueduct+tcp://127.0.0.1:0") as running,
        await aqueduct.Client.connect(running.addresses[0]) as client,
    ):
        await client.call("coroutine", numbers(1))
        await asyncio.sleep(0.1)
        (connection,) = running.connections
        carriers: list[Any] = [client.connection.carrier, connection.carrier]
        for carrier in carriers:
            assert carrier.streams.mux.idle
            assert not any(entity.end_out for entity in carrier.streams._senders.values())
        before = segments(carriers[0]._sock)
        await client.call("coroutine", numbers(1))
        assert segments(carriers[0]._sock) == before + 1


def segments(sock: socket.socket) -> int:
    """Segments with data that the kernel has sent (tcpi_data_segs_out)."""
    found = struct.unpack_from("I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160), 156)
    return int(found[0])


@pytest.mark.parametrize("handler", ["times", "times in a thread"])
async def test_none_several_and_many_answers(carrier, handler):
    service = shapes()
    async with connected(service, carrier) as client:
        none = await client.call(handler, numbers(0))
        assert (none.num_rows, none.schema) == (0, NUMBERS)
        table = await client.call_table(handler, numbers(0))
        assert (table.num_rows, table.schema) == (0, NUMBERS)
        assert (await client.call(handler, numbers(1)))["id"].to_pylist() == list(range(100))
        three = await client.call(handler, numbers(3))
        wanted = [*range(100), *range(1, 101), *range(2, 102)]
        assert three["id"].to_pylist() == wanted
        table = await client.call_table(handler, numbers(3))
        assert table.column("id").num_chunks == 3
        assert table["id"].to_pylist() == wanted
        many = await client.call_table(handler, numbers(1500))
        assert many.column("id").num_chunks == 1500
        assert many["id"][-1].as_py() == 1598


@pytest.mark.requirement("AC-61")
async def test_more_answers_than_one_message_may_hold_though_they_are_small(carrier):
    service = aqueduct.Service("test")

    @service.handler("rows", output=pa.schema([("id", pa.bool_())]))
    async def rows(batches):
        async for _ in batches:
            for _ in range(129):
                yield pa.record_batch([pa.array([True])], names=["id"])

    async with connected(service, carrier) as client:
        assert (await client.call_table("rows", numbers(1))).column("id").num_chunks == 129


@pytest.mark.requirement("AC-58")
@pytest.mark.parametrize("handler", SHAPES)
async def test_what_does_not_fit_travels_as_an_exchange(carrier, handler):
    seen: list[Any] = []
    service = shapes(seen, config=SMALL)
    # Around the limit of 2,048 bytes, a few times it, and beyond every window.
    sizes = [*range(180, 260, 4), 1000, 100_000]
    async with connected(service, carrier) as client:
        for size in sizes:
            batch = numbers(*range(size))
            assert await client.call(handler, batch, deadline=30) == batch
        await until(lambda: not service.counters()["open_calls"])
    assert len(seen) == len(sizes)


@pytest.mark.requirement("AC-55")
@pytest.mark.parametrize("handler", ["times", "times in a thread"])
async def test_a_large_answer_is_worked_out_once(carrier, handler):
    seen: list[Any] = []
    service = shapes(seen, config=SMALL)
    async with connected(service, carrier, headers={"a": "b"}) as client:
        for count in range(8):
            table = await client.call_table(handler, numbers(count), headers={"n": str(count)})
            assert table["id"].to_pylist() == [v for n in range(count) for v in range(n, n + 100)]
        await until(lambda: not service.counters()["open_calls"])
        assert [call.headers["n"] for call in seen] == [str(n) for n in range(8)]
        assert service.counters()["batches_out"] == sum(range(8))
        assert client.connection.snapshot().channel_count == 1


async def test_a_large_answer_of_a_slow_reader_is_held_back(carrier):
    """The answers follow on a channel with its windows; nothing gathers in the service."""
    service = aqueduct.Service("test")
    yielded = 0

    @service.handler("endless", output=NUMBERS)
    async def endless(batches):
        nonlocal yielded
        async for _ in batches:
            while True:
                yielded += 1
                yield numbers(*range(50_000))

    async with connected(service, carrier) as client:
        with pytest.raises(DeadlineExceeded):
            await client.call_table("endless", numbers(1), deadline=0.5)
        await until(lambda: not service.counters()["open_calls"])
        before = yielded
        await asyncio.sleep(0.05)
        assert yielded == before


async def test_what_the_handler_knows_of_its_call(carrier):
    seen: list[Any] = []
    service = shapes(seen)
    async with connected(service, carrier, token="one", headers={"who": "me"}) as client:
        await client.call(
            "coroutine",
            numbers(1),
            deadline=50,
            headers={"a": "b"},
            write_key="run",
            attempt="2",
            partition=aqueduct.Partition(1, 3),
        )
        await client.call("coroutine", numbers(1), token="other")
        await client.call("coroutine", numbers(1))
    call, other, plain = seen
    assert (call.kind, call.handler, call.schema) == ("exchange", "coroutine", NUMBERS)
    assert (call.write_key, call.attempt, call.token) == ("run", "2", "one")
    assert call.partition == aqueduct.Partition(1, 3)
    assert dict(call.headers) == {"a": "b"}
    assert call.connection_headers["who"] == "me"
    assert call.output_schema == NUMBERS
    assert 0 < call.deadline <= 50
    assert (other.token, plain.token) == ("other", "one")
    assert plain.deadline is None and not plain.headers
    assert call.number < other.number < plain.number


async def test_alike_calls_are_told_apart():
    """Schemas of one length, and metadata, make another call of what is kept."""
    service = aqueduct.Service("test")
    seen: list[Any] = []

    @service.handler("see")
    async def see(batch, call):
        seen.append(call.schema)
        return batch

    schemas = [
        pa.schema([("id", pa.int64())]),
        pa.schema([("ix", pa.int64())]),
        pa.schema([("id", pa.int64(), False)]),
        pa.schema([("id", pa.int64())], {"a": "b"}),
        pa.schema([("id", pa.int64())], {"a": "c"}),
    ]
    async with connected(service) as client:
        for schema in schemas * 2:
            batch = pa.record_batch([pa.array([1])], schema=schema)
            answer = await client.call("see", batch)
            assert answer.schema.equals(schema, check_metadata=True)
    assert all(a.equals(b, check_metadata=True) for a, b in zip(seen, schemas * 2, strict=True))


# Refusals and errors


async def test_refusals(carrier):
    async def authorize(call):
        await asyncio.sleep(0)
        if call.token == "bad":
            raise Refused("not you")

    service = shapes(authorize=authorize)
    service.handler("picky", input=PAIRS)(lambda batch: batch)
    service.handler("source", kind="source", output=NUMBERS)(_source)
    service.handler("one", max_calls=1)(_waits)
    async with connected(service, carrier) as client:
        with pytest.raises(UnknownHandler, match="did you mean 'coroutine'"):
            await client.call("coroutines", numbers(1))
        with pytest.raises(UnknownHandler, match="is a source, and was called as exchange"):
            await client.call("source", numbers(1))
        with pytest.raises(SchemaMismatch) as caught:
            await client.call("picky", numbers(1))
        assert caught.value.peer == client.address and caught.value.column
        with pytest.raises(SchemaMismatch, match="output of handler 'coroutine'"):
            await client.call("coroutine", numbers(1), output_schema=PAIRS)
        for _ in range(2):
            assert await client.call("coroutine", numbers(1), output_schema=NUMBERS) == numbers(1)
        with pytest.raises(Refused, match="not you"):
            await client.call("coroutine", numbers(1), token="bad")
        task = asyncio.create_task(client.call("one", numbers(1)))
        await until(lambda: service.counters()["open_calls"])
        with pytest.raises(Busy, match="its limit"):
            await client.call("one", numbers(1))
        task.cancel()
        await until(lambda: not service.counters()["open_calls"])
        assert service.counters()["refused"] == 6


def _source():
    yield numbers(1)


async def _waits(batch):
    await asyncio.sleep(3600)


async def test_too_many_calls_of_a_connection_are_busy(carrier):
    service = aqueduct.Service("test", config=config(calls={"max_calls_connection": 3}))
    service.handler("waits")(_waits)
    async with connected(service, carrier) as client:
        tasks = [asyncio.create_task(client.call("waits", numbers(1))) for _ in range(3)]
        await until(lambda: service.counters()["open_calls"] == 3)
        with pytest.raises(Busy, match="max_calls_connection"):
            await client.call("waits", numbers(1))
        for task in tasks:
            task.cancel()
        await until(lambda: not service.counters()["open_calls"])


@pytest.mark.requirement("AC-60")
@pytest.mark.parametrize("handler", SHAPES)
async def test_what_a_handler_raises_comes_with_its_traceback(carrier, handler):
    service = aqueduct.Service("test")

    def fails(batch):
        raise ValueError("seven")

    async def fails_async(batch):
        await asyncio.sleep(0)
        raise ValueError("seven")

    def generator(batches):
        for batch in batches:
            yield batch
            fails(batch)

    async def async_generator(batches):
        async for batch in batches:
            yield batch
            await fails_async(batch)

    shape = {
        "async generator": async_generator,
        "generator": generator,
        "coroutine": fails_async,
        "function": fails,
    }[handler]
    service.handler(handler)(shape)
    async with connected(service, carrier) as client:
        for _ in range(2):
            with pytest.raises(HandlerFailed, match="raised ValueError: seven") as caught:
                await client.call(handler, numbers(1))
            error = caught.value
            assert (error.kind, error.detail) == ("ValueError", "seven")
            assert "fails" in error.remote_traceback
            assert str(Path(aqueduct.__file__).parent) not in error.remote_traceback
            assert (error.peer, error.handler) == (client.address, handler)
        await until(lambda: not service.counters()["open_calls"])
        assert service.counters()["failed"] == 2


async def test_an_answer_of_another_schema_or_none(carrier):
    service = aqueduct.Service("test")

    @service.handler("other")
    async def other(batch):
        return pa.record_batch({"x": pa.array(["y"])})

    @service.handler("nothing")
    async def nothing(batch):
        return None

    async with connected(service, carrier) as client:
        for _ in range(2):
            with pytest.raises(SchemaMismatch):
                await client.call("other", numbers(1))
            with pytest.raises(HandlerFailed, match=r"a pyarrow.RecordBatch is wanted"):
                await client.call("nothing", numbers(1))


@pytest.mark.parametrize("handler", SHAPES)
async def test_batches_above_the_services_limit(carrier, handler):
    limit = config(calls={"batch_limit": 1000})
    async with connected(shapes(config=limit), carrier, client_config=config()) as client:
        assert await client.call(handler, numbers(1)) == numbers(1)
        with pytest.raises(BatchTooLarge, match=r"above the limit of 1000"):
            await client.call(handler, numbers(*range(300)))
        with pytest.raises(BatchTooLarge, match=r"above the limit of 1000"):  # as an exchange
            await client.call(handler, numbers(*range(100_000)))


async def test_misuse_is_said_at_once():
    async with connected(shapes()) as client:
        for wrong in ("text", [numbers(1)], None):
            with pytest.raises(LocalProtocolError, match=r"takes one pyarrow\.RecordBatch"):
                await client.call("coroutine", wrong)
        with pytest.raises(LocalProtocolError, match="deadline"):
            await client.call("coroutine", numbers(1), deadline=-1)
        with pytest.raises(LocalProtocolError, match="name of a handler"):
            await client.call("", numbers(1))


# Deadlines


@pytest.mark.parametrize("handler", ["stuck", "async stuck", "function", "coroutine"])
async def test_a_deadline_ends_the_call_on_both_sides(carrier, handler):
    watched = Watched()
    async with connected(watched.service, carrier) as client:
        with pytest.raises(DeadlineExceeded, match=r"did not end within (the deadline of )?0.3 s"):
            await client.call(handler, numbers(1), deadline=0.3)
        await watched.wait(watched.told)
        assert watched.call.cancelled
        await watched.wait(watched.ended)
        await watched.idle()


@pytest.mark.parametrize("impatient", ["client", "service"])
@pytest.mark.parametrize(
    "handler", mostly_long(["stuck", "async stuck", "function", "coroutine"], "stuck", "coroutine")
)
async def test_a_call_without_a_deadline_is_not_waited_for_in_vain(carrier, handler, impatient):
    short = config(timing={"progress_deadline": 0.4})
    both = {"client": config(), "service": config()} | {impatient: short}
    watched = Watched(config=both["service"])
    async with connected(watched.service, carrier, client_config=both["client"]) as client:
        with pytest.raises(DeadlineExceeded, match=r"0.4 s"):
            await client.call(handler, numbers(1))
        await watched.wait(watched.ended)
        await watched.idle()
        # And the next one is watched as well.
        with pytest.raises(DeadlineExceeded, match=r"0.4 s"):
            await client.call("coroutine", numbers(1))
        await watched.idle()


# Sync clients


@pytest.mark.parametrize("handler", SHAPES)
def test_a_sync_client_calls(handler):
    with sync_client(shapes(config=SMALL)) as client:
        for size in (1, 100, 250, 10_000):
            batch = numbers(*range(size))
            assert client.call(handler, batch) == batch
            assert client.call_table(handler, batch) == pa.Table.from_batches([batch])
        assert values(client.call_table("times", numbers(2)).to_batches())[1][0] == 1
        with pytest.raises(UnknownHandler):
            client.call("x", numbers(1))
        with pytest.raises(LocalProtocolError, match="takes one"):
            client.call(handler, [numbers(1)])


# Many


async def test_many_at_once(carrier):
    service = shapes()
    async with connected(service, carrier) as client:
        for handler in SHAPES[:1] + SHAPES[2:]:
            answers = await asyncio.gather(
                *(client.call(handler, numbers(value)) for value in range(200))
            )
            assert values(answers) == [[value] for value in range(200)]
        await until(lambda: not service.counters()["open_calls"])
    assert service.counters()["calls"] == 600


async def test_calls_of_one_connection_share_the_loop_with_others():
    """A burst does not keep the loop: it begins a few calls in each turn."""
    service = aqueduct.Service("test")
    turns = []
    turn = 0

    @service.handler("turn")
    async def turn_of(batch):
        turns.append(turn)
        return batch

    async with connected(service) as client:
        calls = [asyncio.create_task(client.call("turn", numbers(n))) for n in range(150)]
        while not all(call.done() for call in calls):
            turn += 1
            await asyncio.sleep(0)
    assert len(set(turns)) >= 3
    assert max(turns.count(turn) for turn in set(turns)) <= 64


async def test_a_service_that_drains_refuses_and_ends_well(carrier):
    service = aqueduct.Service("test")
    begun, going = asyncio.Event(), asyncio.Event()

    @service.handler("waits")
    async def waits(batch):
        begun.set()
        await going.wait()
        return batch

    async with serving(service, carrier, drain=None) as running:
        client = await aqueduct.Client.connect(running.addresses[0])
        task = asyncio.create_task(client.call("waits", numbers(1)))
        await begun.wait()
        closing = asyncio.create_task(running.close())
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="is ending"):
            await client.call("waits", numbers(1))
        going.set()
        assert await task == numbers(1)
        await closing
        await client.close()


async def test_a_drain_that_is_cut_short_refuses_what_is_open(carrier):
    watched = Watched()
    async with serving(watched.service, carrier) as running:
        client = await aqueduct.Client.connect(running.addresses[0])
        task = asyncio.create_task(client.call("coroutine", numbers(1)))
        await watched.wait(watched.begun)
        await running.close(drain=0)
        with pytest.raises(Refused, match="is ending"):
            await task
        assert watched.how == "CancelledError"
        await client.close()


async def test_an_older_service_refuses_it_cleanly():
    """One that knows no such kind: it says so, by the one channel that it was given."""

    async def older(connection):
        async for message in connection.entrypoint:
            with pytest.raises(BadCall, match="the call is of the kind b'unary'") as caught:
                CallHead.decode(message.headers, message.payload)
            headers, payload = Status.from_exception(caught.value).encode()
            message.attachments[-1].handle.send_nowait(payload, headers=headers)

    async with (
        await serve(older, "memory://older-service") as server,
        await aqueduct.Client.connect(server.addresses[0]) as client,
    ):
        with pytest.raises(BadCall, match="the call is of the kind b'unary'"):
            await client.call("any", numbers(1))
