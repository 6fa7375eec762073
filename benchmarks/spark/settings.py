"""What settings of Spark 4.2 and 4.3 gain between the JVM and a Python worker.

    python -m benchmarks.spark.settings [--rows N] [--repeat N] [--json FILE]

Each cache has a Spark of its own, as it is fixed at its start. A row of the table is a job over the
same rows of 60 bytes, which are in Spark's memory. ``CPU`` is the processor time of the JVM and its
Python workers; it tells more than seconds on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from benchmarks.runner import ROOT
from benchmarks.spark.functions import identity
from benchmarks.spark.services import Running
from spark_udfs import exchange, exchange_column

ARROW_CACHE: Final = "org.apache.spark.sql.execution.columnar.ArrowCachedBatchSerializer"
COLUMNAR: Final = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"
PIPELINED: Final = "spark.python.udf.pipelined.enabled"
CACHES: Final = {
    "Spark's": {},
    "Arrow": {"spark.sql.cache.serializer": ARROW_CACHE},
}
TICK: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """What the processes below this one have used, those that have ended and were waited for too.

    So the service must not be one of them: it is started elsewhere.
    """
    parents: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            parents[int(entry.name)] = int(text[1]), sum(map(int, text[11:15]))
    own, total = {os.getpid()}, 0
    found = True
    while found:
        fresh = {pid for pid, (parent, _) in parents.items() if parent in own and pid not in own}
        total += sum(parents[pid][1] for pid in fresh)
        own |= fresh
        found = bool(fresh)
    return total / TICK


def jobs(spark: Any, address: str, rows: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The jobs of one Spark, by name."""
    from pyspark.sql import functions as sql

    number = sql.col("id")
    text = sql.substring(sql.concat(sql.lit("0" * 16), number.cast("string")), -16, 16)
    doubles = [(number * (k + 1.5)).alias(name) for k, name in enumerate("abcd")]
    frame = spark.range(0, rows, 1, 4).select("id", *doubles, text.alias("s")).cache()
    assert frame.count() == rows
    column = exchange_column(address, "echo", "double", columns=["a"])

    def same(arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
        yield from arrays

    same_column: Any = getattr(sql, "arrow_udf")(same, "double")  # noqa: B009 - of PySpark 4.1

    def written(made: Any, columnar: bool = False, pipelined: bool = False) -> Callable[[], Any]:
        def job() -> None:
            spark.conf.set(COLUMNAR, str(columnar).lower())
            # A setting of the start; where the executor is in this process, it has the same object.
            spark._jsparkSession.sparkContext().conf().set(PIPELINED, str(pipelined).lower())
            made.write.format("noop").mode("overwrite").save()

        return job

    echoed = exchange(address, "echo").apply(frame)
    with_same, with_column = frame.select("*", same_column("a")), frame.select("*", column("a"))
    yield "no function", written(frame)
    yield "mapInArrow, identity", written(frame.mapInArrow(identity, frame.schema))
    yield "mapInArrow, exchange", written(echoed)
    yield "mapInArrow, exchange, pipelined", written(echoed, pipelined=True)
    yield "column, identity", written(with_same)
    yield "column, exchange", written(with_column)
    yield "column, exchange, pipelined", written(with_column, pipelined=True)
    yield "column, identity, columnarInput", written(with_same, columnar=True)
    yield "column, exchange, columnarInput", written(with_column, columnar=True)


def measured(name: str, address: str, rows: int, repeat: int) -> None:
    """Prints the measurements of one Spark: each job warmed up once, then all in turn."""
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master("local[1]")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "4g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
    )
    for key, value in CACHES[name].items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        made = list(jobs(spark, address, rows))
        for turn in range(repeat + 1):
            for job, work in made:
                began, used = time.perf_counter(), cpu_seconds()
                row: dict[str, Any] = {"cache": name, "job": job}
                try:
                    work()
                except Exception as error:  # noqa: BLE001 - Spark fails here with some settings
                    row["error"] = str(error).partition("\n")[0]
                row["job_s"] = time.perf_counter() - began
                row["cpu_s"] = cpu_seconds() - used
                if turn:  # the first time workers start, and the JVM compiles
                    print(json.dumps(row), flush=True)
    finally:
        spark.stop()


def table(rows: list[dict[str, Any]]) -> str:
    """Medians, one line for each job."""
    lines = ["| job | cache | seconds | CPU |", "|---|---|---|---|"]
    for job in dict.fromkeys(row["job"] for row in rows):
        for name in CACHES:
            own = [row for row in rows if (row["job"], row["cache"]) == (job, name)]
            if any("error" in row for row in own):
                lines.append(f"| {job} | {name} | failed | |")
            elif own:
                seconds, cpu = (
                    statistics.median(row[key] for row in own) for key in ("job_s", "cpu_s")
                )
                lines.append(f"| {job} | {name} | {seconds:.2f} | {cpu:.2f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cache", choices=CACHES, help="one Spark alone; with --address")
    parser.add_argument("--address")
    given = parser.parse_args(arguments)
    if given.cache:
        measured(given.cache, given.address, given.rows, given.repeat)
        return 0
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        service = Running("aqueduct", f"aqueduct+unix://{folder}/service")
        stack.callback(service.close)
        for name in CACHES:
            # Each in a process of its own, whose children are its JVM and the workers alone.
            command = [sys.executable, "-m", "benchmarks.spark.settings", "--cache", name]
            command += ["--address", service.address, "--rows", str(given.rows)]
            command += ["--repeat", str(given.repeat)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("{"):
                        rows.append(json.loads(line))
                        print(line, end="", file=sys.stderr, flush=True)
            if process.returncode:
                return process.returncode
    print(table(rows))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
