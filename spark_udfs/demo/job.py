"""The demo's Spark job: an example of a job of one's own."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import DoubleType, StructField, StructType

from spark_udfs import exchange

__all__ = ["average_delays", "sample", "score_flights"]


def score_flights(
    spark: SparkSession, source: str, target: str, *, address: str, in_flight: int = 8
) -> None:
    """Reads flights from Parquet, has the service score them, writes them to Parquet."""
    flights = spark.read.parquet(source)
    schema = StructType(
        [
            *flights.schema.fields,
            StructField("expected_arr_delay", DoubleType()),
            StructField("great_circle_km", DoubleType()),
        ]
    )
    score = exchange(address, "score", schema=schema, in_flight=in_flight)
    flights.mapInArrow(score, schema).write.parquet(target)


def sample(scored: DataFrame, rows: int) -> DataFrame:
    """Ten flights: eight evenly spread over ``rows``, and the first without each of the scores."""
    step = max(rows // 8, 1)
    spread = scored.where(sql.col("id") % step == step // 2).orderBy("id").limit(8)
    never = scored.where("expected_arr_delay is null").orderBy("id").limit(1)
    unmapped = scored.where("great_circle_km is null").orderBy("id").limit(1)
    union = spread.union(never).union(unmapped).dropDuplicates(["id"])
    return union.orderBy("time_hour", "id")


def average_delays(scored: DataFrame) -> DataFrame:
    """Minutes by carrier, the latest first."""
    return (
        scored.groupBy("carrier")
        .agg(
            sql.count("*").alias("flights"),
            sql.count("arr_delay").alias("arrived"),
            sql.avg("arr_delay").alias("actual"),
            sql.avg("expected_arr_delay").alias("expected"),
            sql.avg("great_circle_km").alias("km"),
        )
        .orderBy(sql.desc_nulls_last("actual"))
    )
