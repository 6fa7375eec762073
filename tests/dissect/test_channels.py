"""The dissector: every vector through the real command, and nothing that ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aqueduct
from aqueduct import dissect as dissection

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "aq.json").read_text())
VALID, INVALID = VECTORS["valid"], VECTORS["invalid"]
PRODUCED = [case for case in VALID if not case.get("lenient")]
COMMAND = [sys.executable, "-m", "aqueduct.cli", "wire"]
CLIENT = {"from": "client", "carrier": "stream"}


def named(cases: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


def environment() -> dict[str, str]:
    """The package under test, wherever the command runs."""
    return {**os.environ, "PYTHONPATH": str(Path(aqueduct.__file__).parents[1])}


class Dissector:
    """The real command, asked line by line."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--json"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )

    def ask(self, request: object) -> dict[str, Any]:
        line = request if isinstance(request, bytes) else json.dumps(request).encode()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer.endswith(b"\n"), "one line for each line, flushed"
        document = json.loads(answer)
        assert isinstance(document, dict)
        return document


@pytest.fixture(scope="module")
def dissector() -> Iterator[Dissector]:
    asked = Dissector()
    with asked.process:
        yield asked
        asked.process.communicate()
    assert asked.process.returncode == 0


# ------------------------------------------------------------ the vectors


@named(VALID)
def test_valid_bytes_are_decoded(dissector: Dissector, case: dict[str, Any]):
    request = {"protocol": "aq", "op": "decode", "context": case["context"], "hex": case["hex"]}
    assert dissector.ask(request) == {"decoded": case["decoded"]}


@named(PRODUCED)
def test_decoded_frames_are_encoded_back(dissector: Dissector, case: dict[str, Any]):
    request = {"protocol": "aq", "op": "encode", "context": case["context"]}
    assert dissector.ask({**request, "value": case["decoded"]}) == {"hex": case["hex"]}


@named([case for case in VALID if "meaning" in case])
def test_what_ranges_mean_is_told_when_asked(dissector: Dissector, case: dict[str, Any]):
    request = {"protocol": "aq", "op": "decode", "context": case["context"], "hex": case["hex"]}
    answer = dissector.ask({**request, "meaning": True})
    assert answer == {"decoded": case["decoded"], "meaning": case["meaning"]}


@named(INVALID)
def test_invalid_bytes_are_an_error_of_their_kind(dissector: Dissector, case: dict[str, Any]):
    request = {"protocol": "aq", "op": "decode", "context": case["context"], "hex": case["hex"]}
    answer = dissector.ask(request)
    assert answer.keys() == {"error", "kind"}
    assert answer["kind"] == case["kind"]
    assert answer["error"]


@named([case for case in VALID if case.get("lenient")])
def test_what_is_only_accepted_is_not_produced(dissector: Dissector, case: dict[str, Any]):
    request = {"op": "encode", "context": case["context"], "value": case["decoded"]}
    assert dissector.ask(request)["kind"] == "malformed"


# ------------------------------------------------------------ the requests


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"9" * 5000,
        b"{}",
        b'{"op": "decode"}',
        b'{"op": "decode", "hex": 5}',
        b'{"op": "decode", "hex": "0"}',
        b'{"op": "decode", "hex": "zz"}',
        b'{"op": "decode", "hex": "\\ud800"}',
        b'{"op": "decode", "hex": "0300", "context": 5}',
        b'{"op": "decode", "hex": "0300", "context": {"from": "nobody"}}',
        b'{"op": "decode", "hex": "0300", "context": {"from": ["client"]}}',
        b'{"op": "decode", "hex": "0300", "context": {"carrier": "pigeon"}}',
        b'{"op": "decode", "hex": "0300", "protocol": "aq9"}',
        b'{"op": "decode", "hex": "0300", "protocol": {}}',
        b'{"op": "dance", "hex": "0300"}',
        b'{"op": "scenario", "list": "dance", "case": {}}',
        b'{"op": "encode"}',
        b'{"op": "encode", "value": {}}',
        b'{"op": "encode", "value": [[]]}',
        b'{"op": "encode", "value": [{"type": {}}]}',
    ],
)
def test_a_bad_request_is_answered_and_the_next_one_too(dissector: Dissector, line: bytes):
    answer = dissector.ask(line)
    assert answer.keys() == {"error", "kind"}
    assert answer["kind"] == "malformed"
    assert dissector.ask({"op": "decode", "hex": "01"}) == {"decoded": [{"type": "ACK_VERSION"}]}


def test_lines_are_answered_up_to_the_last_without_its_end():
    requests = b'{"op": "decode", "hex": "01"}\n\n{"op": "decode", "hex": "01"}'
    done = subprocess.run(
        [*COMMAND, "--json"], input=requests, capture_output=True, env=environment(), check=True
    )
    first, blank, last = map(json.loads, done.stdout.splitlines())
    assert first == last == {"decoded": [{"type": "ACK_VERSION"}]}
    assert blank["kind"] == "malformed"


