"""What a call shows to be let in: text, or what is asked for it before each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aqueduct.errors import ConfigError

__all__ = ["TokenFile", "fresh"]


@dataclass(frozen=True)
class TokenFile:
    """A token in a file, where somebody renews it: read before each call."""

    path: str

    def __call__(self) -> str:
        """Raises OSError, and ValueError for what is no token."""
        shown = Path(self.path).read_text("utf-8").strip()
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
