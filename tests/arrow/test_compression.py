"""Packed payloads: every type there and back, what it saves, and what hostile ones may ask for."""

from __future__ import annotations

import os
import random
import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct.arrow.compression import FREE, RATIO, codec_of, compress, pack
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.errors import BadCall, BatchTooLarge, CallError, ConfigError
from tests.arrow.strategies import make_batch, schemas, streams
from tests.support.selection import some_examples

CODECS = ("lz4", "zstd")
PLAIN = pa.schema([("id", pa.int64()), ("name", pa.string()), ("price", pa.float64())])
ZEROS = pa.schema([pa.field("zero", pa.int64(), nullable=False)])


def landed(encoded) -> AlignedBuffer:
    payload = AlignedBuffer(encoded.size)
    memoryview(payload)[:] = b"".join(encoded.buffers)
    return payload


def plain(rows: int = 20_000, seed: int = 1) -> pa.RecordBatch:
    chance = random.Random(seed)
    return pa.record_batch(
        [
            pa.array(range(rows)),
            pa.array([f"name {chance.randrange(50)}" for _ in range(rows)]),
            pa.array([chance.random() for _ in range(rows)]),
        ],
        schema=PLAIN,
    )


def zeros_of(size: int) -> pa.RecordBatch:
    array = pa.Array.from_buffers(pa.int64(), size // 8, [None, pa.py_buffer(bytes(size))])
    return pa.record_batch([array], schema=ZEROS)


@pytest.mark.parametrize("codec", CODECS)
@some_examples
@given(streams())
def test_streams_of_every_type_come_back(codec, batches):
    schema = batches[0].schema
    encoder, decoder = Encoder(schema), Decoder(schema, compressions=CODECS, checks="full")
    for batch in batches:
        encoded = encoder.encode(batch)
        assert decoder.decode(landed(pack(encoded, codec))).equals(batch)


@some_examples
@given(schemas(), st.integers(0, 1 << 32))
def test_packed_and_plain_payloads_may_alternate(schema, seed):
    chance = random.Random(seed)
    encoder, decoder = Encoder(schema), Decoder(schema, compressions=CODECS)
    for codec in ("lz4", "", "zstd", ""):
        batch = make_batch(schema, 300, chance)
        encoded = encoder.encode(batch)
        payload = landed(compress(encoded, codec) if codec else encoded)
        assert decoder.decode(payload).equals(batch)


@pytest.mark.requirement("AC-42")
@pytest.mark.parametrize("codec", CODECS)
def test_arrow_itself_reads_it(codec):
    batch = plain()
    packed = landed(pack(Encoder(PLAIN).encode(batch), codec))
    message = pa.ipc.read_message(pa.py_buffer(packed))
    assert pa.ipc.read_record_batch(message, PLAIN).equals(batch)
    stream = PLAIN.serialize().to_pybytes() + bytes(packed)
    assert pa.ipc.open_stream(stream).read_all().to_batches() == [batch]


@pytest.mark.requirement("AC-42")
@pytest.mark.parametrize("codec", CODECS)
def test_what_arrow_packed_is_read(codec):
    batch = plain()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, PLAIN, options=pa.ipc.IpcWriteOptions(compression=codec)) as out:
        out.write_batch(batch)
    stream = sink.getvalue().to_pybytes()
    payload = stream[len(PLAIN.serialize()) : -8]
    assert Decoder(PLAIN, compressions=(codec,)).decode(payload).equals(batch)


@pytest.mark.parametrize("codec", CODECS)
def test_what_does_not_pack_stays_where_it_was(codec):
    noise = pa.py_buffer(os.urandom(80_000))
    batch = pa.record_batch(
        {"counted": pa.array(range(10_000)), "noise": _column(noise)},
    )
    encoded = Encoder(batch.schema).encode(batch)
    packed = compress(encoded, codec)
    assert 80_000 < packed.size < encoded.size * 0.8
    kept = [part for part in packed.buffers if len(part) == 80_000]
    assert [pa.py_buffer(part).address for part in kept] == [noise.address]  # never copied
    payload = landed(packed)
    found = Decoder(batch.schema, compressions=CODECS).decode(payload)
    assert found.equals(batch)
    address = found["noise"].buffers()[1].address
    assert not address % 64
    assert 0 <= address - pa.py_buffer(payload).address < len(memoryview(payload))


def _column(data: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), data.size // 8, [None, data])


@pytest.mark.parametrize("codec", CODECS)
def test_what_saves_nothing_is_sent_as_it_was(codec):
    noise = pa.record_batch({"noise": _column(pa.py_buffer(os.urandom(80_000)))})
    small = pa.record_batch({"id": pa.array([1, 2, 3])})
    for batch in (noise, small):
        encoded = Encoder(batch.schema).encode(batch)
        assert compress(encoded, codec) is encoded


def test_a_payload_in_any_parts_is_packed():
    encoded = Encoder(PLAIN).encode(plain())
    whole = b"".join(encoded.buffers)
    expected = b"".join(pack(encoded, "lz4").buffers)
    chance = random.Random(3)
    cuts = sorted(chance.sample(range(1, len(whole)), 40))
    encoded.buffers[:] = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert b"".join(pack(encoded, "lz4").buffers) == expected


# ------------------------------------------------------------ hostile peers


