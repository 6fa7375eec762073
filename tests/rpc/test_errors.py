"""Calls that fail on the way: handlers that raise, batches that are wrong; and what is said."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import (
    BatchTooLarge,
    Busy,
    Cancelled,
    HandlerFailed,
    LocalProtocolError,
    SchemaMismatch,
    UnknownHandler,
)
from tests.support.calls import (
    NUMBERS,
    config,
    connected,
    everything,
    numbers,
    sync_client,
    values,
)
from tests.support.selection import mostly_long

LIBRARY = str(Path(aqueduct.__file__).parent)


@pytest.fixture(params=mostly_long(["memory", "quic", "draft"], "memory", "draft"))
def carrier(request):
    return request.param


@pytest.fixture
def service():
    return aqueduct.Service("test")


def test_the_sync_client_raises_the_same_errors(service):
    @service.handler("fail", input=NUMBERS)
    def fail(batches, call):
        for batch in batches:
            yield batch
            raise KeyError("no such thing")

    with sync_client(service) as client:
        with pytest.raises(UnknownHandler):
            list(client.exchange("fial", [numbers(1)]))
        stream = client.exchange("fail", [numbers(1), numbers(2)])
        assert values([next(stream)]) == [[1]]
        for _ in range(2):  # it is sticky
            with pytest.raises(HandlerFailed, match="raised KeyError: 'no such thing'"):
                next(stream)
        with pytest.raises(SchemaMismatch):
            client.exchange("fail", [pa.record_batch({"x": [1]})]).opened()
        assert list(client.source("aqueduct.describe"))  # and nothing is broken


def failing(where):
    """One handler of each shape that raises ValueError at its third batch."""
    service = aqueduct.Service("test")

    def check(batch):
        if batch["id"][0].as_py() == 2:
            raise ValueError(f"{where} does not like 2")
        return batch

    service.handler("function")(check)
    service.handler("concurrent", concurrency=3)(check)

    @service.handler("coroutine", concurrency=3)
    async def coroutine(batch):
        return check(batch)

    @service.handler("generator")
    def generator(batches):
        for batch in batches:
            yield check(batch)

    @service.handler("async generator")
    async def async_generator(batches, call):
        async for batch in batches:
            yield check(batch)

    @service.handler("sink", kind="sink")
    def sink(batches):
        for batch in batches:
            check(batch)

    @service.handler("async sink", kind="sink")
    async def async_sink(batches):
        async for batch in batches:
            check(batch)

    return service


@pytest.mark.requirement("AC-51")
@pytest.mark.parametrize(
    "handler", ["function", "concurrent", "coroutine", "generator", "async generator"]
)
async def test_a_handler_that_raises(carrier, handler):
    service = failing("it")
    answers: list[Any] = []
    async with connected(service, carrier) as client:
        with pytest.raises(HandlerFailed) as caught:
            await everything(client.exchange(handler, [numbers(n) for n in range(20)]), answers)
        assert service.counters()["failed"] == 1
    error = caught.value
    # What was answered before it failed is not lost.
    assert values(answers) == [[0], [1]]
    assert f"handler '{handler}' at {client.address}, batch 2: raised ValueError" in str(error)
    assert (error.kind, error.detail) == ("ValueError", "it does not like 2")
    assert error.handler == handler
    assert "in check" in error.remote_traceback
    assert "raise ValueError" in error.remote_traceback
    # The library's own frames would hide the user's.
    assert LIBRARY not in error.remote_traceback
    assert any("in check" in note for note in error.__notes__)


@pytest.mark.parametrize("handler", ["sink", "async sink"])
async def test_a_sink_that_raises(carrier, handler):
    async with connected(failing("it"), carrier) as client:
        with pytest.raises(HandlerFailed, match="batch 2: raised ValueError: it does not like 2"):
            await client.sink(handler, [numbers(n) for n in range(20)])


async def test_a_handler_whose_own_task_was_cancelled(service):
    @service.handler("cancels")
    async def cancels(batches, call):
        task = asyncio.ensure_future(asyncio.sleep(3600))
        task.cancel()
        await task
        yield numbers(1)

    async with connected(service) as client:
        with pytest.raises(HandlerFailed, match=r"raised asyncio.*CancelledError"):
            await everything(client.exchange("cancels", [numbers(1)]))


@pytest.mark.parametrize("base", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_a_handler_that_raises_what_it_should_not(service, base):
    @service.handler("function")
    def function(batch):
        raise base("odd")

    @service.handler("generator")
    def generator(batches):
        yield next(batches)
        raise base("odd")

    async with connected(service) as client:
        for handler in ("function", "generator"):
            with pytest.raises(HandlerFailed, match=f"raised {base.__name__}"):
                await everything(client.exchange(handler, [numbers(1)]))


async def test_a_handler_may_choose_the_error(service, carrier):
    @service.handler("busy")
    def busy(batch):
        raise Busy("come back tomorrow")

    @service.handler("cancelled")
    async def cancelled(batches, call):
        async for batch in batches:
            yield batch
            raise Cancelled("of its own")

    async with connected(service, carrier) as client:
        with pytest.raises(Busy, match="come back tomorrow"):
            await everything(client.exchange("busy", [numbers(1)]))
        # An end of some channel of its own is no end of this call.
        with pytest.raises(HandlerFailed, match=r"raised aqueduct.errors.Cancelled: of its own"):
            await everything(client.exchange("cancelled", [numbers(1)]))


async def test_a_handler_that_raises_while_it_is_closed(service):
    @service.handler("generator")
    def generator(batches):
        try:
            yield next(batches)
            raise ValueError("first")
        finally:
            raise KeyError("second")

    async with connected(service) as client:
        with pytest.raises(HandlerFailed, match="raised KeyError: 'second'") as caught:
            await everything(client.exchange("generator", [numbers(1)]))
    assert "ValueError: first" in caught.value.remote_traceback


@pytest.mark.parametrize("shape", ["function", "generator", "async generator", "source"])
async def test_a_handler_that_yields_another_schema(service, carrier, shape):
    wrong = pa.record_batch({"id": pa.array([1], pa.int32())})

    @service.handler("function", output=NUMBERS)
    def function(batch):
        return wrong

    @service.handler("generator", output=NUMBERS)
    def generator(batches):
        for _ in batches:
            yield wrong

    @service.handler("async generator", output=NUMBERS)
    async def async_generator(batches, call):
        async for _ in batches:
            yield wrong

    @service.handler("source", kind="source", output=NUMBERS)
    def source():
        yield wrong

    async with connected(service, carrier) as client:
        stream = (
            client.source("source")
            if shape == "source"
            else client.exchange(shape, [numbers(1), numbers(2)])
        )
        with pytest.raises(SchemaMismatch, match=f"the output of handler '{shape}'") as caught:
            await everything(stream)
    assert caught.value.column == "id"
    assert (caught.value.wanted, caught.value.got) == ("int64", "int32")


OTHERWISE = "the handler answers otherwise than its output= declares; in the handler: "
UNDECLARED = "the handler declares no output=, so its answers must have the schema of its input; "
REQUIRED = pa.schema([pa.field("id", pa.int64(), nullable=False)])


@pytest.mark.parametrize(
    ("output", "made", "advice"),
    [
        (
            NUMBERS,
            {"id": pa.array([1], pa.int32())},
            f"{OTHERWISE}cast to int64: batch.cast(schema)",
        ),
        (NUMBERS, {"id": [1], "more": [2]}, f"{OTHERWISE}leave it out: batch.select(['id'])"),
        (NUMBERS, {"ID": [1]}, f"{OTHERWISE}did you mean it by 'ID'? then rename it"),
        (NUMBERS, {"x": ["a"]}, f"{OTHERWISE}the columns that came are 'x'"),
        (NUMBERS, {"id": [[1]]}, f"{OTHERWISE}there is no cast"),
        (REQUIRED, {"id": pa.array([None], pa.int64())}, OTHERWISE),
        (None, {"length": [1]}, f"{UNDECLARED}declare output=, or in the handler: "),
    ],
    ids=["type", "extra", "case", "missing", "nested", "nulls", "undeclared"],
)
@pytest.mark.parametrize("shape", ["function", "generator", "call"])
async def test_a_handler_at_fault_is_told_so_and_not_its_caller(
    service, carrier, caplog, shape, output, made, advice
):
    """In the status, and by a warning in the service's log."""
    batch = pa.record_batch(made)

    @service.handler("generator", output=output)
    def generator(batches):
        for _ in batches:
            yield batch

    service.handler("function", output=output)(lambda _: batch)
    async with connected(service, carrier) as client:
        handler = "generator" if shape == "generator" else "function"
        with pytest.raises(SchemaMismatch, match=f"the output of handler '{handler}'") as caught:
            if shape == "call":
                await client.call(handler, numbers(1))
            else:
                await everything(client.exchange(handler, [numbers(1)]))
    text = str(caught.value)
    assert advice in text
    assert "in Spark" not in text
    (record,) = (
        each
        for each in caplog.records
        if each.name == "aqueduct.service.server" and "failed" in each.msg
    )
    assert record.levelname == "WARNING"
    assert advice in record.getMessage()


