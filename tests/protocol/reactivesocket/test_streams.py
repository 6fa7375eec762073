"""Requests and their answers, between two peers and at one that a test answers itself."""

from __future__ import annotations

from enum import Enum
from itertools import product
from typing import Any

import pytest

from aqueduct._speedups.reactivesocket import reactive_frames as codec
from aqueduct.config import ReactiveSocket as Settings
from aqueduct.errors import LocalProtocolError, SequenceError
from aqueduct.protocol.reactivesocket import events, state
from aqueduct.protocol.reactivesocket.demand import UNBOUNDED
from tests.protocol.reactivesocket.peers import CODES, Lone, Pair, frame, response
from tests.reference.reactivesocket import Frame

STREAM, SUB = codec.REQUEST_STREAM, codec.REQUEST_SUB
ONE, FIRE = codec.REQUEST_RESPONSE, codec.REQUEST_FNF
WHOLE = codec.BEGIN | codec.END


def requested(kind: int, n: int | None = None) -> tuple[Lone, int]:
    """A client that has sent a request."""
    lone = Lone(client=True)
    stream = lone.core.request(kind, b"what", n=n)
    assert len(lone.sent()) == 1
    return lone, stream


def asked(name: str, n: int = 0, *, settings: Settings | None = None) -> Lone:
    """A server that has been sent a request on stream 1."""
    lone = Lone(settings)
    (event,) = lone.receive(frame(name, 1, b"what", n=n))
    assert event[:2] == (events.REQUEST, 1)
    lone.heard.clear()
    return lone


def got(heard: list[events.Event]) -> list[events.Event]:
    """Events of items without what they cost."""
    return [event[:3] if event[0] == events.ITEM else event for event in heard]


@pytest.mark.parametrize(
    ("table", "states", "inputs"),
    [
        (state.CONNECTION, state.ReactiveState, state.ReactiveInput),
        (state.REQUESTER, state.RequesterState, state.RequesterInput),
        (state.RESPONDER, state.ResponderState, state.ResponderInput),
    ],
)
def test_a_table_has_every_pair(
    table: dict[Any, Any], states: type[Enum], inputs: type[Enum]
) -> None:
    assert table.keys() == set(product(states, inputs))
    assert set(table.values()) - {None} <= set(states)


# Requests


@pytest.mark.requirement("RS-14")
@pytest.mark.requirement("RS-R9")
def test_a_request_for_one_response() -> None:
    pair = Pair()
    stream = pair.client.core.request(ONE, [b"pi", b"", b"ng"])
    pair.move()
    assert pair.server.heard == [(events.REQUEST, stream, ONE, 1, b"ping", 260)]
    assert pair.server.core.demand(stream) == 1
    with pytest.raises(LocalProtocolError, match="has one response: complete it with that"):
        pair.server.core.item(stream, b"pong")
    with pytest.raises(LocalProtocolError, match="no more can be asked for"):
        pair.client.core.request_n(stream, 1)
    assert pair.server.core.complete(stream, b"pong")
    assert not pair.server.core.responding
    pair.move()
    assert got(pair.client.heard) == [
        (events.ACCEPTED,),
        (events.ITEM, stream, [b"pong"]),
        (events.COMPLETED, stream),
    ]
    assert not pair.client.core.requested
    assert not pair.server.core.complete(stream, b"pong")


@pytest.mark.requirement("RS-14")
def test_a_request_for_one_response_ends_by_error_and_by_cancel() -> None:
    pair = Pair()
    first, second = (pair.client.core.request(ONE) for _ in range(2))
    pair.move()
    assert pair.server.core.fail_stream(first, "no such thing")
    assert pair.client.core.cancel(second)
    assert not pair.client.core.cancel(second)
    pair.move()
    data = b"APPLICATION_ERROR: no such thing"
    assert (events.ERROR, first, data, 256 + len(data)) in pair.client.heard
    assert pair.server.heard[-1] == (events.CANCELLED, second)
    assert not pair.server.core.complete(second, b"late")
    assert not pair.server.core.fail_stream(first, "again")
    assert not pair.client.core.requested and not pair.server.core.responding


@pytest.mark.requirement("RS-R9")
@pytest.mark.parametrize("bits", ["be", "", "bec", "c"])
def test_one_response_completes_with_the_flag_or_without(bits: str) -> None:
    lone, stream = requested(ONE)
    heard = got(lone.receive(response(stream, b"x", bits), response(stream, b"y", bits)))
    assert heard[1:] == [(events.ITEM, stream, [b"x"]), (events.COMPLETED, stream)]


