"""Casts of dates, times, timestamps and durations, and of text and integers to them and back.

All goes by counts: integers of 64 bits, in units of a number of nanoseconds. Arrow's own casts
drop the time of a timestamp that becomes a date, and let some counts overflow. The functions are
rules, as those of ``cast_numbers``.

A timestamp with a zone is an instant, and has a date and a time of day in that zone. They are kept
where the zone is lost or gained, as Spark does: ``13:05+01:00`` becomes ``13:05``.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.cast_numbers import Misfit, require

__all__ = [
    "day",
    "from_count",
    "from_text",
    "rescaled",
    "to_count",
    "to_text",
    "zoned",
]

_Parts: TypeAlias = dict[str, pa.Array]

_SECOND: Final = 1_000_000_000
_DAY: Final = 86_400 * _SECOND
_UNITS: Final = {"s": _SECOND, "ms": 1_000_000, "us": 1_000, "ns": 1}
_FRACTION: Final = 18
"""Digits of a second's fraction that a text may have: what fits into 64 bits."""

_DATE_TEXT: Final = r"(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})"
_TIME_TEXT: Final = (
    r"(?P<minute>[0-9]{2}:[0-9]{2})"
    rf"(?::(?P<second>[0-9]{{2}})(?:\.(?P<fraction>[0-9]{{1,{_FRACTION}}}))?)?"
)
_ZONE_TEXT: Final = r"(?P<zone>Z|[+-][0-9]{2}:?[0-9]{2})"
_DATE: Final = rf"^{_DATE_TEXT}$"
_TIME: Final = rf"^{_TIME_TEXT}$"
_LOCAL: Final = rf"^{_DATE_TEXT}(?:[T ]{_TIME_TEXT})?$"
_ZONED: Final = rf"^{_DATE_TEXT}(?:[T ]{_TIME_TEXT}{_ZONE_TEXT}?)?$"
_FORM: Final = {
    _DATE: "2024-12-31",
    _TIME: "23:59:58.5",
    _LOCAL: "2024-12-31 23:59:58.5",
    _ZONED: "2024-12-31 23:59:58.5+01:00",
}


