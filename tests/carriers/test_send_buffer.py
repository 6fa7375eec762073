"""The send half of a stream, against a model: what is sent, lost, acknowledged and released."""

from __future__ import annotations

from typing import Any

import pytest
from aioquic.quic.packet_builder import QuicDeliveryState
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduct.carriers.quic.send_buffer import SendBuffer, SendTotals
from aqueduct.carriers.quic.varint import decode_varint, encode_varint

ACKED, LOST = QuicDeliveryState.ACKED, QuicDeliveryState.LOST
FAR = 1 << 60


def parse(parts: list[Any]) -> tuple[int, int, bytes, bool]:
    """Stream, offset, data and end flag of a STREAM frame."""
    frame = b"".join(parts)
    assert frame[0] & 0xFE == 0x0E
    stream, at = decode_varint(frame, 1)
    offset, at = decode_varint(frame, at)
    length, at = decode_varint(frame, at)
    assert len(frame) == at + length
    return stream, offset, frame[at:], bool(frame[0] & 1)


def make() -> tuple[SendBuffer, SendTotals, list[int]]:
    totals = SendTotals()
    woken: list[int] = []
    return SendBuffer(10, totals, woken.append), totals, woken


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(st.integers(0, 3000), max_size=5)),
        st.tuples(st.just("send"), st.integers(0, 2500)),
        st.tuples(st.just("ack"), st.integers(0, 1 << 30)),
        st.tuples(st.just("lose"), st.integers(0, 1 << 30)),
        st.tuples(st.just("credit"), st.integers(0, 5000)),
    ),
    max_size=80,
)


@given(steps=STEPS, end=st.booleans())
@settings(deadline=None, max_examples=150)
def test_every_byte_arrives_whatever_is_lost(steps: list[Any], end: bool) -> None:
    sender, totals, _ = make()
    written = bytearray()
    received: dict[int, int] = {}
    finished = False
    flying: list[tuple[int, int, bool]] = []
    released, limit = 0, 4000

    def send(room: int) -> bool:
        nonlocal finished
        parts: list[Any] = []
        before = sender.sendable(limit)
        frame = sender.frame(room, limit, parts)
        if frame is None:
            assert not parts
            return False
        assert before
        stream, offset, data, fin = parse(parts)
        assert len(b"".join(parts)) <= room
        assert (stream, offset, offset + len(data), fin) == (10, *frame)
        assert data == written[offset : offset + len(data)]
        assert offset + len(data) <= limit
        assert not fin or offset + len(data) == len(written)
        received.update(dict.fromkeys(range(offset, offset + len(data)), 1))
        finished = finished or fin
        flying.append(frame)
        return True

    def settle(state: QuicDeliveryState, which: int) -> None:
        nonlocal released
        if flying:
            sender.on_data_delivery(state, *flying.pop(which % len(flying)))
            for other in totals.released:
                assert other is sender
                released += sender.take_released()
            totals.released = []

    for kind, value in steps:
        if kind == "write":
            buffers = [bytes((len(written) + n + i) % 251 for i in range(n)) for n in value]
            written += b"".join(buffers)
            sender.append(buffers, False)
        elif kind == "send":
            send(value)
        elif kind == "credit":
            limit += value
        else:
            settle(ACKED if kind == "ack" else LOST, value)
        assert totals.queued == len(written) - released
    sender.append([], end)
    limit = FAR
    while flying or sender.sendable(limit):
        while send(1200):
            pass
        while flying:
            settle(ACKED, 0)
    assert released == len(written)
    assert len(received) == len(written)
    assert finished is end
    assert sender.is_finished is end
    assert totals.queued == 0
    assert totals.finished == ([sender] if end else [])
    assert not sender._views or sender._first == len(sender._views)


def test_buffers_are_not_copied_and_let_go_when_acknowledged() -> None:
    sender, _, _ = make()
    mine = bytearray(b"x" * 5000)
    sender.append([mine], False)
    parts: list[Any] = []
    frame = sender.frame(3000, FAR, parts)
    assert frame is not None
    assert parts[1].obj is mine
    parts.clear()
    rest = sender.frame(5000, FAR, parts)
    assert rest is not None
    parts.clear()
    with pytest.raises(BufferError):
        mine.append(1)  # still referenced
    sender.on_data_delivery(ACKED, *frame)
    sender.on_data_delivery(ACKED, *rest)
    mine.append(1)


def test_small_buffers_are_joined() -> None:
    sender, _, _ = make()
    sender.append([b"a" * 100, b"b" * 100, b"c" * 5000, b"d", b"e"], False)
    assert [len(view) for view in sender._views] == [200, 5000, 2]


def test_a_stream_wakes_the_connection_when_it_has_something() -> None:
    sender, _, woken = make()
    sender.append([], False)
    assert woken == []
    sender.append([b"x"], False)
    assert woken == [10]
    sender.queued = True  # by the connection
    sender.append([b"y"], True)
    assert woken == [10]


def test_after_a_reset_nothing_is_sent_or_reported() -> None:
    sender, totals, woken = make()
    sender.append([b"x" * 4000], False)
    first = sender.frame(2000, FAR, [])
    second = sender.frame(1000, FAR, [])
    assert first is not None and second is not None
    sender.on_data_delivery(LOST, *first)
    sender.reset(7)
    sender.reset(8)
    woken.clear()
    assert totals.queued == 0
    assert not sender.sendable(FAR)
    assert sender.frame(1000, FAR, []) is None
    sender.on_data_delivery(ACKED, *second)
    sender.on_data_delivery(LOST, *second)
    assert not sender.sendable(FAR) and sender.take_released() == 0
    frame = sender.get_reset_frame()
    assert (frame.stream_id, frame.error_code, frame.final_size) == (10, 7, second[1])
    assert not sender.reset_pending
    sender.on_reset_delivery(LOST)
    assert sender.reset_pending
    sender.on_reset_delivery(ACKED)
    assert sender.is_finished
    assert woken == [10, 10]


def test_offsets_beyond_four_bytes() -> None:
    sender, _, _ = make()
    sender._fresh = sender._stop = sender._base = 0x4000_0000 - 100
    sender.append([b"x" * 2000], True)
    sizes = []
    while sender.sendable(FAR):
        parts: list[Any] = []
        frame = sender.frame(100, FAR, parts)
        assert frame is not None
        assert parse(parts)[1] == frame[0]
        sizes.append(len(b"".join(parts)))
    assert set(sizes[:-1]) == {100}  # full, whichever form the offset has
    assert frame is not None and frame[2]


@pytest.mark.parametrize(
    "value", [0, 0x3F, 0x40, 0x3FFF, 0x4000, 0x3FFF_FFFF, 0x4000_0000, 2**62 - 1]
)
def test_varints(value: int) -> None:
    data = encode_varint(value)
    assert decode_varint(b"?" + data + b"?", 1) == (value, 1 + len(data))
    for cut in range(len(data)):
        with pytest.raises(IndexError):
            decode_varint(data[:cut], 0)
