"""Batches converted to the types that Spark takes: without loss, or an error with the row.

Columns that have these types already pass as they are, without a copy. ``spark_udfs.spark_types``
says which type becomes which.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.casts import Unfit, cast, first_bad, first_null, runs_of_rows, text_of_value
from aqueduct.arrow.schema import shorten
from aqueduct.errors import SchemaMismatch
from spark_udfs.spark_types import bound_of, precision_of, shown

__all__ = ["Fitting"]

_is: Final = pa.types
_DAY: Final = 86_400_000_000_000
"""Nanoseconds."""
_LOSSES: Final = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    pa.ArrowCapacityError,
    OverflowError,
)
"""What pyarrow raises for a value that does not fit. A lack of memory is another matter."""


class Fitting:
    """Converts batches of one schema to another one that Spark takes, column by column."""

    def __init__(
        self, wanted: pa.Schema, got: pa.Schema, *, where: str = "", rounding: bool = False
    ) -> None:
        """``where`` begins the text of errors. Both schemas have the same number of columns.

        ``rounding``: values that would be lost may become the nearest ones.
        """
        self.schema = wanted
        self._rounding = rounding
        self._where = f"{where}: " if where else ""
        pairs = zip(wanted, got, strict=True)
        self._converts = [not _as_it_is(mine, theirs.type) for mine, theirs in pairs]
        self.nothing: bool = not any(self._converts) and wanted.equals(got, check_metadata=True)
        """Whether batches pass as they are."""

    def one(self, batch: pa.RecordBatch, number: int) -> pa.RecordBatch:
        """Batch ``number`` converted. Raises SchemaMismatch that names column, row and value."""
        if self.nothing:
            return batch
        arrays = list(batch.columns)
        for place, converts in enumerate(self._converts):
            if converts:
                arrays[place] = self._column(arrays[place], self.schema.field(place), number)
        if not arrays:  # only its rows are counted
            return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, array: pa.Array, field: pa.Field, number: int) -> pa.Array:
        try:
            return self._whole(_convert(array, field), field, number)
        except _LOSSES as error:
            rounded = _rounded(array, field) if self._rounding else None
            if rounded is not None:
                return self._whole(rounded, field, number)
            row = first_bad(array, lambda part: _converts(part, field))
            value, remedy = shorten(text_of_value(array[row]), 80), ""
            if not self._rounding and _rounded(array.slice(row, 1), field) is not None:
                remedy = '; cast="round" allows it to be rounded'
            raise SchemaMismatch(
                f"{self._where}column {field.name!r}: {shown(array.type)} does not become "
                f"{shown(field.type)}, which Spark takes, without a loss: the value {value} in "
                f"row {row} of batch {number}: {error}{remedy}",
                column=field.name,
                wanted=str(field.type),
                got=str(array.type),
            ) from error

    def _whole(self, made: pa.Array, field: pa.Field, number: int) -> pa.Array:
        """``made``, without nulls if there must be none: runs may have some, Spark's arrays not."""
        row = -1 if field.nullable else first_null(made)
        if row < 0:
            return made
        raise SchemaMismatch(
            f"{self._where}column {field.name!r} is declared {shown(field.type)} not null, and row "
            f"{row} of batch {number} is null; fill it, or declare the column nullable",
            column=field.name,
            wanted=f"{field.type} not null",
            got="null",
        )


def _convert(array: pa.Array, field: pa.Field) -> pa.Array:
    """``array`` as values of ``field``. Raises one of _LOSSES for a value that is lost."""
    kind, given = field.type, array.type
    if _as_it_is(field, given):
        return array
    if isinstance(given, pa.BaseExtensionType):
        if given.extension_name == "arrow.bool8":
            return pc.not_equal(array.storage, 0)
        return _convert(array.storage, field)
    if _is.is_dictionary(given):
        return _looked_up(array.dictionary, array.indices, field)
    if _is.is_run_end_encoded(given):
        return _looked_up(array.values, runs_of_rows(array), field)
    if _is.is_struct(kind):
        return _struct(array, kind)
    if _is.is_map(kind):
        return _map(array, kind)
    if _is.is_nested(kind):
        return _list(array, kind)
    made = array if given.equals(kind) else array.cast(kind)
    _check(made, field)
    return made


def _rounded(array: pa.Array, field: pa.Field) -> pa.Array | None:
    """``array`` with the nearest values that the field can have; None if more would be lost."""
    try:
        return _convert(cast(array, field.type, rounding=True), field)
    except (Unfit, *_LOSSES):
        return None


