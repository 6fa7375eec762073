"""Calls of one batch that a thread makes with what was made ready for all that are alike."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.loop_thread import LoopThread
from aqueduct.client.task_client import TaskClient
from aqueduct.client.unary import one_batch
from aqueduct.errors import (
    AqueductError,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    HandlerFailed,
    LocalProtocolError,
    SchemaMismatch,
)
from aqueduct.testing.stream_relay import End, StreamRelay
from tests.support.calls import NUMBERS, config, numbers, served, sync_client, until_seen, values

LONG = 20.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def seen():
    """What handlers saw of their calls."""
    return []


@pytest.fixture
def held():
    """Keeps the handler ``hold`` until it is set."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def service(seen, held):
    service = aqueduct.Service("test")

    @service.handler("double", input=NUMBERS, output=NUMBERS)
    def double(batch, call):
        seen.append((call.write_key, call.attempt, call.partition, dict(call.headers)))
        if batch["id"][0].as_py() < 0:
            raise ValueError("below zero")
        return pa.record_batch({"id": pa.compute.multiply(batch["id"], 2)}, schema=NUMBERS)

    @service.handler("many", input=NUMBERS, output=NUMBERS)
    def many(batch):
        return pa.record_batch({"id": pa.array(range(batch["id"][0].as_py()))}, schema=NUMBERS)

    @service.handler("same")
    async def same(batch):
        return batch

    @service.handler("hold", input=NUMBERS, output=NUMBERS)
    def hold(batch, call):
        seen.append("begun")
        while not held.wait(0.01):
            try:
                call.check()
            except aqueduct.AqueductError as error:
                seen.append(type(error).__name__)
                raise
        return batch

    return service


@pytest.fixture(params=["tcp", "quic", "draft"])
def client(request, service):
    with sync_client(service, request.param) as client:
        yield client


@pytest.fixture
def begun(client, monkeypatch):
    """The exchanges that were begun as such."""
    heads = []
    begin = client._client.begin

    def counted(head, *arguments):
        heads.append(head)
        return begin(head, *arguments)

    monkeypatch.setattr(client._client, "begin", counted)
    return heads


def prepared_call(client, handler, batch, *, expected=None, deadline=None, **options):
    prepared = client.prepare(handler, NUMBERS, output_schema=expected, deadline=deadline)
    encoded = prepared.encode(batch)
    assert encoded is not None
    return prepared.call(encoded, **options)


def answers(call):
    return values(call.result().batches)


def test_what_a_call_says_of_itself_arrives(client, begun, seen):
    prepared = client.prepare("double", NUMBERS, output_schema=NUMBERS, deadline=LONG)
    own = {"attempt": "a", "partition": aqueduct.Partition(3), "headers": {"key": "value"}}
    for write_key in ("r", "s"):
        encoded = prepared.encode(numbers(1, 2))
        call = prepared.call(encoded, write_key=write_key, **own)
        answered = call.result()
        assert values(answered.batches) == [[2, 4]]
        assert answered.follow is None
        assert call.waited > 0
    plain_call = prepared.call(prepared.encode(numbers(3)))
    assert answers(plain_call) == [[6]]
    assert begun == []
    assert seen == [
        *((write_key, "a", aqueduct.Partition(3), {"key": "value"}) for write_key in ("r", "s")),
        ("", "", None, {}),
    ]
    with client.exchange("double", [numbers(1, 2)], schema=NUMBERS) as plain:
        list(plain)
    assert (call.encoded.size, answered.size) == (plain.bytes_sent, plain.bytes_received)


