"""Casts by value, each compared with what Python's exact numbers and its datetime say."""

from __future__ import annotations

import datetime
import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduct.arrow.cast_ways import RULES, kind_of, obstacle
from aqueduct.arrow.casts import Unfit, cast
from tests.arrow.judges import Fails, cast_by_hand, decimal_with, tick
from tests.support.selection import EXAMPLES, some_examples

ROOT = Path(__file__).parents[2]
UNITS = ("s", "ms", "us", "ns")
INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
DECIMALS = [
    *(getattr(pa, f"decimal{bits}")(5, 2) for bits in (32, 64) if hasattr(pa, f"decimal{bits}")),
    pa.decimal128(3, 3),
    pa.decimal128(5, -2),
    pa.decimal128(10, 0),
    pa.decimal128(38, 0),
    pa.decimal128(38, 18),
    pa.decimal128(38, 38),
    pa.decimal256(40, -10),
    pa.decimal256(50, 25),
    pa.decimal256(76, 0),
    pa.decimal256(76, 76),
]
NUMBERS = [pa.bool_(), *INTEGERS, *FLOATS, *DECIMALS]
DATES = [pa.date32(), pa.date64()]
TIMES = [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
STAMPS = [pa.timestamp(unit) for unit in UNITS]
ZONED = [pa.timestamp(unit, zone) for unit in UNITS for zone in ("UTC", "Europe/Zurich")]
DURATIONS = [pa.duration(unit) for unit in UNITS]
TEXTS = [pa.string(), pa.large_string(), pa.string_view()]
BINARIES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)]
COUNTED = [*DATES, *TIMES, *STAMPS, *ZONED, *DURATIONS]
LEAVES = [*NUMBERS, *COUNTED, *TEXTS, *BINARIES]
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]
DAYS_OF_ZONES = 24_000
"""For how many days since 1970 both sides know the clock changes of a zone."""


def counted(counts: list[int | None], kind: pa.DataType) -> pa.Array:
    """An array of dates, times or durations, by their counts."""
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    return pa.array(counts, width).view(kind)


def values_of(array: pa.Array) -> list[Any]:
    """What an array holds, as ``cast_by_hand`` has it."""
    if array.type in COUNTED:
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    return list(array.to_pylist())


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array:
    return counted(values, kind) if kind in COUNTED else pa.array(values, kind)


def same(found: Any, wanted: Any) -> bool:
    """Equal by value: NaN is NaN."""
    if isinstance(found, float) and isinstance(wanted, float) and math.isnan(wanted):
        return math.isnan(found)
    return type(found) is type(wanted) and found == wanted


def numbers(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type of number, those at its edges among them."""
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_integer(kind):
        bits, signed = kind.bit_width, pa.types.is_signed_integer(kind)
        least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return st.integers(max(least, -3), min(most, 3)) | st.integers(least, most)
    if pa.types.is_floating(kind):
        plain = st.floats(width=kind.bit_width)
        edges = st.sampled_from([0.0, -0.0, 0.5, 1.5, 2.5, 1.0, -1.25])
        wide = st.sampled_from([2.0**31, 2.0**63, 2.0**64, -(2.0**63), 1e300, 65519.0, 0.1, 1.239])
        return edges | plain | wide if kind.bit_width == 64 else edges | plain
    limit = 10**kind.precision - 1
    units = st.integers(-limit, limit) | st.integers(-min(limit, 300), min(limit, 300))
    return units.map(lambda unit: decimal_with(unit, kind.scale))


def counts(kind: pa.DataType) -> st.SearchStrategy[int]:
    """Counts that a type of date, time or duration may have, whole days and minutes among them."""
    if pa.types.is_time(kind):
        return st.integers(0, 86_400 * 10**9 // tick(kind) - 1)
    if getattr(kind, "tz", None) not in (None, "UTC"):
        most = DAYS_OF_ZONES * 86_400 * 10**9 // tick(kind)
        hours = st.integers(0, DAYS_OF_ZONES * 24).map(lambda n: n * 3600 * 10**9 // tick(kind))
        return hours | st.integers(0, most)
    bits = kind.bit_width
    anything = st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    step = max(86_400 * 10**9 // tick(kind), 1)
    days = st.integers(-4_000, 40_000).map(lambda n: n * step)
    near = st.integers(-(10**8) * step // 10**3, 10**8 * step // 10**3)
    if pa.types.is_date64(kind):
        return days | st.integers(-(1 << 63) // step + 1, (1 << 63) // step - 1).map(
            lambda n: n * step
        )
    return days | near | anything


def known_by_zones(value: int, got: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether the clock changes of the zones are known there, if one is concerned."""
    zones = {getattr(kind, "tz", None) for kind in (got, wanted)} - {None}
    first, last = 2 * 86_400 * 10**9, DAYS_OF_ZONES * 86_400 * 10**9
    return not zones or first <= value * tick(got) <= last


def judge(values: list[Any], got: pa.DataType, wanted: pa.DataType, rounding: bool) -> None:
    """Casts ``values`` and compares: all of them, or the first one that fails."""
    expected: list[Any] = []
    for row, value in enumerate(values):
        try:
            expected.append(cast_by_hand(value, got, wanted, rounding))
        except Fails:
            with pytest.raises(Unfit) as caught:
                cast(array_of(values, got), wanted, rounding=rounding)
            assert (caught.value.row, caught.value.path) == (row, ())
            assert values[row] is not None
            break
    else:
        made = cast(array_of(values, got), wanted, rounding=rounding)
        assert made.type == wanted
        found = values_of(made)
        pairs = zip(found, expected, strict=True)
        assert all(same(each, right) for each, right in pairs), (found, expected)


def some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.none() | strategy, min_size=1, max_size=5)


