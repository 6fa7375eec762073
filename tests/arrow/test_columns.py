"""The compiled writer and reader against Arrow's own, for all types that they know."""

from __future__ import annotations

import ctypes
import gc
import io
import mmap
import random
import struct
import subprocess
import sys
import threading

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.arrow.columns import DEPTH_LIMIT, KINDS, NODES_LIMIT, Columns
from aqueduct._speedups.arrow.reader import BatchReader
from aqueduct._speedups.arrow.writer import BatchWriter
from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.layout import common_columns
from aqueduct.errors import BadCall, LocalProtocolError
from tests.arrow.strategies import common_schemas, make_batch, streams
from tests.arrow.test_hostile import mutated
from tests.support.selection import some_examples

IMPORT = pa.RecordBatch._import_from_c
WORDS = pa.schema([("word", pa.string()), ("x", pa.int64())])


def writer(schema):
    columns = common_columns(schema)
    assert columns is not None, schema
    return BatchWriter(columns)


def reader(schema, inside=True):
    columns = common_columns(schema)
    assert columns is not None, schema
    return BatchReader(columns, IMPORT, schema, inside)


def joined(written):
    buffers, size = written
    payload = b"".join(buffers)
    assert len(payload) == size
    return payload


def batch_of(schema=WORDS, size=100, seed=1):
    return make_batch(schema, size, random.Random(seed))


def written(batch):
    return joined(writer(batch.schema).write(batch))


# What one writes, the other reads


@some_examples
@given(streams(of=common_schemas()))
def test_arrow_reads_what_is_written(batches):
    schema = batches[0].schema
    write = writer(schema).write
    for batch in batches:
        payload = joined(write(batch))
        source = pa.BufferReader(payload)
        message = pa.ipc.read_message(source)
        assert source.tell() == len(payload)
        assert (len(payload) - message.body.size) % 64 == 0
        result = pa.ipc.read_record_batch(message, schema)
        result.validate(full=True)
        assert result.equals(batch)


@some_examples
@given(streams(of=common_schemas()))
def test_what_arrow_writes_is_read(batches):
    schema = batches[0].schema
    read = reader(schema).read
    for batch in batches:
        for payload in (batch.serialize().to_pybytes(), written(batch)):
            result = read(payload)
            assert result is not None
            result.validate(full=True)
            assert result.schema.equals(schema)
            assert result.equals(batch)


@some_examples
@given(streams(of=common_schemas()), st.integers(0, 1 << 32), st.sampled_from(["memory", "layout"]))
def test_what_is_read_is_what_arrow_reads(batches, seed, checks):
    """Of any payload: what the compiled reader takes, Arrow's takes too, and as the same."""
    schema, chance = batches[0].schema, random.Random(seed)
    read, write = reader(schema, checks == "memory").read, writer(schema).write
    arrow = Decoder(schema, checks=checks)
    arrow._fast = None
    for batch in batches:
        for payload in (batch.serialize().to_pybytes(), written(batch)):
            for _ in range(4):
                wrong = mutated(payload, chance)
                found = read(wrong)
                if found is None:
                    continue
                expected = arrow.decode(wrong)
                assert found.num_rows == expected.num_rows
                assert found.schema.equals(expected.schema)
                if checks == "memory":
                    assert joined(write(found)) == joined(write(expected))


@pytest.mark.parametrize("start", range(10))
def test_slices_are_cut_to_their_rows(start):
    inner = pa.struct([("flag", pa.bool_()), ("words", pa.large_list(pa.large_string()))])
    schema = pa.schema(
        [
            ("flag", pa.bool_()),
            ("words", pa.list_(pa.string())),
            ("pair", pa.list_(inner, 2)),
            ("map", pa.map_(pa.string(), inner)),
        ]
    )
    batch = batch_of(schema, 200).slice(start)
    for length in (0, 1, 7, 8, 9, 63, 64, 65, 130):
        part = batch.slice(3, length)
        payload = written(part)
        theirs = part.serialize().to_pybytes()
        assert Decoder(schema).decode(payload).equals(part)
        if length:  # Arrow pads with what comes next, and does not cut what is in fixed lists
            assert body_of(payload) <= body_of(theirs)


def body_of(payload):
    body = pa.ipc.read_message(pa.BufferReader(payload)).body
    assert body is not None
    return body.size


