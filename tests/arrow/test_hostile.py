"""Payloads from a peer that lies: a batch that can be used, or BadCall; never a crash."""

from __future__ import annotations

import random
import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.ipc import deserialize_schema, serialize_schema
from aqueduct.errors import BadCall, BatchTooLarge
from tests.arrow.strategies import make_batch, schemas, streams
from tests.support.selection import some_examples

WORDS = pa.schema([("word", pa.string()), ("x", pa.int64())])
CODED = pa.schema([("kind", pa.dictionary(pa.int8(), pa.string())), ("x", pa.int64())])


def batch_of(schema, size=100, seed=1):
    return make_batch(schema, size, random.Random(seed))


def payload_of(batch):
    return b"".join(Encoder(batch.schema).encode(batch).buffers)


def coded(indices, values):
    kind = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), pa.array(values))
    return pa.RecordBatch.from_arrays([kind, pa.array(range(len(indices)))], schema=CODED)


def refusal(schema, payload, **options):
    with pytest.raises(BadCall) as caught:
        Decoder(schema, **options).decode(payload)
    return str(caught.value)


def split(payload):
    """The messages of a payload."""
    source = pa.BufferReader(payload)
    found = []
    while (start := source.tell()) < len(payload):
        pa.ipc.read_message(source)
        found.append(payload[start : source.tell()])
    return found


@pytest.mark.requirement("AC-21")
@pytest.mark.parametrize("schema", [WORDS, CODED], ids=["plain", "dictionaries"])
def test_every_truncation_is_refused(schema):
    payload = payload_of(batch_of(schema, 5))
    for size in range(len(payload)):
        assert refusal(schema, payload[:size]).startswith("the batch cannot be read: ")


@pytest.mark.parametrize("schema", [WORDS, CODED], ids=["plain", "dictionaries"])
def test_garbage_is_refused(schema):
    payload = payload_of(batch_of(schema))
    for wrong in (b"", b"\0", b"\xff" * 64, b"garbage " * 50, struct.pack("<iI", -1, 0)):
        assert refusal(schema, wrong).startswith("the batch cannot be read: ")
    assert refusal(schema, payload + b"\0" * 8).endswith(": 8 bytes follow the record batch")
    twice = refusal(schema, payload + split(payload)[-1])
    assert "bytes follow the record batch" in twice
    assert "a schema came instead of a record" in refusal(schema, serialize_schema(schema))


def test_errors_say_which_batch_of_what():
    decoder = Decoder(WORDS, where="the input of handler 'h'", peer="aqueduct://a:1", handler="h")
    with pytest.raises(BadCall) as caught:
        decoder.decode(b"", number=17)
    assert str(caught.value) == (
        "batch 17 of the input of handler 'h' cannot be read: "
        "it ends where a record batch is expected"
    )
    assert (caught.value.peer, caught.value.handler) == ("aqueduct://a:1", "h")


def test_a_stream_of_plain_batches_goes_on_after_a_bad_one():
    decoder = Decoder(WORDS)
    with pytest.raises(BadCall):
        decoder.decode(b"")
    batch = batch_of(WORDS)
    assert decoder.decode(payload_of(batch)).equals(batch)


def test_a_stream_with_dictionaries_does_not():
    decoder = Decoder(CODED)
    payload = payload_of(coded([0], ["a"]))
    for wrong in (b"", payload, payload):
        with pytest.raises(BadCall, match=r"^batch 3 cannot be read: it ends where"):
            decoder.decode(wrong, number=3)


@pytest.mark.requirement("AC-92")
def test_other_schemas_are_noticed_by_their_parts():
    three = pa.schema([*WORDS, ("y", pa.int64())])
    text = refusal(WORDS, payload_of(batch_of(three)))
    assert text.endswith(
        "the record batch is of another schema: its parts are 3 arrays in 7 buffers, "
        "and the schema's are 2 arrays in 5 buffers"
    )
    assert "is of another schema" in refusal(three, payload_of(batch_of(WORDS)))
    assert "is of another schema" in refusal(pa.schema([]), payload_of(batch_of(WORDS)))
    text = refusal(WORDS, payload_of(coded([0], ["a"])))
    assert "a dictionary, which the schema does not have, came instead of" in text


@pytest.mark.requirement("AC-40")
def test_compression_is_refused():
    for schema in (WORDS, CODED):
        stream = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(stream, schema, options=options) as writer:
            writer.write_batch(batch_of(schema))
        messages = split(stream.getvalue().to_pybytes()[:-8])
        text = refusal(schema, b"".join(messages[1:]))
        assert text.endswith("is compressed, which was not agreed on")


