"""The JSON of each value of an array, made by Arrow itself: a text for each row."""

from __future__ import annotations

import binascii
import json
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "DAY",
    "DIGITS",
    "MONTHS",
    "UNITS",
    "inside_of",
    "text_of",
    "texts_of",
    "writer_of",
]

UNITS: Final = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
DIGITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}
DAY: Final = 86_400
_FIRST: Final = -719_162 * DAY
"""Seconds from 1970 to the beginning of the year 1."""
_LAST: Final = 2_932_897 * DAY
"""And to the end of the year 9999."""
_ESCAPED: Final = r'["\\\x00-\x1f]'
MONTHS: Final = ("months", "days", "nanoseconds")


def inside_of(kind: pa.DataType) -> pa.DataType:
    """The type of the values of dictionaries, runs and extension types."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def texts_of(array: pa.Array) -> pa.Array:
    """The JSON of each value. Raises ValueError for one that has none."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return texts_of(array.storage)
    if pa.types.is_dictionary(kind):
        return _filled(texts_of(array.dictionary).take(array.indices))
    if pa.types.is_run_end_encoded(kind):
        return _run_texts(array)
    if pa.types.is_union(kind):
        return _union_texts(array)
    if pa.types.is_struct(kind):
        texts = _struct_texts(array)
    elif pa.types.is_map(kind):
        texts = _map_texts(array)
    elif pa.types.is_nested(kind):
        texts = _list_texts(array)
    else:
        write = writer_of(kind)
        if write is None:
            raise ValueError(f"the type {kind} has no form in JSON")
        return _filled(write(array))
    return texts if not array.null_count else pc.if_else(array.is_valid(), texts, "null")


def _filled(texts: pa.Array) -> pa.Array:
    return texts.fill_null("null") if texts.null_count else texts


def text_of(text: str) -> str:
    """The JSON of a text."""
    return json.dumps(text, ensure_ascii=False)


def _quoted(texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', texts, '"', "")


def _plain(array: pa.Array) -> pa.Array:
    return array.cast(pa.string())


def _whole_texts(array: pa.Array) -> pa.Array:
    return _quoted(array.cast(pa.string()))


def _float_texts(array: pa.Array) -> pa.Array:
    if pa.types.is_float16(array.type):
        array = _singles(array)
    texts = array.cast(pa.string())
    texts = pc.if_else(pc.equal(texts, "-0"), "-0.0", texts)  # a whole number has no sign of zero
    if pc.all(pc.is_finite(array)).as_py() is False:
        texts = pc.if_else(pc.is_nan(array), None, texts)
        signs = pc.if_else(pc.greater(array, 0), '"Infinity"', '"-Infinity"')
        texts = pc.if_else(pc.is_inf(array), signs, texts)
    return texts


def _singles(array: pa.Array) -> pa.Array:
    """Halves as float32: older versions of Arrow cannot cast them."""
    if not len(array):
        return pa.array([], pa.float32())
    halves = memoryview(array.buffers()[1]).cast("B")[2 * array.offset :]
    values = struct.unpack(f"<{len(array)}e", halves[: 2 * len(array)])
    valid = array.is_valid().to_pylist()
    return pa.array(
        [value if is_valid else None for value, is_valid in _pairs(values, valid)], pa.float32()
    )


def _string_texts(array: pa.Array) -> pa.Array:
    array = array.cast(pa.string())
    array.validate(full=True)  # that it is UTF-8
    if pc.any(pc.match_substring_regex(array, _ESCAPED)).as_py():
        write = json.JSONEncoder(ensure_ascii=False).encode
        return pa.array(
            [None if value is None else write(value) for value in array.to_pylist()], pa.string()
        )
    return _quoted(array)


def _binary_texts(array: pa.Array) -> pa.Array:
    write = binascii.b2a_base64
    return pa.array(
        [
            None if value is None else f'"{write(value, newline=False).decode()}"'
            for value in array.to_pylist()
        ],
        pa.string(),
    )


def _decimal_texts(array: pa.Array) -> pa.Array:
    try:
        return _quoted(array.cast(pa.string()))
    except pa.ArrowNotImplementedError:  # for the narrow ones of older versions
        values = array.to_pylist()
        return pa.array([None if value is None else f'"{value}"' for value in values], pa.string())


def _date_texts(array: pa.Array) -> pa.Array:
    _check_range(array.cast(pa.int32()), 1, _FIRST // DAY, _LAST // DAY)
    return _quoted(array.cast(pa.string()))


def _date64_texts(array: pa.Array) -> pa.Array:
    moments = array.view(pa.int64()).view(pa.timestamp("ms"))
    texts = _moment_texts(moments)
    return pc.replace_substring(texts, "T00:00:00.000Z", "")


def _time_texts(array: pa.Array) -> pa.Array:
    whole = array.view(pa.int32() if pa.types.is_time32(array.type) else pa.int64())
    _check_range(whole.cast(pa.int64()), UNITS[array.type.unit], 0, DAY)
    return _quoted(array.cast(pa.string()))


def _moment_texts(array: pa.Array) -> pa.Array:
    unit = array.type.unit
    _check_range(array.view(pa.int64()), UNITS[unit], _FIRST, _LAST)
    texts = array.view(pa.timestamp(unit)).cast(pa.string())
    texts = pc.replace_substring(texts, " ", "T", max_replacements=1)
    return pc.binary_join_element_wise('"', texts, 'Z"', "")


def _check_range(values: pa.Array, unit: int, least: int, end: int) -> None:
    """Raises ValueError for a value outside of ``least`` to below ``end``, in ``unit``."""
    found = pc.min_max(values).as_py()
    low, high = found["min"], found["max"]
    if low is not None and (low < least * unit or high >= end * unit):
        value = low if low < least * unit else high
        raise ValueError(f"the value {value} is no time of a day, or not in the years 1 to 9999")


def _duration_texts(array: pa.Array) -> pa.Array:
    unit, digits = UNITS[array.type.unit], DIGITS[array.type.unit]

    def write(value: int) -> str:
        seconds, rest = divmod(abs(value), unit)
        sign = "-" if value < 0 else ""
        fraction = f".{rest:0{digits}}".rstrip("0") if rest else ""
        return f'"{sign}PT{seconds}{fraction}S"'

    values = array.view(pa.int64()).to_pylist()
    return pa.array([None if value is None else write(value) for value in values], pa.string())


def _interval_texts(array: pa.Array) -> pa.Array:
    return pa.array(
        [
            None
            if value is None
            else f'{{"months":{value[0]},"days":{value[1]},"nanoseconds":"{value[2]}"}}'
            for value in array.to_pylist()
        ],
        pa.string(),
    )


def _null_texts(array: pa.Array) -> pa.Array:
    return pa.nulls(len(array), pa.string())


_WRITERS: Final[
    tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]], ...]
] = (
    (lambda kind: kind in (pa.int64(), pa.uint64()), _whole_texts),
    (pa.types.is_integer, _plain),
    (pa.types.is_boolean, _plain),
    (pa.types.is_floating, _float_texts),
    (lambda kind: kind in (pa.string(), pa.large_string(), pa.string_view()), _string_texts),
    (
        lambda kind: (
            kind in (pa.binary(), pa.large_binary(), pa.binary_view())
            or pa.types.is_fixed_size_binary(kind)
        ),
        _binary_texts,
    ),
    (pa.types.is_decimal, _decimal_texts),
    (pa.types.is_date32, _date_texts),
    (pa.types.is_date64, _date64_texts),
    (pa.types.is_time, _time_texts),
    (pa.types.is_timestamp, _moment_texts),
    (pa.types.is_duration, _duration_texts),
    (lambda kind: kind == pa.month_day_nano_interval(), _interval_texts),
    (pa.types.is_null, _null_texts),
)


