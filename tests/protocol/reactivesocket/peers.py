"""One connection to which a test says what the peer would send, and two that are joined."""

from __future__ import annotations

from typing import Any

from aqueduct._speedups.reactivesocket import reactive_frames as codec
from aqueduct.config import ReactiveSocket as Settings
from aqueduct.protocol.reactivesocket import events
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection
from tests.reference.reactivesocket import TYPES, Frame, decode, encode

__all__ = ["CODES", "Lone", "Pair", "frame", "response"]

CODES = {name: code for code, name in TYPES.items()}


def frame(name: str, stream: int = 0, data: bytes = b"", *, flags: int = 0, n: int = 0) -> bytes:
    """A frame as the peer writes it."""
    return encode(Frame(CODES[name], stream, flags, n, data=data))


def response(stream: int, data: bytes = b"", bits: str = "be") -> bytes:
    """A RESPONSE with some of the bits begin, end and complete."""
    flags = {"b": codec.BEGIN, "e": codec.END, "c": codec.COMPLETE}
    return frame("RESPONSE", stream, data, flags=sum(flags[bit] for bit in bits))


class Lone:
    """One connection. A server has had its SETUP and accepted it, a client's SETUP has left."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        client: bool = False,
        begun: bool = True,
        **how: Any,
    ) -> None:
        self.core = ReactiveConnection(settings, client=client, **how)
        self.heard: list[events.Event] = []
        if begun and client:
            self.sent()
        elif begun:
            self.receive(frame("SETUP"))
            self.core.accept()
            self.heard.clear()

    def receive(self, *data: bytes, now: float = 0.0) -> list[events.Event]:
        """Feeds the bytes; returns what was reported."""
        for piece in data:
            self.core.receive_data(piece, now)
        return self.drain()

    def drain(self) -> list[events.Event]:
        """What was reported since; buffers as bytes."""
        new = [tuple(map(_plain, event)) for event in self.core.events_received()]
        self.heard += new
        return new

    def sent(self) -> list[Frame]:
        """All that leaves."""
        buffers, size = self.core.take(1 << 40)
        data = b"".join(map(bytes, buffers))
        assert len(data) == size
        assert self.core.idle
        return decode(data)

    def fails(self, *data: bytes) -> str:
        """Feeds bytes that must end the connection; returns the error's text."""
        self.receive(*data)
        assert self.core.error is not None
        assert self.heard[-1] == (events.FAILED, self.core.error)
        assert not self.core.requested and not self.core.responding
        return str(self.core.error)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [bytes(part) for part in value]
    if isinstance(value, (str, int, Exception)):
        return value
    return bytes(value)


class Pair:
    """A client and a server, whose bytes move when a test says so."""

    def __init__(self, settings: Settings | None = None, **how: Any) -> None:
        self.client = Lone(settings, client=True, begun=False, **how)
        self.server = Lone(settings, begun=False, **how)
        self.move()
        self.server.core.accept()
        self.server.heard.clear()

    def move(self, limit: int = 1 << 40) -> None:
        """Brings all that waits to the other side, until nothing does."""
        moved = True
        while moved:
            moved = False
            for one, other in ((self.client, self.server), (self.server, self.client)):
                buffers, size = one.core.take(limit)
                if size:
                    moved = True
                    other.receive(b"".join(map(bytes, buffers)))
