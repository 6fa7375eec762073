"""Several exchanges that one thread drives, with one queue for the news of all."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.call import END, FailedBatch
from aqueduct.client.thread_call import NEWS, Failed
from aqueduct.errors import (
    Cancelled,
    ConnectionLost,
    HandlerFailed,
    LocalProtocolError,
    SchemaMismatch,
    UnknownHandler,
)
from tests.support.calls import NUMBERS, Watched, numbers, sync_client, values


@pytest.fixture
def service():
    service = aqueduct.Service("test")

    @service.handler("echo", input=NUMBERS, output=NUMBERS, concurrency=2, idempotent=True)
    def echo(batch):
        if batch["id"][0].as_py() < 0:
            raise ValueError("below zero")
        return batch

    return service


def test_the_news_of_all_come_by_one_queue(service):
    with sync_client(service) as client:
        news: SimpleQueue[Any] = SimpleQueue()
        calls = {
            tag: client.exchange_call("echo", news, tag, schema=NUMBERS, report_failures=True)
            for tag in ("a", "b")
        }
        for call in calls.values():
            call.expect(acceptance=True)
        while not all(call.accepted for call in calls.values()):
            tag, found = news.get(timeout=20)
            assert found is NEWS
        for call in calls.values():
            assert call.accepted and call.room and call.schema == NUMBERS
            assert call.capabilities == {"one-to-one", "idempotent", "failures"}
        assert calls["a"].push(numbers(1)) == 0
        assert calls["b"].push(numbers(2)) == 0
        assert calls["a"].push(numbers(-3)) == 1
        for call in calls.values():
            call.set_waiting(True)
            call.finish()
        come: dict[str, list[Any]] = {"a": [], "b": []}
        while any(not each or each[-1] is not END for each in come.values()):
            tag, what = news.get(timeout=20)
            if what is not NEWS:  # of the acceptance, which was seen before
                come[tag].append(calls[tag].popped(what))
        assert [number for number, _ in come["a"][:-1]] == [0, 1]
        assert values([calls["a"].decode(come["a"][0][1])]) == [[1]]
        failure = come["a"][1][1]
        assert type(failure) is FailedBatch and isinstance(failure.error, HandlerFailed)
        assert values([calls["b"].decode(come["b"][0][1])]) == [[2]]
        assert calls["a"].settled == 2 and calls["a"].sent_bytes > calls["b"].sent_bytes > 0
        with pytest.raises(SchemaMismatch):
            calls["a"].push(pa.record_batch({"other": [1]}))


def test_a_call_that_fails_says_why(service):
    with sync_client(service) as client:
        news: SimpleQueue[Any] = SimpleQueue()
        call = client.exchange_call("ehco", news, None, schema=NUMBERS)
        _, found = news.get(timeout=20)
        assert type(found) is Failed and isinstance(found.error, UnknownHandler)
        assert not call.accepted and call.capabilities == frozenset()
        call = client.exchange_call("echo", news, "again", schema=NUMBERS, in_flight=1)
        call.push(numbers(1))
        assert not call.room
        assert news.get(timeout=20)[0] == "again"
        client.close()
        _, found = news.get(timeout=20)
        assert type(found) is Failed and isinstance(found.error, ConnectionLost)
        with pytest.raises(LocalProtocolError, match="closed"):
            call.check()
        with pytest.raises(LocalProtocolError, match="closed"):
            client.exchange_call("echo", news, None, schema=NUMBERS)


def test_a_call_may_be_given_up():
    watched = Watched()
    with sync_client(watched.service) as client:
        news: SimpleQueue[Any] = SimpleQueue()
        call = client.exchange_call("stuck", news, None, schema=NUMBERS)
        call.push(numbers(1))
        assert watched.begun.wait(20)
        call.abandon()
        assert watched.told.wait(20)
        assert isinstance(watched.call.reason, Cancelled)


def test_what_is_kept_besides_fills_the_window(service):
    with sync_client(service) as client:
        news: SimpleQueue[Any] = SimpleQueue()
        call = client.exchange_call("echo", news, None, schema=NUMBERS, in_flight_bytes=100_000)
        if not call.expect(acceptance=True):
            news.get(timeout=20)
        call.push(numbers(1))
        call.hold(200_000)
        if not call.expect(room=True):  # the answer makes room for one, as nothing is under way
            found = [news.get(timeout=20)[1], news.get(timeout=20)[1]]
            assert NEWS in found
        assert call.room