@pytest.mark.parametrize("way", ["exchange", "call", "source"])
async def test_a_caller_that_expects_otherwise_is_told_what_the_handler_declares(
    service, carrier, way
):
    service.handler("echo", output=NUMBERS)(lambda batch: batch)
    service.handler("give", kind="source", output=NUMBERS)(_give)
    wanted = pa.schema([("id", pa.int32())])
    async with connected(service, carrier) as client:
        with pytest.raises(SchemaMismatch, match=r"output_schema= .* \(id int64\): expect that"):
            if way == "call":
                await client.call("echo", numbers(1), output_schema=wanted)
            elif way == "source":
                await everything(client.source("give", output_schema=wanted))
            else:
                await everything(client.exchange("echo", [numbers(1)], output_schema=wanted))


def _give():
    yield numbers(1)


async def test_a_caller_at_fault_is_told_so_and_the_service_does_not_warn(service, carrier, caplog):
    service.handler("echo", input=NUMBERS)(lambda batch: batch)
    wrong = pa.record_batch({"id": pa.array([1], pa.int32())})
    async with connected(service, carrier) as client:
        with pytest.raises(SchemaMismatch, match=r"the input of handler .*; cast to int64: "):
            await everything(client.exchange("echo", [wrong]))
    assert not [
        each for each in caplog.records if each.levelname == "WARNING" and "refused" in each.msg
    ]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "a pyarrow.RecordBatch is wanted, got NoneType"),
        ([1], "a pyarrow.RecordBatch is wanted, got list"),
        (pa.array([1]), "Int64Array is one column, and batches have named columns"),
    ],
)
async def test_a_handler_that_yields_no_batch(service, carrier, made, words):
    service.handler("function")(lambda batch: made)

    @service.handler("generator")
    def generator(batches):
        for _ in batches:
            yield made

    async with connected(service, carrier) as client:
        for handler in ("function", "generator"):
            with pytest.raises(HandlerFailed, match="the output of handler") as caught:
                await everything(client.exchange(handler, [numbers(1)]))
            assert words in str(caught.value)