@pytest.mark.requirement("RS-15")
def test_fire_and_forget_has_no_stream() -> None:
    pair = Pair()
    stream = pair.client.core.request(FIRE, b"x")
    assert not pair.client.core.requested
    pair.move()
    assert pair.server.heard == [(events.REQUEST, stream, FIRE, 0, b"x", 1281)]
    assert not pair.server.core.responding
    assert not pair.server.core.fail_stream(stream, "no")
    assert pair.server.core.idle


@pytest.mark.requirement("RS-16")
def test_a_stream_is_answered_as_it_asks() -> None:
    pair = Pair()
    stream = pair.client.core.request(STREAM, b"all", n=2)
    pair.move()
    server = pair.server.core
    assert server.item(stream, b"1") and server.item(stream, [b"2", b"3"])
    with pytest.raises(LocalProtocolError, match="was not asked for an item: wait for DEMAND"):
        server.item(stream, b"4")
    with pytest.raises(LocalProtocolError, match="wait for DEMAND"):
        server.complete(stream, b"4")
    assert pair.client.core.request_n(stream, 2)
    assert pair.client.core.request_n(stream, 3)
    assert [each.n for each in pair.client.sent()] == [5]  # what has not left is one
    assert pair.server.receive(frame("REQUEST_N", stream, n=5)) == [(events.DEMAND, stream)]
    assert server.demand(stream) == 5
    assert server.complete(stream, b"4")
    pair.move()
    assert got(pair.client.heard)[1:] == [
        (events.ITEM, stream, [b"1"]),
        (events.ITEM, stream, [b"23"]),
        (events.ITEM, stream, [b"4"]),
        (events.COMPLETED, stream),
    ]


@pytest.mark.requirement("RS-17")
@pytest.mark.requirement("RS-R9")
def test_a_subscription_does_not_complete_by_us_and_may_by_a_peer() -> None:
    lone = asked("REQUEST_SUB", 3)
    with pytest.raises(LocalProtocolError, match="a subscription, which does not complete"):
        lone.core.complete(1)
    assert lone.core.item(1, b"x")
    assert lone.core.fail_stream(1, "gone", word="REJECTED")
    assert [each.name for each in lone.sent()] == ["RESPONSE", "ERROR"]
    lone, stream = requested(SUB, 5)
    heard = got(lone.receive(response(stream, b"x"), response(stream, b"y", "bec")))
    assert heard[-2:] == [(events.ITEM, stream, [b"y"]), (events.COMPLETED, stream)]


@pytest.mark.requirement("RS-18")
def test_a_cancelled_stream_gets_nothing_more() -> None:
    """Not even what waited to leave, which lets go of its memory."""
    lone = Lone()
    before = lone.core.held_bytes
    for stream in (1, 3):
        lone.receive(frame("REQUEST_STREAM", stream, n=UNBOUNDED))
        lone.core.release(256)
        for _ in range(3):
            assert lone.core.item(stream, b"x")
    assert lone.receive(frame("CANCEL", 1)) == [(events.CANCELLED, 1)]
    assert not lone.core.item(1, b"y")
    assert [each.stream for each in lone.sent()] == [3, 3, 3]
    lone.receive(frame("CANCEL", 3))
    assert lone.core.held_bytes == before


def test_streams_take_turns() -> None:
    lone = Lone()
    for stream in (1, 3):
        lone.receive(frame("REQUEST_STREAM", stream, n=9))
        for _ in range(3):
            lone.core.item(stream, b"x")
    assert [each.stream for each in lone.sent()] == [1, 3, 1, 3, 1, 3]


# Demand


@pytest.mark.requirement("RS-R6")
def test_demand_adds_up_and_has_a_bound() -> None:
    lone = asked("REQUEST_STREAM", 1)
    lone.receive(frame("REQUEST_N", 1, n=UNBOUNDED), frame("REQUEST_N", 1, n=UNBOUNDED))
    assert lone.core.demand(1) == UNBOUNDED
    for _ in range(5):
        assert lone.core.item(1, b"x")
    assert lone.core.demand(1) == UNBOUNDED


@pytest.mark.requirement("RS-R6")
@pytest.mark.requirement("RS-R12")
@pytest.mark.parametrize("n", [0, 1 << 63, (1 << 64) - 1])
def test_a_request_n_that_cannot_be_ends_its_stream_alone(n: int) -> None:
    lone = asked("REQUEST_STREAM", 2)
    lone.receive(frame("REQUEST_STREAM", 3, n=1))
    lone.core.item(1, b"x")
    (event,) = lone.receive(frame("REQUEST_N", 1, n=n))
    assert event[:2] == (events.ABORTED, 1)
    assert isinstance(event[2], SequenceError)
    (sent,) = lone.sent()
    assert (sent.name, sent.stream) == ("ERROR", 1)
    assert sent.data == f"INVALID: a REQUEST_N of {n} items; it has 1 to 2^63 - 1 (RS-R6)".encode()
    assert list(lone.core.responding) == [3]


