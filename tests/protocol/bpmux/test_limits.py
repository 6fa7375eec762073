"""Heartbeats, and what bounds a peer that floods: memory, work, and words (BP-R11, BP-R12)."""

from __future__ import annotations

import tracemalloc

import pytest

from aqueduct.config import Bpmux as Settings
from aqueduct.errors import ConfigError, LimitExceeded
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.state import REQ_IN, SINK_IN, SINK_OUT, STREAM_IN
from tests.protocol.bpmux.pair import Lone, MuxPair
from tests.protocol.bpmux.test_receiving import fails, opened


@pytest.mark.requirement("BP-R11")
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("040b", "200b"),
        ("2401", "0001"),
        ("440c", "a00c"),
        ("6403", "8003"),
        ("840d", "600d"),
        ("a402", "4002"),
        ("a400", "6000"),
        ("6400", "a000"),
    ],
)
def test_a_ping_is_answered_by_the_mirrored_type(text: str, answer: str) -> None:
    lone = opened()
    lone.receive(text + text)
    assert len(lone.of(events.PING)) == 2
    assert lone.answer() == answer + answer


@pytest.mark.requirement("BP-13")
@pytest.mark.requirement("BP-R11")
def test_a_chunk_without_flags_is_a_pong() -> None:
    lone = opened()
    mux = lone.mux
    sink = mux.find(SINK_OUT, 2)
    assert sink is not None
    mux.ping(sink, 1.0)
    mux.ping(sink, 2.0)
    mux.ping(mux.top_stream, 3.0)
    assert lone.answer() == "4402" + "4402" + "a400"
    lone.receive("a002")
    assert lone.of(events.PONG) == [(sink, 1.0)]
    lone.receive("6000" + "a002")
    assert lone.of(events.PONG)[1:] == [(mux.top_stream, 3.0), (sink, 2.0)]
    before = len(lone.events)
    lone.receive("a002" + "6000")  # asked or not
    assert lone.error is None
    lone.drain()
    assert len(lone.events) == before


@pytest.mark.requirement("BP-R11")
def test_a_missing_pong_is_reported_once_and_not_fatal() -> None:
    lone = Lone(Settings(pong_deadline=5.0))
    mux = lone.mux
    assert mux.next_deadline() is None
    mux.ping(mux.top_stream, 1.0)
    mux.ping(mux.top_stream, 2.0)
    lone.take_all()
    assert mux.next_deadline() == 6.0
    mux.handle_deadline(5.9)
    assert lone.of(events.PONG_MISSING) == []
    mux.handle_deadline(6.0)
    assert lone.of(events.PONG_MISSING) == [(mux.top_stream, 1.0)]
    assert mux.next_deadline() == 7.0
    lone.receive("6000" + "6000")
    assert lone.of(events.PONG) == [(mux.top_stream, 1.0), (mux.top_stream, 2.0)]
    assert mux.next_deadline() is None
    mux.handle_deadline(100.0)
    assert len(lone.of(events.PONG_MISSING)) == 1
    assert lone.error is None
    assert Settings().pong_deadline == 30.0


@pytest.mark.requirement("BP-R11")
def test_nobody_waits_for_the_pong_of_what_is_gone() -> None:
    lone = opened()
    sink = lone.mux.find(SINK_OUT, 2)
    assert sink is not None
    lone.mux.ping(sink, 1.0)
    lone.mux.ping(lone.mux.top_stream, 2.0)
    lone.take_all()
    lone.receive("a20200")
    lone.take_all()
    assert lone.mux.next_deadline() == 32.0
    assert list(sink.awaited) == []


def test_a_heartbeat_is_a_pong_that_nobody_asked_for() -> None:
    pair = MuxPair()
    pair.left.mux.heartbeat(pair.left.mux.top_sink)
    assert pair.left.take() == b"\x60\x00"


@pytest.mark.requirement("BP-8")
@pytest.mark.parametrize("text", ["0009", "4009", "8009"])
def test_a_sign_of_life_of_nobody(text: str) -> None:
    fails(Lone(), text, "is unknown, and opening it needs a payload (BP-8)")


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("tag", ["10", "50", "90", "d0"])
def test_entities_of_a_kind_have_a_limit(tag: str) -> None:
    lone = Lone(Settings(entities=3))
    lone.receive("".join(f"{tag}{number:02x}00" for number in (1, 2, 3)))
    assert lone.error is None
    error = fails(lone, tag + "0400", "is one above Bpmux.entities (3) (BP-R12)")
    assert isinstance(error, LimitExceeded)


@pytest.mark.requirement("BP-R12")
def test_the_stream_half_of_a_duplex_counts() -> None:
    lone = Lone(Settings(entities=2))
    lone.receive("500100" + "500200")
    fails(lone, "d00300", "is one above Bpmux.entities (2)")


