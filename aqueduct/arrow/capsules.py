"""Tables of other libraries, by Arrow's PyCapsule interface: Polars, DuckDB, pandas, nanoarrow.

A stream (``__arrow_c_stream__``) is read lazily, batch by batch, and an array
(``__arrow_c_array__``) is one batch. Their buffers are shared and not copied.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import pyarrow as pa

from aqueduct.arrow.ipc import first_line
from aqueduct.arrow.joining import joined
from aqueduct.errors import ConfigError, LocalProtocolError, WrongType

__all__ = [
    "ArrowArrayTable",
    "ArrowStreamTable",
    "as_batch",
    "as_batches",
    "fitted",
    "has_batch",
    "has_stream",
    "open_reader",
    "to_pandas",
    "to_polars",
    "whole",
]


class ArrowStreamTable(Protocol):
    """A table of any library that can be read as a stream of Arrow."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """A PyCapsule of an ArrowArrayStream."""


class ArrowArrayTable(Protocol):
    """A batch of any library that can be read as an array of Arrow."""

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """PyCapsules of an ArrowSchema and an ArrowArray."""


_FAMILIES: Final = (
    frozenset({pa.string(), pa.large_string(), pa.string_view()}),
    frozenset({pa.binary(), pa.large_binary(), pa.binary_view()}),
)
_IN_MEMORY: Final = (pa.RecordBatch, pa.Table)


def has_stream(given: Any) -> bool:
    """Whether ``given`` has batches that ``open_reader`` reads, and that may take their time."""
    return hasattr(given, "__arrow_c_stream__") and not isinstance(given, _IN_MEMORY)


def has_batch(given: Any) -> bool:
    """Whether ``as_batch`` makes a batch of ``given``, as far as one can say by its look."""
    return hasattr(given, "__arrow_c_stream__") or hasattr(given, "__arrow_c_array__")


def open_reader(given: Any, *, where: str) -> pa.RecordBatchReader:
    """A reader of the batches of a stream. No batch is read, but the other library may work long.

    ``where`` begins errors. Raises WrongType if the stream has no columns, and what the other
    library raises.
    """
    if isinstance(given, pa.RecordBatchReader):
        return given
    # Errors of what is not a C stream keep their types.
    reader = given.to_reader() if hasattr(given, "to_reader") else None
    if isinstance(reader, pa.RecordBatchReader):
        return reader
    try:
        return pa.RecordBatchReader.from_stream(given)
    except pa.ArrowInvalid as error:
        raise _not_a_table(given, where, error) from error


def as_batch(given: Any, *, where: str) -> pa.RecordBatch:
    """All rows of ``given`` as one batch: a batch, a Table, or what ``has_batch`` is true of.

    Several batches are joined, which copies them. ``where`` begins errors. Raises WrongType for
    what is none of these, LocalProtocolError where batches cannot be joined, and what the other
    library raises.
    """
    if isinstance(given, pa.RecordBatch):
        return given
    if isinstance(given, pa.Table):
        return whole(given.schema, given.to_batches(), where=where)
    if hasattr(given, "__arrow_c_stream__"):
        reader = open_reader(given, where=where)
        try:
            return whole(reader.schema, list(reader), where=where)
        finally:
            if reader is not given:
                reader.close()
    if not hasattr(given, "__arrow_c_array__"):
        raise WrongType(f"{where}: {_wanted(given)}")
    try:
        return pa.record_batch(given)
    except (pa.ArrowInvalid, ValueError, TypeError) as error:
        raise _not_a_table(given, where, error) from error


def as_batches(given: Any, schema: pa.Schema | None, *, where: str) -> list[pa.RecordBatch]:
    """All batches of what ``has_batch`` is true of, at least one, in the layout of ``schema``.

    ``where`` begins errors. Raises WrongType, and what the other library raises.
    """
    if has_stream(given):
        reader = open_reader(given, where=where)
        try:
            found = list(reader) or [whole(reader.schema, [], where=where)]
        finally:
            if reader is not given:
                reader.close()
    else:
        found = [as_batch(given, where=where)]
    return found if schema is None else [fitted(batch, schema) for batch in found]


def whole(schema: pa.Schema, batches: list[pa.RecordBatch], *, where: str) -> pa.RecordBatch:
    """All of ``batches`` as one; without rows if there is none. Raises LocalProtocolError."""
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.record_batch([pa.nulls(0, field.type) for field in schema], schema=schema)
    try:
        return joined(batches)
    except pa.ArrowException as error:
        raise LocalProtocolError(
            f"{where}: its {len(batches)} batches cannot be put together ({error})"
        ) from error


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch of another library in the layout of ``schema``, if that alone makes a difference.

    Each library has a layout of its own for text, bytes and lists: with views, with offsets of 32
    or of 64 bits. What differs otherwise is left as it is.
    """
    found = batch.schema
    if found.equals(schema) or found.names != schema.names:
        return batch
    if not all(_alike(one.type, other.type) for one, other in zip(found, schema, strict=True)):
        return batch
    try:
        columns = [
            column if field.type == column.type else column.cast(field.type)
            for column, field in zip(batch.columns, schema, strict=True)
        ]
    except pa.ArrowException:
        return batch
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _alike(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types have the same values, in whatever layout."""
    types = pa.types
    if one == other:
        return True
    for family in _FAMILIES:
        if one in family:
            return other in family
    if _is_list(one) and _is_list(other):
        return _alike(one.value_type, other.value_type)
    if types.is_dictionary(one) and types.is_dictionary(other):
        return _alike(one.value_type, other.value_type)
    if types.is_struct(one) and types.is_struct(other):
        fields, others = list(one), list(other)
        return [each.name for each in fields] == [each.name for each in others] and all(
            _alike(each.type, wanted.type) for each, wanted in zip(fields, others, strict=True)
        )
    return False


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        test(kind)
        for test in (
            types.is_list,
            types.is_large_list,
            types.is_list_view,
            types.is_large_list_view,
        )
    )


def _wanted(given: Any) -> str:
    """What an error says of ``given``, which is no batch."""
    return f"a pyarrow.RecordBatch is wanted, got {type(given).__name__}"


def to_pandas(table: pa.Table, options: dict[str, Any]) -> Any:
    """A DataFrame of pandas. Raises ConfigError without pandas.

    ``options``: those of ``pyarrow.Table.to_pandas``.
    """
    try:
        return table.to_pandas(**options)
    except ImportError as error:
        raise _missing("to_pandas", "pandas", error) from error


def to_polars(table: pa.Table) -> Any:
    """A DataFrame of Polars. Raises ConfigError without Polars."""
    try:
        import polars
    except ImportError as error:
        raise _missing("to_polars", "polars", error) from error
    return polars.from_arrow(table, rechunk=False)


def _missing(method: str, extra: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{method} needs the package {extra} ({error}): pip install 'aqueduct-arrow[{extra}]'"
    )


def _not_a_table(given: Any, where: str, error: Exception) -> WrongType:
    """The error for a stream or array that does not become batches."""
    text, kind = first_line(error), type(given).__name__
    if "non-struct" in text:
        return WrongType(
            f"{where}: {kind} is one column, and batches have named columns: make a data frame of "
            f"it, such as series.to_frame() ({text})"
        )
    return WrongType(f"{where}: Arrow makes no batches of {kind}: {text}")
