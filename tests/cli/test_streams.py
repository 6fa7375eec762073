"""Standard streams of a process that are closed or full, or that nobody reads any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.cli.common import CALL_FAILED, FAILED, WRONG_USAGE
from tests.support.calls import numbers, served

APP = """
import sys
import aqueduct

service = aqueduct.Service("silent")
service.handler("echo")(lambda batch: batch)

@service.on_start
def begin():
    print("for nobody", file=sys.stderr, flush=True)
"""
BROKEN = 128 + signal.SIGPIPE
PATIENCE = 100


def started(
    redirection: str,
    *arguments: str,
    output: int = subprocess.PIPE,
    folder: Path | None = None,
    buffered: bool = True,
) -> subprocess.Popen[str]:
    """The command with what a shell does to its streams."""
    search = [str(folder), *sys.path] if folder else sys.path
    command = [sys.executable, "-m", "aqueduct.cli", *arguments]
    return subprocess.Popen(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(search),
            "PYTHONUNBUFFERED": "" if buffered else "1",
        },
    )


def ended(
    redirection: str, *arguments: str, output: int = subprocess.PIPE, buffered: bool = True
) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    with started(redirection, *arguments, output=output, buffered=buffered) as process:
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out or "", err


@pytest.fixture
def broken() -> Iterator[int]:
    """The end of a pipe that has no other one."""
    ours, theirs = os.pipe()
    os.close(ours)
    yield theirs
    os.close(theirs)


@pytest.mark.parametrize(
    ("arguments", "buffered"),
    [(("--help",), True), (("serve", "--help"), False), (("--version",), True)],
)
def test_a_help_whose_reader_has_ended_is_no_failure(
    broken: int, arguments: tuple[str, ...], buffered: bool
) -> None:
    assert ended("", *arguments, output=broken, buffered=buffered) == (BROKEN, "", "")


@pytest.mark.parametrize(
    ("arguments", "buffered"),
    [
        (("--help",), False),
        (("serve", "--help"), True),
        (("token", "a"), True),
        (("completion", "bash"), True),
    ],
)
def test_what_has_no_room_is_one_line(arguments: tuple[str, ...], buffered: bool) -> None:
    status, _, told = ended(">/dev/full", *arguments, buffered=buffered)
    assert status == FAILED
    name = "aqueduct" if arguments[0] == "--help" else f"aqueduct {arguments[0]}"
    assert told == f"{name}: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("wanted", "arguments"), [(WRONG_USAGE, ("descrbe",)), (FAILED, ("describe", "nowhere"))]
)
def test_an_error_that_nobody_can_be_told_keeps_its_status(
    wanted: int, arguments: tuple[str, ...]
) -> None:
    assert ended("2>/dev/full", *arguments) == (wanted, "", "")
    assert ended("2>&-", *arguments) == (wanted, "", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("describe", "aqueduct+tcp://127.0.0.1:1"),
        ("call", "aqueduct+tcp://127.0.0.1:1", "echo", "--format", "csv"),
        ("serve", "app:service", "--listen", "aqueduct+tcp://127.0.0.1:0", "--workers", "1"),
    ],
)
def test_a_command_says_that_its_output_is_closed(arguments: tuple[str, ...]) -> None:
    status, _, told = ended(">&-", *arguments)
    assert status == FAILED
    assert told.count("\n") == 1
    assert ": standard output is closed: connect it" in told


def test_no_token_is_added_that_nobody_would_see(tmp_path: Path) -> None:
    file = tmp_path / "tokens.txt"
    status, _, told = ended(">&-", "token", "a", "--file", str(file))
    assert status == FAILED and "standard output is closed" in told
    assert not file.exists()


def test_a_call_whose_answers_go_to_a_file_needs_no_streams(tmp_path: Path) -> None:
    service = aqueduct.Service("numbers")
    service.handler("echo")(lambda batch: batch)
    given, taken = tmp_path / "given.arrow", tmp_path / "taken.arrow"
    with pa.ipc.new_file(given, numbers(1, 2).schema) as writer:
        writer.write_batch(numbers(1, 2))
    with served(service, "unix") as address:
        files = ("--in", str(given), "--out", str(taken))
        assert ended("<&- >&- 2>&-", "call", address, "echo", *files) == (0, "", "")
        assert ended("2>&-", "call", address, "none", *files) == (CALL_FAILED, "", "")
    with pa.ipc.open_file(taken) as reader:
        assert reader.read_all().to_pydict() == {"id": [1, 2]}


@pytest.mark.parametrize("more", [(), ("--workers", "1", "--log-format", "json")])
def test_a_service_without_standard_error_serves_without_a_log(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    (tmp_path / "app.py").write_text(APP)
    listen = ("--listen", f"aqueduct+unix://{tmp_path}/silent.sock", *more)
    with started("2>&-", "serve", "app:service", *listen, folder=tmp_path) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on ")
            with aqueduct.SyncClient(line.removeprefix("listening on ").strip()) as client:
                assert client.call("echo", numbers(1)).num_rows == 1
            process.send_signal(signal.SIGUSR1)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=PATIENCE) == ("", "")
        assert process.returncode == 0


def test_a_program_serves_without_streams_too(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    code = (
        "import app, os, signal; "
        "app.service.on_start(lambda: os.kill(os.getpid(), signal.SIGTERM)); "
        f"app.service.run('aqueduct+unix://{tmp_path}/silent.sock')"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0
