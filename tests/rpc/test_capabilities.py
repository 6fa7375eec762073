"""What a call may ask for: answers as they are made, and failures of single batches."""

from __future__ import annotations

import asyncio
import threading

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.arrow.encode import Encoder
from aqueduct.client.client import Client
from aqueduct.endpoint import serve
from aqueduct.errors import (
    BadCall,
    BatchTooLarge,
    CallError,
    HandlerFailed,
    Refused,
    SchemaMismatch,
)
from aqueduct.rpc.fragments import batch_headers, fragments
from aqueduct.rpc.request import Accepted
from aqueduct.rpc.status import Status
from tests.support.calls import (
    NUMBERS,
    address_of,
    config,
    connected,
    everything,
    numbers,
    serving,
    sync_client,
    values,
)
from tests.support.selection import mostly_long


@pytest.fixture(params=mostly_long(["memory", "quic", "draft"], "memory", "draft"))
def carrier(request):
    return request.param


class Turns:
    """A handler whose batches end in the order that the test says."""

    def __init__(self, service, *, coroutine):
        self.gates = {}
        if coroutine:

            @service.handler("turns", input=NUMBERS, output=NUMBERS, concurrency=4, idempotent=True)
            async def turns(batch):
                await asyncio.to_thread(self.gate(batch).wait, 30)
                return batch
        else:

            @service.handler("turns", input=NUMBERS, output=NUMBERS, concurrency=4, idempotent=True)
            def turns(batch):
                self.gate(batch).wait(30)
                return batch

    def gate(self, batch):
        return self.gates.setdefault(batch["id"][0].as_py(), threading.Event())

    def open(self, value):
        self.gates.setdefault(value, threading.Event()).set()


@pytest.mark.requirement("AC-45")
@pytest.mark.requirement("AC-46")
@pytest.mark.requirement("AC-48")
@pytest.mark.parametrize("coroutine", [False, True])
async def test_answers_come_as_they_are_made(carrier, coroutine):
    service = aqueduct.Service("test")
    turns = Turns(service, coroutine=coroutine)
    async with connected(service, carrier) as client:
        given = [numbers(value) for value in range(6)]
        async with client.exchange("turns", given, ordered=False) as stream:
            assert stream.number == -1 and not stream.capabilities
            await stream.opened()
            assert stream.capabilities == {"one-to-one", "idempotent", "as-completed"}
            # Of four at work and as many that wait, in an order that only the handler knows.
            for value in (2, 1, 3, 5, 0, 4):
                turns.open(value)
                async with asyncio.timeout(20):
                    batch = await anext(stream)
                assert (stream.number, values([batch])) == (value, [[value]])
            assert not stream.over
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert stream.over
        assert stream.counters["batches_out"] == 6


async def test_one_slow_batch_does_not_fill_the_window():
    """In order, batch 0 would let ``in_flight`` batches out and no more."""
    service = aqueduct.Service("test")
    turns = Turns(service, coroutine=True)
    async with connected(service) as client:
        given = [numbers(value) for value in range(40)]
        for value in range(1, 40):
            turns.open(value)
        async with client.exchange("turns", given, ordered=False, in_flight=3) as stream:
            seen: list[int] = []
            async with asyncio.timeout(20):
                while len(seen) < 39:
                    await anext(stream)
                    seen.append(stream.number)
            assert sorted(seen) == list(range(1, 40))
            turns.open(0)
            assert values(await everything(stream)) == [[0]]


def test_a_sync_client_has_the_numbers_too():
    service = aqueduct.Service("test")
    turns = Turns(service, coroutine=False)
    with sync_client(service) as client:
        stream = client.exchange("turns", [numbers(7), numbers(8)], ordered=False)
        assert stream.number == -1 and stream.capabilities == frozenset()
        turns.open(8)
        assert values([next(stream)]) == [[8]] and stream.number == 1
        assert stream.capabilities == {"one-to-one", "idempotent", "as-completed"}
        turns.open(7)
        assert values([next(stream)]) == [[7]] and stream.number == 0
        assert not stream.over
        assert list(stream) == [] and stream.over
        assert stream.bytes_sent == stream.counters["bytes_in"] > 0
        assert stream.bytes_received == stream.counters["bytes_out"] > 0
        assert stream.waited > 0


