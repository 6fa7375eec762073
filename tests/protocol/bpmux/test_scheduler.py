"""Who goes first, proved by counting bytes: urgent chunks, then sinks in turn."""

from __future__ import annotations

import random

import pytest

from aqueduct.config import Bpmux as Settings
from aqueduct.dissect.bpmux import Chunk, read_chunks
from aqueduct.protocol.bpmux.state import SINK_OUT, Entity
from tests.protocol.bpmux.pair import Lone

CHUNK = 1000
AMPLE = "ff" + "7f" + "ff" * 7


def sinks(count: int, chunk: int = CHUNK) -> tuple[Lone, list[Entity]]:
    """So many open sinks with more credit than they need."""
    lone = Lone(Settings(chunk=chunk))
    opened = [lone.mux.open_sink() for _ in range(count)]
    lone.take_all()
    lone.receive("".join(f"a8{entity.identifier:02x}{AMPLE}" for entity in opened))
    lone.drain()
    return lone, opened


def taken(lone: Lone, limit: int = 1 << 30) -> list[Chunk]:
    return list(read_chunks(lone.take(limit)))


def test_sinks_take_turns_by_bytes() -> None:
    """Small writes or large ones: each sink sends a chunk's worth of bytes, then the next."""
    lone, (first, second, third) = sinks(3)
    lone.mux.write(first, bytes(50 * CHUNK))
    for _ in range(500):
        lone.mux.write(second, bytes(100), whole=True)
    lone.mux.write(third, [bytes(30)] * 1700)
    turns: list[tuple[int, int]] = []
    for chunk in taken(lone, 90 * CHUNK):
        size = len(chunk.payload)
        assert size <= CHUNK
        if turns and turns[-1][0] == chunk.identifier:
            turns[-1] = (chunk.identifier, turns[-1][1] + size)
        else:
            turns.append((chunk.identifier, size))
    assert [who for who, _ in turns] == [1 + index % 3 for index in range(len(turns))]
    sent = [sum(size for who, size in turns if who == number) for number in (1, 2, 3)]
    assert max(sent) - min(sent) <= 2 * CHUNK
    assert min(sent) >= 25 * CHUNK


