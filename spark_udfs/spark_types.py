"""The one table of types for Spark: what each Arrow type becomes there, and each Spark type here.

``exchange`` and its relatives, the Data Source and docs/cookbook/types.md all go by it. Values are
converted by ``spark_udfs.fitting``.

Arrow has no type for some of what Spark knows: a collation, the bounds of an interval, a
user-defined type. A field's metadata says it then, under ``SQL_NAME`` or ``JSON_TYPE``, both ways:
batches that come from Spark are sent with it, and a table or an answer may declare it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

from aqueduct.arrow.schema import shorten
from aqueduct.errors import ConfigError, SchemaMismatch

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField, StructType

__all__ = [
    "ARROW_TYPES",
    "JSON_TYPE",
    "PRECISION",
    "SPARK_TYPES",
    "SQL_NAME",
    "ArrowRow",
    "Refusal",
    "SparkRow",
    "arrow_of",
    "bound_of",
    "markdown",
    "precision_of",
    "retold",
    "same_meaning",
    "shown",
    "spark_schema",
    "taken_schema",
    "told_schema",
]

SQL_NAME: Final = b"Spark:DataType:SqlName"
"""The key of a field's metadata that names its Spark type: ``string collate UTF8_LCASE``."""
JSON_TYPE: Final = b"Spark:DataType:JsonType"
"""The key that describes a user-defined type. It only counts for types that the frame sent has:
to make such a type of a text imports the module that the text names."""
PRECISION: Final = b"SPARK::time::precision"
"""Spark's own key: how many digits the fraction of a second has in a column of times."""
_METADATA: Final = b"SPARK::metadata::json"
"""Spark's own key: the metadata of a column, such as its comment."""
_DIGITS: Final = 38
_MONTHS: Final = 21
"""The number of Arrow's interval of months. pyarrow can hold such a type, and has no name for it.
"""
_LARGE: Final = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
_BOUNDS: Final[Mapping[str, int]] = MappingProxyType(
    {"day": 86_400_000_000, "hour": 3_600_000_000, "minute": 60_000_000, "second": 1}
)
"""Microseconds of the last field of an interval; a second has a fraction."""


Refusal: TypeAlias = Callable[[str, Any, str], Exception]
"""Makes the error for a column that Spark has no type for, of: its name (with those of fields
inside it after dots), the Arrow type there, and what to do."""
_Inner: TypeAlias = Callable[[pa.Field], pa.Field]
"""What becomes of a field inside a type."""


@dataclass(frozen=True, slots=True)
class ArrowRow:
    """One row of the table: some types of Arrow, and what becomes of them in Spark."""

    arrow: str
    """The names of the types, for people."""
    holds: Callable[[Any], bool]
    """Whether a type belongs to this row."""
    taken: Callable[[Any, _Inner], pa.DataType] | None
    """The type in which Spark takes it; None: Spark has no type for it."""
    spark: str
    """What Spark calls it, for people; empty if it has no type for it."""
    note: str = ""
    """Which values are errors; or, where Spark has no type for it, what to do."""


@dataclass(frozen=True, slots=True)
class SparkRow:
    """One row of the other table: a type of Spark, and what services get."""

    spark: str
    arrow: str
    """Empty if Spark hands it to no function in Python."""
    note: str = ""


def _same(kind: Any, inner: _Inner) -> pa.DataType:
    return kind


def _to(kind: pa.DataType) -> Callable[[Any, _Inner], pa.DataType]:
    return lambda _, inner: kind


def _extension(*names: str) -> Callable[[Any], bool]:
    def holds(kind: Any) -> bool:
        return isinstance(kind, pa.BaseExtensionType) and (
            not names or kind.extension_name in names
        )

    return holds


def _decimal(kind: Any, inner: _Inner) -> pa.DataType:
    precision, scale = _digits(kind)
    return pa.decimal128(precision, scale)


def _digits(kind: Any) -> tuple[int, int]:
    """Precision and scale that Spark can have: 0 <= scale <= precision, for the same values."""
    precision, scale = kind.precision, kind.scale
    if scale < 0:
        return precision - scale, 0
    return max(precision, scale), scale


def _struct(kind: Any, inner: _Inner) -> pa.DataType:
    found = _tagged(kind)
    if found == "variant":
        tag = pa.field("metadata", pa.binary(), False, {b"variant": b"true"})
        return pa.struct([pa.field("value", pa.binary(), False), tag])
    if found:
        wkb = kind.field("wkb").with_type(pa.binary()).with_nullable(False)
        return pa.struct([pa.field("srid", pa.int32(), False), wkb])
    return pa.struct([inner(field) for field in kind])


