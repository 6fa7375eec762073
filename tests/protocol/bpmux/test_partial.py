"""Partial mode: payloads in pieces, received and sent (BP-16, BP-R10)."""

from __future__ import annotations

import pytest

from aqueduct.config import Bpmux as Settings
from aqueduct.errors import FrameError, LimitExceeded, LocalProtocolError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.state import REQ_IN, REQ_OUT, SINK_IN, STREAM_IN, STREAM_OUT
from tests.protocol.bpmux.pair import Lone, MuxPair
from tests.protocol.bpmux.test_receiving import fails, opened


@pytest.mark.requirement("BP-16")
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("tag", ["e0", "f8", "e8", "f0"])
def test_pieces_are_one_payload(tag: str, step: int) -> None:
    """The two middle bits of the tag are ignored."""
    for whole in (False, True):
        lone = Lone(whole=whole)
        lone.mux.credit(lone.mux.top_stream, 100)
        lone.take_all()
        lone.receive(tag + "05" + "700001aa" + "780000" + "07" + "700002bbcc" + "700002ddee", step)
        assert lone.delivered() == [("stream_out", 0, "payload", bytes.fromhex("aabbccddee"))]
        assert lone.of(events.CREDIT) == [(lone.mux.top_stream,)]
        assert lone.mux.top_stream.partial == 0
        lone.receive("700001ff", step)
        assert lone.delivered()[1:] == [("stream_out", 0, "payload", b"\xff")]


@pytest.mark.requirement("BP-16")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("e000", "is zero or not in the fewest bytes"),
        ("e10005", "is zero or not in the fewest bytes"),
        ("e700ffffffffffffff", "is zero or not in the fewest bytes"),
        ("e001700002aabb", "above the total size of 1"),
        ("e001620002aabb", "above the total size of 1"),
        ("e005720002aabb00", "an end inside a partial payload"),
    ],
)
def test_wrong_totals(text: str, match: str) -> None:
    lone = opened()
    assert isinstance(fails(lone, text, match), FrameError)


@pytest.mark.requirement("BP-16")
@pytest.mark.requirement("BP-R10")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("700003bbccdd", "whose partial payload lacks 2 (BP-16)"),
        ("620001bb", "mixes payload and end payload in partial mode (BP-16)"),
        ("720001bb00", "an end inside a partial payload"),
        ("e002700001bb", "which is in partial mode (BP-R10)"),
        ("e002620001bb", "which is in partial mode (BP-R10)"),
    ],
)
def test_what_may_not_follow_a_first_piece(text: str, match: str) -> None:
    lone = opened()
    lone.receive("e003700001aa")
    assert lone.error is None
    fails(lone, text, match)


@pytest.mark.requirement("BP-16")
def test_end_payloads_may_be_in_pieces() -> None:
    lone = opened()
    lone.receive("e003620001aa")
    assert lone.of(events.ENDED) == []
    assert lone.answer() == "", "it takes effect with the last piece"
    lone.receive("640062" + "0002bbcc")
    assert lone.of(events.PING) == [(lone.mux.top_stream,)]
    assert lone.delivered() == [("stream_out", 0, "end", b"\xaa\xbb\xcc")]
    assert lone.answer() == "a100"
    for text, match in (
        ("620003bbccdd", "lacks 2 (BP-16)"),
        ("700001bb", "mixes payload and end payload"),
        ("720001bb00", "mixes payload and end payload"),
    ):
        lone = opened()
        lone.receive("e003620001aa")
        fails(lone, text, match)


@pytest.mark.requirement("BP-R10")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("e0056400", "a Partial before a chunk without a payload"),
        ("e0056100", "a Partial before a chunk without a payload"),
        ("e005e005700001aa", "a Partial follows a Partial"),
    ],
)
def test_a_partial_has_its_chunk(text: str, match: str) -> None:
    assert isinstance(fails(opened(), text, match), FrameError)


@pytest.mark.requirement("BP-R10")
@pytest.mark.parametrize(
    ("tag", "place"), [("10", REQ_IN), ("50", STREAM_IN), ("90", SINK_IN), ("d0", SINK_IN)]
)
def test_an_opening_payload_in_pieces_is_all_on_the_top_level(tag: str, place: int) -> None:
    lone = opened()
    top = lone.mux.top_stream
    lone.receive("e006" + tag + "2002aabb")
    entity = lone.last()
    assert (entity.place, entity.identifier) == (place, 32)
    assert top.credit_in == 98
    lone.receive(tag + "2000" + tag + "2002ccdd")
    lone.receive(tag + "2002eeff")
    assert top.credit_in == 94
    assert lone.delivered()[-1][2:] == ("payload", bytes.fromhex("aabbccddeeff"))
    payers = {event[3] for event in lone.of(events.PAYLOAD)}
    assert payers == {top}
    # After it, the type is as it always was.
    known = {"d0": "which is known", "50": "has credit for 0"}.get(tag, "after its opening")
    fails(lone, tag + "2001aa", known)


@pytest.mark.requirement("BP-R10")
def test_pieces_keep_the_type_of_the_first() -> None:
    lone = opened()
    lone.receive("e003d02001aa")
    lone.receive("502000" + "882005" + "8420")  # the other half, credit and ping: no pieces
    assert lone.error is None
    fails(lone, "902002bbcc", "a payload for <sink_in 32> after its opening")
    lone = opened()
    lone.receive("e003902001aa")
    fails(lone, "d02002bbcc", "a Duplex for <sink_in 32>, which is known (BP-9)")
    lone = opened()
    lone.receive("e003d02001aa")
    fails(lone, "82200100", "comes as Out-Stream; it began as Duplex (BP-R10)")


