"""Two cores and two applications that do whatever they like: what must hold whatever happens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduct.config import Bpmux as Settings
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import (
    REQ_IN,
    REQ_OUT,
    SINK_IN,
    SINK_OUT,
    STREAM_IN,
    STREAM_OUT,
    Entity,
)


class Log:
    """The user of an entity: what was said on it, what was heard, and who is its other side."""

    def __init__(self) -> None:
        self.said = b""
        self.heard = b""
        self.end: bytes | None = None
        self.heard_end: bytes | None = None
        self.dropped = False
        self.other: Log | None = None
        self.missing = 0
        self.over = False


class Person:
    """One application. It gives credit back when it likes, and answers when it likes."""

    def __init__(self, rng: random.Random, mux: Mux, name: int) -> None:
        self.rng = rng
        self.mux = mux
        self.name = name
        self.wire: list[bytes] = []
        self.debts: list[tuple[Entity, int]] = []
        self.alive: list[Entity] = []
        self.logs: list[Log] = []
        self.counter = 0
        for entity in (mux.top_sink, mux.top_stream):
            self.own(entity)
        self.asked = 0
        self.pongs = 0

    def own(self, entity: Entity) -> Log:
        log = entity.user = Log()
        self.alive.append(entity)
        self.logs.append(log)
        return log

    def bytes_of(self, most: int) -> bytes:
        size = self.rng.choice([0, 1, self.rng.randrange(most), self.rng.randrange(most)])
        self.counter += 1
        return bytes((self.counter * 7 + self.name + index) % 256 for index in range(size))

    # What it does

    def act(self) -> None:
        often = [self.write] * 3 + [self.give] * 2
        self.rng.choice([self.open, self.end, self.sign, *often])()

    def open(self) -> None:
        rng, mux = self.rng, self.mux
        if len(self.alive) > 12:
            return
        credit = rng.choice([0, 9, 50])
        data = self.bytes_of(60)
        total = len(data) + rng.choice([0, 10]) if rng.random() < 0.3 and data else 0
        kind = rng.randrange(4)
        sink = None
        if kind == 0:
            entity = mux.request(data, credit=credit, total=total)
        elif kind == 1:
            whole = rng.random() < 0.3
            entity = mux.open_sink(data, credit=credit, total=total, whole=whole)
        elif kind == 2:
            entity = mux.open_stream(data, credit=credit, total=total)
        else:
            sink, entity = mux.open_duplex(data, credit=credit, total=total)
        log = self.own(entity)
        log.said += data
        log.missing = max(total - len(data), 0)
        if sink is not None:
            self.own(sink)

    def write(self) -> None:
        rng = self.rng
        entity = rng.choice(self.alive)
        log: Log = entity.user
        if log.over or entity.gone or entity.end_in:
            return
        if log.missing:
            data = self.bytes_of(20)[: log.missing]
            log.missing -= len(data)
            log.said += data
            self.mux.write(entity, data)
        elif entity.place in (SINK_OUT, SINK_IN) and log.end is None:
            data = self.bytes_of(200)
            how = rng.randrange(4)
            log.said += data
            if how == 0 and len(data) < 50:
                self.mux.write(entity, data, whole=True)
            elif how == 1 and data:
                extra = rng.choice([0, 5])
                log.missing = extra
                self.mux.write(entity, data, total=len(data) + extra)
            else:
                self.mux.write(entity, [data[:10], memoryview(data)[10:]])
        elif entity.place == REQ_IN and log.end is None and not entity.ending:
            data = self.bytes_of(60)
            extra = rng.choice([0, 0, 5]) if data else 0
            log.said += data
            log.missing = extra
            in_pieces = extra > 0 or rng.random() < 0.5
            self.mux.respond(entity, data, total=(len(data) + extra) * in_pieces)

    def give(self) -> None:
        if self.debts and self.rng.random() < 0.7:
            self.mux.consumed(*self.debts.pop(self.rng.randrange(len(self.debts))))
        else:
            self.mux.consumed(self.rng.choice(self.alive), self.rng.choice([1, 10, 100]))

    def end(self) -> None:
        entity = self.rng.choice(self.alive[2:] or [None])
        if entity is not None and self.rng.random() < 0.5:
            self.end_of(entity, drop=self.rng.random() < 0.4)

    def end_of(self, entity: Entity, *, drop: bool = False) -> None:
        log: Log = entity.user
        if log.over or log.missing or log.end is not None or entity.gone or entity.end_in:
            return
        if entity.ending or (drop and entity.items and entity.items[0].begun):
            return
        log.end = self.bytes_of(9)
        log.dropped = drop
        unseen = entity.place == REQ_OUT and not entity.opened and drop
        self.mux.end(entity, log.end, drop=drop)
        if unseen:
            log.over = True
            self.alive.remove(entity)

    def sign(self) -> None:
        entity = self.rng.choice(self.alive)
        if not (entity.ending or entity.end_out or entity.gone or entity.end_in):
            self.mux.ping(entity, float(self.asked))
            self.asked += 1

    # What it hears

    def listen(self, other: Person) -> None:
        for event in self.mux.events_received():
            kind, entity = event[0], event[1]
            assert kind != events.FAILED, entity
            if kind == events.OPENED:
                halves = [entity] if entity.twin is None else [entity, entity.twin]
                for half in halves:
                    place = {REQ_IN: REQ_OUT, STREAM_IN: SINK_OUT, SINK_IN: STREAM_OUT}[half.place]
                    theirs = other.mux.find(place, half.identifier)
                    assert theirs is not None
                    log = self.own(half)
                    log.other, theirs.user.other = theirs.user, log
            elif kind == events.PAYLOAD:
                _, _, data, whole, payer, charged = event
                entity.user.heard += data
                self.debts.append((payer, charged))
                if whole and entity.place == REQ_OUT:
                    entity.user.dropped = True  # the rest of a request that is answered
                    self.over(entity)
            elif kind == events.ENDED:
                entity.user.heard_end = event[2]
                self.over(entity)
            elif kind in (events.ACKNOWLEDGED, events.ABANDONED):
                self.over(entity)
            elif kind == events.PONG:
                self.pongs += 1

    def over(self, entity: Entity) -> None:
        assert not entity.user.over, "one last event"
        entity.user.over = True
        self.alive.remove(entity)

    def speak(self, most: int) -> None:
        buffers, size, _ = self.mux.take(self.rng.choice([1, 30, 1000, 1 << 20]))
        data = b"".join(buffers)
        assert len(data) == size
        while data:
            cut = self.rng.randrange(1, most)
            self.wire.append(data[:cut])
            data = data[cut:]


def talk(seed: int, steps: int) -> list[Person]:
    rng = random.Random(seed)
    whole = rng.random() < 0.5
    limits = Settings(chunk=rng.choice([20, 100, 1 << 18]), opening=rng.choice([5, 1 << 16]))
    people = [Person(rng, Mux(limits, whole=whole), name) for name in (0, 100)]
    left, right = people
    for mine, theirs in ((left, right), (right, left)):
        mine.mux.top_sink.user.other = theirs.mux.top_stream.user
        mine.mux.top_stream.user.other = theirs.mux.top_sink.user
        mine.mux.credit(mine.mux.top_stream, 100)
    most = rng.choice([2, 10, 1000])
    for _ in range(steps):
        speaker, hearer = rng.choice([(left, right), (right, left)])
        what = rng.randrange(4)
        if what <= 1:
            speaker.act()
        elif what == 2:
            speaker.speak(most)
        elif speaker.wire:
            hearer.mux.receive_data(speaker.wire.pop(0))
            hearer.listen(speaker)
    settle(left, right)
    return people


def settle(left: Person, right: Person) -> None:
    """Everybody finishes what is begun, gives credit, and ends what is open."""
    for _ in range(400):
        for speaker, hearer in ((left, right), (right, left)):
            for payer, charged in speaker.debts:
                speaker.mux.consumed(payer, charged)
            speaker.debts.clear()
            for entity in list(speaker.alive):
                log: Log = entity.user
                if entity.gone or entity.end_in:
                    continue
                if log.missing:
                    data = bytes(log.missing)
                    log.said += data
                    log.missing = 0
                    speaker.mux.write(entity, data)
                top = entity in (speaker.mux.top_sink, speaker.mux.top_stream)
                if not top and entity.place not in (STREAM_OUT, REQ_OUT):
                    speaker.end_of(entity)
                if entity.credit_in + entity.grant < 500:
                    speaker.mux.consumed(entity, 1000)
            speaker.speak(1 << 20)
            for data in speaker.wire:
                hearer.mux.receive_data(data)
                hearer.listen(speaker)
            speaker.wire.clear()
        if left.mux.idle and right.mux.idle and len(left.alive) == len(right.alive) == 2:
            return
    raise AssertionError(f"it does not come to an end: {left.alive} {right.alive}")


def check(people: list[Person]) -> int:
    """The claims; returns how many bytes were said."""
    total = 0
    for person in people:
        mux = person.mux
        assert mux.error is None
        assert [mux.count(place) for place in range(6)] == [0, 0, 1, 0, 1, 0]
        for log in person.logs:
            total += len(log.said)
            if log.other is None:
                assert log.dropped, "it was never heard of"
                continue
            heard = log.other.heard
            if log.heard_end is not None or log.dropped:
                assert log.said.startswith(heard), "what was heard was said, in order"
            else:
                assert log.said == heard, "all bytes arrive"
            if log.other.heard_end is not None:
                assert log.other.heard_end == log.end
    left, right = (person.mux for person in people)
    for mine, theirs in ((left, right), (right, left)):
        assert mine.top_sink.credit_out == theirs.top_stream.credit_in
    return total


@pytest.mark.requirement("BP-5")
@pytest.mark.requirement("BP-15")
@pytest.mark.requirement("BP-R8")
@given(st.integers(0, 1 << 32))
@settings(max_examples=60)
def test_whatever_they_do_all_bytes_arrive_and_nothing_is_left(seed: int) -> None:
    check(talk(seed, 400))


def test_they_do_much() -> None:
    """The claims are about something: these seeds use every part."""
    heard: dict[int, int] = dict.fromkeys(range(10), 0)
    said = 0
    for seed in range(30):
        people = talk(seed, 600)
        said += check(people)
        for person in people:
            heard[events.PONG] += person.pongs
            heard[events.ENDED] += sum(log.heard_end is not None for log in person.logs)
            heard[events.OPENED] += len(person.logs)
    assert said > 50_000
    assert heard[events.PONG] > 50
    assert heard[events.ENDED] > 200
    assert heard[events.OPENED] > 500
