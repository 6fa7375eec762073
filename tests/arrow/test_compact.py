"""Slices, and all arrays that refer to less than they hold: sent as what they refer to."""

from __future__ import annotations

import itertools
import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct.arrow.compact import Compactor, has_slack
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.layout import layouts
from tests.arrow.strategies import make_batch, schemas
from tests.support.selection import some_examples

ROWS = 2000
TEXTS = [f"text number {n:030}" for n in range(ROWS)]
VIEWS = pa.array(TEXTS, pa.string_view())


def joined(encoded):
    payload = AlignedBuffer(encoded.size)
    memoryview(payload)[:] = b"".join(encoded.buffers)
    return payload


def batch_of(array):
    return pa.RecordBatch.from_arrays([array], names=["a"])


def slices_of(batch, count):
    ends = [batch.num_rows * i // count for i in range(count + 1)]
    return [batch.slice(a, b - a) for a, b in itertools.pairwise(ends)]


def sent(batches):
    """The sizes of the payloads of one stream, which all read as they should."""
    encoder, decoder = Encoder(batches[0].schema), Decoder(batches[0].schema, checks="full")
    sizes = []
    for batch in batches:
        encoded = encoder.encode(batch)
        sizes.append(encoded.size)
        found = decoder.decode(joined(encoded))
        found.validate(full=True)
        assert found.equals(batch)
    return sizes


def allowed(schema):
    """What a slice may cost beside its values: metadata, padding, and what is not worth saving."""
    layout, dictionaries = layouts(schema)
    nodes = layout.nodes + sum(found.nodes for found in dictionaries.values())
    return 512 + 1024 * nodes


def check_slices(batch, count=20):
    (whole,) = sent([batch])
    slices = sent(slices_of(batch, count))
    assert sum(slices) <= 1.25 * whole + count * allowed(batch.schema)


@some_examples
@given(schemas(), st.integers(0, 1 << 32), st.sampled_from([0, 8, 100, 1000]))
def test_slices_of_every_type_cost_about_the_whole(schema, seed, first):
    batch = make_batch(schema, 1200, random.Random(seed)).slice(first)
    check_slices(batch, 12)


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_view(pa.list_view(pa.run_end_encoded(pa.int16(), pa.int8()))),
        pa.large_list_view(
            pa.struct({"a": pa.list_view(pa.run_end_encoded(pa.int16(), pa.utf8()))})
        ),
    ],
    ids=["list views", "a struct"],
)
@pytest.mark.parametrize("nullable", [True, False])
def test_slices_of_list_views_in_list_views_do_not_multiply_their_runs(kind, nullable):
    schema = pa.schema([pa.field("x", kind, nullable=nullable)])
    encoder, decoder = Encoder(schema), Decoder(schema, checks="full")
    for seed in range(10):
        batch = make_batch(schema, 1200, random.Random(seed))
        for part in slices_of(batch, 12):
            found = decoder.decode(b"".join(encoder.encode(part).buffers))
            assert found.to_pylist() == part.to_pylist()


def from_dense(offsets, children):
    codes = pa.array([n % len(children) for n in range(len(offsets))], pa.int8())
    return pa.UnionArray.from_dense(codes, pa.array(offsets, pa.int32()), children)


