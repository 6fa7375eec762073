"""One service in the other shapes of Spark: a column, a table, data frames of pandas, and groups.

python examples/spark/frames.py              starts the service too
python examples/spark/frames.py serve        the service alone; prints its address
python examples/spark/frames.py ADDRESS      the job alone
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import aqueduct
from program import run
from spark_udfs import (
    exchange_by_key,
    exchange_column,
    exchange_grouped,
    exchange_pandas,
    exchange_table,
)

CELSIUS = pa.schema([("celsius", pa.float64())])
FAHRENHEIT = pa.schema([("fahrenheit", pa.float64())])
READINGS = pa.schema([("city", pa.string()), ("day", pa.int64()), ("celsius", pa.float64())])
TRENDS = pa.schema([("city", pa.string()), ("days", pa.int64()), ("slope", pa.float64())])

service = aqueduct.Service("weather", description="Converts temperatures, and finds trends.")


@service.handler("convert", input=CELSIUS, output=FAHRENHEIT, concurrency=4)
def convert(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Degrees of one kind to those of the other."""
    return pa.record_batch([pc.add(pc.multiply(batch["celsius"], 1.8), 32.0)], schema=FAHRENHEIT)


@service.handler("trend", input=READINGS, output=TRENDS, concurrency=4)
def trend(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The slope of one city's readings by least squares: a batch is a city."""
    days = pc.subtract(pc.cast(batch["day"], pa.float64()), pc.mean(batch["day"]))
    slope = pc.divide(pc.sum(pc.multiply(days, batch["celsius"])), pc.sum(pc.multiply(days, days)))
    row = [[batch["city"][0].as_py()], [batch.num_rows], [slope.as_py()]]
    return pa.record_batch(row, schema=TRENDS)


def job(spark: SparkSession, address: str) -> None:
    """500 cities that warm by their number in thousandths of a degree a day, each 10 days."""
    readings = spark.range(0, 5000, 1, 4).selectExpr(
        "concat('city ', id % 500) as city",
        "id div 500 as day",
        "15 + (id % 500) * (id div 500) / 1000 as celsius",
    )

    readings.createOrReplaceTempView("readings")
    spark.udf.register("to_fahrenheit", exchange_column(address, "convert"))
    column = spark.sql("SELECT to_fahrenheit(celsius) fahrenheit FROM readings")
    spark.udtf.register("convert", exchange_table(address, "convert"))
    table = spark.sql("SELECT * FROM convert(TABLE(SELECT celsius FROM readings))")
    pandas = readings.select("celsius").mapInPandas(
        exchange_pandas(address, "convert", input_schema=CELSIUS), "fahrenheit double"
    )
    for frame in (column, table, pandas):
        (mean,) = frame.selectExpr("round(avg(fahrenheit), 6)").collect()[0]
        assert mean == round(32 + 1.8 * (15 + 249.5 * 4.5 / 1000), 6), mean

    declared = "city string, days long, slope double"
    grouped = readings.groupBy("city").applyInArrow(exchange_grouped(address, "trend"), declared)
    by_key = exchange_by_key(address, "trend", ["city"]).apply(readings)
    for frame in (grouped, by_key):
        trends = {row.city: (row.days, round(row.slope, 6)) for row in frame.collect()}
        assert trends == {f"city {k}": (10, k / 1000) for k in range(500)}
    print("ok: 500 trends twice, and 5,000 temperatures three times")


if __name__ == "__main__":
    run(__file__, service, job)
