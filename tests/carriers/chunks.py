"""bpmux/rel by hand: chunks as they stand in the text, and a peer that says what a test says.

Nothing here is shared with the library, so that one misreading cannot hide in both.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Chunk", "Kind", "RawPeer", "chunk", "partial", "read_chunks", "read_varu64", "varu64"]

DEADLINE = 30.0


class Kind(IntEnum):
    """The type of a chunk, from its sender's view (BP-2)."""

    OUT_REQUEST = 0
    IN_REQUEST = 1
    OUT_SINK = 2
    IN_SINK = 3
    OUT_STREAM = 4
    IN_STREAM = 5
    DUPLEX = 6
    PARTIAL = 7


@dataclass(frozen=True)
class Chunk:
    """One chunk; of a PARTIAL one ``id`` is the total size."""

    kind: Kind
    id: int
    payload: bytes | None = None
    credit: int | None = None
    ping: bool = False
    end: bytes | None = None
    ack: bool = False


def varu64(value: int) -> bytes:
    """BP-R1."""
    if value < 248:
        return bytes([value])
    size = (value.bit_length() + 7) // 8
    return bytes([247 + size]) + value.to_bytes(size, "big")


def chunk(
    kind: Kind,
    number: int,
    payload: bytes | None = None,
    *,
    credit: int | None = None,
    ping: bool = False,
    end: bytes | None = None,
    ack: bool = False,
) -> bytes:
    """The bytes of a chunk (BP-1, BP-3), sensible or not."""
    flags = (
        (payload is not None) << 4
        | (credit is not None) << 3
        | ping << 2
        | (end is not None) << 1
        | int(ack)
    )
    found = bytes([kind << 5 | flags]) + varu64(number)
    if payload is not None:
        found += varu64(len(payload)) + payload
    if credit is not None:
        found += varu64(credit)
    if end is not None:
        found += varu64(len(end)) + end
    return found


def partial(total: int) -> bytes:
    """What goes before the first piece of a payload of ``total`` bytes (BP-16)."""
    size = (total.bit_length() + 7) // 8
    return bytes([Kind.PARTIAL << 5 | size - 1]) + total.to_bytes(size, "big")


class _Short(Exception):
    """More bytes are needed."""


def read_varu64(data: bytes, at: int = 0) -> tuple[int, int]:
    """The number there, and where it ends."""
    if at >= len(data):
        raise _Short
    if data[at] < 248:
        return data[at], at + 1
    end = at + 1 + data[at] - 247
    if end > len(data):
        raise _Short
    return int.from_bytes(data[at + 1 : end], "big"), end


def _bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = read_varu64(data, at)
    if at + size > len(data):
        raise _Short
    return data[at : at + size], at + size


def _read(data: bytes, at: int) -> tuple[Chunk, int]:
    kind, flags = Kind(data[at] >> 5), data[at] & 31
    if kind is Kind.PARTIAL:
        end = at + 2 + (flags & 7)
        if end > len(data):
            raise _Short
        return Chunk(kind, int.from_bytes(data[at + 1 : end], "big")), end
    number, at = read_varu64(data, at + 1)
    payload = credit = end_payload = None
    if flags & 16:
        payload, at = _bytes(data, at)
    if flags & 8:
        credit, at = read_varu64(data, at)
    if flags & 2:
        end_payload, at = _bytes(data, at)
    return Chunk(kind, number, payload, credit, bool(flags & 4), end_payload, bool(flags & 1)), at


def read_chunks(data: bytes) -> tuple[list[Chunk], bytes]:
    """The whole chunks there, and the bytes behind the last of them."""
    found = []
    at = 0
    while at < len(data):
        try:
            read, at = _read(data, at)
        except _Short:
            break
        found.append(read)
    return found, data[at:]


class RawPeer:
    """A socket whose peer thinks that bpmux is spoken. Reads all the time, unless told not to."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.chunks: list[Chunk] = []
        """All that came."""
        self.received = 0
        """Bytes that came."""
        self.over = False
        """Whether the other side has ended or reset the connection."""
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._reading = False
        self.read(True)

    @classmethod
    async def connect(cls, place: tuple[str, int] | str) -> RawPeer:
        """A peer of the server there."""
        family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        async with asyncio.timeout(DEADLINE):
            await asyncio.get_running_loop().sock_connect(sock, place)
        return cls(sock)

    def read(self, wanted: bool) -> None:
        """Whether it reads what comes."""
        if wanted and not self._reading and not self.over:
            self._loop.add_reader(self.sock, self._on_readable)
        elif not wanted and self._reading:
            self._loop.remove_reader(self.sock)
        self._reading = wanted and not self.over

    async def say(self, *data: bytes) -> None:
        """Sends these bytes; ConnectionError if it is over, TimeoutError if nobody reads them."""
        async with asyncio.timeout(DEADLINE):
            await self._loop.sock_sendall(self.sock, b"".join(data))

    def say_now(self, data: bytes) -> int:
        """Sends what the kernel takes of them; how many that were."""
        try:
            return self.sock.send(data)
        except BlockingIOError:
            return 0

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until what came makes this true."""
        async with asyncio.timeout(DEADLINE):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_over(self) -> None:
        """Waits for the end of the connection."""
        await self.until(lambda: self.over)

    def of(self, kind: Kind, number: int) -> list[Chunk]:
        """What came for one entity."""
        return [found for found in self.chunks if (found.kind, found.id) == (kind, number)]

    def payload(self, kind: Kind, number: int) -> bytes:
        """All payload that came for one entity."""
        return b"".join(found.payload or b"" for found in self.of(kind, number))

    def credit(self, kind: Kind, number: int) -> int:
        """All credit that came for one entity."""
        return sum(found.credit or 0 for found in self.of(kind, number))

    def close(self) -> None:
        """Closes the socket."""
        self.read(False)
        self.sock.close()

    # Within

    def _on_readable(self) -> None:
        try:
            data = self.sock.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.received += len(data)
            found, self._rest = read_chunks(self._rest + data)
            self.chunks += found
        else:
            self.over = True
            self.read(False)
        self._changed.set()
