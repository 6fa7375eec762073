"""What an SocketReader tells directly is what the core's events would say, in the same order."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from aqueduct._speedups.bpmux.chunks import CREDIT, END, PAYLOAD, encode_head, encode_rest
from aqueduct._speedups.bpmux.entities import Entity
from aqueduct._speedups.stream.socket_reader import Outcome, SocketReader
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import STREAM_IN

KiB = 1 << 10
SINK = 2

Said = tuple[str, int, bytes]


class Near:
    """One end of a socket pair; the other is written to by hand."""

    def __init__(self, *, tells: bool, takes: bool = True) -> None:
        self.here, self.peer = socket.socketpair()
        self.here.setblocking(False)
        self.mux = Mux(brief=True)
        self.mux.credit(self.mux.top_stream, 64 * KiB)
        self.mux.take(KiB)
        self.takes = takes
        self.said: list[Said] = []
        """What came, be it told or an event."""
        self.told = 0
        self.intake = SocketReader(
            self.mux.reading,
            self.here.fileno(),
            None,
            memoryview(bytearray(64 * KiB)),
            lambda entity: None,
            lambda: None,
        )
        if tells:
            self.mux.reading.tell(self.arrival, self.piece, self.acknowledgement)

    def close(self) -> None:
        self.here.close()
        self.peer.close()

    def arrival(self, entity: Entity, data: Any) -> bool:
        if self.takes:
            self.told += 1
            self.said.append(("arrived", entity.identifier, bytes(data)))
        return self.takes

    def piece(self, entity: Entity, data: Any) -> bool:
        if self.takes:
            self.told += 1
            self.said.append(("piece", entity.identifier, bytes(data)))
        return self.takes

    def acknowledgement(self, entity: Entity) -> None:
        self.told += 1
        self.said.append(("acknowledged", entity.identifier, b""))

    def receive(self, data: bytes) -> list[events.Event]:
        """As a carrier does; what were events."""
        self.peer.sendall(data)
        found: list[events.Event] = []
        while True:
            outcome, _ = self.intake.read(1 << 20)
            if outcome == Outcome.CORE:
                self.mux.go_on(self.intake.step)
                batch = self.mux.events_received()
                found += batch
                self.said += [said for event in batch if (said := self.of(event)) is not None]
                assert self.mux.error is None
            if outcome == Outcome.DRAINED or self.intake.drained:
                return found

    def of(self, event: events.Event) -> Said | None:
        kind = event[0]
        if kind == events.PAYLOAD:
            return ("piece", event[1].identifier, bytes(event[2]))
        if kind == events.ARRIVED:
            return ("arrived", event[1].identifier, bytes(event[2]))
        if kind == events.ACKNOWLEDGED:
            return ("acknowledged", event[1].identifier, b"")
        if kind == events.OPENED:
            self.mux.credit(event[1], 64 * KiB)
            self.mux.take(KiB)
        if kind == events.ENDED:
            return ("ended", event[1].identifier, b"")
        return None


@pytest.fixture
def near() -> Iterator[Near]:
    made = Near(tells=True)
    yield made
    made.close()


def plain(identifier: int, payload: bytes) -> bytes:
    return encode_head(SINK, PAYLOAD, identifier, len(payload)) + payload


def brief(identifier: int, payload: bytes) -> bytes:
    head = encode_head(SINK, PAYLOAD | CREDIT | END, identifier, len(payload))
    return head + payload + encode_rest(CREDIT | END, 9, 0)


def end(identifier: int) -> bytes:
    return encode_head(SINK, END, identifier) + encode_rest(END, 0, 0)


def test_what_comes_in_one_chunk_is_told(near: Near) -> None:
    assert near.receive(brief(1, b"one") + brief(2, b"two")) == []
    assert near.said == [("arrived", 1, b"one"), ("arrived", 2, b"two")]
    assert near.mux.take(KiB)[1] > 0, "both are acknowledged"
    assert near.mux.find(STREAM_IN, 1) is None


def test_bytes_of_a_known_stream_are_told(near: Near) -> None:
    assert near.receive(plain(1, b"opens"))[0][0] == events.OPENED
    near.said.clear()
    assert near.receive(plain(1, b"goes on") + brief(2, b"another")) == []
    assert near.receive(plain(1, bytes(100))[:50]) == []
    assert near.receive(plain(1, bytes(100))[50:]) == []
    assert [(kind, number) for kind, number, _ in near.said] == [
        ("piece", 1), ("arrived", 2), ("piece", 1), ("piece", 1),
    ]  # fmt: skip
    assert near.told == 4


def test_the_last_bytes_and_their_end_are_events_together(near: Near) -> None:
    """So who reads them can tell that they are the last."""
    near.receive(plain(1, b"opens"))
    kinds = [event[0] for event in near.receive(plain(1, b"last") + end(1))]
    assert kinds == [events.PAYLOAD, events.ENDED]
    assert near.told == 0


def test_an_acknowledgement_of_a_sink_is_told(near: Near) -> None:
    near.receive(encode_head(5, CREDIT, 0) + encode_rest(CREDIT, KiB, 0))  # for opening chunks
    near.mux.open_ended([b"abc"], credit=9, keep=9, identifier=1)
    near.mux.take(KiB)
    assert near.receive(bytes.fromhex("a101")) == []
    assert near.said == [("acknowledged", 1, b"")]


def test_what_is_not_taken_is_an_event() -> None:
    near = Near(tells=True, takes=False)
    near.receive(plain(1, b"opens"))
    found = near.receive(plain(1, b"goes on") + brief(2, b"another") + plain(1, b"and on"))
    assert [event[0] for event in found] == [events.PAYLOAD, events.ARRIVED, events.PAYLOAD]
    assert near.told == 0
    near.close()


def test_nothing_overtakes_an_event(near: Near) -> None:
    """An opening chunk is an event: what stands behind it in the same read is one, too."""
    found = near.receive(plain(1, b"opens") + brief(2, b"another") + plain(3, b"opens"))
    assert [event[0] for event in found] == [
        events.OPENED, events.PAYLOAD, events.ARRIVED, events.OPENED, events.PAYLOAD,
    ]  # fmt: skip
    assert near.told == 0


@pytest.mark.parametrize("seed", range(40))
def test_any_stream_of_chunks_is_told_in_its_order(seed: int) -> None:
    sides = [Near(tells=True), Near(tells=False)]
    chance = random.Random(seed)
    known: list[int] = []
    fresh: list[int] = []
    number = 0
    sent: list[Said] = []
    pending = b""
    for _ in range(120):
        what = chance.choice(["open", "brief", "brief", "plain", "plain", "plain", "end"])
        payload = chance.randbytes(chance.choice([1, 20, 300]))
        if what == "brief" or (what == "open" and len(known + fresh) < 4):
            number += 1
            pending += brief(number, payload) if what == "brief" else plain(number, payload)
            sent.append(("arrived" if what == "brief" else "piece", number, payload))
            fresh += [number] if what == "open" else []
        elif known:
            which = chance.choice(known)
            if what == "end":
                known.remove(which)
                pending += end(which)
                sent.append(("ended", which, b""))
            else:
                pending += plain(which, payload)
                sent.append(("piece", which, payload))
        if chance.random() < 0.4:
            cut = chance.choice([len(pending), chance.randrange(len(pending) + 1)])
            for side in sides:
                if cut:
                    side.receive(pending[:cut])
                side.mux.take(64 * KiB)  # acknowledges, and grants
            pending = pending[cut:]
            if not pending:  # what was opened has its credit by now
                known, fresh = known + fresh, []
    for side in sides:
        side.receive(pending)
        side.close()
        assert joined(side.said) == joined(sent)
    assert sides[0].told > 10 and sides[1].told == 0


def joined(said: list[Said]) -> list[Said]:
    """With pieces of one stream that follow each other as one; what came whole may have come so."""
    result: list[Said] = []
    for kind, number, data in said:
        if kind == "arrived":  # cut by a read, it is pieces and an end
            result += [("piece", number, data), ("ended", number, b"")]
        elif kind == "piece" and result and result[-1][:2] == ("piece", number):
            result[-1] = ("piece", number, result[-1][2] + data)
        elif kind != "piece" or data:
            result.append((kind, number, data))
    return result
