"""The decoder beyond the vectors: against its model, in pieces, limits, the end."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels.frames import decode_headers
from aqueduct.errors import (
    FrameError,
    LimitExceeded,
    LocalProtocolError,
    RemoteProtocolError,
    SequenceError,
    VersionError,
)
from tests.reference import codec as model
from tests.speedups.strategies import (
    ROUTE,
    as_tuple,
    client_decoder,
    cut,
    cuts,
    encode_frames,
    headers,
    message,
    read_all,
    sequences,
)

MiB = 1 << 20
UNLIMITED = (1 << 63) - 1


# Against the model.


@given(sequences(), cuts)
def test_round_trip_in_pieces(
    sequence: tuple[list[model.Frame], bool, bool], places: list[int]
) -> None:
    frames, from_server, datagram = sequence
    data = encode_frames(frames)
    assert data == model.encode(frames)
    decoder = codec.FrameDecoder(from_server=from_server, datagram=datagram)
    assert [as_tuple(frame) for frame in read_all(decoder, cut(data, places))] == frames
    decoder.end()
    assert decoder.finished


def check_like_model(data: bytes, pieces: list[bytes], **options: Any) -> None:
    """Frames, kind of error and truncation are those of the model, whatever the pieces."""
    expected, error = model.decode(data, **options)
    decoder = codec.FrameDecoder(**options)
    frames: list[Any] = []
    caught: RemoteProtocolError | None = None
    try:
        for piece in pieces:
            decoder.feed(piece)
            while (frame := decoder.next()) is not None:
                frames.append(frame)
        decoder.end()
    except RemoteProtocolError as found:
        caught = found
    assert [as_tuple(frame) for frame in frames] == expected
    assert type(caught) is type(error)
    assert getattr(caught, "truncated", None) == getattr(error, "truncated", None)


@given(
    sequences(),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4),
    st.integers(0, 1 << 16),
    st.binary(max_size=4),
    cuts,
)
def test_damaged_sequences_like_the_model(
    sequence: tuple[list[model.Frame], bool, bool],
    damage: list[tuple[int, int]],
    length: int,
    tail: bytes,
    places: list[int],
) -> None:
    frames, from_server, datagram = sequence
    data = bytearray(encode_frames(frames))
    for place, value in damage:
        if data:
            data[place % len(data)] = value
    broken = bytes(data[: length % (len(data) + 1)]) + tail
    # A declared length may not take memory: the limit keeps the landing of payloads small.
    check_like_model(
        broken,
        cut(broken, places),
        from_server=from_server,
        datagram=datagram,
        frame_limit=1 << 20,
    )


@given(st.binary(max_size=60), cuts, st.booleans(), st.booleans())
def test_random_bytes_like_the_model(
    data: bytes, places: list[int], from_server: bool, datagram: bool
) -> None:
    check_like_model(
        data, cut(data, places), from_server=from_server, datagram=datagram, frame_limit=1 << 20
    )


@given(
    sequences(), cuts, st.integers(0, 60), st.integers(0, 40), st.integers(0, 3), st.integers(0, 20)
)
def test_limits_like_the_model(
    sequence: tuple[list[model.Frame], bool, bool],
    places: list[int],
    frame_limit: int,
    header_limit: int,
    attachment_limit: int,
    block_limit: int,
) -> None:
    frames, from_server, datagram = sequence
    data = encode_frames(frames)
    check_like_model(
        data,
        cut(data, places),
        from_server=from_server,
        datagram=datagram,
        frame_limit=frame_limit,
        header_limit=header_limit,
        attachment_limit=attachment_limit,
        block_limit=block_limit,
    )


# Incremental decoding.


@pytest.mark.requirement("AQ-5")
def test_a_header_block_byte_by_byte_is_read_once() -> None:
    pairs = tuple((b"key-%06x" % number, bytes(60)) for number in range(900))
    data = codec.encode_connection_headers(pairs)
    assert len(data) > 62 << 10
    decoder = codec.FrameDecoder(from_server=False)
    for place in range(len(data) - 1):
        decoder.feed(data[place : place + 1])
        assert decoder.next() is None
        # All that came is consumed, so no byte is looked at again before the block is whole.
        assert decoder.buffered == 0
        assert decoder.consumed == place + 1
    assert decoder.gathered == len(data) - 1 - 4
    decoder.feed(data[-1:])
    assert decoder.next() == codec.ConnectionHeaders(pairs)
    assert decoder.gathered == 0


def test_many_frames_of_one_chunk_come_one_by_one() -> None:
    decoder = client_decoder()
    decoder.feed(b"".join(message(number, b"x" * number) for number in range(100)))
    for number in range(100):
        before = decoder.consumed
        frame = decoder.next()
        assert frame == codec.MessageFrame(number, (), (), b"x" * number)
        assert isinstance(frame, codec.MessageFrame)
        assert frame.size == number
        assert decoder.consumed - before == len(message(number, b"x" * number))
    assert decoder.next() is None
    assert decoder.frames == 101


def test_chunks_are_kept_by_reference_until_consumed() -> None:
    decoder = client_decoder()
    decoder.auto_admit = 0
    chunk = bytearray(message(0, b"p" * 5000))
    decoder.feed(chunk)
    with pytest.raises(BufferError):
        chunk.append(0)  # the decoder holds it
    assert isinstance(decoder.next(), codec.MessageHead)
    decoder.admit()
    assert decoder.next() is not None
    decoder.feed(ROUTE[:1])  # the next chunk takes the place of the last one
    chunk.append(0)


def test_chunks_of_other_kinds() -> None:
    data = message(0, bytes(range(100)))
    for chunk in (bytearray(data), memoryview(data), memoryview(b"__" + data)[2:]):
        decoder = client_decoder()
        decoder.feed(chunk)
        assert decoder.next() == codec.MessageFrame(0, (), (), bytes(range(100)))
    decoder = client_decoder()
    with pytest.raises(BufferError, match="not contiguous"):
        decoder.feed(memoryview(data)[::2])
    with pytest.raises(TypeError):
        decoder.feed("text")  # type: ignore[arg-type]
    decoder.feed(b"")
    decoder.feed(data)
    assert decoder.next() == codec.MessageFrame(0, (), (), bytes(range(100)))


@pytest.mark.parametrize("size", [1, 2, 100, 128])
def test_tiny_chunks_that_wait_are_packed(size: int) -> None:
    """A peer that sends single bytes costs bytes, not an object for each of them."""
    payload = bytes(range(256)) * 256
    data = message(0, payload)
    head = len(data) - len(payload)
    decoder = client_decoder()
    decoder.auto_admit = 0
    decoder.feed(data[:head])
    assert isinstance(decoder.next(), codec.MessageHead)
    chunk = bytearray(size)
    for place in range(head, len(data), size):
        piece = data[place : place + size]
        chunk[: len(piece)] = piece
        if place == head + 100 * size:
            references = sys.getrefcount(chunk)
        decoder.feed(bytes(piece) if place < head + 100 * size else memoryview(chunk)[: len(piece)])
    assert sys.getrefcount(chunk) == references
    assert decoder.buffered == len(payload)
    decoder.admit()
    assert decoder.next() == codec.MessageFrame(0, (), (), payload)


@given(st.lists(st.integers(1, 400), min_size=20, max_size=120))
def test_chunks_of_all_sizes_that_wait_stay_in_order(sizes: list[int]) -> None:
    payload = bytes(number * 7 % 251 for number in range(sum(sizes)))
    decoder = client_decoder()
    decoder.auto_admit = -1
    decoder.feed(b"\x04\x00\x00\x00" + model.varint(len(payload)))
    assert decoder.next() == codec.MessageHead(0, (), (), len(payload))
    at = 0
    for size in sizes:
        decoder.feed(payload[at : at + size])
        at += size
    decoder.admit()
    assert decoder.next() == codec.MessageFrame(0, (), (), payload)


# Where a sequence stands and how it ends.


@pytest.mark.requirement("AQ-R10")
def test_pause() -> None:
    decoder = codec.FrameDecoder(from_server=False)
    decoder.pause = True
    decoder.feed(codec.VERSION + b"\x01" + ROUTE + message(0))
    assert decoder.next() == codec.Version("0.0.0-AFTER")
    assert not decoder.paused
    assert decoder.next() == codec.AckVersion()
    for _ in range(2):
        assert decoder.next() is None
        assert decoder.paused
    assert decoder.consumed == len(codec.VERSION) + 1
    assert decoder.route == -1
    decoder.feed(message(1))
    decoder.end()
    decoder.pause = False
    assert decoder.next() == codec.RouteTo(0)
    assert not decoder.paused
    assert decoder.route == 0
    assert decoder.next() == codec.MessageFrame(0, (), (), b"")
    assert not decoder.finished
    assert decoder.next() == codec.MessageFrame(1, (), (), b"")
    assert decoder.finished


@pytest.mark.requirement("AQ-R7")
@pytest.mark.requirement("AQ-R12")
@pytest.mark.parametrize("data", [b"", ROUTE, codec.VERSION, codec.VERSION + ROUTE])
def test_sequences_that_may_end(data: bytes) -> None:
    decoder = codec.FrameDecoder(from_server=False)
    decoder.feed(data)
    assert len([*iter(decoder.next, None)]) == decoder.frames
    assert decoder.between_frames
    decoder.end()
    assert decoder.finished
    assert decoder.next() is None
    with pytest.raises(LocalProtocolError, match="feed after end"):
        decoder.feed(b"\x00")


@pytest.mark.requirement("AQ-R7")
def test_the_end_inside_what_was_not_read_yet() -> None:
    decoder = codec.FrameDecoder(from_server=False)
    decoder.feed(ROUTE + message(0, b"whole") + message(1, b"cut")[:-1])
    decoder.end()
    assert decoder.next() == codec.RouteTo(0)
    assert decoder.next() == codec.MessageFrame(0, (), (), b"whole")
    with pytest.raises(FrameError) as caught:
        decoder.next()
    assert caught.value.truncated
    assert "MESSAGE at byte 12 of a sequence for channel 0" in str(caught.value)


@pytest.mark.requirement("AQ-R7")
def test_the_end_of_a_message_that_waits() -> None:
    whole = message(0, b"p" * 100)
    decoder = client_decoder()
    decoder.auto_admit = 0
    decoder.feed(whole)
    assert isinstance(decoder.next(), codec.MessageHead)
    decoder.end()
    decoder.admit()
    assert decoder.next() == codec.MessageFrame(0, (), (), b"p" * 100)
    assert decoder.finished

    for ended_first in (False, True):
        decoder = client_decoder()
        decoder.auto_admit = 0
        decoder.feed(whole[:-1])
        if ended_first:
            decoder.end()
            with pytest.raises(FrameError, match="inside a frame"):
                decoder.next()
        else:
            assert isinstance(decoder.next(), codec.MessageHead)
            with pytest.raises(FrameError, match="inside a frame"):
                decoder.end()
        assert not decoder.waiting
        assert decoder.buffered == 0


def test_the_end_inside_a_landing_payload() -> None:
    decoder = client_decoder()
    decoder.feed(message(0, bytes(MiB))[:-1])
    assert decoder.next() is None
    with pytest.raises(FrameError) as caught:
        decoder.end()
    assert caught.value.truncated
    assert decoder.remaining == 0


def test_an_error_lets_all_memory_go() -> None:
    decoder = client_decoder()
    chunk = bytearray(b"\x00" * 1000)
    decoder.feed(chunk)
    with pytest.raises(FrameError, match="no frame has the tag 0"):
        decoder.next()
    chunk.append(1)
    assert (decoder.buffered, decoder.consumed) == (0, 3)


# The context of frames.


def next_error(data: bytes, **options: Any) -> RemoteProtocolError:
    decoder = codec.FrameDecoder(**{"from_server": False, **options})
    with pytest.raises(RemoteProtocolError) as caught:
        read_all(decoder, [data])
    return caught.value


@pytest.mark.requirement("AQ-R5")
def test_versions_of_others() -> None:
    magic = codec.VERSION[:16]
    other = next_error(magic + b"\x060.0.0X")
    assert type(other) is VersionError
    assert "0.0.0X" in str(other)
    assert type(next_error(magic + b"\x00")) is VersionError
    assert type(next_error(magic + b"\x80\x02")) is VersionError  # 256 bytes are not waited for
    assert type(next_error(b"\xefGET / HTTP/1.1")) is VersionError


@pytest.mark.requirement("AQ-R28")
@pytest.mark.parametrize("frame", [b"\x05\x02", b"\x06\x02", b"\x04\x01"])
def test_a_oneshot_channel_has_one_message(frame: bytes) -> None:
    assert type(next_error(b"\x03\x04" + frame)) is SequenceError


@pytest.mark.requirement("AQ-R4")
def test_attachments_twice() -> None:
    frame = ROUTE + b"\x04\x00\x00\x06\x08\x00\x10\x00\x08\x00\x00"
    assert "channel 8 is attached twice" in str(next_error(frame))
    server = ROUTE + b"\x04\x00\x00\x02\x01\x00\x00"
    assert type(next_error(server)) is SequenceError


@pytest.mark.requirement("AQ-R13")
def test_the_highest_number_passes() -> None:
    (frame,) = read_all(client_decoder(), [b"\x04" + b"\xff" * 9 + b"\x01\x00\x00\x00"])
    assert frame.num == (1 << 64) - 1


# Limits.


@pytest.mark.requirement("AQ-R31")
@pytest.mark.parametrize(
    ("data", "limit", "name"),
    [
        (ROUTE + b"\x04\x00\x65", "header_limit", "Limits.header_bytes"),
        (b"\x02\x65", "header_limit", "Limits.header_bytes"),
        (ROUTE + b"\x04\x00\x00\x65", "block_limit", "Limits.block_bytes"),
        (ROUTE + b"\x04\x00\x00\x64", "block_limit", None),
        (b"\x03\x02\x08\x65", "block_limit", "Limits.block_bytes"),
        (ROUTE + b"\x04\x00\x00\x00\xff\x01", "frame_limit", "Limits.frame_bytes"),
        (ROUTE + b"\x04\x00\x00" + b"\xff" * 9 + b"\x01", "frame_limit", "Limits.frame_bytes"),
        (ROUTE + b"\x04\x00\x00\x00" + b"\xff" * 9 + b"\x01", "", "Limits.frame_bytes"),
        (b"\x02" + b"\xff" * 9 + b"\x01", "", "Limits.frame_bytes"),
        (ROUTE + b"\x04\x00\x00\x60", "frame_limit", None),
        (ROUTE + b"\x04\x00\x00\x61", "frame_limit", "Limits.frame_bytes"),
    ],
)
def test_declared_lengths_are_checked_at_once(data: bytes, limit: str, name: str | None) -> None:
    options: dict[str, Any] = {limit: 100} if limit else {}
    decoder = codec.FrameDecoder(from_server=False, **options)
    decoder.feed(data)
    if name is None:
        assert len([*iter(decoder.next, None)]) == 1
        return
    with pytest.raises(LimitExceeded) as caught:
        list(iter(decoder.next, None))
    assert name in str(caught.value)


@pytest.mark.requirement("AQ-R31")
def test_limits_of_attachments() -> None:
    attached = tuple((number << 3, ((b"k", b"v" * 20),)) for number in range(1, 5))
    data = message(0, b"", (), attached)
    (frame,) = read_all(client_decoder(attachment_limit=4, header_limit=23), [data])
    assert frame.attachments == attached
    with pytest.raises(LimitExceeded, match=r"more than 3 attachments \(Limits.attachments\)"):
        read_all(client_decoder(attachment_limit=3), [data])
    with pytest.raises(LimitExceeded, match=r"channel 8, 22 are allowed \(Limits.header_bytes\)"):
        read_all(client_decoder(header_limit=22), [data])


@pytest.mark.requirement("AQ-R31")
def test_the_largest_frame_is_taken() -> None:
    data = message(0, b"p" * 90)
    assert len(read_all(client_decoder(frame_limit=len(data)), [data])) == 1
    with pytest.raises(LimitExceeded):
        read_all(client_decoder(frame_limit=len(data) - 1), [data])


def test_bad_arguments() -> None:
    with pytest.raises(TypeError):
        codec.FrameDecoder()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="negative"):
        codec.FrameDecoder(from_server=True, frame_limit=-1)
    assert codec.FrameDecoder(from_server=True).auto_admit == UNLIMITED


@given(headers)
def test_frames_are_values(pairs: model.Headers) -> None:
    one = codec.ConnectionHeaders(pairs)
    assert one == codec.ConnectionHeaders(tuple(pairs))
    assert one != codec.ConnectionHeaders((*pairs, (b"more", b"")))
    assert one != codec.AckVersion()
    assert codec.MessageFrame(1, pairs, (), b"ab") == codec.MessageFrame(
        1, pairs, (), bytearray(b"ab")
    )
    assert codec.MessageFrame(1, pairs, (), b"ab") != codec.MessageFrame(1, pairs, (), b"ax")
    assert repr(one) == f"ConnectionHeaders(headers={pairs!r})"
    with pytest.raises(TypeError):
        hash(one)
    with pytest.raises(AttributeError):
        one.headers = ()  # type: ignore[misc]


@pytest.mark.requirement("AQ-R31")
@pytest.mark.requirement("AQ-16")
def test_large_blocks_become_objects_when_they_are_asked_for() -> None:
    """Attachments with a million empty headers in 3 MiB, and half a million ranges in 512 KiB."""
    pairs = b"\x01k\x00" * 16_000
    attached = b"".join(
        model.varint(channel) + model.varint(len(pairs)) + pairs for channel in range(3, 131, 2)
    )
    message = b"\x04\x00\x00" + model.varint(len(attached)) + attached + b"\x00"
    count = 1 << 19
    ranges = b"\x08" + model.varint(count) + b"\x01" * count
    for route, frame in ((b"\x03\x02", message), (b"\x03\x02", ranges)):
        decoder = codec.FrameDecoder(from_server=True, header_limit=1 << 16)
        if frame is ranges:
            decoder = codec.FrameDecoder(from_server=False)
        data = route + frame
        decoder.feed(data)
        assert isinstance(decoder.next(), codec.RouteTo)
        tracemalloc.start()
        try:
            found = decoder.next()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < len(data) + (1 << 20)
        if isinstance(found, codec.MessageFrame):
            assert [channel for channel, _ in found.attached] == list(range(3, 131, 2))
            assert all(headers == pairs for _, headers in found.attached)
            assert decode_headers(found.attached[0][1]) == ((b"k", b""),) * 16_000
        else:
            assert isinstance(found, codec.AckReliable)
            assert len(found.block) == len(found.ranges) == count
