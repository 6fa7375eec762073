"""What received chunks do, and which ones end the connection, by hand-written bytes."""

from __future__ import annotations

from typing import Any

import pytest

from aqueduct.dissect.bpmux_scenarios import Session
from aqueduct.errors import FrameError, LocalProtocolError, RemoteProtocolError, SequenceError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.state import (
    PLACES,
    REQ_IN,
    REQ_OUT,
    SINK_IN,
    SINK_OUT,
    STREAM_IN,
    STREAM_OUT,
)
from tests.protocol.bpmux.pair import Lone
from tests.speedups.test_bpmux import VECTORS

ALL = {
    "request": lambda mux: mux.request(credit=9, identifier=1),
    "sink": lambda mux: mux.open_sink(credit=9, identifier=2),
    "stream": lambda mux: mux.open_stream(credit=9, identifier=3),
    "duplex": lambda mux: mux.open_duplex(credit=9, identifier=4),
}


def opened() -> Lone:
    """One with an entity of each kind, its own (1 to 4) and the peer's (11 to 14), with credit."""
    lone = Lone()
    for make in ALL.values():
        make(lone.mux)
    lone.mux.credit(lone.mux.top_stream, 100)
    lone.receive("a80064" + "100b00" + "500c00" + "900d00" + "d00e00")
    lone.drain()
    for place, identifier in ((REQ_IN, 11), (STREAM_IN, 12), (SINK_IN, 13), (STREAM_IN, 14)):
        entity = lone.mux.find(place, identifier)
        assert entity is not None
        lone.mux.credit(entity, 9)
    lone.take_all()
    lone.events.clear()
    return lone


def fails(lone: Lone, text: str, match: str) -> RemoteProtocolError:
    """These bytes end the connection, with these words; nothing is sent or done after it."""
    lone.drain()
    lone.receive(text)
    error = lone.error
    assert error is not None, "it went on"
    assert match in str(error)
    assert lone.drain()[-1] == (events.FAILED, error)
    lone.receive("a80001")
    lone.mux.message(b"")
    lone.mux.consumed(lone.mux.top_stream, 1)
    assert lone.take_all() == b""
    assert lone.drain() == []
    assert lone.mux.idle
    assert lone.mux.expected() is None
    assert lone.mux.next_deadline() is None
    return error


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("case", VECTORS["sessions"], ids=lambda case: case["name"])
def test_sessions_have_their_outcome(case: dict[str, Any], step: int) -> None:
    session = Session()
    for what, text in case["steps"]:
        data = bytes.fromhex(text)
        if what == "send":
            session.send(data)
            continue
        for at in range(0, len(data), step or len(data)):
            session.receive(data[at : at + (step or len(data))])
    assert session.acks.hex() == case["result"]["acks"]
    assert session.delivered == case["result"]["delivered"]


@pytest.mark.requirement("BP-4")
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("case", VECTORS["bad_sessions"], ids=lambda case: case["name"])
def test_bad_sessions_end_at_their_last_step(case: dict[str, Any], step: int) -> None:
    session = Session()
    for k, (what, text) in enumerate(case["steps"]):
        data = bytes.fromhex(text)
        last = k == len(case["steps"]) - 1
        if what == "recv" and last:
            with pytest.raises(SequenceError):
                for at in range(0, len(data), step or len(data)):
                    session.receive(data[at : at + (step or len(data))])
            assert session.mux.take(1 << 20) == ([], 0, [])
        elif what == "recv":
            session.receive(data)
        elif last:
            with pytest.raises(LocalProtocolError):
                session.send(data)
            assert session.mux.error is None
        else:
            session.send(data)


@pytest.mark.requirement("BP-5")
def test_the_beginning_is_the_top_level_alone() -> None:
    mux = Lone().mux
    assert [mux.count(place) for place in range(6)] == [0, 0, 1, 0, 1, 0]
    for entity, place in ((mux.top_sink, SINK_OUT), (mux.top_stream, STREAM_OUT)):
        assert mux.find(place, 0) is entity
        assert (entity.credit_in, entity.credit_out, entity.partial) == (0, 0, 0)
        assert not entity.end_in
        assert not entity.end_out
    assert mux.idle


