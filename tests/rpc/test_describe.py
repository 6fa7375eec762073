"""What a service tells of itself, there and back."""

from __future__ import annotations

import json
import struct

import pyarrow as pa
import pytest

from aqueduct.errors import BadCall
from aqueduct.rpc.describe import (
    DESCRIBE,
    DESCRIBE_SCHEMA,
    RESERVED_PREFIX,
    Description,
    HandlerDescription,
)

PLAIN = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
DESCRIPTION = Description(
    service="flights",
    library="0.1.0",
    handlers=(
        HandlerDescription("score", "exchange", PLAIN, PLAIN, 4, True, "Scores é."),
        HandlerDescription("any", "sink", max_concurrency=2),
    ),
    summary="Scores flights.",
)


@pytest.mark.requirement("AC-68")
@pytest.mark.requirement("AC-69")
def test_a_description_survives():
    assert Description.from_json(DESCRIPTION.to_json()) == DESCRIPTION
    assert Description.from_json(DESCRIPTION.to_json().encode()) == DESCRIPTION
    batch = DESCRIPTION.to_batch()
    assert batch.schema.equals(DESCRIBE_SCHEMA)
    assert Description.from_batches([batch]) == DESCRIPTION


def test_one_without_a_summary_is_fine():
    document = json.loads(DESCRIPTION.to_json())
    del document["summary"]
    assert Description.from_json(json.dumps(document)).summary == ""


@pytest.mark.requirement("AC-70")
def test_people_can_read_it():
    document = json.loads(DESCRIPTION.to_json())
    assert document["convention"] == 1
    assert document["handlers"][0]["input"]["text"] == "id: int64 not null\nname: string"
    assert document["handlers"][1]["input"] is None


def test_its_name_is_reserved():
    assert DESCRIBE == "aqueduct.describe" and DESCRIBE.startswith(RESERVED_PREFIX)


def altered(**changes):
    document = json.loads(DESCRIPTION.to_json())
    document["handlers"][0] |= changes
    return json.dumps(document)


@pytest.mark.requirement("AC-69")
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, ""),
        (b"\xff", "'utf-8' codec"),
        ("[]", "it has no 'service' of the type str"),
        ("{}", "it has no 'service' of the type str"),
        (
            '{"service":"s","library":"l","convention":true}',
            "it has no 'convention' of the type int",
        ),
        (altered(kind="stream"), "'stream' is no kind of handler"),
        (altered(name=None), "it has no 'name' of the type str"),
        (altered(concurrency=1.5), "it has no 'concurrency' of the type int"),
        (altered(max_concurrency="2"), "it has no 'max_concurrency' of the type int"),
        (altered(input="x"), "it has no 'input' of the type dict"),
        (altered(input={"ipc": "%"}), "'input' is not base64"),
        (altered(output={"ipc": "aaaa"}), "'output': not a schema in Arrow IPC form"),
        (" " * ((16 << 20) + 1), "it has 16777217 bytes, above the limit of 16777216"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_descriptions_that_are_wrong(text, fault):
    with pytest.raises(BadCall) as caught:
        Description.from_json(text, peer="p")
    assert str(caught.value).startswith("the description of the service cannot be read: ")
    assert fault in str(caught.value)
    assert (caught.value.peer, caught.value.handler) == ("p", DESCRIBE)


def test_answers_that_are_wrong():
    batch = DESCRIPTION.to_batch()
    for batches, rows in (([], 0), ([batch, batch], 2)):
        with pytest.raises(BadCall, match=f"is one text, and {rows} rows came"):
            Description.from_batches(batches)


def damaged(text: bytes) -> pa.RecordBatch:
    """A batch whose one text has these bytes, UTF-8 or not."""
    offsets = pa.py_buffer(struct.pack("=ii", 0, len(text)))
    column = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(text)])
    return pa.RecordBatch.from_arrays([column], schema=DESCRIBE_SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        DESCRIPTION.to_json().encode()[:-3] + b"\x80}]",
        b'{"service": "\xc3"}',
        b"",
        b"[]",
        b"5",
        b"null",
        b'{"service": 5}',
        b"[" * 100_000,
        b"9" * 100_000,
        altered(name="\ud800").encode(),
        altered(input={"ipc": "AAAA", "text": ""}).encode(),
        altered(input={"ipc": "\u00e9", "text": ""}).encode(),
        altered(input=[1]).encode(),
        json.dumps({**json.loads(DESCRIPTION.to_json()), "tables": [5]}).encode(),
        json.dumps({**json.loads(DESCRIPTION.to_json()), "sinks": {"a": 1}}).encode(),
    ],
)
def test_a_damaged_description_is_an_error_of_the_library_that_names_the_peer(text: bytes):
    with pytest.raises(BadCall) as caught:
        Description.from_batches([damaged(text)], peer="tcp://there:1")
    assert (caught.value.peer, caught.value.handler) == ("tcp://there:1", DESCRIBE)
    str(caught.value).encode()
