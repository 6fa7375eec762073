"""Batches to payloads and back: every type, no copies, the format byte for byte."""

from __future__ import annotations

import random
import struct
import weakref

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct.arrow.compression import pack
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.ipc import by_identity, deserialize_schema, serialize_schema
from aqueduct.errors import BadCall, LocalProtocolError, SchemaMismatch
from tests.arrow.strategies import Celsius, Labels, make_batch, schemas, streams
from tests.support.selection import some_examples

PLAIN = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("price", pa.float64()),
        ("name", pa.string()),
        ("tags", pa.list_(pa.string())),
    ]
)
CODED = pa.schema([("kind", pa.dictionary(pa.int8(), pa.string())), ("x", pa.int64())])


def batch_of(schema=PLAIN, size=1000, seed=1):
    return make_batch(schema, size, random.Random(seed))


def coded(indices, values, schema=CODED):
    kind = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), pa.array(values))
    return pa.RecordBatch.from_arrays([kind, pa.array(range(len(indices)))], schema=schema)


def joined(encoded):
    """The payload as it arrives: in one aligned buffer."""
    payload = AlignedBuffer(encoded.size)
    memoryview(payload)[:] = b"".join(encoded.buffers)
    return payload


def roundtrip(batch):
    return Decoder(batch.schema).decode(joined(Encoder(batch.schema).encode(batch)))


