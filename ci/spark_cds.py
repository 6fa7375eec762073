"""Archives the classes that Spark loads, so that a Java process maps them instead of jars.

    ci/env python ci/spark_cds.py .venv/spark.jsa

The tests start some dozens of Java processes that live for seconds, and half of what each of them
costs is to read, check and link the same classes. Java takes the archive for what it was made of:
another Java or other jars are as slow as before, and say nothing of it. Where Java makes no such
archive, the file is empty.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

ENDING = 120.0  # seconds; Java writes the archive as it ends


def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What comes."""
    yield from batches


def work(spark: SparkSession, folder: Path) -> None:
    """A little of what tests do."""
    frame = spark.range(0, 1000, 1, 2).withColumn("word", sql.col("id").cast("string"))
    frame.mapInArrow(same, "id long, word string").write.parquet(str(folder / "table"))
    read = spark.read.parquet(str(folder / "table")).filter("id > 10")
    small = spark.createDataFrame([(k, f"w{k}") for k in range(10)], "id long, name string")
    joined = read.join(sql.broadcast(small), "id", "left").groupBy("name").agg(sql.sum("id"))
    assert len(joined.orderBy("name").collect()) == 1
    grouped = read.groupBy(sql.col("id") % 2).applyInArrow(lambda table: table, read.schema)
    assert grouped.count() == 989
    stream = spark.readStream.schema(frame.schema).parquet(str(folder / "table"))
    query = stream.writeStream.format("memory").queryName("rows")
    query = query.option("checkpointLocation", str(folder / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination(60)
    assert spark.sql("select count(*) from rows").first() == (1000,)


def main(target: Path) -> None:
    """Works with Spark for some seconds, and leaves the archive of what it loaded."""
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / "archive"
        os.environ["SPARK_SUBMIT_OPTS"] = (
            f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable "
            f"-XX:ArchiveClassesAtExit={made}"
        )
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.sql.shuffle.partitions", "2")
        builder = builder.config("spark.sql.warehouse.dir", str(Path(name) / "warehouse"))
        for setting in ("spark.driver.bindAddress", "spark.driver.host"):
            builder = builder.config(setting, "127.0.0.1")
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        gateway: Any = spark.sparkContext._gateway
        work(spark, Path(name))
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(ENDING)
        found = made.read_bytes() if made.exists() else b""
    part = target.with_suffix(".part")  # half an archive must not be found
    part.write_bytes(found)
    part.replace(target)
    print(f"{target}: {len(found) >> 20} MiB of classes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