# Numbers


@pytest.mark.parametrize("got", NUMBERS, ids=str)
@settings(max_examples=30)
@given(data=st.data(), rounding=st.booleans())
def test_casts_of_numbers_change_no_value(data, got, rounding):
    wanted = data.draw(st.sampled_from([kind for kind in NUMBERS if kind != got]))
    judge(data.draw(some(numbers(got))), got, wanted, rounding)


@pytest.mark.parametrize(
    ("value", "got", "wanted", "why"),
    [
        (1e300, pa.float64(), pa.float32(), "out of the range of float"),
        (-1e39, pa.float64(), pa.float32(), "out of the range of float"),
        (70000.0, pa.float32(), pa.float16(), "out of the range of halffloat"),
        (70000, pa.int32(), pa.float16(), "out of the range of halffloat"),
        (5, pa.int64(), pa.bool_(), "neither 0 nor 1"),
        (0.7, pa.float64(), pa.bool_(), "neither 0 nor 1"),
        (Decimal("0.7"), pa.decimal128(2, 1), pa.bool_(), "neither 0 nor 1"),
        (Decimal(10**30), pa.decimal128(38, 0), pa.bool_(), "neither 0 nor 1"),
        (Decimal(300), pa.decimal128(38, 0), pa.int8(), "out of bounds"),
        (math.nan, pa.float64(), pa.bool_(), "neither 0 nor 1"),
        (math.nan, pa.float64(), pa.int64(), "out of the range of int64"),
        (math.inf, pa.float64(), pa.decimal128(10, 2), "no decimal is equal to it"),
        (2.0**63, pa.float64(), pa.int64(), "out of the range of int64"),
        (2.0**64, pa.float64(), pa.uint64(), "out of the range of uint64"),
        (300, pa.int64(), pa.int8(), "not in range"),
        (-1, pa.int64(), pa.uint64(), "not in range"),
        (Decimal("99.999"), pa.decimal128(5, 3), pa.decimal128(4, 2), "out of the range of dec"),
        (10**9, pa.int64(), pa.decimal128(10, 2), "out of the range of decimal128(10, 2)"),
        (1, pa.int64(), pa.decimal256(76, 76), "out of the range of decimal256(76, 76)"),
    ],
    ids=str,
)
def test_casts_out_of_range_are_errors_also_with_rounding(value, got, wanted, why):
    for rounding in (False, True):
        with pytest.raises(Unfit) as caught:
            cast(pa.array([None, value], got), wanted, rounding=rounding)
        assert caught.value.row == 1
        assert why in caught.value.why and 'cast="round"' not in caught.value.why


