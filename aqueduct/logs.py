"""The log of the ``aqueduct`` command: one line an event, as text or as JSON.

Only the command calls ``configure``: a library leaves the root logger, and Python's hooks for
exceptions that nobody has caught, to the program that uses it.

::

    2026-11-28T22:40:07.123Z WARNING aqueduct.service.server <Call 7 of ...> failed: ...
    {"ts": "2026-11-28T22:40:07.123Z", "level": "warning", "logger": "aqueduct.service.server",
     "message": "<Call 7 of ...> failed: ...", "peer": "10.0.0.7:51234", "handler": "score",
     "call": 7, "status": "error"}

Lines of workers have their process id. What is not printable is escaped in both forms.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from aqueduct.errors import ConfigError
from aqueduct.escaping import FIELDS, INDENT, escape, logger_of, shown

__all__ = ["FORMATS", "LEVELS", "LogSettings", "as_json", "configure"]

log = logger_of(__name__)

FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")
_NAMES: Final = ("peer", "handler", "call", "status")
"""Of the fields that a line of JSON may have."""
_CHATTY: Final = ("quic", "websockets")
"""Loggers of other libraries that tell each connection at the level of info."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How the command logs."""

    format: str = "text"
    level: str = "info"

    def __post_init__(self) -> None:
        for name, choices in (("format", FORMATS), ("level", LEVELS)):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"log {name} is {shown(value)}; there are {', '.join(choices)}")


def configure(
    settings: LogSettings, *, worker: bool = False, where: TextIO | None = None
) -> logging.Handler:
    """Has everything that this process logs written to standard error, one line an event.

    So are Python's warnings, and exceptions that nobody has caught. ``worker``: lines have the
    process id. ``where``: to another stream. Returns the handler. A service that configures logging
    by itself, when it is loaded, has the last word.
    """
    stream = sys.stderr if where is None else where
    handler = _LogHandler(stream)
    pid = os.getpid() if worker else None
    handler.setFormatter(
        _JsonLines(pid) if settings.format == "json" else _TextLines(pid, blocks=stream.isatty())
    )
    level = settings.level.upper()
    root = logging.root
    for other in tuple(root.handlers):
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _CHATTY:
        logger_of(name).setLevel(logging.NOTSET if level == "DEBUG" else logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    sys.unraisablehook = _unraisable
    threading.excepthook = _uncaught_in_thread
    return handler


def as_json(text: str, *, worker: bool = False) -> str:
    """A line of JSON for what is told without a log record, such as the last words of a process."""
    found = {"ts": _time_text(None), "level": "error", "logger": "aqueduct", "message": text}
    return _line(found | ({"process": os.getpid()} if worker else {}))


def _uncaught(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt) or not log.isEnabledFor(logging.ERROR):
        sys.__excepthook__(kind, error, trace)
        return
    log.critical("an error that nobody has caught ends the process", exc_info=(kind, error, trace))


def _uncaught_in_thread(found: threading.ExceptHookArgs) -> None:
    if issubclass(found.exc_type, SystemExit):
        return
    if found.exc_value is None or not log.isEnabledFor(logging.ERROR):
        threading.__excepthook__(found)
        return
    name = "" if found.thread is None else f" {found.thread.name}"
    log.error(
        "an error that nobody has caught ends the thread%s",
        name,
        exc_info=(found.exc_type, found.exc_value, found.exc_traceback),
    )


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    if found.exc_value is None or not log.isEnabledFor(logging.ERROR):
        sys.__unraisablehook__(found)
        return
    try:
        place = repr(found.object)
    except Exception:  # noqa: BLE001  it may be half made
        place = f"an object of the type {type(found.object).__name__}"
    log.error(
        "%s %s",
        found.err_msg or "an error that nobody could catch, in",
        place,
        exc_info=(found.exc_type, found.exc_value, found.exc_traceback),
    )


class _LogHandler(logging.StreamHandler[TextIO]):
    """Writes records; of one that cannot be written it says where it comes from."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging calls it
        """Called by ``emit`` where an exception is handled."""
        if record.name == __name__:
            return  # nobody reads the log
        if not log.isEnabledFor(logging.ERROR):
            super().handleError(record)
            return
        place = f"{record.name}, {record.pathname}:{record.lineno}"
        error = sys.exc_info()[1]
        log.error("a record of the log cannot be written (%s)", place, exc_info=error)


class _TextLines(logging.Formatter):
    """Time, level, logger and message.

    ``blocks``: what has several lines, as a traceback has, keeps them, indented. That is for
    people at a terminal. Programs that read the log want one line.
    """

    def __init__(self, pid: int | None, *, blocks: bool) -> None:
        super().__init__()
        self._process = "" if pid is None else f" [{pid}]"
        self._blocks = blocks

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if failure := _traceback(record):
            text += f"\n{failure}"
        first, *others = text.rstrip("\n").split("\n")
        line = (
            f"{_time_text(record.created)} {record.levelname}{self._process} "
            f"{escape(record.name)} {escape(first)}"
        )
        rest = [escape(other.removeprefix(INDENT).expandtabs()) for other in others]
        if self._blocks:
            return "\n".join((line, *(INDENT + other for other in rest)))
        return "\\n".join((line, *rest))


class _JsonLines(logging.Formatter):
    """One object a line."""

    def __init__(self, pid: int | None) -> None:
        super().__init__()
        self._pid = pid

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "ts": _time_text(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._pid is not None:
            found["process"] = self._pid
        fields = getattr(record, FIELDS, None)
        if isinstance(fields, dict):
            found |= {name: fields[name] for name in _NAMES if fields.get(name) not in (None, "")}
        if failure := _traceback(record):
            found["traceback"] = failure
        return _line(found)


def _line(found: dict[str, Any]) -> str:
    return json.dumps(found, default=str)  # ASCII: what is not printable is escaped


def _traceback(record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append("".join(traceback.format_exception(*record.exc_info)))
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(part.rstrip("\n") for part in parts)


def _time_text(seconds: float | None) -> str:
    time = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
