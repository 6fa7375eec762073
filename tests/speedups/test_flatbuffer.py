"""What is read of an Arrow message's metadata, against a slow reader of the same flatbuffer."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.arrow.flatbuffer import is_batch, numbers

SCHEMAS = (
    pa.schema([("id", pa.int64())]),
    pa.schema([("text", pa.string()), ("flag", pa.bool_())]),
    pa.schema([("view", pa.string_view()), ("id", pa.int64()), ("bytes", pa.binary_view())]),
    pa.schema([("inner", pa.list_(pa.struct([("a", pa.float32())])))]),
    pa.schema([("word", pa.dictionary(pa.int32(), pa.string()))]),
    pa.schema([]),
)


def batch_of(schema):
    """Two rows, of values long enough to make views refer to a buffer of their own."""
    values = {
        "id": [1, 2],
        "text": ["a", None],
        "flag": [True, False],
        "view": ["x" * 40, "y"],
        "bytes": [b"z" * 40, b"w" * 50],
        "inner": [[{"a": 1.0}], []],
        "word": ["one", "two"],
    }
    return pa.record_batch([pa.array(values[f.name], f.type) for f in schema], schema=schema)


def messages(schema, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch_of(schema))
    source = pa.BufferReader(sink.getvalue())
    found = []
    while True:
        try:
            found.append(pa.ipc.read_message(source))
        except EOFError:
            return found


def layout_of(message):
    layout = numbers(message.metadata)[3]
    assert layout is not None
    return layout


def slowly(data):
    """The same numbers, by struct and Python's own bounds."""

    def table(at):
        return at - struct.unpack_from("<i", data, at)[0]

    def field(at, index):
        size = struct.unpack_from("<H", data, table(at))[0]
        if 4 + 2 * index >= size:
            return 0
        offset = struct.unpack_from("<H", data, table(at) + 4 + 2 * index)[0]
        return at + offset if offset else 0

    def value(at, index, form):
        place = field(at, index)
        return struct.unpack_from(form, data, place)[0] if place else 0

    def follow(place):
        return place + struct.unpack_from("<I", data, place)[0]

    def length(at, index):
        place = field(at, index)
        return struct.unpack_from("<I", data, follow(place))[0] if place else 0

    message = follow(0)
    kind = value(message, 1, "<B")
    header = follow(field(message, 2))
    dictionary, delta = -1, False
    if kind == 2:
        dictionary, delta = value(header, 0, "<q"), bool(value(header, 2, "<B"))
        header = follow(field(header, 1))
    layout, compressed = None, False
    if kind in (2, 3):
        views = length(header, 4)
        buffers = length(header, 2)
        if views:
            at = follow(field(header, 4)) + 4
            buffers -= sum(struct.unpack_from(f"<{views}q", data, at))
        layout = (length(header, 1), buffers, views)
        compressed = field(header, 3) != 0
    version, body = value(message, 0, "<H"), value(message, 3, "<q")
    return kind, version, body, layout, compressed, dictionary, delta


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_the_numbers_are_those_of_the_message(schema, compression):
    kinds = []
    for message in messages(schema, compression=compression):
        found = numbers(message.metadata)
        assert found == slowly(message.metadata.to_pybytes())
        kind, version, body, layout, compressed, _, _ = found
        assert (version, body) == (4, 0 if message.body is None else message.body.size)
        kinds.append(kind)
        if kind == 3:
            assert compressed == (compression is not None)
            assert layout is not None
            assert layout[0] >= len(schema)
            assert is_batch(message.metadata, *layout) == (compression is None)
    assert kinds[0] == 1
    assert kinds[-1] == 3


@pytest.mark.parametrize("schema", SCHEMAS[:4], ids=str)
def test_a_batch_of_other_parts_is_no_such_batch(schema):
    first, batch = messages(schema)
    nodes, buffers, views = layout_of(batch)
    assert is_batch(batch.metadata, nodes, buffers, views)
    assert not is_batch(batch.metadata, nodes + 1, buffers, views)
    assert not is_batch(batch.metadata, nodes, buffers - 1, views)
    assert not is_batch(batch.metadata, nodes, buffers, views + 1)
    assert not is_batch(first.metadata, 0, 0, 0)
    older = messages(schema, metadata_version=pa.ipc.MetadataVersion.V4)[1]
    assert not is_batch(older.metadata, *layout_of(older))


def test_a_dictionary_and_its_delta():
    schema = SCHEMAS[4]
    dictionary = messages(schema)[1]
    assert numbers(dictionary.metadata)[0] == 2
    assert numbers(dictionary.metadata)[5:] == (0, False)
    assert not is_batch(dictionary.metadata, *layout_of(dictionary))


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_what_is_cut_short_is_refused_or_read_alike(schema):
    for message in messages(schema):
        data = message.metadata.to_pybytes()
        for size in range(len(data)):
            same(data[:size])


@given(data=st.binary(max_size=60), which=st.sampled_from(SCHEMAS), edits=st.data())
def test_any_bytes_are_read_within_their_bounds(data, which, edits):
    same(data)
    metadata = bytearray(messages(which)[-1].metadata.to_pybytes())
    for _ in range(4):
        at = edits.draw(st.integers(0, len(metadata) - 1))
        metadata[at] = edits.draw(st.integers(0, 255))
    same(bytes(metadata))


def same(data):
    """Both readers say the same of ``data``, or both refuse it.

    The slow one may look before the beginning, as Python's offsets do, so it is given no chance.
    """
    try:
        found = numbers(data)
    except ValueError:
        return
    assert found == slowly(data)
