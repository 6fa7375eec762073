"""Tasks of one small batch, as Spark makes thousands: the batch goes with its call."""

from __future__ import annotations

import io
from typing import Any

import pytest

from aqueduct.client.client_connection import ClientConnection
from aqueduct.errors import HandlerFailed
from spark_udfs.calls import partition as partition_module
from spark_udfs.worker.metrics import TaskMetrics
from spark_udfs.worker.task import TaskContext
from tests.spark.callees import Callee, answers, batch, calling, until, value_of


@pytest.fixture
def begun(monkeypatch):
    """The handlers of the exchanges that were begun as such."""
    handlers: list[str] = []
    begin = ClientConnection.begin

    def counted(self, head, *arguments):
        handlers.append(head.handler)
        return begin(self, head, *arguments)

    monkeypatch.setattr(ClientConnection, "begin", counted)
    return handlers


@pytest.fixture
def there(monkeypatch):
    """Whether more input, or its end, is there; None: it cannot be known."""
    says: list[bool | None] = [True]

    def input_look():
        return None if says[0] is None else lambda: says[0]

    monkeypatch.setattr(partition_module, "input_look", input_look)
    return says


@pytest.fixture
def task():
    """Runs a task with these batches, and gives the values of its answers and its numbers."""
    count = 0

    def run(call: Any, batches: Any, **more: Any) -> tuple[list[int], TaskMetrics]:
        nonlocal count
        count += 1
        place = TaskContext(partition=3, stage=1, attempt=0, task=count)
        numbers = TaskMetrics()
        found = answers(call, batches, place=place, numbers=numbers, **more)
        return [value_of(answer.batch) for answer in found], numbers

    return run


def test_a_single_small_batch_goes_with_its_call(running, begun, there, task):
    callee = Callee()
    with running(callee.service) as address:
        call = calling(address, write_key="r", headers=(("key", "value"),), token=lambda: "shown")
        counted = []
        for value in range(5):
            found, numbers = task(call, iter([batch(value, 3)]))
            assert found == [value * value]
            counted.append(numbers)
        assert begun == ["square"]  # the first, which tells what the handler is
        seen = list(callee.calls.values())
        assert [(each.write_key, each.attempt, each.headers["key"]) for each in seen] == [
            (f"r/1/{seen[0].partition.index}", str(number), "value") for number in range(1, 6)
        ]
        assert {each.token for each in seen} == {"shown"}
        for numbers in counted:
            assert numbers.waiting_seconds > 0
            numbers.waiting_seconds = 0.0
            assert numbers == counted[0]
        assert (counted[0].batches_sent, counted[0].rows_received) == (1, 3)
        assert counted[0].bytes_sent == counted[0].bytes_received > 24
        until(lambda: not callee.service.counters()["open_calls"])
        assert callee.service.counters()["connections"] == 1


def test_what_is_more_is_an_exchange(running, begun, there, task):
    callee = Callee()
    with running(callee.service) as address:
        call = calling(address)
        task(call, iter([batch(1)]))
        begun.clear()
        for values in ([], [1, 2], [1, 2, 3]):
            found, numbers = task(call, map(batch, values))
            assert found == [value * value for value in values]
            assert numbers.batches_sent == numbers.rows_sent == len(values)
        assert task(call, iter([batch(2, 100_000)]))[0] == [4]
        there[0] = False  # Spark has not said yet whether there is more
        assert task(call, iter([batch(3)]))[0] == [9]
        there[0] = None
        assert task(call, iter([batch(4)]))[0] == [16]
        there[0] = True
        assert task(calling(address, compression="zstd"), iter([batch(5)]))[0] == [25]
        assert begun == ["square"] * 7
        assert task(call, iter([batch(6)]))[0] == [36]
        assert len(begun) == 7


def test_a_handler_of_all_batches_is_always_an_exchange(running, begun, there, task):
    with running(Callee().service) as address:
        for _ in range(2):
            assert task(calling(address, handler="sums"), iter([batch(7)]))[0] == [7, -7]
    assert begun == ["sums", "sums"]


def test_what_is_known_of_one_call_is_not_believed_of_another(running, begun, there, task):
    callee = Callee()
    with running(callee.service) as address:
        for options in ({}, {"deadline": 30.0}, {"deadline": 40.0}, {"handler": "square once"}):
            for _ in range(2):
                assert task(calling(address, **options), iter([batch(2)]))[0] == [4]
        assert begun == ["square"] * 3 + ["square once"]


def test_the_caller_hears_what_the_handler_is_before_data_flows(running, there, task):
    callee = Callee()
    told: list[Any] = []

    def opened(schema, capabilities):
        told.append((schema, "one-to-one" in capabilities))
        if len(told) == 3:
            raise ZeroDivisionError

    with running(callee.service) as address:
        call = calling(address)
        for value in (1, 2):
            task(call, iter([batch(value)]), opened=opened)
        with pytest.raises(ZeroDivisionError):
            task(call, iter([batch(3)]), opened=opened)
        assert told == [(batch(1).schema, True)] * 3
        until(lambda: not callee.service.counters()["open_calls"])
        assert sum(callee.asked.values()) == 2


def test_failures_of_the_handler_and_of_the_input_end_the_task(running, begun, there, task):
    callee = Callee()

    def broken():
        yield batch(1)
        raise io.UnsupportedOperation("the input is broken")

    with running(callee.service) as address:
        call = calling(address)
        task(call, iter([batch(1)]))
        with pytest.raises(HandlerFailed, match="-2 is below zero") as raised:
            task(call, iter([batch(-2)]))
        assert raised.value.batch == 0
        # A worker ends with a task that failed, and its connection with it.
        task(call, iter([batch(1)]))
        with pytest.raises(io.UnsupportedOperation, match="the input is broken"):
            task(call, broken())
        until(lambda: not callee.service.counters()["open_calls"])
        assert len(begun) == 2
