"""Streams that come and go in one chunk: the short way says and does what the general one does."""

from __future__ import annotations

from typing import Any

import pytest

from aqueduct.config import Bpmux as Settings
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import SINK_OUT, STREAM_IN, Entity
from tests.protocol.bpmux.pair import Lone, Side

WHOLE = "5a" + "01" + "03" + "616263" + "09" + "00"
"""The peer's sink 1 with the payload abc, credit 9, and an end without a payload."""


def listening(credit: int = 100, *, brief: bool = True, **limits: Any) -> Side:
    """One that grants so much of its top-level's credit."""
    side = Side(Mux(Settings(**limits), brief=brief))
    side.mux.credit(side.mux.top_stream, credit)
    side.take_all()
    return side


def told(side: Side) -> list[tuple[Any, ...]]:
    """What was reported since, with entities by name."""
    return [
        tuple(repr(item) if isinstance(item, Entity) else item for item in event)
        for event in side.drain()
    ]


@pytest.mark.requirement("BP-R5")
@pytest.mark.requirement("BP-12")
@pytest.mark.parametrize("cut", range(1, len(WHOLE) // 2 + 1))
def test_what_comes_whole_is_one_event_and_in_pieces_the_same_in_several(cut: int) -> None:
    data = bytes.fromhex(WHOLE)
    brief, plain = listening(), listening(brief=False)
    for side in (brief, plain):
        side.mux.receive_data(data[:cut])
        side.mux.receive_data(data[cut:])
        assert side.mux.top_stream.credit_in == 97
        assert side.mux.count(STREAM_IN) == 1
        entity = side.mux.find(STREAM_IN, 1)
        assert entity is not None
        assert (entity.credit_out, entity.end_in, entity.end_out) == (9, True, False)
    several = told(plain)
    assert [event[0] for event in several if event[0] != events.PAYLOAD] == [
        events.OPENED, events.CREDIT, events.ENDED,
    ]  # fmt: skip
    assert b"".join(event[2] for event in several if event[0] == events.PAYLOAD) == b"abc"
    whole = [(events.ARRIVED, "<stream_in 1>", b"abc", "<stream_out 0>", 3)]
    together = cut < 3 or cut == len(data)  # the head may come before
    assert told(brief) == (whole if together else several)
    for side in (brief, plain):
        assert side.take_all() == bytes.fromhex("a101"), "the end is acknowledged"
        assert side.mux.count(STREAM_IN) == 0


def test_a_run_of_them_in_one_read() -> None:
    side = listening()
    text = "".join(f"5a{number:02x}0178" + "0900" for number in range(1, 21))
    side.mux.receive_data(bytes.fromhex(text))
    assert [event[1].identifier for event in side.drain()] == list(range(1, 21))
    assert side.mux.top_stream.credit_in == 80
    assert side.take_all() == b"".join(bytes([0xA1, number]) for number in range(1, 21))


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        pytest.param("5a01657800" + "00" * 120, {}, id="above the top-level's credit"),
        pytest.param("5a0103616263" + "09f800", {}, id="a padded length of the end"),
        pytest.param("5a0103616263" + "f80900", {}, id="a padded credit"),
        pytest.param(WHOLE + WHOLE, {}, id="again before it is acknowledged"),
        pytest.param(WHOLE + WHOLE.replace("5a01", "5a02"), {"entities": 1}, id="one too many"),
        pytest.param(WHOLE + "4101", {}, id="an acknowledgement of what has not ended"),
        pytest.param("4201" + "00", {}, id="an end of nothing"),
    ],
)
@pytest.mark.requirement("BP-4")
@pytest.mark.requirement("BP-8")
@pytest.mark.requirement("BP-10")
@pytest.mark.requirement("BP-13")
@pytest.mark.requirement("BP-R12")
def test_what_is_not_allowed_fails_in_the_same_words(text: str, limits: dict[str, int]) -> None:
    errors = []
    for brief in (True, False):
        side = listening(brief=brief, **limits)
        side.mux.receive_data(bytes.fromhex(text))
        assert side.error is not None
        errors.append((type(side.error), str(side.error)))
    assert errors[0] == errors[1]


@pytest.mark.requirement("BP-R5")
def test_nothing_arrives_after_the_top_level_has_ended() -> None:
    errors = []
    for brief in (True, False):
        side = listening(brief=brief)
        side.mux.receive_data(bytes.fromhex("620000" + WHOLE))
        assert side.error is not None
        errors.append(str(side.error))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 300])
@pytest.mark.parametrize("credit", [0, 10, 64, 73, 74, 1000])
@pytest.mark.parametrize("limit", [1, 40, 1 << 20])
@pytest.mark.requirement("BP-R5")
@pytest.mark.requirement("BP-10")
def test_what_is_opened_ended_leaves_as_if_opened_written_and_ended(
    size: int, credit: int, limit: int
) -> None:
    """Whatever credit there is, however much may leave with an opening chunk, or at once."""
    sent = []
    for at_once in (True, False):
        side = Lone(Settings(opening=64))
        mux = side.mux
        mux.top_sink.keep = 10
        side.receive("a800" + f"{credit:02x}" if credit < 248 else "a800f903e8")
        data = [bytes(size // 2), b"x" * (size - size // 2)]
        if at_once:
            entity = mux.open_ended(data, credit=9, keep=9, identifier=1)
        else:
            entity = mux.open_sink(credit=9, keep=9, identifier=1)
            mux.write(entity, data)
            mux.end(entity)
        other = mux.open_sink([b"other"], identifier=2)
        while not mux.idle:
            side.take(limit)
        if not entity.end_out:
            side.receive("a801f9ffff")
        while not mux.idle:
            side.take(limit)
        assert entity.end_out
        assert (mux.count(SINK_OUT), other.opened) == (3, True)
        sent.append((side.sent, mux.top_sink.credit_out, entity.credit_in))
    assert sent[0] == sent[1]


@pytest.mark.requirement("BP-13")
@pytest.mark.requirement("BP-R8")
def test_an_acknowledgement_ends_it_and_its_number_is_free() -> None:
    side = Lone()
    side.receive("a80064")
    entity = side.mux.open_ended([b"abc"], credit=9, keep=9, identifier=1)
    assert side.take_all() == bytes.fromhex(WHOLE)
    side.drain()
    side.receive("a101")
    assert side.of(events.ACKNOWLEDGED) == [(entity,)]
    assert entity.gone
    assert side.mux.find(SINK_OUT, 1) is None
    assert side.mux.open_ended([b"abc"], identifier=1) is not entity
