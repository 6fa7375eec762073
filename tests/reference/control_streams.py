"""The model of the codec of the control-stream draft: a whole sequence at once, frames as tuples.

A frame is (name, field, ...), with the fields in their order on the wire. With header blocks a
Message ends with what is behind its block, and its headers, None for a malformed block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from aqueduct.errors import (
    FrameError,
    LimitExceeded,
    RemoteProtocolError,
    SequenceError,
)
from tests.reference.codec import (
    MAGIC,
    Frame,
    Headers,
    Model,
    header_data,
    header_pairs,
    varbytes,
    varint,
)

__all__ = ["NAMES", "decode", "encode", "header_block"]

NAMES = {
    239: "Version",
    1: "ConnectionControl",
    2: "ChannelControl",
    3: "Message",
    4: "SentUnreliable",
    5: "AckReliable",
    6: "AckNackUnreliable",
    7: "FinishSender",
    8: "CloseReceiver",
    9: "ClosedChannelLost",
}
TYPES = {name: kind for kind, name in NAMES.items()}
ALIGNMENT: Final = 64
FINAL = ("ConnectionControl", "FinishSender", "CloseReceiver", "ClosedChannelLost")


def decode(
    data: bytes,
    *,
    from_server: bool,
    carrier: str,
    channel: int = -1,
    header_blocks: bool = False,
    **limits: Any,
) -> tuple[list[Frame], RemoteProtocolError | None]:
    """The frames before the first error, and that error. A cut counts as one."""
    model = ControlModel(data, from_server, carrier == "datagram", **limits)
    model.carrier, model.route, model.header_blocks = carrier, channel, header_blocks
    try:
        while model.at < len(data):
            model.frames.append(model.frame())
        if not model.frames and carrier != "answer":
            raise FrameError("AQ0-8")
    except RemoteProtocolError as error:
        return model.frames, error
    return model.frames, None


@dataclass
class ControlModel(Model):
    """``route`` is the channel of a control stream, and of each message while it is read."""

    carrier: str = ""
    header_blocks: bool = False

    def frame(self) -> Frame:
        self.start = self.at
        kind = self.take(1)[0]
        if kind not in NAMES:
            raise FrameError("unknown type")
        if not self.may_stand(NAMES[kind]):
            raise SequenceError("not here")
        return {
            239: lambda: ("Version", self.version()[1]),
            1: lambda: ("ConnectionControl", header_pairs(self.block(self.header_limit))),
            2: self.channel_control,
            3: self.control_message,
            4: lambda: ("SentUnreliable", self.count()),
            5: self.ranges,
            6: self.ranges,
            7: lambda: ("FinishSender", self.count()),
            8: self.ranges,
            9: self.lost,
        }[kind]()

    def may_stand(self, name: str) -> bool:
        before = [frame[0] for frame in self.frames]
        if before and before[-1] in FINAL:
            return False
        alone = before in ([], ["Version"])
        bidirectional = self.carrier in ("opener", "answer")
        ours = bool(self.route & 1) == self.from_server
        match name:
            case "Version":
                return not before
            case "ConnectionControl":
                answers = self.carrier == "answer"
                right_side = answers == self.from_server
                return bidirectional and right_side and before == ["Version"] and self.route == -1
            case "ChannelControl":
                return self.carrier == "opener" and alone
            case "Message":
                return not bidirectional
            case "ClosedChannelLost":
                return self.carrier == "uni" and alone
            case "SentUnreliable" | "FinishSender":
                return bidirectional and self.route >= 0 and ours
        return bidirectional and self.route >= 0 and not ours

    def channel_control(self) -> Frame:
        channel = self.number()
        if bool(channel & 2) == self.from_server:
            raise SequenceError("AQ0-25")
        self.route = channel
        return "ChannelControl", channel

    def lost(self) -> Frame:
        channel = self.number()
        if bool(channel & 2) != self.from_server:
            raise SequenceError("AQ0-R11")
        return "ClosedChannelLost", channel

    def control_message(self) -> Frame:
        self.route = self.number()
        if bool(self.route & 1) != self.from_server:
            raise SequenceError("AQ0-13")
        num = self.number()
        if num and self.oneshot:
            raise SequenceError("AQ-R28")
        attached = self.channels(self.block(self.block_limit))
        payload = self.block()
        if not self.header_blocks:
            return "Message", self.route, num, attached, payload
        try:
            return "Message", self.route, num, attached, *self.split(payload)
        except RemoteProtocolError:
            return "Message", self.route, num, attached, b"", None

    def split(self, payload: bytes) -> tuple[bytes, Headers]:
        """What is behind the header block, and the headers; AC-95 to AC-98."""
        inner = Model(payload, False, False)
        headers = header_pairs(inner.block(self.header_limit))
        zeros = inner.take(-inner.at % ALIGNMENT)
        if any(zeros):
            raise FrameError("AC-97")
        return payload[inner.at :], headers

    def channels(self, block: bytes) -> tuple[int, ...]:
        inner = Model(block, self.from_server, self.datagram)
        found: list[int] = []
        while inner.at < len(block):
            if len(found) == self.attachment_limit:
                raise LimitExceeded("Limits.attachments")
            channel = inner.inner_number()
            if channel == 0 or bool(channel & 2) != self.from_server or channel in found:
                raise SequenceError("AQ0-24")
            found.append(channel)
        return tuple(found)

    def ranges(self) -> Frame:
        name = NAMES[self.data[self.start]]
        block = self.block(self.block_limit)
        inner = Model(block, False, False)
        found: list[int] = []
        while inner.at < len(block):
            found.append(inner.inner_number())
            if sum(found) >= 1 << 64 or (found[-1] == 0 and len(found) > 1):
                raise FrameError("AQ0-6")
        if found == [0]:
            raise FrameError("AQ0-6")
        return name, tuple(found)


# Frames to bytes.


def encode(frames: Iterable[Frame]) -> bytes:
    """The bytes of frames of ``decode``."""
    return b"".join(map(encode_frame, frames))


def encode_frame(frame: Frame) -> bytes:
    name, *fields = frame
    kind = bytes([TYPES[name]])
    match name:
        case "Version":
            return MAGIC + varbytes(fields[0].encode())
        case "ConnectionControl":
            return kind + header_data(fields[0])
        case "Message":
            channel, num, attached, payload, *headers = fields
            if headers:
                payload = header_block(headers[0]) + payload
            head = kind + varint(channel) + varint(num)
            return head + varbytes(b"".join(map(varint, attached))) + varbytes(payload)
        case "AckReliable" | "AckNackUnreliable" | "CloseReceiver":
            return kind + varbytes(b"".join(map(varint, fields[0])))
    return kind + varint(fields[0])


def header_block(headers: Headers) -> bytes:
    """Headers as they stand in front of a payload."""
    data = header_data(headers)
    return data + bytes(-len(data) % ALIGNMENT)