@pytest.mark.requirement("RS-R6")
def test_an_initial_number_that_cannot_be_is_answered() -> None:
    lone = Lone()
    assert lone.receive(frame("REQUEST_STREAM", 1, n=1 << 63)) == []
    (sent,) = lone.sent()
    assert sent.data.startswith(b"INVALID: a request for 9223372036854775808 items; 2^63 - 1")
    assert not lone.core.responding


@pytest.mark.requirement("RS-R6")
def test_a_request_for_nothing_ends_in_time() -> None:
    lone = Lone(Settings(first_demand=30.0))
    for stream, now in ((1, 5.0), (3, 6.0), (5, 7.0), (7, 8.0)):
        lone.receive(frame("REQUEST_STREAM", stream, n=0), now=now)
    lone.receive(frame("REQUEST_N", 3, n=1), frame("CANCEL", 5))
    assert lone.core.next_deadline() == 35.0
    lone.core.handle_deadline(34.9)
    assert lone.core.idle
    lone.core.handle_deadline(38.0)
    assert [event[:2] for event in lone.drain()] == [(events.ABORTED, 1), (events.ABORTED, 7)]
    first, second = lone.sent()
    assert (first.stream, second.stream) == (1, 7)
    assert first.data.startswith(b"CANCELED: no REQUEST_N came for 30 s after a request for 0")
    assert lone.core.next_deadline() is None


@pytest.mark.requirement("RS-R6")
@pytest.mark.parametrize("bits", ["be", "", "b"])
def test_who_sends_more_than_was_asked_for_is_cancelled(bits: str) -> None:
    lone, stream = requested(STREAM, 1)
    *_, event = lone.receive(response(stream, b"1"), response(stream, b"2", bits))
    assert event[:2] == (events.BROKEN, stream)
    assert str(event[2]) == "an item that was not asked for (RS-R6)"
    assert [each.name for each in lone.sent()] == ["CANCEL"]
    assert not lone.core.requested


@pytest.mark.requirement("RS-R6")
def test_the_end_needs_no_demand() -> None:
    for last, name in (
        (response(1, b"", "c"), events.COMPLETED),
        (frame("ERROR", 1), events.ERROR),
    ):
        lone, stream = requested(STREAM, 0)
        assert lone.receive(last)[-1][:2] == (name, stream)
    lone = asked("REQUEST_STREAM", 0)
    assert lone.core.complete(1)
    (sent,) = lone.sent()
    assert (sent.flags, sent.data) == (codec.COMPLETE, b"")


def test_a_requester_asks_for_what_can_be() -> None:
    lone, stream = requested(STREAM, 0)
    for n in (0, 1 << 63):
        with pytest.raises(LocalProtocolError, match="it has 1 to"):
            lone.core.request_n(stream, n)
    for n in (-1, 1 << 63):
        with pytest.raises(LocalProtocolError, match="it has 0 to"):
            lone.core.request(SUB, n=n)
    for kind, number in ((ONE, 1), (FIRE, 1), (STREAM, None), (SUB, None)):
        with pytest.raises(LocalProtocolError, match="a number of items belongs to"):
            lone.core.request(kind, n=number)
    with pytest.raises(LocalProtocolError, match="type 0x16 is no request"):
        lone.core.request(codec.CANCEL)
    assert not lone.core.request_n(99, 1)


# Fragments


