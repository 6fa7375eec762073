"""Views whose empty buffers are missing, as casts of some versions of PyArrow leave them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from aqueduct.arrow import views
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.joining import joined as put_together
from aqueduct.arrow.sizes import batch_bytes
from aqueduct.arrow.views import CASTS_LOSE_BUFFERS, may_lack_buffers, with_all_buffers
from tests.arrow.test_compact import joined

TEXTS = ["short", None, ""]


def cast(kind: pa.DataType) -> pa.Array:
    """An array that a cast has made: with PyArrow 21 to 24 it has no buffer of long values."""
    plain = pa.string() if kind == pa.string_view() else pa.binary()
    return pa.array(TEXTS, pa.string()).cast(plain).cast(kind)


def lacks(array: pa.Array) -> bool:
    return any(buffer is None for buffer in array.buffers()[2:])


def batch_of(array: pa.Array) -> pa.RecordBatch:
    return pa.record_batch([array, pa.array([1, 2, 3])], names=["text", "number"])


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        (pa.string_view(), True),
        (pa.binary_view(), True),
        (pa.list_(pa.struct({"a": pa.int8(), "b": pa.string_view()})), True),
        (pa.dictionary(pa.int8(), pa.string_view()), True),
        (pa.run_end_encoded(pa.int32(), pa.binary_view()), True),
        (pa.string(), False),
        (pa.struct({"a": pa.list_view(pa.int8())}), False),
        (pa.dictionary(pa.int8(), pa.string()), False),
    ],
    ids=str,
)
def test_types_with_views_may_lack_buffers(
    kind: pa.DataType, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (False, True):
        monkeypatch.setattr(views, "CASTS_LOSE_BUFFERS", wrong)
        assert may_lack_buffers(pa.int8(), kind) is (has and wrong)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
def test_a_missing_buffer_is_added(kind: pa.DataType) -> None:
    batch = batch_of(cast(kind))
    assert lacks(batch.column(0)) is CASTS_LOSE_BUFFERS
    assert batch_bytes(batch) > 0
    found = with_all_buffers(batch)
    assert not lacks(found.column(0))
    assert found.equals(batch)
    for place in (0, 1):
        once, again = found.column(place), with_all_buffers(found).column(place)
        assert once.buffers()[1].address == again.buffers()[1].address
    found.__arrow_c_array__()  # where a buffer is missing, it ends the process


def test_columns_with_views_inside_are_copied() -> None:
    texts = cast(pa.string_view())
    inside = pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), texts)
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 2], pa.int8()), texts)
    batch = pa.record_batch([inside, coded], names=["list", "dictionary"])
    found = with_all_buffers(batch)
    assert found.to_pylist() == batch.to_pylist() and found.schema == batch.schema
    found.__arrow_c_array__()


def test_batches_of_what_a_cast_has_made_are_put_together() -> None:
    texts = cast(pa.string_view())
    batch = pa.record_batch([pa.DictionaryArray.from_arrays([0, 2], texts)], names=["a"])
    assert put_together([batch, batch]).to_pylist() == batch.to_pylist() * 2


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
def test_what_a_cast_has_made_is_sent(kind: pa.DataType) -> None:
    """Where no null may be, too: there the batch is looked at through the C data interface."""
    whole, some = cast(kind), cast(kind).slice(2)
    inside = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), cast(kind))
    for array, nullable in ((whole, True), (some, False), (inside, True)):
        schema = pa.schema([pa.field("text", array.type, nullable)])
        batch = pa.RecordBatch.from_arrays([array], schema=schema)
        encoder = Encoder(schema)
        encoder._may_lack_buffers = True  # as it is with a PyArrow whose casts leave some out
        assert not encoder.slow(batch)
        found = Decoder(schema).decode(joined(encoder.encode(batch)))
        assert found.to_pylist() == batch.to_pylist()
