"""Inputs that do not fit what a handler declares: what each is told, and that its remedy is true.

The table of docs/cookbook/errors.md. Each line is a real call to a real service.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.arrow.schema import difference
from aqueduct.errors import SchemaMismatch
from spark_udfs import exchange

ROOT = Path(__file__).parent.parent.parent


def s(*fields):
    return pa.schema(list(fields))


def one(kind, *, nullable=True):
    return pa.schema([pa.field("a", kind, nullable=nullable)])


CASES = {
    "another case": (
        s(("score", pa.float64())),
        s(("Score", pa.float64())),
        [[1.5]],
        (
            "column 'score' is missing: wanted double, and no such column came; did you mean it "
            "by 'Score'? then rename it: batch.rename_columns, or in Spark "
            ".withColumnRenamed('Score', 'score')"
        ),
    ),
    "a slip of the pen": (
        s(("score", pa.float64())),
        s(("scroe", pa.float64())),
        None,
        (
            "column 'score' is missing: wanted double, and no such column came; did you mean it "
            "by 'scroe'? then rename it: batch.rename_columns, or in Spark "
            ".withColumnRenamed('scroe', 'score')"
        ),
    ),
    "missing": (
        s(("a", pa.int64()), ("b", pa.string())),
        s(("b", pa.string())),
        None,
        (
            "column 'a' is missing: wanted int64, and no such column came; the columns that came "
            "are 'b'"
        ),
    ),
    "no column at all": (
        s(("a", pa.int64())),
        s(),
        None,
        (
            "column 'a' is missing: wanted int64, and no such column came; the columns that came "
            "are none"
        ),
    ),
    "too many": (
        s(("a", pa.int64())),
        s(("a", pa.int64()), ("b", pa.int64())),
        None,
        (
            "column 'b' is not wanted: int64 came; leave it out: batch.select(['a']), or in Spark"
            " .select(['a'])"
        ),
    ),
    "twice": (
        s(("a", pa.int64())),
        s(("a", pa.int64()), ("a", pa.int64())),
        None,
        (
            "column 'a' is not wanted: int64 came; 2 columns of that name came, and 1 is wanted: "
            "rename or drop"
        ),
    ),
    "another order": (
        s(("a", pa.int64()), ("b", pa.string())),
        s(("b", pa.string()), ("a", pa.int64())),
        [["x"], [1]],
        (
            "column 'a' is out of order: wanted it at position 0, got 'b' there; put them in "
            "order: batch.select(['a', 'b']), or in Spark .select(['a', 'b'])"
        ),
    ),
    "a smaller number": (
        one(pa.int64()),
        one(pa.int32()),
        [[1]],
        (
            "column 'a' has another type: wanted int64, got int32; cast to int64: "
            "batch.cast(schema), or in Spark col('a').cast('bigint')"
        ),
    ),
    "a larger number": (
        one(pa.int16()),
        one(pa.int64()),
        [[1]],
        (
            "column 'a' has another type: wanted int16, got int64; cast to int16: "
            "batch.cast(schema), or in Spark col('a').cast('smallint')"
        ),
    ),
    "without a sign": (
        one(pa.int64()),
        one(pa.uint32()),
        [[1]],
        (
            "column 'a' has another type: wanted int64, got uint32; cast to int64: "
            "batch.cast(schema), or in Spark col('a').cast('bigint')"
        ),
    ),
    "with a sign": (
        one(pa.uint8()),
        one(pa.int16()),
        [[1]],
        (
            "column 'a' has another type: wanted uint8, got int16; cast to uint8: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "half a float": (
        one(pa.float32()),
        one(pa.float16()),
        [[1.5]],
        (
            "column 'a' has another type: wanted float, got halffloat; cast to float: "
            "batch.cast(schema), or in Spark col('a').cast('float')"
        ),
    ),
    "a number for a float": (
        one(pa.float64()),
        one(pa.int64()),
        [[1]],
        (
            "column 'a' has another type: wanted double, got int64; cast to double: "
            "batch.cast(schema), or in Spark col('a').cast('double')"
        ),
    ),
    "text for a number": (
        one(pa.int32()),
        one(pa.string()),
        [["7"]],
        (
            "column 'a' has another type: wanted int32, got string; cast to int32: "
            "batch.cast(schema), or in Spark col('a').cast('int')"
        ),
    ),
    "text for truth": (
        one(pa.bool_()),
        one(pa.string()),
        [["true"]],
        (
            "column 'a' has another type: wanted bool, got string; cast to bool: "
            "batch.cast(schema), or in Spark col('a').cast('boolean')"
        ),
    ),
    "large text": (
        one(pa.string()),
        one(pa.large_string()),
        [["x"]],
        (
            "column 'a' has another type: wanted string, got large_string; cast to string: "
            "batch.cast(schema), or in Spark set spark.sql.execution.arrow.useLargeVarTypes=false"
        ),
    ),
    "small text": (
        one(pa.large_string()),
        one(pa.string()),
        [["x"]],
        (
            "column 'a' has another type: wanted large_string, got string; cast to large_string: "
            "batch.cast(schema), or in Spark set spark.sql.execution.arrow.useLargeVarTypes=true"
        ),
    ),
    "a view of text": (
        one(pa.string()),
        one(pa.string_view()),
        [["x"]],
        (
            "column 'a' has another type: wanted string, got string_view; cast to string: "
            "batch.cast(schema), or in Spark col('a').cast('string')"
        ),
    ),
    "text for bytes": (
        one(pa.binary()),
        one(pa.string()),
        [["x"]],
        (
            "column 'a' has another type: wanted binary, got string; cast to binary: "
            "batch.cast(schema), or in Spark col('a').cast('binary')"
        ),
    ),
    "bytes of one size": (
        one(pa.binary(2)),
        one(pa.binary()),
        [[b"xy"]],
        (
            "column 'a' has another type: wanted fixed_size_binary[2], got binary; cast to "
            "fixed_size_binary[2]: batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "another precision": (
        one(pa.decimal128(10, 2)),
        one(pa.decimal128(12, 4)),
        [[Decimal("1.5")]],
        (
            "column 'a' has another type: wanted decimal128(10, 2), got decimal128(12, 4); cast "
            "to decimal128(10, 2): batch.cast(schema), or in Spark col('a').cast('decimal(10,2)')"
        ),
    ),
    "a float for a decimal": (
        one(pa.decimal128(10, 2)),
        one(pa.float64()),
        [[1.5]],
        (
            "column 'a' has another type: wanted decimal128(10, 2), got double; cast to "
            "decimal128(10, 2): batch.cast(schema), or in Spark col('a').cast('decimal(10,2)')"
        ),
    ),
    "a wide decimal": (
        one(pa.decimal256(50, 2)),
        one(pa.decimal128(10, 2)),
        [[Decimal("1.5")]],
        (
            "column 'a' has another type: wanted decimal256(50, 2), got decimal128(10, 2); cast "
            "to decimal256(50, 2): batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "no zone": (
        one(pa.timestamp("us", "UTC")),
        one(pa.timestamp("us")),
        [[0]],
        (
            "column 'a' has another type: wanted timestamp[us, tz=UTC], got timestamp[us]; cast "
            "to timestamp[us, tz=UTC]: batch.cast(schema), or in Spark col('a').cast('timestamp')"
        ),
    ),
    "a zone": (
        one(pa.timestamp("us")),
        one(pa.timestamp("us", "UTC")),
        [[0]],
        (
            "column 'a' has another type: wanted timestamp[us], got timestamp[us, tz=UTC]; cast "
            "to timestamp[us]: batch.cast(schema), or in Spark col('a').cast('timestamp_ntz')"
        ),
    ),
    "another unit": (
        one(pa.timestamp("ms", "UTC")),
        one(pa.timestamp("us", "Europe/Zurich")),
        [[0]],
        (
            "column 'a' has another type: wanted timestamp[ms, tz=UTC], got timestamp[us, "
            "tz=Europe/Zurich]; cast to timestamp[ms, tz=UTC]: batch.cast(schema), or in Spark "
            "exchange(..., cast=True)"
        ),
    ),
    "nanoseconds": (
        one(pa.timestamp("ns")),
        one(pa.timestamp("us")),
        [[0]],
        (
            "column 'a' has another type: wanted timestamp[ns], got timestamp[us]; cast to "
            "timestamp[ns]: batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "a date for a time": (
        one(pa.timestamp("us")),
        one(pa.date32()),
        [[0]],
        (
            "column 'a' has another type: wanted timestamp[us], got date32[day]; cast to "
            "timestamp[us]: batch.cast(schema), or in Spark col('a').cast('timestamp_ntz')"
        ),
    ),
    "a date in milliseconds": (
        one(pa.date64()),
        one(pa.date32()),
        [[0]],
        (
            "column 'a' has another type: wanted date64[ms], got date32[day]; cast to date64[ms]:"
            " batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "text for a date": (
        one(pa.date32()),
        one(pa.string()),
        [["2026-01-02"]],
        (
            "column 'a' has another type: wanted date32[day], got string; cast to date32[day]: "
            "batch.cast(schema), or in Spark col('a').cast('date')"
        ),
    ),
    "a number for a duration": (
        one(pa.duration("us")),
        one(pa.int64()),
        [[1]],
        (
            "column 'a' has another type: wanted duration[us], got int64; cast to duration[us]: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "one value for a list": (
        one(pa.list_(pa.int64())),
        one(pa.int64()),
        None,
        (
            "column 'a' has another type: wanted list<item: int64>, got int64; there is no "
            "cast: build it as list<item: int64>, or change what is declared"
        ),
    ),
    "another value in a list": (
        one(pa.list_(pa.float32())),
        one(pa.list_(pa.float64())),
        [[[1.5]]],
        (
            "column 'a.item' has another type: wanted float, got double; cast to float: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "a list of any length": (
        one(pa.list_(pa.float32(), 2)),
        one(pa.list_(pa.float32())),
        [[[1.5, 2.5]]],
        (
            "column 'a' has another type: wanted fixed_size_list<item: float>[2], got list<item: "
            "float>; cast to fixed_size_list<item: float>[2]: batch.cast(schema), or in Spark "
            "exchange(..., cast=True)"
        ),
    ),
    "a large list": (
        one(pa.list_(pa.int64())),
        one(pa.large_list(pa.int64())),
        [[[1]]],
        (
            "column 'a' has another type: wanted list<item: int64>, got large_list<item: int64>; "
            "cast to list<item: int64>: batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "a field lacking": (
        one(pa.struct([("x", pa.int64()), ("y", pa.int64())])),
        one(pa.struct([("x", pa.int64())])),
        None,
        (
            "column 'a' has another type: wanted struct<x: int64, y: int64>, got struct<x: "
            "int64>; it lacks the field 'y'; there is no cast: build it as struct<x: int64, y: "
            "int64>, or change what is declared"
        ),
    ),
    "a field too many": (
        one(pa.struct([("x", pa.int64())])),
        one(pa.struct([("x", pa.int64()), ("z", pa.int8())])),
        None,
        (
            "column 'a' has another type: wanted struct<x: int64>, got struct<x: int64, z: int8>;"
            " the field 'z' is not wanted; there is no cast: build it as struct<x: int64>, or "
            "change what is declared"
        ),
    ),
    "fields in another order": (
        one(pa.struct([("x", pa.int64()), ("y", pa.int64())])),
        one(pa.struct([("y", pa.int64()), ("x", pa.int64())])),
        [[{"x": 1, "y": 2}]],
        (
            "column 'a' has another type: wanted struct<x: int64, y: int64>, got struct<y: int64,"
            " x: int64>; its fields are in another order; cast to struct<x: int64, y: int64>: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "deep inside": (
        one(pa.list_(pa.struct([("x", pa.struct([("deep", pa.int64())]))]))),
        one(pa.list_(pa.struct([("x", pa.struct([("deep", pa.int32())]))]))),
        [[[{"x": {"deep": 1}}]]],
        (
            "column 'a.item.x.deep' has another type: wanted int64, got int32; cast to int64: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "text for a struct": (
        one(pa.struct([("x", pa.int64())])),
        one(pa.string()),
        None,
        (
            "column 'a' has another type: wanted struct<x: int64>, got string; there is no "
            "cast: build it as struct<x: int64>, or change what is declared"
        ),
    ),
    "another value in a map": (
        one(pa.map_(pa.string(), pa.int64())),
        one(pa.map_(pa.string(), pa.int32())),
        [[[("k", 1)]]],
        (
            "column 'a.value' has another type: wanted int64, got int32; cast to int64: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "another key in a map": (
        one(pa.map_(pa.string(), pa.int64())),
        one(pa.map_(pa.int32(), pa.int64())),
        [[[(1, 1)]]],
        (
            "column 'a.key' has another type: wanted string, got int32; cast to string: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "text for a dictionary": (
        one(pa.dictionary(pa.int32(), pa.string())),
        one(pa.string()),
        [["x"]],
        (
            "column 'a' has another type: wanted dictionary<values=string, indices=int32, "
            "ordered=0>, got string; cast to dictionary<values=string, indices=int32, ordered=0>:"
            " batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "a dictionary for text": (
        one(pa.string()),
        one(pa.dictionary(pa.int8(), pa.string())),
        [["x"]],
        (
            "column 'a' has another type: wanted string, got dictionary<values=string, "
            "indices=int8, ordered=0>; cast to string: batch.cast(schema), or in Spark "
            "col('a').cast('string')"
        ),
    ),
    "nulls": (
        one(pa.int64(), nullable=False),
        one(pa.int64()),
        [[1]],
        (
            "column 'a' may hold nulls: wanted int64 not null, got int64 (nullable); declare it "
            "nullable, or if it holds no null: batch.cast(schema), or in Spark exchange(..., "
            "cast=True)"
        ),
    ),
    "nulls in a list": (
        one(pa.list_(pa.field("item", pa.int64(), nullable=False))),
        one(pa.list_(pa.int64())),
        [[[1]]],
        (
            "column 'a.item' may hold nulls: wanted int64 not null, got int64 (nullable); declare"
            " it nullable, or if it holds no null: batch.cast(schema)"
        ),
    ),
    "nothing but nulls": (
        one(pa.int8()),
        one(pa.null()),
        [[None]],
        (
            "column 'a' has another type: wanted int8, got null; cast to int8: "
            "batch.cast(schema), or in Spark col('a').cast('tinyint')"
        ),
    ),
    "a uuid": (
        one(pa.uuid()),
        one(pa.binary(16)),
        None,
        (
            "column 'a' has another type: wanted extension<arrow.uuid>, got "
            "fixed_size_binary[16]; wrap it: "
            "pa.ExtensionArray.from_storage(extension<arrow.uuid>, column)"
        ),
    ),
}
"""What the handler takes, what comes, a row of that for ``cast=True`` (None: there is no cast),
and the text."""

EXPECTED = (
    "output_schema= (in Spark schema=) expects otherwise than the handler declares ({}): expect "
    "that, and cast the answers (in Spark by cast=True)"
)
OUTPUTS = {
    "a larger number": (
        one(pa.int64()),
        one(pa.int32()),
        "column 'a' has another type: wanted int64, got int32; " + EXPECTED.format("a int32"),
    ),
    "a column that does not come": (
        s(("a", pa.int64()), ("b", pa.string())),
        one(pa.int64()),
        (
            "column 'b' is missing: wanted string, and no such column came; "
            + EXPECTED.format("a int64")
        ),
    ),
    "a column that nobody wants": (
        s(("b", pa.string())),
        s(("a", pa.int64()), ("b", pa.string())),
        "column 'a' is not wanted: int64 came; " + EXPECTED.format("a int64, b string"),
    ),
    "nulls": (
        one(pa.int64(), nullable=False),
        one(pa.int64()),
        (
            "column 'a' may hold nulls: wanted int64 not null, got int64 (nullable); "
            + EXPECTED.format("a int64")
        ),
    ),
}
"""What is declared of the answers, what the handler answers with, and the text."""


@pytest.fixture(scope="module")
def service():
    service = aqueduct.Service("tables")
    for name, (wanted, *_) in CASES.items():
        service.handler(name, input=wanted)(lambda batch: batch)
    for name, (_, given, _) in OUTPUTS.items():
        service.handler(f"out: {name}", output=given)(lambda batch: batch)
    return service


@pytest.fixture
def address(service, running):
    with running(service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as address:
        yield address


def batch_of(schema, values):
    arrays = [pa.array(each, field.type) for field, each in zip(schema, values, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def told(call, batch):
    """The text of the error, which must come before any data flows."""
    with pytest.raises(SchemaMismatch) as caught:
        list(call(iter([batch])))
    text, _, place = str(caught.value).rpartition(" [")
    assert "after 0 batches" in place
    assert caught.value.column
    return text


@pytest.mark.parametrize(("wanted", "got", "values", "text"), CASES.values(), ids=CASES)
def test_an_input_that_does_not_fit(request, address, wanted, got, values, text):
    name = request.node.callspec.id
    nothing = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in got], schema=got)
    found = told(exchange(address, name), nothing)
    assert found == f"handler {name!r} at {address}: the input of handler {name!r}: {text}"


@pytest.mark.parametrize(
    ("name", "wanted", "got", "values"),
    [(name, *case[:3]) for name, case in CASES.items() if case[2]],
    ids=[name for name, case in CASES.items() if case[2]],
)
def test_the_cast_that_is_named_does(address, name, wanted, got, values):
    (answer,) = exchange(address, name, cast=True)(iter([batch_of(got, values)]))
    assert answer.num_rows == 1
    assert difference(wanted, answer.schema) is None


@pytest.mark.parametrize(("declared", "given", "text"), OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_other_than_declared(request, address, declared, given, text):
    name = f"out: {request.node.callspec.id}"
    found = told(exchange(address, name, schema=declared), batch_of(one(pa.int8()), [[1]]))
    assert found == f"handler {name!r} at {address}: the output of handler {name!r}: {text}"


def test_the_table_is_long_enough():
    assert len(CASES) >= 30
    assert len({text for *_, text in CASES.values()}) == len(CASES)


@pytest.mark.checkout
@pytest.mark.parametrize("text", [case[-1] for case in (CASES | OUTPUTS).values()])
def test_the_text_is_in_the_cookbook(text):
    assert f"`{text}`" in (ROOT / "docs" / "cookbook" / "errors.md").read_text()