def _tagged(kind: Any) -> str:
    """Whether a struct is a variant, a geometry or a geography, by the tags that Spark gives."""
    tags = {field.name: field.metadata or {} for field in kind}
    if tags.keys() == {"value", "metadata"} and kind.num_fields == 2:
        if tags["metadata"].get(b"variant") == b"true":
            return "variant"
    elif tags.keys() == {"srid", "wkb"} and kind.num_fields == 2:
        tag = tags["wkb"]
        for name in ("geometry", "geography"):
            if tag.get(name.encode()) == b"true" and _is_whole(tag.get(b"srid", b"")):
                return name
    return ""


def _is_whole(text: bytes) -> bool:
    return text.removeprefix(b"-").isdigit()


def _map(kind: Any, inner: _Inner) -> pa.DataType:
    return pa.map_(inner(kind.key_field), inner(kind.item_field))


def _list(kind: Any, inner: _Inner) -> pa.DataType:
    return pa.list_(inner(kind.value_field))


def _values(kind: Any, inner: _Inner) -> pa.DataType:
    return inner(pa.field("values", kind.value_type)).type


def _storage(kind: Any, inner: _Inner) -> pa.DataType:
    return inner(pa.field("storage", kind.storage_type)).type


_is: Final = pa.types
_ALWAYS: Final = "any value"
_US: Final = "whole microseconds, in their range of 64 bits"
ARROW_TYPES: Final[tuple[ArrowRow, ...]] = (
    ArrowRow("null", _is.is_null, _same, "void", _ALWAYS),
    ArrowRow("bool", _is.is_boolean, _same, "boolean", _ALWAYS),
    ArrowRow("int8", _is.is_int8, _same, "tinyint", _ALWAYS),
    ArrowRow("int16", _is.is_int16, _same, "smallint", _ALWAYS),
    ArrowRow("int32", _is.is_int32, _same, "int", _ALWAYS),
    ArrowRow("int64", _is.is_int64, _same, "bigint", _ALWAYS),
    ArrowRow("uint8", _is.is_uint8, _to(pa.int16()), "smallint", _ALWAYS),
    ArrowRow("uint16", _is.is_uint16, _to(pa.int32()), "int", _ALWAYS),
    ArrowRow("uint32", _is.is_uint32, _to(pa.int64()), "bigint", _ALWAYS),
    ArrowRow("uint64", _is.is_uint64, _to(pa.decimal128(20, 0)), "decimal(20,0)", _ALWAYS),
    ArrowRow("halffloat", _is.is_float16, _to(pa.float32()), "float", _ALWAYS),
    ArrowRow("float", _is.is_float32, _same, "float", _ALWAYS),
    ArrowRow("double", _is.is_float64, _same, "double", _ALWAYS),
    ArrowRow(
        "decimal32, decimal64, decimal128, decimal256 of at most 38 digits",
        lambda kind: bool(_is.is_decimal(kind)) and _digits(kind)[0] <= _DIGITS,
        _decimal,
        "decimal(p,s)",
        "any value; a negative scale becomes scale 0 with as many digits more",
    ),
    ArrowRow(
        "decimals of more digits",
        _is.is_decimal,
        None,
        "",
        "Spark has 38 digits: give decimal128(38, s), or text",
    ),
    ArrowRow("string", _is.is_string, _same, "string", _ALWAYS),
    ArrowRow(
        "large_string, string_view",
        lambda kind: bool(_is.is_large_string(kind) or _is.is_string_view(kind)),
        _to(pa.string()),
        "string",
        "less than 2 GiB in a batch",
    ),
    ArrowRow("binary", _is.is_binary, _same, "binary", _ALWAYS),
    ArrowRow(
        "large_binary, binary_view, fixed_size_binary",
        lambda kind: bool(
            _is.is_large_binary(kind) or _is.is_binary_view(kind) or _is.is_fixed_size_binary(kind)
        ),
        _to(pa.binary()),
        "binary",
        "less than 2 GiB in a batch",
    ),
    ArrowRow("date32", _is.is_date32, _same, "date", _ALWAYS),
    ArrowRow("date64", _is.is_date64, _to(pa.date32()), "date", "whole days"),
    ArrowRow(
        "time32, time64",
        _is.is_time,
        _to(pa.time64("ns")),
        "time(6)",
        "whole microseconds of one day, or whole units of the precision p of a declared time(p)",
    ),
    ArrowRow(
        "timestamp without a zone, in s, ms, us or ns",
        lambda kind: bool(_is.is_timestamp(kind)) and kind.tz is None,
        _to(pa.timestamp("us")),
        "timestamp_ntz",
        _US,
    ),
    ArrowRow(
        "timestamp with a zone, in s, ms, us or ns",
        _is.is_timestamp,
        _to(pa.timestamp("us", "UTC")),
        "timestamp",
        f"{_US}; the zone's name is not kept",
    ),
    ArrowRow(
        "duration in s, ms, us or ns",
        _is.is_duration,
        _to(pa.duration("us")),
        "interval day to second",
        _US,
    ),
    ArrowRow(
        "month_day_nano_interval, month_interval",
        lambda kind: bool(_is.is_interval(kind) or kind.id == _MONTHS),
        None,
        "",
        "give a duration, or months, days and nanoseconds as columns of integers",
    ),
    ArrowRow(
        "list, large_list, fixed_size_list, list_view, large_list_view",
        lambda kind: bool(
            _is.is_list(kind)
            or _is.is_large_list(kind)
            or _is.is_fixed_size_list(kind)
            or _is.is_list_view(kind)
            or _is.is_large_list_view(kind)
        ),
        _list,
        "array",
        "less than 2,147,483,648 elements in a batch",
    ),
    ArrowRow("map", _is.is_map, _map, "map", _ALWAYS),
    ArrowRow(
        "struct",
        _is.is_struct,
        _struct,
        "struct, variant, geometry or geography",
        "any value; the last three by the tags that Spark puts into the fields' metadata",
    ),
    ArrowRow(
        "dictionary, run_end_encoded",
        lambda kind: bool(_is.is_dictionary(kind) or _is.is_run_end_encoded(kind)),
        _values,
        "as their values",
        "as their values",
    ),
    ArrowRow("extension arrow.bool8", _extension("arrow.bool8"), _to(pa.bool_()), "boolean"),
    ArrowRow(
        "extension arrow.uuid",
        _extension("arrow.uuid"),
        _to(pa.binary()),
        "binary",
        "its 16 bytes",
    ),
    ArrowRow(
        "other extension types (arrow.json, arrow.fixed_shape_tensor, arrow.opaque, ...)",
        _extension(),
        _storage,
        "as their storage",
        "as their storage",
    ),
    ArrowRow(
        "dense_union, sparse_union",
        _is.is_union,
        None,
        "",
        "give a struct with one field for each of its types",
    ),
)
"""What each Arrow type becomes in Spark. The first row that holds counts."""
SPARK_TYPES: Final[tuple[SparkRow, ...]] = (
    SparkRow("void", "null"),
    SparkRow("boolean", "bool"),
    SparkRow("tinyint, smallint, int, bigint", "int8, int16, int32, int64"),
    SparkRow("float, double", "float, double"),
    SparkRow("decimal(p,s)", "decimal128(p, s)"),
    SparkRow("string", "string", "large_string with useLargeVarTypes"),
    SparkRow(
        "string collate NAME",
        "string",
        "the collation is in the field's metadata, and comes back by it",
    ),
    SparkRow(
        "char(n), varchar(n)",
        "string",
        "columns of tables alone have them; Spark makes them string before a function sees them, "
        "and takes no answer as char or varchar",
    ),
    SparkRow("binary", "binary", "large_binary with useLargeVarTypes"),
    SparkRow("date", "date32"),
    SparkRow("timestamp", "timestamp in us", "in the session's zone, whose name is not kept"),
    SparkRow("timestamp_ntz", "timestamp in us, without a zone"),
    SparkRow("time(p)", "time64 in ns", "the precision is in the field's metadata"),
    SparkRow("interval day to second", "duration in us"),
    SparkRow(
        "interval with other bounds (day, hour to minute, ...)",
        "duration in us",
        "the bounds are in the field's metadata, and come back by it",
    ),
    SparkRow(
        "interval year to month",
        "",
        "Spark hands it to no function in Python: send "
        "extract(YEAR FROM c) * 12 + extract(MONTH FROM c)",
    ),
    SparkRow(
        "interval (of a calendar)",
        "month_day_nano_interval",
        "can be sent by exchange, and is not taken back; not written",
    ),
    SparkRow("array, map, struct", "list, map, struct", "the same for what is inside"),
    SparkRow("variant", "struct of value and metadata", "tagged, and comes back by the tag"),
    SparkRow(
        "geometry(srid), geography(srid)",
        "struct of srid and wkb",
        "tagged, and comes back by the tag",
    ),
    SparkRow(
        "user-defined types",
        "as the type that they are stored as",
        "come back by exchange.apply, and where .schema(...) declares them; else as stored",
    ),
)
"""What each Spark type becomes in Arrow."""


