"""The signals of a process that serves, and its end within a limit.

SIGINT and SIGTERM drain a service, a second one ends it, a third one ends the process. SIGUSR1
writes the state of the service as one line. ``Service.run``, ``aqueduct serve`` and its workers use
this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, Self, TextIO

from aqueduct.escaping import escape
from aqueduct.forks import own

__all__ = [
    "FORCE_SECONDS",
    "LEAST",
    "Holders",
    "ProcessDeadline",
    "ServiceSignals",
    "end_process",
    "say",
    "tell",
    "tell_as",
    "tell_state",
]

FORCE_SECONDS: Final = 2.0
"""Seconds that a service has to tell its clients after a second signal."""
LEAST: Final = 1.0
"""Seconds, at least, from the first signal to the end of the process, even with a short drain."""
_FLUSH: Final = 0.2
"""Seconds for what is still in the buffers of standard output and error."""


_forms: Final[list[Callable[[str], str]]] = [str]


def say(line: str) -> None:
    """Writes a line to standard output."""
    _write(line, sys.stdout)


def tell(line: str) -> None:
    """Writes a line to standard error, in the form that ``tell_as`` gave."""
    _write(_forms[-1](line), sys.stderr)


def tell_state(state: dict[str, Any]) -> None:
    """Writes the state of a service to standard error, as a line of JSON."""
    _write(json.dumps(state, separators=(",", ":")), sys.stderr)


def tell_as(form: Callable[[str], str]) -> None:
    """Gives what ``tell`` writes a form: the command has logs that other programs read."""
    _forms.append(form)


def _write(line: str, where: TextIO | None) -> None:
    """Writes one line. Text of a peer in it is escaped. None: the stream is closed."""
    if where is None:
        return  # as for Python's print()
    encoding = where.encoding or "utf-8"
    text = escape(line).encode(encoding, "backslashreplace").decode(encoding)
    print(text, file=where, flush=True)


class ProcessDeadline:
    """Ends the process when its time is over, whatever its threads and its event loop are doing.

    ``before`` is called in a thread of its own right before that.
    """

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self._before = before
        self.ordered = False
        """Whether the process is to end."""
        # The only thing that a signal handler may touch: it never waits for a lock.
        self._orders: SimpleQueue[tuple[float, int, str] | None] = SimpleQueue()
        threading.Thread(target=self._watch, name="aqueduct-deadline", daemon=True).start()

    def end_in(self, seconds: float, status: int = 1, text: str = "") -> None:
        """The process ends in ``seconds`` at the latest. The earliest of several orders counts.

        It then writes ``text`` to standard error. May be called from a signal handler.
        """
        self.ordered = True
        self._orders.put((time.monotonic() + seconds, status, text))

    def cancel(self) -> None:
        """No order counts any more."""
        self._orders.put(None)

    def _watch(self) -> None:
        due, status, text = math.inf, 0, ""
        while True:
            try:
                left = None if due == math.inf else max(due - time.monotonic(), 0)
                order = self._orders.get(timeout=left)
            except Empty:
                break
            if order is None:
                return
            if order[0] < due:
                due, status, text = order
        end_process(status, text, self._before)


class Holders:
    """Threads and child processes, begun since this was made, that hold up the process's end."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())

    def __bool__(self) -> bool:
        return bool(_children()) or any(
            not thread.daemon for thread in threading.enumerate() if thread not in self._threads
        )


def _children() -> Sequence[Any]:
    """The processes that multiprocessing has started here: it waits for them at the exit."""
    processes = sys.modules.get("multiprocessing")
    return processes.active_children() if processes is not None else ()


def end_process(status: int, text: str = "", before: Callable[[], object] = lambda: None) -> None:
    """Ends this process now, with the processes that multiprocessing has started here.

    No thread and no exit handler is waited for.
    """

    def last() -> None:
        before()
        children.extend(child.pid for child in _children())
        if text:
            tell(text)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
                stream.flush()

    children: list[int] = []
    # In a thread, as a stuck one may hold the lock of a stream.
    thread = threading.Thread(target=last, name="aqueduct-end", daemon=True)
    try:
        thread.start()
        thread.join(_FLUSH)
        # Last: a parent that waits for a child would end this process with another status.
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGTERM)
    finally:
        os._exit(status)


class ServiceSignals:
    """Handles SIGINT, SIGTERM and SIGUSR1 while the block runs, on an event loop.

    - ``drain`` is called on the loop for the first SIGINT or SIGTERM, ``force`` for the second.
    - ``look`` is called on the loop for SIGUSR1, and may be set later.
    - ``seconds``: the process ends within these after the first signal, even if a handler blocks
      the loop or a thread. After the second signal it ends within ``grace``, after the third at
      once. ``deadline`` does that, also after the block, as threads may hold up the process.

    Outside of the main thread, which has all signals, this does nothing.
    """

    def __init__(
        self,
        *,
        drain: Callable[[], object],
        force: Callable[[], object],
        seconds: float,
        deadline: ProcessDeadline,
        grace: float = FORCE_SECONDS,
        numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        self.seconds = seconds
        """For the whole end; may be set until the first signal comes."""
        self.look: Callable[[], object] = lambda: None
        self._deadline = deadline
        self._grace = grace
        self._drain = drain
        self._force = force
        self._heard = 0
        self._numbers = numbers
        self._noted = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        loop = asyncio.get_running_loop()
        own(self)
        for number in (*self._numbers, signal.SIGUSR1):
            self._previous[number] = signal.getsignal(number)
        loop.add_signal_handler(signal.SIGUSR1, lambda: self.look())
        for number in self._numbers:
            loop.add_signal_handler(number, self._hear)
            # The loop is woken as before. This runs also while a handler keeps it from turning.
            signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._previous:
            loop.remove_signal_handler(number)
        self._restore(self._previous)
        self._previous = {}

    def left_behind(self) -> None:
        """In a forked child: restores the signal handlers from before the service, but for Ctrl-C.

        It ignores Ctrl-C, which a terminal sends to all processes: the service decides what it
        means. Otherwise a call whose work is done by a pool of processes could not end.
        """
        others = [n for n in self._numbers if signal.getsignal(n) != self._note]
        before = {n: handler for n, handler in self._previous.items() if n not in others}
        if signal.SIGINT in before:
            before[signal.SIGINT] = signal.SIG_IGN
        self._restore(before)

    # Within

    def _restore(self, previous: dict[int, Any]) -> None:
        for number, handler in previous.items():
            if handler is not None:  # it was not set from Python
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between any two instructions."""
        self._noted += 1
        deadline = self._deadline
        if self._noted == 1:
            seconds = max(self.seconds, LEAST)
            text = f"ended {seconds:g} s after the signal: a handler or thread holds on"
            deadline.end_in(seconds, 1, text)
        elif self._noted == 2:
            deadline.end_in(self._grace, 128 + number)
        else:
            deadline.end_in(0, 128 + number)

    def _hear(self) -> None:
        """On the loop."""
        self._heard += 1
        if self._heard == 1:
            self._drain()
        elif self._heard == 2:
            self._force()
