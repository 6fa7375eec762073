"""A target with faults on purpose: the fuzzer has to find both, or it would find no others."""

from __future__ import annotations

import importlib

from aqueduct.errors import SequenceError

__all__ = ["target"]

_native = importlib.import_module("fuzz_canary")  # ci/fuzz.sh compiles canary.c


def target(data: bytes) -> None:
    """One input: see ``canary.c``; and an exception of ours that nobody allowed."""
    _native.look(data)
    if data == b"raise it!":  # longer than the inputs that look for the overflow
        raise SequenceError("this one is not on any list")
