"""Aqueduct's frame sequences, in the vocabulary of the test vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from aqueduct._speedups import channels as codec
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

__all__ = ["AqContext", "contexts", "frame_to_json"]

_CARRIERS: Final = ("stream", "datagram")
_BITS: Final = ChannelBits(lowest="creator", second="sender", creator="creator")


def contexts(given: Any) -> list[AqContext]:
    """The contexts that ``given`` leaves open: without ``from`` it may be either side."""
    if not isinstance(given, Mapping):
        raise WireError(f"context must be an object, not {kind_of(given)}")
    carrier = one_of(given.get("carrier", "stream"), _CARRIERS, "context.carrier")
    sides = SIDES
    if "from" in given:
        sides = (one_of(given["from"], SIDES, "context.from"),)
    return [AqContext(side == "server", carrier == "datagram") for side in sides]


@dataclass(frozen=True)
class AqContext:
    """Which side sends a frame sequence, and what carries it."""

    from_server: bool
    datagram: bool
    single: ClassVar[bool] = False

    def decode(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """Frames with the offset each begins at. Raises WireError behind the last good one."""
        decoder = codec.FrameDecoder(from_server=self.from_server, datagram=self.datagram)
        return decoded(decoder, data, frame_to_json)

    def encode(self, value: list[Any]) -> bytes:
        """The bytes of ``value``, checked like bytes that came. Raises WireError."""
        return encoded(value, _ENCODERS, self.decode)

    def meaning(self, frames: list[dict[str, Any]]) -> Any:
        """What the ranges of the last acknowledging frame say, as [start, end) pairs."""
        for frame in reversed(frames):
            if frame["type"] == "ACK_RELIABLE":
                return alternate(frame["ranges"])[1]
            if frame["type"] == "ACK_NACK_UNRELIABLE":
                acks, nacks = alternate(frame["ranges"])
                return {"acks": acks, "nacks": nacks, "next": sum(frame["ranges"])}
        return None

    def describe(self, frame: dict[str, Any]) -> list[str]:
        """A line with the fields, and one for each header, attachment and payload."""
        fields = [
            f"{name} {_BITS.text(value)}"
            for name, value in frame.items()
            if name not in ("type", "headers", "attachments", "payload")
        ]
        if "ranges" in frame:
            fields.append(f"that is {_BITS.text(self.meaning([frame]))}")
        lines = [f"{frame['type']}  {', '.join(fields)}".rstrip()]
        lines += [header_text(pair) for pair in frame.get("headers", ())]
        for attachment in frame.get("attachments", ()):
            lines.append(f"attached channel {_BITS.text(attachment['channel'])}")
            lines += ["  " + header_text(pair) for pair in attachment["headers"]]
        if frame.get("payload"):
            lines.append(f"payload {payload_text(bytes.fromhex(frame['payload']))}")
        return lines


def frame_to_json(frame: codec.Frame) -> dict[str, Any]:
    """One frame of the codec in the vocabulary of the test vectors."""
    name = codec.FRAME_NAMES[frame.TAG]
    match frame:
        case codec.Version():
            return {"type": name, "version": frame.version}
        case codec.ConnectionHeaders():
            return {"type": name, "headers": headers_to_json(frame.headers)}
        case codec.RouteTo():
            return {"type": name, "channel": _BITS.to_json(frame.channel)}
        case codec.MessageFrame():
            attachments = [
                {"channel": _BITS.to_json(channel), "headers": headers_to_json(headers)}
                for channel, headers in frame.attachments
            ]
            return {
                "type": name,
                "num": frame.num,
                "headers": headers_to_json(frame.headers),
                "attachments": attachments,
                "payload": bytes(frame.payload).hex(),
            }
        case codec.SentUnreliable():
            return {"type": name, "count": frame.count}
        case codec.FinishSender():
            return {"type": name, "sent_reliable": frame.sent_reliable}
        case codec.AckReliable():
            return {"type": name, "ranges": list(frame.ranges)}
        case codec.AckNackUnreliable():
            channel = _BITS.to_json(frame.channel)
            return {"type": name, "channel": channel, "ranges": list(frame.ranges)}
    return {"type": name}


def _encode_message(fields: Fields) -> bytes:
    num, headers = fields.number("num"), read_headers(fields)
    attachments = []
    where = f"{fields.where}: attachments"
    for k, given in enumerate(list_of(fields.take("attachments", []), where)):
        entry = Fields(given, f"{where}[{k}]")
        attachments.append((_BITS.take(entry), read_headers(entry)))
        entry.end()
    payload = hex_bytes(fields.take("payload", ""), f"{fields.where}: payload")
    return numbered(lambda n: codec.encode_message(n, payload, headers, attachments), num, 1)


def _plain(data: bytes) -> Callable[[Fields], bytes]:
    return lambda fields: data


_ENCODERS: Final[Encoders] = {
    "VERSION": lambda fields: version(fields, "AQ-R5"),
    "ACK_VERSION": _plain(codec.ACK_VERSION),
    "CONNECTION_HEADERS": lambda fields: codec.encode_connection_headers(read_headers(fields)),
    "ROUTE_TO": lambda fields: codec.encode_route_to(_BITS.take(fields)),
    "MESSAGE": _encode_message,
    "SENT_UNRELIABLE": lambda fields: codec.encode_sent_unreliable(fields.number("count")),
    "FINISH_SENDER": lambda fields: codec.encode_finish_sender(fields.number("sent_reliable")),
    "CANCEL_SENDER": _plain(codec.CANCEL_SENDER),
    "ACK_RELIABLE": lambda fields: codec.encode_ack_reliable(fields.numbers("ranges")),
    "ACK_NACK_UNRELIABLE": lambda fields: codec.encode_ack_nack_unreliable(
        _BITS.take(fields), fields.numbers("ranges")
    ),
    "CLOSE_RECEIVER": _plain(codec.CLOSE_RECEIVER),
    "FORGET_CHANNEL": _plain(codec.FORGET_CHANNEL),
}
