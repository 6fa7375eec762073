"""Casts that change no value: from every Arrow type to every other, where that makes sense.

The rule: what comes out is *equal by value* to what went in. NaN equals NaN, -0.0 equals 0.0, and
1, 1.0, True and Decimal("1.00") are equal. Text becomes a number or a time, and back, by reading
and writing: every character counts. Floating point becomes the nearest number of a narrower kind,
but never an infinity. All else that rounds is an error, unless rounding is asked for: then values
become the nearest ones, and halves the even one. Nothing else is ever lost: no overflow, no time of
a timestamp that becomes a date, no field of a struct.

``cast_ways.RULES`` has the pairs of kinds between which a cast leads. Lists, structs, maps,
dictionaries and runs are taken apart and built anew around the values inside; lists by their
offsets and sizes. Arrow's own casts are used only where they keep the rule: they ignore the sizes
of list views, and fill missing fields with nulls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.cast_numbers import Misfit, Rule
from aqueduct.arrow.cast_ways import RULES, kind_of, places_by_name, stands_for
from aqueduct.arrow.sizes import array_bytes
from aqueduct.config import DEFAULT

__all__ = ["Unfit", "cast", "first_bad", "first_null", "runs_of_rows", "text_of_value"]


def cast(
    array: pa.Array,
    wanted: pa.DataType,
    *,
    rounding: bool = False,
    limit: int = DEFAULT.calls.batch_limit,
) -> pa.Array:
    """``array`` with the type ``wanted``, equal by value; itself if it has that type.

    - ``rounding``: values may become the nearest ones that ``wanted`` has.
    - ``limit``: bytes that the values of overlapping list views may take when they are copied
    apart.

    Raises Unfit for the first value that does not fit, and ``pyarrow.ArrowException`` where there
    is an ``obstacle``.
    """
    made = _cast(array, wanted, _How(rounding, limit))
    if made is not array:
        made.validate(full=True)
    return made


class Unfit(Exception):
    """A value that cannot be cast."""

    def __init__(
        self,
        row: int | None,
        value: str,
        why: str,
        *,
        wanted: pa.DataType,
        got: pa.DataType,
        path: tuple[str, ...] = (),
    ) -> None:
        super().__init__(why)
        self.row = row
        """Of the array that was to be cast; None: all values fit, but not all together."""
        self.value = value
        """The value in Python's words."""
        self.why = why
        self.wanted = wanted
        self.got = got
        self.path = path
        """The names of fields from the column to the value, without the column's own."""

    def inside(self, name: str, row: int | None) -> Unfit:
        """The same, seen from the array that has this one as its field ``name``."""
        return Unfit(
            row, self.value, self.why, wanted=self.wanted, got=self.got, path=(name, *self.path)
        )


class _How(NamedTuple):
    """The options of ``cast``."""

    rounding: bool
    limit: int


_PLAINLY: Final = _How(rounding=False, limit=DEFAULT.calls.batch_limit)


def _cast(array: pa.Array, wanted: pa.DataType, how: _How) -> pa.Array:
    kind = array.type
    if kind.equals(wanted):
        return array
    if isinstance(kind, pa.BaseExtensionType):
        storage = array.storage
        if pa.types.is_boolean(stands_for(kind)):  # every number but 0 is true
            storage = pc.not_equal(storage, pa.scalar(0, storage.type))
        return _cast(storage, wanted, how)
    if isinstance(wanted, pa.BaseExtensionType):
        meant = _cast(array, stands_for(wanted), how)
        return wanted.wrap_array(_cast(meant, wanted.storage_type, how))
    have, want = kind_of(kind), kind_of(wanted)
    if have == "null":
        return pa.nulls(len(array), wanted)
    if have == want == "dictionary":
        return _redictionaried(array, wanted, how)
    if have in ("dictionary", "runs"):
        return _cast(_decoded(array), wanted, how)
    if want in ("dictionary", "runs"):
        values = _cast(array, wanted.value_type, how)
        encode = _dictionary_of if want == "dictionary" else _runs_of
        return encode(values, wanted)
    if have == want == "struct":
        return _struct(array, wanted, how)
    if have == want == "map":
        return _map(array, wanted, how)
    if have == want == "list":
        return _list(array, wanted, how)
    return _leaf(array, wanted, how)