def test_the_numbers_of_rows_and_nulls_are_counted_for_slices():
    column = pa.array([None, 1, None, 3, None, None, 6, 7, None, 9] * 50, pa.int64())
    for start in range(12):
        for length in (0, 1, 5, 64, 200):
            part = pa.record_batch([column.slice(start, length)], names=["x"])
            result = reader(part.schema).read(written(part))
            assert result.column(0).null_count == part.column(0).null_count
            assert result.equals(part)


def test_a_whole_column_without_nulls_leaves_its_bitmap():
    column = pa.array([None, *range(1000)], pa.int64())
    part = pa.record_batch([column.slice(1)], names=["x"])
    buffers, _ = writer(part.schema).write(part)
    assert [len(buffer) for buffer in buffers[1:]] == [8000]


# Who is not served


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int8(), pa.string()),
        pa.string_view(),
        pa.binary_view(),
        pa.list_view(pa.int8()),
        pa.large_list_view(pa.int8()),
        pa.sparse_union([pa.field("a", pa.int8())]),
        pa.dense_union([pa.field("a", pa.int8())]),
        pa.run_end_encoded(pa.int32(), pa.int8()),
    ],
    ids=str,
)
def test_uncommon_types_are_left_to_arrow(kind):
    for outer in (kind, pa.list_(kind), pa.struct([("a", pa.int8()), ("b", kind)])):
        assert common_columns(pa.schema([("x", pa.int8()), ("y", outer)])) is None


def test_schemas_without_columns_and_very_large_ones_are_left_to_arrow():
    assert common_columns(pa.schema([])) is None
    names = [(f"c{i}", pa.int8()) for i in range(NODES_LIMIT + 1)]
    assert common_columns(pa.schema(names)) is None
    columns = common_columns(pa.schema(names[1:]))
    assert columns is not None and columns.columns == columns.nodes == NODES_LIMIT
    deep = pa.int8()
    for _ in range(DEPTH_LIMIT - 1):
        deep = pa.list_(deep)
    assert common_columns(pa.schema([("x", deep)])) is not None
    assert common_columns(pa.schema([("x", pa.list_(deep))])) is None
    batch = pa.RecordBatch.from_arrays([pa.nulls(3, deep)], names=["x"])
    assert reader(batch.schema).read(written(batch)).equals(batch)


def test_what_must_not_be_null_is_left_to_arrow():
    schema = pa.schema([pa.field("x", pa.int8(), nullable=False)])
    open_schema = pa.schema([("x", pa.int8())])
    batch = pa.RecordBatch.from_arrays([pa.array([1, None], pa.int8())], schema=open_schema)
    assert writer(schema).write(batch) is None
    assert reader(schema).read(written(batch)) is None
    assert reader(open_schema).read(written(batch)).equals(batch)


def test_another_layout_is_left_to_arrow():
    batch = batch_of()
    one, text = pa.schema([("x", pa.string())]), pa.schema([("x", pa.string())] * 2)
    assert writer(one).write(batch) is None
    assert writer(text).write(batch) is None
    assert reader(one).read(written(batch)) is None
    assert reader(text).read(written(batch)) is None


def test_layouts_that_cannot_be_are_refused():
    good = [("struct", 0, 2, False), ("fixed", 8, 0, False), ("bytes", 0, 0, True)]
    columns = Columns(good)
    assert (columns.nodes, columns.columns, columns.buffers) == (3, 1, 6)
    assert columns.head_size % 64 == 0
    for wrong in (
        [],
        good[:2],
        [("struct", 0, -1, False)],
        [("fixed", -1, 0, False)],
        [("fixed", 8, 1, False), ("fixed", 8, 0, False)],
        [("list", 0, 0, False)],
        [("list", 0, 2, False), ("fixed", 8, 0, False), ("fixed", 8, 0, False)],
        [("list", 0, 1, False)] * DEPTH_LIMIT + [("fixed", 8, 0, False)],
        [("nulls", 0, 0, False)] * (NODES_LIMIT + 1),
    ):
        with pytest.raises(LocalProtocolError):
            Columns(wrong)
    with pytest.raises(KeyError):
        Columns([("union", 0, 1, False)])
    assert all(isinstance(number, int) for number in KINDS.values())


# Hostile payloads


