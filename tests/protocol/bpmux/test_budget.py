"""What one core lets its peer have under way (BP-R12), and what it takes back (BP-R15)."""

from __future__ import annotations

import random

import pytest

from aqueduct._speedups.bpmux.chunks import ChunkDecoder, encode_head
from aqueduct.config import Bpmux as Settings
from aqueduct.errors import ConfigError, FrameError, LocalProtocolError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.state import SINK_OUT, STREAM_IN, STREAM_OUT, Entity
from tests.protocol.bpmux.pair import Lone, MuxPair

KiB = 1 << 10
LIMIT = 256 * KiB
TIGHT = Settings(connection_bytes=LIMIT, payload_bytes=64 * KiB, entities=64)


def bounded(lone: Lone) -> int:
    """Bytes that are held and that may come."""
    budget = lone.mux._budget
    assert budget is not None
    maps = lone.mux._state.maps
    owed = sum(each.credit_in + each.grant for known in maps for each in known.values())
    assert budget.granted == owed
    return budget.held + budget.granted


@pytest.mark.requirement("BP-R13")
def test_identifier_0_with_duplex_is_refused_by_the_codec() -> None:
    for data in (b"\xd0\x00\x00", b"\xd0\x00", b"\xe0\x01\xd0\x00\x01a", b"\xde\x00"):
        decoder = ChunkDecoder()
        with pytest.raises(FrameError, match=r"a Duplex with identifier 0.*\(BP-R13\)"):
            for byte in data:
                decoder.feed(bytes([byte]))
                decoder.next()
        with pytest.raises(FrameError, match="identifier 0"):
            decoder.feed(b"")
    with pytest.raises(LocalProtocolError, match="identifier 0"):
        encode_head(6, 16, 0, 0)
    assert encode_head(6, 16, 1, 0) == b"\xd0\x01\x00"
    assert encode_head(0, 16, 0, 0) == b"\x10\x00\x00"  # requests may use 0


