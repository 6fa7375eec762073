"""What a value of Arrow means, by Python's exact numbers and its datetime: the judge of casts.

Values are given as Python has them, but for dates, times and durations, which are counts of their
unit. ``cast_by_hand`` says what the cast of one value must give, or that it must fail. Nothing here
asks pyarrow for more than the parameters of a type.
"""

from __future__ import annotations

import datetime
import math
import re
import struct
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa

from aqueduct.arrow.cast_ways import kind_of

NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
DAY = 86_400 * 10**9
EPOCH = datetime.datetime(1970, 1, 1)
NUMBERS = ("bool", "integer", "float", "decimal")
FORMS = {16: "<e", 32: "<f", 64: "<d"}
PACKED = {16: "<H", 32: "<I", 64: "<Q"}
GREATEST = {16: Fraction(65504), 32: Fraction(2**24 - 1) * 2**104, 64: Fraction(2**53 - 1) * 2**971}
ULP = {16: Fraction(32), 32: Fraction(2**104), 64: Fraction(2**971)}


class Fails(Exception):
    """The cast must fail."""


def cast_by_hand(value: Any, got: pa.DataType, wanted: pa.DataType, rounding: bool) -> Any:
    """What a value becomes; counts for dates, times and durations. Raises Fails."""
    if value is None:
        return None
    have, want = kind_of(got), kind_of(wanted)
    if have in NUMBERS and want in NUMBERS:
        return number_of(value, got, wanted, rounding)
    if have == "text":
        return of_text(value, wanted, rounding)
    if want == "text":
        raise AssertionError("texts are judged by reading them again")
    if "integer" in (have, want):
        return count_within(value, wanted)
    if have == "duration" or have == "time":
        return count_within(divided(value * tick(got), tick(wanted), rounding), wanted)
    return moment_of(value, got, wanted, rounding)


def number_of(value: Any, got: pa.DataType, wanted: pa.DataType, rounding: bool) -> Any:
    """Among truth values and numbers."""
    want = kind_of(wanted)
    if isinstance(value, float) and not math.isfinite(value):
        if want == "float":
            return value
        raise Fails
    exact = Fraction(value)
    if want == "bool":
        if exact not in (0, 1):
            raise Fails
        return exact == 1
    if want == "integer":
        return count_within(divided(exact, Fraction(1), rounding), wanted)
    if want == "decimal":
        return decimal_of(exact, wanted, rounding)
    found = nearest(exact, wanted.bit_width)
    if math.isinf(found) or not (rounding or kind_of(got) == "float" or Fraction(found) == exact):
        raise Fails
    return found


def decimal_of(exact: Fraction, wanted: pa.DataType, rounding: bool) -> Decimal:
    scaled = divided(exact * Fraction(10) ** wanted.scale, Fraction(1), rounding)
    if abs(scaled) >= 10**wanted.precision:
        raise Fails
    return decimal_with(scaled, wanted.scale)


def decimal_with(units: int, scale: int) -> Decimal:
    """So many units of a scale, whatever the precision of Python's context."""
    return Decimal((int(units < 0), Decimal(abs(units)).as_tuple().digits, -scale))


def nearest(exact: Fraction, bits: int) -> float:
    """The floating point number that is nearest, of two the even one."""
    sign = -1.0 if exact < 0 else 1.0
    if abs(exact) >= GREATEST[bits] + ULP[bits] / 2:
        return math.copysign(math.inf, sign)
    if bits == 64:
        return exact.numerator / exact.denominator
    form, packed = FORMS[bits], PACKED[bits]
    near = min(abs(exact), GREATEST[bits])
    try:
        start = struct.unpack(packed, struct.pack(form, near.numerator / near.denominator))[0]
    except OverflowError:
        start = struct.unpack(packed, struct.pack(form, float(GREATEST[bits])))[0]
    found = []
    for place in (start - 1, start, start + 1):
        if place >= 0:
            value = struct.unpack(form, struct.pack(packed, place))[0]
            if math.isfinite(value):
                found.append((abs(Fraction(value) - abs(exact)), place & 1, value))
    return math.copysign(min(found)[2], sign)


def divided(count: Any, unit: Any, rounding: bool) -> int:
    """``count`` in units, a whole number of them. Raises Fails."""
    found = Fraction(count) / Fraction(unit)
    if found.denominator != 1 and not rounding:
        raise Fails
    return round(found)


def count_within(count: int, kind: pa.DataType) -> int:
    """``count``, if a value of the type can be made of it."""
    bits = kind.bit_width
    least, end = -(1 << bits - 1), 1 << bits - 1
    if pa.types.is_unsigned_integer(kind):
        least, end = 0, 1 << bits
    if pa.types.is_time(kind):
        least, end = 0, DAY // tick(kind)
    if not least <= count < end:
        raise Fails
    if pa.types.is_date64(kind) and count % 86_400_000:
        raise Fails
    return count


