"""The dissector speaks bpmux: all vectors through the real command, and what is wrong is said."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct import dissect
from tests.dissect.test_channels import COMMAND, environment

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "bpmux.json").read_text())


def ask(op: str, **request: Any) -> dict[str, Any]:
    return dissect.answer(json.dumps({"protocol": "bpmux", "op": op, **request}))


def play(*steps: list[str], name: str = "sessions") -> dict[str, Any]:
    return ask("scenario", list=name, case={"steps": list(steps)})


def test_the_command_answers_every_vector() -> None:
    """In one run: valid bytes both ways, invalid ones by their kind, sessions, bad sessions."""
    requests: list[dict[str, Any]] = []
    wanted: list[Any] = []
    for case in VECTORS["valid"]:
        requests.append({"op": "decode", "context": case["context"], "hex": case["hex"]})
        wanted.append({"decoded": case["decoded"]})
        requests.append({"op": "encode", "context": case["context"], "value": case["decoded"]})
        wanted.append({"hex": case["hex"]})
    for case in VECTORS["invalid"]:
        requests.append({"op": "decode", "context": case["context"], "hex": case["hex"]})
        wanted.append(case["kind"])
    for case in VECTORS["sessions"]:
        requests.append({"op": "scenario", "list": "sessions", "case": case})
        wanted.append({"result": case["result"]})
    for case in VECTORS["bad_sessions"]:
        requests.append({"op": "scenario", "list": "bad_sessions", "case": case})
        wanted.append("malformed")
    done = subprocess.run(
        [*COMMAND, "--json"],
        input="\n".join(json.dumps({"protocol": "bpmux", **r}) for r in requests).encode(),
        capture_output=True,
        env=environment(),
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(wanted)
    for request, answer, want in zip(requests, answers, wanted, strict=True):
        if isinstance(want, str):
            assert answer.keys() == {"error", "kind"}, request
            assert answer["kind"] == want, request
            assert answer["error"]
        else:
            assert answer == want, request


@pytest.mark.parametrize("case", VECTORS["bad_sessions"], ids=lambda case: case["name"])
def test_a_bad_session_breaks_at_its_last_step(case: dict[str, Any]) -> None:
    steps = case["steps"]
    assert "result" in play(*steps[:-1])
    answer = play(*steps, name="bad_sessions")
    assert answer["error"].startswith(f"case.steps[{len(steps) - 1}] ({steps[-1][0]}): ")


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        (None, "case.steps must be a list"),
        ([5], "case.steps[0] must be a list"),
        ([[]], "has 0 items; it must be [recv | send, hex]"),
        ([["take", ""]], "'take'; known: recv, send"),
        ([["recv", "0g"]], "is not hexadecimal"),
        ([["send", "7000"]], "(send): the bytes end inside a chunk"),
        ([["send", "a100"]], "is sent by the core itself"),
        ([["send", "500000"]], "Out-Sink 0 is never sent (BP-R3)"),
        ([["send", "d00000"]], "a Duplex with identifier 0"),
        ([["send", "700001aa"]], "cannot leave: the peer has given credit for 0"),
        ([["send", "480101"]], "opening it needs a payload (BP-8)"),
        ([["send", "300100"]], "names nothing that the peer has opened (BP-7)"),
        ([["send", "500100"], ["send", "d00100"]], "Duplex 1 is in use (BP-8)"),
        ([["recv", "620000"], ["send", "a80001"]], "the top-level has ended"),
        ([["send", "a80001"], ["send", "a8" + "00" + "ff" * 9]], "are above 2^64 - 1"),
        ([["recv", "a80005"], ["send", "e002700001aa"], ["send", "e002700001aa"]], "partial mode"),
        ([["recv", "a80005"], ["send", "e002700001aa"], ["send", "620000"]], "lacks 1 bytes"),
    ],
)
def test_what_is_wrong_with_a_session_is_said(steps: Any, named: str) -> None:
    answer = ask("scenario", list="sessions", case={"steps": steps})
    assert named in answer["error"]


@pytest.mark.parametrize("case", [None, 7, [], "x"])
def test_a_session_is_an_object(case: object) -> None:
    assert "case must be an object" in ask("scenario", list="sessions", case=case)["error"]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([5], "chunk 0 must be an object"),
        ([{"id": 1}], "chunk 0 has no type"),
        ([{"type": "Sink", "id": 1}], "type is 'Sink'; known: Out-Request"),
        ([{"type": "In-Sink"}], "has no id"),
        ([{"type": "In-Sink", "id": 1 << 64}], "id is 18446744073709551616"),
        ([{"type": "In-Sink", "id": 1, "ping": 1}], "ping must be true or false, not int"),
        ([{"type": "In-Sink", "id": 1, "credit": -1}], "credit is -1"),
        ([{"type": "In-Sink", "id": 1, "payload": "0"}], "payload is not hexadecimal"),
        ([{"type": "In-Sink", "id": 1, "x": 1}], "unknown fields: x"),
        ([{"type": "In-Sink", "id": 1, "ack_end": True, "ping": True}], "stands alone"),
        ([{"type": "Duplex", "id": 1}], "a Duplex without a payload"),
        ([{"type": "Partial", "total": 0}], "total is zero"),
        ([{"type": "Partial", "total": 5}], "nothing follows the last Partial"),
        ([{"type": "Partial", "total": 5}] * 2, "chunk 1 (Partial) follows a Partial"),
    ],
)
def test_what_is_wrong_with_chunks_is_said(value: Any, named: str) -> None:
    assert named in ask("encode", value=value)["error"]


def test_sends_play_every_part_of_the_protocol() -> None:
    """The application's chunks leave by commands, in any form that the text allows."""
    answer = play(
        ["recv", "a800f903e8"],  # credit for our opening payloads
        ["send", "5c0101aa09"],  # a sink with payload, credit and ping
        ["recv", "a80105"],
        ["send", "52010002bbcc"],  # an empty payload and the end
        ["recv", "a101"],
        ["send", "100502aabb"],
        ["recv", "2005"],  # a heartbeat
        ["recv", "220500"],  # refused
        ["send", "d8070004"],  # a duplex
        ["send", "500700"],  # an empty message on its sink half
        ["recv", "700702ccdd"],
        ["send", "8007"],
        ["recv", "12010000"],  # a request that is cancelled at once
    )
    assert answer == {
        "result": {
            "acks": "01052101",
            "delivered": [
                ["req_out", 5, "end", ""],
                ["stream_out", 7, "payload", "ccdd"],
                ["req_in", 1, "payload", ""],
                ["req_in", 1, "end", ""],
            ],
        }
    }


def test_chunks_are_shown_to_people() -> None:
    lines = list(dissect.dissect("bpmux", "7e0101aa0201bb 2109", {}))
    assert [line.strip() for line in lines] == [
        "0  In-Sink  id 1, credit 2, ping",
        "payload aa",
        "end bb",
        "7  In-Request  id 9, ack_end",
    ]


@given(st.lists(st.tuples(st.sampled_from(["recv", "send"]), st.binary(max_size=12))))
def test_no_session_ends_the_loop(steps: list[tuple[str, bytes]]) -> None:
    answer = play(*([what, data.hex()] for what, data in steps))
    assert answer.keys() in ({"result"}, {"error", "kind"})
