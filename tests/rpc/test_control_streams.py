"""Calls over the control-stream draft as a peer sees them: blocks of headers, and broken ones."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pyarrow as pa
import pytest

import aqueduct
from aqueduct import Client
from aqueduct._speedups.base.buffers import bytes_copied
from aqueduct.arrow.encode import Encoder
from aqueduct.config import DEFAULT
from aqueduct.endpoint import channel, connect, serve
from aqueduct.errors import BadCall
from aqueduct.rpc import keys
from aqueduct.rpc.fragments import batch_headers
from aqueduct.rpc.request import Accepted, CallHead
from aqueduct.rpc.status import Status
from tests.reference.codec import Model, header_pairs, varbytes
from tests.reference.control_streams import header_block
from tests.support.calls import (
    NUMBERS,
    address_of,
    connected,
    everything,
    numbers,
    serving,
    values,
)

requirement = pytest.mark.requirement
BROKEN = {
    "none at all": b"",
    "no block": b"payload",
    "cut": header_block(((b"key", b"v" * 80),))[:64],
    "beyond the message": b"\xff\x7f" + bytes(80),
    "odd": varbytes(b"\x01k").ljust(64, b"\0"),
    "padded with more than zeros": b"\0" * 63 + b"\1",
    "too long": header_block(((b"key", bytes(DEFAULT.limits.header_bytes)),)),
}


def split(payload):
    """The headers and the payload of a message as it came."""
    model = Model(bytes(payload), False, False)
    headers = header_pairs(model.block())
    assert not any(model.take(-model.at % 64))
    return headers, model.data[model.at :]


def text_of(payload):
    """The payload of a batch."""
    return b"".join(map(bytes, Encoder(NUMBERS).encode(payload).buffers))


class Call:
    """A call whose blocks are written by hand, on a connection that knows nothing of them."""

    def __init__(self, connection, message=None):
        self.sender, receiver = channel()
        output_sender, self.output = channel()
        status_sender, self.status = channel(oneshot=True)
        if message is None:
            headers, payload = CallHead("echo", "exchange", schema=NUMBERS).encode()
            message = header_block(headers) + b"".join(map(bytes, payload))
        connection.entrypoint.send_nowait(
            message, attachments=[receiver, output_sender, status_sender]
        )

    async def end(self):
        async with asyncio.timeout(20):
            message = await self.status.receive()
        assert message.headers == ()
        headers, payload = split(message.payload)
        return Status.decode(headers, payload).to_exception()


@pytest.fixture(params=["draft", "draft-memory", "draft-quic"])
async def plain(request):
    """A connection of plain channels to a service."""
    service = aqueduct.Service("test")
    service.handler("echo")(lambda batch: batch)
    async with (
        serving(service, request.param) as running,
        await connect(running.addresses[0]) as connection,
    ):
        yield connection


@requirement("AC-95")
@requirement("AC-96")
async def test_the_messages_of_a_call(plain):
    call = Call(plain)
    for number in range(3):
        payload = text_of(numbers(number))
        call.sender.send_nowait(header_block(batch_headers(number)) + payload)
    call.sender.finish()
    async with asyncio.timeout(20):
        accepted, *answers = [message async for message in call.output]
    assert await call.end() is None
    headers, payload = split(accepted.payload)
    assert dict(headers)[keys.ACCEPTED] == b"1"
    assert Accepted.decode(headers, payload, kind="exchange").schema == NUMBERS
    for number, answer in enumerate(answers):
        assert split(answer.payload) == (batch_headers(number), text_of(numbers(number)))
    assert len(answers) == 3


@requirement("AC-97")
@requirement("AC-98")
@requirement("AC-6")
@pytest.mark.parametrize("how", BROKEN)
async def test_a_call_with_a_broken_block_is_bad_and_others_go_on(plain, how):
    other = Call(plain)
    error = await Call(plain, BROKEN[how]).end()
    assert isinstance(error, BadCall)
    assert "the header block of a message is malformed" in str(error)
    plain.entrypoint.send_nowait(BROKEN[how])  # which asks for no answer
    other.sender.send_nowait(header_block(batch_headers(0)) + text_of(numbers(1)))
    other.sender.finish()
    assert await other.end() is None


@requirement("AC-97")
@pytest.mark.parametrize("how", BROKEN)
async def test_a_batch_with_a_broken_block_ends_its_call_alone(plain, how):
    other, call = Call(plain), Call(plain)
    call.sender.send_nowait(BROKEN[how])
    error = await call.end()
    assert isinstance(error, BadCall)
    assert "the header block of a message is malformed" in str(error)
    other.sender.finish()
    assert await other.end() is None


@requirement("AC-97")
async def test_what_plain_channels_send_is_no_call(plain):
    _, payload = CallHead("echo", "exchange", schema=NUMBERS).encode()
    error = await Call(plain, b"".join(map(bytes, payload))).end()
    assert isinstance(error, BadCall)


@asynccontextmanager
async def answering(place, broken):
    """A client of a service by hand. The first call's message at ``place`` is ``broken``."""
    heads = [Accepted(NUMBERS).encode(), (batch_headers(0), [text_of(numbers(7))])]
    heads.append(Status("ok").encode())
    good = [header_block(headers) + b"".join(map(bytes, payload)) for headers, payload in heads]
    calls = [[*good[:place], broken, *good[place + 1 :]], good]

    async def on_connection(connection):
        async for message in connection.entrypoint:
            accepted, batch, status = calls.pop(0)
            *_, output, end = [attachment.handle for attachment in message.attachments]
            output.send_nowait(accepted)
            output.send_nowait(batch)
            output.finish()
            end.send_nowait(status)

    address = address_of("draft-memory")
    async with await serve(on_connection, address), await Client.connect(address) as client:
        yield client