@pytest.mark.requirement("BP-6")
@pytest.mark.requirement("BP-R2")
@pytest.mark.parametrize(
    ("text", "place", "identifier"),
    [
        ("080b05", REQ_IN, 11),
        ("280105", REQ_OUT, 1),
        ("480c05", STREAM_IN, 12),
        ("680305", STREAM_OUT, 3),
        ("880d05", SINK_IN, 13),
        ("a80205", SINK_OUT, 2),
        ("480e05", STREAM_IN, 14),
        ("880e05", SINK_IN, 14),
        ("680405", STREAM_OUT, 4),
        ("a80405", SINK_OUT, 4),
        ("a80005", SINK_OUT, 0),
        ("680005", STREAM_OUT, 0),
    ],
)
def test_a_type_names_the_mirrored_map(text: str, place: int, identifier: int) -> None:
    lone = opened()
    entity = lone.mux.find(place, identifier)
    assert entity is not None
    before = entity.credit_out
    others = {
        (each, number): other.credit_out
        for each in range(6)
        for number in range(15)
        if (other := lone.mux.find(each, number)) is not None and other is not entity
    }
    lone.receive(text)
    assert lone.of(events.CREDIT) == [(entity,)]
    assert entity.credit_out == before + 5
    for (each, number), credit in others.items():
        found = lone.mux.find(each, number)
        assert found is not None
        assert found.credit_out == credit, PLACES[each]


@pytest.mark.requirement("BP-2")
@pytest.mark.requirement("BP-R2")
@pytest.mark.requirement("BP-R3")
@pytest.mark.parametrize(
    ("place", "identifier", "text"),
    [
        (REQ_OUT, 1, "0801f90100"),
        (REQ_IN, 11, "280bf90100"),
        (SINK_OUT, 2, "4802f90100"),
        (SINK_IN, 13, "680df90100"),
        (STREAM_OUT, 3, "8803f90100"),
        (STREAM_IN, 12, "a80cf90100"),
        (SINK_OUT, 0, "6800f90100"),
        (STREAM_OUT, 0, "a800f90100"),
    ],
)
def test_own_chunks_use_the_plain_map_and_the_top_level_in(
    place: int, identifier: int, text: str
) -> None:
    lone = opened()
    entity = lone.mux.find(place, identifier)
    assert entity is not None
    before = entity.credit_in
    lone.mux.credit(entity, 256)
    assert entity.credit_in == before, "it counts when it is sent"
    assert lone.answer() == text
    assert entity.credit_in == before + 256


@pytest.mark.requirement("BP-7")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("300100", "In-Request 1 names nothing"),
        ("200100", "In-Request 1 names nothing"),
        ("d00000", "a Duplex with identifier 0"),
    ],
)
def test_what_cannot_be_unknown(text: str, match: str) -> None:
    fails(Lone(), text, match)


@pytest.mark.requirement("BP-7")
@pytest.mark.parametrize("text", ["700000", "a80001", "680001", "6400"])
def test_the_top_level_is_not_reopened(text: str) -> None:
    lone = Lone()
    lone.receive("620000" + "a20000")
    assert lone.answer() == "a100" + "6100"
    assert lone.mux.find(SINK_OUT, 0) is lone.mux.find(STREAM_OUT, 0) is None
    fails(lone, text, "names nothing that this side has opened (BP-7")


@pytest.mark.requirement("BP-R4")
@pytest.mark.parametrize("text", ["700100", "6401", "a80101", "a101", "6101", "a20100"])
def test_an_in_entity_is_never_unknown(text: str) -> None:
    fails(Lone(), text, "names nothing that this side has opened")


@pytest.mark.requirement("BP-8")
@pytest.mark.parametrize(
    "text", ["0401", "0001", "480101", "420100", "8401", "8001", "0101", "4101"]
)
def test_opening_needs_a_payload(text: str) -> None:
    fails(Lone(), text, "opening it needs a payload (BP-8)")


@pytest.mark.requirement("BP-8")
@pytest.mark.parametrize(
    ("text", "place"), [("1005", REQ_IN), ("5005", STREAM_IN), ("9005", SINK_IN), ("d005", SINK_IN)]
)
def test_unknown_is_created(text: str, place: int) -> None:
    lone = Lone()
    lone.receive(text + "00")
    entity = lone.last()
    assert (entity.place, entity.identifier) == (place, 5)
    assert lone.delivered() == [(PLACES[place], 5, "payload", b"")]
    duplex = text.startswith("d")
    assert (lone.mux.find(STREAM_IN, 5) is not None) == (duplex or place == STREAM_IN)
    assert entity.twin is (lone.mux.find(STREAM_IN, 5) if duplex else None)


