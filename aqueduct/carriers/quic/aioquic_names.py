"""Looks up what this carrier uses of aioquic and aioquic does not promise: once, before all else.

``foreign.AIOQUIC`` has the names. The import raises ConfigError where one is missing, or aioquic
itself: then no address of QUIC can be used, and those of the other carriers can.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from opcode import EXTENDED_ARG, opmap
from types import CodeType, FunctionType
from typing import Any, Final

from aqueduct.carriers.foreign import AIOQUIC, Missing, require
from aqueduct.errors import ConfigError

__all__ = ["SUPPORTED", "look_up"]

SUPPORTED: Final = "aioquic>=1.7,<1.8"
"""As pyproject.toml has it."""

_STORE_ATTR: Final = opmap["STORE_ATTR"]


def look_up(names: dict[str, tuple[str, ...]]) -> None:
    """Raises Missing, or another ImportError, at the first module or class that lacks a name."""
    for owner, wanted in names.items():
        module, _, kind = owner.partition(":")
        there: Any = import_module(module)
        if kind:
            require(there, kind)
            there = getattr(there, kind)
        gone = [name for name in wanted if not hasattr(there, name)]
        if gone and isinstance(there, type):
            given = _given(there)
            gone = [name for name in gone if name not in given]
        if gone:
            raise Missing(f"{owner.replace(':', '.')} has no {', '.join(gone)}")


def _given(kind: type) -> set[str]:
    """The attributes that methods of a class give its objects: their code tells, without one."""
    functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    return {name for function in functions for name in _stored(function.__code__)}


def _stored(code: CodeType) -> Iterator[str]:
    """The attributes that a code sets. ``dis`` does the same 30 times as slowly."""
    extended = 0
    for operation, number in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = extended | number
        extended = argument << 8 if operation == EXTENDED_ARG else 0
        if operation == _STORE_ATTR:
            yield code.co_names[argument]


def _require(names: dict[str, tuple[str, ...]]) -> None:
    try:
        look_up(names)
    except ImportError as reason:
        try:
            installed = f"aioquic {version('aioquic')}"
        except PackageNotFoundError:
            installed = "no aioquic"
        raise ConfigError(
            f"QUIC (aqueduct://) does not work with what is installed, {installed}: {reason}. "
            f"Type: pip install '{SUPPORTED}'; or use aqueduct+tls://"
        ) from reason


_require(AIOQUIC)
