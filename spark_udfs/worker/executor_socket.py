"""The socket between a Python worker and its executor: whether Spark still listens, and has more.

An executor that wants no more of a task (``limit``, a cancelled job, the end of its own process)
tells its Python worker nothing; it closes their socket, and a worker learns of that when it reads
or writes the next time. One that waits for a slow service does neither. So a thread looks at the
socket as long as the process lives, which costs nothing while nothing happens.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from aqueduct.escaping import logger_of

__all__ = ["executor_socket", "input_look", "watch"]

log = logger_of(__name__)

_HUNG_UP: Final = getattr(select, "POLLRDHUP", None)
"""What the kernel calls it; Linux alone says it without a read."""
_PLACES: Final = tuple(os.path.join("pyspark", name) for name in ("worker.py", "daemon.py"))


def executor_socket() -> int | None:
    """The file descriptor of the executor's end; None outside a Python worker of Spark's.

    PySpark keeps it in the variables of its main function alone, in the main thread.
    """
    for frame in sys._current_frames().values():
        found = _input_of(frame)
        if found is not None:
            return int(found.fileno())
    return None


def input_look() -> Callable[[], bool] | None:
    """Something to call for whether Spark has sent more input, or its end, to this task.

    It never waits. None outside a task, or where the input is read in some other way. To be called
    in the task's own thread, as is what it returns.
    """
    found = _input_of(sys._getframe())
    if not isinstance(found, io.BufferedReader):
        return None

    def look() -> bool:
        descriptor = found.fileno()
        os.set_blocking(descriptor, False)  # of the socket, which this thread alone uses
        try:
            return bool(found.peek(1))
        finally:
            os.set_blocking(descriptor, True)

    return look


def _input_of(frame: FrameType | None) -> Any:
    while frame is not None:
        if frame.f_code.co_filename.endswith(_PLACES):
            try:
                found = frame.f_locals["infile"]
                found.fileno()
            except (KeyError, AttributeError, OSError, ValueError):
                pass  # some other function of theirs
            else:
                return found
        frame = frame.f_back
    return None


def watch(descriptor: int, gone: Callable[[], None]) -> bool:
    """Calls ``gone()`` once, from a thread, when the other end of the socket is closed.

    Returns whether that can be known on this system.
    """
    if _HUNG_UP is None:
        return False
    own = os.dup(descriptor)  # each task has a descriptor of its own, and closes it
    threading.Thread(target=_watch, args=(own, gone), name="aqueduct-vigil", daemon=True).start()
    return True


def _watch(descriptor: int, gone: Callable[[], None]) -> None:
    assert _HUNG_UP is not None
    poller = select.poll()
    poller.register(descriptor, _HUNG_UP)
    poller.poll()  # ends with the process at the latest
    os.close(descriptor)
    log.debug("the executor has closed its socket to process %d", os.getpid())
    gone()
