"""Tokens in a file: what its lines say, who may call what, and what happens when it changes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct import reloading
from aqueduct.errors import ConfigError, Refused
from aqueduct.reloading import Reload
from aqueduct.rpc.describe import DESCRIBE
from aqueduct.service.token_file import _parse, append_line, make_token, token_line
from tests.support.calls import NUMBERS, connected, numbers, sync_client, until

LOOSE: Any = aqueduct
OTHER = "sha256:" + "0" * 64


def written(path: Path, *lines: str) -> Path:
    """A file of these lines, put in its place as a whole."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in lines))
    new.chmod(0o600)
    new.replace(path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(
        tmp_path / "tokens.txt",
        "# who may call",
        "",
        token_line("admin", "all") + "   # everything",
        "\t" + token_line("etl", "some", handlers=("echo", "other"), expires="2999-01-31"),
        token_line("reader", "table", tables=("trips",)),
        token_line("writer", "sink", sinks=("store",), handlers=["echo"]),
        token_line("late", "old", expires="2020-01-31"),
        token_line("bytes", b"\xff\xfe"),
    )


def service(path: Path, **options: Any) -> aqueduct.Service:
    made = aqueduct.Service("closed", authorize=aqueduct.TokenFile(path, **options))
    made.handler("echo")(lambda batch: batch)
    made.handler("train")(lambda batch: batch)

    @made.table("trips", schema=NUMBERS)
    def trips():
        yield numbers(1)

    @made.table("secrets", schema=NUMBERS)
    def others():
        yield numbers(1)

    return made


async def refusal(client: aqueduct.Client, handler: str, token: Any) -> str:
    """Why a call is refused; "" if it is not."""
    try:
        await client.call(handler, numbers(1), token=token)
    except Refused as error:
        return str(error)
    return ""


async def test_a_token_opens_what_its_line_says(path):
    async with connected(service(path)) as client:
        for handler, token, why in (
            ("echo", "all", None),
            ("train", "all", None),
            ("echo", "some", None),
            ("echo", b"\xff\xfe", None),
            ("echo", "sink", None),
            ("train", "some", "the token of 'etl' is not for handler 'train'; it is for handlers "),
            (
                "echo",
                "table",
                "the token of 'reader' is not for handler 'echo'; it is for tables t",
            ),
            ("echo", "old", r"the token of 'late' has expired \(2020-01-31T00:00:00\+00:00\)"),
            ("echo", "unknown", "the service does not know the token"),
            ("echo", hashlib.sha256(b"all").hexdigest(), "the service does not know the token"),
            ("echo", "", "the service does not know the token"),
            ("echo", None, "asks for a token, and the call has none; give token="),
        ):
            found = await refusal(client, handler, token)
            assert (found == "") if why is None else re.search(why, found), (handler, token, found)


async def test_tables_sinks_and_the_description(path):
    made = service(path)
    async with connected(made, token="table") as client:
        rows = [each async for each in client.source("aqueduct.table.rows.trips")]
        assert [batch.to_pydict() for batch in rows] == [{"id": [1]}]
        with pytest.raises(
            Refused, match="the token of 'reader' is not for table 'secrets'; it is"
        ):
            assert [each async for each in client.source("aqueduct.table.rows.secrets")]
        assert {each.name for each in (await client.describe()).tables} == {"trips", "secrets"}
    writer = aqueduct.TokenFile(path).entries[3]
    for verb in ("write", "commit", "abort", "look"):
        assert writer.check(f"aqueduct.sink.{verb}.store") == ""
        assert "not for sink 'other.store'" in writer.check(f"aqueduct.sink.{verb}.other.store")
    assert writer.check(DESCRIBE) == writer.check("echo") == ""
    assert "not for table 'trips'" in writer.check("aqueduct.table.plan.trips")
    assert "not for handler 'aqueduct.sink'" in writer.check("aqueduct.sink")


async def test_a_handler_finds_who_calls(path):
    made = service(path)

    @made.handler("who", output=pa.schema([("name", pa.string())]))
    def who(batch, call):
        return pa.record_batch({"name": [call.state.caller]})

    async with connected(made, token="all") as client:
        answer = await client.call("who", numbers(1))
        assert answer["name"].to_pylist() == ["admin"]


def test_a_sync_client_reads_why(path):
    with sync_client(service(path), token="old") as client:
        with pytest.raises(Refused, match="has expired"):
            client.call("echo", numbers(1))
        assert client.call("echo", numbers(1), token="all") == numbers(1)


def test_times_have_a_zone_of_their_own_or_utc():
    entries = {}
    now = datetime.now(UTC)
    for name, expires in (
        ("soon", (now + timedelta(hours=1)).replace(tzinfo=None).isoformat()),
        ("zone", (now - timedelta(minutes=1)).astimezone().isoformat()),
    ):
        entries[name] = token_line(name, "x", expires=expires)
    for name, line in entries.items():
        (entry,) = _entries(line)
        assert bool(entry.check("echo")) is (name == "zone")


def _entries(*lines: str, end: str = "\n") -> tuple[Any, ...]:
    return tuple(_parse(("\n".join(lines) + end).encode(), where="tokens.txt"))


GOOD = "a sha256:" + "1" * 64


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a", "the line has no hash behind its name; a line is: NAME sha256:HASH"),
        ("secret-token", "the line has no hash"),
        ("secret-token handlers=a", "the line has no hash"),
        ("secret-token,= sha256:1", "the line has no hash"),
        ("a secret-token", "the line has no hash"),
        ("a sha256:" + "1" * 63, "the line has no hash .*a hash has 64 hexadecimal digits"),
        ("a sha512:" + "1" * 64, "the line has no hash"),
        ("a,b " + OTHER, "'a,b' is no name; a line is: NAME sha256:HASH"),
        ("\x07 " + OTHER, r"'\\x07' is no name"),
        (GOOD + " handler=a", "'handler=' of 'a' is no limit of a token; did you mean handlers=?"),
        (GOOD + " handler", "a word of 'a' is no limit of a token; did you mean handlers=?"),
        (GOOD + " x=a", "'x=' of 'a' is no limit of a token; known are handlers, tables, sinks"),
        (GOOD + " secret-token", "a word of 'a' is no limit of a token; known are handlers"),
        (GOOD + " secret-token==", "a word of 'a' is no limit of a token; known are handlers"),
        (GOOD + " token=secret-token", "'token=' of 'a' is no limit of a token; known are"),
        (GOOD + " handlers", "handlers= of 'a' has nothing behind it"),
        (GOOD + " handlers=", "handlers= of 'a' has nothing behind it"),
        (GOOD + " handlers=a,,b", "'handlers=a,,b': a name between commas is empty"),
        (GOOD + " handlers=a handlers=b", "'a' has handlers= twice"),
        (GOOD + " expires=tomorrow", "expires=tomorrow is no time; write it like 2027-01-31"),
        ("b " + OTHER + "\nc " + OTHER, "the hash is that of line 2"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, line, why):
    path = written(tmp_path / "tokens.txt", "# first", line)
    number = 2 + line.count("\n")
    with pytest.raises(ConfigError, match=rf"tokens\.txt, line {number}: {why}") as caught:
        aqueduct.TokenFile(path)
    assert "secret-token" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "line 1 has no end of line"),
        (GOOD.encode(), "line 1 has no end of line, so more of it may be still to come"),
        (b"# all\n" + GOOD.encode() + b" handlers=sco", "line 2 has no end of line"),
        (b"\xff\n", "line 1: it is not UTF-8"),
        (b"#" * 1025 + b"\n", r"has more than 1024 bytes \(limit\)"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path, content, why):
    path = tmp_path / "tokens.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        aqueduct.TokenFile(path, limit="1k")