@pytest.mark.parametrize(
    ("value", "got", "wanted", "rounded"),
    [
        (1.239, pa.float64(), pa.decimal128(10, 2), Decimal("1.24")),
        (0.1, pa.float64(), pa.decimal128(10, 2), Decimal("0.10")),
        (Decimal("1.235"), pa.decimal128(5, 3), pa.decimal128(10, 2), Decimal("1.24")),
        (Decimal("1.225"), pa.decimal128(5, 3), pa.decimal128(10, 2), Decimal("1.22")),
        (Decimal("0.1"), pa.decimal128(5, 3), pa.float64(), 0.1),
        (2**53 + 1, pa.int64(), pa.float64(), 2.0**53),
        (2**64 - 1, pa.uint64(), pa.float64(), 2.0**64),
        (16777217, pa.int32(), pa.float32(), 16777216.0),
        (2.5, pa.float64(), pa.int32(), 2),
        (Decimal("3.5"), pa.decimal128(5, 1), pa.int8(), 4),
        (Decimal("1E+2"), pa.decimal128(5, -2), pa.decimal128(5, -3), Decimal("0E+3")),
        ("1.239", pa.string(), pa.decimal128(10, 2), Decimal("1.24")),
    ],
    ids=str,
)
def test_casts_that_round_name_the_option(value, got, wanted, rounded):
    with pytest.raises(Unfit) as caught:
        cast(pa.array([value], got), wanted)
    assert caught.value.why.endswith(f'; it would become {rounded!r}, which cast="round" allows')
    assert cast(pa.array([value], got), wanted, rounding=True).to_pylist() == [rounded]


@pytest.mark.parametrize("got", [kind for kind in DECIMALS if kind.precision > 9], ids=str)
@pytest.mark.parametrize("wanted", [kind for kind in DECIMALS if kind.precision < 10], ids=str)
def test_casts_to_narrow_decimals_drop_no_bits(got, wanted):
    most = 10**got.precision
    for units in (2**32 + 5, 2**33 * 1000, 2**64 + 5, 2**64, 2**128 + 7, 2**128 * 10):
        if units < most:
            judge([decimal_with(units, got.scale)], got, wanted, False)
            judge([decimal_with(units, got.scale)], got, wanted, True)


def test_casts_of_floats_take_the_nearest():
    doubles = [0.1, -0.0, math.nan, math.inf, 1e-300, 3.4028235677973362e38]
    found = cast(pa.array(doubles), pa.float32()).to_pylist()
    assert found[:2] == [0.10000000149011612, 0.0] and math.copysign(1, found[1]) < 0
    assert math.isnan(found[2]) and found[3:] == [math.inf, 0.0, 3.4028234663852886e38]


# Text


@pytest.mark.parametrize("wanted", NUMBERS, ids=str)
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data(), rounding=st.booleans(), kind=st.sampled_from(TEXTS))
def test_casts_of_text_to_numbers_read_every_character(data, wanted, rounding, kind):
    good = numbers(wanted).map(str)
    loose = st.from_regex(r"[+-]?[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
    odd = st.sampled_from(
        ["", " 5", "5 ", "+5", "-0", "007", "0x10", "1e3", "1.0", "1_0", "٣", "5\n", ".5", "5.",
         ".", "1e400", "1e-400", "inf", "-Infinity", "nan", "NaN(1)", "TRUE", "false", "t", "1,5"]
    )  # fmt: skip
    judge(data.draw(some(good | loose | odd)), kind, wanted, rounding)


@pytest.mark.parametrize("got", NUMBERS, ids=str)
@settings(max_examples=20)
@given(data=st.data(), kind=st.sampled_from(TEXTS))
def test_casts_of_numbers_to_text_can_be_read_again(data, got, kind):
    values = data.draw(some(numbers(got)))
    made = cast(pa.array(values, got), kind)
    assert made.type == kind
    read = [cast_by_hand(text, kind, got, False) for text in made.to_pylist()]
    held = pa.array(values, got).to_pylist()
    assert all(same(each, right) for each, right in zip(read, held, strict=True)), (made, held)


def test_casts_of_text_bound_their_work():
    texts = pa.array(["1e-999999999", "-1e-999999999"])
    assert cast(texts, pa.float16()).to_pylist() == [0.0, 0.0]
    assert cast(texts, pa.decimal128(3, 1), rounding=True).to_pylist() == [0, 0]
    for text in ("1e999999999", "9" * 100_000):
        for kind in (pa.float16(), pa.float64(), pa.decimal128(3, 1), pa.int64()):
            with pytest.raises(Unfit):
                cast(pa.array([text]), kind, rounding=True)


@pytest.mark.parametrize("wanted", [*DATES, *TIMES, *STAMPS, *ZONED], ids=str)
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data(), rounding=st.booleans(), kind=st.sampled_from(TEXTS))
def test_casts_of_text_to_times_read_every_character(data, wanted, rounding, kind):
    known = wanted in ZONED
    first, last = (datetime.date(1970, 1, 3), datetime.date(2035, 1, 1)) if known else (None, None)
    dates = st.dates(*((first, last) if known else ())).map(str)
    fractions = st.text("0159", min_size=1, max_size=18).map(lambda digits: f".{digits}")
    whole = st.integers(0, 59).map(":{:02}".format)
    seconds = st.builds("{}{}".format, whole, fractions | st.just(""))
    times = st.builds(
        "{:02}:{:02}{}".format, st.integers(0, 23), st.integers(0, 59), seconds | st.just("")
    )
    zones = st.sampled_from(["", "Z", "+01:00", "-0930", "+14:00"])
    stamps = st.builds("{}{}{}{}".format, dates, st.sampled_from(["T", " "]), times, zones)
    odd = st.sampled_from(
        ["2024-02-30", "2024-1-1", "20240101", "2024-01-01 24:00", "2024-01-01 23:59:60", "12:60",
         "2024-01-01T12", " 2024-01-01", "2024-01-01 12:00:00.", "2024-01-01 12:00.5", "0000-01-01",
         "10000-01-01", "2024-01-01Z", "2024-01-01 12:00+1", "24:00:00", "23:59:59.9999999999",
         "2024-01-01 12:00:00.1234567890123456789", "now", ""]
    )  # fmt: skip
    judge(data.draw(some(dates | times | stamps | odd)), kind, wanted, rounding)


