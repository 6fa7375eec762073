"""Calls that go well: every kind and shape, every type, every size, over both carriers."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import threading

import pyarrow as pa
import pytest

import aqueduct
from tests.support.calls import NUMBERS, config, connected, numbers, sync_client, values
from tests.support.selection import mostly_long


@pytest.fixture(
    params=mostly_long(
        ["memory", "quic", "draft", "draft-memory", "draft-quic"], "memory", "quic", "draft"
    )
)
def carrier(request):
    return request.param


def make(**options):
    service = aqueduct.Service("echo", **options)

    @service.handler("function")
    def function(batch):
        return batch

    @service.handler("concurrent", concurrency=4)
    def concurrent(batch, call):
        return batch

    @service.handler("coroutine", concurrency=4)
    async def coroutine(batch):
        await asyncio.sleep(0)
        return batch

    @service.handler("generator")
    def generator(batches):
        yield from batches

    @service.handler("async generator")
    async def async_generator(batches, call):
        async for batch in batches:
            yield batch

    @service.handler("source", kind="source", output=NUMBERS)
    def source(call):
        for number in range(int(call.headers["count"])):
            yield numbers(number)

    @service.handler("async source", kind="source", output=NUMBERS)
    async def async_source(call):
        for number in range(int(call.headers["count"])):
            yield numbers(number)

    @service.handler("sink", kind="sink")
    def sink(batches):
        return {"sum": sum(sum(batch["id"].to_pylist()) for batch in batches)}

    @service.handler("async sink", kind="sink")
    async def async_sink(batches, call):
        total = 0
        async for batch in batches:
            total += sum(batch["id"].to_pylist())
        return {"sum": total}

    @service.handler("silent sink", kind="sink")
    def silent_sink(batches, call):
        for _ in batches:
            pass

    return service


SHAPES = ["function", "concurrent", "coroutine", "generator", "async generator"]


@pytest.mark.parametrize("handler", SHAPES)
async def test_batches_come_back_in_order(carrier, handler):
    batches = [numbers(n, n + 1) for n in range(50)]
    async with connected(make(), carrier) as client:
        assert [batch async for batch in client.exchange(handler, batches)] == batches


@pytest.mark.parametrize("handler", SHAPES)
async def test_no_batches_at_all(carrier, handler):
    async with connected(make(), carrier) as client:
        stream = client.exchange(handler, [], schema=NUMBERS)
        assert [batch async for batch in stream] == []
        assert stream.schema == NUMBERS
        assert stream.counters["batches_in"] == 0


@pytest.mark.parametrize("handler", ["source", "async source"])
async def test_a_source_gives_its_batches(carrier, handler):
    async with connected(make(), carrier) as client:
        stream = client.source(handler, headers={"count": "40"})
        assert values([batch async for batch in stream]) == [[n] for n in range(40)]
        assert stream.counters["rows_out"] == 40


@pytest.mark.parametrize("handler", ["sink", "async sink"])
async def test_a_sink_takes_batches_and_counts(carrier, handler):
    async with connected(make(), carrier) as client:
        counters = await client.sink(handler, [numbers(n) for n in range(40)])
        assert counters["sum"] == sum(range(40))
        assert (counters["batches_in"], counters["rows_in"]) == (40, 40)
        counters = await client.sink("silent sink", [numbers(1)])
        assert counters["rows_in"] == 1
        assert "sum" not in counters


@pytest.mark.parametrize("handler", SHAPES)
def test_the_sync_client_exchanges(handler):
    batches = [numbers(n, n + 1) for n in range(50)]
    with sync_client(make()) as client:
        assert list(client.exchange(handler, batches)) == batches
        assert list(client.exchange(handler, iter(batches), schema=NUMBERS)) == batches
        assert list(client.exchange(handler, [], schema=NUMBERS)) == []


@pytest.mark.parametrize("handler", ["source", "async source"])
def test_the_sync_client_reads_sources(handler):
    with sync_client(make()) as client:
        stream = client.source(handler, headers={"count": "40"})
        assert values(list(stream)) == [[n] for n in range(40)]
        assert stream.counters["rows_out"] == 40
        assert next(stream, None) is None


@pytest.mark.parametrize("handler", ["sink", "async sink"])
def test_the_sync_client_fills_sinks(handler):
    with sync_client(make()) as client:
        counters = client.sink(handler, (numbers(n) for n in range(40)), schema=NUMBERS)
        assert counters["sum"] == sum(range(40))


async def test_every_form_of_input_is_taken(carrier):
    batches = [numbers(n) for n in range(20)]
    table = pa.Table.from_batches(batches)

    async def later():
        for batch in batches:
            await asyncio.sleep(0)
            yield batch

    async with connected(make(), carrier) as client:
        for given in (batches, tuple(batches), table, table.to_reader()):
            assert [batch async for batch in client.exchange("function", given)] == batches
        for given in (iter(batches), later()):
            stream = client.exchange("function", given, schema=NUMBERS)
            assert [batch async for batch in stream] == batches
        assert [b async for b in client.exchange("function", batches[0])] == batches[:1]


def test_the_sync_client_takes_every_form_of_input_that_does_not_need_a_loop():
    batches = [numbers(n) for n in range(20)]
    table = pa.Table.from_batches(batches)
    with sync_client(make()) as client:
        for given in (batches, tuple(batches), table, table.to_reader()):
            assert list(client.exchange("function", given)) == batches
        assert list(client.exchange("generator", batches[0])) == batches[:1]


def typed_batches():
    small = pa.dictionary(pa.int8(), pa.string())
    columns = {
        "null": pa.nulls(3),
        "bool": pa.array([True, None, False]),
        "int8": pa.array([1, None, -1], pa.int8()),
        "uint64": pa.array([0, None, 2**64 - 1], pa.uint64()),
        "half": pa.array([1.5, None, -2], pa.float64()).cast(pa.float32()),
        "decimal128": pa.array([decimal.Decimal("1.23"), None, decimal.Decimal("-9.99")]),
        "decimal256": pa.array([decimal.Decimal(10) ** 50, None, 1], pa.decimal256(60, 2)),
        "date": pa.array([datetime.date(2013, 1, 1), None, datetime.date(1, 1, 1)]),
        "time": pa.array([1, None, 3], pa.time64("ns")),
        "timestamp": pa.array([1, None, -1], pa.timestamp("us")),
        "zoned": pa.array([1, None, -1], pa.timestamp("ns", "Europe/Berlin")),
        "duration": pa.array([1, None, -1], pa.duration("ms")),
        "interval": pa.array([(1, 2, 3), None, (0, 0, -1)], pa.month_day_nano_interval()),
        "string": pa.array(["a", None, "ü" * 100]),
        "binary": pa.array([b"", None, bytes(range(256))]),
        "fixed": pa.array([b"abcd", None, b"wxyz"], pa.binary(4)),
        "large_string": pa.array(["a", None, "c"], pa.large_string()),
        "large_binary": pa.array([b"a", None, b"c"], pa.large_binary()),
        "string_view": pa.array(["a", None, "longer than twelve bytes"], pa.string_view()),
        "binary_view": pa.array([b"a", None, b"longer than twelve bytes"], pa.binary_view()),
        "list": pa.array([[1, None], None, []], pa.list_(pa.int64())),
        "large_list": pa.array([["x"], None, []], pa.large_list(pa.string())),
        "fixed_list": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2)),
        "struct": pa.array([{"a": 1, "b": ["x"]}, None, {"a": None, "b": None}]),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "dictionary": pa.array(["x", None, "y"]).dictionary_encode().cast(small),
        "nested dictionary": pa.array([["x"], None, ["y", "x"]], pa.list_(small)),
        "run_end": pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["a", None])),
        "union": pa.UnionArray.from_dense(
            pa.array([0, 1, 0], pa.int8()),
            pa.array([0, 0, 1], pa.int32()),
            [pa.array([1, 2]), pa.array(["u"])],
        ),
    }
    return pa.record_batch(columns)


@pytest.mark.parametrize("handler", ["function", "generator", "async generator"])
async def test_every_type_survives(carrier, handler):
    batch = typed_batches()
    # Slices have offsets, and bitmaps that begin inside a byte.
    batches = [batch, batch.slice(1), batch.slice(0, 1), batch.slice(3), batch]
    async with connected(make(), carrier) as client:
        answers = [answer async for answer in client.exchange(handler, batches)]
    assert answers == batches
    assert all(answer.schema.equals(batch.schema) for answer in answers)
    for answer in answers:
        answer.validate(full=True)


async def test_dictionaries_that_change_and_grow(carrier):
    def words(*texts):
        return pa.record_batch({"word": pa.array(texts).dictionary_encode()})

    batches = [words("a", "b"), words("a", "b", "c"), words("z"), words("z", "y"), words("a")]
    async with connected(make(), carrier) as client:
        answers = [batch async for batch in client.exchange("generator", batches)]
    assert [a.to_pydict() for a in answers] == [b.to_pydict() for b in batches]


async def test_batches_without_columns_or_rows(carrier):
    nothing = pa.schema([])
    empty = pa.RecordBatch.from_arrays([], schema=nothing)
    async with connected(make(), carrier) as client:
        for handler in SHAPES:
            answers = [b async for b in client.exchange(handler, [empty, empty], schema=nothing)]
            assert [answer.num_columns for answer in answers] == [0, 0]
            answers = [b async for b in client.exchange(handler, [numbers(), numbers(1)])]
            assert values(answers) == [[], [1]]


@pytest.mark.parametrize("handler", ["function", "generator", "async generator"])
async def test_one_row_of_40_mib(carrier, handler):
    row = pa.record_batch({"blob": pa.array([bytes(40 << 20)], pa.large_binary())})
    async with connected(make(), carrier) as client:
        answers = [b async for b in client.exchange(handler, [row, row.slice(0, 0), row])]
    assert [answer.num_rows for answer in answers] == [1, 0, 1]
    assert answers[0].equals(row) and answers[2].equals(row)


@pytest.mark.long
@pytest.mark.parametrize("face", ["async", "sync"])
async def test_one_row_of_300_mib(face):
    blob = pa.py_buffer(bytes(range(256)) * (300 << 12))
    offsets = pa.py_buffer(b"".join(n.to_bytes(8, "little") for n in (0, blob.size)))
    array = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, blob])
    row = pa.record_batch({"blob": array})
    assert row.nbytes > 300 << 20

    def exchange():
        with sync_client(make()) as client:
            return list(client.exchange("function", [row]))

    if face == "sync":
        answers = await asyncio.to_thread(exchange)
    else:
        async with connected(make(), "quic") as client:
            answers = [batch async for batch in client.exchange("function", [row])]
    assert len(answers) == 1 and answers[0].equals(row)


async def test_batches_are_cut_and_put_together_whatever_the_size(carrier):
    service = make(config=config(calls={"fragment_bytes": 1000}))
    sizes = [0, 1, 100, 500, 117, 118, 119, 120, 1000, 1001, 10_000]
    batches = [pa.record_batch({"x": pa.array(range(size), pa.int64())}) for size in sizes]
    async with connected(service, carrier) as client:
        for handler in SHAPES:
            assert [b async for b in client.exchange(handler, batches)] == batches


async def test_many_calls_at_once(carrier):
    batches = [numbers(n) for n in range(10)]
    async with connected(make(), carrier) as client:

        async def one(handler):
            return [batch async for batch in client.exchange(handler, batches)]

        answers = await asyncio.gather(*(one(SHAPES[n % len(SHAPES)]) for n in range(60)))
    assert all(answer == batches for answer in answers)


def test_many_threads_share_a_sync_client():
    batches = [numbers(n) for n in range(10)]
    failed = []
    with sync_client(make()) as client:

        def one(handler):
            for _ in range(5):
                if list(client.exchange(handler, batches)) != batches:
                    failed.append(handler)  # noqa: PERF401

        threads = [threading.Thread(target=one, args=(SHAPES[n % 5],)) for n in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []


async def test_the_call_tells_the_handler_what_the_client_said(carrier):
    seen = []
    service = aqueduct.Service("test")
    output = pa.schema([("n", pa.int64())])

    @service.handler("look", output=output)
    def look(batch, call):
        seen.append(call)
        return pa.record_batch({"n": [call.deadline > 0]}).cast(output)

    async with connected(service, carrier, headers={"who": "me"}, token="client's") as client:
        partition = aqueduct.Partition(3, 8)
        stream = client.exchange(
            "look",
            [numbers(1)],
            headers={"region": "süd"},
            write_key="run 7",
            attempt="2",
            deadline=30,
            partition=partition,
        )
        assert await stream.opened() == output
        assert [batch async for batch in stream] == [pa.record_batch({"n": [1]})]
        async for _ in client.exchange("look", [numbers(1)], token="its own", deadline=9):
            pass
        peer = client.connection.local
    call, other = seen
    assert (call.handler, call.kind, call.number) == ("look", "exchange", 1)
    assert dict(call.headers) == {"region": "süd"}
    assert dict(call.connection_headers) == {"who": "me"}
    assert (call.write_key, call.attempt, call.partition) == ("run 7", "2", partition)
    assert (call.schema, call.output_schema) == (NUMBERS, output)
    assert (call.token, other.token) == ("client's", "its own")
    assert 0 <= call.deadline <= 30
    assert not call.cancelled and call.reason is None
    if carrier == "quic":
        assert call.peer == peer
    assert "look" in repr(call)


async def test_an_output_may_depend_on_the_input_or_the_call(carrier):
    service = aqueduct.Service("test")

    @service.handler("append", output=lambda schema: schema.append(pa.field("one", pa.int8())))
    def append(batch):
        return batch.append_column("one", pa.array([1] * batch.num_rows, pa.int8()))

    @service.handler(
        "column", kind="source", output=lambda call: pa.schema([(call.headers["name"], pa.int8())])
    )
    def column(call):
        yield pa.record_batch([pa.array([7], pa.int8())], schema=call.output_schema)

    async with connected(service, carrier) as client:
        (answer,) = [b async for b in client.exchange("append", [numbers(5)])]
        assert answer.to_pydict() == {"id": [5], "one": [1]}
        (answer,) = [b async for b in client.source("column", headers={"name": "x"})]
        assert answer.to_pydict() == {"x": [7]}


async def test_handlers_see_the_declared_schema_and_clients_the_expected_one(carrier):
    declared = pa.schema([pa.field("at", pa.timestamp("us", "UTC"))])
    sent = pa.schema([pa.field("at", pa.timestamp("us", "Europe/Berlin"), nullable=False)])
    expected = pa.schema([pa.field("at", pa.timestamp("us", "Asia/Tokyo"), metadata={"a": "b"})])
    service, seen = aqueduct.Service("test"), []

    @service.handler("echo", input=declared)
    def echo(batch, call):
        seen.append((batch.schema, call.schema))
        return batch

    batch = pa.record_batch([pa.array([1, 2], pa.timestamp("us", "Europe/Berlin"))], schema=sent)
    async with connected(service, carrier) as client:
        stream = client.exchange("echo", [batch], output_schema=expected)
        (answer,) = [b async for b in stream]
        assert stream.schema is not None
        assert stream.schema.equals(expected, check_metadata=True)
        assert answer.schema.equals(expected, check_metadata=True)
    assert seen == [(declared, declared)]
