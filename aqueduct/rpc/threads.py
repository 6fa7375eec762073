"""Threads that are there at once: for handlers written without asyncio, and for the sync client.

A ``Job`` is work that would take an event loop too long. A few threads of the process do it.

All of them are daemon threads, because a handler that never returns must not keep an interpreter
from ending. For the same reason ``concurrent.futures`` is of no use here: its threads are joined
at exit, and what finds no free thread waits in a queue, where one slow call starves the others.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import itertools
import os
import queue
import selectors
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from aqueduct._speedups.loop.waiter import Waiter
from aqueduct.errors import LocalProtocolError
from aqueduct.escaping import logger_of

__all__ = ["Job", "ThreadPool", "apart", "at_work", "check_patches", "green", "provide"]

log = logger_of(__name__)

Work = Callable[[], None]
T = TypeVar("T")

_IDLE_SECONDS: Final = 30.0
_names = itertools.count(1)
_GREEN: Final = ("gevent.", "eventlet.")
_ALL: Final = "the threads, selectors and queues"


def green() -> str:
    """Which of the modules that threads rest on have been patched, for people; "" for none."""
    parts = {
        "threads": _thread.start_new_thread,
        "selectors": selectors.DefaultSelector,
        "queues": SimpleQueue,
    }
    names = [name for name, part in parts.items() if part.__module__.startswith(_GREEN)]
    return _ALL if len(names) == len(parts) else f"the {' and '.join(names)}" if names else ""


_AT_IMPORT: Final = (_thread.start_new_thread, selectors.DefaultSelector, queue.SimpleQueue)


def check_patches() -> None:
    """Raises LocalProtocolError if gevent or eventlet patched threads after aqueduct's import.

    Locks and queues that were made before, here and in asyncio, would block all greenlets.
    """
    now = (_thread.start_new_thread, selectors.DefaultSelector, queue.SimpleQueue)
    if now == _AT_IMPORT:
        return
    parts = zip(now, _AT_IMPORT, ("threads", "selectors", "queues"), strict=True)
    late = [
        name
        for part, before, name in parts
        if part is not before and part.__module__.startswith(_GREEN)
    ]
    if late:
        raise LocalProtocolError(
            f"gevent.monkey or eventlet patched the {' and '.join(late)} of this process after "
            "aqueduct was imported; patch at the beginning of the program, before it imports "
            "anything else, or leave these as they are: "
            "gevent.monkey.patch_all(thread=False, select=False, queue=False)"
        )


class ThreadPool:
    """Threads on call: ``start`` gives a piece of work one at once, and no work ever queues.

    A thread that is done waits for the next piece of work; one that has waited for 30 s, or finds
    ``idle_limit`` others that wait, ends. How many work at once is the caller's to bound.
    """

    def __init__(self, name: str = "aqueduct", *, idle_limit: int = 32) -> None:
        """Raises LocalProtocolError if threads cannot work, as half of them was patched."""
        check_patches()
        if green() not in ("", _ALL):
            raise LocalProtocolError(
                f"{green()} of this process are those of gevent.monkey or eventlet, and others "
                f"are not, so handlers could not run; let it patch all of {_ALL}, or none"
            )
        self._name = name
        self._idle_limit = idle_limit
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False
        self.threads = 0
        """Threads alive, at work or idle."""

    def start(self, work: Work) -> None:
        """Runs ``work()`` in a thread of its own. It should raise nothing; what it does is logged.

        Raises RuntimeError when the system has no thread to give, and LocalProtocolError after
        a late patch (``check_patches``).
        """
        check_patches()
        with self._lock:
            worker = self._idle.pop() if self._idle else None
            if worker is None:
                self.threads += 1
        if worker is None:
            worker = _Worker(self, f"{self._name}-{next(_names)}")
            try:
                worker.thread.start()
            except BaseException:
                with self._lock:
                    self.threads -= 1
                raise
        worker.inbox.put(work)

    def close(self) -> None:
        """Idle threads end now, the others when their work does."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self.threads -= len(idle)
        for worker in idle:
            worker.inbox.put(None)

    # What workers ask

    def wait_for_work(self, worker: _Worker) -> bool:
        """Whether the worker is to wait for work; False: it ends."""
        with self._lock:
            if self._closed or len(self._idle) >= self._idle_limit:
                self.threads -= 1
                return False
            self._idle.append(worker)
            return True

    def leave(self, worker: _Worker) -> bool:
        """False: the worker was called up in this very moment, so work is on its way."""
        with self._lock:
            if worker not in self._idle:
                return False
            self._idle.remove(worker)
            self.threads -= 1
            return True


