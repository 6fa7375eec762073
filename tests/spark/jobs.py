"""What the drivers of ``engines`` do: functions of a session and of plain values, by name."""

from __future__ import annotations

from typing import Any

from spark_udfs import exchange, register


def ready(spark: Any) -> str:
    """Says that there is a Spark."""
    return str(spark.version)


def through(
    spark: Any,
    *,
    address: str | list[str],
    handler: str = "echo",
    rows: int = 2000,
    partitions: int = 4,
    options: dict[str, Any] | None = None,
    settings: dict[str, str] | None = None,
) -> dict[str, Any]:
    """All rows through a handler; what tells whether each came back once, and what was counted."""
    for name, value in (settings or {}).items():
        spark.conf.set(name, value)
    score = exchange(address, handler, **(options or {}))
    frame = spark.range(0, rows, 1, numPartitions=partitions).mapInArrow(score, "id long")
    row = frame.selectExpr("count(id) rows", "sum(id) sum", "sum(id * id) squares").first()
    for name in settings or {}:
        spark.conf.unset(name)
    return {
        "rows": row.rows,
        "sum": row.sum,
        "squares": row.squares,
        "tasks": score.numbers.tasks,
        "retries": score.numbers.retries,
        "summary": score.summary(),
    }


def save(spark: Any, *, address: str, rows: int, partitions: int) -> None:
    """Ids written into the sink ``shelf``."""
    # Spark looks for data sources in the thread's active session, which this makes it.
    spark.createDataFrame([], "id long")
    register(spark)
    frame = spark.range(0, rows, 1, numPartitions=partitions)
    frame.write.format("aqueduct").options(address=address, handler="shelf").mode("append").save()


def joined(spark: Any, *, settings: dict[str, str], rows: int) -> dict[str, Any]:
    """Rows with answers joined to them; all that there is to say stands in settings."""
    for name, value in settings.items():
        spark.conf.set(name, value)
    score = exchange(handler="echo", columns=["id"], columns_mode="replace")
    frame = spark.range(0, rows, 1, numPartitions=2).selectExpr("id", "'x' as more")
    found = frame.transform(score.apply)
    result = {
        "columns": found.columns,
        "rows": found.where("more = 'x'").count(),
        "in_flight": score.calling.in_flight,
    }
    for name in settings:
        spark.conf.unset(name)
    return result


def limited(spark: Any, *, address: str, headers: dict[str, str], rows: int) -> list[int]:
    """The first rows of a handler's answers."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "20000")  # a worker gives its executor what fills its buffer
    score = exchange(address, "hold", headers=headers)
    frame = spark.range(0, 100_000, 1, numPartitions=1).mapInArrow(score, "id long")
    found = [row.id for row in frame.limit(rows).collect()]
    spark.conf.set(name, before)
    return found


def read_tables(spark: Any, *, address: str, checkpoint: str) -> dict[str, Any]:
    """The table ``log`` of ``tests.spark.tables``: all of it, some of it, and as a stream."""
    settings = {
        "spark.aqueduct.address": address,
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    for name, value in settings.items():
        spark.conf.set(name, value)
    register(spark)
    frame = spark.read.format("aqueduct").option("columns", "row").load("log")
    some = sorted(row.row for row in frame.where("row > 3 and row < 9").collect())
    stream = spark.readStream.format("aqueduct").option("max_rows", 4).load("log")
    writer = stream.writeStream.format("memory").queryName("read_tables")
    writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query = writer.start()
    if not query.awaitTermination(100):
        raise TimeoutError("the query did not end")
    rows = sorted(row.row for row in spark.table("read_tables").collect())
    for name in settings:
        spark.conf.unset(name)
    return {"count": frame.count(), "some": some, "rows": rows}


def read_numbers(spark: Any, *, address: str) -> dict[str, Any]:
    """The table ``numbers`` of a service; what tells whether each row came once."""
    register(spark)
    frame = spark.read.format("aqueduct").option("address", address).load("numbers")
    row = frame.selectExpr("count(id) rows", "sum(id) sum", "sum(id * id) squares").first()
    return {"rows": row.rows, "sum": row.sum, "squares": row.squares}


def interrupt(spark: Any) -> int:
    """Ends all jobs; how many there were."""
    if hasattr(spark, "sparkContext"):
        raise TypeError("for Spark Connect")
    return len(spark.interruptAll())
