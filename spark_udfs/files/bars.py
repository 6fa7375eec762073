"""Bars of progress: in a terminal, in a notebook, or as plain lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape as html_escape
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol, TextIO

from aqueduct.escaping import escape
from spark_udfs.worker.metrics import Total

__all__ = ["Bar", "FilesProgress", "LineBar", "NotebookBar", "RichBar", "TerminalBar", "bar_for"]

MiB: Final = 1 << 20
_LINES_EVERY: Final = 10.0  # seconds between two lines where nothing can be overwritten
_WIDTH: Final = 24  # characters of a bar of text


@dataclass(slots=True)
class FilesProgress:
    """How one query stands."""

    title: str
    tasks: int = 0
    """Of the stages that have begun."""
    running: int = 0
    ended: int = 0
    failed: int = 0
    """Attempts; Spark makes others."""
    total: Total = field(default_factory=Total)
    """What the tasks that ended well have counted."""
    seconds: float = 0.0
    """Since the query began."""

    def __str__(self) -> str:
        """One line."""
        return f"{self.title}: {', '.join(self.parts())}"

    def parts(self) -> list[str]:
        """What the line has, one by one."""
        moved = self.total.bytes_sent + self.total.bytes_received
        speed = moved / MiB / self.seconds if self.seconds > 0 else 0.0
        found = [f"{self.ended:,} of {self.tasks:,} tasks", f"{self.running:,} running"]
        if self.failed:
            found.append(f"{self.failed:,} failed")
        return [
            *found,
            f"{self.total.tasks:,} files or parts",
            f"{self.total.rows_sent:,} rows",
            f"{moved / MiB:,.1f} MiB",
            f"{speed:,.1f} MiB/s",
            f"{self.total.waiting_seconds:,.1f} s waiting for the service",
        ]


class Bar(Protocol):
    """Shows how one query stands; used by one thread."""

    def show(self, progress: FilesProgress) -> None:
        """How it stands now."""

    def close(self) -> None:
        """Nothing more comes."""


def bar_for(wanted: bool | None) -> Callable[[], Bar] | None:
    """What makes a bar for whom this program writes to; None: for nobody.

    ``wanted``: True, in any case; None, in a notebook and at a terminal alone.
    """
    if wanted is False:
        return None
    if _in_notebook():
        return NotebookBar
    if sys.stderr is not None and sys.stderr.isatty():
        return RichBar if find_spec("rich") is not None else TerminalBar
    return LineBar if wanted else None


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    found = None if shell is None else shell.get_ipython()
    return found is not None and getattr(found, "kernel", None) is not None


class LineBar:
    """A line now and then, for a log."""

    def __init__(self, where: TextIO | None = None) -> None:
        self._where = where or sys.stderr
        self._due = 0.0
        self._last = ""

    def show(self, progress: FilesProgress) -> None:
        """See Bar."""
        self._last = str(progress)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _LINES_EVERY
            self._write()

    def close(self) -> None:
        """See Bar."""
        self._write()

    def _write(self) -> None:
        if self._last:
            self._where.write(f"{escape(self._last)}\n")
            self._where.flush()
            self._last = ""


class TerminalBar:
    """One line that is written over."""

    def __init__(self, where: TextIO | None = None) -> None:
        self._where = where or sys.stderr

    def show(self, progress: FilesProgress) -> None:
        """See Bar."""
        full = round(_WIDTH * _share(progress))
        drawn = "#" * full + "." * (_WIDTH - full)
        text = escape(f"{progress.title} [{drawn}] {', '.join(progress.parts())}")
        columns = _columns(self._where)
        if len(text) >= columns:
            text = f"{text[: columns - 5]} ..."
        self._where.write(f"\r\x1b[K{text}")
        self._where.flush()

    def close(self) -> None:
        """See Bar."""
        self._where.write("\n")
        self._where.flush()


class RichBar:
    """By ``rich``, which the extra ``cli`` brings: a bar, and the numbers below it."""

    def __init__(self, where: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        stream = where or sys.stderr
        console = Console(file=stream, width=_columns(stream))
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, progress: FilesProgress) -> None:
        """See Bar."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        first = Table.grid(padding=(0, 1))
        bar = ProgressBar(max(progress.tasks, 1), progress.ended, width=_WIDTH)
        first.add_row(Text(escape(progress.title)), bar)
        numbers = Text(escape(", ".join(progress.parts())))  # wrapped where it is too long
        self._live.update(Group(first, numbers), refresh=True)

    def close(self) -> None:
        """See Bar."""
        self._live.stop()


class NotebookBar:
    """An output of a notebook, which is replaced."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, progress: FilesProgress) -> None:
        """See Bar."""
        display: Any = import_module("IPython.display")
        made = {"text/html": _html(progress), "text/plain": escape(progress)}
        if self._handle is None:
            self._handle = display.display(made, raw=True, display_id=True)
        else:
            self._handle.update(made, raw=True)

    def close(self) -> None:
        """The last state stays."""


def _html(progress: FilesProgress) -> str:
    title = html_escape(escape(progress.title))
    numbers = html_escape(escape(", ".join(progress.parts())))
    most = max(progress.tasks, 1)
    return (
        f'<div><b>{title}</b> <progress max="{most}" value="{progress.ended}"></progress> '
        f"{numbers}</div>"
    )


def _share(progress: FilesProgress) -> float:
    return min(progress.ended / progress.tasks, 1.0) if progress.tasks else 0.0


def _columns(where: TextIO) -> int:
    try:
        return os.get_terminal_size(where.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80