class _Worker:
    def __init__(self, pool: ThreadPool, name: str) -> None:
        self.inbox: SimpleQueue[Work | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._pool = pool

    def _run(self) -> None:
        work: Work | None = self.inbox.get()
        while work is not None:
            try:
                work()
            except BaseException:
                log.exception("work in thread %s raised", threading.current_thread().name)
            work = None  # it may hold batches
            if not self._pool.wait_for_work(self):
                return
            try:
                work = self.inbox.get(timeout=_IDLE_SECONDS)
            except Empty:
                if self._pool.leave(self):
                    return
                work = self.inbox.get()


class _Crew:
    """A few threads, at most ``size``, that do the work given to them, in that order."""

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self._name = name
        self._pool: ThreadPool | None = None
        self._lock = threading.Lock()
        self._waiting: deque[Work] = deque()
        self._active = 0

    def start(self, work: Work) -> None:
        """Has a thread do ``work``. If the system has no thread to give, the caller does it.

        Raises LocalProtocolError as a ``ThreadPool`` does.
        """
        check_patches()
        with self._lock:
            pool = self._threads()
            self._waiting.append(work)
            if self._active >= self.size:
                return
            self._active += 1
        try:
            pool.start(self._work)
        except RuntimeError:
            self._work()

    def start_alone(self, work: Work) -> None:
        """Has a thread of its own do ``work``, which may block: it counts for nothing here.

        Raises RuntimeError when the system has no thread to give, and as ``start`` does.
        """
        check_patches()
        with self._lock:
            pool = self._threads()
        pool.start(work)

    def _threads(self) -> ThreadPool:
        if self._pool is None:
            self._pool = ThreadPool(self._name)
        return self._pool

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._active -= 1
                    return
                work = self._waiting.popleft()
            work()
            del work  # it may hold batches


_crew = _Crew("aqueduct-work", 1)


def _new_crew() -> None:
    global _crew
    _crew = _Crew("aqueduct-work", _crew.size)


def provide(count: int) -> None:
    """From now on up to ``count`` threads of the process do jobs at the same time, or more.

    The largest count that a client or service has asked for holds (Calls.work_threads).
    """
    _crew.size = max(_crew.size, count)


def at_work() -> int:
    """How many threads of the process do jobs at the same time, at most."""
    return _crew.size


if hasattr(os, "register_at_fork"):  # the threads stay behind
    os.register_at_fork(after_in_child=_new_crew)


class Job(Generic[T]):
    """Work of one message that is too long for an event loop, done in a thread.

    It is made on the loop, and begins at once unless all threads are at work. If a task is
    cancelled while it waits, the job goes on, and may be waited for again.
    """

    __slots__ = ("_error", "_loop", "_on_done", "_value", "_waiter", "_work", "done")

    def __init__(
        self,
        work: Callable[[], T],
        on_done: Callable[[], object] | None = None,
        *,
        blocks: bool = False,
    ) -> None:
        """``on_done`` is called on the loop, when the work is done.

        ``blocks``: it may wait for something else, so it gets a thread of its own.
        """
        self.done = False
        """Whether the work is done, or the job was forgotten. It is set on the loop."""
        self._work: Callable[[], T] | None = work
        self._on_done = on_done
        self._value: T | None = None
        self._error: BaseException | None = None
        self._waiter: Waiter | None = None
        self._loop = asyncio.get_running_loop()
        if blocks:
            _crew.start_alone(self._run)
        else:
            _crew.start(self._run)

    async def wait(self) -> T:
        """Returns what the work returns, or raises what it raises. For one task at a time."""
        await self.settled()
        return self.result()

    async def settled(self) -> None:
        """Returns once it is ``done``. For one task at a time."""
        while not self.done:
            self._waiter = Waiter(self._loop)
            await self._waiter

    def result(self) -> T:
        """What the work returned. Raises what it raised. Call it once the job is ``done``."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def forget(self) -> None:
        """The result is not needed any more: work that has not begun never begins.

        Call it on the loop. A task in ``settled`` goes on, and must not ask for a result.
        """
        self._work = self._on_done = None
        self._wake()

    def _run(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            self._value = work()
        except BaseException as error:  # noqa: BLE001  the waiting task gets it
            self._error = error
        del work
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        self._wake()
        if self._on_done is not None:
            self._on_done()

    def _wake(self) -> None:
        self.done = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.step_soon()


async def apart(work: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Calls ``work(*arguments, **named)`` in a thread. Returns or raises what it does.

    If the task is cancelled, work that has begun goes on, and its result is dropped.
    """
    job = Job(partial(work, *arguments, **named))
    try:
        return await job.wait()
    finally:
        job.forget()
