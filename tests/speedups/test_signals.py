"""Events of one half: they compare by what they say of whom, and cannot be changed."""

from __future__ import annotations

import pytest

from aqueduct._speedups.channels.events import Readable, SenderEnded, Writable

KINDS = (Readable, Writable, SenderEnded)


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_is_what_happened_to_whom(kind: type[Readable]) -> None:
    half, other = [0], [0]  # equal, but not the same
    event = kind(half)
    assert event.half is half
    assert event == kind(half)
    assert hash(event) == hash(kind(half))
    assert event != kind(other)
    assert event != half
    assert [each for each in KINDS if event == each(half)] == [kind]
    assert repr(event) == f"{kind.__name__}(half=[0])"
    with pytest.raises(AttributeError):
        event.half = other  # type: ignore[misc]


def test_one_that_goes_leaves_its_place_to_the_next() -> None:
    for _ in range(3):
        events = [kind([number]) for kind in KINDS for number in range(100)]
        assert [event.half[0] for event in events] == [*range(100)] * 3
        del events