def test_what_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"TokenFile: .*No such file.*absent\.txt"):
        aqueduct.TokenFile(tmp_path / "absent.txt")
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for ever
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=f"TokenFile: {place} is no file"):
            aqueduct.TokenFile(place)


@pytest.mark.parametrize(
    ("name", "value"),
    [("path", 5), ("path", ""), ("recheck", -1), ("recheck", "soon"), ("timeout", 0), ("limit", 0)],
)
def test_wrong_arguments_are_refused(path, name, value):
    with pytest.raises(ConfigError, match=f"^TokenFile: {name} is "):
        LOOSE.TokenFile(**{"path": path, name: value})


def test_a_comment_alone_lets_nobody_in(tmp_path):
    assert aqueduct.TokenFile(written(tmp_path / "tokens.txt", "# nobody")).entries == ()


async def test_a_file_that_changes_is_read_again(path, caplog):
    caplog.set_level(logging.INFO, "aqueduct.service.token_file")
    async with connected(service(path, recheck=0)) as client:
        assert await refusal(client, "echo", "all") == ""
        written(path, token_line("new", "fresh"))
        assert await refusal(client, "echo", "fresh") == ""
        assert "does not know" in await refusal(client, "echo", "all")
        assert f"{path}: read again: 1 tokens" in caplog.text