class _NoTypeError(Exception):
    """Spark has no type for a field. ``path`` is filled by those around it, innermost first."""

    def __init__(self, kind: Any, advice: str) -> None:
        super().__init__(advice)
        self.kind = kind
        self.path: list[str] = []

    def made(self, refusal: Refusal) -> Exception:
        return refusal(".".join(self.path), self.kind, str(self))


def taken_schema(
    schema: pa.Schema, refusal: Refusal, *, loose: bool = False, large: bool = False
) -> pa.Schema:
    """The schema in which Spark takes batches of ``schema``: names and metadata are the same.

    - ``loose``: as ``mapInArrow`` takes them, which minds neither the zone of a timestamp nor
      offsets of 64 bits. Everything else in Spark compares types with its own.
    - ``large``: text and bytes with offsets of 64 bits, as the session may have them.

    Raises what ``refusal`` makes.
    """

    def inner(field: pa.Field) -> pa.Field:
        found = _taken_field(field, inner, loose)
        if large and found.type in _LARGE:
            return found.with_type(_LARGE[found.type])
        return found

    try:
        return pa.schema([inner(field) for field in schema])
    except _NoTypeError as error:
        raise error.made(refusal) from None


def _taken_field(field: pa.Field, inner: _Inner, loose: bool) -> pa.Field:
    try:
        kind = field.type if loose and _is_loose(field.type) else _taken(field.type, inner)
    except _NoTypeError as error:
        error.path.insert(0, field.name)
        raise
    return pa.field(field.name, kind, field.nullable, field.metadata)