@pytest.mark.parametrize("limit", [20 * CHUNK, CHUNK, CHUNK // 3, 1])
def test_a_small_message_waits_for_what_was_taken_alone(limit: int) -> None:
    """However much is queued elsewhere: what is taken next begins with it."""
    lone, (*bulky, sparse) = sinks(9)
    for entity in bulky:
        lone.mux.write(entity, bytes(1 << 20))
    lone.take(10 * CHUNK)  # they were idle too; now each had its first turn
    for _ in range(50):
        lone.take(min(limit, 3 * CHUNK))
        lone.mux.write(sparse, b"now", whole=True)
        first, *rest = taken(lone, limit)
        assert (first.identifier, first.payload) == (sparse.identifier, b"now")
        assert all(chunk.identifier != sparse.identifier for chunk in rest)
        while sparse.queue:  # it comes to be idle again
            lone.take(CHUNK)


def test_who_was_idle_goes_first_for_one_turn_only() -> None:
    """A sink that writes again and again gets its share, not the whole line."""
    lone, (bulky, greedy) = sinks(2)
    lone.mux.write(bulky, bytes(1 << 20))
    sent = {bulky: 0, greedy: 0}
    for _ in range(400):
        lone.mux.write(greedy, bytes(CHUNK))
        for chunk in taken(lone, CHUNK):
            entity = lone.mux.find(SINK_OUT, chunk.identifier)
            assert entity is not None
            sent[entity] += len(chunk.payload)
    assert sent[bulky] >= 0.45 * sum(sent.values())
    assert sent[greedy] >= 0.45 * sum(sent.values())


def test_credit_that_comes_in_drops_does_not_overtake() -> None:
    """A sink whose credit is renewed all the time is not taken for one that was idle."""
    lone = Lone(Settings(chunk=CHUNK))
    dripping, steady = lone.mux.open_sink(), lone.mux.open_sink()
    lone.take_all()
    lone.receive(f"a802{AMPLE}")
    lone.mux.write(dripping, bytes(1 << 20))
    lone.mux.write(steady, bytes(1 << 20))
    sent = {1: 0, 2: 0}
    for _ in range(400):
        lone.receive("a801f903e8")
        for chunk in taken(lone, CHUNK):
            sent[chunk.identifier] += len(chunk.payload)
    assert sent[2] >= 0.45 * sum(sent.values())
    assert sent[1] >= 0.3 * sum(sent.values())


def test_urgent_chunks_go_before_all_payloads() -> None:
    lone, (bulky, other, done) = sinks(3)
    mux = lone.mux
    lone.receive("500900" + "a800" + AMPLE)
    mux.write(bulky, bytes(1 << 20))
    lone.take(CHUNK)
    mux.credit(other, 5)
    mux.end(done, b"code", drop=True)
    mux.ping(mux.top_stream, 0.0)
    mux.message(b"limit", urgent=True)
    lone.receive("420900" + "a402")
    chunks = taken(lone, CHUNK)
    kinds = [(chunk.type, chunk.identifier, chunk.flags) for chunk in chunks]
    urgent = kinds[: next(k for k, kind in enumerate(kinds) if kind[1] == bulky.identifier)]
    assert sorted(urgent) == sorted(
        [(2, 2, 8), (2, 3, 2), (5, 0, 4), (3, 0, 16), (5, 9, 1), (2, 2, 0)]
    )


def test_openings_keep_their_order() -> None:
    lone = Lone(Settings(chunk=CHUNK))
    bulky = lone.mux.open_sink(bytes(100 * CHUNK))
    lone.receive("a80064")
    lone.take(10)
    lone.receive(f"a801{AMPLE}")
    lone.take(10 * CHUNK)
    rng = random.Random(5)
    later = [lone.mux.open_sink(bytes(rng.randrange(50)) or None) for _ in range(200)]
    for entity in later[::7]:
        lone.mux.end(entity, drop=True)
    order = [chunk.identifier for chunk in taken(lone, 20 * CHUNK) if chunk.identifier != 1]
    assert order == [entity.identifier for entity in later]
    assert bulky.queued > 0


@pytest.mark.parametrize("limit", [100, 5000, 1 << 20])
def test_a_take_holds_its_limit(limit: int) -> None:
    lone, entities = sinks(5, chunk=1 << 18)
    for entity in entities:
        lone.mux.write(entity, bytes(1 << 21))
    for _ in range(8):
        _, size, written = lone.mux.take(limit)
        assert limit <= size <= limit + 1024 + 64
        assert sum(count for _, count in written) >= size - 12 * len(written)


def test_a_payload_that_may_not_be_cut_pays_for_it_later() -> None:
    lone, (large, small) = sinks(2)
    for _ in range(20):
        lone.mux.write(large, bytes(10 * CHUNK), whole=True)
    for _ in range(2000):
        lone.mux.write(small, bytes(100), whole=True)
    sent = {1: 0, 2: 0}
    for _ in range(100):
        for chunk in taken(lone, CHUNK):
            sent[chunk.identifier] += len(chunk.payload)
    assert abs(sent[1] - sent[2]) <= 12 * CHUNK
    assert min(sent.values()) >= 40 * CHUNK


def test_what_is_written_is_told_for_each_sink() -> None:
    lone, entities = sinks(4)
    total = dict.fromkeys(entities, 0)
    for index, entity in enumerate(entities):
        lone.mux.write(entity, bytes(1000 * (index + 1)))
        lone.mux.end(entity, b"end")
    while not lone.mux.idle:
        _, _, written = lone.mux.take(700)
        for entity, size in written:
            total[entity] += size
    assert list(total.values()) == [1000, 2000, 3000, 4000]
