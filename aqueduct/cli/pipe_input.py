"""``PipeInput``: a pipe, a terminal or a socket, whose reads end when a signal comes."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import threading
import weakref
from typing import Any

__all__ = ["PipeInput"]


class PipeInput(io.RawIOBase):
    """Reads what may be silent for pyarrow, which waits for it outside of Python.

    A signal is handled once Python runs again. So a read fails when one comes: the handler of the
    signal runs next, and raises. ``interrupt`` has reads fail, too. Without it a process could not
    end while a thread of pyarrow waits for input.
    """

    def __init__(self, file: io.FileIO | None, descriptor: int = 0) -> None:
        """``file``: is closed once nobody reads any more. None: ``descriptor`` stays open."""
        self._fd = descriptor if file is None else file.fileno()
        self._ended, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self.gone = threading.Event()
        """Set once nobody holds this file any more, no thread of pyarrow either."""
        # Not before the last thread has left `readinto`: it holds a reference.
        weakref.finalize(self, _close, file, self.gone, self._ended, self._wake)
        self._before: int | None = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def readable(self) -> bool:
        """As that of a file."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As that of a file. Raises OSError after ``interrupt`` or a signal.

        It does not return 0 then: nobody is to take the rows so far for all of them.
        """
        try:
            return _read(self._fd, self._ended, buffer)
        finally:
            del self, buffer  # the traceback of an error would hold them

    def interrupt(self) -> None:
        """Has all reads fail, those to come too; signals are handled as before this was made."""
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
            self._before = None
        with contextlib.suppress(BlockingIOError):  # it has been told often enough
            os.write(self._wake, b"\0")


def _read(fd: int, ended: int, buffer: Any) -> int:
    waiter = select.poll()  # which takes descriptors of any number
    for each in (fd, ended):
        waiter.register(each, select.POLLIN)
    ready = [each for each, _ in waiter.poll()]
    if ended in ready:
        raise OSError(errno.ECANCELED, "the command ends")
    return os.readv(fd, [buffer])


def _close(file: io.FileIO | None, gone: threading.Event, *descriptors: int) -> None:
    if file is not None:
        file.close()
    for fd in descriptors:
        os.close(fd)
    gone.set()
