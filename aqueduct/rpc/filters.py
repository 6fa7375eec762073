"""``Filter``: a condition on the rows of a table: JSON on the wire, Arrow where it is read.

A condition is true, false or unknown (null) for a row, as in SQL; rows are kept where it is true.
Values are ``bool``, ``int``, ``float``, ``Decimal``, ``str``, ``bytes``, ``date``, ``datetime``
(with a zone: a point in time; without: a wall clock's) and None.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import decimal
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.errors import BadCall, ConfigError

__all__ = ["OPERATIONS", "Filter", "all_of", "filters_from_json", "filters_to_json"]

COMPARISONS: Final = ("equal", "same", "less", "less_or_equal", "greater", "greater_or_equal")
TEXTS: Final = ("starts_with", "ends_with", "contains")
NULLS: Final = ("is_null", "is_not_null")
PARTS: Final = ("not", "and", "or")
OPERATIONS: Final = (*COMPARISONS, "in", *TEXTS, *NULLS, *PARTS)
"""``same`` is the equality that null and null have too; ``in`` has a tuple as its value."""

_DEPTH: Final = 32
_SIGNS: Final = dict(zip(COMPARISONS, ("=", "<=>", "<", "<=", ">", ">="), strict=True))
_NULL: Final = pa.nulls(1, pa.bool_())[0]  # pa.scalar would import pandas


@dataclass(frozen=True, slots=True)
class Filter:
    """One condition. Raises ConfigError for what is none."""

    operation: str
    """One of ``OPERATIONS``."""
    column: tuple[str, ...] = ()
    """The column's name; for a field inside a struct, the names that lead there. Empty for
    ``not``, ``and`` and ``or``."""
    value: Any = None
    """What the column is compared with; a tuple for ``in``; None where there is nothing."""
    parts: tuple[Filter, ...] = ()
    """Of ``not`` (one), ``and`` and ``or`` (one or more)."""

    def __post_init__(self) -> None:
        operation = self.operation
        if operation not in OPERATIONS:
            raise ConfigError(
                f"{operation!r} is no operation of a filter; there are {', '.join(OPERATIONS)}"
            )
        if operation in PARTS:
            if not self.parts or self.column or (operation == "not" and len(self.parts) != 1):
                raise ConfigError(f"a filter {operation!r} has parts and no column")
            return
        if self.parts or not self.column:
            raise ConfigError(f"a filter {operation!r} has a column and no parts")
        if operation == "in" and not isinstance(self.value, tuple):
            raise ConfigError("the value of a filter 'in' is a tuple")
        if operation in TEXTS and not isinstance(self.value, str):
            raise ConfigError(f"the value of a filter {operation!r} is text")

    def __str__(self) -> str:
        if self.operation == "not":
            return f"not ({self.parts[0]})"
        if self.operation in PARTS:
            return f" {self.operation} ".join(f"({part})" for part in self.parts)
        name = ".".join(self.column)
        if self.operation in NULLS:
            return f"{name} {self.operation.replace('_', ' ')}"
        return f"{name} {_SIGNS.get(self.operation, self.operation)} {self.value!r}"

    def columns(self) -> frozenset[str]:
        """The columns of the table that it looks at."""
        if self.parts:
            return frozenset().union(*(part.columns() for part in self.parts))
        return frozenset(self.column[:1])

    def to_json(self) -> dict[str, Any]:
        """The filter as JSON's values. Raises ConfigError if a value has no form there."""
        if self.parts:
            return {"op": self.operation, "of": [part.to_json() for part in self.parts]}
        document: dict[str, Any] = {"op": self.operation, "column": list(self.column)}
        if self.operation == "in":
            document["values"] = [_to_json(value) for value in self.value]
        elif self.operation not in NULLS:
            document["value"] = _to_json(self.value)
        return document

    @classmethod
    def from_json(cls, document: Any) -> Filter:
        """The filter that JSON's values hold. Raises BadCall if they hold none."""
        return _filter_of(document, _DEPTH)

    def expression(self, schema: pa.Schema) -> pc.Expression:
        """The same condition for Arrow, on rows of ``schema``.

        NaN equals itself and is above all other numbers, as in Spark. Raises ConfigError if Arrow
        cannot compare the column with the value.
        """
        made = self._expression(schema)
        try:
            # Some comparisons are refused only where there are rows.
            used = [schema.field(name) for name in sorted(self.columns())]
            row = [pa.nulls(1, field.type) for field in used]
            pa.Table.from_arrays(row, names=[field.name for field in used]).filter(made)
        except (pa.ArrowException, TypeError) as error:
            raise ConfigError(f"Arrow cannot tell {self}: {error}") from error
        return made

    def _expression(self, schema: pa.Schema) -> pc.Expression:
        if self.operation == "not":
            return ~self.parts[0]._expression(schema)
        if self.operation in PARTS:
            made, *others = [part._expression(schema) for part in self.parts]
            for other in others:
                made = made & other if self.operation == "and" else made | other
            return made
        kind = _type_of(self.column, schema)
        field = pc.field(*self.column)
        value = self.value
        try:
            if isinstance(value, datetime.datetime) and pa.types.is_timestamp(kind):
                if (value.tzinfo is None) != (kind.tz is None):
                    raise TypeError(f"of {kind} and {value!r} one has a zone")
                # Arrow compares points in time of one zone's name alone.
                value = pa.scalar(value, pa.timestamp("us", kind.tz))
            return _MAKERS[self.operation](field, value, pa.types.is_floating(kind))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"Arrow cannot tell {self}: {error}") from error