@pytest.mark.requirement("BP-8")
@pytest.mark.parametrize("before", ["5005", "d005"])
def test_a_duplex_in_use_for_a_sink(before: str) -> None:
    lone = Lone()
    lone.receive(before + "00")
    fails(lone, "d00500", "Duplex")


@pytest.mark.requirement("BP-9")
@pytest.mark.parametrize("before", ["9005", "d005"])
def test_a_known_duplex(before: str) -> None:
    lone = Lone()
    lone.receive(before + "00")
    fails(lone, "d00500", "a Duplex for <sink_in 5>, which is known (BP-9)")


@pytest.mark.requirement("BP-9")
@pytest.mark.requirement("BP-R6")
@pytest.mark.parametrize("text", ["100b01aa", "900d01aa", "900e01aa"])
def test_who_may_not_carry_payloads(text: str) -> None:
    fails(opened(), text, "after its opening (BP-9, BP-R6)")


@pytest.mark.requirement("BP-R6")
def test_an_in_stream_never_carries_a_payload() -> None:
    assert isinstance(fails(opened(), "b00201aa", "a payload on In-Stream"), FrameError)


@pytest.mark.requirement("BP-9")
@pytest.mark.requirement("BP-R6")
@pytest.mark.parametrize(
    ("text", "place", "identifier"),
    [
        ("3001", REQ_OUT, 1),
        ("7003", STREAM_OUT, 3),
        ("7004", STREAM_OUT, 4),
        ("500c", STREAM_IN, 12),
        ("500e", STREAM_IN, 14),
        ("7000", STREAM_OUT, 0),
    ],
)
def test_who_carries_payloads_and_pays_for_them(text: str, place: int, identifier: int) -> None:
    lone = opened()
    entity = lone.mux.find(place, identifier)
    assert entity is not None
    credit = entity.credit_in
    lone.receive(text + "03aabbcc")
    assert lone.of(events.PAYLOAD) == [(entity, b"\xaa\xbb\xcc", True, entity, 3)]
    assert entity.credit_in == credit - 3


@pytest.mark.requirement("BP-10")
@pytest.mark.parametrize(
    ("text", "credit"),
    [
        ("3001", 9),
        ("7003", 9),
        ("500c", 9),
        ("420c", 9),
        ("020b", 9),
        ("820d", 9),
        ("a202", 9),
        ("6204", 9),
    ],
)
def test_more_than_the_credit(text: str, credit: int) -> None:
    fails(opened(), text + "0a" + "00" * 10, f"has credit for {credit} (BP-10)")


@pytest.mark.requirement("BP-10")
def test_credit_is_spent_to_the_last_byte() -> None:
    lone = opened()
    lone.receive("500c08" + "00" * 8 + "500c01aa")
    entity = lone.mux.find(STREAM_IN, 12)
    assert entity is not None
    assert entity.credit_in == 0
    fails(lone, "500c01aa", "has credit for 0")


@pytest.mark.requirement("BP-10")
@pytest.mark.parametrize(
    ("text", "place", "identifier"),
    [
        ("380103aabbcc05", REQ_OUT, 1),
        ("580c03aabbcc05", STREAM_IN, 12),
        ("e005500c03aabbcc", STREAM_IN, 12),
        ("420c03aabbcc", STREAM_IN, 12),
        ("520c01aa02bbcc", STREAM_IN, 12),
        ("a20203aabbcc", SINK_OUT, 2),
    ],
)
def test_every_payload_costs(text: str, place: int, identifier: int) -> None:
    """Whatever stands beside it in the chunk, in pieces or whole, at the end or before."""
    lone = opened()
    entity = lone.mux.find(place, identifier)
    assert entity is not None
    lone.receive(text)
    assert lone.error is None
    assert entity.credit_in == 6


@pytest.mark.requirement("BP-10")
def test_credit_above_64_bits() -> None:
    lone = Lone()
    lone.receive("a800ff" + "ff" * 8)
    assert lone.mux.top_sink.credit_out == (1 << 64) - 1
    assert lone.of(events.CREDIT) == [(lone.mux.top_sink,)]
    lone.receive("a80000")
    assert lone.of(events.CREDIT) == [(lone.mux.top_sink,)]
    fails(lone, "a80001", "credit above 2^64 - 1 for <sink_out 0> (BP-10)")


@pytest.mark.requirement("BP-11")
@pytest.mark.requirement("BP-14")
def test_a_response_is_acknowledged() -> None:
    lone = opened()
    lone.receive("300100")
    assert lone.answer() == "0101"
    assert lone.mux.find(REQ_OUT, 1) is None
    assert isinstance(fails(opened(), "32010000", "a response with an end (BP-11)"), FrameError)


