"""The client of ReactiveSocket that drives a task: requests from a thread, news in a queue."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from aqueduct.client.call import END, FailedBatch
from aqueduct.client.reactive_client import ReactiveTaskClient
from aqueduct.client.thread_call import NEWS, Failed
from aqueduct.config import DEFAULT, Timing
from aqueduct.errors import (
    BadCall,
    Cancelled,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    HandlerFailed,
    LocalProtocolError,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from aqueduct.rpc.describe import DESCRIBE, Description
from aqueduct.rpc.request import FAILURES, ONE_TO_ONE
from tests.support.calls import config, until_seen
from tests.support.reactive_peer import stranger, stream_of, words_of

NUMBERS = pa.schema([("id", pa.int64())])


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"id": values}, schema=NUMBERS)


class Task:
    """A thread with one exchange, and the queue of its news."""

    def __init__(self, client: ReactiveTaskClient, **options: Any) -> None:
        self.news: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.exchange = client.exchange_call(
            "square", self.news, self, **{"schema": NUMBERS, **options}
        )

    def next(self) -> Any:
        tag, found = self.news.get(timeout=20)
        assert tag is self
        return self.exchange.popped(found)

    def accepted(self) -> None:
        if not self.exchange.expect(acceptance=True):
            assert self.next() is NEWS
        assert self.exchange.accepted


@pytest.fixture
def peer():
    with stranger() as (service, server):
        yield service, server


@pytest.fixture
def client(peer):
    made = ReactiveTaskClient(peer[1].address)
    yield made
    made.close()


def test_batches_are_sent_and_answered(client):
    task = Task(client, in_flight=2)
    task.accepted()
    exchange = task.exchange
    assert exchange.capabilities == {ONE_TO_ONE, FAILURES}
    assert exchange.room
    assert [exchange.push(batch(2)), exchange.push(batch(3, 4))] == [0, 1]
    assert not exchange.room and not exchange.expect(room=True)
    found = dict([task.next(), task.next()])
    assert {number: exchange.decode(answer) for number, answer in found.items()} == {
        0: batch(4),
        1: batch(9, 16),
    }
    assert all(len(answer) > 8 for answer in found.values())
    assert exchange.room and exchange.settled == 2
    assert exchange.sent_bytes > 24
    exchange.finish()
    assert task.next() is END


def test_a_finish_waits_for_what_is_under_way(peer, client):
    service, server = peer
    service.gate = asyncio.Event()
    task = Task(client)
    task.accepted()
    task.exchange.push(batch(2))
    task.exchange.finish()
    server.loop.call_soon_threadsafe(service.gate.set)
    number, answer = task.next()
    assert (number, task.exchange.decode(answer)) == (0, batch(4))
    assert task.next() is END


def test_what_came_counts_until_the_thread_asks_for_more(peer, client):
    task = Task(client)
    task.accepted()
    big = batch(*range(100_000))
    task.exchange.push(big)
    _, answer = task.next()
    assert client._connection.snapshot().held_bytes >= 800_000
    task.exchange.decode(answer)
    task.exchange.set_waiting(True)
    client._thread.run(asyncio.sleep(0))
    assert client._connection.snapshot().held_bytes < 100_000


@pytest.mark.parametrize("reports", [True, False])
def test_a_failure_of_a_batch(client, reports):
    task = Task(client, report_failures=reports)
    task.accepted()
    task.exchange.push(batch(-1))
    found = task.next()
    if reports:
        number, failed = found
        assert number == 0 and type(failed) is FailedBatch
    else:
        failed = found
        assert type(failed) is Failed
    error = failed.error
    assert "batch 0: no root of -1 here" in str(error)


def test_what_cannot_be_sent_is_an_error_and_nothing_was_sent(peer, client):
    task = Task(client)
    task.accepted()
    with pytest.raises(SchemaMismatch, match="no"):
        task.exchange.push(pa.record_batch({"no": [1]}))
    with pytest.raises(LocalProtocolError, match="cannot be the name of a handler"):
        client.exchange_call("", queue.SimpleQueue(), None, schema=NUMBERS)
    assert task.exchange.push(batch(1)) == 0
    task.next()
    assert len(peer[0].asked) == 1


def test_an_abandoned_exchange_cancels_its_requests(peer, client):
    service, server = peer
    service.gate = asyncio.Event()
    task, other = Task(client), Task(client)
    task.accepted()
    other.accepted()
    for each in (task, other):
        each.exchange.push(batch(1))
    until_seen(lambda: service.at_work == 2)
    task.exchange.abandon()
    assert isinstance(task.next().error, Cancelled)
    until_seen(lambda: service.at_work == 1)
    server.loop.call_soon_threadsafe(service.gate.set)
    assert other.next()[0] == 0


def test_a_closed_client_fails_what_is_under_way(peer):
    service, _ = peer
    service.gate = asyncio.Event()
    client = ReactiveTaskClient(peer[1].address)
    task = Task(client)
    task.accepted()
    task.exchange.push(batch(1))
    client.close()
    assert isinstance(task.next().error, ConnectionLost)
    assert client.closed
    task.exchange.push(batch(1))
    assert isinstance(task.next().error, ConnectionLost)
    client.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        Task(client)


def test_a_service_that_is_none_of_aqueduct_has_no_description(client):
    assert client.describe() is None
    assert client.describe(token="any") is None


def test_a_service_that_answers_nothing_has_none_either(peer):
    _, server = peer

    async def silent(request: Any) -> None:
        await asyncio.Event().wait()

    server.responder = silent
    timing = Timing(connect_timeout=0.3)
    client = ReactiveTaskClient(server.address, config=dataclasses.replace(DEFAULT, timing=timing))
    assert client.describe() is None
    client.close()


def responding(server: Any, describe: Any, respond: Any) -> None:
    """The service answers by these: what asks for its description, and what does not."""

    async def responder(request: Any) -> None:
        pairs, body = words_of(bytes(request.data))
        if pairs["handler"] == DESCRIBE:
            await describe(request)
        else:
            await respond(request, pairs, body)

    server.responder = responder


async def nothing(request: Any) -> None:
    request.fail("no such thing")


@contextmanager
def dialed(server: Any, **options: Any) -> Iterator[ReactiveTaskClient]:
    client = ReactiveTaskClient(server.address, config=config(**options))
    try:
        yield client
    finally:
        client.close()


def test_a_description_that_comes_late_is_used_then(peer):
    service, server = peer
    service.gate = asyncio.Event()
    asked = []

    async def describe(request: Any) -> None:
        asked.append(request)
        await service.gate.wait()
        description = Description("late", library="1")
        await request.send(stream_of(pa.Table.from_batches([description.to_batch()])))
        request.complete()

    responding(server, describe, None)
    with dialed(server, timing={"connect_timeout": 0.1}) as client:
        assert client.describe() is None
        assert client.describe() is None
        server.loop.call_soon_threadsafe(service.gate.set)
        until_seen(lambda: client.describe() is not None)
        assert len(asked) == 1


def test_a_service_that_refuses_its_description_may_allow_the_handler(peer):
    service, server = peer
    said = ["refused: not for you"]

    async def describe(request: Any) -> None:
        request.fail(said[0], "REJECTED")

    async def respond(request: Any, pairs: Any, body: bytes) -> None:
        await service.respond(request)

    responding(server, describe, respond)
    with dialed(server) as client:
        task = Task(client)
        task.accepted()
        assert task.exchange.capabilities == {ONE_TO_ONE, FAILURES}
        task.exchange.push(batch(3))
        assert task.exchange.decode(task.next()[1]) == batch(9)
        with pytest.raises(Refused, match="not for you"):
            client.describe()
        said[0] = "draining: it ends"
        failed = Task(client).next()
        assert isinstance(failed.error, Refused) and failed.error.draining


TEXTS = pa.schema([("text", pa.string())])
SPLIT = {"frame_bytes": 4096}


def texts(*values: str) -> pa.RecordBatch:
    return pa.record_batch({"text": values}, schema=TEXTS)


def sent(client: ReactiveTaskClient, given: pa.RecordBatch, **options: Any) -> Task:
    task = Task(client, schema=TEXTS, **options)
    task.accepted()
    task.exchange.push(given)
    return task


async def echo(request: Any, pairs: Any, body: bytes) -> None:
    await request.send(body)


@pytest.mark.parametrize(
    "values",
    [["x" * 2500] * 3 + ["y"] * 60, ["y"] * 60 + ["x" * 2500] * 3, ["y", "x" * 2500] * 4],
    ids=["first", "last", "between"],
)
def test_a_batch_is_split_until_each_part_fits(peer, values):
    _, server = peer
    responding(server, nothing, echo)
    with dialed(server, reactivesocket=SPLIT) as client:
        task = sent(client, texts(*values))
        assert task.exchange.decode(task.next()[1]) == texts(*values)


def test_each_answer_to_a_part_is_progress(peer):
    _, server = peer
    turns = asyncio.Semaphore(0)
    asked = []

    async def respond(request: Any, pairs: Any, body: bytes) -> None:
        asked.append(request)
        await turns.acquire()
        await request.send(body)

    responding(server, nothing, respond)
    with dialed(server, reactivesocket=SPLIT) as client:
        task = sent(client, texts(*["x" * 2500] * 2))
        until_seen(lambda: len(asked) == 1)
        task.exchange._moved = 0.0
        server.loop.call_soon_threadsafe(turns.release)
        until_seen(lambda: len(asked) == 2)
        assert task.exchange._moved > 0
        server.loop.call_soon_threadsafe(turns.release)
        assert task.exchange.decode(task.next()[1]).num_rows == 2


def test_each_part_has_what_is_left_of_the_deadline(peer):
    _, server = peer
    left = []

    async def respond(request: Any, pairs: Any, body: bytes) -> None:
        left.append(int(pairs["deadline"]))
        await asyncio.sleep(0.02)
        await request.send(body)

    responding(server, nothing, respond)
    with dialed(server, reactivesocket=SPLIT) as client:
        task = sent(client, texts(*["x" * 2500] * 4), deadline=60.0)
        task.next()
    assert len(left) == 4
    assert left[0] - left[-1] >= 50


def answering(column: Any) -> Any:
    """Answers a batch with ``column``, which is made of the first letter of its first text."""

    async def respond(request: Any, pairs: Any, body: bytes) -> None:
        with pa.ipc.open_stream(body) as reader:
            first = reader.read_all()["text"][0].as_py()[0]
        await request.send(stream_of(pa.table({"d": column(first)})))

    return respond


def halves(first: str) -> pa.Array:
    values = pa.array([ord(first)], pa.uint16()).view(pa.float16())
    return pa.DictionaryArray.from_arrays(pa.array([0]), values)


def words(first: str) -> pa.Array:
    values = pa.array([f"{first}{place}" for place in range(100)])
    return pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), values)


def test_answers_to_parts_are_joined_whatever_their_dictionaries(peer):
    _, server = peer
    responding(server, nothing, answering(halves))
    with dialed(server, reactivesocket=SPLIT) as client:
        task = sent(client, texts("a" * 2500, "b" * 2500))
        found = task.exchange.decode(task.next()[1])["d"].to_pylist()
        assert found == [halves("a")[0].as_py(), halves("b")[0].as_py()]


def test_answers_to_parts_that_cannot_be_joined_are_an_error(peer):
    _, server = peer
    responding(server, nothing, answering(words))
    with dialed(server, reactivesocket=SPLIT) as client:
        task = sent(client, texts("a" * 2500, "b" * 2500))
        _, answer = task.next()
        with pytest.raises(
            BadCall, match=r"'square' at .*: its 2 answers .* cannot be put together"
        ):
            task.exchange.decode(answer)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("unknown-handler: it may answer often: ask it by REQUEST_STREAM", ConfigError),
        ("handler-failed: no row, so ask it by REQUEST_STREAM", HandlerFailed),
        ("unknown-handler: ask it by REQUEST_STREAM or not", UnknownHandler),
    ],
)
def test_what_a_service_says_of_others_is_told_from_the_words_of_a_handler(peer, text, kind):
    _, server = peer

    async def respond(request: Any, pairs: Any, body: bytes) -> None:
        request.fail(text)

    responding(server, nothing, respond)
    with dialed(server) as client:
        assert type(sent(client, texts("a")).next().error) is kind


def test_where_nobody_listens(peer):
    _, server = peer
    address = server.address
    asyncio.run_coroutine_threadsafe(server.close(), server.loop).result(20)
    with pytest.raises(ConnectFailed, match="refused"):
        ReactiveTaskClient(address)
    with pytest.raises(ConfigError):
        ReactiveTaskClient("reactivesocket+tcp://")


def test_a_forked_child_is_told_that_the_client_is_its_parents(client):
    task = Task(client)
    task.accepted()
    child = os.fork()
    if not child:
        try:
            client.close()
            code = 0 if client.closed else 1
            try:
                Task(client)
                code = 2
            except LocalProtocolError:
                pass
        except BaseException:  # noqa: BLE001  the parent hears the code
            code = 3
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    task.exchange.push(batch(5))
    assert task.exchange.decode(task.next()[1]) == batch(25)