async def test_answers_larger_than_a_message_come_as_they_are_made():
    settings = config(calls={"fragment_bytes": 1000})
    service = aqueduct.Service("test", config=settings)
    turns = Turns(service, coroutine=True)
    large = [numbers(*[value] * 2000) for value in range(4)]
    async with connected(service) as client:
        async with client.exchange("turns", large, ordered=False) as stream:
            for value in (3, 0, 2, 1):
                turns.open(value)
                async with asyncio.timeout(20):
                    batch = await anext(stream)
                assert stream.number == value and batch.equals(large[value])
            assert await everything(stream) == []


@pytest.mark.requirement("AC-46")
@pytest.mark.parametrize("shape", ["generator", "async generator"])
async def test_other_handlers_keep_the_order_and_end_with_their_failure(shape):
    service = aqueduct.Service("test")
    if shape == "generator":

        @service.handler("twice", input=NUMBERS, output=NUMBERS)
        def twice(batches, call):
            for batch in batches:
                yield batch
                yield batch
            raise ValueError("no more")
    else:

        @service.handler("twice", input=NUMBERS, output=NUMBERS)
        async def twice(batches, call):
            async for batch in batches:
                yield batch
                yield batch
            raise ValueError("no more")

    async with connected(service) as client:
        given = [numbers(value) for value in range(20)]
        stream = client.exchange("twice", given, ordered=False, report_failures=True, in_flight=2)
        await stream.opened()
        assert stream.capabilities == frozenset()
        seen = []
        for _ in range(40):
            batch = await anext(stream)
            seen.append((stream.number, batch["id"][0].as_py()))
        assert seen == [(value, value) for value in range(20) for _ in range(2)]
        with pytest.raises(HandlerFailed, match="no more"):
            await anext(stream)
        assert stream.over


def picky(service, **options):
    @service.handler("picky", input=NUMBERS, output=NUMBERS, **options)
    def picky(batch):
        value = batch["id"][0].as_py()
        if value % 5 == 1:
            raise KeyError(value)
        if value % 5 == 2:
            return pa.record_batch({"other": [1]})  # not what was declared
        if value % 5 == 3:
            return "text"
        return batch


@pytest.mark.requirement("AC-49")
@pytest.mark.parametrize("ordered", [True, False])
async def test_a_batch_that_fails_does_not_end_the_call(carrier, ordered):
    service = aqueduct.Service("test")
    picky(service, concurrency=4)
    async with connected(service, carrier) as client:
        given = [numbers(value) for value in range(25)]
        stream = client.exchange("picky", given, ordered=ordered, report_failures=True)
        found, order = {}, []
        while True:
            try:
                outcome = await anext(stream)
            except StopAsyncIteration:
                break
            except CallError as error:
                outcome = error
            if isinstance(outcome, CallError):
                assert outcome.batch == stream.number and not stream.over
            assert stream.number not in found
            found[stream.number] = outcome
            order.append(stream.number)
        assert stream.over and "failures" in stream.capabilities
        assert sorted(found) == list(range(25))
        assert order == sorted(order) or not ordered
        for value, outcome in found.items():
            kind = value % 5
            if kind in (0, 4):
                assert values([outcome]) == [[value]]
            elif kind == 1:
                assert type(outcome) is HandlerFailed and outcome.kind == "KeyError"
                assert f"batch {value}" in str(outcome) and "picky" in outcome.remote_traceback
            elif kind == 2:
                assert type(outcome) is SchemaMismatch and "other" in str(outcome)
            else:
                assert type(outcome) is HandlerFailed and "got str" in str(outcome)
        assert stream.counters["batches_in"] == 25 and stream.counters["batches_out"] == 10
    assert service.counters()["failed"] == 0