@pytest.mark.requirement("BP-R12")
def test_credit_is_granted_while_there_is_room() -> None:
    lone = Lone(TIGHT, whole=True)
    mux = lone.mux
    mux.credit(mux.top_stream, 64 * KiB)
    opened: list[Entity] = []
    for number in range(1, 60):
        lone.receive(f"50{number:02x}00")
        opened.append(lone.last())
        mux.consumed(opened[-1], 50 * KiB, 0)
        assert bounded(lone) <= LIMIT
    lone.take_all()
    assert all(entity.credit_in >= KiB for entity in opened)
    assert sum(entity.credit_in for entity in opened) < LIMIT
    # What is waited for has all that it is owed, and only one that is not in Partial mode has.
    for entity in opened[-2:]:
        mux.wait_for(entity)
    assert opened[-2].credit_in + opened[-2].grant == 50 * KiB
    assert opened[-1].credit_in + opened[-1].grant < 50 * KiB
    lone.take_all()
    lone.receive("503af9c800" + "00" * (50 * KiB))
    assert lone.error is None
    assert lone.of(events.PAYLOAD)[-1][0] is opened[-2]
    mux.wait_no_more(opened[-2])
    mux.consumed(opened[-2], 50 * KiB)
    assert opened[-1].credit_in + opened[-1].grant == 50 * KiB


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("seed", range(40))
def test_a_peer_that_keeps_within_its_credit_is_bounded(seed: int) -> None:
    """Any order of openings, payloads whole or in pieces, ends and readers."""
    rng = random.Random(seed)
    pair = MuxPair(TIGHT, top=0, whole=True)
    left, right = pair.left, pair.right
    right.mux.credit(right.mux.top_stream, 32 * KiB)
    pair.run()
    waiting: list[tuple[Entity, int, int]] = []
    readers: set[Entity] = set()
    budget = right.mux._budget
    assert budget is not None
    sinks: list[Entity] = []

    def drain() -> None:
        for event in right.events:
            if event[0] == events.OPENED:
                right.mux.consumed(event[1], 64 * KiB, 0)
            elif event[0] == events.PAYLOAD:
                if event[1] in readers:
                    readers.discard(event[1])
                    right.mux.wait_no_more(event[1])
                    right.mux.consumed(event[4], event[5], len(event[2]))
                else:
                    waiting.append((event[4], event[5], len(event[2])))
            elif event[0] == events.ENDED:
                waiting.append((event[3], event[4], len(event[2])))
        right.events.clear()

    for _ in range(120):
        choice = rng.random()
        if choice < 0.3 and len(sinks) < 40:
            size = rng.choice([0, 10, 40 * KiB])
            sinks.append(
                left.mux.open_sink(bytes(size), credit=10, total=size if size > 20 * KiB else 0)
            )
        elif choice < 0.7 and sinks:
            sink = rng.choice(sinks)
            size = rng.choice([1, 2000, 50 * KiB])
            if not sink.ending:
                left.mux.write(sink, bytes(size), total=size)
        elif choice < 0.75 and sinks:
            sink = sinks.pop(rng.randrange(len(sinks)))
            if not sink.ending:
                left.mux.end(sink)
        elif choice < 0.85 and waiting:
            payer, charged, size = waiting.pop(rng.randrange(len(waiting)))
            right.mux.consumed(payer, charged, size)
        elif choice < 0.9 and right.mux.count(STREAM_IN):
            entity = rng.choice(list(right.mux._state.maps[STREAM_IN].values()))
            if entity not in readers:
                readers.add(entity)
                right.mux.wait_for(entity)
        pair.run()
        drain()
        # Beside it: one payload that is completed, and one window.
        assert budget.held + budget.granted <= LIMIT + 2 * 64 * KiB
        assert budget.held == sum(each[2] for each in waiting) + sum(
            len(each.joined) for each in right.mux._state.maps[STREAM_IN].values()
        )
    # Whoever waits for everything, and takes it, gets everything.
    right.mux.wait_for(right.mux.top_stream)
    for _ in range(3000):
        if not waiting and not any(sink.items for sink in sinks):
            break
        for entity in right.mux._state.maps[STREAM_IN].values():
            if entity not in readers:
                readers.add(entity)
                right.mux.wait_for(entity)
        while waiting:
            right.mux.consumed(*waiting.pop())
        pair.run()
        drain()
    assert not any(sink.items for sink in sinks)
    assert budget.held == 0


@pytest.mark.requirement("BP-R15")
def test_what_is_taken_back_is_never_sent() -> None:
    lone = Lone()
    mux = lone.mux
    request = mux.request(b"abc")
    sink = mux.open_sink(b"abc", whole=True)
    stream = mux.open_stream(b"abc")
    out, into = mux.open_duplex(b"abc")
    assert lone.answer() == ""
    for entity in (request, sink, stream, out):
        assert mux.take_back(entity)
        assert not mux.take_back(entity)
    assert not mux.take_back(into)
    assert (mux.count(SINK_OUT), mux.count(STREAM_OUT), mux.count(0)) == (1, 1, 0)
    lone.receive("a80064")
    assert lone.answer() == ""
    assert lone.drain() == [(events.CREDIT, mux.top_sink)]
    known = mux.request(b"abc")
    assert lone.answer() == "10010361" + "6263"
    assert not mux.take_back(known)


@pytest.mark.requirement("BP-R15")
def test_nothing_is_kept_of_many_that_are_taken_back() -> None:
    """While the transport takes nothing the scheduler does not look at them."""
    lone = Lone()
    turns = lone.mux.turns
    for _ in range(5000):
        assert lone.mux.take_back(lone.mux.request(bytes(10)))
        assert len(turns.fresh) + len(turns.bulky) + len(turns.urgent) <= 130
    assert lone.answer() == ""


