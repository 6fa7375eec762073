"""Batches of one schema made into batches of another by casts that change no value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from aqueduct.arrow.cast_ways import Obstacle, obstacle, places_by_name
from aqueduct.arrow.casts import Unfit, cast, first_null
from aqueduct.arrow.ipc import first_line
from aqueduct.arrow.schema import check, difference, no_cast, shorten
from aqueduct.config import DEFAULT
from aqueduct.errors import SchemaMismatch

__all__ = ["Cast", "Casting", "cast_column", "casts"]

Cast: TypeAlias = bool | Literal["round"]
"""The option ``cast``: whether values are cast, and whether rounding is allowed."""

_VALUE: Final = 80
"""Characters of a value in an error."""


def casts(given: Any) -> Cast:
    """Reads the option ``cast``: true, false, or ``round``; raises ValueError for anything else."""
    if isinstance(given, bool):
        return given
    word = given.strip().lower() if isinstance(given, str) else None
    if word == "round":
        return "round"
    if word in ("true", "on"):
        return True
    if word in ("false", "off"):
        return False
    raise ValueError


class Casting:
    """The way from one schema to another: columns by name, types by casts by value."""

    def __init__(
        self,
        wanted: pa.Schema,
        got: pa.Schema,
        *,
        where: str,
        rounding: bool = False,
        limit: int = DEFAULT.calls.batch_limit,
    ) -> None:
        """``where`` begins the text of errors; ``rounding`` and ``limit`` are those of ``cast``.

        Columns are found by name, in any order and, where that is clear, in any case. Raises
        SchemaMismatch for columns that are missing or too many, and where no cast leads.
        """
        self._where = where
        self._rounding, self._limit = rounding, limit
        self._places = _places(wanted, got, where)
        fields = []
        for field, place in zip(wanted, self._places, strict=True):
            came = got.field(place)
            metadata = field.metadata or came.metadata
            fields.append(pa.field(field.name, self._type(field, came), field.nullable, metadata))
        self.schema = pa.schema(fields)
        """What comes out: ``wanted``, with the names of time zones and inner fields as they came.
        """

    def all(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """``batches``, each by ``one``."""
        for number, batch in enumerate(batches):
            yield self.one(batch, number)

    def one(self, batch: pa.RecordBatch, number: int) -> pa.RecordBatch:
        """One batch. Raises SchemaMismatch that names the first value that cannot be cast."""
        arrays = [
            cast_column(
                batch.column(place),
                field,
                where=self._where,
                rounding=self._rounding,
                limit=self._limit,
                batch=f"batch {number}",
            )
            for field, place in zip(self.schema, self._places, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _type(self, wanted: pa.Field, got: pa.Field) -> pa.DataType:
        """The type that a column will have. Raises SchemaMismatch where no cast leads."""
        if wanted.type.equals(got.type):
            return wanted.type  # its fields may have metadata
        mine, theirs = (pa.schema([pa.field(wanted.name, field.type)]) for field in (wanted, got))
        if difference(mine, theirs) is None:
            return got.type
        found = obstacle(wanted.type, got.type)
        if found is not None:
            raise _no_way(wanted.name, found, self._where)
        return wanted.type


def cast_column(
    array: pa.Array,
    field: pa.Field,
    *,
    where: str,
    rounding: bool,
    batch: str,
    limit: int = DEFAULT.calls.batch_limit,
) -> pa.Array:
    """A column as one of the type of ``field``, equal by value.

    Raises SchemaMismatch that names column, row and value, and ``batch``.
    """
    try:
        made = cast(array, field.type, rounding=rounding, limit=limit)
    except Unfit as error:
        raise _misfit(field.name, error, where, batch) from error
    except pa.ArrowException as error:
        raise SchemaMismatch(
            f"{where}: column {field.name!r}: wanted {field.type}, got {array.type}, and {batch} "
            f"cannot be cast: {first_line(error)}",
            column=field.name,
            wanted=str(field.type),
            got=str(array.type),
        ) from error
    row = -1 if field.nullable else first_null(made)
    if row >= 0:
        raise SchemaMismatch(
            f"{where}: column {field.name!r}: wanted {field.type} not null, got {array.type}, and "
            f"row {row} of {batch} is null",
            column=field.name,
            wanted=str(field.type),
            got=str(array.type),
        )
    return made


def _places(wanted: pa.Schema, got: pa.Schema, where: str) -> list[int]:
    """Where the columns of ``wanted`` are in ``got``, all of which must be wanted."""
    found = places_by_name(wanted.names, got.names)
    if found is None:
        check(wanted, got, where=where)  # says what is missing, too many, or there twice
        raise AssertionError("unreachable")
    return found


def _no_way(column: str, found: Obstacle, where: str) -> SchemaMismatch:
    name = ".".join((column, *found.path))
    wanted, got = (shorten(str(kind)) for kind in (found.wanted, found.got))
    why = f"{shorten(found.why)}; " if found.why else ""
    return SchemaMismatch(
        f"{where}: column {name!r} has another type: wanted {wanted}, got {got}; "
        f"{why}{no_cast(found.wanted)}",
        column=name,
        wanted=wanted,
        got=got,
    )


def _misfit(name: str, error: Unfit, where: str, batch: str) -> SchemaMismatch:
    column = ".".join((name, *error.path))
    if error.row is None:
        text = f", got {error.got}, and {batch} cannot be cast: {error.why}"
    elif error.value == "None":  # a null fits everywhere, but where none may be
        text = f" not null, got {error.got}, and row {error.row} of {batch} holds a null"
    else:
        text = (
            f", got {error.got}, and the value {shorten(error.value, _VALUE)} in row {error.row} "
            f"of {batch} cannot be cast: {error.why}"
        )
    return SchemaMismatch(
        f"{where}: column {column!r}: wanted {error.wanted}{text}",
        column=column,
        wanted=str(error.wanted),
        got=str(error.got),
    )