@requirement("AC-97")
@pytest.mark.parametrize("place", range(3), ids=["accept message", "batch", "status"])
@pytest.mark.parametrize("how", BROKEN)
async def test_an_answer_with_a_broken_block_ends_its_call_alone(place, how):
    async with answering(place, BROKEN[how]) as client:
        with pytest.raises(BadCall, match="the header block of a message is malformed"):
            await everything(client.exchange("any", [numbers(1)]))
        stream = client.exchange("any", [numbers(1)])
        assert values(await everything(stream)) == [[7]]


@requirement("AC-97")
@pytest.mark.parametrize("how", BROKEN)
async def test_a_unary_answer_with_a_broken_block_ends_its_call_alone(how):
    async def on_connection(connection):
        async for message in connection.entrypoint:
            message.attachments[0].handle.send_nowait(BROKEN[how])

    address = address_of("draft-memory")
    async with await serve(on_connection, address), await Client.connect(address) as client:
        for _ in range(2):
            with pytest.raises(BadCall, match="the header block of a message is malformed"):
                await client.call("any", numbers(1))


@pytest.mark.parametrize("size", [5000, 100_000, 3_000_000, 9_000_000])
async def test_batches_are_aligned_and_land_once(size):
    """Also those that come in fragments: from the carrier each goes to its place."""
    service = aqueduct.Service("test")
    addresses = []

    @service.handler("look")
    def look(batch):
        addresses.append(batch.column(0).buffers()[1].address)
        return batch

    batch = numbers(*range(size // 8))
    async with connected(service, "draft") as client:
        await everything(client.exchange("look", [batch]))
        before = bytes_copied()
        for answer in await everything(client.exchange("look", [batch] * 2)):
            assert answer == batch
            addresses.append(answer.column(0).buffers()[1].address)
        assert bytes_copied() - before <= 5 * size + 64 * 1024  # once each way
    assert len(addresses) == 5 and all(address % 64 == 0 for address in addresses)


def test_a_batch_of_pyarrow_points_into_the_message():
    """Without a copy of its own, as the payload of a block begins at a multiple of 64."""
    payload = header_block(batch_headers(1)) + text_of(numbers(1, 2))
    _, batch = split(payload)
    assert (len(payload) - len(batch)) % 64 == 0
    message = pa.ipc.read_message(pa.py_buffer(batch))
    assert pa.ipc.read_record_batch(message, NUMBERS) == numbers(1, 2)
