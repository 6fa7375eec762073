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

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.ipc import by_identity, first_line
from aqueduct.arrow.joining import joined
from aqueduct.arrow.json_texts import inside_of, text_of, texts_of, writer_of
from aqueduct.arrow.json_values import (
    MINUS_ZERO,
    Allowance,
    TooMuch,
    array_of,
    shown_value,
    unknown_name,
)
from aqueduct.config import DEFAULT
from aqueduct.errors import BadCall, BatchTooLarge, LocalProtocolError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["decode_rows", "encode_rows", "fits_json", "most_values"]

_SPACE: Final = re.compile(r"[ \t\n\r]*").match
_ROW_ENDS: Final = re.compile(r"[ \t\n\r]*([,\]]?)[ \t\n\r]*").match
_DIGITS: Final = 512
"""Characters of a whole number: the largest float has 309 of them."""
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
        parts += [("," if parts else "{") + text_of(field.name) + ":", texts]
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
    batch_limit: int = DEFAULT.calls.batch_limit,
    charge: Callable[[int], object] | None = None,
    where: str = "the rows",
    peer: str = "",
    handler: str = "",
) -> pa.RecordBatch:
    """The batch of a JSON array of objects, or of one object a line.

    ``values``: how many values, names and brackets are read; commas and colons are counted before
    anything is. The columns have no more values either: what a row lacks is one there, and a list
    of fixed size many. ``batch_limit``: bytes of the batch. ``charge`` is told the bytes of
    each part of a column, and what it raises ends the reading. Raises BadCall that names row and
    column for what does not fit ``schema``, and BatchTooLarge above a limit.
    """

    def bad(text: str) -> BadCall:
        return BadCall(f"{where}: {text}", peer=peer, handler=handler)

    def large(text: str) -> BatchTooLarge:
        text = f"{where}: {text}; send fewer rows at a time"
        return BatchTooLarge(text, peer=peer, handler=handler)

    most = f"above the limit of {values} (ReactiveSocket.json_values)"
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
        raise large(f"about {found} values of JSON came, {most}")
    allowance = Allowance(values, batch_limit, charge)
    batches: list[pa.RecordBatch] = []
    rows: list[Any] = []
    count = 0
    try:
        for row in _rows(text):
            rows.append(row)
            if len(rows) == _ROWS:
                batches.append(_batch(rows, schema, count, allowance))
                count += len(rows)
                rows.clear()
        batches.append(_batch(rows, schema, count, allowance))
        return batches[0] if len(batches) == 1 else joined(batches)
    except TooMuch as error:
        raise large(f"{error}, in rows {count} to {count + len(rows) - 1}") from None
    except _Unfit as error:
        column = "" if error.column is None else f", column {error.column!r}"
        raise bad(f"row {error.row}{column}: {error.text}") from None
    except pa.ArrowException as error:
        text = f"the columns of {count + len(rows)} rows cannot be put together"
        raise bad(f"{text}: {first_line(error)}") from None
    except ValueError as error:
        raise bad(f"not JSON rows: {first_line(error)}") from None
    except RecursionError:
        raise bad("not JSON rows: lists or objects are nested too deeply") from None


def most_values(data: ReadableBuffer, schema: pa.Schema) -> int:
    """An upper bound of the values that the columns of these rows have, without reading them."""
    text = bytes(data)
    row, inner = _widths(schema)
    found = sum(map(text.count, (b",", b":", b"[", b"{")))
    return text.count(b"{") * row + found * inner


@by_identity
def _widths(schema: pa.Schema) -> tuple[int, int]:
    """The most values that a row makes without any value in it, and that a value within makes."""
    least: list[int] = [1]
    return sum(_width(field.type, least) for field in schema), max(least)


def _width(kind: pa.DataType, within: list[int]) -> int:
    """Values that a null makes. To ``within`` come those of what arrays have any number of."""
    kind = inside_of(kind)
    inner = [kind.field(place) for place in range(kind.num_fields)]
    widths = [_width(field.type, within) for field in inner]
    if pa.types.is_fixed_size_list(kind):
        return 1 + int(kind.list_size) * widths[0]
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        if pa.types.is_union(kind):
            within += widths
        return 1 + sum(widths)
    within += widths
    return 1


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
    kind = inside_of(kind)
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        inner = [kind.field(place) for place in range(kind.num_fields)]
        _check_names(f"fields of column {path!r}", [field.name for field in inner])
    elif pa.types.is_nested(kind):
        inner = [kind.field(place) for place in range(kind.num_fields)]
    else:
        if writer_of(kind) is None:
            raise BadCall(f"column {path!r}: the type {kind} has no form in JSON")
        return
    for field in inner:
        _check_type(f"{path}.{field.name}", field.type)


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
    return texts_of(column.slice(start, size))


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON; write it as a text")


def _whole(text: str) -> int:
    """A whole number: Python needs the square of its length in time for one."""
    if len(text) > _DIGITS:
        raise ValueError(f"a number has {len(text)} characters, and at most {_DIGITS} are read")
    return MINUS_ZERO if text == "-0" else int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"an object has the name {twice!r:.80} twice")
    return found


_READER: Final = json.JSONDecoder(
    parse_constant=_constant, parse_int=_whole, object_pairs_hook=_object
)


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


def _batch(rows: list[Any], schema: pa.Schema, first: int, allowance: Allowance) -> pa.RecordBatch:
    """Raises _Unfit and TooMuch; ``first``: the number of the first row."""
    names = schema.names
    known = frozenset(names)
    for place, row in enumerate(rows):
        if type(row) is not dict:
            raise _Unfit(f"an object is wanted, and {shown_value(row)} came", first + place)
        if not row.keys() <= known:
            raise _Unfit(unknown_name(row, names), first + place)
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        made = _attempt(partial(_part_of_field, values, field, allowance), len(values))
        if isinstance(made, _Unfit):
            raise _Unfit(made.text, first + made.row, field.name)
        allowance.keep(made.get_total_buffer_size())
        columns.append(made)
    if not columns:  # which says nothing of how many rows there are
        array = pa.array([{}] * len(rows), pa.struct([]))
        return pa.RecordBatch.from_struct_array(array).replace_schema_metadata(schema.metadata)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _part_of_field(
    values: list[Any], field: pa.Field, allowance: Allowance, start: int, size: int
) -> pa.Array:
    allowance.rewind()
    part = values[start : start + size] if size < len(values) else values
    return array_of(part, field, allowance)
