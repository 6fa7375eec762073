"""Tasks name their executor to the services that they call."""

from __future__ import annotations

import os
import socket

import pytest

from aqueduct.config import Calls, Config
from aqueduct.rpc.executor_name import ExecutorName
from spark_udfs.worker.task import NOWHERE, TaskContext
from tests.spark.callees import Callee, answers, batch, calling

PLACE = TaskContext(partition=3, stage=1, attempt=0, task=7)
QUIET = Config(calls=Calls(spark_tasks=0))


@pytest.fixture
def named(running):
    """What a connection says of its executor, whose task this is."""

    def ask(place=PLACE, **more):
        callee = Callee()
        with running(callee.service) as address:
            list(answers(calling(address, **more), iter([batch(1)]), place=place))
            (call,) = callee.calls.values()
            return call.connection_headers.get("aqueduct-executor")

    return ask


def test_a_task_names_its_executor_and_application(named, monkeypatch):
    monkeypatch.delenv("SPARK_EXECUTOR_ID", raising=False)
    said = named(application=("app-1", "nightly"), connection_headers=(("team", "blue"),))
    host, parent = socket.gethostname(), f"process {os.getppid()}"
    assert ExecutorName.decode(said.encode()) == ExecutorName("app-1", "nightly", host, parent)
    monkeypatch.setenv("SPARK_EXECUTOR_ID", "12")
    assert ExecutorName.decode(named().encode()) == ExecutorName("", "", host, "12")


def test_a_setting_and_other_programs_do_not(named):
    assert named(config=QUIET) is None
    assert named(place=NOWHERE) is None
