"""Batches as JSON rows and back: each type by its rule, and what does not fit named."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import assume, given

from aqueduct.arrow.json_rows import decode_rows, encode_rows, fits_json, most_values
from aqueduct.errors import BadCall, BatchTooLarge, LocalProtocolError
from tests.arrow.strategies import shown_rightly, streams
from tests.support.selection import some_examples

NS = pa.timestamp("ns")
UTC = datetime.UTC
UNION = pa.dense_union([pa.field("i", pa.int32()), pa.field("s", pa.string())])


def of(kind, values, *, nullable=True):
    schema = pa.schema([pa.field("a", kind, nullable=nullable)])
    return pa.RecordBatch.from_arrays([pa.array(values, kind)], schema=schema)


def read(kind, text, *, nullable=True):
    schema = pa.schema([pa.field("a", kind, nullable=nullable)])
    return decode_rows(text.encode(), schema).column(0)


RULES = [
    (pa.bool_(), [True, False, None], "[true,false,null]"),
    (pa.int8(), [-128, 127], "[-128,127]"),
    (pa.uint32(), [4294967295], "[4294967295]"),
    (pa.int64(), [-(2**63), None], '["-9223372036854775808",null]'),
    (pa.uint64(), [2**64 - 1], '["18446744073709551615"]'),
    (pa.float32(), [0.1, 1e20], "[0.1,1e+20]"),
    (pa.float64(), [1.5, -0.0], "[1.5,-0.0]"),
    (pa.float64(), [float("inf"), float("-inf")], '["Infinity","-Infinity"]'),
    (pa.decimal128(5, 2), [Decimal("1.50"), None], '["1.50",null]'),
    (pa.string(), ['a"\\\n\x01é漢', ""], '["a\\"\\\\\\n\\u0001é漢",""]'),
    (pa.large_string(), ["plain"], '["plain"]'),
    (pa.string_view(), ["plain"], '["plain"]'),
    (pa.binary(), [b"\xff\x00", b""], '["/wA=",""]'),
    (pa.binary(2), [b"ab"], '["YWI="]'),
    (pa.date32(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)],
     '["0001-01-01","9999-12-31"]'),
    (pa.date64(), [datetime.date(2026, 1, 31)], '["2026-01-31"]'),
    (pa.time32("s"), [datetime.time(23, 59, 59)], '["23:59:59"]'),
    (pa.time64("us"), [datetime.time(1, 2, 3, 4)], '["01:02:03.000004"]'),
    (pa.timestamp("s"), [datetime.datetime(2026, 1, 31, 1, 2, 3)], '["2026-01-31T01:02:03Z"]'),
    (pa.timestamp("us", "Europe/Berlin"), [datetime.datetime(2026, 1, 31, 1, 2, 3, 4, UTC)],
     '["2026-01-31T01:02:03.000004Z"]'),
    (pa.duration("ms"), [1500, -60_000, 0], '["PT1.5S","-PT60S","PT0S"]'),
    (pa.month_day_nano_interval(), [pa.MonthDayNano([1, -2, 3])],
     '[{"months":1,"days":-2,"nanoseconds":"3"}]'),
    (pa.list_(pa.int32()), [[1, None], [], None], "[[1,null],[],null]"),
    (pa.list_(pa.int64(), 2), [[1, 2], None], '[["1","2"],null]'),
    (pa.struct({"x": pa.int32(), "y": pa.string()}), [{"x": 1, "y": None}, None],
     '[{"x":1,"y":null},null]'),
    (pa.map_(pa.string(), pa.int32()), [[("k", 1), ("k", 2)], [], None],
     '[[["k",1],["k",2]],[],null]'),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b", None, "a"], '["a","b",null,"a"]'),
    (pa.null(), [None], "[null]"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "text"), RULES, ids=[str(rule[0]) for rule in RULES])
def test_each_type_has_its_rule(kind, values, text):
    batch = of(kind, values)
    rows = json.loads(encode_rows(batch))
    assert rows == [{"a": value} for value in json.loads(text)]
    assert encode_rows(batch).count(b"\n") == 0
    again = decode_rows(encode_rows(batch), batch.schema)
    again.validate(full=True)
    assert again.equals(batch)


def test_a_union_names_the_field_of_each_value():
    kinds = pa.array([0, 1, 0], pa.int8())
    starts = pa.array([0, 0, 1], pa.int32())
    children = [pa.array([1, 2], pa.int32()), pa.array(["a"])]
    array = pa.UnionArray.from_dense(kinds, starts, children, ["i", "s"])
    batch = pa.RecordBatch.from_arrays([array], schema=pa.schema({"a": UNION}))
    assert json.loads(encode_rows(batch)) == [{"a": {"i": 1}}, {"a": {"s": "a"}}, {"a": {"i": 2}}]
    assert decode_rows(encode_rows(batch), batch.schema).to_pylist() == batch.to_pylist()
    part = batch.slice(1, 2)
    assert json.loads(encode_rows(part)) == [{"a": {"s": "a"}}, {"a": {"i": 2}}]


def test_runs_are_as_their_values():
    kind = pa.run_end_encoded(pa.int16(), pa.string())
    array = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int16()), ["x", "y"], kind)
    batch = pa.RecordBatch.from_arrays([array], names=["a"]).slice(1, 3)
    assert json.loads(encode_rows(batch)) == [{"a": "x"}, {"a": "y"}, {"a": "y"}]
    assert decode_rows(encode_rows(batch), batch.schema).to_pylist() == batch.to_pylist()


def test_nan_is_null_and_comes_back_where_no_null_is_allowed():
    batch = of(pa.float64(), [1.0, float("nan")], nullable=False)
    assert encode_rows(batch) == b'[{"a":1},{"a":null}]'
    back = decode_rows(encode_rows(batch), batch.schema).column(0)
    assert str(back[1].as_py()) == "nan"
    assert decode_rows(encode_rows(batch), of(pa.float64(), []).schema).column(0).null_count == 1


@some_examples
@given(streams())
def test_any_batch_comes_back(batches):
    for batch in batches:
        try:
            fits_json(batch.schema)
        except BadCall:
            assume(False)
        text = encode_rows(batch)
        back = decode_rows(text, batch.schema)
        back.validate(full=True)
        assert back.schema.equals(batch.schema)
        if shown_rightly(batch.schema):
            assert back.to_pylist() == batch.to_pylist()
        assert encode_rows(back) == text


def test_many_rows_are_made_in_parts_and_come_back_as_one_batch():
    kind = pa.dictionary(pa.int16(), pa.string())
    batch = pa.record_batch(
        {"n": pa.array(range(10_000), pa.int64()), "d": pa.array(list("ab") * 5000).cast(kind)}
    )
    back = decode_rows(encode_rows(batch), batch.schema)
    assert back.num_rows == 10_000
    assert back.to_pylist() == batch.to_pylist()
    text = b"[" + b'{"n":1,"d":"a"},' * 9999 + b'{"n":300,"d":"a"}]'
    with pytest.raises(BadCall, match=r"row 9999, column 'n': 300 is out of the range of int8"):
        decode_rows(text, batch.schema.set(0, pa.field("n", pa.int8())))


JOINED = [
    (pa.float16(), [1.5, 2.5, -8]),
    (pa.float32(), [1.5, -0.0, 0]),
    (pa.struct({"x": pa.int8()}), [{"x": 1}, {"x": 2}, {"x": None}]),
    (pa.list_(pa.string()), [["a"], ["b", None], []]),
    (pa.uuid(), ["YWJjZGVmZ2hpamtsbW5vcA==", "YWJjZGVmZ2hpamtsbW5vcQ==", None]),
]


@pytest.mark.parametrize(("kind", "values"), JOINED, ids=[str(each[0]) for each in JOINED])
def test_dictionaries_of_parts_are_joined(kind, values):
    first, second, third = values
    rows = [{"a": first}] * 4096 + [{"a": second}, {"a": first}, {"a": third}]
    schema = pa.schema({"a": pa.dictionary(pa.int8(), kind)})
    back = decode_rows(json.dumps(rows).encode(), schema)
    assert back.num_rows == 4099
    assert json.loads(encode_rows(back)) == rows
    assert encode_rows(back).endswith(
        encode_rows(decode_rows(json.dumps(rows[4096:]).encode(), schema))[1:]
    )


@pytest.mark.parametrize(
    ("kind", "count", "distinct", "says"),
    [
        (pa.dictionary(pa.int8(), pa.string()), 200, 200, "more distinct ones than the index int8"),
        (pa.dictionary(pa.int8(), pa.string()), 5000, 120, None),
        (pa.dictionary(pa.int8(), pa.string()), 8000, 160, "8000 rows cannot be put together"),
        (pa.run_end_encoded(pa.int16(), pa.string()), 40_000, 1, "40000 rows cannot be put tog"),
    ],
    ids=["at once", "few", "in parts", "runs"],
)
def test_more_than_a_dictionary_or_runs_can_number_is_refused(kind, count, distinct, says):
    rows = [{"a": str(place * distinct // count)} for place in range(count)]
    data, schema = json.dumps(rows).encode(), pa.schema({"a": kind})
    if says is None:
        assert json.loads(encode_rows(decode_rows(data, schema))) == rows
        return
    with pytest.raises(BadCall, match=says):
        decode_rows(data, schema)


@pytest.mark.parametrize("text", ["[]", "null", "[], null"])
def test_lists_of_no_values_in_a_child_process(text):
    """By Arrow's own way they end the process by a signal."""
    program = (
        "import pyarrow as pa, sys; from aqueduct.arrow.json_rows import *;"
        "kind = pa.struct({'v': pa.list_(pa.int32(), 0)});"
        "schema = pa.schema({'a': kind, 'v': kind['v'].type});"
        "batch = decode_rows(sys.argv[1].encode(), schema);"
        "batch.validate(full=True);"
        "print(encode_rows(batch).decode())"
    )
    rows = json.dumps(
        [{"a": {"v": value}, "v": value} for value in json.loads(f"[{text}]")],
        separators=(",", ":"),
    )
    done = subprocess.run([sys.executable, "-c", program, rows], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, rows), done.stderr