@pytest.mark.requirement("BP-R15")
def test_what_is_withdrawn_leaves_room_for_what_follows() -> None:
    lone = Lone()
    mux = lone.mux
    lone.receive("900100" + "100200")
    sink, request = lone.of(events.OPENED)
    item = mux.write(sink[0], bytes(10), total=10)
    answer = mux.respond(request[0], b"never")
    assert item is not None and answer is not None
    assert mux.withdraw(sink[0], item) and mux.withdraw(request[0], answer)
    assert not mux.withdraw(sink[0], item)
    mux.write(sink[0], b"abc", whole=True)
    mux.respond(request[0], b"now")
    lone.receive("880105" + "080205")
    assert lone.answer() == "7001" + "03616263" + "3002" + "036e6f77"
    begun = mux.write(sink[0], b"abcdef", total=6)
    assert begun is not None
    assert lone.answer() == "e006" + "7001026162"
    assert not mux.withdraw(sink[0], begun)


@pytest.mark.requirement("BP-R15")
def test_ends_that_lack_credit_leave_bare_at_the_close() -> None:
    lone = Lone()
    mux = lone.mux
    lone.receive("900100" + "900200")
    first, second = (event[0] for event in lone.of(events.OPENED))
    mux.end(first, b"goodbye")
    mux.write(second, b"unsent", whole=True)
    mux.end(second, b"goodbye")
    mux.end(mux.top_sink, b"reason")
    assert lone.answer() == ""
    mux.end_bare()
    assert sorted(lone.answer()) == sorted("620100" + "620000")
    assert second.queued == 13


@pytest.mark.requirement("BP-R14")
def test_the_end_of_in_sink_0_ends_that_direction_alone() -> None:
    lone = Lone(whole=True)
    mux = lone.mux
    mux.credit(mux.top_stream, 100)
    lone.take_all()
    lone.receive("a80064" + "10050161" + "500100")
    asked = mux.request(b"?", credit=10)
    lone.take_all()
    lone.receive("620003627965")
    ended = lone.of(events.ENDED)
    assert [(event[0], event[1]) for event in ended] == [(mux.top_stream, b"bye")]
    assert lone.answer() == "a100"
    request = mux.find(1, 5)
    stream = mux.find(STREAM_IN, 1)
    assert request is not None and stream is not None
    mux.credit(stream, 3)
    mux.respond(request, b"")
    lone.receive("30000121")
    assert lone.of(events.PAYLOAD)[-1][:2] == (asked, b"!")
    lone.take_all()
    lone.receive("500103616263")
    assert lone.of(events.PAYLOAD)[-1][:2] == (stream, b"abc")
    mux.message(b"one more")
    assert lone.answer() == "7000086f6e65206d6f7265"
    assert lone.error is None


@pytest.mark.requirement("BP-R14")
def test_openings_that_wait_for_credit_outlive_the_end_of_in_sink_0() -> None:
    lone = Lone(whole=True)
    lone.mux.request(b"abc", credit=5)
    assert lone.answer() == ""
    lone.receive("620000")
    assert lone.answer() == "a100"
    lone.receive("a80003")
    assert lone.answer() == "1800" + "03616263" + "05"
    assert not lone.of(events.ABANDONED)


def test_a_burst_of_chunks_is_taken_in_steps() -> None:
    lone = Lone(whole=True)
    mux = lone.mux
    mux.receive_data(b"\x50\x01\x00" + b"\x40\x01" * 9 + b"\x44", 4)
    assert mux.unread
    assert len(lone.of(events.OPENED)) == 1
    with pytest.raises(LocalProtocolError, match="before what was fed is consumed"):
        mux.receive_data(b"\x01")
    mux.read_on(4)
    assert mux.unread
    mux.read_on(4)
    assert not mux.unread
    mux.receive_data(b"\x01")
    assert len(lone.of(events.PING)) == 1
    mux.receive_data(b"\xff" * 20, 1)
    assert lone.error is not None
    assert not mux.unread
    mux.read_on()


def test_settings_of_one_connection_are_checked() -> None:
    found = Settings()
    assert (found.connection_bytes, found.closing_deadline) == (64 << 20, 30.0)
    for name in ("connection_bytes", "closing_deadline", "wake_up"):
        with pytest.raises(ConfigError, match=f"Bpmux.{name} is 0"):
            Settings(**{name: 0})
