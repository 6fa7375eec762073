"""Two cores joined by a link that keeps every byte, and the ways of one core to speak alone."""

from __future__ import annotations

from typing import Any

from aqueduct.config import Bpmux as Settings
from aqueduct.errors import RemoteProtocolError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import PLACES, Entity

__all__ = ["Lone", "MuxPair", "Side"]


class Side:
    """One core, what it reported, and what it sent."""

    def __init__(self, mux: Mux) -> None:
        self.mux = mux
        self.events: list[events.Event] = []
        self.sent = b""

    def drain(self) -> list[events.Event]:
        """The events since the last call; they stay in ``events``."""
        new = self.mux.events_received()
        self.events += new
        return new

    def take(self, limit: int = 1 << 20) -> bytes:
        """The bytes of one ``take``, held to what it says of itself."""
        buffers, size, written = self.mux.take(limit)
        data = b"".join(buffers)
        assert len(data) == size
        assert sum(count for _, count in written) <= size
        self.sent += data
        return data

    def take_all(self) -> bytes:
        """Everything that can leave now."""
        taken = []
        while not self.mux.idle:
            taken.append(self.take())
        return b"".join(taken)

    def of(self, kind: int) -> list[tuple[Any, ...]]:
        """What was reported of one kind, without the kind; clears nothing."""
        self.drain()
        return [event[1:] for event in self.events if event[0] == kind]

    def last(self, kind: int = events.OPENED) -> Entity:
        """The entity of the last event of that kind."""
        entity = self.of(kind)[-1][0]
        assert isinstance(entity, Entity)
        return entity

    @property
    def error(self) -> RemoteProtocolError | None:
        return self.mux.error

    def delivered(self) -> list[tuple[str, int, str, bytes]]:
        """What the application got: place, identifier, payload or end, bytes put together."""
        self.drain()
        result: list[tuple[str, int, str, bytes]] = []
        pieces: dict[Entity, bytes] = {}
        for event in self.events:
            if event[0] == events.PAYLOAD:
                _, entity, data, whole, _, _ = event
                pieces[entity] = pieces.get(entity, b"") + data
                if whole:
                    payload = pieces.pop(entity)
                    result.append((PLACES[entity.place], entity.identifier, "payload", payload))
            elif event[0] == events.ENDED:
                entity = event[1]
                result.append((PLACES[entity.place], entity.identifier, "end", event[2]))
        assert not pieces, "a payload was begun and not ended"
        return result


class Lone(Side):
    """One core whose peer is the test: bytes go in as hex."""

    def __init__(self, settings: Settings | None = None, **options: bool) -> None:
        super().__init__(Mux(settings, **options))

    def receive(self, text: str, step: int = 0) -> None:
        """Bytes of the peer, in pieces of ``step`` bytes (0: all at once)."""
        data = bytes.fromhex(text)
        for at in range(0, len(data), step or len(data) or 1):
            self.mux.receive_data(data[at : at + (step or len(data))])

    def answer(self) -> str:
        """What leaves now, as hex."""
        return self.take_all().hex()


class MuxPair:
    """Two sides; ``run`` lets bytes pass until nothing moves."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        top: int = 1 << 20,
        limit: int = 1 << 20,
        chop: int = 0,
        **options: bool,
    ) -> None:
        self.left = Side(Mux(settings, **options))
        self.right = Side(Mux(settings, **options))
        self.limit = limit
        self.chop = chop
        if top:
            for side in (self.left, self.right):
                side.mux.credit(side.mux.top_stream, top)
            self.run()
            self.left.drain()
            self.right.drain()
            self.left.events.clear()
            self.right.events.clear()

    def run(self) -> None:
        moved = True
        while moved:
            moved = self.step(self.left, self.right)
            moved = self.step(self.right, self.left) or moved

    def step(self, sender: Side, receiver: Side) -> bool:
        """One ``take`` from one to the other; whether there was any."""
        data = sender.take(self.limit)
        for at in range(0, len(data), self.chop or len(data) or 1):
            receiver.mux.receive_data(data[at : at + (self.chop or len(data))])
        sender.drain()
        receiver.drain()
        assert receiver.error is None, receiver.error
        return bool(data)
