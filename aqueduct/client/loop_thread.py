"""An event loop in a thread of its own, for clients that are called from threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar, cast
from weakref import WeakValueDictionary

from aqueduct import forks
from aqueduct.address import Address
from aqueduct.errors import AqueductError, LocalProtocolError
from aqueduct.rpc.threads import check_patches, green

__all__ = ["LoopThread", "ServingThread", "thread_for"]

T = TypeVar("T")

_ENDING: Final = (
    "the interpreter is ending, and with it the threads of clients: close clients, and make calls, "
    "before the program ends"
)


@dataclass(slots=True)
class _Outcome(Generic[T]):
    """How a coroutine has ended."""

    result: T | None = None
    error: BaseException | None = None


class LoopThread:
    """An event loop in a daemon thread, for code that has none.

    A fork leaves the thread behind: in the child every method raises LocalProtocolError.
    """

    def __init__(self, name: str = "aqueduct-loop") -> None:
        """Raises LocalProtocolError where there are no threads to be had."""
        if sys.is_finalizing():
            raise LocalProtocolError(_ENDING)
        check_patches()
        if patched := green():
            raise LocalProtocolError(
                f"{patched} of this process are those of gevent.monkey or eventlet, and a "
                "SyncClient needs a real thread for its event loop; leave them as they are: "
                "gevent.monkey.patch_all(thread=False, select=False, queue=False)"
            )
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._ended = False
        self.check_caller: Callable[[], None] = lambda: None
        """Raises if the calling thread must not wait."""
        self._waiting: set[SimpleQueue[Any]] = set()
        """What ``wait`` waits for, in all threads."""
        forks.own(self)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.loop.close()
            raise LocalProtocolError(f"a client needs a thread, and has none: {error}") from error
        self._started.wait()

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the loop, as ``check`` would say."""
        return self._ended

    @property
    def alive(self) -> bool:
        """Whether the loop still runs, in this very process."""
        return self.pid == os.getpid() and not self.loop.is_closed()

    def check(self) -> None:
        """Raises LocalProtocolError after a fork, a late patch, or when the loop has ended."""
        check_patches()
        self.check_process()
        if self._ended or not self.alive:
            raise LocalProtocolError("the client is closed: its event loop has ended")
        if sys.is_finalizing():
            raise LocalProtocolError(_ENDING)
        if asyncio._get_running_loop() is self.loop:
            raise LocalProtocolError(
                "a sync client was called on its own event loop, which would wait for itself"
            )
        self.check_caller()

    def check_process(self) -> None:
        """Raises LocalProtocolError in a forked child."""
        if self.pid != os.getpid():
            raise LocalProtocolError(
                f"this client was made in process {self.pid} and its event loop did not survive "
                f"the fork into process {os.getpid()}; make a client after the fork"
            )

    def call(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Schedules ``callback(*arguments)`` on the loop."""
        self.loop.call_soon_threadsafe(callback, *arguments)

    def wait(
        self,
        ended: SimpleQueue[T | None],
        begin: Callable[[], object],
        *,
        timeout: float | None = None,
    ) -> T | None:
        """Has the loop call ``begin``, and waits for what is put into ``ended`` then.

        None: the loop has ended before. Raises TimeoutError. To be called after ``check``.
        """
        self._waiting.add(ended)
        try:
            self.loop.call_soon_threadsafe(begin)
            if self.loop.is_closed():
                return None
            return ended.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None
        except RuntimeError:
            if self.loop.is_closed():
                return None
            raise
        finally:
            self._waiting.discard(ended)

    def run(self, work: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T:
        """Runs a coroutine on the loop and waits for its result.

        An interrupt (and the timeout, as TimeoutError) cancels it. Raises AqueductError as
        ``check`` does, and what the coroutine raises.
        """
        try:
            self.check()
        except AqueductError:
            work.close()
            raise
        ended: SimpleQueue[_Outcome[T] | None] = SimpleQueue()
        begun: list[asyncio.Task[None]] = []

        def begin() -> None:
            begun.append(self.loop.create_task(_told(work, ended)))

        try:
            found = self.wait(ended, begin, timeout=timeout)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its tasks
                self.call(lambda: [each.cancel() for each in begun])
            if self.loop.is_closed() and not begun:
                work.close()
            raise
        if found is None:  # the loop ended before it began
            work.close()
        elif found.error is None:
            return cast("T", found.result)
        elif not isinstance(found.error, asyncio.CancelledError):
            raise found.error
        self.check()  # says so if it is the end of the loop that cancelled it
        raise CancelledError

    def left_behind(self) -> None:
        """In a forked child: the loop is the parent's, and its thread stayed there."""
        self._ended = True
        forks.sever_loop(self.loop)

    def stop(self) -> None:
        """Ends the loop and its thread; what still runs on it is cancelled."""
        ended, self._ended = self._ended, True
        if self.alive and not sys.is_finalizing():  # when no thread but this one runs any more
            if not ended:  # a second stop would cut short how the loop cleans up
                with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                    self.call(self.loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=10)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._started.set)
        try:
            self.loop.run_forever()
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=5))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        for ended in tuple(self._waiting):  # what came too late to be run
            ended.put(None)


class ServingThread(LoopThread):
    """An event loop in a thread of its own, which serves at ``memory://NAME``.

    Sync clients of that address live on it, for memory is not shared by two loops. They leave it
    running: ``end`` ends it.
    """

    def serves(self, name: str) -> None:
        """Sync clients of ``memory://NAME`` are to live here, from now on."""
        _serving[name] = self

    def stop(self) -> None:
        """A client is closed; the loop goes on."""

    def end(self) -> None:
        """Ends the loop and its thread."""
        super().stop()


_serving: Final[WeakValueDictionary[str, ServingThread]] = WeakValueDictionary()
"""By the names of what they serve."""


def thread_for(address: Address) -> LoopThread:
    """The thread for a sync client of ``address``: a new one, unless one serves it in memory."""
    found = _serving.get(address.host) if address.scheme == "memory" else None
    if found is None or found.ended or not found.alive:
        return LoopThread("aqueduct-sync-client")
    return found


async def _told(work: Coroutine[Any, Any, T], ended: SimpleQueue[_Outcome[T] | None]) -> None:
    """Runs ``work``, and tells the thread that waits in the same turn of the loop."""
    try:
        ended.put(_Outcome(await work))
    except BaseException as error:
        ended.put(_Outcome(error=error))
        if not isinstance(error, Exception):
            raise
