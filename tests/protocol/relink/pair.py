"""Two links joined by connections that can be cut at any byte, and the ways of one link alone."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from aqueduct.config import Relink as Settings
from aqueduct.errors import LinkUnknown
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.handshake import Opening
from aqueduct.protocol.relink.link import Link

__all__ = ["LinkPair", "Lone", "Side", "plain_parts"]


def plain_parts(parts: Any) -> tuple[bytes, ...]:
    """The parts of a message as bytes."""
    return tuple(bytes(part) for part in parts)


class Side:
    """One link, and what it reported."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.events: list[events.Event] = []
        self.messages: dict[int, list[tuple[bytes, ...]]] = defaultdict(list)
        """The messages of each channel, in order; with ``pieces`` each has one part."""
        self._pieces: dict[int, list[bytes]] = defaultdict(list)

    def drain(self) -> list[events.Event]:
        """The events since the last call; they stay in ``events``."""
        new = self.link.events_received()
        for event in new:
            if event[0] == events.PIECE:
                self._pieces[event[1]].append(bytes(event[4]))
            elif event[0] == events.MESSAGE:
                parts = event[3]
                if parts is None:
                    parts = [b"".join(self._pieces.pop(event[1], []))]
                self.messages[event[1]].append(plain_parts(parts))
        self.events += new
        return new

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        """What was reported of one kind, without the kind."""
        self.drain()
        return [event[1:] for event in self.events if event[0] == kind]

    def take(self, now: float, limit: int = 1 << 20) -> bytes:
        """The bytes of one ``take``, held to what it says of itself."""
        buffers, size = self.link.take(limit, now)
        data = b"".join(map(bytes, buffers))
        assert len(data) == size
        assert size % 8 == 0
        return data

    def take_all(self, now: float = 0.0) -> bytes:
        """Everything that can leave now."""
        taken = []
        while not self.link.idle:
            taken.append(self.take(now))
        return b"".join(taken)


class LinkPair:
    """Two links, and the bytes under way between them. ``now`` is the clock of both."""

    def __init__(
        self,
        opening: Opening | None = None,
        settings: Settings | None = None,
        *,
        pieces: bool = False,
        start: int = 0,
    ) -> None:
        opening = opening or Opening("test")
        self.now = 100.0
        self.sides = tuple(
            Side(Link(opening, settings, connector=connector, pieces=pieces, start=start))
            for connector in (True, False)
        )
        self.left, self.right = self.sides
        self.wires = [b"", b""]
        """Bytes on their way to the other side."""
        self.connect(resumed=False)

    def connect(self, *, resumed: bool = True) -> None:
        for side in self.sides:
            side.link.connected(self.now, resumed=resumed)

    def cut(self) -> None:
        """All that is under way is lost."""
        self.wires = [b"", b""]
        for side in self.sides:
            side.link.disconnected()
            side.drain()

    def move(self, index: int, size: int | None = None) -> int:
        """Brings ``size`` bytes of one side to the other; None: all. Returns how many."""
        if self.sides[index].link.error is None:
            self.wires[index] += self.sides[index].take_all(self.now)
        wire = self.wires[index]
        size = len(wire) if size is None else min(size, len(wire))
        self.wires[index] = wire[size:]
        other = self.sides[1 - index]
        if size:
            other.link.receive_data(wire[:size], self.now)
        other.drain()
        assert other.link.error is None, other.link.error
        return size

    def settle(self, seconds: float = 0.1) -> None:
        """Brings everything to its end, acknowledgements that wait for their time included."""
        for _ in range(3):
            while self.move(0) + self.move(1):
                pass
            self.now += seconds
            for side in self.sides:
                side.link.handle_deadline(self.now)


class Lone(Side):
    """One link, to which a test says what the peer would send."""

    def __init__(
        self,
        opening: Opening | None = None,
        settings: Settings | None = None,
        *,
        connector: bool = True,
        pieces: bool = False,
        connected: bool = True,
    ) -> None:
        link = Link(opening or Opening("test"), settings, connector=connector, pieces=pieces)
        super().__init__(link)
        if connected:
            link.connected(0.0, resumed=False)

    def receive(self, *data: bytes, now: float = 0.0) -> list[events.Event]:
        """Feeds the bytes; returns what was reported."""
        for piece in data:
            self.link.receive_data(piece, now)
        return self.drain()

    def fails(self, *data: bytes) -> str:
        """Feeds the bytes, which must end the link; returns the error's text."""
        self.receive(*data)
        assert self.link.error is not None
        assert not isinstance(self.link.error, LinkUnknown)
        assert self.events[-1] == (events.FAILED, self.link.error)
        assert self.link.idle
        return str(self.link.error)
