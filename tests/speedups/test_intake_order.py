"""What a SocketReader reads is reported in the order in which it was sent."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from aqueduct._speedups.bpmux.chunks import CREDIT, END, PAYLOAD, encode_head, encode_rest
from aqueduct._speedups.stream.socket_reader import Outcome, SocketReader
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from tests.support.selection import mostly_long

KiB = 1 << 10
SINK = 2

Said = tuple[str, int, bytes]


class Near:
    """One end of a socket pair; the other is written to by hand."""

    def __init__(self) -> None:
        self.here, self.peer = socket.socketpair()
        self.here.setblocking(False)
        self.mux = Mux()
        self.mux.credit(self.mux.top_stream, 64 * KiB)
        self.mux.take(KiB)
        self.said: list[Said] = []
        """What was reported."""
        self.reader = SocketReader(
            self.mux.receiver,
            self.here.fileno(),
            None,
            memoryview(bytearray(64 * KiB)),
            lambda entity: None,
            lambda: None,
        )

    def close(self) -> None:
        self.here.close()
        self.peer.close()

    def receive(self, data: bytes) -> list[events.Event]:
        """As a carrier does; returns the events."""
        self.peer.sendall(data)
        found: list[events.Event] = []
        while True:
            outcome, _ = self.reader.read(1 << 20)
            if outcome == Outcome.CORE:
                self.mux.go_on(self.reader.step)
                batch = self.mux.events_received()
                found += batch
                self.said += [said for event in batch if (said := self.of(event)) is not None]
                assert self.mux.error is None
            if outcome == Outcome.DRAINED or self.reader.drained:
                return found

    def of(self, event: events.Event) -> Said | None:
        kind = event[0]
        if kind == events.PAYLOAD:
            return ("piece", event[1].identifier, bytes(event[2]))
        if kind == events.OPENED:
            self.mux.credit(event[1], 64 * KiB)
            self.mux.take(KiB)
        if kind == events.ENDED:
            return ("ended", event[1].identifier, b"")
        return None


@pytest.fixture
def near() -> Iterator[Near]:
    made = Near()
    yield made
    made.close()


def plain(identifier: int, payload: bytes) -> bytes:
    return encode_head(SINK, PAYLOAD, identifier, len(payload)) + payload


def brief(identifier: int, payload: bytes) -> bytes:
    head = encode_head(SINK, PAYLOAD | CREDIT | END, identifier, len(payload))
    return head + payload + encode_rest(CREDIT | END, 9, 0)


def end(identifier: int) -> bytes:
    return encode_head(SINK, END, identifier) + encode_rest(END, 0, 0)


def test_the_last_bytes_and_their_end_are_events_together(near: Near) -> None:
    """So who reads them can tell that they are the last."""
    near.receive(plain(1, b"opens"))
    kinds = [event[0] for event in near.receive(plain(1, b"last") + end(1))]
    assert kinds == [events.PAYLOAD, events.ENDED]


def test_nothing_overtakes_an_event(near: Near) -> None:
    near.receive(plain(1, b"opens") + brief(2, b"another") + plain(3, b"opens"))
    assert near.said == [
        ("piece", 1, b"opens"), ("piece", 2, b"another"), ("ended", 2, b""), ("piece", 3, b"opens"),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", mostly_long(range(40), *range(15)))
def test_any_stream_of_chunks_is_reported_in_its_order(near: Near, seed: int) -> None:
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
            sent.append(("piece", number, payload))
            if what == "brief":
                sent.append(("ended", number, b""))
            else:
                fresh.append(number)
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
            if cut:
                near.receive(pending[:cut])
            near.mux.take(64 * KiB)  # acknowledges, and grants
            pending = pending[cut:]
            if not pending:  # what was opened has its credit by now
                known, fresh = known + fresh, []
    near.receive(pending)
    assert joined(near.said) == joined(sent)


def joined(said: list[Said]) -> list[Said]:
    """With pieces of one stream that follow each other as one."""
    result: list[Said] = []
    for kind, number, data in said:
        if kind == "piece" and result and result[-1][:2] == ("piece", number):
            result[-1] = ("piece", number, result[-1][2] + data)
        elif kind != "piece" or data:
            result.append((kind, number, data))
    return result