NUMBERS = pa.array(range(3 * ROWS))
SHUFFLED = random.Random(1).sample(range(ROWS), ROWS)
STARTS = pa.array(range(ROWS + 1), pa.int32())
LIST_VIEWS = pa.ListViewArray.from_arrays(
    pa.array([3 * n for n in range(ROWS)], pa.int32()), pa.array([3] * ROWS, pa.int32()), NUMBERS
)
DENSE = from_dense([n // 2 for n in range(ROWS)], [VIEWS, NUMBERS])
SLACK = {
    "string_view": VIEWS,
    "binary_view": pa.array([text.encode() for text in TEXTS], pa.binary_view()),
    "list of views": pa.ListArray.from_arrays(STARTS, VIEWS),
    "large list of views": pa.LargeListArray.from_arrays(STARTS.cast(pa.int64()), VIEWS),
    "struct of views": pa.StructArray.from_arrays([VIEWS, NUMBERS[:ROWS]], ["v", "n"]),
    "struct with nulls": pa.StructArray.from_arrays(
        [VIEWS], ["v"], mask=pa.array([n % 3 == 0 for n in range(ROWS)])
    ),
    "fixed list of views": pa.FixedSizeListArray.from_arrays(VIEWS, 2),
    "map of views": pa.MapArray.from_arrays(STARTS, VIEWS, VIEWS),
    "list_view": LIST_VIEWS,
    "large_list_view": pa.LargeListViewArray.from_arrays(
        LIST_VIEWS.offsets.cast(pa.int64()), LIST_VIEWS.sizes.cast(pa.int64()), NUMBERS
    ),
    "list_view in any order": pa.ListViewArray.from_arrays(
        pa.array([3 * n for n in SHUFFLED], pa.int32()), LIST_VIEWS.sizes, NUMBERS
    ),
    "list_view of views in any order": pa.ListViewArray.from_arrays(
        pa.array(SHUFFLED, pa.int32()), pa.array([1] * ROWS, pa.int32()), VIEWS
    ),
    "list of list_view": pa.ListArray.from_arrays(STARTS, LIST_VIEWS),
    "dense union": DENSE,
    "dense union with gaps": from_dense([8 * n for n in range(ROWS // 8)], [VIEWS]),
    "dense union of numbers with gaps": from_dense([8 * n for n in range(ROWS // 8)], [NUMBERS]),
    "struct of dense union": pa.StructArray.from_arrays([DENSE], ["u"]),
    "sparse union of views": pa.UnionArray.from_sparse(
        pa.array([n % 2 for n in range(ROWS)], pa.int8()), [VIEWS, NUMBERS[:ROWS]]
    ),
    "runs of views": pa.RunEndEncodedArray.from_arrays(
        pa.array(range(2, 2 * ROWS + 2, 2), pa.int32()), VIEWS
    ),
    "dictionary of views": pa.DictionaryArray.from_arrays(pa.array(range(ROWS), pa.int32()), VIEWS),
}


@pytest.mark.parametrize("array", SLACK.values(), ids=SLACK)
def test_slices_of_shared_buffers_cost_about_the_whole(array):
    check_slices(batch_of(array), 100)
    check_slices(batch_of(array.slice(3, len(array) - 6)), 100)


@pytest.mark.parametrize("array", SLACK.values(), ids=SLACK)
def test_slices_without_rows_hold_nothing(array):
    batch = batch_of(array)
    if pa.types.is_dictionary(array.type):
        return  # a dictionary belongs to the column
    (size,) = sent([batch.slice(5, 0)])
    assert size <= allowed(batch.schema)


def test_a_view_of_few_rows_far_apart_is_copied():
    rows = [0, 700, 1999]
    _, views, *texts = VIEWS.buffers()
    some = b"".join(memoryview(views)[16 * row : 16 * row + 16] for row in rows)
    array = pa.Array.from_buffers(pa.string_view(), 3, [None, pa.py_buffer(some), *texts])
    assert array.to_pylist() == [TEXTS[row] for row in rows]
    (size,) = sent([batch_of(array)])
    assert size < 600


def test_several_buffers_of_views_are_each_cut():
    parts = [pa.array([chr(97 + n) * 2000 for _ in range(50)], pa.string_view()) for n in range(4)]
    whole = pa.concat_arrays(parts)
    assert len(whole.buffers()) > 4
    (size,) = sent([batch_of(whole.slice(60, 30))])
    assert 60_000 <= size < 62_000
    (size,) = sent([batch_of(whole.slice(40, 20))])
    assert 40_000 <= size < 42_000


def test_nulls_and_short_texts_survive_in_slices_of_views():
    values = [None if n % 5 == 0 else "x" * (n % 40) for n in range(ROWS)]
    for kind in (pa.string_view(), pa.struct([("a", pa.string_view())])):
        array = pa.array(values, pa.string_view())
        if pa.types.is_struct(kind):
            array = pa.StructArray.from_arrays([array], ["a"])
        for start in (0, 1, 7, 8, 123):
            sent([batch_of(array.slice(start, 31))])


def test_the_whole_of_a_view_is_not_copied():
    batch = batch_of(VIEWS)
    assert Compactor(batch.schema, (0,)).compact(batch) is batch
    text = VIEWS.buffers()[2]
    encoded = Encoder(batch.schema).encode(batch)
    assert text.address in [pa.py_buffer(buffer).address for buffer in encoded.buffers]


def test_a_slice_of_a_view_is_cut_where_it_lies():
    batch = batch_of(VIEWS.slice(500, 1000))
    cut = Compactor(batch.schema, (0,)).compact(batch)
    assert cut is not batch and cut.equals(batch)
    for part in cut.column(0).buffers()[2:]:
        assert any(
            text.address <= part.address < part.address + part.size <= text.address + text.size
            for text in VIEWS.buffers()[2:]
        )


def test_a_stream_sends_a_dictionary_of_views_once():
    batch = batch_of(SLACK["dictionary of views"])
    sizes = sent(slices_of(batch, 10))
    assert sizes[0] > 50_000 and max(sizes[1:]) < 5_000


def test_a_dictionary_of_views_is_cut_once():
    part = pa.DictionaryArray.from_arrays(
        pa.array([n % 100 for n in range(ROWS)], pa.int32()), VIEWS[300:400]
    )
    first, *rest = sent(slices_of(batch_of(part), 10))
    assert first < 12_000 and max(rest) < 5_000


def test_types_with_slack_are_known():
    assert has_slack(pa.list_(pa.struct([("a", pa.binary_view())])))
    assert has_slack(pa.dictionary(pa.int8(), pa.string_view()))
    assert has_slack(pa.map_(pa.string(), pa.list_view(pa.int8())))
    for kind in (pa.string(), pa.list_(pa.int8()), pa.dictionary(pa.int8(), pa.string())):
        assert not has_slack(kind)
    assert not has_slack(pa.sparse_union([pa.field("a", pa.int8())]))


def test_arrays_that_refer_to_what_is_not_there_stay_as_they_are():
    _, views, *texts = VIEWS.buffers()
    cut_short = [text.slice(0, min(text.size, 20_000)) for text in texts]
    damaged = {
        "view": pa.Array.from_buffers(pa.string_view(), ROWS, [None, views, *cut_short]),
        "list view": pa.Array.from_buffers(
            pa.list_view(pa.int64()),
            1,
            [None, *(pa.array([n], pa.int32()).buffers()[1] for n in (100, 1))],
            children=[NUMBERS.slice(0, 10)],
        ),
        "union": from_dense([5000], [NUMBERS.slice(0, 10)]),
    }
    for array in damaged.values():
        batch = batch_of(array)
        assert Compactor(batch.schema, (0,)).compact(batch) is batch
