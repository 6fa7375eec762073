"""Commands: what leaves for them, when it waits, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aqueduct.config import Bpmux as Settings
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import REQ_IN, REQ_OUT, SINK_IN, SINK_OUT, STREAM_IN, STREAM_OUT
from tests.protocol.bpmux.pair import Lone, MuxPair
from tests.protocol.bpmux.test_receiving import opened


@pytest.mark.requirement("BP-15")
def test_what_is_sent_is_charged() -> None:
    lone = opened()
    sink = lone.mux.find(SINK_OUT, 2)
    assert sink is not None
    lone.receive("a8020a")
    lone.mux.write(sink, b"abc", whole=True)
    lone.mux.end(sink, b"de")
    assert sink.credit_out == 10, "it counts when it is sent"
    assert lone.answer() == "520203" + b"abc".hex() + "02" + b"de".hex()
    assert sink.credit_out == 5
    assert sink.end_out


@pytest.mark.requirement("BP-15")
def test_nothing_leaves_without_credit() -> None:
    lone = opened()
    sink = lone.mux.find(SINK_OUT, 2)
    assert sink is not None
    lone.receive("a80204")
    lone.mux.write(sink, b"abcde", whole=True)
    assert lone.answer() == ""
    assert lone.mux.idle
    lone.receive("a80201")
    assert lone.answer() == "500205" + b"abcde".hex()
    lone.mux.end(sink, b"x")
    assert lone.answer() == ""
    lone.receive("a80201")
    assert lone.answer() == "42020178"


def test_runs_of_bytes_are_cut_by_credit() -> None:
    lone = opened()
    sink = lone.mux.find(SINK_OUT, 2)
    assert sink is not None
    sink.keep = 2
    lone.receive("a80205")
    lone.mux.write(sink, [b"abc", bytearray(b"de"), memoryview(b"fg")])
    lone.mux.write(sink, b"")
    assert lone.answer() == "500203" + b"abc".hex()
    lone.receive("a80203")
    assert lone.answer() == "500203" + b"def".hex()
    lone.mux.end(sink, b"yz", drop=True)
    assert lone.answer() == "420202" + b"yz".hex(), "what is kept is for the end"
    assert sink.queued == 0


@pytest.mark.requirement("BP-R5")
def test_opening_chunks_take_what_the_top_level_has() -> None:
    lone = Lone(Settings(opening=4))
    lone.receive("a80007")
    lone.mux.top_sink.keep = 1
    for data in (b"abcdef", b"ghijkl", b"mno"):
        lone.mux.open_sink(data, credit=9, keep=3)
    assert lone.answer() == ("58010461626364" + "09" + "5802026768" + "09" + "58030009")
    assert lone.mux.top_sink.credit_out == 1
    assert [entity.queued for k in (1, 2, 3) if (entity := lone.mux.find(SINK_OUT, k))] == [2, 4, 3]


@pytest.mark.requirement("BP-R5")
def test_whole_openings_wait_for_top_level_credit_in_order() -> None:
    lone = Lone()
    first = lone.mux.request(b"abcde")
    second = lone.mux.open_stream(b"xy")
    assert lone.answer() == ""
    lone.receive("a80003")
    assert lone.answer() == "", "the first one comes first"
    assert not first.opened
    lone.receive("a80003")
    assert lone.answer() == "100005" + b"abcde".hex()
    lone.receive("a80001")
    assert lone.answer() == "900102" + b"xy".hex()
    assert second.opened
    assert lone.mux.top_sink.credit_out == 0


@pytest.mark.requirement("BP-R5")
def test_what_waits_when_the_top_level_ends_is_abandoned() -> None:
    lone = Lone()
    request = lone.mux.request(b"abcde")
    sink, stream = lone.mux.open_duplex(b"abc")
    run = lone.mux.open_sink(b"run")
    lone.take_all()
    assert run.opened
    lone.receive("a20000")
    assert lone.of(events.ABANDONED) == [(request,), (stream,)]
    assert request.gone
    assert stream.gone
    assert sink.gone
    assert lone.answer() == "6100"
    assert lone.mux.count(REQ_OUT) == 0
    with pytest.raises(LocalProtocolError, match="nothing opens with a payload"):
        lone.mux.request(b"x")
    lone.mux.open_sink(b"x")
    lone.mux.request()
    assert lone.answer() == "500300" + "100100"


@pytest.mark.requirement("BP-R5")
@pytest.mark.parametrize("ours", [False, True])
def test_what_opens_after_the_end_of_the_top_level_opens_empty(ours: bool) -> None:
    """Credit that is left is of no use."""
    lone = Lone()
    lone.receive("a80064")
    if ours:
        lone.mux.close()
    before = lone.mux.open_sink(b"queued")
    if not ours:
        lone.receive("a20000")
    after = lone.mux.open_sink(b"x")
    assert lone.answer() == ("620000" if ours else "6100") + "500100" + "500200"
    assert (before.queued, after.queued) == (6, 1)


@pytest.mark.requirement("BP-R5")
def test_our_own_close_abandons_what_waits() -> None:
    lone = Lone()
    request = lone.mux.request(b"abcde")
    lone.take_all()
    lone.mux.close()
    assert lone.answer() == "620000"
    assert lone.of(events.ABANDONED) == [(request,)]
    assert request.gone


@pytest.mark.requirement("BP-R8")
def test_nothing_is_sent_after_our_end() -> None:
    lone = opened()
    sink = lone.mux.find(SINK_OUT, 2)
    assert sink is not None
    lone.receive("a80264")
    for taken in (False, True):
        if not taken:
            lone.mux.end(sink)
        else:
            assert lone.answer() == "420200"
        for call in (
            lambda: lone.mux.write(sink, b"x"),
            lambda: lone.mux.write(sink, b"x", whole=True),
            lambda: lone.mux.end(sink),
            lambda: lone.mux.ping(sink, 0.0),
            lambda: lone.mux.heartbeat(sink),
        ):
            with pytest.raises(LocalProtocolError, match="ended"):
                call()
    with pytest.raises(LocalProtocolError, match="ended"):
        lone.mux.credit(sink, 1)
    lone.mux.consumed(sink, 1)
    lone.receive("a402")  # their ping came too late
    assert lone.answer() == ""
    assert sink.credit_in == 9


def test_an_end_that_waits_can_be_replaced() -> None:
    lone = opened()
    sink = lone.mux.find(SINK_OUT, 2)
    assert sink is not None
    lone.mux.write(sink, b"waits")
    lone.mux.end(sink)
    assert lone.answer() == ""
    lone.mux.end(sink, drop=True)
    assert lone.answer() == "420200"
    with pytest.raises(LocalProtocolError):
        lone.mux.end(sink, drop=True)
    # So can a response that waits.
    request = lone.mux.find(REQ_IN, 11)
    assert request is not None
    lone.mux.respond(request, b"late")
    lone.mux.end(request, drop=True)
    assert lone.answer() == "220b00"


@pytest.mark.requirement("BP-12")
def test_the_peers_end_drops_what_waits() -> None:
    lone = opened()
    sink = lone.mux.find(SINK_OUT, 2)
    assert sink is not None
    lone.mux.write(sink, b"never")
    lone.mux.credit(sink, 5)
    lone.mux.ping(sink, 0.0)
    lone.receive("a20200")
    assert sink.queued == 0
    # It may not be known yet: commands are without effect.
    lone.mux.write(sink, b"x")
    lone.mux.end(sink)
    lone.mux.credit(sink, 1)
    lone.mux.ping(sink, 0.0)
    lone.mux.heartbeat(sink)
    assert lone.answer() == "4102"
    lone.mux.write(sink, b"x")
    lone.mux.end(sink)
    assert lone.answer() == ""
    assert lone.mux.next_deadline() is None


def test_a_request_is_taken_back_before_it_leaves() -> None:
    lone = Lone()
    request = lone.mux.request(b"")
    lone.mux.end(request, drop=True)
    assert request.gone
    assert lone.answer() == ""
    request = lone.mux.request(b"")
    lone.mux.end(request)
    assert lone.answer() == "12010000"
    waiting = lone.mux.request(b"abc")
    assert lone.answer() == ""
    lone.mux.end(waiting, drop=True)
    other = lone.mux.request(b"x")
    lone.receive("a80001")
    assert lone.answer() == "10030178"
    assert other.opened


def test_a_sink_that_is_dropped_before_it_leaves_opens_empty() -> None:
    lone = Lone()
    lone.receive("a80064")
    sink = lone.mux.open_sink(b"abc", credit=9)
    lone.mux.end(sink, b"code", drop=True)
    assert lone.answer() == "5a01000904" + b"code".hex()
    # Without credit for its payload the end waits for the sink's own.
    lone = Lone()
    sink = lone.mux.open_sink(b"abc")
    lone.mux.end(sink, b"code", drop=True)
    assert lone.answer() == "500100"
    lone.receive("a80104")
    assert lone.answer() == "420104" + b"code".hex()


def test_small_buffers_are_joined_and_large_ones_referenced() -> None:
    lone = opened()
    sink = lone.mux.find(SINK_OUT, 2)
    assert sink is not None
    lone.receive("a802fb01000000")
    large = bytes(5000)
    lone.mux.write(sink, [b"ab", large, b"cd", memoryview(b"ef")])
    lone.mux.ping(sink, 0.0)
    buffers, size, written = lone.mux.take(1 << 20)
    assert [len(buffer) for buffer in buffers] == [2 + 5 + 2, 5000, 4]
    assert buffers[1] is large
    assert size == 5013
    assert written == [(sink, 5006)]


def test_messages_may_be_urgent() -> None:
    lone = Lone()
    lone.receive("a80004")
    lone.mux.top_sink.keep = 2
    lone.mux.message(b"abc")
    assert lone.answer() == "", "two bytes are kept"
    lone.mux.message(b"u1", urgent=True)
    lone.mux.message(b"u", urgent=True)
    assert lone.answer() == "700002" + b"u1".hex() + "70000175"
    lone.receive("a80005")
    assert lone.answer() == "700003" + b"abc".hex()


def test_a_begun_payload_goes_before_an_urgent_one() -> None:
    lone = Lone()
    lone.receive("a80002")
    lone.mux.write(lone.mux.top_sink, b"abcd", total=4)
    assert lone.answer() == "e004700002" + b"ab".hex()
    lone.mux.message(b"u", urgent=True)
    lone.mux.message(b"v")
    lone.receive("a80014")
    assert lone.answer() == "700002" + b"cd".hex() + "70000175" + "70000176"


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda lone, mux: mux.open_sink(identifier=2), "identifier 2 of sink_out is in use"),
        (lambda lone, mux: mux.open_sink(identifier=0), "identifier 0 of sink_out is in use"),
        (lambda lone, mux: mux.open_sink(identifier=1 << 64), "must have 64 bits"),
        (lambda lone, mux: mux.request(identifier=-1), "must have 64 bits"),
        (lambda lone, mux: mux.open_duplex(identifier=2), "identifier 2 of sink_out is in use"),
        (lambda lone, mux: mux.open_duplex(identifier=3), "identifier 3 of stream_out is in use"),
        (lambda lone, mux: mux.open_sink(credit=1 << 64), "the credit is 18446744073709551616"),
        (lambda lone, mux: mux.open_sink(total=1 << 64, payload=b""), "the total size is"),
        (
            lambda lone, mux: mux.write(mux.find(STREAM_OUT, 3), b"x"),
            "<stream_out 3> is not a sink",
        ),
        (lambda lone, mux: mux.write(mux.find(REQ_IN, 11), b"x"), "<req_in 11> is not a sink"),
        (lambda lone, mux: mux.respond(mux.find(REQ_OUT, 1)), "<req_out 1> is no request"),
        (lambda lone, mux: mux.credit(mux.find(SINK_OUT, 2), (1 << 64) - 1), "above 2^64 - 1"),
        (lambda lone, mux: mux.credit(mux.find(SINK_OUT, 2), -1), "above 2^64 - 1"),
        (lambda lone, mux: twice(mux), "has been answered or ended"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(
    call: Callable[[Lone, Any], object], match: str
) -> None:
    lone = opened()
    counts = [lone.mux.count(place) for place in range(6)]
    with pytest.raises(LocalProtocolError, match=match.replace("(", r"\(").replace("^", r"\^")):
        call(lone, lone.mux)
    assert [lone.mux.count(place) for place in range(6)] == counts
    assert lone.error is None


def twice(mux: Mux) -> None:
    request = mux.find(REQ_IN, 11)
    assert request is not None
    mux.respond(request)
    mux.respond(request)


def test_more_entities_than_the_limit_are_not_opened() -> None:
    lone = Lone(Settings(entities=2))
    for _ in range(2):
        lone.mux.request()
    with pytest.raises(LocalProtocolError, match=r"Bpmux.entities is 2"):
        lone.mux.request()
    lone.mux.open_sink()
    with pytest.raises(LocalProtocolError, match=r"Bpmux.entities is 2"):
        lone.mux.open_duplex()
    assert lone.mux.count(STREAM_OUT) == 1


def test_identifiers_skip_those_in_use() -> None:
    lone = Lone()
    mux = lone.mux
    assert mux.request(identifier=0).identifier == 0
    assert [mux.request().identifier for _ in range(2)] == [1, 2]
    mux.open_sink(identifier=2)
    mux.open_stream(identifier=3)
    assert mux.open_sink().identifier == 1
    sink, stream = mux.open_duplex()
    assert (sink.identifier, stream.identifier) == (4, 4)
    assert mux.open_stream().identifier == 5
    assert (sink.place, stream.place) == (SINK_OUT, STREAM_OUT)


@pytest.mark.requirement("BP-R9")
@pytest.mark.requirement("BP-R5")
def test_the_opening_of_a_duplex_carries_a_run_of_its_sink() -> None:
    lone = Lone(Settings(opening=4))
    lone.receive("a80007")
    sink, stream = lone.mux.open_duplex(None, credit=9)
    lone.mux.write(sink, b"abc")
    lone.mux.write(sink, b"def")
    lone.mux.end(sink)
    assert lone.answer() == "d80104" + b"abcd".hex() + "09"
    assert lone.mux.top_sink.credit_out == 3
    assert (sink.queued, stream.queued) == (2, 0)
    lone.receive("a80101")
    assert lone.answer() == "500101" + b"e".hex()
    lone.receive("a80101")
    assert lone.answer() == "520101" + b"f".hex() + "00", "and the end behind it"


def test_a_run_of_a_duplex_can_be_dropped_before_its_opening() -> None:
    lone = Lone()
    lone.receive("a80007")
    sink, stream = lone.mux.open_duplex(None, credit=9)
    lone.mux.write(sink, b"abc")
    lone.mux.end(sink, b"x", drop=True)
    lone.mux.end(stream, b"y")
    assert lone.answer() == "da01000901" + b"y".hex()
    lone.receive("a80101")
    assert lone.answer() == "420101" + b"x".hex()


@pytest.mark.parametrize("payload", [b"", b"abc"])
def test_an_opening_payload_of_a_duplex_takes_no_run_with_it(payload: bytes) -> None:
    lone = Lone()
    lone.receive("a80007")
    sink, _ = lone.mux.open_duplex(payload)
    lone.mux.write(sink, b"def")
    assert lone.answer() == f"d0010{len(payload)}" + payload.hex()
    assert sink.queued == 3


def test_an_opening_of_a_duplex_waits_for_no_run() -> None:
    lone = Lone()
    lone.receive("a80007")
    sink, stream = lone.mux.open_duplex(None)
    lone.mux.end(sink)
    assert lone.answer() == "d00100" + "420100"
    assert stream.queued == 0


def test_the_sink_half_of_a_duplex_waits_for_its_opening() -> None:
    lone = Lone()
    sink, _ = lone.mux.open_duplex(b"abc", credit=5)
    lone.mux.write(sink, b"x", whole=True)
    lone.mux.credit(sink, 9)
    lone.mux.ping(sink, 0.0)
    assert lone.answer() == ""
    lone.receive("a80003")
    assert lone.answer() == "d80103" + b"abc".hex() + "05" + "4c0109"
    lone.receive("a80101")
    assert lone.answer() == "50010178"


def test_the_user_of_an_entity_is_kept() -> None:
    pair = MuxPair()
    sink = pair.left.mux.open_sink()
    sink.user = "mine"
    pair.run()
    pair.right.mux.end(pair.right.last())
    pair.run()
    assert pair.left.last(events.ENDED).user == "mine"
    assert [pair.right.mux.count(place) for place in (SINK_IN, STREAM_IN)] == [0, 0]


@pytest.mark.requirement("BP-R5")
def test_who_ends_while_it_waits_holds_nobody_back() -> None:
    lone = Lone()
    lone.receive("a80002")
    answered = lone.mux.request(b"abcd", total=4, credit=5)
    behind = lone.mux.request(b"xy")
    taken_back = lone.mux.request(b"never")
    last = lone.mux.request(b"z")
    assert lone.answer() == "e004180002" + b"ab".hex() + "05"
    lone.receive("300001" + "aa")  # the answer comes before the whole question
    assert answered.end_in
    lone.receive("a80002")
    assert lone.answer() == "0100" + "100102" + b"xy".hex()
    assert behind.opened
    lone.mux.end(taken_back, drop=True)
    lone.receive("a80001")
    assert lone.answer() == "100301" + b"z".hex()
    assert last.opened
