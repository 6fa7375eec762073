"""The processes around the demo: its service, and the session of Spark."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

__all__ = ["DemoError", "ServiceProcess", "check_java", "spark_session"]

START_DEADLINE: Final = 60.0
STOP_DEADLINE: Final = 10.0
_JAVA: Final = "-XX:TieredStopAtLevel=1"
"""For a Java process of half a minute: its better compiler would cost more than it gains.

Nothing that what the user says of Java elsewhere could contradict: it would not start.
"""


class DemoError(Exception):
    """Something the demo needs is not there; the text says what to do."""


class ServiceProcess:
    """``python -m spark_udfs.demo.service`` in a process of its own, at ``address``."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "spark_udfs.demo.service", address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last: deque[str] = deque(maxlen=20)
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        try:
            self.address = self._wait_for_address()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ended(self) -> str | None:
        """How the process ended, or None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"the service (process {self.pid}) was killed by {signal.Signals(-code).name}"
        said = "".join(f"\n  {line}" for line in self._last)
        return f"the service (process {self.pid}) ended with status {code}{said}"

    def kill(self) -> None:
        """SIGKILL: it has no time to say good-bye."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM: it finishes its calls and leaves."""
        self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            self.kill()

    def _wait_for_address(self) -> str:
        deadline = time.monotonic() + START_DEADLINE
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise DemoError(f"the service gave no address in {START_DEADLINE:.0f} s") from None
            if line is None:
                self._process.wait()
                raise DemoError(self.ended())
            found = [word for word in line.split() if word.startswith("aqueduct") and "://" in word]
            if found:
                return found[0]

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._last.append(line.rstrip())
                self._lines.put(line)
        self._lines.put(None)


def check_java() -> None:
    """Raises DemoError if Spark would find no Java."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    if shutil.which(java) is None:
        raise DemoError(
            f"Spark needs Java 17 or 21, and there is no {java}: install one "
            "(on Debian: apt install openjdk-17-jre-headless), or set JAVA_HOME"
        )


@contextlib.contextmanager
def spark_session(directory: Path, *, threads: int, batch_rows: int) -> Iterator[SparkSession]:
    """A local Spark with its Python workers; what it has to say goes to ``directory/spark.log``."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.master(f"local[{threads}]")
        .appName("aqueduct demo")
        .config("spark.driver.defaultJavaOptions", _JAVA)
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", str(threads))
        # Several partitions for each worker, so that tasks follow one another on a connection.
        .config("spark.sql.files.minPartitionNum", str(4 * threads))
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", str(batch_rows))
    )
    with _stderr_to(directory / "spark.log"):  # the Java process inherits it
        session = builder.getOrCreate()
    try:
        # The Python workers start now, once, instead of within the job whose time is measured.
        session.range(0, threads, 1, threads).mapInArrow(_as_they_are, "id long").count()
        yield session
    finally:
        session.stop()


def _as_they_are(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
