"""What a child of ``os.fork`` must not share with its parent: sockets, event loops and signals.

A child inherits every descriptor. As long as it lives, the kernel keeps the parent's connections
open and its ports taken, although nobody serves them. It shares the kernel's list of what the
parent's event loop waits for, and would change it. And a signal to the child is written to the
wake-up socket of the parent's loop, which takes it for its own.

So a forked child gives all of that up before it runs anything else. Its descriptors stay open and
lead to ``/dev/null``. So objects that own a descriptor can still close it. A process that is
started by exec (subprocess, posix_spawn, multiprocessing's spawn and forkserver) inherits none of
this.

A child that was forked in a handler, and comes to the handler's end, ends there: nobody waits for
its answer, and what the library would wait for does not exist in it. On the event loop it ends as
well where its handler waits for something: the loop is the parent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from typing import Any, Final, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet

from aqueduct.escaping import logger_of

__all__ = [
    "AsyncSteps",
    "Inherited",
    "call",
    "iterate",
    "own",
    "own_loop",
    "own_socket",
    "sever",
    "sever_loop",
    "steps",
]

log = logger_of(__name__)


class Inherited(Protocol):
    """An object that belongs to the parent, although a forked child inherits it."""

    def left_behind(self) -> None:
        """Called in the child, before anything else runs there.

        It must change nothing outside of this process, and step no task.
        """


_sockets: Final[WeakSet[socket.socket]] = WeakSet()
_loops: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, bool]] = WeakKeyDictionary()
"""For each loop whether its thread is the main thread, which receives the signals."""
_inherited: Final[WeakSet[Any]] = WeakSet()
_FILES: Final = ("_selector", "_ssock", "_csock")
"""Attributes of asyncio's own loops that hold descriptors."""
_AWAITED: Final = (
    "a child that was forked in a handler awaits something on the event loop, which is the "
    "parent's; end the child before that, by os._exit"
)
_masks: Final = threading.local()
_generation = 0
"""How many forks this process is away from the one that has imported this module."""


def own_socket(sock: socket.socket) -> None:
    """A forked child does not keep this socket open."""
    _sockets.add(sock)


def own_loop(loop: asyncio.AbstractEventLoop) -> None:
    """A forked child leaves this loop alone if it runs at that time. Call it where the loop runs.

    Its signal handlers have no effect in the child either.
    """
    if loop not in _loops:
        _loops[loop] = threading.current_thread() is threading.main_thread()


def own(inherited: Inherited) -> None:
    """``left_behind`` is called in a forked child. Only a weak reference is kept."""
    _inherited.add(inherited)


def sever(descriptors: Iterable[int]) -> None:
    """Has these descriptors lead to ``/dev/null``. The files that they led to stay as they are."""
    wanted = [descriptor for descriptor in descriptors if descriptor >= 0]
    if not wanted:
        return
    try:
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # there is no descriptor left: take one of these
        os.close(wanted[0])
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for descriptor in wanted:
            if descriptor != nowhere:
                os.dup2(nowhere, descriptor, inheritable=False)
    finally:
        if nowhere not in wanted:
            os.close(nowhere)


def sever_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Separates a child's loop from the parent's: its selector and its wake-up sockets.

    It has no effect on loops that are not asyncio's own: their attributes are not known.
    """
    files: Iterable[Any] = (getattr(loop, name, None) for name in _FILES)
    sever([file.fileno() for file in files if hasattr(file, "fileno")])


def call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What ``function(*arguments)`` returns. A child that is forked in it ends where it ends."""
    before = _generation
    try:
        result = function(*arguments)
    except BaseException as error:
        if _generation != before:
            _end(error)
        raise
    if _generation != before:
        _end(None)
    return result


def iterate(values: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """What a generator yields. A child that is forked in it ends at its next value, or its end."""
    try:
        while True:
            yield call(next, (values,))  # which is not kept here while the caller has it
    except StopIteration:
        pass
    finally:
        call(values.close, ())


@types.coroutine
def steps(awaitable: Awaitable[Any]) -> Generator[Any, Any, Any]:
    """What ``await awaitable`` returns. A child that is forked in it ends where its step ends.

    A child that awaits something ends with status 1, and says so on standard error.
    """
    before = _generation
    try:
        inner: Any = awaitable.__await__()
    except AttributeError:
        name = type(awaitable).__name__
        raise TypeError(f"object {name} can't be used in 'await' expression") from None
    proceed: Callable[[Any], Any] = inner.send
    value: Any = None
    while True:
        try:
            yielded = proceed(value)
        except StopIteration as stop:
            if _generation != before:
                _end(None)
            return stop.value
        except BaseException as error:
            if _generation != before:
                _end(None if isinstance(error, StopAsyncIteration) else error)
            raise
        finally:
            value = None  # an error's traceback has this frame
        if _generation != before:
            _end(SystemExit(_AWAITED))
        try:
            value = yield yielded
            proceed = inner.send
        except GeneratorExit:
            inner.close()
            raise
        except BaseException as error:  # noqa: BLE001  the handler decides about it
            value = error
            proceed = inner.throw
        del yielded


class AsyncSteps:
    """An async generator of which each value comes by ``steps``."""

    __slots__ = ("_values",)

    def __init__(self, values: AsyncGenerator[Any, None]) -> None:
        self._values = values

    def __aiter__(self) -> AsyncSteps:
        return self

    def __anext__(self) -> Awaitable[Any]:
        return steps(self._values.__anext__())

    def aclose(self) -> Awaitable[None]:
        """Ends the generator."""
        return steps(self._values.aclose())


def _end(error: BaseException | None) -> NoReturn:
    """Ends a forked child as Python ends a process whose program has come so far."""
    status = 1
    try:
        if error is None or isinstance(error, StopIteration):
            status = 0
        elif isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            status = error.code or 0
        elif isinstance(error, SystemExit):
            sys.stderr.write(f"{error.code}\n")
        else:
            traceback.print_exception(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
                stream.flush()
    finally:
        os._exit(status & 0xFF)


# In the parent


def _before() -> None:
    # A signal that comes to the child before it has handlers of its own would go to the parent.
    # It is kept back until then.
    loops = [loop for reference in _loops.keyrefs() if (loop := reference()) is not None]
    if any(_loops.get(loop) and loop.is_running() for loop in loops):
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _after() -> None:
    mask = _masks.__dict__.pop("before", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# In the child


def _after_in_child() -> None:
    global _generation
    _generation += 1
    try:
        _let_go()
    except Exception:
        log.exception("a forked process could not let go of what belongs to its parent")
    finally:
        _after()


def _let_go() -> None:
    running = [loop for loop in _loops if loop.is_running()]
    sever([sock.fileno() for sock in list(_sockets)])
    for loop in running:
        sever_loop(loop)
    signals_are_loops = any(_loops[loop] for loop in running)
    inherited = list(_inherited)
    _sockets.clear()
    _loops.clear()
    _inherited.clear()
    for each in inherited:
        try:
            each.left_behind()
        except Exception:
            log.exception("a forked process could not let go of %s", type(each).__name__)
    if signals_are_loops:
        _reset_signals()


def _reset_signals() -> None:
    """Removes asyncio's signal handlers, which have no effect without their loop."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        function = getattr(handler, "func", handler)
        if (getattr(function, "__module__", None) or "").startswith("asyncio."):
            interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if interrupt else signal.SIG_DFL)


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
