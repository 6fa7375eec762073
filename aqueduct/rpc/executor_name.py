"""``ExecutorName``: which Spark executor makes the calls of a connection, for those who look on.

It travels once, as a header of the connection. A service shows it and decides nothing by it: what a
client says of itself may be untrue.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from aqueduct.rpc.keys import Headers

__all__ = ["EXECUTOR_HEADER", "ExecutorName", "executor_value"]

EXECUTOR_HEADER: Final = b"aqueduct-executor"
"""The key among the headers of a connection."""

_VERSION: Final = 1
_MOST: Final = 2048
"""Bytes of a value; what is longer is left alone."""
_CLIPPED: Final = 60
"""Characters of each text in it; more are cut off."""


@dataclass(frozen=True, slots=True)
class ExecutorName:
    """One executor of one application. An empty text is what is not known."""

    application: str
    """Spark's id of the application."""
    name: str
    """The name of the application."""
    host: str
    """The name of the executor's machine."""
    executor: str
    """What tells executors of one machine apart."""

    def encode(self) -> bytes:
        """The value of the header."""
        texts = {key: text[:_CLIPPED] for key, text in asdict(self).items()}
        return json.dumps({"version": _VERSION, **texts}).encode()

    @classmethod
    def decode(cls, value: bytes) -> ExecutorName | None:
        """What a header says; None if it cannot be read: then the calls have no executor."""
        if len(value) > _MOST:
            return None
        try:
            said = json.loads(value)
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or said.get("version") != _VERSION:
            return None
        texts = [said.get(name, "") for name in cls.__slots__]
        if not all(isinstance(text, str) for text in texts):
            return None
        return cls(*(text[:_CLIPPED] for text in texts))


def executor_value(headers: Headers) -> bytes | None:
    """What the headers of a connection say of an executor, as it came; None: nothing."""
    for key, value in headers:
        if key == EXECUTOR_HEADER:
            return value
    return None
