"""Frame sequences, pieces of bytes, and compiled frames as the tuples of the model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from aqueduct._speedups import channels as codec
from aqueduct._speedups.base.buffers import BufferSlice
from aqueduct.arrow.encode import Encoder
from tests.reference.codec import Frame

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "aq.json").read_text())

HIGHEST = (1 << 64) - 1
ROUTE = b"\x03\x00"
numbers = st.one_of(
    st.integers(0, 300),
    st.sampled_from([127, 128, 1 << 32, 1 << 56, 1 << 63, HIGHEST - 1]),
    st.integers(0, HIGHEST - 1),
)
keys = st.text(st.characters(max_codepoint=127), min_size=1, max_size=12).map(str.encode)
headers = st.lists(st.tuples(keys, st.binary(max_size=20)), max_size=4).map(tuple)
payloads = st.one_of(
    st.binary(max_size=40),
    st.integers(4000, 9000).map(lambda size: bytes(range(256)) * (size // 256) + b"\x5a"),
)


@st.composite
def ack_ranges(draw: Any, *, paired: bool) -> tuple[int, ...]:
    size = draw(st.integers(1, 4)) * 2 if paired else draw(st.integers(1, 7))
    rest = draw(st.lists(st.integers(1, 1 << 40), min_size=size, max_size=size))
    if draw(st.booleans()) and size > 1:
        rest[0] = 0
    return tuple(rest)


@st.composite
def sequences(draw: Any) -> tuple[list[Frame], bool, bool]:
    """The frames of one sequence, whether the server sends it, whether it is a datagram."""
    from_server, datagram = draw(st.booleans()), draw(st.booleans())
    side = 1 if from_server else 0
    prelude: list[Any] = [st.just(("VERSION", "0.0.0-AFTER"))]
    if not datagram:
        prelude += [
            st.just(("ACK_VERSION",)),
            st.builds(lambda pairs: ("CONNECTION_HEADERS", pairs), headers),
        ]
    frames: list[Frame] = draw(st.lists(st.one_of(prelude), max_size=3))
    if draw(st.integers(0, 4)) == 0:
        return frames, from_server, datagram
    by_sender = datagram or draw(st.booleans())
    sender = side if by_sender else 1 - side
    creator = draw(st.integers(0, 1))
    index = draw(st.integers(1, (1 << 61) - 1))
    oneshot = draw(st.booleans())
    route = creator | sender << 1 | oneshot << 2 | index << 3
    frames.append(("ROUTE_TO", route))
    kinds: list[Any] = []
    if by_sender:
        own = st.tuples(st.integers(1, 1 << 40).map(lambda n: n << 3 | side), headers)
        attached = st.lists(own, max_size=3, unique_by=lambda each: each[0]).map(tuple)
        kinds.append(
            st.tuples(
                st.just("MESSAGE"),
                st.just(0) if oneshot else numbers,
                headers,
                attached,
                payloads,
            )
        )
    if not datagram:
        few = st.integers(0, 1) if oneshot else numbers
        if by_sender:
            kinds += [
                st.tuples(st.just("SENT_UNRELIABLE"), few.filter(bool)),
                st.tuples(st.just("FINISH_SENDER"), few),
                st.just(("CANCEL_SENDER",)),
            ]
        else:
            kinds += [
                st.tuples(st.just("ACK_RELIABLE"), ack_ranges(paired=True)),
                st.tuples(st.just("ACK_NACK_UNRELIABLE"), st.just(route), ack_ranges(paired=False)),
                st.just(("CLOSE_RECEIVER",)),
            ]
        if creator == side:
            kinds.append(st.just(("FORGET_CHANNEL",)))
    frames += draw(st.lists(st.one_of(kinds), max_size=4))
    return frames, from_server, datagram


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """``data`` cut at some places, taken modulo its length."""
    stops = sorted({place % len(data) for place in places} - {0}) if data else []
    return [data[i:j] for i, j in zip([0, *stops], [*stops, len(data)], strict=True)]


cuts = st.lists(st.integers(0, 1 << 20), max_size=12)


def as_tuple(frame: Any) -> Frame:
    """A compiled frame as the model writes it."""
    name = codec.FRAME_NAMES[frame.TAG]
    match frame:
        case codec.Version():
            return name, frame.version
        case codec.ConnectionHeaders():
            return name, frame.headers
        case codec.RouteTo():
            return name, frame.channel
        case codec.MessageFrame():
            return name, frame.num, frame.headers, frame.attachments, bytes(frame.payload)
        case codec.SentUnreliable():
            return name, frame.count
        case codec.FinishSender():
            return name, frame.sent_reliable
        case codec.AckReliable():
            return name, frame.ranges
        case codec.AckNackUnreliable():
            return name, frame.channel, frame.ranges
    return (name,)


def encode_frames(frames: Iterable[Frame]) -> bytes:
    """Frames of the model through the compiled encoders."""
    return b"".join(map(encode_one, frames))


def encode_one(frame: Frame) -> bytes:
    name, *fields = frame
    match name:
        case "CONNECTION_HEADERS":
            return codec.encode_connection_headers(*fields)
        case "ROUTE_TO":
            return codec.encode_route_to(*fields)
        case "MESSAGE":
            num, pairs, attachments, payload = fields
            return b"".join(codec.encode_message(num, payload, pairs, attachments))
        case "SENT_UNRELIABLE":
            return codec.encode_sent_unreliable(*fields)
        case "FINISH_SENDER":
            return codec.encode_finish_sender(*fields)
        case "ACK_RELIABLE":
            return codec.encode_ack_reliable(*fields)
        case "ACK_NACK_UNRELIABLE":
            return codec.encode_ack_nack_unreliable(*fields)
    return {
        "VERSION": codec.VERSION,
        "ACK_VERSION": codec.ACK_VERSION,
        "CANCEL_SENDER": codec.CANCEL_SENDER,
        "CLOSE_RECEIVER": codec.CLOSE_RECEIVER,
        "FORGET_CHANNEL": codec.FORGET_CHANNEL,
    }[name]


def read_all(decoder: codec.FrameDecoder, pieces: Iterable[Any]) -> list[Any]:
    """Feeds the pieces one after the other and collects the frames."""
    frames = []
    for piece in pieces:
        decoder.feed(piece)
        while (frame := decoder.next()) is not None:
            frames.append(frame)
        assert decoder.buffered == 0  # whatever was fed is consumed, so nothing is read twice
    return frames


def vector_frames(vector: dict[str, Any]) -> list[Frame]:
    """What a valid vector says it decodes to."""
    return [_vector_frame(frame) for frame in vector["decoded"]]


def _vector_frame(frame: dict[str, Any]) -> Frame:
    def pairs(found: list[list[str]]) -> tuple[tuple[bytes, bytes], ...]:
        return tuple((bytes.fromhex(key), bytes.fromhex(value)) for key, value in found)

    fields = []
    for name, value in frame.items():
        match name:
            case "channel":
                fields.append(value["id"])
            case "headers":
                fields.append(pairs(value))
            case "attachments":
                fields.append(
                    tuple((each["channel"]["id"], pairs(each["headers"])) for each in value)
                )
            case "payload":
                fields.append(bytes.fromhex(value))
            case "ranges":
                fields.append(tuple(value))
            case _:
                fields.append(value)
    return tuple(fields)


def vector_decoder(vector: dict[str, Any]) -> codec.FrameDecoder:
    return codec.FrameDecoder(
        from_server=vector["context"]["from"] == "server",
        datagram=vector["context"]["carrier"] == "datagram",
    )


def client_decoder(**options: Any) -> codec.FrameDecoder:
    """Reads what a client sends on the entrypoint; ROUTE_TO is consumed."""
    decoder = codec.FrameDecoder(from_server=False, **options)
    decoder.feed(ROUTE)
    assert decoder.next() == codec.RouteTo(0)
    return decoder


def message(num: int, payload: Any = b"", *args: Any) -> bytes:
    return b"".join(map(bytes, codec.encode_message(num, payload, *args)))


def piece_of(data: bytes) -> BufferSlice:
    """``data``, in whole columns of 8 bytes, as a batch gives its columns to be sent."""
    column = pa.Array.from_buffers(pa.int64(), len(data) // 8, [None, pa.py_buffer(data)])
    batch = pa.record_batch([column], names=["column"])
    buffers = Encoder(batch.schema).encode(batch).buffers
    assert isinstance(buffers[1], BufferSlice)
    return buffers[1]
