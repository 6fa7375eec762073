"""What tasks wait for: a future that steps its task where it is woken.

An asyncio Future that is set has its task wait for another turn of the event loop, which is several
times the work of what most messages lead to. So what wakes a task within a turn of the loop, and
has nothing else to do behind it, steps the task itself.
"""

import asyncio
import sys

cimport cython
from cpython.contextvars cimport PyContext_CheckExact, PyContext_Enter, PyContext_Exit

from aqueduct.errors import LocalProtocolError

__all__ = ["Waiter", "WaiterSlot", "nests"]

cdef object current_task = asyncio.current_task
if sys.version_info < (3, 12):  # where it is a function of Python, which does this and no more
    current_task = asyncio.tasks._current_tasks.get
cdef object get_running_loop = asyncio.get_running_loop


cpdef bint nests(loop) except -1:
    """Whether callbacks of this loop may run it again, as nest_asyncio lets them.

    A task that is stepped within a callback would then run that callback once more while it is at
    work, which its context forbids. So on such a loop every task goes on in a turn of its own.
    """
    return getattr(loop, "_nest_patched", False)


@cython.auto_pickle(False)
cdef class Waiter:
    """What one task waits for: ``await`` returns once it is ``woken``.

    It is as much of a future as tasks use. Wake it by ``step`` or ``step_soon``, on its ``loop``.
    """

    def __init__(self, loop not None):
        self._loop = loop

    def step(self):
        """Wakes the task, and steps it at once unless some task is at work already."""
        cdef object callback, context
        self.woken = True
        if self._callback is None:
            return
        if current_task(self._loop) is not None or nests(self._loop):
            self.step_soon()
            return
        context, self._context = self._context, None
        callback, self._callback = self._callback, None
        try:
            PyContext_Enter(context)
        except RuntimeError:  # the waking code runs in the context of the task itself
            self._loop.call_soon(callback, self, context=context)
            return
        try:
            callback(self)
        finally:
            PyContext_Exit(context)

    def step_soon(self):
        """Wakes the task; it goes on in the next turn of the loop."""
        self.woken = True
        self._call_soon()

    def __await__(self):
        return self

    def __next__(self):
        if self.woken:
            raise StopIteration
        self._asyncio_future_blocking = True
        return self

    # What a task asks of a future

    def get_loop(self):
        """The loop of the task."""
        return self._loop

    def add_done_callback(self, callback not None, *, context not None):
        """The task begins to wait."""
        if not PyContext_CheckExact(context):
            raise TypeError(f"context: a Context is needed, not {type(context).__name__}")
        self._callback, self._context = callback, context
        if self.woken:
            self._call_soon()

    def cancel(self, msg=None):
        """The task is cancelled while it waits. False: it is about to go on."""
        if self._callback is None:
            return False
        self._cancelled = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        if self._among is not None and self._among.waiters and self in self._among.waiters:
            self._among.waiters.remove(self)  # it may be long until they are woken
        self._call_soon()
        return True

    def result(self):
        """What the task wakes with."""
        cancelled, self._cancelled = self._cancelled, None
        if cancelled is not None:
            raise cancelled

    cdef int _call_soon(self) except -1:
        """Has the task go on in the next turn, if it waits."""
        callback, self._callback = self._callback, None
        context, self._context = self._context, None
        if callback is not None:
            self._loop.call_soon(callback, self, context=context)
        return 0


@cython.final
@cython.auto_pickle(False)
cdef class WaiterSlot:
    """Tasks that wait for a handle to change; ``waiters`` are those, None if there is none.

    ``loop`` is where it changes; None: wherever it is waited for.
    """

    def __init__(self, loop=None):
        self.loop = loop

    def wake(self, stepper=None):
        """Lets all of them look again: when ``stepper`` has them step, or soon."""
        cdef Waiter waiter
        waiters, self.waiters = self.waiters, None
        if waiters is None:
            return
        for waiter in waiters:
            if stepper is None:
                waiter.step_soon()
            else:
                stepper.step(waiter)

    def wait(self):
        """What to await: it returns with the next ``wake``. Await it at once, and once.

        Raises LocalProtocolError on another loop than ``loop``, if that is set.
        """
        cdef object running = get_running_loop()
        cdef Waiter waiter
        if self.loop is not None and running is not self.loop:
            raise LocalProtocolError(
                "this belongs to another event loop, where its messages come: wait for them there"
            )
        waiter = Waiter(running)
        waiter._among = self
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(waiter)
        return waiter
