"""Calls of one batch that end before their end, and peers that do not keep to the convention."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.arrow.encode import Encoder
from aqueduct.client.client import Client
from aqueduct.endpoint import channel, serve
from aqueduct.errors import (
    BadCall,
    CallError,
    Cancelled,
    ChannelError,
    ConnectionLost,
    DeadlineExceeded,
    ReceiverClosed,
    SchemaMismatch,
)
from aqueduct.rpc import keys
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.status import Status
from aqueduct.rpc.unary import UnaryTemplate, encode_answer, schema_prefix
from tests.support.calls import (
    ENDS,
    NUMBERS,
    PAIRS,
    Watched,
    config,
    connected,
    numbers,
    raw_connection,
    serving,
    until,
)
from tests.support.selection import mostly_long

HANDLERS = [name for name in ENDS if name not in ("generator", "async generator")]
"""Those of Watched that do not answer one batch at once."""


@pytest.fixture(params=mostly_long(["memory", "quic", "draft"], "memory", "draft"))
def carrier(request):
    return request.param


@pytest.mark.requirement("AC-62")
@pytest.mark.parametrize("handler", HANDLERS)
async def test_a_call_whose_task_is_cancelled_ends_the_handler(carrier, handler):
    watched = Watched()
    async with connected(watched.service, carrier) as client:
        task = asyncio.create_task(client.call(handler, numbers(1)))
        await watched.wait(watched.begun)
        assert not watched.call.cancelled
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await watched.wait(watched.told)
        await watched.wait(watched.ended)
        assert watched.how in ENDS[handler]
        with pytest.raises(Cancelled, match="the client abandoned the call"):
            watched.call.check()
        await watched.idle()
        counters = watched.service.counters()
        assert (counters["cancelled"], counters["failed"]) == (1, 0)
        assert await client.call("generator", numbers(2)) == numbers(2)


@pytest.mark.parametrize("turns", range(12))
async def test_cancelled_in_any_turn_of_the_loop(turns):
    """Before it is sent, under way, answered: nothing is left of it, and the next call works."""
    service = aqueduct.Service("test")

    @service.handler("echo")
    async def echo(batch):
        await asyncio.sleep(0)
        return batch

    async with connected(service) as client:
        for _ in range(3):
            task = asyncio.create_task(client.call("echo", numbers(1)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                assert await task == numbers(1)
            except asyncio.CancelledError:
                pass
        assert await client.call("echo", numbers(2)) == numbers(2)
        await until(lambda: not service.counters()["open_calls"])
        await until(lambda: client.connection.snapshot().channel_count == 1)
        assert client.connection._holds == 1


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("who", ["client", "service"])
async def test_a_lost_connection_ends_both_sides(carrier, handler, who):
    watched = Watched()
    async with serving(watched.service, carrier) as running:
        client = await Client.connect(running.addresses[0])
        task = asyncio.create_task(client.call(handler, numbers(1)))
        await watched.wait(watched.begun)
        if who == "client":
            await client.close()
        else:
            (connection,) = running.connections
            connection.close_soon(0, "gone")
        with pytest.raises(ConnectionLost):
            await task
        await watched.wait(watched.ended)
        assert watched.how in ENDS[handler]
        with pytest.raises(ConnectionLost):
            watched.call.check()
        await watched.idle()
        if who == "client":
            with pytest.raises(ConnectionLost):
                await client.call(handler, numbers(1))
        else:  # it connects again
            await client.describe()
            assert client.endpoints[0].connections == 2
        await client.close()


async def test_a_call_that_is_dropped_ends_the_handler():
    watched = Watched()
    async with connected(watched.service) as client:
        call = client.call("coroutine", numbers(1))
        call.send(None)  # its first step, and no other
        await watched.wait(watched.begun)
        call.close()
        del call
        gc.collect()
        await watched.wait(watched.ended)
        assert watched.how == "CancelledError"
        await watched.idle()


async def test_cancelled_while_a_large_answer_comes(carrier):
    watched = Watched(config=config(calls={"unary_bytes": 1024}))

    @watched.service.handler("endless", output=NUMBERS)
    async def endless(batches, call):
        with watched.watching(call):
            async for _ in batches:
                while True:
                    yield numbers(*range(100_000))

    async with connected(watched.service, carrier) as client:
        task = asyncio.create_task(client.call("endless", numbers(1)))
        await until(lambda: watched.service.counters()["batches_out"] > 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await watched.wait(watched.ended)
        await watched.idle()
        assert watched.service.counters()["cancelled"] == 1
        await until(lambda: client.connection.snapshot().channel_count == 1)


async def test_no_room_to_send_is_waited_for_within_the_deadline():
    """A service that reads nothing: the call waits, and gives up in time."""
    flow = config(flow={"channel_high_water": 1000, "connection_high_water": 2000})

    async def deaf(connection):
        await connection.wait_closed()

    async with (
        await serve(
            deaf,
            "memory://deaf",
            config=config(
                flow={"channel_receive_bytes": 1000, "initial_window": 1000, "receive_budget": 1000}
            ),
        ) as server,
        await Client.connect(server.addresses[0], config=flow) as client,
    ):
        waiting = [
            asyncio.create_task(client.call("any", numbers(*range(200)), deadline=2))
            for _ in range(5)
        ]
        await until(lambda: not client.connection.entrypoint.writable)
        assert client.connection.entrypoint.queued < 2 * 4000
        for task in waiting:
            with pytest.raises(DeadlineExceeded):
                await task


# Clients that do not keep to the convention

QUESTION = UnaryTemplate(CallHead("echo", "exchange", schema=NUMBERS))
BATCH = b"".join(bytes(part) for part in Encoder(NUMBERS).encode(numbers(1)).buffers)


def replaced(key, value):
    return tuple((k, value if k == key else v) for k, v in QUESTION.headers)


WRONG = {
    "no body": ([p for p in QUESTION.headers if p[0] != keys.BODY], QUESTION.prefix + BATCH),
    "a body that is no number": (replaced(keys.BODY, b"x"), QUESTION.prefix + BATCH),
    "a body beyond the end": (replaced(keys.BODY, b"99999"), QUESTION.prefix + BATCH),
    "a body inside the schema": (replaced(keys.BODY, b"16"), QUESTION.prefix + BATCH),
    "a body inside the batch": (
        replaced(keys.BODY, b"%d" % (QUESTION.body + 8)),
        QUESTION.prefix + BATCH,
    ),
    "no schema": (replaced(keys.BODY, b"0"), QUESTION.prefix + BATCH),
    "two bodies": ((*QUESTION.headers, (keys.BODY, b"8")), QUESTION.prefix + BATCH),
    "no batch": (QUESTION.headers, QUESTION.prefix),
    "nothing": (QUESTION.headers, b""),
    "two kinds": ((*QUESTION.headers, (keys.KIND, b"exchange")), QUESTION.prefix + BATCH),
    "garbage for a batch": (QUESTION.headers, QUESTION.prefix + b"\xff" * 64),
    "a batch cut short": (QUESTION.headers, QUESTION.prefix + BATCH[:-8]),
    "something behind the batch": (QUESTION.headers, QUESTION.prefix + BATCH + bytes(8)),
    "another version": (replaced(keys.CALL, b"2"), QUESTION.prefix + BATCH),
    "schemas of 9 MiB": (
        replaced(keys.BODY, b"%d" % (9 << 20)),
        QUESTION.prefix + bytes((9 << 20) - QUESTION.body) + BATCH,
    ),
}


@pytest.mark.requirement("AC-6")
@pytest.mark.requirement("AC-56")
@pytest.mark.parametrize("wrong", WRONG)
async def test_a_malformed_call_is_refused_and_does_no_harm(wrong, carrier):
    headers, payload = WRONG[wrong]
    async with RawEcho(carrier) as (service, connection):
        for _ in range(2):
            sender, status = channel(oneshot=True)
            connection.entrypoint.send_nowait(payload, headers=tuple(headers), attachments=[sender])
            error = await end_of(status)
            assert isinstance(error, CallError) and error.status == "bad-call", error
            good, status = channel(oneshot=True)
            connection.entrypoint.send_nowait(
                [QUESTION.prefix, BATCH], headers=QUESTION.headers, attachments=[good]
            )
            assert await end_of(status) is None
        await until(lambda: not service.counters()["open_calls"])
        assert connection.snapshot().channel_count == 1


class RawEcho:
    """A service and a bare connection to it."""

    def __init__(self, carrier="memory"):
        self.service = aqueduct.Service("test")
        self.carrier = carrier

        @self.service.handler("echo")
        async def echo(batch):
            return batch

    async def __aenter__(self):
        self.serving = serving(self.service, self.carrier)
        running = await self.serving.__aenter__()
        self.connection = await raw_connection(running.addresses[0])
        return self.service, self.connection

    async def __aexit__(self, *exc):
        await self.connection.close()
        await self.serving.__aexit__(*exc)


async def end_of(status):
    async with asyncio.timeout(20):
        message = await status.receive()
    if any(key == keys.ANSWERS for key, _ in message.headers):
        return None
    return Status.decode(message.headers, message.payload).to_exception()


@pytest.mark.requirement("AC-15")
async def test_attachments_of_a_call_that_are_none():
    """Each set of channels is ended; where there is a sender, it says why."""
    async with RawEcho() as (service, connection):

        def send(*attachments):
            connection.entrypoint.send_nowait(
                [QUESTION.prefix, BATCH], headers=QUESTION.headers, attachments=list(attachments)
            )

        send()
        sender, receiver = channel(oneshot=True)
        send(receiver)
        with pytest.raises(ReceiverClosed):
            await sender.wait_closed()
        one, status = channel()
        send(one)  # no oneshot
        assert "the sender of a oneshot; 1 came" in str(await end_of(status))
        first, first_status = channel(oneshot=True)
        second, second_status = channel(oneshot=True)
        send(first, second)
        assert "the sender of a oneshot; 2 came" in str(await end_of(second_status))
        with pytest.raises(ChannelError):
            await first_status.receive()
        await until(lambda: service.counters()["refused"] == 4)
        assert service.counters()["calls"] == 0
        good, status = channel(oneshot=True)
        send(good)
        assert await end_of(status) is None


# Services that do not keep to the convention

PREFIX = schema_prefix(NUMBERS)
GOOD = encode_answer(PREFIX, [Encoder(NUMBERS).encode(numbers(1))])
END = len(PREFIX) + len(BATCH)


def answer(text, payload=PREFIX + BATCH, code=b"ok"):
    return ((keys.STATUS, code), (keys.ANSWERS, text)), payload


BAD_ANSWERS = {
    "nothing": ((), b""),
    "ok without answers": (((keys.STATUS, b"ok"),), b"{}"),
    "answers without a status": (((keys.ANSWERS, b"1"),), b"{}"),
    "no numbers": answer(b""),
    "numbers that are none": answer(b"%d,x" % len(PREFIX)),
    "numbers that fall": answer(b"%d,8" % len(PREFIX)),
    "numbers that stand still": answer(b"%d,%d,%d" % (len(PREFIX), len(PREFIX), END)),
    "numbers beyond the end": answer(b"%d,%d" % (len(PREFIX), END + 1)),
    "bytes behind the last": answer(b"%d,%d" % (len(PREFIX), END), PREFIX + BATCH + b"x"),
    "too many": answer(b",".join([b"1"] * 2000)),
    "a schema that is none": answer(b"8,%d" % END),
    "no schema": answer(b"0,%d" % END),
    "a batch that is none": answer(b"%d,%d" % (len(PREFIX), END), PREFIX + bytes(len(BATCH))),
    "two statuses": ((*GOOD[0], (keys.STATUS, b"ok")), b"".join(map(bytes, GOOD[1]))),
    "a status that is no JSON": (((keys.STATUS, b"busy"),), b"["),
    "an accept message without channels": (((keys.ACCEPTED, b"1"),), PREFIX),
    "an accept message of another version": (((keys.ACCEPTED, b"2"),), PREFIX),
}


class Answering:
    """A client of a service that answers every call with one message, whatever it is."""

    def __init__(self, headers, payload, attach=lambda: (), then=lambda: None):
        self.message = headers, payload
        self.attach = attach
        self.then = then

    async def __aenter__(self):
        async def serve_one(connection):
            async for message in connection.entrypoint:
                headers, payload = self.message
                message.attachments[0].handle.send_nowait(
                    payload, headers=headers, attachments=self.attach()
                )
                self.then()
            await connection.wait_closed()

        self.server = await serve(serve_one, f"memory://answering-{id(self)}")
        self.client = await Client.connect(self.server.addresses[0])
        return self.client

    async def __aexit__(self, *exc):
        await self.client.close()
        await self.server.close()


async def test_a_good_answer_by_hand():
    async with Answering(*GOOD) as client:
        assert await client.call("any", numbers(7)) == numbers(1)
        with pytest.raises(SchemaMismatch):
            await client.call("any", numbers(7), output_schema=PAIRS)


@pytest.mark.requirement("AC-59")
@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_a_bad_answer_is_an_error_and_nothing_else(name):
    async with Answering(*BAD_ANSWERS[name]) as client:
        for _ in range(2):
            with pytest.raises(BadCall) as caught:
                await client.call("any", numbers(1))
            assert caught.value.handler == "any" and caught.value.peer == client.address
        await until(lambda: client.connection.snapshot().channel_count == 1)


@pytest.mark.requirement("AC-53")
async def test_a_status_of_an_unknown_word():
    headers, payload = ((keys.STATUS, b"strange"),), json.dumps({"message": "odd"}).encode()
    async with Answering(headers, payload) as client:
        with pytest.raises(CallError, match=r"odd .status 'strange'"):
            await client.call("any", numbers(1))


@pytest.mark.requirement("AC-61")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("side", ["senders", "receivers"])
async def test_an_accept_message_with_channels_that_are_none(count, side):
    kept = []

    def attach():
        pairs = [channel() for _ in range(count if side == "receivers" else 2)]
        kept.extend(pairs)
        return [pair[1 if side == "receivers" else 0] for pair in pairs]

    async with Answering(((keys.ACCEPTED, b"1"),), PREFIX, attach) as client:
        with pytest.raises(BadCall, match="where two receivers belong"):
            await client.call("any", numbers(1))
        gc.collect()
        await until(lambda: client.connection.snapshot().channel_count == 1)
        assert client.connection._holds == 1


@pytest.mark.requirement("AC-61")
async def test_answers_that_follow_by_hand_and_stop_in_the_middle():
    pairs: list[Any] = []

    def attach():
        pairs[:] = [channel(), channel(oneshot=True)]
        return [pair[1] for pair in pairs]

    def then():
        output = pairs[0][0]
        output.send_nowait(BATCH, headers=((keys.BATCH, b"0"),))
        output.cancel()

    async with Answering(((keys.ACCEPTED, b"1"),), PREFIX, attach, then) as client:
        with pytest.raises(BadCall, match="without a status"):
            await client.call("any", numbers(1))
    expected = pa.schema([("other", pa.int64())])
    async with Answering(((keys.ACCEPTED, b"1"),), PREFIX, attach, then) as client:
        with pytest.raises(SchemaMismatch):
            await client.call("any", numbers(1), output_schema=expected)


async def test_a_service_that_gives_up_the_oneshot():
    async def silent(connection):
        async for message in connection.entrypoint:
            message.attachments[0].handle.cancel()
        await connection.wait_closed()

    async with (
        await serve(silent, "memory://silent") as server,
        await Client.connect(server.addresses[0]) as client,
    ):
        with pytest.raises(BadCall, match=r"gave up the call .* without a status"):
            await client.call("any", numbers(1))
