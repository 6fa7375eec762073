"""Scenarios asked of the dissector: the vectors through the real command, and bad ones named."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct import dissect
from tests.dissect.test_channels import COMMAND, JSON, VECTORS, environment

LOSS = VECTORS["loss"]


def ask(**request: Any) -> dict[str, Any]:
    return dissect.answer(json.dumps({"op": "scenario", "list": "loss", **request}))


@pytest.mark.requirement("AQ-47")
@pytest.mark.requirement("AQ-R27")
def test_the_command_answers_every_scenario() -> None:
    requests = [{"protocol": "aq", "op": "scenario", "list": "loss", "case": c} for c in LOSS]
    done = subprocess.run(
        [*COMMAND, "--json"],
        input="\n".join(map(json.dumps, requests)).encode(),
        capture_output=True,
        env=environment(),
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers == [{"result": case["result"]} for case in LOSS]


SEND = ["send", 0, "reliable", 0, [8]]
DATAGRAM = ["send", 0, "unreliable", 0, [8]]


@pytest.mark.requirement("AQ-R27")
@pytest.mark.parametrize(
    ("steps", "named"),
    [
        (None, "case.steps must be a list"),
        ([5], "case.steps[0] must be a list"),
        ([[]], "case.steps[0] is empty"),
        ([["dance", 0]], "'dance'; known: send, ack, nack, close, got, forget"),
        ([[5]], "case.steps[0] is 5"),
        ([["send", 0, "reliable", 0]], "3 arguments; it takes 4"),
        ([["close", 0, 1]], "2 arguments; it takes 1"),
        ([["send", "0", "reliable", 0, []]], "channel must be a whole number"),
        ([["send", -8, "reliable", 0, []]], "channel is -8"),
        ([["send", 0, "sometimes", 0, []]], "space is 'sometimes'"),
        ([["send", 0, "reliable", 1.0, []]], "number must be a whole number"),
        ([["send", 0, "reliable", (1 << 64) - 1, []]], "number is 18446744073709551615"),
        ([["send", 0, "reliable", 0, 8]], "attached must be a list"),
        ([["send", 0, "reliable", 0, [True]]], "attached[0] must be a whole number"),
        ([["send", 0, "reliable", 0, [0]]], "never attached (AQ-R4)"),
        ([["send", 0, "reliable", 0, [9]]], "must be created by the client (AQ-16)"),
        ([["send", 0, "reliable", 0, [8, 8]]], "attached twice (AQ-R4)"),
        ([SEND, ["send", 0, "reliable", 1, [8]]], "case.steps[1] (send): channel 8"),
        ([SEND, SEND], "reliable message 0 on channel 0"),
        ([["send", 8, "reliable", 0, []]], "was never attached"),
        ([["send", 2, "reliable", 0, []]], "the client does not send on channel 2"),
        ([["ack", 0, "reliable", 0]], "was never sent"),
        ([SEND, ["ack", 0, "unreliable", 0]], "was never sent"),
        ([SEND, ["nack", 0, "reliable", 0]], "nacked by the end of its channel alone"),
        ([DATAGRAM, ["ack", 0, "unreliable", 0], ["nack", 0, "unreliable", 0]], "settled already"),
        ([SEND, ["close", 0], ["ack", 0, "reliable", 0]], "ended at case.steps[1] (close)"),
        ([SEND, ["close", 8], ["send", 8, "reliable", 0, []]], "ended at case.steps[1]"),
        ([["got", 8]], "must be created by the server"),
        ([["got", 3]], "not a sender of this side"),
        ([["got", 1], ["got", 1]], "attached twice"),
        ([SEND, ["forget", 8]], "only the creator"),
        (
            [
                ["send", 0, "reliable", 0, [12]],
                ["send", 12, "reliable", 0, []],
                ["send", 12, "reliable", 1, []],
            ],
            "case.steps[2] (send): ",
        ),
    ],
)
def test_a_bad_scenario_is_named(steps: Any, named: str) -> None:
    answer = ask(case={"side": "client", "steps": steps})
    assert answer.keys() == {"error", "kind"}
    assert answer["kind"] == "malformed"
    assert named in answer["error"]


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"list": "loss"}, "case must be an object, not null"),
        ({"case": []}, "case must be an object, not list"),
        ({"case": {"steps": []}}, "case.side is None"),
        ({"case": {"side": "nobody", "steps": []}}, "case.side is 'nobody'"),
        ({"list": "gain", "case": {}}, "list is 'gain'; known: loss"),
        ({"list": None, "case": {}}, "list is None"),
        ({"protocol": "aq9", "case": {}}, "protocol is 'aq9'"),
    ],
)
def test_a_bad_request_is_named(request_: dict[str, Any], named: str) -> None:
    answer = ask(**request_)
    assert answer["kind"] == "malformed"
    assert named in answer["error"]


WORDS = st.sampled_from(["send", "ack", "nack", "close", "got", "forget", "reliable", "unreliable"])
STEP = st.lists(WORDS | st.integers(0, 20) | st.lists(st.integers(0, 40), max_size=3), max_size=5)


@given(st.sampled_from(["client", "server"]), st.lists(STEP, max_size=6) | JSON)
def test_any_steps_are_played_or_refused(side: str, steps: Any) -> None:
    answer = ask(case={"side": side, "steps": steps})
    if "result" in answer:
        assert answer["result"].keys() == {"accessible", "lost", "pending"}
    else:
        assert answer["kind"] == "malformed"


def test_the_command_tells_of_scenarios() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aqueduct.cli", "wire", "--help"],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert "scenario" in done.stdout
