"""Spark's schemas made of Arrow's by the table of types, and Arrow's of Spark's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from aqueduct.errors import ConfigError, SchemaMismatch
from spark_udfs.spark_types import (
    BOUNDS,
    JSON_TYPE,
    PRECISION,
    SQL_NAME,
    NoTypeError,
    Refusal,
    bounds_of,
    precision_of,
    tagged,
    taken_schema,
)

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField, StructType

__all__ = ["arrow_of", "same_meaning", "spark_schema"]

_METADATA = b"SPARK::metadata::json"
"""Spark's own key: the metadata of a column, such as its comment."""


def spark_schema(
    schema: pa.Schema, refusal: Refusal, *, known: Iterable[DataType] = ()
) -> StructType:
    """What Spark calls the columns of ``schema``. Raises what ``refusal`` makes.

    ``known``: types among which user-defined ones are looked for.
    """
    from pyspark.sql.types import StructType

    told = {_json(kind): kind for each in known for kind in _user_defined(each)}
    try:
        return StructType([_spark_field(field, told) for field in taken_schema(schema, refusal)])
    except NoTypeError as error:
        raise error.made(refusal) from None


def _spark_field(field: pa.Field, known: Mapping[str, DataType]) -> StructField:
    from pyspark.sql.types import StructField

    try:
        kind = _spark_type(field, known)
    except NoTypeError as error:
        error.path.insert(0, field.name)
        raise
    return StructField(field.name, kind, field.nullable, _column(field))


def _column(field: pa.Field) -> dict[str, Any] | None:
    """The metadata of a column, as Spark has it."""
    text = (field.metadata or {}).get(_METADATA)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:  # not Spark's doing
        return None
    return found if isinstance(found, dict) else None


