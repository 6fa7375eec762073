"""Frame sequences of the control-stream draft, and compiled frames as the tuples of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.channels.frames import (
    FinishSender,
    MessageFrame,
    MessageHead,
    SentUnreliable,
    Version,
)
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct._speedups.control_streams import control_frames as codec
from tests.reference.codec import Frame
from tests.speedups.strategies import headers, numbers, payloads

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "aq0.json").read_text()
)
CARRIERS = {"uni": "uni", "datagram": "datagram", "bidi-opener": "opener", "bidi-answer": "answer"}
VERSION_FRAME: Frame = ("Version", "0.0.0-AFTER")

Options = dict[str, Any]


@dataclass(frozen=True)
class Sequence:
    """Frames with what a decoder must know of them."""

    frames: list[Frame]
    options: Options


def vector_options(vector: dict[str, Any]) -> Options:
    context = vector["context"]
    return {
        "from_server": context["from"] == "server",
        "carrier": CARRIERS[context["carrier"]],
        "channel": context.get("channel", -1),
    }


def vector_frames(vector: dict[str, Any]) -> list[Frame]:
    return [tuple(map(_field, frame.items())) for frame in vector["decoded"]]


def _field(item: tuple[str, Any]) -> Any:
    name, value = item
    match name:
        case "channel":
            return value["id"]
        case "headers":
            return tuple((bytes.fromhex(key), bytes.fromhex(text)) for key, text in value)
        case "attachments":
            return tuple(each["id"] for each in value)
        case "payload":
            return bytes.fromhex(value)
        case "ranges":
            return tuple(value)
    return value


def as_tuple(frame: Any, decoder: codec.ControlFrameDecoder) -> Frame:
    """A compiled frame as the model writes it."""
    channel = decoder.channel
    match frame:
        case Version():
            return "Version", frame.version
        case codec.ConnectionControl():
            return "ConnectionControl", frame.headers
        case codec.ChannelControl():
            return "ChannelControl", frame.channel
        case MessageFrame():
            assert frame.attached == frame.attachments
            attached = tuple(each for each, pairs in frame.attachments if pairs == ())
            found = "Message", channel, frame.num, attached, bytes(frame.payload)
            if not decoder.header_blocks:
                assert frame.headers == ()
                return found
            broken = bool(frame.headers) and frame.headers[0][0] == b""
            return *found, None if broken else frame.headers
        case SentUnreliable():
            return "SentUnreliable", frame.count
        case FinishSender():
            return "FinishSender", frame.sent_reliable
        case codec.ControlAcks():
            return "AckReliable", frame.ranges
        case codec.ControlAckNacks():
            return "AckNackUnreliable", frame.ranges
        case codec.ControlClose():
            return "CloseReceiver", frame.ranges
    assert isinstance(frame, codec.ClosedChannelLost)
    return "ClosedChannelLost", frame.channel


def read_into(
    found: list[Frame], decoder: codec.ControlFrameDecoder, pieces: Iterable[Any]
) -> None:
    """Feeds the pieces one after the other and collects the frames."""
    for piece in pieces:
        decoder.feed(piece)
        while (frame := decoder.next()) is not None:
            assert not isinstance(frame, MessageHead)
            found.append(as_tuple(frame, decoder))
        assert decoder.buffered == 0  # whatever was fed is consumed, so nothing is read twice


def encode_frames(frames: Iterable[Frame]) -> bytes:
    """Frames of the model through the compiled encoders."""
    return b"".join(map(encode_one, frames))


def encode_one(frame: Frame) -> bytes:
    name, *fields = frame
    if name == "Version":
        return VERSION
    if name == "Message":
        channel, num, attached, payload, *pairs = fields
        parts = encoder.encode_control_message(channel, num, payload, attached, *pairs)
        return b"".join(map(bytes, parts))
    encoders: dict[str, Callable[..., bytes]] = {
        "ConnectionControl": encoder.encode_connection_control,
        "ChannelControl": encoder.encode_channel_control,
        "SentUnreliable": encoder.encode_control_sent_unreliable,
        "FinishSender": encoder.encode_control_finish,
        "AckReliable": encoder.encode_control_acks,
        "AckNackUnreliable": encoder.encode_control_ack_nacks,
        "CloseReceiver": encoder.encode_control_close,
        "ClosedChannelLost": encoder.encode_closed_channel_lost,
    }
    return encoders[name](*fields)


@st.composite
def pos_neg(draw: Any, *, empty: bool = False) -> tuple[int, ...]:
    """Ranges by AQ0-6."""
    rest = draw(st.lists(st.integers(1, 1 << 40), min_size=0 if empty else 1, max_size=6))
    if rest and draw(st.booleans()):
        rest = [0, *rest]
    return tuple(rest)


@st.composite
def channels(draw: Any, *, sender: int | None = None, creator: int | None = None) -> int:
    low: int = sender if sender is not None else draw(st.integers(0, 1))
    high: int = creator if creator is not None else draw(st.integers(0, 1))
    index: int = draw(st.integers(1, (1 << 61) - 1))
    oneshot: bool = draw(st.booleans())
    return low | high << 1 | oneshot << 2 | index << 3


@st.composite
def sequences(draw: Any) -> Sequence:
    """A sequence that any carrier may carry, from either side."""
    side: int = draw(st.integers(0, 1))
    carrier = draw(st.sampled_from(["uni", "datagram", "opener", "answer"]))
    options: Options = {"from_server": bool(side), "carrier": carrier}
    frames: list[Frame] = [VERSION_FRAME] if draw(st.booleans()) else []
    if carrier in ("uni", "datagram"):
        if carrier == "uni" and draw(st.integers(0, 5)) == 0:
            frames.append(("ClosedChannelLost", draw(channels(creator=side))))
        else:
            options["header_blocks"] = draw(st.booleans())
            one = messages(side, header_blocks=options["header_blocks"])
            frames += draw(st.lists(one, min_size=1, max_size=3))
        return Sequence(frames, options)
    if draw(st.integers(0, 4)) == 0 and (carrier == "answer") == bool(side):
        return Sequence([VERSION_FRAME, ("ConnectionControl", draw(headers))], options)
    channel = draw(channels(creator=1 - side if carrier == "opener" else side))
    if carrier == "opener":
        frames.append(("ChannelControl", channel))
    else:
        options["channel"] = channel
    frames += draw(control(channel, side))
    return Sequence(frames, options)


def messages(side: int, *, header_blocks: bool) -> Any:
    """Messages of a sender on this side."""

    def message(
        channel: int, number: int, attached: list[int], payload: bytes, pairs: Any
    ) -> Frame:
        number = 0 if channel & 4 else number
        frame = "Message", channel, number, tuple(attached), payload
        return (*frame, pairs) if header_blocks else frame

    attachments = st.lists(channels(creator=side), max_size=3, unique=True)
    return st.builds(message, channels(sender=side), numbers, attachments, payloads, headers)


def control(channel: int, side: int) -> Any:
    """What this side may say on a control stream, behind its ChannelControl."""
    if channel & 1 == side:
        few = st.integers(0, 1) if channel & 4 else numbers
        middle = st.tuples(st.just("SentUnreliable"), few.filter(bool))
        last = st.tuples(st.just("FinishSender"), few)
    else:
        kinds = st.sampled_from(["AckReliable", "AckNackUnreliable"])
        middle = st.tuples(kinds, pos_neg())
        last = st.tuples(st.just("CloseReceiver"), pos_neg(empty=True))
    return st.builds(
        lambda some, end: [*some, *end], st.lists(middle, max_size=3), st.lists(last, max_size=1)
    )
