"""The cascade of AQ-R27: the scenarios of ``tests/vectors/aq.json``, and any others.

``aqueduct.dissect.channel_scenarios`` plays them on a real connection, frame by frame; the model
here states the rules once more, as a fixed point over all that happened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.dissect.channel_scenarios import LossScenario, play, read_steps
from aqueduct.protocol.channels import ids

SCENARIOS = json.loads((Path(__file__).parents[2] / "vectors" / "aq.json").read_text())["loss"]


def played(*steps: list[Any], side: str = "client") -> LossScenario:
    scenario = LossScenario(side == "client", read_steps(list(steps), side))
    scenario.play()
    return scenario


@pytest.mark.requirement("AQ-R27")
@pytest.mark.requirement("AQ-47")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[entry["name"] for entry in SCENARIOS])
def test_scenarios(scenario: dict[str, Any]) -> None:
    assert play(scenario) == scenario["result"]


@pytest.mark.requirement("AQ-R27")
@pytest.mark.requirement("AQ-R23")
def test_a_forgotten_sender_loses_what_is_not_acked_and_is_not_forgotten_back() -> None:
    scenario = played(
        ["got", 1],
        ["send", 1, "reliable", 0, [8]],
        ["send", 8, "reliable", 0, [16]],
        ["send", 1, "reliable", 1, [24]],
        ["send", 24, "reliable", 0, [32]],
        ["send", 24, "reliable", 1, [40]],
        ["ack", 1, "reliable", 0],
        ["ack", 24, "reliable", 0],
        ["forget", 1],
    )
    # What hangs on 24 goes with it, acked or not (AQ-R27.5).
    assert scenario.result() == {"accessible": [8], "lost": [24, 32, 40], "pending": [16]}
    assert len(scenario.forgotten()) == 3
    assert 1 not in scenario.forgotten()


@pytest.mark.requirement("AQ-R27")
@pytest.mark.parametrize("reached", [True, False])
def test_the_tables_of_a_sender_that_ended_while_pending_still_decide(reached: bool) -> None:
    scenario = played(
        ["send", 0, "unreliable", 0, [8]],
        ["send", 8, "reliable", 0, [16]],
        ["ack", 8, "reliable", 0],
        ["close", 8],
        ["ack" if reached else "nack", 0, "unreliable", 0],
    )
    outcome = scenario.result()
    assert outcome.pop("accessible" if reached else "lost") == [8, 16]
    assert not any(outcome.values())
    assert not scenario.core._registry._pending_tables
    assert not scenario.core.pending_channels()


@pytest.mark.requirement("AQ-R27")
def test_a_cascade_of_any_depth_takes_no_stack() -> None:
    depth = 5000
    steps: list[list[Any]] = []
    for index in range(depth):
        outer = ids.make(0, 0, False, index)
        steps.append(["send", outer, "unreliable", 0, [outer + 8]])
    scenario = played(*steps, ["nack", 0, "unreliable", 0])
    assert len(scenario.result()["lost"]) == depth


@pytest.mark.requirement("AQ-R27")
def test_the_server_side_has_the_same_rules() -> None:
    scenario = played(
        ["got", 2],
        ["send", 2, "unreliable", 5, [3, 9]],
        ["send", 3, "reliable", 0, [11]],
        ["send", 2, "unreliable", 2, [1]],
        ["ack", 2, "unreliable", 2],
        ["nack", 2, "unreliable", 5],
        side="server",
    )
    assert scenario.result() == {"accessible": [1], "lost": [3, 9, 11], "pending": []}


@pytest.mark.requirement("AQ-R15")
@pytest.mark.requirement("AQ-R27")
def test_a_later_datagram_may_be_settled_before_an_earlier_one() -> None:
    scenario = played(
        ["send", 0, "unreliable", 0, [8]],
        ["send", 8, "reliable", 0, [24]],
        ["send", 0, "unreliable", 1, [16]],
        ["ack", 0, "unreliable", 1],
        ["ack", 8, "reliable", 0],
    )
    assert scenario.result() == {"accessible": [16], "lost": [], "pending": [8, 24]}


class Model:
    """AQ-R27 as a fixed point: what is known of each message, and where that leads."""

    def __init__(self) -> None:
        self.carried: dict[int, tuple[int, str, int]] = {}
        self.acked: set[tuple[int, str, int]] = set()
        self.nacked: set[tuple[int, str, int]] = set()
        self.roots = {0}

    def step(self, what: str, channel: int, space: str = "", number: int = 0, *inner: Any) -> None:
        message = channel, space, number
        match what:
            case "send":
                self.carried.update(dict.fromkeys(inner[0], message))
            case "ack":
                self.acked.add(message)
            case "nack":
                self.nacked.add(message)
            case "got":
                self.roots.add(channel)
            case _:
                mine = {m for m in self.carried.values() if m[0] == channel}
                self.nacked |= mine - self.acked

    def standing(self, channel: int) -> str:
        if channel in self.roots:
            return "accessible"
        message = self.carried[channel]
        outer = self.standing(message[0])
        if message in self.nacked or outer == "lost":
            return "lost"
        return outer if message in self.acked else "pending"

    def result(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"accessible": [], "lost": [], "pending": []}
        for channel in sorted(self.carried):
            found[self.standing(channel)].append(channel)
        return found


@st.composite
def cases(draw: st.DrawFn) -> list[list[Any]]:
    """Any steps that can follow each other at a client."""
    steps: list[list[Any]] = []
    senders, index, got = [0], 1, 0
    open_messages: list[tuple[int, str, int]] = []
    numbers: dict[tuple[int, str], int] = {}
    for _ in range(draw(st.integers(1, 30))):
        what = draw(st.sampled_from(["send", "send", "send", "settle", "settle", "got", "close"]))
        if what == "got":
            channel = 1 + 8 * got
            got += 1
            senders.append(channel)
            steps.append(["got", channel])
        elif what == "send" and senders:
            channel = draw(st.sampled_from(senders))
            space = draw(st.sampled_from(["reliable", "unreliable"]))
            number = numbers.get((channel, space), 0) + draw(st.integers(0, 2))
            numbers[channel, space] = number + 1
            inner = []
            for _ in range(draw(st.integers(0, 3))):
                inner.append(8 * index + 2 * draw(st.integers(0, 1)))
                index += 1
            senders += [c for c in inner if not c & 2]
            open_messages.append((channel, space, number))
            steps.append(["send", channel, space, number, inner])
        elif what == "settle" and open_messages:
            message = open_messages.pop(draw(st.integers(0, len(open_messages) - 1)))
            nack = message[1] == "unreliable" and draw(st.booleans())
            steps.append(["nack" if nack else "ack", *message])
        elif what == "close" and len(senders) > 1 and draw(st.integers(0, 3)) == 0:
            channel = senders.pop(draw(st.integers(0, len(senders) - 1)))
            open_messages = [m for m in open_messages if m[0] != channel]
            word = "forget" if channel & 1 and draw(st.booleans()) else "close"
            steps.append([word, channel])
    return steps


@pytest.mark.requirement("AQ-R27")
@given(cases())
def test_any_scenario_ends_as_the_rules_say(steps: list[list[Any]]) -> None:
    model = Model()
    for step in steps:
        model.step(*step)
    assert play({"side": "client", "steps": steps}) == model.result()
