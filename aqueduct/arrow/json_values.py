"""Arrays of the values of JSON, by the type that is wanted."""

from __future__ import annotations

import binascii
import json
import re
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from itertools import accumulate
from math import inf
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.ipc import first_line
from aqueduct.arrow.json_texts import DAY, DIGITS, FIRST, LAST, MONTHS, UNITS, inside_of
from aqueduct.escaping import near_miss

__all__ = ["MINUS_ZERO", "Allowance", "TooMuch", "array_of", "shown_value", "unknown_name"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}\Z").match
_MOMENT: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)"
    r"(?:[T ]((?:[01]\d|2[0-3]):\d\d)(?:(:\d\d)(?:[.,](\d{1,9}))?)?(Z|[+-]\d\d:?\d\d)?)?\Z",
    re.ASCII,
).match
_CLOCK: Final = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?\Z", re.ASCII).match
_SECONDS: Final = re.compile(r"(-?)PT(\d{1,19})(?:\.(\d{1,9}))?S\Z", re.ASCII).match
_WHOLE: Final = re.compile(r"-?\d{1,20}\Z", re.ASCII).match
_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?\Z", re.ASCII).match
_NUMBER_MOST: Final = 200
_WHOLE_MOST: Final = 10**_NUMBER_MOST
_NOTHING: Final = Decimal(0)
_INFINITE: Final = {
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "NaN": float("nan"),
}


class _MinusZero(int):
    """The number ``-0`` of JSON: 0 as a whole number, and -0.0 as a float."""

    def __repr__(self) -> str:
        return "-0"


MINUS_ZERO: Final = _MinusZero()


class TooMuch(Exception):
    """The rows make more values or bytes than are allowed."""


class Allowance:
    """How many values and bytes the columns of one request may still take.

    A row without fields has no values in JSON, and one or many in the columns.
    """

    __slots__ = ("_bytes", "_charge", "_kept", "_limits", "_values")

    def __init__(
        self, values: int, size: int, charge: Callable[[int], object] | None = None
    ) -> None:
        """``charge`` is told how many bytes were made, and may raise why there is no room."""
        self._charge = charge
        self._values = values
        self._bytes = size
        self._kept = values, size
        self._limits = values, size

    def spend(self, values: int, size: int = 0) -> None:
        """Takes some of it, before they are made. Raises TooMuch."""
        self._values -= values
        self._bytes -= size
        self.check()

    def keep(self, size: int) -> None:
        """The values that were taken stay so, and were made of ``size`` bytes. Raises TooMuch."""
        self._bytes = self._kept[1] - size
        self._kept = self._values, self._bytes
        self.check()
        if self._charge is not None:
            self._charge(size)

    def rewind(self) -> None:
        """Gives back what was taken since ``keep``."""
        self._values, self._bytes = self._kept

    def check(self, values: int = 0) -> None:
        """Raises TooMuch unless so many values more may be taken."""
        if self._values < values:
            raise TooMuch(
                "with what the rows lack, the columns have more values than the limit of "
                f"{self._limits[0]} (ReactiveSocket.json_values)"
            )
        if self._bytes < 0:
            raise TooMuch(
                "the columns have more bytes than the limit of "
                f"{self._limits[1]} (Calls.batch_limit)"
            )


def _is_whole(value: Any) -> bool:
    return type(value) is int or value is MINUS_ZERO


def unknown_name(row: dict[str, Any], names: Sequence[str]) -> str:
    """What is wrong with an object that has a name beside ``names``."""
    name = next(name for name in row if name not in names)
    alike = near_miss(name, names)
    hint = f"did you mean {alike!r}?" if alike else f"there are {', '.join(map(repr, names[:20]))}"
    return f"{name!r:.80} is none of the names; {hint}"


def shown_value(value: Any) -> str:
    """A value in an error."""
    text = json.dumps(value) if not isinstance(value, (dict, list)) else type(value).__name__
    return {"dict": "an object", "list": "an array"}.get(text, text[:80])


def array_of(values: list[Any], field: pa.Field, allowance: Allowance) -> pa.Array:
    """Raises what ``_attempt`` catches, and TooMuch."""
    kind = field.type
    allowance.spend(len(values))
    if not field.nullable and None in values:
        if pa.types.is_floating(inside_of(kind)):
            values = [float("nan") if value is None else value for value in values]
        elif not _only_null(kind):
            name = f" {field.name!r}" if field.name else ""
            raise ValueError(f"the field{name} is null or missing, and is declared not null")
    return _of_type(values, kind, allowance)


