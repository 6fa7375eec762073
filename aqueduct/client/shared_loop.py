"""An event loop that is run by whoever waits for it: its own thread, or the thread that calls.

A small call by way of another thread changes threads four times, and each change costs more than
the work between them: the other thread must be woken, get a processor, and get the interpreter. So
a thread that has to wait for an answer may borrow the loop and run it until then. It need not even
do that, but steps the work itself, where what this waits for comes at once.

Nobody runs the loop right after that, as the next call often comes at once. Its own thread takes
it up again when it is told that there is work, or has seen that nobody did any for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Coroutine, Sized
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aqueduct.carriers.clock import clock_of
from aqueduct.client.deferred_signals import DeferredSignals
from aqueduct.client.loop_thread import LoopThread

if TYPE_CHECKING:
    from aqueduct.endpoint import Connection

__all__ = ["SharedLoop"]

T = TypeVar("T")

_UNATTENDED: Final = 0.05
"""Seconds for which nobody runs the loop at most: no peer takes offence at that."""
_STEPPED: Final = 0.01
"""Seconds of stepping at most: timers and what others put onto the loop wait for it."""
_TURNS: Final = 64
"""Of the loop at most, for what is left on it when somebody lets go of it."""


class _Attendance:
    """While a thread does for ``connection`` what turns of the loop would do, and makes none.

    One is enough for a loop, as one thread has it at a time.
    """

    __slots__ = ("_loop", "connection")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.connection: Connection

    def __enter__(self) -> None:
        asyncio._set_running_loop(self._loop)
        self.connection.attend(True)

    def __exit__(self, *ignored: object) -> None:
        try:
            self.connection.attend(False)
        finally:
            del self.connection
            asyncio._set_running_loop(None)


class SharedLoop(LoopThread):
    """An event loop with a thread of its own, from which others may borrow it."""

    def __init__(self, name: str = "aqueduct-loop") -> None:
        self._running = threading.Lock()  # whoever holds it runs the loop
        self._kept = True  # by its own thread; another one need not be told of work
        self._used = self._turned = 0.0
        self.idle: Callable[[], bool] = lambda: True
        """Whether nothing is under way on the loop but what ``run`` waits for."""
        self._work: SimpleQueue[None] = SimpleQueue()
        super().__init__(name)
        self._signals = DeferredSignals(self._stop_soon)
        self._attendance = _Attendance(self.loop)
        self._time = clock_of(self.loop)
        # Of asyncio's own loops; another one, as a policy may make it, stays with its thread.
        self._ready: Sized = getattr(self.loop, "_ready", ())
        selector: Any = getattr(self.loop, "_selector", None)
        self._lends = hasattr(self.loop, "_ready") and hasattr(selector, "fileno")
        if self._lends:
            came = select.poll()
            came.register(selector, select.POLLIN)
            self._came = came.poll

    @property
    def kept(self) -> bool:
        """Whether the loop's own thread runs it."""
        return self._kept

    @property
    def may_borrow(self) -> bool:
        """Whether the calling thread may ever: not if it runs a loop of its own."""
        return asyncio._get_running_loop() is None

    def lend(self) -> None:
        """On the loop, as what some thread waits for in ``run`` ends: its next call may borrow.

        Not if anything else is under way.
        """
        if self._kept and self._lends and len(self._begun) <= 1 and self.idle():
            self._let_go()

    def borrow(self) -> bool:
        """Whether the calling thread has the loop now, until it does ``give_back``.

        Signals wait until then (see ``deferred_signals``).
        """
        if self._kept or self._ended or self.pid != os.getpid():
            return False  # or this is the child of a fork
        if not self.may_borrow:
            return False
        # An exception between taking the loop and giving it back would leave it to nobody.
        self._signals.begin()
        if self._running.acquire(blocking=False):
            if not self._ended:
                return True
            self._running.release()
        self._signals.end()
        return False

    def turn(self, seconds: float, until: asyncio.Future[Any] | None = None) -> None:
        """Runs the borrowed loop until something on it calls ``loop.stop``, or for so long.

        ``until`` is done, for instance. A signal ends it, too, between two callbacks.
        """
        loop = self.loop
        self._turned = self._time()
        timer = loop.call_later(seconds, loop.stop)
        if until is not None:
            until.add_done_callback(_stop)
        try:
            loop.run_forever()
            self._run_rest()
        finally:
            timer.cancel()
            if until is not None:
                until.remove_done_callback(_stop)

    def step(
        self,
        work: Coroutine[Any, Any, T],
        connection: Connection,
        otherwise: Callable[[asyncio.Task[T]], object],
    ) -> T | None:
        """Runs ``work`` on the borrowed loop to its end, without turns of it; what it returns.

        It waits for what the connection brings. If that does not come at once, this is None, and
        the work a task from then on, which ``otherwise`` is told. Its futures must not mind to be
        waited for again. A signal ends the next turn.
        """
        loop = self.loop
        until = self._time() + _STEPPED
        self._attendance.connection = connection
        with self._attendance:
            try:
                while True:
                    awaited = work.send(None)
                    awaited._asyncio_future_blocking = False
                    if not connection.look() or self._time() >= until:
                        break
            except StopIteration as end:
                found: T = end.value
                return found
            except BaseException:
                work.close()  # now, on its loop; it is over if it was what raised
                raise
            otherwise(loop.create_task(work))
        return None

    def run_rest(self) -> None:
        """Does what callbacks have left for the next turn, which may not come soon.

        Now and then it makes one in any case: what timers are due, and which were cancelled, is
        seen by turns alone.
        """
        if self._ready or self._time() - self._turned >= _UNATTENDED:
            self.turn(0)

    def give_back(self) -> None:
        """Ends what ``borrow`` began. Raises what the handlers of signals raise that came."""
        self._used = time.monotonic()
        self._running.release()
        self._signals.end()

    def rest(self, connection: Connection | None = None) -> None:
        """The loop's own thread lets go of it, so that the next call may borrow it.

        Or, if it has: what the last call owes leaves now rather than with the next one.
        """
        if self._kept:
            if self._lends:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self.loop.call_soon_threadsafe(self._let_go)
        elif connection is not None and self.borrow():
            try:
                self._attendance.connection = connection
                with self._attendance:
                    connection.settle()
                self.run_rest()
            finally:
                self.give_back()

    def catch_up(self, connection: Connection) -> None:
        """Does what came up while nobody ran the loop, as the end of a connection."""
        if self._kept or not (self._came(0) or self._ready) or not self.borrow():
            return
        try:
            self._attendance.connection = connection
            with self._attendance:
                connection.read()
            if self._ready or self._came(0):
                self.turn(0)
        finally:
            self.give_back()

    # Within

    def _need(self) -> None:
        if not self._kept:
            self._work.put(None)

    def _stop_soon(self) -> None:
        """A signal has come, and waits until the loop is given back."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _let_go(self) -> None:
        # Who puts something onto the loop from here on has it taken up again. What was put there
        # before is run in the turn that comes yet.
        self._kept = False
        self.loop.call_soon(self.loop.stop)

    def _run_rest(self) -> None:
        """What callbacks left for the next turn, which may not come soon."""
        for _ in range(_TURNS):
            if not self._ready:
                return
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def _attend(self) -> None:
        wanted = True
        while not self._ended:
            with self._running:
                if wanted or not self._rests():
                    self._kept = True
                    if not self._ended:
                        self.loop.run_forever()
                        self._kept = False
                        self._run_rest()
                wanted = not self._rests()
            if not wanted:
                wanted = self._wait()

    def _rests(self) -> bool:
        """Whether all that threads have put onto the loop is done. For who has the loop."""
        while not self._work.empty():
            self._work.get()
        return not (self._begun or self._ready) and self.idle()

    def _wait(self) -> bool:
        """Returns when there is work; True: nobody has borrowed the loop for a moment."""
        since = time.monotonic()
        while not self._ended:
            try:
                self._work.get(timeout=_UNATTENDED)
                return False  # whoever has the loop may do it yet
            except Empty:
                idle = time.monotonic() - max(self._used, since)
                if idle >= _UNATTENDED and not self._running.locked():
                    return True
        return False

    def _clean_up(self) -> None:
        with self._running:
            super()._clean_up()


def _stop(done: asyncio.Future[Any]) -> None:
    done.get_loop().stop()
