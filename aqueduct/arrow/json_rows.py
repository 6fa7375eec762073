"""Record batches as JSON rows, and back by a schema: one object for each row.

| Arrow | JSON |
|---|---|
| null | null |
| bool | true, false |
| int8 to int32, uint8 to uint32 | a number |
| int64, uint64 | text, ``"12"``, as many programs read numbers of 53 bits; numbers are read too |
| float16, float32, float64 | a number; null for NaN, ``"Infinity"``, ``"-Infinity"`` |
| decimal | text, ``"12.50"``; whole numbers are read too |
| string | text |
| binary, of fixed size too | text, base64 |
| date32 | text, ``"2026-01-31"`` |
| date64 | the same; with a time as in ``timestamp`` where it is no whole day |
| time32, time64 | text, ``"23:59:59.000001"`` |
| timestamp | text in UTC, ``"2026-01-31T23:59:59.000001Z"``; other offsets are read too |
| duration | text, seconds: ``"PT1.5S"``, ``"-PT60S"`` |
| month_day_nano_interval | ``{"months": 1, "days": 2, "nanoseconds": "3"}`` |
| list, of fixed size or view too | an array |
| struct | an object; what it lacks is null |
| map | an array of pairs, ``[[key, value], ...]`` |
| union | an object with one name, that of the value's field: ``{"text": "a"}`` |
| dictionary, run_end_encoded | as their values |
| extension types | as their storage |

A timestamp without a zone is taken to be UTC, and so is text without an offset. Years are 1 to
9999. A null for a float that is declared not null is NaN. Metadata of schemas and fields does not
travel.
"""

from __future__ import annotations

import binascii
import json
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.ipc import by_identity, first_line
from aqueduct.config import DEFAULT
from aqueduct.errors import BadCall, BatchTooLarge, LocalProtocolError
from aqueduct.escaping import near_miss

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["decode_rows", "encode_rows", "fits_json"]