@pytest.mark.requirement("AC-22")
def test_old_metadata_is_refused():
    stream = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(stream, WORDS, options=options) as writer:
        writer.write_batch(batch_of(WORDS))
    _, message = split(stream.getvalue().to_pybytes()[:-8])
    assert refusal(WORDS, message).endswith("is of metadata version V4, not V5")


@pytest.mark.requirement("AC-25")
@pytest.mark.parametrize("rows", [-1, 1 << 31, (1 << 63) - 1])
def test_numbers_of_rows_that_cannot_be(rows):
    batch = pa.record_batch([pa.nulls(54_321)], names=["x"])
    payload = payload_of(batch).replace(struct.pack("<q", 54_321), struct.pack("<q", rows))
    refusal(batch.schema, payload)
    payload = payload_of(batch.select([])).replace(
        struct.pack("<q", 54_321), struct.pack("<q", rows)
    )
    refusal(pa.schema([]), payload)


def test_lengths_that_cannot_be():
    batch = pa.record_batch([pa.array(range(4321), pa.int64())], names=["x"])
    payload = payload_of(batch)
    for length in (-1, 4320, 4322, 1 << 40, (1 << 63) - 1):
        one = struct.pack("<q", length)
        refusal(batch.schema, payload.replace(struct.pack("<q", 4321), one, 1))
        if length != 4320:  # fewer values than there is room for would be right
            refusal(batch.schema, payload.replace(struct.pack("<q", 4321), one))
        refusal(batch.schema, payload.replace(struct.pack("<q", 4321 * 8), one))


def buffers(kind, size, *parts, children=()):
    made = [None if part is None else pa.py_buffer(part) for part in parts]
    return pa.Array.from_buffers(kind, size, [None, *made], children=list(children))


def int32s(*numbers):
    return struct.pack(f"<{len(numbers)}i", *numbers)


BOMBS = {
    "text": buffers(pa.string(), 3, int32s(0, 1 << 30, 5, 10), b"abcdefghij"),
    "text backwards": buffers(pa.string(), 3, int32s(0, 9, 5, 10), b"abcdefghij"),
    "bytes": buffers(pa.binary(), 3, int32s(0, -5, 5, 10), b"abcdefghij"),
    "large text": buffers(
        pa.large_string(), 3, struct.pack("<4q", 0, 1 << 60, 5, 10), b"abcdefghij"
    ),
    "lists": buffers(
        pa.list_(pa.int8()), 3, int32s(0, 1 << 30, 2, 3), children=[pa.array([1, 2, 3], pa.int8())]
    ),
    "lists inside": pa.StructArray.from_arrays(
        [
            buffers(
                pa.list_(pa.int8()), 2, int32s(0, 99, 3), children=[pa.array([1] * 3, pa.int8())]
            )
        ],
        ["a"],
    ),
    "views of lists": buffers(
        pa.list_view(pa.int8()),
        2,
        int32s(0, 1 << 20),
        int32s(1, 1),
        children=[pa.array([1, 2, 3], pa.int8())],
    ),
    "codes of a sparse union": buffers(
        pa.sparse_union([pa.field("a", pa.int8())]),
        2,
        b"\0\x07",
        children=[pa.array([1, 2], pa.int8())],
    ),
    "offsets of a dense union": buffers(
        pa.dense_union([pa.field("a", pa.int8())]),
        2,
        b"\0\0",
        int32s(0, 1 << 20),
        children=[pa.array([1, 2], pa.int8())],
    ),
    "maps": buffers(
        pa.map_(pa.int8(), pa.int8()),
        2,
        int32s(0, 1 << 20, 1),
        children=[
            pa.StructArray.from_arrays(
                [pa.array([1], pa.int8()), pa.array([1], pa.int8())],
                fields=[pa.field("key", pa.int8(), False), pa.field("value", pa.int8())],
            )
        ],
    ),
}


@pytest.mark.requirement("AC-92")
@pytest.mark.parametrize("column", BOMBS.values(), ids=BOMBS)
def test_what_points_outside_is_refused(column):
    batch = pa.RecordBatch.from_arrays([column], schema=pa.schema([("x", column.type)]))
    payload = payload_of(batch)
    assert refusal(batch.schema, payload).startswith("the batch cannot be read: ")
    refusal(batch.schema, payload, checks="full")


