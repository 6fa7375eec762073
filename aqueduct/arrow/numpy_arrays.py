"""Columns as numpy arrays, and arrays as columns; without a copy where Arrow's memory allows.

| column | array | copied |
|---|---|---|
| whole numbers, floats | of the same numbers | no |
| timestamps, durations | ``datetime64`` (UTC), ``timedelta64`` of the same unit | no |
| fixed-shape tensors | n-d, the first dimension is the row | no |
| lists, if all rows are as long | 2-d, or n-d where lists hold lists | no |
| dates | ``datetime64`` | yes |
| bools | bools | yes |
| text, binary | objects: ``str``, ``bytes`` | yes |

Arrays without a copy are read-only, and keep the batch's memory as long as they live. Dictionaries
count as what they stand for. Lists without rows make an array of the shape (0, 0), since only lists
of a fixed size tell their length. Other types have no array. An array has no place for a null: see
``arrays_of``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from aqueduct.errors import ConfigError
from aqueduct.escaping import shown

__all__ = ["arrays_of", "batch_of", "check_schema"]

_HALF_EXACT: Final = 1 << 11
"""Whole numbers up to this one are all values of float16, too."""

_VIEWS: Final = (
    kinds.is_integer,
    kinds.is_floating,
    kinds.is_timestamp,
    kinds.is_duration,
)
_COPIES: Final = (
    kinds.is_boolean,
    kinds.is_date,
    kinds.is_string,
    kinds.is_large_string,
    kinds.is_string_view,
    kinds.is_binary,
    kinds.is_large_binary,
    kinds.is_binary_view,
    kinds.is_fixed_size_binary,
)
_TYPES: Final = (
    "numbers, bools, dates, timestamps, durations, text, binary, tensors, lists of numbers"
)


def check_schema(schema: pa.Schema, where: str) -> None:
    """Raises ConfigError, which begins with ``where``, for a column that has no array."""
    for field in schema:
        if not _has_array(field.type):
            raise ConfigError(
                f"{where}: column {field.name!r} has the type {field.type}, which has no numpy "
                f"array; there are those of {_TYPES}"
            )
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise ConfigError(f"{where}: there are several columns {twice[0]!r}, and a dict has one")


def arrays_of(batch: pa.RecordBatch, *, nan: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """The columns of a batch, whose schema has passed ``check_schema``.

    Raises ValueError, which names the column, for nulls. ``nan``: those of floats become NaN.
    """
    return {
        name: _array_of(column, name, nan)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


def batch_of(result: Any, schema: pa.Schema) -> pa.RecordBatch:
    """The batch of this schema that a dict of arrays makes; or one array, for one column.

    Whatever numpy takes for an array will do. It is cast to the type of its column if that keeps
    its values. A float loses digits if its column has a smaller float, and nothing else does.
    Masked values become nulls. Raises ValueError and TypeError, which name the column.
    """
    if isinstance(result, pa.RecordBatch):
        raise TypeError("a RecordBatch was returned; a dict of numpy arrays is wanted")
    if not isinstance(result, Mapping):
        if len(schema) != 1 or result is None:
            keys = ", ".join(map(repr, schema.names))
            raise TypeError(
                f"a {type(result).__name__} was returned; a dict of arrays is wanted, with the "
                f"keys {keys}" + (", or the one array" if len(schema) == 1 else "")
            )
        result = {schema.names[0]: result}
    missing = [name for name in schema.names if name not in result]
    more = [name for name in result if name not in schema.names]
    if missing or more:
        wrong = f"it lacks {missing[0]!r}" if missing else f"it has {shown(more[0])}"
        keys = ", ".join(map(repr, schema.names))
        raise ValueError(f"the dict that was returned must have the keys {keys}; {wrong}")
    columns = {field.name: _column_of(result[field.name], field) for field in schema}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        (first, rows), *others = lengths.items()
        name, count = next(each for each in others if each[1] != rows)
        raise ValueError(
            f"the arrays that were returned differ in rows: {first!r} has {rows}, {name!r} {count}"
        )
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


# ------------------------------------------------------------------ columns to arrays


def _has_array(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.FixedShapeTensorType):
        return _is_view(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _has_array(kind.storage_type)
    if kinds.is_dictionary(kind):
        return _has_array(kind.value_type)
    if _is_list(kind):
        return _has_array(kind.value_type) and not kinds.is_dictionary(kind.value_type)
    return _is_view(kind) or any(fits(kind) for fits in _COPIES)


def _is_view(kind: pa.DataType) -> bool:
    return any(fits(kind) for fits in _VIEWS)


def _is_list(kind: pa.DataType) -> bool:
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def _array_of(column: pa.Array, name: str, nan: bool) -> np.ndarray[Any, Any]:
    kind = column.type
    if column.null_count:
        if nan and kinds.is_floating(kind):
            filled: np.ndarray[Any, Any] = column.to_numpy(zero_copy_only=False)
            return filled  # of nulls it makes NaN
        raise ValueError(
            f"column {name!r} ({kind}) has {column.null_count} nulls, for which a numpy array has "
            "no place; fill them before, for example by pyarrow.compute.fill_null"
        )
    if isinstance(kind, pa.FixedShapeTensorType):
        values = _array_of(column.storage.flatten(), name, nan)
        shape, order = kind.shape, kind.permutation
        found = values.reshape(len(column), *shape)
        return found if order is None else found.transpose(0, *(place + 1 for place in order))
    if isinstance(kind, pa.BaseExtensionType):
        return _array_of(column.storage, name, nan)
    if kinds.is_dictionary(kind):
        return _array_of(column.dictionary_decode(), name, nan)
    if _is_list(kind):
        return _rows_of(column, name, nan)
    whole: np.ndarray[Any, Any] = column.to_numpy(zero_copy_only=_is_view(kind))
    return whole


def _rows_of(column: pa.Array, name: str, nan: bool) -> np.ndarray[Any, Any]:
    """Lists that are all as long, as rows of one array."""
    rows = len(column)
    if kinds.is_fixed_size_list(column.type):
        length = column.type.list_size
    elif not rows:
        length = 0
    else:
        lengths = np.diff(column.offsets.to_numpy())
        length = int(lengths[0])
        other = np.flatnonzero(lengths != length)
        if len(other):
            raise ValueError(
                f"column {name!r} ({column.type}) has lists of {length} values and, in row "
                f"{other[0]}, of {lengths[other[0]]}; the rows of a numpy array are as long as "
                "each other"
            )
    values = _array_of(column.flatten(), name, nan)
    return values.reshape(rows, length, *values.shape[1:])


# ------------------------------------------------------------------ arrays to columns


def _column_of(given: Any, field: pa.Field) -> pa.Array:
    try:
        array = np.ma.asanyarray(given) if np.ma.isMaskedArray(given) else np.asarray(given)
    except ValueError as error:  # lists of several lengths
        raise ValueError(f"{field.name!r} is no array: {error}") from error
    if not array.ndim:
        raise ValueError(
            f"{field.name!r} is {shown(given)}, a single value; an array with a value for each "
            "row is wanted"
        )
    try:
        column = _cast(array, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{field.name!r}, an array of {array.dtype} of the shape {array.shape}, is none for "
            f"a column of {field.type}: {error}"
        ) from error
    if column.null_count and not field.nullable:
        raise ValueError(f"{field.name!r} has masked values, and its column takes no nulls")
    return column


def _cast(array: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.ExtensionArray.from_storage(kind, _tensors(array, kind))
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _cast(array, kind.storage_type))
    if kinds.is_dictionary(kind):
        return _cast(array, kind.value_type).dictionary_encode().cast(kind)
    if _is_list(kind):
        return _lists(array, kind)
    if array.ndim > 1:
        raise ValueError("it has a value for each row")
    return _flat(array, kind)


def _tensors(array: np.ndarray[Any, Any], kind: pa.FixedShapeTensorType) -> pa.Array:
    order = list(range(len(kind.shape))) if kind.permutation is None else list(kind.permutation)
    wanted = tuple(kind.shape[place] for place in order)
    if array.shape[1:] != wanted:
        raise ValueError(f"the shape (rows, {', '.join(map(str, wanted))}) is wanted")
    if kind.permutation is not None:
        array = array.transpose(0, *(int(place) + 1 for place in np.argsort(order)))
    return _lists(array.reshape(len(array), kind.storage_type.list_size), kind.storage_type)


def _lists(array: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    if array.ndim < 2:
        raise ValueError("an array of two dimensions or more is wanted")
    rows, length = array.shape[:2]
    values = _cast(array.reshape(rows * length, *array.shape[2:]), kind.value_type)
    if values.null_count and not kind.value_field.nullable:
        raise ValueError("it has masked values, and the lists of the column take no nulls")
    if kinds.is_fixed_size_list(kind):
        if length != kind.list_size:
            raise ValueError(f"{kind.list_size} values in each row are wanted")
        return pa.FixedSizeListArray.from_arrays(values, type=kind)
    large = kinds.is_large_list(kind)
    offsets = pa.array(np.arange(rows + 1) * length, pa.int64() if large else pa.int32())
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, values, type=kind)


def _flat(array: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    mask = None
    if isinstance(array, np.ma.MaskedArray):
        mask, array = np.ma.getmaskarray(array), array.data
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    made = _objects(array, kind, mask) if array.dtype.kind == "O" else pa.array(array, mask=mask)
    if made.type == kind:
        return made
    if not _is_alike(made.type, kind):
        raise ValueError(f"{made.type} is not cast to {kind}")
    cast = made.cast(kind)
    _check_kept(made, cast)
    return cast


def _objects(array: np.ndarray[Any, Any], kind: pa.DataType, mask: Any) -> pa.Array:
    """Objects as a column of a type of their own, where Arrow would cut values to fit ``kind``."""
    whole = kinds.is_integer(kind) or kinds.is_decimal(kind)
    time = kinds.is_timestamp(kind) or kinds.is_duration(kind)
    if not (whole or time or kinds.is_floating(kind) or kinds.is_date(kind)):
        return pa.array(array, kind, mask=mask)
    if whole and all(each is None or isinstance(each, int | np.integer) for each in array):
        return pa.array(array, kind, mask=mask)  # some fit uint64 alone
    made = pa.array(array, mask=mask)
    if kinds.is_null(made.type):
        return made.cast(kind)
    if time and _is_alike(made.type, kind):
        zone = {"tz": made.type.tz} if kinds.is_timestamp(made.type) else {}
        finest = pa.timestamp if kinds.is_timestamp(made.type) else pa.duration
        try:
            return pa.array(array, finest("ns", **zone), mask=mask)  # those of pandas have them
        except (pa.ArrowException, OverflowError):
            return made  # before 1677 or after 2262
    return made


def _check_kept(made: pa.Array, cast: pa.Array) -> None:
    """Raises ValueError where a cast of Arrow changes values without a word."""
    one, other = made.type, cast.type
    if kinds.is_floating(other):
        before: Any = made.to_numpy(zero_copy_only=False) if kinds.is_floating(one) else 0.0
        after = cast.to_numpy(zero_copy_only=False)
        if np.any(np.isinf(after) & np.isfinite(before)):
            raise ValueError("a value is too large")
        if kinds.is_float16(other) and kinds.is_integer(one):
            ends = pc.min_max(made).as_py()
            if ends["min"] is not None and max(-ends["min"], ends["max"]) > _HALF_EXACT:
                raise ValueError(f"whole numbers up to {_HALF_EXACT} alone are those of halffloat")
        return
    cut = kinds.is_date(other) or (kinds.is_decimal(other) and kinds.is_floating(one))
    if cut and pc.all(pc.equal(cast.cast(one), made)).as_py() is False:
        what = "a time of day" if kinds.is_date(other) else "digits"
        raise ValueError(f"a value has {what} for which the column has no place")


def _is_alike(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether a cast asks for the same thing in another form."""

    def is_number(kind: pa.DataType) -> bool:
        return bool(kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_decimal(kind))

    def is_time(kind: pa.DataType) -> bool:
        return bool(kinds.is_timestamp(kind) or kinds.is_date(kind))

    def is_text(kind: pa.DataType) -> bool:
        return bool(
            kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)
        )

    def is_binary(kind: pa.DataType) -> bool:
        return bool(
            kinds.is_binary(kind)
            or kinds.is_large_binary(kind)
            or kinds.is_binary_view(kind)
            or kinds.is_fixed_size_binary(kind)
        )

    families = (is_number, is_time, is_text, is_binary, kinds.is_duration)
    return any(family(one) and family(other) for family in families)
