"""Streams that come and go in one chunk."""

from __future__ import annotations

from typing import Any

import pytest

from aqueduct.config import Bpmux as Settings
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import SINK_OUT, STREAM_IN
from tests.protocol.bpmux.pair import Lone, Side

WHOLE = "5a" + "01" + "03" + "616263" + "09" + "00"
"""The peer's sink 1 with the payload abc, credit 9, and an end without a payload."""


def listening(credit: int = 100, **limits: Any) -> Side:
    """One that grants so much of its top-level's credit."""
    side = Side(Mux(Settings(**limits)))
    side.mux.credit(side.mux.top_stream, credit)
    side.take_all()
    return side


@pytest.mark.requirement("BP-R5")
@pytest.mark.requirement("BP-12")
@pytest.mark.parametrize("cut", range(1, len(WHOLE) // 2 + 1))
def test_however_it_is_cut_the_same_is_reported(cut: int) -> None:
    data = bytes.fromhex(WHOLE)
    side = listening()
    side.mux.receive_data(data[:cut])
    side.mux.receive_data(data[cut:])
    assert side.mux.top_stream.credit_in == 97
    assert side.mux.count(STREAM_IN) == 1
    entity = side.mux.find(STREAM_IN, 1)
    assert entity is not None
    assert (entity.credit_out, entity.end_in, entity.end_out) == (9, True, False)
    found = side.drain()
    payload = [event for event in found if event[0] == events.PAYLOAD]
    assert [event[0] for event in found if event not in payload] == [
        events.OPENED, events.CREDIT, events.ENDED,
    ]  # fmt: skip
    assert b"".join(event[2] for event in payload) == b"abc"
    assert {event[4] for event in payload} == {side.mux.top_stream}
    assert side.take_all() == bytes.fromhex("a101"), "the end is acknowledged"
    assert side.mux.count(STREAM_IN) == 0


def test_a_run_of_them_in_one_read() -> None:
    side = listening()
    text = "".join(f"5a{number:02x}0178" + "0900" for number in range(1, 21))
    side.mux.receive_data(bytes.fromhex(text))
    ends = [event[1].identifier for event in side.drain() if event[0] == events.ENDED]
    assert ends == list(range(1, 21))
    assert side.mux.top_stream.credit_in == 80
    assert side.take_all() == b"".join(bytes([0xA1, number]) for number in range(1, 21))


@pytest.mark.parametrize(
    ("text", "limits", "words"),
    [
        pytest.param("5a01657800" + "00" * 120, {}, "has credit for 100", id="credit"),
        pytest.param(
            "5a0103616263" + "09f800",
            {},
            "the length of an end",
            id="padded length",
        ),
        pytest.param("5a0103616263" + "f80900", {}, "the credit is not in", id="padded credit"),
        pytest.param(WHOLE + WHOLE, {}, "sender has ended", id="again"),
        pytest.param(
            WHOLE + WHOLE.replace("5a01", "5a02"),
            {"entities": 1},
            "one above Bpmux.entities",
            id="one too many",
        ),
        pytest.param(
            WHOLE + "4101",
            {},
            "sender has ended",
            id="acknowledgement",
        ),
        pytest.param("4201" + "00", {}, "opening it needs a payload", id="an end of nothing"),
        pytest.param("620000" + WHOLE, {}, "after the top-level ended", id="after the top-level"),
    ],
)
@pytest.mark.requirement("BP-4")
@pytest.mark.requirement("BP-8")
@pytest.mark.requirement("BP-10")
@pytest.mark.requirement("BP-13")
@pytest.mark.requirement("BP-R5")
@pytest.mark.requirement("BP-R12")
def test_what_is_not_allowed_fails(text: str, limits: dict[str, int], words: str) -> None:
    side = listening(**limits)
    side.mux.receive_data(bytes.fromhex(text))
    assert side.error is not None
    assert words in str(side.error)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 300])
@pytest.mark.parametrize("credit", [0, 10, 64, 73, 74, 1000])
@pytest.mark.parametrize("limit", [1, 40, 1 << 20])
@pytest.mark.requirement("BP-R5")
@pytest.mark.requirement("BP-10")
def test_what_is_opened_written_and_ended_leaves_in_its_order(
    size: int, credit: int, limit: int
) -> None:
    """Whatever credit there is, however much may leave with an opening chunk, or at once."""
    side, far = Lone(Settings(opening=64)), listening(2000)
    mux = side.mux
    mux.top_sink.keep = 10
    side.receive("a800" + f"{credit:02x}" if credit < 248 else "a800f903e8")
    data = [bytes(size // 2), b"x" * (size - size // 2)]
    entity = mux.open_sink(credit=9, keep=9, identifier=1)
    mux.write(entity, data)
    mux.end(entity)
    other = mux.open_sink([b"other"], identifier=2)
    while not mux.idle:
        side.take(limit)
    opening = min(size, 64, max(credit - 10, 0))
    assert mux.top_sink.credit_out >= min(credit, 10)
    assert entity.queued == size - opening, "as much as there is credit for opens it"
    if not entity.end_out:
        side.receive("a801f9ffff")
    while not mux.idle:
        side.take(limit)
    assert (entity.end_out, other.opened, entity.credit_in) == (True, True, 9)
    assert mux.count(SINK_OUT) == 3
    for byte in side.sent:
        far.mux.receive_data(bytes([byte]))
        for event in far.drain():
            if event[0] == events.OPENED:
                far.mux.credit(event[1], 1000)
        far.take_all()
    assert far.error is None
    payloads = [event for event in far.events if event[0] == events.PAYLOAD]
    assert b"".join(event[2] for event in payloads if event[1].identifier == 1) == b"".join(data)


@pytest.mark.requirement("BP-13")
@pytest.mark.requirement("BP-R8")
def test_an_acknowledgement_ends_it_and_its_number_is_free() -> None:
    side = Lone()
    side.receive("a80064")
    entity = side.mux.open_sink([b"abc"], credit=9, keep=9, identifier=1)
    side.mux.end(entity)
    assert side.take_all() == bytes.fromhex(WHOLE)
    side.drain()
    side.receive("a101")
    assert side.of(events.ACKNOWLEDGED) == [(entity,)]
    assert entity.gone
    assert side.mux.find(SINK_OUT, 1) is None
    assert side.mux.open_sink([b"abc"], identifier=1) is not entity