@pytest.mark.parametrize("got", [*DATES, *TIMES, *STAMPS, *ZONED], ids=str)
@settings(max_examples=20)
@given(data=st.data(), kind=st.sampled_from(TEXTS))
def test_casts_of_times_to_text_can_be_read_again(data, got, kind):
    days = st.integers(0, DAYS_OF_ZONES) if got in ZONED else st.integers(-700_000, 2_900_000)
    step = 86_400 * 10**9 // tick(got) or 1
    parts = st.just(0) if got in DATES else st.integers(0, max(step - 1, 0))
    whole = parts if got in TIMES else st.builds(lambda day, part: day * step + part, days, parts)
    if got in (pa.timestamp("ns"), pa.timestamp("ns", "UTC")):
        whole = whole.filter(lambda count: abs(count) < 1 << 63)
    values = data.draw(some(whole))
    made = cast(counted(values, got), kind)
    assert [cast_by_hand(text, kind, got, False) for text in made.to_pylist()] == values


@pytest.mark.parametrize("count", [-(2**30), -719_529, 2_932_897, 2**31 - 1])
def test_casts_of_dates_that_have_no_text_are_errors(count):
    with pytest.raises(Unfit) as caught:
        cast(counted([0, count], pa.date32()), pa.string())
    assert caught.value.row == 1 and caught.value.value


# Dates and times


@pytest.mark.parametrize("got", COUNTED, ids=str)
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data(), rounding=st.booleans())
def test_casts_of_times_change_no_value(data, got, rounding):
    ways = [kind for kind in COUNTED if kind != got and obstacle(kind, got) is None]
    wanted = data.draw(st.sampled_from(ways))
    values = data.draw(some(counts(got)))
    judge([v for v in values if v is None or known_by_zones(v, got, wanted)], got, wanted, rounding)


@pytest.mark.parametrize("kind", COUNTED, ids=str)
@settings(max_examples=15)
@given(data=st.data(), rounding=st.booleans(), integers=st.sampled_from(INTEGERS))
def test_casts_of_counts_change_no_value(data, kind, rounding, integers):
    judge(data.draw(some(counts(kind))), kind, integers, rounding)
    judge(data.draw(some(numbers(integers))), integers, kind, rounding)


