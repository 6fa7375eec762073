"""The dissector speaks Relink: all vectors through the real command, and what is wrong is said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduct import dissect
from tests.dissect.test_channels import COMMAND, JSON, environment

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "relink.json").read_text())
PACKETS = {"what": "packets", "from": "connector", "connector_id_size": 1, "listener_id_size": 1}


def ask(op: str, **request: Any) -> dict[str, Any]:
    return dissect.answer(json.dumps({"protocol": "relink", "op": op, **request}))


@pytest.mark.requirement("RL-2")
@pytest.mark.requirement("RL-3")
@pytest.mark.requirement("RL-9")
@pytest.mark.requirement("RL-15")
@pytest.mark.requirement("RL-R2")
@pytest.mark.requirement("RL-R4")
@pytest.mark.requirement("RL-R7")
@pytest.mark.requirement("RL-R8")
@pytest.mark.requirement("RL-R9")
def test_the_command_answers_every_vector() -> None:
    """In one run: valid bytes both ways, invalid ones by their kind, and acknowledgements."""
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
    for case in VECTORS["acknowledgements"]:
        requests.append({"op": "scenario", "list": "acknowledgements", "case": case})
        wanted.append({"result": case["result"]})
    done = subprocess.run(
        [*COMMAND, "--json"],
        input="\n".join(json.dumps({"protocol": "relink", **r}) for r in requests).encode(),
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
        ({"what": "hello"}, "context.what is 'hello'; known: connector-hello"),
        ({"from": "client"}, "context.from is 'client'; known: connector, listener"),
        ({"connector_id_size": 9}, "context.connector_id_size is 9; it must be between 0 and 8"),
        ({"listener_id_size": "1"}, "context.listener_id_size must be a whole number, not str"),
    ],
)
def test_what_is_wrong_with_a_context_is_said(context: Any, named: str) -> None:
    assert named in ask("decode", context=context, hex="")["error"]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (7, "value must be a list"),
        ([5], "packet 0 must be an object"),
        ([{}], "packet 0 has no format"),
        ([{"format": "msg"}], "format is 'msg'; known: channel-op"),
        ([{"format": "general", "type": "hello"}], "type is 'hello'; known: nop, ping"),
        ([{"format": "sequence-op", "type": "close"}], "type is 'close'; known: commit, rollback"),
        ([{"format": "channel-op", "type": "close"}], "(channel-op) has no channels"),
        ([{"format": "channel-op", "type": "close", "channels": [256]}], "channel id of 1 bytes"),
        ([{"format": "channel-op", "type": "close", "channels": [1, 2]}], "one target, not 2"),
        (
            [{"format": "channel-op", "type": "close", "channels": [1], "sequence": 1}],
            "sequence forms alone",
        ),
        ([{"format": "sequence-op", "type": "commit", "channels": [1]}], "sequence forms alone"),
        (
            [{"format": "sequence-op", "type": "commit", "channels": [1], "sequence": 1 << 32}],
            "sequence number is 4294967296",
        ),
        ([{"format": "general", "type": "nop", "channels": [1]}], "unknown fields: channels"),
        ([{"format": "message", "channels": [1]}], "(message) has no parts"),
        ([{"format": "message", "channels": [1], "parts": "00"}], "parts must be a list"),
        ([{"format": "message", "channels": [1], "parts": ["0"]}], "parts[0] is not hexadecimal"),
        ([{"format": "message", "channels": [1], "parts": [""] * 256}], "need a long message"),
        ([{"format": "message", "channels": [1], "parts": ["00" * 65_536]}], "needs a large"),
        (
            [{"format": "message", "channels": [1], "parts": [], "long": 1}],
            "long must be true or false, not int",
        ),
    ],
)
def test_what_is_wrong_with_packets_is_said(value: Any, named: str) -> None:
    answer = ask("encode", context=PACKETS, value=value)
    assert named in answer["error"]
    assert answer["kind"] == "malformed"


NO_LINK = {"endpoint": "a", "connector_id_size": 1, "listener_id_size": 1}
OPENING = {**NO_LINK, "old_epoch": 0, "old_link": 0}


@pytest.mark.requirement("RL-R3")
@pytest.mark.requirement("RL-R19")
@pytest.mark.parametrize(
    ("what", "value", "named"),
    [
        ("connector-hello", 5, "connector-hello must be an object"),
        ("connector-hello", {}, "connector-hello has no version"),
        ("connector-hello", {"version": 1}, "version (RL-R19) is 1"),
        ("listener-hello", {"version": 0, "x": 1}, "unknown fields: x"),
        ("listener-reply", {"epoch": 1}, "listener-reply has no link"),
        ("listener-reply", {"epoch": -1, "link": 1}, "epoch is -1"),
        ("listener-reply", {"epoch": 1, "link": 1 << 63}, "link is 9223372036854775808"),
        ("connector-open", {"endpoint": 5}, "endpoint must be a string"),
        ("connector-open", {**OPENING, "endpoint": "\ud800"}, "endpoint is no UTF-8"),
        ("connector-open", {**OPENING, "endpoint": "a" * 256}, "256 bytes; at most 255"),
        ("connector-open", {**OPENING, "connector_id_size": 9}, "channel ids of 9 and 1 bytes"),
        ("connector-open", NO_LINK, "connector-open has no old_epoch"),
        ("connector-open", {**OPENING, "old_link": 1 << 63}, "below 2^63"),
        (
            "connector-open",
            {**OPENING, "require_old_link": 1},
            "require_old_link must be true or false",
        ),
    ],
)
def test_what_is_wrong_with_a_handshake_is_said(what: str, value: Any, named: str) -> None:
    answer = ask("encode", context={"what": what}, value=value)
    assert named in answer["error"]
    assert answer["kind"] == "malformed"


@pytest.mark.requirement("RL-5")
@pytest.mark.requirement("RL-R3")
@pytest.mark.parametrize(
    ("what", "text", "kind", "named"),
    [
        ("connector-open", "01ff0101000000000000000000000000" + "00" * 8, "malformed", "UTF-8"),
        ("connector-open", "01610901000000000000000000000000" + "00" * 8, "malformed", "9 and 1"),
        ("connector-open", "", "truncated", "end inside the connector-open"),
        ("listener-reply", "00" * 17, "malformed", "1 bytes behind the listener-reply"),
        ("listener-reply", "ff" * 16, "malformed", "2^63 or more"),
        ("connector-hello", "00" * 9, "malformed", "1 bytes behind"),
        ("connector-hello", "00" * 7, "truncated", "a hello of 7 bytes"),
    ],
)
def test_what_is_wrong_with_bytes_is_said(what: str, text: str, kind: str, named: str) -> None:
    answer = ask("decode", context={"what": what}, hex=text)
    assert named in answer["error"]
    assert answer["kind"] == kind


@pytest.mark.requirement("RL-R4")
def test_a_connector_may_offer_any_version() -> None:
    answer = ask("decode", context={"what": "connector-hello"}, hex="0700000000000000")
    assert answer == {"decoded": {"version": 7}}


@pytest.mark.requirement("RL-10")
def test_a_side_that_is_not_said_is_found() -> None:
    """Its channel ids are of two bytes, and what it acknowledges has one."""
    sizes = {"connector_id_size": 1, "listener_id_size": 2}
    message = [{"format": "message", "channels": [300], "parts": []}]
    text = ask("encode", context={**sizes, "from": "listener"}, value=message)["hex"]
    dirty = text[:8] + "01000000" + text[16:]
    assert "decoded" in ask("decode", context=sizes, hex=dirty)
    wanted = [{"format": "channel-ack", "type": "closed", "multicast": False, "channels": [7]}]
    assert ask("decode", context=sizes, hex="8500070000000000", meaning=True) == {
        "decoded": wanted,
        "meaning": None,
    }


def test_what_no_bytes_can_meet_is_truncated() -> None:
    """A size is a promise; targets without an id are all there, and too many."""
    large = "5101010000000000" + "ff" * 8
    assert ask("decode", context=PACKETS, hex=large)["kind"] == "truncated"
    without = {**PACKETS, "connector_id_size": 0}
    answer = ask("decode", context=without, hex="4300000001000100")
    assert answer["kind"] == "malformed"
    assert "65537 targets that have no id" in answer["error"]


def test_packets_are_shown_to_people() -> None:
    text = "1301 0000 02000000 0102 0300 0000 0000 6162630000000000 2f00 0000 01000000 05000000"
    text += "09000000 20000000 00000000"
    lines = list(dissect.dissect("relink", text, {"from": "connector"}))
    assert [line.strip() for line in lines] == [
        "0  message  multicast, channels 1, 2",
        "part 616263",
        "24  sequence-ack consumed  multicast, channels 5, sequence 9",
        "40  general ping",
    ]
    with pytest.raises(dissect.WireError) as caught:
        list(dissect.dissect("relink", "2000000000000000 a0", {}))
    assert (caught.value.kind, caught.value.offset) == ("malformed", 8)
    part = "51 01 01 0000000000 2100000000000000" + "aa" * 33 + "00" * 7
    lines = list(dissect.dissect("relink", part, {}))
    assert lines[0].endswith("message  channels 1, large")
    assert lines[1].endswith(" ... (33 bytes)")


def test_the_command_reads_a_handshake_and_other_ids() -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "aqueduct.cli", "wire", "relink", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment(), check=True
        ).stdout.strip()

    opening = "05737061726b040405000000000000000100000000000000ffffffffffffff7f"
    assert run(opening, "--what", "connector-open") == (
        "0  connector-open  endpoint spark, connector_id_size 4, listener_id_size 4, "
        "connector_transactions, require_old_link, old_epoch 1, old_link 9223372036854775807"
    )
    arguments = ("0500341200000000", "--from", "listener", "--id-sizes", "2", "8")
    assert run(*arguments) == "0  channel-ack received  channels 4660"


@given(st.sampled_from(["packets", "connector-open", "listener-reply", "connector-hello"]), JSON)
def test_any_value_is_encoded_or_refused(what: str, value: Any) -> None:
    answer = ask("encode", context={"what": what}, value=value)
    assert answer.keys() in ({"hex"}, {"error", "kind"})


@given(
    st.sampled_from(["packets", "connector-open", "listener-reply", "listener-hello"]),
    st.binary(max_size=40),
    st.integers(0, 8),
)
def test_any_bytes_are_decoded_and_again_the_same(what: str, data: bytes, id_size: int) -> None:
    """Or refused. Padding need not be the same, so the value is what is compared."""
    context = {
        "what": what,
        "connector_id_size": id_size,
        "listener_id_size": 1,
        "from": "connector",
    }
    answer = ask("decode", context=context, hex=data.hex())
    if "decoded" in answer:
        again = ask("encode", context=context, value=answer["decoded"])
        assert ask("decode", context=context, hex=again["hex"]) == answer
    else:
        assert answer.keys() == {"error", "kind"}


# ----------------------------------------------------------------- acknowledgements


def play(*steps: Sequence[Any], **case: Any) -> dict[str, Any]:
    return ask("scenario", list="acknowledgements", case={"steps": list(steps), **case})


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (None, "case must be an object, not null"),
        ({}, "case.steps must be a list, not null"),
        ({"steps": [5]}, "case.steps[0] must be a list"),
        ({"steps": [["send"]]}, "has 1 items; it must be [word, number]"),
        ({"steps": [["drop", 1]]}, "'drop'; known: send, commit, rollback, received"),
        ({"steps": [["send", None]]}, "case.steps[0] (send) must be a whole number, not null"),
        ({"steps": [["received", 1 << 32]]}, "(received) is 4294967296"),
        ({"steps": [["send", 1 << 20], ["send", 1]]}, "more than 1048576 messages"),
        ({"steps": [], "start": 1 << 32}, "case.start is 4294967296"),
        ({"steps": [], "transactional": 1}, "case.transactional must be true or false, not int"),
    ],
)
def test_what_is_wrong_with_a_case_is_said(case: Any, named: str) -> None:
    assert named in ask("scenario", list="acknowledgements", case=case)["error"]


@pytest.mark.requirement("RL-R8")
@pytest.mark.requirement("RL-R9")
@pytest.mark.parametrize(
    ("steps", "transactional", "error", "stale"),
    [
        ([["received", 0]], False, 0, []),
        ([["received", (1 << 32) - 1], ["send", 1], ["consumed", None]], False, None, [0]),
        ([["committed", (1 << 32) - 1]], False, 0, []),
        ([["commit", (1 << 32) - 1]], True, None, [0]),
        ([["send", 2], ["received", 2]], False, 1, []),
        ([["send", 2], ["consumed", 0], ["received", 0], ["consumed", 2]], False, 3, [2]),
        ([["commit", 0]], True, 0, []),
        ([["send", 2], ["commit", 0]], False, 1, []),
        ([["send", 2], ["commit", 2]], True, 1, []),
        ([["send", 2], ["commit", 1], ["rollback", 0], ["commit", None]], True, 3, [2]),
        ([["send", 2], ["rollback", 0], ["committed", 0]], True, 2, []),
        ([["send", 2], ["commit", 1], ["committed", 0], ["uncommitted", 0]], True, None, [3]),
        ([["send", 3], ["received", 1], ["consumed", 0], ["consumed", 0]], True, None, [3]),
    ],
)
def test_errors_and_stale_steps_are_told(
    steps: list[Any], transactional: bool, error: int | None, stale: list[int]
) -> None:
    result = play(*steps, transactional=transactional)["result"]
    assert (result["error_step"], result["stale_steps"]) == (error, stale)


NUMBERS = st.none() | st.integers(0, 9) | st.integers(0, (1 << 32) - 1)
WORDS = ("commit", "rollback", "received", "consumed", "committed", "uncommitted")
STEP = st.tuples(st.just("send"), st.integers(0, 4)) | st.tuples(st.sampled_from(WORDS), NUMBERS)


def distance(sequence: int, cursor: int) -> int:
    """How many messages a sequence number passes; 0: none, it is stale."""
    ahead = (sequence - cursor + 1) % (1 << 32)
    return ahead if ahead <= 1 << 31 else 0


def judge(steps: list[Any], start: int, transactional: bool) -> dict[str, Any]:
    """What the rules say of a case, message by message (RL-R7 to RL-R9)."""
    received = consumed = decided = results = 0
    sent: list[str] = []  # what was decided about each message
    answers: list[list[Any]] = []
    stale: list[int] = []
    error = None
    for at, (what, said) in enumerate(steps):
        if what == "send":
            sent += ["undecided"] * said
            continue
        # The cursor of the kind, and how far the packet goes.
        if what in ("commit", "rollback"):
            cursor = decided
        elif what in ("received", "consumed"):
            cursor = received if what == "received" else consumed
        else:
            cursor = results
        if what in ("committed", "uncommitted") and said is None:
            while cursor < len(sent) and sent[cursor] == "rollback":
                cursor += 1
        count = 1 if said is None else distance(said, start + cursor)
        end = cursor + count
        plain_only = not transactional and what not in ("received", "consumed")
        if plain_only:
            error = at
            break
        if count == 0:
            stale.append(at)
            continue
        if end > len(sent):
            error = at
            break
        if what in ("commit", "rollback"):
            sent[decided:end] = [what] * (end - decided)
            decided = end
        elif what == "received":
            received = end
        elif what == "consumed":
            consumed, received = end, max(received, end)
        else:
            if sent[end - 1] != "commit" or "undecided" in sent[:end]:
                error = at
                break
            answers += [
                [(start + each) % (1 << 32), what]
                for each in range(results, end)
                if sent[each] == "commit"
            ]
            results = end
            consumed, received = max(consumed, end), max(received, end)
    if transactional:
        left = [
            each
            for each, decision in enumerate(sent)
            if decision == "undecided" or (decision == "commit" and each >= results)
        ]
    else:
        left = list(range(consumed, len(sent)))
    return {
        "outstanding": [(start + each) % (1 << 32) for each in left],
        "unreceived": [(start + each) % (1 << 32) for each in range(received, len(sent))],
        "results": answers,
        "stale_steps": stale,
        "error_step": error,
    }


@pytest.mark.requirement("RL-16")
@pytest.mark.requirement("RL-R7")
@pytest.mark.requirement("RL-R8")
@pytest.mark.requirement("RL-R9")
@settings(max_examples=400)
@given(
    st.lists(STEP, max_size=12),
    st.sampled_from([0, 7, (1 << 31) - 2, (1 << 32) - 3]),
    st.booleans(),
)
def test_any_steps_have_the_outcome_that_the_rules_say(
    steps: list[Any], start: int, transactional: bool
) -> None:
    # Numbers near the start, so that they hit messages.
    placed = [
        (what, (start + given) % (1 << 32) if what != "send" and given in range(10) else given)
        for what, given in steps
    ]
    wanted = judge(placed, start, transactional)
    assert play(*placed, start=start, transactional=transactional) == {"result": wanted}