@pytest.mark.requirement("RS-13")
@pytest.mark.requirement("RS-R7")
@pytest.mark.parametrize(
    ("frames", "wanted"),
    [
        ([("be", b"1"), ("c", b"")], [[b"1"], "completed"]),
        ([("c", b"7")], [[b"7"], "completed"]),
        ([("", b"7"), ("", b"")], [[b"7"], []]),
        ([("b", b"1"), ("", b"2"), ("", b""), ("e", b"3")], [[b"1", b"2", b"3"]]),
        ([("b", b"1"), ("c", b"2"), ("e", b"3")], [[b"1", b"2", b"3"]]),
        ([("bc", b"1"), ("ec", b"3")], [[b"1", b"3"], "completed"]),
        ([("bec", b"")], [[], "completed"]),
        ([("b", b"1"), ("b", b"2")], ["broken"]),
        ([("b", b"1"), ("be", b"2")], ["broken"]),
        ([("e", b"1")], ["broken"]),
        ([("ec", b"1")], ["broken"]),
    ],
)
def test_items_and_their_fragments(
    frames: list[tuple[str, bytes]], wanted: list[list[bytes] | str]
) -> None:
    lone, stream = requested(STREAM, 9)
    other = lone.core.request(STREAM, n=9)
    lone.sent()
    heard: list[object] = []
    for bits, data in frames:
        heard += [
            event[2] if event[0] == events.ITEM else event[0]
            for event in lone.receive(response(stream, data, bits), response(other, b"o", "be"))
            if event[0] != events.ACCEPTED and event[1] == stream
        ]
    assert heard == wanted
    ended = "broken" in wanted or "completed" in wanted
    assert (stream in lone.core.requested) is not ended
    assert [each.name for each in lone.sent()] == ["CANCEL"] * ("broken" in wanted)
    assert lone.core._requester.fragments_cost == 0


@pytest.mark.requirement("RS-R8")
def test_only_what_exceeds_a_frame_is_sent_in_fragments() -> None:
    lone = asked("REQUEST_STREAM", 9, settings=Settings(frame_bytes=256))
    most = 256 - 12
    data = bytes(range(244)) * 2
    assert lone.core.item(1, data[:most])
    assert lone.core.item(1, [data, b"x"])
    assert lone.core.complete(1, [data[:200], data[200:most], data[most:]])
    sent = lone.sent()
    assert [len(each.data) for each in sent] == [most, most, most, 1, most, most]
    begin, end = codec.BEGIN, codec.END
    flags = [begin | end, begin, 0, end, begin, end | codec.COMPLETE]
    assert [each.flags for each in sent] == flags
    assert b"".join(each.data for each in sent[1:4]) == data + b"x"
    lone, stream = requested(STREAM, 9)
    lone.receive(*(response(stream, each.data, _bits(each)) for each in sent))
    items = [b"".join(event[2]) for event in lone.heard if event[0] == events.ITEM]
    assert items == [data[:most], data + b"x", data]


def _bits(each: Frame) -> str:
    named = (("b", codec.BEGIN), ("e", codec.END), ("c", codec.COMPLETE))
    return "".join(name for name, flag in named if each.flags & flag)


# Ids


@pytest.mark.requirement("RS-R10")
def test_ids_of_both_sides_are_apart() -> None:
    pair = Pair()
    mine = [pair.client.core.request(STREAM, n=1) for _ in range(3)]
    theirs = [pair.server.core.request(STREAM, n=1) for _ in range(3)]
    assert (mine, theirs) == ([1, 3, 5], [2, 4, 6])
    lone, stream = requested(STREAM, 5)
    lone.receive(frame("REQUEST_STREAM", stream, n=7))
    assert lone.core.demand(stream) == 7
    lone.receive(frame("CANCEL", stream))
    assert stream in lone.core.requested and stream not in lone.core.responding


@pytest.mark.requirement("RS-R10")
@pytest.mark.requirement("RS-R11")
def test_an_id_in_use_is_ignored_and_may_come_again() -> None:
    lone = asked("REQUEST_STREAM", 1)
    for name in ("REQUEST_STREAM", "REQUEST_RESPONSE", "REQUEST_FNF", "REQUEST_SUB"):
        assert lone.receive(frame(name, 1, n=5)) == []
    assert lone.core.demand(1) == 1
    lone.core.complete(1)
    (event,) = lone.receive(frame("REQUEST_SUB", 1, n=5))
    assert event[:4] == (events.REQUEST, 1, SUB, 5)


@pytest.mark.requirement("RS-R11")
def test_what_is_ignored() -> None:
    lone = Lone()
    for name in ("RESPONSE", "ERROR", "CANCEL", "REQUEST_N"):
        assert lone.receive(frame(name, 9, n=0)) == []
    assert lone.receive(frame("SETUP", data=b"again")) == []
    assert lone.core.idle and lone.core.error is None
    client = Lone(client=True)
    assert client.receive(frame("SETUP")) == []
    assert client.core.error is None
    assert CODES["SETUP"] == codec.SETUP


def test_ids_end() -> None:
    lone = Lone(client=True)
    lone.core._requester._next = (1 << 64) - 1
    assert lone.core.request(FIRE) == (1 << 64) - 1
    with pytest.raises(LocalProtocolError, match="no stream id is left"):
        lone.core.request(FIRE)