@pytest.mark.requirement("AC-92")
@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
@pytest.mark.parametrize(
    "view", [(1000, b"abab", 0, 0), (20, b"abab", 9, 0), (20, b"abab", 0, 1), (-1, b"abab", 0, 0)]
)
def test_views_of_what_is_not_there_are_refused(kind, view):
    batch = pa.record_batch([pa.array(["ab" * 10], kind)], names=["x"])
    right = struct.pack("<i4sii", 20, b"abab", 0, 0)
    payload = payload_of(batch)
    assert right in payload
    wrong = payload.replace(right, struct.pack("<i4sii", *view))
    assert refusal(batch.schema, wrong).startswith("the batch cannot be read: ")


@pytest.mark.requirement("AC-92")
@pytest.mark.parametrize("ends", [(3, 1 << 20, 5), (4, 3, 5), (0, 4, 5), (-1, 4, 5), (3, 4, 4)])
def test_runs_that_end_nowhere_are_refused(ends):
    runs = pa.RunEndEncodedArray.from_arrays(
        pa.array([3, 4, 5], pa.int32()), pa.array([1, 2, 3], pa.int8())
    )
    batch = pa.record_batch([runs], names=["x"])
    payload = payload_of(batch).replace(int32s(3, 4, 5), int32s(*ends))
    assert refusal(batch.schema, payload).startswith("the batch cannot be read: ")


@pytest.mark.requirement("AC-92")
@pytest.mark.parametrize("checks", ["memory", "full"])
@pytest.mark.parametrize("index", [2, 127, -1])
def test_indices_outside_the_dictionary_are_refused(checks, index):
    payload = payload_of(coded([1, 1, 1, 1, 1, 1, 1, 1], ["a", "b"]))
    wrong = payload.replace(b"\1" * 8, b"\1" * 7 + struct.pack("b", index))
    assert wrong != payload
    assert refusal(CODED, wrong, checks=checks)


def test_layout_checks_leave_the_inside_alone():
    # What the documentation of Decoder says of the three degrees.
    column = BOMBS["text backwards"]
    schema = pa.schema([("x", pa.string())])
    payload = payload_of(pa.RecordBatch.from_arrays([column], schema=schema))
    assert Decoder(schema, checks="layout").decode(payload).num_rows == 3
    broken_text = buffers(pa.string(), 1, int32s(0, 2), b"\xff\xfe")
    payload = payload_of(pa.RecordBatch.from_arrays([broken_text], schema=schema))
    assert Decoder(schema).decode(payload).num_rows == 1
    assert "UTF8" in refusal(schema, payload, checks="full")


@pytest.mark.requirement("AC-24")
def test_dictionaries_must_be_those_of_the_schema():
    dictionary, batch = split(payload_of(coded([0, 1], ["a", "b"])))
    assert refusal(CODED, dictionary).endswith("it ends where a record batch is expected")
    assert refusal(CODED, batch).startswith("the batch cannot be read: ")
    two = pa.schema([CODED.field(0), pa.field("y", pa.dictionary(pa.int8(), pa.string()))])
    first, second, _ = split(payload_of(batch_of(two)))
    text = refusal(CODED, first + second + batch)
    assert text.endswith("dictionary 1 is none of the schema's")
    numbers = pa.schema([("kind", pa.dictionary(pa.int8(), pa.int8())), ("x", pa.int64())])
    other, _ = split(payload_of(batch_of(numbers)))
    assert "the dictionary is of another schema: its parts are 1 arrays in 2 buffers" in refusal(
        CODED, other + batch
    )


@pytest.mark.requirement("AC-93")
def test_dictionaries_are_bounded_in_all():
    decoder, encoder = Decoder(CODED, dictionary_limit=10_000), Encoder(CODED)
    words = ["word"]
    with pytest.raises(BatchTooLarge) as caught:
        for number in range(1000):
            words.append(f"{number:0100}")
            decoder.decode(b"".join(encoder.encode(coded([0], words[-100:])).buffers))
            if number < 80:
                batch = coded([len(words) - 1], words)
                decoder.decode(b"".join(encoder.encode(batch).buffers))
    assert "the dictionaries hold " in str(caught.value)
    assert "above the limit of 10000 (Calls.batch_limit)" in str(caught.value)


@pytest.mark.requirement("AC-93")
def test_replaced_dictionaries_do_not_count():
    decoder, encoder = Decoder(CODED, dictionary_limit=10_000), Encoder(CODED)
    for number in range(30):
        batch = coded([0], [f"{number:05000}"])
        assert decoder.decode(b"".join(encoder.encode(batch).buffers)).equals(batch)