@pytest.mark.parametrize("token", [None, "shown", b"shown"], ids=["none", "text", "bytes"])
def test_the_client_s_token_is_shown_unless_a_call_has_one(service, token):
    shown = []
    service.authorize = lambda call: shown.append(call.token)
    with sync_client(service, token="usual") as client:
        assert answers(prepared_call(client, "double", numbers(1), token=token)) == [[2]]
    assert shown == ["usual" if token is None else "shown"]


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"write_key": "r" * 257}, "write key of a call has 257 bytes"),
        ({"attempt": "\ud800"}, "attempt of a call cannot be sent"),
        ({"token": b"t" * 16385}, "token of a call has 16385 bytes"),
        ({"partition": aqueduct.Partition(-1)}, "is no share of anything"),
        ({"headers": {"k": "v" * 40_000}}, "above the limit"),
    ],
)
def test_what_cannot_be_said_is_told_before_anything_is_sent(client, seen, own, text):
    with pytest.raises(LocalProtocolError, match=text):
        prepared_call(client, "double", numbers(1), **own)
    assert seen == []


def test_what_does_not_fit_a_message_is_not_encoded(client):
    prepared = client.prepare("double", NUMBERS)
    assert prepared.encode(numbers(*range(100_000))) is None
    with pytest.raises(SchemaMismatch, match="the input of handler 'double'"):
        prepared.encode(pa.record_batch({"text": ["one"]}))


def test_a_client_that_compresses_prepares_nothing(service):
    with served(service, "tcp") as address:
        with TaskClient(f"{address}?compression=zstd") as client:
            assert client.prepare("double", NUMBERS) is None


def test_an_answer_that_does_not_fit_follows(client, begun):
    call = prepared_call(client, "many", numbers(200_000), deadline=LONG)
    answered = call.result()
    assert answered.follow is not None and answered.batches == ()
    with call.follow(answered) as stream:
        assert values(list(stream)) == [list(range(200_000))]
        assert stream.number == 0
        assert stream.bytes_received > 200_000 * 8
    assert len(begun) == 1  # with the answer


def test_an_answer_that_follows_can_be_left(client, service):
    call = prepared_call(client, "many", numbers(200_000))
    call.follow(call.result()).close()
    until_seen(lambda: service.counters()["open_calls"] == 0)
    assert answers(prepared_call(client, "double", numbers(1))) == [[2]]


def test_answers_that_are_not_like_the_last_one(client, begun):
    """What was heard before, and with what it was compared, decides nothing."""
    texts = pa.record_batch({"text": ["one"]})
    for expected in (None, NUMBERS, None, texts.schema, NUMBERS):
        for batch in (numbers(1), texts, numbers(3)):
            prepared = client.prepare("same", batch.schema, output_schema=expected)
            call = prepared.call(prepared.encode(batch))
            if expected is None or expected == batch.schema:
                assert list(call.result().batches) == [batch]
            else:
                with pytest.raises(SchemaMismatch):
                    call.result()
    assert begun == []


def test_a_handler_that_fails(client):
    call = prepared_call(client, "double", numbers(-1))
    with pytest.raises(HandlerFailed, match="below zero") as raised:
        call.result()
    assert raised.value.batch == 0


def test_another_schema_than_declared(client):
    texts = pa.schema([("text", pa.string())])
    call = prepared_call(client, "double", numbers(1), expected=texts)
    with pytest.raises(SchemaMismatch, match="the output of handler 'double'"):
        call.result()


def test_a_deadline(client, seen):
    call = prepared_call(client, "hold", numbers(1), deadline=0.2)
    with pytest.raises(DeadlineExceeded, match=r"did not end within (the deadline of )?0\.2 s"):
        call.result()
    until_seen(lambda: len(seen) == 2)


def test_no_answer_and_no_deadline(service):
    hasty = config(timing={"progress_deadline": 0.3})
    with sync_client(service, config=hasty) as client:
        with pytest.raises(DeadlineExceeded, match=r"no answer came for 0\.3 s"):
            prepared_call(client, "hold", numbers(1)).result()


def raised_meanwhile(call, seen, act):
    """What a thread that waits for an answer is told, when ``act`` is done beside it."""
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(call.result)
        until_seen(lambda: seen == ["begun"])
        act()
        return waiting.exception(LONG)