def tick(kind: pa.DataType) -> int:
    """Nanoseconds of the type's unit."""
    if pa.types.is_date(kind):
        return DAY if pa.types.is_date32(kind) else 10**6
    return NANOSECONDS[kind.unit]


def moment_of(count: int, got: pa.DataType, wanted: pa.DataType, rounding: bool) -> int:
    """Among dates and timestamps."""
    have, want = getattr(got, "tz", None), getattr(wanted, "tz", None)
    have = "" if pa.types.is_date(got) else have or ""
    want = "" if pa.types.is_date(wanted) else want or ""
    moment = count * tick(got)
    if bool(have) != bool(want):
        zone = ZoneInfo(have or want)
        moment = local_of(moment, zone) if have else instant_of(moment, zone)
    if pa.types.is_date(wanted):
        return count_within(divided(moment, DAY, False) * DAY // tick(wanted), wanted)
    return count_within(divided(moment, tick(wanted), rounding), wanted)


def local_of(moment: int, zone: ZoneInfo) -> int:
    seconds, rest = divmod(moment, 10**9)
    there = datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(seconds=seconds)
    local = there.astimezone(zone).replace(tzinfo=None, fold=0)
    found = int((local - EPOCH).total_seconds()) * 10**9 + rest
    if instant_of(found, zone) != moment:
        raise Fails
    return found


def instant_of(moment: int, zone: ZoneInfo) -> int:
    seconds, rest = divmod(moment, 10**9)
    local = EPOCH + datetime.timedelta(seconds=seconds)
    found = set()
    for fold in (0, 1):
        there = local.replace(tzinfo=zone, fold=fold).astimezone(datetime.UTC)
        if there.astimezone(zone).replace(tzinfo=None) == local:
            found.add(there)
    if len(found) != 1:
        raise Fails
    since = found.pop().replace(tzinfo=None) - EPOCH
    return int(since.total_seconds()) * 10**9 + rest


def of_text(text: str, wanted: pa.DataType, rounding: bool) -> Any:
    """What a text means, as the type reads it."""
    want = kind_of(wanted)
    if want == "bool":
        if text.lower() not in ("true", "false", "0", "1"):
            raise Fails
        return text.lower() in ("true", "1")
    if want == "integer":
        if not re.fullmatch("[+-]?[0-9]+", text):
            raise Fails
        return count_within(int(text), wanted)
    if want in ("float", "decimal"):
        return of_number_text(text, wanted, rounding)
    return of_time_text(text, wanted, rounding)


def of_number_text(text: str, wanted: pa.DataType, rounding: bool) -> Any:
    if not re.fullmatch(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        plain = re.fullmatch("[+-]?(inf|infinity)|nan", text.lower())
        if plain is None or pa.types.is_decimal(wanted):
            raise Fails
        return float(text)
    exact = Fraction(Decimal(text))
    if pa.types.is_decimal(wanted):
        return decimal_of(exact, wanted, rounding)
    found = nearest(exact, wanted.bit_width)
    if math.isinf(found):
        raise Fails
    return found


def of_time_text(text: str, wanted: pa.DataType, rounding: bool) -> int:
    digits, day = "", "[0-9]{4}-[0-9]{2}-[0-9]{2}"
    time = r"(?:[01][0-9]|2[0-3]):[0-9]{2}(?::[0-9]{2}(?:\.([0-9]{1,18}))?)?"
    if kind_of(wanted) == "date":
        form = f"({day})"
    elif kind_of(wanted) == "time":
        form, text = f"1970-01-01 {time}", f"1970-01-01 {text}"
    else:
        zone = "" if wanted.tz is None else r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
        form = f"{day}(?:[T ]{time}{zone})?"
    found = re.fullmatch(form, text)
    if not found:
        raise Fails
    if "." in text:
        digits = found[1]
        text = text.replace(f".{digits}", "")
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise Fails from None
    seconds = (moment.replace(tzinfo=None) - EPOCH) // datetime.timedelta(seconds=1) * 10**9
    exact = seconds + Fraction(int(digits or 0), 10 ** len(digits)) * 10**9
    if kind_of(wanted) == "date":
        return count_within(divided(exact, tick(wanted), False), wanted)
    count = count_within(divided(exact, tick(wanted), rounding), wanted)
    offset = moment.utcoffset()
    if getattr(wanted, "tz", None) is None:
        return count
    if offset is None:
        return instant_of(count * tick(wanted), ZoneInfo(wanted.tz)) // tick(wanted)
    return count - int(offset.total_seconds()) * 10**9 // tick(wanted)
