"""Files that hold one secret: a password or a token."""

from __future__ import annotations

from typing import Final

from aqueduct.errors import ConfigError
from aqueduct.escaping import escape

__all__ = ["password_in", "secret_in"]

_MOST_BYTES: Final = 64 << 10
"""More than any token or password has."""


def secret_in(path: str, what: str) -> str:
    """The text of a file, at most 64 KiB.

    Raises ConfigError for a larger file, and for one that cannot be read.
    """
    named = escape(path)
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{named}: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{named} is above {_MOST_BYTES} bytes: that is no {what}")
    return content.decode("utf-8", "surrogateescape")


def password_in(path: str) -> str:
    """The password of a private key, which is the one line of a file.

    Raises ConfigError for a file that has no line or several, and as ``secret_in`` does.
    """
    password = secret_in(path, "password").rstrip("\r\n")
    if not password or "\n" in password:
        raise ConfigError(f"{escape(path)} must hold one line, the password, and nothing else")
    return password
