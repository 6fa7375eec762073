"""Real services and one real Spark for the tests of this folder."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import aqueduct
from aqueduct.service.server import RunningService
from spark_udfs.calls.pool import process_pool
from tests.spark.callees import Neighbour
from tests.spark.services import make

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def _running(
    service: aqueduct.Service,
    address: str = "aqueduct://127.0.0.1:0",
    *,
    lives: list[RunningService] | None = None,
    **options,
):
    """``service`` on an event loop in a thread of this process; gives its address.

    ``lives``: gets what listens.
    """
    started: list[str] = []
    ready, stop = threading.Event(), []
    errors: list[BaseException] = []

    async def serve() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        async with service.serving(address, **{"dev_certificate": True, **options}) as live:
            started.append(live.addresses[0])
            if lives is not None:
                lives.append(live)
            ready.set()
            await ended.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - reported in the test's thread
            errors.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="test-service")
    thread.start()
    assert ready.wait(20)
    try:
        if errors:
            raise errors[0]
        yield started[0]
    finally:
        if stop:
            stop[0]()
        thread.join(40)
        assert not thread.is_alive()
        if errors:
            raise errors[0]


@pytest.fixture
def running():
    """``with running(service) as address``: a service on an event loop of its own."""
    return _running


@pytest.fixture
def service() -> aqueduct.Service:
    """All handlers of ``tests.spark.services``; files that need others have their own."""
    return make()


@pytest.fixture
def address(service: aqueduct.Service) -> Iterator[str]:
    """Where ``service`` is."""
    with _running(service) as address:
        yield address


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    """No connection of this process outlives its test."""
    yield
    for thread in threading.enumerate():
        if thread.name == "aqueduct-connect":  # what it makes goes to the pool
            thread.join(20)
    process_pool().close()


class Child:
    """``tests.spark.services`` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.spark.services", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.address = self.line("aqueduct://").split()[-1]

    def line(self, start: str) -> str:
        """The next line of its output that has a word beginning with ``start``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:  # ends with the process; the test's timeout bounds it
            if any(word.startswith(start) for word in line.split()):
                return line
        raise AssertionError(f"no line with {start!r}; status {self.process.wait()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def child() -> Iterator[type[Child]]:
    """Starts services in processes of their own, which end with the test."""
    children = []

    class Started(Child):
        def __init__(self, *arguments: str) -> None:
            children.append(self)
            super().__init__(*arguments)

    yield Started
    for each in children:
        each.kill()
        if each.process.stdout is not None:
            each.process.stdout.close()


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    """A callee in a process of its own, to be started and killed by the test."""
    each = Neighbour()
    yield each
    each.kill()


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """One local[2] for all tests."""
    # Workers get the functions of these tests by name, as they get those of the library.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .appName("aqueduct tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "Europe/Zurich")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture
def small_batches(spark):
    """Spark cuts its rows into batches of 100."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(name, "100")
    yield
    spark.conf.unset(name)
