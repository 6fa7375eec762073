"""The dissector speaks ReactiveSocket: all vectors through the real command, and clear errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct import dissect
from tests.dissect.test_channels import COMMAND, JSON, environment

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "reactivesocket.json").read_text())


def ask(op: str, **request: Any) -> dict[str, Any]:
    return dissect.answer(json.dumps({"protocol": "reactivesocket", "op": op, **request}))


@pytest.mark.requirement("RS-2")
@pytest.mark.requirement("RS-13")
@pytest.mark.requirement("RS-R1")
@pytest.mark.requirement("RS-R6")
@pytest.mark.requirement("RS-R7")
@pytest.mark.requirement("RS-R9")
@pytest.mark.requirement("RS-R14")
def test_the_command_answers_every_vector() -> None:
    """In one run: valid bytes both ways, invalid ones by their kind, and responses."""
    requests: list[dict[str, Any]] = []
    wanted: list[Any] = []
    for case in VECTORS["valid"]:
        requests.append({"op": "decode", "context": case["context"], "hex": case["hex"]})
        wanted.append({"decoded": case["decoded"]})
        if not case.get("lenient"):
            requests.append({"op": "encode", "context": case["context"], "value": case["decoded"]})
            wanted.append({"hex": case["hex"]})
    for case in VECTORS["invalid"]:
        requests.append({"op": "decode", "context": case["context"], "hex": case["hex"]})
        wanted.append(case["kind"])
    for case in VECTORS["responses"]:
        requests.append({"op": "scenario", "list": "responses", "case": case})
        wanted.append({"result": case["result"]})
    done = subprocess.run(
        [*COMMAND, "--json"],
        input="\n".join(
            json.dumps({"protocol": "reactivesocket", **each}) for each in requests
        ).encode(),
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


@pytest.mark.parametrize(
    ("context", "named"),
    [
        (5, "context must be an object"),
        ({"framing": "udp"}, "context.framing is 'udp'; known: tcp, message"),
    ],
)
def test_what_is_wrong_with_a_context_is_said(context: Any, named: str) -> None:
    assert named in ask("decode", context=context, hex="")["error"]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (7, "value must be a list"),
        ([5], "frame 0 must be an object"),
        ([{}], "frame 0 has no type"),
        ([{"type": "LEASE"}], "type is 'LEASE'; known: SETUP, REQUEST_RESPONSE"),
        ([{"type": "CANCEL"}], "frame 0 (CANCEL) has no stream"),
        ([{"type": "CANCEL", "stream": 0}], "CANCEL does not belong on stream 0"),
        ([{"type": "CANCEL", "stream": 1, "data": ""}], "unknown fields: data"),
        ([{"type": "SETUP", "stream": 0, "data": "", "ignore": True}], "unknown fields: ignore"),
        ([{"type": "CANCEL", "stream": 1, "ignore": 1}], "ignore must be true or false, not int"),
        ([{"type": "ERROR", "stream": 1, "data": "0"}], "data is not hexadecimal"),
        ([{"type": "REQUEST_N", "stream": 1, "n": 0}], "a REQUEST_N of 0 items"),
        ([{"type": "REQUEST_SUB", "stream": 1, "n": 1 << 63, "data": ""}], "2^63 - 1 are the most"),
        ([{"type": "UNKNOWN", "code": 1, "stream": 0, "data": ""}], "code 0x1 is SETUP"),
        ([{"type": "UNKNOWN", "code": 2, "stream": 0, "data": ""}], "flags 0x0 do not belong"),
        ([{"type": "UNKNOWN", "code": 1 << 16, "stream": 0, "data": ""}], "code is 65536"),
        ([{"type": "EXT", "extended_type": 1 << 32, "data": ""}], "an extended type is"),
    ],
)
def test_what_is_wrong_with_frames_is_said(value: Any, named: str) -> None:
    answer = ask("encode", value=value)
    assert named in answer["error"]
    assert answer["kind"] == "malformed"


def test_a_message_is_one_frame() -> None:
    context = {"framing": "message"}
    assert "one frame, not 2" in ask("encode", context=context, value=[{}, {}])["error"]
    assert "one frame, not 0" in ask("encode", context=context, value=[])["error"]


@given(JSON, st.sampled_from(["tcp", "message"]))
def test_any_value_is_encoded_or_refused(value: Any, framing: str) -> None:
    answer = ask("encode", context={"framing": framing}, value=value)
    assert answer.keys() in ({"hex"}, {"error", "kind"})


@given(st.binary(max_size=40), st.sampled_from(["tcp", "message"]))
def test_any_bytes_are_decoded_and_again_the_same(data: bytes, framing: str) -> None:
    """Or refused. Flags need not be the same, so the value is what is compared."""
    context = {"framing": framing}
    answer = ask("decode", context=context, hex=data.hex())
    if "decoded" in answer:
        again = ask("encode", context=context, value=answer["decoded"])
        assert ask("decode", context=context, hex=again["hex"]) == answer
    else:
        assert answer.keys() == {"error", "kind"}


def test_frames_for_people() -> None:
    text = "00000012 0060 0020 0000000000000001 6f6b" + "00000010 0080 0016 0000000000000005"
    assert [line.strip() for line in dissect.dissect("reactivesocket", text, {})] == [
        "0  RESPONSE  stream 1, begin, end",
        "data 6f6b",
        "18  CANCEL  ignore, stream 5",
    ]
    with pytest.raises(dissect.WireError) as caught:
        list(dissect.dissect("reactivesocket", text + "0000", {}))
    assert (caught.value.kind, caught.value.offset) == ("truncated", 34)


def test_the_command_reads_a_message() -> None:
    command = [sys.executable, "-m", "aqueduct.cli", "wire", "reactivesocket"]
    data = "00000012000000000000004d" + "aa" * 33
    done = subprocess.run(
        [*command, data, "--framing", "message"],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first.strip() == "0  REQUEST_FNF  stream 77"
    assert second.strip() == f"data {'aa' * 32} ... (33 bytes)"


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (None, "case must be an object, not null"),
        ({}, "case.frames must be a list, not null"),
        ({"kind": "fnf", "frames": []}, "case.kind is 'fnf'; known: response, stream"),
        ({"frames": [5]}, "case.frames[0] must be a list"),
        ({"frames": [[True, True]]}, "has 2 items; it must be [begin, end, complete, data]"),
        ({"frames": [[True, 1, True, ""]]}, "a flag must be true or false, not int"),
        ({"frames": [[True, True, True, 1]]}, "case.frames[0]: data must be a string"),
    ],
)
def test_what_is_wrong_with_a_case_is_said(case: Any, named: str) -> None:
    assert named in ask("scenario", list="responses", case=case)["error"]
