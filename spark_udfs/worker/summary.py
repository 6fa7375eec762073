"""``TaskSummary``: numbers of tasks for people, as text and as a table of a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as html_escape
from typing import Any, Final

from aqueduct.escaping import escape, escape_lines

__all__ = ["TaskSummary"]

_CELL: Final = "padding: 2px 12px 2px 0; text-align: left; vertical-align: top"


class TaskSummary(str):
    """A text of a few lines. A shell shows it as it is, and a notebook as a table."""

    __slots__ = ("_rows", "_title")

    _title: str
    _rows: tuple[tuple[str, str], ...]

    def __new__(
        cls, text: str, *, title: str = "", rows: Sequence[tuple[str, str]] = ()
    ) -> TaskSummary:
        """``rows``: names with what they are, instead of the lines of ``text``."""
        made = super().__new__(cls, text)
        made._title = title
        made._rows = tuple(rows)
        return made

    def titled(self, title: str) -> TaskSummary:
        """The same with a title before it."""
        return TaskSummary(f"{title}: {self}", title=title, rows=self._rows or [("", str(self))])

    def __repr__(self) -> str:
        return escape_lines(str(self))

    def _repr_html_(self) -> str:
        rows = self._rows or [("", line) for line in self.splitlines()]
        caption = f"<caption>{_safe(self._title)}</caption>" if self._title else ""
        body = "".join(
            f'<tr><th scope="row" style="{_CELL}">{_safe(name)}</th>'
            f'<td style="{_CELL}">{_safe(value)}</td></tr>'
            for name, value in rows
        )
        return f"<table>{caption}<tbody>{body}</tbody></table>"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _again, (str(self), self._title, self._rows)


def _again(text: str, title: str, rows: tuple[tuple[str, str], ...]) -> TaskSummary:
    return TaskSummary(text, title=title, rows=rows)


def _safe(text: str) -> str:
    """Text in HTML: a handler or an address that others chose is neither a tag nor a script."""
    return html_escape(escape(text), quote=True)
