"""``aqueduct call`` against a service: each format, each kind of handler, and each way to fail."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, parquet

import aqueduct
from aqueduct.cli import main
from aqueduct.cli.call_options import NOT_OFFERED, OFFERED
from aqueduct.cli.common import CALL_FAILED, FAILED, WRONG_USAGE, CommandFailed
from aqueduct.cli.formats import BatchFile
from aqueduct.cli.progress import Progress
from aqueduct.client.connection_options import ClientOptions
from aqueduct.client.options import ExchangeOptions, SinkOptions, SourceOptions, UnaryOptions
from aqueduct.errors import Refused
from tests.arrow.test_sizes import read_back
from tests.sinks.shelf import NotedShelf
from tests.support.calls import NUMBERS, PAIRS, numbers, served

PATIENCE = 60


class Served:
    def __init__(self) -> None:
        self.shelf = NotedShelf()
        self.started, self.stopped = threading.Event(), threading.Event()
        self.failed = threading.Event()
        self.batches: list[int] = []
        self.calls: list[Any] = []

    def service(self) -> aqueduct.Service:
        service = aqueduct.Service("test")

        @service.handler("echo", input=PAIRS)
        async def echo(batches, call):
            self.calls.append(call)
            async for batch in batches:
                self.batches.append(batch.num_rows)
                yield batch

        @service.handler("any")
        async def anything(batches):
            async for batch in batches:
                yield batch

        @service.handler("strict", input=pa.schema([pa.field("id", pa.int8(), nullable=False)]))
        async def strict(batches):
            async for batch in batches:
                yield batch

        @service.handler("odd", input=NUMBERS, output=NUMBERS)
        def odd(batch):
            """Refuses even numbers."""
            if batch["id"][0].as_py() % 2 == 0:
                raise ValueError("even")
            return batch

        @service.handler("fails", input=NUMBERS)
        async def fails(batches):
            async for batch in batches:
                yield batch
                self.failed.set()
                raise ValueError("no\nmore")

        @service.handler("hangs", input=NUMBERS)
        async def hangs(batches):
            self.started.set()
            try:
                async for batch in batches:
                    yield batch
            finally:
                self.stopped.set()

        @service.handler("count", kind="source", output=NUMBERS)
        async def count(call):
            for value in range(3):
                yield numbers(value)

        @service.handler("drop", kind="sink")
        async def drop(batches):
            return {"kept": sum([batch.num_rows async for batch in batches])}

        service.sink("shelf", self.shelf, schema=NUMBERS)
        return service


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[str, Served]]:
    made = Served()
    with served(made.service(), "unix") as address:
        yield address, made


@pytest.fixture
def address(running: tuple[str, Served]) -> str:
    return running[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def status_of(*arguments: str) -> int:
    try:
        return main(["call", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)


def pairs(rows: int) -> pa.Table:
    columns = [pa.array(range(rows), pa.int64()), pa.array([f"row {n}" for n in range(rows)])]
    return pa.table(columns, schema=PAIRS)


def save(table: pa.Table, path: str) -> str:
    suffix = Path(path).suffix
    if suffix == ".parquet":
        parquet.write_table(table, path)
    elif suffix == ".csv":
        csv.write_csv(table, path)
    else:
        make = pa.ipc.new_file if suffix == ".arrow" else pa.ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table)
    return path


def load(path: str | Path) -> pa.Table:
    suffix = Path(path).suffix
    if suffix == ".parquet":
        return parquet.read_table(path)
    if suffix == ".csv":
        return csv.read_csv(path)
    if suffix == ".arrow":
        return pa.ipc.open_file(path).read_all()
    return pa.ipc.open_stream(path).read_all()


@pytest.mark.parametrize("into", [".parquet", ".arrow", ".arrows", ".csv"])
@pytest.mark.parametrize("out", [".parquet", ".arrow", ".arrows", ".csv"])
def test_each_format_is_read_and_written(address, folder, into, out):
    table = pairs(100)
    name = save(table, f"in{into}")
    assert status_of(address, "echo", "--in", name, "--out", f"out{out}", "--rows", "30") == 0
    assert load(f"out{out}").equals(table)
    assert sorted(os.listdir()) == sorted([name, f"out{out}"])


def test_batches_have_at_most_the_rows_that_are_asked_for(running, folder):
    address, made = running
    for suffix in (".parquet", ".arrow", ".csv"):
        made.batches.clear()
        name = save(pairs(100), f"in{suffix}")
        assert status_of(address, "echo", "--in", name, "--out", "o.arrow", "--rows", "30") == 0
        assert max(made.batches) <= 30 and sum(made.batches) == 100


def test_many_small_answers_are_few_row_groups(address, folder):
    name = save(pairs(1000), "in.parquet")
    assert status_of(address, "echo", "--in", name, "--out", "o.parquet", "--rows", "10") == 0
    assert parquet.ParquetFile("o.parquet").num_row_groups == 1
    assert load("o.parquet").equals(pairs(1000))


def test_a_source_needs_no_input(address, folder):
    assert status_of(address, "count", "--out", "out.parquet") == 0
    assert load("out.parquet")["id"].to_pylist() == [0, 1, 2]
    save(pairs(1), "in.csv")
    assert status_of(address, "count", "--in", "in.csv") == WRONG_USAGE


def test_a_sink_gives_its_counters(address, folder, capsys):
    save(pairs(100), "in.parquet")
    assert status_of(address, "drop", "--in", "in.parquet") == 0
    assert "kept: 100\n" in capsys.readouterr().out
    assert status_of(address, "drop", "--in", "in.parquet", "--out", "o.csv") == WRONG_USAGE
    assert status_of(address, "drop") == WRONG_USAGE


def test_a_write_is_there_once_however_often_it_is_tried(running, folder, capsys):
    address, made = running
    save(pa.table([pa.array([5, 6, 7])], schema=NUMBERS), "in.parquet")
    assert status_of(address, "shelf", "--in", "in.parquet") == WRONG_USAGE
    assert "--write-key" in capsys.readouterr().err
    for said in ("3 rows are written\n", "3 rows were written under this key before"):
        assert status_of(address, "shelf", "--in", "in.parquet", "--write-key", "day 1") == 0
        assert said in capsys.readouterr().out
        assert made.shelf.rows == [5, 6, 7]


def test_csv_has_the_types_of_the_handler(address, folder, capsys):
    Path("in.csv").write_text("text,other,id\n001,x,7\n")
    assert status_of(address, "echo", "--in", "in.csv", "--out", "out.arrow") == 0
    assert load("out.arrow").to_pylist() == [{"id": 7, "text": "001"}]
    Path("in.csv").write_text("id\n1\n\nNA\n")
    assert status_of(address, "strict", "--in", "in.csv", "--out", "s.arrow") == FAILED
    assert "empty value in the column 'id'" in capsys.readouterr().err
    Path("in.csv").write_text("id\nseven\n")
    assert status_of(address, "strict", "--in", "in.csv", "--out", "s.arrow") == FAILED
    assert "in.csv cannot be read: In CSV column #0" in capsys.readouterr().err
    Path("in.csv").write_text("text\nseven\n")
    assert status_of(address, "strict", "--in", "in.csv", "--out", "s.arrow") == FAILED
    assert "'id'" in capsys.readouterr().err
    assert not Path("s.arrow").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.parquet", b""),
        ("in.parquet", b"PAR1 but not more"),
        ("in.arrow", b""),
        ("in.arrow", b"ARROW1 and then nothing"),
        ("in.arrows", b"\xff" * 40),
        ("in.csv", b""),
    ],
)
def test_a_file_that_is_none_is_named_and_nothing_stays(address, folder, capsys, name, content):
    Path(name).write_bytes(content)
    assert status_of(address, "any", "--in", name, "--out", "out.arrow") == FAILED
    told = capsys.readouterr().err
    assert name in told and told.count("\n") == 1
    assert os.listdir() == [name]


def test_a_file_cut_short_leaves_the_old_answers(address, folder):
    save(pairs(5000), "in.arrows")
    content = Path("in.arrows").read_bytes()
    Path("in.arrows").write_bytes(content[: len(content) // 2])
    Path("out.arrow").write_text("old")
    assert status_of(address, "any", "--in", "in.arrows", "--out", "out.arrow") == FAILED
    assert Path("out.arrow").read_text() == "old"
    assert sorted(os.listdir()) == ["in.arrows", "out.arrow"]


def test_a_handler_that_fails_is_status_three_and_nothing_stays(address, folder, capsys):
    save(pa.table([pa.array([1, 2])], schema=NUMBERS), "in.parquet")
    assert status_of(address, "fails", "--in", "in.parquet", "--out", "o.csv") == CALL_FAILED
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "ValueError" in told
    assert os.listdir() == ["in.parquet"]


def test_a_failed_call_with_parquet_is_one_line_and_nothing_stays(address, folder):
    save(pa.table([pa.array([1, 2])], schema=NUMBERS), "in.parquet")
    process = start(address, "fails", "--in", "in.parquet", "--out", "o.parquet")
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == CALL_FAILED
    assert told.count(b"\n") == 1, told
    assert os.listdir() == ["in.parquet"]


def test_a_pipe_by_its_descriptor_is_written(address, folder):
    reading, writing = os.pipe()
    try:
        assert status_of(address, "count", "--format", "csv", "--out", f"/dev/fd/{writing}") == 0
        assert os.read(reading, 4096) == b'"id"\n0\n1\n2\n'
    finally:
        os.close(reading)
        os.close(writing)
    assert os.listdir() == []


def test_a_long_name_has_room_for_that_of_the_hidden_file(address, folder):
    name = "\u6c34" * 83 + ".csv"
    assert status_of(address, "count", "--out", name) == 0
    assert os.listdir() == [name]


def test_rows_do_not_steer_a_terminal(folder, monkeypatch):
    service = aqueduct.Service("evil")
    text = pa.schema([("text", pa.string())])

    @service.handler("evil", kind="source", output=text)
    async def evil():
        yield pa.record_batch([["a\x1b]0;OWNED\x07\x1b[2Jb", "\u6c34"]], schema=text)

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    with served(service, "tcp") as address:
        assert status_of(address, "evil", "--format", "csv") == 0
    shown = screen.bytes.getvalue().decode()
    assert "\x1b" not in shown and "\x07" not in shown
    assert "OWNED" in shown and "\u6c34" in shown


def test_failures_of_batches_are_told_and_the_others_are_written(address, folder, capsys):
    save(pa.table([pa.array(range(5))], schema=NUMBERS), "in.parquet")
    options = ("--rows", "1", "--report-failures", "--out", "o.csv")
    assert status_of(address, "odd", "--in", "in.parquet", *options) == CALL_FAILED
    told = capsys.readouterr().err
    assert told.count("aqueduct call: batch ") == 3 and "3 batches failed" in told
    assert load("o.csv")["id"].to_pylist() == [1, 3]


def test_a_handler_that_is_none_leads_to_the_near_one(address, folder, capsys):
    save(pairs(1), "in.csv")
    assert status_of(address, "ecoh", "--in", "in.csv") == CALL_FAILED
    assert "did you mean echo?" in capsys.readouterr().err
    assert status_of(address, "zzzzzz", "--in", "in.csv") == CALL_FAILED
    assert "aqueduct describe shows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("echo",), "give --in"),
        (("echo", "--in", "in.txt"), ".parquet"),
        (("echo", "--in", "no.csv"), "no.csv"),
        (("echo", "--in", "in.csv", "--out", "none/o.csv"), "none/o.csv"),
        (("echo", "--in", "in.csv", "--out", "."), "suffix"),
        (("echo", "--in", "in.csv", "--out", "folder.csv"), "folder.csv"),
        (("echo", "--in", "in.csv", "--out", "-", "--format", "parquet"), "needs a file"),
        (("echo", "--in", "in.csv", "--in-flight", "0"), "above zero"),
        (("echo", "--in", "in.csv", "--header", "x"), "NAME=VALUE"),
        (("echo", "--in", "in.csv", "--header", "x=1", "--header", "x=2"), "twice"),
        (("echo", "--in", "in.csv", "--kind", "sink"), "--kind sink"),
        (("count", "--in-flight", "3"), "has no --in-flight"),
        (("shelf", "--in", "in.csv", "--write-key", "k", "--no-ordered"), "no --ordered"),
    ],
)
def test_what_cannot_work_is_one_line(address, folder, capsys, arguments, said):
    save(pairs(1), "in.csv")
    Path("folder.csv").mkdir()
    assert status_of(address, *arguments) in (FAILED, WRONG_USAGE)
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1
    assert sorted(os.listdir()) == ["folder.csv", "in.csv"]


def test_options_reach_the_handler(running, folder):
    address, made = running
    save(pairs(1), "in.csv")
    options = ("--header", "a=1", "--header", "b=x=y", "--write-key", "k", "--attempt", "2")
    more = ("--deadline", "1min", "--retries", "1", "--compression", "lz4", "--out", "o.csv")
    assert status_of(address, "echo", "--in", "in.csv", *options, *more) == 0
    call = made.calls[-1]
    assert {"a": "1", "b": "x=y"}.items() <= dict(call.headers).items()
    assert (call.write_key, call.attempt) == ("k", "2")


def test_every_option_of_clients_is_offered_or_has_a_reason():
    kinds = (ClientOptions, ExchangeOptions, SinkOptions, SourceOptions, UnaryOptions)
    known = {name for kind in kinds for name in kind.__annotations__}
    assert known == OFFERED.keys() | NOT_OFFERED.keys()
    assert not OFFERED.keys() & NOT_OFFERED.keys()


def test_a_service_that_describes_nothing_is_called_by_the_kind_that_is_given(folder):
    def allowed(call):
        if call.handler == "aqueduct.describe":
            raise Refused("nobody may look")

    service = aqueduct.Service("closed", authorize=allowed)

    @service.handler("echo")
    def echo(batch):
        return batch

    save(pairs(2), "in.parquet")
    given = ("echo", "--in", "in.parquet", "--out", "o.parquet")
    with served(service, "unix") as address:
        assert status_of(address, *given) == CALL_FAILED
        assert status_of(address, *given, "--kind", "exchange") == 0
    assert load("o.parquet").equals(pairs(2))


def test_an_answer_keeps_the_mode_of_the_file_and_the_link_to_it(address, folder):
    Path("real.csv").write_text("old")
    Path("real.csv").chmod(0o640)
    Path("link.csv").symlink_to("real.csv")
    assert status_of(address, "count", "--out", "link.csv") == 0
    assert Path("link.csv").is_symlink()
    assert stat.S_IMODE(Path("real.csv").stat().st_mode) == 0o640
    assert load("real.csv")["id"].to_pylist() == [0, 1, 2]


def test_a_device_is_written_and_not_replaced(address, folder):
    os.mkfifo("pipe.csv")
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(Path("pipe.csv").read_text()))
    thread.start()
    assert status_of(address, "count", "--out", "pipe.csv") == 0
    thread.join(PATIENCE)
    assert found == ['"id"\n0\n1\n2\n']
    assert os.listdir() == ["pipe.csv"]


def test_a_type_that_csv_has_not_is_named(address, folder, capsys):
    table = pa.table({"a": pa.array([[1], [2]])})
    save(table, "in.arrow")
    assert status_of(address, "any", "--in", "in.arrow", "--out", "o.csv") == FAILED
    assert "o.csv cannot be written as csv" in capsys.readouterr().err
    assert os.listdir() == ["in.arrow"]


# ------------------------------------------------------- as a process of its own


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    root = str(Path(aqueduct.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-m", "aqueduct.cli", "call", *arguments]
    options.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen(command, env=environment, **options)


def stream_of(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def test_arrow_streams_go_through_standard_input_and_output(address):
    process = start(address, "echo", "--in", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, err = process.communicate(stream_of(pairs(1000)), PATIENCE)
    assert (process.returncode, err) == (0, b"")
    assert pa.ipc.open_stream(out).read_all().equals(pairs(1000))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_call_and_leaves_nothing(running, folder, number):
    address, made = running
    made.started.clear()
    made.stopped.clear()
    process = start(address, "hangs", "--in", "-", "--out", "out.arrow", stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stderr is not None
    with contextlib.closing(process.stdin), contextlib.closing(process.stderr):
        process.stdin.write(stream_of(pa.table([pa.array([1])], schema=NUMBERS))[:-8])
        process.stdin.flush()
        assert made.started.wait(PATIENCE) and len(os.listdir()) == 1
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
        told = process.stderr.read().decode()
    assert told.startswith("aqueduct call: cancelled; ") and "out.arrow was not written" in told
    assert told.count("\n") == 1
    assert os.listdir() == []
    assert made.stopped.wait(PATIENCE)


def wait_until_read(pipe: Any) -> None:
    """Until the process has read all of a pipe, so that it waits for more."""
    deadline = time.monotonic() + PATIENCE
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]:
        assert time.monotonic() < deadline, "the process does not read its standard input"
        time.sleep(0.01)


def said(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.read().decode()


@contextlib.contextmanager
def fed(*arguments: str, fifo: bool) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """A running call, and the pipe that is its input: standard input, or a FIFO."""
    if not fifo:
        process = start(*arguments, "--in", "-", stdin=subprocess.PIPE, bufsize=0)
        assert process.stdin is not None and process.stderr is not None
        with process.stdin, process.stderr:
            yield process, process.stdin
        return
    os.mkfifo("input")
    process = start(*arguments, "--in", "input", stdin=subprocess.DEVNULL)
    assert process.stderr is not None
    with process.stderr, open(opened("input", process), "wb", buffering=0) as pipe:
        yield process, pipe


def opened(fifo: str, process: subprocess.Popen[bytes]) -> int:
    """A descriptor to write to a FIFO, once the process has opened it."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            found = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it yet
            assert process.poll() is None, said(process)
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            os.set_blocking(found, True)
            return found


