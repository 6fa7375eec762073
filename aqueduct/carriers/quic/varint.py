"""QUIC's variable-length integers (RFC 9000 section 16); not those of the channels."""

from __future__ import annotations

__all__ = ["decode_varint", "encode_varint"]


def encode_varint(value: int) -> bytes:
    """The shortest form of ``value``, below 2**62."""
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x4000_0000:
        return (value | 0x8000_0000).to_bytes(4, "big")
    return (value | 0xC000_0000_0000_0000).to_bytes(8, "big")


def decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """The value at ``at`` and where it ends. Raises IndexError if ``data`` ends before it."""
    first = data[at]
    if first < 0x40:
        return first, at + 1
    if first < 0x80:
        return (first & 0x3F) << 8 | data[at + 1], at + 2
    stop = at + (4 if first < 0xC0 else 8)
    if stop > len(data):
        raise IndexError(stop)
    mask = 0x3FFF_FFFF if first < 0xC0 else 0x3FFF_FFFF_FFFF_FFFF
    return int.from_bytes(data[at:stop], "big") & mask, stop
