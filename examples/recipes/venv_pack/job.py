"""A Spark job whose executors have Aqueduct from an archive: ``job.py ADDRESS``."""

import sys

from pyspark.sql import SparkSession

from spark_udfs import exchange


def main(address: str) -> None:
    """Asks the service for the length of 1,000 words, and prints how many there are of each."""
    spark = SparkSession.builder.appName("words").getOrCreate()
    words = spark.sql("select id, concat('word ', id) as word from range(0, 1000, 1, 4)")
    lengths = words.transform(exchange(address, "lengths").apply)
    rows = lengths.groupBy("length").count().orderBy("length").collect()
    print({row["length"]: row["count"] for row in rows})
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
