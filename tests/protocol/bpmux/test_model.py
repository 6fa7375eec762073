"""The core beside a plain model of the text, chunk by chunk, in any pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduct._speedups import bpmux
from aqueduct.errors import AqueductError
from aqueduct.wire.bpmux import read_chunks
from aqueduct.wire.sessions import Session
from aqueduct.wire.values import WireError
from tests.reference import bpmux as model
from tests.speedups.test_bpmux import VECTORS

NUMBERS = st.one_of(st.integers(0, 3), st.sampled_from([7, 300, (1 << 64) - 1]))
BYTES = st.binary(max_size=4)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


@st.composite
def chunks(draw: st.DrawFn) -> model.Chunk:
    """Mostly sensible ones: few entities, so that they meet again."""
    kind = draw(st.sampled_from(model.TYPES))
    number = draw(st.integers(0, 2))
    what = draw(st.integers(0, 9))
    if what == 0:
        return model.Chunk(kind, number, ack=True)
    if what == 1:
        return model.Chunk(kind, number, credit=draw(NUMBERS), ping=draw(st.booleans()))
    if what <= 3:
        return model.Chunk(kind, number, end=draw(BYTES), total=draw(st.sampled_from([0, 0, 4])))
    if what <= 8:
        total = draw(st.sampled_from([0, 0, 0, 3, 5]))
        return model.Chunk(kind, number, draw(BYTES), total=total)
    return model.Chunk(
        kind,
        number,
        draw(maybe(BYTES)),
        draw(maybe(NUMBERS)),
        draw(st.booleans()),
        draw(maybe(BYTES)),
        draw(st.booleans()),
        draw(st.sampled_from([0, 0, 2])),
    )


STEPS = st.lists(st.tuples(st.sampled_from(["recv", "recv", "send"]), chunks(), st.integers(0, 5)))
CREDITS = [
    ("send", model.Chunk("In-Stream", 0, credit=40), 0),
    ("recv", model.Chunk("In-Stream", 0, credit=40), 0),
]


def play(steps: list[tuple[str, model.Chunk, int]]) -> int:
    """Both at once; how many steps were no error."""
    session, endpoint = Session(), model.Endpoint()
    for index, (what, given_chunk, cut) in enumerate(steps):
        # What this side sends in pieces is cut by the scheduler, not by a chunk of the application.
        chunk = replace(given_chunk, total=0) if what == "send" else given_chunk
        data = model.encode(chunk)
        wanted: Exception | None = None
        try:
            (endpoint.receive if what == "recv" else endpoint.send)(chunk)
        except (model.Violation, model.Misuse) as error:
            wanted = error
        got: Exception | None = None
        try:
            if what == "recv":
                for part in (data[:cut], data[cut:]):
                    session.receive(part)
            else:
                session.send(data)
        except (WireError, AqueductError) as error:
            got = error
        assert (got is None) == (wanted is None), (index, chunk, got, wanted)
        if wanted is not None:
            return index
        compare(session, endpoint)
    return len(steps)


def compare(session: Session, endpoint: model.Endpoint) -> None:
    assert [tuple(entry) for entry in session.delivered] == [
        (place, number, what, data.hex()) for place, number, what, data in endpoint.delivered
    ]
    assert session.acks == b"".join(map(model.encode, endpoint.acks))
    for place, name in enumerate(endpoint.maps):
        assert session.mux.count(place) == len(endpoint.maps[name])
        for number, entity in endpoint.maps[name].items():
            found = session.mux.find(place, number)
            assert found is not None
            assert (found.credit_in, found.credit_out, found.partial, found.end_out) == (
                entity.credit_in,
                entity.credit_out,
                entity.partial,
                entity.end_out,
            )


@pytest.mark.requirement("BP-4")
@pytest.mark.requirement("BP-10")
@pytest.mark.requirement("BP-15")
@given(STEPS)
@settings(max_examples=300)
def test_the_core_does_what_the_model_does(steps: list[tuple[str, model.Chunk, int]]) -> None:
    play(CREDITS + steps)


@pytest.mark.parametrize(
    "case", VECTORS["sessions"] + VECTORS["bad_sessions"], ids=lambda case: case["name"]
)
def test_the_model_agrees_with_the_vectors(case: dict[str, Any]) -> None:
    steps = []
    for what, text in case["steps"]:
        steps += [(what, chunk, 0) for chunk in model_chunks(bytes.fromhex(text))]
    done = play(steps)
    assert done == len(steps) - (0 if "result" in case else 1)


def model_chunks(data: bytes) -> list[model.Chunk]:
    found = []
    for chunk in read_chunks(data):
        flags = chunk.flags
        found.append(
            model.Chunk(
                bpmux.TYPE_NAMES[chunk.type],
                chunk.identifier,
                chunk.payload if flags & bpmux.PAYLOAD else None,
                chunk.credit if flags & bpmux.CREDIT else None,
                bool(flags & bpmux.PING),
                chunk.end if flags & bpmux.END else None,
                bool(flags & bpmux.ACK_END),
                chunk.total,
            )
        )
    return found
