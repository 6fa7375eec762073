"""Captures of real connections: a proxy that records, and files as Wireshark reads them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

__all__ = ["CLIENT", "Recording", "cut_up", "recorded", "write_capture"]

Segment = tuple[bool, bytes]
"""Whether the server sent it, and its bytes."""

CLIENT, SERVER = (b"\x0a\x00\x00\x01", 40_000), (b"\x0a\x00\x00\x02", 4433)
_RAW_IP = 101
_LARGEST = 60_000  # bytes of a packet
_SYN, _ACK, _PUSH = 2, 16, 8


class Recording:
    """What went through the proxy, in the order in which it came there."""

    def __init__(self) -> None:
        self.port = 0
        self.segments: list[Segment] = []

    def sent(self, *, server: bool) -> bytes:
        """All bytes of one side."""
        return b"".join(data for side, data in self.segments if side is server)


@contextlib.asynccontextmanager
async def recorded(port: int) -> AsyncIterator[Recording]:
    """A proxy on 127.0.0.1 before the service at ``port``, for one connection at a time."""
    recording = Recording()
    relays: list[asyncio.Task[None]] = []

    async def pass_on(
        server: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                recording.segments.append((server, data))
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(False, reader, back), pass_on(True, there, writer))
        for end in (writer, back):
            end.close()
            with contextlib.suppress(ConnectionError):
                await end.wait_closed()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.append(asyncio.create_task(relay(reader, writer)))

    async with await asyncio.start_server(begin, "127.0.0.1", 0) as proxy:
        recording.port = proxy.sockets[0].getsockname()[1]
        yield recording
        async with asyncio.timeout(10):
            await asyncio.gather(*relays)


def cut_up(segments: Iterable[Segment], seed: int, largest: int) -> Iterator[Segment]:
    """The same bytes in other segments, as a network may make them; the first begins a chunk."""
    chance = random.Random(seed)
    for server, data in segments:
        start = 0
        while start < len(data):
            size = chance.randint(8 if start == 0 else 1, largest)
            yield server, data[start : start + size]
            start += size


def write_capture(path: Path, *connections: Iterable[Segment]) -> None:
    """Writes TCP connections, each from its SYN on, as a file of the old pcap format."""
    packets: list[bytes] = []
    for number, segments in enumerate(connections):
        packets += _packets((CLIENT[0], CLIENT[1] + number), segments)
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262_144, _RAW_IP))
        for number, packet in enumerate(packets):
            file.write(struct.pack("<IIII", 1, number, len(packet), len(packet)) + packet)


def _packets(client: tuple[bytes, int], segments: Iterable[Segment]) -> Iterator[bytes]:
    ends = (client, SERVER)
    sent = [0, 0]

    def packet(server: bool, flags: int, data: bytes = b"") -> bytes:
        source, target = ends[server], ends[not server]
        numbers = sent[server], sent[not server]
        sent[server] += len(data) + bool(flags & _SYN)
        tcp = struct.pack("!HHIIBB", source[1], target[1], *numbers, 80, flags)
        size = 40 + len(data)
        ip = struct.pack("!BBHIBBH", 69, 0, size, 0, 64, 6, 0) + source[0] + target[0]
        return ip + tcp + struct.pack("!HHH", 65_535, 0, 0) + data

    yield packet(False, _SYN)
    yield packet(True, _SYN | _ACK)
    yield packet(False, _ACK)
    for server, data in segments:
        for start in range(0, len(data), _LARGEST):
            yield packet(server, _ACK | _PUSH, data[start : start + _LARGEST])