def _spark_type(field: pa.Field, known: Mapping[str, DataType]) -> DataType:
    """The type of a field of a schema that Spark takes."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import ArrayType, MapType, StructType

    kind = field.type
    metadata = field.metadata or {}
    user = known.get(metadata.get(JSON_TYPE, b"").decode(errors="replace"))
    if user is not None and _arrow_type(user, "UTC", False).equals(kind):
        return user
    if pa.types.is_struct(kind) and not tagged(kind):
        return StructType([_spark_field(each, known) for each in kind])
    if pa.types.is_map(kind):
        key, item = (_spark_type(each, known) for each in (kind.key_field, kind.item_field))
        return MapType(key, item, kind.item_field.nullable)
    if pa.types.is_list(kind):
        inner = kind.value_field
        return ArrayType(_spark_type(inner, known), inner.nullable)
    try:
        found = from_arrow_type(kind, prefer_timestamp_ntz=True)
    except PySparkException:
        raise NoTypeError(kind, "this version of Spark has none: give another type") from None
    return _named(metadata, found) or found


def _named(metadata: Mapping[bytes, bytes], found: DataType) -> DataType | None:
    """The type that metadata names, if a column of ``found`` can be it."""
    from pyspark.sql.types import DayTimeIntervalType, StringType

    name = metadata.get(SQL_NAME, b"").decode(errors="replace").strip()
    if found.simpleString().startswith("time("):  # Spark 4.0 has no such class
        digits = precision_of(metadata)
        return None if digits is None else type(found)(digits)  # type: ignore[call-arg]
    if isinstance(found, DayTimeIntervalType):
        bounds = bounds_of(name)
        if bounds is None:
            return None
        numbers = [list(BOUNDS).index(each) for each in bounds]
        return DayTimeIntervalType(numbers[0], numbers[-1])
    words = name.split()
    collated = len(words) == 3 and [each.lower() for each in words[:2]] == ["string", "collate"]
    return StringType(words[2]) if collated and isinstance(found, StringType) else None


def arrow_of(
    schema: StructType,
    what: str = "the schema",
    *,
    zone: str = "UTC",
    large: bool = False,
    calendar: bool = False,
) -> pa.Schema:
    """The Arrow schema in which Spark hands columns over and takes them, with what tells the rest.

    - ``zone``: that of timestamps. ``large``: text and bytes have offsets of 64 bits.
    - ``calendar``: intervals of a calendar may be there. Spark hands them over and takes none.

    Raises ConfigError that begins with ``what`` for a type that Spark hands to no function.
    """
    fields = []
    for field in schema:
        try:
            fields.append(_arrow_field(field, zone, large, calendar))
        except NoTypeError as error:
            raise ConfigError(
                f"{what}: column {'.'.join(error.path)!r} is {error.kind}, and {error}"
            ) from None
    return pa.schema(fields)


def _arrow_field(field: StructField, zone: str, large: bool, calendar: bool) -> pa.Field:
    from pyspark.sql.pandas import types as pandas

    described: Any = getattr(pandas, "to_arrow_metadata", lambda given: {})  # since PySpark 4.2
    metadata = {**(described(field.metadata) or {}), **_tags(field.dataType)}
    try:
        kind = _arrow_type(field.dataType, zone, large, calendar)
    except NoTypeError as error:
        error.path.insert(0, field.name)
        raise
    nullable = field.nullable or pa.types.is_null(kind)  # to Arrow, what is always null may be null
    return pa.field(field.name, kind, nullable, metadata or None)


def _arrow_type(kind: DataType, zone: str, large: bool, calendar: bool = False) -> pa.DataType:
    from pyspark.errors import PySparkException
    from pyspark.sql import types as spark
    from pyspark.sql.pandas.types import to_arrow_type

    def inner(name: str, kind: DataType, nullable: bool) -> pa.Field:
        return _arrow_field(spark.StructField(name, kind, nullable), zone, large, calendar)

    if isinstance(kind, spark.UserDefinedType):
        return _arrow_type(kind.sqlType(), zone, large, calendar)
    if isinstance(kind, spark.StructType):
        return pa.struct([_arrow_field(field, zone, large, calendar) for field in kind])
    if isinstance(kind, spark.ArrayType):
        return pa.list_(inner("element", kind.elementType, kind.containsNull))
    if isinstance(kind, spark.MapType):
        key = inner("key", kind.keyType, False)
        return pa.map_(key, inner("value", kind.valueType, kind.valueContainsNull))
    if isinstance(kind, spark.CalendarIntervalType) and calendar:
        return pa.month_day_nano_interval()
    if isinstance(kind, spark.TimestampType):
        return pa.timestamp("us", zone)  # PySpark 4.1 and older take no zone
    if isinstance(kind, spark.CharType | spark.VarcharType):
        return pa.large_string() if large else pa.string()
    try:
        return to_arrow_type(kind, prefers_large_types=large)
    except PySparkException:
        raise NoTypeError(kind.simpleString(), _advice(kind)) from None


def _advice(kind: DataType) -> str:
    from pyspark.sql.types import CalendarIntervalType, YearMonthIntervalType

    if isinstance(kind, YearMonthIntervalType):
        return (
            "Spark hands such columns to no function in Python: leave it out, or send its months, "
            "extract(YEAR FROM c) * 12 + extract(MONTH FROM c)"
        )
    if isinstance(kind, CalendarIntervalType):
        return (
            "Spark takes no such column from Python: leave it out, or make an interval day to "
            "second of it"
        )
    return "Arrow has no type for it: leave it out, or cast it to another"


def _tags(kind: DataType) -> dict[bytes, bytes]:
    """What tells a type that Arrow has not."""
    from pyspark.sql import types as spark

    if isinstance(kind, spark.UserDefinedType):
        return {JSON_TYPE: _json(kind).encode()}
    name = kind.simpleString() if isinstance(kind, spark.AtomicType) else ""
    if name.startswith("time(") and name != "time(6)":
        return {PRECISION: name.removeprefix("time(").removesuffix(")").encode()}
    if isinstance(kind, spark.DayTimeIntervalType) and name != "interval day to second":
        return {SQL_NAME: name.encode()}
    if isinstance(kind, spark.StringType) and name.startswith("string collate "):
        return {SQL_NAME: name.encode()}
    return {}


def _json(kind: DataType) -> str:
    return json.dumps(kind.jsonValue(), sort_keys=True)


def _user_defined(kind: DataType) -> Iterator[DataType]:
    """The user-defined types in ``kind``."""
    from pyspark.sql import types as spark

    if isinstance(kind, spark.UserDefinedType):
        yield kind
    elif isinstance(kind, spark.StructType):
        for field in kind:
            yield from _user_defined(field.dataType)
    elif isinstance(kind, spark.ArrayType):
        yield from _user_defined(kind.elementType)
    elif isinstance(kind, spark.MapType):
        yield from _user_defined(kind.keyType)
        yield from _user_defined(kind.valueType)


def same_meaning(wanted: pa.Schema, got: pa.Schema, where: str) -> None:
    """Raises SchemaMismatch where one schema has a geometry and the other something else.

    To Arrow these are equal structs. One without any tag may be read as either, and a geometry of
    any system of coordinates (``geometry(ANY)``, srid -1) takes those of each.
    """
    for mine, theirs in zip(wanted, got, strict=True):
        _same_meaning(where, mine.name, mine.type, theirs.type)


def _same_meaning(where: str, path: str, wanted: Any, got: Any) -> None:
    if pa.types.is_struct(wanted) and pa.types.is_struct(got):
        mine, theirs = _shown(wanted), _shown(got)
        if mine and theirs and mine != theirs and mine != theirs.partition("(")[0] + "(any)":
            raise SchemaMismatch(
                f"{where}: column {path!r} has another type: wanted {mine}, got {theirs}; declare "
                "it as it is, and convert it in Spark",
                column=path,
                wanted=mine,
                got=theirs,
            )
    for field, other in zip(_fields(wanted), _fields(got), strict=False):
        _same_meaning(where, f"{path}.{field.name}", field.type, other.type)


def _shown(kind: Any) -> str:
    found = tagged(kind)
    if found not in ("geometry", "geography"):
        return found
    srid = int(kind.field("wkb").metadata[b"srid"])
    return f"{found}({'any' if srid == -1 else srid})"


def _fields(kind: Any) -> list[pa.Field]:
    return (
        [kind.field(place) for place in range(kind.num_fields)] if pa.types.is_nested(kind) else []
    )
