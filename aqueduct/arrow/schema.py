"""Schemas compared at the door: which column differs, and the cast that would do.

What counts: the columns' names and order, their types, and null values where none are wanted. What
does not: metadata, the name of a time zone, the names of the inner fields of lists and maps. A
batch of the one schema can then be read as the other without touching its buffers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

from aqueduct.arrow.cast_ways import misnamed, obstacle
from aqueduct.arrow.ipc import is_wide, serialize_schema
from aqueduct.errors import SchemaMismatch
from aqueduct.escaping import near_miss

__all__ = [
    "Difference",
    "check",
    "check_expected",
    "difference",
    "equal_schemas",
    "no_cast",
    "shorten",
]

_SPARK_TYPES: Final = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date32[day]": "date",
    "timestamp[us]": "timestamp_ntz",
    "timestamp[us, tz]": "timestamp",
}
_LARGE: Final = {"string": "large_string", "binary": "large_binary"}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two schemas."""

    problem: Literal["missing", "extra", "order", "type", "nullable"]
    """What is wrong with the column."""
    column: str
    """Its name; fields inside a nested type follow with dots."""
    wanted: str
    """What was wanted; empty for an extra column."""
    got: str
    """What came; empty for a missing column."""
    remedy: str
    """What to do about it, with pyarrow."""
    in_spark: str = ""
    """The same in Spark, for its users; empty if there is nothing else to do."""

    def __str__(self) -> str:
        spark = f", or in Spark {self.in_spark}" if self.in_spark else ""
        return f"{self.what}; {self.remedy}{spark}"

    @property
    def what(self) -> str:
        """What is wrong, without what to do about it."""
        what = {
            "missing": f"is missing: wanted {self.wanted}, and no such column came",
            "extra": f"is not wanted: {self.got} came",
            "order": f"is out of order: wanted {self.wanted}, got {self.got}",
            "type": f"has another type: wanted {self.wanted}, got {self.got}",
            "nullable": f"may hold nulls: wanted {self.wanted}, got {self.got}",
        }[self.problem]
        return f"column {self.column!r} {what}"

    def mismatch(self, text: str, peer: str = "", handler: str = "") -> SchemaMismatch:
        """The error with this ``text``."""
        said = {"column": self.column, "wanted": self.wanted, "got": self.got}
        return SchemaMismatch(text, peer=peer, handler=handler, **said)


def check(
    wanted: pa.Schema,
    got: pa.Schema,
    *,
    where: str = "",
    peer: str = "",
    handler: str = "",
    fault: str = "",
) -> None:
    """Raises SchemaMismatch if a batch of ``got`` cannot be taken where ``wanted`` is declared.

    ``where`` begins the text, for example "the input of handler 'score'". ``fault`` is for what a
    handler made: it says what the handler did wrong. Its caller, who reads the text too, cannot
    mend it, so there is no advice for Spark then.
    """
    found = difference(wanted, got)
    if found is not None:
        text = f"{found.what}; {fault}{found.remedy}" if fault else str(found)
        raise found.mismatch(f"{where}: {text}" if where else text, peer, handler)


def check_expected(
    expected: pa.Schema, declared: pa.Schema, *, peer: str = "", handler: str = ""
) -> None:
    """Raises SchemaMismatch if a handler declares another output than its caller expects.

    Then neither has made a mistake in a batch: the caller is told what to expect instead.
    """
    found = difference(expected, declared)
    if found is not None:
        answers = shorten(", ".join(f"{field.name} {_text(field)}" for field in declared))
        raise found.mismatch(
            f"the output of handler {handler!r}: {found.what}; output_schema= (in Spark schema=) "
            f"expects otherwise than the handler declares ({answers}): expect that, and cast the "
            "answers (in Spark by cast=True)",
            peer,
            handler,
        )


def difference(wanted: pa.Schema, got: pa.Schema) -> Difference | None:
    """The first difference that matters, or None."""
    if equal_schemas(got, wanted):
        return None
    if wanted.names != got.names:
        return _names(wanted, got)
    for mine, theirs in zip(wanted, got, strict=True):
        found = _field(mine.name, mine, theirs)
        if found is not None:
            return found
    return None


