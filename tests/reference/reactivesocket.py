"""ReactiveSocket's frames in their plainest form: whole frames, a field at a time.

It follows the text and the resolutions of ``docs/protocols/reactivesocket.md``, not the codec.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NUMBERED", "TYPES", "Broken", "Frame", "decode", "encode"]

TYPES = {
    0x0001: "SETUP",
    0x0011: "REQUEST_RESPONSE",
    0x0012: "REQUEST_FNF",
    0x0013: "REQUEST_STREAM",
    0x0014: "REQUEST_SUB",
    0x0015: "REQUEST_N",
    0x0016: "CANCEL",
    0x0020: "RESPONSE",
    0x0021: "ERROR",
    0xFFFF: "EXT",
}
NUMBERED = ("REQUEST_STREAM", "REQUEST_SUB", "REQUEST_N")


class Broken(Exception):
    """The bytes are no frames: ``kind`` is malformed, truncated, version or limit."""

    def __init__(self, kind: str, frames: list[Frame]) -> None:
        super().__init__(kind)
        self.kind = kind
        self.frames = frames
        """Those before."""


@dataclass(frozen=True)
class Frame:
    """One frame; what its type does not have is at its default."""

    type: int
    stream: int = 0
    flags: int = 0
    n: int = 0
    extended_type: int = 0
    data: bytes = b""

    @property
    def name(self) -> str:
        return TYPES.get(self.type, "")


def encode(frame: Frame, *, framed: bool = True) -> bytes:
    """A frame as bytes, whatever it says."""
    out = bytes([0, frame.flags]) + frame.type.to_bytes(2, "big")
    if frame.name == "EXT":
        out += frame.extended_type.to_bytes(4, "big")
    else:
        out += frame.stream.to_bytes(8, "big")
    if frame.name in NUMBERED:
        out += frame.n.to_bytes(8, "big")
    out += frame.data
    return (len(out) + 4).to_bytes(4, "big") + out if framed else out


def decode(data: bytes, *, framed: bool = True, limit: int = (1 << 31) - 1) -> list[Frame]:
    """All frames; Broken tells why that is not possible, and has those before."""
    frames: list[Frame] = []
    if not framed:
        if len(data) > limit:
            raise Broken("limit", frames)
        return [_frame(data, len(data), frames, cut="truncated")]
    while data:
        if len(data) < 4:
            raise Broken("truncated", frames)
        length = int.from_bytes(data[:4], "big") & 0x7FFFFFFF
        if length < 12:
            raise Broken("malformed", frames)
        if length - 4 > limit:
            raise Broken("limit", frames)
        frames.append(_frame(data[4:length], length - 4, frames, cut="malformed"))
        data = data[length:]
    return frames


def _frame(body: bytes, size: int, before: list[Frame], *, cut: str) -> Frame:
    """The frame of ``size`` bytes of which ``body`` is here; ``cut``: what a short one is."""

    def need(count: int) -> None:
        if size < count:
            raise Broken(cut, before)
        if len(body) < count:
            raise Broken("truncated", before)

    def check(wanted: bool, kind: str = "malformed") -> None:
        if not wanted:
            raise Broken(kind, before)

    need(4)
    flags, type_ = body[1], int.from_bytes(body[2:4], "big")
    name = TYPES.get(type_, "")
    check(body[0] == 0, "version")
    check(type_ != 0)
    check(bool(name) or flags & 0x80 > 0)
    if name == "EXT":
        need(8)
        extended_type = int.from_bytes(body[4:8], "big")
        need(size)
        return Frame(type_, 0, flags, 0, extended_type, body[8:])
    head = 20 if name in NUMBERED else 12
    need(head)
    check(size == head or name not in ("REQUEST_N", "CANCEL"))
    stream = int.from_bytes(body[4:12], "big")
    if name == "SETUP":
        check(stream == 0)
    elif name not in ("ERROR", ""):
        check(stream > 0)
    number = int.from_bytes(body[12:20], "big") if name in NUMBERED else 0
    need(size)
    return Frame(type_, stream, flags, number, 0, body[head:])
