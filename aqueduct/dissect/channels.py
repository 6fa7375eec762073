"""Aqueduct's frame sequences, in the vocabulary of the test vectors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from aqueduct._speedups import channels as codec
from aqueduct._speedups.base import varint
from aqueduct.dissect.values import (
    HIGHEST,
    Fields,
    WireError,
    hex_bytes,
    kind_of,
    list_of,
    number,
    one_of,
)
from aqueduct.errors import AqueductError

__all__ = ["AqContext", "channel_to_json", "contexts", "frame_to_json"]

_SIDES: Final[tuple[str, ...]] = ("client", "server")
_CARRIERS: Final = ("stream", "datagram")
PREVIEW: Final = 32
"""Bytes of a payload that are shown to people."""


def contexts(given: Any) -> list[AqContext]:
    """The contexts that ``given`` leaves open: without ``from`` it may be either side."""
    if not isinstance(given, Mapping):
        raise WireError(f"context must be an object, not {kind_of(given)}")
    carrier = one_of(given.get("carrier", "stream"), _CARRIERS, "context.carrier")
    sides = _SIDES
    if "from" in given:
        sides = (one_of(given["from"], _SIDES, "context.from"),)
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
        # A payload that cannot be in these bytes gets no memory: its length may be a lie.
        decoder.auto_admit = len(data)
        try:
            decoder.feed(data)
            while True:
                offset = decoder.consumed
                frame = decoder.next()
                if frame is None or isinstance(frame, codec.MessageHead):
                    break
                yield offset, frame_to_json(frame)
            decoder.end()
        except AqueductError as error:
            raise WireError.of(error, offset) from error

    def encode(self, value: list[Any]) -> bytes:
        """The bytes of ``value``, checked like bytes that came. Raises WireError."""
        data = b"".join(_encode_frame(frame, f"frame {k}") for k, frame in enumerate(value))
        try:
            for _ in self.decode(data):
                pass
        except WireError as error:  # whatever is wrong, it is in the value, not cut off
            raise WireError(str(error)) from error
        return data

    def meaning(self, frames: list[dict[str, Any]]) -> Any:
        """What the ranges of the last acknowledging frame say, as [start, end) pairs."""
        for frame in reversed(frames):
            if frame["type"] == "ACK_RELIABLE":
                return _alternate(frame["ranges"])[1]
            if frame["type"] == "ACK_NACK_UNRELIABLE":
                acks, nacks = _alternate(frame["ranges"])
                return {"acks": acks, "nacks": nacks, "next": sum(frame["ranges"])}
        return None

    def describe(self, frame: dict[str, Any]) -> list[str]:
        """A line with the fields, and one for each header, attachment and payload."""
        fields = [
            f"{name} {_text(value)}"
            for name, value in frame.items()
            if name not in ("type", "headers", "attachments", "payload")
        ]
        if "ranges" in frame:
            fields.append(f"that is {_text(self.meaning([frame]))}")
        lines = [f"{frame['type']}  {', '.join(fields)}".rstrip()]
        lines += [_header_text(pair) for pair in frame.get("headers", ())]
        for attachment in frame.get("attachments", ()):
            lines.append(f"attached channel {_text(attachment['channel'])}")
            lines += ["  " + _header_text(pair) for pair in attachment["headers"]]
        if frame.get("payload"):
            lines.append(f"payload {_payload_text(bytes.fromhex(frame['payload']))}")
        return lines


def frame_to_json(frame: codec.Frame) -> dict[str, Any]:
    """One frame of the codec in the vocabulary of the test vectors."""
    name = codec.FRAME_NAMES[frame.TAG]
    match frame:
        case codec.Version():
            return {"type": name, "version": frame.version}
        case codec.ConnectionHeaders():
            return {"type": name, "headers": _headers_to_json(frame.headers)}
        case codec.RouteTo():
            return {"type": name, "channel": channel_to_json(frame.channel)}
        case codec.MessageFrame():
            attachments = [
                {"channel": channel_to_json(channel), "headers": _headers_to_json(headers)}
                for channel, headers in frame.attachments
            ]
            return {
                "type": name,
                "num": frame.num,
                "headers": _headers_to_json(frame.headers),
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
            channel = channel_to_json(frame.channel)
            return {"type": name, "channel": channel, "ranges": list(frame.ranges)}
    return {"type": name}


def channel_to_json(channel: int) -> dict[str, Any]:
    """The bits of a channel id (AQ-6)."""
    return {
        "id": channel,
        "creator": _SIDES[channel & 1],
        "sender": _SIDES[channel >> 1 & 1],
        "oneshot": bool(channel & 4),
        "index": channel >> 3,
    }


def _headers_to_json(headers: codec.Headers) -> list[list[str]]:
    return [[key.hex(), value.hex()] for key, value in headers]


def _alternate(lengths: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Consecutive ranges, first kind and second kind by turns; empty ones are left out."""
    kinds: tuple[list[list[int]], list[list[int]]] = ([], [])
    start = 0
    for k, length in enumerate(lengths):
        if length:
            kinds[k % 2].append([start, start + length])
        start += length
    return kinds


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value).replace('"', "")
    if "id" not in value:
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if value["id"] == 0:
        return "0 (the entrypoint)"
    receiver = _SIDES[value["sender"] == "client"]
    kind = "oneshot" if value["oneshot"] else "multishot"
    return (
        f"{value['id']} ({value['sender']} to {receiver}, {kind}, "
        f"index {value['index']} of the {value['creator']})"
    )


