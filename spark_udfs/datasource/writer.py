"""``df.write.format("aqueduct")`` and ``df.writeStream.format("aqueduct")``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqueduct.errors import ConfigError
from spark_udfs.datasource.options import Settings

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType

__all__ = ["make_stream_writer", "make_writer"]


def make_writer(settings: Settings, schema: StructType, overwrite: bool) -> DataSourceWriter:
    """What writes rows of ``schema`` to the sink ``settings.handler``."""
    raise ConfigError(f"{settings.handler!r} cannot be written to: aqueduct has no sinks yet")


def make_stream_writer(
    settings: Settings, schema: StructType, overwrite: bool
) -> DataSourceStreamWriter:
    """The same for the batches of a stream."""
    raise ConfigError(f"{settings.handler!r} cannot be written to: aqueduct has no sinks yet")