def no_cast(wanted: pa.DataType) -> str:
    """What to do where there is no cast to ``wanted``."""
    return f"there is no cast: build it as {_short(wanted)}, or change what is declared"


def equal_schemas(got: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether they are equal but for metadata; False for some very wide ones that are.

    Arrow holds all threads up while it compares, so wide ones are compared by their messages, with
    the metadata. ``wanted`` is the one that is used again and again.
    """
    if got is wanted:
        return True
    if is_wide(wanted):
        return len(got) == len(wanted) and serialize_schema(got) == serialize_schema(wanted)
    return bool(got.equals(wanted))


def shorten(text: str, limit: int = 200) -> str:
    """``text`` with its middle left out, if it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def _names(wanted: pa.Schema, got: pa.Schema) -> Difference:
    lacking = Counter(wanted.names) - Counter(got.names)
    surplus = Counter(got.names) - Counter(wanted.names)
    came = shorten(", ".join(map(repr, got.names))) or "none"
    for field in wanted:
        if field.name in lacking:
            remedy, spark = f"the columns that came are {came}", ""
            alike = near_miss(field.name, surplus, cutoff=0.75)
            if alike is not None:
                remedy = f"did you mean it by {alike!r}? then rename it: batch.rename_columns"
                spark = f".withColumnRenamed({alike!r}, {field.name!r})"
            return Difference("missing", field.name, _text(field), "", remedy, spark)
    columns = shorten(repr(wanted.names))
    for field in got:
        if field.name in surplus:
            remedy, spark = f"leave it out: batch.select({columns})", f".select({columns})"
            if field.name in wanted.names:
                came, right = got.names.count(field.name), wanted.names.count(field.name)
                remedy = f"{came} columns of that name came, and {right} is wanted: rename or drop"
                spark = ""
            return Difference("extra", field.name, "", _text(field), remedy, spark)
    place = next(i for i, name in enumerate(wanted.names) if name != got.names[i])
    return Difference(
        "order",
        wanted.names[place],
        f"it at position {place}",
        f"{got.names[place]!r} there",
        f"put them in order: batch.select({columns})",
        f".select({columns})",
    )


def _field(path: str, wanted: pa.Field, got: pa.Field) -> Difference | None:
    found = _type(path, wanted.type, got.type)
    if found is None and got.nullable and not wanted.nullable:
        remedy = "declare it nullable, or if it holds no null: batch.cast(schema)"
        spark = "" if "." in path else "exchange(..., cast=True)"
        got_text = f"{_text(got)} (nullable)"
        return Difference("nullable", path, _text(wanted), got_text, remedy, spark)
    return found


def _type(path: str, wanted: pa.DataType, got: pa.DataType) -> Difference | None:
    if wanted.equals(got):
        return None
    if not _same_node(wanted, got):
        return Difference("type", path, _short(wanted), _short(got), *_remedy(path, wanted, got))
    for name, mine, theirs in _inner(wanted, got):
        found = _field(f"{path}.{name}", mine, theirs)
        if found is not None:
            return found
    return None


def _same_node(wanted: pa.DataType, got: pa.DataType) -> bool:
    """Whether two types agree, but for the fields inside."""
    types = pa.types
    if wanted.id != got.id:
        return False
    if types.is_timestamp(wanted):
        # Spark declares UTC and sends the session's zone: only having one counts.
        return wanted.unit == got.unit and (wanted.tz is None) == (got.tz is None)
    if isinstance(wanted, pa.BaseExtensionType):
        if wanted.extension_name != got.extension_name:
            return False
        return bool(wanted.equals(got))
    if types.is_fixed_size_list(wanted):
        return bool(wanted.list_size == got.list_size)
    if types.is_struct(wanted):
        return [field.name for field in wanted] == [field.name for field in got]
    if types.is_union(wanted):
        names = [wanted.field(i).name for i in range(wanted.num_fields)]
        return (
            wanted.mode == got.mode
            and wanted.type_codes == got.type_codes
            and names == [got.field(i).name for i in range(got.num_fields)]
        )
    if types.is_dictionary(wanted):
        return bool(wanted.ordered == got.ordered)
    if types.is_map(wanted):
        return bool(wanted.keys_sorted == got.keys_sorted)
    return bool(types.is_nested(wanted) or types.is_run_end_encoded(wanted))


def _inner(wanted: pa.DataType, got: pa.DataType) -> list[tuple[str, pa.Field, pa.Field]]:
    """The pairs of fields inside two types that agree as nodes."""
    types = pa.types
    if types.is_map(wanted):
        return [
            ("key", wanted.key_field, got.key_field),
            ("value", wanted.item_field, got.item_field),
        ]
    if types.is_dictionary(wanted):
        return [
            ("indices", pa.field("", wanted.index_type), pa.field("", got.index_type)),
            ("dictionary", pa.field("", wanted.value_type), pa.field("", got.value_type)),
        ]
    if types.is_run_end_encoded(wanted):
        return [
            ("run_ends", pa.field("", wanted.run_end_type), pa.field("", got.run_end_type)),
            ("values", pa.field("", wanted.value_type), pa.field("", got.value_type)),
        ]
    if types.is_struct(wanted) or types.is_union(wanted):
        pairs = ((wanted.field(i), got.field(i)) for i in range(wanted.num_fields))
        return [(mine.name, mine, theirs) for mine, theirs in pairs]
    if types.is_nested(wanted):
        return [("item", wanted.value_field, got.value_field)]
    return []


def _remedy(path: str, wanted: pa.DataType, got: pa.DataType) -> tuple[str, str]:
    """What to do about another type, with pyarrow and in Spark."""
    if isinstance(got, pa.BaseExtensionType) and got.storage_type.equals(wanted):
        return f"send its storage: batch.column({path!r}).storage", ""
    if isinstance(wanted, pa.BaseExtensionType) and wanted.storage_type.equals(got):
        return f"wrap it: pa.ExtensionArray.from_storage({_short(wanted)}, column)", ""
    if obstacle(wanted, got) is not None:
        return f"{_fields(wanted, got)}{no_cast(wanted)}", ""
    text = f"{_fields(wanted, got)}cast to {_short(wanted)}"
    if not _arrow_casts(wanted, got):
        return text, "exchange(..., cast=True)"
    text += ": batch.cast(schema)"
    names = str(wanted), str(got)
    if _LARGE.get(names[0]) == names[1]:
        return text, "set spark.sql.execution.arrow.useLargeVarTypes=false"
    if _LARGE.get(names[1]) == names[0]:
        return text, "set spark.sql.execution.arrow.useLargeVarTypes=true"
    spark = _spark_type(wanted)
    if spark and "." not in path:
        return text, f"col({path!r}).cast({spark!r})"
    return text, "exchange(..., cast=True)"


def _fields(wanted: pa.DataType, got: pa.DataType) -> str:
    """Which fields of a struct make the difference."""
    if not (pa.types.is_struct(wanted) and pa.types.is_struct(got)):
        return ""
    return (shorten(misnamed(wanted, got)) or "its fields are in another order") + "; "


def _arrow_casts(wanted: pa.DataType, got: pa.DataType) -> bool:
    """Whether Arrow's own cast may be named. Of list views it takes other values."""
    if any(
        pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind) for kind in (wanted, got)
    ):
        return False
    try:
        pa.nulls(0, got).cast(wanted)
    except pa.ArrowException:
        return False
    return True


def _spark_type(wanted: pa.DataType) -> str:
    if pa.types.is_decimal128(wanted):
        return f"decimal({wanted.precision},{wanted.scale})"
    if pa.types.is_timestamp(wanted) and wanted.tz is not None:
        return _SPARK_TYPES.get(f"timestamp[{wanted.unit}, tz]", "")
    return _SPARK_TYPES.get(str(wanted), "")


def _text(field: pa.Field) -> str:
    return _short(field.type) + ("" if field.nullable else " not null")


def _short(kind: pa.DataType) -> str:
    return shorten(str(kind))
