"""Whole Sparks in processes of their own, for tests that kill parts of them.

``python -m tests.spark.engines cluster`` is a driver with a standalone master and two workers on
hosts of their own (127.0.0.1 and 127.0.0.2, as a second attempt of a slow task never runs on the
host of the first), each with an executor process and its Python daemon. ``connect`` is a client of
a Spark Connect server that it starts. A driver reads requests, one JSON object a line: a function
of ``tests.spark.jobs`` and its arguments; it runs them side by side and writes what they return.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
HOSTS = ("127.0.0.1", "127.0.0.2")

SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
}
CLUSTER = {
    **SETTINGS,
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": os.environ.get("SPARK_SUBMIT_OPTS", ""),
    "spark.task.maxFailures": "50",  # how often is not what is tested
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "5s",  # what takes less is only a busy machine's
}


class Failed(Exception):
    """What a job raised in the driver, as text."""


class Engine:
    """A driver process, as tests see it."""

    def __init__(self, kind: str, log: Path) -> None:
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.spark.engines", kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": _python_path()},
                start_new_session=True,
            )
        self.log = log
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._reader.start()

    def start(self, job: str, **arguments: Any) -> Future[Any]:
        """Begins ``jobs.JOB(spark, **arguments)`` in the driver."""
        assert self.process.stdin is not None
        number = next(self._numbers)
        future: Future[Any] = Future()
        self._waiting[number] = future
        request = {"number": number, "job": job, "arguments": arguments}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return future

    def run(self, job: str, *, timeout: float = 120, **arguments: Any) -> Any:
        """The same, and waits for what it returns. Raises Failed."""
        return self.start(job, **arguments).result(timeout)

    def processes(self) -> dict[int, str]:
        """Those of this Spark: "driver", "executor", "daemon" and "worker" by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if _session(entry) == self.process.pid:
                        found[int(entry.name)] = _kind(entry)
        return found

    def executor_of(self, worker: int) -> int:
        """The executor of a Python worker."""
        return _parent(_parent(worker))

    def close(self) -> dict[int, str]:
        """Ends it, and returns what was left of it after a while, and had to be killed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(20)
        self._reader.join(20)
        self.process.stdout.close()
        return left

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # somebody else's line
                answer = json.loads(line)
                future = self._waiting.pop(answer["number"])
                if "error" in answer:
                    future.set_exception(Failed(answer["error"]))
                else:
                    future.set_result(answer["result"])
        for future in self._waiting.values():
            future.set_exception(Failed(f"the driver has ended:\n{self.log.read_text()[-8000:]}"))


@contextlib.contextmanager
def started(kind: str, folder: Path) -> Iterator[Engine]:
    """An engine that is ready; it is asserted that no process of it is left behind."""
    engine = Engine(kind, folder / "spark.log")
    try:
        engine.run("ready", timeout=200)
        yield engine
    finally:
        left = engine.close()
    assert left == {}


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _status(process: Path) -> list[str]:
    return process.joinpath("stat").read_text().rpartition(")")[2].split()


def _session(process: Path) -> int:
    state, _, _, session = _status(process)[:4]
    return 0 if state == "Z" else int(session)


def _parent(pid: int) -> int:
    return int(_status(Path(f"/proc/{pid}"))[1])


def _kind(process: Path) -> str:
    command = process.joinpath("cmdline").read_bytes().split(b"\0")
    if b"pyspark.daemon" in command:
        parent = Path(f"/proc/{_parent(int(process.name))}/cmdline").read_bytes()
        return "worker" if b"pyspark.daemon" in parent.split(b"\0") else "daemon"
    if b"org.apache.spark.executor.CoarseGrainedExecutorBackend" in command:
        return "executor"
    return "driver"


# The driver


def _cluster() -> tuple[Any, Any]:
    """A session on a master with two workers, which live in the driver's own Java process.

    That is what ``local-cluster`` does, but for the names of the hosts.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    conf = SparkConf().setAll(list(CLUSTER.items()))
    gateway = launch_gateway(conf)
    jvm: Any = gateway.jvm
    # The executors of workers find what a driver's launcher finds.
    java_conf = jvm.org.apache.spark.SparkConf(True)
    deploy = jvm.org.apache.spark.deploy
    master = deploy.master.Master.startRpcEnvAndEndpoint(HOSTS[0], 0, 0, java_conf)
    address = f"spark://{HOSTS[0]}:{master._1().address().port()}"
    urls = gateway.new_array(jvm.java.lang.String, 1)
    urls[0] = address
    nothing = jvm.scala.Option.empty()
    for number, host in enumerate(HOSTS):
        number_of = jvm.scala.Option.apply(number)
        deploy.worker.Worker.startRpcEnvAndEndpoint(
            host, 0, 0, 1, 1024, urls, None, number_of, java_conf, nothing
        )
    conf.setMaster(address).setAppName("aqueduct engines")
    context = SparkContext(conf=conf, gateway=gateway)
    return SparkSession(context), gateway


def _connect() -> tuple[Any, Any]:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote("local[2]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    return builder.getOrCreate(), None


def main(kind: str) -> None:
    # Whatever Spark prints belongs to the log: answers have the standard output to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spark, gateway = {"cluster": _cluster, "connect": _connect}[kind]()
    jobs = importlib.import_module("tests.spark.jobs")
    lock = threading.Lock()

    def run(number: int, job: str, arguments: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"number": number}
        try:
            answer["result"] = getattr(jobs, job)(spark, **arguments)
        except Exception:  # noqa: BLE001 - the test's to judge
            answer["error"] = traceback.format_exc()
        with lock:
            print(json.dumps(answer), file=answers, flush=True)

    pool = ThreadPoolExecutor(8)
    for line in sys.stdin:
        pool.submit(run, **json.loads(line))
    spark.stop()
    if gateway is not None:
        gateway.shutdown()
    os._exit(0)  # jobs of a test that failed may still run


if __name__ == "__main__":
    main(sys.argv[1])
