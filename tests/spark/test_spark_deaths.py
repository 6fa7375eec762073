"""What a service hears of tasks that end before their time, from real workers of Spark's.

The service is a process of its own and notes when a call was cancelled, by the clock that all
processes of a machine share. The bound is the promise: 1 s after the end of a task, or of the
process that worked on it; a killed process is only silent over QUIC, until its idle timeout.
"""

from __future__ import annotations

import os
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from spark_udfs import exchange
from tests.spark.witness import IDLE, Witness
from tests.support.selection import mostly_long

pytestmark = pytest.mark.spark

PROMISE = 1.0
SCHEMES = ("tcp", "tls", "unix", "quic")
KERNEL = ("tcp", "tls", "unix")
ROWS = 100_000
LOST = (PySparkException, Py4JJavaError)
"""What the driver gets for a job that was ended."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    path = tmp_path_factory.mktemp("witness") / "socket"
    witness = Witness(
        "aqueduct+tcp://127.0.0.1:0",
        "aqueduct+tls://127.0.0.1:0",
        f"aqueduct+unix://{path}",
        "aqueduct://127.0.0.1:0",
    )
    yield witness
    witness.close()


@pytest.fixture
def witness(service, spark):
    # A worker gives its executor what it has when that fills its buffer of 64 KiB.
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "20000")
    service.forget()
    yield service
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    service.settled()


@pytest.fixture(params=mostly_long(SCHEMES, "tcp", "quic"))
def address(request, witness):
    return witness.addresses[SCHEMES.index(request.param)]


@pytest.fixture
def background():
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


def holding(spark, address, *, answers=1):
    """A frame whose only task gets some answers and then waits for one that does not come."""

    def call(batches):
        headers = {"hold": "all", "answers": str(answers), "pid": str(os.getpid())}
        yield from exchange(address, "hold", headers=headers)(batches)

    return spark.range(0, ROWS, 1, numPartitions=1).mapInArrow(call, "id long")


def test_limit_cancels(spark, address, witness):
    assert len(holding(spark, address).limit(3).collect()) == 3
    ended = time.monotonic()
    (cancelled,) = witness.wait("cancelled")
    assert cancelled["at"] - ended < PROMISE


def test_take_cancels(spark, address, witness):
    assert [row.id for row in holding(spark, address).take(5)] == [0, 1, 2, 3, 4]
    ended = time.monotonic()
    (cancelled,) = witness.wait("cancelled")
    assert cancelled["at"] - ended < PROMISE


def test_an_exception_behind_the_answers_cancels(spark, address, witness):
    def call(batches):
        score = exchange(address, "hold", headers={"hold": "all", "answers": "1"})
        for _ in score(batches):
            raise ValueError("not what I wanted")

    frame = spark.range(0, ROWS, 1, numPartitions=1).mapInArrow(call, "id long")
    with pytest.raises(PySparkException, match="not what I wanted"):
        frame.collect()
    ended = time.monotonic()
    (cancelled,) = witness.wait("cancelled")
    assert cancelled["at"] - ended < PROMISE


def test_an_exception_in_another_step_of_the_task_cancels(spark, address, witness):
    frame = holding(spark, address).selectExpr("if(id = 5, raise_error('not that one'), id) id")
    with pytest.raises(PySparkException, match="not that one"):
        frame.collect()
    ended = time.monotonic()
    (cancelled,) = witness.wait("cancelled")
    assert cancelled["at"] - ended < PROMISE


def test_a_cancelled_job_cancels(spark, address, witness, background):
    job = background(holding(spark, address).collect)
    (held,) = witness.wait("holding")
    with_end = Ending(int(held["pid"]))
    spark.sparkContext.cancelAllJobs()
    with pytest.raises(LOST):
        job.result(60)
    (cancelled,) = witness.wait("cancelled")
    assert cancelled["at"] - with_end.wait() < PROMISE


@pytest.mark.parametrize("scheme", mostly_long(SCHEMES, "tcp", "quic"))
def test_a_worker_killed_with_sigkill(spark, witness, background, scheme):
    job = background(holding(spark, witness.addresses[SCHEMES.index(scheme)]).collect)
    (held,) = witness.wait("holding")
    os.kill(int(held["pid"]), signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(LOST):
        job.result(60)
    (cancelled,) = witness.wait("cancelled")
    promised = PROMISE if scheme in KERNEL else IDLE + PROMISE
    assert cancelled["at"] - killed < promised


class Ending:
    """When a process that is not ours has ended."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def wait(self) -> float:
        """Seconds of the monotonic clock; not before the end, and hardly after it."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        assert poller.poll(60_000)
        os.close(self._descriptor)
        return time.monotonic()