def test_a_reader_that_goes_away_ends_the_command_quietly():
    process = subprocess.Popen(
        [*COMMAND, "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(b'{"op": "decode", "hex": "01"}\n')
        process.stdin.flush()
        assert process.stderr.read() == b""
        assert process.wait() != 0


def ask(**request: Any) -> dict[str, Any]:
    return dissection.answer(json.dumps(request))


ENTRYPOINT = {"id": 0, "creator": "client", "sender": "client", "oneshot": False, "index": 0}
ROUTE = {"type": "ROUTE_TO", "channel": ENTRYPOINT}


def test_no_bytes_are_no_frames():
    assert ask(op="decode", hex="") == {"decoded": []}
    assert ask(op="encode", value=[]) == {"hex": ""}


def test_without_a_sender_either_side_will_do():
    client, server = "030004000000" + "00", "0303040a00000101"
    assert "decoded" in ask(op="decode", hex=client)
    assert "decoded" in ask(op="decode", hex=server)
    assert ask(op="decode", hex=server, context=CLIENT)["kind"] == "malformed"
    finish = {"type": "FINISH_SENDER", "sent_reliable": 0}
    route = {"type": "ROUTE_TO", "channel": {"id": 2}}
    assert ask(op="encode", value=[route, finish]) == {"hex": "03020600"}
    assert ask(op="encode", value=[route, finish], context=CLIENT)["kind"] == "malformed"


def test_a_false_length_takes_no_memory():
    for length in ("ffffffff7f", "ffffffffffffffff7f", "ffffffffffffffffff01"):
        for cut in ("0300040000" + "00" + length + "41", "03000400" + length, "030008" + length):
            assert ask(op="decode", hex=cut, context={"from": "client"})["kind"] in (
                "truncated",
                "malformed",
            )
        message = "0300040000" + "00" + length + "41"
        assert ask(op="decode", hex=message, context=CLIENT)["kind"] == "truncated"


@pytest.mark.requirement("AQ-R13")
def test_codecs_pass_the_highest_number():
    message = {
        "type": "MESSAGE", "num": (1 << 64) - 1, "headers": [], "attachments": [], "payload": "aa",
    }  # fmt: skip
    encoded = "030004ffffffffffffffffff01000001aa"
    assert ask(op="encode", context=CLIENT, value=[ROUTE, message]) == {"hex": encoded}
    assert ask(op="decode", context=CLIENT, hex=encoded) == {"decoded": [ROUTE, message]}


@pytest.mark.parametrize(
    "channel",
    [
        23,
        {"id": 23},
        {"creator": "server", "sender": "server", "oneshot": True, "index": 2},
        {"id": 23, "creator": "server", "sender": "server", "oneshot": True, "index": 2},
        {"id": 23, "oneshot": True},
    ],
)
def test_a_channel_is_taken_by_id_or_by_its_bits(channel: object):
    assert ask(op="encode", value=[{"type": "ROUTE_TO", "channel": channel}]) == {"hex": "0317"}


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        ({"type": "ROUTE_TO", "channel": {"id": 23, "sender": "client"}}, "id is 23"),
        ({"type": "ROUTE_TO", "channel": {"id": 23, "index": 3}}, "id is 23"),
        ({"type": "ROUTE_TO", "channel": {"creator": "server", "sender": "server"}}, "index"),
        ({"type": "ROUTE_TO", "channel": {"id": 1 << 64}}, "id"),
        ({"type": "ROUTE_TO", "channel": {"id": -1}}, "id"),
        ({"type": "ROUTE_TO", "channel": {"id": True}}, "id"),
        ({"type": "ROUTE_TO", "channel": {"id": 1.0}}, "id"),
        ({"type": "ROUTE_TO", "channel": {"id": 0, "colour": "red"}}, "colour"),
        ({"type": "ROUTE_TO", "channel": {}}, "creator"),
        ({"type": "ROUTE_TO"}, "channel"),
        ({"type": "ROUTE_TO", "channel": 0, "colour": "red"}, "colour"),
        ({"type": "NO_SUCH"}, "NO_SUCH"),
        ({"type": "VERSION", "version": "1"}, "version"),
        ({"type": "ACK_VERSION", "colour": "red"}, "colour"),
        ({"type": "CONNECTION_HEADERS", "headers": [["", "00"]]}, "key"),
        ({"type": "CONNECTION_HEADERS", "headers": [["ff", "00"]]}, "key"),
        ({"type": "CONNECTION_HEADERS", "headers": [["61"]]}, "headers[0]"),
        ({"type": "CONNECTION_HEADERS", "headers": [["61", 5]]}, "headers[0]"),
        ({"type": "CONNECTION_HEADERS", "headers": {}}, "headers"),
    ],
)
def test_a_bad_frame_is_named(frame: dict[str, Any], named: str):
    answer = ask(op="encode", context=CLIENT, value=[frame])
    assert answer["kind"] == "malformed"
    assert named in answer["error"]


