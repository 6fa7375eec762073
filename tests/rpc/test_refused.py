"""Calls that are turned away at the door, and the words that say why."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import (
    Busy,
    HandlerFailed,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from tests.support.calls import (
    NUMBERS,
    PAIRS,
    config,
    connected,
    everything,
    numbers,
    sync_client,
    values,
)


@pytest.fixture(params=["memory", "quic", "draft"])
def carrier(request):
    return request.param


@pytest.fixture
def service():
    return aqueduct.Service("test")


async def test_an_unknown_handler_is_named_with_what_there_is(service, carrier):
    service.handler("score")(lambda batch: batch)
    async with connected(service, carrier) as client:
        with pytest.raises(UnknownHandler) as caught:
            await everything(client.exchange("scores", [numbers(1)]))
        assert "'test' has no handler 'scores'; did you mean 'score'?" in str(caught.value)
        assert caught.value.handler == "scores" and caught.value.peer == client.address
        with pytest.raises(UnknownHandler, match=r"no handler 'x'; it has 'score'"):
            await everything(client.exchange("x", [numbers(1)]))
        with pytest.raises(UnknownHandler, match="'score' is an exchange, and was called as sour"):
            await everything(client.source("score"))
        assert service.counters()["refused"] == 3


async def test_a_service_without_handlers_says_so(service):
    async with connected(service) as client:
        with pytest.raises(UnknownHandler, match="it has none"):
            await everything(client.exchange("x", [numbers(1)]))


@pytest.mark.requirement("AC-65")
@pytest.mark.parametrize(
    ("sent", "words", "column", "wanted", "got"),
    [
        (pa.schema([("id", pa.int64())]), "column 'text' is missing", "text", "string", ""),
        (
            pa.schema([("id", pa.int32()), ("text", pa.string())]),
            "'id' has another type: wanted int64, got int32; cast to int64",
            "id",
            "int64",
            "int32",
        ),
        (
            pa.schema([("text", pa.string()), ("id", pa.int64())]),
            "column 'id' is out of order",
            "id",
            "it at position 0",
            "'text' there",
        ),
        (PAIRS.append(pa.field("x", pa.int8())), "'x' is not wanted", "x", "", "int8"),
    ],
)
async def test_a_schema_mismatch_names_the_column(
    service, carrier, sent, words, column, wanted, got
):
    called = []

    @service.handler("pairs", input=PAIRS)
    def pairs(batch):
        called.append(batch)
        return batch

    batch = pa.RecordBatch.from_arrays([pa.nulls(2, field.type) for field in sent], schema=sent)
    async with connected(service, carrier) as client:
        with pytest.raises(SchemaMismatch, match="the input of handler 'pairs'") as caught:
            await everything(client.exchange("pairs", [batch]))
    error = caught.value
    assert words in str(error)
    assert (error.column, error.wanted, error.got) == (column, wanted, got)
    assert error.handler == "pairs"
    assert called == []


async def test_null_values_where_none_are_wanted(service, carrier):
    certain = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    service.handler("certain", input=certain)(lambda batch: batch)
    async with connected(service, carrier) as client:
        with pytest.raises(SchemaMismatch, match="column 'id' may hold nulls"):
            await everything(client.exchange("certain", [numbers(1)]))
        holed = pa.record_batch([pa.array([1, None])], schema=certain)
        with pytest.raises(SchemaMismatch, match="1 of its values are null"):
            await everything(client.exchange("certain", [holed], schema=certain))


@pytest.mark.requirement("AC-65")
async def test_another_output_than_the_client_expects(service, carrier):
    called = []

    @service.handler("echo")
    def echo(batch):
        called.append(batch)
        return batch

    service.handler("numbers", kind="source", output=NUMBERS)(lambda: (yield numbers(1)))
    async with connected(service, carrier) as client:
        with pytest.raises(SchemaMismatch, match="the output of handler 'echo': column 'text' is"):
            await everything(client.exchange("echo", [numbers(1)], output_schema=PAIRS))
        with pytest.raises(SchemaMismatch, match="the output of handler 'numbers'"):
            await everything(client.source("numbers", output_schema=PAIRS))
    assert called == []


async def test_an_output_that_cannot_be_told(service, carrier):
    service.handler("raises", output=lambda schema: schema.field("nope"))(lambda batch: batch)
    service.handler("wrong", output=lambda schema: 7)(lambda batch: batch)
    async with connected(service, carrier) as client:
        with pytest.raises(HandlerFailed, match="could not tell its output schema: KeyError"):
            await everything(client.exchange("raises", [numbers(1)]))
        with pytest.raises(HandlerFailed, match=r"gave a int, not a pyarrow.Schema"):
            await everything(client.exchange("wrong", [numbers(1)]))


async def test_more_calls_than_a_connection_may_have(carrier):
    service = aqueduct.Service("test", config=config(calls={"max_calls_connection": 2}))
    release = asyncio.Event()

    @service.handler("hold")
    async def hold(batches, call):
        await release.wait()
        async for batch in batches:
            yield batch

    async with connected(service, carrier) as client:
        first, second = (client.exchange("hold", [numbers(n)]) for n in range(2))
        await first.opened()
        await second.opened()
        with pytest.raises(Busy, match=r"2 calls are open on this connection, .*max_calls_connec"):
            await everything(client.exchange("hold", [numbers(3)]))
        release.set()
        assert values(await everything(first)) == [[0]]
        assert values(await everything(client.exchange("hold", [numbers(4)]))) == [[4]]
        await second.aclose()


async def test_more_calls_than_a_service_or_a_handler_may_have(carrier):
    service = aqueduct.Service("test", config=config(calls={"max_calls_process": 3}))
    release = threading.Event()

    @service.handler("hold", max_calls=2)
    def hold(batches, call):
        release.wait(30)
        yield from batches

    @service.handler("echo")
    async def echo(batches, call):
        async for batch in batches:
            yield batch

    async with connected(service, carrier) as client:
        held = [client.exchange("hold", [numbers(n)]) for n in range(2)]
        for stream in held:
            await stream.opened()
        # A plain generator has a thread of its own: it never waits for another's.
        with pytest.raises(Busy, match=r"'hold' has 2 calls open, which is its limit"):
            await everything(client.exchange("hold", [numbers(3)]))
        assert values(await everything(client.exchange("echo", [numbers(3)]))) == [[3]]
        third = client.exchange("echo", _forever(), schema=NUMBERS)
        await third.opened()
        with pytest.raises(Busy, match=r"'test' has 3 calls open, .*max_calls_process"):
            await everything(client.exchange("echo", [numbers(3)]))
        await third.aclose()
        release.set()
        assert [values(await everything(stream)) for stream in held] == [[[0]], [[1]]]
        assert values(await everything(client.exchange("hold", [numbers(3)]))) == [[3]]


async def _forever():
    while True:
        yield numbers(1)
        await asyncio.sleep(0)


async def test_who_may_call_is_for_the_service_to_say(carrier):
    async def authorize(call):
        await asyncio.sleep(0)
        if call.token == "broken":
            raise ZeroDivisionError("secret")
        if call.token != "open sesame" or call.connection_headers.get("who") != "me":
            raise Refused("wrong token", handler=call.handler)

    service = aqueduct.Service("test", authorize=authorize)
    service.handler("echo")(lambda batch: batch)
    async with connected(service, carrier, headers={"who": "me"}) as client:
        for token in (None, "sesame"):
            with pytest.raises(Refused, match=r"handler 'echo' at .*: wrong token"):
                await everything(client.exchange("echo", [numbers(1)], token=token))
            with pytest.raises(Refused):  # not even what there is is told
                await everything(client.source("aqueduct.describe", token=token))
        with pytest.raises(Refused, match="could not decide") as caught:
            await everything(client.exchange("echo", [numbers(1)], token="broken"))
        assert "secret" not in str(caught.value)
        stream = client.exchange("echo", [numbers(1)], token="open sesame")
        assert values(await everything(stream)) == [[1]]


class _NumpyBool:
    """Named as numpy's: true, and not Python's True."""

    def __bool__(self):
        return True


_NumpyBool.__name__ = _NumpyBool.__qualname__ = "bool_"


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("shape", ["exchange", "call", "source"])
async def test_authorize_that_returns_false_refuses(carrier, shape, is_async):
    def decide(call):
        return call.token == "ok"

    async def decide_later(call):
        await asyncio.sleep(0)
        return decide(call)

    service = aqueduct.Service("test", authorize=decide_later if is_async else decide)
    begun = []

    @service.handler("echo")
    def echo(batch):
        begun.append(batch)
        return batch

    async with connected(service, carrier) as client:

        async def ask(token):
            if shape == "exchange":
                return await everything(client.exchange("echo", [numbers(1)], token=token))
            if shape == "call":
                return [await client.call("echo", numbers(1), token=token)]
            return await everything(client.source("aqueduct.describe", token=token))

        for token in (None, "wrong"):
            with pytest.raises(Refused, match="does not allow the call"):
                await ask(token)
        assert not begun and service.counters()["refused"] == 2
        assert len(await ask("ok")) == 1


@pytest.mark.parametrize("answer", [None, True], ids=repr)
async def test_authorize_that_returns_none_or_true_allows(answer):
    service = aqueduct.Service("test", authorize=lambda call: answer)
    service.handler("echo")(lambda batch: batch)
    async with connected(service) as client:
        assert values(await everything(client.exchange("echo", [numbers(1)]))) == [[1]]


ODD: dict[str, Any] = {
    "zero": 0,
    "one": 1,
    "text": "ok",
    "no text": "",
    "a dict": {"user": "me"},
    "a list": [],
    "numpy": _NumpyBool(),
    "a function": lambda: True,
    "not implemented": NotImplemented,
}


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("name", ODD)
async def test_authorize_that_returns_anything_else_refuses(name, is_async, caplog):
    def decide(call):
        return ODD[name]

    async def decide_later(call):
        return ODD[name]

    service = aqueduct.Service("test", authorize=decide_later if is_async else decide)
    service.handler("echo")(lambda batch: batch)
    async with connected(service) as client:
        with pytest.raises(Refused, match="could not decide about the call"):
            await everything(client.exchange("echo", [numbers(1)]))
    (record,) = (one for one in caplog.records if one.levelname == "ERROR")
    assert f"authorize returned {ODD[name]!r}" in record.getMessage()
    assert "only None and True allow" in record.getMessage()
    assert ("return bool(...) of it" in record.getMessage()) == (name == "numpy")


def test_a_plain_function_may_authorize():
    def authorize(call):
        if call.token is None:
            raise Refused("no token")

    service = aqueduct.Service("test", authorize=authorize)
    service.handler("echo")(lambda batch: batch)
    with sync_client(service, token=b"any") as client:
        assert values(list(client.exchange("echo", [numbers(1)]))) == [[1]]
    with sync_client(service) as client:
        with pytest.raises(Refused, match="no token"):
            list(client.exchange("echo", [numbers(1)]))