@pytest.mark.parametrize(("kind", "fifo"), [("arrow", False), ("arrow", True), ("csv", True)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_call_whose_input_is_silent(address, folder, number, kind, fifo):
    part = stream_of(pairs(1))[:100] if kind == "arrow" else b"id,text\n"
    with fed(address, "echo", "--format", kind, fifo=fifo) as (process, pipe):
        pipe.write(part)
        wait_until_read(pipe)
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
        told = said(process)
    assert told.startswith("aqueduct call: cancelled; ") and told.count("\n") == 1


@pytest.mark.parametrize(("kind", "fifo"), [("arrow", False), ("csv", False), ("csv", True)])
def test_a_call_that_has_failed_does_not_wait_for_the_end_of_its_input(running, folder, kind, fifo):
    address, made = running
    made.failed.clear()
    rows = b"1\n" * (6 << 20)  # more than is parsed ahead
    batch = stream_of(pa.Table.from_batches([numbers(1)]))[:-8]  # the end of the stream is missing
    first, more = (b"id\n" + rows, rows)
    if kind == "arrow":
        first, more = batch, batch[len(stream_of(NUMBERS.empty_table())[:-8]) :]
    with fed(address, "fails", "--format", kind, fifo=fifo) as (process, pipe):
        with contextlib.suppress(BrokenPipeError):
            pipe.write(first)
            assert made.failed.wait(PATIENCE)
            deadline = time.monotonic() + PATIENCE
            while process.poll() is None and time.monotonic() < deadline:
                pipe.write(more)  # a failure is told with the next batch after it
                time.sleep(0.05)
        assert process.wait(PATIENCE) == CALL_FAILED, said(process)
        assert "no\\nmore" in said(process)


def test_standard_input_that_is_closed_is_told(address, folder):
    process = start(address, "echo", "--in", "-", preexec_fn=lambda: os.close(0))
    assert process.communicate(timeout=PATIENCE)[1].decode() == (
        "aqueduct call: standard input is closed: give a file, or connect it\n"
    )
    assert process.returncode == FAILED


def test_a_reader_that_ends_early_is_no_error(address, folder):
    save(pairs(200_000), "in.parquet")
    process = start(address, "any", "--in", "in.parquet", "--format", "csv", stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b'"id","text"\n'
    process.stdout.close()
    assert process.wait(PATIENCE) == 128 + signal.SIGPIPE
    with process.stderr as told:
        assert told.read() == b""


# ------------------------------------------------------- what a terminal shows


class Terminal(io.StringIO):
    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self.bytes = io.BytesIO()

    @property
    def buffer(self) -> io.BytesIO:
        return self.bytes

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("plain", [False, True])
def test_a_terminal_sees_how_far_it_is(address, folder, monkeypatch, plain):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1" if plain else "")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    save(pairs(1000), "in.parquet")
    assert status_of(address, "echo", "--in", "in.parquet", "--out", "o.csv", "--rows", "9") == 0
    shown = screen.getvalue()
    assert "1,000 rows sent, 1,000 received, " in shown.splitlines()[-1]
    assert ("\x1b[" in shown) is not plain
    assert ("\r" in shown) or not plain


def test_arrow_is_not_written_to_a_terminal(address, folder, monkeypatch, capsys):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert status_of(address, "count") == WRONG_USAGE
    assert "--format csv" in capsys.readouterr().err
    assert screen.getvalue() == ""


@pytest.mark.long
@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".csv"])
def test_memory_does_not_grow_with_the_file(address, folder, suffix):
    """A file of 600 MiB in Arrow, in one row group, there and back."""
    rows = 1 << 20
    table = pa.table({"id": pa.array(range(rows), pa.int64()), "text": ["x" * 500] * rows})
    code = (
        "import resource, sys\nfrom aqueduct.cli import main\nstatus = main(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)\nsys.exit(status)"
    )
    peaks = []
    for name, size in (("small", 1000), ("large", rows)):
        file = save(table.slice(0, size).cast(PAIRS), f"{name}{suffix}")
        given = ("call", address, "echo", "--in", file, "--out", f"out{suffix}")
        done = subprocess.run(
            [sys.executable, "-c", code, *given],
            env={**os.environ, "PYTHONPATH": str(Path(aqueduct.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
            timeout=170,
        )
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 350, peaks


def test_an_answer_of_unions_without_rows_is_counted() -> None:
    choice = pa.sparse_union([pa.field("number", pa.int64())])
    progress = Progress()
    progress.received(read_back(pa.record_batch({"choice": pa.nulls(0, choice)})), 1.5)
    assert (progress.received_rows, progress.waited) == (0, 1.5)
    assert progress.bytes < 64


def test_a_parquet_file_that_is_cut_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"id": pa.array(random.Random(5).sample(range(1 << 40), 1 << 18), pa.int64())})
    parquet.write_table(table, path, row_group_size=1 << 16)
    with BatchFile(str(path), "parquet", rows=1 << 14) as file:
        batches = file.batches()
        assert next(batches).num_rows == 1 << 14
        os.truncate(path, 1 << 20)
        with pytest.raises(CommandFailed, match=r"rows\.parquet cannot be read: "):
            list(batches)


@pytest.mark.parametrize("wanted", [None, pa.schema({"id": pa.int64()})], ids=["any", "declared"])
def test_threads_have_left_a_pipe_that_is_closed(tmp_path: Path, wanted: pa.Schema | None) -> None:
    path = tmp_path / "rows"
    os.mkfifo(path)
    code = "import os, sys; os.write(1, b'id\\n' + b'1\\n' * (8 << 20)); sys.stdin.read()"
    program = [sys.executable, "-c", code]  # more than one block, and then nothing
    with open(os.open(path, os.O_RDWR), "wb", buffering=0) as pipe:
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=pipe) as feeder:
            try:
                file = BatchFile(str(path), "csv", rows=1000, wanted=wanted)
                assert file._pipe is not None
                gone = file._pipe.gone
                assert not gone.is_set()
                file.close()
                assert gone.is_set()
            finally:
                feeder.kill()
