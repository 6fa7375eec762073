"""What a service does once in each process: before its first call, and after its last.

::

    @service.on_start
    def load() -> None:
        service.state.model = read_model("model.bin")

    @service.on_stop
    def free() -> None:
        service.state.model.close()

Functions may be plain or ``async``, and may take the service as their one argument. Plain ones run
in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from aqueduct import forks
from aqueduct.config import Timing
from aqueduct.errors import ConfigError, LocalProtocolError, StartFailed
from aqueduct.escaping import logger_of
from aqueduct.rpc.threads import ThreadPool
from aqueduct.service.handlers import HandlerShape, shape_of, takes_last
from aqueduct.service.signals import LEAST

__all__ = ["Lifetime", "unless"]

log = logger_of(__name__)

T = TypeVar("T")

_SHARE: Final = 1 / 4
"""The part of a drain that ``on_stop`` functions have, at most."""


class _Step(NamedTuple):
    """One function of a start or a stop."""

    what: str
    """``on_start`` or ``on_stop``, and its name."""
    function: Callable[..., Any]
    takes_service: bool
    after: int
    """How many functions of ``on_start`` there were when it was registered."""


class Lifetime:
    """The ``on_start`` and ``on_stop`` functions of a service, run once in each process.

    Servings of one process share them: the first to begin starts, the last to end stops.
    """

    def __init__(self, name: str, timing: Timing, service: object) -> None:
        """``service`` of this ``name`` is the argument of the functions that take one."""
        self._name = name
        self.timing = timing
        self._service = service
        self._starts: list[_Step] = []
        self._stops: list[_Step] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._servings = 0
        """Those that have begun and not ended."""
        self._changing: Future[None] | None = None
        """Done when the start or stop is that is under way; None: there is none."""
        forks.own(self)

    def left_behind(self) -> None:
        """In a forked child: its servings are its own, and none has begun."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._servings = 0
        self._changing = None

    def on_start(self, function: Callable[..., Any]) -> None:
        """Registers a function. Raises ConfigError, and LocalProtocolError while it is served."""
        self._starts.append(self._step("on_start", function))

    def on_stop(self, function: Callable[..., Any]) -> None:
        """The same for the end."""
        self._stops.append(self._step("on_stop", function))

    def kept(self, drain: float) -> float:
        """Of the seconds of a drain, those that are kept for ``on_stop`` functions."""
        if not self._stops:
            return 0.0
        return min(self.timing.stop_timeout, max(drain * _SHARE, LEAST))

    async def begin(self) -> None:
        """A serving begins. Raises StartFailed."""
        while True:
            changing, first = self._enter()
            if changing is None:
                return
            if first:
                break
            await asyncio.wrap_future(changing)  # it is running, so that nobody can cancel it
        try:
            await self._start()
        except BaseException:
            with self._lock:
                self._servings -= 1
            raise
        finally:
            self._changed(changing)

    async def end(self, seconds: float) -> None:
        """A serving has ended. The last one runs ``on_stop`` functions, within ``seconds``."""
        with self._lock:
            if self._pid != os.getpid():
                return
            self._servings -= 1
            if self._servings or not self._stops:
                return
            mine = self._changing = _begun()
        try:
            await self._stop(self._stops, seconds)
        finally:
            self._changed(mine)

    # Within

    def _step(self, what: str, function: Callable[..., Any]) -> _Step:
        where = f"{what} of the service {self._name!r}"
        if shape_of(function) in (HandlerShape.GENERATOR, HandlerShape.ASYNC_GENERATOR):
            raise ConfigError(
                f"{where} yields; write two functions, one for on_start and one for on_stop"
            )
        takes = takes_last(f"{where}: it", function, "(service)", last="service")
        with self._lock:
            if self._servings:
                raise LocalProtocolError(
                    f"{where} came while the service is served, and would not run; register it "
                    "before serving or run"
                )
        name = getattr(function, "__name__", None) or type(function).__name__
        return _Step(f"{what} {name!r}", function, takes, len(self._starts))

    def _enter(self) -> tuple[Future[None] | None, bool]:
        """A start or stop that is under way; and whether it is this serving's own start.

        Without one, or if it is its own, the serving is counted.
        """
        with self._lock:
            if self._changing is not None:
                return self._changing, False
            self._servings += 1
            if self._servings == 1 and self._starts:
                self._changing = _begun()
            return self._changing, True

    def _changed(self, mine: Future[None]) -> None:
        with self._lock:
            if self._changing is mine:
                self._changing = None
        mine.set_result(None)

    async def _start(self) -> None:
        seconds = self.timing.start_timeout
        where = f"of the service {self._name!r}"
        done = 0
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                for step in self._starts:
                    await self._run(step)
                    done += 1
        except Exception as error:
            text = f"{self._starts[done].what} {where} "
            if isinstance(error, TimeoutError) and limit.expired():
                text += f"was not done within {seconds:g} s of the start (Timing.start_timeout)"
            else:
                text += f"raised {type(error).__name__}" + (f": {error}" if str(error) else "")
            raise StartFailed(text) from error
        finally:
            if done < len(self._starts):
                stops = [step for step in self._stops if step.after <= done and done]
                await self._stop(stops, self.timing.stop_timeout)

    async def _stop(self, steps: list[_Step], seconds: float) -> None:
        """Runs all of them, the last one first, whatever befalls the others.

        Half of the time is divided evenly, so that one that hangs leaves some to the others.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        share = seconds / 2 / max(len(steps), 1)
        cancelled: BaseException | None = None
        for number, step in reversed(list(enumerate(steps))):
            begun = loop.time()
            limit = asyncio.timeout_at(end - share * number)
            try:
                async with limit:
                    await self._run(step)
            except asyncio.CancelledError as error:
                cancelled = error
            except Exception as error:
                where = f"of the service {self._name!r}"
                if isinstance(error, TimeoutError) and limit.expired():
                    took = loop.time() - begun
                    text = "%s %s was not done within %.2g s (Timing.stop_timeout)"
                    log.error(text, step.what, where, took)
                else:
                    log.exception("%s %s raised", step.what, where)
        if cancelled is not None:
            raise cancelled

    async def _run(self, step: _Step) -> None:
        arguments = (self._service,) if step.takes_service else ()
        if shape_of(step.function) is HandlerShape.COROUTINE:
            result = step.function(*arguments)
        else:
            result = await _in_a_thread(step, arguments)
        if inspect.isawaitable(result):
            await result


async def _in_a_thread(step: _Step, arguments: tuple[Any, ...]) -> Any:
    """Calls a plain function in a thread. If the task is cancelled, the thread goes on."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def work() -> None:
        result: Any = None
        failed: BaseException | None = None
        try:
            result = step.function(*arguments)
        except StopIteration as error:  # which no future takes
            failed = RuntimeError(f"{step.what} raised StopIteration")
            failed.__cause__ = error
        except BaseException as error:  # noqa: BLE001  the waiting task gets it
            failed = error
        with suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(settle, result, failed)

    pool = ThreadPool("aqueduct-lifetime")
    pool.start(work)
    pool.close()
    return await answer


def _begun() -> Future[None]:
    """A future that callers that wait for it cannot cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` returns; None if ``event`` is set before: then it is cancelled."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
    return None if working.cancelled() and event.is_set() else working.result()
