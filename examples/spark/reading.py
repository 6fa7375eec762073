"""A table of a service, read by Spark: its splits in tasks, its columns and filters at the source.

python examples/spark/reading.py              starts the service too
python examples/spark/reading.py serve        the service alone; prints its address
python examples/spark/reading.py ADDRESS      the job alone
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

import aqueduct
import spark_udfs
from aqueduct.service.tables import Request
from program import run

READINGS = pa.schema(
    [
        ("station", pa.string()),
        ("hour", pa.timestamp("s", "UTC")),
        ("celsius", pa.float32()),
        ("remark", pa.string()),
    ]
)
STATIONS = ("Arosa", "Basel", "Chur", "Davos")
HOURS = 24 * 365

service = aqueduct.Service("weather", description="What thermometers said.")


def stations(request: Request) -> list[str]:
    """The splits: the stations, without those that a filter leaves out."""
    wanted = list(STATIONS)
    for each in request.filters:
        if each.column == ("station",) and each.operation == "equal":
            wanted = [name for name in wanted if name == each.value]
    return wanted


@service.table("readings", schema=READINGS, splits=stations, filters="applied")
def readings(station: str, request: Request) -> Iterator[pa.RecordBatch]:
    """An hour of a station in each row."""
    number = STATIONS.index(station)  # it comes over the network: anything else is an error
    for first in range(0, HOURS, 1000):
        hours = range(first, min(first + 1000, HOURS))
        columns = {
            "station": [station] * len(hours),
            "hour": [hour * 3600 for hour in hours],
            "celsius": [number + hour % 24 for hour in hours],
            "remark": ["nothing to be said about this hour" for _ in hours],
        }
        # Only what is wanted need be made. What is made beyond that does not travel.
        arrays = [pa.array(columns[field.name], field.type) for field in request.schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=request.schema)


def job(spark: SparkSession, address: str) -> None:
    """Looks at one station's warm hours, and at all of them."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark_udfs.register(spark)
    source = spark.read.format("aqueduct").option("address", address)

    frame = source.load("readings")
    assert dict(frame.dtypes)["hour"] == "timestamp", frame.dtypes
    assert frame.rdd.getNumPartitions() == len(STATIONS)

    # One split is planned, and the service leaves out the cold hours.
    warm = frame.where("station = 'Chur' and celsius >= 20")
    assert warm.rdd.getNumPartitions() == 1
    assert warm.count() == 365 * 6, warm.count()

    # Two columns travel instead of four.
    narrow = source.option("columns", "station, celsius").load("readings")
    means: dict[str, float] = dict(narrow.groupBy("station").agg({"celsius": "mean"}).collect())
    assert means == {name: 11.5 + number for number, name in enumerate(STATIONS)}, means
    print(f"ok: {HOURS * len(STATIONS):,} hours of {len(means)} stations")


if __name__ == "__main__":
    run(__file__, service, job)