INTERESTING = [
    0,
    1,
    2,
    7,
    64,
    255,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    (1 << 64) - 8,
]


def mutated(data, chance):
    """``data`` with a few faults of the kinds that parsers fall for."""
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5])):
        place = chance.randrange(len(data) or 1)
        match chance.randrange(5):
            case 0:
                data[place : place + 1] = chance.randbytes(1)
            case 1:
                width = chance.choice([4, 8])
                place -= place % width
                value = chance.choice(INTERESTING) + chance.randint(-2, 2)
                data[place : place + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
            case 2:
                data[place : place + 8] = bytes(8)
            case 3:
                other = chance.randrange(len(data) or 1)
                data[place : place + 8] = data[other : other + 8]
            case 4 if chance.random() < 0.3:
                del data[place:]
    return bytes(data)


def use(batch):
    """Touches every value; text that is not UTF-8 may say so."""
    for column in batch.columns:
        try:
            column.to_pylist()
        except (UnicodeDecodeError, ValueError, OverflowError):
            pass
        pa.concat_arrays([column, column]).equals(column)
    assert Decoder(batch.schema).decode(payload_of(batch)).num_rows == batch.num_rows


@pytest.mark.requirement("AC-92")
@some_examples
@given(streams(), st.integers(0, 1 << 32))
def test_any_payload_gives_a_usable_batch_or_an_error(batches, seed):
    chance = random.Random(seed)
    encoder = Encoder(batches[0].schema)
    payloads = [b"".join(encoder.encode(batch).buffers) for batch in batches]
    for _ in range(4):
        decoder = Decoder(batches[0].schema)
        for payload in payloads:
            if chance.random() < 0.7:
                payload = mutated(payload, chance)
            try:
                batch = decoder.decode(payload)
            except (BadCall, BatchTooLarge):
                break
            if batch.num_rows < 1000:
                use(batch)


@some_examples
@given(schemas(), st.integers(0, 1 << 32))
def test_any_schema_message_gives_a_usable_schema_or_an_error(schema, seed):
    chance = random.Random(seed)
    data = serialize_schema(schema)
    for _ in range(4):
        try:
            found = deserialize_schema(mutated(data, chance))
        except BadCall:
            continue
        str(found)
        Decoder(found)
        Encoder(found)
        assert deserialize_schema(serialize_schema(found)).equals(found)


ENTRIES = pa.list_(pa.struct([("key", pa.string()), ("value", pa.int32())]))
MAP = pa.map_(pa.string(), pa.int32())


def lists_of_entries(*, null_key, null_entry, null_row):
    """Two rows with the layout of a map, and nulls in the second entry."""
    entries = pa.StructArray.from_arrays(
        [pa.array(["a", None if null_key else "b", "c"]), pa.array([1, 2, 3], pa.int32())],
        fields=list(ENTRIES.value_type),
        mask=pa.array([False, null_entry, False]),
    )
    rows = pa.array([False, null_row])
    return pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), entries, mask=rows)


@pytest.mark.parametrize("checks", ["layout", "memory", "full"])
@pytest.mark.parametrize("null_row", [False, True])
@pytest.mark.parametrize(("null_key", "null_entry"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("around", ["column", "struct", "list", "dictionary", "list_view"])
def test_nulls_in_the_entries_and_keys_of_a_map(around, null_key, null_entry, null_row, checks):
    """Arrow ends the process at such a map, even if the null belongs to no row."""
    array = lists_of_entries(null_key=null_key, null_entry=null_entry, null_row=null_row)
    if around == "struct":
        hidden = pa.array([False, null_row])
        array = pa.StructArray.from_arrays([array], names=["m"], mask=hidden)
        wanted = pa.struct([("m", MAP)])
    elif around == "list":
        array = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), array)
        wanted = pa.list_(MAP)
    elif around == "dictionary":
        array = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), array)
        wanted = pa.dictionary(pa.int32(), MAP)
    elif around == "list_view":
        offsets, sizes = pa.array([0], pa.int32()), pa.array([1], pa.int32())
        array = pa.ListViewArray.from_arrays(offsets, sizes, array)
        wanted = pa.list_view(MAP)
    else:
        wanted = MAP
    batch = pa.record_batch([array], names=["x"])
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
    messages = split(stream.getvalue().to_pybytes()[:-8])
    text = refusal(pa.schema([("x", wanted)]), b"".join(messages[1:]), checks=checks)
    assert "should have no nulls" in text
