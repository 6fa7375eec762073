"""The model of ``_speedups.codec``: decodes a whole sequence at once, frames as plain tuples.

A frame is (name, field, ...), with the fields in their order on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aqueduct.errors import (
    FrameError,
    LimitExceeded,
    RemoteProtocolError,
    SequenceError,
    VersionError,
)

__all__ = ["Frame", "Model", "decode", "encode", "varint"]

Frame = tuple[Any, ...]
Headers = tuple[tuple[bytes, bytes], ...]

MAGIC = bytes([239, 80, 95, 166, 96, 15, 64, 142]) + b"AQUEDUCT"
TEXT = b"0.0.0-AFTER"
PLAIN = {1: "ACK_VERSION", 7: "CANCEL_SENDER", 10: "CLOSE_RECEIVER", 11: "FORGET_CHANNEL"}
BY_SENDER, BY_RECEIVER = range(4, 8), range(8, 11)
UNLIMITED = (1 << 63) - 1


def decode(
    data: bytes, *, from_server: bool, datagram: bool = False, **limits: Any
) -> tuple[list[Frame], RemoteProtocolError | None]:
    """The frames before the first error, and that error. A cut counts as one."""
    model = Model(data, from_server, datagram, **limits)
    try:
        while model.at < len(data):
            model.frames.append(model.frame())
    except RemoteProtocolError as error:
        return model.frames, error
    return model.frames, None


@dataclass
class Model:
    data: bytes
    from_server: bool
    datagram: bool
    frame_limit: int = UNLIMITED
    header_limit: int = UNLIMITED
    attachment_limit: int = UNLIMITED
    block_limit: int = UNLIMITED
    at: int = 0
    start: int = 0
    route: int = -1
    frames: list[Frame] = field(default_factory=list)

    def frame(self) -> Frame:
        self.start = self.at
        tag = self.take(1)[0]
        self.check_place(tag)
        if tag in PLAIN:
            return (PLAIN[tag],)
        return {
            239: self.version,
            2: lambda: ("CONNECTION_HEADERS", header_pairs(self.block(self.header_limit))),
            3: self.route_to,
            4: self.message,
            5: lambda: ("SENT_UNRELIABLE", self.count()),
            6: lambda: ("FINISH_SENDER", self.count()),
            8: self.ack_reliable,
            9: self.ack_nack_unreliable,
        }[tag]()

    def check_place(self, tag: int) -> None:
        if tag not in range(1, 12) and tag != 239:
            raise FrameError("unknown tag")
        routed = self.route >= 0
        if routed == (tag in (239, 1, 2, 3)):
            raise SequenceError("AQ-9")
        sender_is_server, creator_is_server = bool(self.route & 2), bool(self.route & 1)
        if tag in BY_SENDER and sender_is_server != self.from_server:
            raise SequenceError("AQ-24")
        if tag in BY_RECEIVER and sender_is_server == self.from_server:
            raise SequenceError("AQ-24")
        if tag == 11 and creator_is_server != self.from_server:
            raise SequenceError("AQ-23")
        if self.datagram and tag not in (239, 3, 4):
            raise SequenceError("AQ-R11")

    def version(self) -> Frame:
        for expected in MAGIC[1:]:
            if self.take(1)[0] != expected:
                raise VersionError("magic")
        size = self.number()
        if size > 255:
            raise VersionError("AQ-R5")
        self.check_size(size)
        if self.take(size) != TEXT:
            raise VersionError("text")
        return "VERSION", TEXT.decode()

    def route_to(self) -> Frame:
        self.route = self.number()
        return "ROUTE_TO", self.route

    def message(self) -> Frame:
        num = self.number()
        if num and self.oneshot:
            raise SequenceError("AQ-R28")
        headers = header_pairs(self.block(self.header_limit))
        attached = self.attached(self.block(self.block_limit))
        return "MESSAGE", num, headers, attached, self.block()

    def attached(self, block: bytes) -> tuple[tuple[int, Headers], ...]:
        inner = Model(block, self.from_server, self.datagram)
        found: list[tuple[int, Headers]] = []
        while inner.at < len(block):
            if len(found) == self.attachment_limit:
                raise LimitExceeded("Limits.attachments")
            channel = inner.inner_number()
            if channel == 0 or bool(channel & 1) != self.from_server:
                raise SequenceError("AQ-16, AQ-R4")
            if channel in [other for other, _ in found]:
                raise SequenceError("AQ-R4")
            size = inner.inner_number()
            if size > len(block) - inner.at:
                raise FrameError("cut inside a block")
            if size > self.header_limit:
                raise LimitExceeded("Limits.header_bytes")
            found.append((channel, header_pairs(inner.take(size))))
        return tuple(found)

    def count(self) -> int:
        number = self.number()
        if number > 1 and self.oneshot:
            raise SequenceError("AQ-R28")
        return number

    def ack_reliable(self) -> Frame:
        ranges = lengths(self.block(self.block_limit))
        if len(ranges) % 2:
            raise FrameError("AQ-20")
        return "ACK_RELIABLE", ranges

    def ack_nack_unreliable(self) -> Frame:
        channel = self.number()
        if channel != self.route:
            raise SequenceError("AQ-R14")
        return "ACK_NACK_UNRELIABLE", channel, lengths(self.block(self.block_limit))

    @property
    def oneshot(self) -> bool:
        return bool(self.route & 4)

    # Primitives.

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise FrameError("cut", truncated=True)
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self) -> int:
        value = 0
        for index in range(10):
            byte = self.take(1)[0]
            value |= (byte & 127) << (7 * index)
            if index == 9 and byte > 1:
                raise FrameError("above 64 bits")
            if byte < 128:
                if byte == 0 and index:
                    raise FrameError("not the shortest form")
                return value
        raise AssertionError("the tenth byte always ends it")

    def inner_number(self) -> int:
        """A varint inside a block: a cut there is malformed."""
        try:
            return self.number()
        except FrameError as error:
            raise FrameError(str(error)) from None

    def check_size(self, size: int) -> None:
        if size > self.frame_limit - (self.at - self.start):
            raise LimitExceeded("Limits.frame_bytes")

    def block(self, limit: int = 1 << 64) -> bytes:
        size = self.number()
        if size > limit:
            raise LimitExceeded("Limits.header_bytes or block_bytes")
        self.check_size(size)
        return self.take(size)


def header_pairs(block: bytes) -> Headers:
    parts: list[bytes] = []
    inner = Model(block, False, False)
    while inner.at < len(block):
        size = inner.inner_number()
        if size > len(block) - inner.at:
            raise FrameError("cut inside a block")
        parts.append(inner.take(size))
    if len(parts) % 2:
        raise FrameError("AQ-5")
    for key in parts[::2]:
        if not key or not key.isascii():
            raise FrameError("AQ-R3")
    return tuple(zip(parts[::2], parts[1::2], strict=True))


def lengths(block: bytes) -> tuple[int, ...]:
    inner = Model(block, False, False)
    found: list[int] = []
    while inner.at < len(block):
        found.append(inner.inner_number())
        if found[-1] == 0 and len(found) > 1:
            raise FrameError("AQ-20, AQ-21")
    if not sum(found) or sum(found) >= 1 << 64:
        raise FrameError("AQ-21, AQ-R2")
    return tuple(found)


# Frames to bytes.


def encode(frames: Iterable[Frame]) -> bytes:
    """The bytes of frames of ``decode``."""
    return b"".join(map(encode_frame, frames))


def encode_frame(frame: Frame) -> bytes:
    name, *fields = frame
    match name:
        case "VERSION":
            return MAGIC + varbytes(fields[0].encode())
        case "CONNECTION_HEADERS":
            return b"\2" + header_data(fields[0])
        case "ROUTE_TO" | "SENT_UNRELIABLE" | "FINISH_SENDER":
            return {"R": b"\3", "S": b"\5", "F": b"\6"}[name[0]] + varint(fields[0])
        case "MESSAGE":
            num, headers, attachments, payload = fields
            attached = b"".join(varint(chan) + header_data(pairs) for chan, pairs in attachments)
            return (
                b"\4" + varint(num) + header_data(headers) + varbytes(attached) + varbytes(payload)
            )
        case "ACK_RELIABLE":
            return b"\x08" + varbytes(b"".join(map(varint, fields[0])))
        case "ACK_NACK_UNRELIABLE":
            return b"\x09" + varint(fields[0]) + varbytes(b"".join(map(varint, fields[1])))
    return bytes([{plain: tag for tag, plain in PLAIN.items()}[name]])


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def varbytes(data: bytes) -> bytes:
    return varint(len(data)) + data


def header_data(headers: Headers) -> bytes:
    return varbytes(b"".join(varbytes(part) for pair in headers for part in pair))