async def test_an_answer_above_the_limit_is_a_failure_of_its_batch():
    service = aqueduct.Service(
        "test", config=config(calls={"batch_limit": 10_000, "fragment_bytes": 5_000})
    )

    @service.handler("grow", input=NUMBERS, output=NUMBERS)
    def grow(batch):
        return numbers(*range(batch["id"][0].as_py()))

    async with connected(service) as client:
        given = [numbers(10), numbers(5_000), numbers(20)]
        stream = client.exchange("grow", given, report_failures=True)
        assert (await anext(stream)).num_rows == 10
        with pytest.raises(BatchTooLarge, match=r"batch 1: .* yield fewer rows"):
            await anext(stream)
        assert (await anext(stream)).num_rows == 20
        assert await everything(stream) == []


async def test_dictionaries_outlive_a_failure():
    """The answers behind it stand on dictionaries that were sent before."""
    words = pa.schema([("word", pa.dictionary(pa.int32(), pa.string()))])
    service = aqueduct.Service("test")

    @service.handler("words", input=words, output=words)
    def echo(batch):
        if batch["word"][0].as_py() == "bad":
            raise ValueError("a bad word")
        return batch

    def batch(*values):
        return pa.record_batch({"word": pa.array(values).dictionary_encode()}, schema=words)

    async with connected(service) as client:
        given = [batch("a"), batch("bad", "b"), batch("c", "a")]
        stream = client.exchange("words", given, schema=words, report_failures=True)
        assert (await anext(stream))["word"].to_pylist() == ["a"]
        with pytest.raises(HandlerFailed, match="a bad word"):
            await anext(stream)
        assert (await anext(stream))["word"].to_pylist() == ["c", "a"]
        assert await everything(stream) == []


async def test_without_the_capability_a_failure_ends_the_call():
    service = aqueduct.Service("test")
    picky(service)
    async with connected(service) as client:
        stream = client.exchange("picky", [numbers(0), numbers(1), numbers(0)])
        assert values([await anext(stream)]) == [[0]]
        with pytest.raises(HandlerFailed) as caught:
            await anext(stream)
        assert caught.value.batch == 1 and stream.over
        assert stream.capabilities == {"one-to-one"}


@pytest.mark.requirement("AC-50")
async def test_the_end_of_the_service_is_no_failure_of_a_batch(carrier):
    service = aqueduct.Service("test")
    turns = Turns(service, coroutine=True)
    async with serving(service, carrier, drain=0.01) as running:
        async with await Client.connect(running.addresses[0]) as client:
            stream = client.exchange("turns", [numbers(1), numbers(2)], report_failures=True)
            turns.open(1)
            await anext(stream)
            closing = asyncio.create_task(running.close(drain=0.01))
            with pytest.raises(Refused, match="the service 'test' is ending") as caught:
                await anext(stream)
            assert caught.value.draining and stream.over
            turns.open(2)
            await closing


async def test_a_service_that_drains_says_so():
    service = aqueduct.Service("test")
    turns = Turns(service, coroutine=True)
    async with serving(service, drain=20) as running:
        address = running.addresses[0]
        async with await Client.connect(address) as client:
            stream = client.exchange("turns", [numbers(1)])
            await stream.opened()
            closing = asyncio.create_task(running.close(drain=20))
            await asyncio.sleep(0)
            with pytest.raises(Refused, match="is ending") as caught:
                await client.exchange("turns", [numbers(1)]).opened()
            assert caught.value.draining
            turns.open(1)
            assert values(await everything(stream)) == [[1]]
            await closing


# Services that do not follow the convention


