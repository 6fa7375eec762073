"""A growing table of a service, read as a stream; the query stops and goes on where it was.

python examples/spark/streaming.py              starts the service too
python examples/spark/streaming.py serve        the service alone; prints its address
python examples/spark/streaming.py ADDRESS      the job alone
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import aqueduct
import spark_udfs
from aqueduct.service.tables import Limit
from program import run

EVENTS = pa.schema([("number", pa.int64()), ("kind", pa.string())])
SPLIT = 500

Offset = dict[str, int]


class Events:
    """Events in the order in which they came."""

    schema = EVENTS

    def __init__(self) -> None:
        self.newest = 1500

    def initial(self) -> Offset:
        """Where a new query begins."""
        return {"event": 0}

    def latest(self, start: Offset, limit: Limit) -> Offset:
        """How far a query may go now: to the newest event, or as far as it wishes."""
        end = self.newest
        if limit.rows is not None:
            end = min(end, start["event"] + limit.rows)
        if limit.until is not None:  # the query is to end there
            end = min(end, limit.until["event"])
        return {"event": max(start["event"], end)}

    def between(self, start: Offset, end: Offset) -> list[list[int]]:
        """The splits between two offsets: the same whenever they are asked for."""
        starts = range(start["event"], end["event"], SPLIT)
        return [[first, min(first + SPLIT, end["event"])] for first in starts]

    def read(self, split: list[int]) -> Iterator[pa.RecordBatch]:
        """The events of a split."""
        numbers = range(*split)
        kinds = ["even" if number % 2 == 0 else "odd" for number in numbers]
        yield pa.record_batch([pa.array(numbers, pa.int64()), pa.array(kinds)], schema=EVENTS)

    def commit(self, end: Offset) -> None:
        """Nothing before ``end`` is asked for again: here, new events come."""
        self.newest = max(self.newest, end["event"] + 1000)


service = aqueduct.Service("events", description="What happened.")
service.table("events", Events())


def until_now(spark: SparkSession, address: str, checkpoint: str) -> list[list[int]]:
    """Runs the query until it has all events of now; gives the numbers in each batch."""
    batches: list[list[int]] = []

    def write(frame: DataFrame, number: int) -> None:
        batches.append(sorted(row.number for row in frame.collect()))

    source = spark.readStream.format("aqueduct").option("address", address)
    frame = source.option("max_rows", 1000).load("events")
    writer = frame.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    return batches


def job(spark: SparkSession, address: str) -> None:
    """Two queries with one checkpoint: each event once, in batches of a thousand at most."""
    spark_udfs.register(spark)
    with tempfile.TemporaryDirectory() as checkpoint:
        first = until_now(spark, address, checkpoint)
        second = until_now(spark, address, checkpoint)
    assert first[0] == list(range(1000)), first
    assert second, "no event came between the two"
    batches = first + second
    assert max(map(len, batches)) <= 1000
    numbers = [number for batch in batches for number in batch]
    assert numbers == list(range(len(numbers))), numbers
    print(f"ok: {len(numbers):,} events in {len(batches)} batches, each once")


if __name__ == "__main__":
    run(__file__, service, job)