def _header_text(pair: list[str]) -> str:
    return f"header {bytes.fromhex(pair[0]).decode()}: {_payload_text(bytes.fromhex(pair[1]))}"


def _payload_text(data: bytes) -> str:
    shown = data[:PREVIEW]
    more = f" ... ({len(data)} bytes)" if len(data) > PREVIEW else ""
    printable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in shown)
    return f"{shown.hex()}{more}  |{printable}|" if data else "(empty)"


def _encode_frame(given: Any, where: str) -> bytes:
    fields = Fields(given, where)
    name = fields.take("type")
    encoder = _ENCODERS.get(name) if isinstance(name, str) else None
    if encoder is None:
        raise WireError(f"{where} has the unknown type {name!r}; known: {', '.join(_ENCODERS)}")
    fields.where = f"{where} ({name})"
    try:
        data = encoder(fields)
    except AqueductError as error:
        raise WireError(f"{fields.where}: {error}") from error
    fields.end()
    return data


def _encode_version(fields: Fields) -> bytes:
    ours = codec.VERSION[17:].decode()
    version = fields.take("version", ours)
    if version != ours:
        raise WireError(f"{fields.where}: version is {version!r}; it must be {ours!r} (AQ-R5)")
    return codec.VERSION


def _encode_message(fields: Fields) -> bytes:
    num, headers = fields.number("num"), _headers(fields)
    attachments = []
    where = f"{fields.where}: attachments"
    for k, given in enumerate(list_of(fields.take("attachments", []), where)):
        entry = Fields(given, f"{where}[{k}]")
        attachments.append((_channel_of(entry), _headers(entry)))
        entry.end()
    payload = hex_bytes(fields.take("payload", ""), f"{fields.where}: payload")
    # The highest number is an endpoint's error, not the format's (AQ-R13), but the encoder is
    # the endpoint's: it gets the number below, which is as long, and the number is exchanged.
    below = min(num, HIGHEST - 1)
    data = b"".join(map(bytes, codec.encode_message(below, payload, headers, attachments)))
    return data[:1] + varint.encode(num) + data[1 + len(varint.encode(below)) :]


def _plain(data: bytes) -> Callable[[Fields], bytes]:
    return lambda fields: data


_ENCODERS: Final[dict[str, Callable[[Fields], bytes]]] = {
    "VERSION": _encode_version,
    "ACK_VERSION": _plain(codec.ACK_VERSION),
    "CONNECTION_HEADERS": lambda fields: codec.encode_connection_headers(_headers(fields)),
    "ROUTE_TO": lambda fields: codec.encode_route_to(_channel_of(fields)),
    "MESSAGE": _encode_message,
    "SENT_UNRELIABLE": lambda fields: codec.encode_sent_unreliable(fields.number("count")),
    "FINISH_SENDER": lambda fields: codec.encode_finish_sender(fields.number("sent_reliable")),
    "CANCEL_SENDER": _plain(codec.CANCEL_SENDER),
    "ACK_RELIABLE": lambda fields: codec.encode_ack_reliable(fields.numbers("ranges")),
    "ACK_NACK_UNRELIABLE": lambda fields: codec.encode_ack_nack_unreliable(
        _channel_of(fields), fields.numbers("ranges")
    ),
    "CLOSE_RECEIVER": _plain(codec.CLOSE_RECEIVER),
    "FORGET_CHANNEL": _plain(codec.FORGET_CHANNEL),
}


def _channel(given: Any, where: str) -> int:
    """A channel id from {"id"}, from its bits, or from both if they agree; or a bare number."""
    if not isinstance(given, Mapping):
        return number(given, where)
    fields = Fields(given, where)
    channel = fields.number("id") if "id" in given else None
    if channel is None or len(given) > 1:
        known = channel_to_json(channel) if channel is not None else {}
        creator = one_of(fields.take("creator", known.get("creator")), _SIDES, f"{where}.creator")
        sender = one_of(fields.take("sender", known.get("sender")), _SIDES, f"{where}.sender")
        oneshot = fields.take("oneshot", known.get("oneshot", False))
        if not isinstance(oneshot, bool):
            raise WireError(f"{where}.oneshot must be true or false, not {kind_of(oneshot)}")
        index = number(fields.take("index", known.get("index")), f"{where}.index", HIGHEST >> 3)
        bits = index << 3 | oneshot << 2 | _SIDES.index(sender) << 1 | _SIDES.index(creator)
        if channel is not None and bits != channel:
            raise WireError(f"{where}: id is {channel}, but its fields make {bits}")
        channel = bits
    fields.end()
    return channel


def _channel_of(fields: Fields) -> int:
    return _channel(fields.take("channel"), f"{fields.where}: channel")


def _headers(fields: Fields) -> codec.Headers:
    where = f"{fields.where}: headers"
    pairs = list_of(fields.take("headers", []), where)
    return tuple(_header(pair, f"{where}[{k}]") for k, pair in enumerate(pairs))


def _header(given: Any, where: str) -> tuple[bytes, bytes]:
    pair = list_of(given, where)
    if len(pair) != 2:
        raise WireError(f"{where} must be a pair [key, value], not {len(pair)} items")
    return hex_bytes(pair[0], f"{where} key"), hex_bytes(pair[1], f"{where} value")