@pytest.mark.parametrize(
    "text",
    ['[{"a":1},{"a":2}]', '{"a":1}\n{"a":2}\n', ' [ {"a":1} ,\n{"a":2}]\n', '{"a":1}\r\n{"a":2}'],
)
def test_rows_are_an_array_or_lines(text):
    assert read(pa.int32(), text).to_pylist() == [1, 2]


@pytest.mark.parametrize("text", ["", " \n", "[]", " [ ] "])
def test_no_rows_are_a_batch_without_rows(text):
    assert len(read(pa.int32(), text)) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[{}", "a comma or the end of the array is missing at character 3"),
        ("[{} {}]", "a comma or the end of the array is missing at character 3"),
        ("[{},", "the array does not end"),
        ("[{}] x", "more follows the array at character 5"),
        ("{} {}", "a new line is missing at character 2"),
        ("{},{}", "a new line is missing at character 2"),
        ("[", "the array does not end"),
        ('[{"a":NaN}]', "NaN is no JSON; write it as a text"),
        ('[{"a":}]', "Expecting value"),
        ("[" * 100_000, "not JSON rows: lists or objects are nested too deeply"),
        ("[1]", "row 0: an object is wanted, and 1 came"),
        ('[{},[]]', "row 1: an object is wanted, and an array came"),
        ('[{"a":1,"a":1}]', "an object has the name 'a' twice"),
        ('[{"A":1}]', "row 0: 'A' is none of the names; did you mean 'a'?"),
    ],
)  # fmt: skip
def test_text_that_is_no_rows_is_refused(text, says):
    with pytest.raises(BadCall, match=r"^the rows: ") as caught:
        read(pa.int32(), text)
    assert says in str(caught.value)


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(BadCall, match="not UTF-8"):
        decode_rows(b"\xff", pa.schema({"a": pa.int8()}))


