"""What the JSON of the dissector is made of: one error, and readers that name what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from aqueduct.errors import AqueductError, LimitExceeded

__all__ = ["HIGHEST", "Fields", "WireError", "hex_bytes", "kind_of", "list_of", "number", "one_of"]

HIGHEST: Final = (1 << 64) - 1


class WireError(Exception):
    """What a request is answered with instead of a result.

    ``kind`` is that of the answer: "truncated" if only bytes are missing at the end, else
    "malformed". ``offset`` is where the frame that failed begins, if bytes were read.
    """

    def __init__(self, message: str, kind: str = "malformed", offset: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.offset = offset

    @classmethod
    def of(cls, error: AqueductError, offset: int) -> WireError:
        """A codec's own error, as an answer.

        The limits are as high as they go, so what is above one is a length that no bytes can
        meet: the rest is missing.
        """
        truncated = isinstance(error, LimitExceeded) or getattr(error, "truncated", False)
        return cls(str(error), "truncated" if truncated else "malformed", offset)


class Fields:
    """The fields of one JSON object, each taken once; what is left over is an error."""

    def __init__(self, given: Any, where: str) -> None:
        if not isinstance(given, Mapping):
            raise WireError(f"{where} must be an object, not {kind_of(given)}")
        self.left = dict(given)
        self.where = where

    def take(self, name: str, default: Any = None) -> Any:
        """The field, or ``default``. Raises WireError if there is neither."""
        value = self.left.pop(name, default)
        if value is None:
            raise WireError(f"{self.where} has no {name}")
        return value

    def number(self, name: str) -> int:
        """A number of 64 bits."""
        return number(self.take(name), f"{self.where}: {name}")

    def numbers(self, name: str) -> list[int]:
        """A list of such numbers."""
        values = list_of(self.take(name), f"{self.where}: {name}")
        return [number(value, f"{self.where}: {name}[{k}]") for k, value in enumerate(values)]

    def end(self) -> None:
        """Raises WireError if a field was not taken."""
        if self.left:
            raise WireError(f"{self.where} has unknown fields: {', '.join(sorted(self.left))}")


def hex_bytes(given: Any, where: str) -> bytes:
    """Bytes from hexadecimal digits."""
    if not isinstance(given, str):
        raise WireError(f"{where} must be a string of hexadecimal digits, not {kind_of(given)}")
    try:
        return bytes.fromhex(given)
    except ValueError as error:
        raise WireError(f"{where} is not hexadecimal: {error}") from error


def number(given: Any, where: str, highest: int = HIGHEST) -> int:
    """A whole number from 0 to ``highest``."""
    if isinstance(given, bool) or not isinstance(given, int):
        raise WireError(f"{where} must be a whole number, not {kind_of(given)}")
    if not 0 <= given <= highest:
        raise WireError(f"{where} is {given}; it must be between 0 and {highest}")
    return given


def list_of(given: Any, where: str) -> list[Any]:
    """A list of anything."""
    if not isinstance(given, list):
        raise WireError(f"{where} must be a list, not {kind_of(given)}")
    return given


def one_of(given: Any, known: Iterable[str], where: str) -> str:
    """One of the known words."""
    if not isinstance(given, str) or given not in known:
        raise WireError(f"{where} is {given!r}; known: {', '.join(known)}")
    return given


def kind_of(given: Any) -> str:
    """What a JSON value is, for people."""
    return "null" if given is None else type(given).__name__