_UNITS: Final = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_DIGITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_DAY: Final = 86_400
_FIRST: Final = -719_162 * _DAY
"""Seconds from 1970 to the beginning of the year 1."""
_LAST: Final = 2_932_897 * _DAY
"""And to the end of the year 9999."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SPACE: Final = re.compile(r"[ \t\n\r]*").match
_ROW_ENDS: Final = re.compile(r"[ \t\n\r]*([,\]]?)[ \t\n\r]*").match
_MOMENT: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d)?)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?)?\Z"
).match
_CLOCK: Final = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?\Z").match
_SECONDS: Final = re.compile(r"(-?)PT(\d{1,19})(?:\.(\d{1,9}))?S\Z").match
_WHOLE: Final = re.compile(r"-?\d{1,20}\Z").match
_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?\Z").match
_NUMBER_MOST: Final = 200
_ESCAPED: Final = r'["\\\x00-\x1f]'
_INFINITE: Final = {
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "NaN": float("nan"),
}
_MONTHS: Final = ("months", "days", "nanoseconds")
_ROWS: Final = 4096
"""Rows that are made into columns at a time: as objects of Python they take much more memory."""


def encode_rows(batch: pa.RecordBatch) -> bytes:
    """The rows as one JSON array of objects, UTF-8.

    Raises LocalProtocolError that names row and column for a value that JSON cannot have, and
    for a schema that it cannot (``fits_json``).
    """
    try:
        fits_json(batch.schema)
    except BadCall as error:
        raise LocalProtocolError(str(error)) from None
    rows = batch.num_rows
    if not rows:
        return b"[]"
    parts: list[Any] = []
    for place, field in enumerate(batch.schema):
        column = batch.column(place)
        texts = _attempt(partial(_texts_of, column), rows)
        if isinstance(texts, _Unfit):
            raise LocalProtocolError(f"row {texts.row}, column {field.name!r}: {texts.text}")
        parts += [("," if parts else "{") + _text(field.name) + ":", texts]
    if parts:
        lines = pc.binary_join_element_wise(*parts, "}", "")
    else:
        lines = pa.array(["{}"] * rows)
    try:
        joined = pc.binary_join(
            pa.ListArray.from_arrays(pa.array([0, rows], pa.int32()), lines), ","
        )
    except pa.ArrowException as error:
        raise LocalProtocolError(f"{rows} rows do not fit one JSON text: {error}") from error
    return b"[%b]" % joined[0].as_buffer()


def decode_rows(
    data: ReadableBuffer,
    schema: pa.Schema,
    *,
    values: int = DEFAULT.reactivesocket.json_values,
    where: str = "the rows",
    peer: str = "",
    handler: str = "",
) -> pa.RecordBatch:
    """The batch of a JSON array of objects, or of one object a line.

    ``values``: how many values, names and brackets are read; commas and colons are counted before
    anything is. Raises BadCall that names row and column for what does not fit ``schema``, and
    BatchTooLarge above the limit.
    """

    def bad(text: str) -> BadCall:
        return BadCall(f"{where}: {text}", peer=peer, handler=handler)

    try:
        fits_json(schema)
    except BadCall as error:
        raise bad(str(error)) from None
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError as error:
        raise bad(f"not UTF-8: {error}") from None
    found = sum(map(text.count, ",:[{"))
    if found > values:
        raise BatchTooLarge(
            f"{where}: about {found} values of JSON came, above the limit of {values} "
            "(ReactiveSocket.json_values); send fewer rows at a time",
            peer=peer,
            handler=handler,
        )
    batches: list[pa.RecordBatch] = []
    rows: list[Any] = []
    count = 0
    try:
        for row in _rows(text):
            rows.append(row)
            if len(rows) == _ROWS:
                batches.append(_batch(rows, schema, count))
                count += len(rows)
                rows.clear()
        batches.append(_batch(rows, schema, count))
    except _Unfit as error:
        column = "" if error.column is None else f", column {error.column!r}"
        raise bad(f"row {error.row}{column}: {error.text}") from None
    except (ValueError, RecursionError) as error:
        raise bad(f"not JSON rows: {first_line(error)}") from None
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches, schema).combine_chunks().to_batches()[0]


@by_identity
def fits_json(schema: pa.Schema) -> None:
    """Raises BadCall for a schema whose rows are no JSON: names that repeat, unknown types."""
    _check_names("columns", schema.names)
    for field in schema:
        _check_type(field.name, field.type)


def _check_names(what: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadCall(f"two {what} have the name {twice!r}, and an object of JSON has it once")


def _check_type(path: str, kind: pa.DataType) -> None:
    kind = _inside(kind)
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        inner = [kind.field(place) for place in range(kind.num_fields)]
        _check_names(f"fields of column {path!r}", [field.name for field in inner])
    elif pa.types.is_nested(kind):
        inner = [kind.field(place) for place in range(kind.num_fields)]
    else:
        if _writer_of(kind) is None:
            raise BadCall(f"column {path!r}: the type {kind} has no form in JSON")
        return
    for field in inner:
        _check_type(f"{path}.{field.name}", field.type)


def _inside(kind: pa.DataType) -> pa.DataType:
    """The type of the values of dictionaries, runs and extension types."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