def _is_loose(kind: Any) -> bool:
    if _is.is_timestamp(kind):
        return bool(kind.unit == "us")
    return bool(_is.is_large_string(kind) or _is.is_large_binary(kind))


def _taken(kind: pa.DataType, inner: _Inner) -> pa.DataType:
    for row in ARROW_TYPES:
        if row.holds(kind):
            if row.taken is None:
                raise _NoTypeError(kind, row.note)
            return row.taken(kind, inner)
    raise _NoTypeError(kind, "give another type")


def spark_schema(
    schema: pa.Schema, refusal: Refusal, *, known: Iterable[DataType] = ()
) -> StructType:
    """What Spark calls the columns of ``schema``. Raises what ``refusal`` makes.

    ``known``: types among which user-defined ones are looked for.
    """
    from pyspark.sql.types import StructType

    told = {_json(kind): kind for each in known for kind in _user_defined(each)}
    return StructType([_spark_field(field, told) for field in taken_schema(schema, refusal)])


def _spark_field(field: pa.Field, known: Mapping[str, DataType]) -> StructField:
    from pyspark.sql.types import StructField

    return StructField(field.name, _spark_type(field, known), field.nullable, _column(field))


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
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import ArrayType, MapType, StructType

    kind = field.type
    metadata = field.metadata or {}
    user = known.get(metadata.get(JSON_TYPE, b"").decode(errors="replace"))
    if user is not None and _arrow_type(user, "UTC", False).equals(kind):
        return user
    if _is.is_struct(kind) and not _tagged(kind):
        return StructType([_spark_field(each, known) for each in kind])
    if _is.is_map(kind):
        key, item = (_spark_type(each, known) for each in (kind.key_field, kind.item_field))
        return MapType(key, item, kind.item_field.nullable)
    if _is.is_list(kind):
        inner = kind.value_field
        return ArrayType(_spark_type(inner, known), inner.nullable)
    found = from_arrow_type(kind, prefer_timestamp_ntz=True)
    return _named(metadata, found) or found


def _named(metadata: Mapping[bytes, bytes], found: DataType) -> DataType | None:
    """The type that metadata names, if a column of ``found`` can be it."""
    from pyspark.errors import PySparkException
    from pyspark.sql.types import DayTimeIntervalType, StringType, TimeType

    name = metadata.get(SQL_NAME, b"").decode(errors="replace").strip()
    if isinstance(found, TimeType):
        digits = precision_of(metadata)
        return None if digits is None else TimeType(digits)
    if isinstance(found, DayTimeIntervalType):
        bounds = _bounds(name)
        if bounds is None:
            return None
        numbers = [list(_BOUNDS).index(each) for each in bounds]
        return DayTimeIntervalType(numbers[0], numbers[-1])
    words = name.split()
    if isinstance(found, StringType) and [each.lower() for each in words[:2]] == [
        "string",
        "collate",
    ]:
        try:
            return StringType(" ".join(words[2:]))
        except PySparkException:  # no collation of this Spark
            return None
    return None


