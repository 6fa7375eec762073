"""A job and a stream write Parquet files through a service, each row exactly once.

python examples/spark/writing.py                 starts the service too, which dies in a commit
python examples/spark/writing.py serve FOLDER    the service alone, with a socket in the folder
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

sys.path.insert(0, str(Path(__file__).parents[2]))

import aqueduct
from aqueduct.service.sinks import PreparedAttempt, WriteKey
from examples.sinks.parquet import ParquetSink, read
from spark_udfs import register

TRIPS = pa.schema([("id", pa.int64()), ("distance", pa.float64())])


class MortalSink(ParquetSink):
    """Its service dies right after the first commit, before anybody hears that it is done."""

    def commit(
        self, write_key: WriteKey, prepared: Sequence[PreparedAttempt], note: object = None
    ) -> dict[str, object]:
        """Commits, and dies the first time."""
        result = super().commit(write_key, prepared, note)
        if not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os._exit(1)
        return result


def serve(folder: str) -> None:
    """The service, until it is told to end."""
    service = aqueduct.Service("stock", description="Keeps trips.")
    service.sink("trips", MortalSink(folder), schema=TRIPS)
    service.run(f"aqueduct+unix://{folder}/socket")


@contextmanager
def supervised(folder: str) -> Iterator[str]:
    """The service in a process of its own, started again when it dies; gives its address."""
    command = [sys.executable, "-u", __file__, "serve", folder]
    ready, ended = threading.Event(), threading.Event()
    running: list[subprocess.Popen[str]] = []

    def supervise() -> None:
        while not ended.is_set():
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                running[:] = [process]
                assert process.stdout is not None and process.stdout.readline()
                ready.set()

    thread = threading.Thread(target=supervise)
    thread.start()
    ready.wait(60)
    try:
        yield f"aqueduct+unix://{folder}/socket"
    finally:
        ended.set()
        running[0].terminate()
        thread.join()


def write(spark: SparkSession, address: str, folder: str) -> None:
    """A job, and a stream that is fed by files."""
    register(spark)
    trips = spark.range(0, 10_000, 1, 4).selectExpr("id", "id / 10D as distance")
    (
        trips.write.format("aqueduct")
        .options(address=address, handler="trips", write_key="2026-11-22")
        .option("retries", 20)  # a service that is being started again is waited for
        .mode("append")
        .save()
    )
    trips.selectExpr("id + 10000 as id", "distance").write.parquet(f"{folder}/more")
    query = (
        spark.readStream.schema(trips.schema)
        .option("maxFilesPerTrigger", 2)
        .parquet(f"{folder}/more")
        .writeStream.format("aqueduct")
        .options(address=address, handler="trips", checkpointLocation=f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main(arguments: list[str]) -> None:
    """See above."""
    if arguments[:1] == ["serve"]:
        serve(arguments[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        with supervised(folder) as address:
            with SparkSession.builder.master("local[2]").getOrCreate() as spark:
                write(spark, address, folder)
        assert (Path(folder) / "died").exists(), "the service did not die"
        rows = read(folder)
        assert rows is not None
        assert sorted(rows["id"].to_pylist()) == list(range(20_000))
    print("ok: 20000 rows are there once, and the service died in a commit")


if __name__ == "__main__":
    main(sys.argv[1:])
