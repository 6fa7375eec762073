"""bpmux: any bytes in any pieces to one core, and chunks of both sides beside the plain model.

The first byte of an input says which. Bytes: a length, so many bytes that say how to cut the rest,
the rest. Chunks: each takes as many bytes as it needs.
"""

from __future__ import annotations

from typing import Any, Final

from aqueduct.config import Bpmux as Settings
from aqueduct.errors import FrameError, LimitExceeded, SequenceError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import REQ_IN, SINK_IN, STREAM_IN, Entity
from tests.fuzz.source import Source
from tests.protocol.bpmux.beside import CREDITS, play
from tests.reference import bpmux as model

__all__ = ["ALLOWED", "target"]

ALLOWED: Final = (FrameError, SequenceError, LimitExceeded)
"""What may end a connection for what a peer sent; each is told by its type."""
SETTINGS: Final = Settings(entities=8, unanswered_pings=20, payload_bytes=300, opening=50, chunk=64)
STEPS: Final = 60


def target(data: bytes) -> None:
    """One input."""
    source = Source(data)
    if source.byte() & 1:
        steps: list[tuple[str, model.Chunk, int]] = []
        while not source.empty and len(steps) < STEPS:
            steps.append(step(source))
        play(CREDITS + steps)
    else:
        plan = Source(source.take(source.byte()))
        compare(source.rest(), plan)


def step(source: Source) -> tuple[str, model.Chunk, int]:
    """A chunk of one side, and where it is cut."""
    what = source.byte()
    kind = model.TYPES[(what & 7) % 7]
    flags = source.byte()
    sizes = source.byte()
    chunk = model.Chunk(
        kind,
        what >> 3 & 3,
        bytes(sizes & 7) if flags & 16 else None,
        source.number() if flags & 8 else None,
        bool(flags & 4),
        bytes(sizes >> 3 & 3) if flags & 2 else None,
        bool(flags & 1),
        sizes >> 5 if flags & 32 else 0,
    )
    return "send" if what & 32 else "recv", chunk, flags >> 6


class Ear:
    """A core with something of each kind open, and what its application hears."""

    def __init__(self, *, whole: bool = False) -> None:
        self.mux = mux = Mux(SETTINGS, whole=whole, regrant=False)
        self.heard: list[Any] = []
        self.pieces: dict[Entity, bytes] = {}
        mux.credit(mux.top_stream, 400)
        mux.request(credit=40, identifier=1)
        mux.open_sink(b"queued", credit=40, identifier=2)
        mux.open_stream(credit=40, identifier=3)
        mux.open_duplex(credit=40, identifier=4)
        mux.take(1 << 20)
        mux.receive_data(bytes.fromhex("100100" + "500200" + "900300" + "d00400"))
        for place, identifier in ((REQ_IN, 1), (STREAM_IN, 2), (SINK_IN, 3), (STREAM_IN, 4)):
            entity = mux.find(place, identifier)
            assert entity is not None
            mux.credit(entity, 300)
        mux.take(1 << 20)
        mux.events_received()

    def listen(self) -> None:
        for event in self.mux.events_received():
            kind, entity = event[0], event[1]
            if kind == events.PAYLOAD:
                self.hear(entity, bytes(event[2]))
                if event[3]:
                    self.heard.append((kind, repr(entity), self.pieces.pop(entity)))
            elif kind == events.FAILED:
                assert isinstance(entity, ALLOWED), entity
                assert self.mux.error is entity
                self.heard.append((kind, type(entity), str(entity)))
            else:
                self.heard.append((kind, repr(entity), *event[2:3]))

    def hear(self, entity: Entity, data: bytes) -> None:
        self.pieces[entity] = self.pieces.get(entity, b"") + data

    def answer(self) -> bytes:
        buffers, size, _ = self.mux.take(1 << 20)
        data = b"".join(buffers)
        assert len(data) == size
        return data


def compare(data: bytes, plan: Source) -> None:
    """However bytes are cut, and wherever they land, the same is heard and answered."""
    at_once, cut, joined = Ear(), Ear(), Ear(whole=True)
    for ear in (at_once, joined):
        ear.mux.receive_data(data)
        ear.mux.receive_eof()
        ear.listen()
    at = 0
    while at < len(data):
        how = plan.byte()
        size = len(data) if plan.empty else 1 + (how & 63)
        expected = cut.mux.expected() if how & 64 else None
        if expected is not None:
            entity, missing = expected
            part = data[at : at + min(size, missing)]
            cut.hear(entity, part)
            cut.mux.landed(len(part))
        else:
            part = data[at : at + size]
            cut.mux.receive_data(memoryview(part) if how & 128 else part)
        cut.listen()
        at += len(part)
    cut.mux.receive_eof()
    cut.listen()
    assert cut.heard == at_once.heard
    assert cut.answer() == (answer := at_once.answer())
    if joined.mux.error is None:
        assert joined.heard == at_once.heard
        assert joined.answer() == answer
    elif not isinstance(joined.mux.error, LimitExceeded):
        assert joined.heard == at_once.heard