def addresses(array):
    """Where the buffers of an array are, but for its validity, which Arrow may leave out."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    found = [buffer.address for buffer in array.buffers() if buffer is not None and buffer.size]
    if pa.types.is_dictionary(array.type):
        found += addresses(array.dictionary)
    return found


def messages(payload):
    """(offset of the body, message) of each IPC message of a payload."""
    source = pa.BufferReader(payload)
    found = []
    while source.tell() < source.size():
        message = pa.ipc.read_message(source)
        found.append((source.tell() - (message.body.size if message.body else 0), message))
    return found


@some_examples
@given(streams())
def test_every_type_survives(batches):
    encoder, decoder = Encoder(batches[0].schema), Decoder(batches[0].schema)
    for batch in batches:
        encoded = encoder.encode(batch)
        assert encoded.size == sum(len(buffer) for buffer in encoded.buffers)
        payload = joined(encoded)
        found = messages(payload)
        assert [message.type for _, message in found[-1:]] == ["record batch"]
        assert all(body % 64 == 0 for body, _ in found)
        result = decoder.decode(payload)
        assert result.schema.equals(batch.schema)
        assert result.equals(batch)
        result.validate(full=True)


@pytest.mark.requirement("AC-21")
@some_examples
@given(streams())
def test_a_payload_is_read_by_arrow_itself(batches):
    schema = batches[0].schema
    encoder = Encoder(schema)
    stream = serialize_schema(schema) + b"".join(
        b"".join(encoder.encode(batch).buffers) for batch in batches
    )
    for batch, result in zip(batches, pa.ipc.open_stream(stream), strict=True):
        assert result.equals(batch)


@pytest.mark.parametrize("form", [pa.ListViewArray, pa.LargeListViewArray])
@some_examples
@given(data=st.data())
def test_list_views_survive_with_gaps_overlaps_nulls_and_slices(form, data):
    width = pa.int64() if form is pa.LargeListViewArray else pa.int32()
    words = pa.array(["a", None, "ccc", "", "a text that is too long for a view"])
    values = data.draw(st.sampled_from([words, words.cast(pa.string_view())]))
    starts = data.draw(st.lists(st.integers(0, len(words)), min_size=1, max_size=6))
    sizes = [data.draw(st.integers(0, len(words) - start)) for start in starts]
    nulls = [data.draw(st.booleans()) for _ in starts]
    array = form.from_arrays(
        pa.array(starts, width), pa.array(sizes, width), values, mask=pa.array(nulls)
    )
    listed = pa.ListArray.from_arrays(pa.array([0, len(array)], pa.int32()), array)
    whole = pa.StructArray.from_arrays([array], ["v"])
    first = data.draw(st.integers(0, len(array)))
    for column in (array.slice(first), whole.slice(first), listed):
        batch = pa.record_batch({"v": column})
        encoded = Encoder(batch.schema).encode(batch)
        for payload in (joined(encoded), joined(pack(encoded, "zstd"))):
            found = Decoder(batch.schema, compressions=("zstd",)).decode(payload)
            found.validate(full=True)
            assert found["v"].to_pylist() == column.to_pylist()


@some_examples
@given(streams(dictionaries=False))
def test_decoded_columns_point_into_the_payload(batches):
    batch = batches[0]
    payload = joined(Encoder(batch.schema).encode(batch))
    result = Decoder(batch.schema).decode(payload)
    for column in result.columns:
        for address in addresses(column):
            assert payload.address <= address < payload.address + payload.size


def test_no_column_is_copied_in_sending():
    batch = batch_of()
    encoded = Encoder(PLAIN).encode(batch)
    sent = {pa.py_buffer(buffer).address for buffer in encoded.buffers}
    for column in batch.columns:
        assert set(addresses(column)) <= sent
    assert encoded.size - batch.nbytes < 1024


def test_a_slice_on_a_boundary_is_sent_from_where_it_lies():
    numbers = pa.array(range(1000), pa.int64())
    batch = pa.record_batch([numbers], names=["x"]).slice(64, 128)
    encoded = Encoder(batch.schema).encode(batch)
    sent = [pa.py_buffer(buffer).address for buffer in encoded.buffers]
    assert sent[1:] == [numbers.buffers()[1].address + 64 * 8]
    assert len(encoded.buffers[1]) == 128 * 8


def test_dictionaries_land_in_the_payload_too():
    batch = coded([0, 1] * 4, ["a" * 50_000, "b" * 50_000])
    payload = joined(Encoder(CODED).encode(batch))
    result = Decoder(CODED).decode(payload)
    end = payload.address + payload.size
    for column in result.columns:
        assert all(payload.address <= address < end for address in addresses(column))


def test_a_small_dictionary_does_not_keep_a_whole_payload():
    batch = coded([0, 1] * 5000, ["a", "b"])
    encoder, decoder = Encoder(CODED), Decoder(CODED)
    payload = joined(encoder.encode(batch))
    result = decoder.decode(payload)
    end = payload.address + payload.size
    values = addresses(result.column(0).dictionary)
    assert not any(payload.address <= address < end for address in values)
    assert payload.exports
    del result
    assert not payload.exports
    assert decoder.decode(joined(encoder.encode(batch))).equals(batch)


def test_a_batch_keeps_its_payload():
    payload = joined(Encoder(PLAIN).encode(batch_of()))
    decoder = Decoder(PLAIN)
    assert not payload.exports
    result = decoder.decode(payload)
    assert payload.exports
    del result
    assert not payload.exports


@pytest.mark.requirement("AC-24")
def test_dictionaries_are_sent_once_grown_and_replaced():
    encoder, decoder = Encoder(CODED), Decoder(CODED)
    kinds = []
    for batch in (
        coded([0, 1, 0], ["a", "b"]),
        coded([1, 1], ["a", "b"]),
        coded([2, None, 0], ["a", "b", "c"]),
        coded([0], ["x"]),
        coded([0, 1], ["x", "y"]),
    ):
        payload = joined(encoder.encode(batch))
        kinds.append([message.type for _, message in messages(payload)])
        assert decoder.decode(payload).equals(batch)
    both = ["dictionary", "record batch"]
    assert kinds == [both, both[1:], both, both, both]


@pytest.mark.requirement("AC-24")
def test_a_dictionary_that_grew_sends_what_is_new():
    encoder = Encoder(CODED)
    values = [f"value {i}" for i in range(100)]
    first = encoder.encode(coded([0], values)).size
    grown = encoder.encode(coded([0], [*values, "one more"])).size
    assert grown < first / 2


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
        pa.struct([("a", pa.dictionary(pa.int16(), pa.string())), ("b", pa.int8())]),
        pa.dictionary(pa.int8(), pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        pa.map_(pa.string(), pa.dictionary(pa.int8(), pa.int64())),
        Labels(),
    ],
    ids=str,
)
def test_dictionaries_inside(kind):
    schema = pa.schema([("x", kind)])
    encoder, decoder = Encoder(schema), Decoder(schema)
    for seed in range(6):
        batch = batch_of(schema, 30, seed)
        assert decoder.decode(joined(encoder.encode(batch))).equals(batch)


def test_batches_without_columns_have_rows():
    batch = pa.record_batch([pa.array([1, 2, 3])], names=["x"]).select([])
    result = roundtrip(batch)
    assert (result.num_columns, result.num_rows) == (0, 3)


def test_a_batch_without_rows():
    assert roundtrip(batch_of(size=0)).equals(batch_of(size=0))
    assert roundtrip(coded([], ["a"])).num_rows == 0


def test_every_column_of_nulls():
    schema = pa.schema([("a", pa.null()), ("b", pa.string()), ("c", Celsius())])
    batch = pa.RecordBatch.from_arrays([pa.nulls(9, field.type) for field in schema], schema=schema)
    assert roundtrip(batch).equals(batch)


def test_extension_types_come_back_as_themselves():
    storage = pa.array([36.6, None])
    column = pa.ExtensionArray.from_storage(Celsius(), storage)
    result = roundtrip(pa.record_batch([column], names=["t"]))
    assert isinstance(result.column(0).type, Celsius)


def test_a_payload_may_lie_anywhere():
    batch = batch_of()
    payload = b"".join(Encoder(PLAIN).encode(batch).buffers)
    for offset in range(9):
        moved = memoryview(bytes(offset) + payload)[offset:]
        assert Decoder(PLAIN).decode(moved).equals(batch)


def test_a_batch_of_an_alike_schema_is_sent_as_the_encoders():
    schema = pa.schema([("t", pa.list_(pa.timestamp("us", "UTC"))), ("x", pa.int64())])
    zone = pa.timestamp("us", "Europe/Berlin")
    alike = pa.schema([("t", pa.list_(zone)), pa.field("x", pa.int64(), nullable=False)])
    batch = batch_of(alike, 1000)
    encoded = Encoder(schema).encode(batch)
    sent = {pa.py_buffer(buffer).address for buffer in encoded.buffers}
    assert set(addresses(batch.column(1))) <= sent
    result = Decoder(schema).decode(joined(encoded))
    assert result.schema.equals(schema)
    assert result.column(1).equals(batch.column(1))


def test_another_schema_is_refused_and_does_no_harm():
    encoder = Encoder(PLAIN, where="the output of handler 'h'", peer="p", handler="h")
    with pytest.raises(SchemaMismatch) as caught:
        encoder.encode(batch_of(PLAIN.set(1, pa.field("price", pa.int64()))))
    assert str(caught.value) == (
        "the output of handler 'h': column 'price' has another type: wanted double, got int64; "
        "cast to double: batch.cast(schema), or in Spark col('price').cast('double')"
    )
    assert (caught.value.column, caught.value.peer, caught.value.handler) == ("price", "p", "h")
    batch = batch_of()
    assert Decoder(PLAIN).decode(joined(encoder.encode(batch))).equals(batch)


def test_nulls_in_a_column_that_has_none_are_refused():
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    batch = pa.RecordBatch.from_arrays([pa.array([1, None, None])], schema=schema)
    with pytest.raises(SchemaMismatch) as caught:
        Encoder(schema).encode(batch)
    assert str(caught.value) == (
        "the batch: column 'id' is declared int64 not null, and 2 of its values are null; fill "
        "them (pyarrow.compute.fill_null), or declare the column nullable"
    )
    open_schema = pa.schema([("id", pa.int64())])
    payload = joined(Encoder(open_schema).encode(batch.cast(open_schema)))
    with pytest.raises(BadCall, match="column 'id' is declared int64 not null, and 2 of its"):
        Decoder(schema).decode(payload)


def test_what_is_no_batch_is_refused():
    encoder = Encoder(PLAIN)
    with pytest.raises(LocalProtocolError, match=r"got Table \(a Table gives its batches by to_b"):
        encoder.encode(pa.Table.from_batches([batch_of()]))
    assert encoder.encode(batch_of()).size


def test_an_encoder_that_failed_stays_failed():
    deep = pa.int8()
    for _ in range(70):
        deep = pa.list_(deep)
    schema = pa.schema([("x", deep)])
    batch = pa.RecordBatch.from_arrays([pa.array([None], deep)], schema=schema)
    encoder = Encoder(schema)
    with pytest.raises(LocalProtocolError, match=r"Arrow cannot write it: .*recursion depth"):
        encoder.encode(batch)
    with pytest.raises(LocalProtocolError, match=r"an earlier one failed: .*recursion"):
        encoder.encode(batch)


@pytest.mark.requirement("AC-25")
def test_too_many_rows_are_refused():
    batch = pa.record_batch([pa.nulls(1 << 31)], names=["x"])
    with pytest.raises(LocalProtocolError, match="has 2147483648 rows, above the limit of 21474"):
        Encoder(batch.schema).encode(batch)
    fewer = batch.slice(1)
    assert roundtrip(fewer).num_rows == (1 << 31) - 1


@some_examples
@given(schemas())
def test_schemas_survive(schema):
    data = serialize_schema(schema)
    assert deserialize_schema(data).equals(schema, check_metadata=True)
    assert deserialize_schema(memoryview(bytearray(data))).equals(schema)


def test_schemas_that_differ_in_metadata_alone_are_told_apart():
    plain, rich = PLAIN, PLAIN.with_metadata({"a": "b"})
    assert plain.equals(rich)
    for _ in range(2):
        for schema in (plain, rich):
            data = serialize_schema(schema)
            assert deserialize_schema(data).equals(schema, check_metadata=True)


def test_what_was_made_of_a_schema_goes_with_it():
    made = []

    @by_identity
    def find(schema):
        made.append(schema.names)
        return Thing()

    first = pa.schema([("a", pa.int8())])
    alive = weakref.ref(find(first))
    assert find(first) is alive()
    assert made == [["a"]]
    twin = pa.schema([("a", pa.int8())])
    assert find(twin) is not alive()
    del first
    assert alive() is None
    others = [pa.schema([(str(i), pa.int8())]) for i in range(500)]
    things = [weakref.ref(find(schema)) for schema in others]
    assert sum(thing() is not None for thing in things) <= 128


class Thing:
    """What a test makes of schemas."""


def test_an_extension_type_may_be_registered_later():
    class Late(pa.ExtensionType):
        def __init__(self):
            super().__init__(pa.int8(), "aqueduct.tests.late")

        def __arrow_ext_serialize__(self):
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage_type, serialized):
            return cls()

    data = serialize_schema(pa.schema([("x", Late())]))
    assert deserialize_schema(data).field(0).type == pa.int8()
    pa.register_extension_type(Late())
    try:
        assert deserialize_schema(data).field(0).type == Late()
    finally:
        pa.unregister_extension_type("aqueduct.tests.late")
    assert deserialize_schema(data).field(0).type == pa.int8()


@pytest.mark.requirement("AC-13")
def test_what_is_no_schema_is_refused():
    data = serialize_schema(PLAIN)
    payload = b"".join(Encoder(PLAIN).encode(batch_of()).buffers)
    for wrong, text in (
        (b"", "the input: not a schema in Arrow IPC form: "),
        (b"garbage" * 9, "the input: not a schema in Arrow IPC form: "),
        (data[:-9], "the input: not a schema in Arrow IPC form: "),
        (data + b"\0", "the input: 1 bytes follow the schema"),
        (payload, "the input: a schema was expected and a record batch came"),
        (struct.pack("<iI", -1, 0), "the input: not a schema in Arrow IPC form: "),
        (data.replace(b"price", b"pr\xffce"), "the input: not a schema in Arrow IPC form: "),
    ):
        with pytest.raises(BadCall) as caught:
            deserialize_schema(wrong, where="the input", peer="p")
        assert str(caught.value).startswith(text)
        assert caught.value.peer == "p"
    with pytest.raises(BadCall, match=r"^not a schema"):
        deserialize_schema(b"")
