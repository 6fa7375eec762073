"""The columns of a table as Spark has them: schemas both ways, and batches made to fit.

Spark takes batches of exactly the Arrow schema that it declares, and knows fewer types than Arrow.
So a table's types become those that Spark has and that hold every value (``spark_schema``), and its
batches are cast to them in the task (``fit``), which copies nothing where they are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from aqueduct.arrow.casts import Unfit, cast
from aqueduct.arrow.schema import difference
from aqueduct.errors import SchemaMismatch

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["arrow_of", "check_declared", "fit", "spark_schema"]

_PLAIN: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}


def spark_schema(schema: pa.Schema, where: str) -> StructType:
    """What Spark calls the columns of ``schema``.

    Raises SchemaMismatch, beginning with ``where``, for a type that Spark has not.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructType

    found = StructType()
    for field in schema:
        try:
            kind = from_arrow_type(_plain(field.type), prefer_timestamp_ntz=True)
        except (PySparkException, TypeError) as error:
            raise SchemaMismatch(
                f"{where}: Spark has no type for column {field.name!r}, {field.type}; leave it out "
                'by .option("columns", ...), or let the table give another type',
                column=field.name,
                got=str(field.type),
            ) from error
        found.add(field.name, kind, field.nullable)
    return found


def arrow_of(schema: StructType) -> pa.Schema:
    """The Arrow schema that batches must have for Spark to take them as ``schema``."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def check_declared(declared: StructType, given: pa.Schema, where: str) -> None:
    """Raises SchemaMismatch if a table that gives ``given`` cannot be read as ``declared``."""
    wanted = arrow_of(declared)
    found = difference(wanted, arrow_of(spark_schema(given, where)))
    if found is not None:
        raise SchemaMismatch(
            f"{where}: {found}", column=found.column, wanted=found.wanted, got=found.got
        )


def fit(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """``batch``, with columns cast where their types differ.

    Raises SchemaMismatch for a value that does not fit.
    """
    arrays = []
    for column, field in zip(batch.columns, wanted, strict=True):
        array = column
        if not array.type.equals(field.type):
            try:
                array = cast(array, field.type)
            except Unfit as error:
                raise SchemaMismatch(
                    f"column {field.name!r}: {column.type} does not become {field.type}: the value "
                    f"{error.value} in row {error.row}: {error}",
                    column=field.name,
                    wanted=str(field.type),
                    got=str(column.type),
                ) from error
        arrays.append(array)
    if not arrays:  # only its rows are counted
        return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type that Spark has for it; itself if there is none."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if types.is_time(kind):
        return pa.time64("ns")
    if types.is_duration(kind):
        return pa.duration("us")
    if types.is_decimal(kind) and kind.precision <= 38:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    if types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field))
    if types.is_nested(kind) and not types.is_union(kind):
        return pa.list_(_plain_field(kind.value_field))
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _plain(field.type), field.nullable)
