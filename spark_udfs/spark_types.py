"""The one table of types for Spark: from each Arrow type to Spark's, and back.

``exchange`` and its relatives, the Data Source and docs/cookbook/types.md use this table.
``spark_udfs.functions.fitting`` converts values by it.

Arrow has no type for some types of Spark: collations, bounds of intervals, user-defined types. The
field's metadata names these, under ``SQL_NAME`` or ``JSON_TYPE``. Batches from Spark are sent with
this metadata, and a table or an answer may declare it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import pyarrow as pa

from aqueduct.arrow.schema import shorten
from aqueduct.errors import ConfigError

__all__ = [
    "ARROW_TYPES",
    "BOUNDS",
    "JSON_TYPE",
    "PRECISION",
    "SPARK_TYPES",
    "SQL_NAME",
    "ArrowRow",
    "NoTypeError",
    "Refusal",
    "SparkRow",
    "bound_of",
    "bounds_of",
    "check_names",
    "markdown",
    "nullable_schema",
    "precision_of",
    "retold",
    "shown",
    "tagged",
    "taken_schema",
    "told_schema",
]

SQL_NAME: Final = b"Spark:DataType:SqlName"
"""The key of a field's metadata that names its Spark type: ``string collate UTF8_LCASE``."""
JSON_TYPE: Final = b"Spark:DataType:JsonType"
"""The key that describes a user-defined type. It counts only for types that the sent frame has:
making such a type from text would import the module that the text names."""
PRECISION: Final = b"SPARK::time::precision"
"""Spark's own key: the digits of a second's fraction, in a column of times."""
_DIGITS: Final = 38
_MONTHS: Final = 21
"""The number of Arrow's interval of months. pyarrow can hold such a type, and has no name for it.
"""
_LARGE: Final = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
BOUNDS: Final[Mapping[str, int]] = MappingProxyType(
    {"day": 86_400_000_000, "hour": 3_600_000_000, "minute": 60_000_000, "second": 1}
)
"""Microseconds of the last field of an interval; a second has a fraction."""


Refusal: TypeAlias = Callable[[str, Any, str], Exception]
"""Makes the error for a column that Spark has no type for. It gets the column's name (names of
inner fields follow after dots), the Arrow type there, and what to do."""
_Inner: TypeAlias = Callable[[pa.Field], pa.Field]
"""Converts a field inside a type."""


@dataclass(frozen=True, slots=True)
class ArrowRow:
    """One row of the table: some Arrow types, and the Spark type that they become."""

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
    """One row of the other table: a Spark type, and the Arrow type that services get."""

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
    found = tagged(kind)
    if found == "variant":
        tag = pa.field("metadata", pa.binary(), False, {b"variant": b"true"})
        return pa.struct([pa.field("value", pa.binary(), False), tag])
    if found:
        wkb = kind.field("wkb").with_type(pa.binary()).with_nullable(False)
        return pa.struct([pa.field("srid", pa.int32(), False), wkb])
    twice = _twice([field.name for field in kind])
    if twice is not None:
        raise NoTypeError(kind, f"rename one of its fields {twice!r}: each has its own name there")
    return pa.struct([inner(field) for field in kind])


def _twice(names: list[str]) -> str | None:
    """The first name that is there twice; None: each is there once."""
    return next((name for name in names if names.count(name) > 1), None)


def check_names(schema: pa.Schema, where: str) -> None:
    """Raises ConfigError for two columns of one name: Spark's reader of Arrow loses one of them."""
    name = _twice(schema.names)
    if name is not None:
        raise ConfigError(
            f"{where} has {schema.names.count(name)} columns {name!r}, and Spark takes one column "
            "of a name; rename the others"
        )


def tagged(kind: Any) -> str:
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
        "to Spark's frames they are string, with the length in the column's metadata, which is "
        "kept; Spark takes no answer that is declared as char or varchar",
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


class NoTypeError(Exception):
    """Spark has no type for a field. ``path`` is filled by those around it, innermost first."""

    def __init__(self, kind: Any, advice: str) -> None:
        super().__init__(advice)
        self.kind = kind
        self.path: list[str] = []

    def made(self, refusal: Refusal) -> Exception:
        """What ``refusal`` makes of it."""
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
    except NoTypeError as error:
        raise error.made(refusal) from None


def _taken_field(field: pa.Field, inner: _Inner, loose: bool) -> pa.Field:
    try:
        kind = field.type if loose and _is_loose(field.type) else _taken(field.type, inner)
    except NoTypeError as error:
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
                raise NoTypeError(kind, row.note)
            return row.taken(kind, inner)
    raise NoTypeError(kind, "give another type")


def told_schema(got: pa.Schema, told: pa.Schema) -> pa.Schema:
    """``got`` with the metadata that ``told`` has, where both have the same columns."""
    if got.names != told.names:
        return got
    return pa.schema([_told_field(*pair) for pair in zip(got, told, strict=True)], got.metadata)


def _told_field(got: pa.Field, told: pa.Field) -> pa.Field:
    metadata = {**(got.metadata or {}), **(told.metadata or {})}
    kind = told.type if _is.is_nested(got.type) and told.type.equals(got.type) else got.type
    return pa.field(got.name, kind, got.nullable, metadata or None)


def nullable_schema(schema: pa.Schema) -> pa.Schema:
    """``schema`` with nulls everywhere: Spark's optimizer changes where there may be some."""
    return pa.schema([_nullable(field) for field in schema])


def _nullable(field: pa.Field) -> pa.Field:
    kind = field.type
    if _is.is_struct(kind):
        kind = pa.struct([_nullable(each) for each in kind])
    elif _is.is_map(kind):
        kind = pa.map_(
            kind.key_field.with_type(_nullable(kind.key_field).type), _nullable(kind.item_field)
        )
    elif _is.is_list(kind):
        kind = pa.list_(_nullable(kind.value_field))
    return pa.field(field.name, kind, True, field.metadata)


def retold(
    batches: Iterator[pa.RecordBatch], schema: pa.Schema, rows: pa.Schema | None
) -> tuple[Iterator[pa.RecordBatch], pa.Schema]:
    """``batches`` and their ``schema``, with the metadata of ``rows`` (see ``told_schema``)."""
    told = schema if rows is None else told_schema(schema, rows)
    if told.equals(schema, check_metadata=True):
        return batches, schema
    return (pa.RecordBatch.from_arrays(batch.columns, schema=told) for batch in batches), told


def bounds_of(name: str) -> tuple[str, str] | None:
    """The first and the last field of "interval day to hour"."""
    words = name.lower().split()
    if words[:1] != ["interval"] or len(words) not in (2, 4) or words[2:3] not in ([], ["to"]):
        return None
    first, last = words[1], words[-1]
    order = list(BOUNDS)
    if first not in order or last not in order or order.index(first) > order.index(last):
        return None
    return first, last


def bound_of(metadata: Mapping[bytes, bytes]) -> int:
    """Of how many microseconds the values of an interval are a multiple, by its metadata."""
    bounds = bounds_of(metadata.get(SQL_NAME, b"").decode(errors="replace"))
    return 1 if bounds is None else BOUNDS[bounds[1]]


def precision_of(metadata: Mapping[bytes, bytes]) -> int | None:
    """The digits of the fraction of a second in a column of times, 0 to 6, by its metadata."""
    text = metadata.get(PRECISION, b"")
    digits = int(text) if text.isdigit() and len(text) < 3 else None
    return digits if digits is not None and digits <= 6 else None


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
