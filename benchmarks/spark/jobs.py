"""Each case of the plan as jobs of Spark: one method for a kind, one call for a measurement."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import common
from benchmarks.processes import Failed
from benchmarks.runner import ROOT
from benchmarks.spark import functions
from benchmarks.spark.cases import Case, Contestant
from benchmarks.spark.services import Running
from spark_udfs import exchange, list_files

__all__ = ["Jobs"]

MiB: Final = 1 << 20
BATCH_ROWS: Final = 10_000
SLOW_ROWS: Final = 1_000
TASK_ROWS: Final = 10
FILE_BYTES: Final = 256 * MiB
GROUP_ROWS: Final = 1 << 20
GENERATED_BYTES: Final = 4 * MiB
SAMPLE: Final = 0.1
"""Seconds between two looks at a service's memory."""
SETTLED: Final = 1 << 30
"""Bytes after which a service's memory is to stay as it is."""
TIMED: Final = "rows long, total long, worker long, seconds double"


class Jobs:
    """One Spark, and the services, for all measurements of a run."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._services: dict[str, Running] = {}
        self._frames: dict[Any, Any] = {}
        self._parquet: dict[int, tuple[list[str], int, int]] = {}
        self._warm: set[Any] = set()
        self._kind = ("", "")
        self.spark: Any = None

    def close(self) -> None:
        for service in self._services.values():
            service.close()
        if self.spark is not None:
            self.spark.stop()
        self._folder.cleanup()

    def measure(self, case: Case, contestant: Contestant, size: int) -> dict[str, Any]:
        """One measurement. Raises Failed, and what Spark raises."""
        self._start(case)
        row: dict[str, Any] = getattr(self, f"_{case.kind}")(contestant, size)
        return row

    def service(self, contestant: Contestant) -> Running:
        """The contestant's service, started on first use; one for all cases."""
        listen = contestant.listen.replace("FOLDER", self._folder.name)
        if listen not in self._services:
            self._services[listen] = Running(contestant.peer, listen)
        return self._services[listen]

    # Within

    def _start(self, case: Case) -> None:
        if self._kind == (case.master, case.sockets):
            return
        if self.spark is not None:
            self.spark.stop()
        from pyspark.sql import SparkSession

        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        self.spark = (
            SparkSession.builder.master(case.master)
            .appName("aqueduct benchmark")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.memory", "4g")
            .config("spark.python.unix.domain.socket.enabled", case.sockets == "unix")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.execution.arrow.maxRecordsPerBatch", BATCH_ROWS)
            .getOrCreate()
        )
        self.spark.sparkContext.setLogLevel("ERROR")
        self._kind = case.master, case.sockets
        self._frames.clear()
        self._warm.clear()

    def _first(self, contestant: Contestant, kind: str) -> bool:
        """Whether this Spark has not had the contestant yet: workers are to start and import."""
        key = contestant, kind
        if key in self._warm:
            return False
        self._warm.add(key)
        return True

    def _function(self, contestant: Contestant, handler: str) -> Any:
        """What the contestant does with the batches of a task."""
        address = self.service(contestant).address if contestant.listen else ""
        if contestant.peer == "aqueduct":
            in_flight = 1 if contestant.variant == "in-flight-1" else 8
            return exchange(address, handler, in_flight=in_flight)
        if contestant.variant == "identity":
            return functions.identity
        flight: dict[str, Callable[[str, str], Any]] = {
            "waiting": functions.flight_waiting,
            "client-per-task": functions.flight_waiting,
            "pipelined": functions.flight_pipelined,
        }
        return flight[contestant.variant](address, handler)

    # Plain exchange

    def _table(self, rows: int) -> Any:
        """Rows of 60 bytes, in Spark's memory: four partitions."""
        if ("table", rows) not in self._frames:
            from pyspark.sql import functions as sql

            number = sql.col("id")
            text = sql.substring(
                sql.concat(sql.lit("0000000000000000"), number.cast("string")), -16, 16
            )
            doubles = [(number * (k + 1.5)).alias(name) for k, name in enumerate("abcd")]
            frame = self.spark.range(0, rows, 1, 4).select("id", *doubles, text.alias("s")).cache()
            if frame.count() != rows:
                raise Failed("Spark lost rows")
            self._frames["table", rows] = frame
        return self._frames["table", rows]

    def _plain(self, contestant: Contestant, rows: int) -> dict[str, Any]:
        frame = self._table(rows)
        if contestant.variant != "no-udf":
            answered = frame.mapInArrow(self._function(contestant, "echo"), frame.schema)
        else:
            answered = frame
        # The job that warms up is the one whose answers are compared.
        if self._first(contestant, "plain") and _sums(answered) != _sums(frame):
            raise Failed("the answers are not what was sent")
        began = time.perf_counter()
        answered.write.format("noop").mode("overwrite").save()
        return {"job_s": time.perf_counter() - began}

    # A slow service

    def _slow(self, contestant: Contestant, batches: int) -> dict[str, Any]:
        if self._first(contestant, "slow"):
            self._slow(contestant, 8)
        rows = batches * SLOW_ROWS
        self.spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", SLOW_ROWS)
        try:
            frame = self.spark.range(0, rows, 1, 1)
            answered = frame.mapInArrow(self._function(contestant, "slow"), frame.schema)
            began = time.perf_counter()
            total = answered.groupBy().sum("id").collect()[0][0]
            seconds = time.perf_counter() - began
        finally:
            self.spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", BATCH_ROWS)
        _require_sum(total, rows)
        return {"job_s": seconds}

    # Many small tasks

    def _tasks(self, contestant: Contestant, tasks: int) -> dict[str, Any]:
        self._timed(contestant, max(1, tasks // 10))  # workers start, connect and import
        seconds, rows = self._timed(contestant, tasks)
        firsts = sorted(row.seconds * 1e6 for row in rows)
        return {
            "job_s": seconds,
            "p50_us": firsts[len(firsts) // 2],
            "p99_us": firsts[len(firsts) * 99 // 100],
        }

    def _workers(self, contestant: Contestant, tasks: int) -> dict[str, Any]:
        service = self.service(contestant)
        before = service.counters()["connections"]
        seconds, rows = self._timed(contestant, tasks, "new workers")
        workers = len({row.worker for row in rows})
        made = service.counters()["connections"] - before
        return {"job_s": seconds, "workers": workers, "handshakes_worker": made / workers}

    def _timed(
        self, contestant: Contestant, tasks: int, workers: str = ""
    ) -> tuple[float, list[Any]]:
        """Tasks of one small batch, in workers that only this contestant has.

        Spark has a pool of workers for each environment, so no worker holds what others import.
        """
        function = functions.Timed(self._function(contestant, "score"))
        environment = self.spark.sparkContext.environment
        environment["AQUEDUCT_CONTESTANT"] = workers or contestant.name
        try:
            frame = self.spark.range(0, tasks * TASK_ROWS, 1, tasks).mapInArrow(function, TIMED)
            began = time.perf_counter()
            rows = frame.collect()
            seconds = time.perf_counter() - began
        finally:
            del environment["AQUEDUCT_CONTESTANT"]
        if len(rows) != tasks:
            raise Failed(f"{len(rows)} tasks answered of {tasks}")
        _require_sum(sum(row.total for row in rows), tasks * TASK_ROWS)
        return seconds, rows

    # Files

    def _files(self, contestant: Contestant, nbytes: int) -> dict[str, Any]:
        if self._first(contestant, "files"):
            self._files(contestant, FILE_BYTES)
        paths, rows, total = self._written(nbytes)
        peer = contestant.peer if contestant.listen else ""
        address = self.service(contestant).address if contestant.listen else ""
        function = functions.FilesSent(peer, address)
        frame = list_files(self.spark, paths, split=1 << 40, tasks=len(paths))  # a file to a task
        job = frame.mapInArrow(function, "rows long, total long").groupBy().sum("rows", "total")
        began = time.perf_counter()
        found = tuple(job.collect()[0])
        seconds = time.perf_counter() - began
        if found != (rows, total):
            raise Failed(f"rows and sum of the answers are {found}, not {(rows, total)}")
        decoded = rows * common.ROW_BYTES
        return {"job_s": seconds, "bytes": decoded, "mib_s": decoded / MiB / seconds}

    def _written(self, nbytes: int) -> tuple[list[str], int, int]:
        """Snappy Parquet of so many bytes when decoded, in the page cache: paths, rows, sum."""
        if nbytes not in self._parquet:
            import pyarrow as pa
            import pyarrow.parquet as pq

            made = common.make_batches(FILE_BYTES)
            paths, rows, total = [], 0, 0
            for number in range(max(1, nbytes // FILE_BYTES)):
                batch = made[number % len(made)]
                path = Path(self._folder.name) / f"{nbytes}-{number}.parquet"
                table = pa.Table.from_batches([batch])
                pq.write_table(table, path, compression="snappy", row_group_size=GROUP_ROWS)
                path.read_bytes()
                paths.append(str(path))
                rows += batch.num_rows
                total += int(batch.column(0).to_numpy().sum())
            self._parquet[nbytes] = paths, rows, total
        return self._parquet[nbytes]

    # Memory

    def _memory(self, contestant: Contestant, nbytes: int) -> dict[str, Any]:
        service = self.service(contestant)
        count = 64  # batches for each row, rows for each of eight tasks
        tasks = 8
        each = max(1, nbytes // (tasks * count * GENERATED_BYTES))
        function = functions.Generated(service.address, "swallow", GENERATED_BYTES, count)
        frame = self.spark.range(0, tasks * each, 1, tasks).mapInArrow(
            function, "rows long, total long"
        )
        before, samples = service.resident(), []
        bytes_before = service.counters()["bytes_in"]
        over = threading.Event()

        def sample() -> None:
            while not over.wait(SAMPLE):
                samples.append((service.counters()["bytes_in"] - bytes_before, service.resident()))

        sampler = threading.Thread(target=sample)
        sampler.start()
        began = time.perf_counter()
        try:
            rows, total = frame.groupBy().sum("rows", "total").collect()[0]
        finally:
            over.set()
            sampler.join()
        seconds = time.perf_counter() - began
        batches = tasks * each * count
        made = common.make_batches(GENERATED_BYTES)
        if rows != batches * made[0].num_rows:
            raise Failed(f"the service counted {rows} rows")
        moved = service.counters()["bytes_in"] - bytes_before
        # Each task sends its batches from the first on, and their number divides by DISTINCT.
        sums = [int(batch.column(0).to_numpy().sum()) for batch in made]
        if total != sum(sums) * batches // common.DISTINCT:
            raise Failed(f"the service's sum is {total}")
        settled = [resident for sent, resident in samples if sent >= min(SETTLED, moved // 2)]
        return {
            "job_s": seconds,
            "bytes": moved,
            "mib_s": moved / MiB / seconds,
            "samples": len(settled),
            "server_growth_mib": (max(resident for _, resident in samples) - before) / MiB,
            "settled_mib": (max(settled) - min(settled)) / MiB,
        }


def _sums(frame: Any) -> tuple[Any, ...]:
    """Rows and sums of a frame, enough to tell another apart."""
    from pyspark.sql import functions as sql

    columns = [sql.sum(name) for name in frame.columns if name != "s"]
    text = sql.sum(sql.crc32(sql.col("s")))
    found = frame.select(sql.count("*"), *columns, text).collect()[0]
    return tuple(round(value, 3) if isinstance(value, float) else value for value in found)


def _require_sum(total: int, rows: int) -> None:
    if total != rows * (rows - 1) // 2:
        raise Failed(f"the sum of the answers is {total}, not that of {rows} rows")
