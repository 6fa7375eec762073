"""Flows of a pipeline: readings from files go through a service, and into another one's sink.

``spark-pipelines run`` reads this file; ``run.py`` beside it starts the services and the pipeline.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DoubleType

import spark_udfs

spark = SparkSession.active()
spark_udfs.register(spark)
ADDRESS = str(spark.conf.get("spark.readings.address", ""))
FOLDER = str(spark.conf.get("spark.readings.folder", ""))

fahrenheit = spark_udfs.exchange_column(ADDRESS, "convert", DoubleType(), columns=["celsius"])

dp.create_sink("kept", "aqueduct", {"address": ADDRESS, "handler": "kept"})


@dp.append_flow(target="kept")
def readings() -> DataFrame:
    """What the files have, converted by the service."""
    files = spark.readStream.schema("id long, celsius double").json(FOLDER)
    return files.select("id", fahrenheit("celsius").alias("fahrenheit"))
