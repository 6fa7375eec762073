"""What may not be registered as a sink, and what strangers may send to one."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.sink_writer import SinkWriter
from aqueduct.errors import BadCall, ConfigError, UnknownHandler
from aqueduct.rpc.sink_commit import ABORT, ATTEMPT_HEADER, COMMIT, DOCUMENT_SCHEMA, WRITE, to_batch
from tests.sinks.shelf import Shelf, attempt, service_with
from tests.support.calls import config, connected, numbers, sync_client

# What may be registered


class WithoutCommit:
    def open(self, attempt: Any, call: Any) -> None: ...
    def abort(self, write_key: Any, prepared: Any) -> None: ...


class ShortOpen(Shelf):
    def open(self, attempt: Any) -> Any: ...  # type: ignore[override]


class Generated(Shelf):
    def commit(self, write_key: Any, prepared: Any) -> Any:
        yield 1


class AsyncLeftovers(Shelf):
    async def leftovers(self) -> Any: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sink": WithoutCommit()}, r"WithoutCommit has no method commit\(write_key, prepared\)"),
        ({"sink": ShortOpen}, r"it is called as open\(attempt, call\); its signature is \(attempt"),
        ({"sink": Generated}, r"commit\(write_key, prepared\) must be a function, not a generator"),
        ({"sink": AsyncLeftovers}, r"leftovers\(\) must be a plain function or generator"),
        ({"sink": None}, r"NoneType has no method open\(attempt, call\)"),
        ({"schema": ["id"]}, r"schema must be a pyarrow.Schema, not list"),
        ({"time_to_live": 0}, r"time_to_live is 0; it must be above zero"),
        ({"name": ""}, r"it must be text of 1 to 200 bytes"),
        ({"name": "x" * 201}, r"it must be text of 1 to 200 bytes"),
        ({"name": "there"}, r"the service 'test' has a sink 'there' already"),
    ],
)
def test_what_cannot_be_a_sink(options: dict[str, Any], text: str) -> None:
    service = aqueduct.Service("test")
    service.sink("there", Shelf)
    given = {"name": "shelf", "sink": Shelf(), **options}
    with pytest.raises(ConfigError, match=text):
        service.sink(given.pop("name"), given.pop("sink"), **given)


def test_the_time_to_live_is_the_configured_one() -> None:
    service = aqueduct.Service("test", config=config(sinks={"time_to_live": 7.0}))
    assert service.sink("shelf", Shelf).time_to_live == 7
    assert service.sink("other", Shelf(), time_to_live=8).time_to_live == 8


@pytest.mark.parametrize("name", ["receipt_bytes", "document_bytes", "attempts", "time_to_live"])
def test_limits_are_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Sinks.{name} is 0; it must be above zero"):
        config(sinks={name: 0})


def test_a_sink_that_is_not_there_is_named() -> None:
    with sync_client(service_with(Shelf())) as client:
        with pytest.raises(UnknownHandler, match=r"did you mean 'aqueduct.sink.look.shelf'"):
            SinkWriter(client, "shelv").look()


# What strangers may send


HEADER = json.loads(attempt().to_json())


@pytest.mark.requirement("AC-84")
@pytest.mark.requirement("AC-85")
@pytest.mark.parametrize(
    ("header", "text"),
    [
        (None, "does not say which attempt it is"),
        ("", "no JSON"),
        ("[]", "is a list, not an object"),
        ("{}", "no 'version'"),
        (json.dumps(HEADER | {"version": 2}), "is of version 2, and this side knows 1"),
        (json.dumps(HEADER | {"run": ""}), "1 to 256 bytes"),
        (json.dumps(HEADER | {"run": "x" * 257}), "1 to 256 bytes"),
        (json.dumps(HEADER | {"run": "a\nb"}), "printable"),
        (json.dumps(HEADER | {"run": "\ud800"}), "printable"),
        (json.dumps(HEADER | {"run": 7}), "no 'run' of the type str"),
        (json.dumps(HEADER | {"overwrite": 1}), "no 'overwrite' of the type bool"),
        (json.dumps(HEADER | {"task": -1}), "the task of an attempt is -1"),
        (json.dumps(HEADER | {"task": True}), "no 'task' of the type int"),
        (json.dumps(HEADER | {"stage": 1 << 63}), "the stage of an attempt is 9223372036854775808"),
        (json.dumps(HEADER | {"execution": "x" * 257}), "0 to 256 bytes"),
        (json.dumps(HEADER | {"more": "x" * 4096}), "above the limit of 4096"),
        ("[" * 4000, "no JSON"),
        ('{"version": NaN}', "no JSON"),
    ],
)
async def test_a_call_that_is_no_attempt(header: str | None, text: str) -> None:
    shelf = Shelf()
    async with connected(service_with(shelf)) as client:
        headers = {} if header is None else {ATTEMPT_HEADER: header}
        answers = client.exchange(WRITE + "shelf", [numbers(1)], headers=headers, write_key="r")
        with pytest.raises(BadCall, match=text):
            async for _ in answers:
                pass
    assert shelf.asked == []


SETTLE = {"version": 1, "run": "r", "overwrite": False, "execution": None, "attempts": []}
ENTRY = {"execution": "", "stage": 0, "partition": 0, "task": 0, "receipt": None}


@pytest.mark.requirement("AC-83")
@pytest.mark.requirement("AC-84")
@pytest.mark.parametrize("what", [COMMIT, ABORT])
@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("", "no JSON"),
        ("null", "is a NoneType, not an object"),
        ("[" * 100_000, "no JSON"),
        (SETTLE | {"version": "1"}, "no 'version' of the type int"),
        (SETTLE | {"version": 0}, "version 0"),
        (SETTLE | {"run": "\x00"}, "printable"),
        (SETTLE | {"execution": 7}, "printable"),
        (SETTLE | {"attempts": {}}, "no 'attempts' of the type list"),
        (SETTLE | {"attempts": [[]]}, "an attempt is a list, not an object"),
        (SETTLE | {"attempts": [ENTRY, ENTRY]}, "names partition 0 twice"),
        (SETTLE | {"attempts": [{**ENTRY, "task": 1.0}]}, "no 'task' of the type int"),
        (
            SETTLE | {"attempts": [{k: v for k, v in ENTRY.items() if k != "receipt"}]},
            "has no receipt for partition 0",
        ),
        (SETTLE | {"more": "x" * 200_000}, "above the limit of 150000"),
    ],
)
async def test_a_settlement_that_is_none(what: str, document: Any, text: str) -> None:
    shelf = Shelf()
    service = service_with(shelf, config(sinks={"document_bytes": 150_000}))
    async with connected(service) as client:
        body = document if isinstance(document, str) else json.dumps(document)
        with pytest.raises(BadCall, match=text):
            await client.call(what + "shelf", to_batch(body))
        two = pa.record_batch({"document": ["{}", "{}"]}, schema=DOCUMENT_SCHEMA)
        with pytest.raises(BadCall, match="is one text, and 2 came"):
            await client.call(what + "shelf", two)
    assert shelf.asked == []


async def test_text_that_is_no_utf8_is_refused() -> None:
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    column = pa.Array.from_buffers(pa.string(), 1, buffers)
    batch = pa.RecordBatch.from_arrays([column], schema=DOCUMENT_SCHEMA)
    async with connected(service_with(Shelf())) as client:
        with pytest.raises(BadCall, match="is not UTF-8"):
            await client.call(COMMIT + "shelf", batch)
