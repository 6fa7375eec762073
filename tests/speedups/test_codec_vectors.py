"""Every vector of the codec: whole, byte by byte, with trailing bytes, in random pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels.tracker import SentNumbers, UnreliableSent
from aqueduct.errors import FrameError, RemoteProtocolError, SequenceError, VersionError
from tests.reference import codec as model
from tests.speedups.strategies import (
    VECTORS,
    as_tuple,
    cut,
    cuts,
    encode_frames,
    read_all,
    vector_decoder,
    vector_frames,
)

valid = pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
invalid = pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda vector: vector["name"])

Vector = dict[str, Any]


def check_valid(vector: Vector, pieces: list[bytes]) -> None:
    decoder = vector_decoder(vector)
    frames = read_all(decoder, pieces)
    assert [as_tuple(frame) for frame in frames] == vector_frames(vector)
    decoder.end()
    assert decoder.finished
    assert decoder.consumed == len(bytes.fromhex(vector["hex"]))
    assert decoder.frames == len(frames)


def check_invalid(vector: Vector, pieces: list[bytes]) -> None:
    decoder = vector_decoder(vector)
    caught: pytest.ExceptionInfo[RemoteProtocolError]
    if vector["kind"] == "truncated":
        read_all(decoder, pieces)
        with pytest.raises(RemoteProtocolError) as caught:
            decoder.end()
        assert type(caught.value) is FrameError
        assert caught.value.truncated
    else:
        with pytest.raises((FrameError, SequenceError, VersionError)) as caught:
            read_all(decoder, pieces)
        assert not getattr(caught.value, "truncated", False)
    assert_sticky(decoder, caught.value)


def assert_sticky(decoder: codec.FrameDecoder, error: RemoteProtocolError) -> None:
    assert decoder.error is error
    for call in (
        decoder.next,
        decoder.end,
        decoder.admit,
        lambda: decoder.feed(b"x"),
        lambda: decoder.receive_buffer(1),
        lambda: decoder.received(0),
    ):
        with pytest.raises(type(error)) as again:
            call()
        assert again.value is error


@valid
def test_valid_whole(vector: Vector) -> None:
    check_valid(vector, [bytes.fromhex(vector["hex"])])


@valid
def test_valid_byte_by_byte(vector: Vector) -> None:
    data = bytes.fromhex(vector["hex"])
    check_valid(vector, [data[i : i + 1] for i in range(len(data))])


@given(places=cuts)
@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
def test_valid_in_pieces(vector: Vector, places: list[int]) -> None:
    check_valid(vector, cut(bytes.fromhex(vector["hex"]), places))


@valid
@pytest.mark.parametrize("trailing", [b"\x00", b"\x00\xff\x80", b"\x0c" * 5])
def test_valid_with_trailing_bytes(vector: Vector, trailing: bytes) -> None:
    decoder = vector_decoder(vector)
    decoder.feed(bytes.fromhex(vector["hex"]) + trailing)
    frames = [as_tuple(decoder.next()) for _ in vector["decoded"]]
    assert frames == vector_frames(vector)
    assert decoder.buffered == len(trailing)
    with pytest.raises(FrameError, match=f"no frame has the tag {trailing[0]}"):
        decoder.next()


@valid
def test_valid_again_to_the_same_bytes(vector: Vector) -> None:
    frames = vector_frames(vector)
    assert model.encode(frames).hex() == vector["hex"]
    if not vector.get("lenient"):
        assert encode_frames(frames).hex() == vector["hex"]


@valid
def test_the_model_agrees_on_valid(vector: Vector) -> None:
    frames, error = decode_by_model(vector)
    assert (frames, error) == (vector_frames(vector), None)


@invalid
def test_invalid_whole(vector: Vector) -> None:
    check_invalid(vector, [bytes.fromhex(vector["hex"])])


@invalid
def test_invalid_byte_by_byte(vector: Vector) -> None:
    data = bytes.fromhex(vector["hex"])
    check_invalid(vector, [data[i : i + 1] for i in range(len(data))])


@given(places=cuts)
@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda vector: vector["name"])
def test_invalid_in_pieces(vector: Vector, places: list[int]) -> None:
    check_invalid(vector, cut(bytes.fromhex(vector["hex"]), places))


@invalid
def test_invalid_with_trailing_bytes(vector: Vector) -> None:
    if vector["kind"] == "malformed":
        check_invalid(vector, [bytes.fromhex(vector["hex"]) + b"\x04\x00\xff"])
    else:
        decoder = vector_decoder(vector)
        decoder.feed(bytes.fromhex(vector["hex"]))
        frames = [as_tuple(frame) for frame in iter(decoder.next, None)]
        assert frames == decode_by_model(vector)[0]


@invalid
def test_the_model_agrees_on_invalid(vector: Vector) -> None:
    _, error = decode_by_model(vector)
    assert error is not None
    assert getattr(error, "truncated", False) == (vector["kind"] == "truncated")


def decode_by_model(vector: Vector) -> tuple[list[model.Frame], RemoteProtocolError | None]:
    return model.decode(
        bytes.fromhex(vector["hex"]),
        from_server=vector["context"]["from"] == "server",
        datagram=vector["context"]["carrier"] == "datagram",
    )


@pytest.mark.parametrize(
    "vector",
    [vector for vector in VECTORS["valid"] if "meaning" in vector],
    ids=lambda vector: vector["name"],
)
def test_the_meaning_of_acks(vector: Vector) -> None:
    frame, meaning = vector["decoded"][-1], vector["meaning"]
    ranges = codec.AckReliable(tuple(frame["ranges"])).block
    if frame["type"] == "ACK_RELIABLE":
        acked = SentNumbers(sent=(1 << 64) - 1).ack(ranges)
        assert [list(pair) for pair in acked] == meaning
    else:
        sent = UnreliableSent(sent=(1 << 64) - 1)
        acks, nacks, lost = sent.ack_nack(ranges)
        assert lost == sum(stop - start for start, stop in nacks)
        assert [list(pair) for pair in acks] == meaning["acks"]
        assert [list(pair) for pair in nacks] == meaning["nacks"]
        assert sent.settled == meaning["next"]