@pytest.mark.requirement("BP-12")
@pytest.mark.requirement("BP-14")
@pytest.mark.requirement("BP-R8")
@pytest.mark.parametrize(
    ("text", "place", "identifier", "answer"),
    [
        ("020b", REQ_IN, 11, "210b"),
        ("2201", REQ_OUT, 1, "0101"),
        ("420c", STREAM_IN, 12, "a10c"),
        ("6203", STREAM_OUT, 3, "8103"),
        ("820d", SINK_IN, 13, "610d"),
        ("a202", SINK_OUT, 2, "4102"),
    ],
)
def test_ends_are_acknowledged_by_the_inverted_type(
    text: str, place: int, identifier: int, answer: str
) -> None:
    lone = opened()
    entity = lone.mux.find(place, identifier)
    assert entity is not None
    lone.receive(text + "00")
    assert lone.of(events.ENDED) == [(entity, b"", entity, 0)]
    assert entity.end_in
    assert not entity.gone
    assert lone.answer() == answer
    assert entity.gone
    assert lone.mux.find(place, identifier) is None


@pytest.mark.requirement("BP-R3")
@pytest.mark.parametrize(("text", "answer"), [("620000", "a100"), ("a20000", "6100")])
def test_the_top_level_is_acknowledged_with_in(text: str, answer: str) -> None:
    lone = Lone()
    lone.receive(text)
    assert lone.answer() == answer


@pytest.mark.requirement("BP-R3")
def test_a_peer_may_use_zero_for_its_own() -> None:
    lone = Lone()
    lone.receive("500000" + "900000" + "100000")
    assert [lone.mux.count(place) for place in range(6)] == [0, 1, 1, 1, 1, 1]
    for place in (SINK_IN, STREAM_IN):
        entity = lone.mux.find(place, 0)
        assert entity is not None
        for call in (
            lambda entity=entity: lone.mux.credit(entity, 1),
            lambda entity=entity: lone.mux.write(entity, b"x"),
            lambda entity=entity: lone.mux.end(entity),
            lambda entity=entity: lone.mux.ping(entity, 0.0),
            lambda entity=entity: lone.mux.heartbeat(entity),
        ):
            with pytest.raises(LocalProtocolError, match="0 is the top-level"):
                call()
    assert lone.take_all() == b""


@pytest.mark.requirement("BP-12")
@pytest.mark.requirement("BP-R8")
@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("420c00", "420c00"),
        ("420c00", "400c"),
        ("420c00", "480c01"),
        ("020b00", "040b"),
        ("020b00", "020b00"),
        ("620000", "620000"),
        ("300100", "2401"),
    ],
)
def test_nothing_follows_an_end(end: str, text: str, taken: bool) -> None:
    lone = opened()
    lone.receive(end)
    assert lone.error is None
    if taken:
        lone.take_all()
    fails(lone, text, "(BP-")


@pytest.mark.requirement("BP-12")
@pytest.mark.requirement("BP-R8")
def test_ends_that_cross_remove_without_an_acknowledgement() -> None:
    lone = opened()
    sink = lone.mux.find(SINK_OUT, 2)
    assert sink is not None
    lone.mux.end(sink)
    assert lone.answer() == "420200"
    assert sink.end_out
    lone.receive("a20200")
    assert lone.of(events.ENDED) == [(sink, b"", sink, 0)]
    assert sink.gone
    assert lone.answer() == ""
    assert lone.mux.find(SINK_OUT, 2) is None
    # The identifier is free again.
    again = lone.mux.open_sink(identifier=2)
    assert lone.answer() == "500200"
    assert lone.mux.find(SINK_OUT, 2) is again


@pytest.mark.requirement("BP-R7")
def test_a_cancel_crosses_the_response() -> None:
    lone = opened()
    request = lone.mux.find(REQ_IN, 11)
    assert request is not None
    lone.receive("080b05")
    lone.mux.respond(request, b"12345")
    assert lone.answer() == "300b05" + b"12345".hex()
    assert request.end_out
    lone.receive("020b00")
    assert request.gone
    assert lone.answer() == ""
    # The other side of the same: the response comes when the cancel has left.
    lone = opened()
    asked = lone.mux.find(REQ_OUT, 1)
    assert asked is not None
    lone.mux.end(asked)
    assert lone.answer() == "020100"
    lone.receive("300101aa")
    assert lone.delivered() == [("req_out", 1, "payload", b"\xaa")]
    assert asked.gone
    assert lone.answer() == ""


