"""How far a call is: a line on standard error, which a terminal alone gets."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

from aqueduct.arrow.sizes import batch_bytes
from aqueduct.cli.output import console, number, of_bytes

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Progress"]

_PAUSE: Final = 0.1  # seconds between two looks


class Progress:
    """Rows and bytes of one call. ``with`` shows them while the block runs."""

    def __init__(self) -> None:
        self.sent_rows = self.received_rows = 0
        self.bytes = 0
        """Of the batches of both ways."""
        self.waited = 0.0
        """Seconds without an answer or room to send."""
        self.share: Callable[[], float | None] = lambda: None
        """How much of the input is read, from 0 to 1; None if nobody knows."""
        self._began = time.monotonic()
        self._next = 0.0
        # Rows on the same terminal would break the line.
        self._shown = sys.stderr.isatty() and not sys.stdout.isatty()
        self._bar: Any = None
        self._width = 0

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        screen = console(sys.stderr) if self._shown else None
        if screen is not None:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                BarColumn(),
                TextColumn("{task.description}", markup=False),
                console=screen,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task("", total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._width:
            self._line("")
        if self._shown and error is None:
            print(self, file=sys.stderr)

    def sent(self, batch: pa.RecordBatch) -> None:
        """A batch was given to the call."""
        self.sent_rows += batch.num_rows
        self.bytes += batch_bytes(batch)
        self._update()

    def received(self, batch: pa.RecordBatch, waited: float) -> None:
        """An answer was written; the call has waited so long until now."""
        self.received_rows += batch.num_rows
        self.bytes += batch_bytes(batch)
        self.waited = waited
        self._update()

    def _update(self) -> None:
        """Shows what is known, if the last time is long enough ago."""
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + _PAUSE
        share = self.share()
        if self._bar is not None:
            self._bar.update(self._task, description=str(self), total=1.0, completed=share or 0.0)
            if share is None:
                self._bar.update(self._task, total=None)
        else:
            self._line(str(self) if share is None else f"{share:4.0%}  {self}")

    def __str__(self) -> str:
        seconds = time.monotonic() - self._began
        return (
            f"{number(self.sent_rows)} rows sent, {number(self.received_rows)} received, "
            f"{of_bytes(self.bytes / max(seconds, 1e-3))}/s, {seconds:.1f} s, of which "
            f"{self.waited:.1f} s waiting for the service"
        )

    def _line(self, text: str) -> None:
        """Writes over the line before, and ends it if there is no text."""
        sys.stderr.write(f"\r{text.ljust(self._width)}" + ("" if text else "\r"))
        sys.stderr.flush()
        self._width = len(text)