NO_SUCH_DAY = (  # as Python says it
    "day is out of range" if sys.version_info < (3, 14) else "day 30 must be in range 1..28"
)
UNFIT = [
    (pa.bool_(), "1", "true or false is wanted, and 1 came"),
    (pa.int8(), "300", "300 is out of the range of int8"),
    (pa.int8(), "true", "a whole number is wanted, and true came"),
    (pa.int8(), "1.5", "a whole number is wanted, and 1.5 came"),
    (pa.int32(), '"1"', 'a whole number is wanted, and "1" came'),
    (pa.int64(), '"1.5"', 'as text such as "12", is wanted'),
    (pa.int64(), '"9223372036854775808"', "is out of the range of int64"),
    (pa.uint64(), '"-1"', "-1 is out of the range of uint64"),
    (pa.float64(), '"x"', "a number is wanted"),
    (pa.float32(), "1e300", "1e+300 is out of the range of float"),
    (pa.float16(), "1e300", "too large"),
    (pa.float64(), "1" + "0" * 400, "too large"),
    (pa.float64(), "1e400", "a number is out of the range of double"),
    (pa.float32(), "-1e400", "a number is out of the range of float"),
    (pa.float16(), "1e400", "a number is out of the range of halffloat"),
    (pa.int64(), '"\u0661\u0662"', "a whole number, as text"),
    (pa.decimal128(38, 0), '"1e-9999"', "it does not fit decimal128(38, 0)"),
    (pa.decimal128(38, 0), '"1e9999"', "it does not fit decimal128(38, 0)"),
    (pa.decimal128(38, 0), '"1.' + "0" * 150 + '1"', "it does not fit decimal128(38, 0)"),
    (pa.decimal128(5, 2), '"\u0661"', "a decimal, as text"),
    (pa.date32(), '"2026-W01-1"', "a date, as text"),
    (pa.timestamp("ms"), '"2026-01-01T12:00.5Z"', "a time, as text"),
    (pa.timestamp("s"), '"2026-01-01T24:00:00Z"', "a time, as text"),
    (pa.timestamp("s"), '"0001-01-01T00:00:00+23:59"', "not in the years 1 to 9999"),
    (pa.timestamp("s"), '"9999-12-31T23:59:59-00:01"', "not in the years 1 to 9999"),
    (pa.time32("s"), '"0\u0661:00:00"', "a time of a day, as text"),
    (pa.duration("s"), '"PT\u0661S"', "a duration, as text"),
    (pa.decimal128(5, 2), "1.5", "a decimal, as text"),
    (pa.decimal128(5, 2), '"NaN"', "a decimal, as text"),
    (pa.decimal128(5, 2), '"1.555"', "it does not fit decimal128(5, 2)"),
    (pa.decimal128(5, 2), '"123456"', "it does not fit decimal128(5, 2)"),
    (pa.string(), "1", "text is wanted, and 1 came"),
    (pa.string(), '"\\ud800"', "surrogates"),
    (pa.binary(), '"a"', "no base64"),
    (pa.binary(2), '"YQ=="', "2"),
    (pa.date32(), '"2026-02-30"', NO_SUCH_DAY),
    (pa.date32(), "5", "a date, as text"),
    (pa.time32("s"), '"24:00:00"', "no time of a day"),
    (pa.time32("s"), '"01:00:00.5"', ".5 seconds does not fit the unit s"),
    (pa.timestamp("s"), '"2026-01-31T00:00:00.5Z"', "does not fit the unit s"),
    (pa.timestamp("s"), '"yesterday"', "a time, as text"),
    (pa.timestamp("ns"), '"9999-01-01T00:00:00Z"', "out of the range of timestamp[ns]"),
    (pa.duration("s"), '"1s"', "a duration, as text"),
    (pa.month_day_nano_interval(), "{}", "an object of months, days and nanoseconds"),
    (pa.month_day_nano_interval(), '{"months":1,"days":1,"nanoseconds":"x"}', "a whole number"),
    (pa.list_(pa.int8()), "1", "an array is wanted, and 1 came"),
    (pa.list_(pa.int8()), "[1,300]", "out of the range of int8"),
    (pa.list_(pa.int8(), 2), "[1]", "2 values are wanted, and 1 came"),
    (pa.struct({"x": pa.int8()}), '{"y":1}', "'y' is none of the names"),
    (pa.struct([pa.field("x", pa.int8(), nullable=False)]), "{}", "'x' is null or missing"),
    (pa.map_(pa.string(), pa.int8()), '[["k"]]', "a pair, [key, value], is wanted"),
    (pa.map_(pa.string(), pa.int8()), "[[null,1]]", "null or missing"),
    (UNION, '{"i":1,"s":"a"}', "an object with one name"),
    (UNION, '{"x":1}', "'x' is none of the names"),
    (pa.dictionary(pa.int8(), pa.int8()), '"a"', "a whole number is wanted"),
    (pa.null(), "1", "null is wanted, and 1 came"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "value", "says"), UNFIT, ids=[f"{each[0]} {each[1]:.20}" for each in UNFIT]
)
def test_what_does_not_fit_is_named_by_row_and_column(kind, value, says):
    good = "null" if pa.types.is_null(kind) else _good(kind)
    with pytest.raises(BadCall, match="row 2, column 'a': ") as caught:
        read(
            kind, f'[{{"a":{good}}},{{"a":{good}}},{{"a":{value}}},{{"a":{good}}},{{"a":{value}}}]'
        )
    assert says in str(caught.value)