def all_of(filters: Iterable[Filter], schema: pa.Schema) -> pc.Expression | None:
    """All of them, for Arrow; None if there is none. Raises what ``Filter.expression`` raises."""
    made = None
    for each in filters:
        found = each.expression(schema)
        made = found if made is None else made & found
    return made


def filters_to_json(filters: Iterable[Filter]) -> list[dict[str, Any]]:
    """Raises ConfigError as ``Filter.to_json`` does."""
    return [each.to_json() for each in filters]


def filters_from_json(documents: Any, limit: int) -> tuple[Filter, ...]:
    """Raises BadCall if they are none, or more than ``limit``, counted as Tables.filters says."""
    if not isinstance(documents, list):
        raise BadCall(f"filters are a list, not {type(documents).__name__}")
    count = _count(documents, limit)
    if count > limit:
        raise BadCall(
            f"{count} filters came, above the limit of {limit} (Tables.filters); those inside "
            "others count, and the values of an 'in'"
        )
    return tuple(map(Filter.from_json, documents))


def _count(documents: list[Any], limit: int) -> int:
    """How many filters, and values of an ``in``; it is not looked further above ``limit``."""
    count, inside = 0, [documents]
    while inside and count <= limit:
        found = inside.pop()
        count += len(found)
        if count > limit:
            break
        for each in found:
            if isinstance(each, dict):
                inside += [each[name] for name in ("of", "values") if type(each.get(name)) is list]
    return count


def _filter_of(document: Any, depth: int) -> Filter:
    """The filter of ``document``, in which others stand less than ``depth`` deep."""
    if not isinstance(document, dict):
        raise BadCall(f"a filter is an object, not {type(document).__name__}")
    if depth < 1:
        raise BadCall(f"filters are nested more than {_DEPTH} deep")
    try:
        operation = document.get("op")
        if operation in PARTS:
            parts = _list(document, "of")
            return Filter(operation, parts=tuple(_filter_of(part, depth - 1) for part in parts))
        column = _list(document, "column")
        if not all(isinstance(name, str) for name in column):
            raise BadCall("the column of a filter is a list of names")
        value: Any = None
        if operation == "in":
            value = tuple(map(_from_json, _list(document, "values")))
        elif operation not in NULLS:
            value = _from_json(document.get("value"))
        return Filter(str(operation), tuple(column), value)
    except ConfigError as error:
        raise BadCall(str(error)) from error


def _list(document: dict[str, Any], name: str) -> list[Any]:
    found = document.get(name)
    if not isinstance(found, list):
        raise BadCall(f"a filter {document.get('op')!r} has a list {name!r}")
    return found


# Values: pairs of a type and text, so that nothing depends on what a JSON library makes of numbers.


def _timestamp(text: str) -> datetime.datetime:
    found = datetime.datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError("a timestamp has a zone")
    return found.astimezone(datetime.UTC)


def _wall_clock(text: str) -> datetime.datetime:
    found = datetime.datetime.fromisoformat(text)
    if found.tzinfo is not None:
        raise ValueError("a timestamp_ntz has no zone")
    return found


def _whole(text: str) -> int:
    if len(text) > 40:
        raise ValueError("a whole number has at most 40 characters")
    return int(text)


def _decimal(text: str) -> decimal.Decimal:
    found = decimal.Decimal(text)
    if len(text) > 100 or not found.is_finite():
        raise ValueError("a decimal is finite, of at most 100 characters")
    return found


_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text],
    "int": _whole,
    "float": float,
    "decimal": _decimal,
    "string": str,
    "binary": lambda text: base64.b64decode(text, validate=True),
    "date": datetime.date.fromisoformat,
    "timestamp": _timestamp,
    "timestamp_ntz": _wall_clock,
}


