"""The columns of a table as Spark has them, by the one table in ``spark_udfs.spark_types``.

Spark takes batches of exactly the Arrow schema that it declares, and knows fewer types than Arrow.
So a table's types become those that Spark has and that hold every value (``spark_schema``), and its
batches are converted to them in the task (``spark_udfs.functions.fitting``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from aqueduct.arrow.schema import difference
from aqueduct.errors import SchemaMismatch
from spark_udfs import spark_schemas
from spark_udfs.functions.fitting import Fitting
from spark_udfs.spark_schemas import arrow_of, same_meaning
from spark_udfs.spark_types import Refusal, shown, taken_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["arrow_of", "check", "check_declared", "fit", "spark_schema"]


def spark_schema(schema: pa.Schema, where: str) -> StructType:
    """What Spark calls the columns of ``schema``.

    Raises SchemaMismatch, beginning with ``where``, for a type that Spark has not.
    """
    return spark_schemas.spark_schema(schema, _refusal(where))


def check_declared(declared: StructType, given: pa.Schema, where: str) -> None:
    """Raises SchemaMismatch if a table that gives ``given`` cannot be read as ``declared``."""
    wanted, taken = arrow_of(declared, where), taken_schema(given, _refusal(where))
    check(wanted, taken, where)
    same_meaning(wanted, taken, where)


def check(wanted: pa.Schema, got: pa.Schema, where: str, *, handler: str = "") -> None:
    """Raises SchemaMismatch for the first difference that matters, with advice for a Data Source.

    ``where`` begins the text.
    """
    found = difference(wanted, got)
    if found is not None:
        in_spark = '.option("cast", "true")' if "cast=True" in found.in_spark else found.in_spark
        text = f"{where}: {replace(found, in_spark=in_spark)}"
        raise found.mismatch(text, handler=handler)


def fit(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """``batch``, with columns converted where their types differ.

    Raises SchemaMismatch for a value that does not fit.
    """
    return Fitting(wanted, batch.schema).one(batch, 0)


def _refusal(where: str) -> Refusal:
    def refused(column: str, kind: Any, advice: str) -> SchemaMismatch:
        return SchemaMismatch(
            f"{where}: Spark has no type for column {column!r}, {shown(kind)}; {advice}. Let the "
            'table give another type, or leave the column out by .option("columns", ...)',
            column=column,
            got=str(kind),
        )

    return refused
