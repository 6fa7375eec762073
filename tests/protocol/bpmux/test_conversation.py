"""Requests, sinks, streams and duplexes between two cores, from opening to the last word."""

from __future__ import annotations

import pytest

from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.state import (
    REQ_IN,
    REQ_OUT,
    SINK_IN,
    SINK_OUT,
    STREAM_IN,
    STREAM_OUT,
)
from tests.protocol.bpmux.pair import MuxPair

chopped = pytest.mark.parametrize("chop", [0, 1, 7])


def assert_nothing_left(pair: MuxPair) -> None:
    """Only the top-level is in the maps, with nothing queued."""
    for side in (pair.left, pair.right):
        for place in (REQ_OUT, REQ_IN, SINK_OUT, SINK_IN, STREAM_OUT, STREAM_IN):
            expected = 1 if place in (SINK_OUT, STREAM_OUT) else 0
            assert side.mux.count(place) == expected
        assert side.mux.idle


@pytest.mark.requirement("BP-11")
@pytest.mark.requirement("BP-R7")
@chopped
def test_a_request_gets_its_response(chop: int) -> None:
    pair = MuxPair(chop=chop)
    asked = pair.left.mux.request(b"question", credit=6)
    pair.run()
    got = pair.right.last()
    assert got.place == REQ_IN
    pair.right.mux.respond(got, b"answer")
    pair.run()
    assert pair.right.delivered() == [("req_in", 0, "payload", b"question")]
    assert pair.left.delivered() == [("req_out", 0, "payload", b"answer")]
    assert pair.right.last(events.ACKNOWLEDGED) is got
    assert asked.gone
    assert_nothing_left(pair)


@pytest.mark.requirement("BP-15")
@chopped
def test_a_sink_carries_bytes_as_far_as_credit_goes(chop: int) -> None:
    pair = MuxPair(chop=chop)
    sink = pair.left.mux.open_sink(b"head", credit=9)
    pair.left.mux.write(sink, [b"a" * 10, memoryview(b"b" * 10)])
    pair.run()
    stream = pair.right.last()
    got = b"".join(event[1] for event in pair.right.of(events.PAYLOAD))
    assert got == b"head" + b"a" * 10 + b"b" * 10  # all of it on top-level credit
    pair.left.mux.write(sink, b"c" * 10)
    pair.run()
    assert sink.queued == 10
    pair.right.mux.credit(stream, 4)
    pair.run()
    assert sink.queued == 6
    pair.right.mux.credit(stream, 100)
    pair.left.mux.end(sink, b"bye")
    pair.run()
    got = b"".join(event[1] for event in pair.right.of(events.PAYLOAD))
    assert got == b"head" + b"a" * 10 + b"b" * 10 + b"c" * 10
    assert pair.right.of(events.ENDED) == [(stream, b"bye", stream, 3)]
    assert pair.left.last(events.ACKNOWLEDGED) is sink
    assert_nothing_left(pair)


@pytest.mark.requirement("BP-R9")
@chopped
def test_a_duplex_is_two_halves_with_an_end_each(chop: int) -> None:
    pair = MuxPair(chop=chop)
    sink, stream = pair.left.mux.open_duplex(b"hello", credit=5)
    pair.left.mux.write(sink, b"waits for credit", whole=True)
    pair.run()
    theirs = pair.right.last()
    assert theirs.place == SINK_IN
    assert theirs.twin is not None
    assert theirs.twin.place == STREAM_IN
    pair.right.mux.write(theirs, b"12345", whole=True)
    pair.right.mux.credit(theirs.twin, 100)
    pair.run()
    pair.right.mux.end(theirs)
    pair.run()
    assert stream.gone
    assert not sink.gone
    pair.left.mux.end(sink)
    pair.run()
    assert pair.right.delivered() == [
        ("sink_in", 1, "payload", b"hello"),
        ("stream_in", 1, "payload", b"waits for credit"),
        ("stream_in", 1, "end", b""),
    ]
    assert pair.left.delivered() == [
        ("stream_out", 1, "payload", b"12345"),
        ("stream_out", 1, "end", b""),
    ]
    assert_nothing_left(pair)


@chopped
def test_a_stream_is_written_by_the_peer(chop: int) -> None:
    pair = MuxPair(chop=chop)
    stream = pair.left.mux.open_stream(b"please", credit=3)
    pair.run()
    theirs = pair.right.last()
    assert theirs.place == SINK_IN
    pair.right.mux.write(theirs, b"12345")
    pair.run()
    assert pair.left.delivered() == [("stream_out", 1, "payload", b"123")]
    pair.left.mux.end(stream)
    pair.run()
    assert pair.right.of(events.ENDED) == [(theirs, b"", theirs, 0)]
    assert_nothing_left(pair)