@pytest.mark.requirement("BP-R12")
def test_entities_that_ended_count_until_they_are_acknowledged() -> None:
    """A peer that opens, ends and does not read is stopped by the same limit."""
    lone = Lone(Settings(entities=3))
    for number in (1, 2, 3):
        lone.receive(f"52{number:02x}0000")
    assert lone.mux.count(STREAM_IN) == 3
    stuck = Lone(Settings(entities=3))
    stuck.receive("52010000" + "52020000" + "52030000")
    fails(stuck, "500400", "is one above Bpmux.entities")
    assert lone.answer() == "a101a102a103"
    lone.receive("500400")
    assert lone.error is None


@pytest.mark.requirement("BP-R12")
def test_a_peer_that_pings_and_does_not_read() -> None:
    lone = Lone(Settings(unanswered_pings=5))
    lone.receive("a400" * 5)
    assert lone.error is None
    assert lone.answer() == "6000" * 5
    lone.receive("a400" * 5)
    error = fails(lone, "a400", "6 pings for <sink_out 0> without reading an answer")
    assert isinstance(error, LimitExceeded)
    assert "Bpmux.unanswered_pings is 5" in str(error)


def held_by(lone: Lone, text: str, times: int) -> int:
    """Bytes of memory that stay taken after these chunks, whose events were drained."""
    data = bytes.fromhex(text) * 100
    lone.mux.receive_data(data)
    lone.mux.events_received()
    tracemalloc.start()
    try:
        for _ in range(times // 100):
            lone.mux.receive_data(data)
            lone.mux.events_received()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize(
    "text",
    [
        "a80001",  # credit
        "a80000",  # credit of nothing
        "6000",  # pongs
        "700000",  # empty messages
        "500c00",
        "a400" + "a000",
    ],
)
def test_floods_of_small_chunks_hold_no_memory(text: str) -> None:
    lone = opened()
    settings = Settings(unanswered_pings=1 << 40)
    if "a400" in text:
        lone = Lone(settings)
    assert held_by(lone, text, 20_000) < 20_000
    assert lone.error is None
    buffers, _, _ = lone.mux.take(1 << 30)
    assert sum(map(len, buffers)) <= 2 * 20_100


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize(("tag", "place"), [("1c", REQ_IN), ("5c", STREAM_IN), ("9c", SINK_IN)])
def test_an_entity_of_the_peer_is_small(tag: str, place: int) -> None:
    """With credit on it, and a ping answered: what 65,536 of a kind may cost is bounded."""
    lone = Lone()
    lone.mux.take(1 << 20)
    tracemalloc.start()
    try:
        for number in range(256, 4352):
            lone.receive(f"{tag}f9{number:04x}0005")
            lone.mux.events_received()
            lone.mux.take(1 << 20)
        held = tracemalloc.get_traced_memory()[0] / 4096
    finally:
        tracemalloc.stop()
    assert lone.error is None
    assert lone.mux.count(place) == 4096
    assert held < 700


@pytest.mark.requirement("BP-R12")
def test_empty_and_tiny_pieces_cost_what_they_bring() -> None:
    lone = Lone(Settings(payload_bytes=1 << 30), whole=True)
    lone.mux.credit(lone.mux.top_stream, 1 << 30)
    lone.take_all()
    lone.receive("e320000000" + "700001aa")
    assert lone.error is None
    assert held_by(lone, "700001aa" + "700000", 10_000) < 2 * 15_000
    assert lone.mux.top_stream.partial == 0x20000000 - 1 - 100 - 10_000
    assert lone.events == []


@pytest.mark.requirement("BP-R12")
def test_a_declared_size_takes_no_memory() -> None:
    lone = Lone(whole=True)
    lone.mux.credit(lone.mux.top_stream, 1 << 40)
    lone.take_all()
    tracemalloc.start()
    try:
        lone.receive("e304000000" + "7000fb03fffff0" + "aa")
        assert lone.error is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.requirement("BP-R12")
def test_dribbled_credit_does_not_visit_all_that_wait() -> None:
    """A thousand requests wait for top-level credit; the peer grants a byte at a time."""
    lone = Lone()
    for _ in range(1000):
        lone.mux.request(bytes(100))
    lone.take_all()
    turns = lone.mux.turns
    visits = 0
    for _ in range(500):
        lone.receive("a80001")
        visits += len(turns.urgent) + len(turns.fresh) + len(turns.bulky)
        lone.take_all()
    assert sum(entity.opened for number in range(1000) if (entity := lone.mux.find(0, number))) == 5
    assert visits <= 500 + 2 * 5


def test_defaults_are_those_of_the_text_and_settings_are_checked() -> None:
    settings = Settings()
    assert settings.entities == 65_536
    assert settings.payload_bytes == 64 << 20
    for name in ("chunk", "opening", "entities", "payload_bytes", "pong_deadline"):
        with pytest.raises(ConfigError, match=f"Bpmux.{name} is 0"):
            Settings(**{name: 0})


def test_requests_beyond_what_we_answer_stay_within_the_map() -> None:
    lone = Lone(Settings(entities=1000))
    lone.receive("".join(f"10f9{number:04x}00" for number in range(256, 1256)))
    assert lone.mux.count(REQ_IN) == 1000
    assert lone.error is None
