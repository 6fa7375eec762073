"""One job of each kind with the PySpark that is installed; what it lacks must be told by name.

``ci/pyspark_versions.sh`` runs it with each version: ``python ci/pyspark_jobs.py 4.1``, or with the
names of some jobs behind. A line says what became of each: ``ok``, or which version it needs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyspark
from pyspark.sql import SparkSession

import aqueduct
import spark_udfs
from examples.sinks.parquet import ParquetSink, read

ROOT: Final = Path(__file__).parents[1]
IDS: Final = pa.schema([("id", pa.int64())])
ROWS: Final = 1000


class Log:
    """A table that is also a stream, of as many rows as there are."""

    schema = IDS

    def initial(self) -> dict[str, int]:
        """Where a query begins."""
        return {"row": 0}

    def latest(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        """How far it may go."""
        return {"row": min(ROWS, start["row"] + (limit.rows or ROWS))}

    def between(self, start: dict[str, int], end: dict[str, int]) -> list[list[int]]:
        """One split."""
        return [[start["row"], end["row"]]]

    def read(self, split: list[int]) -> Any:
        """The rows of a split."""
        yield pa.record_batch([pa.array(range(*split), pa.int64())], schema=IDS)


def make(folder: str) -> aqueduct.Service:
    """A service for all jobs; its sink writes into ``folder``."""
    service = aqueduct.Service("versions")
    service.table("log", Log())
    service.sink("kept", ParquetSink(folder), schema=IDS)

    @service.table("ids", schema=IDS, filters="applied")
    def ids() -> Any:
        yield pa.record_batch([pa.array(range(ROWS), pa.int64())], schema=IDS)

    @service.handler("double", input=IDS, output=IDS, concurrency=4)
    def double(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch([pc.multiply(batch["id"], 2)], schema=IDS)

    return service


class Jobs:
    """The jobs, by their names and the PySpark that they need."""

    def __init__(self, spark: SparkSession, address: str, folder: str) -> None:
        self.spark, self.address, self.folder = spark, address, Path(folder)
        self.frame = spark.range(0, ROWS, 1, 2)
        spark_udfs.register(spark)
        self.source = {"address": address}

    def exchange(self) -> None:
        """Batches to a handler and back."""
        self._doubled(spark_udfs.exchange(self.address, "double").apply(self.frame))

    def exchange_pandas(self) -> None:
        """The same with data frames of pandas."""
        double = spark_udfs.exchange_pandas(self.address, "double", input_schema="id long")
        self._doubled(self.frame.mapInPandas(double, "id long"))

    def exchange_grouped(self) -> None:
        """The same by groups."""
        double = spark_udfs.exchange_grouped(self.address, "double")
        groups = self.frame.groupBy((self.frame.id % 3).alias("key"))
        self._doubled(groups.applyInArrow(double, "id long"))

    def exchange_by_key(self) -> None:
        """The same by keys."""
        keyed = self.frame.selectExpr("id % 100 as id")
        double = spark_udfs.exchange_by_key(self.address, "double", ["id"])
        assert double.apply(keyed).selectExpr("sum(id)").collect()[0][0] == 2 * 10 * 4950

    def exchange_files(self) -> None:
        """Files that executors read themselves."""
        pq.write_table(pa.table({"id": range(ROWS)}), self.folder / "ids.parquet")
        files = spark_udfs.list_files(self.spark, str(self.folder / "ids.parquet"))
        double = spark_udfs.exchange_files(self.address, "double")
        assert files.mapInArrow(double, double.schema).collect()[0]["rows_out"] == ROWS

    def read(self) -> None:
        """A table is read."""
        reader = self.spark.read.format("aqueduct").options(**self.source)
        assert reader.load("ids").where("id >= 10").count() == ROWS - 10

    def write(self) -> None:
        """Rows are written exactly once."""
        writer = self.frame.write.format("aqueduct").options(**self.source, handler="kept")
        writer.mode("append").save()
        kept = read(str(self.folder))
        assert kept is not None and sorted(kept["id"].to_pylist()) == list(range(ROWS))

    def exchange_column(self) -> None:
        """A column goes, a column comes, also in SQL."""
        double = spark_udfs.exchange_column(self.address, "double")
        self._doubled(self.frame.select(double("id").alias("id")))
        self.spark.udf.register("double_of", double)
        self._doubled(self.spark.sql(f"select double_of(id) id from range({ROWS})"))

    def exchange_table(self) -> None:
        """A table function of SQL."""
        self.spark.udtf.register("doubled", spark_udfs.exchange_table(self.address, "double"))
        self.frame.createOrReplaceTempView("ids")
        self._doubled(self.spark.sql("select * from doubled(table(ids))"))

    def pushed_filters(self) -> None:
        """A filter is given to the table."""
        self.spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        try:
            self.read()
        finally:
            self.spark.conf.unset("spark.sql.python.filterPushdown.enabled")

    def write_stream(self) -> None:
        """A stream is written exactly once."""
        (self.folder / "in").mkdir()
        pq.write_table(pa.table({"id": range(ROWS, 2 * ROWS)}), self.folder / "in" / "a.parquet")
        stream = self.spark.readStream.schema("id long").parquet(str(self.folder / "in"))
        writer = stream.writeStream.format("aqueduct").options(**self.source, handler="kept")
        writer = writer.option("checkpointLocation", str(self.folder / "checkpoint"))
        assert writer.trigger(availableNow=True).start().awaitTermination(200)
        kept = read(str(self.folder))
        assert kept is not None and set(range(ROWS, 2 * ROWS)) <= set(kept["id"].to_pylist())

    def read_stream(self) -> None:
        """A table is read as a stream, in limited batches."""
        found: list[int] = []

        def keep(frame: Any, number: int) -> None:
            found.extend(row.id for row in frame.collect())

        reader = self.spark.readStream.format("aqueduct").options(**self.source, max_rows="600")
        query = reader.load("log").writeStream.foreachBatch(keep).trigger(availableNow=True).start()
        assert query.awaitTermination(200)
        assert sorted(found) == list(range(ROWS))
        progress = query.lastProgress
        assert progress is not None and "1000" in str(progress["sources"][0]["latestOffset"])

    def pipeline(self) -> None:
        """A declarative pipeline writes into a sink."""
        command = [sys.executable, str(ROOT / "examples" / "pipelines" / "run.py")]
        subprocess.run(command, check=True, timeout=2000)

    def _doubled(self, frame: Any) -> None:
        assert frame.selectExpr("sum(id)", "count(*)").collect() == [(ROWS * (ROWS - 1), ROWS)]


NEEDS: Final = {
    "exchange": "4.0",
    "exchange_pandas": "4.0",
    "exchange_grouped": "4.0",
    "exchange_by_key": "4.0",
    "exchange_files": "4.0",
    "read": "4.0",
    "write": "4.0",
    "pushed_filters": "4.0",  # without them Spark filters by itself
    "exchange_column": "4.1",
    "exchange_table": "4.1",
    "write_stream": "4.1",
    "read_stream": "4.2",
}
PIPELINES: Final = "4.1"


def tried(job: Callable[[], None], name: str, since: str, version: str) -> str:
    """What became of a job; raises what it raised, where that is not what it should say."""
    older = tuple(map(int, version.split("."))) < tuple(map(int, since.split(".")))
    try:
        job()
    except Exception as error:
        if older and f"needs PySpark {since} or newer" in str(error):
            return f"needs {since}"
        raise
    if older:
        raise AssertionError(f"{name} is known to need {since}, and works with {version}")
    return "ok"


def main(version: str, wanted: list[str]) -> int:
    """The jobs named, or all; returns how many did not do what they should."""
    assert pyspark.__version__.startswith(version), pyspark.__version__
    failed = 0

    def do(job: Callable[[], None], name: str, since: str) -> None:
        nonlocal failed
        if wanted and name not in wanted:
            return
        try:
            became = tried(job, name, since, version)
        except Exception:  # noqa: BLE001 - it is counted, and the next job is tried
            traceback.print_exc()
            became, failed = "failed", failed + 1
        print(f"{pyspark.__version__} {name}: {became}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-u", __file__, "serve", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            try:
                builder = SparkSession.builder.master("local[2]").config(
                    "spark.ui.enabled", "false"
                )
                with builder.getOrCreate() as spark:
                    spark.sparkContext.setLogLevel("ERROR")
                    jobs = Jobs(spark, address, folder)
                    for name, since in NEEDS.items():
                        do(getattr(jobs, name), name, since)
                if version >= PIPELINES:
                    do(jobs.pipeline, "pipeline", PIPELINES)
            finally:
                process.terminate()
    return failed


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        make(sys.argv[2]).run("aqueduct+tcp://127.0.0.1:0")
    else:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