def _as_it_is(field: pa.Field, given: pa.DataType) -> bool:
    """Whether there is nothing to convert or to check in a column of ``given``."""
    kind = field.type
    if not given.equals(kind):
        return False
    if _is.is_nested(kind):
        inner = (kind.field(place) for place in range(kind.num_fields))
        return all(_as_it_is(each, each.type) for each in inner)
    return not _is_checked(field)


def _is_checked(field: pa.Field) -> bool:
    if _is.is_time(field.type):
        return True
    return bool(_is.is_duration(field.type)) and bound_of(field.metadata or {}) > 1


def _check(array: pa.Array, field: pa.Field) -> None:
    """Raises ArrowInvalid for a value that Arrow's type allows and Spark's does not."""
    metadata = field.metadata or {}
    if _is.is_time(field.type):
        given = precision_of(metadata)
        digits = 6 if given is None else given
        values = array.view(pa.int64())
        least, most = pc.min_max(values).values()
        if least.as_py() is not None and not 0 <= least.as_py() <= most.as_py() < _DAY:
            raise pa.ArrowInvalid("it is no time of a day")
        _check_multiple(values, 10 ** (9 - digits), f"a time({digits}) has fewer digits")
    elif _is.is_duration(field.type):
        unit = bound_of(metadata)
        _check_multiple(array.view(pa.int64()), unit, "the interval's last field is larger")


def _check_multiple(values: pa.Array, unit: int, text: str) -> None:
    if unit == 1:
        return
    whole = pc.multiply(pc.divide(values, unit), unit)
    if pc.all(pc.equal(whole, values)).as_py() is False:
        raise pa.ArrowInvalid(text)


def _looked_up(values: pa.Array, places: pa.Array, field: pa.Field) -> pa.Array:
    """The values at ``places``, converted."""
    try:
        found = values.take(places)
    except pa.ArrowNotImplementedError:  # of views and runs: their conversions lose nothing
        return _convert(values, field).take(places)
    return _convert(found, field)


def _struct(array: Any, kind: Any) -> pa.Array:
    names = [field.name for field in array.type]
    # The fields of a null row do not count.
    columns = array.flatten()
    valid = array.is_valid() if array.null_count else None
    made = []
    for place, field in enumerate(kind):
        column = columns[place if names[place] == field.name else names.index(field.name)]
        column = _convert(column, field)
        if not field.nullable and column.null_count:
            bad = column.is_null() if valid is None else pc.and_(column.is_null(), valid)
            if pc.any(bad).as_py():
                raise pa.ArrowInvalid(f"its field {field.name!r} is null, and must not be")
        made.append(column)
    return pa.StructArray.from_arrays(made, fields=list(kind), mask=array.is_null())


def _list(array: Any, kind: Any) -> pa.Array:
    field = kind.value_field
    # The elements of all rows that are not null, in the order of the rows, wherever they lie.
    values = _convert(array.flatten(), field)
    if not field.nullable and values.null_count:
        raise pa.ArrowInvalid("an element is null, and must not be")
    offsets = _offsets(pc.list_value_length(array))
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=mask)


def _map(array: Any, kind: Any) -> pa.Array:
    mask = array.is_null() if array.null_count else None
    spans = pc.add(array.offsets, 0)  # of a slice they are one, which is not taken with a mask
    lists = [pa.ListArray.from_arrays(spans, each, mask=mask) for each in (array.keys, array.items)]
    columns = []
    for each, field in zip(lists, (kind.key_field, kind.item_field), strict=True):
        column = _convert(each.flatten(), field)
        if not field.nullable and column.null_count:
            raise pa.ArrowInvalid("a key or a value is null, and must not be")
        columns.append(column)
    offsets = _offsets(pc.list_value_length(lists[0]))
    return pa.MapArray.from_arrays(offsets, *columns, type=kind, mask=mask)


def _offsets(lengths: pa.Array) -> pa.Array:
    """Where rows of these lengths begin, one after the other, and where the last one ends."""
    ends = pc.cumulative_sum(pc.fill_null(lengths, 0).cast(pa.int64()))
    return pa.concat_arrays([pa.array([0], pa.int64()), ends]).cast(pa.int32())


def _converts(array: pa.Array, field: pa.Field) -> bool:
    """Whether every value of ``array`` can be converted."""
    try:
        _convert(array, field)
    except _LOSSES:
        return False
    return True
