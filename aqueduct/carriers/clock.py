"""The clock of an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["clock_of"]


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """``loop.time``, in seconds: what asyncio's own loops mean by it, without a step of Python.

    A small call asks for the time a dozen times.
    """
    if type(loop).time is asyncio.BaseEventLoop.time:
        return time.monotonic
    return loop.time