@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize(
    ("text", "got", "wanted", "why"),
    [
        ("2024-01-01 13:05", "us", pa.date32(), "it has a time of day, and a date has none"),
        ("2024-01-01 13:05", "us", pa.date64(), "it has a time of day, and a date has none"),
        ("2263-01-01 00:00", "s", pa.timestamp("ns"), "overflow"),
        ("2024-03-31 02:30", "us", pa.timestamp("us", "Europe/Zurich"), "doesn't exist"),
        ("2024-10-27 02:30", "us", pa.timestamp("us", "Europe/Zurich"), "ambiguous"),
    ],
    ids=str,
)
def test_casts_lose_no_time_and_invent_none(text, got, wanted, why, rounding):
    moment = datetime.datetime.fromisoformat(text)
    with pytest.raises(Unfit) as caught:
        cast(pa.array([None, moment], pa.timestamp(got)), wanted, rounding=rounding)
    assert caught.value.row == 1
    assert why in caught.value.why and 'cast="round"' not in caught.value.why


def test_casts_to_coarser_units_round_if_that_is_allowed():
    moments = pa.array([1_500_000, 2_500_000, -1_500_000, -500_000], pa.timestamp("us"))
    with pytest.raises(Unfit, match=r'too coarse for it; it would become .* which cast="round"'):
        cast(moments, pa.timestamp("s"))
    assert values_of(cast(moments, pa.timestamp("s"), rounding=True)) == [2, 2, -2, 0]
    late = pa.array([86_399_999], pa.time32("ms"))
    with pytest.raises(Unfit, match="no time between 00:00 and 24:00"):
        cast(late, pa.time32("s"), rounding=True)


def test_casts_keep_the_date_and_time_where_a_zone_is_lost_or_gained():
    local = pa.array([datetime.datetime(2024, 7, 1, 13, 5)], pa.timestamp("us"))
    there = cast(local, pa.timestamp("us", "Europe/Zurich"))
    assert values_of(there) == [values_of(local)[0] - 2 * 3600 * 10**6]
    assert cast(there, pa.timestamp("us")).equals(local)
    assert values_of(cast(there, pa.timestamp("us", "UTC"))) == values_of(there)
    midnight = cast(pa.array([0, 19905], pa.date32()), pa.timestamp("us", "Europe/Zurich"))
    assert values_of(cast(midnight, pa.date32())) == [0, 19905]


# Bytes


@some_examples
@given(
    st.sampled_from([*TEXTS, *BINARIES]),
    st.sampled_from([*TEXTS, *BINARIES]),
    st.lists(st.none() | st.binary(max_size=3) | st.text(max_size=3).map(str.encode)),
)
def test_casts_of_bytes_and_text_change_no_byte(got, wanted, values):
    if kind_of(got) == "text":
        values = [None if each is None else each.decode("latin") for each in values]
    if got == pa.binary(2):
        values = [each if each is None else (each + b"ab")[:2] for each in values]

    def good(value: Any) -> bool:
        raw = value.encode() if isinstance(value, str) else value
        try:
            return (kind_of(wanted) == "binary" and (wanted != pa.binary(2) or len(raw) == 2)) or (
                kind_of(wanted) == "text" and raw.decode() is not None
            )
        except UnicodeDecodeError:
            return False

    bad = [row for row, value in enumerate(values) if value is not None and not good(value)]
    if bad and obstacle(wanted, got) is None:
        with pytest.raises(Unfit) as caught:
            cast(pa.array(values, got), wanted)
        assert caught.value.row == bad[0]
        return
    made = cast(pa.array(values, got), wanted)
    raw = [each.encode() if isinstance(each, str) else each for each in made.to_pylist()]
    assert raw == [each.encode() if isinstance(each, str) else each for each in values]


# The table


def test_there_are_the_casts_of_the_table_and_no_others():
    for got in LEAVES:
        for wanted in LEAVES:
            way = (kind_of(got), kind_of(wanted)) in RULES or got == wanted
            assert (obstacle(wanted, got) is None) == way, (got, wanted)
            if way:
                assert cast(pa.nulls(3, got), wanted).equals(pa.nulls(3, wanted))
                assert cast(pa.nulls(0, got), wanted).equals(pa.nulls(0, wanted))
            else:
                with pytest.raises(pa.ArrowNotImplementedError, match="there is no cast from"):
                    cast(pa.nulls(3, got), wanted)


@pytest.mark.checkout
def test_casts_are_in_the_cookbook():
    text = (ROOT / "docs" / "cookbook" / "casts.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([`\w, ]+) \|", text, re.MULTILINE)
    told = {(got, wanted) for got, names in rows for wanted in re.findall(r"`(\w+)`", names)}
    assert told == set(RULES)


