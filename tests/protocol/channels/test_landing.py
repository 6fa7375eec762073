"""Payload bytes that a carrier reads straight to their place, beside those it hands over."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups import codec
from aqueduct.config import DEFAULT, Config, Flow
from aqueduct.errors import Finished, LocalProtocolError
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.channels.receiving import ReceiverHalf
from tests.pair import Pair

ROUTE = codec.encode_route_to(0)
KiB = 1 << 10
SIZES = st.sampled_from([0, 1, 100, 4095, 4096, 4097, 16 * KiB, 16 * KiB + 1, 40_000, 70_000])


def frames(sizes: list[int], *, finish: bool) -> bytes:
    """A sequence of messages; each byte tells where it belongs."""
    parts = [codec.VERSION, ROUTE]
    for number, size in enumerate(sizes):
        payload = bytes((number + at) % 251 for at in range(size))
        parts += [bytes(part) for part in codec.encode_message(number, payload)]
    if finish:
        parts.append(codec.encode_finish_sender(len(sizes)))
    return b"".join(parts)


def server(config: Config = DEFAULT) -> ChannelConnection:
    """A server that has accepted its client."""
    return Pair(config).server.core


def entry(core: ChannelConnection) -> ReceiverHalf:
    assert isinstance(core.entrypoint, ReceiverHalf)
    return core.entrypoint


def told(core: ChannelConnection) -> list[Any]:
    """What the core reports and wants, by names and numbers."""
    events = [type(event).__name__ for event in core.events_received()]
    return [events, core.effects_to_apply(), core.error]


def taken(core: ChannelConnection, now: float) -> list[tuple[int, bytes]]:
    half, all_of_it = entry(core), []
    while (received := core.receive(half, now)) is not None:
        all_of_it.append((received.number, bytes(received.payload)))
    return all_of_it


@given(st.lists(SIZES, max_size=6), st.lists(st.integers(1, 60_000), max_size=30), st.data())
def test_landing_and_feeding_say_the_same(
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
        while piece:
            room = None
            if data.draw(st.booleans()):
                room = landed.receive_buffer(9, data.draw(st.integers(1, len(piece))))
            if room is None:
                landed.receive_stream(9, bytes(piece), False, 200.0)
                break
            assert 0 < len(room) <= len(piece)
            size = data.draw(st.integers(1, len(room)))
            room[:size] = piece[:size]
            more = piece[size : size + data.draw(st.integers(0, 10_000))]
            landed.landed(9, size, 200.0, bytes(more))
            piece = piece[size + len(more) :]
        assert landed.snapshot() == fed.snapshot()
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
    assert last_credits(landed_wanted) == last_credits(wanted)
    assert [each for each in landed_wanted if each[0] != 3] == [e for e in wanted if e[0] != 3]


def last_credits(wanted: list[Any]) -> dict[int, int]:
    """A credit may come in other steps, never to another limit."""
    return {effect[1]: effect[2] for effect in wanted if effect[0] == 3}


def test_what_is_no_large_payload_does_not_land() -> None:
    core = server()
    wire = frames([100_000, 20], finish=False)
    assert core.receive_buffer(9, 1000) is None  # no such stream yet
    core.receive_stream(9, wire[:60], False, 200.0)
    assert core.receive_buffer(9, 4095) is None  # so few are cheaper to copy
    room = core.receive_buffer(9, 1 << 30)
    assert room is not None
    at = 60
    assert len(room) == 100_000 - (at - wire.index(bytes(range(251))))
    most = len(room) - 4095
    room[:most] = wire[at : at + most]
    core.landed(9, most, 200.0)
    at += most
    assert core.receive_buffer(9, 1 << 30) is None  # a small rest
    core.receive_stream(9, wire[at:], False, 200.0)
    assert [len(payload) for _, payload in taken(core, 200.0)] == [100_000, 20]


def test_a_payload_that_waits_for_room_does_not_land() -> None:
    """Memory is taken by admission, never by declaration."""
    size = 1 << 20
    core = server(dataclasses.replace(DEFAULT, flow=Flow(channel_receive_bytes=size)))
    first, second = (b"".join(map(bytes, codec.encode_message(n, bytes(size)))) for n in (0, 1))
    core.receive_stream(9, codec.VERSION + ROUTE + first + second[:1000], False, 200.0)
    assert core.receive_buffer(9, size) is None
    assert len(taken(core, 200.0)) == 1
    room = core.receive_buffer(9, size)
    assert room is not None
    room[:] = second[1000:]
    core.landed(9, len(room), 200.0)
    assert taken(core, 200.0) == [(1, bytes(size))]


def test_a_closed_receiver_takes_nothing_and_a_carrier_that_lies_is_told() -> None:
    core = server()
    core.receive_stream(9, frames([100_000], finish=False)[:60], False, 200.0)
    with pytest.raises(LocalProtocolError, match="only memory of receive_buffer"):
        core.landed(9, 100_000, 200.0)
    with pytest.raises(LocalProtocolError, match="no such stream"):
        core.landed(10, 1, 200.0)
    assert core.receive_buffer(9, 50_000) is not None
    core.close_receiver(entry(core), 200.0)
    assert core.receive_buffer(9, 50_000) is None
    with pytest.raises(LocalProtocolError):
        core.landed(9, 1, 200.0)
    core.close(now=200.0)
    assert core.receive_buffer(9, 50_000) is None
    core.landed(9, 1, 200.0)  # the connection is over: nothing counts any more