def test_a_payload_ends_where_memory_ends():
    """Nothing behind a payload is read: after it comes memory that nobody may touch."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + 3 * page), page, 0) == 0
    try:
        chance = random.Random(5)
        taken = refused = 0
        schema = pa.schema(
            [
                ("a", pa.list_(pa.binary())),
                ("b", pa.bool_()),
                ("c", pa.map_(pa.binary(), pa.large_binary())),
                ("d", pa.list_(pa.int16(), 2)),
            ]
        )
        read = reader(schema).read
        payload = written(batch_of(schema, 20))
        for size in (*range(0, len(payload), 8), *[len(payload)] * 3000):
            wrong = mutated(payload[:size], chance) if size else b""
            wrong = wrong[: len(wrong) & ~7]
            start = 3 * page - len(wrong)
            memory[start : 3 * page] = wrong
            found = read(memoryview(memory)[start : 3 * page])
            if found is None:
                refused += 1
                continue
            taken += 1
            found.validate(full=True)
            del found
        assert taken > 100
        assert refused > 100
    finally:
        libc.mprotect(ctypes.c_void_p(address + 3 * page), page, 3)


@pytest.mark.parametrize("large", [False, True], ids=["32 bits", "64 bits"])
def test_offsets_that_point_outside_are_not_read(large):
    kind, letter = (pa.large_binary(), "q") if large else (pa.binary(), "i")
    schema = pa.schema([("x", kind)])
    batch = pa.RecordBatch.from_arrays([pa.array([b"abc", b"defg", b"hi"], kind)], schema=schema)
    payload = written(batch)
    right = struct.pack(f"<4{letter}", 0, 3, 7, 9)
    assert right in payload
    top = (1 << (63 if large else 31)) - 1
    for offsets in (
        (0, 3, 7, top),
        (0, 3, top, 9),
        (0, -1, 7, 9),
        (-1, 3, 7, 9),
        (0, 7, 3, 9),
        (0, 3, 9, 7),
        (-top - 1, top, 0, 9),
        (0, top, -top - 1, 9),
        (5, 3, 7, 9),
    ):
        wrong = payload.replace(right, struct.pack(f"<4{letter}", *offsets))
        assert reader(schema).read(wrong) is None, offsets
        with pytest.raises(BadCall):
            Decoder(schema).decode(wrong)
    inner = payload.replace(right, struct.pack(f"<4{letter}", 0, 7, 3, 9))
    assert reader(schema, inside=False).read(inner).num_rows == 3
    fewer = payload.replace(right, struct.pack(f"<4{letter}", 1, 3, 3, 8))
    assert reader(schema).read(fewer).column(0).to_pylist() == [b"bc", b"", b"defgh"]


def test_wrong_numbers_of_nulls_are_not_read():
    batch = pa.record_batch([pa.array([1, None, 3, None, 5] * 100, pa.int64())], names=["x"])
    payload = written(batch)
    right = struct.pack("<qq", 500, 200)
    assert payload.count(right) == 1
    for nulls in (-1, 1, 199, 201, 500, 501):
        wrong = payload.replace(right, struct.pack("<qq", 500, nulls))
        assert reader(batch.schema).read(wrong) is None
    none = payload.replace(right, struct.pack("<qq", 500, 0))
    assert reader(batch.schema).read(none).column(0).null_count == 0


# Whose memory it is


def exporting(size):
    """Memory that tells whether anyone points into it, and a batch that does."""
    memory = AlignedBuffer(8 * size)
    memoryview(memory)[:] = bytes(8 * size)
    column = pa.Array.from_buffers(pa.int64(), size, [None, pa.py_buffer(memory)])
    return memory, pa.record_batch([column], names=["x"])


def test_buffers_keep_their_columns():
    memory, batch = exporting(1000)
    buffers, _ = writer(batch.schema).write(batch)
    assert pa.py_buffer(buffers[1]).address == memory.address
    del batch
    gc.collect()
    assert memory.exports
    part = memoryview(buffers[1])[100:200]
    del buffers
    gc.collect()
    assert memory.exports
    assert bytes(part) == bytes(100)
    del part
    assert not memory.exports


def test_small_buffers_keep_nothing():
    memory, batch = exporting(10)
    buffers, _ = writer(batch.schema).write(batch)
    assert [type(buffer) for buffer in buffers] == [bytes]
    del batch
    assert not memory.exports


def test_a_batch_that_is_not_written_is_let_go():
    memory, batch = exporting(1000)
    assert writer(WORDS).write(batch) is None
    del batch
    assert not memory.exports


def test_the_views_of_a_batch_are_of_these_buffers_alone():
    _, batch = exporting(1000)
    piece = writer(batch.schema).write(batch)[0][1]
    view = memoryview(piece)
    assert len(piece) == 8000 and repr(piece) == "<Piece of 8000 bytes>"
    assert view.readonly and view.contiguous and (view.format, view.shape) == ("B", (8000,))
    assert bytes(view) == bytes(8000) and view.obj is piece
    with pytest.raises(TypeError, match="read-write"):
        io.BytesIO(b"other").readinto(piece)
    assert bytes(piece) == bytes(8000)


def landed(batch):
    payload = AlignedBuffer(len(data := written(batch)))
    memoryview(payload)[:] = data
    return payload


def test_a_batch_keeps_its_payload_until_its_last_column_is_gone():
    payload = landed(batch_of(size=1000))
    batch = reader(WORDS).read(payload)
    assert payload.exports == 1
    column = batch.column(1).slice(5, 9)
    del batch
    gc.collect()
    assert payload.exports == 1
    assert column.equals(batch_of(size=1000).column(1).slice(5, 9))
    del column
    assert not payload.exports


def test_a_payload_that_is_not_read_is_let_go():
    payload = landed(batch_of())
    other = pa.schema([("x", pa.int8())])
    assert reader(other).read(payload) is None
    assert not payload.exports
    with pytest.raises((TypeError, BufferError)):
        reader(WORDS).read(7)
    with pytest.raises(BufferError):
        reader(WORDS).read(memoryview(payload)[::2])


def test_a_payload_is_let_go_when_the_import_fails():
    payload = landed(batch_of())
    columns = common_columns(WORDS)
    assert columns is not None

    def fail(address, schema):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        BatchReader(columns, fail, WORDS).read(payload)
    assert not payload.exports
    with pytest.raises(pa.ArrowInvalid):  # Arrow itself lets it go
        BatchReader(columns, IMPORT, pa.schema([("x", pa.int8())])).read(payload)
    assert not payload.exports


def test_batches_end_in_any_thread():
    """Columns go away in other threads, Python's own and those of Arrow, while more are made."""
    schema = pa.schema([("x", pa.int64()), ("s", pa.string())])
    batch = batch_of(schema, 2000)
    payloads = [landed(batch) for _ in range(40)]
    read, write = reader(schema).read, writer(schema).write
    wrong = []

    def work(mine):
        for _ in range(20):
            batches = [read(payload) for payload in mine]
            table = pa.Table.from_batches(batches).sort_by("x")  # in Arrow's threads
            again = [write(one)[0] for one in batches]
            del batches
            if table.num_rows != 2000 * len(mine):
                wrong.append(table.num_rows)
            del table
            if any(b"".join(buffers) != written(batch) for buffers in again):
                wrong.append("bytes")

    threads = [threading.Thread(target=work, args=(payloads[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert wrong == []
    gc.collect()
    assert [payload.exports for payload in payloads] == [0] * 40


def test_large_payloads_are_read_while_other_threads_run():
    batch = pa.record_batch([pa.array([b"abc"] * 100_000)], names=["x"])
    payload = written(batch)
    assert len(payload) > 256 << 10
    assert reader(batch.schema).read(payload).equals(batch)
    right = struct.pack("<3i", 150_000, 150_003, 150_006)
    wrong = payload.replace(right, struct.pack("<3i", 150_000, 150_003, 150_002))
    assert wrong != payload
    assert reader(batch.schema).read(wrong) is None


def test_a_process_ends_with_batches_alive():
    code = (
        "import pyarrow as pa\n"
        "from aqueduct.arrow import Decoder, Encoder\n"
        "batch = pa.record_batch([pa.array(range(9999)), pa.array(['x'] * 9999)], ['a', 'b'])\n"
        "buffers = Encoder(batch.schema).encode(batch).buffers\n"
        "pa.kept = [Decoder(batch.schema).decode(b''.join(buffers)), buffers]\n"
        "print(pa.kept[0].num_rows)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "9999\n", "")


# That it is used


def test_encoder_and_decoder_use_it(monkeypatch):
    def never(*_):
        raise AssertionError("Arrow's own was asked")

    batch = batch_of()
    monkeypatch.setattr(Encoder, "_open", never)
    monkeypatch.setattr(Decoder, "_decode", never)
    for checks in ("layout", "memory", "full"):
        payload = b"".join(Encoder(WORDS).encode(batch).buffers)
        assert Decoder(WORDS, checks=checks).decode(payload).equals(batch)
