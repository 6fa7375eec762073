"""Exchanges of a sync client that are brief: a single small batch goes as a call of one batch."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct import borrowing
from aqueduct.arrow.call import ONE_TO_ONE
from aqueduct.carriers.stream import polling
from aqueduct.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    HandlerFailed,
    SchemaMismatch,
)
from tests.calls import NUMBERS, config, numbers, sync_client, until_seen, values

LONG = 20.0
ROOT = Path(__file__).parent.parent


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
        seen.append((call.run, call.attempt, call.partition, dict(call.headers)))
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


@pytest.fixture(params=["its own thread", "by hand"])
def client(request, service):
    """One whose loop has a thread, and one whose loop is stepped by who waits."""
    by_hand = request.param == "by hand"
    with sync_client(service, "tcp" if by_hand else "quic") as client:
        if by_hand:
            client.rest()
            until_seen(lambda: not client._thread.kept)
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


def brief(client, handler, batches, **options):
    stream = client.exchange(
        handler, batches, schema=NUMBERS, together=True, ready=lambda: True, **options
    )
    stream.be_brief()
    return stream


@pytest.mark.parametrize("resting", [True, False])
def test_a_single_batch_goes_as_a_call_of_one_batch(client, begun, seen, resting):
    if resting:
        client.rest()
        until_seen(lambda: not client._thread.kept)
    else:
        client._thread.borrow = lambda: False  # somebody else has it
    with brief(
        client,
        "double",
        [numbers(1, 2)],
        run="r",
        attempt="a",
        partition=aqueduct.Partition(3),
        headers={"key": "value"},
        deadline=LONG,
    ) as stream:
        assert values([next(stream)]) == [[2, 4]]
        assert stream.number == 0
        assert not stream.over
        assert list(stream) == []
        assert stream.over
    assert begun == []
    assert seen == [("r", "a", aqueduct.Partition(3), {"key": "value"})]
    with client.exchange("double", [numbers(1, 2)], schema=NUMBERS) as plain:
        list(plain)
    assert (stream.bytes_sent, stream.bytes_received) == (plain.bytes_sent, plain.bytes_received)


@pytest.mark.parametrize("carrier", ["tcp", "quic"])
def test_who_waits_steps_the_loop_where_an_answer_comes_at_once(service, carrier, monkeypatch):
    monkeypatch.setattr(polling, "_YIELDED", float("inf"))  # however busy the machine is
    monkeypatch.setattr(polling, "_BY_HAND", LONG)
    monkeypatch.setattr(borrowing, "_STEPPED", LONG)
    patient = config(stream={"poll": LONG})
    with sync_client(service, carrier, config=patient) as client:
        thread, stepped, step = client._thread, [], client._thread.step

        def counted(*arguments):
            stepped.append(step(*arguments))
            return stepped[-1]

        monkeypatch.setattr(thread, "step", counted)
        for number in range(20):
            client.rest()
            until_seen(lambda: not thread.kept)
            with brief(client, "same", [numbers(number)]) as stream:
                assert values(list(stream)) == [[number]]
    assert stepped == [carrier == "tcp"] * 20  # QUIC has one socket for many: it is not looked at


def test_what_is_not_brief_is_an_exchange(client, begun):
    for batches in ([], [numbers(1), numbers(2)], [numbers(*range(100_000))]):
        expected = [[2 * value for value in each["id"].to_pylist()] for each in batches]
        assert values(list(brief(client, "double", batches))) == expected
    assert values(list(brief(client, "double", [numbers(1)], compression="zstd"))) == [[2]]
    assert values(list(brief(client, "double", [numbers(1)], report_failures=True))) == [[2]]
    assert len(begun) == 5


def test_a_call_whose_acceptance_was_asked_for_is_an_exchange(client, begun):
    with brief(client, "double", [numbers(1)]) as stream:
        assert stream.opened() == NUMBERS
        assert ONE_TO_ONE in stream.traits
        assert values(list(stream)) == [[2]]
    assert len(begun) == 1


def test_an_answer_that_does_not_fit_follows(client, begun):
    with brief(client, "many", [numbers(200_000)]) as stream:
        assert values(list(stream)) == [list(range(200_000))]
        assert stream.number == 0
        assert stream.bytes_received > 200_000 * 8
    assert len(begun) == 1  # with the answer


def test_answers_that_are_not_like_the_last_one(client, begun):
    """What was heard before, and with what it was compared, decides nothing."""
    texts = pa.record_batch({"text": ["one"]})
    for expected in (None, NUMBERS, None, texts.schema, NUMBERS):
        for batch in (numbers(1), texts, numbers(3)):
            stream = client.exchange(
                "same", [batch], output_schema=expected, together=True, ready=lambda: True
            )
            stream.be_brief()
            if expected is None or expected == batch.schema:
                assert list(stream) == [batch]
            else:
                with pytest.raises(SchemaMismatch):
                    next(stream)
    assert begun == []


def test_a_handler_that_fails(client):
    with brief(client, "double", [numbers(-1)]) as stream:
        with pytest.raises(HandlerFailed, match="below zero") as raised:
            next(stream)
        assert raised.value.batch == 0
        assert stream.over
        with pytest.raises(HandlerFailed, match="below zero"):
            next(stream)


def test_another_schema_than_declared(client):
    texts = pa.schema([("text", pa.string())])
    stream = brief(client, "double", [numbers(1)], output_schema=texts)
    with pytest.raises(SchemaMismatch, match="the output of handler 'double'"):
        next(stream)


def test_a_deadline(client, seen):
    with brief(client, "hold", [numbers(1)], deadline=0.2) as stream:
        with pytest.raises(DeadlineExceeded, match=r"did not end within (the deadline of )?0\.2 s"):
            next(stream)
    until_seen(lambda: len(seen) == 2)


def test_no_answer_and_no_deadline(service):
    hasty = config(timing={"progress_deadline": 0.3})
    with sync_client(service, config=hasty) as client:
        with pytest.raises(DeadlineExceeded, match=r"no answer came for 0\.3 s"):
            next(brief(client, "hold", [numbers(1)]))


def raised_meanwhile(stream, seen, act):
    """What a thread that waits for an answer is told, when ``act`` is done beside it."""
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(next, stream)
        until_seen(lambda: seen == ["begun"])
        act()
        return waiting.exception(LONG)


@pytest.mark.parametrize("resting", [True, False])
def test_another_thread_ends_it(client, seen, resting):
    if resting:
        client.rest()
    stream = brief(client, "hold", [numbers(1)])
    assert type(raised_meanwhile(stream, seen, stream.close)) is Cancelled
    until_seen(lambda: seen == ["begun", "Cancelled"])


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


def test_a_service_that_dies_while_who_waits_steps_the_loop(monkeypatch):
    monkeypatch.setattr(polling, "_YIELDED", float("inf"))
    monkeypatch.setattr(polling, "_BY_HAND", LONG)
    monkeypatch.setattr(borrowing, "_STEPPED", LONG)
    patient = config(stream={"poll": LONG})
    command = [sys.executable, "-c", DYING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with aqueduct.SyncClient(address, config=patient) as client:
            for batch in (numbers(1), numbers(1, 2)):
                client.rest()
                until_seen(lambda: not client._thread.kept)
                stream = brief(client, "die", [batch])
                if batch.num_rows == 1:
                    assert list(stream) == [batch]
                else:
                    with pytest.raises(ConnectionLost):
                        next(stream)
                    with pytest.raises(ConnectionLost):  # sticky
                        next(stream)
    assert process.returncode == 1


def test_the_end_of_the_connection_ends_it(client, seen, held):
    stream = brief(client, "hold", [numbers(1)])
    assert type(raised_meanwhile(stream, seen, client.close)) is ConnectionLost
