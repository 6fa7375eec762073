"""Spark calls Arrow services: functions for ``mapInArrow`` and ``mapInPandas``, a Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_udfs.exchange import exchange
from spark_udfs.frames import exchange_pandas

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["exchange", "exchange_pandas", "register"]


def register(spark: SparkSession) -> None:
    """Makes ``format("aqueduct")`` known to a session; see ``spark_udfs.datasource.register``."""
    from spark_udfs import datasource  # PySpark is needed from here on

    datasource.register(spark)
