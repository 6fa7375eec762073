"""Tests of what must be freed without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """A block without the garbage collector: what a cycle keeps is not freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
