"""Whatever a peer sends: however its bytes are cut, the same is heard, answered and kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.reactivesocket import reactive_frames as codec
from aqueduct.config import ReactiveSocket as Settings
from aqueduct.errors import FrameError, LimitExceeded, SequenceError, VersionError
from aqueduct.protocol.reactivesocket import events
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection
from tests.reference.reactivesocket import TYPES, Frame, decode, encode

ALLOWED = (FrameError, VersionError, LimitExceeded, SequenceError)
"""What may end a connection, or a stream, for what a peer sent."""
SETTINGS = Settings(
    frame_bytes=6000,
    item_bytes=9000,
    fragments=4,
    fragments_bytes=12_000,
    setup_bytes=50,
    streams=3,
    unsent_answers=6,
)
FRAMES = st.builds(
    Frame,
    st.sampled_from([*TYPES, 0x20, 0x20, 0x30]),
    st.sampled_from([0, 1, 3, 5, 9, 11]),
    st.sampled_from([0, 0x60, 0x40, 0x20, 0x10, 0x70, 0x80]),
    st.sampled_from([0, 1, 4, (1 << 63) - 1, 1 << 63]),
    st.sampled_from([7, 8]),
    st.sampled_from([b"", b"x", bytes(51), bytes(5000)]),
)


class Ear:
    """A connection with a stream of each kind open, and what its application hears."""

    def __init__(self, *, client: bool, begun: bool, left: bool) -> None:
        self.core = core = ReactiveConnection(SETTINGS, client=client, extensions={7})
        self.heard: list[Any] = []
        if begun and not client:
            core.receive_data(encode(Frame(codec.SETUP)), 0.0)
            core.accept()
        if begun:
            core.request(codec.REQUEST_RESPONSE)
            core.request(codec.REQUEST_STREAM, n=3)
            core.request(codec.REQUEST_SUB, n=2)
            core.receive_data(encode(Frame(codec.REQUEST_STREAM, 9, n=4)), 0.0)
            core.item(9, bytes(7000))
        if left:
            core.take(1 << 20)
        assert core.error is None
        core.events_received()

    def listen(self) -> None:
        for event in self.core.events_received():
            told: list[Any] = []
            for value in event:
                if isinstance(value, Exception):
                    assert isinstance(value, ALLOWED), value
                    told.append((type(value), str(value)))
                elif isinstance(value, list):
                    told.append(b"".join(map(bytes, value)))
                else:
                    told.append(value if isinstance(value, (str, int)) else bytes(value))
            self.heard.append(told)
            if event[0] == events.SETUP:
                self.core.accept()

    def end(self) -> tuple[list[Any], bytes, int]:
        """All that was heard, is answered in time, and is kept."""
        self.core.handle_deadline(100.0)
        self.core.receive_eof()
        self.listen()
        answer = b"".join(map(bytes, self.core.take(1 << 20)[0]))
        assert self.core.idle
        decode(answer)
        return self.heard, answer, self.core.held_bytes


def compare(data: bytes, cuts: Iterable[tuple[int, bool]], **how: bool) -> None:
    """However bytes are cut, and wherever they land, the same is heard, answered and kept.

    A cut is a number of bytes, and whether they are read to their place.
    """
    at_once, cut = Ear(**how), Ear(**how)
    at_once.core.receive_data(data, 0.0)
    at_once.listen()
    for size, lands in (*cuts, (len(data), False)):
        room = cut.core.room() if lands else None
        part = data[:size] if room is None else data[: min(size, len(room))]
        if room is None:
            cut.core.receive_data(memoryview(part) if lands else part, 0.0)
        else:
            room[: len(part)] = part
            cut.core.landed(len(part), 0.0)
        cut.listen()
        data = data[len(part) :]
    assert not data or cut.core.error is not None
    assert cut.end() == at_once.end()


@pytest.mark.requirement("RS-R12")
@given(
    st.fixed_dictionaries({name: st.booleans() for name in ("client", "begun", "left")}),
    st.lists(FRAMES, max_size=8),
    st.binary(max_size=20),
    st.lists(st.tuples(st.integers(1, 6000), st.booleans()), max_size=12),
)
def test_any_bytes_in_any_pieces(
    how: dict[str, bool], sent: list[Frame], more: bytes, cuts: list[tuple[int, bool]]
) -> None:
    compare(b"".join(map(encode, sent)) + more, cuts, **how)
