"""One side of a pair whose core is muted: the test speaks for it, and reads what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Config
from aqueduct.protocol.common import effects
from tests.reference.codec import Frame
from tests.speedups.strategies import as_tuple, message
from tests.support.pair import Pair, Side

__all__ = ["CLOSE", "FORGET", "Peer", "Said", "message", "route"]

CLOSE = ("CLOSE_RECEIVER",)
FORGET = ("FORGET_CHANNEL",)
route = codec.encode_route_to


@dataclass
class Said:
    """One stream of the side under test, as its effects made it."""

    data: bytearray = field(default_factory=bytearray)
    fin: bool = False
    reset: int | None = None
    """The code, if it was reset."""

    def frames(self, *, from_server: bool) -> list[Frame]:
        """What stands there whole; a MESSAGE is (name, number, headers, attachments, payload)."""
        decoder = codec.FrameDecoder(from_server=from_server)
        decoder.feed(bytes(self.data))
        return [as_tuple(frame) for frame in iter(decoder.next, None)]


class Peer:
    """The muted side of a pair, and ``other``, the side under test.

    ``Peer()`` speaks for a client that is connected, ``Peer("server")`` for a server;
    ``connect=False`` begins before the first byte.
    """

    def __init__(
        self,
        side: str = "client",
        config: Config = DEFAULT,
        *,
        connect: bool = True,
        **options: Any,
    ) -> None:
        self.pair = Pair(config, connect=connect, **options)
        if connect:
            self.pair.advance(1)
        self.is_server = side == "server"
        self.side: Side = getattr(self.pair, side)
        self.other: Side = self.pair.client if self.is_server else self.pair.server
        self.side.mute = True
        self.core = self.other.core
        self._read = len(self.other.applied)
        self._streams: dict[int, Said] = {}
        self.stops: dict[int, int] = {}
        """My streams that it stopped, and the code."""
        self.datagrams: list[bytes] = []

    # What the test says

    def say(self, *frames: bytes, fin: bool = True) -> int:
        """A sequence on a stream of its own; returns the stream."""
        stream: int = self.side.carrier._opened
        self.more(stream, *frames, fin=fin)
        return stream

    def more(self, stream: int, *frames: bytes, fin: bool = False) -> None:
        """The next bytes of a stream."""
        self.side.carrier.write(stream, list(frames), fin)
        self.side.carrier.flush()
        self.pair.run()

    def reset(self, stream: int, code: int = 0) -> None:
        self.side.carrier.reset(stream, code)
        self.side.carrier.flush()
        self.pair.run()

    def datagram(self, *frames: bytes) -> None:
        self.side.carrier.send_datagram(b"".join(frames))
        self.side.carrier.flush()
        self.pair.run()

    # What it is told

    def look(self) -> dict[int, Said]:
        """The streams of the side under test, by number, since this object was made."""
        self.pair.run()
        for effect in self.other.applied[self._read :]:
            kind = effect[0]
            if kind == effects.WRITE:
                said = self._streams.setdefault(effect[1], Said())
                said.data.extend(b"".join(bytes(part) for part in effect[2]))
                said.fin = effect[3]
            elif kind == effects.RESET:
                self._streams.setdefault(effect[1], Said()).reset = effect[2]
            elif kind == effects.STOP:
                self.stops[effect[1]] = effect[2]
            elif kind == effects.DATAGRAM:
                self.datagrams.append(effect[1])
        self._read = len(self.other.applied)
        return self._streams

    def told(self, channel: int | None = None) -> list[list[Frame]]:
        """Its sequences without leading VERSIONs; those for one channel without ROUTE_TO too."""
        found = []
        for said in self.look().values():
            frames = self.frames(said)
            while frames and frames[0][0] == "VERSION":
                del frames[0]
            if channel is None:
                found.append(frames)
            elif frames and frames[0] == ("ROUTE_TO", channel):
                found.append(frames[1:])
        return found

    def streams(self, channel: int) -> list[Said]:
        """Its streams for one channel."""
        return [
            said for said in self.look().values() if ("ROUTE_TO", channel) in self.frames(said)[:2]
        ]

    def frames(self, said: Said) -> list[Frame]:
        return said.frames(from_server=not self.is_server)

    def datagram_frames(self) -> list[list[Frame]]:
        """Its datagrams, decoded."""
        self.look()
        found = []
        for data in self.datagrams:
            decoder = codec.FrameDecoder(from_server=not self.is_server, datagram=True)
            decoder.feed(data)
            found.append([as_tuple(frame) for frame in iter(decoder.next, None)])
        return found

    @property
    def closed_with(self) -> int | None:
        """The code with which it closed the connection."""
        return self.other.close_code
