"""Handlers asked in JSON: rows in, rows out, by the SETUP or by a header."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.config import DEFAULT, Flow
from aqueduct.endpoint import accounts
from aqueduct.errors import ReactiveError
from tests.service.reactive_clients import WORDS, asked, asking, headers, rows_of, words
from tests.support.calls import config, until

WIDE = pa.schema([("v", pa.list_(pa.float64(), 64))])
WIDE_ROWS = b"[" + b",".join([b"{}"] * 1000) + b"]"  # of 512 bytes each, as columns
SUMS = pa.schema([("id", pa.int64()), ("sum", pa.float64())])


@pytest.fixture
def service():
    service = aqueduct.Service("sums")

    @service.handler("sums", input=pa.schema([("n", pa.list_(pa.float64()))]), output=SUMS)
    async def sums(batch):
        rows = batch["n"].to_pylist()
        return pa.record_batch(
            {"id": pa.array(range(len(rows)), pa.int64()), "sum": [sum(row) for row in rows]}
        )

    @service.handler("any")
    async def any_(batch):
        return batch

    @service.handler("pages", kind="source", output=SUMS)
    def pages():
        for number in range(2):
            yield pa.record_batch({"id": [number], "sum": [1.5]}, schema=SUMS)

    @service.handler("bad", kind="source", output=pa.schema([("t", pa.timestamp("s"))]))
    def bad():
        yield pa.record_batch({"t": pa.array([2**60], pa.timestamp("s"))})

    @service.handler("echo", input=WORDS)
    async def echo(batch):
        return batch

    service.gate = asyncio.Event()  # type: ignore[attr-defined]

    @service.handler("held", input=WIDE)
    async def held(batch):
        await service.gate.wait()  # type: ignore[attr-defined]
        return batch.slice(0, 1)

    @service.handler("held in a thread", input=WIDE)
    def held_in_a_thread(batches):
        for batch in batches:
            asyncio.run_coroutine_threadsafe(
                service.gate.wait(),  # type: ignore[attr-defined]
                service.loop,  # type: ignore[attr-defined]
            ).result(20)
            yield batch.slice(0, 1)

    return service


@pytest.mark.parametrize("setup", [b"", headers(format="json")])
async def test_rows_go_in_and_out(service, setup):
    said = {} if setup else {"format": "json"}
    async with asking(service, setup=setup) as (running, client):
        body = json.dumps([{"n": [1, 2]}, {"n": []}]).encode()
        item = await client.request(headers(handler="sums", **said) + body)
        assert json.loads(bytes(item.data)) == [{"id": "0", "sum": 3}, {"id": "1", "sum": 0}]
        item = await client.request(headers(handler="sums", **said) + b'{"n":[1]}\n{"n":[2]}\n')
        assert len(json.loads(bytes(item.data))) == 2
        async with client.stream(headers(handler="pages", **said), n=8) as stream:
            found = [json.loads(bytes(item.data)) async for item in stream]
        assert found == [[{"id": "0", "sum": 1.5}], [{"id": "1", "sum": 1.5}]]
        await until(lambda: not running.calls)
        assert running.counters()["rows_in"] == 4
        assert running.counters()["rows_out"] == 6


async def test_a_request_may_be_of_arrow_where_the_setup_says_json(service):
    async with asking(service, setup=headers(format="json")) as (_, client):
        item = await client.request(asked("echo", words("a"), format="arrow"))
        assert rows_of(item.data) == [["a"]]


@pytest.mark.parametrize(
    ("handler", "body", "says"),
    [
        ("sums", b'[{"n":[1]},{"n":["x"]}]', "row 1, column 'n': a number is wanted"),
        ("sums", b'[{"m":[1]}]', "row 0: 'm' is none of the names"),
        ("sums", b"[", "the input of handler 'sums': not JSON rows: the array does not end"),
        ("sums", b"", "the request has no body"),
        ("sums", b"[" + b"1," * 600 + b"1]", "above the limit of 500 .ReactiveSocket.json_values"),
        ("any", b"[]", "declares no input=, by which rows of JSON are read"),
        ("none", b"[]", "unknown-handler"),
    ],
)
async def test_what_does_not_fit_is_an_error_that_says_where(service, handler, body, says):
    service.config = config(reactivesocket={"json_values": 500})
    async with asking(service, setup=headers(format="json")) as (_, client):
        with pytest.raises(ReactiveError, match=says):
            await client.request(headers(handler=handler) + body)


async def test_an_answer_without_a_form_is_the_fault_of_the_handler(service, caplog):
    async with asking(service, setup=headers(format="json")) as (_, client):
        with pytest.raises(ReactiveError, match=r"handler-failed: .*row 0, column 't'"):
            async with client.stream(headers(handler="bad")) as stream:
                await stream.receive()
    assert "bad" in caplog.text


async def test_many_rows_are_read_and_written_in_threads(service):
    async with asking(service, setup=headers(format="json")) as (_, client):
        rows = [{"word": f"word {number}"} for number in range(20_000)]
        item = await client.request(headers(handler="echo") + json.dumps(rows).encode())
        assert json.loads(bytes(item.data)) == rows


async def items_of(client, body):
    async with client.stream(body, n=1) as stream:
        return [json.loads(bytes(item.data)) async for item in stream]


@pytest.mark.parametrize("handler", ["held", "held in a thread"])
async def test_the_columns_of_rows_count_in_memory_until_their_call_ends(service, handler):
    service.loop = asyncio.get_running_loop()
    receiving = accounts.process().receiving
    async with asking(service) as (running, client):
        before = receiving.used
        body = headers(handler=handler, format="json") + WIDE_ROWS
        asking_it = asyncio.create_task(items_of(client, body))
        await until(lambda: receiving.used - before > 512_000)
        assert receiving.used - before < 600_000
        (state,) = running.state()["connections"]
        assert state["held_bytes"] > 512_000
        service.gate.set()
        assert await asking_it == [[{"v": None}]]
        await until(lambda: receiving.used == before)


async def test_columns_of_a_client_that_has_gone_count_no_more(service):
    receiving = accounts.process().receiving
    before = receiving.used
    async with asking(service) as (running, client):
        body = headers(handler="held", format="json") + WIDE_ROWS
        asking_it = asyncio.create_task(items_of(client, body))
        await until(lambda: receiving.used - before > 512_000)
        asking_it.cancel()
        await until(lambda: not running.calls)
    await until(lambda: receiving.used == before)


async def test_columns_above_the_budget_of_the_process_are_refused(service):
    receiving = accounts.process().receiving
    before = receiving.used
    flow = Flow(process_receive_budget=before + 400_000)
    service.config = replace(DEFAULT, flow=flow)
    async with asking(service) as (running, client):
        body = headers(handler="held", format="json") + WIDE_ROWS
        text = r"busy: .*'held': the columns of its rows have no room.*process_receive_budget"
        with pytest.raises(ReactiveError, match=text):
            await client.request(body)
        await until(lambda: not running.calls)
        service.gate.set()
        item = await client.request(headers(handler="held", format="json") + b"[{}]")
        assert json.loads(bytes(item.data)) == [{"v": None}]
        item.release()
    await until(lambda: receiving.used == before)
