"""Layouts and physical schemas: right for every type, by what Arrow itself writes."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given

from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.ipc import DICTIONARY, RECORD_BATCH, VERSION_5, Layout, summarize
from aqueduct.arrow.layout import grows_by_deltas, layouts, needs_deep_check, physical_schema
from tests.arrow.strategies import PLAIN, Celsius, Labels, make_batch, streams
from tests.support.selection import some_examples


def summaries(payload):
    source = pa.BufferReader(payload)
    while source.tell() < len(payload):
        yield summarize(pa.ipc.read_message(source).metadata)


@pytest.mark.requirement("AC-14")
@some_examples
@given(streams())
def test_layouts_are_those_of_what_is_written(batches):
    schema = batches[0].schema
    wanted, dictionaries = layouts(schema)
    encoder = Encoder(schema)
    for batch in batches:
        for summary in summaries(b"".join(encoder.encode(batch).buffers)):
            assert summary.version == VERSION_5 and not summary.compressed
            if summary.kind == DICTIONARY:
                assert summary.layout == dictionaries[summary.dictionary]
            else:
                assert summary.kind == RECORD_BATCH
                assert (summary.layout, summary.dictionary) == (wanted, -1)


@pytest.mark.requirement("AC-14")
def test_a_layout_by_hand():
    schema = pa.schema(
        [
            ("a", pa.int64()),  # validity, values
            ("b", pa.string()),  # validity, offsets, text
            ("c", pa.string_view()),  # validity, views, and the variadic ones
            ("d", pa.struct([("e", pa.null())])),  # validity; nothing
            ("f", pa.dictionary(pa.int8(), pa.list_(pa.dictionary(pa.int8(), pa.int8())))),
        ]
    )
    assert layouts(schema) == (
        Layout(6, 10, 1),
        {0: Layout(2, 4, 0), 1: Layout(1, 2, 0)},
    )


def test_summaries_of_deltas():
    encoder = None
    found = []
    for values in (["a"], ["a", "b"], ["x"]):
        column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(values))
        batch = pa.record_batch([column], names=["x"])
        encoder = encoder or Encoder(batch.schema)
        found += summaries(b"".join(encoder.encode(batch).buffers))
    assert [summary.delta for summary in found if summary.kind == DICTIONARY] == [
        False,
        True,
        False,
    ]
    assert [summary.body for summary in found] == [16, 8, 16, 8, 16, 8]


@some_examples
@given(streams())
def test_a_batch_can_be_read_as_its_physical_schema(batches):
    for batch in batches:
        schema = physical_schema(batch.schema)
        array = batch.__arrow_c_array__()[1]
        twin = pa.RecordBatch._import_from_c_capsule(schema.__arrow_c_schema__(), array)
        twin.validate(full=True)
        assert twin.num_rows == batch.num_rows
        assert layouts(schema) == layouts(batch.schema)
        assert physical_schema(schema).equals(schema)


MEANING = [
    *(kind for kind in PLAIN if isinstance(kind, pa.BaseExtensionType)),
    *(kind for kind in PLAIN if pa.types.is_decimal(kind)),
    *(kind for kind in PLAIN if pa.types.is_temporal(kind) and not pa.types.is_interval(kind)),
    pa.string(),
    pa.large_string(),
    pa.string_view(),
]


@pytest.mark.parametrize("kind", PLAIN, ids=str)
def test_meaning_is_what_a_physical_type_lacks(kind):
    [field] = physical_schema(pa.schema([("x", kind)]))
    assert (field.type != kind) == (kind in MEANING)


@pytest.mark.parametrize(
    ("kind", "deep"),
    [
        (pa.int64(), False),
        (pa.null(), False),
        (pa.bool_(), False),
        (pa.decimal128(5), False),
        (pa.timestamp("us", "UTC"), False),
        (pa.binary(5), False),
        (pa.struct([("a", pa.int8()), ("b", pa.list_(pa.int8(), 3))]), False),
        (Celsius(), False),
        (pa.string(), True),
        (pa.large_binary(), True),
        (pa.binary_view(), True),
        (pa.list_(pa.int8()), True),
        (pa.large_list_view(pa.int8()), True),
        (pa.map_(pa.int8(), pa.int8()), True),
        (pa.sparse_union([pa.field("a", pa.int8())]), True),
        (pa.dictionary(pa.int8(), pa.int8()), True),
        (pa.run_end_encoded(pa.int32(), pa.int8()), True),
        (pa.struct([("a", pa.int8()), ("b", pa.struct([("c", pa.string())]))]), True),
        (Labels(), True),
    ],
    ids=str,
)
def test_a_deep_look_is_for_what_points_elsewhere(kind, deep):
    assert needs_deep_check(pa.schema([("x", kind)])) == deep
    assert needs_deep_check(pa.schema([("x", pa.int8()), ("y", kind)])) == deep


@pytest.mark.parametrize(
    ("kind", "deltas"),
    [
        (pa.string(), True),
        (pa.dictionary(pa.int8(), pa.string()), True),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), True),
        (pa.dictionary(pa.int8(), pa.struct([("a", pa.int8())])), False),
        (pa.struct([("a", pa.dictionary(pa.int8(), pa.list_(pa.int8())))]), False),
    ],
    ids=str,
)
def test_deltas_are_for_plain_values(kind, deltas):
    assert grows_by_deltas(pa.schema([("x", kind)])) == deltas


def test_dictionaries_of_nested_values_are_replaced_when_they_grow():
    kind = pa.dictionary(pa.int8(), pa.struct([("a", pa.int8())]))
    encoder = Encoder(pa.schema([("x", kind)]))
    for size in (1, 2):
        values = pa.array([{"a": i} for i in range(size)], kind.value_type)
        column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), values)
        batch = pa.record_batch([column], names=["x"])
        first, _ = summaries(b"".join(encoder.encode(batch).buffers))
        assert (first.kind, first.delta) == (DICTIONARY, False)


def test_other_messages_have_no_layout():
    schema = pa.schema([("x", pa.int8())])
    [summary] = summaries(schema.serialize().to_pybytes())
    assert (summary.layout, summary.body) == (None, 0)
    batch = make_batch(schema, 3, random.Random(1))
    assert summarize(pa.ipc.read_message(batch.serialize()).metadata).layout == Layout(1, 2, 0)
