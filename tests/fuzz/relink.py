"""Relink: packets beside the plain model, bytes of a peer to one link, and two links that are cut.

The first byte of an input says which. Bytes: a byte of choices, a length, so many bytes that say
how to cut the rest, the rest. Packets: each takes as many bytes as it needs. Two links: what they
do is decided byte by byte.
"""

from __future__ import annotations

import random
from typing import Any, Final

from aqueduct._speedups.relink import packets as codec
from aqueduct._speedups.relink.packets import PacketDecoder, PacketStep
from aqueduct.config import Relink as Settings
from aqueduct.errors import FrameError, LimitExceeded, SequenceError
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.handshake import Opening
from aqueduct.protocol.relink.link import Link
from tests.fuzz.source import Source
from tests.protocol.relink.test_random import play
from tests.reference import relink as model

__all__ = ["ALLOWED", "target"]

UNREADABLE: Final = (FrameError, LimitExceeded)
"""What bytes that are no packets may be refused with."""
ALLOWED: Final = (FrameError, LimitExceeded, SequenceError)
"""What may end a link for what a peer sent."""
LIMITS: Final = (
    model.Limits(),
    model.Limits(parts=3),
    model.Limits(targets=3),
    model.Limits(message_bytes=9),
)
PACKETS: Final = 8
SIZES: Final = (0, 1, 7, 8, 9, 255, 4095, 4096, 5000, 65_535, 65_536, 66_000)