def _bounds(name: str) -> tuple[str, str] | None:
    """The first and the last field of "interval day to hour"."""
    words = name.lower().split()
    if words[:1] != ["interval"] or len(words) not in (2, 4) or words[2:3] not in ([], ["to"]):
        return None
    first, last = words[1], words[-1]
    order = list(_BOUNDS)
    if first not in order or last not in order or order.index(first) > order.index(last):
        return None
    return first, last


def bound_of(metadata: Mapping[bytes, bytes]) -> int:
    """Of how many microseconds the values of an interval are a multiple, by its metadata."""
    bounds = _bounds(metadata.get(SQL_NAME, b"").decode(errors="replace"))
    return 1 if bounds is None else _BOUNDS[bounds[1]]


def precision_of(metadata: Mapping[bytes, bytes]) -> int | None:
    """The digits of the fraction of a second in a column of times, 0 to 6, by its metadata."""
    text = metadata.get(PRECISION, b"")
    digits = int(text) if text.isdigit() and len(text) < 3 else None
    return digits if digits is not None and digits <= 6 else None


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
        except _NoTypeError as error:
            raise ConfigError(
                f"{what}: column {'.'.join(error.path)!r} is {error.kind}, and {error}"
            ) from None
    return pa.schema(fields)


def _arrow_field(field: StructField, zone: str, large: bool, calendar: bool) -> pa.Field:
    from pyspark.sql.pandas.types import to_arrow_metadata

    metadata = {**(to_arrow_metadata(field.metadata) or {}), **_tags(field.dataType)}
    try:
        kind = _arrow_type(field.dataType, zone, large, calendar)
    except _NoTypeError as error:
        error.path.insert(0, field.name)
        raise
    return pa.field(field.name, kind, field.nullable, metadata or None)


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
    if isinstance(kind, spark.CharType | spark.VarcharType):
        return pa.large_string() if large else pa.string()
    try:
        return to_arrow_type(kind, timezone=zone, prefers_large_types=large)
    except PySparkException:
        raise _NoTypeError(kind.simpleString(), _advice(kind)) from None


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
    if isinstance(kind, spark.TimeType) and kind.precision != 6:
        return {PRECISION: str(kind.precision).encode()}
    name = kind.simpleString() if isinstance(kind, spark.AtomicType) else ""
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
    if _is.is_struct(wanted) and _is.is_struct(got):
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
    found = _tagged(kind)
    if found not in ("geometry", "geography"):
        return found
    srid = int(kind.field("wkb").metadata[b"srid"])
    return f"{found}({'any' if srid == -1 else srid})"


def _fields(kind: Any) -> list[pa.Field]:
    return [kind.field(place) for place in range(kind.num_fields)] if _is.is_nested(kind) else []


def told_schema(got: pa.Schema, told: pa.Schema) -> pa.Schema:
    """``got``, with the metadata that ``told`` has beside, where both have the same columns."""
    if got.names != told.names:
        return got
    return pa.schema([_told_field(*pair) for pair in zip(got, told, strict=True)], got.metadata)


def _told_field(got: pa.Field, told: pa.Field) -> pa.Field:
    metadata = {**(told.metadata or {}), **(got.metadata or {})}
    kind = told.type if _is.is_nested(got.type) and told.type.equals(got.type) else got.type
    return pa.field(got.name, kind, got.nullable, metadata or None)


def retold(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """``batches`` with the metadata of ``schema``, which is that of ``told_schema``."""
    for batch in batches:
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def markdown() -> str:
    """Both tables, as docs/cookbook/types.md has them."""
    lines = ["| Arrow | Spark | without an error |", "|---|---|---|"]
    for row in ARROW_TYPES:
        spark = row.spark or "none"
        note = row.note or _ALWAYS
        lines.append(f"| {row.arrow} | {spark} | {note if row.spark else 'refused: ' + note} |")
    lines += ["", "| Spark | Arrow | |", "|---|---|---|"]
    for each in SPARK_TYPES:
        lines.append(f"| {each.spark} | {each.arrow or 'none'} | {each.note} |")
    return "\n".join(lines) + "\n"


def shown(kind: Any) -> str:
    """A type for errors, at most 200 characters of it."""
    return shorten(str(kind))