@pytest.mark.requirement("BP-13")
@pytest.mark.parametrize(
    ("text", "place", "identifier"),
    [
        ("010b", REQ_IN, 11),
        ("2101", REQ_OUT, 1),
        ("410c", STREAM_IN, 12),
        ("6103", STREAM_OUT, 3),
        ("810d", SINK_IN, 13),
        ("a102", SINK_OUT, 2),
        ("a100", SINK_OUT, 0),
        ("6100", STREAM_OUT, 0),
    ],
)
def test_an_acknowledgement_removes_what_has_ended(text: str, place: int, identifier: int) -> None:
    lone = opened()
    entity = lone.mux.find(place, identifier)
    assert entity is not None
    lone.mux.end(entity)
    fails_early = opened()
    fails(fails_early, text, "which has not ended (BP-13)")
    lone.take_all()
    lone.receive(text)
    assert lone.of(events.ACKNOWLEDGED) == [(entity,)]
    assert entity.gone
    assert lone.mux.find(place, identifier) is None


@pytest.mark.requirement("BP-13")
@pytest.mark.parametrize("flags", [0x11, 0x09, 0x05, 0x03])
def test_an_acknowledgement_stands_alone(flags: int) -> None:
    lone = opened()
    sink = lone.mux.find(SINK_OUT, 2)
    assert sink is not None
    lone.mux.end(sink)
    lone.take_all()
    text = f"{0x80 | flags:02x}0d" + "00" * 2
    assert isinstance(fails(lone, text, "ack-end stands alone"), FrameError)


@pytest.mark.requirement("BP-R5")
def test_an_opening_payload_is_charged_to_the_top_level() -> None:
    lone = opened()
    top = lone.mux.top_stream
    lone.receive("520505" + b"12345".hex() + "02aabb")
    assert top.credit_in == 100 - 7
    entity = lone.last()
    assert lone.of(events.PAYLOAD) == [(entity, b"12345", True, top, 5)]
    assert lone.of(events.ENDED) == [(entity, b"\xaa\xbb", top, 2)]
    fails(lone, "50065e" + "00" * 94, "<stream_out 0> has credit for 93")


@pytest.mark.requirement("BP-R5")
@pytest.mark.parametrize("taken", [False, True])
def test_no_opening_payload_after_the_end_of_the_top_level(taken: bool) -> None:
    for text in ("100201aa", "12020001aa"):
        lone = opened()
        lone.receive("620000")
        if taken:
            lone.take_all()
        lone.receive("100100")  # without a byte it is possible
        assert lone.error is None
        fails(lone, text, "after the top-level ended (BP-R5)")


@pytest.mark.requirement("BP-R5")
def test_our_own_end_of_the_top_stream_stops_opening_payloads_when_it_is_seen() -> None:
    lone = opened()
    lone.mux.end(lone.mux.top_stream)
    assert lone.answer() == "a20000"
    lone.receive("100101aa")  # it was under way
    assert lone.error is None
    lone.receive("6100")
    fails(lone, "100201aa", "after the top-level ended (BP-R5)")


@pytest.mark.requirement("BP-R9")
def test_the_opening_chunk_of_a_duplex_acts_on_one_half() -> None:
    lone = Lone()
    lone.receive("de05000700")  # payload, credit, ping, end
    sink = lone.last()
    stream = lone.mux.find(STREAM_IN, 5)
    assert sink.place == SINK_IN
    assert stream is not None
    assert (sink.credit_out, stream.credit_out) == (7, 0)
    assert lone.of(events.PING) == [(sink,)]
    assert lone.of(events.ENDED)[0][0] is sink
    assert lone.answer() == "6105"  # In-Sink
    assert sink.gone
    assert not stream.gone
    lone.receive("420500")
    assert lone.of(events.ENDED)[1][0] is stream
    assert lone.answer() == "a105"


@pytest.mark.requirement("BP-5")
def test_the_top_level_has_two_halves_of_its_own() -> None:
    mux = Lone().mux
    assert mux.top_sink is mux.find(SINK_OUT, 0)
    assert mux.top_stream is mux.find(STREAM_OUT, 0)
    assert mux.top_sink is not mux.top_stream
    assert (mux.top_sink.place, mux.top_stream.place) == (SINK_OUT, STREAM_OUT)