def test_another_thread_ends_it(client, seen):
    call = prepared_call(client, "hold", numbers(1))
    assert type(raised_meanwhile(call, seen, call.close)) is Cancelled
    until_seen(lambda: seen == ["begun", "Cancelled"])
    call.close()


def test_one_that_was_ended_before_it_began(client, seen):
    call = prepared_call(client, "hold", numbers(1))
    call.close()
    with pytest.raises(Cancelled, match="was closed here"):
        call.result()
    until_seen(lambda: seen in ([], ["begun", "Cancelled"]))


DYING = """
import os, asyncio, aqueduct

service = aqueduct.Service("dying")

@service.handler("die")
async def die(batch):
    if batch.num_rows == 1:
        return batch
    os._exit(1)

async def main():
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as running:
        print(running.addresses[0], flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_service_that_dies_while_a_thread_waits():
    patient = config(byte_stream={"poll": LONG})
    command = [sys.executable, "-c", DYING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with TaskClient(address, config=patient) as client:
            for batch in (numbers(1), numbers(1, 2)):
                call = prepared_call(client, "die", batch)
                if batch.num_rows == 1:
                    assert list(call.result().batches) == [batch]
                else:
                    with pytest.raises(ConnectionLost):
                        call.result()
    assert process.returncode == 1


@contextmanager
def between(service):
    """A client, and the way of its answers: call it to narrow.

    ``narrow(count, end)``: after ``count`` bytes more ``end`` happens to it.
    """
    proxy, thread = StreamRelay(), LoopThread("test-proxy")

    async def start(target):
        return proxy.start(target)

    async def narrow(count, end):
        way = proxy.link.down
        way.stall()
        way.fate = replace(way.fate, end=end)
        way.let(count)

    async def close():
        proxy.close()

    try:
        with served(service, "tcp") as address:
            host, _, port = address.removeprefix("aqueduct+tcp://").rpartition(":")
            host, port = thread.run(start((host, int(port))))
            with TaskClient(f"aqueduct+tcp://{host}:{port}") as client:
                assert answers(prepared_call(client, "double", numbers(1))) == [[2]]
                yield client, lambda count, end: thread.run(narrow(count, end))
            thread.run(close())
    finally:
        thread.stop()


WHOLE = 10_000  # bytes, more than an answer has


@pytest.mark.parametrize("end", [End.RESET, End.FIN])
@pytest.mark.parametrize("count", [1, 9, 33, 100, 250, 350, WHOLE])
def test_a_connection_that_is_cut_inside_the_answer(service, count, end):
    with between(service) as (client, narrow):
        narrow(count, end)
        call = prepared_call(client, "double", numbers(1), deadline=LONG)
        if count == WHOLE:
            assert answers(call) == [[2]]
        else:
            with pytest.raises(ConnectionLost):
                call.result()


@pytest.mark.parametrize("count", [1, 9, 33, 100, 250, 350])
def test_an_answer_that_stalls_and_comes_too_late(service, count):
    with between(service) as (client, narrow):
        narrow(count, End.STALL)
        with pytest.raises(DeadlineExceeded):
            prepared_call(client, "double", numbers(1), deadline=0.3).result()
        narrow(WHOLE, End.STALL)
        assert answers(prepared_call(client, "double", numbers(3), deadline=LONG)) == [[6]]


def test_the_end_of_the_connection_ends_it(client, seen, held):
    call = prepared_call(client, "hold", numbers(1))
    assert type(raised_meanwhile(call, seen, client.close)) is ConnectionLost
    with pytest.raises(AqueductError):
        prepared_call(client, "hold", numbers(1)).result()


def test_batches_of_an_answer_are_joined_whatever_their_dictionaries():
    batches = []
    for bits in (0x3E00, 0xC800):  # 1.5 and -8.0, which Arrow would mix up
        halves = pa.array([bits], pa.uint16()).view(pa.float16())
        batches.append(pa.record_batch({"a": pa.DictionaryArray.from_arrays([0], halves)}))
    assert one_batch(batches[0].schema, batches)["a"].to_pylist() == [1.5, -8.0]
