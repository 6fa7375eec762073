"""What a service remembers of attempts, and how settlements take turns."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aqueduct.errors import BadCall, Busy, Refused
from aqueduct.rpc.sink_commit import Attempt, PreparedAttempt, WriteKey, numbered
from aqueduct.service.sink_attempts import Attempts, KeyedLock

RUN = WriteKey("run")


def attempt(task: int, execution: str = "e", write_key: WriteKey = RUN) -> Attempt:
    return Attempt(write_key, execution=execution, task=task)


def test_attempts_are_open_then_prepared_then_forgotten() -> None:
    attempts = Attempts("sink", 10)
    one, two = attempts.begin(attempt(1)), attempts.begin(attempt(2))
    assert attempts.counts() == (2, 0)
    attempts.prepared(one, 7)
    assert attempts.counts() == (1, 1)
    attempts.forget(two)
    attempts.forget(two)
    assert attempts.committed(RUN, []) == [PreparedAttempt(attempt(1), 7)]
    assert attempts.counts() == (0, 0)
    assert attempts.committed(RUN, []) == []


def test_the_limit_counts_all_runs() -> None:
    attempts = Attempts("sink", 2)
    known = attempts.begin(attempt(1))
    attempts.begin(attempt(1, write_key=WriteKey("other")))
    with pytest.raises(Busy, match="'sink' has 2 attempts"):
        attempts.begin(attempt(2))
    attempts.forget(known)
    attempts.begin(attempt(2))


def test_an_attempt_that_is_known_is_not_begun() -> None:
    attempts = Attempts("sink", 10)
    attempts.recall(PreparedAttempt(attempt(1)), 0)
    attempts.recall(PreparedAttempt(attempt(1)), 0)
    with pytest.raises(BadCall, match="already, or did"):
        attempts.begin(attempt(1))
    assert attempts.counts() == (0, 1)


def test_a_commit_ends_its_execution_and_no_other() -> None:
    attempts = Attempts("sink", 10)
    mine, other = attempts.begin(attempt(1)), attempts.begin(attempt(1, "another"))
    attempts.recall(PreparedAttempt(attempt(2)), 0)
    assert attempts.committed(RUN, [PreparedAttempt(attempt(2))]) == []
    with pytest.raises(Refused, match="writes no more: its write is committed without it"):
        mine.check()
    other.check()
    with pytest.raises(Refused, match="comes too late: its write is committed"):
        attempts.begin(attempt(3))
    attempts.begin(attempt(3, "another"))


def test_the_executions_that_are_over_are_remembered_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aqueduct.service.sink_attempts._ENDED_LIMIT", 3)
    attempts = Attempts("sink", 10)
    for number in range(4):
        attempts.aborted(RUN, str(number), "its write is aborted")
    attempts.begin(attempt(1, "0"))
    for number in range(1, 4):
        with pytest.raises(Refused, match="comes too late: its write is aborted"):
            attempts.begin(attempt(1, str(number)))


def test_a_run_is_too_old_when_nothing_was_heard_of_it() -> None:
    attempts = Attempts("sink", 10)
    attempts.recall(PreparedAttempt(attempt(1)), 100)
    attempts.recall(PreparedAttempt(attempt(2, write_key=WriteKey("new"))), 0)
    assert attempts.expired(50) == [RUN]
    known = attempts.begin(attempt(3))
    assert attempts.expired(50) == []
    attempts.forget(known)
    assert attempts.expired(50) == []  # that was a sign of it
    attempts.recall(PreparedAttempt(attempt(4, write_key=WriteKey("old"))), 100)
    assert attempts.expired(50) == [WriteKey("old")]


def test_the_last_claims_of_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aqueduct.service.sink_attempts._CLAIMS_LIMIT", 2)
    attempts = Attempts("sink", 10)
    for key in "abca":
        attempts.claimed(numbered(key, 3), "e", "another has the key")
    for key, number in (("a", 3), ("a", 12), ("c", 3)):
        with pytest.raises(Refused, match="comes too late: another has the key"):
            attempts.begin(attempt(1, "former", numbered(key, number)))
        assert attempts.lost(numbered(key, number), "former")
        assert not attempts.lost(numbered(key, number), "e")
    for write_key in (numbered("a", 2), numbered("b", 3), WriteKey("a"), WriteKey("a/03")):
        attempts.begin(attempt(1, "former", write_key))


async def test_turns_are_taken_in_order() -> None:
    turns, order = KeyedLock(), []

    async def work(number: int, key: str) -> None:
        async with turns.turn(key):
            order.append(number)
            await asyncio.sleep(0)
            order.append(number)

    await asyncio.gather(*(work(number, "a") for number in range(4)), work(9, "b"))
    assert [number for number in order if number != 9] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert order.index(9) < 3
    assert turns._waiting == {}


async def test_a_cancelled_task_leaves_the_queue() -> None:
    turns = KeyedLock()
    begun = []

    async def work(number: int) -> None:
        async with turns.turn("a"):
            begun.append(number)
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(work(number)) for number in range(5)]
    await asyncio.sleep(0.01)
    for number in (0, 1, 3):
        tasks[number].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(each, asyncio.CancelledError) for each in found] == [1, 1, 0, 1, 0]
    assert begun == [0, 2, 4]
    assert turns._waiting == {}


async def test_work_that_raises_passes_its_turn_on() -> None:
    turns = KeyedLock()
    with pytest.raises(ValueError, match="no"):
        async with turns.turn("a"):
            raise ValueError("no")
    async with asyncio.timeout(5), turns.turn("a"):
        pass


def test_turns_are_taken_over_threads() -> None:
    turns = KeyedLock()
    inside: list[int] = []
    most: list[int] = []

    async def work() -> None:
        for _ in range(50):
            async with turns.turn("a"):
                inside.append(1)
                most.append(len(inside))
                await asyncio.sleep(0)
                inside.pop()

    threads = [threading.Thread(target=asyncio.run, args=(work(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 200 and set(most) == {1}
    assert turns._waiting == {}
