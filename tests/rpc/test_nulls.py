"""Nulls in fields that are declared without them, in calls: refused by name, on both sides."""

from __future__ import annotations

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.ipc import adopt
from aqueduct.client.unary import UnaryCaller
from aqueduct.errors import BadCall, SchemaMismatch
from aqueduct.rpc.request import CallHead
from tests.support.calls import connected, numbers, sync_client
from tests.support.selection import mostly_long

STRICT = pa.schema([("a", pa.struct([pa.field("x", pa.int64(), nullable=False)]))])
OPEN = pa.schema([("a", pa.struct([("x", pa.int64())]))])
NAMED = "column 'a.x' is declared int64 not null, and 1 of its values are null"


def batch_of(*values):
    """Read as if nothing in it were null."""
    return adopt(pa.record_batch([pa.array(values, OPEN.field(0).type)], schema=OPEN), STRICT)


GOOD, BAD = batch_of({"x": 1}, None), batch_of({"x": None})


@pytest.fixture(params=mostly_long(["memory", "quic", "draft"], "memory", "draft"))
def carrier(request):
    return request.param


def make():
    service = aqueduct.Service("nulls")

    @service.handler("function", output=STRICT)
    def function(batch):
        return BAD if batch["id"][0].as_py() else GOOD

    @service.handler("coroutine", output=STRICT)
    async def coroutine(batch):
        return BAD if batch["id"][0].as_py() else GOOD

    @service.handler("generator", output=STRICT)
    def generator(batches):
        for batch in batches:
            yield function(batch)

    @service.handler("async generator", output=STRICT)
    async def async_generator(batches):
        async for batch in batches:
            yield function(batch)

    @service.handler("echo", input=STRICT, output=STRICT)
    def echo(batch):
        return batch

    return service


SHAPES = ["function", "coroutine", "generator", "async generator"]


@pytest.mark.parametrize("handler", SHAPES)
async def test_an_answer_with_a_nested_null_is_refused_by_name(carrier, handler):
    async with connected(make(), carrier) as client:
        found = []
        with pytest.raises(SchemaMismatch, match=f"the output of handler '{handler}': {NAMED}"):
            async for batch in client.exchange(handler, [numbers(0), numbers(1)]):
                found.append(batch)  # noqa: PERF401  those before the error count
        assert found == [GOOD]
        with pytest.raises(SchemaMismatch, match=NAMED):
            await client.call(handler, numbers(1))
        assert (await client.call(handler, numbers(0))).equals(GOOD)


async def test_a_batch_with_a_nested_null_is_refused_before_it_is_sent(carrier):
    async with connected(make(), carrier) as client:
        with pytest.raises(SchemaMismatch, match=f"the input of handler 'echo': {NAMED}"):
            await client.call("echo", BAD)
        with pytest.raises(SchemaMismatch, match=NAMED):
            async for batch in client.exchange("echo", [GOOD, BAD]):
                assert batch.equals(GOOD)
        assert (await client.call("echo", GOOD)).equals(GOOD)


@pytest.mark.requirement("AC-26")
async def test_a_nested_null_of_a_peer_is_refused_where_it_comes(carrier):
    """A client of another library may not look for it."""
    async with connected(make(), carrier) as client:
        head = CallHead("echo", "exchange", schema=STRICT)
        caller = UnaryCaller(client.connection, head, peer=client.address)
        encoded = Encoder(OPEN).encode(adopt(BAD, OPEN))
        with pytest.raises(BadCall, match=f"batch 0 of the input .* cannot be read: {NAMED}"):
            await client.link.ask(caller, encoded)


def test_a_sync_client_hears_of_nested_nulls():
    with sync_client(make()) as client:
        with pytest.raises(SchemaMismatch, match=NAMED):
            list(client.exchange("generator", [numbers(1)]))
        with pytest.raises(SchemaMismatch, match=NAMED):
            list(client.exchange("echo", [BAD]))
        assert list(client.exchange("echo", [GOOD])) == [GOOD]
