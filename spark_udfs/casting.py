"""Batches of one schema made into batches of another by safe casts: no value changes unnoticed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from aqueduct.arrow.schema import check, difference, shorten
from aqueduct.errors import SchemaMismatch

__all__ = ["Casting"]


class Casting:
    """The way from one schema to another: columns by name, types by safe casts."""

    def __init__(self, wanted: pa.Schema, got: pa.Schema, *, where: str) -> None:
        """``where`` begins the text of errors.

        Columns are found by name, in any order and, where that is clear, in any case. Raises
        SchemaMismatch for columns that are missing or too many, and where no cast leads.
        """
        self._where = where
        self._wanted = wanted
        self._places = _places(wanted, got, where)
        fields = []
        for field, place in zip(wanted, self._places, strict=True):
            came = got.field(place)
            fields.append(pa.field(field.name, self._type(field, came), field.nullable))
        self.schema = pa.schema(fields)
        """What comes out: ``wanted``, with the names of time zones and inner fields as they came.
        """
        self._casts = [
            not field.type.equals(got.field(place).type)
            for field, place in zip(self.schema, self._places, strict=True)
        ]

    def all(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """``batches``, each by ``one``."""
        for number, batch in enumerate(batches):
            yield self.one(batch, number)

    def one(self, batch: pa.RecordBatch, number: int) -> pa.RecordBatch:
        """One batch. Raises SchemaMismatch that names the first value that cannot be cast."""
        arrays = []
        for field, place, casts in zip(self.schema, self._places, self._casts, strict=True):
            array = batch.column(place)
            if casts:
                array = self._cast(array, field, number)
            if not field.nullable and array.null_count:
                raise self._null(array, field, number)
            if casts and _null_inside(array):
                raise self._mismatch(
                    f"column {field.name!r}: wanted {field.type}, and batch {number} holds a null "
                    "inside where none may be",
                    field,
                    batch.column(place).type,
                )
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _type(self, wanted: pa.Field, got: pa.Field) -> pa.DataType:
        """The type that a column will have. Raises SchemaMismatch where no cast leads."""
        mine, theirs = (pa.schema([pa.field(wanted.name, field.type)]) for field in (wanted, got))
        if difference(mine, theirs) is None:
            return got.type
        try:
            pa.nulls(0, got.type).cast(wanted.type)
        except pa.ArrowException:
            check(mine, theirs, where=self._where)  # says that there is no cast
        return wanted.type

    def _cast(self, array: pa.Array, field: pa.Field, number: int) -> pa.Array:
        try:
            return array.cast(field.type)
        except pa.ArrowException as error:
            row = _first_bad(array, field.type)
            value = shorten(repr(array[row].as_py()), 80)
            raise self._mismatch(
                f"column {field.name!r}: wanted {field.type}, got {array.type}, and the value "
                f"{value} in row {row} of batch {number} cannot be cast: {error}",
                field,
                array.type,
            ) from error

    def _null(self, array: pa.Array, field: pa.Field, number: int) -> SchemaMismatch:
        row = array.is_null().index(True).as_py()
        return self._mismatch(
            f"column {field.name!r}: wanted {field.type} not null, got {array.type}, and row "
            f"{row} of batch {number} is null",
            field,
            array.type,
        )

    def _mismatch(self, text: str, field: pa.Field, got: pa.DataType) -> SchemaMismatch:
        return SchemaMismatch(
            f"{self._where}: {text}", column=field.name, wanted=str(field.type), got=str(got)
        )


def _places(wanted: pa.Schema, got: pa.Schema, where: str) -> list[int]:
    """Where the columns of ``wanted`` are in ``got``, all of which must be wanted."""
    names = list(got.names)
    lower = [name.lower() for name in names]
    found = []
    for field in wanted:
        if names.count(field.name) == 1:
            found.append(names.index(field.name))
        elif lower.count(field.name.lower()) == 1:
            found.append(lower.index(field.name.lower()))
        else:
            check(wanted, got, where=where)  # says what is missing, or there twice
            return list(range(len(wanted)))  # the same names twice, in the same order
    if len(set(found)) != len(names):
        check(wanted, got, where=where)
    return found


def _null_inside(array: pa.Array) -> bool:
    """Whether a value in a list or a map is null whose field says that it is not.

    Arrow looks at the fields of structs when it casts, and not at those.
    """
    kind = array.type
    inner: list[tuple[pa.Field, pa.Array]] = []
    if pa.types.is_struct(kind):
        whole = array.filter(array.is_valid()) if array.null_count else array
        inner = list(zip(kind, whole.flatten(), strict=True))
    elif pa.types.is_map(kind):
        whole = array.filter(array.is_valid()) if array.null_count else array
        inner = [(kind.key_field, whole.keys), (kind.item_field, whole.items)]
    elif pa.types.is_nested(kind) and not pa.types.is_union(kind):
        inner = [(kind.value_field, array.flatten())]
    return any(
        (not field.nullable and values.null_count > 0) or _null_inside(values)
        for field, values in inner
    )


def _first_bad(array: pa.Array, kind: pa.DataType) -> int:
    """The first row that cannot be cast; one is known to be there."""
    start, count = 0, len(array)
    while count > 1:
        half = count // 2
        try:
            array.slice(start, half).cast(kind)
        except pa.ArrowException:
            count = half
        else:
            start, count = start + half, count - half
    return start
