"""Relink's packets in their plainest form: whole packets, a field at a time, nothing is fast.

It follows the text and the resolutions of ``docs/protocols/relink.md``, not the codec.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMATS", "TYPES", "Broken", "Limits", "Packet", "decode", "encode"]

FORMATS = ("channel-op", "channel-ack", "sequence-op", "sequence-ack", "message")
OPERATIONS = ("commit", "rollback", "close")
ACKNOWLEDGEMENTS = ("received", "consumed", "committed", "uncommitted", "closed")
TYPES = {
    "channel-op": OPERATIONS,
    "channel-ack": ACKNOWLEDGEMENTS,
    "sequence-op": OPERATIONS[:2],
    "sequence-ack": ACKNOWLEDGEMENTS[:4],
    "general": ("nop", "ping", "pong", "resume", "shutdown"),
}
WITHOUT_ID = 65_536
"""Targets that a packet may have when ids take no bytes."""


class Broken(Exception):
    """The bytes are no packets: ``kind`` is malformed, truncated or limit."""

    def __init__(self, kind: str, packets: list[Packet]) -> None:
        super().__init__(kind)
        self.kind = kind
        self.packets = packets
        """Those before."""


@dataclass(frozen=True)
class Packet:
    """One packet; what its format does not have is at its default."""

    format: str
    type: str = ""
    multicast: bool = False
    channels: tuple[int, ...] = ()
    sequence: int = -1
    parts: tuple[bytes, ...] = ()
    long: bool = False
    large: bool = False

    @property
    def shortest(self) -> Packet:
        """The same message in the form that takes the fewest bytes."""
        long, large = len(self.parts) > 255, any(len(part) > 65_535 for part in self.parts)
        return Packet(self.format, "", self.multicast, self.channels, -1, self.parts, long, large)


@dataclass(frozen=True)
class Limits:
    parts: int = (1 << 32) - 1
    targets: int = (1 << 32) - 1
    message_bytes: int = (1 << 63) - 1


def encode(packet: Packet, id_size: int, dirt: int = 0) -> bytes:
    """A packet as bytes, whatever it says; ``dirt`` stands for every padding byte."""
    out = bytearray()

    def align(to: int) -> None:
        while len(out) % to:
            out.append(dirt)

    dirty = dirt > 0
    if packet.format == "general":
        out.append(TYPES["general"].index(packet.type) << 5 | 0b11110 * dirty)
        align(8)
        return bytes(out)
    if packet.format == "message":
        specific = packet.long | packet.large << 1 | dirty << 2
    else:
        specific = TYPES[packet.format].index(packet.type)
    out.append(1 | packet.multicast << 1 | FORMATS.index(packet.format) << 2 | specific << 5)
    short = packet.format == "message" and not packet.long
    out.append(len(packet.parts) if short else dirt)
    if packet.multicast:
        out += bytes([dirt, dirt]) + len(packet.channels).to_bytes(4, "little")
    for channel in packet.channels:
        out += channel.to_bytes(id_size, "little")
    if packet.format.startswith("sequence"):
        align(4)
        out += packet.sequence.to_bytes(4, "little")
    if packet.format == "message":
        align(2)
        if packet.long:
            out += len(packet.parts).to_bytes(4, "little")
        if packet.large:
            align(8)
        for part in packet.parts:
            out += len(part).to_bytes(8 if packet.large else 2, "little")
        align(8)
        for part in packet.parts:
            out += part
            align(8)
    align(8)
    return bytes(out)


class _Cut(Exception):
    pass


class _Bad(Exception):
    pass


class _Reader:
    """Reads one packet; offsets are from its start."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise _Cut
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def align(self, to: int) -> None:
        self.take(-self.at % to)


def decode(
    data: bytes, sender_id_size: int, receiver_id_size: int, limits: Limits | None = None
) -> list[Packet]:
    """All packets; Broken tells why that is not possible, and has those before."""
    packets: list[Packet] = []
    while data:
        reader = _Reader(data)
        try:
            packets.append(_packet(reader, sender_id_size, receiver_id_size, limits or Limits()))
        except _Cut:
            raise Broken("truncated", packets) from None
        except _Bad as error:
            raise Broken(str(error), packets) from None
        data = data[reader.at :]
    return packets


def _packet(reader: _Reader, sender: int, receiver: int, limits: Limits) -> Packet:
    first = reader.number(1)
    specific = first >> 5
    if not first & 1:
        if specific >= len(TYPES["general"]):
            raise _Bad("malformed")
        reader.align(8)
        return Packet("general", TYPES["general"][specific])
    number = first >> 2 & 7
    if number >= len(FORMATS):
        raise _Bad("malformed")
    name = FORMATS[number]
    if name != "message" and specific >= len(TYPES[name]):
        raise _Bad("malformed")
    short_length = reader.number(1)
    targets = 1
    if first & 2:
        reader.take(2)
        targets = reader.number(4)
        if targets > limits.targets:
            raise _Bad("limit")
    id_size = receiver if number % 2 else sender
    if id_size == 0 and targets > WITHOUT_ID:
        raise _Bad("limit")
    channels = tuple(reader.number(id_size) for _ in range(targets))
    sequence = -1
    if name.startswith("sequence"):
        reader.align(4)
        sequence = reader.number(4)
    if name != "message":
        reader.align(8)
        return Packet(name, TYPES[name][specific], first & 2 > 0, channels, sequence)
    long, large = specific & 1 > 0, specific & 2 > 0
    reader.align(2)
    length = reader.number(4) if long else short_length
    if length > limits.parts:
        raise _Bad("limit")
    if large:
        reader.align(8)
    sizes: list[int] = []
    for _ in range(length):
        sizes.append(reader.number(8 if large else 2))
        if sum(sizes) > limits.message_bytes:
            raise _Bad("limit")
    reader.align(8)
    parts = []
    for size in sizes:
        parts.append(reader.take(size))
        reader.align(8)
    return Packet(name, "", first & 2 > 0, channels, -1, tuple(parts), long, large)
