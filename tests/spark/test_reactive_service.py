"""The calls behind a partition as requests of ReactiveSocket, to a service of Aqueduct."""

from __future__ import annotations

import threading

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aqueduct
from aqueduct.errors import (
    Busy,
    ConfigError,
    HandlerFailed,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from spark_udfs import exchange
from spark_udfs.calls.pool import process_pool
from spark_udfs.worker.metrics import TaskMetrics
from spark_udfs.worker.task import TaskContext
from tests.spark.callees import (
    NUMBERS,
    Callee,
    Neighbour,
    answers,
    batch,
    calling,
    check_squares,
    until,
)

pytestmark = pytest.mark.spark

WAYS = {
    "plain": {},
    "retries": {"retries": 2},
    "as completed": {"ordered": False},
    "failures": {"on_error": "report"},
    "late ones": {"on_error": "report", "batch_deadline": 30.0},
}


@pytest.fixture(params=["tcp", "unix", "ws"])
def address(request, tmp_path):
    return {
        "tcp": "reactivesocket+tcp://127.0.0.1:0",
        "unix": f"reactivesocket+unix://{tmp_path}/s",
        "ws": "reactivesocket+ws://127.0.0.1:0",
    }[request.param]


@pytest.fixture
def callee(running):
    found = Callee()
    with running(found.service, "reactivesocket+tcp://127.0.0.1:0", dev_certificate=False) as place:
        yield found, place


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_batch_has_its_answer(running, address, way):
    callee = Callee()
    with running(callee.service, address, dev_certificate=False) as place:
        numbers = TaskMetrics()
        given = (batch(value, 1 + 50 * (value % 7)) for value in range(100))
        found = list(answers(calling(place, **way), given, numbers=numbers))
        check_squares(found, 100, ordered=way.get("ordered", True))
        assert set(callee.asked.values()) == {1}
        assert numbers.batches_sent == numbers.batches_received == 100
        assert (numbers.retries, numbers.reconnects, numbers.failed_batches) == (0, 0, 0)
        until(lambda: not callee.service.counters()["open_calls"])
        # Each batch is a call of its own, beside the one that asks for the description.
        assert callee.service.counters()["calls"] == 101


def test_the_driver_learns_the_schema_and_what_is_wrong_with_it(callee):
    _, place = callee
    found = exchange(place, "square").output_schema(NUMBERS)
    assert found.simpleString() == "struct<id:bigint>"
    with pytest.raises(UnknownHandler, match="did you mean 'square'"):
        exchange(place, "sqare").output_schema(NUMBERS)
    with pytest.raises(SchemaMismatch, match="'id'"):
        exchange(place, "square").output_schema(pa.schema([("id", pa.string())]))
    cast = exchange(place, "square", cast=True)
    assert cast.output_schema(pa.schema([("id", pa.int32())])) == found


def test_a_task_learns_what_is_wrong_before_data_flows(callee):
    service, place = callee
    with pytest.raises(UnknownHandler, match="did you mean 'square'"):
        list(answers(calling(place, handler="sqare"), [batch(1)]))
    texts = pa.record_batch({"id": ["1"]})
    with pytest.raises(SchemaMismatch, match="the input of handler 'square'"):
        list(exchange(place, "square").answers([texts]))
    with pytest.raises(SchemaMismatch, match="'more'"):
        wanted = pa.schema([("id", pa.int64()), ("more", pa.int64())])
        list(answers(calling(place, schema=wanted), [batch(1)]))
    assert not service.asked


def test_a_handler_of_all_batches_is_an_error_that_says_which_address_can(callee):
    service, place = callee
    with pytest.raises(ConfigError, match=r"'sums' is no function of one batch.*aqueduct://"):
        list(answers(calling(place, handler="sums"), map(batch, range(3))))
    with pytest.raises(ConfigError, match="aqueduct://"):
        exchange(place, "square", compression="lz4")
    assert not service.asked


def test_a_handler_that_fails(callee):
    _, place = callee
    found = list(answers(calling(place, on_error="report"), map(batch, [1, -2, 3])))
    assert [answer.number for answer in found] == [0, 1, 2]
    assert isinstance(found[1].error, HandlerFailed)
    assert "batch 1: raised ValueError: -2 is below zero" in str(found[1].error)
    with pytest.raises(HandlerFailed, match="batch 1: raised ValueError: -2 is below") as raised:
        list(answers(calling(place), map(batch, [1, -2, 3])))
    assert raised.value.batch == 1


def test_a_handler_hears_what_a_call_says(callee):
    service, place = callee
    where = TaskContext(partition=3, stage=1, attempt=0, task=17)
    call = calling(place, token="let me", headers=(("a", "b"),), write_key="job", deadline=30.0)
    check_squares(list(answers(call, map(batch, range(3)), place=where)), 3)
    assert len(service.calls) == 3
    for heard in service.calls.values():
        assert (heard.token, dict(heard.headers)) == ("let me", {"a": "b"})
        assert (heard.write_key, heard.attempt) == ("job/1/3", "17")
        assert heard.partition.index == 3
        assert 0 < heard.deadline <= 30


def test_who_may_not_call_is_told(running):
    callee = Callee(authorize=lambda call: call.token in ("let me", b"let me"))
    with running(callee.service, "reactivesocket+tcp://127.0.0.1:0", dev_certificate=False) as at:
        check_squares(list(answers(calling(at, token="let me"), map(batch, range(3)))), 3)
        with pytest.raises(Refused):
            list(answers(calling(at, retries=3), map(batch, range(3))))


def test_a_service_that_is_killed_and_comes_back():
    neighbour = Neighbour()
    neighbour.address = f"reactivesocket+tcp://127.0.0.1:{neighbour.port}"
    try:
        neighbour.start()
        call = calling(neighbour.address, retries=50, backoff=0.05, backoff_limit=0.2)
        numbers = TaskMetrics()
        found = []
        for answer in answers(call, (batch(value, 100) for value in range(600)), numbers=numbers):
            found.append(answer)
            if len(found) in (100, 300):
                neighbour.kill()
                threading.Timer(0.3, neighbour.start).start()
        check_squares(found, 600)
        assert numbers.retries >= 2 and numbers.reconnects == 2
        assert numbers.batches_sent == 600
        until(lambda: neighbour.process is not None)
    finally:
        process_pool().close()
        neighbour.kill()


def test_a_service_that_drains_hands_its_batches_to_another(running):
    callees = Callee(), Callee()
    first = running(callees[0].service, "reactivesocket+tcp://127.0.0.1:0", dev_certificate=False)
    second = running(callees[1].service, "reactivesocket+tcp://127.0.0.1:0", dev_certificate=False)
    with second as other:
        entered = first.__enter__()
        ending: list[threading.Thread] = []

        def source():
            for value in range(300):
                if value == 100:
                    ending.append(threading.Thread(target=first.__exit__, args=(None, None, None)))
                    ending[0].start()
                yield batch(value)

        call = calling(entered, other, retries=20)
        check_squares(list(answers(call, source())), 300)
        ending[0].join(40)
        assert callees[1].asked and sum(map(len, (each.asked for each in callees))) >= 300


def test_a_busy_service_is_asked_again(running):
    service = aqueduct.Service("busy")
    gate, asked = threading.Event(), []

    @service.handler(input=NUMBERS, output=NUMBERS, idempotent=True, max_calls=1)
    def square(batch):
        asked.append(batch)
        if len(asked) == 1:
            gate.wait(20)
        return pa.record_batch({"id": pc.multiply(batch["id"], batch["id"])}, schema=NUMBERS)

    with running(service, "reactivesocket+tcp://127.0.0.1:0", dev_certificate=False) as at:
        one = threading.Thread(target=lambda: list(answers(calling(at), [batch(1)])))
        one.start()
        until(lambda: asked)
        with pytest.raises(Busy):
            list(answers(calling(at), [batch(2)]))
        threading.Timer(0.1, gate.set).start()
        call = calling(at, retries=1000, backoff=0.001, backoff_limit=0.01, in_flight=1)
        check_squares(list(answers(call, map(batch, range(20)))), 20)
        one.join(20)


def test_an_address_of_each_kind_shares_the_work(running):
    callee, other = Callee(), Callee()
    with (
        running(callee.service, "reactivesocket+tcp://127.0.0.1:0", dev_certificate=False) as first,
        running(other.service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as second,
    ):

        def source():
            for value in range(300):
                if value == 4:
                    until(lambda: other.service.counters()["open_connections"])
                yield batch(value)

        check_squares(list(answers(calling(first, second, retries=1), source())), 300)
        assert callee.asked and other.asked
