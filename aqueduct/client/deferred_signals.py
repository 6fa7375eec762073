"""Signals that wait: their handlers run once what must not be cut short is done.

Python runs a handler wherever the main thread is, between any two instructions, and many handlers
raise: KeyboardInterrupt, what ends a process that is told to, what a timeout by SIGALRM is made of.
In the middle of what a connection does with its state that would leave half a change behind. The
event loop's own thread never sees one; the main thread does, while it has borrowed the loop.
"""

from __future__ import annotations

# What signal wraps: its own functions take twenty calls of Python to make enums of handlers.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeAlias

from aqueduct.forks import own

__all__ = ["DEFERRED", "DeferredSignals"]

_Handler: TypeAlias = Callable[[int, "FrameType | None"], Any]

_FAULTS: Final = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGSEGV", "SIGSTOP")
"""Of which no handler in Python makes sense, or none is possible."""
_REAL_TIME: Final = getattr(_signal, "SIGRTMIN", 32)

DEFERRED: Final = tuple(
    sorted(
        number
        for number in _signal.valid_signals()
        if number < _REAL_TIME and number not in {getattr(_signal, name, None) for name in _FAULTS}
    )
)
"""The signals that wait, as numbers, if Python has something to do for them."""


class DeferredSignals:
    """Signals wait from ``begin`` until ``end``. For the main thread; it does nothing in others."""

    __slots__ = ("__weakref__", "_came", "_handlers", "_main", "_noticed")

    def __init__(self, noticed: Callable[[], object]) -> None:
        """``noticed`` is called when a signal comes that waits then, wherever the thread is."""
        self._noticed = noticed
        self._main = threading.main_thread().ident
        self._handlers: dict[int, _Handler] = {}
        self._came: dict[int, FrameType | None] = {}
        own(self)

    def begin(self) -> None:
        """From here on signals wait. What comes before is raised, and then none does."""
        if threading.get_ident() != self._main:
            return
        try:
            for number in DEFERRED:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """No signal waits any more. Raises what the handlers of those that came raise."""
        if not self._handlers or threading.get_ident() != self._main:
            return
        try:
            self._restore()
        finally:
            handlers, came = self._handlers, self._came
            self._handlers, self._came = {}, {}  # a frame is not to live on here
            self._handle(handlers, came)

    def left_behind(self) -> None:
        """In a forked child: nobody is to end the wait, and what came is the parent's."""
        self._restore()
        self._handlers, self._came = {}, {}

    def _restore(self) -> None:
        """Each signal has its own handler again, also if one of these raises meanwhile."""
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == self._note:  # or somebody has set another
                    _signal.signal(number, handler)
        except BaseException:
            self._restore()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came[number] = frame
        self._noticed()

    def _handle(self, handlers: dict[int, _Handler], came: dict[int, FrameType | None]) -> None:
        """One that raises keeps no other from running."""
        if came:
            number = next(iter(came))
            frame = came.pop(number)
            try:
                handlers[number](number, frame)
            finally:
                self._handle(handlers, came)