def _only_null(kind: pa.DataType) -> bool:
    return bool(pa.types.is_null(inside_of(kind)))


def _of_type(values: list[Any], kind: pa.DataType, allowance: Allowance) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        storage = _of_type(values, kind.storage_type, allowance)
        return pa.ExtensionArray.from_storage(kind, storage)
    if pa.types.is_dictionary(kind):
        return _dictionary(values, kind, allowance)
    if pa.types.is_run_end_encoded(kind):
        ends = pa.array(range(1, len(values) + 1), kind.run_end_type)
        runs = _of_type(values, kind.value_type, allowance)
        return pa.RunEndEncodedArray.from_arrays(ends, runs, kind)
    if pa.types.is_struct(kind):
        return _struct(values, kind, allowance)
    if pa.types.is_union(kind):
        return _union(values, kind, allowance)
    if pa.types.is_map(kind):
        return _map(values, kind, allowance)
    if pa.types.is_nested(kind):
        return _list(values, kind, allowance)
    if pa.types.is_fixed_size_binary(kind):
        allowance.spend(0, len(values) * kind.byte_width)  # a null has as many as a value
    for fits, read in _READERS:
        if fits(kind):
            return read(values, kind)
    raise ValueError(f"the type {kind} has no form in JSON")


def _wanted(value: Any, what: str) -> ValueError:
    return ValueError(f"{what} is wanted, and {shown_value(value)} came")


def _checked(values: list[Any], kinds: tuple[type, ...], what: str) -> None:
    for value in values:
        if value is not None and type(value) not in kinds:
            raise _wanted(value, what)


def _each(values: list[Any], read: Callable[[Any], Any]) -> list[Any]:
    return [None if value is None else read(value) for value in values]


def _nulls(values: list[Any], kind: pa.DataType) -> pa.Array:
    for value in values:
        if value is not None:
            raise _wanted(value, "null")
    return pa.nulls(len(values))


def _booleans(values: list[Any], kind: pa.DataType) -> pa.Array:
    _checked(values, (bool,), "true or false")
    return pa.array(values, kind)


def _integers(values: list[Any], kind: pa.DataType) -> pa.Array:
    _checked(values, (int, _MinusZero), "a whole number")
    return _numbers(values, kind)


def _numbers(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowException):
        value = next((value for value in values if value is not None), None)
        raise ValueError(f"{value} is out of the range of {kind}") from None


