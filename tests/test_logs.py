"""The log of the command: one line an event, as text and as JSON, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import aqueduct
from aqueduct.errors import CallError, ConfigError
from aqueduct.escaping import Lines, logger_of
from aqueduct.logs import LogSettings, as_json, configure
from tests.support.calls import connected, numbers, until

NASTY = "one\ntwo\r\x1b[31m\u202ered\x00"
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logged() -> Iterator[Any]:
    """Configures the log of this process for a test: what was written, by settings."""
    root = logging.root
    handlers, level = list(root.handlers), root.level
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
    quic = logging.getLogger("quic").level

    def begin(format: str = "text", level: str = "info", **more: Any) -> io.StringIO:
        where = more.pop("where", None) or io.StringIO()
        configure(LogSettings(format, level), where=where, **more)
        return where

    yield begin
    sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
    logging.captureWarnings(False)
    logging.getLogger("quic").setLevel(quic)
    for handler in tuple(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)


def events() -> None:
    """Says what is worst for a log, by our loggers and by others'."""
    for log in (logger_of("aqueduct.test_logs"), logging.getLogger("others")):
        log.info("plain %d", 7)
        log.info("it said %s", NASTY)
        try:
            raise ValueError(NASTY)
        except ValueError:
            log.exception("it failed")
    logger_of("aqueduct.test_logs").warning("why:%s", Lines("a\nb"))
    logging.getLogger("others").info(NASTY)
    logging.getLogger(NASTY).error("a name")


COUNT = 9


def test_text_has_one_line_an_event(logged):
    where = logged("text")
    events()
    lines = where.getvalue().removesuffix("\n").split("\n")
    assert len(lines) == COUNT
    assert all(line.isprintable() for line in lines)
    line = re.compile(rf"{STAMP} (INFO|ERROR|WARNING) \S+ .+")
    assert all(map(line.fullmatch, lines)), lines
    assert re.fullmatch(rf"{STAMP} INFO aqueduct.test_logs plain 7", lines[0])
    assert "it failed\\nTraceback (most recent call last):\\n" in lines[2]
    assert "it failed\\nTraceback" in lines[5]
    assert lines[6].endswith("why:\\na\\nb")


def test_a_terminal_has_tracebacks_in_lines_of_their_own(logged):
    where = logged("text", where=Terminal())
    events()
    lines = where.getvalue().removesuffix("\n").split("\n")
    assert len([line for line in lines if re.match(STAMP, line)]) == COUNT
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith("  | ") for line in lines if not re.match(STAMP, line))
    assert "  | Traceback (most recent call last):" in lines


def test_json_has_one_object_a_line(logged):
    where = logged("json", worker=True)
    events()
    text = where.getvalue()
    assert text.isascii()
    found = [json.loads(line) for line in text.splitlines()]
    assert len(found) == COUNT
    assert found[0].keys() == {"ts", "level", "logger", "message", "process"}
    assert re.fullmatch(STAMP, found[0]["ts"])
    assert (found[0]["level"], found[0]["logger"]) == ("info", "aqueduct.test_logs")
    assert found[2]["traceback"].startswith("Traceback (most recent call last):\n")
    assert found[-2]["message"] == NASTY, "a program reads what was said"


def test_lines_of_workers_have_their_process(logged):
    where = logged("text", worker=True)
    logging.getLogger("others").info("here")
    assert re.fullmatch(rf"{STAMP} INFO \[\d+\] others here\n", where.getvalue())
    assert "process" not in json.loads(as_json("last words"))
    assert "process" in json.loads(as_json("last words", worker=True))


def test_the_level_bounds_what_is_logged(logged):
    where = logged("text", "warning")
    events()
    assert "INFO" not in where.getvalue() and "WARNING" in where.getvalue()
    logging.getLogger("quic").info("each connection")
    where = logged("text", "info")
    logging.getLogger("quic").info("each connection")
    assert where.getvalue() == ""
    where = logged("text", "debug")
    logging.getLogger("quic").info("each connection")
    assert "each connection" in where.getvalue()


def test_warnings_of_python_are_lines_of_the_log(logged):
    where = logged("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old\nand", stacklevel=1)
    (line,) = where.getvalue().splitlines()
    assert json.loads(line)["logger"] == "py.warnings"


def test_settings_that_cannot_work():
    with pytest.raises(ConfigError, match=r"log format is 'xml'; there are text, json"):
        LogSettings("xml")
    with pytest.raises(ConfigError, match=r"log level is 'loud'; there are debug, info"):
        LogSettings("text", "loud")