def _to_json(value: Any) -> list[str]:
    if value is None:
        return ["null", ""]
    if isinstance(value, bool):
        return ["bool", "true" if value else "false"]
    if isinstance(value, int):
        return ["int", str(value)]
    if isinstance(value, float):
        return ["float", repr(value)]
    if isinstance(value, decimal.Decimal) and value.is_finite():
        return ["decimal", str(value)]
    if isinstance(value, str):
        return ["string", value]
    if isinstance(value, bytes | bytearray):
        return ["binary", base64.b64encode(value).decode()]
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            return ["timestamp_ntz", value.isoformat()]
        return ["timestamp", value.astimezone(datetime.UTC).isoformat()]
    if isinstance(value, datetime.date):
        return ["date", value.isoformat()]
    raise ConfigError(f"a filter cannot have {value!r}, of the type {type(value).__name__}")


def _from_json(document: Any) -> Any:
    if (
        not isinstance(document, list)
        or len(document) != 2
        or not all(isinstance(part, str) for part in document)
        or document[0] not in _READERS
    ):
        raise BadCall(f"a value is a pair of a type and text; types are {', '.join(_READERS)}")
    kind, text = document
    try:
        return _READERS[kind](text)
    except (ValueError, KeyError, ArithmeticError, binascii.Error) as error:
        raise BadCall(f"{text[:100]!r} is no {kind}: {error}") from error


# Expressions. A float column has NaN, of which Arrow thinks otherwise than Spark.


def _type_of(column: tuple[str, ...], schema: pa.Schema) -> pa.DataType:
    name, *inner = column
    if schema.names.count(name) != 1:
        raise ConfigError(f"the table has no one column {name!r}; it has {schema.names}")
    found = schema.field(name).type
    for step in inner:
        place = found.get_field_index(step) if pa.types.is_struct(found) else -1
        if place < 0:
            raise ConfigError(f"column {'.'.join(column)!r}: {found} has no field {step!r}")
        found = found.field(place).type
    return found


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _valid(field: pc.Expression, made: pc.Expression | bool) -> pc.Expression:
    """``made`` where the field has a value, else unknown."""
    return pc.if_else(field.is_valid(), made, _NULL)


def _equal(field: pc.Expression, value: Any, floating: bool) -> pc.Expression:
    if value is None:
        return pc.scalar(_NULL)
    if floating and _is_nan(value):
        return pc.is_nan(field)
    return field == value


def _same(field: pc.Expression, value: Any, floating: bool) -> pc.Expression:
    if value is None:
        return field.is_null()
    return _equal(field, value, floating) & field.is_valid()


def _less(field: pc.Expression, value: Any, floating: bool) -> pc.Expression:
    if value is None:
        return pc.scalar(_NULL)
    if floating and _is_nan(value):
        return ~pc.is_nan(field)
    return field < value


def _greater(field: pc.Expression, value: Any, floating: bool) -> pc.Expression:
    if value is None:
        return pc.scalar(_NULL)
    if not floating:
        return field > value
    if _is_nan(value):
        return _valid(field, False)
    return (field > value) | pc.is_nan(field)


def _less_or_equal(field: pc.Expression, value: Any, floating: bool) -> pc.Expression:
    return ~_greater(field, value, floating)


def _greater_or_equal(field: pc.Expression, value: Any, floating: bool) -> pc.Expression:
    return ~_less(field, value, floating)


def _in(field: pc.Expression, values: tuple[Any, ...], floating: bool) -> pc.Expression:
    wanted = [value for value in values if value is not None]
    plain = [value for value in wanted if not (floating and _is_nan(value))]
    made = field.isin(pa.array(plain)) if plain else pc.scalar(False)
    if len(plain) < len(wanted):
        made = made | pc.is_nan(field)
    if floating and 0 in plain:
        made = made | (field == 0.0)  # to ``isin``, 0.0 and -0.0 are two values
    # A null among the values makes every row that has none of the others unknown.
    return _valid(field, pc.if_else(made, True, _NULL) if len(wanted) < len(values) else made)


_MAKERS: Final[dict[str, Callable[[pc.Expression, Any, bool], pc.Expression]]] = {
    "equal": _equal,
    "same": _same,
    "less": _less,
    "less_or_equal": _less_or_equal,
    "greater": _greater,
    "greater_or_equal": _greater_or_equal,
    "in": _in,
    "starts_with": lambda field, value, _: pc.starts_with(field, value),
    "ends_with": lambda field, value, _: pc.ends_with(field, value),
    "contains": lambda field, value, _: pc.match_substring(field, value),
    "is_null": lambda field, *_: field.is_null(),
    "is_not_null": lambda field, *_: field.is_valid(),
}
