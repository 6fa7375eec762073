"""The way out of a byte stream: buffers gathered for the kernel, and takes until it is full."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from aqueduct._speedups.base.buffers import bytes_copied
from aqueduct._speedups.bpmux.chunks import CREDIT, PING
from aqueduct._speedups.bpmux.scheduler import write_out
from aqueduct._speedups.io.gather import IovecWriter
from aqueduct.config import Bpmux as Settings
from aqueduct.dissect.bpmux import Chunk, read_chunks
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import SINK_OUT, Entity
from tests.speedups.strategies import piece_of

KiB = 1 << 10
MiB = 1 << 20
LARGE = 4096
FULL = 16 * KiB - 40
"""Bytes of a take that is a little less than a chunk."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection whose kernel holds little, neither of which waits."""
    one, other = socket.socketpair()
    for end in (one, other):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * KiB)
    with one, other:
        yield one, other


def read_all(end: socket.socket) -> bytes:
    """What is there now."""
    data = b""
    try:
        while piece := end.recv(MiB):
            data += piece
    except BlockingIOError:
        pass
    return data


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def test_small_buffers_are_joined_and_large_ones_stay() -> None:
    out = IovecWriter()
    large, view = content(1, LARGE), memoryview(content(2, 3 * LARGE))[100:]
    before = bytes_copied()
    given: list[bytes | bytearray | memoryview] = [
        b"ab",
        b"",
        bytearray(b"cd"),
        large,
        view,
        b"x",
        b"y" * (LARGE - 1),
    ]
    out.extend(given)
    assert out.buffers == [b"abcd", large, view, b"x" + b"y" * (LARGE - 1)]
    assert out.buffers[1] is large
    assert bytes_copied() - before == 2 + 2 + 1 + LARGE - 1
    assert out.size == out.left == sum(len(each) for each in given)
    out.clear()
    assert (out.buffers, out.size, out.left) == ([], 0, 0)


