"""Peers that are not there, are something else, or say what they should not."""

from __future__ import annotations

import asyncio
import re
import socket

import pytest

import aqueduct
from aqueduct.arrow.encode import Encoder
from aqueduct.client.client import Client
from aqueduct.endpoint import channel, serve
from aqueduct.errors import (
    BadCall,
    CallError,
    ConnectFailed,
    ConnectionLost,
)
from aqueduct.rpc.fragments import batch_headers, fragments
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.status import Status
from tests.support.calls import (
    NUMBERS,
    RawCall,
    address_of,
    config,
    everything,
    numbers,
    raw_connection,
    served,
    serving,
)
from tests.support.selection import mostly_long


@pytest.fixture(params=mostly_long(["memory", "quic", "draft"], "memory", "draft"))
def carrier(request):
    return request.param


@pytest.fixture
def service():
    return aqueduct.Service("test")


async def test_connecting_fails_where_no_server_listens():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with pytest.raises(ConnectFailed, match=str(port)):
        await Client.connect(f"aqueduct://127.0.0.1:{port}?verify=off")
    with pytest.raises(ConnectFailed):
        await Client.connect("memory://nobody-is-there")


def test_a_sync_client_fails_where_no_server_listens():
    with pytest.raises(ConnectFailed, match=r"127.0.0.1:9"):
        aqueduct.SyncClient("aqueduct://127.0.0.1:9?verify=off")
    with pytest.raises(aqueduct.AqueductError, match="is not an address"):
        aqueduct.SyncClient("127.0.0.1:9")


def test_another_certificate(service):
    with served(service) as address:
        wrong = address.partition("?")[0] + "?fingerprint=sha256:" + "0" * 64
        with pytest.raises(ConnectFailed, match="fingerprint"):
            aqueduct.SyncClient(wrong)
        with pytest.raises(ConnectFailed, match="certificate"):
            aqueduct.SyncClient(address.partition("?")[0])


async def test_a_silent_port_is_not_waited_for_long():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"aqueduct://127.0.0.1:{silent.getsockname()[1]}?verify=off"
        with pytest.raises(ConnectFailed):
            await Client.connect(address, config=config(timing={"connect_timeout": 0.3}))


async def other_service(address, answer):
    """An Aqueduct server that knows nothing of Arrow; ``answer`` gets each message."""

    async def on_connection(connection):
        async for message in connection.entrypoint:
            await answer(connection, message)
            del message  # the channels of the call with it

    return await serve(on_connection, address)


@pytest.mark.requirement("AC-20")
@pytest.mark.parametrize("how", ["drop", "finish", "nonsense", "accept message only", "close"])
async def test_a_server_that_is_no_service(how):
    async def answer(connection, message):
        handles = [attachment.handle for attachment in message.attachments]
        if how == "finish":
            handles[1].finish()
        elif how == "nonsense":
            await handles[1].send(b"hello?")
            handles[1].finish()
        elif how == "accept message only":
            headers, payload = Status("ok").encode()
            handles[1].finish()
            await handles[2].send(payload, headers=headers)
        elif how == "close":
            await connection.close(7, "not here")

    address = address_of("memory")
    async with await other_service(address, answer), await Client.connect(address) as client:
        words = {
            "drop": "without a status",
            "finish": "without a status",
            "nonsense": "not an Arrow accept message",
            "accept message only": "ended well without an accept message",
            "close": "not here",
        }[how]
        kind = ConnectionLost if how == "close" else BadCall
        with pytest.raises(kind, match=words):
            await everything(client.exchange("echo", [numbers(1)]))


@pytest.mark.requirement("AC-36")
async def test_a_sink_that_answers():
    async def answer(connection, message):
        output, status = message.attachments[1].handle, message.attachments[2].handle
        await output.send(b"", headers=((b"arrow-hello-e42c4c", b"1"),))
        for headers, payload in fragments(Encoder(NUMBERS).encode(numbers(1)), 0):
            await output.send(payload, headers=headers)
        output.finish()
        headers, end = Status("ok").encode()
        await status.send(end, headers=headers)

    address = address_of("memory")
    async with await other_service(address, answer), await Client.connect(address) as client:
        with pytest.raises(BadCall, match=r"the sink 'store' at .* answered with a batch"):
            await client.sink("store", [numbers(1)])


@pytest.fixture(params=["memory", "draft-memory"])
async def raw(request):
    service = aqueduct.Service("test")
    service.handler("echo")(lambda batch: batch)

    @service.handler("swallows")
    def swallows(batches):
        try:
            yield from batches
        except CallError:
            pass

    async with (
        serving(service, request.param) as running,
        await raw_connection(running.addresses[0]) as connection,
    ):
        yield connection


@pytest.mark.requirement("AC-6")
@pytest.mark.requirement("AC-15")
async def test_a_message_that_is_no_call(raw):
    call = RawCall(raw, headers=((b"hello", b"world"),))
    error = await call.end()
    assert isinstance(error, BadCall) and "not an Arrow call" in str(error)
    raw.entrypoint.send_nowait(b"nothing attached")
    head, payload = CallHead("echo", "source").encode()
    error = await RawCall(raw, headers=head, payload=payload).end()
    assert isinstance(error, BadCall) and "carries 2 channels, not 3" in str(error)
    good = RawCall(raw)
    good.sender.finish()
    assert await good.end() is None  # the connection goes on


@pytest.mark.requirement("AC-15")
async def test_channels_that_point_the_wrong_way(raw):
    one, _ = channel()
    _, into = channel()
    status, answer = channel(oneshot=True)
    headers, payload = CallHead("echo", "exchange", schema=NUMBERS).encode()
    raw.entrypoint.send_nowait(payload, headers=headers, attachments=[one, into, status])
    message = await asyncio.wait_for(answer.receive(), 10)
    error = Status.decode(message.headers, message.payload).to_exception()
    assert isinstance(error, BadCall) and "point the wrong way" in str(error)


@pytest.mark.requirement("AC-16")
@pytest.mark.requirement("AC-31")
@pytest.mark.parametrize("handler", ["echo", "swallows"])
@pytest.mark.parametrize(
    ("headers", "payload", "words"),
    [
        ((), b"x", "is no batch"),
        (batch_headers(0), b"", "batch 0 of 0 bytes came where 0 was due"),
        (batch_headers(5), b"x", "batch 5 of 1 bytes came where 0 was due"),
        (batch_headers(0), b"nonsense", "batch 0 of the input of handler '.*' cannot be read"),
        (((b"arrow-batch-2179bf", b"x"),), b"x", "which is not a number"),
    ],
)
async def test_batches_that_are_none(raw, handler, headers, payload, words):
    call = RawCall(raw, CallHead(handler, "exchange", schema=NUMBERS))
    call.sender.send_nowait(payload, headers=headers)
    error = await call.end()
    assert isinstance(error, BadCall)
    assert re.search(words, str(error))
