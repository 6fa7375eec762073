"""Files that hold one secret: a password or a token."""

from __future__ import annotations

import os
from typing import Final

from aqueduct.errors import ConfigError
from aqueduct.escaping import escape

__all__ = ["password_in", "secret_in"]

_MOST_BYTES: Final = 64 << 10
"""More than any token or password has."""


def secret_in(path: str | os.PathLike[str], what: str) -> str:
    """The text of a file, at most 64 KiB. Raises OSError, and ConfigError for a larger one."""
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ConfigError(
            f"{escape(os.fspath(path))} is above {_MOST_BYTES} bytes: that is no {what}"
        )
    return content.decode("utf-8", "surrogateescape")


def password_in(path: str | os.PathLike[str]) -> str:
    """The password of a private key, which is the one line of a file.

    Raises OSError, and ConfigError for a file that has no line, or more than one.
    """
    password = secret_in(path, "password").rstrip("\r\n")
    if not password or "\n" in password:
        raise ConfigError(
            f"{escape(os.fspath(path))} must hold one line, the password, and nothing else"
        )
    return password
