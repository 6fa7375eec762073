"""What commands write for people: styled by ``rich`` in a terminal, plain everywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, TextIO

from aqueduct.escaping import escape
from aqueduct.service.signals import say

__all__ = ["Page", "console", "number", "of_bytes", "plain_table", "rich_table"]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def console(stream: TextIO) -> Any:
    """A console of ``rich`` for ``stream``.

    None: it is no terminal of UTF-8, or a dumb one; ``NO_COLOR`` is set; or ``rich`` is not
    installed, which the extra ``cli`` brings.
    """
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    if (stream.encoding or "").lower().replace("-", "") != "utf8":
        return None  # its frames and bars are no ASCII
    try:
        from rich.console import Console
    except ImportError:
        return None
    # Text of a peer is no markup, and a number or path in it is nothing to be stressed.
    return Console(file=stream, markup=False, highlight=False, emoji=False)


class Page:
    """Lines and tables on standard output. All text in them is escaped."""

    def __init__(self) -> None:
        self._console = console(sys.stdout)

    def line(self, text: str = "", style: str = "") -> None:
        """Writes a line; ``style`` is one of rich, such as "bold"."""
        if self._console is None:
            say(text)
            return
        from rich.text import Text

        self._console.print(Text(escape(text), style=style), soft_wrap=True)

    def table(
        self, titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0
    ) -> None:
        """Writes a table, of which the last ``right`` columns have numbers."""
        lines = [tuple(map(escape, row)) for row in rows]
        if self._console is None:
            for line in plain_table(titles, lines, right=right):
                say(line)
            return
        self._console.print(rich_table(titles, lines, right=right))


def plain_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0
) -> list[str]:
    """The lines of a table without a frame."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    first = len(titles) - right
    return [
        "  ".join(
            text.rjust(width) if place >= first else text.ljust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (titles, *rows)
    ]


def rich_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0) -> Any:
    """A table of ``rich``; the texts are escaped already."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=0)
    for place, title in enumerate(titles):
        numbers = place >= len(titles) - right
        justify: Any = "right" if numbers else "left"
        # Where there is no room, names are cut short, and numbers are not.
        table.add_column(Text(title), justify=justify, overflow="ellipsis", no_wrap=numbers)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def number(value: float) -> str:
    """A number as people read it: ``12,345``."""
    return f"{value:,.0f}"


def of_bytes(size: float) -> str:
    """A size as people read it: ``1.5 MiB``."""
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