def test_pieces_of_a_batch_leave_like_other_buffers(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    out, data = IovecWriter(), content(3, 25 * LARGE)
    out.extend([b"head", piece_of(data), piece_of(data[:2048])])
    assert [type(each) for each in out.buffers] == [bytes, memoryview, bytes]
    arrived = b""
    while out.left:
        out.send(ends[0].fileno())
        arrived += read_all(ends[1])
        assert len(arrived) + out.left == 4 + len(data) + 2048
        assert b"".join(out.buffers) == (b"head" + data + data[:2048])[len(arrived) :]
    assert arrived == b"head" + data + data[:2048]


def test_what_is_given_lives_until_it_has_left() -> None:
    out = IovecWriter()
    block = bytearray(LARGE)
    out.add(block)
    with pytest.raises(BufferError):
        block.append(1)
    out.clear()
    block.append(1)


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_arrives_however_the_kernel_cuts(
    seed: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    """More parts than one call takes, added at any moment; what is left is what was not read."""
    rng = random.Random(seed)
    sender, reader = ends
    out = IovecWriter()
    given = got = b""
    pieces = [content(seed + size, size) for size in (1, 300, LARGE, LARGE + 7, 20_000)]
    for count in (1, 5, 300, 1, 2):
        for _ in range(count):
            piece = rng.choice(pieces)
            forms: list[bytes | bytearray | memoryview] = [piece, memoryview(piece)]
            out.add(rng.choice([*forms, bytearray(piece)]))
            given += piece
        sent = out.send(sender.fileno())
        assert out.left == len(given) - len(got) - sent
        got += read_all(reader)
        assert b"".join(out.buffers) == given[len(got) :]
    while out.left:
        out.send(sender.fileno())
        got += read_all(reader)
    assert got == given
    assert out.send(sender.fileno()) == 0


def test_a_full_kernel_takes_nothing_and_a_dead_one_says_why(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    sender, reader = ends
    out = IovecWriter()
    out.add(bytes(MiB))
    while out.send(sender.fileno()):
        pass
    left = out.left
    assert 0 < left < MiB
    assert out.send(sender.fileno()) == 0
    assert out.left == left
    reader.close()
    with pytest.raises(BrokenPipeError):
        out.send(sender.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        out.send(-1)


def sinks(count: int, chunk: int) -> tuple[Mux, list[Entity]]:
    """So many open sinks with more credit than they need."""
    mux = Mux(Settings(chunk=chunk))
    entities = [mux.open_sink() for _ in range(count)]
    while not mux.idle:
        mux.take(MiB)
    for entity in entities:
        entity.credit_out = 1 << 40
    return mux, entities


@pytest.mark.parametrize("limit", [10 * KiB, 64 * KiB])
def test_takes_leave_whole_and_one_after_the_other(
    limit: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    sender, reader = ends
    mux, entities = sinks(3, 16 * KiB)
    payloads = {entity: content(entity.identifier, 300 * KiB) for entity in entities}
    for entity in entities:
        mux.turns.write_run(entity, [payloads[entity]])
    out = IovecWriter()
    told = dict.fromkeys(entities, 0)
    data = b""
    while not (mux.idle and not out.left):
        written: list[tuple[Entity, int]] = []
        before, taken = sum(told.values()), 900 * KiB - sum(each.queued for each in entities)
        write_out(mux.scheduler, out, sender.fileno(), limit, MiB, written)
        for entity, size in written:
            told[entity] += size
        # A take is told when all of it has left, and no other is begun before.
        now = 900 * KiB - sum(each.queued for each in entities)
        assert now - sum(told.values()) <= limit + KiB
        assert sum(told.values()) >= before
        assert bool(out.left) == (now > sum(told.values()))
        assert now >= taken
        data += read_all(reader)
    assert told == dict.fromkeys(entities, 300 * KiB)
    found = dict.fromkeys((entity.identifier for entity in entities), b"")
    for chunk in read_chunks(data):
        found[chunk.identifier] += chunk.payload
    assert found == {entity.identifier: payloads[entity] for entity in entities}


def test_write_out_ends_with_its_budget_and_takes_nothing_without_a_limit(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    sender, reader = ends
    mux, (entity,) = sinks(1, 64 * KiB)
    mux.turns.write_run(entity, [bytes(100 * KiB)])
    out = IovecWriter()
    written: list[tuple[Entity, int]] = []
    assert write_out(mux.scheduler, out, sender.fileno(), 0, MiB, written) == 0
    sent = write_out(mux.scheduler, out, sender.fileno(), 4 * KiB, 7 * KiB, written)
    assert 8 * KiB <= sent <= 8 * KiB + 32
    # What is of one entity in a row is told as one.
    assert written == [(entity, 100 * KiB - entity.queued)]
    assert not out.left
    assert len(read_all(reader)) == sent
    out.add(b"words")
    assert write_out(mux.scheduler, out, sender.fileno(), 0, MiB, written) == 5
    assert read_all(reader) == b"words"


def test_what_little_is_left_of_a_turn_is_no_chunk_of_its_own(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Takes may be a little less than the chunk, for whole segments: each is one chunk still."""
    sender, reader = ends
    chunk, limit = 16 * KiB, 16 * KiB - 40
    mux, entities = sinks(2, chunk)
    for entity in entities:
        mux.turns.write_run(entity, [bytes(100 * limit)])
    out = IovecWriter()
    data = b""
    for _ in range(200):
        write_out(mux.scheduler, out, sender.fileno(), limit, limit, [])
        data += read_all(reader)
    assert mux.idle
    chunks = list(read_chunks(data))
    assert {len(each.payload) for each in chunks} == {limit}
    # And they are taken in turns.
    assert [each.identifier for each in chunks] == [entity.identifier for entity in entities] * 100


def test_more_than_a_little_of_a_turn_is_used(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, reader = ends
    mux, (first, second) = sinks(2, 16 * KiB)
    for entity in (first, second):
        mux.turns.write_run(entity, [bytes(32 * KiB)])
    out = IovecWriter()
    write_out(mux.scheduler, out, sender.fileno(), 16 * KiB - 100, MiB, [])
    sizes = [(each.identifier, len(each.payload)) for each in read_chunks(read_all(reader))]
    one, other = first.identifier, second.identifier
    assert sizes[:2] == [(one, 16 * KiB - 100), (one, 100 - 5)]
    assert sizes[2][0] == other  # in what is left of the same take


def taken(mux: Mux) -> list[Chunk]:
    """What leaves now."""
    buffers, _, _ = mux.take(MiB)
    return list(read_chunks(b"".join(buffers)))


def test_credit_goes_first_in_a_chunk_of_its_own() -> None:
    mux, (bulk,) = sinks(1, MiB)
    stream = mux.open_stream(b"", credit=1)
    assert taken(mux)
    mux.turns.write_run(bulk, [bytes(100)])
    for size in (0, 300, 5):
        mux.turns.give_back(stream, size)
    assert list(mux.turns.urgent) == [stream]  # once
    first, second = taken(mux)
    assert (first.identifier, first.credit, first.flags) == (stream.identifier, 305, CREDIT)
    assert (second.identifier, len(second.payload)) == (bulk.identifier, 100)
    assert (stream.grant, stream.credit_in) == (0, 306)
    mux.ping(stream, 0.0)
    mux.turns.give_back(stream, 7)
    (both,) = taken(mux)
    assert (both.credit, both.flags) == (7, CREDIT | PING)
    mux.end(stream)
    assert taken(mux)
    mux.turns.give_back(stream, 1)  # which the peer could use no more
    assert not taken(mux)


def test_a_plain_run_is_queued_and_all_else_refused_unchanged() -> None:
    mux, (first, second) = sinks(2, KiB)
    turns = mux.turns
    assert turns.write_run(first, [b"ab", b"c"])
    assert turns.write_run(first, [b"d"])
    assert turns.write_run(second, [b""])
    assert (first.queued, second.queued, list(turns.fresh)) == (4, 0, [first])
    mux.write(second, b"whole", whole=True)
    assert not turns.write_run(second, [b"e"])
    assert second.queued == 5
    mux.end(first)
    assert not turns.write_run(first, [b"e"])
    unopened = mux.open_sink()
    assert unopened.place == SINK_OUT
    assert not turns.write_run(unopened, [b"e"])
    assert not turns.write_run(mux.top_sink, [b"e"])
    assert not unopened.queued and not mux.top_sink.queued


@pytest.mark.parametrize("seed", range(6))
def test_of_what_is_offered_only_what_the_kernel_begins_with_is_taken(
    seed: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Whoever comes next waits for one chunk at most, though the kernel was offered four."""
    rng = random.Random(seed)
    sender, reader = ends
    limit = 8 * KiB - 40
    mux, (bulk, other) = sinks(2, 8 * KiB)
    whole = content(seed, MiB)
    while bulk.queued < MiB:
        mux.turns.write_run(bulk, [whole[bulk.queued :][: rng.choice([100, 3000, 5000, 70_000])]])
    out = IovecWriter()
    data, told, late = b"", 0, 0
    while not (mux.idle and not out.left):
        written: list[tuple[Entity, int]] = []
        sent = write_out(mux.scheduler, out, sender.fileno(), limit, MiB, written, None, 3)
        told += sum(size for entity, size in written if entity is bulk)
        begun = MiB - bulk.queued - told
        assert 0 <= begun <= limit
        assert bool(begun) == bool(out.left) or not sent
        if out.left and late < 20:
            mux.turns.write_run(other, [b"%d" % late])
            assert MiB - bulk.queued - told == begun
            late += 1
        data += reader.recv(rng.choice([2 * KiB, 20 * KiB, MiB]))
        data += read_all(reader) if rng.random() < 0.3 else b""
    data += read_all(reader)
    assert told == MiB
    chunks = list(read_chunks(data))
    mine = [chunk.payload for chunk in chunks if chunk.identifier == bulk.identifier]
    assert b"".join(mine) == whole
    assert max(map(len, mine)) <= limit
    theirs = b"".join(chunk.payload for chunk in chunks if chunk.identifier == other.identifier)
    assert theirs == b"".join(b"%d" % number for number in range(late))
    assert late == 20


@pytest.mark.parametrize("seed", range(8))
def test_runs_of_any_length_leave_whole_whatever_credit_comes_when(
    seed: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Nothing is lost, repeated or sent on no credit, and what was not taken can be ended."""
    rng = random.Random(seed)
    sender, reader = ends
    limit = 8 * KiB - 40
    mux, (bulk,) = sinks(1, 8 * KiB)
    granted = bulk.credit_out = rng.choice([1, 100, 3 * limit])
    keep = bulk.keep
    bulk.credit_out += keep
    whole, data, out, told = b"", b"", IovecWriter(), 0
    for _ in range(200):
        if rng.random() < 0.6:
            run = rng.randbytes(rng.choice([1, 500, limit, 4 * limit, 4 * limit + 4096, 50_000]))
            mux.turns.write_run(bulk, [run])
            whole += run
        if rng.random() < 0.6:
            more = rng.choice([1, 700, limit, 5 * limit + 1, 100_000])
            granted += more
            bulk.credit_out += more
            mux.turns.wake(bulk)
        written: list[tuple[Entity, int]] = []
        write_out(
            mux.scheduler, out, sender.fileno(), limit, MiB, written, None, rng.choice([3, 4])
        )
        told += sum(size for _, size in written)
        assert bulk.credit_out - keep == granted - (len(whole) - bulk.queued)
        data += reader.recv(rng.choice([2 * KiB, 20 * KiB, MiB])) if out.left or written else b""
    granted += len(whole)
    bulk.credit_out += len(whole)
    mux.end(bulk)
    mux.turns.wake(bulk)
    while not (mux.idle and not out.left):
        written = []
        write_out(mux.scheduler, out, sender.fileno(), limit, MiB, written, None, 3)
        told += sum(size for _, size in written)
        data += read_all(reader)
    data += read_all(reader)
    chunks = list(read_chunks(data))
    assert b"".join(chunk.payload for chunk in chunks) == whole
    assert told == len(whole)
    assert max(len(chunk.payload) for chunk in chunks) <= limit
    assert bulk.credit_out - keep == granted - len(whole) >= 0


@pytest.fixture
def packets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection that keeps apart what was written apart."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (one, other):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MiB)
    with one, other:
        yield one, other


def calls_for(
    packets: tuple[socket.socket, socket.socket], mux: Mux, budget: int = MiB, offered: int = 3
) -> list[list[int]]:
    """The chunks of each call of the kernel, by the sizes of their payloads."""
    sender, reader = packets
    write_out(mux.scheduler, IovecWriter(), sender.fileno(), FULL, budget, [], None, offered)
    found: list[list[int]] = []
    while True:
        try:
            data = reader.recv(MiB)
        except BlockingIOError:
            return found
        found.append([len(chunk.payload) for chunk in read_chunks(data)])


@pytest.mark.skipif(sys.platform != "linux", reason="packets of a Unix socket are Linux's")
class TestOffers:
    """How many chunks one call has: those of who is alone, as long as they are alike and next."""

    def test_four_chunks_leave_at_once(self, packets: tuple[socket.socket, socket.socket]) -> None:
        mux, (entity,) = sinks(1, 16 * KiB)
        mux.turns.write_run(entity, [bytes(10 * FULL)])
        assert calls_for(packets, mux) == [[FULL] * 4, [FULL] * 4, [FULL] * 2]
        assert mux.idle
        assert not entity.queued
        mux.turns.write_run(entity, [bytes(FULL)])
        assert calls_for(packets, mux) == [[FULL]]

    @pytest.mark.parametrize("rest", [1, 70, FULL - 1])
    def test_what_is_left_at_the_end_leaves_with_them(
        self, packets: tuple[socket.socket, socket.socket], rest: int
    ) -> None:
        mux, (entity,) = sinks(1, 16 * KiB)
        mux.turns.write_run(entity, [bytes(2 * FULL), bytes(rest)])
        assert calls_for(packets, mux) == [[FULL] * 2 + [rest]]
        assert mux.idle
        assert not entity.queued

    @pytest.mark.parametrize(
        ("rest", "calls"),
        [(4096, [[FULL] * 4 + [4096]]), (4097, [[FULL] * 4, [4097]])],
        ids=["little", "more"],
    )
    def test_a_little_more_than_is_offered_is_worth_no_call_of_its_own(
        self, packets: tuple[socket.socket, socket.socket], rest: int, calls: list[list[int]]
    ) -> None:
        mux, (entity,) = sinks(1, 16 * KiB)
        mux.turns.write_run(entity, [bytes(4 * FULL + rest)])
        assert calls_for(packets, mux) == calls
        assert mux.idle

    def test_a_last_chunk_that_ends_the_entity_too_is_not_offered(
        self, packets: tuple[socket.socket, socket.socket]
    ) -> None:
        mux, (entity,) = sinks(1, 16 * KiB)
        mux.turns.write_run(entity, [bytes(3 * FULL)])
        mux.end(entity)
        assert calls_for(packets, mux) == [[FULL] * 2, [FULL]]
        assert mux.idle

    def test_nothing_is_offered_unless_it_is_asked_for(
        self, packets: tuple[socket.socket, socket.socket]
    ) -> None:
        mux, (entity,) = sinks(1, 16 * KiB)
        mux.turns.write_run(entity, [bytes(3 * FULL)])
        assert calls_for(packets, mux, offered=0) == [[FULL]] * 3

    def test_entities_that_are_not_alone_take_turns(
        self, packets: tuple[socket.socket, socket.socket]
    ) -> None:
        mux, entities = sinks(2, 16 * KiB)
        for entity in entities:
            mux.turns.write_run(entity, [bytes(3 * FULL)])
        assert calls_for(packets, mux)[:4] == [[FULL]] * 4

    def test_the_budget_bounds_what_is_offered(
        self, packets: tuple[socket.socket, socket.socket]
    ) -> None:
        mux, (entity,) = sinks(1, 16 * KiB)
        mux.turns.write_run(entity, [bytes(10 * FULL)])
        assert calls_for(packets, mux, budget=2 * FULL + 100) == [[FULL] * 2, [FULL]]

    def test_credit_bounds_what_is_offered(
        self, packets: tuple[socket.socket, socket.socket]
    ) -> None:
        mux, (entity,) = sinks(1, 16 * KiB)
        entity.keep, entity.credit_out = 1000, 1000 + 2 * FULL + 100
        mux.turns.write_run(entity, [bytes(10 * FULL)])
        assert calls_for(packets, mux) == [[FULL] * 2 + [100]]
        assert entity.credit_out == 1000
        assert entity.queued == 8 * FULL - 100

    def test_a_chunk_of_very_many_buffers_is_not_offered(
        self, packets: tuple[socket.socket, socket.socket]
    ) -> None:
        mux, (entity,) = sinks(1, 16 * KiB)
        mux.turns.write_run(entity, [bytes(FULL)])
        mux.turns.write_run(entity, [bytes(16)] * 1024)
        mux.turns.write_run(entity, [bytes(2 * FULL)])
        found = calls_for(packets, mux)
        assert found[0] == [FULL]
        assert sum(map(sum, found)) == 3 * FULL + 16 * KiB


def test_none_is_no_entity() -> None:
    """It is an error, and never memory of somebody else's."""
    turns: Any = Mux().turns
    for use in (
        turns.wake,
        turns.goes_first,
        turns.make_urgent,
        lambda none: turns.give_back(none, 5),
    ):
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
            use(None)
    assert turns.idle
