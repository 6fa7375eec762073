"""A peer by hand, in both roles: it says bytes, and reads packets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aqueduct._speedups.relink import packets
from aqueduct._speedups.relink.packets import PacketDecoder, PacketStep
from aqueduct.address import Address
from aqueduct.protocol.relink import handshake
from aqueduct.protocol.relink.handshake import Opening
from tests.relink.pairs import within

__all__ = [
    "Packet",
    "ScriptedListener",
    "ScriptedPeer",
    "ack",
    "general",
    "message",
    "operation",
    "packets",
]


@dataclass(frozen=True)
class Packet:
    """One packet: ``data`` has the parts of a message, joined."""

    format: int
    type: int
    channel: int | None
    sequence: int
    data: bytes = b""


def general(kind: int) -> bytes:
    return packets.encode_general(kind)


def ack(kind: int, sequence: int | None = None, channel: int = 1, id_size: int = 4) -> bytes:
    form = packets.CHANNEL_ACK if sequence is None else packets.SEQUENCE_ACK
    return packets.encode_packet(form, kind, (channel,), id_size, sequence=sequence)


def operation(kind: int, sequence: int | None = None, channel: int = 1, id_size: int = 4) -> bytes:
    form = packets.CHANNEL_OP if sequence is None else packets.SEQUENCE_OP
    return packets.encode_packet(form, kind, (channel,), id_size, sequence=sequence)


def message(*parts: bytes, channel: int = 1, id_size: int = 4) -> bytes:
    head = packets.encode_message_head((channel,), id_size, [len(part) for part in parts])
    return head + b"".join(part + bytes(-len(part) % 8) for part in parts)


class ScriptedPeer:
    """A connection. As a connector it is made by ``connect``; a ScriptedListener gives others."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = PacketDecoder(4, 4)
        self._data = bytearray()
        self.epoch = self.link = 0
        self.opening = Opening("")

    @classmethod
    async def connect(cls, address: Address) -> ScriptedPeer:
        """Connects, and says nothing yet."""
        if address.path:
            return cls(*await within(asyncio.open_unix_connection(address.path)))
        return cls(*await within(asyncio.open_connection(address.host, address.port)))

    def say(self, *data: bytes) -> None:
        self._writer.write(b"".join(data))

    async def greet(self, opening: Opening) -> tuple[int, int]:
        """The connector's handshake, in lockstep; returns the epoch and the link id."""
        self.say(handshake.encode_hello())
        assert await self.exactly(8) == handshake.encode_hello()
        self.say(handshake.encode_opening(opening))
        found = handshake.decode_reply(await self.exactly(16))
        assert found is not None
        self.epoch, self.link, _ = found
        return self.epoch, self.link

    async def welcome(self, epoch: int, link: int | None = None) -> Opening:
        """The listener's handshake. ``link``: of the answer; None: what was asked for."""
        assert await self.exactly(8) == handshake.encode_hello()
        self.say(handshake.encode_hello())
        data = b""
        while (found := handshake.decode_opening(data)) is None:
            data += await self.exactly(1)
        self.opening = found[0]
        self.say(handshake.encode_reply(epoch, self.opening.old_link if link is None else link))
        return self.opening

    async def exactly(self, count: int) -> bytes:
        return await within(self._reader.readexactly(count))

    async def packet(self) -> Packet:
        """The next packet that is no nop or pong; pings are answered."""
        while True:
            found = await self._packet()
            if found.format == packets.GENERAL and found.type == packets.PING:
                self.say(general(packets.PONG))
            elif found.format != packets.GENERAL or found.type not in (packets.NOP, packets.PONG):
                return found

    async def packets(self, count: int) -> list[Packet]:
        return [await self.packet() for _ in range(count)]

    async def is_closed(self) -> bool:
        """Reads until the other side closes the connection."""
        try:
            while await within(self._reader.read(65_536)):
                pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self._writer.transport.abort()

    async def _packet(self) -> Packet:
        decoder = self._decoder
        while True:
            step = decoder.next()
            if step == PacketStep.NOTHING:
                data = await within(self._reader.read(65_536))
                if not data:
                    raise EOFError
                decoder.feed(data)
            elif step == PacketStep.PIECE:
                assert decoder.data is not None
                self._data += decoder.data
            elif step == PacketStep.DONE or decoder.format != packets.MESSAGE:
                data, self._data = bytes(self._data), bytearray()
                channel = decoder.channels[0] if decoder.channels else None
                return Packet(decoder.format, decoder.type, channel, decoder.sequence, data)


class ScriptedListener:
    """Accepts connections of a connector, for a test to play the other side of each."""

    def __init__(self) -> None:
        self._peers: asyncio.Queue[ScriptedPeer] = asyncio.Queue()

    async def __aenter__(self) -> ScriptedListener:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"aqueduct+tcp://127.0.0.1:{port}"
        self._all: list[ScriptedPeer] = []
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for peer in self._all:
            peer.close()

    async def accept(self) -> ScriptedPeer:
        return await within(self._peers.get())

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = ScriptedPeer(reader, writer)
        self._all.append(peer)
        self._peers.put_nowait(peer)