def _leaf(array: pa.Array, wanted: pa.DataType, how: _How) -> pa.Array:
    got, rounding = array.type, how.rounding
    rule = RULES.get((kind_of(got), kind_of(wanted)))
    if rule is None:
        raise pa.ArrowNotImplementedError(f"there is no cast from {got} to {wanted}")
    if kind_of(got) == "text":  # of Arrow's functions of text few take views
        array = array.cast(pa.large_string())
    try:
        return rule(array, wanted, rounding)
    except (pa.ArrowException, Misfit) as error:
        row = first_bad(array, lambda part: _why(part, wanted, rule, rounding) is None)
        one = array.slice(row, 1)
        why = _why(one, wanted, rule, rounding)
        if why is None:
            raise Unfit(None, "", _line(error), wanted=wanted, got=got) from error
        rounded = None if rounding else _rounded(one, wanted, rule)
        if rounded is not None:
            why += f'; it would become {rounded}, which cast="round" allows'
        raise Unfit(row, text_of_value(one[0]), why, wanted=wanted, got=got) from error


def first_bad(array: pa.Array, is_good: Callable[[pa.Array], bool]) -> int:
    """The first row of ``array`` that is not good; if no single row is the reason, any row.

    ``is_good`` tells it of a slice of the array.
    """
    start, count = 0, len(array)
    while count > 1:
        half = count // 2
        if is_good(array.slice(start, half)):
            start, count = start + half, count - half
        else:
            count = half
    return start


def _why(array: pa.Array, wanted: pa.DataType, rule: Rule, rounding: bool) -> str | None:
    """Why some value of ``array`` cannot be cast; None: all can."""
    try:
        rule(array, wanted, rounding)
    except (pa.ArrowException, Misfit) as error:
        return _line(error)
    return None


def _rounded(one: pa.Array, wanted: pa.DataType, rule: Rule) -> str | None:
    """What rounding makes of one value, if it can be cast then."""
    try:
        return text_of_value(rule(one, wanted, True)[0])
    except (pa.ArrowException, Misfit):
        return None


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def text_of_value(scalar: pa.Scalar) -> str:
    """A value in Python's words, or in Arrow's if Python has none: a date in the year 12000."""
    try:
        return repr(scalar.as_py())
    except (ValueError, TypeError, OverflowError):
        pass
    try:
        return str(pc.cast(scalar, pa.string()).as_py())
    except (pa.ArrowException, UnicodeDecodeError):  # text that a peer sent may not be UTF-8
        return f"a value of {scalar.type}"


def _field(array: pa.Array, field: pa.Field, how: _How, there: pa.Array | None = None) -> pa.Array:
    """The values of a field inside a list, struct or map.

    ``there``: where there is one, if a null of the field may be one of the struct around it.
    """
    made = _cast(array, field.type, how)
    row = -1 if field.nullable else first_null(made, there)
    if row >= 0:
        why = "it is declared not null"
        raise Unfit(row, "None", why, wanted=field.type, got=array.type)
    return made


def first_null(array: pa.Array, there: pa.Array | None = None) -> int:
    """The first row that is null, also by its dictionary, runs or union; -1: none is.

    ``there``: the rows that count.
    """
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if not array.null_count and kind_of(array.type) not in ("dictionary", "runs", "union"):
        return -1
    nulls = _nulls(array)
    row: int = (nulls if there is None else pc.and_(nulls, there)).index(True).as_py()
    return row


def _nulls(array: pa.Array) -> pa.Array:
    """Which rows are null. ``is_null`` of PyArrow 21 reads bitmaps, and some types have none."""
    if isinstance(array.type, pa.BaseExtensionType):
        return _nulls(array.storage)
    kind = kind_of(array.type)
    if kind == "dictionary":
        return pc.fill_null(_nulls(array.dictionary).take(array.indices), True)
    if kind == "runs":
        runs = pa.RunEndEncodedArray.from_arrays(array.run_ends, _nulls(array.values))
        return pc.run_end_decode(runs.slice(array.offset, len(array)))
    return _nulls_of_union(array) if kind == "union" else array.is_null()