class _Unfit(Exception):
    """A value that does not fit, in ``row``."""

    def __init__(self, text: str, row: int, column: str | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.row = row
        self.column = column


def _attempt(make: Callable[[int, int], pa.Array], rows: int) -> Any:
    """``make(0, rows)``, or what is wrong with the first row for which it fails."""
    try:
        return make(0, rows)
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        failed = error
    start, size = 0, rows
    while size > 1:  # twice the time of all rows, in the end
        half = size // 2
        try:
            make(start, half)
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            size, failed = half, error
        else:
            start, size = start + half, size - half
    if rows > 1:
        try:
            make(start, 1)
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            failed = error
    return _Unfit(first_line(failed), start)


# Arrow to JSON: a text for each value


def _texts_of(column: pa.Array, start: int, size: int) -> pa.Array:
    return _texts(column.slice(start, size))


def _texts(array: pa.Array) -> pa.Array:
    """The JSON of each value. Raises ValueError for one that has none."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _texts(array.storage)
    if pa.types.is_dictionary(kind):
        return _filled(_texts(array.dictionary).take(array.indices))
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
        write = _writer_of(kind)
        if write is None:
            raise ValueError(f"the type {kind} has no form in JSON")
        return _filled(write(array))
    return texts if not array.null_count else pc.if_else(array.is_valid(), texts, "null")


def _filled(texts: pa.Array) -> pa.Array:
    return texts.fill_null("null") if texts.null_count else texts


def _text(text: str) -> str:
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
    _check_range(array.cast(pa.int32()), 1, _FIRST // _DAY, _LAST // _DAY)
    return _quoted(array.cast(pa.string()))


def _date64_texts(array: pa.Array) -> pa.Array:
    moments = array.view(pa.int64()).view(pa.timestamp("ms"))
    texts = _moment_texts(moments)
    return pc.replace_substring(texts, "T00:00:00.000Z", "")


def _time_texts(array: pa.Array) -> pa.Array:
    whole = array.view(pa.int32() if pa.types.is_time32(array.type) else pa.int64())
    _check_range(whole.cast(pa.int64()), _UNITS[array.type.unit], 0, _DAY)
    return _quoted(array.cast(pa.string()))


def _moment_texts(array: pa.Array) -> pa.Array:
    unit = array.type.unit
    _check_range(array.view(pa.int64()), _UNITS[unit], _FIRST, _LAST)
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
    unit, digits = _UNITS[array.type.unit], _DIGITS[array.type.unit]

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


def _writer_of(kind: pa.DataType) -> Callable[[pa.Array], pa.Array] | None:
    return next((write for fits, write in _WRITERS if fits(kind)), None)


def _struct_texts(array: pa.StructArray) -> pa.Array:
    kind = array.type
    if not kind.num_fields:
        return pa.array(["{}"] * len(array), pa.string())
    parts: list[Any] = []
    for place in range(kind.num_fields):
        name = _text(kind.field(place).name)
        parts += [("," if place else "{") + name + ":", _texts(array.field(place))]
    return pc.binary_join_element_wise(*parts, "}", "")


def _list_texts(array: pa.Array) -> pa.Array:
    kind, rows = array.type, len(array)
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        inner = _texts(array.values.slice(array.offset * size, rows * size))
        return _joined([size] * rows, inner)
    offsets = array.offsets.to_pylist()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _texts(array.values.slice(offsets[0], offsets[-1] - offsets[0]))
        return _joined([end - start for start, end in pairwise(offsets)], inner)
    # A view has its values anywhere, and a null one shows none.
    valid = array.is_valid().to_pylist()
    sizes = [size if is_valid else 0 for size, is_valid in _pairs(array.sizes.to_pylist(), valid)]
    places = [
        place for start, size in _pairs(offsets, sizes) for place in range(start, start + size)
    ]
    return _joined(sizes, _texts(array.values).take(pa.array(places, pa.int64())))


def _pairs(first: Sequence[Any], second: Sequence[Any]) -> Any:
    return zip(first, second, strict=True)


def _map_texts(array: pa.MapArray) -> pa.Array:
    offsets = array.offsets.to_pylist()
    first, size = offsets[0], offsets[-1] - offsets[0]
    keys, items = _texts(array.keys.slice(first, size)), _texts(array.items.slice(first, size))
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
    return _texts(array.values).take(pa.array(places, pa.int64()))


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
        found = _texts(array.field(child)).take(pa.array(rows_of, pa.int64()))
        name = _text(kind.field(child).name)
        texts[code] = pc.binary_join_element_wise(f"{{{name}:", found, "}", "").to_pylist()
    turns = {code: iter(of) for code, of in texts.items()}
    return pa.array([next(turns[code]) for code in codes], pa.string())


# JSON to Arrow


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON; write it as a text")


_READER: Final = json.JSONDecoder(parse_constant=_constant)


def _rows(text: str) -> Any:
    """The values of an array, or of lines, one after the other. Raises ValueError."""
    space = _SPACE(text)
    assert space is not None
    at, size, read = space.end(), len(text), _READER.raw_decode
    inside = text.startswith("[", at)
    if inside:
        found = _SPACE(text, at + 1)
        assert found is not None
        at = found.end()
        if text.startswith("]", at):
            at = _end_of(text, at + 1)
            return
    while at < size:
        row, at = read(text, at)
        yield row
        ends = _ROW_ENDS(text, at)
        assert ends is not None
        sign = ends[1]
        if inside and sign == "]":
            _end_of(text, ends.end())
            return
        if inside != (sign == ","):
            what = "a comma or the end of the array" if inside else "a new line"
            raise ValueError(f"{what} is missing at character {at}")
        if not inside and ends.end() < size and "\n" not in text[at : ends.end()]:
            raise ValueError(f"a new line is missing at character {at}")
        at = ends.end()
    if inside:
        raise ValueError("the array does not end")


def _end_of(text: str, at: int) -> int:
    space = _SPACE(text, at)
    assert space is not None
    if space.end() < len(text):
        raise ValueError(f"more follows the array at character {space.end()}")
    return space.end()


def _batch(rows: list[Any], schema: pa.Schema, first: int) -> pa.RecordBatch:
    """Raises _Unfit; ``first``: the number of the first row."""
    names = schema.names
    known = frozenset(names)
    for place, row in enumerate(rows):
        if type(row) is not dict:
            raise _Unfit(f"an object is wanted, and {_shown(row)} came", first + place)
        if not row.keys() <= known:
            raise _Unfit(_unknown(row, names), first + place)
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        made = _attempt(partial(_part_of_field, values, field), len(values))
        if isinstance(made, _Unfit):
            raise _Unfit(made.text, first + made.row, field.name)
        columns.append(made)
    if not columns:  # which says nothing of how many rows there are
        array = pa.array([{}] * len(rows), pa.struct([]))
        return pa.RecordBatch.from_struct_array(array).replace_schema_metadata(schema.metadata)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _unknown(row: dict[str, Any], names: Sequence[str]) -> str:
    name = next(name for name in row if name not in names)
    alike = near_miss(name, names)
    hint = f"did you mean {alike!r}?" if alike else f"there are {', '.join(map(repr, names[:20]))}"
    return f"{name!r:.80} is none of the names; {hint}"


def _shown(value: Any) -> str:
    """A value in an error."""
    text = json.dumps(value) if not isinstance(value, (dict, list)) else type(value).__name__
    return {"dict": "an object", "list": "an array"}.get(text, text[:80])


def _part_of_field(values: list[Any], field: pa.Field, start: int, size: int) -> pa.Array:
    return _of_field(values[start : start + size] if size < len(values) else values, field)


def _of_field(values: list[Any], field: pa.Field) -> pa.Array:
    """Raises what ``_attempt`` catches."""
    kind = field.type
    if not field.nullable and None in values:
        if pa.types.is_floating(_inside(kind)):
            values = [float("nan") if value is None else value for value in values]
        elif not _only_null(kind):
            name = f" {field.name!r}" if field.name else ""
            raise ValueError(f"the field{name} is null or missing, and is declared not null")
    return _of_type(values, kind)


def _only_null(kind: pa.DataType) -> bool:
    return bool(pa.types.is_null(_inside(kind)))


def _of_type(values: list[Any], kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _of_type(values, kind.storage_type))
    if pa.types.is_dictionary(kind):
        return _dictionary(values, kind)
    if pa.types.is_run_end_encoded(kind):
        ends = pa.array(range(1, len(values) + 1), kind.run_end_type)
        return pa.RunEndEncodedArray.from_arrays(ends, _of_type(values, kind.value_type), kind)
    if pa.types.is_struct(kind):
        return _struct(values, kind)
    if pa.types.is_union(kind):
        return _union(values, kind)
    if pa.types.is_map(kind):
        return _map(values, kind)
    if pa.types.is_nested(kind):
        return _list(values, kind)
    for fits, read in _READERS:
        if fits(kind):
            return read(values, kind)
    raise ValueError(f"the type {kind} has no form in JSON")


def _wanted(value: Any, what: str) -> ValueError:
    return ValueError(f"{what} is wanted, and {_shown(value)} came")


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
    _checked(values, (int,), "a whole number")
    return _numbers(values, kind)


def _numbers(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowException):
        value = next((value for value in values if value is not None), None)
        raise ValueError(f"{value} is out of the range of {kind}") from None


def _wide_integers(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> int:
        if type(value) is int:
            return value
        if type(value) is not str or not _WHOLE(value):
            raise _wanted(value, 'a whole number, as text such as "12",')
        return int(value)

    return _numbers(_each(values, read), kind)


def _floats(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> float:
        if type(value) is float:
            return value
        if type(value) is int:
            return float(value)
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
            raise ValueError(f"{_shown(value)} is no base64: {error}") from None

    return pa.array(_each(values, read), kind)


def _decimals(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> Decimal:
        if type(value) is int:
            return Decimal(value)
        if type(value) is not str or len(value) > _NUMBER_MOST or not _NUMBER(value):
            raise _wanted(value, 'a decimal, as text such as "12.50",')
        return Decimal(value)

    try:
        return pa.array(_each(values, read), kind)
    except (pa.ArrowException, InvalidOperation) as error:
        raise ValueError(f"it does not fit {kind}: {first_line(error)}") from None


def _dates(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> date:
        if type(value) is not str or len(value) != 10:
            raise _wanted(value, 'a date, as text such as "2026-01-31",')
        return date.fromisoformat(value)

    return pa.array(_each(values, read), kind)


def _moments(values: list[Any], kind: pa.DataType) -> pa.Array:
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    units, digits = _UNITS[unit], _DIGITS[unit]

    def read(value: Any) -> int:
        found = _MOMENT(value) if type(value) is str else None
        if found is None:
            raise _wanted(value, 'a time, as text such as "2026-01-31T23:59:59Z",')
        day, clock, fraction, zone = found.groups()
        text = f"{day}T{clock or '00:00'}{zone or 'Z'}"
        moment = datetime.fromisoformat(text) - _EPOCH
        return (moment.days * _DAY + moment.seconds) * units + _fraction(fraction, digits, unit)

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
    units, digits = _UNITS[kind.unit], _DIGITS[kind.unit]

    def read(value: Any) -> int:
        found = _CLOCK(value) if type(value) is str else None
        if found is None:
            raise _wanted(value, 'a time of a day, as text such as "23:59:59",')
        hours, minutes, seconds = (int(found[place]) for place in (1, 2, 3))
        if hours > 23 or minutes > 59 or seconds > 59:
            raise ValueError(f"{_shown(value)} is no time of a day")
        whole = (hours * 60 + minutes) * 60 + seconds
        return whole * units + _fraction(found[4], digits, kind.unit)

    narrow = pa.int32() if pa.types.is_time32(kind) else pa.int64()
    return pa.array(_each(values, read), narrow).view(kind)


def _durations(values: list[Any], kind: pa.DataType) -> pa.Array:
    units, digits = _UNITS[kind.unit], _DIGITS[kind.unit]

    def read(value: Any) -> int:
        found = _SECONDS(value) if type(value) is str else None
        if found is None:
            raise _wanted(value, 'a duration, as text such as "PT1.5S",')
        whole = int(found[2]) * units + _fraction(found[3], digits, kind.unit)
        return -whole if found[1] else whole

    return _spans(_each(values, read), kind)


def _intervals(values: list[Any], kind: pa.DataType) -> pa.Array:
    def read(value: Any) -> pa.MonthDayNano:
        if type(value) is not dict or value.keys() != set(_MONTHS):
            raise _wanted(value, "an object of months, days and nanoseconds")
        parts = [value[name] for name in _MONTHS]
        if type(parts[2]) is str and _WHOLE(parts[2]):
            parts[2] = int(parts[2])
        for part in parts:
            if type(part) is not int:
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
    (pa.types.is_interval, dict.fromkeys(_MONTHS, 0)),
)


def _example(kind: pa.DataType) -> Any:
    """Some value of a type, for places that no row shows."""
    kind = _inside(kind)
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
    has_null = field.nullable and not pa.types.is_union(_inside(field.type))
    return None if has_null else _example(field.type)


def _dictionary(values: list[Any], kind: pa.DictionaryType) -> pa.Array:
    places: dict[Any, int] = {}
    distinct: list[Any] = []
    indices: list[int | None] = []
    for value in values:
        if value is None:
            indices.append(None)
            continue
        key = json.dumps(value) if isinstance(value, (dict, list)) else (type(value), value)
        place = places.get(key)
        if place is None:
            place = places[key] = len(distinct)
            distinct.append(value)
        indices.append(place)
    return pa.DictionaryArray.from_arrays(
        _numbers(indices, kind.index_type),
        _of_type(distinct, kind.value_type),
        ordered=kind.ordered,
    )


def _struct(values: list[Any], kind: pa.StructType) -> pa.Array:
    _checked(values, (dict,), "an object")
    names = [field.name for field in kind]
    known = frozenset(names)
    filler: Any = None
    for value in values:
        if value is not None:
            if not value.keys() <= known:
                raise ValueError(_unknown(value, names))
            filler = value if filler is None else filler
    if not names:
        return pa.array(values, kind)
    if filler is None:
        filler = _example(kind)
    mask = pa.array([value is None for value in values], pa.bool_())
    shown = [filler if value is None else value for value in values]
    children = [_of_field([value.get(field.name) for value in shown], field) for field in kind]
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)


def _list(values: list[Any], kind: pa.DataType) -> pa.Array:
    _checked(values, (list,), "an array")
    inner = kind.field(0)
    mask = pa.array([value is None for value in values], pa.bool_())
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        for value in values:
            if value is not None and len(value) != size:
                raise ValueError(f"{size} values are wanted, and {len(value)} came")
        filler = next((value for value in values if value is not None), None)
        if filler is None:
            filler = _example(kind)
        flat = [each for value in values for each in (filler if value is None else value)]
        return pa.FixedSizeListArray.from_arrays(_of_field(flat, inner), type=kind, mask=mask)
    child = _of_field([each for value in values for each in value or ()], inner)
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


def _map(values: list[Any], kind: pa.MapType) -> pa.Array:
    _checked(values, (list,), "an array of pairs")
    flat = [pair for value in values for pair in value or ()]
    for pair in flat:
        if type(pair) is not list or len(pair) != 2:
            raise _wanted(pair, "a pair, [key, value],")
    keys = _of_field([pair[0] for pair in flat], kind.key_field)
    items = _of_field([pair[1] for pair in flat], kind.item_field)
    ends = list(accumulate(len(value or ()) for value in values))
    starts = [0, *ends[:-1]]
    # An offset that is null makes the map null.
    offsets: list[int | None] = [
        None if value is None else start for value, start in zip(values, starts, strict=False)
    ]
    offsets.append(ends[-1] if ends else 0)
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, items, type=kind)


def _union(values: list[Any], kind: pa.UnionType) -> pa.Array:
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
            raise ValueError(_unknown(value, names))
        which.append(place)
        offsets.append(len(inner[place]))
        inner[place].append(found)
    codes = pa.array([kind.type_codes[place] for place in which], pa.int8())
    if kind.mode == "dense":
        children = [_of_field(found, field) for found, field in zip(inner, fields, strict=True)]
        starts = pa.array(offsets, pa.int32())
        made = pa.UnionArray.from_dense(codes, starts, children, names, kind.type_codes)
    else:
        children = [_spread(place, field, which, values) for place, field in enumerate(fields)]
        made = pa.UnionArray.from_sparse(codes, children, names, kind.type_codes)
    return _declared(made, kind)


def _spread(place: int, field: pa.Field, which: list[int], values: list[Any]) -> pa.Array:
    """The values of one field at the rows of a sparse union; in others there may be anything."""
    if place in which:
        filler = values[which.index(place)][field.name]
    else:
        filler = _example_of(field)
    found = [
        value[field.name] if of == place else filler
        for of, value in zip(which, values, strict=True)
    ]
    return _of_field(found, field)


def _declared(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The array as of ``kind``: what makes unions knows of no field that is declared not null."""
    batch = pa.RecordBatch.from_arrays([array], names=[""])
    capsule = batch.__arrow_c_array__()[1]
    wanted = pa.schema([pa.field("", kind)])
    return pa.RecordBatch._import_from_c_capsule(wanted.__arrow_c_schema__(), capsule).column(0)