def to_count(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """What Arrow keeps of dates, times and durations, as integers: how many of their unit."""
    return _count(array).cast(wanted)


def from_count(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Integers as so many units of a date, time or duration."""
    count = array.cast(pa.int64())
    if pa.types.is_date64(wanted):
        days = _rescaled(count, _UNITS["ms"], _DAY, False, "it is no whole number of days")
        return _made(days, wanted)
    return _made(count, wanted)


def rescaled(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Times, timestamps and durations in another unit; to a coarser one if nothing is lost."""
    why = f"{wanted} is too coarse for it"
    return _made(_rescaled(_count(array), _unit(array.type), _unit(wanted), rounding, why), wanted)


def day(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Dates and timestamps where one of both is a date: midnight alone is equal to its date."""
    kind = array.type
    if pa.types.is_timestamp(wanted):
        local = _local(wanted)
        return zoned(_made(_rescaled(_days(array), _DAY, _unit(wanted)), local), wanted, False)
    if pa.types.is_timestamp(kind):
        array = zoned(array, _local(kind), False)
    return _made(_days(array), wanted)


def zoned(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Timestamps: instants stay; where a zone is lost or gained, date and time of day stay."""
    have, want = array.type.tz, wanted.tz
    if (have is None) == (want is None):
        return rescaled(array, wanted, rounding)
    if have is None:
        return _assume(rescaled(array, _local(wanted), rounding), want)
    local = pc.local_timestamp(array)
    if have != "UTC":  # Arrow lets it overflow, and a clock that is put back shows an hour twice
        same = pc.equal(_count(_assume(local, have)), _count(array))
        require(same, f"its local time in {have} is out of range")
    return rescaled(local, wanted, rounding)


def from_text(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Dates and times in ISO 8601: every character counts, and so does every digit."""
    if pa.types.is_date(wanted):
        parts = _parts(array, _DATE)
        return day(_dates(parts), wanted, False)
    if pa.types.is_time(wanted):
        parts = _parts(array, _TIME)
        date = pc.if_else(pc.is_valid(array), pa.scalar("1970-01-01", pa.large_string()), None)
        return _made(_moments(date, parts, wanted, rounding), wanted)
    parts = _parts(array, _LOCAL if wanted.tz is None else _ZONED)
    _dates(parts)  # raises Misfit for a year 0
    local = _made(_moments(parts["date"], parts, wanted, rounding), _local(wanted))
    if wanted.tz is None:
        return local
    zone = parts["zone"]
    told = pc.not_equal(zone, "")
    instants = _less_offset(_count(local), zone, wanted)
    assumed = _assume(pc.if_else(told, None, local), wanted.tz)
    return pc.if_else(told, _made(instants, wanted), assumed)


def to_text(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """As ISO 8601 has it, from which it can be read again."""
    made = array.cast(pa.string())
    try:
        back = from_text(made.cast(pa.large_string()), array.type, False)
    except (pa.ArrowException, Misfit):
        raise Misfit("it has no text of the form YYYY-MM-DD hh:mm:ss") from None
    require(pc.equal(_count(back), _count(array)), "its text would mean another value")
    return made.cast(wanted)


def _unit(kind: pa.DataType) -> int:
    """Nanoseconds of what a type counts."""
    if pa.types.is_date(kind):
        return _DAY if pa.types.is_date32(kind) else _UNITS["ms"]
    return _UNITS[kind.unit]


def _local(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp(kind.unit)


def _count(array: pa.Array) -> pa.Array:
    if array.type.bit_width == 32:
        return array.view(pa.int32()).cast(pa.int64())
    return array.view(pa.int64())


def _made(count: pa.Array, wanted: pa.DataType) -> pa.Array:
    """The values of a type that are so many of its units; dates by their days."""
    if pa.types.is_date64(wanted):
        count = _rescaled(count, _DAY, _UNITS["ms"])
    if pa.types.is_time(wanted):
        within = pc.and_(pc.greater_equal(count, 0), pc.less(count, _DAY // _unit(wanted)))
        require(within, "it is no time between 00:00 and 24:00")
    if wanted.bit_width == 32:
        return count.cast(pa.int32()).view(wanted)
    return count.view(wanted)


def _days(array: pa.Array) -> pa.Array:
    """Of dates, and of timestamps without a zone, as integers."""
    return _rescaled(
        _count(array), _unit(array.type), _DAY, False, "it has a time of day, and a date has none"
    )


def _rescaled(
    count: pa.Array,
    have: int,
    want: int,
    rounding: bool = False,
    why: str = "",
    before: pa.Array | None = None,
) -> pa.Array:
    """``count`` of units of ``have`` as a count of units of ``want``, both in the same measure.

    Halves go to the even number; that of the sum, if ``before`` will be added.
    """
    if have >= want:
        factor = pa.scalar(have // want, pa.int64())
        return count if have == want else pc.multiply_checked(count, factor)
    factor = pa.scalar(want // have, pa.int64())
    whole = pc.divide(count, factor)
    rest = pc.subtract(count, pc.multiply(whole, factor))
    if not rounding:
        require(pc.equal(rest, 0), why)
        return whole
    twice = pc.multiply(pc.abs(rest), 2)
    odd = pc.equal(pc.bit_wise_and(whole if before is None else pc.add(whole, before), 1), 1)
    away = pc.or_(pc.greater(twice, factor), pc.and_(pc.equal(twice, factor), odd))
    return pc.add(whole, pc.if_else(away, pc.sign(rest), pa.scalar(0, pa.int8())))


def _assume(local: pa.Array, zone: str) -> pa.Array:
    """Local times as instants. Raises ArrowInvalid for those that are there twice, or not."""
    made = pc.assume_timezone(local, zone, ambiguous="raise", nonexistent="raise")
    if zone != "UTC":  # Arrow lets it overflow
        same = pc.equal(_count(pc.local_timestamp(made)), _count(local))
        require(same, f"that local time in {zone} is out of range")
    return made


def _parts(array: pa.Array, pattern: str) -> _Parts:
    """The named groups of ``pattern`` in text that has its form; empty where they are left out."""
    parts = pc.extract_regex(array, pattern)
    good = pc.or_(pc.is_valid(parts), pc.is_null(array))
    require(good, f"it is not of the form {_FORM[pattern]}")
    names = [field.name for field in parts.type]
    return dict(zip(names, parts.flatten(), strict=True))  # null where the text is


def _dates(parts: _Parts) -> pa.Array:
    date = parts["date"]
    require(pc.invert(pc.starts_with(date, "0000")), "there is no year 0")
    return date.cast(pa.date32())


def _moments(date: pa.Array, parts: _Parts, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """The counts of dates and times of day, in the unit of ``wanted``."""
    minute, second, unit = parts["minute"], parts["second"], _unit(wanted)
    minute = pc.if_else(pc.equal(minute, ""), "00:00", minute)
    second = pc.if_else(pc.equal(second, ""), "00", second)
    time = pc.binary_join_element_wise(minute, second, pa.scalar(":", pa.large_string()))
    text = pc.binary_join_element_wise(date, time, pa.scalar("T", pa.large_string()))
    whole = _rescaled(_count(text.cast(pa.timestamp("s"))), _SECOND, unit)
    small = pc.utf8_rpad(parts["fraction"], _FRACTION, "0").cast(pa.int64())
    want, why = unit * 10 ** (_FRACTION - 9), f"{wanted} is too coarse for it"
    return pc.add_checked(whole, _rescaled(small, 1, want, rounding, why, before=whole))


def _less_offset(count: pa.Array, zone: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Instants of local times, by the offsets in the texts; null where a text has none."""
    zone = pc.if_else(pc.equal(zone, "Z"), "+00:00", zone)
    zone = pc.if_else(pc.equal(zone, ""), None, zone)
    hours = pc.utf8_slice_codeunits(zone, 1, 3).cast(pa.int64())
    minutes = pc.utf8_slice_codeunits(zone, -2).cast(pa.int64())
    within = pc.and_(pc.less(hours, 24), pc.less(minutes, 60))
    require(within, "its offset from UTC is out of range")
    seconds = pc.add(pc.multiply(hours, 3600), pc.multiply(minutes, 60))
    seconds = pc.if_else(pc.starts_with(zone, "-"), pc.negate(seconds), seconds)
    return pc.subtract_checked(count, _rescaled(seconds, _SECOND, _unit(wanted)))
