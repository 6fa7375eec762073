"""Messages of Arrow calls as a peer sees them, for rules that no other test looks at."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from hypothesis import given

import aqueduct
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.endpoint import channel
from aqueduct.errors import BadCall, Finished, UnknownHandler
from aqueduct.rpc import keys
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.status import Status
from aqueduct.rpc.unary import UnaryTemplate, decode_answer
from tests.arrow.strategies import streams
from tests.support.calls import NUMBERS, RawCall, numbers, raw_connection, serving

ALIGNMENT = 64
WORDS = pa.schema([("word", pa.string())])
SAME = pa.record_batch([["word"] * 10_000], schema=WORDS)


@pytest.fixture(params=["memory", "draft-memory"])
async def raw(request):
    service = aqueduct.Service("test")
    service.handler("echo", input=WORDS, output=WORDS)(lambda batch: batch)

    @service.handler("count", kind="source", output=NUMBERS)
    def count():
        for value in range(40):
            yield numbers(value)

    async with (
        serving(service, request.param) as running,
        await raw_connection(running.addresses[0]) as connection,
    ):
        yield connection


@pytest.mark.requirement("AC-19")
async def test_a_refused_call_is_not_accepted_first(raw):
    call = RawCall(raw, CallHead("nobody", "exchange", schema=NUMBERS))
    async with asyncio.timeout(20):
        with pytest.raises(Finished):
            await call.output.receive()
    assert isinstance(await call.end(), UnknownHandler)


@pytest.mark.requirement("AC-51")
@pytest.mark.requirement("AC-32")
async def test_answers_of_a_source_count_from_0(raw):
    sender, output = channel()
    status_sender, status = channel(oneshot=True)
    headers, payload = CallHead("count", "source").encode()
    raw.entrypoint.send_nowait(payload, headers=headers, attachments=[sender, status_sender])
    async with asyncio.timeout(20):
        first, *answers = [message async for message in output]
        end = await status.receive()
    assert dict(first.headers)[keys.ACCEPTED] == b"1"
    decoder = Decoder(NUMBERS)
    for number, message in enumerate(answers):
        assert message.headers == ((keys.BATCH, b"%d" % number),)
        assert decoder.decode(message.payload) == numbers(number)
    assert len(answers) == 40
    assert Status.decode(end.headers, end.payload).to_exception() is None


async def ask(raw, headers, payload):
    sender, status = channel(oneshot=True)
    raw.entrypoint.send_nowait(payload, headers=headers, attachments=[sender])
    async with asyncio.timeout(20):
        return await status.receive()


@pytest.mark.requirement("AC-57")
async def test_a_unary_call_is_never_compressed(raw):
    question = UnaryTemplate(CallHead("echo", "exchange", schema=WORDS))
    batch = b"".join(map(bytes, Encoder(WORDS).encode(SAME).buffers))
    asked = (*question.headers, (keys.COMPRESSION, b"zstd"))
    answer = await ask(raw, asked, question.prefix + batch)
    found = decode_answer(answer.headers, answer.payload)
    assert found is not None and keys.COMPRESSION not in dict(answer.headers)
    (payload,) = found.batches
    assert len(payload) >= 10_000 * 4
    assert Decoder(WORDS).decode(payload) == SAME  # which refuses what is compressed
    refused = await ask(raw, asked, question.prefix + written_by_arrow(SAME, compression="zstd"))
    with pytest.raises(BadCall, match="compressed, which was not agreed on"):
        error = Status.decode(refused.headers, refused.payload).to_exception()
        assert error is not None
        raise error


def written_by_arrow(batch, **options):
    """The payload of a batch as Arrow's own writer has it: bodies at multiples of 8."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    source = pa.BufferReader(sink.getvalue())
    pa.ipc.read_message(source)  # the schema
    start = source.tell()
    pa.ipc.read_message(source)
    return sink.getvalue().slice(start, source.tell() - start).to_pybytes()


@pytest.mark.requirement("AC-23")
@given(streams())
def test_each_body_begins_at_a_multiple_of_64(batches):
    encoder = Encoder(batches[0].schema)
    for batch in batches:
        payload = pa.py_buffer(b"".join(map(bytes, encoder.encode(batch).buffers)))
        source = pa.BufferReader(payload)
        while source.tell() < payload.size:
            message = pa.ipc.read_message(source)
            assert (source.tell() - message.body.size) % ALIGNMENT == 0


@pytest.mark.requirement("AC-23")
def test_a_body_may_begin_at_any_multiple_of_8():
    starts = set()
    for length in range(1, 9):
        schema = pa.schema([("c" * 8 * length, pa.int64())] + [("d", pa.int8())] * length)
        batch = pa.record_batch([[1, 2]] * (1 + length), schema=schema)
        payload = written_by_arrow(batch)
        source = pa.BufferReader(payload)
        message = pa.ipc.read_message(source)
        starts.add((source.tell() - message.body.size) % ALIGNMENT)
        assert Decoder(schema).decode(payload) == batch
    assert len(starts) > 1
