"""Frames of ReactiveSocket: every vector, and any frames in any pieces beside a readable model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.base.buffers import AlignedBuffer, bytes_copied
from aqueduct._speedups.reactivesocket import reactive_frames as codec
from aqueduct._speedups.reactivesocket.reactive_frames import ReactiveFrameDecoder
from aqueduct.errors import FrameError, LimitExceeded, LocalProtocolError, VersionError
from tests.reference.reactivesocket import NUMBERED, TYPES, Broken, Frame, decode, encode

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "reactivesocket.json").read_text()
)
CODES = {name: code for code, name in TYPES.items()}
HIGHEST = (1 << 64) - 1
LIMIT = 60
Piece: TypeAlias = bytes | memoryview


def vectors(kind: str) -> Any:
    return pytest.mark.parametrize("vector", VECTORS[kind], ids=lambda vector: vector["name"])


def is_framed(vector: dict[str, Any]) -> bool:
    return bool(vector["context"]["framing"] == "tcp")


def frame_of(decoder: ReactiveFrameDecoder) -> Frame:
    return Frame(
        decoder.type,
        decoder.stream,
        decoder.flags,
        decoder.n,
        decoder.extended_type,
        bytes(decoder.data),
    )


def read_into(read: list[Frame], decoder: ReactiveFrameDecoder, pieces: Sequence[Piece]) -> None:
    """The frames that are whole after these pieces, some of which are read to their place."""
    for piece in pieces:
        room = decoder.room()
        if room is not None:
            size = min(len(room), len(piece))
            room[:size] = piece[:size]
            decoder.landed(size)
            while decoder.next():
                read.append(frame_of(decoder))
            piece = piece[size:]
        decoder.feed(piece)
        while decoder.next():
            read.append(frame_of(decoder))


def read(data: bytes, pieces: Sequence[Piece], **how: Any) -> tuple[list[Frame], str]:
    found: list[Frame] = []
    decoder = ReactiveFrameDecoder(**how)
    try:
        read_into(found, decoder, pieces)
        decoder.end()
    except LimitExceeded:
        return found, "limit"
    except VersionError:
        return found, "version"
    except FrameError as error:
        return found, "truncated" if error.truncated else "malformed"
    assert decoder.frames == len(found)
    return found, ""


def model(data: bytes, **how: Any) -> tuple[list[Frame], str]:
    try:
        return decode(data, **how), ""
    except Broken as broken:
        return broken.frames, broken.kind


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


def head_of(frame: Frame, *, framed: bool = True) -> bytes:
    """The head as the codec writes it."""
    if frame.name == "EXT":
        return codec.encode_extension_head(
            frame.extended_type, len(frame.data), ignore=frame.flags > 0, framed=framed
        )
    return codec.encode_head(
        frame.type,
        frame.stream,
        len(frame.data),
        flags=frame.flags,
        n=frame.n if frame.name in NUMBERED else None,
        framed=framed,
    )


@pytest.mark.requirement("RS-1")
@pytest.mark.requirement("RS-2")
@pytest.mark.requirement("RS-3")
@pytest.mark.requirement("RS-5")
@pytest.mark.requirement("RS-6")
@pytest.mark.requirement("RS-R1")
@pytest.mark.requirement("RS-R2")
@pytest.mark.requirement("RS-R3")
@pytest.mark.requirement("RS-7")
@pytest.mark.requirement("RS-9")
@pytest.mark.requirement("RS-11")
@pytest.mark.requirement("RS-R4")
@vectors("valid")
def test_valid_vectors(vector: dict[str, Any]) -> None:
    """Whole, byte by byte where there is a length, and written again."""
    data, framed = bytes.fromhex(vector["hex"]), is_framed(vector)
    found, error = read(data, [data], framed=framed)
    assert not error
    if framed:
        assert read(data, [data[at : at + 1] for at in range(len(data))]) == (found, "")
    assert len(found) == len(vector["decoded"])
    for frame, wanted in zip(found, vector["decoded"], strict=True):
        assert (frame.name or "UNKNOWN") == wanted["type"]
        assert frame.data.hex() == wanted.get("data", "")
        assert frame.stream == wanted.get("stream", 0)
        assert frame.n == wanted.get("n", 0)
        assert frame.extended_type == wanted.get("extended_type", 0)
        named = ("ignore", codec.IGNORE), ("begin", codec.BEGIN), ("end", codec.END)
        for name, flag in (*named, ("complete", codec.COMPLETE)):
            assert name not in wanted or bool(frame.flags & flag) is wanted[name]
    if not vector.get("lenient"):
        written = b"".join(head_of(each, framed=framed) + each.data for each in found)
        assert written == data


@vectors("invalid")
def test_invalid_vectors(vector: dict[str, Any]) -> None:
    """As the model has it; numbers of items that may not be are for the core to refuse."""
    data, framed = bytes.fromhex(vector["hex"]), is_framed(vector)
    found, kind = read(data, [data], framed=framed)
    assert (found, kind) == model(data, framed=framed)
    assert kind == (
        "" if vector["name"] in ("request n zero", "initial n 2^63") else vector["kind"]
    )


FRAMES = st.builds(
    Frame,
    st.sampled_from([*TYPES, 0x30, 2]),
    st.sampled_from([0, 1, 2, 255, 1 << 32, HIGHEST]),
    st.sampled_from([0, 0x80, 0xF0, 0x0F]),
    st.sampled_from([0, 1, 256, (1 << 63) - 1, 1 << 63, HIGHEST]),
    st.sampled_from([0, 7, 0x01020304]),
    st.sampled_from([b"", b"x", bytes(31), bytes(range(40))]),
)


@given(
    st.lists(FRAMES, max_size=4),
    st.binary(max_size=6),
    st.lists(st.integers(0, 30), max_size=12),
    st.sampled_from([LIMIT, 45, 1 << 20]),
)
def test_any_frames_in_any_pieces(
    frames: list[Frame], more: bytes, sizes: list[int], limit: int
) -> None:
    data = b"".join(map(encode, frames)) + more
    wanted = model(data, limit=limit)
    assert read(data, [data], frame_bytes=limit) == wanted
    assert read(data, cut(data, sizes), frame_bytes=limit) == wanted


@given(FRAMES, st.integers(0, 40), st.sampled_from([LIMIT, 45]))
def test_any_message(frame: Frame, size: int, limit: int) -> None:
    for data in (encode(frame, framed=False), encode(frame, framed=False)[:size]):
        wanted = model(data, framed=False, limit=limit)
        assert read(data, [data], framed=False, frame_bytes=limit) == wanted


def test_several_messages_of_one_decoder() -> None:
    decoder = ReactiveFrameDecoder(framed=False)
    frame = Frame(CODES["REQUEST_FNF"], 5, data=b"abc")
    for _ in range(3):
        decoder.feed(encode(frame, framed=False))
        assert decoder.next()
        assert frame_of(decoder) == frame
        assert not decoder.next()
    decoder.end()


def test_large_data_is_a_view_of_what_came_or_lands_in_place() -> None:
    """No byte is copied where it is whole in a read, nor where a carrier reads to its place."""
    payload = bytes(range(256)) * 64
    frame = Frame(CODES["RESPONSE"], 1, codec.BEGIN | codec.END, data=payload)
    data = encode(frame)
    decoder = ReactiveFrameDecoder()
    before = bytes_copied()
    decoder.feed(data)
    assert decoder.next()
    assert isinstance(decoder.data, memoryview) and decoder.data == payload
    assert not decoder.next()
    decoder.feed(data[:16])
    assert not decoder.next()
    assert bytes_copied() == before
    room = decoder.room()
    assert room is not None and len(room) == len(payload) == decoder.missing == decoder.coming
    room[:] = payload
    decoder.landed(len(payload))
    assert decoder.next()
    assert isinstance(decoder.data, AlignedBuffer) and bytes(decoder.data) == payload
    assert bytes_copied() == before
    assert decoder.room() is None
    assert decoder.coming == 0


def test_data_keep_no_more_alive_than_twice_their_size() -> None:
    """A view would keep all that was read with it, and the memory that counts is the data's."""
    for size, view in ((5000, False), (20_000, False), (40_000, True)):
        payload = bytes(size)
        decoder = ReactiveFrameDecoder()
        data = encode(Frame(CODES["REQUEST_RESPONSE"], 1, data=payload))
        rest = encode(Frame(CODES["RESPONSE"], 1, data=bytes(65_000 - size)))
        decoder.feed(data + rest)
        assert decoder.next()
        assert isinstance(decoder.data, memoryview) is view
        assert bytes(decoder.data) == payload
        assert decoder.missing == 0
        assert decoder.next()
        assert not decoder.next()