def _good(kind):
    return '{"i":1}' if kind == UNION else "null"


def test_a_null_where_none_is_allowed_is_named():
    with pytest.raises(BadCall, match=r"row 1, column 'a': the field 'a' is null or missing"):
        read(pa.int32(), '[{"a":1},{}]', nullable=False)


def test_text_of_other_programs_is_read_too():
    assert read(pa.int64(), '[{"a":5}]').to_pylist() == [5]
    assert read(pa.decimal128(5, 2), '[{"a":5}]').to_pylist() == [Decimal("5.00")]
    moment = '[{"a":"2026-01-31T02:00:00.500+02:00"}]'
    assert read(pa.timestamp("ms"), moment)[0].as_py() == datetime.datetime(
        2026, 1, 31, 0, 0, 0, 500_000
    )
    assert read(pa.timestamp("ms"), '[{"a":"2026-01-31"}]')[0].as_py() == datetime.datetime(
        2026, 1, 31
    )
    assert (
        read(pa.date64(), '[{"a":"2026-01-31T00:00:00.007Z"}]').cast(pa.int64())[0].as_py()
        % 86_400_000
        == 7
    )


def test_values_are_counted_before_they_are_read():
    schema = pa.schema({"a": pa.list_(pa.int8())})
    text = b'[{"a":[' + b"1," * 100 + b"1]}]"
    assert decode_rows(text, schema, values=104).num_rows == 1
    with pytest.raises(BatchTooLarge, match=r"about 104 values .* limit of 103 \(ReactiveSocket"):
        decode_rows(text, schema, values=103)