@pytest.mark.parametrize(
    "frames",
    [
        [{"type": "CANCEL_SENDER"}],  # before ROUTE_TO
        [ROUTE, {"type": "ACK_VERSION"}],
        [ROUTE, ROUTE],
        [ROUTE, {"type": "CLOSE_RECEIVER"}],  # from the sender's side
        [ROUTE, {"type": "SENT_UNRELIABLE", "count": 1 << 64}],
        [{"type": "ROUTE_TO", "channel": 4}, {"type": "MESSAGE", "num": 1}],  # oneshot
        [ROUTE, {"type": "MESSAGE", "num": 0, "attachments": [{"channel": 0}]}],
        [ROUTE, {"type": "MESSAGE", "num": 0, "attachments": [{"channel": 8}, {"channel": 8}]}],
        [ROUTE, {"type": "MESSAGE", "num": 0, "attachments": [{"channel": 9}]}],  # the peer's
        [{"type": "ROUTE_TO", "channel": 2}, {"type": "ACK_RELIABLE", "ranges": [1]}],
        [{"type": "ROUTE_TO", "channel": 2}, {"type": "ACK_RELIABLE", "ranges": [1, 1, 0, 1]}],
        [
            {"type": "ROUTE_TO", "channel": 2},
            {"type": "ACK_NACK_UNRELIABLE", "channel": 10, "ranges": [1]},
        ],
    ],
)
def test_what_a_connection_refuses_is_not_encoded(frames: list[dict[str, Any]]):
    assert ask(op="encode", context=CLIENT, value=frames)["kind"] == "malformed"


def test_an_error_of_an_encode_is_never_a_truncation():
    datagram = {"from": "client", "carrier": "datagram"}
    answer = ask(op="encode", context=datagram, value=[{"type": "ACK_VERSION"}])
    assert answer["kind"] == "malformed"


# ------------------------------------------------------------ anything

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {"type": st.sampled_from(sorted({f["type"] for case in VALID for f in case["decoded"]}))},
    optional={
        name: JSON | st.integers(0, 1 << 64)
        for name in ("channel", "num", "headers", "attachments", "payload", "ranges", "count")
    },
)


@given(st.binary() | st.text().map(str.encode) | JSON.map(lambda v: json.dumps(v).encode()))
def test_any_line_is_answered(line: bytes):
    assert dissection.answer(line).keys() == {"error", "kind"}


@given(st.lists(FIELDS | JSON, max_size=3))
def test_any_value_is_encoded_or_refused(value: list[Any]):
    answer = ask(op="encode", value=value)
    if "hex" in answer:
        again = ask(op="decode", hex=answer["hex"])["decoded"]
        assert ask(op="encode", value=again) == answer
    else:
        assert answer["kind"] == "malformed"


@given(
    st.sampled_from(VALID + INVALID),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    st.integers(0, 400),
)
def test_any_bytes_are_decoded_or_refused(
    case: dict[str, Any], changes: list[tuple[int, int]], length: int
):
    data = bytearray.fromhex(case["hex"])
    for at, byte in changes:
        data[at % len(data)] = byte
    answer = ask(op="decode", hex=data[: length or None].hex(), context=case["context"])
    assert answer.keys() in ({"decoded"}, {"error", "kind"})
    assert answer.get("kind", "malformed") in ("malformed", "truncated")


@named(VALID)
def test_a_cut_is_a_truncation_and_never_another_meaning(case: dict[str, Any]):
    data = bytes.fromhex(case["hex"])
    for length in range(len(data)):
        answer = ask(op="decode", hex=data[:length].hex(), context=case["context"])
        if "decoded" in answer:
            assert answer["decoded"] == case["decoded"][: len(answer["decoded"])]
        else:
            assert answer["kind"] == "truncated"


# ------------------------------------------------------------ for people


def dissect(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=given,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


def test_people_read_offsets_fields_and_payloads():
    case = next(case for case in VALID if case["name"] == "message headers")
    done = dissect("aq", case["hex"], "--from", "client")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "     0  ROUTE_TO  channel 0 (the entrypoint)",
        "     2  MESSAGE  num 2",
        "          header trace-00ff11: 01ff  |..|",
        "          header z: (empty)",
        "          payload aa  |.|",
    ]


def test_people_read_what_is_good_before_what_is_not():
    done = dissect("aq", "-", given="03 00 04 00 00 00 01 61\n05")
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines()[:2]] == [
        ["0", "ROUTE_TO"],
        ["2", "MESSAGE"],
    ]
    assert done.stderr.startswith("aqueduct wire: truncated at byte 8: ")
    assert len(done.stderr.splitlines()) == 1


@named(VALID)
def test_every_vector_can_be_shown(case: dict[str, Any]):
    lines = list(dissection.dissect("aq", case["hex"], case["context"]))
    for frame in case["decoded"]:
        assert any(frame["type"] in line for line in lines)


@pytest.mark.parametrize(
    "arguments", [["aq", "zz"], ["zz", "03"], ["aq", "03", "--from", "bob"], ["aq", "00"]]
)
def test_a_failure_is_one_line(arguments: list[str]):
    done = dissect(*arguments)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("aqueduct wire: ")


@pytest.mark.parametrize("arguments", [[], ["aq"], ["--json", "aq"], ["--json", "aq", "03"]])
def test_wrong_usage_is_status_two(arguments: list[str]):
    assert dissect(*arguments).returncode == 2
