"""Several addresses behind one partition: spread by what is under way, and none of them needed."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from itertools import count, islice

import pytest

from aqueduct.config import Config, Timing
from aqueduct.errors import BadCall, Busy, ConnectFailed, ConnectionLost, Refused
from spark_udfs.calls import connector as endpoints
from spark_udfs.worker.metrics import TaskMetrics
from spark_udfs.worker.task import TaskContext
from tests.spark.callees import (
    Callee,
    answers,
    batch,
    calling,
    check_squares,
    free_port,
    until,
    value_of,
)

TCP = "aqueduct+tcp://127.0.0.1:0"


@pytest.fixture(autouse=True)
def untroubled():
    """What a test has learnt of addresses is forgotten."""
    yield
    endpoints._troubled.clear()


@pytest.fixture
def several(running):
    """``several(3)``: so many callees, and their addresses."""
    with ExitStack() as stack:

        def start(count, **options):
            callees = [Callee(f"callee {n}", **options) for n in range(count)]
            places = [
                stack.enter_context(running(callee.service, TCP, dev_certificate=False))
                for callee in callees
            ]
            return callees, places

        yield start


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("retries", [0, 2])
def test_batches_are_spread(several, ordered, retries):
    callees, places = several(3)
    call = calling(*places, ordered=ordered, retries=retries)
    numbers = TaskMetrics()
    values = count()

    def source():
        while not all(callee.asked for callee in callees):  # until all are connected
            yield batch(next(values), 200)
        for value in islice(values, 300):
            yield batch(value, 200)

    found = list(answers(call, source(), numbers=numbers))
    total = next(values)
    check_squares(found, total, ordered=ordered)
    assert all(sum(callee.asked.values()) > 20 for callee in callees)
    assert sum(sum(callee.asked.values()) for callee in callees) == total
    assert (numbers.retries, numbers.reconnects) == (0, 0)
    assert numbers.bytes_sent == sum(c.service.counters()["bytes_in"] for c in callees)


def until_asked(callee):
    """Batches that are let through, until the callee has one."""
    value = 1000
    while not callee.asked:
        yield batch(value)
        value += 1


def test_the_next_batch_goes_where_the_fewest_bytes_are_under_way(several):
    callees, places = several(2)

    def source():
        yield batch(0, 5000)  # to the first
        yield from until_asked(callees[1])
        for value in range(1, 7):
            yield batch(value)

    call = calling(*places, handler="gated", in_flight=10, ordered=False)
    seen: list[int] = []
    found = answers(call, source())
    reader = threading.Thread(target=lambda: seen.extend(value_of(a.batch) for a in found))
    reader.start()
    until(lambda: sum(callee.asked[value] for callee in callees for value in range(7)) == 7)
    assert callees[0].asked[0] == 1
    assert all(callees[1].asked[value] for value in range(1, 7))
    for callee in callees:
        for value in range(7):
            callee.gate(value).set()
    reader.join(20)
    assert {0, 1, 2, 3, 4, 5, 6} <= set(seen)


def test_a_small_partition_makes_one_call(several):
    callees, places = several(3)
    for partition in range(6):
        found = list(answers(calling(*places), [batch(3)], place=TaskContext(partition=partition)))
        assert [value_of(answer.batch) for answer in found] == [9]
    assert [callee.service.counters()["calls"] for callee in callees] == [2, 2, 2]


def test_a_handler_of_all_batches_has_one_address(several):
    callees, places = several(3)
    for partition in range(6):
        call = calling(*places, handler="sums")
        found = list(answers(call, map(batch, range(30)), place=TaskContext(partition=partition)))
        assert value_of(found[-1].batch) == -sum(range(30))
    assert [callee.service.counters()["calls"] for callee in callees] == [2, 2, 2]


@pytest.mark.parametrize("handler", ["square", "square once", "sums"])
@pytest.mark.parametrize("partition", [0, 1])
def test_one_of_two_is_not_there(several, handler, partition):
    """Without any retries: another address is no retry."""
    (callee,), (there,) = several(1)
    nowhere = f"aqueduct+tcp://127.0.0.1:{free_port()}"
    call = calling(nowhere, there, handler=handler)
    place = TaskContext(partition=partition)
    found = list(answers(call, map(batch, range(100)), place=place))
    if handler == "sums":
        assert value_of(found[-1].batch) == -sum(range(100))
    else:
        check_squares(found, 100)
    assert set(callee.asked.values()) == {1}


def test_one_of_two_says_nothing(several):
    """It accepts connections, and that is all: the other one is not held up until it is late."""
    (callee,), (there,) = several(1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        nowhere = f"aqueduct+tcp://127.0.0.1:{silent.getsockname()[1]}"
        config = Config(timing=Timing(connect_timeout=30))
        began = time.monotonic()
        call = calling(nowhere, there, config=config, hedge=0.1)
        check_squares(list(answers(call, map(batch, range(50)))), 50)
        # The next task does not begin where this one heard nothing.
        call = calling(nowhere, there, config=config)
        check_squares(list(answers(call, [batch(0)])), 1)
        assert time.monotonic() - began < 20  # connecting may take 30 s
        assert sum(callee.asked.values()) == 51


def test_all_of_them_are_gone():
    places = [f"aqueduct+tcp://127.0.0.1:{free_port()}" for _ in range(3)]
    with pytest.raises(ConnectFailed, match="tried once without an answer") as caught:
        list(answers(calling(*places), [batch(1)]))
    assert all(place in str(caught.value) for place in places)
    with pytest.raises(ConnectFailed, match="tried 3 times"):
        list(answers(calling(*places, retries=2), [batch(1)]))


def test_one_refuses_and_the_other_takes_all(several):
    def busy(call):
        raise Busy("not now")

    (full,), (first,) = several(1, authorize=busy)
    (callee,), (second,) = several(1)
    for handler in ("square", "sums"):
        list(answers(calling(first, second, handler=handler), map(batch, range(40))))
    assert not full.asked and set(callee.asked) == set(range(40))
    assert full.service.counters()["refused"] >= 2


def test_what_one_refuses_for_good_ends_the_work(several):
    def never(call):
        raise Refused("no such token")

    _, (first,) = several(1, authorize=never)
    (callee,), (second,) = several(1)
    with pytest.raises(Refused, match="no such token"):
        list(answers(calling(first, second, retries=3), map(batch, range(40))))
    assert not callee.asked


def test_two_services_that_are_not_the_same(running):
    one, other = Callee(), Callee()

    @one.service.handler("mixed")
    def function(batch):
        time.sleep(0.002)
        return batch

    @other.service.handler("mixed")
    def generator(batches, call):
        yield from batches

    with (
        running(one.service, TCP, dev_certificate=False) as first,
        running(other.service, TCP, dev_certificate=False) as second,
        pytest.raises(BadCall, match="is no function of one batch, and at another address it is"),
    ):
        list(answers(calling(first, second, handler="mixed"), map(batch, range(400))))


@pytest.mark.parametrize("ordered", [True, False])
def test_one_of_two_dies_and_comes_back(several, neighbour, ordered):
    (callee,), (there,) = several(1)
    neighbour.start()
    numbers = TaskMetrics()
    given: list[int] = []
    end = time.monotonic() + 40

    def source():
        while not (numbers.reconnects and len(given) > 1000):
            if len(given) == 300:
                neighbour.kill()
            if len(given) == 600:
                neighbour.start()
            given.append(len(given))
            yield batch(given[-1], 100)
            assert time.monotonic() < end

    call = calling(
        neighbour.address, there, ordered=ordered, retries=5, backoff=0.02, backoff_limit=0.1
    )
    found = list(answers(call, source(), numbers=numbers))
    check_squares(found, len(given), ordered=ordered)
    assert numbers.retries >= 1 and numbers.reconnects == 1
    assert 0 < len(callee.asked) < len(given)


def test_a_killed_service_takes_with_it_what_may_not_be_asked_again(several, neighbour):
    (callee,), (there,) = several(1)
    neighbour.start()

    def source():
        yield from until_asked(callee)
        for value in range(8):
            yield batch(value)

    def kill():
        until(lambda: sum(callee.asked[value] for value in range(8)) == 4)
        neighbour.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    call = calling(neighbour.address, there, handler="gated once", retries=5)
    with pytest.raises(ConnectionLost, match="'gated once' is not declared idempotent"):
        list(answers(call, source()))
    killer.join(20)
    assert set(callee.asked.values()) == {1}
    for value in range(8):
        callee.gate(value).set()
