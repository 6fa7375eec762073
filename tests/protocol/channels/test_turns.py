"""What a peer sends at once is worked on in turns: others are served between them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Flow
from aqueduct.errors import ConnectionLost
from tests.protocol.channels.attacker import ENTRY, Attacker, message
from tests.support.pair import Pair

TURN = DEFAULT.flow.wake_up
ATTACHED = 1000
"""Attachments of one message; a turn is over after the message in which it is used up."""
FRAMES = 20_000


def attached(number: int) -> list[int]:
    """Indexes of channels that only message ``number`` carries."""
    return [(number * ATTACHED + place + 1) << 3 for place in range(ATTACHED)]


def in_turns(attacker: Attacker, parts: list[bytes], *, fin: bool = True) -> list[int]:
    """Says ``parts`` on streams of their own; the work of each turn."""
    shared = attacker.core._shared
    steps = []
    for part in parts:
        attacker.opened += 1
        attacker.core.receive_stream(attacker.opened - 1, part, fin, attacker.now)
    steps.append(shared.work)
    while attacker.core.goes_on:
        attacker.core.handle_deadline(attacker.now)
        steps.append(shared.work)
        attacker._apply()
    return steps


@pytest.mark.parametrize("streams", ["one stream", "a stream each"])
def test_messages_with_many_attachments_are_read_in_turns(streams: str) -> None:
    attacker = Attacker()
    messages = [message(number, attached=attached(number)) for number in range(40)]
    if streams == "one stream":
        parts = [ENTRY + b"".join(messages)]
    else:
        parts = [ENTRY + each for each in messages]
    steps = in_turns(attacker, parts)
    assert max(steps) < TURN + ATTACHED + len(parts)
    taken = attacker.take_all()
    assert [received.number for received in taken] == list(range(40))
    assert [len(received.attachments) for received in taken] == [ATTACHED] * 40
    assert attacker.core.error is None


@pytest.mark.parametrize(
    "flood",
    [
        (codec.VERSION, codec.ACK_VERSION),
        (ENTRY, codec.encode_sent_unreliable(1)),
    ],
    ids=["ACK_VERSION", "SENT_UNRELIABLE"],
)
def test_tiny_frames_are_read_in_turns(flood: tuple[bytes, bytes]) -> None:
    attacker = Attacker()
    steps = in_turns(attacker, [flood[0] + flood[1] * FRAMES], fin=False)
    assert max(steps) <= TURN
    assert attacker.core.error is None
    assert len(steps) > FRAMES // TURN


def test_what_comes_for_a_postponed_stream_is_read_behind_the_rest() -> None:
    attacker = Attacker()
    core = attacker.core
    first, second, third = (message(number, attached=attached(number)) for number in range(3))
    core.receive_stream(1, ENTRY + first + second, False, 0.0)
    core.receive_stream(1, third, True, 0.0)
    assert core.incoming.streams[1].postponed
    while core.goes_on:
        core.handle_deadline(0.0)
    assert 1 not in core.incoming.streams
    assert [received.number for received in attacker.take_all()] == [0, 1, 2]


def test_a_reset_ends_a_postponed_stream() -> None:
    attacker = Attacker()
    core = attacker.core
    core.receive_stream(
        1, ENTRY + b"".join(message(n, attached=attached(n)) for n in range(3)), False, 0.0
    )
    core.receive_reset(1, 0, 0.0)
    while core.goes_on:
        core.handle_deadline(0.0)
    assert len(attacker.take_all()) == 2
    assert core.error is None


def test_what_was_postponed_is_delivered_when_the_connection_is_lost() -> None:
    attacker = Attacker()
    core = attacker.core
    core.receive_stream(
        1, ENTRY + b"".join(message(n, attached=attached(n)) for n in range(5)), True, 0.0
    )
    core.connection_lost(ConnectionLost("the network is gone"))
    assert [received.number for received in attacker.take_all()] == [0, 1, 2, 3, 4]


def test_a_violation_in_a_postponed_part_closes_the_connection() -> None:
    attacker = Attacker()
    said = ENTRY + b"".join(message(n, attached=attached(n)) for n in range(3))
    in_turns(attacker, [said + codec.encode_route_to(0) + b"\xff"])
    assert attacker.core.error is not None


@pytest.mark.parametrize("most", [1, 7, 100])
def test_a_turn_may_be_as_short_as_one_frame(most: int) -> None:
    attacker = Attacker(dataclasses.replace(DEFAULT, flow=Flow(wake_up=most)))
    steps = in_turns(attacker, [ENTRY + codec.encode_sent_unreliable(1) * 500], fin=False)
    assert max(steps) <= most
    assert len(steps) >= 500 // most
    assert attacker.core.error is None


def test_many_streams_that_wait_are_opened_in_turns() -> None:
    """A peer that lets none out, and then many at once."""
    flow: Any = Flow(wake_up=100)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    pair.run()
    core = pair.server.core
    core.openable_changed(0, 0.0)
    receivers = 1000
    said = [message(n, attached=[((n + 1) << 3)]) for n in range(receivers)]
    core.receive_stream(10_000, codec.VERSION + ENTRY + b"".join(said), True, 0.0)
    while core.goes_on:
        core.handle_deadline(0.0)
    while (received := core.receive(pair.receiver, 0.0)) is not None:
        core.drop_attachment(received.attachments[0][0], 0.0)
    core.effects_to_apply()
    steps = []
    core.openable_changed(1 << 20, 0.0)
    while True:
        steps.append(len(core.effects_to_apply()))
        if not core.goes_on:
            break
        core.handle_deadline(0.0)
    assert max(steps) <= 100 + 20  # with credit, and what a deadline owes
    assert sum(steps) >= receivers / 2
    assert core.error is None