def test_the_error_says_where_and_of_whom():
    with pytest.raises(BadCall, match=r"^the input of handler 'x': row 0: ") as caught:
        decode_rows(b"[1]", pa.schema([]), where="the input of handler 'x'", peer="p", handler="x")
    assert (caught.value.peer, caught.value.handler) == ("p", "x")


def test_rows_without_columns_are_counted():
    batch = decode_rows(b"[{},{}]", pa.schema([]))
    assert batch.num_rows == 2
    assert encode_rows(batch) == b"[{},{}]"


def test_a_schema_with_names_twice_is_refused():
    twice = pa.schema([("a", pa.int8()), ("a", pa.int8())])
    with pytest.raises(BadCall, match="two columns have the name 'a'"):
        decode_rows(b"[]", twice)
    inner = pa.struct([("x", pa.int8()), ("x", pa.int8())])
    batch = pa.RecordBatch.from_arrays([pa.nulls(1, inner)], names=["a"])
    with pytest.raises(LocalProtocolError, match="two fields of column 'a' have the name 'x'"):
        encode_rows(batch)


def test_a_value_without_a_form_is_named_by_row_and_column():
    batch = of(NS, [0, 1, None]).append_column(
        "t", pa.array([0, 2**62, 0], pa.int64()).view(pa.timestamp("s"))
    )
    with pytest.raises(
        LocalProtocolError, match=r"row 1, column 't': .* not in the years 1 to 9999"
    ):
        encode_rows(batch)
    broken = pa.RecordBatch.from_arrays(
        [pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())], names=["s"]
    )
    with pytest.raises(LocalProtocolError, match=r"row 1, column 's': .*UTF8"):
        encode_rows(broken)


