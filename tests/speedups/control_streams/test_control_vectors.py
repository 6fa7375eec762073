"""Every vector of the control-stream draft: whole, in pieces, and back to the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from aqueduct._speedups.control_streams.control_frames import ControlFrameDecoder
from aqueduct.errors import FrameError, RemoteProtocolError, SequenceError, VersionError
from tests.reference import control_streams as model
from tests.reference.codec import Frame
from tests.speedups.control_streams.sequences import (
    VECTORS,
    Sequence,
    encode_frames,
    read_into,
    sequences,
    vector_frames,
    vector_options,
)
from tests.speedups.strategies import cut, cuts

Vector = dict[str, Any]
requirement = pytest.mark.requirement
valid = pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
invalid = pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda vector: vector["name"])


def check_valid(vector: Vector, pieces: list[bytes]) -> None:
    decoder = ControlFrameDecoder(**vector_options(vector))
    found: list[Frame] = []
    read_into(found, decoder, pieces)
    assert found == vector_frames(vector)
    decoder.end()
    assert decoder.finished
    assert decoder.consumed == len(bytes.fromhex(vector["hex"]))
    assert decoder.frames == len(found)


def check_invalid(vector: Vector, pieces: list[bytes]) -> None:
    decoder = ControlFrameDecoder(**vector_options(vector))
    with pytest.raises((FrameError, SequenceError, VersionError)) as caught:
        read_into([], decoder, pieces)
        decoder.end()
    truncated = vector["kind"] == "truncated"
    assert getattr(caught.value, "truncated", False) is truncated
    assert_final(decoder, caught.value)


def assert_final(decoder: ControlFrameDecoder, error: RemoteProtocolError) -> None:
    """After an error every method raises it again, and no memory is held."""
    assert decoder.error is error
    assert not decoder.buffered
    assert not decoder.finished
    for call in (
        decoder.next,
        decoder.end,
        decoder.admit,
        decoder.skip,
        lambda: decoder.feed(b"x"),
        lambda: decoder.receive_buffer(1),
        lambda: decoder.received(0),
    ):
        with pytest.raises(type(error)) as again:
            call()
        assert again.value is error


@requirement("AQ0-5")
@requirement("AQ0-7")
@requirement("AQ0-10")
@requirement("AQ0-11")
@requirement("AQ0-12")
@requirement("AQ0-13")
@requirement("AQ0-14")
@requirement("AQ0-15")
@requirement("AQ0-16")
@requirement("AQ0-17")
@requirement("AQ0-R9")
@requirement("AQ0-R12")
@valid
def test_valid_whole(vector: Vector) -> None:
    check_valid(vector, [bytes.fromhex(vector["hex"])])


@valid
def test_valid_at_each_byte(vector: Vector) -> None:
    data = bytes.fromhex(vector["hex"])
    check_valid(vector, [data[at : at + 1] for at in range(len(data))])
    for at in range(1, len(data)):
        check_valid(vector, [data[:at], data[at:]])


@requirement("AQ0-5")
@requirement("AQ0-6")
@requirement("AQ0-7")
@requirement("AQ0-10")
@requirement("AQ0-11")
@requirement("AQ0-12")
@requirement("AQ0-13")
@requirement("AQ0-14")
@requirement("AQ0-15")
@requirement("AQ0-16")
@requirement("AQ0-17")
@valid
def test_valid_again_to_the_same_bytes(vector: Vector) -> None:
    frames = vector_frames(vector)
    assert model.encode(frames).hex() == vector["hex"]
    if not vector.get("lenient"):
        assert encode_frames(frames).hex() == vector["hex"]


@requirement("AQ0-8")
@valid
def test_a_sequence_that_is_cut_is_truncated(vector: Vector) -> None:
    """At each byte: whole frames before it come, and the end says what is missing."""
    data = bytes.fromhex(vector["hex"])
    options = vector_options(vector)
    for size in range(1, len(data)):
        frames, error = model.decode(data[:size], **options)
        decoder = ControlFrameDecoder(**options)
        found: list[Frame] = []
        read_into(found, decoder, [data[:size]])
        assert found == frames
        if error is None:
            decoder.end()
            assert decoder.finished
        else:
            with pytest.raises(FrameError, match="ends inside a frame") as caught:
                decoder.end()
            assert caught.value.truncated
            assert_final(decoder, caught.value)


@requirement("AQ0-4")
@requirement("AQ0-5")
@requirement("AQ0-6")
@requirement("AQ0-7")
@requirement("AQ0-8")
@requirement("AQ0-10")
@requirement("AQ0-11")
@requirement("AQ0-12")
@requirement("AQ0-13")
@requirement("AQ0-14")
@requirement("AQ0-15")
@requirement("AQ0-16")
@requirement("AQ0-17")
@requirement("AQ0-R9")
@requirement("AQ0-R16")
@invalid
def test_invalid_whole_and_at_each_byte(vector: Vector) -> None:
    data = bytes.fromhex(vector["hex"])
    check_invalid(vector, [data])
    check_invalid(vector, [data[at : at + 1] for at in range(len(data))])
    for at in range(1, len(data)):
        check_invalid(vector, [data[:at], data[at:]])


@invalid
def test_the_model_agrees_on_invalid(vector: Vector) -> None:
    _, error = model.decode(bytes.fromhex(vector["hex"]), **vector_options(vector))
    assert error is not None
    assert getattr(error, "truncated", False) == (vector["kind"] == "truncated")


@valid
def test_the_model_agrees_on_valid(vector: Vector) -> None:
    answer = model.decode(bytes.fromhex(vector["hex"]), **vector_options(vector))
    assert answer == (vector_frames(vector), None)


@given(sequences(), cuts)
def test_any_sequence_comes_back(sequence: Sequence, places: list[int]) -> None:
    data = encode_frames(sequence.frames)
    assert data == model.encode(sequence.frames)
    assert model.decode(data, **sequence.options) == (sequence.frames, None)
    decoder = ControlFrameDecoder(**sequence.options)
    found: list[Frame] = []
    read_into(found, decoder, cut(data, places))
    assert found == sequence.frames
    decoder.end()
    assert decoder.finished


@given(sequences(), sequences(), cuts)
def test_what_one_carrier_may_carry_another_may_not(
    sequence: Sequence, other: Sequence, places: list[int]
) -> None:
    """The frames of one sequence, in the place of another, and one behind the other."""
    for frames in (sequence.frames, [*other.frames, *sequence.frames]):
        data = encode_frames(frames)
        wanted, fault = model.decode(data, **other.options)
        decoder = ControlFrameDecoder(**other.options)
        found: list[Frame] = []
        error = None
        try:
            read_into(found, decoder, cut(data, places))
            decoder.end()
        except RemoteProtocolError as raised:
            error = raised
        assert found == wanted
        assert type(error) is type(fault)