def _nulls_of_union(array: pa.Array) -> pa.Array:
    kind, (_, codes, *offsets) = array.type, array.buffers()[:3]
    length, start = len(array), array.offset
    codes = pa.Array.from_buffers(pa.int8(), length, [None, codes], offset=start)
    found = pa.repeat(pa.scalar(False), length)
    for place, code in enumerate(kind.type_codes):
        mine, nulls = pc.equal(codes, pa.scalar(code, pa.int8())), _nulls(array.field(place))
        if kind.mode == "dense":
            rows = pa.Array.from_buffers(pa.int32(), length, [None, offsets[0]], offset=start)
            nulls = nulls.take(pc.if_else(mine, rows, None))
        found = pc.or_(found, pc.fill_null(pc.and_(mine, nulls), False))
    return found


def _struct(array: pa.Array, wanted: pa.DataType, how: _How) -> pa.Array:
    places = places_by_name(*([field.name for field in kind] for kind in (wanted, array.type)))
    if places is None:
        raise pa.ArrowNotImplementedError(f"there is no cast from {array.type} to {wanted}")
    given = array.flatten()  # null where the struct is: what is hidden there is not cast
    there = array.is_valid() if array.null_count else None
    fields = []
    for field, place in zip(wanted, places, strict=True):
        values = given[place]
        if there is not None and kind_of(values.type) == "runs" and values.type != field.type:
            values = _decoded(values, there)  # runs have no nulls of their own
        try:
            fields.append(_field(values, field, how, there))
        except Unfit as error:
            raise error.inside(field.name, error.row) from error.__cause__
    return pa.Array.from_buffers(wanted, len(array), [_validity(array)], children=fields)