def test_what_rows_lack_counts_before_it_is_made():
    wide = pa.schema({"a": pa.list_(pa.float32(), 768)})
    text = b"[" + b"{}," * 19 + b"{}]"
    assert decode_rows(text, wide, values=20 * 769).num_rows == 20
    with pytest.raises(
        BatchTooLarge, match=r"columns have more values than the limit of 15379 .*json_values"
    ):
        decode_rows(text, wide, values=20 * 769 - 1)
    many = pa.schema([(f"c{place}", pa.int8()) for place in range(100)])
    assert decode_rows(text, many, values=2000).num_rows == 20
    with pytest.raises(BatchTooLarge, match=r"limit of 1999 .*json_values.*, in rows 0 to 19"):
        decode_rows(text, many, values=1999)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.list_(pa.struct([(f"x{place}", pa.int8()) for place in range(100)])), "[{},{},{}]"),
        (pa.list_(pa.list_(pa.int8(), 100)), "[null,null,null]"),
        (pa.map_(pa.int8(), pa.list_(pa.int8(), 100)), "[[1,null],[2,null],[3,null]]"),
        (
            pa.sparse_union([pa.field("i", pa.int8()), pa.field("x", pa.list_(pa.int8(), 300))]),
            '{"i":1}',
        ),
    ],
    ids=["structs", "lists", "maps", "union"],
)
def test_what_values_lack_counts_at_any_depth(kind, text):
    assert len(read(kind, f'[{{"a":{text}}}]')) == 1
    with pytest.raises(BatchTooLarge, match="columns have more values than the limit of 299 "):
        decode_rows(f'[{{"a":{text}}}]'.encode(), pa.schema({"a": kind}), values=299)


def test_nulls_are_not_filled_with_the_longest_value():
    long = "x" * 10_000
    text = f'[{{"a":{{"s":"{long}"}}}}' + ',{"a":null}' * 100 + "]"
    kind = pa.struct([pa.field("s", pa.string(), nullable=False)])
    assert read(kind, text).get_total_buffer_size() < 20_000


def test_the_bytes_of_columns_have_a_limit():
    schema = pa.schema({"a": pa.binary(1000)})
    text = b"[" + b"{}," * 9 + b"{}]"
    assert decode_rows(text, schema, batch_limit=20_000).num_rows == 10
    with pytest.raises(BatchTooLarge, match=r"more bytes than the limit of 9999 \(Calls.batch_"):
        decode_rows(text, schema, batch_limit=9999)
    text = b'[{"a":"' + b"x" * 1000 + b'"}]'
    with pytest.raises(BatchTooLarge, match=r"more bytes than the limit of 999 \(Calls.batch_"):
        decode_rows(text, pa.schema({"a": pa.string()}), batch_limit=999)


def test_a_failed_column_does_not_use_up_what_is_allowed():
    text = b"[" + b'{"a":1},' * 99 + b'{"a":300}]'
    with pytest.raises(BadCall, match="row 99, column 'a': 300 is out of the range"):
        decode_rows(text, pa.schema({"a": pa.int8()}), values=300)


@some_examples
@given(streams())
def test_the_bound_of_values_holds(batches):
    for batch in batches:
        try:
            fits_json(batch.schema)
        except BadCall:
            assume(False)
        text = encode_rows(batch)
        decode_rows(text, batch.schema, values=max(most_values(text, batch.schema), 1000))


def test_long_numbers_are_refused_before_they_are_read():
    kind = pa.decimal256(76, 0)
    assert read(kind, f'[{{"a":{"9" * 76}}}]')[0].as_py() == Decimal("9" * 76)
    with pytest.raises(BadCall, match="a number has 513 characters, and at most 512 are read"):
        read(kind, f'[{{"a":{"9" * 513}}}]')
    with pytest.raises(BadCall, match=r"row 0, column 'a': .* more than 200 digits"):
        read(kind, f'[{{"a":{"9" * 201}}}]')
    assert read(pa.string(), f'[{{"a":"{"9" * 600}"}}]')[0].as_py() == "9" * 600