async def test_a_broken_file_leaves_what_was_read_and_is_logged_once(path, caplog):
    caplog.set_level(logging.INFO, "aqueduct.service.token_file")
    async with connected(service(path, recheck=0)) as client:
        for break_it in (
            lambda: written(path, "admin sha256:1"),
            lambda: written(path, "# all", "secret-token"),
            lambda: written(path, GOOD + " secret-token"),
            lambda: path.write_text(""),
            lambda: path.unlink(),
        ):
            caplog.clear()
            break_it()
            for _ in range(3):
                assert await refusal(client, "echo", "all") == ""
                assert "does not know" in await refusal(client, "echo", "unknown")
            (record,) = caplog.records
            assert record.levelno == logging.ERROR
            assert "the 6 tokens read before still hold" in record.getMessage()
            assert "secret-token" not in caplog.text
        written(path, token_line("admin", "all"))
        assert await refusal(client, "echo", "all") == ""
        assert "read again: 1 tokens" in caplog.text


async def test_the_same_size_and_time_hide_no_change(path):
    """Right after a change a second one may leave the same time."""
    authorize = aqueduct.TokenFile(written(path, token_line("a", "one")), recheck=0)
    made = aqueduct.Service("closed", authorize=authorize)
    made.handler("echo")(lambda batch: batch)
    async with connected(made) as client:
        assert await refusal(client, "echo", "one") == ""
        before = path.stat()
        with path.open("r+") as file:
            file.write(token_line("a", "two"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert await refusal(client, "echo", "two") == ""


async def test_a_file_that_did_not_change_is_not_read(path, monkeypatch):
    monkeypatch.setattr(reloading, "_COARSE", 0)
    authorize = aqueduct.TokenFile(path, recheck=0)
    made = aqueduct.Service("closed", authorize=authorize)
    made.handler("echo")(lambda batch: batch)
    async with connected(made) as client:
        for change in (False, True):
            before = authorize.entries
            if change:
                path.chmod(0o400)  # another state of the same content
            assert await refusal(client, "echo", "all") == ""
            assert (authorize.entries[0] is not before[0]) is change


async def test_calls_between_two_looks_do_not_look(path):
    async with connected(service(path, recheck=3600)) as client:
        assert await refusal(client, "echo", "all") == ""
        path.unlink()
        assert await refusal(client, "echo", "all") == ""


def test_who_may_write_the_file_is_looked_at(path, caplog):
    path.chmod(0o644)
    aqueduct.TokenFile(path)
    assert caplog.text == ""
    for mode in (0o620, 0o602):
        caplog.clear()
        path.chmod(mode)
        aqueduct.TokenFile(path)
        (record,) = caplog.records
        assert f"{path} may be written by others than its owner" in record.getMessage()


def test_a_new_token_is_long_and_its_line_opens():
    token = make_token()
    assert len(token) > 40 and token != make_token() and token.isascii()
    (entry,) = _entries(token_line("etl", token, handlers=("score",)))
    assert entry.digest == hashlib.sha256(token.encode()).digest()
    assert token not in repr(entry)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "a b"}, "neither white space nor '#'"),
        ({"name": ""}, "."),
        ({"name": "a#"}, "neither white space nor '#'"),
        ({"name": "a,b"}, "is no name"),
        ({"name": "a", "handlers": ("x y",)}, "white space"),
        ({"name": "a", "handlers": ("x#y",)}, "neither white space nor '#'"),
        ({"name": "a", "expires": "x"}, "is no time"),
    ],
)
def test_a_line_that_could_not_be_read_is_not_made(given, why):
    with pytest.raises(ConfigError, match=why):
        token_line(**{"token": "x", **given})