def _wide_integers(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> int:
        if _is_whole(value):
            return int(value)
        if type(value) is not str or not _WHOLE(value):
            raise _wanted(value, 'a whole number, as text such as "12",')
        return int(value)

    return _numbers(_each(values, read), kind)


def _floats(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> float:
        if type(value) is float:
            if value in (inf, -inf):  # which JSON has as a text alone
                raise ValueError(f"a number is out of the range of {kind}")
            return value
        if _is_whole(value):
            return -0.0 if value is MINUS_ZERO else float(value)
        if type(value) is str and value in _INFINITE:
            return _INFINITE[value]
        raise _wanted(value, "a number")

    numbers = _each(values, read)
    if pa.types.is_float16(kind):
        return _halves(numbers, kind)
    made = pa.array(numbers, kind)
    if kind == pa.float32():
        for wide, narrow in zip(numbers, pc.is_inf(made).to_pylist(), strict=True):
            if narrow and wide not in _INFINITE.values():
                raise ValueError(f"{wide} is out of the range of {kind}")
    return made


def _halves(numbers: list[float | None], kind: pa.DataType) -> pa.Array:
    data = struct.pack(f"<{len(numbers)}e", *(0.0 if each is None else each for each in numbers))
    validity = None
    if None in numbers:
        validity = pa.array([each is not None for each in numbers]).buffers()[1]
    return pa.Array.from_buffers(kind, len(numbers), [validity, pa.py_buffer(data)])


def _strings(values: list[Any], kind: pa.DataType) -> pa.Array:
    _checked(values, (str,), "text")
    return pa.array(values, kind)


def _binaries(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> bytes:
        if type(value) is not str:
            raise _wanted(value, "text in base64")
        try:
            return binascii.a2b_base64(value, strict_mode=True)
        except ValueError as error:
            raise ValueError(f"{shown_value(value)} is no base64: {error}") from None

    return pa.array(_each(values, read), kind)


def _decimals(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> Decimal:
        if _is_whole(value):
            if abs(value) >= _WHOLE_MOST:
                raise ValueError(f"it does not fit {kind}: it has more than {_NUMBER_MOST} digits")
        elif type(value) is not str or len(value) > _NUMBER_MOST or not _NUMBER(value):
            raise _wanted(value, 'a decimal, as text such as "12.50",')
        number = Decimal(value)
        if not number:
            return _NOTHING
        # Arrow makes 0 of what has many digits behind the point, so they end here.
        if number.adjusted() + kind.scale >= kind.precision:
            raise ValueError(f"it does not fit {kind}: it has too many digits before the point")
        sign, figures, exponent = number.as_tuple()
        lost = -kind.scale - int(exponent)
        if lost <= 0:
            return number
        if any(figures[-lost:]):
            raise ValueError(f"it does not fit {kind}: it has more digits behind the point")
        return Decimal((sign, figures[:-lost], -kind.scale))

    try:
        return pa.array(_each(values, read), kind)
    except (pa.ArrowException, InvalidOperation) as error:
        raise ValueError(f"it does not fit {kind}: {first_line(error)}") from None


def _dates(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> date:
        if type(value) is not str or not _DATE(value):
            raise _wanted(value, 'a date, as text such as "2026-01-31",')
        return date.fromisoformat(value)

    return pa.array(_each(values, read), kind)


def _moments(values: list[Any], kind: pa.DataType) -> pa.Array:
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    units, digits = UNITS[unit], DIGITS[unit]

    def read(value: Any) -> int:
        found = _MOMENT(value) if type(value) is str else None
        if found is None:
            raise _wanted(value, 'a time, as text such as "2026-01-31T23:59:59Z",')
        day, clock, second, fraction, zone = found.groups()
        text = f"{day}T{clock or '00:00'}{second or ''}{zone or 'Z'}"
        moment = datetime.fromisoformat(text) - _EPOCH
        seconds = moment.days * DAY + moment.seconds
        if not FIRST <= seconds < LAST:
            raise ValueError(f"{shown_value(value)} is not in the years 1 to 9999 of UTC")
        return seconds * units + _fraction(fraction, digits, unit)

    return _spans(_each(values, read), kind)


def _spans(values: list[int | None], kind: pa.DataType) -> pa.Array:
    """Times or spans of time, in units of 64 bits."""
    try:
        return pa.array(values, pa.int64()).view(kind)
    except OverflowError:
        raise ValueError(f"it is out of the range of {kind}") from None


def _fraction(fraction: str | None, digits: int, unit: str) -> int:
    if not fraction:
        return 0
    kept, lost = fraction[:digits], fraction[digits:]
    if lost.strip("0"):
        raise ValueError(f"a fraction of .{fraction} seconds does not fit the unit {unit}")
    return int(kept.ljust(digits, "0") or "0")


def _times(values: list[Any], kind: pa.DataType) -> pa.Array:
    units, digits = UNITS[kind.unit], DIGITS[kind.unit]

    def read(value: Any) -> int:
        found = _CLOCK(value) if type(value) is str else None
        if found is None:
            raise _wanted(value, 'a time of a day, as text such as "23:59:59",')
        hours, minutes, seconds = (int(found[place]) for place in (1, 2, 3))
        if hours > 23 or minutes > 59 or seconds > 59:
            raise ValueError(f"{shown_value(value)} is no time of a day")
        whole = (hours * 60 + minutes) * 60 + seconds
        return whole * units + _fraction(found[4], digits, kind.unit)

    narrow = pa.int32() if pa.types.is_time32(kind) else pa.int64()
    return pa.array(_each(values, read), narrow).view(kind)


def _durations(values: list[Any], kind: pa.DataType) -> pa.Array:
    units, digits = UNITS[kind.unit], DIGITS[kind.unit]

    def read(value: Any) -> int:
        found = _SECONDS(value) if type(value) is str else None
        if found is None:
            raise _wanted(value, 'a duration, as text such as "PT1.5S",')
        whole = int(found[2]) * units + _fraction(found[3], digits, kind.unit)
        return -whole if found[1] else whole

    return _spans(_each(values, read), kind)


def _intervals(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> pa.MonthDayNano:
        if type(value) is not dict or value.keys() != set(MONTHS):
            raise _wanted(value, "an object of months, days and nanoseconds")
        parts = [value[name] for name in MONTHS]
        if type(parts[2]) is str and _WHOLE(parts[2]):
            parts[2] = int(parts[2])
        for part in parts:
            if not _is_whole(part):
                raise _wanted(part, "a whole number")
        return pa.MonthDayNano(parts)

    return _numbers(_each(values, read), kind)


_READERS: Final[
    tuple[tuple[Callable[[pa.DataType], bool], Callable[[list[Any], pa.DataType], pa.Array]], ...]
] = (
    (lambda kind: kind in (pa.int64(), pa.uint64()), _wide_integers),
    (pa.types.is_integer, _integers),
    (pa.types.is_boolean, _booleans),
    (pa.types.is_floating, _floats),
    (lambda kind: kind in (pa.string(), pa.large_string(), pa.string_view()), _strings),
    (pa.types.is_decimal, _decimals),
    (
        lambda kind: (
            kind in (pa.binary(), pa.large_binary(), pa.binary_view())
            or pa.types.is_fixed_size_binary(kind)
        ),
        _binaries,
    ),
    (pa.types.is_date32, _dates),
    (pa.types.is_date64, _moments),
    (pa.types.is_timestamp, _moments),
    (pa.types.is_time, _times),
    (pa.types.is_duration, _durations),
    (lambda kind: kind == pa.month_day_nano_interval(), _intervals),
    (pa.types.is_null, _nulls),
)


_EXAMPLES: Final[tuple[tuple[Callable[[pa.DataType], bool], Any], ...]] = (
    (pa.types.is_null, None),
    (pa.types.is_boolean, False),
    (pa.types.is_integer, 0),
    (pa.types.is_floating, 0),
    (pa.types.is_decimal, 0),
    (pa.types.is_date, "1970-01-01"),
    (pa.types.is_timestamp, "1970-01-01"),
    (pa.types.is_time, "00:00:00"),
    (pa.types.is_duration, "PT0S"),
    (pa.types.is_interval, dict.fromkeys(MONTHS, 0)),
)


def _example(kind: pa.DataType) -> Any:
    """Some value of a type, for places that no row shows."""
    kind = inside_of(kind)
    if pa.types.is_struct(kind):
        return {field.name: _example_of(field) for field in kind}
    if pa.types.is_union(kind):
        return {kind.field(0).name: _example_of(kind.field(0))}
    if pa.types.is_fixed_size_list(kind):
        return [_example_of(kind.field(0))] * kind.list_size
    if pa.types.is_nested(kind):
        return []
    for fits, value in _EXAMPLES:
        if fits(kind):
            return value
    width = kind.byte_width if pa.types.is_fixed_size_binary(kind) else 0
    return binascii.b2a_base64(bytes(width), newline=False).decode()


def _example_of(field: pa.Field) -> Any:
    has_null = field.nullable and not pa.types.is_union(inside_of(field.type))
    return None if has_null else _example(field.type)


def _dictionary(values: list[Any], kind: pa.DictionaryType, allowance: Allowance) -> pa.Array:
    places: dict[Any, int] = {}
    distinct: list[Any] = []
    indices: list[int | None] = []
    for value in values:
        if value is None:
            indices.append(None)
            continue
        # By their texts 0.0 and -0.0 differ, and 1 and true.
        key = value if type(value) is str else (repr(value),)
        place = places.get(key)
        if place is None:
            place = places[key] = len(distinct)
            distinct.append(value)
        indices.append(place)
    try:
        numbers = pa.array(indices, kind.index_type)
    except (OverflowError, pa.ArrowException):
        raise ValueError(
            f"the values are more distinct ones than the index {kind.index_type} of a dictionary "
            "can number"
        ) from None
    return pa.DictionaryArray.from_arrays(
        numbers,
        _of_type(distinct, kind.value_type, allowance),
        ordered=kind.ordered,
    )


def _struct(values: list[Any], kind: pa.StructType, allowance: Allowance) -> pa.Array:
    _checked(values, (dict,), "an object")
    names = [field.name for field in kind]
    known = frozenset(names)
    for value in values:
        if value is not None and not value.keys() <= known:
            raise ValueError(unknown_name(value, names))
    if not names:
        return pa.array(values, kind)
    filler: Any = _example(kind) if None in values else None
    mask = pa.array([value is None for value in values], pa.bool_())
    shown = [filler if value is None else value for value in values]
    children = [
        array_of([value.get(field.name) for value in shown], field, allowance) for field in kind
    ]
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)


def _list(values: list[Any], kind: pa.DataType, allowance: Allowance) -> pa.Array:
    _checked(values, (list,), "an array")
    inner = kind.field(0)
    mask = pa.array([value is None for value in values], pa.bool_())
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        for value in values:
            if value is not None and len(value) != size:
                raise ValueError(f"{size} values are wanted, and {len(value)} came")
        allowance.check(len(values) * size)
        filler: Any = _example(kind) if None in values else None
        flat = [each for value in values for each in (filler if value is None else value)]
        child = array_of(flat, inner, allowance)
        # Arrow's own way takes the number of lists from that of their values: 0 for size 0.
        validity = pc.invert(mask).buffers()[1]
        return pa.Array.from_buffers(kind, len(values), [validity], children=[child])
    child = array_of([each for value in values for each in value or ()], inner, allowance)
    lengths = [len(value or ()) for value in values]
    offsets = [0, *accumulate(lengths)]
    large = pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind)
    index = pa.int64() if large else pa.int32()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        array = pa.LargeListArray if large else pa.ListArray
        return array.from_arrays(pa.array(offsets, index), child, type=kind, mask=mask)
    views = pa.LargeListViewArray if large else pa.ListViewArray
    return views.from_arrays(
        pa.array(offsets[:-1], index), pa.array(lengths, index), child, type=kind, mask=mask
    )


def _map(values: list[Any], kind: pa.MapType, allowance: Allowance) -> pa.Array:
    _checked(values, (list,), "an array of pairs")
    flat = [pair for value in values for pair in value or ()]
    for pair in flat:
        if type(pair) is not list or len(pair) != 2:
            raise _wanted(pair, "a pair, [key, value],")
    keys = array_of([pair[0] for pair in flat], kind.key_field, allowance)
    items = array_of([pair[1] for pair in flat], kind.item_field, allowance)
    ends = list(accumulate(len(value or ()) for value in values))
    starts = [0, *ends[:-1]]
    # An offset that is null makes the map null.
    offsets: list[int | None] = [
        None if value is None else start for value, start in zip(values, starts, strict=False)
    ]
    offsets.append(ends[-1] if ends else 0)
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, items, type=kind)


def _union(values: list[Any], kind: pa.UnionType, allowance: Allowance) -> pa.Array:
    fields = [kind.field(place) for place in range(kind.num_fields)]
    places = {field.name: place for place, field in enumerate(fields)}
    names = list(places)
    which: list[int] = []
    inner: list[list[Any]] = [[] for _ in fields]
    offsets: list[int] = []
    loose = next((field.name for field in fields if field.nullable), None)
    if loose is not None and None in values:
        values = [{loose: None} if value is None else value for value in values]
    for value in values:
        if type(value) is not dict or len(value) != 1:
            raise _wanted(value, "an object with one name, that of a field,")
        ((name, found),) = value.items()
        place = places.get(name)
        if place is None:
            raise ValueError(unknown_name(value, names))
        which.append(place)
        offsets.append(len(inner[place]))
        inner[place].append(found)
    codes = pa.array([kind.type_codes[place] for place in which], pa.int8())
    if kind.mode == "dense":
        children = [
            array_of(found, field, allowance) for found, field in zip(inner, fields, strict=True)
        ]
        starts = pa.array(offsets, pa.int32())
        made = pa.UnionArray.from_dense(codes, starts, children, names, kind.type_codes)
    else:
        children = [
            array_of(_spread(place, field, which, values), field, allowance)
            for place, field in enumerate(fields)
        ]
        made = pa.UnionArray.from_sparse(codes, children, names, kind.type_codes)
    return _declared(made, kind)


def _spread(place: int, field: pa.Field, which: list[int], values: list[Any]) -> list[Any]:
    """The values of one field at the rows of a sparse union; in others there may be anything."""
    filler = _example_of(field)
    return [
        value[field.name] if of == place else filler
        for of, value in zip(which, values, strict=True)
    ]


def _declared(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The array as of ``kind``: what makes unions knows of no field that is declared not null."""
    batch = pa.RecordBatch.from_arrays([array], names=[""])
    capsule = batch.__arrow_c_array__()[1]
    wanted = pa.schema([pa.field("", kind)])
    return pa.RecordBatch._import_from_c_capsule(wanted.__arrow_c_schema__(), capsule).column(0)
