"""Frame sequences of the control-stream draft, in the vocabulary of the test vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from aqueduct._speedups.base import varint
from aqueduct._speedups.channels.frames import FinishSender, MessageFrame, SentUnreliable, Version
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct._speedups.control_streams import control_frames as codec
from aqueduct.dissect.channel_fields import (
    SIDES,
    ChannelBits,
    alternate,
    header_text,
    headers_to_json,
    payload_text,
    read_headers,
)
from aqueduct.dissect.frame_sequences import Encoders, decoded, encoded, numbered, version
from aqueduct.dissect.values import Fields, WireError, hex_bytes, kind_of, list_of, one_of

__all__ = ["ControlContext", "contexts"]

_CARRIERS: Final[Mapping[str, str]] = {
    "uni": "uni",
    "datagram": "datagram",
    "bidi-opener": "opener",
    "bidi-answer": "answer",
}
_BITS: Final = ChannelBits(lowest="sender", second="minter", creator="minter")
_ACKS: Final = ("AckReliable", "AckNackUnreliable", "CloseReceiver")


def contexts(given: Any) -> list[ControlContext]:
    """The contexts that ``given`` leaves open: without ``from`` it may be either side.

    Without ``carrier`` it may be a unidirectional stream, or a bidirectional one from its opener.
    ``header_blocks``: the messages are those of Arrow calls, which begin with headers (AC-95).
    """
    if not isinstance(given, Mapping):
        raise WireError(f"context must be an object, not {kind_of(given)}")
    carriers = ["uni", "bidi-opener"]
    if "carrier" in given:
        carriers = [one_of(given["carrier"], _CARRIERS, "context.carrier")]
    sides = list(SIDES)
    if "from" in given:
        sides = [one_of(given["from"], SIDES, "context.from")]
    channel = -1
    if "channel" in given:
        channel = _BITS.read(given["channel"], "context.channel")
        if carriers != ["bidi-answer"]:
            raise WireError("context.channel belongs to the carrier bidi-answer")
    elif carriers == ["bidi-answer"]:
        # Only the connection control stream has no channel, and there the server answers.
        if sides == ["client"]:
            raise WireError("context has no channel, and a bidi-answer of the client needs one")
        sides = ["server"]
    blocks = given.get("header_blocks", False)
    if not isinstance(blocks, bool):
        raise WireError(f"context.header_blocks must be true or false, not {kind_of(blocks)}")
    return [
        ControlContext(side == "server", _CARRIERS[carrier], channel, blocks)
        for carrier in carriers
        for side in sides
    ]


@dataclass(frozen=True)
class ControlContext:
    """Which side sends a frame sequence, what carries it, and of an answer the channel."""

    from_server: bool
    carrier: str
    channel: int = -1
    header_blocks: bool = False
    single: ClassVar[bool] = False

    def decode(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """Frames with the offset each begins at. Raises WireError behind the last good one."""
        decoder = codec.ControlFrameDecoder(
            from_server=self.from_server,
            carrier=self.carrier,
            channel=self.channel,
            header_blocks=self.header_blocks,
        )

        def to_json(frame: codec.ControlFrame) -> dict[str, Any]:
            found = _frame_to_json(frame, decoder.channel)
            if self.header_blocks and isinstance(frame, MessageFrame):
                found |= _block_to_json(frame.headers)
            return found

        return decoded(decoder, data, to_json)

    def encode(self, value: list[Any]) -> bytes:
        """The bytes of ``value``, checked like bytes that came. Raises WireError."""
        encoders = _ENCODERS_OF_CALLS if self.header_blocks else _ENCODERS
        return encoded(value, encoders, self.decode)

    def meaning(self, frames: list[dict[str, Any]]) -> Any:
        """What the ranges of the last acknowledging frame say, as [start, end) pairs.

        Those of an AckReliable count from the lowest number that was not acknowledged before.
        """
        for frame in reversed(frames):
            if frame["type"] in _ACKS:
                acks, others = alternate(frame["ranges"])
                if frame["type"] == "AckReliable":
                    return acks
                return {"acks": acks, "nacks": others, "next": sum(frame["ranges"])}
        return None

    def describe(self, frame: dict[str, Any]) -> list[str]:
        """A line with the fields, and one for each header, attachment and payload."""
        fields = [
            f"{name} {_BITS.text(value)}"
            for name, value in frame.items()
            if name not in ("type", "headers", "attachments", "payload")
        ]
        if frame.get("ranges"):
            fields.append(f"that is {_BITS.text(self.meaning([frame]))}")
        lines = [f"{frame['type']}  {', '.join(fields)}".rstrip()]
        lines += [header_text(pair) for pair in frame.get("headers", ())]
        lines += [f"attached channel {_BITS.text(each)}" for each in frame.get("attachments", ())]
        if frame.get("payload"):
            lines.append(f"payload {payload_text(bytes.fromhex(frame['payload']))}")
        return lines


def _block_to_json(headers: tuple[tuple[bytes, bytes], ...]) -> dict[str, Any]:
    """The headers that a message begins with, or what is wrong with them."""
    if headers and not headers[0][0]:
        return {"malformed": headers[0][1].decode()}
    return {"headers": headers_to_json(headers)}


def _frame_to_json(frame: codec.ControlFrame, channel: int) -> dict[str, Any]:
    """One frame of the codec; ``channel`` is what the decoder says of a message."""
    match frame:
        case Version():
            return {"type": "Version", "version": frame.version}
        case codec.ConnectionControl():
            return {"type": "ConnectionControl", "headers": headers_to_json(frame.headers)}
        case codec.ChannelControl():
            return {"type": "ChannelControl", "channel": _BITS.to_json(frame.channel)}
        case MessageFrame():
            return {
                "type": "Message",
                "channel": _BITS.to_json(channel),
                "num": frame.num,
                "attachments": [_BITS.to_json(attached) for attached, _ in frame.attachments],
                "payload": bytes(frame.payload).hex(),
            }
        case SentUnreliable():
            return {"type": "SentUnreliable", "count": frame.count}
        case FinishSender():
            return {"type": "FinishSender", "sent_reliable": frame.sent_reliable}
        case codec.ControlAcks():
            return {"type": "AckReliable", "ranges": list(frame.ranges)}
        case codec.ControlAckNacks():
            return {"type": "AckNackUnreliable", "ranges": list(frame.ranges)}
        case codec.ControlClose():
            return {"type": "CloseReceiver", "ranges": list(frame.ranges)}
        case codec.ClosedChannelLost():
            return {"type": "ClosedChannelLost", "channel": _BITS.to_json(frame.channel)}


def _encode_message(fields: Fields, *, header_block: bool = False) -> bytes:
    headers = read_headers(fields) if header_block else None
    channel, num = _BITS.take(fields), fields.number("num")
    where = f"{fields.where}: attachments"
    attachments = [
        _BITS.read(each, f"{where}[{k}]")
        for k, each in enumerate(list_of(fields.take("attachments", []), where))
    ]
    payload = hex_bytes(fields.take("payload", ""), f"{fields.where}: payload")
    return numbered(
        lambda n: encoder.encode_control_message(channel, n, payload, attachments, headers),
        num,
        1 + len(varint.encode(channel)),
    )


_ENCODERS: Final[Encoders] = {
    "Version": lambda fields: version(fields, "AQ0-10"),
    "ConnectionControl": lambda fields: encoder.encode_connection_control(read_headers(fields)),
    "ChannelControl": lambda fields: encoder.encode_channel_control(_BITS.take(fields)),
    "Message": _encode_message,
    "SentUnreliable": lambda fields: encoder.encode_control_sent_unreliable(fields.number("count")),
    "FinishSender": lambda fields: encoder.encode_control_finish(fields.number("sent_reliable")),
    "AckReliable": lambda fields: encoder.encode_control_acks(fields.numbers("ranges")),
    "AckNackUnreliable": lambda fields: encoder.encode_control_ack_nacks(fields.numbers("ranges")),
    "CloseReceiver": lambda fields: encoder.encode_control_close(fields.numbers("ranges")),
    "ClosedChannelLost": lambda fields: encoder.encode_closed_channel_lost(_BITS.take(fields)),
}
_ENCODERS_OF_CALLS: Final[Encoders] = {
    **_ENCODERS,
    "Message": partial(_encode_message, header_block=True),
}
