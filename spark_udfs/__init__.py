"""Spark calls Arrow services: functions for ``mapInArrow`` and ``mapInPandas``, a Data Source."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from spark_udfs.calls.telemetry import Setup, traced
from spark_udfs.functions.exchange import exchange
from spark_udfs.functions.pandas import exchange_column, exchange_pandas

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_udfs.files.exchange import exchange_files, send_files
    from spark_udfs.files.listing import list_files
    from spark_udfs.functions.groups import exchange_by_key, exchange_grouped
    from spark_udfs.functions.tables import exchange_table

__all__ = [
    "exchange",
    "exchange_by_key",
    "exchange_column",
    "exchange_files",
    "exchange_grouped",
    "exchange_pandas",
    "exchange_table",
    "list_files",
    "register",
    "send_files",
    "traced",
]

# Imported when first used: few workers need what reads Parquet or compares keys.
_LATER: Final = {
    "exchange_by_key": "spark_udfs.functions.groups",
    "exchange_files": "spark_udfs.files.exchange",
    "exchange_grouped": "spark_udfs.functions.groups",
    "exchange_table": "spark_udfs.functions.tables",
    "list_files": "spark_udfs.files.listing",
    "send_files": "spark_udfs.files.exchange",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def register(spark: SparkSession, *, telemetry: Setup | None = None) -> None:
    """Makes ``format("aqueduct")`` known to a session; see ``spark_udfs.datasource.register``."""
    from spark_udfs import datasource  # PySpark is needed from here on

    datasource.register(spark, telemetry=telemetry)