def test_another_limit_is_named_by_its_setting() -> None:
    decoder = ReactiveFrameDecoder()
    decoder.allow(12, "setup_bytes")
    decoder.feed(encode(Frame(CODES["SETUP"], data=b"x")))
    with pytest.raises(LimitExceeded, match=r"13 bytes is above 12 \(ReactiveSocket.setup_bytes"):
        decoder.next()


def test_nothing_lands_that_is_not_expected() -> None:
    decoder = ReactiveFrameDecoder()
    with pytest.raises(LocalProtocolError, match="1 bytes cannot have landed: 0 bytes of data"):
        decoder.landed(1)
    decoder.feed(encode(Frame(CODES["RESPONSE"], 1, data=bytes(5000)))[:-1])
    assert not decoder.next()
    with pytest.raises(LocalProtocolError, match="2 bytes cannot have landed"):
        decoder.landed(2)
    assert decoder.missing == 1


def test_a_decoder_is_fed_once_it_has_said_all() -> None:
    for framed in (True, False):
        decoder = ReactiveFrameDecoder(framed=framed)
        decoder.feed(encode(Frame(CODES["CANCEL"], 1), framed=framed))
        with pytest.raises(LocalProtocolError, match="before what was fed is consumed"):
            decoder.feed(b"x")


