"""Calls that break and go on: cut connections, killed services, restarts, refusals."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aqueduct
from aqueduct.address import Address
from aqueduct.client.loop_thread import LoopThread
from aqueduct.client.retry import Backoff, may_pass, renumbered, with_note
from aqueduct.config import Config, Timing
from aqueduct.errors import (
    Busy,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    Refused,
)
from aqueduct.testing.stream_relay import End, Fate, StreamRelay
from spark_udfs import exchange
from spark_udfs.calls.pool import process_pool
from spark_udfs.worker.metrics import TaskMetrics
from spark_udfs.worker.task import TaskContext
from tests.spark.callees import (
    Callee,
    Neighbour,
    answers,
    batch,
    calling,
    check_squares,
    free_port,
    until,
    value_of,
)

TCP = "aqueduct+tcp://127.0.0.1:0"
REACTIVE = "reactivesocket+tcp://127.0.0.1:0"
IMPATIENT = Config(timing=Timing(connect_timeout=2))


class Cutting(StreamRelay):
    """A proxy whose connections have the fates that ``fates`` gives, then none."""

    def __init__(self, fates, **options):
        super().__init__(**options)
        self.fates = iter(fates)

    async def _join(self, client):
        self.up, self.down = next(self.fates, (Fate(), Fate()))
        await super()._join(client)


@contextmanager
def cut(address: str, fates) -> Iterator[tuple[str, Cutting]]:
    """The address of a proxy before ``address``, and the proxy."""
    behind = Address.parse(address)
    thread = LoopThread("test-proxy")
    made: list[Cutting] = []

    async def start() -> int:
        made.append(Cutting(fates))
        return made[0].start((behind.host, behind.port))[1]  # type: ignore[return-value]

    async def close() -> None:
        made[0].close()

    try:
        yield str(behind.with_port(thread.run(start()))), made[0]
    finally:
        thread.run(close())
        thread.stop()


ENDS = st.sampled_from([End.RESET, End.FIN])
FATES = st.builds(
    lambda up, down, end: (Fate(up, end, chop=True), Fate(down, end, chop=True)),
    st.none() | st.integers(0, 60_000),
    st.none() | st.integers(0, 60_000),
    ENDS,
)


CUT = {
    "fates": st.lists(FATES, min_size=1, max_size=6),
    "seed": st.integers(0, 1 << 30),
    "ordered": st.booleans(),
    "reports": st.booleans(),
    "count": st.integers(0, 60),
    "in_flight": st.integers(1, 12),
    "addresses": st.integers(1, 3),
}


@settings(max_examples=60, deadline=None)
@given(**CUT)
def test_whatever_is_cut_every_batch_is_answered_once(shared_callee, **cuts):
    check_cut(*shared_callee, **cuts)


@settings(max_examples=20, deadline=None)
@given(**CUT)
def test_whatever_is_cut_of_requests_every_batch_is_answered_once(reactive_callee, **cuts):
    check_cut(*reactive_callee, **cuts)


def check_cut(callee, address, *, fates, seed, ordered, reports, count, in_flight, addresses):
    chance = random.Random(seed)
    failing = {n for n in range(count) if reports and chance.random() < 0.2}
    failing.discard(0)
    signed = [-n if n in failing else n for n in range(count)]
    given = [batch(n, chance.choice([1, 10, 2000])) for n in signed]
    callee.asked.clear()
    try:
        with cut(address, fates) as (place, proxy):
            # All of them lead to the one proxy, under names that the pool tells apart.
            places = [place, place.replace("127.0.0.1", "localhost"), address][:addresses]
            call = calling(
                *places,
                ordered=ordered,
                in_flight=in_flight,
                on_error="report" if reports else "fail",
                retries=8,
                backoff=0.001,
                config=IMPATIENT,
            )
            numbers = TaskMetrics()
            found = list(answers(call, given, numbers=numbers))
            order = [answer.number for answer in found]
            assert (order if ordered else sorted(order)) == list(range(count))
            for answer in found:
                if answer.number in failing:
                    assert answer.batch is None
                    assert answer.error is not None and answer.error.batch == answer.number
                else:
                    assert answer.error is None
                    assert value_of(answer.batch) == answer.number**2
                    assert answer.batch.num_rows == given[answer.number].num_rows
            assert numbers.batches_sent == numbers.batches_received == count
            assert numbers.failed_batches == len(failing)
            assert (numbers.retries > 0) or len(proxy.links) <= addresses
            process_pool().close()
    finally:
        process_pool().close()
    until(lambda: not callee.service.counters()["open_calls"])


@pytest.fixture(scope="module")
def shared_callee():
    """For the examples of one test, which are many."""
    yield from callee_at(TCP)


@pytest.fixture(scope="module")
def reactive_callee():
    """The same, where each batch is a request of ReactiveSocket."""
    yield from callee_at(REACTIVE)


def callee_at(where):
    from tests.spark.conftest import _running

    callee = Callee()
    with _running(callee.service, where, dev_certificate=False) as address:
        yield callee, address


@pytest.mark.parametrize("ordered", [True, False])
def test_a_service_that_is_killed_and_comes_back(neighbour, ordered):
    neighbour.start()
    call = calling(neighbour.address, retries=50, backoff=0.05, backoff_limit=0.2, ordered=ordered)
    numbers = TaskMetrics()
    given = (batch(value, 100) for value in range(600))
    found = []
    for answer in answers(call, given, numbers=numbers):
        found.append(answer)
        if len(found) in (100, 300):
            neighbour.kill()
            threading.Timer(0.3, neighbour.start).start()
    check_squares(found, 600, ordered=ordered)
    assert numbers.retries >= 2 and numbers.reconnects == 2
    assert numbers.batches_sent == 600
    until(lambda: neighbour.process is not None)


def test_a_service_that_has_restarted_is_asked_again_on_a_new_connection(caplog):
    # Its links have gone with the process, so nothing can be resumed: retries go on as ever.
    neighbour = Neighbour("?resume=60s")
    try:
        neighbour.start()
        numbers = TaskMetrics()
        call = calling(neighbour.address, retries=5, backoff=0.05, backoff_limit=0.2)
        found = []
        for answer in answers(call, (batch(value, 100) for value in range(400)), numbers=numbers):
            found.append(answer)
            if len(found) in (100, 300):
                neighbour.kill()
                threading.Timer(0.3, neighbour.start).start()
        check_squares(found, 400)
        assert (numbers.retries, numbers.reconnects, numbers.resumes) == (2, 2, 0)
        assert caplog.text.count("ConnectionLost: ") == 2
        assert caplog.text.count("the service restarted; ") == 2
        until(lambda: neighbour.process is not None)
    finally:
        process_pool().close()
        neighbour.kill()


def test_cut_connections_are_no_retries_where_they_can_be_resumed(running):
    callee = Callee()
    fates = [
        (Fate(), Fate(40_000, End.RESET)),
        (Fate(50_000, End.RESET), Fate()),
        (Fate(), Fate(30_000, End.FIN)),
        (Fate(20_000, End.FIN), Fate()),
    ]
    with (
        running(callee.service, TCP + "?resume=60s", dev_certificate=False) as address,
        cut(address, fates) as (place, proxy),
    ):
        numbers = TaskMetrics()
        call = calling(place, handler="square once", in_flight=5)
        given = (batch(value, 200) for value in range(200))
        check_squares(list(answers(call, given, numbers=numbers)), 200)
        assert len(proxy.links) == 5
        assert set(callee.asked.values()) == {1}
        assert (numbers.retries, numbers.reconnects) == (0, 0)
        assert numbers.resumes == 4
        process_pool().close()
        until(lambda: not callee.service.counters()["open_connections"])
        assert callee.service.counters()["resumes"] >= numbers.resumes


def test_nothing_answered_is_asked_again(running):
    callee = Callee()
    fates = [(Fate(), Fate(30_000, End.RESET)), (Fate(), Fate(50_000, End.RESET))]
    with (
        running(callee.service, TCP, dev_certificate=False) as address,
        cut(address, fates) as (place, proxy),
    ):
        call = calling(place, retries=3, in_flight=5)
        before: list[dict[int, int]] = []
        found = []
        for answer in answers(call, (batch(value, 200) for value in range(150))):
            found.append(answer)
            if len(proxy.links) > len(before) + 1:
                before.append(dict(callee.asked))
        check_squares(found, 150)
        assert len(proxy.links) == 3
        # Only what was under way when a connection broke was asked twice: 5 batches each time.
        assert sum(callee.asked.values()) <= 150 + 2 * 5
        attempts = {call.attempt for call in callee.calls.values()}
        assert attempts == {"", "0.1", "0.2"}
        process_pool().close()


def test_attempts_and_tokens_of_resumed_calls(running):
    callee = Callee()
    fates = [(Fate(), Fate(20_000, End.RESET))]
    tokens = iter("abcdef")
    with (
        running(callee.service, TCP, dev_certificate=False) as address,
        cut(address, fates) as (where, _),
    ):
        place = TaskContext(partition=3, stage=1, attempt=0, task=17)
        call = calling(where, retries=3, token=lambda: next(tokens), write_key="job")
        numbers = TaskMetrics()
        given = (batch(value, 500) for value in range(40))
        check_squares(list(answers(call, given, place=place, numbers=numbers)), 40)
        seen = [(call.write_key, call.attempt, call.token) for call in callee.calls.values()]
        assert seen == [("job/1/3", "17", "a"), ("job/1/3", "17.1", "b")]
        assert (numbers.retries, numbers.reconnects) == (1, 1)


def test_what_is_not_declared_idempotent_is_not_asked_again(running):
    callee = Callee()
    fates = [(Fate(), Fate(20_000, End.RESET))]
    with (
        running(callee.service, TCP, dev_certificate=False) as address,
        cut(address, fates) as (place, proxy),
    ):
        call = calling(place, handler="square once", retries=5)
        with pytest.raises(
            ConnectionLost, match="'square once' is not declared idempotent"
        ) as caught:
            list(answers(call, (batch(value, 500) for value in range(40))))
        assert "idempotent=True" in str(caught.value)
        assert len(proxy.links) == 1 and set(callee.asked.values()) == {1}


def test_a_handler_of_all_batches_is_not_called_again_once_it_has_some(running):
    callee = Callee()
    fates = [(Fate(), Fate(2_000, End.RESET))]
    with (
        running(callee.service, TCP, dev_certificate=False) as address,
        cut(address, fates) as (place, proxy),
    ):
        call = calling(place, handler="sums", retries=5)
        with pytest.raises(ConnectionLost, match="'sums' is no function of one batch"):
            list(answers(call, map(batch, range(400))))
        assert len(proxy.links) == 1


@pytest.mark.parametrize("handler", ["square", "square once", "sums"])
def test_a_call_of_which_nothing_was_sent_is_made_again(running, handler):
    """Cut before the accept message has come."""
    callee = Callee()
    fates = [(Fate(), Fate(limit, End.RESET)) for limit in (0, 40, 100)]
    with (
        running(callee.service, TCP, dev_certificate=False) as address,
        cut(address, fates) as (place, proxy),
    ):
        numbers = TaskMetrics()
        call = calling(place, handler=handler, retries=3, config=IMPATIENT)
        found = list(answers(call, map(batch, range(3)), numbers=numbers))
        assert len(found) == (4 if handler == "sums" else 3)
        assert len(proxy.links) == 4 and numbers.retries == 3
        assert set(callee.asked.values()) == {1}


def test_retries_are_counted_from_the_last_answer(running):
    """Each connection lasts for some answers: six breaks, of which no two are in a row."""
    callee = Callee()
    fates = [(Fate(), Fate(9_000, End.RESET)) for _ in range(6)]
    with (
        running(callee.service, TCP, dev_certificate=False) as address,
        cut(address, fates) as (place, proxy),
    ):
        call = calling(place, retries=1, in_flight=2)
        check_squares(list(answers(call, (batch(value, 200) for value in range(60)))), 60)
        assert len(proxy.links) == 7


def test_a_service_that_never_comes_is_an_error_in_the_end():
    address = f"aqueduct+tcp://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectFailed, match=r"; tried once \(retries=0\)"):
        list(answers(calling(address), [batch(1)]))
    numbers = TaskMetrics()
    with pytest.raises(ConnectFailed, match="tried 4 times without an answer at") as caught:
        list(answers(calling(address, retries=3), [batch(1)], numbers=numbers))
    assert address in str(caught.value) and "retries=3" in str(caught.value)
    assert numbers.retries == 3 and numbers.batches_sent == 0


def test_pauses_end_with_the_deadline():
    address = f"aqueduct+tcp://127.0.0.1:{free_port()}"
    call = calling(address, retries=1000, backoff=60.0, backoff_limit=60.0, deadline=0.3)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"not done within its deadline of 0\.3 s"):
        list(answers(call, [batch(1)]))
    assert time.monotonic() - began < 20  # the pause is at least 30 s


def test_a_service_that_is_busy_is_asked_again(running):
    callee = Callee()
    started = threading.Event()

    @callee.service.handler("one", max_calls=1, idempotent=True)
    def one(batch, call):
        started.set()
        callee.gate(value_of(batch)).wait(30)
        return batch

    with running(callee.service) as address:
        first = threading.Thread(
            target=lambda: list(answers(calling(address, handler="one"), [batch(1)]))
        )
        first.start()
        assert started.wait(20)
        with pytest.raises(Busy, match="tried 3 times"):
            list(answers(calling(address, handler="one", retries=2), [batch(2)]))
        callee.gate(2).set()
        numbers = TaskMetrics()
        call = calling(address, handler="one", retries=1000, backoff_limit=0.02)
        patient = answers(call, [batch(2)], numbers=numbers)
        found = []
        second = threading.Thread(target=lambda: found.extend(patient))
        second.start()
        until(lambda: numbers.retries >= 2)
        callee.gate(1).set()
        first.join(20)
        second.join(20)
        assert [value_of(answer.batch) for answer in found] == [2]
        assert numbers.reconnects == 0  # it was one connection all the time


@pytest.mark.parametrize("shape", ["function", "generator"])
def test_eight_tasks_wait_for_two_places_and_none_is_refused(running, shape):
    service = aqueduct.Service("callee")
    gate, inside, most = threading.Event(), [0], [0]
    lock = threading.Lock()

    def work(batch):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        assert gate.wait(20)
        with lock:
            inside[0] -= 1
        return batch

    if shape == "function":
        service.handler("two", max_concurrency=2)(work)
    else:

        @service.handler("two", max_concurrency=2)
        def two(batches):
            yield from map(work, batches)

    with running(service) as address:
        found: list[int] = []

        def task(number: int) -> None:
            call = calling(address, handler="two", retries=0)
            found.extend(value_of(each.batch) for each in answers(call, [batch(number)]))

        tasks = [threading.Thread(target=task, args=(number,)) for number in range(8)]
        for each in tasks:
            each.start()
        until(lambda: inside[0] == 2 and service.counters()["waiting_calls"] == 6)
        gate.set()
        for each in tasks:
            each.join(20)
    assert sorted(found) == list(range(8))
    assert most[0] == 2


@pytest.mark.parametrize("carrier", ["tcp", "unix", "quic"])
def test_a_service_that_drains_hands_over_to_its_successor(running, tmp_path, carrier):
    """The calls that are open at its end are made again, at the same address."""
    listen = {"tcp": TCP, "unix": f"aqueduct+unix://{tmp_path}/s", "quic": "aqueduct://127.0.0.1:0"}
    options = {} if carrier == "quic" else {"dev_certificate": False}
    callee = Callee(config=Config(timing=Timing(close_linger=0.2, drain_timeout=0.2)))

    def let_go():
        """Three are answered once all are asked; the others are not waited for any more then."""
        until(lambda: callee.asked[5])
        for value in range(3):
            callee.gate(value).set()
        until(lambda: all(call.cancelled for call in callee.calls.values()))
        for value in range(3, 6):
            callee.gate(value).set()

    letting = threading.Thread(target=let_go)
    letting.start()
    with running(callee.service, listen[carrier], **options) as address:
        address = address.partition("?")[0]  # the successor has another certificate
        query = "?verify=off" if carrier == "quic" else ""
        more = {"retries": 200, "backoff_limit": 0.05, "config": IMPATIENT}
        call = calling(address + query, handler="gated", **more)
        found = answers(call, map(batch, range(6)))
        assert [next(found).number for _ in range(3)] == [0, 1, 2]
    letting.join(20)
    next_one = Callee()
    for value in range(6):
        next_one.gate(value).set()
    with running(next_one.service, address, **options):
        assert [answer.number for answer in found] == [3, 4, 5]
    assert set(next_one.asked) == {3, 4, 5}


def test_errors_that_may_pass():
    assert may_pass(ConnectFailed("x")) and may_pass(ConnectionLost("x", code=1))
    assert may_pass(Busy("x")) and may_pass(Refused("x", draining=True))
    assert not may_pass(Refused("x")) and not may_pass(ConnectionLost("x", code=4))
    assert not may_pass(DeadlineExceeded("x")) and not may_pass(KeyError("x"))


def test_pauses_double_up_to_their_limit():
    backoff = Backoff(0.1, 1.0)
    assert backoff.until <= time.monotonic()
    for wanted in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        before = time.monotonic()
        backoff.failed()
        after = time.monotonic()
        assert backoff.until - before >= wanted / 2
        assert backoff.until - after <= wanted
    backoff.failures = 5000
    backoff.failed()
    assert backoff.failures == 5001
    backoff.succeeded()
    before = time.monotonic()
    backoff.failed()
    assert backoff.until - before >= 0.05


def test_pauses_are_options():
    call = exchange("aqueduct://a", "h", retries=3, backoff="20ms", backoff_limit="2s").calling
    assert (call.retries, call.backoff, call.backoff_limit) == (3, 0.02, 2.0)
    assert exchange("aqueduct://a", "h").calling.backoff_limit == 30.0
    with pytest.raises(ConfigError, match="backoff_limit"):
        exchange("aqueduct://a", "h", backoff_limit="soon")


def test_errors_are_copied_before_they_say_more():
    error = aqueduct.errors.HandlerFailed("handler 'h' at p, batch 3: raised", kind="K", detail="d")
    error.batch = 3
    other = renumbered(error, 17)
    assert str(other) == "handler 'h' at p, batch 17: raised"
    assert (other.batch, other.kind, error.batch) == (17, "K", 3)
    lost = ConnectionLost("gone", code=7)
    more = with_note(lost, "tried twice")
    assert (str(more), more.code, str(lost)) == ("gone; tried twice", 7, "gone")
