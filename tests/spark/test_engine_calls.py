"""What the calls behind a partition give: order, numbers, failures, deadlines, tokens."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pyarrow as pa
import pytest

from aqueduct.errors import (
    ConfigError,
    DeadlineExceeded,
    HandlerFailed,
    Refused,
    SchemaMismatch,
)
from spark_udfs.worker.metrics import TaskMetrics
from spark_udfs.worker.task import TaskContext
from tests.spark.callees import (
    NUMBERS,
    Callee,
    answers,
    batch,
    calling,
    check_squares,
    until,
    value_of,
)

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "retries": {"retries": 2},
    "as completed": {"ordered": False},
    "failures": {"on_error": "report"},
    "late ones": {"on_error": "report", "batch_deadline": 30.0},
}


@pytest.fixture(params=["tcp", "draft", "unix", "quic"])
def address(request, tmp_path):
    return {
        "tcp": "aqueduct+tcp://127.0.0.1:0",
        "draft": "aqueduct+tcp://127.0.0.1:0?dialect=control-streams",
        "unix": f"aqueduct+unix://{tmp_path}/service.sock",
        "quic": "aqueduct://127.0.0.1:0",
    }[request.param]


def options(address):
    return {} if address.startswith("aqueduct://") else {"dev_certificate": False}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_batch_has_its_answer(running, address, way):
    callee = Callee()
    with running(callee.service, address, **options(address)) as place:
        numbers = TaskMetrics()
        given = (batch(value, 1 + 50 * (value % 7)) for value in range(200))
        found = list(answers(calling(place, **way), given, numbers=numbers))
        check_squares(found, 200, ordered=way.get("ordered", True))
        assert [answer.batch.num_rows for answer in sorted(found, key=lambda a: a.number)] == [
            1 + 50 * (value % 7) for value in range(200)
        ]
        assert set(callee.asked.values()) == {1}
        assert numbers.batches_sent == numbers.batches_received == 200
        assert numbers.rows_sent == numbers.rows_received > 200
        counted = callee.service.counters()
        assert numbers.bytes_sent == counted["bytes_in"] > 8 * numbers.rows_sent
        assert numbers.bytes_received == counted["bytes_out"] > 8 * numbers.rows_received
        assert 0 < numbers.waiting_seconds < 60
        assert (numbers.retries, numbers.reconnects, numbers.failed_batches) == (0, 0, 0)
        until(lambda: not callee.service.counters()["open_calls"])
        assert callee.service.counters()["calls"] == 1
        assert callee.service.counters()["cancelled"] == 0


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("count", [0, 1])
def test_small_partitions(running, way, count):
    callee = Callee()
    with running(callee.service) as address:
        check_squares(list(answers(calling(address, **way), map(batch, range(count)))), count)
        assert callee.service.counters()["calls"] == 1
        assert callee.service.counters()["cancelled"] == 0


@pytest.mark.parametrize("way", ["plain", "retries", "as completed"])
def test_a_handler_of_all_batches(running, way):
    callee = Callee()
    with running(callee.service) as address:
        call = calling(address, handler="sums", **WAYS[way])
        found = list(answers(call, map(batch, range(100))))
        sums = list(itertools.accumulate(range(100)))
        assert [value_of(answer.batch) for answer in found] == [*sums, -sums[-1]]
        assert [answer.number for answer in found] == [*range(100), 99]
        assert [value_of(a.batch) for a in answers(call, iter(()))] == [0]


@pytest.mark.parametrize("way", ["as completed", "retries", "failures", "late ones"])
@pytest.mark.parametrize(("in_flight", "size"), [(3, 1 << 20), (50, 2500)])
def test_no_more_is_under_way_than_may_be(running, way, in_flight, size):
    """Each batch has about 1,000 bytes."""
    callee = Callee()
    with running(callee.service) as address:
        call = calling(
            address, handler="gated", in_flight=in_flight, in_flight_bytes=size, **WAYS[way]
        )
        read: list[int] = []
        seen: list[int] = []
        under_way: list[int] = []

        def source():
            for value in range(20):
                read.append(value)
                under_way.append(len(read) - len(seen))
                yield batch(value, 110)

        found = answers(call, source())
        reader = threading.Thread(target=lambda: seen.extend(a.number for a in found))
        reader.start()
        until(lambda: len(callee.asked) == 3)
        for value in range(1, 20):
            callee.gate(value).set()
        if way == "as completed":  # the slow one takes one place of the three
            until(lambda: len(seen) == 19)
        callee.gate(0).set()
        reader.join(20)
        assert sorted(seen) == list(range(20))
        assert seen == sorted(seen) or way == "as completed"
        assert max(under_way) == 3


@pytest.mark.parametrize(
    ("way", "rows", "expected"),
    [("plain", 1, 64), ("plain", 40_000, 8), ("retries", 1, 8), ("retries", 40_000, 8)],
)
def test_of_small_batches_more_are_under_way_where_one_call_has_all(running, way, rows, expected):
    callee = Callee()
    with running(callee.service) as address:
        read: list[int] = []

        def source():
            for value in range(100):
                read.append(value)
                yield batch(value, rows)

        call = calling(address, handler="gated", in_flight=None, in_flight_bytes=None, **WAYS[way])
        found: list[Any] = []
        reader = threading.Thread(target=lambda: found.extend(answers(call, source())))
        reader.start()
        until(lambda: len(callee.asked) == 8 and len(read) >= expected)
        time.sleep(0.2)
        assert len(read) == expected  # the first has no answer
        for value in range(100):
            callee.gate(value).set()
        reader.join(20)
        assert [answer.number for answer in found] == list(range(100))


def test_what_the_caller_keeps_counts_as_under_way(running):
    for way in (WAYS["plain"], WAYS["retries"], WAYS["as completed"]):
        callee = Callee()
        with running(callee.service) as address:
            kept: list[int] = []
            most: list[int] = []

            def source(kept=kept, most=most):
                for value in range(30):
                    kept.append(400)
                    most.append(len(kept))
                    yield batch(value)

            call = calling(address, in_flight=20, in_flight_bytes=3000, **way)
            for _ in answers(call, source(), held=lambda kept=kept: sum(kept)):
                kept.pop()
            assert len(most) == 30 and 2 <= max(most) <= 8


@pytest.mark.parametrize("way", ["plain", "retries"])
def test_what_the_caller_keeps_does_not_stop_a_handler_that_answers_at_the_end(running, way):
    """It takes batches and answers none, so what the caller keeps of them only grows."""
    callee = Callee()

    @callee.service.handler("later", input=NUMBERS, output=NUMBERS)
    def later(batches, call):
        yield from list(batches)

    kept: list[int] = []

    def source():
        for value in range(60):
            kept.append(400)
            yield batch(value)

    with running(callee.service) as address:
        call = calling(address, handler="later", in_flight_bytes=3000, **WAYS[way])
        found = list(answers(call, source(), held=lambda: sum(kept)))
        assert [value_of(answer.batch) for answer in found] == list(range(60))


@pytest.mark.parametrize("way", ["plain", "retries", "as completed"])
def test_only_waiting_for_the_service_is_counted(running, way):
    """The service takes 0.3 s for one batch; before that the input takes as long for another."""
    callee = Callee()
    with running(callee.service) as address:
        callee.gate(0).set()
        upstream = threading.Event()
        counted: list[float] = []
        numbers = TaskMetrics()

        def source():
            yield batch(0)
            began = time.monotonic()
            threading.Timer(0.3, upstream.set).start()
            assert upstream.wait(20)
            counted.append(time.monotonic() - began)
            threading.Thread(target=answer_late).start()
            yield batch(1)

        def answer_late():
            until(lambda: callee.asked[1])
            threading.Event().wait(0.3)  # nothing sets it
            callee.gate(1).set()

        call = calling(address, handler="gated", **WAYS[way])
        began = time.monotonic()
        assert len(list(answers(call, source(), numbers=numbers))) == 2
        took = time.monotonic() - began
        # The thread may be late to its wait, by a third of it.
        assert 0.2 <= numbers.waiting_seconds <= took - counted[0]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("more", [{}, {"retries": 3}, {"batch_deadline": 30.0}])
def test_failed_batches_are_reported_and_the_rest_is_answered(running, ordered, more):
    callee = Callee()
    with running(callee.service) as address:
        call = calling(address, ordered=ordered, on_error="report", **more)
        numbers = TaskMetrics()
        given = [batch(-value if value % 10 == 5 else value) for value in range(50)]
        found = list(answers(call, given, numbers=numbers))
        order = [answer.number for answer in found]
        assert (order if ordered else sorted(order)) == list(range(50))
        for answer in found:
            if answer.number % 10 == 5:
                error = answer.error
                assert answer.batch is None and isinstance(error, HandlerFailed)
                assert error.kind == "ValueError" and error.batch == answer.number
                assert f"batch {answer.number}: " in str(error)
                assert "is below zero" in error.detail and "squared" in error.remote_traceback
            else:
                assert value_of(answer.batch) == answer.number**2 and answer.error is None
        assert numbers.failed_batches == 5 and numbers.batches_received == 50
        assert callee.asked[-5] == 1  # a failure of the handler is not tried again


@pytest.mark.parametrize("way", ["plain", "retries", "as completed"])
def test_a_failed_batch_ends_the_work(running, way):
    callee = Callee()
    with running(callee.service) as address:
        given = [batch(0), batch(1), batch(-2)]
        with pytest.raises(HandlerFailed, match="batch 2: raised ValueError: -2") as caught:
            list(answers(calling(address, **WAYS[way]), given))
        assert caught.value.batch == 2


def test_failures_are_reported_of_functions_of_one_batch_alone(running):
    callee = Callee()
    with running(callee.service) as address:
        call = calling(address, handler="sums", on_error="report")
        with pytest.raises(ConfigError, match=r"'sums' at .* is no function of one batch"):
            list(answers(call, [batch(1)]))
        assert not callee.asked


def test_a_batch_that_is_late_fails_the_work(running):
    callee = Callee()
    with running(callee.service) as address:
        callee.gate(0).set()
        call = calling(address, handler="gated", batch_deadline=0.2)
        with pytest.raises(DeadlineExceeded, match=r"batch 1: no answer within 0\.2 s") as caught:
            list(answers(call, [batch(0), batch(1)]))
        assert caught.value.batch == 1
        until(lambda: all(call.cancelled for call in callee.calls.values()))
        callee.gate(1).set()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_batch_that_is_late_is_reported_and_holds_back_no_other(running, ordered):
    callee = Callee()
    with running(callee.service) as address:
        for value in range(40):
            if value % 10 != 3:
                callee.gate(value).set()
        call = calling(
            address, handler="gated", batch_deadline=0.3, on_error="report", ordered=ordered
        )
        numbers = TaskMetrics()
        found = {}
        for answer in answers(call, map(batch, range(40)), numbers=numbers):
            assert answer.number not in found
            found[answer.number] = answer
        assert sorted(found) == list(range(40))
        late = [number for number, answer in found.items() if answer.error is not None]
        assert sorted(late) == [3, 13, 23, 33] and numbers.failed_batches == 4
        assert all(type(found[number].error) is DeadlineExceeded for number in late)
        for value in (3, 13, 23, 33):
            callee.gate(value).set()
        until(lambda: not callee.service.counters()["open_calls"])


def test_a_handler_that_takes_no_batch_is_late_too(running):
    callee = Callee()
    holding = threading.Event()

    @callee.service.handler("holds", input=NUMBERS, output=NUMBERS)
    def holds(batches, call):
        for found in batches:
            if value_of(found) == 3:
                call.on_cancel(holding.set)
                holding.wait(30)
            yield found

    with running(callee.service) as address:
        call = calling(address, handler="holds", batch_deadline=0.3)
        with pytest.raises(DeadlineExceeded, match=r"batch [34]: no answer within 0\.3 s"):
            list(answers(call, map(batch, range(8))))
        assert holding.wait(20)


@pytest.mark.parametrize("way", ["plain", "retries"])
def test_the_deadline_of_a_partition(running, way):
    callee = Callee()
    with running(callee.service) as address:
        callee.gate(0).set()
        call = calling(address, handler="gated", deadline=0.3, **WAYS[way])
        found = answers(call, [batch(0), batch(1)])
        assert next(found).number == 0
        with pytest.raises(DeadlineExceeded, match=r"deadline|did not end within"):
            next(found)
        callee.gate(1).set()


def test_a_token_is_asked_for_each_call(running):
    callee = Callee()
    given = itertools.count()
    with running(callee.service) as address:
        for retries in (0, 2):
            call = calling(address, token=lambda: f"token {next(given)}", retries=retries)
            list(answers(call, [batch(1)]))
        assert sorted(call.token for call in callee.calls.values()) == ["token 0", "token 1"]


@pytest.mark.parametrize("retries", [0, 2])
def test_a_token_that_cannot_be_had(running, retries):
    def expired():
        raise KeyError("no secret")

    callee = Callee()
    with running(callee.service) as address:
        with pytest.raises(ConfigError, match="token, which is asked for each call, raised KeyErr"):
            list(answers(calling(address, token=expired, retries=retries), [batch(1)]))
        with pytest.raises(ConfigError, match="gave a bytes, not text"):
            list(answers(calling(address, token=lambda: b"x", retries=retries), [batch(1)]))


def test_what_a_service_refuses_is_not_asked_again(running):
    refused = []

    def authorize(call):
        refused.append(call.token)
        raise Refused("not you")

    callee = Callee(authorize=authorize)
    with running(callee.service) as address:
        with pytest.raises(Refused, match="not you"):
            list(answers(calling(address, retries=5, token="mine"), [batch(1)]))
        other = pa.schema([("id", pa.string())])
        with pytest.raises((Refused, SchemaMismatch)):
            list(answers(calling(address, retries=5, schema=other), [batch(1)]))
        assert len(refused) == 2


@pytest.mark.parametrize("way", ["plain", "retries"])
def test_the_caller_hears_of_the_schema_before_data_flows(running, way):
    callee = Callee()
    with running(callee.service) as address:
        seen: list[tuple[pa.Schema, bool]] = []

        def opened(schema, capabilities):
            seen.append((schema, {"one-to-one", "idempotent"} <= capabilities))

        # The second time the connection knows it, and nothing is waited for.
        for count in (1, 2):
            list(answers(calling(address, **WAYS[way]), [batch(1)], opened=opened))
            assert seen == [(NUMBERS, True)] * count and callee.asked == {1: count}

        def refuse(schema, capabilities):
            raise SchemaMismatch("not this")

        with pytest.raises(SchemaMismatch, match="not this"):
            list(answers(calling(address, **WAYS[way]), [batch(2)], opened=refuse))
        assert callee.asked == {1: 2}


@pytest.mark.parametrize("way", ["plain", "retries", "as completed"])
def test_what_the_input_raises_gives_up_the_call(running, way):
    callee = Callee()

    def source():
        yield batch(1)
        raise KeyError("upstream")

    with running(callee.service) as address:
        with pytest.raises(KeyError, match="upstream"):
            list(answers(calling(address, **WAYS[way]), source()))
        until(lambda: not callee.service.counters()["open_calls"])
        assert callee.service.counters()["cancelled"] == 1


@pytest.mark.parametrize("way", ["plain", "retries", "as completed"])
def test_closing_early_gives_up_the_call(running, way):
    callee = Callee()
    callee.gate(0).set()
    with running(callee.service) as address:
        place = TaskContext(partition=3, stage=1, attempt=0, task=17)
        call = calling(address, handler="gated", write_key="run", **WAYS[way])
        found = answers(call, map(batch, itertools.count()), place=place)
        assert next(found).number == 0
        found.close()
        until(lambda: all(call.cancelled for call in callee.calls.values()))
        (seen,) = callee.calls.values()
        assert (seen.write_key, seen.attempt, seen.partition.index) == ("run/1/3", "17", 3)
        for gate in callee.gates.values():
            gate.set()
        until(lambda: not callee.service.counters()["open_calls"])


@pytest.mark.parametrize("way", ["plain", "retries"])
def test_a_batch_that_cannot_be_sent(running, way):
    callee = Callee()
    wrong = pa.record_batch({"other": [1]})
    with running(callee.service) as address:
        with pytest.raises(SchemaMismatch, match="other"):
            list(answers(calling(address, **WAYS[way]), [batch(1), wrong]))
        until(lambda: not callee.service.counters()["open_calls"])
