"""Text of a peer made safe for logs, terminals and errors of one line; and guesses for errors.

A peer chooses names, reasons, certificates and the text of a handler's exception. A newline there
forges a line of the log. An ANSI sequence moves the cursor. A bidi control shows the text in
another order. A lone surrogate cannot be written at all. ``escape`` writes all these as Python's
repr does.
"""

from __future__ import annotations

import difflib
import logging
import traceback
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from numbers import Number
from typing import Final

__all__ = [
    "FIELDS",
    "INDENT",
    "Lines",
    "escape",
    "escape_lines",
    "logger_of",
    "near_miss",
    "one_line",
    "shown",
]

FIELDS: Final = "fields"
"""Of a log record: what it is about, by name, for logs that are read by programs."""
INDENT: Final = "  | "
"""Before each line of a record but its first one."""
_LONG: Final = 100  # characters: what is longer was not typed
_COMPARED: Final = 16  # names: to compare one takes 20 us


def escape(text: object) -> str:
    """``str(text)`` in one line, with everything escaped that is not printable.

    Spaces of any width stay; newlines, tabs and other controls, format characters, private and
    unassigned characters, and surrogates do not.
    """
    text = str(text)
    if text.isprintable():  # nearly always
        return text
    return "".join(map(_escaped, text))


def escape_lines(text: str) -> str:
    """``text`` with each of its lines escaped; newlines stay, and tabs become spaces.

    For what has to have lines, as a traceback has.
    """
    if text.isprintable():
        return text
    return "\n".join(escape(line.removesuffix("\r").expandtabs()) for line in text.split("\n"))


def one_line(error: BaseException) -> str:
    """The text of an error in one line: its lines are joined by spaces, the rest is escaped."""
    text = str(error)
    raw = error.args[0] if error.args else ""
    if isinstance(raw, str) and text == escape(raw):
        text = raw  # not yet escaped
    return escape(" ".join(text.split())) or type(error).__name__


def shown(value: object, limit: int = 100) -> str:
    """The repr of ``value`` for an error: in one line, of at most ``limit`` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # noqa: BLE001  an object's own __repr__ may fail
        text = f"an object of type {type(value).__name__} whose repr raised {type(error).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def near_miss(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The one of ``names`` that is most like ``name``, if one is; case counts for nothing.

    A peer may ask again and again for a name that is not there, of very many. So few names are
    compared: of those that are about as long, the neighbours of ``name`` in the alphabet.
    """
    if len(name) > _LONG:
        return None
    wanted, spread = name.lower(), 2 + len(name) // 4
    lower = {each.lower(): each for each in names if abs(len(each) - len(name)) <= spread}
    compared = list(lower)
    if len(compared) > _COMPARED:
        compared.sort()
        first = max(0, bisect_left(compared, wanted) - _COMPARED // 2)
        compared = compared[first : first + _COMPARED]
    near = difflib.get_close_matches(wanted, compared, n=1, cutoff=cutoff)
    return lower[near[0]] if near else None


def _escaped(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


class Lines(str):
    """An argument of a log call that keeps its lines. Each is indented.

    So none of them looks like a line of the log.
    """

    __slots__ = ()


def logger_of(name: str) -> logging.Logger:
    """The logger of a module, which escapes all arguments and tracebacks that it logs.

    ``Lines`` and tracebacks keep their lines. An argument that has ``log_fields()``, as a call has,
    says what the record is about; so does the ``peer`` of a connection. ``extra={"fields": {...}}``
    says more.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_escaping)  # the second time changes nothing
    return logger


def _escaping(record: logging.LogRecord) -> bool:
    """A filter that keeps each record, and makes it safe before a handler sees it."""
    if record.args:
        given = record.args
        if isinstance(given, tuple):
            _add_fields(record, given)
        record.args = (
            {name: _safe(value) for name, value in given.items()}
            if isinstance(given, Mapping)
            else tuple(map(_safe, given))
        )
    if record.exc_info and not record.exc_text:
        # A formatter takes this text if it is there, and makes its own otherwise.
        record.exc_text = _indented("".join(traceback.format_exception(*record.exc_info)))
    return True


def _add_fields(record: logging.LogRecord, values: tuple[object, ...]) -> None:
    found: dict[str, object] = {}
    for value in values:
        tell = getattr(type(value), "log_fields", None)
        if tell is not None:
            found |= tell(value)
        elif isinstance(getattr(type(value), "peer", None), property):  # a connection
            found["peer"] = value.peer  # type: ignore[attr-defined]
    if found:
        setattr(record, FIELDS, found | getattr(record, FIELDS, {}))


def _safe(value: object) -> object:
    if value is None or isinstance(value, Number):
        return value  # for %d and %g
    if isinstance(value, Lines):
        if not value:
            return ""
        return "\n" + _indented(value)
    if isinstance(value, str) and value.isprintable():
        return value
    return _Escaped(value)


def _indented(text: str) -> str:
    return "\n".join(INDENT + line for line in escape_lines(text.rstrip("\n")).split("\n"))


class _Escaped:
    """An argument of a record: its text is made when the record is formatted, and escaped."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return escape(self._value)

    def __repr__(self) -> str:
        return escape(repr(self._value))