def refusal(payload, schema=PLAIN, error=BadCall, compressions=CODECS, **options) -> str:
    decoder = Decoder(schema, compressions=compressions, **options)
    with pytest.raises(error) as caught:
        decoder.decode(payload)
    return str(caught.value)


@pytest.mark.requirement("AC-40")
def test_what_was_not_agreed_on_is_refused():
    packed = landed(pack(Encoder(PLAIN).encode(plain()), "zstd"))
    assert refusal(packed, compressions=()).endswith("is compressed, which was not agreed on")
    assert refusal(packed, compressions=("lz4",)).endswith("by zstd, which was not agreed on")


def with_claim(payload, claim: int) -> bytearray:
    """The payload with the first buffer's claim changed."""
    data = bytearray(payload)
    body = 8 + struct.unpack_from("<i", data, 4)[0]
    struct.pack_into("<q", data, body, claim)
    return data


@pytest.mark.requirement("AC-43")
def test_claims_are_looked_at_before_memory_is_taken():
    packed = bytes(landed(pack(Encoder(PLAIN).encode(plain()), "lz4")))
    most = FREE + RATIO * len(packed)
    pool = pa.default_memory_pool()
    before = pool.max_memory()
    for claim in (most + 1, 1 << 40, (1 << 63) - 1):
        text = refusal(with_claim(packed, claim), error=BatchTooLarge)
        assert f"{len(packed)} bytes claim to unpack to " in text
        assert text.endswith(f"above the limit of {most}: {RATIO} times its size and {FREE}")
    assert pool.max_memory() < before + (1 << 20)
    limit = 300_000
    text = refusal(packed, error=BatchTooLarge, dictionary_limit=limit)
    assert text.endswith(f"above the limit of {limit} (Calls.batch_limit)")
    for claim in (-2, -(1 << 63)):
        text = refusal(with_claim(packed, claim))
        assert text.endswith(f"its compressed buffer 1 claims to hold {claim} bytes")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("wrong", [-1, 1, -160_000])
def test_a_claim_that_is_not_true_is_refused(codec, wrong):
    packed = bytes(landed(pack(Encoder(PLAIN).encode(plain()), codec)))
    refusal(with_claim(packed, 160_000 + wrong))


@pytest.mark.requirement("AC-43")
def test_many_messages_share_one_allowance():
    """Dictionaries are messages of their own; each within the limit is not enough."""
    kind = pa.dictionary(pa.int32(), pa.large_binary())
    schema = pa.schema([pa.field(name, kind) for name in "abcd"])
    values = pa.array([bytes(600_000)], pa.large_binary())
    column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), values)
    batch = pa.record_batch([column] * 4, schema=schema)
    packed = pack(Encoder(schema).encode(batch), "zstd")
    payload = bytes(landed(packed))
    assert Decoder(schema, compressions=CODECS).decode(payload).equals(batch)
    honest = 4 * 600_000
    assert len(payload) >= (honest - FREE) // RATIO  # the sender has added what was missing
    text = refusal(payload, schema, BatchTooLarge, dictionary_limit=honest - 1)
    assert "claim to unpack to" in text


@pytest.mark.requirement("AC-44")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1 << 16, FREE, FREE + 8, 64 << 20])
def test_what_packs_too_well_is_filled_up(codec, size):
    batch = zeros_of(size)
    encoded = Encoder(ZEROS).encode(batch)
    packed = compress(encoded, codec)
    assert packed.size < 1000 + size // 200
    payload = landed(packed)
    assert Decoder(ZEROS, compressions=CODECS).decode(payload).equals(batch)


def test_buffers_outside_the_body_are_refused():
    packed = bytes(landed(pack(Encoder(ZEROS).encode(zeros_of(8000)), "lz4")))
    place, (offset, size) = _last_buffer(packed)
    for pair in ((offset, 1 << 40), (1 << 40, size), (-8, size), (offset, 7), (offset, -1)):
        data = bytearray(packed)
        struct.pack_into("<qq", data, place, *pair)
        refusal(data, ZEROS)


def _last_buffer(packed: bytes) -> tuple[int, tuple[int, ...]]:
    """Where the metadata says what the last buffer is: right at its end, in these payloads."""
    (length,) = struct.unpack_from("<i", packed, 4)
    end = 8 + length
    while not any(packed[end - 8 : end]):
        end -= 8
    return end - 16, struct.unpack_from("<qq", packed, end - 16)


@pytest.mark.parametrize("codec", CODECS)
@some_examples
@given(seed=st.integers(0, 1 << 32), schema=schemas())
def test_broken_payloads_are_refused_or_harmless(codec, seed, schema):
    chance = random.Random(seed)
    encoded = Encoder(schema).encode(make_batch(schema, 40, chance))
    payload = bytearray(b"".join(pack(encoded, codec).buffers))
    for _ in range(chance.randrange(1, 5)):
        payload[chance.randrange(len(payload))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
    if chance.random() < 0.2:
        del payload[chance.randrange(len(payload)) :]
    try:
        found = Decoder(schema, compressions=CODECS, checks="full").decode(payload)
    except CallError:
        return
    found.validate(full=True)


def test_names_of_compressions():
    assert [codec_of(name) for name in ("lz4", "zstd", "none")] == ["lz4", "zstd", ""]
    for name in ("", "gzip", "LZ4"):
        with pytest.raises(ConfigError, match="one of lz4, zstd, none"):
            codec_of(name)
