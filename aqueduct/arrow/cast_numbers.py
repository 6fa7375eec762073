"""Casts of truth values, numbers and bytes, and of text to them and back.

A rule is a function of an array, the wanted type, and whether values may be rounded. It gives an
array of that type, or raises Misfit or ``pyarrow.ArrowException`` if one value does not fit. Each
value is judged by itself, so that the caller can look for the first one that does not fit.

Nulls stay null. Values are compared as numbers, exactly: what Arrow itself calls a safe cast makes
an infinity of 1e300 and True of 5, and rounds decimals.
"""

from __future__ import annotations

import decimal
import math
import struct
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "Misfit",
    "Rule",
    "binary",
    "boolean",
    "decimal_number",
    "floating",
    "integer",
    "require",
    "text_of",
    "text_to_boolean",
    "text_to_decimal",
    "text_to_floating",
    "text_to_integer",
]

Rule: TypeAlias = Callable[[pa.Array, pa.DataType, bool], pa.Array]
"""Takes an array, the wanted type, and whether it may round."""

_INTEGER: Final = r"^[+-]?[0-9]+$"
_NUMBER: Final = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_PLAIN_NUMBER: Final = r"^[+-]?[0-9]{1,20}(\.[0-9]{0,18})?$"
"""What fits into decimal128(38, 18), so that Arrow can read it without an overflow."""
_NO_NUMBER: Final = r"(?i)^([+-]?inf|[+-]?infinity|nan)$"
_DIGITS: Final = 76  # of the widest decimal that Arrow has
_EXACT: Final = decimal.Context(
    prec=2 * _DIGITS,
    rounding=decimal.ROUND_HALF_EVEN,
    Emin=decimal.MIN_EMIN,
    Emax=decimal.MAX_EMAX,
    traps=[decimal.InvalidOperation, decimal.Overflow],
)
_BITS: Final = {pa.float16(): 16, pa.float32(): 32, pa.float64(): 64}


class Misfit(Exception):
    """Why a value does not fit."""


def require(holds: pa.Array, why: str) -> None:
    """Raises Misfit with ``why`` unless all of the truth values hold; nulls do."""
    if not pc.all(holds, min_count=0).as_py():
        raise Misfit(why)