def writer_of(kind: pa.DataType) -> Callable[[pa.Array], pa.Array] | None:
    """What makes the texts of a type without others inside; None: it has no form in JSON."""
    return next((write for fits, write in _WRITERS if fits(kind)), None)


def _struct_texts(array: pa.StructArray) -> pa.Array:
    kind = array.type
    if not kind.num_fields:
        return pa.array(["{}"] * len(array), pa.string())
    parts: list[Any] = []
    for place in range(kind.num_fields):
        name = text_of(kind.field(place).name)
        parts += [("," if place else "{") + name + ":", texts_of(array.field(place))]
    return pc.binary_join_element_wise(*parts, "}", "")


def _list_texts(array: pa.Array) -> pa.Array:
    kind, rows = array.type, len(array)
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        inner = texts_of(array.values.slice(array.offset * size, rows * size))
        return _joined([size] * rows, inner)
    offsets = array.offsets.to_pylist()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = texts_of(array.values.slice(offsets[0], offsets[-1] - offsets[0]))
        return _joined([end - start for start, end in pairwise(offsets)], inner)
    # A view has its values anywhere, and a null one shows none.
    valid = array.is_valid().to_pylist()
    sizes = [size if is_valid else 0 for size, is_valid in _pairs(array.sizes.to_pylist(), valid)]
    places = [
        place for start, size in _pairs(offsets, sizes) for place in range(start, start + size)
    ]
    return _joined(sizes, texts_of(array.values).take(pa.array(places, pa.int64())))


def _pairs(first: Sequence[Any], second: Sequence[Any]) -> Any:
    return zip(first, second, strict=True)


def _map_texts(array: pa.MapArray) -> pa.Array:
    offsets = array.offsets.to_pylist()
    first, size = offsets[0], offsets[-1] - offsets[0]
    keys, items = texts_of(array.keys.slice(first, size)), texts_of(array.items.slice(first, size))
    pairs = pc.binary_join_element_wise("[", keys, ",", items, "]", "")
    return _joined([end - start for start, end in pairwise(offsets)], pairs)


def _joined(lengths: list[int], texts: pa.Array) -> pa.Array:
    """Arrays of so many texts each."""
    offsets = pa.array([0, *accumulate(lengths)], pa.int32())
    inner = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), ",")
    return pc.binary_join_element_wise("[", inner, "]", "")


def _run_texts(array: pa.RunEndEncodedArray) -> pa.Array:
    ends = array.run_ends.to_pylist()
    start = array.offset
    run = bisect_right(ends, start)
    places: list[int] = []
    for row in range(start, start + len(array)):
        if row >= ends[run]:
            run += 1
        places.append(run)
    return texts_of(array.values).take(pa.array(places, pa.int64()))


def _union_texts(array: pa.UnionArray) -> pa.Array:
    kind, rows, start = array.type, len(array), array.offset
    buffers = array.buffers()
    codes = memoryview(buffers[1]).cast("b")[start : start + rows].tolist() if rows else []
    dense = kind.mode == "dense"
    places: list[int] | range = range(rows)
    if dense and rows:
        places = memoryview(buffers[2]).cast("i")[start : start + rows].tolist()
    texts: dict[int, list[str]] = {}
    for child, code in enumerate(kind.type_codes):
        rows_of = [place for place, of in zip(places, codes, strict=True) if of == code]
        found = texts_of(array.field(child)).take(pa.array(rows_of, pa.int64()))
        name = text_of(kind.field(child).name)
        texts[code] = pc.binary_join_element_wise(f"{{{name}:", found, "}", "").to_pylist()
    turns = {code: iter(of) for code, of in texts.items()}
    return pa.array([next(turns[code]) for code in codes], pa.string())


# JSON to Arrow