async def test_a_sink_that_returns_something_else(service):
    service.handler("sink", kind="sink")(lambda batches: "stored")
    async with connected(service) as client:
        with pytest.raises(HandlerFailed, match=r"a sink returns None or a dict .*'stored'"):
            await client.sink("sink", [numbers(1)])


async def test_a_handler_that_ends_early_is_no_error(service, carrier):
    @service.handler("generator")
    def generator(batches):
        yield next(batches)

    @service.handler("async generator")
    async def async_generator(batches, call):
        yield await anext(batches)

    @service.handler("sink", kind="sink")
    def sink(batches):
        return {"first": next(batches)["id"][0].as_py()}

    pulled = []

    def many():
        for number in range(100_000):
            pulled.append(number)
            yield numbers(number)

    async with connected(service, carrier) as client:
        for handler in ("generator", "async generator"):
            stream = client.exchange(handler, many(), schema=NUMBERS)
            assert values(await everything(stream)) == [[0]]
        assert (await client.sink("sink", many(), schema=NUMBERS))["first"] == 0
    assert len(pulled) < 30_000


# -------------------------------------------------------------------- what is sent


async def test_a_batch_of_another_schema_never_leaves(service, carrier):
    service.handler("echo")(lambda batch: batch)
    async with connected(service, carrier) as client:
        wrong = pa.record_batch({"other": [1]})
        stream = client.exchange("echo", _later(numbers(1), wrong), schema=NUMBERS)
        answers: list[Any] = []
        with pytest.raises(SchemaMismatch, match=r"the input of handler 'echo'.*column 'id' is"):
            await everything(stream, answers)
        with pytest.raises(LocalProtocolError, match="RecordBatch is wanted, got int"):
            await everything(client.exchange("echo", _later(7), schema=NUMBERS))
        with pytest.raises(SchemaMismatch):
            client.exchange("echo", [wrong], schema=NUMBERS)


async def _later(*batches):
    for batch in batches:
        await asyncio.sleep(0)
        yield batch


