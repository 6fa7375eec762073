"""What a service knows of the Spark tasks that call it."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.admin.spark_merging import merged
from aqueduct.client.client import Client
from aqueduct.config import Calls, Config
from aqueduct.errors import HandlerFailed, Refused
from aqueduct.rpc.executor_name import EXECUTOR_HEADER, ExecutorName
from aqueduct.rpc.request import Partition
from aqueduct.rpc.sink_commit import ATTEMPT_HEADER, Attempt, WriteKey
from tests.support.calls import until

NUMBERS = pa.schema([("id", pa.int64())])
BATCH = pa.record_batch({"id": [1, 2, 3]}, schema=NUMBERS)


@pytest.fixture
def gate():
    return asyncio.Event()


def make(gate: asyncio.Event, kept: int = 1000) -> aqueduct.Service:
    service = aqueduct.Service("book", config=Config(calls=Calls(spark_tasks=kept)))

    @service.handler("same", input=NUMBERS, output=NUMBERS)
    def same(batch):
        return batch

    @service.handler("held", input=NUMBERS, output=NUMBERS)
    async def held(batch):
        await gate.wait()
        return batch

    @service.handler("broken", input=NUMBERS, output=NUMBERS)
    def broken(batch):
        raise ValueError("no")

    return service


def report(running):
    return running.tasks.report(tuple(running.calls), 200)


def client(address: str, host: str = "node7", name: str = "nightly") -> Client:
    said = ExecutorName("app-1", name, host, "3").encode()
    return Client(address, headers=[(EXECUTOR_HEADER, said)])


def of_task(task: int, partition: int = 4, stage: int = 2, again: str = "") -> dict[str, Any]:
    return {
        "write_key": f"a/key/{stage}/{partition}",
        "attempt": f"{task}{again}",
        "partition": Partition(partition),
    }


@pytest.mark.requirement("AC-104")
async def test_calls_are_added_up_by_task_and_by_executor(gate):
    gate.set()
    async with make(gate).serving("memory://book") as running:
        async with client("memory://book") as first, client("memory://book", "node8") as second:
            await first.call("held", BATCH, **of_task(17))
            await first.call("same", BATCH, **of_task(17, again=".1"))
            with pytest.raises(HandlerFailed):
                await first.call("broken", BATCH, **of_task(18, partition=5))
            await second.call("same", BATCH, **of_task(19, partition=6))
            await until(lambda: not running.counters()["open_calls"])
            found = report(running)
        assert found["task_count"] == 3 and found["executor_count"] == 2
        tasks = {row["task"]: row for row in found["tasks"]}
        one = tasks[17]
        assert one["idle"] >= 0
        assert {
            name: one[name] for name in one if name not in ("idle", "bytes_in", "bytes_out")
        } == {
            "application": "app-1",
            "name": "nightly",
            "host": "node7",
            "executor": "3",
            "handler": "same",
            "stage": 2,
            "partition": 4,
            "task": 17,
            "calls": 2,
            "open_calls": 0,
            "waiting_turn": 0,
            "waiting_client": 0,
            "failed": 0,
            "batches_in": 2,
            "rows_in": 6,
            "batches_out": 2,
            "rows_out": 6,
        }
        assert one["bytes_in"] == one["bytes_out"] > 0
        assert (tasks[18]["failed"], tasks[18]["rows_in"], tasks[18]["rows_out"]) == (1, 3, 0)
        hosts = {
            row["host"]: (row["calls"], row["failed"], row["rows_in"]) for row in found["executors"]
        }
        assert hosts == {"node7": (3, 1, 9), "node8": (1, 0, 3)}


async def test_a_call_that_is_open_stands_first_and_counts(gate):
    async with make(gate).serving("memory://book") as running:
        async with client("memory://book") as one:
            await one.call("same", BATCH, **of_task(1))
            await one.call("same", BATCH, **of_task(2))
            held = asyncio.ensure_future(one.call("held", BATCH, **of_task(2)))
            await until(lambda: running.counters()["rows_in"] == 9)
            found = report(running)
            assert [row["handler"] for row in found["tasks"]] == ["held", "same"]
            assert [(row["task"], row["open_calls"], row["calls"]) for row in found["tasks"]] == [
                (2, 1, 2),
                (1, 0, 1),
            ]
            assert [(row["open_calls"], row["calls"]) for row in found["executors"]] == [(1, 3)]
            gate.set()
            await held


async def test_only_the_latest_tasks_and_executors_are_kept(gate):
    async with make(gate, kept=2).serving("memory://book") as running:
        for task in range(5):
            async with client("memory://book", f"node{task}") as one:
                await one.call("same", BATCH, **of_task(task))
        await until(lambda: not running.counters()["open_calls"])
        found = report(running)
        assert {row["task"] for row in found["tasks"]} == {3, 4}
        assert {row["host"] for row in found["executors"]} == {"node3", "node4"}
        assert found["forgotten"] == 3


async def test_a_call_that_is_refused_is_of_no_task(gate):
    service = make(gate)
    service.authorize = lambda call: call.token == "known"
    async with service.serving("memory://book") as running, client("memory://book") as one:
        with pytest.raises(Refused):
            await one.call("same", BATCH, **of_task(1))
        await one.call("same", BATCH, **of_task(2), token="known")
        await until(lambda: report(running)["tasks"])
        assert [each["task"] for each in report(running)["tasks"]] == [2]


async def test_nothing_is_kept_with_a_limit_of_0(gate):
    async with make(gate, kept=0).serving("memory://book") as running:
        async with client("memory://book") as one:
            await one.call("same", BATCH, **of_task(1))
            held = asyncio.ensure_future(one.call("held", BATCH, **of_task(2)))
            await until(lambda: running.counters()["open_calls"] == 1)
            assert report(running)["tasks"] == report(running)["executors"] == []
            gate.set()
            await held


@pytest.mark.requirement("AC-104")
async def test_others_and_what_cannot_be_read_have_no_task(gate):
    async with make(gate).serving("memory://book") as running:
        async with Client("memory://book") as plain:
            await plain.call("same", BATCH, **of_task(1))
        async with Client("memory://book", headers=[(EXECUTOR_HEADER, b"{")]) as odd:
            await odd.call("same", BATCH, **of_task(1))
            held = asyncio.ensure_future(odd.call("held", BATCH, **of_task(1)))
            await until(lambda: running.counters()["rows_in"] == 9)
            assert report(running)["task_count"] == report(running)["executor_count"] == 0
            gate.set()
            await held
        async with client("memory://book") as one:
            await one.call("same", BATCH)
        await until(lambda: not running.counters()["open_calls"])
        assert report(running)["task_count"] == 0
        assert report(running)["executors"][0]["calls"] == 1
        assert running.tasks.report((), 0)["executors"] == []


@pytest.mark.parametrize(
    ("said", "stage", "task"),
    [
        ({"write_key": "x/2/4", "attempt": "9" * 16}, 2, "9" * 16),
        ({"write_key": "x/2/5", "attempt": "7"}, None, 7),
        ({"write_key": "", "attempt": "\x1b[1m" + "x" * 99}, None, "\\x1b[1m" + "x" * 36),
        ({"attempt": "id", "headers": {ATTEMPT_HEADER: "[" * 4000}}, None, "id"),
        ({"attempt": "id", "headers": {ATTEMPT_HEADER: '{"stage": true, "task": 1}'}}, None, "id"),
        (
            {
                "attempt": "id",
                "headers": {ATTEMPT_HEADER: Attempt(WriteKey("k"), "e", 3, 4, 8).to_json()},
            },
            3,
            8,
        ),
    ],
)
async def test_a_task_is_known_by_what_its_calls_say_anyway(gate, said, stage, task):
    async with make(gate).serving("memory://book") as running:
        async with client("memory://book", name="<b>\u202e") as one:
            await one.call("same", BATCH, partition=Partition(4), **said)
        await until(lambda: not running.counters()["open_calls"])
        (row,) = report(running)["tasks"]
        assert (row["stage"], row["partition"], row["task"]) == (stage, 4, task)
        assert row["name"] == "<b>\\u202e"


async def test_what_workers_know_is_added_up(gate):
    states = []
    for task in (1, 2):
        async with make(gate).serving("memory://book") as running:
            async with client("memory://book") as one:
                await one.call("same", BATCH, **of_task(1))
                await one.call("same", BATCH, **of_task(task))
            await until(lambda: not running.counters()["open_calls"])
            states.append(report(running))
    states[1]["task_count"] += 7  # as if more had been left off
    found = merged(states, 200)
    assert {row["task"]: row["calls"] for row in found["tasks"]} == {1: 3, 2: 1}
    assert [row["rows_in"] for row in found["executors"]] == [12]
    assert (found["task_count"], found["executor_count"], found["forgotten"]) == (9, 1, 0)
