"""An event loop that others may borrow from its thread, and sync clients that do."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client import shared_loop, sync_stream
from aqueduct.client.shared_loop import SharedLoop
from aqueduct.endpoint import PendingReply
from aqueduct.errors import LocalProtocolError
from tests.support.calls import NUMBERS, numbers, served, sync_client, until_seen, values

LONG = 20.0


def borrow(thread: SharedLoop) -> None:
    """As soon as its own thread has let go of it."""
    until_seen(thread.borrow)


@pytest.fixture
def thread():
    thread = SharedLoop("test-borrowed")
    yield thread
    thread.stop()
    assert not thread.alive


@pytest.fixture
def resting(thread):
    """Nobody runs its loop."""
    thread.rest()
    borrow(thread)
    thread.give_back()
    return thread


def test_its_own_thread_keeps_the_loop_until_it_is_told_to_rest(thread):
    assert thread.kept
    assert not thread.borrow()
    thread.rest()
    borrow(thread)
    assert not thread.kept
    thread.give_back()


def test_who_borrows_the_loop_runs_what_is_put_there(resting):
    found = []

    def look():
        found.append(threading.current_thread())
        resting.loop.call_soon(last)

    def last():
        found.append(threading.current_thread())

    assert resting.borrow()
    try:
        resting.loop.call_soon(look)
        resting.loop.call_soon(resting.loop.stop)
        resting.turn(LONG)  # runs what was left for the next turn, too
    finally:
        resting.give_back()
    assert found == [threading.current_thread()] * 2


def test_a_turn_ends_in_time(resting):
    assert resting.borrow()
    try:
        resting.turn(0.01)
    finally:
        resting.give_back()


def test_nobody_else_gets_a_loop_that_is_borrowed(resting):
    assert resting.borrow()
    assert not resting.borrow()
    with ThreadPoolExecutor() as pool:
        assert pool.submit(resting.borrow).result(LONG) is False
    resting.give_back()
    assert resting.borrow()
    resting.give_back()


def test_a_loop_is_not_borrowed_within_another(resting):
    async def try_it():
        return resting.borrow()

    assert asyncio.run(try_it()) is False
    assert resting.borrow()
    resting.give_back()


def test_work_brings_the_own_thread_back(resting):
    seen = threading.Event()
    resting.call(seen.set)
    assert seen.wait(LONG)
    assert resting.kept


def test_a_coroutine_brings_the_own_thread_back(resting):
    async def answer():
        await asyncio.sleep(0)
        return threading.current_thread()

    assert resting.run(answer()) is not threading.current_thread()


def test_work_for_a_borrowed_loop_is_done_by_who_has_it(resting):
    found = []

    def look():
        found.append(threading.current_thread())
        resting.loop.stop()

    assert resting.borrow()
    try:
        threading.Timer(0.01, resting.call, (look,)).start()
        resting.turn(LONG)
    finally:
        resting.give_back()
    assert found == [threading.current_thread()]


def test_an_unattended_loop_is_taken_up_again(resting):
    seen = threading.Event()
    resting.loop.call_soon_threadsafe(seen.set)  # nobody is told
    assert seen.wait(LONG)
    assert resting.kept


def test_a_loop_catches_up_with_what_nobody_did(resting):
    found = []
    resting.loop.call_soon_threadsafe(lambda: found.append(threading.current_thread()))
    connection: Any = Brought([])
    resting.catch_up(connection)
    assert found == [threading.current_thread()]
    assert connection.said == [
        (True, resting.loop),
        ("read", resting.loop),
        (False, resting.loop),
    ]
    resting.catch_up(connection)
    assert len(connection.said) == 3  # nothing came up


class Brought:
    """A connection, as far as loops know one: what looks bring is given beforehand."""

    def __init__(self, looks):
        self.looks = iter(looks)
        self.said = []

    def attend(self, attended):
        self.said.append((attended, asyncio.get_running_loop()))

    def look(self):
        return next(self.looks)()

    def read(self):
        self.said.append(("read", asyncio.get_running_loop()))


async def awaiting(asked, found):
    found.append("begun")
    for _ in range(2):
        await asked
        found.append(asyncio.get_running_loop())
    return "done"


def step(thread, looks, asked, found, tasks):
    connection = Brought(looks)
    borrow(thread)
    try:
        return thread.step(awaiting(asked, found), connection, tasks.append)
    finally:
        assert connection.said == [(state, thread.loop) for state in (True, False)]
        assert asyncio._get_running_loop() is None
        thread.give_back()


def brings(asked):
    def look():
        asked.wake()
        return True

    return look


def test_work_whose_input_is_there_needs_no_turn(resting, monkeypatch):
    monkeypatch.setattr(shared_loop, "_STEPPED", LONG)  # however busy the machine is
    asked, found = PendingReply(resting.loop), list[Any]()
    tasks: list[asyncio.Task[str]] = []
    # One look brings something else, and the work waits on.
    looks = [brings(asked), lambda: True, brings(asked)]
    assert step(resting, looks, asked, found, tasks) == "done"
    assert found == ["begun", resting.loop, resting.loop]
    assert tasks == []


@pytest.mark.parametrize("brought", [0, 1])
def test_work_whose_input_is_not_there_goes_on_as_a_task(resting, brought, monkeypatch):
    monkeypatch.setattr(shared_loop, "_STEPPED", LONG)
    asked, found = PendingReply(resting.loop), list[Any]()
    tasks: list[asyncio.Task[str]] = []
    looks = [*[brings(asked)] * brought, lambda: False]
    assert step(resting, looks, asked, found, tasks) is None
    assert found == ["begun", *[resting.loop] * brought]
    for more in range(brought + 2, 4):  # the loop's own thread goes on
        until_seen(lambda: asked._callback is not None)
        resting.call(asked.wake)
        until_seen(lambda: len(found) == more)  # noqa: B023
    until_seen(tasks[0].done)
    assert tasks[0].result() == "done"
    assert found == ["begun", resting.loop, resting.loop]


def test_input_of_others_ends_the_steps(resting):
    asked, found = PendingReply(resting.loop), list[Any]()
    tasks: list[asyncio.Task[str]] = []
    assert step(resting, itertools.repeat(lambda: True), asked, found, tasks) is None
    assert found == ["begun"]
    resting.call(tasks[0].cancel)
    until_seen(tasks[0].cancelled)


def test_what_looking_raises_leaves_no_loop_behind(resting):
    ended = []

    async def work():
        try:
            await PendingReply(resting.loop)
        finally:
            ended.append(asyncio.get_running_loop())

    borrow(resting)
    with pytest.raises(ZeroDivisionError):
        resting.step(work(), Brought([lambda: 1 // 0]), print)
    assert ended == [resting.loop]
    assert asyncio._get_running_loop() is None
    resting.give_back()


def test_a_loop_that_ends_as_it_is_taken_is_not_lent(resting):
    class Lock:
        def acquire(self, blocking):
            resting._ended = True
            return lock.acquire(blocking)

        def release(self):
            lock.release()

    lock, resting._running = resting._running, Lock()
    assert not resting.borrow()
    assert not lock.locked()
    resting._running = lock
    resting._ended = False


def test_who_only_steps_lets_timers_be_seen_now_and_then(resting, monkeypatch):
    monkeypatch.setattr(shared_loop, "_UNATTENDED", 0.0)
    due = threading.Event()
    borrow(resting)
    resting.loop.call_later(0, due.set)
    assert not resting._ready
    until_seen(lambda: resting.run_rest() or due.is_set())
    resting.give_back()


class Foreign(asyncio.SelectorEventLoop):
    """An event loop of another make: nothing is known of its insides."""

    def __getattribute__(self, name):
        if name in ("_ready", "_selector") and sys._getframe(1).f_globals["__name__"].startswith(
            "aqueduct"
        ):
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_a_loop_of_another_make_stays_with_its_thread(monkeypatch):
    monkeypatch.setattr(asyncio, "new_event_loop", Foreign)
    thread = SharedLoop("test-foreign")
    try:
        thread.rest()
        seen = threading.Event()
        thread.call(seen.set)
        assert seen.wait(LONG)
        assert thread.kept
        assert not thread.borrow()
        connection: Any = Brought([])
        thread.catch_up(connection)
        assert connection.said == []
    finally:
        thread.stop()
    assert not thread.alive


def test_a_loop_that_rests_can_be_stopped(thread):
    thread.rest()
    borrow(thread)
    thread.give_back()
    thread.stop()
    assert not thread.alive
    assert not thread.borrow()
    with pytest.raises(LocalProtocolError, match="closed"):
        thread.check()


def test_a_borrowed_loop_can_be_stopped(resting):
    assert resting.borrow()
    threading.Timer(0.01, resting.stop).start()
    resting.turn(LONG)
    resting.give_back()
    resting._thread.join(LONG)
    assert not resting.alive


def test_work_and_rest_and_loans_at_once(thread):
    """Whatever is put onto the loop is run, whoever has it meanwhile."""
    count = 400
    done: list[int] = []
    over = threading.Event()

    def work() -> None:
        for number in range(count):
            thread.call(done.append, number)
            if number % 3 == 0:
                thread.rest()

    def lend() -> None:
        while not over.is_set():
            if thread.borrow():
                try:
                    thread.turn(0.0005)
                finally:
                    thread.give_back()
            time.sleep(0)

    with ThreadPoolExecutor() as pool:
        loans = [pool.submit(lend) for _ in range(2)]
        works = [pool.submit(work) for _ in range(3)]
        try:
            for each in works:
                each.result(LONG)
            until_seen(lambda: len(done) == 3 * count)
        finally:
            over.set()
        for each in loans:
            each.result(LONG)
    assert sorted(done) == sorted(list(range(count)) * 3)


# Clients


@pytest.fixture
def service():
    service = aqueduct.Service("test")

    @service.handler("double", input=NUMBERS, output=NUMBERS)
    def double(batch):
        return pa.record_batch({"id": pa.compute.multiply(batch["id"], 2)}, schema=NUMBERS)

    @service.handler("slow", input=NUMBERS, output=NUMBERS)
    def slow(batch):
        time.sleep(0.05)
        return batch

    return service


@pytest.fixture
def client(service):
    with sync_client(service) as client:
        yield client


def rest(client) -> None:
    client.rest()
    borrow(client._thread)
    client._thread.give_back()


def test_a_small_call_is_made_by_the_thread_that_asks(client, monkeypatch):
    monkeypatch.setattr(sync_stream, "_EARLY", LONG)  # however busy the machine is
    monkeypatch.setattr(shared_loop, "_UNATTENDED", LONG)
    for number in range(20):
        rest(client)
        stream = client.exchange("double", [numbers(number)], schema=NUMBERS, together=True)
        assert values(list(stream)) == [[2 * number]]
        assert not client._thread.kept


def test_the_own_thread_goes_on_with_a_call_that_takes_longer(client):
    rest(client)
    stream = client.exchange("slow", [numbers(1)], schema=NUMBERS, together=True)
    assert values([next(stream)]) == [[1]]
    until_seen(lambda: client._thread.kept)
    assert list(stream) == []


def test_the_own_thread_goes_on_with_a_call_of_many_batches(client):
    rest(client)
    batches = [numbers(number) for number in range(100)]
    stream = client.exchange("double", batches, schema=NUMBERS, together=True)
    assert values(list(stream)) == [[2 * number] for number in range(100)]


def test_input_that_is_there_leaves_before_an_answer_is_looked_for(client, monkeypatch):
    monkeypatch.setattr(sync_stream, "_EARLY", LONG)
    rest(client)
    taken: list[int] = []
    answered: list[int] = []

    def batches():
        for number in range(3):
            taken.append(len(answered))
            yield numbers(number)

    stream = client.exchange(
        "double", batches(), schema=NUMBERS, together=True, ready=lambda: len(taken) < 2
    )
    for batch in stream:
        answered += values([batch])[0]
    assert answered == [0, 2, 4]
    assert taken[:2] == [0, 0]  # the second was asked for before the first was answered


def test_acceptance_is_waited_for_by_the_thread_that_asks(client, monkeypatch):
    monkeypatch.setattr(shared_loop, "_UNATTENDED", LONG)  # however busy the machine is
    rest(client)
    with client.exchange("double", [numbers(1)], schema=NUMBERS, together=True) as stream:
        assert stream.opened() == NUMBERS
        assert not client._thread.kept
        assert values(list(stream)) == [[2]]


def test_threads_that_share_a_client_that_rests(client):
    """One of them may have the loop; the calls of the others go on."""

    def work(first: int) -> None:
        for number in range(first, first + 30):
            client.rest()
            stream = client.exchange("double", [numbers(number)], schema=NUMBERS, together=True)
            assert values(list(stream)) == [[2 * number]]

    with ThreadPoolExecutor() as pool:
        for each in [pool.submit(work, 1000 * k) for k in range(4)]:
            each.result(60)


def test_who_cannot_have_the_loop_has_its_own_thread_run_it(client, monkeypatch):
    monkeypatch.setattr(shared_loop, "_UNATTENDED", 1000)  # it does not come back by itself
    rest(client)
    stream = client.exchange("slow", [numbers(1)], schema=NUMBERS, together=True)
    crossing = stream._crossing
    stream._send_next(stream._input)
    assert crossing._run_loop(0.01)  # it has left, and this thread was to read its answer
    borrow(client._thread)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(crossing._look, LONG)
        until_seen(lambda: crossing._waking)
        client._thread.give_back()
        assert found.result(LONG)[0] == 0
    stream.close()


def test_a_call_left_early_is_cancelled_though_nobody_runs_the_loop(client, service):
    rest(client)
    batches = map(numbers, itertools.count())
    stream = client.exchange("double", batches, schema=NUMBERS, together=True)
    next(stream)
    stream.close()
    until_seen(lambda: service.counters()["open_calls"] == 0)
    assert service.counters()["cancelled"] == 1


def test_a_client_that_rests_hears_of_the_end(service):
    with served(service) as address:
        client = aqueduct.SyncClient(address)
        rest(client)

    def is_closed():
        client.catch_up()
        return client.closed

    until_seen(is_closed)
    client.close()
    client.rest()


def test_a_client_that_rests_closes(service):
    with sync_client(service) as client:
        rest(client)
    assert client.closed