def test_a_line_goes_to_the_end_of_a_sound_file_alone(tmp_path):
    path = tmp_path / "tokens.txt"
    append_line(path, token_line("a", "1"))
    append_line(path, token_line("b", "2"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in aqueduct.TokenFile(path).entries] == ["a", "b"]
    path.write_text("no end")
    with pytest.raises(ConfigError, match="line 1 has no end of line"):
        append_line(path, token_line("c", "3"))
    assert path.read_text() == "no end"


def test_what_is_no_regular_file_gets_no_line_and_is_not_read(tmp_path):
    pipe = tmp_path / "tokens.txt"
    os.mkfifo(pipe)
    for path in ("/dev/full", "/dev/zero", pipe):
        with pytest.raises(ConfigError, match=f"{path} is no regular file"):
            append_line(path, token_line("a", "1"))


def test_a_file_gets_no_line_that_would_make_it_larger_than_its_limit(tmp_path):
    path = tmp_path / "tokens.txt"
    line = token_line("a", "1")
    with pytest.raises(ConfigError, match=f"{path} would have more than {len(line)} bytes"):
        append_line(path, line, limit=len(line))
    assert path.read_text() == ""
    append_line(path, line, limit=len(line) + 1)
    assert path.read_text() == f"{line}\n"
    # Without an end of its last line: its size is looked at first.
    with path.open("ab") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ConfigError, match=f"more than {16 << 20} bytes"):
        append_line(path, token_line("b", "2"))
    assert path.stat().st_size == (16 << 20) + 1


async def test_many_wait_for_one_look_and_none_for_ever():
    release, looks = threading.Event(), []

    def work() -> None:
        looks.append(threading.current_thread())
        release.wait(30)

    reload = Reload(work, name="the look", timeout=30)
    waiting = [asyncio.create_task(reload.run()) for _ in range(20)]
    await until(lambda: looks)
    impatient = Reload(work, name="the look", timeout=0.01)
    with pytest.raises(TimeoutError, match=r"the look took longer than 0\.01 s"):
        await impatient.run()
    await until(lambda: len(looks) == 2)  # it goes on
    cancelled = waiting.pop()
    cancelled.cancel()
    release.set()
    await asyncio.gather(*waiting)
    assert len(looks) == 2 and all(thread.daemon for thread in looks)
    await reload.run()
    assert len(looks) == 3


def held(release: threading.Event) -> None:
    release.wait(30)


def test_a_loop_that_is_closed_holds_up_no_look():
    release = threading.Event()
    reload = Reload(lambda: held(release), name="the look", timeout=30)

    async def leave() -> None:
        waiting = asyncio.ensure_future(reload.run())
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(leave())
    release.set()
    asyncio.run(reload.run())


def test_a_forked_child_waits_for_no_look_of_its_parent():
    release = threading.Event()
    reload = Reload(lambda: held(release), name="the look", timeout=30)

    async def main() -> int:
        waiting = asyncio.ensure_future(reload.run())
        await asyncio.sleep(0)
        child = os.fork()
        if not child:
            os._exit(int(reload._running))
        release.set()
        await waiting
        return child

    assert os.waitpid(asyncio.run(main()), 0)[1] == 0


def test_a_schema_is_not_read_before_the_token(path):
    """A stranger learns of no handler that is not there."""
    with sync_client(service(path)) as client:
        with pytest.raises(Refused, match="asks for a token"):
            client.call("absent", pa.record_batch({"x": [1]}))