async def test_what_is_said_of_a_call_has_its_fields(logged):
    where = logged("json")
    service = aqueduct.Service("logged")

    @service.handler("fails")
    def fails(batch):
        raise RuntimeError("it is broken")

    async with connected(service, "tcp") as client:
        for handler in ("fails", "missing"):
            with pytest.raises(CallError):
                await client.call(handler, numbers(1))
        await until(lambda: "missing" in where.getvalue())
    found = {
        each["handler"]: each
        for each in map(json.loads, where.getvalue().splitlines())
        if "handler" in each
    }
    assert found["fails"]["level"] == "warning" and found["fails"]["call"] == 1
    assert found["fails"]["status"] == "handler-failed"
    assert found["fails"]["peer"].startswith("127.0.0.1:")
    assert "it is broken" in found["fails"]["message"]
    assert found["missing"]["status"] == "unknown-handler"


UNCAUGHT = """
import gc, logging, sys, threading
from aqueduct.logs import LogSettings, configure
configure(LogSettings(sys.argv[1], "info"))
logging.getLogger("others").info("%d rows", "many")
class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")
logging.getLogger("others").info("%s", Unprintable())
def fail():
    raise ValueError("in a thread\\nof its own")
def leave():
    raise SystemExit(3)
for function in (fail, leave):
    thread = threading.Thread(target=function, name="worker")
    thread.start()
    thread.join()
class Ends:
    def __del__(self):
        raise ValueError("at its end")
Ends()
gc.collect()
raise LookupError("of the main thread")
"""


@pytest.mark.parametrize("kind", ["text", "json"])
def test_errors_that_nobody_catches_are_lines_of_the_log(kind):
    done = subprocess.run(
        [sys.executable, "-c", UNCAUGHT, kind], capture_output=True, text=True, timeout=60
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and len(lines) == 5, done.stderr
    wanted = [
        ("a record of the log cannot be written (others, <string>:5)", "%d format"),
        ("a record of the log cannot be written (others, <string>:9)", "no text"),
        ("ends the thread worker", "in a thread\\nof its own"),
        ("Ends.__del__", "ValueError: at its end"),
        ("an error that nobody has caught ends the process", "LookupError: of the main thread"),
    ]
    for line, (message, error) in zip(lines, wanted, strict=True):
        if kind == "json":
            found = json.loads(line)
            error = error.replace("\\n", "\n")
            assert message in found["message"] and error in found["traceback"]
        else:
            assert re.match(rf"{STAMP} (ERROR|CRITICAL) aqueduct.logs ", line)
            assert message in line and error in line


def test_a_log_that_nobody_reads_ends_nothing():
    program = UNCAUGHT.replace("raise LookupError", "print").replace("ValueError", "SystemExit")
    done = subprocess.Popen(
        [sys.executable, "-c", program, "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.stderr is not None
    done.stderr.close()
    out, _ = done.communicate(timeout=60)
    # 120: Python tells at its end that it could not write to standard error.
    assert done.returncode in (0, 120) and out == "of the main thread\n"


DISABLED = """
import logging.config, sys, threading
from aqueduct.logs import LogSettings, configure
configure(LogSettings("json", "info"))
logging.config.dictConfig({"version": 1})  # which disables all loggers that there are
logging.getLogger("others").error("%d rows", "many")
def fail():
    raise ValueError("in a thread")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
class Ends:
    def __del__(self):
        raise ValueError("at its end")
del [Ends()][0]
raise LookupError("of the main thread")
"""


def test_python_tells_errors_where_a_service_has_switched_our_log_off():
    done = subprocess.run(
        [sys.executable, "-c", DISABLED], capture_output=True, text=True, timeout=60
    )
    for text in ("in a thread", "at its end", "of the main thread", "%d rows"):
        assert text in done.stderr
    assert done.returncode == 1


def test_nothing_is_lost_of_what_cannot_be_shown(logged):
    class Half:
        def __repr__(self):
            raise RuntimeError("half made")

        def __str__(self):
            raise FileNotFoundError("no file behind it")

    where = logged("json")
    try:
        raise ValueError("in a callback")
    except ValueError as error:
        told = SimpleNamespace(
            exc_type=ValueError,
            exc_value=error,
            exc_traceback=error.__traceback__,
            err_msg=None,
            object=Half(),
        )
        sys.unraisablehook(told)
    logging.getLogger("others").error("%s", Half())
    first, second = map(json.loads, where.getvalue().splitlines())
    assert first["message"].endswith("an object of the type Half")
    assert "ValueError: in a callback" in first["traceback"]
    assert "cannot be written (others, " in second["message"]
    assert "no file behind it" in second["traceback"]


def test_the_library_never_configures_the_root_logger():
    """Importing, serving and calling leave it as the program has it."""
    program = """
import asyncio, logging
import aqueduct
from aqueduct.service import supervisor, worker
service = aqueduct.Service("s")
async def main():
    async with service.serving("memory://s"):
        async with aqueduct.Client("memory://s") as client:
            await client.describe()
asyncio.run(main())
assert logging.root.handlers == [] and logging.root.level == logging.WARNING, logging.root
assert logging.getLogger("aqueduct").level == logging.NOTSET
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