def _list(array: pa.Array, wanted: pa.DataType, how: _How) -> pa.Array:
    """Lists of one form as those of another, around the same values if these are not cast."""
    lengths = _lengths(pc.list_value_length(array))
    fixed = pa.types.is_fixed_size_list(wanted)
    buffers = [_validity(array)]
    if not fixed:
        buffers += _places(lengths, wanted, array)
    flat = _flat(array, wanted, how.limit)
    try:
        values = _field(flat, wanted.value_field, how)
    except Unfit as error:
        raise error.inside("item", _row_of(lengths, error.row)) from error.__cause__
    if fixed:
        values = _padded(array, lengths, values, wanted)
    return pa.Array.from_buffers(wanted, len(array), buffers, children=[values])


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _flat(array: pa.Array, wanted: pa.DataType, limit: int) -> pa.Array:
    """The values of all lists that are not null, in the order of the rows; of views some twice.

    Raises Unfit where views overlap so much that this takes more than ``limit`` bytes. A few bytes
    of views can name the same values a million times.
    """
    if not _is_view(array.type):
        return array.flatten()
    most = array_bytes(array.values)  # of one list
    if most * len(array) <= limit or _apart(array):
        return array.flatten()
    pieces, size, step = [], 0, max(limit // most, 1)
    for start in range(0, len(array), step):
        pieces.append(array.slice(start, step).flatten())
        size += array_bytes(pieces[-1])
        if size > limit:
            why = (
                "its lists overlap, and one after the other their values take more than the "
                f"limit of {limit} bytes (Calls.batch_limit)"
            )
            raise Unfit(None, "", why, wanted=wanted, got=array.type)
    return pa.concat_arrays(pieces)


def _apart(array: pa.Array) -> bool:
    """Whether no value is in two lists of a view."""
    starts, sizes = array.offsets.cast(pa.int64()), _lengths(pc.list_value_length(array))
    some = pc.greater(sizes, 0)
    starts, sizes = starts.filter(some), sizes.filter(some)
    order = pc.array_sort_indices(starts)
    starts = starts.take(order)
    ends = pc.add(starts, sizes.take(order))
    beyond = pc.less_equal(ends.slice(0, max(len(ends) - 1, 0)), starts.slice(1))
    return bool(pc.all(beyond, min_count=0).as_py())


def _places(lengths: pa.Array, wanted: pa.DataType, array: pa.Array) -> list[pa.Buffer]:
    """The buffers of offsets, and for views of sizes, of lists that follow one another."""
    types = pa.types
    wide = types.is_large_list(wanted) or types.is_large_list_view(wanted)
    width = pa.int64() if wide else pa.int32()
    ends = pc.cumulative_sum_checked(lengths)
    if _is_view(wanted):
        starts = pc.subtract(ends, lengths)
        return [_data(numbers, width, wanted, array) for numbers in (starts, lengths)]
    return [_data(pa.concat_arrays([pa.array([0], pa.int64()), ends]), width, wanted, array)]


def _padded(array: pa.Array, lengths: pa.Array, values: pa.Array, wanted: pa.DataType) -> pa.Array:
    """The values of lists of one size, of which nulls take as much room as others."""
    size = wanted.list_size
    wrong = pc.and_(array.is_valid(), pc.not_equal(lengths, size))
    row = wrong.index(True).as_py()
    if row >= 0:
        why = f"it has {lengths[row].as_py()} values, and {size} are wanted"
        raise Unfit(row, text_of_value(array[row]), why, wanted=wanted, got=array.type)
    if not array.null_count:
        return values
    nothing, pieces, start = pa.nulls(size, values.type), [], 0
    for there in array.is_valid().to_pylist():
        pieces.append(values.slice(start, size) if there else nothing)
        start += size if there else 0
    return pa.concat_arrays(pieces)


def _map(array: pa.Array, wanted: pa.DataType, how: _How) -> pa.Array:
    entries = _entries(array)
    lengths = _lengths(pc.list_value_length(entries))
    keys, items = entries.flatten().flatten()
    made = []
    for name, field, values in (
        ("key", wanted.key_field, keys),
        ("value", wanted.item_field, items),
    ):
        try:
            made.append(_field(values, field, how))
        except Unfit as error:
            raise error.inside(name, _row_of(lengths, error.row)) from error.__cause__
    if how.rounding or not _keep_apart(keys.type, wanted.key_type):
        _check_keys(keys, made[0], lengths)
    inner = wanted.field(0).type
    pairs = pa.Array.from_buffers(inner, len(keys), [None], children=made)
    buffers = [_validity(array), *_places(lengths, wanted, array)]
    return pa.Array.from_buffers(wanted, len(array), buffers, children=[pairs])


def _entries(array: pa.Array) -> pa.Array:
    """A map as the list of structs that it is; nothing is copied."""
    kind = array.type
    fields = [kind.key_field, kind.item_field]
    pairs = pa.StructArray.from_arrays([array.keys, array.items], fields=fields)
    return pa.Array.from_buffers(
        pa.list_(pa.field("entries", pairs.type, nullable=False)),
        len(array),
        array.buffers()[:2],
        offset=array.offset,
        children=[pairs],
    )


def _keep_apart(got: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether no two values become one, as the texts "1" and "01" do, and floats that are near."""
    have, want = kind_of(got), kind_of(wanted)
    return got.equals(wanted) or have == want == "text" or have in ("integer", "date", "binary")


def _check_keys(keys: pa.Array, made: pa.Array, lengths: pa.Array) -> None:
    """Raises Unfit where two keys of a map have become one, and so a value would be lost."""
    before, after = ([text_of_value(key) for key in each] for each in (keys, made))
    place = 0
    for row, length in enumerate(lengths.to_pylist()):
        part = slice(place, place + length)
        place += length
        if len(set(after[part])) < len(set(before[part])):
            raise Unfit(
                row,
                ", ".join(before[part]),
                f"two keys would become one: {', '.join(after[part])}",
                wanted=made.type,
                got=keys.type,
                path=("key",),
            )


def _lengths(lengths: pa.Array) -> pa.Array:
    """As 64-bit integers, zero for what is null."""
    return lengths.cast(pa.int64()).fill_null(0)


def _row_of(lengths: pa.Array, place: int | None) -> int | None:
    """The row whose list has a value, by the value's place among all."""
    if place is None:
        return None
    row: int = pc.greater(pc.cumulative_sum(lengths), place).index(True).as_py()
    return row


def _data(numbers: pa.Array, width: pa.DataType, wanted: pa.DataType, array: pa.Array) -> pa.Buffer:
    """The buffer of offsets or sizes. Raises Unfit if they do not fit into ``width``."""
    try:
        return numbers.cast(width).buffers()[1]
    except pa.ArrowInvalid as error:
        why = f"the lists of the batch have more values together than {wanted} can count"
        raise Unfit(None, "", why, wanted=wanted, got=array.type) from error


def _validity(array: pa.Array) -> pa.Buffer | None:
    """The bitmap of what is not null, from its first bit on; None if nothing is."""
    if not array.null_count:
        return None
    return pc.invert(array.is_null()).buffers()[1]


def _redictionaried(array: pa.Array, wanted: pa.DataType, how: _How) -> pa.Array:
    """A dictionary with other values or indices, in its own order."""
    try:
        values = _cast(array.dictionary, wanted.value_type, how)
        indices = array.indices.cast(wanted.index_type)
    except (Unfit, pa.ArrowInvalid):
        # It may hold what no row has: so the rows are looked at.
        made = _dictionary_of(_cast(_decoded(array), wanted.value_type, how), wanted)
        if not wanted.ordered:
            return made
        why = "its ordered dictionary holds a value that cannot be cast and that no row has"
        raise Unfit(None, "", why, wanted=wanted, got=array.type) from None
    return pa.DictionaryArray.from_arrays(indices, values, ordered=wanted.ordered)


def _dictionary_of(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    try:
        made = values.dictionary_encode()
        indices, values = made.indices, made.dictionary
    except pa.ArrowNotImplementedError:  # so each value stands for itself
        indices = pc.if_else(values.is_valid(), _numbers(len(values)), None)
    try:
        indices = indices.cast(wanted.index_type)
    except pa.ArrowInvalid as error:
        most = (1 << wanted.index_type.bit_width - 1) - 1
        if pa.types.is_unsigned_integer(wanted.index_type):
            most = 2 * most + 1
        row = pc.greater(indices, pa.scalar(most, pa.int32())).index(True).as_py()
        shown = text_of_value(values[indices[row].as_py()])
        why = f"it is value {most + 2} of the dictionary, above what {wanted.index_type} can count"
        raise Unfit(row, shown, why, wanted=wanted, got=values.type) from error
    return pa.DictionaryArray.from_arrays(indices, values, ordered=wanted.ordered)


def _runs_of(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    width = wanted.run_end_type
    if len(values) >> width.bit_width - 1:
        why = f"{len(values)} rows are more than run ends of {width} can count"
        raise Unfit(None, "", why, wanted=wanted, got=values.type)
    try:
        made = pc.run_end_encode(values, run_end_type=width)
    except pa.ArrowNotImplementedError:  # so each value is a run
        ends = pc.add(_numbers(len(values)), pa.scalar(1, pa.int32())).cast(width)
        made = pa.RunEndEncodedArray.from_arrays(ends, values)
    return pa.RunEndEncodedArray.from_arrays(made.run_ends, made.values, type=wanted)


def _decoded(array: pa.Array, there: pa.Array | None = None) -> pa.Array:
    """The values of a dictionary or of runs, row by row; null where ``there`` is false."""
    if isinstance(array, pa.DictionaryArray):
        values, rows = array.dictionary, array.indices
    else:
        values, rows = array.values, runs_of_rows(array)
    if there is not None:
        rows = pc.if_else(there, rows, None)
    return _cast(values, _without_views(values.type), _PLAINLY).take(rows)


def runs_of_rows(array: pa.Array) -> pa.Array:
    """For each row of a run-end encoded array the number of its run, from 0 on."""
    numbers = pa.RunEndEncodedArray.from_arrays(array.run_ends, _numbers(len(array.values)))
    return pc.run_end_decode(numbers.slice(array.offset, len(array)))


def _numbers(count: int) -> pa.Array:
    return pa.array(range(count), pa.int32())


def _without_views(kind: pa.DataType) -> pa.DataType:
    """The type in a form that Arrow can take values out of: it cannot with views of text."""
    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_views(kind.value_type), kind.ordered)
    if types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, _without_views(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    if types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if kind_of(kind) == "list":
        return pa.large_list(_plain_field(kind.value_field))
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_without_views(field.type))