@pytest.mark.requirement("RS-2")
@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [
        (b"GET / HTTP/1.1", LimitExceeded, r"a frame of 1195725852 bytes is above 1048576 \(React"),
        (b"\x16\x03\x01\x02\x00", LimitExceeded, r"above 1048576 \(ReactiveSocket.frame_bytes"),
        (b"\x00\x00\x00\x0b", FrameError, r"a frame of 11 bytes; with its length it has 12"),
        (b"\x00\x00\x00\x10\x01\x00\x00\x01", VersionError, r"version 1; 0 is the only one"),
        (b"\x00\x00\x00\x10\x00\x00\x00\x00", FrameError, r"type 0, which is reserved"),
        (b"\x00\x00\x00\x10\x00\x00\x00\x30", FrameError, r"type 0x30, which is not known"),
        (b"\x00\x00\x00\x0c\x00\x00\x00\x16", FrameError, r"a CANCEL frame of 12 bytes; its"),
    ],
)
def test_what_is_wrong_is_said_as_early_as_it_is_known(
    data: bytes, kind: type[Exception], says: str
) -> None:
    decoder = ReactiveFrameDecoder(frame_bytes=1 << 20)
    decoder.feed(data)
    for use in (decoder.next, decoder.end, lambda: decoder.feed(b""), lambda: decoder.landed(0)):
        with pytest.raises(kind, match=says):
            use()


@pytest.mark.requirement("RS-3")
@pytest.mark.requirement("RS-4")
@pytest.mark.requirement("RS-5")
@pytest.mark.requirement("RS-7")
@pytest.mark.requirement("RS-8")
@pytest.mark.requirement("RS-9")
@pytest.mark.requirement("RS-10")
@pytest.mark.requirement("RS-11")
@pytest.mark.requirement("RS-R4")
@pytest.mark.requirement("RS-R14")
@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (Frame(0, 1), "type 0x0 has no header"),
        (Frame(0x10000, 1), "type 0x10000 has no header"),
        (Frame(CODES["SETUP"], 1), "SETUP does not belong on stream 1"),
        (Frame(CODES["CANCEL"], 0), "CANCEL does not belong on stream 0"),
        (Frame(CODES["RESPONSE"], 0), "RESPONSE does not belong on stream 0"),
        (Frame(CODES["SETUP"], 0, 0x80), "flags 0x80 do not belong to SETUP"),
        (Frame(CODES["REQUEST_FNF"], 1, 0x80), "flags 0x80 do not belong to REQUEST_FNF"),
        (Frame(CODES["ERROR"], 1, 0x40), "flags 0x40 do not belong to ERROR"),
        (Frame(0x30, 1), "flags 0x0 do not belong to type 0x30"),
        (Frame(CODES["CANCEL"], 1, data=b"x"), "CANCEL has no data"),
        (Frame(CODES["REQUEST_N"], 1, n=1, data=b"x"), "REQUEST_N has no data"),
        (Frame(CODES["REQUEST_N"], 1, n=1 << 64), "a number of items is"),
        (Frame(CODES["CANCEL"], 1 << 64), "a stream id is"),
        (Frame(CODES["EXT"], extended_type=1 << 32), "an extended type is"),
    ],
)
def test_what_has_no_bytes_is_refused(frame: Frame, says: str) -> None:
    with pytest.raises(LocalProtocolError, match=says):
        head_of(frame)


def test_a_frame_keeps_the_buffers_of_its_data() -> None:
    parts = codec.buffers_of([b"ab", b"", memoryview(b"cd"), bytearray(b"e"), AlignedBuffer(0)])
    assert [bytes(part) for part in parts] == [b"ab", b"cd", b"e"]
    (head, *kept), size = codec.encode_frame(CODES["RESPONSE"], 3, parts, flags=codec.BEGIN)
    assert head == codec.encode_head(CODES["RESPONSE"], 3, 5, flags=codec.BEGIN)
    assert all(one is other for one, other in zip(kept, parts, strict=True))
    assert size == len(head) + 5
    assert codec.buffers_of(b"") == [] == codec.buffers_of(())
    assert codec.buffers_of(memoryview(b"abcd").cast("H")) == [b"abcd"]
    with pytest.raises(LocalProtocolError, match="is not contiguous"):
        codec.buffers_of(memoryview(b"abcd")[::2])
    with pytest.raises(TypeError):
        codec.buffers_of([3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="neither bytes nor a memoryview"):
        codec.encode_frame(CODES["RESPONSE"], 3, [AlignedBuffer(2)])


def test_a_number_of_items_belongs_to_three_types() -> None:
    with pytest.raises(LocalProtocolError, match="CANCEL has no number of items"):
        codec.encode_head(codec.CANCEL, 1, 0, n=1)
    with pytest.raises(LocalProtocolError, match="REQUEST_N has a number of items"):
        codec.encode_head(codec.REQUEST_N, 1, 0)


def test_a_frame_of_2_to_the_31_bytes_is_refused() -> None:
    assert codec.encode_head(codec.RESPONSE, 1, codec.FRAME_MOST - 16)[:4] == b"\x7f\xff\xff\xff"
    with pytest.raises(LocalProtocolError, match="2147483648 bytes"):
        codec.encode_head(codec.RESPONSE, 1, codec.FRAME_MOST - 15)