@pytest.mark.parametrize(
    ("wanted", "got", "path", "why"),
    [
        (pa.int64(), pa.list_(pa.int64()), (), ""),
        (pa.date32(), pa.time32("s"), (), ""),
        (pa.int64(), pa.binary(), (), ""),
        (pa.bool_(), pa.date32(), (), ""),
        (pa.null(), pa.int8(), (), ""),
        (pa.float64(), pa.duration("s"), (), ""),
        (pa.duration("s"), pa.month_day_nano_interval(), (), ""),
        (pa.binary(3), pa.binary(2), (), ""),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3), (), ""),
        (pa.struct([("x", pa.int8())]), pa.struct([]), (), "it lacks the field 'x'"),
        (pa.struct([]), pa.struct([("x", pa.int8())]), (), "the field 'x' is not wanted"),
        (
            pa.struct([("x", pa.int8()), ("y", pa.int8())]),
            pa.struct([("x", pa.int8()), ("z", pa.int8())]),
            (),
            "it lacks the field 'y', and the field 'z' is not wanted",
        ),
        (
            pa.list_(pa.struct([("x", pa.map_(pa.string(), pa.int8()))])),
            pa.large_list(pa.struct([("x", pa.map_(pa.string(), pa.binary()))])),
            ("item", "x", "value"),
            "",
        ),
        (
            pa.map_(pa.string(), pa.int8(), keys_sorted=True),
            pa.map_(pa.string(), pa.int8()),
            (),
            "its keys are not declared to be sorted",
        ),
        (
            pa.dictionary(pa.int8(), pa.string(), ordered=True),
            pa.string(),
            (),
            "the order of its values is not known",
        ),
        (
            pa.dense_union([pa.field("a", pa.int8())]),
            pa.dense_union([pa.field("a", pa.int16())]),
            (),
            "",
        ),
        (pa.uuid(), pa.json_(), (), ""),
        (pa.uuid(), pa.int64(), (), ""),
    ],
    ids=str,
)
def test_casts_that_make_no_sense_have_an_obstacle(wanted, got, path, why):
    found = obstacle(wanted, got)
    assert found is not None
    assert (found.path, found.why) == (path, why)


def test_the_extension_type_of_truth_values_is_cast_as_bool():
    stored = pa.array([0, 1, 5, None], pa.int8())
    truth = pa.ExtensionArray.from_storage(pa.bool8(), stored)
    assert cast(truth, pa.bool_()).to_pylist() == [False, True, True, None]
    assert cast(truth, pa.int64()).to_pylist() == [0, 1, 1, None]
    assert cast(truth, pa.string()).to_pylist() == ["false", "true", "true", None]
    made = cast(pa.array([1, 0, None]), pa.bool8())
    assert made.type == pa.bool8()
    assert made.storage.to_pylist() == [1, 0, None]
    assert cast(pa.array(["true", "FALSE"]), pa.bool8()).storage.to_pylist() == [1, 0]
    for wanted in (pa.bool8(), pa.list_(pa.bool8())):
        array = pa.array([1, 5]) if wanted == pa.bool8() else pa.array([[1], [5]])
        with pytest.raises(Unfit, match="neither 0 nor 1") as caught:
            cast(array, wanted, rounding=True)
        assert caught.value.row == 1
    assert obstacle(pa.bool8(), pa.date32()) is not None


def test_casts_of_extension_types_are_those_of_their_storage():
    raw = pa.array([b"0123456789abcdef", None], pa.binary(16))
    wrapped = cast(raw.cast(pa.binary()), pa.uuid())
    assert wrapped.type == pa.uuid() and cast(wrapped, pa.large_binary()).to_pylist() == (
        raw.to_pylist()
    )
    assert cast(pa.array(["1"]), pa.json_()).storage.to_pylist() == ["1"]


@pytest.mark.parametrize("wanted", [pa.int64(), pa.date32(), pa.bool_(), pa.decimal128(5, 2)])
def test_text_that_is_not_utf8_is_named_by_its_type(wanted):
    """A peer may send it, and Python has no words for it."""
    words = pa.array([b"1", b"\xff\xfe\x80"])
    text = pa.Array.from_buffers(pa.string(), 2, words.buffers())
    with pytest.raises(Unfit) as caught:
        cast(text.slice(1), wanted)
    assert (caught.value.row, caught.value.value) == (0, "a value of large_string")
