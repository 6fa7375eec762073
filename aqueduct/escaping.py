"""Text of a peer made safe for logs, terminals and errors of one line.

A handler's exception, a name, a reason or a certificate may hold anything: a newline forges a line
of the log, an ANSI sequence moves the cursor, a bidi control shows the text in another order, and a
lone surrogate cannot be written at all. ``escape`` writes all these as Python does in a string.
"""

from __future__ import annotations

import io
import logging
import traceback
import unicodedata
from typing import Final

__all__ = ["Lines", "escape", "escape_lines", "logger_of"]

_INDENT: Final = "  | "


def escape(text: object) -> str:
    """``str(text)`` in one line, with everything escaped that is not printable.

    Spaces of any width stay; newlines, tabs and other controls, format characters, private and
    unassigned characters, and surrogates do not.
    """
    text = str(text)
    if text.isprintable():  # nearly always
        return text
    return "".join(map(_shown, text))


def escape_lines(text: str) -> str:
    """``text`` with each of its lines escaped; newlines stay, and tabs become spaces.

    For what has to have lines, as a traceback has.
    """
    if text.isprintable():
        return text
    return "\n".join(escape(line.removesuffix("\r").expandtabs()) for line in text.split("\n"))


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


class Lines(str):
    """An argument of a log call that has lines: it keeps them, each behind an indent.

    So no line of it can pass for one of the log.
    """

    __slots__ = ()


def logger_of(name: str) -> logging.Logger:
    """The logger of a module. What it logs is escaped, tracebacks too.

    An argument that is ``Lines`` keeps its lines; so does the format.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_FILTER)  # the second time changes nothing
    return logger


class _Escaping(logging.Filter):
    """Escapes what a record says, before a handler of the application sees it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.args:
            given = record.args
            record.args = (
                {name: _safe(value) for name, value in given.items()}
                if isinstance(given, dict)
                else tuple(map(_safe, given))
            )
        if record.exc_info and not record.exc_text:
            # A formatter takes this text if it is there, and makes its own otherwise.
            record.exc_text = escape_lines(_formatted(record.exc_info))
        return True


_FILTER: Final = _Escaping()


def _safe(value: object) -> object:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Lines):
        return "".join(f"\n{_INDENT}{line}" for line in escape_lines(value).splitlines())
    if isinstance(value, str):
        return escape(value)
    return _Escaped(value)


class _Escaped:
    """Any object in a log record: its text is made when the record is formatted, and escaped."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __str__(self) -> str:
        return escape(self.value)

    def __repr__(self) -> str:
        return escape(repr(self.value))


def _formatted(info: object) -> str:
    buffer = io.StringIO()
    kind, error, frames = info  # type: ignore[misc]
    traceback.print_exception(kind, error, frames, file=buffer)
    return buffer.getvalue().rstrip("\n")
