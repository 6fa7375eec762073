"""What a call shows to be let in: text, or what is asked for it before each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aqueduct.errors import ConfigError

__all__ = ["TokenPath", "fresh"]

_LIMIT: Final = 16 << 10
"""Bytes: the most that a call may show."""


@dataclass(frozen=True)
class TokenPath:
    """A token in a file that another program renews: read before each call."""

    path: str

    def __call__(self) -> str:
        """Raises OSError, and ValueError for what is no token."""
        with open(self.path, "rb") as file:
            found = file.read(_LIMIT + 1)  # whatever the path leads to
        if len(found) > _LIMIT:
            raise ValueError(f"{self.path} has more than {_LIMIT} bytes, the limit of a token")
        try:
            shown = found.decode().strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is not UTF-8: {error}") from error
        if not shown:
            raise ValueError(f"{self.path} is empty")
        return shown


def fresh(token: str | Callable[[], str] | None) -> str | None:
    """What the next call shows. Raises ConfigError for what a callable raises."""
    if not callable(token):
        return token
    try:
        shown = token()
    except Exception as error:
        raise ConfigError(
            f"token, which is asked for each call, raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(shown, str):
        raise ConfigError(
            f"token, which is asked for each call, gave a {type(shown).__name__}, not text"
        )
    return shown
