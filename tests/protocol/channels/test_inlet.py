"""Bytes that a carrier puts where an inlet says, beside those it hands over."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Flow
from aqueduct.errors import Finished, LocalProtocolError, SequenceError
from aqueduct.protocol.channels.connection import ChannelConnection
from tests.protocol.channels.arriving import (
    ROUTE,
    SIZES,
    KiB,
    entry,
    frames,
    last_credits,
    server,
    taken,
    told,
)

PREFIX = codec.VERSION + ROUTE


def message(number: int, payload: bytes) -> bytes:
    return b"".join(map(bytes, codec.encode_message(number, payload)))


def bring(core: ChannelConnection, piece: memoryview, data: st.DataObject) -> None:
    """As a carrier would: by the inlet as long as there is one, the rest by hand."""
    while piece:
        inlet = core.inlet(9)
        if inlet is None:
            core.receive_stream(9, bytes(piece), False, 200.0)
            return
        given = 0
        while piece and not inlet.stopped and data.draw(st.integers(0, 9)):
            room = inlet.room(data.draw(st.integers(1, len(piece))))
            if room is not None:
                size = data.draw(st.integers(1, len(room)))
                room[:size] = piece[:size]
                inlet.landed(size)
            else:
                size = data.draw(st.integers(1, len(piece)))
                inlet.feed(bytes(piece[:size]))
            given += size
            piece = piece[size:]
        assert inlet.size == given
        core.inlet_done(9, 200.0)


@given(st.lists(SIZES, max_size=6), st.lists(st.integers(1, 60_000), max_size=30), st.data())
def test_an_inlet_and_feeding_say_the_same(
    sizes: list[int], cuts: list[int], data: st.DataObject
) -> None:
    """In any mixture and any pieces: the same messages, events, credits and acks."""
    wire = memoryview(frames(sizes, finish=True))
    fed, landed = server(), server()
    at = 0
    for cut in [*cuts, len(wire)]:
        piece = wire[at : at + cut]
        at += len(piece)
        fed.receive_stream(9, bytes(piece), False, 200.0)
        bring(landed, piece, data)
        # Not the budget: how far a stream is let run ahead depends on when it was last looked at.
        assert entry(landed).queue.charged == entry(fed).queue.charged
        if data.draw(st.booleans()):
            assert taken(landed, 200.0) == taken(fed, 200.0)
    fed.receive_stream(9, b"", True, 200.0)
    landed.receive_stream(9, b"", True, 200.0)
    assert taken(landed, 200.0) == taken(fed, 200.0)
    for core in (fed, landed):
        assert isinstance(entry(core).error, Finished)
        core.handle_deadline(300.0)
    events, wanted, error = told(fed)
    landed_events, landed_wanted, landed_error = told(landed)
    assert (landed_events, landed_error) == (events, error) == (landed_events, None)
    for effects in (wanted, landed_wanted):
        assert last_credits(effects).get(9, 64 * KiB) >= len(wire)  # or the peer could not go on
    assert [each for each in landed_wanted if each[0] != 3] == [e for e in wanted if e[0] != 3]


def test_there_is_no_inlet_where_each_frame_needs_a_look() -> None:
    core = server()
    assert core.inlet(9) is None  # no such stream
    core.receive_stream(9, codec.VERSION, False, 200.0)
    assert core.inlet(9) is None  # for no channel yet
    core.receive_stream(9, ROUTE + message(0, b"x") + codec.encode_finish_sender(1), False, 200.0)
    assert core.inlet(9) is None  # nothing may follow


def test_an_inlet_stops_where_there_is_no_room_and_the_rest_waits() -> None:
    size = 100 * KiB
    core = server(dataclasses.replace(DEFAULT, flow=Flow(channel_receive_bytes=250 * KiB)))
    core.receive_stream(9, PREFIX, False, 200.0)
    inlet = core.inlet(9)
    assert inlet is not None
    inlet.feed(b"".join(message(number, bytes(size)) for number in range(4)))
    assert inlet.stopped
    with pytest.raises(LocalProtocolError, match="the inlet is stopped"):
        inlet.feed(b"x")
    core.inlet_done(9, 200.0)
    assert entry(core).queue.charged <= 250 * KiB
    assert core.inlet(9) is None  # a message waits
    first = core.receive(entry(core), 200.0)
    assert first is not None and len(first.payload) == size
    assert [number for number, _ in taken(core, 200.0)] == [1, 2, 3]


def test_a_payload_in_flight_lands_though_there_is_no_room_for_another() -> None:
    size = 300 * KiB
    core = server(dataclasses.replace(DEFAULT, flow=Flow(channel_receive_bytes=250 * KiB)))
    wire = message(0, bytes(range(250)) * 1200) + message(1, b"y" * 50)
    core.receive_stream(9, PREFIX + wire[:1000], False, 200.0)  # one is always admitted
    inlet = core.inlet(9)
    assert inlet is not None and inlet.run is None
    rest = memoryview(wire)[1000:]
    room = inlet.room(1 << 30)
    assert room is not None and len(room) < size
    room[:] = rest[: len(room)]
    inlet.landed(len(room))
    assert inlet.stopped  # whole: its owner is to see it
    core.inlet_done(9, 200.0)
    core.receive_stream(9, bytes(rest[len(room) :]), False, 200.0)
    assert taken(core, 200.0) == [(0, bytes(range(250)) * 1200), (1, b"y" * 50)]


def test_there_is_room_for_large_payloads_alone() -> None:
    core = server()
    wire = frames([100_000, 20], finish=False)
    core.receive_stream(9, wire[:60], False, 200.0)
    inlet = core.inlet(9)
    assert inlet is not None
    room = inlet.room(1 << 30)
    assert room is not None
    at = 60
    assert len(room) == 100_000 - (at - wire.index(bytes(range(251))))
    most = len(room) - 4095
    room[:most] = wire[at : at + most]
    inlet.landed(most)
    at += most
    assert inlet.room(1 << 30) is None  # so few are cheaper to copy
    inlet.feed(wire[at:])
    assert inlet.room(1 << 30) is None
    core.inlet_done(9, 200.0)
    assert [len(payload) for _, payload in taken(core, 200.0)] == [100_000, 20]


def test_a_payload_that_waits_for_room_has_no_memory() -> None:
    """It is taken by admission, never by declaration."""
    size = 1 << 20
    core = server(dataclasses.replace(DEFAULT, flow=Flow(channel_receive_bytes=size)))
    first, second = message(0, bytes(size)), message(1, bytes(size))
    core.receive_stream(9, PREFIX + first + second[:1000], False, 200.0)
    assert core.inlet(9) is None
    assert len(taken(core, 200.0)) == 1
    inlet = core.inlet(9)
    assert inlet is not None
    room = inlet.room(size)
    assert room is not None
    room[:] = second[1000:]
    inlet.landed(len(room))
    core.inlet_done(9, 200.0)
    assert taken(core, 200.0) == [(1, bytes(size))]


def test_a_large_payload_that_came_behind_another_in_one_piece_is_delivered_at_once() -> None:
    """No memory is put off for it: nothing may follow that would have it landed."""
    core = server()
    core.receive_stream(9, PREFIX, False, 200.0)
    inlet = core.inlet(9)
    assert inlet is not None
    inlet.feed(message(0, b"x") + message(1, bytes(300 * KiB)))
    core.inlet_done(9, 200.0)
    assert [number for number, _ in taken(core, 200.0)] == [0, 1]


def test_an_inlet_is_idle_while_a_part_of_a_payload_landed_and_nothing_else() -> None:
    """Its owner has no credit to give for it, so it need not be asked."""
    size, window = 300 * KiB, 100 * KiB
    core = server(dataclasses.replace(DEFAULT, flow=Flow(admitted_window=window)))
    wire = memoryview(message(0, bytes(size)) + message(1, b"behind"))
    core.receive_stream(9, PREFIX + wire[:1000], False, 200.0)
    at, idle = 1000, []
    while at < size:
        inlet = core.inlet(9)
        assert inlet is not None and not inlet.stopped
        room = inlet.room(30 * KiB)
        step = wire[at : at + (30 * KiB if room is None else len(room))]
        if room is None:
            inlet.feed(bytes(step))
        else:
            room[:] = step
            inlet.landed(len(step))
        at += len(step)
        assert inlet.decoder is not None
        idle.append((inlet.decoder.remaining, inlet.idle))
        if not inlet.idle:
            core.inlet_done(9, 200.0)
            assert not inlet.idle  # it is closed
    # Of what lacked more than a window, credit is given; with the end, there is a message.
    assert idle == [(left, 0 < left <= window - 30 * KiB) for left, _ in idle]
    assert [each for _, each in idle].count(True) == 2
    core.receive_stream(9, bytes(wire[at:]), False, 200.0)
    assert taken(core, 200.0) == [(0, bytes(size)), (1, b"behind")]


def test_what_the_peer_does_wrong_is_found_when_the_inlet_is_done() -> None:
    core = server()
    core.receive_stream(9, PREFIX, False, 200.0)
    inlet = core.inlet(9)
    assert inlet is not None
    inlet.feed(message(0, b"first") + ROUTE + message(1, b"never"))
    assert inlet.stopped
    core.inlet_done(9, 200.0)
    assert core.error is not None and isinstance(core.error.__cause__, SequenceError)
    assert "second ROUTE_TO" in str(core.error)
    assert core.inlet(9) is None
    core.inlet_done(9, 200.0)  # the connection is over: nothing counts any more


def test_a_carrier_that_reports_a_wrong_size_is_an_error() -> None:
    core = server()
    core.receive_stream(9, PREFIX + message(0, bytes(100_000))[:60], False, 200.0)
    inlet = core.inlet(9)
    assert inlet is not None
    with pytest.raises(LocalProtocolError, match=r"landed\(100000\)"):
        inlet.landed(100_000)
    with pytest.raises(LocalProtocolError, match=r"landed\(-1\)"):
        inlet.landed(-1)
    assert inlet.size == 0
    core.inlet_done(9, 200.0)
    core.close_receiver(entry(core), 200.0)
    assert core.inlet(9) is None
    core.close(now=200.0)
    assert core.inlet(9) is None
