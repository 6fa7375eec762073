"""Jobs on a cluster of Spark's whose parts are killed, with a service of their own.

Executors and Python workers are processes that end by SIGKILL in the middle of a task, and the
service is one, too. After each the job has ended, each row came back once, the service holds no
call, and no process is left.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time

import pyarrow as pa
import pytest

import aqueduct
from tests.spark.engines import started
from tests.spark.witness import Witness

pytestmark = pytest.mark.spark

ROWS = 2000
WHOLE = {
    "rows": ROWS,
    "sum": sum(range(ROWS)),
    "squares": sum(number * number for number in range(ROWS)),
}
PROMISE = 1.0
"""Seconds from the death of a process to the end of its calls; the kernel closes its sockets."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with started("cluster", tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture
def start(tmp_path):
    """Starts services at one address, one after the other; the last ends with the test."""
    path = tmp_path / "service"
    started = []

    def start(**options):
        path.unlink(missing_ok=True)  # of one that was killed
        started.append(Witness(f"aqueduct+unix://{path}", **options))
        return started[-1]

    yield start
    try:
        for witness in started:
            if witness.process.poll() is None:
                witness.settled()
    finally:
        for witness in started:
            witness.close()


def whole(result):
    return {name: result[name] for name in WHOLE}


def test_as_many_connections_as_workers(engine, start):
    # More may pass between two jobs on a busy machine than a service with little patience allows.
    witness = start(free=True, idle=60.0)
    address = witness.addresses[0]
    for _ in range(3):
        result = engine.run("through", address=address, handler="hold", partitions=12)
        assert whole(result) == WHOLE
        assert result["tasks"] == 12
    begun = witness.seen("begun")
    workers = {event["owner"] for event in begun}
    # By what is the same for all attempts: on a busy machine one may be made a second time, and
    # the worker of the one that is not wanted any more is killed.
    assert len({event["write_key"] for event in begun}) == 36
    again = len(begun) - 36
    assert 2 <= len(workers) <= 2 + again  # one for each executor, which has one core
    assert witness.counters()["connections"] == len(workers)
    kinds = engine.processes()
    assert sorted(kinds.values()).count("executor") == 2
    assert [kinds.get(worker) for worker in workers].count("worker") == 2


def test_a_second_attempt_overtakes_a_slow_one(engine, start):
    witness = start()
    job = engine.start(
        "through",
        address=witness.addresses[0],
        handler="hold",
        options={"headers": {"hold": "3", "answers": "1"}},
    )
    first, second = witness.wait("begun", count=2, partition=3)
    assert whole(job.result(120)) == WHOLE
    assert first["write_key"] == second["write_key"]
    assert first["attempt"] != second["attempt"]
    assert first["owner"] != second["owner"]
    (cancelled,) = witness.wait("cancelled", attempt=first["attempt"])
    assert second["at"] < cancelled["at"]  # both were at work
    witness.wait("ended", attempt=second["attempt"])
    assert witness.seen("ended", attempt=first["attempt"]) == []


def held(engine, witness):
    """A job whose first two tasks wait in the service, and the call of one of them."""
    job = engine.start(
        "through",
        address=witness.addresses[0],
        handler="hold",
        options={"headers": {"hold": "all", "answers": "2"}},
    )
    call, _ = witness.wait("holding", count=2)
    assert engine.processes()[call["owner"]] == "worker"
    return job, call


def again(witness, call):
    """What tells an attempt from the one that was killed."""
    first, second = witness.wait("begun", count=2, partition=call["partition"])
    assert first["attempt"] == call["attempt"] != second["attempt"]
    assert first["write_key"] == call["write_key"] == second["write_key"]


def test_a_worker_killed_in_the_middle(engine, start):
    witness = start()
    job, call = held(engine, witness)
    killed = time.monotonic()
    os.kill(call["owner"], signal.SIGKILL)
    (cancelled,) = witness.wait("cancelled", attempt=call["attempt"])
    assert cancelled["at"] - killed < PROMISE
    witness.release()
    result = job.result(120)
    assert whole(result) == WHOLE
    assert result["tasks"] == 4  # the attempt that was killed is not counted
    again(witness, call)


def test_an_executor_killed_in_the_middle(engine, start):
    witness = start()
    job, call = held(engine, witness)
    executor = engine.executor_of(call["owner"])
    assert engine.processes()[executor] == "executor"
    killed = time.monotonic()
    os.kill(executor, signal.SIGKILL)
    (cancelled,) = witness.wait("cancelled", attempt=call["attempt"])
    assert cancelled["at"] - killed < PROMISE  # its workers end with it
    witness.release()
    assert whole(job.result(120)) == WHOLE
    again(witness, call)


def test_an_executor_killed_while_it_reads_a_table(engine, running, tmp_path):
    schema = pa.schema([("id", pa.int64())])
    service = aqueduct.Service("numbers")
    held: queue.Queue[int] = queue.Queue()
    left = threading.Event()
    attempts = []

    @service.table("numbers", schema=schema, splits=[[n, n + 500] for n in range(0, ROWS, 500)])
    def numbers(split, request):
        first, end = split
        yield pa.record_batch([pa.array(range(first, first + 250), pa.int64())], schema=schema)
        if first == 500:
            attempts.append((request.call.write_key, request.call.attempt))
            if len(attempts) == 1:
                request.call.on_cancel(left.set)
                held.put(request.call.peer_credentials.pid)
                left.wait(100)
                request.call.check()
        yield pa.record_batch([pa.array(range(first + 250, end), pa.int64())], schema=schema)

    with running(service, f"aqueduct+unix://{tmp_path / 'tables'}") as address:
        job = engine.start("read_numbers", address=address)
        executor = engine.executor_of(held.get(timeout=100))
        assert engine.processes()[executor] == "executor"
        os.kill(executor, signal.SIGKILL)
        assert left.wait(30)
        assert job.result(120) == WHOLE
    # One piece of work, tried twice; on a busy machine Spark speculates, and there is one more.
    runs, tries = {write_key for write_key, _ in attempts}, {attempt for _, attempt in attempts}
    assert len(runs) == 1 and len(tries) == len(attempts) >= 2


def test_a_service_killed_and_restarted_in_the_middle(engine, start):
    witness = start()
    job = engine.start(
        "through",
        address=witness.addresses[0],
        handler="careful",
        options={"headers": {"at": "200"}, "retries": 100},
    )
    witness.wait("holding", count=2)
    witness.kill()
    start(free=True)
    result = job.result(120)
    assert whole(result) == WHOLE
    assert result["retries"] >= 2
    assert result["tasks"] == 4  # none had to be tried again by Spark


def test_a_service_killed_and_restarted_under_a_handler_that_cannot_go_on(engine, start):
    witness = start()
    job, call = held(engine, witness)
    witness.kill()
    after = start(free=True)
    assert whole(job.result(120)) == WHOLE  # by Spark, which tries the tasks again
    (second,) = after.wait("ended", partition=call["partition"])
    assert second["write_key"] == call["write_key"]
    assert second["attempt"] != call["attempt"]


def test_an_address_that_refuses_is_left_for_another(engine, start, tmp_path):
    witness = start(free=True)
    addresses = [f"aqueduct+unix://{tmp_path / 'nobody'}", witness.addresses[0]]
    result = engine.run(
        "through",
        address=addresses,
        handler="careful",
        options={"headers": {"at": "none"}, "retries": 100},
    )
    assert whole(result) == WHOLE
    assert result["tasks"] == 4
