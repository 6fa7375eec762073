"""The control-stream draft in the dissector: every vector by the real command, and what it says."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from aqueduct import dissect as dissection
from aqueduct.dissect.control_streams import contexts
from tests.dissect.test_channels import COMMAND, Dissector, dissector, environment, named
from tests.speedups.control_streams.sequences import VECTORS

__all__ = ["dissector"]  # a fixture

VERSION_TEXT = "0.0.0-AFTER"
VALID, INVALID = VECTORS["valid"], VECTORS["invalid"]
UNI = {"from": "client", "carrier": "uni"}
names = pytest.mark.parametrize("protocol", ["control-streams", "aq0"])


@names
@named(VALID)
def test_valid_bytes_are_decoded_and_encoded_back(
    dissector: Dissector, case: dict[str, Any], protocol: str
) -> None:
    request = {"protocol": protocol, "context": case["context"]}
    answer = dissector.ask({**request, "op": "decode", "hex": case["hex"]})
    assert answer == {"decoded": case["decoded"]}
    answer = dissector.ask({**request, "op": "encode", "value": case["decoded"]})
    if case.get("lenient"):
        assert answer["kind"] == "malformed"
    else:
        assert answer == {"hex": case["hex"]}


@named(INVALID)
def test_invalid_bytes_are_an_error_of_their_kind(
    dissector: Dissector, case: dict[str, Any]
) -> None:
    answer = dissector.ask(
        {
            "protocol": "control-streams",
            "op": "decode",
            "context": case["context"],
            "hex": case["hex"],
        }
    )
    assert answer.keys() == {"error", "kind"}
    assert answer["kind"] == case["kind"]
    assert answer["error"]


def ask(operation: str, context: Any, **fields: Any) -> dict[str, Any]:
    request = {"protocol": "control-streams", "op": operation, "context": context, **fields}
    return dissection.answer(json.dumps(request))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"type": "Hello"}, "unknown type 'Hello'; known: Version, ConnectionControl"),
        ({"type": "Version", "version": "1"}, "must be '0.0.0-AFTER'"),
        ({"type": "Message", "num": 0}, "has no channel"),
        ({"type": "Message", "channel": 1, "num": 0}, "comes from the receiver"),
        ({"type": "Message", "channel": 0, "num": 0, "attachments": [0]}, "entrypoint"),
        ({"type": "Message", "channel": 0, "num": 0, "attachments": 8}, "attachments must be"),
        ({"type": "Message", "channel": 0, "num": 0, "payload": "0"}, "not hexadecimal"),
        ({"type": "Message", "channel": 0, "num": 0, "more": 1}, "unknown fields: more"),
        ({"type": "FinishSender", "sent_reliable": -1}, "sent_reliable is -1"),
        ({"type": "FinishSender", "sent_reliable": 1}, "control stream of a channel alone"),
        ({"type": "ChannelControl", "channel": {"id": 2}}, "only who opens"),
        ({"type": "ClosedChannelLost", "channel": {"id": 2, "minter": "client"}}, "make 0"),
    ],
)
def test_values_that_are_no_frames(value: Any, text: str) -> None:
    answer = ask("encode", UNI, value=[value])
    assert answer["kind"] == "malformed"
    assert text in answer["error"]


@pytest.mark.parametrize(
    ("context", "text"),
    [
        ([], "context must be an object"),
        ({"from": "nobody"}, "context.from"),
        ({"carrier": "stream"}, "context.carrier"),
        ({"carrier": "uni", "channel": 8}, "belongs to the carrier bidi-answer"),
        ({"channel": 8}, "belongs to the carrier bidi-answer"),
        ({"carrier": "bidi-answer", "channel": "8"}, "context.channel"),
        ({"from": "client", "carrier": "bidi-answer"}, "of the client needs one"),
    ],
)
def test_contexts_that_there_are_not(context: Any, text: str) -> None:
    answer = ask("decode", context, hex="0704")
    assert answer["kind"] == "malformed"
    assert text in answer["error"]


def test_what_a_context_leaves_open_is_tried() -> None:
    control = {"type": "ChannelControl", "channel": {"id": 2, **BITS_OF_TWO}}
    assert ask("decode", {}, hex="0202") == {"decoded": [control]}
    assert [context.from_server for context in contexts({"carrier": "bidi-answer"})] == [True]
    answer = ask("decode", {"carrier": "bidi-answer", "channel": {"id": 2}}, hex="0701")
    assert answer == {"decoded": [{"type": "FinishSender", "sent_reliable": 1}]}


BITS_OF_TWO = {"sender": "client", "minter": "server", "oneshot": False, "index": 0}


def test_the_highest_message_number_is_written() -> None:
    frame = {"type": "Message", "channel": 304, "num": (1 << 64) - 1}
    data = ask("encode", UNI, value=[frame])["hex"]
    (decoded,) = ask("decode", UNI, hex=data)["decoded"]
    assert (decoded["channel"]["id"], decoded["num"]) == (304, (1 << 64) - 1)


@pytest.mark.requirement("AQ0-6")
@pytest.mark.parametrize(
    ("frame", "meaning"),
    [
        ("050403020504", [[0, 3], [5, 10]]),
        ("06020203", {"acks": [[0, 2]], "nacks": [[2, 5]], "next": 5}),
        ("08020003", {"acks": [], "nacks": [[0, 3]], "next": 3}),
        ("0800", {"acks": [], "nacks": [], "next": 0}),
    ],
)
def test_what_ranges_mean(frame: str, meaning: Any) -> None:
    answer = ask("decode", {"from": "server"}, hex="0200" + frame, meaning=True)
    assert answer["meaning"] == meaning
    assert ask("decode", {"from": "server"}, hex="0200", meaning=True)["meaning"] is None


def test_people_read_a_sequence() -> None:
    given = ["control-streams", "02000504 03020504", "--from", "server"]
    done = subprocess.run(
        [*COMMAND, *given], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout.splitlines() == [
        "     0  ChannelControl  channel 0 (the entrypoint)",
        "     2  AckReliable  ranges [3, 2, 5, 4], that is [[0, 3], [5, 10]]",
    ]
    given = ["control-streams", "0701", "--carrier", "bidi-answer", "--channel", "46"]
    done = subprocess.run(
        [*COMMAND, *given], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout.splitlines() == ["     0  FinishSender  sent_reliable 1"]
    lines = dissection.dissect("control-streams", "03 00 01 02 01 08 02 6869", UNI)
    assert list(lines) == [
        "     0  Message  channel 0 (the entrypoint), num 1",
        "          attached channel 1 (server to client, multishot, index 0 of the client)",
        "          attached channel 8 (client to server, multishot, index 1 of the client)",
        "          payload 6869  |hi|",
    ]


CALLS = {**UNI, "header_blocks": True}


@pytest.mark.parametrize("headers", [[], [["6b", "76"], ["6b32", ""]]])
def test_messages_of_calls_begin_with_their_headers(headers: list[list[str]]) -> None:
    message = {"type": "Message", "channel": 0, "num": 5, "attachments": [], "payload": "0102"}
    frames = [{"type": "Version", "version": VERSION_TEXT}, {**message, "headers": headers}]
    made = ask("encode", CALLS, value=frames)
    _, found = ask("decode", CALLS, hex=made["hex"])["decoded"]
    assert (found["headers"], found["payload"]) == (headers, "0102")
    assert ask("encode", CALLS, value=[frames[0], found]) == made
    plain = ask("decode", UNI, hex=made["hex"])["decoded"][1]
    assert len(plain["payload"]) == 2 * 64 + 4  # the block is a part of the payload
    assert "headers" not in plain
    lines = list(dissection.dissect("control-streams", made["hex"], CALLS))
    assert "payload 0102" in lines[-1]
    assert sum("header" in line for line in lines) == len(headers)


def test_a_block_that_is_malformed_says_so() -> None:
    message = {"type": "Message", "channel": 0, "num": 0, "payload": "ff" * 70}
    made = ask("encode", UNI, value=[{"type": "Version"}, message])
    (_, found) = ask("decode", CALLS, hex=made["hex"])["decoded"]
    assert found["malformed"] and "headers" not in found


def test_header_blocks_are_there_or_not() -> None:
    answer = ask("decode", {**UNI, "header_blocks": 1}, hex="")
    assert "context.header_blocks must be true or false" in answer["error"]
    message = {"type": "Message", "channel": 0, "num": 0, "headers": []}
    assert "unknown fields: headers" in ask("encode", UNI, value=[message])["error"]