def boolean(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Numbers as truth values: 0 and 1 alone are equal to one."""
    neither = "it is neither 0 nor 1"
    if pa.types.is_decimal(array.type):
        try:
            array = integer(array, pa.int64(), False)
        except (Misfit, pa.ArrowInvalid):
            raise Misfit(neither) from None
    elif pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    truth = pc.equal(array, pa.scalar(1, array.type))
    require(pc.or_(truth, pc.equal(array, pa.scalar(0, array.type))), neither)
    return truth


def integer(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Truth values and numbers as integers."""
    kind = array.type
    if pa.types.is_decimal(kind):
        try:
            return decimal_number(array, pa.decimal256(_DIGITS, 0), rounding).cast(wanted)
        except Misfit:
            raise Misfit(f"{wanted} has no number that is equal to it") from None
    if not pa.types.is_floating(kind):
        return array.cast(wanted)
    array = array.cast(pa.float64())
    least, end = _bounds(wanted)
    if rounding:
        array = pc.round(array, round_mode="half_to_even")
    else:
        fraction = pc.or_(pc.equal(array, pc.trunc(array)), pc.invert(pc.is_finite(array)))
        require(fraction, f"it has a fraction, and {wanted} has none")
    within = pc.and_(pc.greater_equal(array, least), pc.less(array, end))
    require(within, f"it is out of the range of {wanted}")
    return array.cast(wanted, safe=False)


def floating(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Truth values and numbers as floating point.

    What is floating point already becomes the nearest number; of others only equal ones are taken.
    """
    kind = array.type
    if pa.types.is_decimal(kind):
        return _of_decimals(array, wanted, rounding)
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    if pa.types.is_floating(kind):
        made = array.cast(wanted, safe=False)
        infinite = pc.is_inf(array.cast(pa.float64()))
        overflow = pc.and_not(pc.is_inf(made.cast(pa.float64())), infinite)
        require(pc.invert(overflow), f"it is out of the range of {wanted}")
        return made
    made = array.cast(wanted, safe=False)
    exact = made.cast(pa.float64())
    require(pc.is_finite(exact), f"it is out of the range of {wanted}")
    if not rounding and not _is_small(array, wanted):
        least, end = _bounds(array.type)
        within = pc.and_(pc.greater_equal(exact, least), pc.less(exact, end))
        back = pc.if_else(within, exact, 0.0).cast(array.type, safe=False)
        equal = pc.and_(within, pc.equal(back, array))
        require(equal, f"{wanted} has no number that is equal to it")
    return made


def decimal_number(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Truth values and numbers as decimals."""
    kind = array.type
    if pa.types.is_floating(kind):
        numbers = map(_decimal_of, array.cast(pa.float64()).to_pylist())
        return _to_decimals(numbers, wanted, rounding)
    if not pa.types.is_decimal(kind):
        if pa.types.is_boolean(kind):
            array = array.cast(pa.int8())
        array = array.cast(pa.decimal256(20, 0))
    try:
        return _rescaled(array, wanted, rounding)
    except pa.ArrowInvalid:  # now for what is wrong, if it is not Arrow that lacks room
        return _to_decimals(array.to_pylist(), wanted, rounding)


def text_to_boolean(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """``true`` and ``false``, in any case, and 1 and 0."""
    good = pc.match_substring_regex(array, r"(?i)^(true|false|0|1)$")
    require(good, "it is none of true, false, 1 and 0")
    return array.cast(wanted)


def text_to_integer(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Digits, perhaps after a sign. Arrow itself takes hexadecimal ones, too."""
    require(pc.match_substring_regex(array, _INTEGER), "it is no whole number")
    plain = pc.replace_substring_regex(array, r"^\+", "")
    plain = pc.replace_substring_regex(plain, r"^(-?)0+([0-9])", r"\1\2")
    return pc.replace_substring_regex(plain, r"^-0$", "0").cast(wanted)


def text_to_floating(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """The number that is nearest to the text's; ``inf`` and ``nan`` in any case."""
    number = pc.match_substring_regex(array, _NUMBER)
    require(pc.or_(number, pc.match_substring_regex(array, _NO_NUMBER)), "it is no number")
    if pa.types.is_float16(wanted):  # Arrow parses it by way of another, and so rounds twice
        made = pa.array([_half_of(text) for text in array.to_pylist()], pa.float32()).cast(wanted)
    else:
        made = array.cast(wanted)
    infinite = pc.is_inf(made.cast(pa.float64()))
    require(pc.invert(pc.and_(number, infinite)), f"it is out of the range of {wanted}")
    return made


def text_to_decimal(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """The number that the text is, all of its digits."""
    if pc.all(pc.match_substring_regex(array, _PLAIN_NUMBER), min_count=0).as_py():
        return decimal_number(array.cast(pa.decimal128(38, 18)), wanted, rounding)
    require(pc.match_substring_regex(array, _NUMBER), "it is no number")
    numbers = (None if text is None else Decimal(text) for text in array.to_pylist())
    return _to_decimals(numbers, wanted, rounding)


def text_of(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Truth values and numbers as text, from which they can be read again."""
    return array.cast(pa.string()).cast(wanted)


def binary(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Text and bytes as either; text is UTF-8, and bytes of one length have that one."""
    return array.cast(wanted)


def _bounds(kind: pa.DataType) -> tuple[float, float]:
    """The least number of an integer type, and the first one above its greatest."""
    bits = kind.bit_width
    if pa.types.is_unsigned_integer(kind):
        return 0.0, 2.0**bits
    return -(2.0 ** (bits - 1)), 2.0 ** (bits - 1)


def _rescaled(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    """Decimals as others. Raises ArrowInvalid if Arrow has no room for it, or a value none."""
    kind = array.type
    digits = wanted.precision - wanted.scale + kind.scale
    if kind.scale < wanted.scale and digits > 0:
        # Arrow sees no overflow in rescaling, so what is out of range must go before.
        array = array.cast(_decimal(digits, kind.scale))
    elif kind.scale > wanted.scale >= 0 and rounding and kind.precision < _DIGITS:
        wide = array.cast(_decimal(kind.precision + 1, kind.scale))
        array = pc.round(wide, wanted.scale, round_mode="half_to_even")
    elif kind.scale < wanted.scale or (
        kind.scale > wanted.scale and (rounding or wanted.scale < 0)
    ):
        return _to_decimals(array.to_pylist(), wanted, rounding)  # what Arrow does not always do
    # Arrow drops bits before it looks whether they are needed, where it narrows to 32 bits.
    digits = 38 if max(array.type.bit_width, wanted.bit_width) <= 128 else _DIGITS
    array = array.cast(_decimal(digits, wanted.scale))
    return array.cast(_decimal(wanted.precision, wanted.scale)).cast(wanted)


def _decimal(digits: int, scale: int) -> pa.DataType:
    """The narrower of Arrow's two wide decimals that has so many digits."""
    return pa.decimal128(digits, scale) if digits <= 38 else pa.decimal256(digits, scale)


def _is_small(array: pa.Array, kind: pa.DataType) -> bool:
    """Whether all integers are so small that floating point of this kind has them all."""
    found = pc.min_max(array).as_py()
    limit = 2 ** {16: 11, 32: 24, 64: 53}[kind.bit_width]
    return found["min"] is None or -limit <= found["min"] <= found["max"] <= limit


def _decimal_of(value: float | None) -> Decimal | None:
    if value is None:
        return None
    if not math.isfinite(value):
        raise Misfit("no decimal is equal to it")
    return Decimal(value)


def _to_decimals(
    numbers: Iterable[Decimal | None], wanted: pa.DataType, rounding: bool
) -> pa.Array:
    """Exact, for what Arrow rounds by itself."""
    place = Decimal((0, (1,), -wanted.scale))
    limit = Decimal((0, (1,), wanted.precision - wanted.scale))
    made: list[Decimal | None] = []
    for number in numbers:
        if number is None:
            made.append(None)
            continue
        if number.adjusted() > _DIGITS - wanted.scale and number:
            raise Misfit(f"it is out of the range of {wanted}")
        found = number.quantize(place, context=_EXACT)
        if found.copy_abs() >= limit:  # abs() rounds to 28 digits
            raise Misfit(f"it is out of the range of {wanted}")
        if not rounding and found != number:
            raise Misfit(f"{wanted} has no number that is equal to it")
        made.append(found)
    return pa.array(made, wanted)


def _of_decimals(array: pa.Array, wanted: pa.DataType, rounding: bool) -> pa.Array:
    bits = _BITS[wanted]
    made: list[float | None] = []
    for number in array.to_pylist():
        found = None if number is None else _nearest(number, bits)
        if found is not None and math.isinf(found):
            raise Misfit(f"it is out of the range of {wanted}")
        if found is not None and not rounding and Decimal(found) != number:
            raise Misfit(f"{wanted} has no number that is equal to it")
        made.append(found)
    wide = pa.array(made, pa.float64())
    return wide.cast(wanted, safe=False)  # a number of that size, so that nothing is rounded


def _half_of(text: str | None) -> float | None:
    """The half-precision number nearest to what a text says."""
    if text is None:
        return None
    number = Decimal(text)
    return _nearest(number, 16) if number.is_finite() else float(number)


def _nearest(number: Decimal, bits: int) -> float:
    """The number of ``bits`` bits that is nearest; infinite if it is out of range."""
    found = float(number)
    if bits == 64 or not math.isfinite(found):
        return found
    even = struct.pack("<d", found)[0] & 1 == 0
    if even and Decimal(found) != number:
        # Rounding twice is wrong where the first result lies halfway between two numbers of the
        # second kind. One whose last bit is set never does: of the two around ``number``, take it.
        found = math.nextafter(found, math.inf if number > Decimal(found) else -math.inf)
    form = "<e" if bits == 16 else "<f"
    try:
        value: Any = struct.unpack(form, struct.pack(form, found))[0]
    except OverflowError:
        return math.copysign(math.inf, found)
    return float(value)