async def test_an_input_without_a_schema(service):
    service.handler("echo")(lambda batch: batch)
    async with connected(service) as client:
        given: list[Any] = [[], iter([numbers(1)]), _later()]
        for batches in given:
            with pytest.raises(LocalProtocolError, match=r"needs schema=, the pyarrow.Schema"):
                client.exchange("echo", batches)


async def test_what_the_input_raises_is_raised(service, carrier):
    service.handler("echo")(lambda batch: batch)

    async def broken():
        yield numbers(1)
        raise ZeroDivisionError("in the input")

    def broken_at_once():
        yield numbers(1)
        raise ZeroDivisionError("in the input")

    def broken_later():
        for number in range(100):
            yield numbers(number)
        raise ZeroDivisionError("in the input")

    async with connected(service, carrier) as client:
        for batches in (broken(), broken_at_once(), broken_later()):
            with pytest.raises(ZeroDivisionError, match="in the input"):
                await everything(client.exchange("echo", batches, schema=NUMBERS))
        with pytest.raises(ZeroDivisionError, match="in the input"):
            await client.sink("echo", broken(), schema=NUMBERS)
        assert values(await everything(client.exchange("echo", [numbers(1)]))) == [[1]]


def test_what_the_input_of_a_sync_client_raises_is_raised(service):
    service.handler("echo")(lambda batch: batch)

    def broken():
        yield numbers(1)
        raise ZeroDivisionError("in the input")

    with sync_client(service) as client:
        stream = client.exchange("echo", broken(), schema=NUMBERS)
        with pytest.raises(ZeroDivisionError, match="in the input"):
            list(stream)
        with pytest.raises(ZeroDivisionError):  # sticky
            next(stream)
        assert values(list(client.exchange("echo", [numbers(1)]))) == [[1]]
        with pytest.raises(LocalProtocolError, match="reads plain iterables"):
            client.exchange("echo", _later(), schema=NUMBERS)


async def test_arguments_that_cannot_be_sent(service):
    async with connected(service) as client:
        exchange = functools.partial(client.exchange, batches=[numbers(1)])
        with pytest.raises(LocalProtocolError, match="the deadline of a call is 0 s"):
            exchange("echo", deadline=0)
        with pytest.raises(LocalProtocolError, match="cannot be the name of a handler"):
            exchange("")
        with pytest.raises(LocalProtocolError, match="text to text"):
            exchange("echo", headers={"a": 1})  # type: ignore[dict-item]
        with pytest.raises(LocalProtocolError, match="token of a call has"):
            exchange("echo", token="x" * 20_000)
        with pytest.raises(aqueduct.AqueductError, match="in_flight is 0; it must be"):
            exchange("echo", in_flight=0)
        with pytest.raises(aqueduct.AqueductError, match="in_flight_bytes is True"):
            exchange("echo", in_flight_bytes=True)


async def test_a_batch_above_the_limit(carrier):
    limited = config(calls={"batch_limit": 100_000})
    service = aqueduct.Service("test", config=limited)
    large = pa.record_batch({"id": pa.array(range(20_000), pa.int64())})
    seen = []

    @service.handler("echo")
    def echo(batch):
        seen.append(batch)
        return batch

    @service.handler("generator")
    def generator(batches):
        yield from batches

    @service.handler("grow", output=NUMBERS)
    def grow(batch):
        return large

    async with connected(service, carrier, client_config=config()) as client:
        for handler in ("echo", "generator"):
            answers: list[Any] = []
            with pytest.raises(BatchTooLarge, match=r"batch 1 has \d+ bytes, above .* 100000"):
                await everything(client.exchange(handler, [numbers(1), large, numbers(2)]), answers)
            assert values(answers) in ([[1]], [])  # the limit is noticed before its turn
        with pytest.raises(BatchTooLarge, match="yield fewer rows at a time"):
            await everything(client.exchange("grow", [numbers(1)]))
    assert all(batch.num_rows == 1 for batch in seen)
    # The same at the client: what it sends, and what it receives.
    free = aqueduct.Service("test")
    free.handler("grow", output=NUMBERS)(lambda batch: large)
    async with connected(free, carrier, client_config=limited) as client:
        with pytest.raises(BatchTooLarge, match="send fewer rows at a time"):
            await everything(client.exchange("grow", [large]))
        with pytest.raises(BatchTooLarge, match="the answers of handler 'grow'"):
            await everything(client.exchange("grow", [numbers(1)]))
