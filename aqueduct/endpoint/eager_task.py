"""Coroutines that begin at once, in the caller's turn of the loop; what waits goes on in a task.

A task of its own would cost a call that never waits another turn of the loop. So such a call is
stepped while a spare task, which waits to be given work, stands for it as the current one. If the
coroutine waits, the spare task takes it over where it stands, and cancelling it means what it
always does.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, Protocol

from aqueduct._speedups.loop.waiter import nests

__all__ = ["EagerTaskFactory", "Work"]


class Work(Protocol):
    """Something to be started."""

    task: asyncio.Task[None]
    """Set before ``run`` is stepped."""

    def run(self) -> Coroutine[Any, Any, None]:
        """What it does."""

    def ended(self) -> None:
        """``run`` is over, or never began because its task was cancelled."""


class EagerTaskFactory:
    """Starts work on one event loop."""

    __slots__ = ("_closed", "_loop", "_spare")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._closed = False
        self._loop = loop
        self._spare: _Spare | None = None

    def start(self, work: Work) -> None:
        """Steps it now as far as it goes without waiting.

        Within a step of some task, where no other can be the current one, it begins a turn later.
        """
        loop, spare = self._loop, self._spare
        if not self._closed and (spare is None or spare.task.done() or spare.task.cancelling()):
            spare = self._spare = _Spare(loop)
        in_task = asyncio.current_task(loop) is not None or nests(loop)
        if spare is None or not spare.ready or in_task:
            work.task = loop.create_task(work.run())
            work.task.add_done_callback(_ended(work))
            return
        self._spare = None  # what starts meanwhile needs another
        work.task = spare.task
        coroutine = work.run()
        context = copy_context()
        yielded, over = None, True
        asyncio._enter_task(loop, spare.task)
        try:
            yielded = context.run(coroutine.send, None)
            over = False
        except (StopIteration, asyncio.CancelledError):
            pass  # a task tells nobody either that it was cancelled
        finally:
            asyncio._leave_task(loop, spare.task)
            if over:
                self._keep(spare)
                work.ended()
        if over:
            return
        spare.task.add_done_callback(_ended(work))
        spare.take_over(coroutine, context, yielded)
        if self._spare is None and not self._closed:
            # Made now, it is ready when the next work comes.
            self._spare = _Spare(loop)

    def close(self) -> None:
        """The spare task ends. What starts later begins a turn later."""
        self._closed = True
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.task.cancel()

    def _keep(self, spare: _Spare) -> None:
        """It waits for the next work, unless another does or none comes."""
        if self._closed or self._spare is not None:
            spare.task.cancel()
        else:
            self._spare = spare


def _ended(work: Work) -> Callable[[asyncio.Task[None]], None]:
    return lambda task: work.ended()


class _Spare:
    """A task that waits to be given a coroutine that has begun."""

    __slots__ = ("_context", "_coroutine", "_given", "_yielded", "ready", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ready = False
        """Whether it waits: before its first step, a cancel would not reach what it is given."""
        self._given: asyncio.Future[None] = loop.create_future()
        self._coroutine: Coroutine[Any, Any, None] | None = None
        self._context: Context
        self._yielded: Any = None
        self.task = loop.create_task(self._run())

    def take_over(
        self, coroutine: Coroutine[Any, Any, None], context: Context, yielded: Any
    ) -> None:
        """``coroutine`` has begun in ``context`` and waits for what it ``yielded``."""
        self._coroutine, self._context, self._yielded = coroutine, context, yielded
        if not self._given.done():
            self._given.set_result(None)

    async def _run(self) -> None:
        await self._wait()

    @types.coroutine
    def _wait(self) -> Generator[Any, Any, None]:
        self.ready = True
        cancelled: BaseException | None = None
        thrown: BaseException | None
        try:
            yield from self._given
        except asyncio.CancelledError as error:
            cancelled = error
        coroutine = self._coroutine
        if coroutine is None:
            if cancelled is not None:
                raise cancelled
            return
        run, yielded = self._context.run, self._yielded
        self._coroutine = self._yielded = None
        # A cancel that came before this first step goes to what it waits for, as a task's does.
        if cancelled is not None and asyncio.isfuture(yielded) and yielded.cancel():
            cancelled = None
        try:
            while True:
                if cancelled is None:
                    try:
                        value = yield yielded
                    except BaseException as error:  # noqa: BLE001  the coroutine is to see it
                        cancelled = error
                    else:
                        yielded = run(coroutine.send, value)
                        continue
                thrown, cancelled = cancelled, None
                yielded = run(coroutine.throw, thrown)
        except StopIteration:
            return
        finally:
            thrown = None  # whose traceback has this frame: no garbage for a call that is cancelled
