"""The core beside a plain model of the text, chunk by chunk, in any pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduct._speedups.bpmux import chunks as chunk_codec
from aqueduct.dissect.bpmux import read_chunks
from tests.protocol.bpmux.beside import CREDITS, play
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
                chunk_codec.TYPE_NAMES[chunk.type],
                chunk.identifier,
                chunk.payload if flags & chunk_codec.PAYLOAD else None,
                chunk.credit if flags & chunk_codec.CREDIT else None,
                bool(flags & chunk_codec.PING),
                chunk.end if flags & chunk_codec.END else None,
                bool(flags & chunk_codec.ACK_END),
                chunk.total,
            )
        )
    return found
