"""Schemas compared: what counts, what does not, and every text."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.layout import layouts
from aqueduct.arrow.schema import check, difference
from aqueduct.errors import SchemaMismatch
from tests.arrow.strategies import PLAIN, Celsius, make_batch, schemas
from tests.support.selection import some_examples


def one(kind, *, nullable=True, name="x"):
    return pa.schema([pa.field(name, kind, nullable=nullable)])


def list_of(kind, *, name="item", nullable=True):
    return pa.list_(pa.field(name, kind, nullable=nullable))


def difference_of(wanted, got):
    return difference(one(wanted), one(got))


@some_examples
@given(schemas())
def test_a_schema_does_not_differ_from_itself(schema):
    assert difference(schema, schema) is None
    assert difference(schema, pa.ipc.read_schema(schema.serialize())) is None


def alike(kind):
    """A type that differs from ``kind`` in what does not count alone."""
    types = pa.types
    if types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "America/New_York")
    if types.is_list(kind):
        nullable = kind.value_field.nullable
        return list_of(alike(kind.value_type), name="other", nullable=nullable)
    if types.is_fixed_size_list(kind):
        inner = pa.field("other", alike(kind.value_type), kind.value_field.nullable)
        return pa.list_(inner, kind.list_size)
    if types.is_struct(kind):
        return pa.struct([pa.field(f.name, alike(f.type), f.nullable) for f in kind])
    if types.is_map(kind):
        item = pa.field("other", alike(kind.item_type), kind.item_field.nullable)
        return pa.map_(kind.key_type, item, kind.keys_sorted)
    return kind


@some_examples
@given(schemas(), st.integers(0, 1 << 32))
def test_a_batch_of_an_alike_schema_is_read_as_the_wanted_one(wanted, seed):
    got = pa.schema([pa.field(f.name, alike(f.type), f.nullable) for f in wanted])
    assert difference(wanted, got) is None
    assert layouts(wanted) == layouts(got)
    batch = make_batch(got, 20, random.Random(seed))
    payload = b"".join(Encoder(wanted).encode(batch).buffers)
    result = Decoder(wanted).decode(payload)
    assert result.schema.equals(wanted)
    assert result.num_rows == batch.num_rows
    assert Decoder(got).decode(payload).equals(batch)


@pytest.mark.requirement("AC-63")
@pytest.mark.parametrize("wanted", PLAIN, ids=str)
def test_every_plain_type_differs_from_every_other(wanted):
    for got in PLAIN:
        assert (difference_of(wanted, got) is None) == (wanted == got)


ALIKE = {
    "metadata": (
        pa.schema([pa.field("x", pa.int8(), metadata={"a": "b"})], metadata={"c": "d"}),
        one(pa.int8()),
    ),
    "zone names": (one(pa.timestamp("us", "UTC")), one(pa.timestamp("us", "Europe/Berlin"))),
    "zone names inside": (
        one(list_of(pa.struct([("t", pa.timestamp("us", "UTC"))]))),
        one(list_of(pa.struct([("t", pa.timestamp("us", "+01:00"))]))),
    ),
    "zone names in runs": (
        one(pa.run_end_encoded(pa.int32(), pa.timestamp("s", "UTC"))),
        one(pa.run_end_encoded(pa.int32(), pa.timestamp("s", "+01:00"))),
    ),
    "names inside lists": (one(list_of(pa.int8())), one(list_of(pa.int8(), name="element"))),
    "nulls wanted, none to come": (one(pa.int8()), one(pa.int8(), nullable=False)),
    "nulls wanted inside, none to come": (
        one(list_of(pa.int8())),
        one(list_of(pa.int8(), nullable=False)),
    ),
}


@pytest.mark.requirement("AC-64")
@pytest.mark.parametrize(("wanted", "got"), ALIKE.values(), ids=ALIKE)
def test_what_does_not_count(wanted, got):
    assert difference(wanted, got) is None


TYPES = {
    "text sizes": (
        pa.string(),
        pa.large_string(),
        (
            "column 'x' has another type: wanted string, got large_string; cast to string: "
            "batch.cast(schema), or in Spark set spark.sql.execution.arrow.useLargeVarTypes=false"
        ),
    ),
    "text sizes, the other way": (
        pa.large_binary(),
        pa.binary(),
        (
            "column 'x' has another type: wanted large_binary, got binary; cast to large_binary: "
            "batch.cast(schema), or in Spark set spark.sql.execution.arrow.useLargeVarTypes=true"
        ),
    ),
    "numbers": (
        pa.float64(),
        pa.int64(),
        (
            "column 'x' has another type: wanted double, got int64; cast to double: "
            "batch.cast(schema), or in Spark col('x').cast('double')"
        ),
    ),
    "decimals": (
        pa.decimal128(10, 2),
        pa.decimal128(12, 2),
        (
            "column 'x' has another type: wanted decimal128(10, 2), got decimal128(12, 2); cast to "
            "decimal128(10, 2): batch.cast(schema), or in Spark col('x').cast('decimal(10,2)')"
        ),
    ),
    "a zone wanted": (
        pa.timestamp("us", "UTC"),
        pa.timestamp("us"),
        (
            "column 'x' has another type: wanted timestamp[us, tz=UTC], got timestamp[us]; cast to "
            "timestamp[us, tz=UTC]: batch.cast(schema), or in Spark col('x').cast('timestamp')"
        ),
    ),
    "no zone wanted": (
        pa.timestamp("us"),
        pa.timestamp("us", "UTC"),
        (
            "column 'x' has another type: wanted timestamp[us], got timestamp[us, tz=UTC]; cast to "
            "timestamp[us]: batch.cast(schema), or in Spark col('x').cast('timestamp_ntz')"
        ),
    ),
    "units": (
        pa.timestamp("ns"),
        pa.timestamp("us"),
        (
            "column 'x' has another type: wanted timestamp[ns], got timestamp[us]; cast to "
            "timestamp[ns]: batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "no cast": (
        pa.struct([("a", pa.int8())]),
        pa.int8(),
        (
            "column 'x' has another type: wanted struct<a: int8>, got int8; there is no cast: "
            "build it as struct<a: int8>, or change what is declared"
        ),
    ),
    "storage": (
        pa.float64(),
        Celsius(),
        (
            "column 'x' has another type: wanted double, got extension<aqueduct.tests.celsius"
            "<Celsius>>; send its storage: batch.column('x').storage"
        ),
    ),
    "extension": (
        Celsius(),
        pa.float64(),
        (
            "column 'x' has another type: wanted extension<aqueduct.tests.celsius<Celsius>>, got "
            "double; wrap it: pa.ExtensionArray.from_storage("
            "extension<aqueduct.tests.celsius<Celsius>>, column)"
        ),
    ),
    "in a list": (
        list_of(pa.int32()),
        list_of(pa.int64()),
        (
            "column 'x.item' has another type: wanted int32, got int64; cast to int32: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "in a list of structs": (
        list_of(pa.struct([("a", pa.int8()), ("b", pa.string())])),
        list_of(pa.struct([("a", pa.int8()), ("b", pa.large_string())])),
        (
            "column 'x.item.b' has another type: wanted string, got large_string; cast to string: "
            "batch.cast(schema), or in Spark set spark.sql.execution.arrow.useLargeVarTypes=false"
        ),
    ),
    "in a map": (
        pa.map_(pa.string(), pa.int8()),
        pa.map_(pa.string(), pa.int16()),
        (
            "column 'x.value' has another type: wanted int8, got int16; cast to int8: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "a map's keys": (
        pa.map_(pa.int8(), pa.int8()),
        pa.map_(pa.int16(), pa.int8()),
        (
            "column 'x.key' has another type: wanted int8, got int16; cast to int8: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "in a dictionary": (
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int32(), pa.string()),
        (
            "column 'x.indices' has another type: wanted int8, got int32; cast to int8: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "a dictionary's values": (
        pa.dictionary(pa.int8(), pa.int8()),
        pa.dictionary(pa.int8(), pa.int16()),
        (
            "column 'x.dictionary' has another type: wanted int8, got int16; cast to int8: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "in runs": (
        pa.run_end_encoded(pa.int32(), pa.int8()),
        pa.run_end_encoded(pa.int16(), pa.int8()),
        (
            "column 'x.run_ends' has another type: wanted int32, got int16; cast to int32: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "in a union": (
        pa.sparse_union([pa.field("a", pa.int8()), pa.field("b", pa.int8())]),
        pa.sparse_union([pa.field("a", pa.int8()), pa.field("b", pa.int16())]),
        (
            "column 'x.b' has another type: wanted int8, got int16; cast to int8: "
            "batch.cast(schema), or in Spark exchange(..., cast=True)"
        ),
    ),
    "names of a struct": (
        pa.struct([("a", pa.int8())]),
        pa.struct([("b", pa.int8())]),
        None,
    ),
    "sizes of lists": (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3), None),
    "modes of unions": (
        pa.sparse_union([pa.field("a", pa.int8())]),
        pa.dense_union([pa.field("a", pa.int8())]),
        None,
    ),
    "codes of unions": (
        pa.dense_union([pa.field("a", pa.int8())], [1]),
        pa.dense_union([pa.field("a", pa.int8())], [2]),
        None,
    ),
    "order of dictionaries": (
        pa.dictionary(pa.int8(), pa.string(), ordered=True),
        pa.dictionary(pa.int8(), pa.string()),
        None,
    ),
    "order of maps": (
        pa.map_(pa.string(), pa.int8(), keys_sorted=True),
        pa.map_(pa.string(), pa.int8()),
        None,
    ),
}


@pytest.mark.requirement("AC-63")
@pytest.mark.parametrize(("wanted", "got", "text"), TYPES.values(), ids=TYPES)
def test_types_that_differ(wanted, got, text):
    found = difference_of(wanted, got)
    assert found is not None and found.problem == "type"
    if text is None:
        assert found.column == "x" and str(wanted) in str(found)
    else:
        assert str(found) == text


@pytest.mark.requirement("AC-63")
def test_nulls_where_none_are_wanted():
    found = difference(one(pa.int8(), nullable=False), one(pa.int8()))
    assert str(found) == (
        "column 'x' may hold nulls: wanted int8 not null, got int8 (nullable); "
        "declare it nullable, or if it holds no null: batch.cast(schema), or in Spark "
        "exchange(..., cast=True)"
    )
    inside = difference(one(list_of(pa.int8(), nullable=False)), one(list_of(pa.int8())))
    assert inside is not None and (inside.problem, inside.column) == ("nullable", "x.item")


ABC = pa.schema([("a", pa.int8()), ("b", pa.string()), ("c", pa.float64())])


@pytest.mark.requirement("AC-63")
def test_a_missing_column():
    found = difference(ABC, pa.schema([("a", pa.int8()), ("c", pa.float64())]))
    assert str(found) == (
        "column 'b' is missing: wanted string, and no such column came; "
        "the columns that came are 'a', 'c'"
    )
    found = difference(ABC, pa.schema([]))
    assert found is not None and found.remedy == "the columns that came are none"


def test_a_column_in_other_case_is_found():
    found = difference(ABC, pa.schema([("a", pa.int8()), ("B", pa.string()), ("c", pa.float64())]))
    assert str(found) == (
        "column 'b' is missing: wanted string, and no such column came; "
        "did you mean it by 'B'? then rename it: batch.rename_columns, or in Spark "
        ".withColumnRenamed('B', 'b')"
    )


def test_an_extra_column():
    found = difference(pa.schema(list(ABC)[:2]), ABC)
    assert str(found) == (
        "column 'c' is not wanted: double came; leave it out: batch.select(['a', 'b']), or in "
        "Spark .select(['a', 'b'])"
    )


@pytest.mark.requirement("AC-63")
def test_columns_out_of_order():
    found = difference(ABC, pa.schema([ABC.field(0), ABC.field(2), ABC.field(1)]))
    assert str(found) == (
        "column 'b' is out of order: wanted it at position 1, got 'c' there; "
        "put them in order: batch.select(['a', 'b', 'c']), or in Spark .select(['a', 'b', 'c'])"
    )


def test_columns_of_the_same_name_are_counted():
    twice = pa.schema([("a", pa.int8()), ("a", pa.int8())])
    found = difference(pa.schema([("a", pa.int8())]), twice)
    assert found is not None and (found.problem, found.column) == ("extra", "a")
    assert difference(twice, twice) is None


def test_long_types_are_shortened():
    wide = pa.struct([(f"field_{i}", pa.int64()) for i in range(1000)])
    found = difference_of(wide, pa.int8())
    assert found is not None and len(str(found)) < 1000 and " ... " in found.wanted


def test_check_raises_with_all_that_is_known():
    check(ABC, ABC)
    with pytest.raises(SchemaMismatch) as caught:
        check(
            one(pa.int8()),
            one(pa.int16()),
            where="the input of handler 'h'",
            peer="aqueduct://host:1",
            handler="h",
        )
    error = caught.value
    assert str(error).startswith("the input of handler 'h': column 'x' has another type: ")
    assert (error.peer, error.handler) == ("aqueduct://host:1", "h")
    assert (error.column, error.wanted, error.got) == ("x", "int8", "int16")
    with pytest.raises(SchemaMismatch, match=r"^column 'x' has another type"):
        check(one(pa.int8()), one(pa.int16()))
