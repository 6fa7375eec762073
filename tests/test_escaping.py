"""What came from a peer is shown escaped: in logs, on terminals, and in errors of one line."""

from __future__ import annotations

import asyncio
import copy
import difflib
import io
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aqueduct
from aqueduct import errors
from aqueduct.cli import main
from aqueduct.endpoint import connect, serve
from aqueduct.errors import (
    AqueductError,
    ConnectionLost,
    HandlerFailed,
    Refused,
    SchemaMismatch,
)
from aqueduct.escaping import Lines, escape, escape_lines, logger_of, near_miss, one_line, shown
from aqueduct.rpc import keys
from aqueduct.rpc.describe import DESCRIBE_SCHEMA, Description
from aqueduct.rpc.status import Status
from tests.support.calls import connected, everything, numbers, served
from tests.test_floors import SOURCES


@pytest.mark.parametrize(
    ("name", "names", "near"),
    [
        ("scores", ["score", "other"], "score"),
        ("SCORES", ["Score", "other"], "Score"),
        ("x", ["score", "other"], None),
        ("score", [], None),
        ("handler_0777O_of_many", [f"handler_{n:05}_of_many" for n in range(9000)], None),
        ("s" * 200, ["s" * 200 + "x"], None),
    ],
)
def test_a_near_miss(name: str, names: list[str], near: str | None) -> None:
    found = near_miss(name, names)
    assert found == near or (near is None and found and found.startswith("handler_077"))


def test_a_near_miss_compares_few_names_of_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    matches = difflib.get_close_matches

    def counted(name: str, names: Any, **options: Any) -> list[str]:
        compared.append(len(names))
        return matches(name, names, **options)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    assert near_miss("column 12345", [f"column_{n:05}" for n in range(20_000)]) is not None
    assert compared == [16]


NASTY = {
    "newline": "a\n2026-11-27 INFO forged",
    "return": "a\rb",
    "escape": "a\x1b[2Jb",
    "bell": "a\x07b",
    "backspace": "a\x08b",
    "null": "a\x00b",
    "delete": "a\x7fb",
    "C1": "a\x9b2Jb",
    "next line": "a\x85b",
    "line separator": "a\u2028b",
    "bidi override": "a\u202eb",
    "bidi isolate": "a\u2067b",
    "zero width": "a\u200bb",
    "byte order mark": "a\ufeffb",
    "surrogate": "a\ud800b",
    "tag": "a\U000e0041b",
    "private": "a\ue000b",
}
ALL = "".join(text[1:-1] for text in NASTY.values())
"""All of them, in one text."""


def is_safe(text: str) -> bool:
    """Whether it is one line that every terminal shows as it is."""
    text.encode()
    return all(each.isprintable() or each in "\u00a0\u3000" for each in text)


@pytest.mark.parametrize("name", NASTY)
def test_what_is_not_printable_is_escaped(name: str) -> None:
    escaped = escape(NASTY[name])
    assert is_safe(escaped) and escaped.startswith("a\\") and escaped.isascii()


@pytest.mark.parametrize(
    "text",
    ["", "plain", "gr\u00fc\u00df \u4f60\u597d", "C:\\new", "1\u00a0000", "\u3000", "\U0001f600"],
)
def test_what_is_printable_stays(text: str) -> None:
    assert escape(text) == escape_lines(text) == text


@given(st.text(st.characters()))
def test_any_text_becomes_safe(text: str) -> None:
    once = escape(text)
    assert escape(once) == once
    once.encode()
    assert not any(ord(each) < 32 or 0x7F <= ord(each) < 0xA0 for each in once)
    assert "\n".join(map(escape, escape_lines(text).split("\n"))) == escape_lines(text)


def test_lines_keep_their_newlines_alone() -> None:
    assert escape_lines("a\r\n\tb\x1b\n") == "a\n        b\\x1b\n"


def test_an_error_in_one_line_joins_its_lines() -> None:
    assert one_line(ValueError("such\n  a\x1b")) == "such a\\x1b"
    assert one_line(errors.ConfigError("such\n  a\x1b")) == "such a\\x1b"
    assert one_line(FileNotFoundError(2, "none", "a\nb")) == "[Errno 2] none: 'a\\nb'"
    assert one_line(KeyError()) == "KeyError"


# Errors


KINDS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_text_of_every_error_is_one_line(kind: type[AqueductError]) -> None:
    for error in (kind(ALL), copy.copy(kind(ALL)), pickle.loads(pickle.dumps(kind(ALL)))):
        assert is_safe(str(error)) and is_safe(f"{error}") and str(error) == escape(ALL)
        assert error.args[0] == ALL


