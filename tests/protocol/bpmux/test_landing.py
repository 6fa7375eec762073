"""Where received bytes end and where they land."""

from __future__ import annotations

import pytest

from aqueduct.errors import FrameError, LocalProtocolError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.state import STREAM_IN
from tests.protocol.bpmux.pair import Lone
from tests.protocol.bpmux.test_receiving import opened


def test_the_end_of_the_bytes_is_a_failure_inside_a_chunk_alone() -> None:
    lone = Lone()
    lone.receive("a80005")
    lone.mux.receive_eof()
    assert lone.error is None
    for text in ("e0", "a8", "a800", "700005", "7000"):
        lone = Lone()
        lone.mux.credit(lone.mux.top_stream, 9)
        lone.take_all()
        lone.receive(text)
        lone.mux.receive_eof()
        assert isinstance(lone.error, FrameError)
        assert lone.error.truncated


def test_a_carrier_reads_payloads_to_their_place() -> None:
    lone = opened()
    stream = lone.mux.find(STREAM_IN, 12)
    assert lone.mux.expected() is None
    lone.receive("580c08aabb")
    assert lone.mux.expected() == (stream, 6)
    assert lone.mux.charged_to is stream
    lone.mux.landed(2)
    assert lone.mux.expected() == (stream, 4)
    with pytest.raises(LocalProtocolError, match="5 bytes cannot have landed: 4 bytes"):
        lone.mux.landed(5)
    lone.mux.landed(4)
    assert lone.mux.expected() is None
    lone.receive("07" + "500c01cc")
    assert lone.of(events.PAYLOAD) == [
        (stream, b"\xaa\xbb", False, stream, 2),
        (stream, b"", True, stream, 0),
        (stream, b"\xcc", True, stream, 1),
    ]
    assert lone.of(events.CREDIT) == [(stream,)]
    lone.receive("100104aa")
    assert lone.mux.charged_to is lone.mux.top_stream
    lone.mux.landed(3)
    lone.receive("440c")
    assert lone.of(events.PING) == [(stream,)]


def test_large_pieces_are_views_of_what_was_fed() -> None:
    lone = Lone()
    lone.mux.credit(lone.mux.top_stream, 1 << 20)
    lone.take_all()
    data = bytes.fromhex("7000f92000") + bytes(0x2000)
    lone.mux.receive_data(data)
    ((_, piece, whole, _, charged),) = lone.of(events.PAYLOAD)
    assert (whole, charged) == (True, 0x2000)
    assert piece.obj is data