@pytest.mark.requirement("BP-R10")
def test_a_response_in_pieces_is_acknowledged_when_whole() -> None:
    lone = opened()
    lone.receive("e003300101aa")
    assert lone.answer() == ""
    lone.receive("300100" + "2401")
    assert lone.answer() == "0001", "a pong"
    lone.receive("300102bbcc")
    assert lone.answer() == "0101"
    assert lone.delivered() == [("req_out", 1, "payload", b"\xaa\xbb\xcc")]
    assert lone.mux.find(REQ_OUT, 1) is None


@pytest.mark.requirement("BP-R10")
def test_payload_and_end_in_one_chunk_when_it_completes() -> None:
    lone = opened()
    lone.receive("e003700001aa" + "720002bbcc01dd")
    assert lone.delivered() == [
        ("stream_out", 0, "payload", b"\xaa\xbb\xcc"),
        ("stream_out", 0, "end", b"\xdd"),
    ]
    assert lone.answer() == "a100"


@pytest.mark.requirement("BP-R12")
def test_pieces_are_granted_back_at_once_where_payloads_are_joined() -> None:
    lone = Lone(whole=True)
    lone.mux.credit(lone.mux.top_stream, 4)
    lone.take_all()
    lone.receive("e009700004aabbccdd")
    assert lone.answer() == "a80004"
    lone.receive("700004aabbccdd")
    assert lone.answer() == "a80004"
    lone.receive("700001ee")
    assert lone.answer() == ""
    top = lone.mux.top_stream
    data = bytes.fromhex("aabbccddaabbccddee")
    assert lone.of(events.PAYLOAD) == [(top, data, True, top, 1)]
    # Without joining nobody has consumed them.
    lone = Lone()
    lone.mux.credit(lone.mux.top_stream, 4)
    lone.take_all()
    lone.receive("e009700004aabbccdd")
    assert lone.answer() == ""


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("e011700001aa", True),
        ("e011620001aa", True),
        ("e011620001aa", False),
        ("700011" + "00" * 17, True),
        ("620011" + "00" * 17, False),
        ("620011" + "00" * 17, True),
    ],
)
def test_what_is_put_together_has_a_limit(text: str, whole: bool) -> None:
    lone = Lone(Settings(payload_bytes=16), whole=whole)
    lone.mux.credit(lone.mux.top_stream, 100)
    lone.take_all()
    assert isinstance(fails(lone, text, "is above Bpmux.payload_bytes (16)"), LimitExceeded)


def test_a_limit_is_not_for_what_is_passed_on() -> None:
    lone = Lone(Settings(payload_bytes=16))
    lone.mux.credit(lone.mux.top_stream, 100)
    lone.take_all()
    lone.receive("e020700020" + "00" * 32 + "700020" + "00" * 32)
    assert [len(entry[3]) for entry in lone.delivered()] == [32, 32]


@pytest.mark.requirement("BP-15")
@pytest.mark.requirement("BP-16")
@pytest.mark.parametrize("chop", [0, 3])
@pytest.mark.parametrize("size", [1, 9, 300, 70_000])
def test_a_payload_larger_than_the_window_arrives(size: int, chop: int) -> None:
    """A request, its response, a message and an end, each in pieces through windows of 8 bytes."""
    pair = MuxPair(top=8, whole=True, chop=chop)
    data = bytes(index % 251 for index in range(size))
    window = 8 if size < 1000 else 4096
    pair.left.mux.consumed(pair.left.mux.top_stream, window)
    pair.right.mux.consumed(pair.right.mux.top_stream, window)
    request = pair.left.mux.request(data, total=size, credit=window)
    pair.run()
    got = pair.right.last()
    assert pair.right.delivered() == [("req_in", 0, "payload", data)]
    pair.right.mux.respond(got, data[: size // 2], total=size)
    pair.run()
    pair.right.mux.write(got, data[size // 2 :])
    pair.run()
    assert pair.left.delivered() == [("req_out", 0, "payload", data)]
    assert request.gone
    sink = pair.left.mux.open_sink(data, total=size, credit=window)
    pair.run()
    pair.right.mux.credit(pair.right.last(), window)
    pair.left.mux.write(sink, data, total=size)
    pair.left.mux.end(sink, data, total=size)
    pair.run()
    assert [entry[2:] for entry in pair.right.delivered()[1:]] == [
        ("payload", data),
        ("payload", data),
        ("end", data),
    ]
    assert pair.left.mux.idle
    assert pair.left.mux.count(STREAM_OUT) == 1
    assert sink.gone


@pytest.mark.requirement("BP-15")
def test_nothing_comes_between_the_pieces_of_a_payload() -> None:
    lone = opened()
    lone.receive("a80205")
    sink = lone.mux.find(2, 2)
    assert sink is not None
    mux = lone.mux
    mux.write(sink, b"aabb", total=8)
    assert lone.answer() == "e008500204" + b"aabb".hex()
    for call in (
        lambda: mux.write(sink, b"x", whole=True),
        lambda: mux.write(sink, b"x", total=9),
        lambda: mux.write(sink, b"12345"),
        lambda: mux.end(sink),
        lambda: mux.end(sink, drop=True),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    mux.write(sink, b"ccdd")
    mux.end(sink, b"e", drop=True)  # what is begun leaves nevertheless
    assert lone.answer() == "500201" + b"c".hex()
    lone.receive("a80204")
    assert lone.answer() == "520203" + b"cdd".hex() + "01" + b"e".hex()


def test_a_payload_that_fits_needs_no_partial() -> None:
    lone = opened()
    lone.receive("a80205")
    sink = lone.mux.find(2, 2)
    assert sink is not None
    lone.mux.write(sink, b"abc", total=3)
    assert lone.answer() == "500203" + b"abc".hex()