def test_zero_keeps_its_sign_as_a_float():
    floats = pa.float64()
    assert str(read(floats, '[{"a":-0},{"a":-0.0},{"a":0}]').to_pylist()) == "[-0.0, -0.0, 0.0]"
    assert read(pa.int8(), '[{"a":-0}]').to_pylist() == [0]
    assert read(pa.int64(), '[{"a":-0}]').to_pylist() == [0]
    assert read(pa.decimal128(5, 2), '[{"a":-0}]').to_pylist() == [0]
    text = '[{"a":0.0},{"a":-0.0},{"a":0.0}]'
    found = read(pa.dictionary(pa.int8(), floats), text)
    assert str(found.to_pylist()) == "[0.0, -0.0, 0.0]"
    assert len(found.dictionary) == 2
    inside = pa.dictionary(pa.int8(), pa.struct({"x": floats}))
    text = '[{"a":{"x":0}},{"a":{"x":-0}}]'
    assert str(read(inside, text).to_pylist()) == "[{'x': 0.0}, {'x': -0.0}]"


GARBAGE = pa.array([2**62, 0], pa.int64()).view(pa.timestamp("s"))
SHOWN = "1970-01-01T00:00:00Z"
BROKEN = pa.array([b"\xff", b"ok"], pa.binary()).view(pa.string())
MASK = pa.array([True, False])
HIDDEN = {
    "struct": (pa.StructArray.from_arrays([GARBAGE], ["t"], mask=MASK), [None, {"t": SHOWN}]),
    "text": (pa.StructArray.from_arrays([BROKEN], ["t"], mask=MASK), [None, {"t": "ok"}]),
    "text view": (
        pa.StructArray.from_arrays(
            [pa.array([b"\xff", b"ok"], pa.binary_view()).view(pa.string_view())], ["t"], mask=MASK
        ),
        [None, {"t": "ok"}],
    ),
    "deep": (
        pa.StructArray.from_arrays(
            [pa.StructArray.from_arrays([GARBAGE], ["t"])], ["u"], mask=MASK
        ),
        [None, {"u": {"t": SHOWN}}],
    ),
    "list": (
        pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), GARBAGE, mask=MASK),
        [None, [SHOWN]],
    ),
    "fixed list": (
        pa.FixedSizeListArray.from_arrays(GARBAGE, type=pa.list_(GARBAGE.type, 1), mask=MASK),
        [None, [SHOWN]],
    ),
    "list view": (
        pa.ListViewArray.from_arrays(
            pa.array([1, 1], pa.int32()), pa.array([1, 0], pa.int32()), GARBAGE
        ),
        [[SHOWN], []],
    ),
    "dictionary": (
        pa.DictionaryArray.from_arrays(pa.array([1, None], pa.int8()), GARBAGE),
        [SHOWN, None],
    ),
    "runs": (
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 4], pa.int32()), GARBAGE).slice(2, 2),
        [SHOWN, SHOWN],
    ),
    "union": (
        pa.UnionArray.from_sparse(
            pa.array([0, 1], pa.int8()), [pa.array([7, 8], pa.int8()), GARBAGE], ["i", "t"]
        ),
        [{"i": 7}, {"t": SHOWN}],
    ),
    "a dictionary below a null": (
        pa.StructArray.from_arrays(
            [pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), GARBAGE)],
            ["t"],
            mask=MASK,
        ),
        [None, {"t": SHOWN}],
    ),
    "a map below a null": (
        pa.StructArray.from_arrays(
            [pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array([1, 2]), GARBAGE)],
            ["t"],
            mask=MASK,
        ),
        [None, {"t": [["2", SHOWN]]}],
    ),
}


@pytest.mark.parametrize(("array", "rows"), HIDDEN.values(), ids=HIDDEN)
def test_what_no_row_shows_may_be_anything(array, rows):
    batch = pa.RecordBatch.from_arrays([array], names=["a"])
    assert [row["a"] for row in json.loads(encode_rows(batch))] == rows


@pytest.mark.parametrize("digits", [0, 150])
def test_zeros_behind_the_point_are_nothing(digits):
    text = f'[{{"a":"1.5{"0" * digits}"}},{{"a":"0e-9999"}},{{"a":"1e2"}}]'
    assert read(pa.decimal128(5, 2), text).to_pylist() == [Decimal("1.50"), 0, 100]