def target(data: bytes) -> None:
    """One input."""
    source = Source(data)
    how = source.byte()
    what, more = how & 3, how >> 2
    if what == 0:
        sender, receiver = id_sizes(source)
        limits = LIMITS[more % len(LIMITS)]
        plan = Source(source.take(source.byte()))
        read(source.rest(), plan, sender, receiver, limits)
    elif what == 1:
        sender, receiver = id_sizes(source)
        packets: list[model.Packet] = []
        while not source.empty and len(packets) < PACKETS:
            packets.append(packet(source, sender, receiver))
        write(packets, sender, receiver, more)
    elif what == 2:
        plan = Source(source.take(source.byte()))
        hear(source.rest(), plan, more)
    else:
        play(Chance(source), transactional=bool(more & 1), steps=len(data) // 4)


def id_sizes(source: Source) -> tuple[int, int]:
    """Of the sender and the receiver."""
    sizes = source.byte()
    return (sizes & 15) % 9, (sizes >> 4) % 9


# ----------------------------------------------------------------- packets


def packet(source: Source, sender: int, receiver: int) -> model.Packet:
    """Any packet that has bytes."""
    what = source.byte()
    name = (*model.FORMATS, "general", "message", "message", "message")[what & 7]
    if name == "general":
        return model.Packet(name, model.TYPES[name][(what >> 3) % 5])
    multicast = bool(what & 64)
    id_size = receiver if name.endswith("-ack") else sender
    count = source.below(5) if multicast else 1
    channels = tuple(source.number() & (1 << 8 * id_size) - 1 for _ in range(count))
    if name != "message":
        types = model.TYPES[name]
        sequence = source.number() & 0xFFFFFFFF if name.startswith("sequence") else -1
        return model.Packet(name, types[(what >> 3) % len(types)], multicast, channels, sequence)
    count = source.below(4)
    parts = tuple(bytes([at]) * SIZES[source.below(len(SIZES))] for at in range(count))
    if what & 128:
        parts += (b"\x07", b"") * source.byte()
    least = model.Packet(name, "", multicast, channels, -1, parts).shortest
    long, large = bool(what & 8) or least.long, bool(what & 16) or least.large
    return model.Packet(name, "", multicast, channels, -1, parts, long, large)


def write(packets: list[model.Packet], sender: int, receiver: int, dirt: int) -> None:
    """The codec writes what the model writes, and reads it back from dirty padding."""
    wire = b""
    for each in packets:
        id_size = receiver if each.format.endswith("-ack") else sender
        wire += model.encode(each, id_size, dirt)
        assert encoded(each, id_size) == model.encode(each, id_size)
    heard, error = Reader(sender, receiver, model.Limits()).read(wire, Source(b""))
    assert (heard, error) == (packets, "")


def encoded(each: model.Packet, id_size: int) -> bytes:
    """What the codec writes."""
    if each.format == "general":
        return codec.encode_general(model.TYPES["general"].index(each.type))
    if each.format != "message":
        return codec.encode_packet(
            model.FORMATS.index(each.format),
            model.TYPES[each.format].index(each.type),
            each.channels,
            id_size,
            multicast=each.multicast,
            sequence=each.sequence if each.sequence >= 0 else None,
        )
    head = codec.encode_message_head(
        each.channels,
        id_size,
        [len(part) for part in each.parts],
        multicast=each.multicast,
        long=each.long,
        large=each.large,
    )
    return head + b"".join(part + bytes(codec.padding_of(len(part))) for part in each.parts)


def read(data: bytes, plan: Source, sender: int, receiver: int, limits: model.Limits) -> None:
    """However bytes are cut, and wherever they land, codec and model read the same."""
    wanted, kind = [], ""
    try:
        wanted = model.decode(data, sender, receiver, limits)
    except model.Broken as broken:
        wanted, kind = broken.packets, broken.kind
    for pieces in (Source(b""), plan):
        assert Reader(sender, receiver, limits).read(data, pieces) == (wanted, kind)


class Reader:
    """A decoder, the packets that it has read, and the parts of the next."""

    def __init__(self, sender: int, receiver: int, limits: model.Limits) -> None:
        self.decoder = PacketDecoder(
            sender,
            receiver,
            parts=limits.parts,
            targets=limits.targets,
            message_bytes=limits.message_bytes,
        )
        self.packets: list[model.Packet] = []
        self.parts: list[bytes] = []

    def read(self, data: bytes, plan: Source) -> tuple[list[model.Packet], str]:
        """The packets in ``data``, and why there are no more: malformed, truncated, limit, ""."""
        at = 0
        try:
            while at < len(data):
                how = plan.byte()
                part = data[at : at + (len(data) if plan.empty else 1 + (how & 63))]
                if self.decoder.in_payload and how & 64:
                    part = part[: self.decoder.missing]
                    self.parts[self.decoder.part] += part
                    self.decoder.landed_outside(len(part))
                else:
                    self.decoder.feed(memoryview(part) if how & 128 else part)
                self.listen()
                at += len(part)
            self.decoder.end()
        except UNREADABLE as error:
            self.assert_broken(error)
            if isinstance(error, LimitExceeded):
                return self.packets, "limit"
            return self.packets, "truncated" if error.truncated else "malformed"
        assert self.decoder.packets == len(self.packets)
        return self.packets, ""

    def assert_broken(self, error: FrameError | LimitExceeded) -> None:
        """It says so again. Bytes that only lack others are no error yet."""
        again: Exception | None = None
        try:
            self.decoder.end()
        except UNREADABLE as raised:
            again = raised
        assert again is error or (again and getattr(error, "truncated", False))

    def listen(self) -> None:
        decoder = self.decoder
        while (step := decoder.next()) != PacketStep.NOTHING:
            name = codec.FORMAT_NAMES[decoder.format]
            message = name == "message"
            if step == PacketStep.PIECE:
                assert decoder.data
                self.parts[decoder.part] += decoder.data
            elif step == PacketStep.PACKET and message:
                self.parts = [b""] * len(decoder.sizes)
            else:
                assert tuple(map(len, self.parts)) == decoder.sizes or not message
                self.packets.append(
                    model.Packet(
                        name,
                        "" if message else codec.TYPE_NAMES[decoder.format][decoder.type],
                        decoder.multicast,
                        decoder.channels,
                        decoder.sequence,
                        tuple(self.parts) if message else (),
                        message and decoder.type & codec.LONG > 0,
                        message and decoder.type & codec.LARGE > 0,
                    )
                )


# ----------------------------------------------------------------- links

SETTINGS: Final = Settings(
    message_bytes=20_000,
    parts=8,
    targets=4,
    channels=4,
    window_messages=8,
    receive_bytes=30_000,
    unconfirmed_results=8,
    unanswered_pings=20,
)


class Chance(random.Random):
    """What would be random, decided by the bytes of an input."""

    def __init__(self, source: Source) -> None:
        super().__init__(0)
        self._source = source

    def random(self) -> float:
        return self._source.byte() / 256

    def getrandbits(self, k: int, /) -> int:
        given = int.from_bytes(self._source.take(min((k + 7) // 8, 2)), "little")
        return given & (1 << k) - 1


class Ear:
    """A link with something of each kind open, and what its application hears.

    It is up, or has sent its resume and waits for the peer's. The bytes of pieces are heard as one
    run, since how they are cut is no matter.
    """

    def __init__(self, how: int) -> None:
        self.transactional = bool(how & 1)
        self.pieces = bool(how & 2) and not self.transactional
        resumed = bool(how & 4)
        opening = Opening(
            "fuzz",
            connector_transactions=self.transactional,
            listener_transactions=self.transactional,
        )
        self.link = link = Link(opening, SETTINGS, connector=bool(how & 8), pieces=self.pieces)
        self.heard: list[Any] = []
        link.connected(0.0, resumed=False)
        for channel in (1, 1, 1, 2, 3):
            link.send(channel, (b"a", b"", bytes(5000)))
        if self.transactional:
            link.commit(1, 0)
            link.rollback(1, 1)
            link.commit(1, 2)
        link.close(3)
        link.take(1 << 20, 0.0)
        for channel in (1, 2, 2):
            link.receive_data(message(channel, b"came", bytes(4096)), 0.0)
        if self.transactional:
            commit = codec.encode_packet(codec.CHANNEL_OP, codec.COMMIT, (2,), 1)
            link.receive_data(commit, 0.0)
            link.complete(2, 0, committed=False)
        else:
            link.consume(2, 0)
        link.take(1 << 20, 0.0)
        if resumed:
            link.disconnected()
            link.connected(0.0, resumed=True)
        assert link.error is None
        link.events_received()

    def listen(self) -> None:
        for event in self.link.events_received():
            kind = event[0]
            if kind == events.PIECE:
                self.hear(bytes(event[4]))
            elif kind == events.MESSAGE:
                parts = None if event[3] is None else [bytes(part) for part in event[3]]
                self.heard.append((*event[:3], parts))
            elif kind == events.FAILED:
                assert isinstance(event[1], ALLOWED), event[1]
                assert self.link.error is event[1]
                self.heard.append((kind, type(event[1]), str(event[1])))
            else:
                self.heard.append(event)

    def hear(self, data: bytes) -> None:
        """Bytes of a message in pieces."""
        if self.heard and isinstance(self.heard[-1], bytes):
            data = self.heard.pop() + data
        self.heard.append(data)

    def end(self) -> tuple[list[Any], bytes, int]:
        """All that was heard, is answered in time, and is kept."""
        self.link.handle_deadline(1.0)
        self.listen()
        answer = b"".join(bytes(each) for each in self.link.take(1 << 20, 1.0)[0])
        return self.heard, answer, self.link.held_bytes


def message(channel: int, *parts: bytes) -> bytes:
    return model.encode(model.Packet("message", "", False, (channel,), -1, parts).shortest, 1)


def hear(data: bytes, plan: Source, how: int) -> None:
    """However bytes are cut, and wherever they land, the same is heard and answered."""
    at_once, cut = Ear(how), Ear(how)
    at_once.link.receive_data(data, 0.0)
    at_once.listen()
    at = 0
    while at < len(data):
        choice = plan.byte()
        part = data[at : at + (len(data) if plan.empty else 1 + (choice & 63))]
        room = cut.link.room() if choice & 64 else None
        expected = cut.link.expected() if choice & 64 else 0
        if room is not None:
            part = part[: len(room)]
            room[: len(part)] = part
            cut.link.landed(len(part), 0.0)
        elif expected:
            part = part[:expected]
            cut.hear(part)
            cut.link.landed(len(part), 0.0)
        else:
            cut.link.receive_data(memoryview(part) if choice & 128 else part, 0.0)
        cut.listen()
        at += len(part)
    assert cut.end() == at_once.end()
