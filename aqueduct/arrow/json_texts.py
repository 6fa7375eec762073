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
    "FIRST",
    "LAST",
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
FIRST: Final = -719_162 * DAY
"""Seconds from 1970 to the beginning of the year 1."""
LAST: Final = 2_932_897 * DAY
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


def texts_of(array: pa.Array, shown: pa.Array | None = None) -> pa.Array:
    """The JSON of each value. Raises ValueError for one that has none.

    ``shown``: of which places the rows show the value; None: of all. Others may be anything.
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return texts_of(array.storage, shown)
    if pa.types.is_dictionary(kind):
        return _dictionary_texts(array, shown)
    if pa.types.is_run_end_encoded(kind):
        return _run_texts(array, shown)
    if pa.types.is_union(kind):
        return _union_texts(array, shown)
    if pa.types.is_nested(kind):
        if array.null_count:
            valid = array.is_valid()
            shown = valid if shown is None else pc.and_(shown, valid)
        if pa.types.is_struct(kind):
            texts = _struct_texts(array, shown)
        elif pa.types.is_map(kind):
            texts = _map_texts(array, shown)
        else:
            texts = _list_texts(array, shown)
    else:
        write = writer_of(kind)
        if write is None:
            raise ValueError(f"the type {kind} has no form in JSON")
        if shown is not None and write in _JUDGES:
            if kind == pa.string_view():  # of which Arrow cannot choose
                array, kind = array.cast(pa.string()), pa.string()
            array = pc.if_else(shown, array, pa.scalar(None, kind))
        return _filled(write(array))
    return texts if not array.null_count else pc.if_else(array.is_valid(), texts, "null")


def _filled(texts: pa.Array) -> pa.Array:
    return texts.fill_null("null") if texts.null_count else texts


def _all_of(places: list[int], size: int) -> pa.Array:
    """What is shown of ``size`` values, by the places of those that are."""
    shown = bytearray(size)
    for place in places:
        shown[place] = 1
    return pa.array(shown, pa.uint8()).cast(pa.bool_())


def _dictionary_texts(array: pa.DictionaryArray, shown: pa.Array | None) -> pa.Array:
    indices = array.indices
    used = indices if shown is None else pc.if_else(shown, indices, None)
    places = pc.unique(used).drop_null().to_pylist()
    texts = texts_of(array.dictionary, _all_of(places, len(array.dictionary)))
    return _filled(texts.take(indices))


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
    except pa.ArrowNotImplementedError:
        # Older versions of pyarrow cannot cast decimal32 and decimal64 to text.
        values = array.to_pylist()
        return pa.array([None if value is None else f'"{value}"' for value in values], pa.string())


def _date_texts(array: pa.Array) -> pa.Array:
    _check_range(array.cast(pa.int32()), 1, FIRST // DAY, LAST // DAY)
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
    _check_range(array.view(pa.int64()), UNITS[unit], FIRST, LAST)
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


_JUDGES: Final = (
    _string_texts,
    _date_texts,
    _date64_texts,
    _time_texts,
    _moment_texts,
)
"""Those that raise for a value which has no form."""


def _struct_texts(array: pa.StructArray, shown: pa.Array | None) -> pa.Array:
    kind = array.type
    if not kind.num_fields:
        return pa.array(["{}"] * len(array), pa.string())
    parts: list[Any] = []
    for place in range(kind.num_fields):
        name = text_of(kind.field(place).name)
        parts += [("," if place else "{") + name + ":", texts_of(array.field(place), shown)]
    return pc.binary_join_element_wise(*parts, "}", "")


def _list_texts(array: pa.Array, shown: pa.Array | None) -> pa.Array:
    kind, rows = array.type, len(array)
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        inner = array.values.slice(array.offset * size, rows * size)
        lengths = [size] * rows
        return _joined(lengths, texts_of(inner, _spread(shown, lengths)))
    offsets = array.offsets.to_pylist()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        lengths = [end - start for start, end in pairwise(offsets)]
        return _joined(lengths, texts_of(inner, _spread(shown, lengths)))
    # A view has its values anywhere, and one that is not shown has none.
    sizes = array.sizes.to_pylist()
    if shown is not None:
        sizes = [size if seen else 0 for size, seen in _pairs(sizes, shown.to_pylist())]
    places = [
        place for start, size in _pairs(offsets, sizes) for place in range(start, start + size)
    ]
    texts = texts_of(array.values, _all_of(places, len(array.values)))
    return _joined(sizes, texts.take(pa.array(places, pa.int64())))


def _spread(shown: pa.Array | None, lengths: list[int]) -> pa.Array | None:
    """What is shown of the values inside of rows of so many values each."""
    if shown is None:
        return None
    parts = [bytes([seen]) * size for seen, size in _pairs(shown.to_pylist(), lengths)]
    return pa.array(b"".join(parts), pa.uint8()).cast(pa.bool_())


def _pairs(first: Sequence[Any], second: Sequence[Any]) -> Any:
    return zip(first, second, strict=True)


def _map_texts(array: pa.MapArray, shown: pa.Array | None) -> pa.Array:
    offsets = array.offsets.to_pylist()
    first, size = offsets[0], offsets[-1] - offsets[0]
    lengths = [end - start for start, end in pairwise(offsets)]
    inside = _spread(shown, lengths)
    keys = texts_of(array.keys.slice(first, size), inside)
    items = texts_of(array.items.slice(first, size), inside)
    pairs = pc.binary_join_element_wise("[", keys, ",", items, "]", "")
    return _joined(lengths, pairs)


def _joined(lengths: list[int], texts: pa.Array) -> pa.Array:
    """Arrays of so many texts each."""
    offsets = pa.array([0, *accumulate(lengths)], pa.int32())
    inner = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), ",")
    return pc.binary_join_element_wise("[", inner, "]", "")


def _run_texts(array: pa.RunEndEncodedArray, shown: pa.Array | None) -> pa.Array:
    ends = array.run_ends.to_pylist()
    start = array.offset
    run = bisect_right(ends, start)
    places: list[int] = []
    for row in range(start, start + len(array)):
        if row >= ends[run]:
            run += 1
        places.append(run)
    used = places
    if shown is not None:
        used = [place for place, seen in _pairs(places, shown.to_pylist()) if seen]
    texts = texts_of(array.values, _all_of(used, len(array.values)))
    return texts.take(pa.array(places, pa.int64()))


def _union_texts(array: pa.UnionArray, shown: pa.Array | None) -> pa.Array:
    kind, rows, start = array.type, len(array), array.offset
    buffers = array.buffers()
    codes = memoryview(buffers[1]).cast("b")[start : start + rows].tolist() if rows else []
    dense = kind.mode == "dense"
    places: list[int] | range = range(rows)
    if dense and rows:
        places = memoryview(buffers[2]).cast("i")[start : start + rows].tolist()
    seen = [True] * rows if shown is None else shown.to_pylist()
    texts: dict[int, list[str]] = {}
    for child, code in enumerate(kind.type_codes):
        rows_of = [place for place, of in zip(places, codes, strict=True) if of == code]
        used = [
            place
            for place, of, is_shown in zip(places, codes, seen, strict=True)
            if of == code and is_shown
        ]
        values = array.field(child)
        inside = texts_of(values, _all_of(used, len(values)))
        found = inside.take(pa.array(rows_of, pa.int64()))
        name = text_of(kind.field(child).name)
        texts[code] = pc.binary_join_element_wise(f"{{{name}:", found, "}", "").to_pylist()
    turns = {code: iter(of) for code, of in texts.items()}
    return pa.array([next(turns[code]) for code in codes], pa.string())