async def other(*messages, capabilities=()):
    """A server that accepts every call, sends ``messages``, and then that all is well."""

    async def on_connection(connection):
        async for message in connection.entrypoint:
            output, status = (attachment.handle for attachment in message.attachments[1:])
            headers, payload = Accepted(NUMBERS, capabilities=frozenset(capabilities)).encode()
            output.send_nowait(payload, headers=headers)
            for headers, payload in messages:
                output.send_nowait(payload, headers=headers)
            output.finish()
            headers, end = Status("ok").encode()
            status.send_nowait(end, headers=headers)
            await output.wait_closed()

    address = address_of("memory")
    return await serve(on_connection, address), address


def answer(number, value=1, *, cut=1 << 20):
    return list(fragments(Encoder(NUMBERS).encode(numbers(value)), number, cut))


def failure(number, code=b"handler-failed", payload=b"{}"):
    return ((*batch_headers(number), (b"arrow-status-8b3ba8", code)), payload)


LOOSE = ("one-to-one", "as-completed", "failures")
HOSTILE = {
    "twice": (LOOSE, [*answer(1), *answer(1)], "batch 1 was answered, which was not sent, or is a"),
    "never sent": (LOOSE, answer(2), "batch 2 was answered, which was not sent"),
    "failed twice": (LOOSE, [failure(0), failure(0)], "batch 0 was answered, which was not sent"),
    "failed and answered": (LOOSE, [failure(0), *answer(0)], "batch 0 was answered, which was"),
    "failed well": (LOOSE, [failure(0, b"ok")], "batch 0 failed with the status 'ok' out of turn"),
    "failed inside": (
        LOOSE,
        [answer(0, cut=40)[0], failure(1)],
        "batch 1 failed with the status 'handler-failed' out of turn",
    ),
    "no JSON": (LOOSE, [failure(0, payload=b"{")], "the status is not JSON"),
    "a strange batch": (LOOSE, [(failure(0)[0][1:], b"{}")], "is b'', which is not a number"),
    "backwards": ((), [*answer(1), *answer(0)], "an answer to batch 0 came behind one to batch 1"),
    "backwards, failed": (
        ("failures",),
        [*answer(1), failure(0)],
        "an answer to batch 0 came behind one to batch 1",
    ),
    "beyond, in fragments": ((), answer(7, cut=40), "batch 7 was answered and 2 were sent"),
}


@pytest.mark.requirement("AC-34")
async def test_an_answer_to_no_batch_has_the_number_0():
    for cut in (40, 1 << 20):  # by the general way, and by the quick one
        server, address = await other(*answer(0, cut=cut))
        async with server, await Client.connect(address) as client:
            stream = client.exchange("any", [], schema=NUMBERS)
            assert values(await everything(stream)) == [[1]] and stream.number == 0


@pytest.mark.requirement("AC-33")
@pytest.mark.requirement("AC-34")
@pytest.mark.requirement("AC-48")
@pytest.mark.requirement("AC-49")
@pytest.mark.parametrize(("capabilities", "messages", "text"), HOSTILE.values(), ids=HOSTILE)
async def test_services_that_break_what_they_granted(capabilities, messages, text):
    server, address = await other(*messages, capabilities=capabilities)
    async with server, await Client.connect(address) as client:
        given = [numbers(1), numbers(2)]
        stream = client.exchange("any", given, ordered=False, report_failures=True)
        with pytest.raises(BadCall, match=text):
            while True:
                try:
                    await anext(stream)
                except HandlerFailed:
                    assert not stream.over


@pytest.mark.requirement("AC-47")
async def test_what_was_not_asked_for_is_not_taken_as_granted():
    server, address = await other(
        *answer(1), *answer(0), capabilities=("one-to-one", "as-completed")
    )
    async with server, await Client.connect(address) as client:
        stream = client.exchange("any", [numbers(1), numbers(2)])
        await anext(stream)
        assert stream.capabilities == {"one-to-one"}
        with pytest.raises(BadCall, match="an answer to batch 0 came behind one to batch 1"):
            await anext(stream)