def test_an_error_that_needs_lines_has_them() -> None:
    error = AqueductError(Lines("a\nb\x1b"))
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == "a\nb\\x1b"


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """What a handler of the standard library writes of all that is logged."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(message)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(before)


def lines_of(written: io.StringIO) -> list[str]:
    """Those of the log; each begins a record, or is indented."""
    lines = written.getvalue().removesuffix("\n").split("\n")
    assert all(map(is_safe, lines)), written.getvalue()
    levels = ("DEBUG:", "INFO:", "WARNING:", "ERROR:", "  | ")
    assert all(line.startswith(levels) for line in lines), written.getvalue()
    return lines


# Logs


def test_the_arguments_of_a_log_call_are_escaped(output: io.StringIO) -> None:
    log = logger_of("aqueduct.test_escaping")
    assert logger_of("aqueduct.test_escaping") is log and len(log.filters) == 1
    log.warning("%s %r %d %5.1f %s", ALL, ALL, 5, 2.5, ValueError(ALL))
    log.warning("%(name)s", {"name": ALL})
    log.warning("plain %s", "text")
    first, second, third = lines_of(output)
    assert first == f"WARNING:{escape(ALL)} {escape(repr(ALL))} 5   2.5 {escape(ALL)}"
    assert second == f"WARNING:{escape(ALL)}" and third == "WARNING:plain text"


def test_lines_in_a_log_are_indented(output: io.StringIO) -> None:
    log = logger_of("aqueduct.test_escaping")
    log.info("why:%s", Lines("one\n2026 ERROR two\x1b\n"))
    log.info("why:%s", Lines(""))
    assert lines_of(output) == ["INFO:why:", "  | one", "  | 2026 ERROR two\\x1b", "INFO:why:"]


def test_a_traceback_in_a_log_is_escaped_and_indented(output: io.StringIO) -> None:
    log = logger_of("aqueduct.test_escaping")
    try:
        try:
            raise KeyError(ALL)
        except KeyError as cause:
            error = ValueError(ALL)
            error.add_note(ALL)
            raise error from cause
    except ValueError:
        log.exception("it failed")
    lines = lines_of(output)
    assert lines[:2] == ["ERROR:it failed", "  | Traceback (most recent call last):"]
    assert any("The above exception was the direct cause" in line for line in lines)


def test_every_module_has_its_logger_from_one_place() -> None:
    found = [
        name for name, path in SOURCES.items() if "getLogger" in path.read_text(encoding="utf-8")
    ]
    # The other one is the logger of aioquic.
    assert [name.partition(":")[0] for name in found] == [
        "aqueduct.carriers.quic",
        "aqueduct.escaping",
    ]


# A handler


class Nasty(Exception):
    pass


Nasty.__qualname__ = "Nasty\x1b[31m"


async def test_the_text_of_a_handlers_exception(output: io.StringIO) -> None:
    service = aqueduct.Service("test")

    @service.handler("fail")
    def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise Nasty(ALL)

    async with connected(service, "tcp") as client:
        with pytest.raises(HandlerFailed) as caught:
            await everything(client.exchange("fail", [numbers(1)]))
    error = caught.value
    assert is_safe(str(error)) and escape(ALL.replace("\ud800", "")[:3]) in str(error)
    assert len(error.detail.splitlines()) > 1
    assert all(map(is_safe, error.remote_traceback.split("\n")))
    assert "raise Nasty(ALL)" in error.remote_traceback
    (note,) = error.__notes__
    assert all(map(is_safe, note.split("\n")))
    lines = lines_of(output)
    assert any("'fail'" in line and "failed: raised" in line for line in lines)
    assert any("raise Nasty(ALL)" in line for line in lines)


async def test_the_text_of_a_refusal(output: io.StringIO) -> None:
    def authorize(call: aqueduct.Call) -> None:
        raise Refused(f"not you{ALL}") if call.token == "a" else ZeroDivisionError(ALL)

    service = aqueduct.Service("test", authorize=authorize)
    service.handler("echo")(lambda batch: batch)
    async with connected(service, "tcp") as client:
        for token in ("a", "b"):
            with pytest.raises(Refused) as caught:
                await everything(client.exchange("echo", [numbers(1)], token=token))
            assert is_safe(str(caught.value))
    assert len(lines_of(output)) > 5


async def test_a_name_that_a_peer_calls(output: io.StringIO) -> None:
    service = aqueduct.Service("test")
    async with connected(service, "tcp") as client:
        with pytest.raises(AqueductError) as caught:
            await everything(client.exchange("a\u202eb", [numbers(1)]))
        assert is_safe(str(caught.value))
    lines_of(output)


async def test_names_of_columns_in_an_error(output: io.StringIO) -> None:
    name = ALL.replace("\ud800", "").replace("\x00", "")
    wanted = pa.schema([pa.field(name, pa.struct([pa.field(name, pa.int32())]))])
    service = aqueduct.Service("test")
    service.handler("echo", input=wanted)(lambda batch: batch)
    async with connected(service, "tcp") as client:
        with pytest.raises(SchemaMismatch) as caught:
            await everything(client.exchange("echo", [numbers(1)]))
    assert is_safe(str(caught.value))
    lines_of(output)


def test_a_status_of_a_foreign_service() -> None:
    payload = b'{"message":"a\\ud800\\n","kind":"\\u001b","detail":"x","traceback":"t\\u009b\\nu"}'
    status = Status.decode(((keys.STATUS, b"handler-failed"),), payload)
    error = status.to_exception(peer="here", handler="h")
    assert isinstance(error, HandlerFailed)
    assert str(error) == "handler 'h' at here: a\\ud800\\n"
    assert error.remote_traceback == "t\\x9b\nu"


# The end of a connection


@pytest.mark.parametrize("carrier", ["memory", "tcp", "tls", "quic"])
async def test_the_reason_of_a_close(carrier: str, output: io.StringIO) -> None:
    reason = ALL.replace("\ud800", "").replace("\x00", "")

    def refuse(headers: Any, connection: Any) -> bool:
        raise ValueError(reason)

    address = {
        "memory": "memory://nasty",
        "quic": "aqueduct://127.0.0.1:0",
    }.get(carrier, f"aqueduct+{carrier}://127.0.0.1:0")
    tls = aqueduct.dev_certificate() if carrier in ("tls", "quic") else None
    async with await serve(lambda _: None, address, on_headers=refuse, tls=tls) as server:
        with pytest.raises(ConnectionLost) as caught:
            await connect(server.addresses[0])
    assert is_safe(str(caught.value)) and "forge" in str(caught.value)
    lines_of(output)


# The command


DESCRIPTION = """{"service":"NASTY","summary":"","library":"NASTY","convention":1,"handlers":[
{"name":"NASTY","kind":"exchange","input":SCHEMA,"output":null,"concurrency":1,"idempotent":false,
"summary":"NASTY"}],"tables":[{"name":"NASTY","schema":SCHEMA,"streams":false,"summary":"NASTY"}],
"sinks":[{"name":"NASTY","schema":SCHEMA,"summary":"NASTY"}]}"""


def hostile() -> str:
    """What a service says of itself that means no good."""
    name = ALL.replace("\ud800", "").replace("\x00", "")
    schema = pa.schema([pa.field(name, pa.struct([pa.field(name, pa.int8())])), ("b", pa.int8())])
    service = aqueduct.Service("test")
    service.handler("h", input=schema)(lambda batch: batch)
    ipc = json.loads(service.describe().to_json())["handlers"][0]["input"]
    nasty = json.dumps(ALL.replace("\ud800", ""))[1:-1]  # half a character is refused as damage
    return DESCRIPTION.replace("NASTY", nasty).replace("SCHEMA", json.dumps(ipc))


class Hostile(aqueduct.Service):
    """A service that describes itself so."""

    def describe(self) -> Any:
        return self

    def to_batch(self) -> pa.RecordBatch:
        return pa.record_batch([pa.array([hostile()])], schema=DESCRIBE_SCHEMA)


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_describe_shows_a_hostile_service_safely(
    form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with served(Hostile("test"), "tcp") as address:
        assert main(["describe", address, *form]) == 0
    shown = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert all(map(is_safe, shown))
    assert not any(line.startswith("2026") for line in shown)
    if form:
        (line,) = shown
        assert Description.from_json(line) == Description.from_json(hostile())
    else:
        columns = [line for line in shown if line.endswith((" int8", ": int8>"))]
        starts = {
            line.index(kind) for line in columns for kind in (" int8", " struct<") if kind in line
        }
        assert len(columns) == 6 and len(starts) <= 2  # still aligned


def test_the_command_writes_to_a_terminal_of_ascii(tmp_path: Path) -> None:
    script = (
        "from aqueduct.service.signals import say, tell; say('gr\\xfcn\\ud800'); tell('a\\x1b')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(aqueduct.__file__).parents[1])},
        check=True,
    )
    assert (done.stdout, done.stderr) == (b"gr\\xfcn\\ud800\n", b"a\\x1b\n")


async def test_a_failure_of_the_command_is_one_line(tmp_path: Path) -> None:
    def refuse(headers: Any, connection: Any) -> bool:
        raise ValueError(ALL.replace("\ud800", "").replace("\x00", ""))

    async with await serve(lambda _: None, "aqueduct+tcp://127.0.0.1:0", on_headers=refuse) as s:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aqueduct.cli", "ping", s.addresses[0]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1 and not out
    assert is_safe(err.decode().removesuffix("\n")) and b"forge" in err


def test_a_value_is_shown_in_one_line_and_cut_short() -> None:
    class Lines:
        def __repr__(self) -> str:
            return "two\nlines"

    assert shown({"a": 1}) == "{'a': 1}"
    assert shown(Lines()) == "two lines"
    assert shown("x" * 1000) == "'" + "x" * 95 + " ..."
    assert len(shown("x" * 1000, 20)) == 20


def test_a_value_whose_repr_raises_is_named_by_its_type() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    assert shown(Bad()) == "an object of type Bad whose repr raised ZeroDivisionError"
