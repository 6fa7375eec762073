"""The Data Source ``aqueduct``: tables of a service are read, and its sinks are written to.

::

    spark_udfs.register(spark)
    trips = spark.read.format("aqueduct").option("address", ADDRESS).load("trips")

Spark makes the source in processes of its own on the driver, which have no session: settings are
those at the time of ``register``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.sql.datasource import DataSource

from spark_udfs.calls.telemetry import Setup, Trace
from spark_udfs.datasource.options import Settings, settings_of
from spark_udfs.options import argument, defaults
from spark_udfs.versions import younger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ["AqueductSource", "register"]


class AqueductSource(DataSource):
    """What ``format("aqueduct")`` is. See ``register``."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """The values of settings ``spark.aqueduct.*`` at the time of ``register``."""
    trace: ClassVar[Trace | None] = None
    """Of the time of ``register``, if there is anybody to tell."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "aqueduct"

    @functools.cached_property
    def settings(self) -> Settings:
        """The options. Raises ConfigError."""
        return settings_of(self.options, self.defaults, self.trace)

    def schema(self) -> StructType:
        """What the service says of the table."""
        from spark_udfs.datasource import reader

        return reader.schema_of(self.settings)

    def reader(self, schema: StructType) -> DataSourceReader:
        """What reads a table as ``schema``: the driver plans, tasks read."""
        from spark_udfs.datasource import reader

        return reader.TableReader(self.settings, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """The same for streams. Needs PySpark 4.2: older ones do not say where a batch begins."""
        younger("pyspark.sql.streaming.datasource.ReadLimit", "4.2", "reading a stream")
        from spark_udfs.datasource import stream_reader

        return stream_reader.TableStreamReader(self.settings, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """What writes rows of ``schema``, on the driver and in tasks."""
        from spark_udfs.datasource import writer

        return writer.make_writer(self.settings, schema, overwrite)

    def streamWriter(  # noqa: N802 - Spark's names
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """The same for the batches of a stream. Needs PySpark 4.1: older ones hand over rows."""
        base = "pyspark.sql.datasource.DataSourceStreamArrowWriter"
        younger(base, "4.1", "writing a stream")
        from spark_udfs.datasource import stream_writer

        return stream_writer.make_stream_writer(self.settings, schema, overwrite)


def register(spark: SparkSession, *, telemetry: Setup | None = None) -> None:
    """Makes ``format("aqueduct")`` known to a session, classic or Connect.

    Settings ``spark.aqueduct.*`` of the session become defaults of the options, as they are now:
    register again after a change. ``telemetry`` is that of ``exchange``; the span that is current
    now is the parent of what tasks do, where no reading or writing names another by ``traced``.
    Raises ConfigError for settings that cannot be.
    """
    argument("spark", spark)
    if telemetry is not None:
        argument("telemetry", telemetry)
    found = defaults(session=spark)
    trace = Trace(telemetry)
    source: type[AqueductSource] = AqueductSource
    if found or trace.wanted:
        # A class that no module has travels by value, with what it holds.
        held = {"defaults": found, "trace": trace if trace.wanted else None}
        source = type("AqueductSource", (AqueductSource,), held)
    spark.dataSource.register(source)
