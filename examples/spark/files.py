"""Parquet files scored by a service: executors read and send them, and Spark sees receipts alone.

python examples/spark/files.py              starts the service too
python examples/spark/files.py serve        the service alone; prints its address
python examples/spark/files.py ADDRESS      the job alone
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import aqueduct
from program import run
from spark_udfs import exchange_files, list_files

TRIPS = pa.schema([("trip", pa.int64()), ("metres", pa.float64())])
FARES = pa.schema([("trip", pa.int64()), ("fare", pa.float64())])
FILES, ROWS = 6, 20_000

service = aqueduct.Service("fares", description="Knows what a trip costs.")


@service.handler("fare", input=TRIPS, output=FARES, concurrency=4)
def fare(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Two to begin with, and one for each kilometre."""
    fares = pc.add(2.0, pc.divide(batch["metres"], 1000.0))
    return pa.record_batch([batch["trip"], fares], schema=FARES)


def write(folder: Path) -> None:
    """What some other job has left: more columns than the service needs."""
    for number in range(FILES):
        trips = range(number * ROWS, (number + 1) * ROWS)
        table = pa.table(
            {
                "trip": trips,
                "driver": [f"driver {trip % 100}" for trip in trips],
                "metres": [float(trip % 50) * 1000 for trip in trips],
            }
        )
        pq.write_table(table, folder / f"trips-{number}.parquet", row_group_size=ROWS // 4)


def job(spark: SparkSession, address: str) -> None:
    """Scores all files; the answers become Parquet, and a receipt tells of each part."""
    with tempfile.TemporaryDirectory() as folder:
        trips, fares = Path(folder, "trips"), Path(folder, "fares")
        trips.mkdir()
        write(trips)
        files = list_files(spark, str(trips), split="64k")  # small, so that files are cut
        score = exchange_files(address, "fare", columns=["trip", "metres"], write=str(fares))
        receipts = files.mapInArrow(score, score.schema).collect()
        assert len(receipts) > FILES, receipts
        assert all(receipt.error is None for receipt in receipts), receipts
        assert sum(receipt.rows_out for receipt in receipts) == FILES * ROWS
        found = spark.read.parquet(str(fares)).selectExpr(
            "count(distinct trip) as trips", "sum(fare) as fares"
        )
        wanted = {"trips": FILES * ROWS, "fares": FILES * ROWS * (2.0 + 24.5)}
        assert [row.asDict() for row in found.collect()] == [wanted], found.collect()
        print(f"ok: {wanted['trips']:,} trips in {len(receipts)} parts of {FILES} files")


if __name__ == "__main__":
    run(__file__, service, job)
