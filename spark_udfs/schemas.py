"""Schemas as Spark users write them, made into Arrow's on the driver."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from aqueduct.errors import ConfigError
from spark_udfs.spark_schemas import arrow_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

__all__ = ["AnySchema", "active_session", "arrow_schema", "large_types"]

AnySchema: TypeAlias = "pa.Schema | StructType | str"
"""An Arrow schema, a Spark schema, or Spark's DDL, for example ``"id long, name string"``."""


def active_session() -> SparkSession | None:
    """The session of this thread, or else the one that the program has; None: there is none.

    Only the thread that made a session has it as its own, and jobs are begun in others too.
    """
    if "pyspark" not in sys.modules:
        return None  # none can have been made
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkException:
        return None


def arrow_schema(schema: AnySchema, argument: str, *, calendar: bool = False) -> pa.Schema:
    """``schema`` in Arrow, as Spark would hand it to a function.

    DDL needs a running Spark session, which also gives timestamps their zone. ``calendar``: it may
    have intervals of a calendar, which Spark hands over and does not take. Raises ConfigError that
    names ``argument``.
    """
    if isinstance(schema, pa.Schema):
        return schema
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    session = active_session()
    if isinstance(schema, str):
        if session is None:
            raise ConfigError(
                f"{argument}={schema!r}: DDL is parsed by Spark, and no session is active here; "
                "start one first, or give a pyarrow.Schema"
            )
        try:
            schema = StructType.fromDDL(schema)
        except PySparkException as error:
            raise ConfigError(f"{argument}={schema!r} is not a schema: {error}") from error
    if not isinstance(schema, StructType):
        raise ConfigError(
            f"{argument} is a {type(schema).__name__}; "
            "it must be a pyarrow.Schema, a StructType or DDL text"
        )
    zone = None if session is None else session.conf.get("spark.sql.session.timeZone")
    return arrow_of(schema, argument, zone=zone or "UTC", large=large_types(), calendar=calendar)


def large_types() -> bool:
    """Whether Spark hands over text and bytes with offsets of 64 bits, by the session's setting."""
    session = active_session()
    name = "spark.sql.execution.arrow.useLargeVarTypes"
    return session is not None and session.conf.get(name, "false") == "true"
